"""Giving a model away, only on request: uploaded to the Hub, ModelScope or Kaggle, or packed into one file.

Uploads are private unless asked otherwise, hold no path of this machine, and the token goes to the library alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, masking, paths, platforms
from nbutils.checkpoints.archive import HashingFile, flush
from nbutils.errors import CourseError
from nbutils.exporting.formats import FORMATS

NOT_UPLOADED = (paths.STAMP, "training.json", "export.json", "README.md")  # ours, or written anew
NOT_SHARED = (".*", "*.partial", "__pycache__", "training_args.bin")  # the last is a pickle full of local paths
LOCAL_PATH = re.compile(r"(?:(?:/[^/\n]+){2}|~[/\\]|file://|[A-Za-z]:[/\\]|\\\\)[^\n]*")
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # their tokens may look like paths
BROWSER_DOWNLOAD = 200e6  # bytes that a browser downloads from a notebook without trouble
MODELSCOPE_PRIVATE = 1  # 3 is internal, 5 public
NOT_THERE = (403, 404)  # a model nobody but its owner can see, or none at all


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, and where it is."""

    url: str
    private: bool
    gib: float

    def __str__(self) -> str:
        return f"{self.url} ({self.gib:.2f} GiB, {'private' if self.private else 'PUBLIC'})"


@dataclass(frozen=True)
class Host:
    """Where models are uploaded to: its package, its secrets (any complete group will do), the upload, the page.

    The upload sends nothing to a repository that is not private, unless that was asked for; it returns whether it is.
    """

    package: str
    secrets: tuple[tuple[str, ...], ...]
    get_token: str
    upload: Callable[[Path, str, dict[str, str], bool], bool]
    page: str


@dataclass(frozen=True)
class SingleFile:
    """The archive, its size and checksum, and how to download it from here."""

    file: Path
    bytes: int
    sha256: str
    hint: str

    def __str__(self) -> str:
        return f"{self.file}: {self.bytes / 1e6:,.1f} MB, sha256 {self.sha256[:16]}\n  {self.hint}"


def push(folder: str | Path, to: str, *, private: bool = True) -> Pushed:
    """Upload a model folder with a model card to hub:owner/name, modelscope:owner/name or kaggle:owner/name."""
    kind, name = parse(to)
    host, folder = PLACES[kind], _model_folder(folder)
    files = _model_files(folder)
    secrets = _secrets(to, host)
    with _staged(folder, files, model_card(folder, name)) as staged:
        try:
            private = host.upload(staged, name, secrets, private)
        except ImportError as problem:
            raise CourseError("sharing.missing_package", package=host.package) from problem
        except CourseError:
            raise
        except Exception as problem:
            reason = f"{type(problem).__name__}: {masking.mask_secrets(str(problem))[:300]}"
            error = CourseError("sharing.upload_failed", to=to, name=name, reason=reason, get_token=host.get_token)
            raise error from None  # the original may hold the token in its request
    return Pushed(host.page.format(name=name), private, _size(files) / paths.GIB)


def parse(to: str) -> tuple[str, str]:
    """Kind and name of a target."""
    kind, _, name = to.strip().partition(":")
    if kind not in PLACES or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name):
        raise CourseError("sharing.unknown_target", to=masking.mask_secrets(to))
    return kind, name


def _secrets(to: str, host: Host) -> dict[str, str]:
    """The first complete group of secrets that this machine has."""
    for group in host.secrets:
        found = {name: value for name in group if (value := platforms.secret(name))}
        if len(found) == len(group):
            return found
    names = " or ".join(" and ".join(group) for group in host.secrets)
    raise CourseError("sharing.missing_token", to=to, names=names, get_token=host.get_token)


def _require_private(private: bool, is_private: bool, name: str) -> None:
    """Nothing is uploaded unasked into a repository that exists already and is public."""
    if private and not is_private:
        raise CourseError("sharing.public_repository", name=name)


def _to_hub(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=platforms.network.HUB, token=secrets["HF_TOKEN"])  # never to a mirror
    api.create_repo(name, private=private, exist_ok=True)
    is_private = api.model_info(name).private is True
    _require_private(private, is_private, name)
    api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model and card")
    return is_private


def _to_modelscope(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    from modelscope.hub.api import HubApi

    token = secrets["MODELSCOPE_API_TOKEN"]
    api = HubApi(token=token)
    repository: dict[str, Any] = {"repo_id": name, "repo_type": "model", "token": token}
    existed = api.repo_exists(**repository)
    if not existed:
        api.create_repo(**repository, visibility="private" if private else "public", exist_ok=False)
    visibility = {key.lower(): value for key, value in dict(api.get_model(name)).items()}.get("visibility")
    is_private = visibility == MODELSCOPE_PRIVATE or (private and not existed and visibility is None)
    _require_private(private, is_private, name)
    api.upload_folder(**repository, folder_path=str(folder), commit_message="Model and card")
    return is_private


def _to_kaggle(folder: Path, name: str, secrets: dict[str, str], private: bool) -> bool:
    import kagglehub

    before = {key: os.environ.get(key) for key in secrets}
    os.environ.update(secrets)  # the library looks nowhere else
    try:
        is_private = _is_private_at_kaggle(name)
        if is_private and not private:
            raise CourseError("sharing.kaggle_is_private")
        _require_private(private, is_private, name)
        kagglehub.model_upload(f"{name}/transformers/default", str(folder), version_notes="Model and card")
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    return is_private


def _is_private_at_kaggle(name: str) -> bool:
    """Whether the model is private there, or not there yet: Kaggle makes new models private."""
    from kagglehub.clients import build_kaggle_client
    from kagglesdk.models.types.model_api_service import ApiGetModelRequest

    request = ApiGetModelRequest()
    request.owner_slug, request.model_slug = name.split("/")
    try:
        with build_kaggle_client() as client:
            return client.models.model_api_client.get_model(request).is_private is True
    except Exception as problem:
        if getattr(getattr(problem, "response", None), "status_code", None) in NOT_THERE:
            return True
        raise


PLACES: dict[str, Host] = {
    "hub": Host(
        "huggingface_hub", (("HF_TOKEN",),), "huggingface.co/settings/tokens", _to_hub,
        "https://huggingface.co/{name}",
    ),
    "modelscope": Host(
        "modelscope", (("MODELSCOPE_API_TOKEN",),), "modelscope.cn/my/myaccesstoken", _to_modelscope,
        "https://modelscope.cn/models/{name}",
    ),
    "kaggle": Host(
        "kagglehub", (("KAGGLE_API_TOKEN",), ("KAGGLE_USERNAME", "KAGGLE_KEY")), "kaggle.com/settings",
        _to_kaggle, "https://www.kaggle.com/models/{name}",
    ),
}  # fmt: skip
pushing = sys.modules[__name__]  # lesson 04 calls sharing.pushing.parse


def model_card(folder: Path, name: str) -> str:
    """A README.md for this model: what it was made from and how it is loaded, no local path."""
    about = paths.stamp(folder) or {}
    try:
        config = paths.read_json(folder / "config.json")
    except (OSError, ValueError):
        config = {}
    base, name = _public_name(str(about.get("base", ""))), _public_name(name)
    form = str(about.get("format", config.get("dtype", config.get("torch_dtype", ""))))
    head = {"library_name": "gguf" if form.startswith("gguf") else "transformers", "pipeline_tag": "text-generation"}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        head["base_model"] = base
    known = FORMATS.get(form)
    facts = {"base model": base, "form": f"{form}: {known.purpose}" if known else form, "made by": about.get("method")}
    lines = ["---", *(f"{key}: {value}" for key, value in head.items()), "tags:", "- lora", "- merged", "---", ""]
    lines += [f"# {name}", "", "Fine-tuned with LoRA; the adapter is merged into the weights.", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items() if value]
    load = known.load if known else "vllm serve {path}"
    return masking.mask_secrets("\n".join([*lines, "", "```", load.format(path=name), "```", ""]))


def _model_folder(given: str | Path) -> Path:
    """The folder by its full name; it must hold a model."""
    folder = Path(os.path.abspath(Path(given).expanduser()))
    if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        raise CourseError("sharing.no_model", folder=folder)
    return folder


def _model_files(folder: Path) -> list[Path]:
    """The files of the model in a fixed order; a link to a file counts as the file, any other link is refused."""
    names = os.listdir(folder)
    files = []
    for name in sorted(set(names) - shutil.ignore_patterns(*NOT_SHARED)(str(folder), names)):
        one = folder / name
        if one.is_symlink() and not one.is_file():
            raise CourseError("sharing.link", link=one, target="a folder" if one.is_dir() else "nothing")
        files += _model_files(one) if one.is_dir() else [one]
    return files


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


@contextmanager
def _staged(folder: Path, files: Iterable[Path], card: str) -> Iterator[Path]:
    """The folder as it is uploaded: links to its files, with the card, without local paths in JSON files."""
    with tempfile.TemporaryDirectory(prefix="nbutils-push-") as place:
        stage = Path(place) / folder.name
        for file in (one for one in files if one.name not in NOT_UPLOADED):
            target = stage / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.path.realpath(file))
        (stage / "README.md").write_text(card, encoding="utf-8")
        for file in stage.rglob("*.json"):
            _remove_local_paths(file)
        yield stage


def _remove_local_paths(file: Path) -> None:
    """Rewrite a JSON file without the folders that the model was made in."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise CourseError("sharing.damaged_json", file=file.name, problem=type(problem).__name__) from None
    public = _without_paths(settings, file.name not in VOCABULARIES)
    if public != settings:
        file.unlink()  # a link: the original stays as it is
        file.write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_paths(value: Any, everywhere: bool) -> Any:
    """The same without local paths, at any depth; not `everywhere`: only where a key says that a path follows."""

    def is_path(one: Any) -> bool:
        return everywhere and isinstance(one, str) and bool(LOCAL_PATH.fullmatch(one))

    def is_private(key: str, one: Any) -> bool:
        named = key.endswith("name_or_path") and isinstance(one, str) and _public_name(one) != one
        return named or is_path(key) or is_path(one)

    if isinstance(value, list):
        return [_without_paths(one, everywhere) for one in value if not is_path(one)]
    if isinstance(value, dict):
        return {key: _without_paths(one, everywhere) for key, one in value.items() if not is_private(key, one)}
    return value


def _public_name(name: str) -> str:
    """A Hub id as it is; of a local folder only its name."""
    is_local = re.match(r"[/~\\.]|[A-Za-z]:[\\/]", name) or name.count("/") > 1
    return Path(name).name if is_local else name


def single_file(folder: str | Path, out: str | Path | None = None, *, progress: bool = True) -> SingleFile:
    """Pack a model folder into one .tar, uncompressed; it takes its name after it was read back."""
    folder = _model_folder(folder)
    out = _archive_place(out or folder.parent / f"{folder.name}.tar", folder)
    files = _model_files(folder)
    disk.require_disk(out.parent, _size(files) / paths.GIB * 1.01 + 0.01, "one file of the model")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        sha256, size = _pack(folder, files, partial, progress)
        if paths.sha256(partial) != sha256:
            raise CourseError("sharing.archive_differs", file=out)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return SingleFile(out, size, sha256, download_hint(out))


def _archive_place(out: str | Path, folder: Path) -> Path:
    """Where the archive goes; a folder, a place inside the model and a foreign file are refused."""
    out = Path(os.path.abspath(Path(out).expanduser()))
    if out.is_dir() or folder.resolve() in out.resolve().parents:
        raise CourseError("sharing.archive_place", file=out, example=folder.parent / f"{folder.name}.tar")
    if os.path.lexists(out) and not _is_archive_of(out, folder):
        raise CourseError("sharing.file_exists", file=out, folder=folder.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _is_archive_of(file: Path, folder: Path) -> bool:
    """Whether `single_file` made this file from a folder of this name."""
    try:
        with tarfile.open(file, "r:") as tar:
            first = tar.next()
    except (OSError, tarfile.TarError):
        return False
    if first is None or first.mtime or first.uid or first.gid or first.uname:
        return False
    return first.name.startswith(f"{folder.name}/")


def _pack(folder: Path, files: list[Path], partial: Path, progress: bool) -> tuple[str, int]:
    """Write the archive without owners and times; its checksum and size."""
    from tqdm.auto import tqdm

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    bar = tqdm(total=_size(files), unit="B", unit_scale=True, disable=not progress)
    with bar, open(partial, "wb") as file:
        hashing = HashingFile(file)
        with tarfile.open(fileobj=hashing, mode="w", copybufsize=paths.CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
            for one in files:
                name = f"{folder.name}/{one.relative_to(folder).as_posix()}"
                tar.add(one, arcname=name, recursive=False, filter=anonymous)
                bar.update(one.stat().st_size)
        flush(file)
    return hashing.digest.hexdigest(), hashing.size


def download_hint(file: Path) -> str:
    """How to download a file from this platform."""
    platform, size = platforms.detect().name, file.stat().st_size if file.exists() else 0
    if platform.startswith("colab") and size <= BROWSER_DOWNLOAD:
        return f'from google.colab import files; files.download("{file}")'
    if platform.startswith("colab"):
        return f'mount Drive, then  !cp "{file}" /content/drive/MyDrive/  and download it at drive.google.com'
    if platform == "kaggle":
        return f"keep {file} below /kaggle/working and save a version: the notebook's Output tab offers it"
    if platform == "autodl":
        return f"right-click it in JupyterLab's file list, Download; several GB: scp -P PORT root@HOST:{file} ."
    return f"in JupyterLab's file list right-click {file.name}, Download; or copy {file}"
