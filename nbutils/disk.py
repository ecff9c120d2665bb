"""Room on disk: asked before a long job, so that it does not end in a full one.

Not here: which folder is for what (platforms.places).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.paths import GIB

KAGGLE_OUTPUT = 20e9  # bytes that Kaggle saves from /kaggle/working; the disk under it may be larger
FEWEST_FILES = 300  # a run, its checkpoints and its caches need about this many


def nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in [folder, *folder.absolute().parents] if os.path.exists(place))


def free_gib(folder: Path) -> float:
    """Free space at `folder`, or at its nearest parent that exists; on Kaggle never more than will be saved."""
    free = shutil.disk_usage(nearest(folder)).free / GIB
    allowance = kaggle_allowance_gib(folder)
    return free if allowance is None else min(free, allowance)


def kaggle_allowance_gib(folder: Path) -> float | None:
    """What is left of Kaggle's 20 GB for a folder below /kaggle/working; None for any other folder."""
    working = platforms.fs_root() / "kaggle/working"
    if platforms.detect().name != "kaggle" or not folder.resolve().is_relative_to(working.resolve()):
        return None
    return max(0.0, KAGGLE_OUTPUT / GIB - folder_gib(working))


def free_inodes(folder: Path) -> int | None:
    """How many more files fit there; None where the file system does not count them."""
    if not hasattr(os, "statvfs"):
        return None
    seen = os.statvfs(nearest(folder))
    return seen.f_favail if seen.f_files else None


def require_disk(folder: Path, gib: float, purpose: str) -> None:
    """Stop before a long job that would run out of disk, or of files on a disk that counts them."""
    free = free_gib(folder)
    if free < gib:
        raise _too_little(folder, gib, purpose, free)
    files = free_inodes(folder)
    if files is not None and files < FEWEST_FILES:
        raise CourseError(
            f"{purpose} needs files in {folder}, and only {files} more can be made there, however much space is free.",
            f"a disk that takes at least {FEWEST_FILES} more files (AutoDL's file storage ends at about 200,000)",
            "delete folders with many small files there, or set NBUTILS_HOME to a folder on another disk",
        )


def _too_little(folder: Path, gib: float, purpose: str, free: float) -> CourseError:
    allowance = kaggle_allowance_gib(folder)
    if allowance is None or allowance > free:
        return CourseError(
            f"{purpose} needs {_size_of(gib)} in {folder}, and {_size_of(free)} are free there.",
            f"at least {_size_of(gib)} of free disk",
            "delete old runs or caches there, or set NBUTILS_HOME to a folder on a larger disk",
        )
    return CourseError(
        f"{purpose} needs {_size_of(gib)} in {folder}, and {_size_of(free)} are left of the 20 GB that Kaggle saves.",
        f"at least {_size_of(gib)} left in /kaggle/working",
        "delete what need not be saved there; big intermediate files belong in /kaggle/temp, which is not saved",
    )


def _size_of(gib: float) -> str:
    """A size in the unit people would use."""
    return f"{gib:.1f} GiB" if gib >= 0.1 or not gib else f"{1024 * gib:.1f} MiB"


def folder_gib(folder: Path) -> float:
    """Size of all files below `folder`; one that vanishes meanwhile counts nothing."""
    return sum(_size(Path(place) / name) for place, _, files in os.walk(folder) for name in files) / GIB


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
