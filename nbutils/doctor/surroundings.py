"""The machine around the lessons: platform, Python, limits, folders, network, secrets by name.

Not here: torch, the card and the packages (computing).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from nbutils import disk, platforms
from nbutils.doctor.report import Check, Machine
from nbutils.platforms import Platform, network
from nbutils.platforms.drive import is_mounted
from nbutils.platforms.secrets import SOURCES

HUB_SECONDS = 4.0
OLDEST_PYTHON = (3, 10)
MANY_FILES = 1_000_000  # more than this is as good as no limit
LITTLE_GIB, LITTLE_MEMORY_GIB, LITTLE_HOURS = 5.0, 4.0, 1.0
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
HUB_TODO = {
    "kaggle": "Settings > Internet > On; it asks for a verified phone number once",
    "autodl": "start a lesson: it switches on AutoDL's own proxy; or set HF_ENDPOINT to a mirror of yours",
}
KEEP_IT = {
    "colab": "mount Drive, or download what you want to keep",
    "colab_enterprise": "mount a bucket and set NBUTILS_HOME to a folder in it",
    "gpushare": "/hy-tmp is wiped 24 hours after a stop: copy what you want to keep to your net disk before",
    "hf_spaces": "add persistent storage in the Space's settings, or download what you want to keep",
    "modal": "mount a Volume and set NBUTILS_HOME to a folder in it",
}


def limits(platform: Platform) -> dict[str, float | None]:
    """The limits as numbers; 0 hours where nobody counts them."""
    hours = platforms.time_limit_hours(platform)
    left = round(hours - platforms.session_seconds(platform) / 3600, 2) if hours else None
    return {
        "hours": hours, "hours_left": left, "processors": round(platforms.processors().value, 2),
        "memory_gib": round(platforms.memory_gib().value, 2),
    }  # fmt: skip


def room(folders: platforms.Folders) -> dict[str, dict[str, float | None]]:
    """Free space and free files of each folder; None where the disk does not count files."""
    places = {"work": folders.work, "scratch": folders.scratch, "keep": folders.keep}
    return {
        name: {"free_gib": round(disk.free_gib(place), 2), "free_inodes": disk.free_inodes(place)}
        for name, place in places.items()
    }


def check_platform(machine: Machine) -> Check:
    """Where this is, and on what evidence."""
    found = machine.platform
    return Check("platform", "OK", f"{found.name}{', a batch run' if found.batch else ''} ({found.evidence})")


def check_python(machine: Machine) -> Check:
    """A Python that the course runs on."""
    seen = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= OLDEST_PYTHON:
        return Check("python", "OK", seen)
    return Check("python", "FAIL", seen, "use Python 3.10 or newer")


def check_processors(machine: Machine) -> Check:
    """The processors this process may use."""
    found = platforms.processors()
    return Check("processors", "OK", f"{found.value:g} (read from {found.source})")


def check_memory(machine: Machine) -> Check:
    """The memory this process may use."""
    found = platforms.memory_gib()
    seen = f"{found.value:.1f} GiB (read from {found.source})"
    if found.value >= LITTLE_MEMORY_GIB:
        return Check("memory", "OK", seen)
    if machine.platform.name == "autodl" and machine.card is None:
        seen += ": what AutoDL gives in its mode without a card (无卡模式)"
    todo = "enough to prepare data; to train, start a machine with at least 8 GiB"
    return Check("memory", "WARN", f"{seen}; a process that takes more is killed", todo)


def check_time(machine: Machine) -> Check:
    """How long this machine still lives."""
    hours, left = platforms.time_limit_hours(machine.platform), limits(machine.platform)["hours_left"]
    if left is None:
        return Check("time", "OK", "no fixed end: this machine stays until somebody stops it")
    seen = f"about {max(left, 0):.1f} of {hours:g} hours are left"
    if left >= LITTLE_HOURS:
        return Check("time", "OK", seen)
    return Check("time", "WARN", seen, "start a fresh machine before a long training; a run that began here continues")


def check_folder(name: str, machine: Machine) -> Check:
    """One folder: whether files can be made there, and how much room is left; makes no folder."""
    folder: Path = getattr(machine.folders, name)
    if why := platforms.cannot_write(disk.nearest(folder)):
        movable = name == "keep" or machine.platform.name == "local"
        todo = (
            "set NBUTILS_HOME to a folder you may write to" if movable else "make it writable, or restart the machine"
        )
        return Check(name, "WARN" if name == "work" else "FAIL", f"{folder} cannot be written ({why})", todo)
    free, files = disk.free_gib(folder), disk.free_inodes(folder)
    counted = "" if files is None or files > MANY_FILES else f", room for {files:,} files"
    seen = f"{folder}, {free:.1f} GiB free{counted}"
    if free < LITTLE_GIB:
        return Check(name, "WARN", seen, "delete what you no longer need there: a merged model alone may need more")
    if files is not None and files < disk.FEWEST_FILES:
        return Check(name, "WARN", seen, "delete folders with many small files there: soon no file can be made")
    return Check(name, "OK", seen)


def check_lasting(machine: Machine) -> Check:
    """Whether runs outlive this machine."""
    name, folders = machine.platform.name, machine.folders
    remark = f" ({folders.remark})" if folders.remark else ""
    if not folders.lasting:
        todo = KEEP_IT.get(name, "download what you want to keep, or set NBUTILS_HOME to a folder that lasts")
        return Check("keep lasts", "WARN", f"no: {folders.keep} vanishes with this machine{remark}", todo)
    if name == "kaggle" and not machine.platform.batch:
        todo = "choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings"
        return Check("keep lasts", "WARN", "only when a version is saved: this is an interactive session", todo)
    return Check("keep lasts", "OK", f"yes{remark}")


def check_inputs(machine: Machine) -> Check | None:
    """What the platform attached."""
    inputs = machine.folders.inputs
    if inputs is None:
        return None
    attached = sorted(place.name for place in inputs.iterdir()) if inputs.is_dir() else []
    return Check("inputs", "OK", f"{inputs}: {', '.join(attached[:8]) if attached else 'nothing is attached'}")


def check_drive(machine: Machine) -> Check | None:
    """Google Drive on Colab; it is not mounted here."""
    if machine.platform.name != "colab":
        return None
    if is_mounted():
        return Check("drive", "OK", "Google Drive is mounted")
    return Check("drive", "WARN", "Google Drive is not mounted", "run the first cells of a lesson and allow access")


def check_hub(machine: Machine) -> Check:
    """Whether models can be downloaded: the hub, in China also its mirrors, or whatever HF_ENDPOINT names."""
    if network.offline():
        return Check("model hub", "OK", "not asked: HF_HUB_OFFLINE is set, so only models on this machine are used")
    if (wish := os.environ.get("NBUTILS_MIRROR", "")) not in ("", *network.SOURCES):
        return Check(
            "model hub", "FAIL", f"NBUTILS_MIRROR is {wish!r}", f"set it to {', '.join(network.SOURCES)}, or unset it"
        )
    known = network.SOURCES.values() if machine.platform.name in network.IN_CHINA else [network.HUB]
    own = os.environ.get("HF_ENDPOINT")
    urls = {urlsplit(url).hostname or "HF_ENDPOINT": url for url in ([own] if own else known)}  # hosts: no password
    times = network.measure(urls, HUB_SECONDS)
    told = [f"{host} answers in {times[host]:.1f} s" if host in times else f"{host} is silent" for host in urls]
    if times:
        return Check("model hub", "OK", ", ".join(told))
    todo = HUB_TODO.get(machine.platform.name, "check the network, or set HF_ENDPOINT to a mirror")
    return Check("model hub", "WARN", f"{', '.join(told)}: only models on this machine can be used", todo)


def check_secrets(machine: Machine) -> Check:
    """Which secrets the environment has; their values stay where they are."""
    seen = [f"{name} is {'set' if os.environ.get(name) else 'not set'}" for name in SECRETS]
    elsewhere = f" (lessons also ask {machine.platform.name}'s own secrets)" if machine.platform.name in SOURCES else ""
    return Check("secrets", "OK", f"in the environment: {', '.join(seen)}{elsewhere}")
