"""The three things reading yields: a row as the file has it, a row that cannot be used, and why not.

Not here: any rule. They are made a million times, so the frequent ones are tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a row, or worth a warning: its kind, the field, what was seen there, what to do."""

    kind: str
    field: str
    seen: str
    todo: str


class Row(NamedTuple):
    """A row as the file has it; `encoding` is named where its text had to be converted to be read."""

    file: str
    line: int
    raw: Any
    encoding: str = ""


class RowError(NamedTuple):
    """A row that cannot be used, with every reason found."""

    file: str
    line: int
    raw: Any
    problems: tuple[Problem, ...]
