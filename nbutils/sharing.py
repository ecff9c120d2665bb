"""Giving a model away, on request: a private upload to the Hub, ModelScope or Kaggle, or one file to download."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nbutils import disk, files, masking, platforms
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.merging.folder import read_header
from nbutils.models import HUB_ID

SHARED = ("*.safetensors", "*.gguf", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py")
NOT_UPLOADED = (files.STAMP, "training.json", "trainer_state.json")  # ours
LOCAL_PATH = re.compile(r"/[^/]+/|~[/\\]|file://|[A-Za-z]:[/\\]|\\\\")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # their tokens may look like paths
MODELSCOPE_PRIVATE = 1  # 3 is internal, 5 public
Opened = tuple[bool, Callable[..., Any]]  # whether a repository is private, and how a folder is uploaded to it


@dataclass(frozen=True)
class Upload:
    """A folder to upload, with nothing of this machine in it, the name of its repository, and the token to send."""

    folder: str
    name: str
    page: str
    gib: float
    token: str = field(repr=False)

    def require_private(self, is_private: bool | None) -> None:
        """Refuse a repository that is there already and is public, or does not say what it is."""
        if is_private is not True:
            raise CourseError(
                tr("{name} exists already and is public, or does not say that it is private.", name=self.name),
                todo=tr("Choose another name, make it private on its page, or push with private=False (--public)."),
            )


@contextmanager
def prepared(folder: str | Path, to: str) -> Iterator[Upload]:
    """A model folder for an upload, with a model card and without local paths; whatever fails shows no token."""
    kind, name = parse(to)
    host, (parts, gib) = HOSTS[kind], _model_files(Path(folder))
    token = platforms.secret(host.secret)
    if not token:
        raise CourseError(
            tr("Pushing to {to} needs {secret}, which was not found.", to=to, secret=host.secret),
            todo=tr("Create one at {get_token} and store it under that name.", get_token=host.get_token),
        )
    before = os.environ.get(host.secret)
    os.environ[host.secret] = token  # kagglehub looks nowhere else
    try:
        with tempfile.TemporaryDirectory(prefix="nbutils-push-") as stage:
            _fill(Path(stage), parts)
            Path(stage, "README.md").write_text(model_card(Path(folder), name), encoding="utf-8")
            yield Upload(stage, name, f"{host.page}{name}", gib, token)
    except CourseError:
        raise
    except Exception as problem:
        reason = f"{type(problem).__name__}: {masking.mask_secrets(str(problem))[:300]}"
        error = CourseError(
            tr("The upload to {to} failed: {reason}", to=to, reason=reason),
            todo=tr(
                "Check name and token ({get_token}), and install the package if it is missing; what was "
                "uploaded already is not sent again.",
                get_token=host.get_token,
            ),
        )
        raise error from None  # the original may hold the token in its request
    finally:
        os.environ.pop(host.secret) if before is None else os.environ.update({host.secret: before})


def _fill(stage: Path, parts: Sequence[Path]) -> None:
    """Links to a model's files; JSON files are copied without the local paths in them."""
    for file in parts:
        if file.name in NOT_UPLOADED:
            continue
        if file.suffix != ".json" or file.name in VOCABULARIES:
            (stage / file.name).symlink_to(file.resolve())
        else:
            content = json.loads(file.read_text(encoding="utf-8"), object_hook=_without_paths)
            files.write_json(stage / file.name, content)


def push(folder: str | Path, to: str, *, private: bool = True) -> str:
    """Upload a model folder with a model card to hub:owner/name (or modelscope:, kaggle:); "file": pack one file."""
    if to == "file":
        return single_file(folder)
    kind, name = parse(to)
    with prepared(folder, to) as upload:
        is_private, send = HOSTS[kind].open(name, upload.token, private)
        if private:
            upload.require_private(is_private)
        send(folder_path=upload.folder)
    return f"{upload.page} ({upload.gib:.2f} GiB, {tr('private') if is_private else tr('PUBLIC')})"


def parse(to: str) -> tuple[str, str]:
    """Kind and name of a target."""
    kind, _, name = to.strip().partition(":")
    if kind not in HOSTS or not HUB_ID.fullmatch(name):
        raise CourseError(
            tr("The target is {to!r}.", to=masking.mask_secrets(to)),
            allowed=tr(
                'hub:owner/name, modelscope:owner/name, kaggle:owner/name, or one file: "file" in PUSH_TO, '
                "NAME.tar in the command"
            ),
            todo=tr("Write it like this, with your own account as owner."),
        )
    return kind, name


def _open_hub(name: str, token: str, private: bool) -> Opened:
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=platforms.network.HUB, token=token)  # never to a mirror
    api.create_repo(name, private=private, exist_ok=True)
    return api.model_info(name).private is True, partial(api.upload_folder, repo_id=name)


def _open_modelscope(name: str, token: str, private: bool) -> Opened:
    from modelscope.hub.api import HubApi

    api, repository = HubApi(token=token), {"repo_id": name, "repo_type": "model", "token": token}
    if api.repo_exists(**repository):
        about = {key.lower(): value for key, value in dict(api.get_model(name)).items()}
        private = about.get("visibility") == MODELSCOPE_PRIVATE
    else:
        api.create_repo(**repository, visibility="private" if private else "public", exist_ok=False)
    return private, partial(api.upload_folder, **repository)


def _open_kaggle(name: str, token: str, private: bool) -> Opened:
    import kagglehub
    from kagglehub.clients import build_kaggle_client
    from kagglesdk.models.types.model_api_service import ApiGetModelRequest

    request = ApiGetModelRequest()
    request.owner_slug, request.model_slug = name.split("/")
    try:
        with build_kaggle_client() as client:
            is_private = client.models.model_api_client.get_model(request).is_private is True
    except Exception as problem:
        if getattr(getattr(problem, "response", None), "status_code", None) not in (403, 404):
            raise
        is_private = True  # not there yet: Kaggle makes new models private
    return is_private, lambda folder_path: kagglehub.model_upload(f"{name}/transformers/default", folder_path)


class Host(NamedTuple):
    """Where models are uploaded to; `open` makes a repository if there is none."""

    secret: str
    get_token: str
    page: str
    open: Callable[[str, str, bool], Opened]


HOSTS = {
    "hub": Host("HF_TOKEN", "huggingface.co/settings/tokens", "https://huggingface.co/", _open_hub),
    "modelscope": Host("MODELSCOPE_API_TOKEN", "modelscope.cn/my/myaccesstoken", "https://modelscope.cn/models/",
                       _open_modelscope),
    "kaggle": Host("KAGGLE_API_TOKEN", "kaggle.com/settings", "https://www.kaggle.com/models/", _open_kaggle),
}  # fmt: skip


def model_card(folder: Path, name: str) -> str:
    """A README.md for this model: what it was made from, no local path."""
    from huggingface_hub import ModelCard, ModelCardData

    about = files.stamp(folder) or {}
    base = str(about.get("base", tr("unknown")))
    known = base if HUB_ID.fullmatch(base) else None
    form = about.get("format") or about.get("dtype", "")
    values = {"name": name, "base": known or Path(base).name, "format": form, "tr": tr}
    data = ModelCardData(base_model=known, pipeline_tag="text-generation", tags=["lora", "merged"])
    template = files.PACKAGE / "templates/model_card.md"
    return masking.mask_secrets(ModelCard.from_template(data, template_path=str(template), **values).content)


def _model_files(folder: Path) -> tuple[list[Path], float]:
    """The files of a model and their GiB; a link counts as its file, hidden and half-written files do not count."""
    found = sorted(file for pattern in SHARED for file in folder.expanduser().glob(pattern) if file.name[0] != ".")
    has_model = any(file.name == "config.json" or file.suffix == ".gguf" for file in found)
    if not has_model or not all(file.is_file() for file in found):  # a broken link
        raise CourseError(
            tr("{folder} is not a complete model folder.", folder=folder),
            allowed=tr("a folder with config.json, or with a GGUF file, and no broken links"),
            todo=tr("Give the merged folder of a run, or one of its exports."),
        )
    files.require_inside(folder.expanduser(), found)
    for file in (one for one in found if one.suffix == ".safetensors"):
        read_header(file)  # refuses one that is cut off
    return found, sum(file.stat().st_size for file in found) / files.GIB


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The values without local paths; `json.loads` calls this at every depth."""
    kept = {}
    for key, value in values.items():
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        is_name = key.endswith("name_or_path")
        if not any(LOCAL_PATH.match(one) or (is_name and not HUB_ID.fullmatch(one)) for one in texts):
            kept[key] = value
    return kept


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member without owner and time: the same model gives the same archive."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def single_file(folder: str | Path, out: str | Path | None = None) -> str:
    """Pack a model folder into one .tar, uncompressed, with its checksum in a .sha256 file beside it."""
    folder = Path(folder).expanduser().resolve()
    parts, gib = _model_files(folder)
    out = Path(out or folder.parent / f"{folder.name}.tar").expanduser().absolute()
    checksum = out.with_name(f"{out.name}.sha256")
    if os.path.lexists(out) and not checksum.is_file():  # not made here
        raise CourseError(
            tr("{file} exists, and was not made here.", file=out), todo=tr("Name another file, or move that one away.")
        )
    files.require_apart(out, folder)
    files.make_folder(out.parent, tr("the archive"))
    files.remove_left(out.parent, f".{glob.escape(out.name)}.*.partial")
    disk.require_disk(out.parent, gib * 1.01 + 0.01, tr("one file of the model"))
    with files.replacement(out) as file:
        with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
            for one in parts:
                tar.add(one, f"{folder.name}/{one.name}", filter=_anonymous)
        file.flush()
        sha256 = files.sha256(Path(file.name))
        files.write_text(checksum, f"{sha256}  {out.name}\n")
    values = {"out": out, "mb": out.stat().st_size / 1e6, "sha256": sha256[:16]}
    return tr("{out}: {mb:,.1f} MB, sha256 {sha256}; download it in JupyterLab's file list", **values)
