"""Where the course's own files are, and how files are written so that half a file is never trusted.

Not here: where a run is kept (platforms), whether there is room for it (disk), what is inside a run folder (lessons).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
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
LARGEST_JSON = 2**26


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


def read_json(path: Path) -> Any:
    """What a JSON file holds; a pipe, a device or endless nesting is a ValueError like any other text that is none."""
    if path.exists() and not (path.is_file() and path.stat().st_size < LARGEST_JSON):
        raise ValueError("it is no plain file, or too large")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


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
        written = read_json(folder / STAMP)
        here = _sizes(folder)  # whatever a person or an editor put beside them does no harm
        return written["about"] if written["files"].items() <= here.items() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def partial_of(target: Path) -> Path:
    """Where `whole_folder` writes before the folder has its name."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def whole_folder(target: Path, about: dict[str, Any], resume: bool = False) -> Iterator[Path]:
    """A folder to write into that takes the name `target` only when the block ends without an error.

    Its stamp is written last: `about`, which says what the folder was made from, and the size of every file.
    With `resume` the block finds what an interrupted one left, and must know by itself what of it is whole.
    A folder of that name is replaced only if it was made this way and holds nothing else.
    """
    target = target.absolute()
    _require_ours(target)
    partial = partial_of(target)
    with _alone_in(partial):
        if not resume:
            empty_folder(partial)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _flush(file)
        write_json(partial / STAMP, {"about": about, "files": _sizes(partial)})
        _require_ours(target)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    if stamp(target) is None:
        raise CourseError(
            f"{target} was written, but is not whole there: that disk lost a part of it.", "a disk that keeps files",
            "run this cell again; on Google Drive, wait a minute first",
        )  # fmt: skip


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make a folder and hold it: a second process that wants it is told; the system frees it should this one die."""
    import fcntl

    if folder.is_symlink() or not (folder.is_dir() or not folder.exists()):
        raise CourseError(
            f"{folder} is a link or a file, and the result would go through it.", "no file of that name",
            "look where it leads, and remove it",
        )  # fmt: skip
    folder.mkdir(exist_ok=True)
    held = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        with suppress(OSError):  # a disk without locks, as Drive: two at once are not noticed there
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as problem:
                raise CourseError(
                    f"another process is writing {folder}.", "one at a time", "wait until it is done, or end it"
                ) from problem
        yield
    finally:
        os.close(held)


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder; the folder itself stays, and may be held by a lock."""
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def require_apart(target: Path, *sources: Path) -> None:
    """Refuse to write a folder over, around or into one that it is made from."""
    place = target.resolve()
    for source in (one.resolve() for one in sources):
        if place == source or place in source.parents or source in place.parents:
            raise CourseError(
                f"the result would go to {target}, and {source} is needed to make it.", "a folder apart from it",
                "name another folder for the result",
            )  # fmt: skip


def _require_ours(target: Path) -> None:
    """Refuse a folder with anything in it that `whole_folder` did not write, hidden or not: it would be lost."""
    if not os.path.lexists(target):
        return
    plain = target.is_dir() and not target.is_symlink()
    others = _foreign(target) if plain else []
    if others or not plain:
        what = f"has files that were not made here ({', '.join(others[:3])})" if others else "is no plain folder"
        raise CourseError(
            f"{target} {what}.", "a new or empty folder, or one this course wrote",
            "move them elsewhere, or name another folder: what is there would be lost",
        )  # fmt: skip


def _foreign(folder: Path) -> list[str]:
    """What a folder holds beside the files of its stamp, the stamp itself and the folders they lie in."""
    try:
        known = {PurePosixPath(name) for name in read_json(folder / STAMP)["files"]}
        known |= {PurePosixPath(STAMP)} | {above for name in known for above in name.parents}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    found = (PurePosixPath(one.relative_to(folder).as_posix()) for one in folder.rglob("*"))
    return sorted(str(one) for one in found if one not in known)


def _sizes(folder: Path) -> dict[str, int]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != STAMP]
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def require_own(folder: Path) -> None:
    """Refuse what another user made, or linked, where everybody may write, as in /tmp: they chose what is in it."""
    folder = folder.absolute()
    there = (place for place in (folder, *folder.parents) if os.path.lexists(place))
    for place in there:
        if place.parent.stat().st_mode & stat.S_IWOTH and place.lstat().st_uid != os.getuid():
            raise CourseError(
                f"{place} belongs to another user of this machine.", "a folder of your own",
                "set NBUTILS_HOME (for an environment SERVE_ENV or EXPORT_ENV) to a folder in your home",
            )  # fmt: skip


def make_folder(folder: Path, purpose: str) -> Path:
    """The folder, made for this user alone if it is missing; a place that takes no files is an error in plain words."""
    require_own(folder)
    try:
        for place in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            place.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
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
