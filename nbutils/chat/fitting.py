"""Which rows fit into max_length: a row that would lose its stop token is left out loudly, never trained cut.

The rows that stay keep their tokens, so that the check and the trainer need not render them again.
Not here: the check itself (contract), and handing the tokens over (handing).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nbutils.chat.forms import training_format
from nbutils.chat.rendering import Example, Row, View
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.paths import write_text

FILE = "too_long.jsonl"
SHOWN = 5


class Long(NamedTuple):
    """A row over the limit: its number (from 1), its tokens, how many are cut, and whether the stop token is."""

    row: int
    tokens: int
    cut: int
    stop_lost: bool


@dataclass(frozen=True)
class Fitting:
    """The rows that keep all their stop tokens, and those over the limit; only blanks of a kept row are ever cut."""

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
        total = len(self.kept) + len(self.left_out)
        if not self.left_out:
            limit = f"max_length is {self.max_length}" if self.max_length else "there is no limit"
            return f"all {total} rows fit: the longest has {self.longest} tokens, {limit}"
        lost = [one for one in self.long if one.stop_lost]
        lines = [
            f"{len(lost)} of {total} rows are LEFT OUT: max_length {self.max_length} would cut off their stop token",
            *(f"  row {one.row}: {one.tokens} tokens, {one.cut} too many" for one in lost[:SHOWN]),
            *([f"  and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else []),
            f"  to train them raise train.max_length to {self.longest} (memory grows with it), or shorten them",
        ]
        return "\n".join(lines)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example that is trained."""
        return [len(example.ids) for example in self.examples]

    def write(self, folder: Path) -> Path:
        """Write the rows that are left out, and their numbers, to too_long.jsonl of a folder; empty without any."""
        lost = [one for one in self.long if one.stop_lost]
        lines = [
            json.dumps({"row": one.row, "tokens": one.tokens, "cut": one.cut} | row, ensure_ascii=False) + "\n"
            for one, row in zip(lost, self.left_out, strict=True)
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
    """Render all rows, and set those aside whose stop token lies beyond `max_length` (0: no limit).

    `stop_ids` are the tokens generation ends at (see find_stop_ids), None the tokenizer's own: none is trained after.
    """
    choice = Choice(form, "as asked") if form else training_format(tokenizer, rows, thinking)
    if not rows:
        raise CourseError("There are no rows to check.", "at least one row", "run lesson 02 first")
    view = View(tokenizer, choice.value, thinking, stop_ids)
    examples = view.encode_all(rows)
    long = _over(view, examples, max_length)
    lost = {number for number, one in long.items() if one.stop_lost}
    longest = max(len(example.ids) for example in examples)
    if len(lost) == len(rows):
        raise CourseError(
            f"All {len(rows)} rows lose their stop token at max_length {max_length}; the longest has {longest} tokens.",
            "rows that fit: a model that never sees the stop token never stops",
            f"raise train.max_length in the profile to {longest}, or shorten the rows",
        )
    numbers = [number for number in range(1, len(rows) + 1) if number not in lost]
    return Fitting(
        form=choice,
        max_length=max_length,
        kept=[rows[number - 1] for number in numbers],
        numbers=numbers,
        long=tuple(long.values()),
        longest=longest,
        left_out=[rows[number - 1] for number in sorted(lost)],
        view=view,
        examples=[example for example in examples if example.row not in lost],
    )


def _over(view: View, examples: list[Example], max_length: int) -> dict[int, Long]:
    """Rows over the limit by number; where an answer is an example of its own, its longest example speaks for a row."""
    long: dict[int, Long] = {}
    for example in examples:
        tokens = len(example.ids)
        if not 0 < max_length < tokens:
            continue
        one = Long(example.row, tokens, tokens - max_length, last_place(view, example) >= max_length)
        before = long.get(example.row)
        long[example.row] = max(before, one, key=lambda either: (either.stop_lost, either.tokens)) if before else one
    return long


def last_place(view: View, example: Example) -> int:
    """Where the last trained token that is not blank stands: the stop token, in a row that keeps the contract."""
    at = example.trained.rfind(1)
    while at > 0 and view.blank(example.ids[at]):
        at = example.trained.rfind(1, 0, at)
    return at
