"""Which platform this is, on what evidence, and what it has: hours, processors, memory, secrets.

`configs/platforms.yaml` lists what proves each platform, in the order in which they are tried. Only variables and files
count, so that a child process finds the same platform as its notebook.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from nbutils.config import Strict, read_table
from nbutils.errors import CourseError
from nbutils.files import GIB
from nbutils.masking import remember_secret

CGROUP = "sys/fs/cgroup"
SECRETS_STATE = "NBUTILS_SECRETS_SILENT"  # the store that cannot answer; child processes do not ask it again either
ASK_AGAIN = ("NotebookAccessError", "BackendError")  # the next secret may be answered


class Entry(Strict):
    """One platform of `configs/platforms.yaml`, which explains the keys."""

    proof: list[str]
    work: str
    scratch: str
    keep: dict[str, str] = Field({})
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
    return read_table("platforms.yaml", Entry)


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

    def present(proof: str) -> bool:
        name, _, value = proof.partition("=")
        if proof.startswith("/"):
            return os.path.exists(root / proof[1:])  # `Path.exists` raises where this user may not look
        return env.get(name) == value if value else bool(env.get(name))

    if name := env.get("NBUTILS_PLATFORM"):
        if name not in table():
            raise CourseError("platforms.unknown", name=name, names=", ".join(table()))
        evidence = "NBUTILS_PLATFORM is set"
    else:
        found = {name: list(filter(present, entry.proof)) for name, entry in table().items()}
        name = next((name for name, proofs in found.items() if proofs), "local")
        evidence = ", ".join(found[name]) or "nothing of a known platform is here"
    return Platform(name, evidence, name == "kaggle" and env.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch")


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)


@dataclass(frozen=True, order=True)
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
    try:  # a simulated machine has it as the date of its /proc/1
        started = psutil.Process(1).create_time() if root == Path("/") else (root / "proc/1").stat().st_mtime
    except (OSError, psutil.Error):
        return 0.0
    return max(0.0, time.time() - started) if time_limit_hours(platform) else 0.0


def processors(root: Path | None = None) -> Limit:
    """How many processors this process may use; a container may have half a one."""
    allowed = Limit(len(os.sched_getaffinity(0)), "the processors this process may run on")
    quota = _cgroup(root, "cpu.max") or _cgroup(root, "cpu/cpu.cfs_quota_us") + _cgroup(root, "cpu/cpu.cfs_period_us")
    if len(quota) < 2 or quota[0] == "max" or int(quota[0]) <= 0:
        return allowed
    return min(allowed, Limit(int(quota[0]) / int(quota[1]), f"/{CGROUP}"))


def memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process may use."""
    whole = Limit(psutil.virtual_memory().total / GIB, "the machine's memory")
    return min(whole, Limit(_container_memory(root)[0], f"/{CGROUP}"))


def free_memory_gib(root: Path | None = None) -> Limit:
    """How much memory this process can still take: what a container has used is not free, whatever the machine says."""
    free = Limit(psutil.virtual_memory().available / GIB, "the machine's free memory")
    limit, used = _container_memory(root)
    return min(free, Limit(max(0.0, limit - used), f"/{CGROUP}"))


def _container_memory(root: Path | None) -> tuple[float, float]:
    """GiB a container may use, and has in use; cached files that can be dropped at once are not in use."""
    limit = _cgroup(root, "memory.max", "memory/memory.limit_in_bytes")
    if not limit or limit[0] == "max":
        return math.inf, 0.0
    used = _cgroup(root, "memory.current", "memory/memory.usage_in_bytes") or ["0"]
    words = _cgroup(root, "memory.stat", "memory/memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=True))
    dropped = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    return int(limit[0]) / GIB, max(0, int(used[0]) - dropped) / GIB


def _cgroup(root: Path | None, *names: str) -> list[str]:
    """The words of the first of these cgroup files that is there (v2, then v1); empty without a container."""
    for name in names:
        with suppress(OSError):
            return ((root or fs_root()) / CGROUP / name).read_text(encoding="utf-8").split()
    return []


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets, never printed; None if nobody has it."""
    value = os.environ.get(name, "").strip() or _from_store(name)
    if value:
        remember_secret(value)
    return value or None


def _from_store(name: str) -> str:
    """The secret as this platform keeps it; empty, after a sentence where one helps, if it cannot be had."""
    store = detect().name
    if store not in ("colab", "kaggle") or os.environ.get(SECRETS_STATE) == store:
        return ""
    try:
        if store == "colab":
            from google.colab import userdata

            return str(userdata.get(name) or "").strip()
        from kaggle_secrets import UserSecretsClient

        return str(UserSecretsClient().get_secret(name) or "").strip()
    except Exception as problem:  # seven documented types, of which none may cost the learner the lesson
        kind = type(problem).__name__  # its text is not shown, it may hold what it must not
        if kind == "SecretNotFoundError" or "No user secrets exist" in str(problem) or isinstance(problem, ImportError):
            return ""
        if kind not in ASK_AGAIN:
            os.environ[SECRETS_STATE] = store
        todo = "allow it for this notebook in the page's panel of secrets, or set an environment variable of that name"
        print(f"secret    {store}'s secrets do not give {name} ({kind}): {todo}.")
        return ""
