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
SAVE_STEPS = 10
STEP_SECONDS = 0.004
KEEP_LAST = 3
SIZE = 2 * 2**20


def lesson_in(home: Path) -> Any:
    """As much of a lesson as resume and sync look at."""
    path = home / "run"
    run = SimpleNamespace(name="run", path=path, checkpoints=path / "checkpoints", logs=path / "logs")
    folders = platforms.Folders(work=home, scratch=home / "scratch", keep=home, inputs=None)
    return SimpleNamespace(scratch=home / "scratch/run", run=run, folders=folders)


def next_state(step: int, value: str) -> str:
    """The state after `step`, from the one before it."""
    return hashlib.sha256(f"{value} {step}".encode()).hexdigest()


def state_at(step: int) -> str:
    """The state after `step` steps; each depends on all before it, so that a wrong restore stays wrong."""
    value = ""
    for number in range(1, step + 1):
        value = next_state(number, value)
    return value


def weights_of(value: str) -> bytes:
    """Two megabytes that belong to this state and no other."""
    return random.Random(value).randbytes(SIZE)


def save(folder: Path, step: int, value: str) -> Path:
    """A checkpoint folder: a little JSON, and the weights of this state."""
    folder.mkdir(parents=True)
    state = {"step": step, "value": value}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "weights.bin").write_bytes(weights_of(value))
    return folder


def load(folder: Path) -> tuple[int, str]:
    """Step and state of a checkpoint folder, which must be what was saved."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    step = state["step"]
    value = state["value"]
    assert folder.name == f"checkpoint-{step}"
    assert value == state_at(step)
    assert (folder / "weights.bin").read_bytes() == weights_of(value)
    return step, value


class SlowFile:
    """A file that takes its chunks in halves; `operation` is called before each, and may raise."""

    def __init__(self, file: Any, operation: Callable[[], None]) -> None:
        self.file = file
        self.operation = operation

    def write(self, chunk: Any) -> int:
        middle = len(chunk) // 2
        for part in (chunk[:middle], chunk[middle:]):
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
        self.faults = faults
        self.dice = random.Random(seed)
        self.gone_until = 0.0
        unlink = Path.unlink
        sha256 = checkpoints.sha256

        def slow_unlink(path: Path, missing_ok: bool = False) -> None:
            self.operation(0.004)
            unlink(path, missing_ok)

        def slow_sha256(path: Path) -> str:
            self.operation(0.008)
            return sha256(path)

        checkpoints.open = self.open  # type: ignore[attr-defined]
        checkpoints.CHUNK = 2**18
        checkpoints.PAUSE = 0.1
        checkpoints.sha256 = slow_sha256
        Path.unlink = slow_unlink  # type: ignore[method-assign]

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" in mode and self.fails("stale", 0.1):
            path = os.devnull  # every write succeeds, and the folder shows what it showed before
        pause = 0.02 if str(path).endswith(".json") else 0.003
        return SlowFile(open(path, mode, **options), lambda: self.operation(pause))

    def fails(self, fault: str, probability: float) -> bool:
        """Whether a fault of the plan happens now."""
        return fault in self.faults and self.dice.random() < probability

    def operation(self, pause: float) -> None:
        """One operation takes a moment, and fails if the dice say so."""
        if threading.current_thread() is threading.main_thread():
            return
        time.sleep(pause * self.dice.uniform(0.5, 1.5))
        if self.fails("errors", 0.02):
            reason = self.dice.choice([errno.ENOTCONN, errno.EIO, errno.ENOSPC])
            raise OSError(reason, "the disk says no")
        if self.fails("vanishing", 0.01):
            self.gone_until = time.monotonic() + 0.3
        self.check()

    def check(self) -> None:
        """Route.check: the mount is gone for a while."""
        if time.monotonic() < self.gone_until:
            raise OSError(errno.ENOTCONN, "not mounted any more")


def main(home: Path, plan: dict[str, Any]) -> None:
    """One start of the training, as lesson 03 does it, disturbed as planned."""
    lesson = lesson_in(home)
    disk = Disk(plan["faults"], plan["seed"])
    resume.mount_check = lambda mount: disk.check()
    lesson.run.path.mkdir(parents=True, exist_ok=True)
    print("started", flush=True)

    step = 0
    value = state_at(0)
    checkpoint = resume.resume_point(lesson.run, lesson.folders, FINGERPRINT, "auto")
    if checkpoint:
        step, value = load(checkpoint)
    sft = SimpleNamespace(save_total_limit=KEEP_LAST)
    course = SimpleNamespace(validation_rows=0)
    profile: Any = SimpleNamespace(sft=sft, course=course)
    running = resume.start_sync(lesson.run, lesson.scratch, FINGERPRINT, profile)

    while step < plan["steps"]:
        time.sleep(STEP_SECONDS)
        step += 1
        value = next_state(step, value)
        if step % SAVE_STEPS == 0 or step == plan["steps"]:
            running.take(save(lesson.scratch / f"trainer/checkpoint-{step}", step, value))
        for line in running.messages():
            print(line, flush=True)
    kept = running.finish(patience=20)
    print(f"complete at step {step}, kept {kept.step if kept else None}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
