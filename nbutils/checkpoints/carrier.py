"""Carries checkpoints from scratch to keep in the background, so that training waits for no disk but its own.

The trainer's folder is packed into the store in scratch, and the newest archive there is copied to the store in keep.
A keep that fails (Drive drops, disk full, mount gone) is tried again with growing pauses; training goes on, and the
learner reads one line when it fails and one when it works again. Not here: when a checkpoint is saved (training).
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
from nbutils.checkpoints.archive import Kept
from nbutils.disk import free_gib
from nbutils.errors import CourseError
from nbutils.paths import GIB

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
PATIENCE = 600.0  # seconds of nothing but failures at the end before the learner is asked to look
_AT_WORK: dict[Path, Carrier] = {}  # by their store in scratch


@dataclass(frozen=True)
class Route:
    """Where checkpoints come from and go to. `check` raises OSError while the way to keep is cut."""

    sealed: Path
    keep: Path
    keep_last: int = 3
    check: Callable[[], None] = lambda: None


class Patience:
    """Whether a wait is worth it: it got further lately, or a copy is under way and moves."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.moved, self.advanced = seconds, time.monotonic(), time.monotonic()
        self.seen = self.furthest = (0, -1)

    def is_lost(self, at: tuple[int, int], trying: bool) -> bool:
        """Asked with how far it is now; a copy that begins again and again is no progress."""
        now = time.monotonic()
        if at != self.seen:
            self.seen, self.moved = at, now
        if at > self.furthest:
            self.furthest, self.advanced = at, now
        return now > self.advanced + self.seconds and not (trying and now < self.moved + self.seconds)


class Carrier:
    """A thread that brings the newest checkpoint home; `take` and `finish` are called by the training thread."""

    def __init__(self, route: Route, mark: dict[str, Any], logs: tuple[Path, Path] | None = None) -> None:
        self.route, self.mark, self.logs = route, mark, logs
        self.outbox = route.sealed.with_name("outbox")
        self.kept: Kept | None = None  # the newest that verified in keep
        self.seconds = 0.0  # what the last whole way took
        self.carried = 0  # bytes of the copy that is under way
        self.problem: str | None = None
        self._messages: list[str] = []
        self._pause, self._trying = FIRST_PAUSE, False
        self._lock, self._news, self._ended = threading.Lock(), threading.Event(), threading.Event()
        for folder in (self.outbox, route.sealed):
            folder.mkdir(parents=True, exist_ok=True)
        self._sealed = next(iter(store.look(route.sealed)[0]), None)  # what this run was restored from, if it was here
        self._news.set()
        self._thread = threading.Thread(target=self._work, name="checkpoint-carrier", daemon=True)
        end_earlier(route.sealed)
        _AT_WORK[route.sealed] = self
        self._thread.start()

    def take(self, folder: Path) -> None:
        """Accept a finished checkpoint folder; it is moved out of the trainer's way and carried from there."""
        self._refuse_if_ended()
        os.replace(folder, self.outbox / folder.name)
        self._news.set()

    def _refuse_if_ended(self) -> None:
        if self._ended.is_set():
            raise CourseError(
                "this training's way to keep was ended, because the cell that looks for checkpoints ran again.",
                "one training for each time that cell runs", "run that cell and all cells after it, in order",
            )  # fmt: skip

    def messages(self) -> list[str]:
        """What happened since the last call, in lines for the learner."""
        with self._lock:
            said, self._messages = self._messages, []
        return said

    @property
    def waiting(self) -> Kept | Path | None:
        """What is not in keep yet; None when all is."""
        if folders := self._taken():
            return folders[-1]
        done = self.kept is not None and self._sealed is not None and self.kept.step >= self._sealed.step
        return None if done else self._sealed

    def finish(self, patience: float = PATIENCE, bar: bool = True) -> Kept | None:
        """Wait until the newest checkpoint is in keep, with a progress bar; CourseError if keep only fails."""
        from tqdm.auto import tqdm

        self._refuse_if_ended()
        self._pause = FIRST_PAUSE
        self._news.set()
        hope = Patience(patience)
        with tqdm(unit="B", unit_scale=True, desc="to keep", disable=not bar or self.waiting is None) as shown:
            while (left := self.waiting) is not None:
                shown.total = left.manifest.size if isinstance(left, Kept) else None
                shown.n = self.carried
                shown.refresh()
                for line in self.messages():
                    tqdm.write(line)
                if hope.is_lost((self.kept.step if self.kept else 0, self.carried), self._trying):
                    raise self._stuck(left)
                time.sleep(0.05)
        for line in [*self.messages(), *self._mirror_logs_at_last()]:
            print(line)
        return self.kept

    def close(self) -> None:
        """End the thread; a copy under way is given up."""
        self._ended.set()
        self._news.set()
        self._thread.join(timeout=30)  # a disk that hangs must not hang the cell

    def _stuck(self, left: Kept | Path) -> CourseError:
        where = left.archive if isinstance(left, Kept) else left
        return CourseError(
            f"the last checkpoint could not be brought to {self.route.keep}: {self.problem or 'no answer from it'}.",
            "a folder that takes files",
            f"make it reachable or free some room, then run this cell again; until then the checkpoint is {where}",
        )

    def _work(self) -> None:
        while not self._ended.is_set():
            self._news.wait(self._pause if self.problem else None)
            self._news.clear()
            self._trying = True
            try:
                self._bring_home()
                self._pause = FIRST_PAUSE
            except Exception as problem:  # whatever it is, the training must not hear of it but as a line
                self._failed(problem)
            self._trying = False

    def _bring_home(self) -> None:
        began = time.monotonic()
        self._seal()
        newest, recovered = self._sealed, self.problem is not None
        if newest is not None and (self.kept is None or self.kept.step < newest.step):
            self.carried = 0
            kept = self._copy(newest)
            self.seconds = time.monotonic() - began
            again = "the way to keep works again: " if recovered else ""
            self._say(f"{again}checkpoint {newest.step} is kept ({newest.manifest.size / 2**20:,.1f} MiB, verified)")
            self.kept = kept  # only now: `finish` waits for it, and shows what was said
            with suppress(OSError):  # the checkpoint is safe; what could not be tidied up is tidied up next time
                store.prune(self.route.keep, self.kept, self.route.keep_last)
                self._mirror_logs()
        self.problem = None

    def _taken(self) -> list[Path]:
        """The folders that were accepted and not packed yet, by step."""
        found = self.outbox.iterdir() if self.outbox.exists() else ()
        return sorted((place for place in found if archive.NAME.fullmatch(place.name)), key=_step)

    def _seal(self) -> None:
        """The newest folder of the outbox as an archive in scratch; older ones have no use any more."""
        for folder in reversed(self._taken()):
            if self._sealed is None or _step(folder) > self._sealed.step:
                self._sealed = archive.pack(folder, self.route.sealed, self.mark)
                store.prune(self.route.sealed, self._sealed, keep_last=1)
            shutil.rmtree(folder)

    def _copy(self, newest: Kept) -> Kept:
        self.route.check()
        self.route.keep.mkdir(exist_ok=True)  # its parent is the run folder: if that is gone, so is the disk
        if (there := self._there_already(newest)) is not None:
            return there
        free = free_gib(self.route.keep) * GIB
        if free < newest.manifest.size:
            raise OSError(28, f"{newest.manifest.size / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free")
        return archive.copy(newest, self.route.keep, self._count)

    def _there_already(self, newest: Kept) -> Kept | None:
        """A whole checkpoint of this step and this training in keep: nothing whole is ever overwritten."""
        place = self.route.keep / newest.archive.name
        try:
            there = Kept(place, archive.read_manifest(archive.manifest_of(place)))
        except (FileNotFoundError, ValueError):
            return None
        problem = archive.defect(there)
        if problem and problem.startswith(archive.UNREADABLE):  # it may be whole: wait, do not write over it
            raise OSError(errno.EIO, f"{place.name} is there, but {problem}")
        return there if there.manifest.fingerprint == self.mark and problem is None else None

    def _count(self, count: int) -> None:
        if self._ended.is_set():  # the cell was run again: what this one still wrote would turn up in the new run
            raise InterruptedError(errno.EINTR, "another carrier took over")
        self.carried += count

    def _mirror_logs(self) -> None:
        if self.logs is None:
            return
        self.route.check()  # it makes folders, and must not make them where a mount was
        source, target = self.logs
        for file in (place for place in source.rglob("*") if place.is_file() and not place.is_symlink()):
            copied = target / file.relative_to(source)
            if not copied.exists() or copied.stat().st_size != file.stat().st_size:
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)

    def _mirror_logs_at_last(self) -> list[str]:
        """The logs, as they are in the end; the checkpoint is safe, so that they are not worth an error."""
        try:
            self._mirror_logs()
        except OSError as problem:
            assert self.logs
            return [f"[WARN] the logs could not be copied to {self.logs[1]}: {problem.strerror or problem}. "
                    f"They are in {self.logs[0]}."]  # fmt: skip
        return []

    def _failed(self, problem: Exception) -> None:
        told = f"{getattr(problem, 'strerror', None) or problem} ({type(problem).__name__})"
        if self.problem is None:
            self._say(f"[WARN] a checkpoint could not be brought to {self.route.keep}: {told}. Training goes on; "
                      "it waits in scratch and is tried again.")  # fmt: skip
        self.problem = told
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _say(self, line: str) -> None:
        with self._lock:
            self._messages.append(line)


def end_earlier(sealed: Path) -> None:
    """End the carrier that an earlier run of the cell began with this store, if there is one."""
    if old := _AT_WORK.pop(sealed, None):
        old.close()


def _step(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])
