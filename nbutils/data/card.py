"""The data card: what was read, what was kept, what was refused and why, and the fingerprint of the result.

Not here: making the data (splits). The card is written last, so a folder with a card is a finished one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nbutils.data.reading import RowError
from nbutils.errors import CourseError

CARD, TRAIN, EVAL, REJECTED = "data_card.json", "train.jsonl", "eval.jsonl", "rejected.jsonl"
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CJK = re.compile(r"[\u3400-\u9fff]")
NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())
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
    rows: int
    accepted: int
    rejected: int
    train: int
    eval: int
    unused: int
    duplicates: int
    trimmed: int
    reasons: dict[str, int]
    languages: dict[str, int]
    characters: dict[str, int]
    fingerprint: str

    def __str__(self) -> str:
        reasons = ", ".join(f"{kind} {count}" for kind, count in self.reasons.items()) or "none"
        lines = {
            "source": self.source + (f" + {self.eval_source}" if self.eval_source else ""),
            "rows": f"{self.rows} = {self.accepted} accepted + {self.rejected} rejected",
            "splits": f"{self.train} train, {self.eval} eval, {self.unused} unused",
            "rejected": f"{reasons} (duplicates: {self.duplicates})",
            "trimmed": f"{self.trimmed} rows lost blank lines or spaces at an edge",
            "languages": ", ".join(f"{name} {count}" for name, count in self.languages.items()),
            "licence": self.licence,
            "fingerprint": self.fingerprint,
        }
        return "\n".join(f"{name:<12} {text}" for name, text in lines.items())


def language(messages: list[dict[str, str]]) -> str:
    """zh or en by the script of the user's turns; a Chinese character weighs as much as three Latin letters."""
    text = " ".join(message["content"] for message in messages if message["role"] == "user")
    plain = text.encode("ascii", "ignore")
    latin = len(plain.translate(None, NO_LETTERS))
    chinese = len(text) - len(plain) if CJK.search(text) else 0
    if not chinese and not latin:
        return "other"
    return "zh" if 3 * chinese >= latin else "en"


def length_bin(messages: list[dict[str, str]]) -> str:
    """The histogram bin of a row's characters."""
    length = sum(len(message["content"]) for message in messages)
    return next((f"<={edge}" for edge in BINS if length <= edge), f">{BINS[-1]}")


def length_bins() -> list[str]:
    """All bins, shortest first."""
    return [*(f"<={edge}" for edge in BINS), f">{BINS[-1]}"]


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
            for line in file:
                digest.update(line)
                counts[-1] += 1
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
    return _rows(out / TRAIN), _rows(out / EVAL)


def _rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def print_problems(errors: Iterable[RowError]) -> None:
    """A table of problems: where, which field, what is wrong, what was seen, what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("line", "field", "problem", "seen", "to do", show_lines=False)
    for error in errors:
        table.title = error.file
        for problem in error.problems:
            cells = (problem.field, problem.kind, problem.seen, problem.todo)
            table.add_row(str(error.line), *(Text(cell) for cell in cells))
    Console(width=140).print(table)
