"""The three things reading yields: a row as the file has it, a row that cannot be used, and why not.

What is said about a row can be shown as it is: private data masked, invisible characters spelled out. Not here: any
rule. They are made a million times, so the frequent ones are tuples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbutils.data.private import mask

INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """The text as it may stand on a screen: private data masked, what would steer the terminal spelled out."""
    return mask(INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text))


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a row, or worth a warning: its kind, the field, what was seen there, what to do."""

    kind: str
    field: str
    seen: str
    todo: str

    def __post_init__(self) -> None:
        for name in ("field", "seen", "todo"):
            object.__setattr__(self, name, shown(getattr(self, name)))


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
