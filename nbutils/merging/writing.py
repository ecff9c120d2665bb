"""One shard of a merged model: computed block by block, written at its place, read back, and written down.

Several workers share the blocks; each holds one block and nothing else, so memory does not grow with the model.
Not here: what the shards are (plan), the folder they go to (streaming).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.merging import dequantized
from nbutils.merging.checks import target_code
from nbutils.merging.formula import Apply, Recipe
from nbutils.merging.readback import ReadBack
from nbutils.merging.shards import FLOATS, Piece, Stored, lay_out, write_at
from nbutils.paths import empty_folder, write_json

if TYPE_CHECKING:
    import torch

Progress = Callable[[int], Any]
JOURNAL = "journal.json"


@dataclass(frozen=True)
class Workshop:
    """How shards are made: the type written, the device computed on, the 4-bit form, the workers."""

    dtype: str
    device: str
    form: Mapping[str, Any]
    workers: int
    progress: Progress

    def layout(self, file: Path, recipes: Mapping[str, Recipe]) -> tuple[bytes, dict[str, Stored]]:
        """The header of a shard and the place of each weight in it."""
        wanted = {
            name: (target_code(recipe.source, self.dtype), recipe.source.shape) for name, recipe in recipes.items()
        }
        return lay_out(file, wanted)

    def write(self, file: Path, recipes: Mapping[str, Recipe]) -> list[Piece]:
        """Write a shard, bring it to the disk, read it back; its pieces with their checksums."""
        header, places = self.layout(file, recipes)
        with open(file, "wb") as opened:
            opened.truncate(len(header) + sum(place.size for place in places.values()))
        with ReadBack(file, self.workers) as done:
            done.add(write_at(file, 0, header))
            self._fill(recipes, places, done.add)
        return done.pieces

    def _fill(self, recipes: Mapping[str, Recipe], places: Mapping[str, Stored], done: Callable[[Piece], None]) -> None:
        """Every block of every weight, by several workers; weights that must be whole one after another."""
        with one_thread_each(), ThreadPoolExecutor(self.workers) as pool:
            waiting: list[Future[None]] = []
            room = threading.BoundedSemaphore(2 * self.workers)
            for name, asked in recipes.items():
                recipe = asked if asked.by_rows else replace(asked, source=asked.source.flat)
                place = places[name] if asked.by_rows else places[name].flat
                applies = [change.load(self.device) for change in recipe.changes]
                for first, last in recipe.source.blocks(recipe.whole):
                    room.acquire()
                    work = pool.submit(self._block, name, recipe, applies, place, first, last, done)
                    work.add_done_callback(lambda _: room.release())
                    waiting.append(work)
                    if recipe.whole:
                        work.result()
                waiting = still_waiting(waiting)
            for work in waiting:
                work.result()

    def _block(
        self, name: str, recipe: Recipe, applies: list[Apply], target: Stored, first: int, last: int,
        done: Callable[[Piece], None],
    ) -> None:  # fmt: skip
        """Make some rows of a weight and write them where they belong."""
        import torch

        source = recipe.source
        data: Any
        if not recipe.by_rows and not recipe.replaced and source.dtype == target.dtype:
            data = source.read(first, last, scratch=True)
        else:
            with torch.inference_mode():
                made, fine = self.rows(recipe, applies, target, first, last)
            if not fine:
                require_finite(name, made, target.dtype)
            data = made.view(-1).view(torch.uint8).numpy().data
        self.progress(len(data))
        done(write_at(target.file, target.start + first * (target.size // max(target.rows, 1)), data))

    def rows(
        self, recipe: Recipe, applies: list[Apply], target: Stored, first: int, last: int
    ) -> tuple[torch.Tensor, bool]:
        """The rows with every change in them, computed in float32 and rounded once; whether they are surely finite."""
        import torch

        stored = recipe.source.tensor(first, last, scratch=not recipe.whole)
        made = torch.empty(stored.shape, dtype=getattr(torch, FLOATS[target.dtype]))
        fine, narrow = True, target.dtype == "F16"
        whole = recipe.whole or self.device != "cpu" or not recipe.source.shape
        for begin, end in recipe.source.steps(first, last, whole):
            rows = stored[begin - first : end - first].to(self.device)
            base = dequantized.there_and_back(rows, self.form) if recipe.four_bit else rows.float()
            weight = base.clone() if len(applies) > 1 or base is rows else base
            for apply in applies:
                weight = apply(weight, base, begin, end)
            made[begin - first : end - first] = weight
            fine = fine and surely_finite(weight, narrow)
        return made, fine


def still_waiting(works: list[Future[None]]) -> list[Future[None]]:
    """The blocks that are not done; the first error among the others ends it all at once, not ten thousand times."""
    for work in works:
        if work.done() and work.exception():
            for other in works:
                other.cancel()
            work.result()
    return [work for work in works if not work.done()]


def surely_finite(weight: torch.Tensor, narrow: bool) -> bool:
    """Whether a glance shows only finite numbers: a finite sum does, and where float16 is meant, the extremes do.

    Looking at each number by itself would take longer than the merge.
    """
    if not narrow:
        return math.isfinite(weight.sum())
    low, high = weight.aminmax()
    return bool(low >= -65504) and bool(high <= 65504)


def require_finite(name: str, made: torch.Tensor, code: str) -> None:
    """Refuse numbers that the target type cannot hold, and adapters that hold none."""
    if not bool(made.isfinite().all()):
        raise CourseError(
            f"{name} has infinite or undefined numbers after the merge in {FLOATS[code]}.", "finite weights",
            "merge in bfloat16 or float32: float16 ends at 65504; if it stays, train again" if code == "F16"
            else "train again from an earlier checkpoint, at a lower learning rate: the adapter itself is broken",
        )  # fmt: skip


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Within this block each worker computes on one processor, and a card computes products in full float32."""
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)  # the blocks are what runs side by side
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@dataclass
class Journal:
    """Which shards of an interrupted merge are finished; it counts only for the same merge of the same files."""

    folder: Path
    of: dict[str, Any]
    shards: dict[str, list[Piece]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, of: dict[str, Any]) -> Journal:
        """The journal of a folder; another merge's remains are removed with it."""
        try:
            written = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
            if written["of"] == json.loads(json.dumps(of)):
                for begun in folder.glob(f".{JOURNAL}.*"):  # killed while it was written
                    begun.unlink()
                shards = {name: [tuple(piece) for piece in pieces] for name, pieces in written["shards"].items()}
                return cls(folder, of, shards)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        empty_folder(folder)
        return cls(folder, of)

    def add(self, name: str, pieces: list[Piece]) -> None:
        """Write down that a shard is finished."""
        self.shards[name] = pieces
        write_json(self.folder / JOURNAL, {"of": self.of, "shards": self.shards})
