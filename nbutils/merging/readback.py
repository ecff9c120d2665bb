"""A growing file brought to the disk, and an eighth of it read back from there, while the rest is still being made.

The system has told by then that all of it is on the disk; a disk that loses data all the same loses more than a piece.
Reading all of it again would take as long as the merge. What an interrupted merge left is read to the last byte.
Not here: what is written (writing).
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from nbutils.errors import CourseError
from nbutils.merging.shards import Piece, is_intact

PAUSE = 0.2  # seconds between two looks at what has been written
SAMPLE = 8  # one piece of so many is read back


class ReadBack:
    """Within its block all pieces are brought to the disk and some are read back; a lost one is an error at its end."""

    def __init__(self, file: Path, workers: int) -> None:
        self.file, self.workers = file, workers
        self.pieces: list[Piece] = []
        self._checked = 0
        self._lost = False
        self._ended = threading.Event()
        self._helper = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ReadBack:
        self._helper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._helper.join()
        if kind is None:
            self._check()
            self._require_kept()

    def add(self, piece: Piece) -> None:
        """A piece that has been written; workers may call it side by side."""
        self.pieces.append(piece)

    def _watch(self) -> None:
        while not self._ended.wait(PAUSE) and not self._lost:
            self._check()

    def _check(self) -> None:
        """Bring what was written to the disk, drop some of it from memory, and read that from where it is now."""
        fresh = len(self.pieces)
        sample = [self.pieces[place] for place in range(self._checked, fresh) if place % SAMPLE == 0]
        with open(self.file, "rb+") as opened:
            os.fsync(opened.fileno())
            for offset, length, _ in sample if hasattr(os, "posix_fadvise") else ():
                os.posix_fadvise(opened.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        self._lost = self._lost or not all_intact(self.file, sample, self.workers)
        self._checked = fresh

    def _require_kept(self) -> None:
        if self._lost:
            raise CourseError(
                f"{self.file} does not hold what was written to it: that disk loses data.", "a disk that keeps files",
                "merge to another folder; on Google Drive, merge to the local disk and copy the result",
            )  # fmt: skip


def intact(file: Path, pieces: list[Piece], workers: int) -> bool:
    """Whether a file holds all its pieces, and nothing behind them."""
    end = max((offset + length for offset, length, _ in pieces), default=0)
    if not pieces or not file.is_file() or file.stat().st_size != end:
        return False
    return all_intact(file, pieces, workers)


def all_intact(file: Path, pieces: list[Piece], workers: int) -> bool:
    """Whether a file holds these pieces; several readers, because a disk gives one of them only a part of its speed."""
    with ThreadPoolExecutor(workers) as pool:
        return all(pool.map(lambda piece: is_intact(file, piece), pieces))
