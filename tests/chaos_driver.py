"""A training made to be killed: the real resume, sync and stores around steps that take milliseconds.

    python tests/chaos_driver.py HOME '{"steps": 60, "seed": 1, "faults": ["errors"]}'

Every write below the stores is slowed down, so that a kill lands inside it, and disturbed if the plan says so. The side
file HOME/phase says what the two threads are doing; it outlives a SIGKILL. Used by test_chaos.
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbutils import checkpoints, platforms
from nbutils.checkpoints import archive, store, sync
from nbutils.training import resume

FINGERPRINT = checkpoints.fingerprint(model="a chain of checksums", seed=7)
SAVE_STEPS, STEP_SECONDS, KEEP_LAST, SIZE = 10, 0.004, 3, 2 * 2**20
SYNC_PHASES = ("packing", "sealing", "copying", "checking", "manifest", "pruning")
WIDTH = 12  # bytes of a phase in the side file


def lesson_in(home: Path) -> Any:
    """As much of a lesson as resume and sync look at."""
    run = SimpleNamespace(name="run", path=home / "run", checkpoints=home / "run/checkpoints", logs=home / "run/logs")
    folders = platforms.Folders(work=home, scratch=home / "scratch", keep=home, inputs=None)
    return SimpleNamespace(scratch=home / "scratch/run", run=run, folders=folders)


def state_at(step: int, start: tuple[int, str] = (0, "")) -> str:
    """The state after `step` steps; each depends on all before it, so that a wrong restore stays wrong."""
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
    """Step and state of a checkpoint folder; exits with status 3 if it is not what was saved."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    right = state["value"] == state_at(state["step"]) and folder.name == f"checkpoint-{state['step']}"
    if not right or (folder / "weights.bin").read_bytes() != random.Random(state["value"]).randbytes(SIZE):
        print(f"WRONG content in {folder}", flush=True)
        sys.exit(3)
    return state["step"], state["value"]


def in_sync_thread() -> bool:
    return threading.current_thread().name == sync.THREAD_NAME


class Phases:
    """What the training thread (0) and the sync thread (1) are doing, in a file that can be read after a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self.file, self.now = os.open(path, os.O_RDWR | os.O_CREAT), ["", ""]
        self.note(0, "starting")
        self.note(1, "idle")

    def note(self, slot: int, name: str) -> None:
        self.now[slot] = name
        os.pwrite(self.file, name.ljust(WIDTH).encode(), slot * WIDTH)

    def around(self, module: Any, function: str, name: Callable[..., str]) -> None:
        """Note the phase while the sync thread is in a function of a module."""
        original = getattr(module, function)

        def inside(*given: Any, **named: Any) -> Any:
            if not in_sync_thread():
                return original(*given, **named)
            before = self.now[1]
            self.note(1, name(*given))
            try:
                return original(*given, **named)
            finally:
                self.note(1, before)

        setattr(module, function, inside)


def read_phases(path: Path) -> tuple[str, str]:
    """What the training thread and the sync thread were doing."""
    text = path.read_bytes().decode() if path.exists() else ""
    return text[:WIDTH].strip() or "starting", text[WIDTH:].strip() or "idle"


class SlowFile:
    """A file that takes its chunks in halves; `operation` is called before each, and may raise."""

    def __init__(self, file: Any, operation: Callable[[], None]) -> None:
        self.file, self.operation = file, operation

    def write(self, chunk: Any) -> int:
        for part in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
            self.operation()
            self.file.write(part)
            self.file.flush()
        return len(chunk)

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Disk:
    """Under all writes: slow below the stores, and below the run folder with the faults of the plan."""

    def __init__(self, keep: Path, faults: list[str], seed: int) -> None:
        self.keep, self.faults, self.dice, self.gone_until = keep, faults, random.Random(seed), 0.0

    def install(self) -> None:
        archive.open = self.open  # type: ignore[attr-defined]
        archive.CHUNK = 2**18
        sync.FIRST_PAUSE, sync.LONGEST_PAUSE = 0.02, 0.2
        unlink, replace, sha256 = Path.unlink, os.replace, archive.sha256

        def slow_unlink(path: Path, missing_ok: bool = False) -> None:
            if in_sync_thread():
                self.operation(path, 0.004)
            unlink(path, missing_ok)

        def slow_sha256(path: Path) -> str:
            self.operation(path if in_sync_thread() else Path("/"), 0.008)
            return sha256(path)

        def forgetful_replace(source: Any, target: Any) -> None:
            if self.keep not in Path(target).parents:
                replace(source, target)  # below the run folder it says yes and leaves what was there

        Path.unlink, os.replace = slow_unlink, forgetful_replace  # type: ignore[method-assign, assignment]
        archive.sha256 = slow_sha256

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" not in mode or not in_sync_thread():
            return open(path, mode, **options)
        if self.keep in Path(path).parents and "stale" in self.faults and self.dice.random() < 0.1:
            path = os.devnull  # every write succeeds, and the folder shows what it showed before
        pause = 0.02 if str(path).endswith(".json") else 0.003
        return SlowFile(open(path, mode, **options), lambda: self.operation(Path(path), pause))

    def operation(self, path: Path, pause: float) -> None:
        """One operation takes a moment, and fails below the run folder if the dice say so."""
        time.sleep(pause * self.dice.uniform(0.5, 1.5))
        if self.keep not in path.parents:
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


def main(home: Path, plan: dict[str, Any]) -> None:
    """One start of the training, as lesson 03 does it, disturbed as planned."""
    phases, lesson = Phases(home / "phase"), lesson_in(home)
    for function, name in {"pack": "packing", "copy": "copying", "defect": "checking"}.items():
        phases.around(archive, function, lambda *_, name=name: name)
    in_keep = lesson.run.checkpoints
    phases.around(archive, "write_manifest", lambda one: "manifest" if one.archive.parent == in_keep else "sealing")
    phases.around(store, "prune", lambda *_: "pruning")
    disk = Disk(lesson.run.path, plan["faults"], plan["seed"])
    disk.install()
    resume.mount_check = lambda folder: disk.check
    lesson.run.path.mkdir(parents=True, exist_ok=True)
    phases.note(0, "restoring")
    found = resume.resume_point(lesson, FINGERPRINT, "auto")
    step, value = load(found) if found else (0, "")
    running = resume.start_sync(lesson, FINGERPRINT, KEEP_LAST)
    (lesson.scratch / "logs").mkdir(exist_ok=True)
    while step < plan["steps"]:
        phases.note(0, "training")
        time.sleep(STEP_SECONDS)
        step, value = step + 1, state_at(step + 1, (step, value))
        if step % SAVE_STEPS == 0 or step == plan["steps"]:
            phases.note(0, "saving")
            running.take(save(lesson.scratch / f"trainer/checkpoint-{step}", step, value))
            (lesson.scratch / "logs/events").write_text(f"{value}\n" * step, encoding="utf-8")
        for line in running.messages():
            print(line, flush=True)
    phases.note(0, "ending")
    kept = running.finish(patience=20, bar=False)
    print(f"complete at step {step}, kept {kept.step if kept else None}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
