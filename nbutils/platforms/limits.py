"""What the platform allows: hours, processors, memory.

In a container the machine's own numbers are not yours: the kernel kills what trusts them. So the smallest limit that
holds for this process counts, and it says where it was read.
Not here: disk room (disk), because it depends on the folder asked about.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbutils.paths import GIB
from nbutils.platforms.detection import Platform, fs_root

TIME_LIMIT_HOURS = {"colab": 12.0, "kaggle": 12.0, "paperspace": 6.0}  # Paperspace: its free machines
CGROUP = "sys/fs/cgroup"


@dataclass(frozen=True)
class Limit:
    """A number that holds for this process, and where it was read."""

    value: float
    source: str


def time_limit_hours(platform: Platform) -> float:
    """How long a machine of this platform lives; 0 if nobody takes it away."""
    return TIME_LIMIT_HOURS.get(platform.name, 0.0)


def session_seconds(platform: Platform, root: Path | None = None) -> float:
    """How long this machine has been up on a platform that counts the hours; 0 elsewhere."""
    if not time_limit_hours(platform):
        return 0.0
    try:
        return max(0.0, time.time() - _started(root or fs_root()))
    except (OSError, psutil.Error):
        return 0.0


def _started(root: Path) -> float:
    """When process 1 began; an imitated machine tells it by the date of its /proc/1."""
    return psutil.Process(1).create_time() if root == Path("/") else (root / "proc/1").stat().st_mtime


def processors(root: Path | None = None) -> Limit:
    """How many processors this process may use; a container may have half a one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Limit(allowed, "the processors this process may run on")]
    found += _cgroup_limits(root or fs_root(), ("cpu", "cpu,cpuacct"), {"cpu.max": _quota, "cpu.cfs_quota_us": _quota})
    return min(found, key=lambda limit: limit.value)


def memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process may use."""
    root = root or fs_root()
    found = [Limit(_host_memory(root) / GIB, "the machine's memory")]
    found += _cgroup_limits(root, ("memory",), {"memory.max": _bytes, "memory.limit_in_bytes": _bytes})
    return min(found, key=lambda limit: limit.value)


def free_memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process can still take: what a container has used is not free, whatever the machine says."""
    root = root or fs_root()
    found = [Limit(psutil.virtual_memory().available / GIB, "the machine's free memory")]
    found += _cgroup_limits(root, ("memory",), {"memory.max": _unused, "memory.limit_in_bytes": _unused})
    return min(found, key=lambda limit: limit.value)


def _unused(file: Path) -> float:
    """What a limit leaves of itself; pages of files that can be dropped at once do not count as used."""
    limit, used, pages = _bytes(file), 0.0, 0
    with suppress(OSError, ValueError):  # where the use is not told, the limit itself is the best guess
        used = _bytes(file.with_name("memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"))
        stat = dict(line.split() for line in file.with_name("memory.stat").read_text(encoding="utf-8").splitlines())
        pages = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    return max(1e-9, limit - max(0.0, used - pages / GIB))


def _host_memory(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, StopIteration):
        return psutil.virtual_memory().total


def _cgroup_limits(
    root: Path, controllers: tuple[str, ...], files: dict[str, Callable[[Path], float]]
) -> Iterator[Limit]:
    """Every limit set for this process's control group or for one above it, in the old layout and the new."""
    for folder in _cgroup_folders(root, controllers):
        for name, read in files.items():
            try:
                if (value := read(folder / name)) > 0:
                    yield Limit(value, f"/{(folder / name).relative_to(root)}")
            except (OSError, ValueError, ZeroDivisionError):
                continue  # not there, "max" (no limit) or unreadable


def _cgroup_folders(root: Path, controllers: tuple[str, ...]) -> list[Path]:
    """The folders that may hold a limit: each mount's own, and down the way to this process's group."""
    found = [root / CGROUP, *(root / CGROUP / controller for controller in controllers)]
    for line in _lines(root / "proc/self/cgroup"):
        _, names, group = line.split(":", 2)
        if not names or set(names.split(",")) & set(controllers):  # no names: the new layout, one tree for all
            way = Path(group.lstrip("/"))
            found += [root / CGROUP / names / part for part in (way, *way.parents)]
    return list(dict.fromkeys(found))


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.count(":") >= 2]
    except OSError:
        return []


def _bytes(file: Path) -> float:
    return int(file.read_text(encoding="utf-8")) / GIB


def _quota(file: Path) -> float:
    """`cpu.max` holds quota and period; the older layout keeps them in two files, and -1 means no limit."""
    words = file.read_text(encoding="utf-8").split()
    period = words[1] if len(words) > 1 else (file.parent / "cpu.cfs_period_us").read_text(encoding="utf-8")
    quota = int(words[0])
    if quota <= 0:
        raise ValueError(quota)
    return quota / int(period)
