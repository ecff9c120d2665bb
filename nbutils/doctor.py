"""The doctor's report on this machine: it repairs and mounts nothing, reads no secret, never crashes over a finding."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from nbutils import disk, display, hardware, install, platforms, record
from nbutils.errors import CourseError
from nbutils.language import joined, tr
from nbutils.masking import describe
from nbutils.platforms import Folders, Platform, network
from nbutils.record import Facts

ROOMS = ("work", "scratch", "keep")
KEEP_LASTS = "keep lasts"
MODEL_HUB = "model hub"


@dataclass
class Check:
    """One thing looked at: OK if there is nothing to do, else WARN or FAIL."""

    name: str
    seen: str
    todo: str = ""
    status: str = "WARN"

    def __post_init__(self) -> None:
        if not self.todo:
            self.status = "OK"

    def __str__(self) -> str:
        text = self.seen
        if self.todo:
            text += tr(". To do: {todo}", todo=self.todo)
        lines = display.wrap(text, 91)
        return f"[{self.status:^4}] {display.pad(tr(self.name), 11)} " + f"\n{' ' * 19}".join(lines)


@dataclass
class Report:
    """Everything the doctor saw: the checks, and the same as values for programs."""

    checks: list[Check]
    values: Facts

    @property
    def failures(self) -> list[str]:
        """The checks that must be fixed before training, by name."""
        return [check.name for check in self.checks if check.status == "FAIL"]

    def counts(self) -> str:
        """How many checks are OK, and how many are not."""
        statuses = Counter(check.status for check in self.checks)
        return joined(f"{statuses[status]} {status}" for status in ("OK", "WARN", "FAIL"))

    def text(self) -> str:
        """The report for people."""
        return "\n".join([*map(str, self.checks), "", self.counts()])

    def require(self) -> None:
        """Print what needs attention; stop if anything must be fixed first.

        Example: doctor.examine().require()
        """
        problems = [check for check in self.checks if check.todo]
        print(*problems, self.counts(), sep="\n")
        if self.failures:
            raise CourseError(
                "Some checks of this machine failed: {names}.",
                todo="Follow the FAIL lines above, then run the cell again.",
                names=joined(map(tr, self.failures)),
            )

    def facts(self) -> Facts:
        """What goes into the facts.json of a lesson."""
        facts = {name: self.values[name] for name in ("precision", "keep_lasts", "limits")}
        warnings = [check.name for check in self.checks if check.todo]
        return facts | {
            "device_works": not {"torch", "GPU"} & set(self.failures),
            "free_gib": round(self.values["room"]["keep"]["free_gib"], 1),
            "warnings": "; ".join(warnings) or "none",
        }

    def as_dict(self) -> Facts:
        """The report for programs."""
        return {"checks": [asdict(check) for check in self.checks], **self.values}


def examine() -> Report:
    """Look at everything; takes a few seconds, most of them for torch and for the network."""
    platform = platforms.detect()
    folders = platforms.folders(platform)
    checks: list[Check] = []
    for look in CHECKS:
        try:
            checks += look(platform, folders)
        except Exception as problem:  # a report with one gap is worth more than none
            checks.append(
                Check(
                    look.__name__.removeprefix("check_"),
                    describe(problem),
                    tr("continue; if a lesson stops, report this line"),
                )
            )
    return Report(checks, _values(platform, folders))


def _values(platform: Platform, folders: Folders) -> Facts:
    """What the doctor saw, for programs."""
    try:
        gpu = hardware.gpu()
    except Exception:  # no torch, or a driver that fails: its check says so
        gpu = None
    places = {"inputs": str(folders.inputs) if folders.inputs else None}
    room = {}
    for name in ROOMS:
        folder = getattr(folders, name)
        places[name] = str(folder)
        room[name] = {"free_gib": round(disk.free_gib(folder), 2), "free_inodes": disk.free_inodes(folder)}
    return {
        "platform": platform.as_dict(),
        "card": asdict(gpu) if gpu else None,
        "keep_lasts": folders.lasting,
        "precision": hardware.dtype(gpu).value,
        "versions": {"python": sys.version.split()[0]} | record.versions(),
        "folders": places,
        "room": room,
        "limits": {
            "hours": platform.entry.hours or None,
            "hours_left": _hours_left(platform),
            "processors": round(platforms.processors(), 2),
            "memory_gib": round(platforms.memory_gib(), 2),
        },
    }


def _hours_left(platform: Platform) -> float | None:
    """How long this machine stays; None where there is no limit."""
    hours = platform.entry.hours
    used = platforms.session_seconds(platform) / 3600
    return round(max(hours - used, 0.0), 2) if hours else None


def check_machine(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Where this is, and what it allows for how long."""
    yield Check("platform", f"{platform.name} ({tr(platform.evidence)})")
    if sys.platform == "win32":
        yield Check(
            "system",
            tr("Windows: doctor, plan and data check run here, the lessons run in WSL2"),
            tr(
                "1. in PowerShell as administrator: wsl --install, then restart; 2. in Ubuntu: sudo apt install git "
                "make gcc python3-venv; 3. git clone ADDRESS, cd into it, make course"
            ),
        )
    memory = platforms.memory_gib()
    todo = tr("prepare data here; to train, start a machine with a GPU and at least 8 GiB of memory")
    seen = tr("{size:.1f} GiB, {count:g} processors", size=memory, count=round(platforms.processors(), 2))
    yield Check("memory", seen, todo if memory < 4 else "")
    left = _hours_left(platform)
    if left is not None:
        todo = tr("start a new machine before a long training; a run that began here is continued there")
        seen = tr("about {left:.1f} of {hours:g} hours are left", left=left, hours=platform.entry.hours)
        yield Check("time", seen, todo if left < 1 else "")


def check_folders(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Room in the folders, and whether runs outlive this machine."""
    for name in ROOMS:
        folder = getattr(folders, name)
        free = disk.free_gib(folder)
        files = disk.free_inodes(folder)
        is_full = free < 5 or (files is not None and files < disk.FEWEST_FILES)
        if why := platforms.cannot_write(disk.nearest(folder)):
            seen = tr("{folder} cannot be written ({why})", folder=folder, why=why)
            todo = tr("make it writable, restart the machine, or set NBUTILS_HOME to a folder you may write to")
            yield Check(name, seen, todo, "WARN" if name == "work" else "FAIL")
        else:
            seen = tr("{folder}, {free:.1f} GiB free", folder=folder, free=free)
            todo = tr("delete what you no longer need there: 5 GiB and 300 files should fit")
            yield Check(name, seen, todo if is_full else "")
    if platform.name == "kaggle" and not platform.batch:
        seen = tr("only if you save a version: this is an interactive session")
        todo = tr("choose Save Version > Save & Run All, or set Persistence to Files in the notebook's settings")
        yield Check(KEEP_LASTS, seen, todo)
    else:
        yield Check(KEEP_LASTS, folders.remark, "" if folders.lasting else tr(platform.entry.keep_todo))


def check_torch(platform: Platform, folders: Folders) -> Iterator[Check]:
    """torch, the GPU, and a real operation on it."""
    if version := install.old_torch():
        seen = tr("torch {version}, and the lessons need torch{wanted}", version=version, wanted=install.TORCH)
        yield Check("torch", seen, install.torch_todo(), "FAIL")
        return
    try:
        import torch
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        seen = tr("torch cannot be imported ({problem})", problem=describe(problem))
        todo = tr("`python -m nbutils install`, or the first cells of any lesson; reinstall it if it is there")
        yield Check("torch", seen, todo, "FAIL")
        return
    yield Check("torch", torch.__version__)
    gpu = hardware.gpu()
    operation = hardware.working_operation(gpu)
    if not operation.value:
        yield Check("GPU", operation.reason, hardware.cure(), "FAIL")
    elif gpu:
        yield Check("GPU", operation.reason)
    elif listed := hardware.driver_gpus():
        seen = tr("the driver lists {gpu}, but torch cannot use it", gpu=listed[0])
        yield Check("GPU", seen, tr("install a torch build for CUDA, or a newer driver if it is one already"))
    else:
        seen = tr("none: lessons run on the CPU, which is enough for the profiles tiny and laptop")
        yield Check("GPU", seen, "" if platform.name == "local" else tr(platform.entry.gpu_todo))


def check_packages(platform: Platform, folders: Folders) -> Iterator[Check]:
    """What the lessons need."""
    missing = install.unsatisfied(install.requirements("train"))
    todo = tr("`python -m nbutils install`, or the first cells of any lesson: both leave torch as it is")
    names = ", ".join(missing) or tr("none")
    seen = tr("missing: {missing}", missing=names)
    yield Check("packages", seen, todo if missing else "")


def check_hub(platform: Platform, folders: Folders) -> Iterator[Check]:
    """Whether models can be downloaded: from the hub, its mirrors, or what HF_ENDPOINT or NBUTILS_MIRROR names."""
    if network.offline():
        yield Check(MODEL_HUB, tr("not asked: HF_HUB_OFFLINE is set, so only models on this machine are used"))
        return
    urls = network.sources() or network.SOURCES
    seconds = network.measure(urls, network.SECONDS)
    answers = []
    for name in urls:
        time = f"{seconds[name]:.1f} s" if name in seconds else tr("does not answer")
        answers.append(f"{name} {time}")
    yield Check(MODEL_HUB, joined(answers), "" if seconds else tr(platform.entry.hub_todo))


CHECKS = (check_machine, check_folders, check_torch, check_packages, check_hub)
