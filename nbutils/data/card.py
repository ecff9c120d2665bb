"""The data card: what was read, what was kept, what was refused and why, and the fingerprint of the result.

Not here: making the data (splits). The card is written last, so a folder with a card is a finished one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nbutils import dashboard
from nbutils.data.private import find_private
from nbutils.data.raw import RowError
from nbutils.data.tally import REPEATED, describe, entries
from nbutils.errors import CourseError
from nbutils.paths import CHUNK

CARD, TRAIN, EVAL, REJECTED = "data_card.json", "train.jsonl", "eval.jsonl", "rejected.jsonl"
CARD_TEXT = "data_card.md"  # the card for people; programs read the JSON
LENT = " (so few rows that train lent eval one; with more rows it may go back)"
AGAIN = "run lesson 02 with a new RUN_NAME, or remove the folder {out} and run lesson 02 again"


class DataCard(BaseModel):
    """rows = accepted + rejected, accepted = train + eval + unused; each rejected row counts under its first reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    eval_source: str
    source_sha256: str
    eval_fraction: float
    limit: int
    licence: str
    columns: str = ""
    near: float | None = None  # None: written before near duplicates were looked for, and text was repaired
    repair: bool | None = None
    rows: int
    accepted: int
    rejected: int
    train: int
    eval: int
    unused: int
    lent: int = 0
    duplicates: int
    trimmed: int
    reasons: dict[str, int]
    warnings: dict[str, int] = {}
    examples: list[str] = []
    languages: dict[str, int]
    characters: dict[str, int]
    fingerprint: str

    def lines(self) -> dict[str, str]:
        """The card in words, but for the histogram."""
        repeated = {kind: count for kind, count in self.reasons.items() if kind in REPEATED}
        others = {kind: count for kind, count in self.reasons.items() if kind not in REPEATED}
        near = "not looked for" if not self.near else f"overlap of {self.near:g} or more"
        return {
            "source": self.source + (f" + {self.eval_source}" if self.eval_source else ""),
            "columns": self.columns or "recognised by name",
            "rows": f"{self.rows} = {self.accepted} accepted + {self.rejected} rejected",
            "splits": f"{self.train} train, {self.eval} eval, {self.unused} unused{LENT * self.lent}",
            "rejected": _counts(others),
            "repeated": f"{_counts(repeated)} (near duplicates: {near})",
            "trimmed": f"{self.trimmed} rows lost blank lines or spaces at an edge",
            "warnings": _counts(self.warnings),
            "languages": _counts(self.languages),
            "licence": self.licence,
            "fingerprint": self.fingerprint,
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in self.lines().items())

    def markdown(self) -> str:
        """The card as a page: the words, the lengths, the first warnings."""
        table = ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in self.lines().items())]
        most = max(self.characters.values(), default=1)
        bars = [f"{name:>8} {count:>9} {'#' * (-(-40 * count // most))}" for name, count in self.characters.items()]
        parts = ["# Data card", "\n".join(table), "## Characters per row", "\n".join(["```", *bars, "```"])]
        if self.examples:
            parts += ["## Warnings, the first of each kind", "\n".join(f"- {_cell(text)}" for text in self.examples)]
        return "\n\n".join(parts) + "\n"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _cell(text: str) -> str:
    """Text that may stand in a table or a list of a Markdown page."""
    return re.sub(r"([|<>`*_\[\]\\])", r"\\\1", text).replace("\n", " ")


def read_card(out: Path) -> DataCard:
    """The card of a finished data folder."""
    path = out / CARD
    if not path.exists():
        raise CourseError(f"There is no {path}: the data is not prepared.", "a finished data folder", "run lesson 02")
    try:
        return DataCard.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as problem:
        raise CourseError(
            f"{path} is not a data card this course wrote: {str(problem).splitlines()[0]}",
            "the card as lesson 02 leaves it",
            AGAIN.format(out=out),
        ) from problem


def fingerprint(out: Path) -> tuple[str, int, int]:
    """sha256 over both splits as they are on disk, with their row counts."""
    digest, counts = hashlib.sha256(), []
    for name in (TRAIN, EVAL):
        counts.append(0)
        with open(out / name, "rb") as file:
            while piece := file.read(CHUNK):
                digest.update(piece)
                counts[-1] += piece.count(b"\n")
        digest.update(b"\0")
    return digest.hexdigest(), counts[0], counts[1]


def verify(out: Path) -> DataCard:
    """The card, once the files beside it are found to be the ones it describes."""
    card = read_card(out)
    missing = [name for name in (TRAIN, EVAL) if not (out / name).exists()]
    if missing:
        raise CourseError(
            f"{', '.join(missing)} is gone from {out}.", "the files the card describes", AGAIN.format(out=out)
        )
    found, train, held_out = fingerprint(out)
    if (found, train, held_out) != (card.fingerprint, card.train, card.eval):
        raise CourseError(
            f"The files in {out} are not the ones its card describes: {train} train and {held_out} eval rows, "
            f"fingerprint {found[:12]}; the card says {card.train}, {card.eval}, {card.fingerprint[:12]}.",
            "data files unchanged since lesson 02 wrote them",
            AGAIN.format(out=out),
        )
    return card


def load(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The verified train and eval rows."""
    verify(out)
    return stored_rows(out / TRAIN), stored_rows(out / EVAL)


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file the course wrote."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


def row_to_show(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row without private data, if there is one among the first hundred; else the first."""
    return next((row for row in rows[:100] if not any(find_private(str(row)))), rows[0])


def show_problems(errors: Iterable[RowError]) -> None:
    """A table of problems: where, which field, what is wrong, what was seen, what to do."""
    found = [entry for error in errors for entry in entries(error)]
    columns = {"line": "line", "field": "field", "problem": "kind", "seen": "seen", "to do": "todo"}
    rows = [{title: entry[name] for title, name in columns.items()} for entry in found]
    dashboard.show_table(rows, text="\n".join(map(describe, found)))
