"""Checkpoint sync: a thread packs the newest checkpoint into the run folder, and retries while its disk fails."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbutils.checkpoints import archive, store
from nbutils.checkpoints.archive import StoredCheckpoint, step_of
from nbutils.disk import folder_gib, free_gib
from nbutils.errors import CourseError

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
PATIENCE = 600.0  # seconds to wait at the end before it is an error
THREAD_NAME = "checkpoint-sync"
_RUNNING: dict[Path, CheckpointSync] = {}  # by outbox


class CheckpointSync:
    """Copies from `outbox` to `keep` in a thread; `check` raises OSError while that is gone; `logs` go from, to."""

    def __init__(
        self, outbox: Path, keep: Path, fingerprint: dict[str, Any], keep_last: int = 3,
        check: Callable[[], None] = lambda: None, logs: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        self.outbox, self.keep, self.fingerprint, self.keep_last = outbox, keep, fingerprint, keep_last
        self.check, self.logs = check, logs
        self.kept: StoredCheckpoint | None = None  # the newest that verified in the run folder
        self.seconds = 0.0  # of the last whole sync
        self._copied, self._size = 0, 0.0  # bytes written of the copy under way, and its GiB
        self.problem: str | None = None
        self._messages: deque[str] = deque()
        self._pause = FIRST_PAUSE
        self._wake, self._stopped = threading.Event(), threading.Event()
        outbox.mkdir(parents=True, exist_ok=True)
        end_earlier(outbox)
        _RUNNING[outbox] = self
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def take(self, folder: Path) -> None:
        """Accept a finished checkpoint folder; it is moved out of the trainer's way."""
        if self._stopped.is_set():
            raise CourseError("checkpoints.sync_stopped")
        os.replace(folder, self.outbox / folder.name)
        self._wake.set()

    def messages(self) -> list[str]:
        """Lines for the learner since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    @property
    def waiting(self) -> Path | None:
        """The newest checkpoint folder that is not in the run folder yet; None when everything is."""
        return max(self.outbox.glob("checkpoint-*"), key=step_of, default=None)

    def finish(
        self, patience: float = PATIENCE, progress: Callable[[str], None] = lambda line: None
    ) -> StoredCheckpoint | None:
        """Wait until the newest checkpoint is in the run folder, with a `progress` line every second."""
        self._pause = FIRST_PAUSE
        self._wake.set()
        started, shown = time.monotonic(), 0
        while (path := self.waiting) is not None:
            waited = time.monotonic() - started
            if waited > patience:
                problem = self.problem or "no answer"
                raise CourseError("checkpoints.sync_failed", folder=self.keep, problem=problem, path=path)
            if int(waited) > shown:
                shown = int(waited)
                how_far = self.problem or f"{self._copied / 2**20:,.0f} of {self._size * 1024:,.0f} MiB"
                progress(f"copying checkpoint {step_of(path)} to {self.keep}: {how_far}, {shown} s")
            time.sleep(0.05)
        with suppress(OSError):  # the checkpoint is safe; logs are no reason for an error
            self._copy_logs()
        for line in self.messages():
            print(line)
        return self.kept

    def close(self) -> None:
        """Stop the thread; a copy under way is given up."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout=30)  # a disk that hangs must not hang the cell

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause if self.problem else None)
            self._wake.clear()
            try:
                self._sync()
                self.problem, self._pause = None, FIRST_PAUSE
            except Exception as problem:  # whatever it is, training goes on
                text = f"{getattr(problem, 'strerror', None) or problem} ({type(problem).__name__})"
                if self.problem is None:
                    warning = f"[WARN] a checkpoint could not be copied to {self.keep}: {text}"
                    self._messages.append(f"{warning}. Training goes on; the copy is retried.")
                self.problem, self._pause = text, min(self._pause * 2, LONGEST_PAUSE)

    def _sync(self) -> None:
        """Pack the newest folder into the run folder, prune there, copy the logs."""
        while (folder := self.waiting) is not None:
            started = time.monotonic()
            kept = self._pack(folder)
            self.seconds = time.monotonic() - started
            size, again = f"{kept.manifest.size / 2**20:,.1f} MiB", "; copying works again" if self.problem else ""
            self._messages.append(f"checkpoint {kept.step} is kept ({size}, verified{again})")
            self.kept, self.problem = kept, None
            for older in self.outbox.glob("checkpoint-*"):
                if step_of(older) <= kept.step:
                    shutil.rmtree(older)
            with suppress(OSError):  # the checkpoint is safe; this is done again next time
                store.prune(self.keep, kept, self.keep_last)
                self._copy_logs()

    def _pack(self, folder: Path) -> StoredCheckpoint:
        self.check()
        self.keep.mkdir(exist_ok=True)  # not its parents: if the run folder is gone, so is the disk
        with suppress(FileNotFoundError, ValueError):
            there = archive.read_manifest(self.keep / f"{folder.name}.json")
            if there.manifest.fingerprint == self.fingerprint and archive.defect(there) is None:
                return there  # a whole one is never overwritten
        self._copied, self._size, free = 0, folder_gib(folder), free_gib(self.keep)
        if free < self._size:
            raise OSError(errno.ENOSPC, f"{self._size:.2f} GiB needed, {free:.2f} GiB free")
        return archive.pack(folder, self.keep, self.fingerprint, self._count)

    def _count(self, count: int) -> None:
        self._copied += count
        if self._stopped.is_set():  # the cell ran again: this copy would turn up in the new run
            raise InterruptedError(errno.EINTR, "another sync took over")

    def _copy_logs(self) -> None:
        if self.logs is None:
            return
        self.check()  # folders must not be made where a mount was
        source, target = self.logs
        for file in (path for path in source.rglob("*") if path.is_file() and not path.is_symlink()):
            name = file.relative_to(source)
            copy = target / name
            if not copy.exists() or copy.stat().st_size != file.stat().st_size:
                for parent in reversed(name.parents):  # below the run folder only: its disk may go at any moment
                    (target / parent).mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def end_earlier(outbox: Path) -> None:
    """Stop the sync that an earlier run of the cell started for this run."""
    if old := _RUNNING.pop(outbox, None):
        old.close()
