"""A training made to be killed: the real resume, sync and stores around steps that take milliseconds.

    python tests/chaos_driver.py HOME '{"steps": 60, "seed": 1, "faults": ["errors"]}'

Every write into the run folder is slowed down, so that a kill lands inside it, and disturbed if the plan says so.
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
from nbutils.training import resume

FINGERPRINT = dict[str, Any](model="a chain of checksums", seed=7)
SAVE_STEPS, STEP_SECONDS, KEEP_LAST, SIZE = 10, 0.004, 3, 2 * 2**20


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
    """Step and state of a checkpoint folder, which must be what was saved."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    assert state["value"] == state_at(state["step"]) and folder.name == f"checkpoint-{state['step']}"
    assert (folder / "weights.bin").read_bytes() == random.Random(state["value"]).randbytes(SIZE)
    return state["step"], state["value"]


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
    """Under all writes of the sync thread: slow, and with the faults of the plan."""

    def __init__(self, faults: list[str], seed: int) -> None:
        self.faults, self.dice, self.gone_until = faults, random.Random(seed), 0.0
        unlink, sha256 = Path.unlink, checkpoints.sha256

        def slow_unlink(path: Path, missing_ok: bool = False) -> None:
            self.operation(0.004)
            unlink(path, missing_ok)

        def slow_sha256(path: Path) -> str:
            self.operation(0.008)
            return sha256(path)

        checkpoints.open = self.open  # type: ignore[attr-defined]
        checkpoints.CHUNK = 2**18
        checkpoints.PAUSE = 0.1
        Path.unlink, checkpoints.sha256 = slow_unlink, slow_sha256  # type: ignore[method-assign]

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" in mode and "stale" in self.faults and self.dice.random() < 0.1:
            path = os.devnull  # every write succeeds, and the folder shows what it showed before
        pause = 0.02 if str(path).endswith(".json") else 0.003
        return SlowFile(open(path, mode, **options), lambda: self.operation(pause))

    def operation(self, pause: float) -> None:
        """One operation takes a moment, and fails if the dice say so."""
        if threading.current_thread() is threading.main_thread():
            return
        time.sleep(pause * self.dice.uniform(0.5, 1.5))
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
    lesson, disk = lesson_in(home), Disk(plan["faults"], plan["seed"])
    resume.mount_check = lambda mount: disk.check()
    lesson.run.path.mkdir(parents=True, exist_ok=True)
    print("started", flush=True)
    checkpoint = resume.resume_point(lesson.run, lesson.folders, FINGERPRINT, "auto")
    step, value = load(checkpoint) if checkpoint else (0, "")
    sft, course = SimpleNamespace(save_total_limit=KEEP_LAST), SimpleNamespace(validation_rows=0)
    profile: Any = SimpleNamespace(sft=sft, course=course)
    running = resume.start_sync(lesson.run, lesson.scratch, FINGERPRINT, profile)
    while step < plan["steps"]:
        time.sleep(STEP_SECONDS)
        step, value = step + 1, state_at(step + 1, (step, value))
        if step % SAVE_STEPS == 0 or step == plan["steps"]:
            running.take(save(lesson.scratch / f"trainer/checkpoint-{step}", step, value))
        for line in running.messages():
            print(line, flush=True)
    kept = running.finish(patience=20)
    print(f"complete at step {step}, kept {kept.step if kept else None}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
