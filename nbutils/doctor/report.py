"""What a report is made of, and how it is shown to people and to programs.

Not here: looking at anything.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from nbutils.hardware import Card
from nbutils.platforms import Folders, Platform

WIDTH = 110


@dataclass(frozen=True)
class Check:
    """One thing looked at; `todo` is empty when it is OK."""

    name: str
    status: str  # OK, WARN or FAIL
    seen: str
    todo: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks look at; `torch` is the check of torch itself, `trouble` a card that cannot even be asked."""

    platform: Platform
    folders: Folders
    torch: Check
    card: Card | None
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """Everything the doctor saw."""

    platform: Platform
    folders: Folders
    room: dict[str, dict[str, float | None]]  # of each folder: free_gib, free_inodes
    limits: dict[str, float | None]
    card: Card | None
    checks: tuple[Check, ...]
    versions: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether anything must be mended before training."""
        return any(check.status == "FAIL" for check in self.checks)

    def text(self) -> str:
        """The report for people."""
        statuses = [check.status for check in self.checks]
        counts = [f"{statuses.count(status)} {status}" for status in ("OK", "WARN", "FAIL")]
        verdict = "Mend what says FAIL before you train." if self.failed else "This machine can be used."
        return "\n".join([*map(_lines, self.checks), "", f"{', '.join(counts)}. {verdict}"])

    def rows(self) -> list[dict[str, str]]:
        """The checks for a table."""
        return [
            {"": _mark(check.status), "what": check.name, "seen": check.seen, "to do": check.todo}
            for check in self.checks
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report for programs."""
        places = {name: getattr(self.folders, name) for name in ("work", "scratch", "keep", "inputs")}
        return {
            "platform": asdict(self.platform),
            "folders": {name: str(place) if place else None for name, place in places.items()},
            "room": self.room,
            "limits": self.limits,
            "card": asdict(self.card) if self.card else None,
            "checks": [asdict(check) for check in self.checks],
            "versions": self.versions,
        }


def _mark(status: str) -> str:
    return "[ OK ]" if status == "OK" else f"[{status}]"


def _lines(check: Check) -> str:
    start, indent = f"{_mark(check.status)} {check.name:11} ", " " * 19
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    wrap.initial_indent = start
    lines = wrap.wrap(check.seen)
    wrap.initial_indent, wrap.subsequent_indent = f"{indent}To do: ", f"{indent}       "
    return "\n".join(lines + wrap.wrap(check.todo))


def first_line(problem: Exception) -> str:
    """A problem in one line: its kind and the first line of what it says."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
