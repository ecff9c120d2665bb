"""The length filter, and the datasets for the trainer: the tokens that were checked, and no second rendering.

A row whose stop token max_length would cut off is left out loudly, never trained cut.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbutils.chat.render import View, training_format
from nbutils.chat.types import IGNORED, Example, Row
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.paths import write_text

if TYPE_CHECKING:
    from datasets import Dataset

FILE = "too_long.jsonl"
SHOWN = 5  # rows that are left out


class Long(NamedTuple):
    """A row that is left out: its number (from 1), its tokens, and how many are too many."""

    row: int
    tokens: int
    cut: int
    stop_lost: bool = True


@dataclass(frozen=True)
class Fitting:
    """The rows that keep their stop tokens, and those that would not; of a kept row only white space is ever cut."""

    form: Choice
    max_length: int
    kept: list[Row] = field(repr=False)
    numbers: list[int] = field(repr=False)  # of the kept rows, from 1, among all
    long: tuple[Long, ...]
    longest: int
    left_out: list[Row] = field(repr=False)
    view: View = field(repr=False)
    examples: list[Example] = field(repr=False)  # those of the kept rows

    def __str__(self) -> str:
        total, count = len(self.kept) + len(self.long), len(self.long)
        if not count:
            limit = f"max_length is {self.max_length}" if self.max_length else "there is no limit"
            return f"all {total} rows fit: the longest has {self.longest} tokens, {limit}"
        lines = [f"{count} of {total} rows are LEFT OUT: max_length {self.max_length} would cut off their stop token"]
        lines += [f"  row {one.row}: {one.tokens} tokens, {one.cut} too many" for one in self.long[:SHOWN]]
        lines += [f"  and {count - SHOWN} more"] if count > SHOWN else []
        lines += [f"  to train them raise train.max_length to {self.longest} (memory grows with it), or shorten them"]
        return "\n".join(lines)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example that is trained."""
        return [len(example.ids) for example in self.examples]

    def write(self, folder: Path) -> Path:
        """Write the rows that are left out, with their numbers, to too_long.jsonl; empty without any."""
        lines = [
            json.dumps({"row": one.row, "tokens": one.tokens, "cut": one.cut} | row, ensure_ascii=False) + "\n"
            for one, row in zip(self.long, self.left_out, strict=True)
        ]
        write_text(folder / FILE, "".join(lines))
        return folder / FILE


def fitting(
    tokenizer: Any,
    rows: Sequence[Row],
    max_length: int,
    form: str = "",
    thinking: bool | None = None,
    stop_ids: Iterable[int] | None = None,
) -> Fitting:
    """Render all rows, and leave out those whose stop token lies beyond `max_length` (0: no limit).

    `thinking` is the mode servers will be asked in, where the template has two; None is its default.
    `stop_ids` are the tokens generation ends at (see find_stop_ids); None: the tokenizer's own.
    """
    choice = Choice(form, "as asked") if form else training_format(tokenizer, rows, thinking)
    if not rows:
        raise CourseError("chat.no_rows")
    view = View(tokenizer, choice.value, thinking, stop_ids)
    examples = view.encode_all(rows)
    longest = max(len(example.ids) for example in examples)
    long: dict[int, Long] = {}
    for example in sorted(examples, key=lambda example: (example.row, len(example.ids))):
        if 0 < max_length <= last_place(view, example):
            long[example.row] = Long(example.row, len(example.ids), len(example.ids) - max_length)
    if len(long) == len(rows):
        raise CourseError("chat.all_rows_too_long", rows=len(rows), max_length=max_length, longest=longest)
    numbers = [number for number in range(1, len(rows) + 1) if number not in long]
    return Fitting(
        form=choice,
        max_length=max_length,
        kept=[rows[number - 1] for number in numbers],
        numbers=numbers,
        long=tuple(long.values()),
        longest=longest,
        left_out=[rows[number - 1] for number in long],
        view=view,
        examples=[example for example in examples if example.row not in long],
    )


def last_place(view: View, example: Example) -> int:
    """The position of the last trained token that is not white space: the stop token, in a sound example."""
    at = example.trained.rfind(1)
    while at > 0 and view.blank(example.ids[at]):
        at = example.trained.rfind(1, 0, at)
    return at


def training_dataset(fitted: Fitting) -> Dataset:
    """The examples of the kept rows, for SFTTrainer: it packs and shuffles these tokens, and changes none."""
    return _dataset(fitted.examples)


def validation_dataset(fitted: Fitting, held_back: Sequence[Row], count: int) -> Dataset:
    """`count` of the held-back rows, evenly spread, rendered as the training rows are; long ones are left out."""
    if count < len(held_back):
        held_back = [held_back[number * len(held_back) // count] for number in range(count)]
    examples = fitted.view.encode_all(held_back) if count and held_back else []
    usable = [one for one in examples if len(one.ids) <= (fitted.max_length or len(one.ids)) and any(one.trained)]
    if count and not usable:
        print("no row is held back that could be validated on: trained without validation, the last step is kept")
    return _dataset(usable)


def _dataset(examples: Sequence[Example]) -> Dataset:
    import numpy
    import pyarrow
    from datasets import Dataset

    offsets = list(itertools.accumulate((len(example.ids) for example in examples), initial=0))
    ids, trained = array("i"), bytearray()
    for example in examples:
        ids += example.ids
        trained += example.trained
    tokens = numpy.frombuffer(ids, dtype=numpy.int32)
    labels = numpy.where(numpy.frombuffer(trained, dtype=bool), tokens, IGNORED).astype(numpy.int64)
    columns = [pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values)) for values in (tokens, labels)]
    return Dataset(pyarrow.table(columns, names=["input_ids", "labels"]))
