"""Placement on disk, checked before a long job so that it does not end in a full one."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.files import GIB

KAGGLE_OUTPUT = 20e9  # bytes that Kaggle saves from /kaggle/working; the disk under it may be larger
FEWEST_FILES = 300  # a run, its checkpoints and its caches need about this many


def nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def free_gib(folder: Path) -> float:
    """Free space at `folder`, or at its nearest parent that exists; on Kaggle never more than will be saved."""
    free = shutil.disk_usage(nearest(folder)).free / GIB
    working = platforms.fs_root() / "kaggle/working"
    if not folder.resolve().is_relative_to(working.resolve()):
        return free
    saved = KAGGLE_OUTPUT / GIB - folder_gib(working)
    return min(free, max(0.0, saved))


def free_inodes(folder: Path) -> int | None:
    """How many more files fit there; None where the file system does not count them."""
    if not hasattr(os, "statvfs"):  # Windows
        return None
    status = os.statvfs(nearest(folder))
    return status.f_favail if status.f_files else None


def require_disk(folder: Path, gib: float) -> None:
    """Stop before a long job that would run out of disk."""
    free = free_gib(folder)
    if free < gib:
        raise CourseError(
            "Not enough disk space in {folder}: {needed:.2f} GiB are needed, and only {free:.2f} GiB are free.",
            todo="Delete old runs or caches there, or set NBUTILS_HOME to a folder on a larger disk.",
            folder=folder,
            needed=gib,
            free=free,
        )


def folder_gib(folder: Path) -> float:
    """Size of all files below `folder`; one that vanishes meanwhile counts nothing."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size / GIB
