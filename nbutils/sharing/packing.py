"""One file to download: a tar of a model folder, not compressed (weights do not shrink), verified by reading it back.

Not here: uploads (pushing), checkpoints' archives (checkpoints.archive).
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nbutils import disk, paths, platforms
from nbutils.checkpoints.archive import HashingFile, flush
from nbutils.errors import CourseError
from nbutils.sharing import contents

SMALL = 200e6  # bytes a browser fetches from a notebook without trouble


@dataclass(frozen=True)
class SingleFile:
    """The archive, its size and checksum, and how to get it from here."""

    file: Path
    bytes: int
    sha256: str
    hint: str

    def __str__(self) -> str:
        return f"{self.file}: {self.bytes / 1e6:,.1f} MB, sha256 {self.sha256[:16]}\n  {self.hint}"


def single_file(folder: str | Path, out: str | Path | None = None, *, progress: bool = True) -> SingleFile:
    """Pack a model folder into one .tar, streaming; it has its name only after every file in it was compared."""
    folder = contents.model_folder(folder)
    out = _place(out or folder.parent / f"{folder.name}.tar", folder)
    files = contents.model_files(folder)
    disk.require_disk(out.parent, contents.size_of(files) / paths.GIB * 1.01 + 0.01, "one file of the model")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        digest, count = _pack(folder, files, partial, progress)
        _verify(folder, files, partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return SingleFile(out, count, digest, download_hint(out))


def _place(out: str | Path, folder: Path) -> Path:
    """Where the archive goes; its folder is made."""
    out = Path(os.path.abspath(Path(out).expanduser()))
    if out.is_dir() or folder.resolve() in out.resolve().parents:
        seen = "is a folder" if out.is_dir() else "would lie inside the folder it is made of"
        raise CourseError(
            f"the archive {out} {seen}.", "a file beside the folder, or elsewhere",
            f"name it {folder.parent / f'{folder.name}.tar'}, for example",
        )  # fmt: skip
    if os.path.lexists(out) and not _is_ours(out, folder):
        raise CourseError(
            f"{out} is there already, and is no archive of a {folder.name} folder.", "a new file name",
            "name another file, or move that one away",
        )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _is_ours(file: Path, folder: Path) -> bool:
    """Whether a file is an archive that was made of a folder of this name."""
    try:
        with tarfile.open(file, "r:") as tar:
            first = tar.next()
            if first is None or first.mtime or first.uid or first.gid or first.uname:  # as the tars of others have
                return False
            return first.name.startswith(f"{folder.name}/")
    except (OSError, tarfile.TarError):
        return False


def _pack(folder: Path, files: list[Path], partial: Path, progress: bool) -> tuple[str, int]:
    """Write the archive; its checksum and size. Owners, groups and times of this machine stay here."""
    from tqdm.auto import tqdm

    bar = tqdm(total=contents.size_of(files), unit="B", unit_scale=True, disable=not progress)
    with bar, open(partial, "wb") as file:
        counted = HashingFile(file)
        settings = {"mode": "w", "copybufsize": paths.CHUNK, "dereference": True}  # a link's target stays here
        with tarfile.open(fileobj=counted, **settings) as tar:  # type: ignore[call-overload]
            for one in files:
                name = f"{folder.name}/{one.relative_to(folder).as_posix()}"
                tar.add(one, arcname=name, recursive=False, filter=_anonymous)
                bar.update(one.stat().st_size)
        flush(file)
    return counted.digest.hexdigest(), counted.size


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _verify(folder: Path, files: list[Path], partial: Path) -> None:
    """Read the archive back and compare every file of it with the folder."""
    expected = {f"{folder.name}/{one.relative_to(folder).as_posix()}": one for one in files}
    seen = {}
    with tarfile.open(partial) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            seen[member.name] = _digest(content)
    wrong = [name for name, file in expected.items() if seen.get(name) != paths.sha256(file)]
    if wrong or len(seen) != len(expected):
        raise CourseError(
            f"the archive differs from {folder}: {', '.join(wrong[:3]) or 'files are too many'}.",
            "an archive equal to the folder", "run this again; if it stays, this disk is not to be trusted",
        )  # fmt: skip


def _digest(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := content.read(paths.CHUNK):
        digest.update(piece)
    return digest.hexdigest()


def download_hint(file: Path) -> str:
    """How to get a file from this platform to one's own machine."""
    name, size = platforms.detect().name, file.stat().st_size if file.exists() else 0
    if name.startswith("colab"):
        if size <= SMALL:
            return f'from google.colab import files; files.download("{file}")'
        return (
            f"a browser download of {size / 1e9:.1f} GB often breaks off: mount Drive, then  "
            f'!cp "{file}" /content/drive/MyDrive/  and fetch it at drive.google.com'
        )
    if name == "kaggle":
        return f"keep {file} below /kaggle/working and save a version: the Output tab of the notebook offers it"
    if name == "autodl":
        return (
            f"in JupyterLab's file list open {file.parent}, right-click {file.name}, Download; "
            f"for several GB: scp -P PORT root@HOST:{file} .  (port and host stand on the instance's page)"
        )
    return f"in JupyterLab's file list right-click {file.name}, Download; or copy {file}"
