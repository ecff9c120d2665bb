"""Checkpoint sync: a thread copies the newest checkpoint from scratch to the run folder while training goes on.

The trainer's folder is packed into the store in scratch, and the newest archive there is copied to the run folder and
verified. If that disk fails (Drive drops, disk full, mount gone), the copy is retried with growing pauses; the learner
reads one line when it fails and one when it works again.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils.checkpoints import archive, store
from nbutils.checkpoints.archive import Kept, step_of
from nbutils.disk import free_gib
from nbutils.errors import CourseError
from nbutils.paths import GIB

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
PATIENCE = 600.0  # seconds without progress at the end before it is an error
THREAD_NAME = "checkpoint-sync"
_RUNNING: dict[Path, CheckpointSync] = {}  # by store in scratch


@dataclass(frozen=True)
class Route:
    """From which store to which. `check` raises OSError while the target is not reachable."""

    sealed: Path
    keep: Path
    keep_last: int = 3
    check: Callable[[], None] = lambda: None


class CheckpointSync:
    """The sync thread; `take` and `finish` are called by the training thread."""

    def __init__(self, route: Route, fingerprint: dict[str, Any], logs: tuple[Path, Path] | None = None) -> None:
        self.route, self.fingerprint, self.logs = route, fingerprint, logs
        self.outbox = route.sealed.with_name("outbox")
        self.kept: Kept | None = None  # the newest that verified in the run folder
        self.seconds = 0.0  # of the last whole sync
        self.copied = 0  # bytes of the copy under way
        self.problem: str | None = None
        self._messages: list[str] = []
        self._pause = FIRST_PAUSE
        self._lock, self._wake, self._stopped = threading.Lock(), threading.Event(), threading.Event()
        for folder in (self.outbox, route.sealed):
            folder.mkdir(parents=True, exist_ok=True)
        self._packed = next(iter(store.look(route.sealed)[0]), None)  # what this run was resumed from
        self._wake.set()
        end_earlier(route.sealed)
        _RUNNING[route.sealed] = self
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def take(self, folder: Path) -> None:
        """Accept a finished checkpoint folder; it is moved out of the trainer's way."""
        self._refuse_if_stopped()
        os.replace(folder, self.outbox / folder.name)
        self._wake.set()

    def messages(self) -> list[str]:
        """Lines for the learner since the last call."""
        with self._lock:
            lines, self._messages = self._messages, []
        return lines

    @property
    def waiting(self) -> Kept | Path | None:
        """What is not in the run folder yet; None when everything is."""
        if folders := self._outbox_folders():
            return folders[-1]
        done = self.kept is not None and self._packed is not None and self.kept.step >= self._packed.step
        return None if done else self._packed

    def finish(self, patience: float = PATIENCE, bar: bool = True) -> Kept | None:
        """Wait until the newest checkpoint is in the run folder; CourseError after `patience` without progress."""
        from tqdm.auto import tqdm

        self._refuse_if_stopped()
        self._pause = FIRST_PAUSE
        self._wake.set()
        furthest, deadline = (-1, -1), 0.0
        with tqdm(unit="B", unit_scale=True, desc="sync", disable=not bar or self.waiting is None) as shown:
            while (left := self.waiting) is not None:
                shown.total = left.manifest.size if isinstance(left, Kept) else None
                shown.n = self.copied
                shown.update(0)  # draws at most every mininterval
                for line in self.messages():
                    tqdm.write(line)
                at = (self.kept.step if self.kept else 0, self.copied)
                if at > furthest:  # a copy that starts over again and again is no progress
                    furthest, deadline = at, time.monotonic() + patience
                elif time.monotonic() > deadline:
                    path, problem = left.archive if isinstance(left, Kept) else left, self.problem or "no answer"
                    raise CourseError("checkpoints.sync_failed", folder=self.route.keep, problem=problem, path=path)
                time.sleep(0.05)
        try:
            self._copy_logs()
        except OSError as problem:  # the checkpoint is safe, so this is no error
            self._say(f"[WARN] the logs could not be copied: {problem.strerror or problem}.")
        for line in self.messages():
            print(line)
        return self.kept

    def close(self) -> None:
        """Stop the thread; a copy under way is given up."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout=30)  # a disk that hangs must not hang the cell

    def _refuse_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise CourseError("checkpoints.sync_stopped")

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
                    self._say(f"[WARN] a checkpoint could not be copied to {self.route.keep}: {text}. "
                              "Training goes on; the checkpoint waits in scratch and is retried.")  # fmt: skip
                self.problem, self._pause = text, min(self._pause * 2, LONGEST_PAUSE)

    def _sync(self) -> None:
        """Pack the newest folder, copy it to the run folder, prune there, copy the logs."""
        started = time.monotonic()
        for folder in reversed(self._outbox_folders()):
            if self._packed is None or step_of(folder) > self._packed.step:
                self._packed = archive.pack(folder, self.route.sealed, self.fingerprint)
                store.prune(self.route.sealed, self._packed, keep_last=1)
            shutil.rmtree(folder)
        newest = self._packed
        if newest is None or (self.kept is not None and self.kept.step >= newest.step):
            return
        kept = self._copy(newest)
        self.seconds = time.monotonic() - started
        recovered = "checkpoint sync works again: " if self.problem else ""
        self._say(f"{recovered}checkpoint {newest.step} is kept ({newest.manifest.size / 2**20:,.1f} MiB, verified)")
        self.kept = kept  # last: `finish` waits for it, and prints the line above
        with suppress(OSError):  # the checkpoint is safe; this is done again next time
            store.prune(self.route.keep, kept, self.route.keep_last)
            self._copy_logs()

    def _copy(self, newest: Kept) -> Kept:
        self.copied = 0
        self.route.check()
        self.route.keep.mkdir(exist_ok=True)  # not its parents: if the run folder is gone, so is the disk
        if (existing := self._existing(newest)) is not None:
            return existing
        free = free_gib(self.route.keep) * GIB
        if free < newest.manifest.size:
            needed = f"{newest.manifest.size / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free"
            raise OSError(errno.ENOSPC, needed)
        return archive.copy(newest, self.route.keep, self._count)

    def _existing(self, newest: Kept) -> Kept | None:
        """A whole checkpoint of this step and training in the run folder: it is never overwritten."""
        manifest = (self.route.keep / newest.archive.name).with_suffix(".json")
        try:
            there = archive.read_manifest(manifest)
        except (FileNotFoundError, ValueError):
            return None
        problem = archive.defect(there)
        if problem and problem.startswith(archive.UNREADABLE):  # it may be whole
            raise OSError(errno.EIO, f"{there.archive.name} is there, but {problem}")
        return there if there.manifest.fingerprint == self.fingerprint and problem is None else None

    def _count(self, count: int) -> None:
        if self._stopped.is_set():  # the cell ran again: this copy would turn up in the new run
            raise InterruptedError(errno.EINTR, "another sync took over")
        self.copied += count

    def _outbox_folders(self) -> list[Path]:
        found = self.outbox.iterdir() if self.outbox.exists() else ()
        return sorted((path for path in found if archive.NAME.fullmatch(path.name)), key=step_of)

    def _copy_logs(self) -> None:
        if self.logs is None:
            return
        self.route.check()  # folders must not be made where a mount was
        source, target = self.logs
        for file in (path for path in source.rglob("*") if path.is_file() and not path.is_symlink()):
            copy = target / file.relative_to(source)
            if not copy.exists() or copy.stat().st_size != file.stat().st_size:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)

    def _say(self, line: str) -> None:
        with self._lock:
            self._messages.append(line)


def end_earlier(sealed: Path) -> None:
    """Stop the sync that an earlier run of the cell started for this store."""
    if old := _RUNNING.pop(sealed, None):
        old.close()
