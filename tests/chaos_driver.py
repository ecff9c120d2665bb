"""A training made to be killed: the real resume, carrier and stores around steps that take milliseconds.

    python tests/chaos_driver.py HOME '{"steps": 60, "seed": 1, "faults": ["errors"]}'

Every write below the stores is slowed down, so that a kill lands inside it, and disturbed if the plan says so. The side
file HOME/phase says at any moment what the two threads are doing; it outlives a SIGKILL. Used by test_chaos.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbutils import checkpoints, platforms, training
from nbutils.checkpoints import archive, carrier, store
from nbutils.training import keeping

MARK = checkpoints.fingerprint(model="a chain of checksums", seed=7)
SAVE_EVERY, STEP_SECONDS, KEEP_LAST, SIZE = 10, 0.004, 3, 2 * 2**20
MAIN_PHASES = ("starting", "restoring", "training", "saving", "ending")
CARRIER_PHASES = ("packing", "sealing", "copying", "checking", "manifest", "pruning")
WIDTH = 12  # bytes of a phase in the side file


def lesson_in(home: Path) -> Any:
    """As much of a lesson as resuming and keeping look at."""
    run = SimpleNamespace(name="run", path=home / "run", checkpoints=home / "run/checkpoints", logs=home / "run/logs")
    folders = platforms.Folders(work=home, scratch=home / "scratch", keep=home, inputs=None)
    return SimpleNamespace(scratch=home / "scratch/run", run=run, folders=folders)


def state_at(step: int, start: tuple[int, str] = (0, "")) -> str:
    """The state after `step` steps; each depends on all before it, so that a wrong restore is wrong for ever."""
    at, value = start
    for number in range(at + 1, step + 1):
        value = hashlib.sha256(f"{value} {number}".encode()).hexdigest()
    return value


def save(folder: Path, step: int, value: str) -> Path:
    """A checkpoint folder: a little JSON and two megabytes that belong to this state and no other."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "value": value}), encoding="utf-8")
    (folder / "weights.bin").write_bytes(random.Random(value).randbytes(SIZE))
    return folder


def load(folder: Path) -> tuple[int, str]:
    """Step and state of a checkpoint folder; exits with status 3 if it is not what was saved at that step."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    right = state["value"] == state_at(state["step"]) and folder.name == f"checkpoint-{state['step']}"
    if not right or (folder / "weights.bin").read_bytes() != random.Random(state["value"]).randbytes(SIZE):
        print(f"WRONG content in {folder}", flush=True)
        sys.exit(3)
    return state["step"], state["value"]


class Phases:
    """What each of the two threads is doing, in a file that can be read after a SIGKILL."""

    def __init__(self, place: Path) -> None:
        self.file, self.now = os.open(place, os.O_RDWR | os.O_CREAT), ["", ""]
        self.note(0, "starting")
        self.note(1, "idle")

    def note(self, slot: int, name: str) -> None:
        """Thread 0 is the training, thread 1 the carrier."""
        self.now[slot] = name
        os.pwrite(self.file, name.ljust(WIDTH).encode(), slot * WIDTH)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The calling thread is in this phase; the training thread's own phases are not refined."""
        slot = int(in_carrier())
        before = self.now[slot]
        if slot == int(name in CARRIER_PHASES):
            self.note(slot, name)
        try:
            yield
        finally:
            self.note(slot, before)

    def around(self, module: Any, function: str, name: Callable[..., str]) -> None:
        """Replace a function of a module by itself inside a phase, which may depend on its arguments."""
        original = getattr(module, function)

        def inside(*given: Any, **named: Any) -> Any:
            with self.phase(name(*given)):
                return original(*given, **named)

        setattr(module, function, inside)


def read_phases(place: Path) -> tuple[str, str]:
    """What the training thread and the carrier were doing."""
    text = place.read_bytes().decode() if place.exists() else ""
    return text[:WIDTH].strip() or "starting", text[WIDTH:].strip() or "idle"


def in_carrier() -> bool:
    """Whether this is the carrier's thread."""
    return threading.current_thread().name == "checkpoint-carrier"


class SlowFile:
    """A file that takes its pieces in halves, each on the disk before a pause; the disk may fail at any of them."""

    def __init__(self, file: Any, hurdle: Callable[[], None]) -> None:
        self.file, self.hurdle = file, hurdle

    def write(self, piece: Any) -> int:
        """Write, as slowly and as unreliably as the plan says."""
        for part in (piece[: len(piece) // 2], piece[len(piece) // 2 :]):
            self.hurdle()
            self.file.write(part)
            self.file.flush()
        return len(piece)

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Disk:
    """The way of all writes: slow below the stores, and below keep with the faults of the plan."""

    def __init__(self, keep: Path, faults: list[str], seed: int) -> None:
        self.keep, self.faults, self.dice = keep, faults, random.Random(seed)
        self.gone_until = 0.0

    def install(self) -> None:
        """Put the disk under the checkpoints room."""
        archive.open = self.open  # type: ignore[attr-defined]
        archive.CHUNK = 2**18
        carrier.FIRST_PAUSE, carrier.LONGEST_PAUSE = 0.02, 0.2
        keeping.still_mounted = lambda folder: self.check
        unlink, replace, sha256 = Path.unlink, os.replace, archive.sha256

        def slow_unlink(place: Path, missing_ok: bool = False) -> None:
            if in_carrier():
                time.sleep(0.004)
                self.hurdle(place)
            unlink(place, missing_ok)

        def slow_sha256(place: Path) -> str:
            if in_carrier():
                self.hurdle(place)
            time.sleep(0.008)
            return sha256(place)

        def forgetful_replace(source: Any, target: Any) -> None:
            if not self.below_keep(Path(target)):
                replace(source, target)  # below keep it says yes and leaves what was there

        Path.unlink, os.replace = slow_unlink, forgetful_replace  # type: ignore[method-assign, assignment]
        archive.sha256 = slow_sha256

    def below_keep(self, place: Path) -> bool:
        """Whether a file lies on the disk that may fail."""
        return self.keep in place.parents

    def open(self, place: Any, mode: str = "r", **options: Any) -> Any:
        """What the archive room calls open."""
        if "w" not in mode or not in_carrier():
            return open(place, mode, **options)
        if self.below_keep(Path(place)) and "stale" in self.faults and self.dice.random() < 0.1:
            place = os.devnull  # every write succeeds, and the folder shows what it showed before
        pause = 0.02 if str(place).endswith(".json") else 0.003
        return SlowFile(open(place, mode, **options), lambda: self.hurdle(Path(place), pause))

    def hurdle(self, place: Path, pause: float = 0.0) -> None:
        """One operation on a file: it takes a moment, and fails below keep if the dice say so."""
        time.sleep(pause * self.dice.uniform(0.5, 1.5))
        if not self.below_keep(place):
            return
        if "errors" in self.faults and self.dice.random() < 0.02:
            raise OSError(self.dice.choice([errno.ENOTCONN, errno.EIO, errno.ENOSPC]), "the disk says no")
        if "vanishing" in self.faults and self.dice.random() < 0.01:
            self.gone_until = time.monotonic() + 0.3
        self.check()

    def check(self) -> None:
        """Route.check: the mount is gone for a while."""
        if time.monotonic() < self.gone_until:
            raise OSError(errno.ENOTCONN, "not mounted any more")


def train(home: Path, steps: int, phases: Phases) -> None:
    """Resume, train, save and carry, as lesson 03 does it."""
    lesson = lesson_in(home)
    lesson.run.path.mkdir(parents=True, exist_ok=True)
    phases.note(0, "restoring")
    found = training.resume_point(lesson, MARK, "auto")
    step, value = load(found) if found else (0, "")
    way_home = training.carrier(lesson, MARK, KEEP_LAST)
    (lesson.scratch / "logs").mkdir(exist_ok=True)
    while step < steps:
        phases.note(0, "training")
        time.sleep(STEP_SECONDS)
        step, value = step + 1, state_at(step + 1, (step, value))
        if step % SAVE_EVERY == 0 or step == steps:
            phases.note(0, "saving")
            way_home.take(save(lesson.scratch / f"trainer/checkpoint-{step}", step, value))
            (lesson.scratch / "logs/events").write_text(f"{value}\n" * step, encoding="utf-8")
        for line in way_home.messages():
            print(line, flush=True)
    phases.note(0, "ending")
    kept = way_home.finish(patience=20, bar=False)
    print(f"complete at step {step}, kept {kept.step if kept else None}", flush=True)


def main(home: Path, plan: dict[str, Any]) -> None:
    """One start of the training, disturbed as planned."""
    phases = Phases(home / "phase")
    in_keep = lesson_in(home).run.checkpoints
    phases.around(archive, "pack", lambda *_: "packing")
    phases.around(archive, "copy", lambda *_: "copying")
    phases.around(archive, "defect", lambda *_: "checking")
    phases.around(archive, "_seal", lambda one: "manifest" if one.archive.parent == in_keep else "sealing")
    phases.around(store, "prune", lambda *_: "pruning")
    Disk(in_keep.parent, plan.get("faults", []), plan["seed"]).install()
    train(home, plan["steps"], phases)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
