"""The doctor's report: what this machine is, what it allows, what works, and what to do about the rest.

It repairs nothing, mounts nothing, reads no secret, and never crashes over what it finds.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from nbutils import disk, hardware, install, platforms, record
from nbutils.errors import CourseError
from nbutils.hardware import GPU
from nbutils.platforms import Folders, Platform, network

HUB_SECONDS = 4.0
LITTLE_GIB, LITTLE_MEMORY_GIB, LITTLE_HOURS = 5.0, 4.0, 1.0
ROOMS = ("work", "scratch", "keep")


@dataclass(frozen=True)
class Check:
    """One thing looked at; `todo` is empty when it is OK."""

    name: str
    status: str  # OK, WARN or FAIL
    seen: str
    todo: str = ""

    def __str__(self) -> str:
        text = f"[{self.status:^4}] {self.name:11} {self.seen}" + (f". To do: {self.todo}" if self.todo else "")
        return textwrap.fill(text, 110, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False)


def check(name: str, seen: str, todo: str = "", status: str = "WARN") -> Check:
    """A check that is OK unless there is something to do."""
    return Check(name, status if todo else "OK", seen, todo)


@dataclass(frozen=True)
class Report:
    """Everything the doctor saw."""

    platform: Platform
    folders: Folders
    room: dict[str, dict[str, float | None]]  # of each folder: free_gib, free_inodes
    limits: dict[str, float | None]
    gpu: GPU | None
    checks: tuple[Check, ...]
    versions: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether anything must be fixed before training."""
        return any(check.status == "FAIL" for check in self.checks)

    def text(self) -> str:
        """The report for people."""
        statuses = [check.status for check in self.checks]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("OK", "WARN", "FAIL"))
        verdict = "Fix what says FAIL before you train." if self.failed else "This machine can be used."
        return "\n".join([*map(str, self.checks), "", f"{counts}. {verdict}"])

    def require(self) -> None:
        """Print what needs attention; stop if anything must be fixed first."""
        problems = [one for one in self.checks if one.status != "OK"]
        print(*problems, f"{len(self.checks) - len(problems)} of {len(self.checks)} checks are OK.", sep="\n")
        if self.failed:
            raise CourseError("doctor.failed", names=", ".join(one.name for one in problems if one.status == "FAIL"))

    def facts(self) -> dict[str, Any]:
        """What goes into the facts.json of a lesson."""
        return {
            "device_works": not any(one.name in ("torch", "GPU") and one.status == "FAIL" for one in self.checks),
            "precision": hardware.precision(self.gpu).value,
            "free_gib": round(self.room["keep"]["free_gib"] or 0, 1),
            "keep_lasts": self.folders.lasting,
            "limits": self.limits,
            "warnings": "; ".join(one.name for one in self.checks if one.status != "OK") or "none",
        }

    def as_dict(self) -> dict[str, Any]:
        """The report for programs."""
        places = {name: getattr(self.folders, name) for name in (*ROOMS, "inputs")}
        seen = asdict(self)
        folders = {name: str(place) if place else None for name, place in places.items()}
        return seen | {"card": seen.pop("gpu"), "folders": folders}  # the key of earlier versions


def examine() -> Report:
    """Look at everything; takes a few seconds, most of them for torch and for the network."""
    platform = platforms.detect()
    folders = platforms.folders(platform)
    room = {
        name: {"free_gib": round(disk.free_gib(place), 2), "free_inodes": disk.free_inodes(place)}
        for name, place in ((name, getattr(folders, name)) for name in ROOMS)
    }
    checks = tuple(one for look in CHECKS for one in _safely(look, platform, folders))
    try:
        gpu = hardware.gpu()
    except Exception:  # no torch, or a driver that fails: its check says so
        gpu = None
    versions = {"python": sys.version.split()[0]} | record.versions()
    return Report(platform, folders, room, _limits(platform), gpu, checks, versions)


def _safely(look: Callable[[Platform, Folders], Iterator[Check]], *machine: Any) -> list[Check]:
    try:
        return list(look(*machine))
    except Exception as problem:  # a report with one gap is worth more than none
        seen = f"could not be looked at ({type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]})"
        return [check(look.__name__.removeprefix("check_"), seen, "continue; if a lesson stops, report this line")]


def _limits(platform: Platform) -> dict[str, float | None]:
    """The limits as numbers; 0 hours where nobody counts them."""
    hours = platforms.time_limit_hours(platform)
    left = round(hours - platforms.session_seconds(platform) / 3600, 2) if hours else None
    cpus, memory = round(platforms.processors().value, 2), round(platforms.memory_gib().value, 2)
    return {"hours": hours, "hours_left": left, "processors": cpus, "memory_gib": memory}


def check_platform(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Where this is, what it allows and for how long."""
    limits, memory = _limits(platform), platforms.memory_gib()
    yield check("platform", f"{platform.name}{', a batch run' if platform.batch else ''} ({platform.evidence})")
    yield check("processors", f"{limits['processors']:g} (read from {platforms.processors().source})")
    todo = "prepare data here; to train, start a machine with a GPU and at least 8 GiB of memory"
    seen = f"{memory.value:.1f} GiB (read from {memory.source})"
    yield check("memory", seen, todo if memory.value < LITTLE_MEMORY_GIB else "")
    if (left := limits["hours_left"]) is None:
        yield check("time", "no time limit")
    else:
        todo = "start a new machine before a long training; a run that began here is continued there"
        seen = f"about {max(left, 0):.1f} of {limits['hours']:g} hours are left"
        yield check("time", seen, todo if left < LITTLE_HOURS else "")


def check_folders(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Whether files can be made in each, how much room is left, and whether runs outlive this machine."""
    for name in ROOMS:
        folder = getattr(folders, name)
        free, files = disk.free_gib(folder), disk.free_inodes(folder)
        if why := platforms.cannot_write(disk.nearest(folder)):
            todo = "make it writable, restart the machine, or set NBUTILS_HOME to a folder you may write to"
            yield check(name, f"{folder} cannot be written ({why})", todo, "WARN" if name == "work" else "FAIL")
        elif files is not None and files < disk.FEWEST_FILES:
            yield check(name, f"{folder}, room for {files} files", "delete folders with many small files there")
        else:
            todo = "delete what you no longer need there: a merged model may need more than this"
            yield check(name, f"{folder}, {free:.1f} GiB free", todo if free < LITTLE_GIB else "")
    if platform.name == "kaggle" and not platform.batch:
        todo = "choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings"
        yield check("keep lasts", "only if you save a version: this is an interactive session", todo)
    else:
        yield check("keep lasts", folders.remark, "" if folders.lasting else platform.entry.keep_todo)


def check_torch(platform: Platform, folders: Folders) -> Iterator[Check]:
    """torch, the GPU, a real operation on it, and the number format training will use."""
    try:
        import torch
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        seen = f"torch cannot be imported ({type(problem).__name__}: {problem})"
        yield check("torch", seen, "start any lesson, its first cells install it; or reinstall it", "FAIL")
        return
    yield check("torch", torch.__version__)
    gpu = hardware.gpu()
    done = hardware.working_operation(gpu)
    if not done.value:
        yield check("GPU", done.reason, hardware.cure(gpu, done.reason), "FAIL")
    elif gpu is None and (listed := hardware.driver_gpus()):
        seen = f"the driver lists {listed[0]}, but torch {torch.__version__} cannot use it"
        yield check("GPU", seen, "install a torch build for CUDA, or a newer driver if it is one already")
    elif gpu is None:
        todo = "" if platform.name == "local" else platform.entry.gpu_todo
        yield check("GPU", "none: lessons run on the CPU, which is enough for the bundled tiny model", todo)
    else:
        yield check("GPU", done.reason)
    choice = hardware.precision(gpu)
    yield check("precision", f"{choice.value}: {choice.reason}")


def check_packages(platform: Platform, folders: Folders) -> Iterator[Check]:
    """What the lessons need, and what conflicts with it."""
    blockers = [f"{name}{versions}" for name, versions in install.BLOCKERS.items()]
    blocking = [one for one in blockers if not install.unsatisfied([one])]
    missing = install.unsatisfied(install.requirements("train"))
    seen = f"missing: {', '.join(missing) or 'none'}; conflicting: {', '.join(blocking) or 'none'}"
    todo = "start any lesson: its first cells fix this and leave torch as it is"
    yield check("packages", seen, todo if missing or blocking else "")


def check_hub(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Whether models can be downloaded: the hub, in China also its mirrors, or whatever HF_ENDPOINT names."""
    if network.offline():
        yield check("model hub", "not asked: HF_HUB_OFFLINE is set, so only models on this machine are used")
        return
    known = network.SOURCES.values() if platform.entry.china else [network.HUB]
    own = os.environ.get("HF_ENDPOINT")
    urls = {urlsplit(url).hostname or "HF_ENDPOINT": url for url in ([own] if own else known)}  # hosts: no password
    times = network.measure(urls, HUB_SECONDS)
    seen = ", ".join(f"{host} {f'{times[host]:.1f} s' if host in times else 'does not answer'}" for host in urls)
    yield check("model hub", seen, "" if times else platform.entry.hub_todo)


CHECKS = (check_platform, check_folders, check_torch, check_packages, check_hub)
