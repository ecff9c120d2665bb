"""Which platform this is and on what evidence; its folders, limits, Drive, secrets and network.

Not here: torch, or anything about the card (hardware).
"""

from __future__ import annotations

from nbutils.platforms.afterwards import power_off, send_notice
from nbutils.platforms.detection import NAMES, Platform, detect, fs_root, in_kernel
from nbutils.platforms.drive import is_mount, mount_drive, mount_point_of
from nbutils.platforms.limits import Limit, free_memory_gib, memory_gib, processors, session_seconds, time_limit_hours
from nbutils.platforms.network import answers, hub_online, prepare_network
from nbutils.platforms.places import Folders, cannot_write, find_input, find_inputs, folders, use_model_cache
from nbutils.platforms.secrets import secret

__all__ = [
    "NAMES", "Folders", "Limit", "Platform", "answers", "cannot_write", "detect", "find_input",
    "find_inputs", "folders", "free_memory_gib", "fs_root", "hub_online", "in_kernel", "is_mount", "memory_gib",
    "mount_drive", "mount_point_of", "power_off", "prepare_network", "processors", "secret", "send_notice",
    "session_seconds", "time_limit_hours", "use_model_cache",
]  # fmt: skip
