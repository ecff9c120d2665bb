"""Google Drive on Colab: mounted only if it is not, within a bounded wait, and never at the price of the lesson.

Not here: what is written to it (checkpoints).
"""

from __future__ import annotations

import os
from pathlib import Path

from nbutils.platforms.detection import Platform, fs_root

MOUNT_POINT = "content/drive"


def is_mounted(root: Path | None = None) -> bool:
    """Whether Drive is really there: an empty folder of that name is not Drive."""
    return os.path.ismount((root or fs_root()) / MOUNT_POINT)


def runs_folder(root: Path | None = None) -> Path:
    """Where runs are kept on a mounted Drive."""
    return (root or fs_root()) / MOUNT_POINT / "MyDrive/finetune-course"


def mount_drive(platform: Platform) -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    if platform.name != "colab":
        return f"No Drive on {platform.name}: runs are kept on its own disk."
    if is_mounted():
        return "Drive is mounted already."
    try:
        from google.colab import drive

        drive.mount("/content/drive")
    except Exception as problem:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        return f"Drive could not be mounted ({type(problem).__name__}: {problem}). Runs stay on this machine's disk."
    return "Drive is mounted: runs outlive this machine."
