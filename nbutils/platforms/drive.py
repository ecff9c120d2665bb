"""Google Drive on Colab: mounted if it is not, within a bounded wait, and never at the price of the lesson.

Nothing is ever made below the mount point before it is a mount: a folder there would keep Drive from being mounted at
all, and what lies in it would be gone with the machine.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nbutils.masking import mask_secrets
from nbutils.platforms.detection import Platform, fs_root

Result = TypeVar("Result")
MOUNT_POINT = "content/drive"
SECONDS = 130.0
STATE = "NBUTILS_DRIVE"  # "off" by the learner; "failed: why" after one failure, inherited by child processes
DISCONNECTED = (errno.ENOTCONN, errno.EIO, errno.ESTALE)
FALLBACK = "Runs stay on this machine's disk, which goes when the machine goes."
MANUALLY = "from google.colab import drive; drive.mount('/content/drive')"
NO_PAGE = (
    "nobody allowed it in time, as happens where no Colab page is attached (papermill, VS Code, the command line)",
    "open this notebook in a Colab page and run the first cells there; what runs afterwards finds Drive mounted",
)
NO_KERNEL = (
    "only the notebook's kernel can request it, not `!python ...` or an SSH shell",
    f"run this in a notebook cell, then start this program again: {MANUALLY}",
)
# (type of the exception, words in its message, what it means, what to do)
CAUSES: tuple[tuple[str, str, str, str], ...] = (
    ("KeyError", "", *NO_KERNEL),
    ("AttributeError", "", *NO_KERNEL),
    ("MessageError", "", "access was refused, or another Google account than the notebook's was chosen",
     f"del os.environ['{STATE}'], run this cell again, and allow access with the notebook's account"),
    ("ValueError", "domain policy", "your organization does not allow Drive here", "use a personal Google account"),
    ("ValueError", "root folder", "the top folder of your Drive holds too many files", "move them into folders"),
    ("ValueError", "mount failed", *NO_PAGE),
    ("TIMEOUT", "", *NO_PAGE),
    ("TimedOut", "", *NO_PAGE),
)  # fmt: skip


class TimedOut(Exception):
    """The call did not return in the time allowed."""


class _Alarm(BaseException):
    """Not an Exception, so that no `except Exception` on the way keeps it."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises; `TimedOut` after `seconds`. Off the main thread, where no alarm can be, unbounded.

    The calls that need it talk to a notebook's page and must stay on the kernel's main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    armed, began = True, time.monotonic()

    def ring(number: int, frame: Any) -> None:
        if armed:
            raise _Alarm

    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again, for who swallows the first
    try:
        result = call()
        armed = False
        return result
    except _Alarm:
        raise TimedOut(f"no answer within {seconds:.0f} s") from None
    finally:  # an alarm set before goes on, less the time spent here
        armed = False
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.01) if left else 0, interval)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)


def is_mount(path: Path, root: Path | None = None) -> bool:
    """Whether something is mounted at exactly this path, even if it no longer answers."""
    return os.path.ismount(path) or any(place == path for place, _ in _mounts(root or fs_root()))


def mount_point_of(path: Path, root: Path | None = None) -> Path | None:
    """The mount a path lies on; None if that is the root disk. `is_mount` tells later whether it is still there."""
    root = root or fs_root()
    path = path.absolute()
    end = root if path.is_relative_to(root) else Path(path.anchor)
    nearest = [path, *path.parents]
    return next((place for place in nearest[: nearest.index(end)] if is_mount(place, root)), None)


def is_mounted(root: Path | None = None) -> bool:
    """Whether Drive is really there: an empty folder of that name is not Drive, nor is a connection that died."""
    root = root or fs_root()
    place = root / MOUNT_POINT
    return (os.path.ismount(place) or (place, "fuse.drive") in _mounts(root)) and not _disconnected(place)


def runs_folder(root: Path | None = None) -> Path:
    """Where runs are kept on a mounted Drive."""
    return (root or fs_root()) / MOUNT_POINT / "MyDrive/finetune-course"


def mount_drive(platform: Platform, seconds: float = SECONDS, root: Path | None = None) -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    root = root or fs_root()
    state = os.environ.get(STATE, "")
    if platform.name != "colab":
        return f"No Drive on {platform.name}: runs are kept on its own disk, or where NBUTILS_HOME says."
    if is_mounted(root):
        os.environ.pop(STATE, None)
        return f"Drive is mounted already: runs outlive this machine in {runs_folder(root)}."
    if state == "off":
        return f"Drive is not used ({STATE}=off). {FALLBACK}"
    if state.startswith("failed"):
        return (
            f"Drive is not requested a second time ({state.partition(': ')[2]}). {FALLBACK} "
            f"To do: del os.environ['{STATE}'] and run this cell again, or mount it yourself: {MANUALLY}."
        )
    meaning, todo = _obstacle(root / MOUNT_POINT) or _mount(root, seconds)
    if not meaning:
        return f"Drive is mounted: runs outlive this machine in {runs_folder(root)}."
    return f"Drive could not be mounted: {meaning}. {FALLBACK} To do: {todo}."


def _mount(root: Path, seconds: float) -> tuple[str, str]:
    """Request Drive from Colab; why it failed and what to do, or two empty texts."""
    patience = int(max(seconds - 20, seconds * 0.8) * 1000)  # Colab's own, shorter, so that it may clean up
    try:
        from google.colab import drive

        within(seconds, lambda: drive.mount(str(root / MOUNT_POINT), timeout_ms=patience))
        if is_mounted(root):
            return "", ""
        meaning, todo = "Colab said it was, but nothing is mounted at /content/drive", f"mount it yourself: {MANUALLY}"
    except Exception as problem:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        kinds = [kind.__name__ for kind in type(problem).__mro__]
        known = [cause[2:] for cause in CAUSES if cause[0] in kinds and cause[1] in str(problem)]
        other = mask_secrets(f"{type(problem).__name__}: {problem}"), f"mount it yourself: {MANUALLY}"
        meaning, todo = known[0] if known else other
    os.environ[STATE] = f"failed: {meaning}"
    return meaning, todo


def _obstacle(place: Path) -> tuple[str, str] | None:
    """What would make Colab refuse the mount point after a long wait, and what to do about it."""
    if trouble := _disconnected(place):
        again = "drive.mount('/content/drive', force_remount=True)"
        return f"it was mounted and lost its connection ({trouble})", f"in a notebook cell: {again}"
    if place.is_symlink() or (place.is_dir() and any(place.iterdir())):
        return (
            f"{place} is a link or holds files of this machine, which are not on Drive",
            f"move it, for example: mv {place} {place}-before; then run this cell again",
        )
    return None


def _disconnected(place: Path) -> str:
    """How a dead connection shows; empty if there is none."""
    try:
        os.stat(place)
    except OSError as problem:
        return f"Errno {problem.errno}, {problem.strerror}" if problem.errno in DISCONNECTED else ""
    return ""


def _mounts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every (mount point, type) the kernel lists, as paths below `root`."""
    try:
        lines = (root / "proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for words in (line.split() for line in lines if len(line.split()) >= 3):
        name = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[1])
        yield (Path(name) if Path(name).is_relative_to(root) else root / name.lstrip("/")), words[2]
