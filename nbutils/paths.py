"""Where the course's own files are, and how files are written so that half a file is never trusted.

Not here: where a run is kept (platforms), whether there is room for it (disk), what is inside a run folder (lessons).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError

PACKAGE = Path(__file__).resolve().parent
CHECKOUT: Path | None = PACKAGE.parent if (PACKAGE.parent / "notebooks").is_dir() else None
_COURSE = CHECKOUT or PACKAGE / "_files"  # the wheel carries the same folders under nbutils/_files

CONFIGS = _COURSE / "configs"
SAMPLES = _COURSE / "data_samples"
NOTEBOOKS = _COURSE / "notebooks"
TINY_MODEL = SAMPLES / "tiny_base"

GIB = 2**30
CHUNK = 2**22  # bytes read or written at a time
STAMP = "complete.json"


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary neighbour is renamed over it once it is on disk.

    At most one folder is made: if more are missing, the disk under them is gone, and its mount point must stay empty.
    """
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` for JSON, readable by people (Chinese stays Chinese)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def stamp(folder: Path) -> dict[str, Any] | None:
    """What `whole_folder` wrote about a folder; None if the folder, or a part of any file of it, is missing."""
    try:
        written = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return written["about"] if written["files"] == _sizes(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def partial_of(target: Path) -> Path:
    """Where `whole_folder` writes before the folder has its name."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def whole_folder(target: Path, about: dict[str, Any], resume: bool = False) -> Iterator[Path]:
    """A folder to write into that takes the name `target` only when the block ends without an error.

    Its stamp is written last: `about`, which says what the folder was made from, and the size of every file.
    With `resume` the block finds what an interrupted one left, and must know by itself what of it is whole.
    """
    partial = partial_of(target)
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=resume)
    yield partial
    for file in partial.rglob("*"):
        if file.is_file():
            _flush(file)
    write_json(partial / STAMP, {"about": about, "files": _sizes(partial)})
    if target.exists():
        shutil.rmtree(target)
    os.replace(partial, target)
    if stamp(target) is None:
        raise CourseError(
            f"{target} was written, but is not whole there: that disk lost a part of it.", "a disk that keeps files",
            "run this cell again; on Google Drive, wait a minute first",
        )  # fmt: skip


def _sizes(folder: Path) -> dict[str, int]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != STAMP]
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def make_folder(folder: Path, purpose: str) -> Path:
    """The folder, made if it is missing; a place where nothing can be written is an error in plain words."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise CourseError(
            f"{folder} cannot be used for {purpose}: {problem.strerror}.",
            "a folder this process may write to",
            "set NBUTILS_HOME to such a folder",
        ) from problem
    return folder
