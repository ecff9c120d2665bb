"""Room on disk: asked before a long job, so that it does not end in a full one.

Not here: which folder is for what (platforms.places).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.paths import GIB


def free_gib(folder: Path) -> float:
    """Free space at `folder`, or at its nearest parent that exists."""
    existing = next(place for place in [folder, *folder.absolute().parents] if place.exists())
    return shutil.disk_usage(existing).free / GIB


def require_disk(folder: Path, gib: float, purpose: str) -> None:
    """Stop before a long job that would run out of disk."""
    free = free_gib(folder)
    if free < gib:
        raise CourseError(
            f"{purpose} needs {gib:.1f} GiB in {folder}, and {free:.1f} GiB are free there.",
            f"at least {gib:.1f} GiB of free disk",
            "delete old runs or caches there, or set NBUTILS_HOME to a folder on a larger disk",
        )


def folder_gib(folder: Path) -> float:
    """Size of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GIB
