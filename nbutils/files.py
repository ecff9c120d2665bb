"""Where the course's own files are, and how files are written so that a half-written one is never trusted."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.language import say, tr

if TYPE_CHECKING:
    from filelock import BaseFileLock

DISTRIBUTION = "nbutils-finetune-course"  # on the package registry, `nbutils` is another project
PACKAGE = Path(__file__).resolve().parent
CHECKOUT: Path | None = PACKAGE.parent if (PACKAGE.parent / "notebooks").is_dir() else None
_COURSE = CHECKOUT or PACKAGE / "_files"  # the wheel has the same folders under nbutils/_files

CONFIGS = _COURSE / "configs"
SAMPLES = _COURSE / "data_samples"
NOTEBOOKS = _COURSE / "notebooks"
TINY_MODEL = SAMPLES / "tiny_base"
TINY_HYBRID = SAMPLES / "tiny_hybrid"

GIB = 2**30
CHUNK = 2**22  # bytes read or written at a time
STAMP = "complete.json"


def fs_root() -> Path:
    """Where the platforms' fixed paths begin: `/`, or `NBUTILS_FS_ROOT` when a platform is simulated."""
    return Path(os.environ.get("NBUTILS_FS_ROOT") or "/")


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    path.parent.mkdir(exist_ok=True)  # no more: a disk that was unmounted lacks several, and must stay empty
    with replacement(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place, once it is on disk, when the block ends without an error.

    Its name cannot be guessed, and it must be new: nobody can have put a link there.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_text` for JSON, readable by people (Chinese stays Chinese)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file; a pipe, a huge file or endless nesting is a ValueError, like any invalid JSON."""
    if path.exists() and not (path.is_file() and path.stat().st_size < 2**26):
        raise ValueError(tr("it is not a regular file, or too large"))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as problem:
        raise ValueError(tr("it is nested too deeply")) from problem


def read_yaml(path: Path) -> Any:
    """A table of the course's own; what a learner writes is read by `config`."""
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is missing or damaged."""
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def sha256(path: Path) -> str:
    """The checksum of a file, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def stamp(folder: Path) -> dict[str, Any] | None:
    """The `about` of a folder that `complete_folder` wrote; None if it, or a part of any of its files, is missing."""
    written = read_object(folder / STAMP)
    complete = "about" in written and written["files"].items() <= sizes(folder).items()
    return written["about"] if complete else None


def partial_of(target: Path) -> Path:
    """Where `complete_folder` writes before the folder gets its name."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def complete_folder(target: Path, about: dict[str, Any]) -> Iterator[Path]:
    """A folder to write into that becomes `target` only when the block ends without an error.

    The stamp is written last: `about`, which says what the folder was made from, and the size of every file.
    An existing target is replaced only if it was made this way and holds nothing else.
    """
    target = target.absolute()
    partial = partial_of(target)
    replaced = target.with_name(f".{target.name}.replaced")
    _require_ours(target)
    partial.mkdir(mode=0o700, exist_ok=True)
    _require_own_folder(partial)
    with held(partial):
        if replaced.exists() and not target.exists():  # a process was killed between two renames
            os.replace(replaced, target)
        for path in partial.iterdir():  # an interrupted block left it
            remove(path)
        yield partial
        for name in sizes(partial):
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
        write_json(partial / STAMP, {"about": about, "files": sizes(partial)})
        _require_ours(target)
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(OSError):  # nothing is there, or a folder of a container's image, which cannot be renamed
            os.replace(target, replaced)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
    if stamp(target) is None:
        raise CourseError(
            "{folder} was written, but it is not complete: the disk lost a part of it.",
            todo="Run this cell again; on Google Drive, wait a minute first.",
            folder=target,
        )


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock on a file or folder, which the system frees if this process dies; refuse one that another holds.

    False where the disk has no locks, such as Drive: two writers are not noticed there.
    """
    if sys.platform == "win32":  # only `data check` comes here
        yield False
        return
    import fcntl

    locked = True
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise CourseError(
                "Another process is writing {folder}.",
                todo="Wait until it is done, or stop it.",
                folder=path,
            ) from problem
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_left(folder: Path, pattern: str) -> None:
    """Remove what killed processes left; one that lives holds its file or folder."""
    for left in folder.glob(pattern):
        with suppress(CourseError, OSError), held(left) as locked:
            if locked:
                remove(left)


def lock(path: Path) -> BaseFileLock:
    """A lock for `with` or `acquire`, free once this process is gone; on a disk without locks, a file beside it."""
    from filelock import FileLock, SoftFileLock

    with tempfile.NamedTemporaryFile(dir=path.parent) as probe, held(Path(probe.name)) as locked:
        if locked:
            return FileLock(path)
    path = path.with_suffix(".held")
    say("[WARN] This disk has no locks: {file} stands for one. If its machine is lost, delete it.", file=path)
    return SoftFileLock(path)


def require_apart(target: Path, *sources: Path) -> None:
    """Refuse to write a folder over, around or into one that it is made from."""
    place = target.resolve()
    for path in sources:
        source = path.resolve()
        if place.is_relative_to(source) or source.is_relative_to(place):
            raise CourseError(
                "The result would go to {target}, and {source} is needed to make it.",
                todo="Name another folder for the result, neither inside {source} nor around it.",
                target=target,
                source=source,
            )


def require_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse files of a folder that are links out of it, unless to `blobs`, where the hub's cache keeps content."""
    place = folder.resolve()
    for path in paths:
        target = Path(os.path.realpath(path))  # resolve() fails on a link to itself
        if target.parent.name != "blobs" and not target.is_relative_to(place):
            raise CourseError(
                "{link} leads out of its folder, to {target}.",
                todo="If you trust it, copy the file to the place of the link; otherwise delete the link.",
                link=path,
                target=target,
            )


def _require_own_folder(place: Path) -> None:
    """Refuse a link, a file, or what another user made, where a folder is written."""
    if place.is_symlink() or place.is_file():
        raise CourseError(
            "{path} is a link or a file, and a folder is written there.",
            todo="Check where it leads, then remove it or name another folder.",
            path=place,
        )
    require_own(place)


def _require_ours(target: Path) -> None:
    """Refuse to replace anything that `complete_folder` did not write, hidden files included."""
    _require_own_folder(target)
    known = {STAMP, *read_object(target / STAMP).get("files", ())}
    foreign = []
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if name not in known and (path.is_symlink() or not path.is_dir()):
            foreign.append(name)
    if foreign:
        raise CourseError(
            "{folder} has files that were not made here ({names}).",
            todo="Move them elsewhere, or name another folder: they would be lost.",
            folder=target,
            names=", ".join(foreign[:3]),
        )


def sizes(folder: Path) -> dict[str, int]:
    """The size of every file below a folder but the stamp, also of those a link leads to."""
    by_name = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != STAMP:
            by_name[file.relative_to(folder).as_posix()] = file.stat().st_size
    return by_name


def require_own(folder: Path) -> None:
    """Refuse what another user made, or linked, in a world-writable place such as /tmp."""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        shared = os.path.lexists(place) and place.parent.stat().st_mode & stat.S_IWOTH
        if shared and place.lstat().st_uid != os.getuid():
            raise CourseError(
                "{folder} belongs to another user of this machine.",
                todo=(
                    "Name a folder in your home: for runs NBUTILS_HOME, for an environment NBUTILS_SERVE_ENV or "
                    "NBUTILS_EXPORT_ENV, for a model --out."
                ),
                folder=place,
            )


def make_folder(folder: Path) -> Path:
    """The folder, made for this user alone if it is missing; one that cannot be written to is a CourseError."""
    require_own(folder)
    try:
        for place in reversed((folder, *folder.parents)):
            place.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(bytes(4096))  # an empty file also fits on a full disk
    except OSError as problem:
        raise CourseError(
            "{folder} cannot be used: {problem}.",
            todo="Set NBUTILS_HOME to a folder you can write to.",
            folder=folder,
            problem=problem.strerror,
        ) from problem
    return folder
