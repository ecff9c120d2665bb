"""Giving a model away, on request: a private upload to the Hub, ModelScope or Kaggle, or one file to download."""

from __future__ import annotations

import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nbutils import disk, files, masking, platforms
from nbutils.errors import CourseError

SHARED = ("*.safetensors", "*.gguf", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py")
NOT_UPLOADED = (files.STAMP, "training.json", "trainer_state.json")  # ours
LOCAL_PATH = re.compile(r"/[^/]+/|~[/\\]|file://|[A-Za-z]:[/\\]|\\\\")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # their tokens may look like paths
MODELSCOPE_PRIVATE = 1  # 3 is internal, 5 public


def push(folder: str | Path, to: str, *, private: bool = True) -> str:
    """Upload a model folder with a model card to hub:owner/name (or modelscope:, kaggle:); "file": pack one file."""
    if to == "file":
        return single_file(folder)
    kind, name = parse(to)
    host, files = HOSTS[kind], _model_files(Path(folder))
    token = platforms.secret(host.secret)
    if not token:
        raise CourseError("sharing.missing_token", to=to, secret=host.secret, get_token=host.get_token)
    try:
        with tempfile.TemporaryDirectory(prefix="nbutils-push-") as stage:
            for file in (one for one in files if one.name not in NOT_UPLOADED):
                _stage(file, Path(stage) / file.name)
            (Path(stage) / "README.md").write_text(model_card(Path(folder), name), encoding="utf-8")
            private = host.upload(stage, name, token, private)
    except CourseError:
        raise
    except Exception as problem:
        reason = f"{type(problem).__name__}: {masking.mask_secrets(str(problem))[:300]}"
        error = CourseError("sharing.upload_failed", to=to, name=name, reason=reason, get_token=host.get_token)
        raise error from None  # the original may hold the token in its request
    return f"{host.page}{name} ({_gib(files):.2f} GiB, {'private' if private else 'PUBLIC'})"


def parse(to: str) -> tuple[str, str]:
    """Kind and name of a target."""
    kind, _, name = to.strip().partition(":")
    if kind not in HOSTS or not HUB_ID.fullmatch(name):
        raise CourseError("sharing.unknown_target", to=masking.mask_secrets(to))
    return kind, name


def _require_private(private: bool, is_private: bool, name: str) -> None:
    """Nothing is uploaded unasked into a repository that exists already and is public."""
    if private and not is_private:
        raise CourseError("sharing.public_repository", name=name)


def _to_hub(folder: str, name: str, token: str, private: bool) -> bool:
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=platforms.network.HUB, token=token)  # never to a mirror
    api.create_repo(name, private=private, exist_ok=True)
    is_private = api.model_info(name).private is True
    _require_private(private, is_private, name)
    api.upload_folder(repo_id=name, folder_path=folder)
    return is_private


def _to_modelscope(folder: str, name: str, token: str, private: bool) -> bool:
    from modelscope.hub.api import HubApi

    api, is_private = HubApi(token=token), private
    repository: dict[str, Any] = {"repo_id": name, "repo_type": "model", "token": token}
    if api.repo_exists(**repository):
        about = {key.lower(): value for key, value in dict(api.get_model(name)).items()}
        is_private = about.get("visibility") == MODELSCOPE_PRIVATE
        _require_private(private, is_private, name)
    else:
        api.create_repo(**repository, visibility="private" if private else "public", exist_ok=False)
    api.upload_folder(**repository, folder_path=folder)
    return is_private


def _to_kaggle(folder: str, name: str, token: str, private: bool) -> bool:
    import kagglehub
    from kagglehub.clients import build_kaggle_client
    from kagglesdk.models.types.model_api_service import ApiGetModelRequest

    request, before = ApiGetModelRequest(), os.environ.get("KAGGLE_API_TOKEN")
    request.owner_slug, request.model_slug = name.split("/")
    os.environ["KAGGLE_API_TOKEN"] = token  # the library looks nowhere else
    try:
        try:
            with build_kaggle_client() as client:
                is_private = client.models.model_api_client.get_model(request).is_private is True
        except Exception as problem:
            if getattr(getattr(problem, "response", None), "status_code", None) not in (403, 404):
                raise
            is_private = True  # not there yet: Kaggle makes new models private
        _require_private(private, is_private, name)
        kagglehub.model_upload(f"{name}/transformers/default", folder)
    finally:
        os.environ.pop("KAGGLE_API_TOKEN") if before is None else os.environ.update(KAGGLE_API_TOKEN=before)
    return is_private


class Host(NamedTuple):
    """Where models are uploaded to. The upload returns whether the model is private there."""

    secret: str
    get_token: str
    upload: Callable[[str, str, str, bool], bool]
    page: str


HOSTS = {
    "hub": Host("HF_TOKEN", "huggingface.co/settings/tokens", _to_hub, "https://huggingface.co/"),
    "modelscope": Host(
        "MODELSCOPE_API_TOKEN", "modelscope.cn/my/myaccesstoken", _to_modelscope, "https://modelscope.cn/models/"
    ),
    "kaggle": Host("KAGGLE_API_TOKEN", "kaggle.com/settings", _to_kaggle, "https://www.kaggle.com/models/"),
}


def model_card(folder: Path, name: str) -> str:
    """A README.md for this model: what it was made from, no local path."""
    from huggingface_hub import ModelCard, ModelCardData

    about = files.stamp(folder) or {}
    base = str(about.get("base", "unknown"))
    known = base if HUB_ID.fullmatch(base) else None
    values = {"name": name, "base": known or Path(base).name, "format": about.get("format") or about.get("dtype", "")}
    data = ModelCardData(base_model=known, pipeline_tag="text-generation", tags=["lora", "merged"])
    template = files.PACKAGE / "templates/model_card.md"
    return masking.mask_secrets(ModelCard.from_template(data, template_path=str(template), **values).content)


def _model_files(folder: Path) -> list[Path]:
    """The files of a model; a link to a file counts as the file, hidden and half-written files do not count."""
    found = sorted(file for pattern in SHARED for file in folder.expanduser().glob(pattern) if file.name[0] != ".")
    has_model = any(file.name == "config.json" or file.suffix == ".gguf" for file in found)
    if not has_model or not all(file.is_file() for file in found):  # a broken link
        raise CourseError("sharing.no_model", folder=folder)
    return found


def _gib(parts: Iterable[Path]) -> float:
    return sum(part.stat().st_size for part in parts) / files.GIB


def _stage(file: Path, target: Path) -> None:
    """A link to the file; of a JSON file a copy without the folders that the model was made in."""
    if file.suffix != ".json" or file.name in VOCABULARIES:
        target.symlink_to(file.resolve())
        return
    content = json.loads(file.read_text(encoding="utf-8"), object_hook=_without_paths)
    target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The values without local paths; `json.loads` calls this at every depth."""

    def is_path(key: str, value: Any) -> bool:
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        is_name = key.endswith("name_or_path")
        return any(LOCAL_PATH.match(one) or (is_name and not HUB_ID.fullmatch(one)) for one in texts)

    return {key: value for key, value in values.items() if not is_path(key, value)}


def single_file(folder: str | Path, out: str | Path | None = None) -> str:
    """Pack a model folder into one .tar, uncompressed, with its checksum in a .sha256 file beside it."""
    folder = Path(folder).expanduser().resolve()
    parts = _model_files(folder)
    out = Path(out or folder.parent / f"{folder.name}.tar").expanduser().absolute()
    checksum, partial = out.with_name(f"{out.name}.sha256"), out.with_name(f".{out.name}.partial")
    if os.path.lexists(out) and not checksum.is_file():  # not made here
        raise CourseError("sharing.file_exists", file=out)
    files.require_apart(out, folder)
    files.make_folder(out.parent, "the archive")
    disk.require_disk(out.parent, _gib(parts) * 1.01 + 0.01, "one file of the model")
    try:
        with open(partial, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
                for one in parts:
                    tar.add(one, f"{folder.name}/{one.name}", filter=_anonymous)
            file.flush()
            os.fsync(file.fileno())
        sha256 = files.sha256(partial)
        files.write_text(checksum, f"{sha256}  {out.name}\n")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return f"{out}: {out.stat().st_size / 1e6:,.1f} MB, sha256 {sha256[:16]}; download it in JupyterLab's file list"


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
