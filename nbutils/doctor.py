"""The doctor's report: what this machine is, what it allows, what works, and what to do about the rest.

It repairs nothing, mounts nothing, reads no secret, and never crashes over what it finds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nbutils import disk, hardware, install, platforms, record
from nbutils.hardware import Card
from nbutils.platforms import Folders, Platform, drive, network, secrets

HUB_SECONDS = 4.0
MANY_FILES = 1_000_000  # more than this is as good as no limit
LITTLE_GIB, LITTLE_MEMORY_GIB, LITTLE_HOURS = 5.0, 4.0, 1.0
WIDTH = 110


@dataclass(frozen=True)
class Check:
    """One thing looked at; `todo` is empty when it is OK."""

    name: str
    status: str  # OK, WARN or FAIL
    seen: str
    todo: str = ""

    @property
    def mark(self) -> str:
        """The status as the report shows it."""
        return "[ OK ]" if self.status == "OK" else f"[{self.status}]"

    def __str__(self) -> str:
        indent = " " * 19
        wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        wrap.initial_indent = f"{self.mark} {self.name:11} "
        lines = wrap.wrap(self.seen)
        wrap.initial_indent, wrap.subsequent_indent = f"{indent}To do: ", f"{indent}       "
        return "\n".join(lines + wrap.wrap(self.todo))


@dataclass(frozen=True)
class Machine:
    """What the checks look at; `torch` is the check of torch itself, `trouble` a GPU that cannot even be asked."""

    platform: Platform
    folders: Folders
    torch: Check
    card: Card | None
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """Everything the doctor saw."""

    platform: Platform
    folders: Folders
    room: dict[str, dict[str, float | None]]  # of each folder: free_gib, free_inodes
    limits: dict[str, float | None]
    card: Card | None
    checks: tuple[Check, ...]
    versions: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether anything must be repaired before training."""
        return any(check.status == "FAIL" for check in self.checks)

    def text(self) -> str:
        """The report for people."""
        statuses = [check.status for check in self.checks]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("OK", "WARN", "FAIL"))
        verdict = "Repair what says FAIL before you train." if self.failed else "This machine can be used."
        return "\n".join([*map(str, self.checks), "", f"{counts}. {verdict}"])

    def rows(self) -> list[dict[str, str]]:
        """The checks for a table."""
        return [{"": one.mark, "what": one.name, "seen": one.seen, "to do": one.todo} for one in self.checks]

    def as_dict(self) -> dict[str, Any]:
        """The report for programs."""
        places = {name: getattr(self.folders, name) for name in ("work", "scratch", "keep", "inputs")}
        return {
            "platform": asdict(self.platform),
            "folders": {name: str(place) if place else None for name, place in places.items()},
            "room": self.room,
            "limits": self.limits,
            "card": asdict(self.card) if self.card else None,
            "checks": [asdict(check) for check in self.checks],
            "versions": self.versions,
        }


def examine() -> Report:
    """Look at everything; takes a few seconds, most of them for torch and for the network."""
    platform = platforms.detect()
    folders, torch = platforms.folders(platform), check_torch()
    try:
        machine = Machine(platform, folders, torch, hardware.card() if torch.status == "OK" else None)
    except Exception as problem:  # a driver may fail in any way; the report says which
        machine = Machine(platform, folders, torch, None, _first_line(problem))
    room = {
        name: {"free_gib": round(disk.free_gib(place), 2), "free_inodes": disk.free_inodes(place)}
        for name, place in (("work", folders.work), ("scratch", folders.scratch), ("keep", folders.keep))
    }
    checks = tuple(one for name, look in CHECKS.items() for one in _safely(name, look, machine))
    versions = {"python": sys.version.split()[0]} | record.versions()
    return Report(platform, folders, room, _limits(platform), machine.card, checks, versions)


def _safely(name: str, look: Callable[[Machine], Iterator[Check]], machine: Machine) -> list[Check]:
    try:
        return list(look(machine))
    except Exception as problem:  # a report with one gap is worth more than none
        seen = f"could not be looked at ({_first_line(problem)})"
        return [Check(name, "WARN", seen, "go on; if a lesson stops, show this line to whoever helps you")]


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"


def _limits(platform: Platform) -> dict[str, float | None]:
    """The limits as numbers; 0 hours where nobody counts them."""
    hours = platforms.time_limit_hours(platform)
    left = round(hours - platforms.session_seconds(platform) / 3600, 2) if hours else None
    cpus, memory = round(platforms.processors().value, 2), round(platforms.memory_gib().value, 2)
    return {"hours": hours, "hours_left": left, "processors": cpus, "memory_gib": memory}


def check_torch() -> Check:
    """torch as it is installed; importing it is the test."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "FAIL", "torch is not installed", "start any lesson: its first cells install it")
    try:
        import torch

        return Check("torch", "OK", str(torch.__version__))
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        return Check("torch", "FAIL", f"torch cannot be imported ({_first_line(problem)})", "reinstall torch")


def check_machine(machine: Machine) -> Iterator[Check]:
    """Where this is, what it allows and for how long."""
    found, limits, memory = machine.platform, _limits(machine.platform), platforms.memory_gib()
    yield Check("platform", "OK", f"{found.name}{', a batch run' if found.batch else ''} ({found.evidence})")
    yield Check("python", "OK", f"{sys.version.split()[0]} at {sys.executable}")
    yield Check("processors", "OK", f"{limits['processors']:g} (read from {platforms.processors().source})")
    seen = f"{memory.value:.1f} GiB (read from {memory.source})"
    if memory.value < LITTLE_MEMORY_GIB:
        mode = ": AutoDL's mode without a GPU (无卡模式)" if found.name == "autodl" and machine.card is None else ""
        todo = "enough to prepare data; to train, start a machine with at least 8 GiB"
        yield Check("memory", "WARN", f"{seen}{mode}; a process that takes more is killed", todo)
    else:
        yield Check("memory", "OK", seen)
    left = limits["hours_left"]
    if left is None:
        yield Check("time", "OK", "no fixed end: this machine stays until somebody stops it")
    else:
        todo = "start a fresh machine before a long training; a run that began here continues"
        status = ("OK", "") if left >= LITTLE_HOURS else ("WARN", todo)
        yield Check("time", status[0], f"about {max(left, 0):.1f} of {limits['hours']:g} hours are left", status[1])


def check_folder(name: str, machine: Machine) -> Iterator[Check]:
    """One folder: whether files can be made there, and how much room is left; makes no folder."""
    folder: Path = getattr(machine.folders, name)
    if why := platforms.cannot_write(disk.nearest(folder)):
        todo = "make it writable, restart the machine, or set NBUTILS_HOME to a folder you may write to"
        yield Check(name, "WARN" if name == "work" else "FAIL", f"{folder} cannot be written ({why})", todo)
        return
    free, files = disk.free_gib(folder), disk.free_inodes(folder)
    counted = "" if files is None or files > MANY_FILES else f", room for {files:,} files"
    todo = "delete what you no longer need there: a merged model alone may need more" if free < LITTLE_GIB else ""
    if files is not None and files < disk.FEWEST_FILES:
        todo = "delete folders with many small files there: soon no file can be made"
    yield Check(name, "WARN" if todo else "OK", f"{folder}, {free:.1f} GiB free{counted}", todo)


def check_lasting(machine: Machine) -> Iterator[Check]:
    """Whether runs outlive this machine, and what the platform attached."""
    platform, folders = machine.platform, machine.folders
    remark = f" ({folders.remark})" if folders.remark else ""
    if not folders.lasting:
        seen = f"no: {folders.keep} vanishes with this machine{remark}"
        yield Check("keep lasts", "WARN", seen, platform.entry.keep_todo)
    elif platform.name == "kaggle" and not platform.batch:
        todo = "choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings"
        yield Check("keep lasts", "WARN", "only when a version is saved: this is an interactive session", todo)
    else:
        yield Check("keep lasts", "OK", f"yes{remark}")
    if inputs := folders.inputs:
        attached = sorted(place.name for place in inputs.iterdir()) if inputs.is_dir() else []
        yield Check("inputs", "OK", f"{inputs}: {', '.join(attached[:8]) or 'nothing is attached'}")
    if platform.name == "colab" and drive.is_mounted():
        yield Check("drive", "OK", "Google Drive is mounted")
    elif platform.name == "colab":
        yield Check("drive", "WARN", "Google Drive is not mounted", "run the first cells of a lesson and allow access")


def check_gpu(machine: Machine) -> Iterator[Check]:
    """torch, the GPU, a real operation on it, and the number format training will use."""
    card, entry = machine.card, machine.platform.entry
    yield machine.torch
    if machine.torch.status != "OK":
        return
    if machine.trouble:
        yield Check("card", "FAIL", f"torch cannot ask the GPU ({machine.trouble})", "restart the machine")
    elif card is not None:
        done = hardware.working_operation(card)
        todo = "" if done.value else hardware.cure(card, done.reason)
        yield Check("card", "OK" if done.value else "FAIL", done.reason, todo)
    elif listed := hardware.driver_gpus():
        seen = f"the driver lists {listed[0]}, but torch {machine.torch.seen} cannot use it"
        yield Check("card", "WARN", seen, "install a torch build for CUDA, or a newer driver if it is one already")
    elif machine.platform.name == "local":
        yield Check("card", "OK", "none: lessons run on the CPU, which is enough for the bundled tiny model")
    else:
        yield Check("card", "WARN", "none: training here uses the CPU, enough for the tiny model only", entry.gpu_todo)
    choice = hardware.precision(card)
    yield Check("precision", "OK", f"{choice.value}: {choice.reason}")


def check_packages(machine: Machine) -> Iterator[Check]:
    """What the lessons import, and what stands in their way."""
    needed = install.requirements("train")
    blockers = [f"{name}{versions}" for name, versions in install.BLOCKERS.items()]
    blocking, missing = [one for one in blockers if not install.unsatisfied([one])], install.unsatisfied(needed)
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"in the way: {', '.join(blocking)}"] if blocking else []
    todo = "start any lesson: its first cells put this right and leave torch as it is" if problems else ""
    seen = f"all {len(needed)} the lessons import" if needed else "a checkout, not installed"
    yield Check("packages", "WARN" if problems else "OK", "; ".join(problems) or seen, todo)


def check_hub(machine: Machine) -> Iterator[Check]:
    """Whether models can be downloaded: the hub, in China also its mirrors, or whatever HF_ENDPOINT names."""
    if network.offline():
        yield Check("model hub", "OK", "not asked: HF_HUB_OFFLINE is set, so only models on this machine are used")
        return
    if (mirror := os.environ.get("NBUTILS_MIRROR", "")) not in ("", *network.SOURCES):
        todo = f"set it to {', '.join(network.SOURCES)}, or unset it"
        yield Check("model hub", "FAIL", f"NBUTILS_MIRROR is {mirror!r}", todo)
        return
    known = network.SOURCES.values() if machine.platform.entry.china else [network.HUB]
    own = os.environ.get("HF_ENDPOINT")
    urls = {urlsplit(url).hostname or "HF_ENDPOINT": url for url in ([own] if own else known)}  # hosts: no password
    times = network.measure(urls, HUB_SECONDS)
    seen = ", ".join(
        f"{host} answers in {times[host]:.1f} s" if host in times else f"{host} is silent" for host in urls
    )
    if times:
        yield Check("model hub", "OK", seen)
    else:
        offline = f"{seen}: only models on this machine can be used"
        yield Check("model hub", "WARN", offline, machine.platform.entry.hub_todo)


def check_secrets(machine: Machine) -> Iterator[Check]:
    """Which secrets the environment has; their values stay where they are."""
    names = ("HF_TOKEN", "WANDB_API_KEY")
    seen = ", ".join(f"{name} is {'set' if os.environ.get(name) else 'not set'}" for name in names)
    store = machine.platform.name in secrets.STORES
    more = f" (lessons also read {machine.platform.name}'s own secrets)" if store else ""
    yield Check("secrets", "OK", f"in the environment: {seen}{more}")


CHECKS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "platform": check_machine,
    **{name: partial(check_folder, name) for name in ("work", "scratch", "keep")},
    "keep lasts": check_lasting,
    "card": check_gpu,
    "packages": check_packages,
    "model hub": check_hub,
    "secrets": check_secrets,
}
