"""The doctor's report on this machine: it repairs and mounts nothing, reads no secret, never crashes over a finding."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from nbutils import disk, hardware, install, platforms, record
from nbutils.errors import CourseError
from nbutils.platforms import Folders, Platform, network

ROOMS = ("work", "scratch", "keep")


@dataclass
class Check:
    """One thing looked at: OK if there is nothing to do, else WARN or FAIL."""

    name: str
    seen: str
    todo: str = ""
    status: str = "WARN"

    def __post_init__(self) -> None:
        self.status = self.status if self.todo else "OK"

    def __str__(self) -> str:
        text = f"[{self.status:^4}] {self.name:11} {self.seen}" + (f". To do: {self.todo}" if self.todo else "")
        return textwrap.fill(text, 110, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False)


@dataclass
class Report:
    """Everything the doctor saw: the checks, and the same as values for programs."""

    checks: list[Check]
    values: dict[str, Any]

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
        problems = [check for check in self.checks if check.todo]
        print(*problems, f"{len(self.checks) - len(problems)} of {len(self.checks)} checks are OK.", sep="\n")
        if self.failed:
            raise CourseError("doctor.failed", names=", ".join(one.name for one in problems if one.status == "FAIL"))

    def facts(self) -> dict[str, Any]:
        """What goes into the facts.json of a lesson."""
        kept = {name: self.values[name] for name in ("precision", "keep_lasts", "limits")}
        return kept | {
            "device_works": not any(one.name in ("torch", "GPU") and one.status == "FAIL" for one in self.checks),
            "free_gib": round(self.values["room"]["keep"]["free_gib"], 1),
            "warnings": "; ".join(check.name for check in self.checks if check.todo) or "none",
        }

    def as_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return {"checks": list(map(asdict, self.checks)), **self.values}


def examine() -> Report:
    """Look at everything; takes a few seconds, most of them for torch and for the network."""
    platform = platforms.detect()
    folders, hours, checks = platforms.folders(platform), platform.entry.hours, list[Check]()
    for look in CHECKS:
        try:
            checks += look(platform, folders)
        except Exception as problem:  # a report with one gap is worth more than none
            seen = f"could not be looked at ({type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]})"
            checks.append(Check(look.__name__[len("check_") :], seen, "continue; if a lesson stops, report this line"))
    try:
        gpu = hardware.gpu()
    except Exception:  # no torch, or a driver that fails: its check says so
        gpu = None
    rooms = {name: getattr(folders, name) for name in ROOMS}
    room = {name: (round(disk.free_gib(place), 2), disk.free_inodes(place)) for name, place in rooms.items()}
    left = round(hours - platforms.session_seconds(platform) / 3600, 2) if hours else None
    cpus, memory = round(platforms.processors().value, 2), round(platforms.memory_gib().value, 2)
    values = {
        "platform": asdict(platform), "card": asdict(gpu) if gpu else None, "keep_lasts": folders.lasting,
        "precision": hardware.precision(gpu).value, "versions": {"python": sys.version.split()[0]} | record.versions(),
        "folders": {name: str(one) if one else None for name, one in (rooms | {"inputs": folders.inputs}).items()},
        "room": {name: dict(zip(("free_gib", "free_inodes"), free, strict=True)) for name, free in room.items()},
        "limits": {"hours": hours, "hours_left": left, "processors": cpus, "memory_gib": memory},
    }  # fmt: skip
    return Report(checks, values)


def check_machine(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Where this is and what it allows for how long; room in the folders, and whether runs outlive this machine."""
    yield Check("platform", f"{platform.name}{', a batch run' if platform.batch else ''} ({platform.evidence})")
    cpus, memory, hours = platforms.processors(), platforms.memory_gib(), platform.entry.hours
    yield Check("processors", f"{round(cpus.value, 2):g} (read from {cpus.source})")
    todo = "prepare data here; to train, start a machine with a GPU and at least 8 GiB of memory"
    seen = f"{memory.value:.1f} GiB (read from {memory.source})"
    yield Check("memory", seen, todo if memory.value < 4 else "")
    left = max(0.0, hours - platforms.session_seconds(platform) / 3600)
    todo = "start a new machine before a long training; a run that began here is continued there"
    seen = f"about {left:.1f} of {hours:g} hours are left" if hours else "no time limit"
    yield Check("time", seen, todo if hours and left < 1 else "")
    for name in ROOMS:
        folder = getattr(folders, name)
        free, files = disk.free_gib(folder), disk.free_inodes(folder)
        if why := platforms.cannot_write(disk.nearest(folder)):
            todo = "make it writable, restart the machine, or set NBUTILS_HOME to a folder you may write to"
            yield Check(name, f"{folder} cannot be written ({why})", todo, "WARN" if name == "work" else "FAIL")
        elif files is not None and files < disk.FEWEST_FILES:
            yield Check(name, f"{folder}, room for {files} files", "delete folders with many small files there")
        else:
            todo = "delete what you no longer need there: a merged model may need more than this"
            yield Check(name, f"{folder}, {free:.1f} GiB free", todo if free < 5 else "")
    if platform.name == "kaggle" and not platform.batch:
        todo = "choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings"
        yield Check("keep lasts", "only if you save a version: this is an interactive session", todo)
    else:
        yield Check("keep lasts", folders.remark, "" if folders.lasting else platform.entry.keep_todo)


def check_torch(platform: Platform, folders: Folders) -> Iterator[Check]:
    """torch, the GPU, a real operation on it, and the number format training will use."""
    try:
        import torch
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        seen = f"torch cannot be imported ({type(problem).__name__}: {problem})"
        yield Check("torch", seen, "start any lesson, its first cells install it; or reinstall it", "FAIL")
        return
    yield Check("torch", torch.__version__)
    gpu = hardware.gpu()
    done = hardware.working_operation(gpu)
    if not done.value:
        yield Check("GPU", done.reason, hardware.cure(gpu, done.reason), "FAIL")
    elif gpu is None and (listed := hardware.driver_gpus()):
        seen = f"the driver lists {listed[0]}, but torch {torch.__version__} cannot use it"
        yield Check("GPU", seen, "install a torch build for CUDA, or a newer driver if it is one already")
    elif gpu is None:
        todo = "" if platform.name == "local" else platform.entry.gpu_todo
        yield Check("GPU", "none: lessons run on the CPU, which is enough for the profiles tiny and laptop", todo)
    else:
        yield Check("GPU", done.reason)
    yield Check("precision", "{0.value}: {0.reason}".format(hardware.precision(gpu)))


def check_packages(platform: Platform, folders: Folders) -> Iterator[Check]:
    """What the lessons need, and what conflicts with it."""
    blockers = [f"{name}{versions}" for name, versions in install.BLOCKERS.items()]
    blocking = [one for one in blockers if not install.unsatisfied([one])]
    missing = install.unsatisfied(install.requirements("train"))
    seen = f"missing: {', '.join(missing) or 'none'}; conflicting: {', '.join(blocking) or 'none'}"
    todo = "start any lesson: its first cells fix this and leave torch as it is"
    yield Check("packages", seen, todo if missing or blocking else "")


def check_hub(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Whether models can be downloaded: the hub, in China also its mirrors, or whatever HF_ENDPOINT names."""
    if network.offline():
        yield Check("model hub", "not asked: HF_HUB_OFFLINE is set, so only models on this machine are used")
        return
    known = network.SOURCES.values() if platform.entry.china else [network.HUB]
    own = os.environ.get("HF_ENDPOINT")
    urls = {urlsplit(url).hostname or "HF_ENDPOINT": url for url in ([own] if own else known)}  # hosts: no password
    times = network.measure(urls, network.SECONDS)
    seen = ", ".join(f"{host} {f'{times[host]:.1f} s' if host in times else 'does not answer'}" for host in urls)
    yield Check("model hub", seen, "" if times else platform.entry.hub_todo)


CHECKS = (check_machine, check_torch, check_packages, check_hub)
