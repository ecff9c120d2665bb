"""The machine a lesson runs on: which platform it is, its folders, limits, Drive, secrets and network."""

# ruff: noqa: F401
from __future__ import annotations

from nbutils.platforms import storage as drive
from nbutils.platforms.detection import (
    Limit,
    Platform,
    detect,
    free_memory_gib,
    fs_root,
    in_kernel,
    memory_gib,
    processors,
    secret,
    session_seconds,
    time_limit_hours,
)
from nbutils.platforms.network import answers, hub_online, prepare_network
from nbutils.platforms.shutdown import power_off, send_notice
from nbutils.platforms.storage import (
    Folders,
    cannot_write,
    find_input,
    find_inputs,
    folders,
    is_mount,
    mount_drive,
    mount_point_of,
    use_model_cache,
)
