"""The machine a lesson runs on: which platform it is, its limits and secrets, its folders, Google Drive.

`configs/platforms.yaml` lists what proves each platform, in the order in which they are tried. Only variables and files
count, so that a child process finds the same platform as its notebook. Nothing is ever made below Drive's mount point
before it is a mount: a folder there would keep Drive from being mounted, and would be gone with the machine.
"""

from __future__ import annotations

import glob
import math
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from nbutils.config import Strict, read_table
from nbutils.errors import CourseError, require_choice
from nbutils.files import CHECKOUT, GIB, fs_root
from nbutils.language import say, tr
from nbutils.masking import describe, remember_secret
from nbutils.platforms.network import hub_online, prepare_network  # noqa: F401

CGROUP = "sys/fs/cgroup"
SECRETS_STATE = "NBUTILS_SECRETS_SILENT"  # the store that cannot answer; child processes do not ask it again either
MOUNT_POINT = "content/drive"
RUNS = f"{MOUNT_POINT}/MyDrive/finetune-course"
STATE = "NBUTILS_DRIVE"  # "off" by the learner; "failed" after one failure, inherited by child processes
MANUALLY = "from google.colab import drive; drive.mount('/content/drive', force_remount=True)"


class Entry(Strict):
    """One platform of `configs/platforms.yaml`, which explains the keys."""

    name: str = ""
    proof: list[str]
    work: str
    scratch: str
    keep: dict[str, str] = Field({})
    inputs: str = ""
    hours: float = 0.0
    limits: str = ""
    currency: Literal["", "$", "¥", "¥$"] = "$"
    ports: list[int] = Field([])
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
    """A platform's name and the evidence for it."""

    name: str
    evidence: str

    @property
    def entry(self) -> Entry:
        """What is known about it."""
        return table()[self.name]

    def as_dict(self) -> dict[str, object]:
        """For facts.json and other programs."""
        return asdict(self) | {"batch": self.batch}

    @property
    def batch(self) -> bool:
        """Whether nobody is watching: Kaggle runs a saved version."""
        return self.name == "kaggle" and os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"


def detect() -> Platform:
    """The platform and its evidence; `NBUTILS_PLATFORM` overrides.

    Example:
        print(platforms.detect().name)
    """
    if name := os.environ.get("NBUTILS_PLATFORM"):
        require_choice("NBUTILS_PLATFORM", name, table())
        return Platform(name, "NBUTILS_PLATFORM is set")
    for name, entry in table().items():
        if proofs := [proof for proof in entry.proof if _is_present(proof)]:
            return Platform(name, ", ".join(proofs))
    return Platform("local", "nothing of a known platform is here")


def _is_present(proof: str) -> bool:
    """Whether a path is here, or a variable is set, to this value where the proof has one."""
    if proof.startswith("/"):
        return os.path.exists(fs_root() / proof[1:])  # `Path.exists` raises where this user may not look
    name, _, value = proof.partition("=")
    actual = os.environ.get(name, "")
    return actual == value if value else bool(actual)


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)


def session_seconds(platform: Platform) -> float:
    """How long this machine has been up on a platform that counts the hours; 0 elsewhere."""
    if not platform.entry.hours:
        return 0.0
    with suppress(OSError, psutil.Error):
        if fs_root() != Path("/"):  # a simulated machine
            return time.time() - (fs_root() / "proc/1").stat().st_mtime
        return time.time() - psutil.Process(1).create_time()
    return 0.0


def processors() -> float:
    """How many processors this process may use; a container may have half a one."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux has it
        count = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max") or _cgroup("cpu/cpu.cfs_quota_us") + _cgroup("cpu/cpu.cfs_period_us")  # v2, v1
    if len(quota) < 2 or quota[0] in ("max", "-1"):
        return count
    return min(count, int(quota[0]) / int(quota[1]))


def memory_gib() -> float:
    """How much memory this process may use."""
    return min(psutil.virtual_memory().total / GIB, _container_gib(used=0))


def free_memory_gib() -> float:
    """How much memory this process can still take: what a container has used is not free, whatever the machine says.

    Example:
        if platforms.free_memory_gib() < 8:
            print("close other notebooks first")
    """
    used = 0
    if usage := _cgroup("memory.current", "memory/memory.usage_in_bytes"):
        words = _cgroup("memory.stat", "memory/memory.stat")
        stat = dict(zip(words[::2], words[1::2], strict=True))
        # cached files that can be dropped at once are not in use
        dropped = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
        used = int(usage[0]) - int(dropped)
    return min(psutil.virtual_memory().available / GIB, _container_gib(used))


def _container_gib(used: int) -> float:
    """What a container has besides what is used; without a limit, infinitely much."""
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    if limit in ([], ["max"]):
        return math.inf
    return (int(limit[0]) - used) / GIB


def _cgroup(*names: str) -> list[str]:
    """The words of the first of these cgroup files that is there (v2, then v1); empty without a container."""
    for name in names:
        with suppress(OSError):
            return (fs_root() / CGROUP / name).read_text(encoding="utf-8").split()
    return []


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets, never printed; None if nobody has it."""
    value = os.environ.get(name, "").strip() or _stored_secret(name).strip()
    if not value:
        return None
    remember_secret(value)
    return value


def _stored_secret(name: str) -> str:
    """A secret of the platform's own store; empty where it has none, or does not answer."""
    store = detect().name
    if store not in ("colab", "kaggle") or os.environ.get(SECRETS_STATE) == store:
        return ""
    try:
        if store == "colab":
            from google.colab import userdata

            return str(userdata.get(name) or "")
        from kaggle_secrets import UserSecretsClient

        return str(UserSecretsClient().get_secret(name) or "")
    except Exception as problem:  # seven documented types, of which none may cost the learner the lesson
        kind = type(problem).__name__  # its text is not shown, it may hold what it must not
        if kind in ("SecretNotFoundError", "ModuleNotFoundError") or "No user secrets exist" in str(problem):
            return ""
        if kind not in ("NotebookAccessError", "BackendError"):  # after these two the next secret may be answered
            os.environ[SECRETS_STATE] = store
        say(
            "secret    {store} did not return {name} ({kind}): give this notebook access to it in the Secrets "
            "panel, or set the environment variable {name}.",
            store=store,
            name=name,
            kind=kind,
        )
        return ""


@dataclass(frozen=True)
class Folders:
    """work: fast and large; scratch: may vanish; keep: outlives the machine; inputs: read-only, or None.

    `earlier`: other places where an earlier session may have kept this run, for example because Drive was not mounted
    then. `lasting` says whether keep really outlives the machine, `remark` why or for how long.
    """

    work: Path
    scratch: Path
    keep: Path
    inputs: Path | None
    earlier: tuple[Path, ...] = ()
    lasting: bool = True
    remark: str = ""

    def is_attached(self, place: Path) -> bool:
        """Whether a place lies in the inputs: anybody may have made what is there."""
        return self.inputs is not None and place.is_relative_to(self.inputs)


def folders(platform: Platform | None = None) -> Folders:
    """The folders of a platform, or of this one; `NBUTILS_HOME` moves the one in which runs are kept.

    Example:
        runs = platforms.folders().keep
    """
    platform = platform or detect()
    home = _chosen_home(platform)
    if platform.name == "local":
        work = CHECKOUT or Path.cwd()
        keep = home or work / "runs"
        return Folders(work, keep / ".scratch", keep, inputs=None, remark=tr("a folder of this computer"))
    root = fs_root()
    entry = platform.entry
    work = root / entry.work[1:]
    places = {root / place[1:] / "runs": tr(remark) for place, remark in entry.keep.items()}
    known = [place for place in places if os.path.isdir(place.parent)]
    lasting = {place: places[place] for place in known if not cannot_write(place.parent)}
    if platform.name == "colab" and drive_mounted():
        lasting = {root / RUNS: tr("it is on your Drive")}
    if home:
        lasting = {home: tr("NBUTILS_HOME names it")}
    keep = next(iter(lasting), work / "runs")
    others = [place for place in (*known, work / "runs") if place != keep]
    return Folders(
        work,
        scratch=root / entry.scratch[1:],
        keep=keep,
        inputs=root / entry.inputs[1:] if entry.inputs else None,
        earlier=tuple(dict.fromkeys(others)),
        lasting=bool(lasting),
        remark=lasting.get(keep) or tr("nothing that lasts can be written here"),
    )


def _chosen_home(platform: Platform) -> Path | None:
    """The folder in NBUTILS_HOME; not one on Drive that is not mounted: made there, it would keep Drive from it."""
    folder = os.environ.get("NBUTILS_HOME")
    if not folder:
        return None
    home = Path(folder).expanduser().absolute()
    on_drive = platform.name == "colab" and home.is_relative_to(fs_root() / MOUNT_POINT)
    return None if on_drive and not drive_mounted() else home


def cannot_write(folder: Path) -> str:
    """Why no file can be made in a folder (full, out of inodes, read-only, not there); empty if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            return ""
    except OSError as problem:
        return problem.strerror or type(problem).__name__


def use_model_cache(platform: Platform, places: Folders) -> str:
    """Move the download cache off a small system disk, before huggingface_hub is imported; says what was done."""
    if os.path.expanduser("~") == "~":  # neither HOME nor an account: libraries would write to a folder of that name
        raise CourseError(
            "This user has no home folder; HOME is not set.",
            todo="Set HOME, as in `export HOME=/tmp/me`, then run this again.",
        )
    in_use = [os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")]
    if not platform.entry.cache or any(in_use) or any(Path.home().glob(".cache/huggingface/hub/models--*")):
        return ""
    cache_folder = getattr(places, platform.entry.cache) / "huggingface"
    os.environ["HF_HUB_CACHE"] = str(cache_folder)
    return tr("downloaded models go to {folder}", folder=cache_folder)


def find_inputs(inputs: Path | None, marker: str) -> list[Path]:
    """Every path below `inputs` whose end matches the glob `marker` ("checkpoints/checkpoint-*.json"), in order."""
    return sorted(inputs.rglob(marker)) if inputs else []


def find_input(inputs: Path | None, name: str) -> Path | None:
    """The file or folder a learner names by the end of its path ("train.jsonl", "owner/slug/train.jsonl")."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        return None
    paths = find_inputs(inputs, glob.escape("/".join(parts)))
    if len(paths) > 1:
        places = ", ".join(map(str, paths))
        raise CourseError(
            "{name!r} was found several times: {places}.",
            todo="Write more of the path in front of it, or the whole path.",
            name=name,
            places=places,
        )
    return paths[0] if paths else None


def is_mount(path: Path) -> bool:
    """Whether something is mounted at exactly this path, even if it no longer answers."""
    if os.path.ismount(path):
        return True
    with suppress(FileNotFoundError), open(fs_root() / "proc/mounts", errors="surrogateescape") as mounts:
        return any(line.split()[1] == str(path) for line in mounts)
    return False


def mount_point_of(path: Path) -> Path | None:
    """The mount a path lies on; None if that is the root disk. `is_mount` tells later whether it is still there."""
    path = path.absolute()
    below_root = [place for place in (path, *path.parents) if fs_root() in place.parents]
    return next(filter(is_mount, below_root), None)


def drive_mounted() -> bool:
    """Whether Drive is really there: an empty folder of that name is not Drive, nor is a connection that died."""
    place = fs_root() / MOUNT_POINT
    return os.path.exists(place) and is_mount(place)


def mount_drive() -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    state = os.environ.get(STATE, "")
    problem = ""
    if not drive_mounted():
        problem = f"{STATE}={state}" if state in ("off", "failed") else _ask_for_drive()
    if not problem:
        os.environ.pop(STATE, None)
        return tr("Drive is mounted: runs are kept in {folder}.", folder=fs_root() / RUNS)
    os.environ[STATE] = state or "failed"
    return tr(
        "Drive is not mounted ({problem}): runs stay on this machine's disk and are deleted with it. To mount it, run "
        "this in an open Colab page: {code}",
        problem=problem,
        code=MANUALLY,
    )


def _ask_for_drive() -> str:
    """Have Colab mount Drive, which asks the learner; why it did not, or nothing."""
    problem = tr("nothing is mounted at /content/drive")
    try:
        from google.colab import drive

        drive.mount(str(fs_root() / MOUNT_POINT))  # it gives up after 120 s
    except Exception as failed:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        problem = describe(failed)
    return "" if drive_mounted() else problem
