"""Google Drive on Colab: mounted only if it is not, within a bounded wait, and never at the price of the lesson.

Not here: what is written to it (checkpoints). Nothing is ever made below the mount point before it is a mount: a
folder there would keep Drive from being mounted at all, and what lies in it would be gone with the machine.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from nbutils.masking import mask_secrets
from nbutils.platforms.detection import Platform, fs_root
from nbutils.platforms.waiting import within

MOUNT_POINT = "content/drive"
SECONDS = 130.0
MEMORY = "NBUTILS_DRIVE"  # "off" by the learner; "failed: why" after one failure, inherited by child processes
DEAD = (errno.ENOTCONN, errno.EIO, errno.ESTALE)
FALLBACK = "Runs stay on this machine's disk, which goes when the machine goes."
BY_HAND = "from google.colab import drive; drive.mount('/content/drive')"

ASK_IN_A_CELL = f"run this in a notebook cell, then start this program again: {BY_HAND}"
NOBODY = (
    "nobody allowed it in time, as happens where no Colab page is attached (papermill, VS Code, the command line)",
    "open this notebook in a Colab page and run the first cells there; what runs afterwards finds Drive mounted",
)
# (type of the exception, words in its message, what it means, what to do)
CAUSES: tuple[tuple[str, str, str, str], ...] = (
    ("NotImplementedError", "", "this machine has no Drive (Colab's image without Colab's service)",
     "download what you want to keep, or set NBUTILS_HOME to a folder that lasts"),
    ("KeyError", "", "this shell does not belong to a Colab notebook (an SSH shell, for example)", ASK_IN_A_CELL),
    ("AttributeError", "", "a program outside the notebook's kernel (`!python ...`) cannot ask for it", ASK_IN_A_CELL),
    ("MessageError", "", "access was refused, or another Google account than the notebook's was chosen",
     "to be asked again: del os.environ['NBUTILS_DRIVE'], run this cell, and allow access with the notebook's account"),
    ("ValueError", "space", "the mount point has a space in its name", "leave it at /content/drive"),
    ("ValueError", "symlink", "its mount point is a symbolic link", "remove that link: rm /content/drive"),
    ("ValueError", "contain files", "its mount point holds files already", "move what lies in /content/drive"),
    ("ValueError", "domain policy", "your organisation does not allow Drive here", "use a personal Google account"),
    ("ValueError", "root folder", "the top folder of your Drive holds too many files to be read in time",
     "move files from 'My Drive' into folders, wait some minutes, and try again"),
    ("ValueError", "mount failed", *NOBODY),
    ("TIMEOUT", "", *NOBODY),
    ("TookTooLong", "", *NOBODY),
)  # fmt: skip


def is_mount(path: Path, root: Path | None = None) -> bool:
    """Whether something is mounted at exactly this path, even if it no longer answers."""
    return os.path.ismount(path) or any(place == path for place, _ in _mounts(root or fs_root()))


def mount_point_of(path: Path, root: Path | None = None) -> Path | None:
    """The mount a path lies on; None if that is the root disk. Ask `is_mount` later whether it is still there."""
    root = root or fs_root()
    path = path.absolute()
    end = root if path.is_relative_to(root) else Path(path.anchor)
    nearest = [path, *path.parents]
    return next((place for place in nearest[: nearest.index(end)] if is_mount(place, root)), None)


def is_mounted(root: Path | None = None) -> bool:
    """Whether Drive is really there: an empty folder of that name is not Drive, nor is a connection that died."""
    root = root or fs_root()
    place = root / MOUNT_POINT
    mounted = os.path.ismount(place) or (place, "fuse.drive") in _mounts(root)
    return mounted and _trouble(place) is None


def runs_folder(root: Path | None = None) -> Path:
    """Where runs are kept on a mounted Drive."""
    return (root or fs_root()) / MOUNT_POINT / "MyDrive/finetune-course"


def mount_drive(platform: Platform, seconds: float = SECONDS, root: Path | None = None) -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    root = root or fs_root()
    if platform.name == "colab_enterprise":
        return f"No Drive on Colab Enterprise: keep runs in a bucket, by NBUTILS_HOME on a mounted one. {FALLBACK}"
    if platform.name != "colab":
        return f"No Drive on {platform.name}: runs are kept on its own disk."
    if is_mounted(root):
        os.environ.pop(MEMORY, None)
        return f"Drive is mounted already: runs outlive this machine in {runs_folder(root)}."
    return _skipped() or _in_the_way(root / MOUNT_POINT) or _mount(root, seconds)


def _mount(root: Path, seconds: float) -> str:
    """Ask Colab for Drive, once."""
    try:
        from google.colab import drive
    except ImportError:
        return _sorry("the package google.colab is missing", "choose a runtime of Colab's own image")
    patience = int(max(seconds - 20, seconds * 0.8) * 1000)  # upstream's own, shorter, so that it may tidy up
    try:
        within(seconds, lambda: drive.mount(str(root / MOUNT_POINT), timeout_ms=patience))
    except Exception as problem:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        meaning, todo = _explained(problem)
    else:
        if is_mounted(root):
            return f"Drive is mounted: runs outlive this machine in {runs_folder(root)}."
        meaning, todo = "Colab said it was, but nothing is mounted at /content/drive", f"mount it yourself: {BY_HAND}"
    os.environ[MEMORY] = f"failed: {meaning}"
    return _sorry(meaning, todo)


def _sorry(meaning: str, todo: str) -> str:
    return f"Drive could not be mounted: {meaning}. {FALLBACK} To do: {todo}."


def _explained(problem: Exception) -> tuple[str, str]:
    """What a failure of `drive.mount` means and what to do about it."""
    kinds = [kind.__name__ for kind in type(problem).__mro__]
    for kind, words, meaning, todo in CAUSES:
        if kind in kinds and words in str(problem):
            return meaning, todo
    return mask_secrets(f"{type(problem).__name__}: {problem}"), f"mount it yourself: {BY_HAND}"


def _skipped() -> str:
    """Why Drive is not asked for at all; empty if it should be."""
    memory = os.environ.get(MEMORY, "")
    if memory == "off":
        return f"Drive is not used ({MEMORY}=off). {FALLBACK}"
    if not memory.startswith("failed"):
        return ""
    why = memory.partition(": ")[2] or "it could not be mounted"
    again = f"del os.environ['{MEMORY}'] and run this cell again, or mount it yourself: {BY_HAND}"
    return f"Drive is not asked for a second time ({why}). {FALLBACK} To try again: {again}."


def _in_the_way(place: Path) -> str:
    """What would make Colab refuse the mount point after a long wait; empty if nothing would."""
    if trouble := _trouble(place):
        again = "from google.colab import drive; drive.mount('/content/drive', force_remount=True)"
        return _sorry(f"it was mounted and lost its connection ({trouble})", f"in a notebook cell: {again}")
    if place.is_symlink():
        return _sorry(f"{place} is a symbolic link", f"remove it and run this cell again: rm {place}")
    try:
        found = sorted(place.iterdir())
    except OSError:  # not there yet, as it should be; anything else Colab will tell
        return ""
    if not found:
        return ""
    names = ", ".join(str(one) for one in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    tidy = f"move what you need and empty that folder, for example: mv {place} {place}-before; then run this cell again"
    return _sorry(f"{place} holds files of this machine already ({names}), which are not on Drive", tidy)


def _trouble(place: Path) -> str | None:
    """How a dead connection shows; None if there is none."""
    try:
        os.stat(place)
    except OSError as problem:
        return f"Errno {problem.errno}, {problem.strerror}" if problem.errno in DEAD else None
    return None


def _mounts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every (mount point, type) the kernel lists, as paths below `root`."""
    try:
        lines = (root / "proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) >= 3:
            name = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[1])
            yield (Path(name) if Path(name).is_relative_to(root) else root / name.lstrip("/")), words[2]
