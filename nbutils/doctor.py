"""The doctor's report on this machine: it repairs and mounts nothing, reads no secret, never crashes over a finding."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from nbutils import disk, display, hardware, install, platforms, record
from nbutils.errors import CourseError
from nbutils.language import joined, tr
from nbutils.platforms import Folders, Platform, network

ROOMS = ("work", "scratch", "keep")
KEEP_LASTS, MODEL_HUB = "keep lasts", "model hub"  # names of checks


def labels() -> dict[str, str]:
    """The names of the checks for people."""
    return {
        "platform": tr("platform"), "system": tr("system"), "processors": tr("processors"), "memory": tr("memory"),
        "time": tr("time"), "work": tr("work"), "scratch": tr("scratch"), "keep": tr("keep"),
        KEEP_LASTS: tr("keep lasts"), "precision": tr("precision"), "packages": tr("packages"),
        MODEL_HUB: tr("model hub"),
    }  # fmt: skip


@dataclass
class Check:
    """One thing looked at: OK if there is nothing to do, else WARN or FAIL."""

    name: str
    seen: str
    todo: str = ""
    status: str = "WARN"

    def __post_init__(self) -> None:
        self.status = self.status if self.todo else "OK"

    @property
    def label(self) -> str:
        """Its name for people."""
        return labels().get(self.name, self.name)

    def __str__(self) -> str:
        todo = tr(". To do: {todo}", todo=self.todo) if self.todo else ""
        lines = display.wrap(f"{self.seen}{todo}", 91)
        return f"[{self.status:^4}] {display.pad(self.label, 11)} " + f"\n{' ' * 19}".join(lines)


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
        counts = joined(f"{statuses.count(status)} {status}" for status in ("OK", "WARN", "FAIL"))
        bad = tr("{counts}. Fix what says FAIL before you train.", counts=counts)
        good = tr("{counts}. This machine can be used.", counts=counts)
        return "\n".join([*map(str, self.checks), "", bad if self.failed else good])

    def require(self) -> None:
        """Print what needs attention; stop if anything must be fixed first."""
        problems = [check for check in self.checks if check.todo]
        good, total = len(self.checks) - len(problems), len(self.checks)
        print(*problems, tr("{good} of {total} checks are OK.", good=good, total=total), sep="\n")
        if self.failed:
            raise CourseError(
                tr(
                    "Some checks of this machine failed: {names}.",
                    names=joined(one.label for one in problems if one.status == "FAIL"),
                ),
                todo=tr("Follow the FAIL lines above, then run the cell again."),
            )

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
            told = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            seen = tr("could not be looked at ({problem})", problem=told)
            todo = tr("continue; if a lesson stops, report this line")
            checks.append(Check(look.__name__[len("check_") :], seen, todo))
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
        "precision": hardware.dtype(gpu).value, "versions": {"python": sys.version.split()[0]} | record.versions(),
        "folders": {name: str(one) if one else None for name, one in (rooms | {"inputs": folders.inputs}).items()},
        "room": {name: dict(zip(("free_gib", "free_inodes"), free, strict=True)) for name, free in room.items()},
        "limits": {"hours": hours or None, "hours_left": left, "processors": cpus, "memory_gib": memory},
    }  # fmt: skip
    return Report(checks, values)


def check_machine(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Where this is and what it allows for how long; room in the folders, and whether runs outlive this machine."""
    yield Check("platform", f"{platform.name}{tr(', a batch run') if platform.batch else ''} ({tr(platform.evidence)})")
    if sys.platform == "win32":
        seen = tr("Windows: doctor, plan and data check run here, the lessons run in WSL2")
        todo = tr("1. in PowerShell as administrator: wsl --install, then restart; 2. in Ubuntu: sudo apt install git "
                  "make gcc python3-venv; 3. git clone ADDRESS, cd into it, make course")  # fmt: skip
        yield Check("system", seen, todo)
    cpus, memory, hours = platforms.processors(), platforms.memory_gib(), platform.entry.hours
    yield Check("processors", tr("{count:g} (read from {source})", count=round(cpus.value, 2), source=cpus.source))
    todo = tr("prepare data here; to train, start a machine with a GPU and at least 8 GiB of memory")
    seen = tr("{size:.1f} GiB (read from {source})", size=memory.value, source=memory.source)
    yield Check("memory", seen, todo if memory.value < 4 else "")
    left = max(0.0, hours - platforms.session_seconds(platform) / 3600)
    todo = tr("start a new machine before a long training; a run that began here is continued there")
    seen = tr("about {left:.1f} of {hours:g} hours are left", left=left, hours=hours) if hours else tr("no time limit")
    yield Check("time", seen, todo if hours and left < 1 else "")
    for name in ROOMS:
        folder = getattr(folders, name)
        free, files = disk.free_gib(folder), disk.free_inodes(folder)
        if why := platforms.cannot_write(disk.nearest(folder)):
            todo = tr("make it writable, restart the machine, or set NBUTILS_HOME to a folder you may write to")
            seen = tr("{folder} cannot be written ({why})", folder=folder, why=why)
            yield Check(name, seen, todo, "WARN" if name == "work" else "FAIL")
        elif files is not None and files < disk.FEWEST_FILES:
            seen = tr("{folder}, room for {files} files", folder=folder, files=files)
            yield Check(name, seen, tr("delete folders with many small files there"))
        else:
            todo = tr("delete what you no longer need there: a merged model may need more than this")
            seen = tr("{folder}, {free:.1f} GiB free", folder=folder, free=free)
            yield Check(name, seen, todo if free < 5 else "")
    if platform.name == "kaggle" and not platform.batch:
        todo = tr("choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings")
        yield Check(KEEP_LASTS, tr("only if you save a version: this is an interactive session"), todo)
    else:
        yield Check(KEEP_LASTS, folders.remark, "" if folders.lasting else tr(platform.entry.keep_todo))


def check_torch(platform: Platform, folders: Folders) -> Iterator[Check]:
    """torch, the GPU, a real operation on it, and the number format training will use."""
    if version := install.old_torch():
        seen = tr("torch {version}, and the lessons need torch{wanted}", version=version, wanted=install.TORCH)
        yield Check("torch", seen, install.torch_todo(), "FAIL")
        return
    try:
        import torch
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        told = f"{type(problem).__name__}: {problem}"
        todo = tr("`python -m nbutils install`, or the first cells of any lesson; reinstall it if it is there")
        yield Check("torch", tr("torch cannot be imported ({problem})", problem=told), todo, "FAIL")
        return
    yield Check("torch", torch.__version__)
    gpu = hardware.gpu()
    done = hardware.working_operation(gpu)
    if not done.value:
        yield Check("GPU", done.reason, hardware.cure(gpu, done.reason), "FAIL")
    elif gpu is None and (listed := hardware.driver_gpus()):
        about = {"gpu": listed[0], "version": torch.__version__}
        seen = tr("the driver lists {gpu}, but torch {version} cannot use it", **about)
        yield Check("GPU", seen, tr("install a torch build for CUDA, or a newer driver if it is one already"))
    elif gpu is None and sys.platform == "darwin":
        seen = tr("Apple's (MPS), which no lesson uses: 01 to 04 run on the CPU, with the profiles tiny (a minute of "
                  "training) and laptop (LoRA without quantization, some minutes)")  # fmt: skip
        todo = tr("rent a GPU for larger models (`python -m nbutils plan`): QLoRA needs CUDA, since bitsandbytes has "
                  "slow 4-bit kernels and no 8-bit optimizers for Macs; lesson 05 needs Linux")  # fmt: skip
        yield Check("GPU", seen, todo)
    elif gpu is None:
        todo = "" if platform.name == "local" else tr(platform.entry.gpu_todo)
        yield Check("GPU", tr("none: lessons run on the CPU, which is enough for the profiles tiny and laptop"), todo)
    else:
        yield Check("GPU", done.reason)
    precision = hardware.dtype(gpu)
    yield Check("precision", joined([precision.value, precision.reason], ":"))


def check_packages(platform: Platform, folders: Folders) -> Iterator[Check]:
    """What the lessons need, and what conflicts with it."""
    blockers = [f"{name}{versions}" for name, versions in install.BLOCKERS.items()]
    blocking = [one for one in blockers if not install.unsatisfied([one])]
    missing, none = install.unsatisfied(install.requirements("train")), tr("none")
    about = {"missing": ", ".join(missing) or none, "blocking": ", ".join(blocking) or none}
    todo = tr("`python -m nbutils install`, or the first cells of any lesson: both leave torch as it is")
    seen = tr("missing: {missing}; conflicting: {blocking}", **about)
    yield Check("packages", seen, todo if missing or blocking else "")


def check_hub(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Whether models can be downloaded: the hub, in China also its mirrors, or whatever HF_ENDPOINT names."""
    if network.offline():
        yield Check(MODEL_HUB, tr("not asked: HF_HUB_OFFLINE is set, so only models on this machine are used"))
        return
    known = network.SOURCES.values() if platform.entry.china else [network.HUB]
    own = os.environ.get("HF_ENDPOINT")
    urls = {urlsplit(url).hostname or "HF_ENDPOINT": url for url in ([own] if own else known)}  # hosts: no password
    times, silent = network.measure(urls, network.SECONDS), tr("does not answer")
    seen = joined(f"{host} {f'{times[host]:.1f} s' if host in times else silent}" for host in urls)
    yield Check(MODEL_HUB, seen, "" if times else tr(platform.entry.hub_todo))


CHECKS = (check_machine, check_torch, check_packages, check_hub)
