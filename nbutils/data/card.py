"""What became of the rows: the counts of a pass, the data card of a finished folder, the report of `data check`."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nbutils import display
from nbutils.data.rows import ChatRow, check_row
from nbutils.data.text import Row, RowError, find_private, shown
from nbutils.errors import CourseError
from nbutils.files import CHUNK

CARD, TRAIN, EVAL, REJECTED = "data_card.json", "train.jsonl", "eval.jsonl", "rejected.jsonl"
REPEATED = ("duplicate", "leak", "near_duplicate", "near_leak")
LENT = " (so few rows that train lent eval one; with more rows it may go back)"
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
CJK = re.compile(r"[\u3400-\u9fff]")
NO_LETTERS = bytes(code for code in range(256) if not (code < 128 and chr(code).isalpha()))
NOT_ASCII = bytes(range(128, 256))
SHOWN = 3  # rows of each kind that are kept to be shown


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

    def __str__(self) -> str:
        lines = {
            "source": self.source, "licence": self.licence,
            "rows": f"{self.rows} = {self.accepted} accepted + {self.rejected} rejected",
            "splits": f"{self.train} train, {self.eval} eval, {self.unused} unused{LENT * self.lent}",
            "rejected": counts_text(self.reasons), "warnings": counts_text(self.warnings),
            "languages": counts_text(self.languages), "characters": counts_text(self.characters),
            "fingerprint": self.fingerprint,
        }  # fmt: skip
        return "\n".join(f"{name:<12} {text}" for name, text in lines.items())

    def facts(self) -> dict[str, Any]:
        """What goes into the facts.json of a lesson."""
        return self.model_dump(include={"rows", "accepted", "rejected", "train", "eval", "fingerprint", "warnings"})


def counts_text(counts: dict[str, int]) -> str:
    """Counts on one line."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def read_card(out: Path) -> DataCard:
    """The card of a finished data folder."""
    path = out / CARD
    if not path.exists():
        raise CourseError("data.not_prepared", path=path)
    try:
        return DataCard.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as problem:
        raise CourseError("data.changed", out=out, what=f"{CARD}: {str(problem).splitlines()[0]}") from problem


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
    if missing := [name for name in (TRAIN, EVAL) if not (out / name).exists()]:
        raise CourseError("data.changed", out=out, what=f"{', '.join(missing)} is gone")
    found = fingerprint(out)
    if found != (card.fingerprint, card.train, card.eval):
        what = "fingerprint {:.12}, {} train and {} eval rows".format(*found)
        raise CourseError("data.changed", out=out, what=what)
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


def show(row: Row | RowError, columns: str = "") -> None:
    """Print a row turn by turn, private data masked; what is wrong with it, if it cannot be used."""
    checked = check_row(row, columns)
    if isinstance(checked, RowError):
        print(*map(describe, entries(checked)), sep="\n")
    else:
        print(*(f"{turn['role']:>9}: {shown(turn['content'])[:300]}" for turn in checked.messages), "", sep="\n")


def show_problems(errors: Iterable[RowError]) -> None:
    """A table of problems: where, which field, what is wrong, what was seen, what to do."""
    found = [entry for error in errors for entry in entries(error)]
    columns = {"line": "line", "field": "field", "problem": "kind", "seen": "seen", "to do": "todo"}
    rows = [{title: entry[name] for title, name in columns.items()} for entry in found]
    display.show_table(rows, text="\n".join(map(describe, found)))


def entries(error: RowError) -> list[dict[str, Any]]:
    """The problems of a row, each with its place, as programs get them."""
    return [{"file": error.file, "line": error.line, **vars(problem)} for problem in error.problems]


def describe(entry: dict[str, Any]) -> str:
    """One problem for people: where, what, and below it what to do."""
    where = f"{entry['file']} line {entry['line']}, {entry['field']}"
    return f"{where}: {entry['kind']}, saw {entry['seen']}\n      -> {entry['todo']}"


class Counts:
    """What a pass counts: each rejected row under its first problem, each accepted one with its warnings."""

    def __init__(self) -> None:
        self.rows = self.templated = 0
        self.files: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.kinds: dict[int, set[str]] = {}  # warnings, and "trimmed", of the rows that have any
        self.first_errors: list[RowError] = []
        self.first_warnings: list[str] = []

    def warn(self, number: int, row: ChatRow, file: str) -> None:
        """Note what is to be said about a row that is used."""
        for warning in row.warnings:
            if sum(f": {warning.kind} " in text for text in self.first_warnings) < 2:
                text = f"{file} line {row.line}, {warning.field}: {warning.kind} {warning.seen}"
                self.first_warnings.append(text.rstrip())
        if row.warnings or row.trimmed:
            self.kinds[number] = {warning.kind for warning in row.warnings} | ({"trimmed"} if row.trimmed else set())

    def measure(self, messages: list[dict[str, Any]]) -> None:
        """Length and language of a row that is used."""
        self.lengths[BIN_NAMES[bisect_left(BINS, sum([len(message["content"]) for message in messages]))]] += 1
        self.languages[language(messages)] += 1

    def reject(self, error: RowError) -> None:
        """One more row that is not used."""
        kind = error.problems[0].kind
        self.reasons[kind] += 1
        if self.reasons[kind] <= SHOWN:
            self.first_errors.append(error)

    def facts(self) -> dict[str, Any]:
        """The counts, as a card and `data check --json` show them."""
        warnings = Counter(kind for kinds in self.kinds.values() for kind in kinds)
        rejected, trimmed = sum(self.reasons.values()), warnings.pop("trimmed", 0)
        used = [place for place, name in enumerate(BIN_NAMES) if self.lengths[name]]
        return {
            "rows": self.rows,
            "accepted": self.rows - rejected,
            "rejected": rejected,
            "duplicates": sum(self.reasons[kind] for kind in REPEATED),
            "trimmed": trimmed,
            "reasons": _largest_first(self.reasons),
            "warnings": _largest_first(warnings | Counter(templated=self.templated)),
            "languages": _largest_first(self.languages),
            "characters": {name: self.lengths[name] for name in BIN_NAMES[used[0] : used[-1] + 1]} if used else {},
        }


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in Counter(counts).most_common() if count > 0}


def language(messages: list[dict[str, Any]]) -> str:
    """zh or en by the script of the user's turns; a Chinese character weighs as much as three Latin letters."""
    text = " ".join([message["content"] for message in messages if message["role"] == "user"])
    raw = text.encode()
    latin = len(raw.translate(None, NO_LETTERS))
    chinese = 0 if text.isascii() or not CJK.search(text) else len(text) - len(raw.translate(None, NOT_ASCII))
    if not chinese and not latin:
        return "other"
    return "zh" if 3 * chinese >= latin else "en"


class Report:
    """What `data check` found: `data` for programs, `text` for people."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def text(self) -> str:
        """A short table, the first problems, what to do next."""
        data = self.data
        first = {problem["kind"]: problem for problem in reversed(data["problems"])}
        names = ("files", "reasons", "warnings", "languages", "lengths")
        lines = [
            f"{'rows':<10} {data['rows']} = {data['accepted']} accepted + {data['rejected']} rejected",
            *(f"{name:<10} {counts_text(data[name])}" for name in names if data[name]),
            *(f"  {describe(first[kind])}" for kind in reversed(first)),
            *(f"  {text}" for text in data["examples"]),
        ]
        return "\n".join([*lines, "", *data["next"]])
