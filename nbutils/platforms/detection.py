"""Which platform this is, on what evidence, and what it allows: hours, processors, memory.

`configs/platforms.yaml` lists what proves each platform, in the order in which they are tried: folders and packages
alone prove little. Only variables and files count, so that a child process finds the same platform as its notebook.
In a container the machine's own numbers are not yours: its cgroup's limits count.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
import yaml
from pydantic import BaseModel, ConfigDict

from nbutils.errors import CourseError
from nbutils.paths import CONFIGS, GIB

CGROUP = "sys/fs/cgroup"


class Entry(BaseModel):
    """One platform of `configs/platforms.yaml`, which explains the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    proof: tuple[str, ...]
    work: str
    scratch: str
    decoys: tuple[str, ...] = ()
    keep: dict[str, str] = {}
    inputs: str = ""
    hours: float = 0.0
    cache: Literal["", "work", "scratch"] = ""
    china: bool = False
    gpu_todo: str = "start a machine with a GPU"
    hub_todo: str = "check the network, or set HF_ENDPOINT to a mirror"
    keep_todo: str = "download what you want to keep, or set NBUTILS_HOME to a folder that lasts"


@cache
def table() -> dict[str, Entry]:
    """All platforms by name, in the order in which they are tried."""
    tree = yaml.safe_load((CONFIGS / "platforms.yaml").read_text(encoding="utf-8"))
    return {name: Entry.model_validate(entry) for name, entry in tree.items()}


@dataclass(frozen=True)
class Platform:
    """A platform's name, the evidence for it, and whether nobody is watching (`batch`)."""

    name: str
    evidence: str
    batch: bool = False

    @property
    def entry(self) -> Entry:
        """What is known about it."""
        return table()[self.name]


def fs_root(env: Mapping[str, str] | None = None) -> Path:
    """Where the platforms' fixed paths begin: `/`, or `NBUTILS_FS_ROOT` when a platform is simulated."""
    return Path((os.environ if env is None else env).get("NBUTILS_FS_ROOT") or "/")


def detect(env: Mapping[str, str] | None = None, root: Path | None = None) -> Platform:
    """The platform and its evidence; `NBUTILS_PLATFORM` overrides."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    if name := env.get("NBUTILS_PLATFORM"):
        if name not in table():
            raise CourseError("platforms.unknown", name=name, names=", ".join(table()))
        evidence = "NBUTILS_PLATFORM is set"
    else:
        found = ((one, entry, _present(entry.proof, env, root)) for one, entry in table().items())
        name, entry, proof = next(row for row in found if row[2] or not row[1].proof)
        decoys = _present(entry.decoys, env, root)
        evidence = ", ".join(proof) or "no platform left a mark"
        evidence += f"; {', '.join(decoys)} alone proves nothing" if decoys else ""
    return Platform(name, evidence, name == "kaggle" and env.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch")


def _present(marks: tuple[str, ...], env: Mapping[str, str], root: Path) -> list[str]:
    """The marks that are here; an empty variable and a path this user may not look at (below /root) are not."""

    def is_here(mark: str) -> bool:
        name, _, value = mark.partition("=")
        if mark.startswith("/"):
            return os.path.exists(root / mark[1:])  # `Path.exists` would raise
        return env.get(name) == value if value else bool(env.get(name))

    return [mark for mark in marks if is_here(mark)]


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)


# ---- limits


@dataclass(frozen=True)
class Limit:
    """A number that holds for this process, and where it was read."""

    value: float
    source: str


def time_limit_hours(platform: Platform) -> float:
    """How long a machine of this platform lives; 0 if nobody takes it away."""
    return platform.entry.hours


def session_seconds(platform: Platform, root: Path | None = None) -> float:
    """How long this machine has been up on a platform that counts the hours; 0 elsewhere."""
    root = root or fs_root()
    try:  # a simulated machine tells it by the date of its /proc/1
        started = psutil.Process(1).create_time() if root == Path("/") else (root / "proc/1").stat().st_mtime
    except (OSError, psutil.Error):
        return 0.0
    return max(0.0, time.time() - started) if time_limit_hours(platform) else 0.0


def processors(root: Path | None = None) -> Limit:
    """How many processors this process may use; a container may have half a one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _smallest(Limit(allowed, "the processors this process may run on"), root, "cpu", _cpu_quota)


def memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process may use."""
    whole = Limit(psutil.virtual_memory().total / GIB, "the machine's memory")
    return _smallest(whole, root, "memory", lambda folder: _memory(folder)[0])


def free_memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process can still take: what a container has used is not free, whatever the machine says."""
    free = Limit(psutil.virtual_memory().available / GIB, "the machine's free memory")
    return _smallest(free, root, "memory", lambda folder: max(0.0, _memory(folder)[0] - _memory(folder)[1]))


def _smallest(machine: Limit, root: Path | None, controller: str, read: Callable[[Path], float]) -> Limit:
    """The machine's number, or the limit of this container's cgroup (v2, or v1 with a folder for each controller)."""
    found, root = [machine], root or fs_root()
    for place in ("", controller, f"{controller},{controller}acct"):
        with suppress(OSError, ValueError):  # not there, or "max": no limit
            folder = root / CGROUP / place
            found.append(Limit(read(folder), f"/{folder.relative_to(root)}"))
    return min(found, key=lambda limit: limit.value)


def _words(folder: Path, *names: str) -> list[str]:
    """The words in the first of these files that is there."""
    name = next((name for name in names if (folder / name).exists()), names[-1])
    return (folder / name).read_text(encoding="utf-8").split()


def _cpu_quota(folder: Path) -> float:
    quota, *period = _words(folder, "cpu.max", "cpu.cfs_quota_us")
    period = period or _words(folder, "cpu.cfs_period_us")
    if int(quota) <= 0:
        raise ValueError("no limit")
    return int(quota) / int(period[0])


def _memory(folder: Path) -> tuple[float, float]:
    """GiB a cgroup may use, and has in use; cached files that can be dropped at once are not in use."""
    limit = int(_words(folder, "memory.max", "memory.limit_in_bytes")[0]) / GIB
    with suppress(OSError, ValueError):  # what is in use may not be told
        words = _words(folder, "memory.stat")
        stat = dict(zip(words[::2], words[1::2], strict=True))
        used = int(_words(folder, "memory.current", "memory.usage_in_bytes")[0])
        return limit, (used - int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)) / GIB
    return limit, 0.0
