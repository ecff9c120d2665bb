"""Which platform this is and on what evidence; its folders, limits, Drive, secrets and network.

Not here: torch, or anything about the card (hardware).
"""

from __future__ import annotations

from nbutils.platforms.detection import NAMES, Platform, detect, fs_root, in_kernel
from nbutils.platforms.drive import mount_drive
from nbutils.platforms.limits import session_seconds, time_limit_hours
from nbutils.platforms.network import answers, hub_online
from nbutils.platforms.places import Folders, find_inputs, folders
from nbutils.platforms.secrets import secret

__all__ = [
    "NAMES", "Folders", "Platform", "answers", "detect", "find_inputs", "folders", "fs_root", "hub_online",
    "in_kernel", "mount_drive", "secret", "session_seconds", "time_limit_hours",
]  # fmt: skip
