"""The machine a lesson runs on: which platform it is, its folders, limits, Drive, secrets and network."""

from __future__ import annotations

from nbutils.platforms.detection import (
    Limit,
    Platform,
    detect,
    free_memory_gib,
    fs_root,
    in_kernel,
    memory_gib,
    processors,
    session_seconds,
    time_limit_hours,
)  # fmt: skip
from nbutils.platforms.drive import is_mount, mount_drive, mount_point_of
from nbutils.platforms.network import answers, hub_online, prepare_network
from nbutils.platforms.secrets import secret
from nbutils.platforms.shutdown import power_off, send_notice
from nbutils.platforms.storage import Folders, cannot_write, find_input, find_inputs, folders, use_model_cache

__all__ = [
    "Folders", "Limit", "Platform", "answers", "cannot_write", "detect", "find_input", "find_inputs", "folders",
    "free_memory_gib", "fs_root", "hub_online", "in_kernel", "is_mount", "memory_gib", "mount_drive",
    "mount_point_of", "power_off", "prepare_network", "processors", "secret", "send_notice", "session_seconds",
    "time_limit_hours", "use_model_cache",
]  # fmt: skip
