"""Giving a model away, on request: a private upload to the Hub or ModelScope, or one file to download."""

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
from pathlib import Path
from typing import Any

from nbutils import disk, files, masking, platforms
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.merging.folder import read_header
from nbutils.models import HUB_ID

SHARED = (".safetensors", ".gguf", ".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
NOT_UPLOADED = (files.STAMP, "training.json", "trainer_state.json")  # ours
LOCAL_PATH = re.compile(r"/[^/]+/|~[/\\]|file://|[A-Za-z]:[/\\]|\\\\")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # their tokens may look like paths
MODELSCOPE_PRIVATE = 1  # 3 is internal, 5 public
MODEL_CARD = files.PACKAGE / "templates/model_card.md"


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
                "{name} exists already and is public, or does not say that it is private.",
                todo="Choose another name, make it private on its page, or push with private=False (--public).",
                name=self.name,
            )


@contextmanager
def prepared(folder: str | Path, to: str) -> Iterator[Upload]:
    """A model folder for an upload, with a model card and without local paths; whatever fails shows no token.

    Example: with prepared("runs/tiny/merged", "hub:owner/name") as upload: ...
    """
    kind, name = parse_target(to)
    host = HOSTS[kind]
    parts, gib = _model_files(Path(folder))
    token = platforms.secret(host.secret)
    if not token:
        raise CourseError(
            "Pushing to {to} needs {secret}, which was not found.",
            todo="Create one at {get_token} and store it under that name.",
            to=to,
            secret=host.secret,
            get_token=host.get_token,
        )
    try:
        with tempfile.TemporaryDirectory(prefix="nbutils-push-") as stage:
            _fill(Path(stage), parts)
            Path(stage, "README.md").write_text(model_card(Path(folder), name), encoding="utf-8")
            yield Upload(stage, name, f"{host.page}{name}", gib, token)
    except CourseError:
        raise
    except Exception as problem:
        reason = masking.describe(problem)[:300]
        error = CourseError(
            "The upload to {to} failed: {reason}",
            todo=(
                "Check name and token ({get_token}), and install the package if it is missing; what was "
                "uploaded already is not sent again."
            ),
            to=to,
            reason=reason,
            get_token=host.get_token,
        )
        raise error from None  # the original may hold the token in its request


def _model_files(folder: Path) -> tuple[list[Path], float]:
    """The files of a model and their GiB; a link counts as its file, hidden and half-written files do not count."""
    parts = [file for file in folder.glob("*") if file.suffix in SHARED and not file.name.startswith(".")]
    has_model = any(file.name == "config.json" or file.suffix == ".gguf" for file in parts)
    has_broken_links = not all(file.is_file() for file in parts)
    if has_broken_links or not has_model:
        raise CourseError(
            "{folder} lacks config.json or a GGUF file, or has broken links.",
            todo="Give the merged folder of a run, or one of its exports.",
            folder=folder,
        )
    files.require_inside(folder, parts)
    for file in folder.glob("*.safetensors"):
        read_header(file)  # refuses one that is cut off
    size = sum(file.stat().st_size for file in parts)
    return sorted(parts), size / files.GIB


def _fill(stage: Path, parts: Sequence[Path]) -> None:
    """Links to a model's files; JSON files are copied without the local paths in them."""
    for file in parts:
        if file.name in NOT_UPLOADED:
            continue
        if file.suffix == ".json" and file.name not in VOCABULARIES:
            content = json.loads(file.read_text(encoding="utf-8"), object_hook=_without_paths)
            files.write_json(stage / file.name, content)
        else:
            (stage / file.name).symlink_to(file.resolve())


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The values without local paths; `json.loads` calls this at every depth."""
    return {key: value for key, value in values.items() if not _is_local(key, value)}


def _is_local(key: str, value: Any) -> bool:
    """Whether a value is a path of this machine, or a list with one."""
    if isinstance(value, list):
        return any(_is_local(key, entry) for entry in value)
    if not isinstance(value, str):
        return False
    if key.endswith("name_or_path") and not HUB_ID.fullmatch(value):
        return True
    return LOCAL_PATH.match(value) is not None


def model_card(folder: Path, name: str) -> str:
    """A README.md for this model: what it was made from, no local path."""
    from huggingface_hub import ModelCard, ModelCardData

    stamp = files.stamp(folder) or {}
    base = str(stamp.get("base", tr("unknown")))
    on_hub = base if HUB_ID.fullmatch(base) else None
    card = ModelCard.from_template(
        ModelCardData(base_model=on_hub, pipeline_tag="text-generation", tags=["lora", "merged"]),
        template_path=str(MODEL_CARD),
        name=name,
        base=on_hub or Path(base).name,
        format=stamp.get("format") or stamp.get("dtype", ""),
        tr=tr,
    )
    return masking.mask_secrets(card.content)


def push(folder: str | Path, to: str, *, private: bool = True) -> str:
    """Upload a model folder with a model card to hub:owner/name (or modelscope:owner/name); "file": pack one file.

    Example: print(push("runs/tiny/merged", "modelscope:owner/name"))
    """
    if to == "file":
        return single_file(folder)
    kind, _ = parse_target(to)
    with prepared(folder, to) as upload:
        is_private = HOSTS[kind].upload(upload, private)
    visibility = tr("private") if is_private else tr("PUBLIC")
    return f"{upload.page} ({upload.gib:.2f} GiB, {visibility})"


def parse_target(to: str) -> tuple[str, str]:
    """Kind and name of a target.

    Example: parse_target("hub:owner/name") == ("hub", "owner/name")
    """
    kind, _, name = to.strip().partition(":")
    if kind not in HOSTS or not HUB_ID.fullmatch(name):
        raise CourseError(
            "The target is {to!r}.",
            todo=(
                "Write hub:owner/name or modelscope:owner/name, with your own account as owner; for one file "
                '"file" in PUSH_TO, NAME.tar in the command.'
            ),
            to=to,
        )
    return kind, name


def _to_hub(upload: Upload, private: bool) -> bool:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=platforms.network.HUB, token=upload.token)  # never to a mirror
    api.create_repo(upload.name, private=private, exist_ok=True)
    is_private = api.model_info(upload.name).private is True
    if private:
        upload.require_private(is_private)
    api.upload_folder(folder_path=upload.folder, repo_id=upload.name)
    return is_private


def _to_modelscope(upload: Upload, private: bool) -> bool:
    from modelscope.hub.api import HubApi

    api = HubApi(token=upload.token)
    repository = {"repo_id": upload.name, "repo_type": "model", "token": upload.token}
    is_private = private
    if api.repo_exists(**repository):
        is_private = api.get_model(upload.name).get("Visibility") == MODELSCOPE_PRIVATE
    else:
        api.create_repo(**repository, visibility="private" if private else "public", exist_ok=False)
    if private:
        upload.require_private(is_private)
    api.upload_folder(**repository, folder_path=upload.folder)
    return is_private


@dataclass(frozen=True)
class Host:
    """Where models are uploaded to; `upload` makes a repository if there is none, and says whether it is private."""

    secret: str
    get_token: str
    page: str
    upload: Callable[[Upload, bool], bool]


HOSTS = {
    "hub": Host(
        "HF_TOKEN",
        get_token="huggingface.co/settings/tokens",
        page="https://huggingface.co/",
        upload=_to_hub,
    ),
    "modelscope": Host(
        "MODELSCOPE_API_TOKEN",
        get_token="modelscope.cn/my/myaccesstoken",
        page="https://modelscope.cn/models/",
        upload=_to_modelscope,
    ),
}


def single_file(folder: str | Path, out: str | Path | None = None) -> str:
    """Pack a model folder into one .tar, uncompressed, with its checksum in a .sha256 file beside it."""
    folder = Path(folder).resolve()
    parts, gib = _model_files(folder)
    out = Path(out or f"{folder}.tar").absolute()
    checksum = out.with_name(f"{out.name}.sha256")
    if os.path.lexists(out) and not checksum.is_file():  # not made here
        raise CourseError(
            "{file} exists, and was not made here.",
            todo="Name another file, or move that one away.",
            file=out,
        )
    files.require_apart(out, folder)
    files.make_folder(out.parent)
    disk.require_disk(out.parent, gib * 1.01 + 0.01)
    with files.held(out.parent.resolve()):  # of two at once, one would remove what the other has begun
        files.remove_left(out.parent, f".{glob.escape(out.name)}.*.partial")
        sha256 = _pack(parts, folder.name, out, checksum)
    return tr(
        "{out}: {gib:.2f} GiB, sha256 {sha256}; download it in JupyterLab's file list",
        out=out,
        gib=gib,
        sha256=sha256[:16],
    )


def _pack(parts: Sequence[Path], name: str, out: Path, checksum: Path) -> str:
    """Write the archive with the files in a folder of that name, and its checksum file; the checksum."""
    with files.replacement(out) as archive:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            for file in parts:
                tar.add(file, f"{name}/{file.name}", filter=_anonymous)
        archive.flush()
        sha256 = files.sha256(Path(archive.name))
        files.write_text(checksum, f"{sha256}  {out.name}\n")
    return sha256


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member without owner and time: the same model gives the same archive."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
