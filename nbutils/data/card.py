"""What became of the rows: the counts of a pass, the data card of a finished folder, the report of `data check`."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from nbutils import dashboard
from nbutils.data.columns import advice
from nbutils.data.rows import ChatRow
from nbutils.data.text import RowError, find_private, shown
from nbutils.errors import CourseError
from nbutils.paths import CHUNK

CARD, CARD_TEXT, TRAIN, EVAL, REJECTED = "data_card.json", "data_card.md", "train.jsonl", "eval.jsonl", "rejected.jsonl"
REPEATED = ("duplicate", "leak", "near_duplicate", "near_leak")
LENT = " (so few rows that train lent eval one; with more rows it may go back)"
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
LANGUAGES = ("zh", "en", "other")
CJK = re.compile(r"[\u3400-\u9fff]")
NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())
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
            "rejected": counts_text(others),
            "repeated": f"{counts_text(repeated)} (near duplicates: {near})",
            "trimmed": f"{self.trimmed} rows lost blank lines or spaces at an edge",
            "warnings": counts_text(self.warnings),
            "languages": counts_text(self.languages),
            "licence": self.licence,
            "fingerprint": self.fingerprint,
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in self.lines().items())

    def markdown(self) -> str:
        """The card as a page: the words, the lengths, the first warnings."""
        table = ["| | |", "|---|---|", *(f"| {name} | {_escaped(text)} |" for name, text in self.lines().items())]
        most = max(self.characters.values(), default=1)
        bars = [f"{name:>8} {count:>9} {'#' * (-(-40 * count // most))}" for name, count in self.characters.items()]
        parts = ["# Data card", "\n".join(table), "## Characters per row", "\n".join(["```", *bars, "```"])]
        if self.examples:
            parts += ["## Warnings, the first of each kind", "\n".join(f"- {_escaped(one)}" for one in self.examples)]
        return "\n\n".join(parts) + "\n"


def counts_text(counts: dict[str, int]) -> str:
    """Counts on one line."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _escaped(text: str) -> str:
    return re.sub(r"([|<>`*_\[\]\\])", r"\\\1", text).replace("\n", " ")


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
    found, train, held_out = fingerprint(out)
    if (found, train, held_out) != (card.fingerprint, card.train, card.eval):
        what = f"{train} train and {held_out} eval rows, fingerprint {found[:12]}; "
        what += f"the card says {card.train}, {card.eval}, {card.fingerprint[:12]}"
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


def show_problems(errors: Iterable[RowError]) -> None:
    """A table of problems: where, which field, what is wrong, what was seen, what to do."""
    found = [entry for error in errors for entry in entries(error)]
    columns = {"line": "line", "field": "field", "problem": "kind", "seen": "seen", "to do": "todo"}
    rows = [{title: entry[name] for title, name in columns.items()} for entry in found]
    dashboard.show_table(rows, text="\n".join(map(describe, found)))


def entries(error: RowError) -> list[dict[str, Any]]:
    """The problems of a row, each with its place, as programs get them."""
    return [{"file": error.file, "line": error.line, **vars(problem)} for problem in error.problems]


def describe(entry: dict[str, Any]) -> str:
    """One problem for people: where, what, and below it what to do."""
    where = f"{entry['file']} line {entry['line']}, {entry['field']}"
    return f"{where}: {entry['kind']}, saw {entry['seen']}\n      -> {entry['todo']}"


class Counts:
    """What a pass counts: each rejected row under its first problem, for each accepted one a bit per label."""

    def __init__(self) -> None:
        self.rows = 0
        self.files: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first_errors: list[RowError] = []
        self.first_warnings: list[str] = []
        self.unknown_columns: dict[str, Any] = {}  # the first row whose columns are the problem, and how many there are
        self.unknown_column_rows = 0
        self.templated = 0
        self._labels: dict[str, int] = {}
        self._bits = array("Q")

    def accept(self, row: ChatRow) -> None:
        """One more row that is used."""
        labels = [BIN_NAMES[_length_bin(row.messages)], language(row.messages)] + ["trimmed"] * row.trimmed
        first = {warning.kind: warning for warning in reversed(row.warnings)}
        for warning in first.values():
            if sum(f": {warning.kind} " in text for text in self.first_warnings) < 2:
                text = f"{row.file} line {row.line}, {warning.field}: {warning.kind} {warning.seen}"
                self.first_warnings.append(text.rstrip())
        bits = 0
        for label in (*labels, *first):
            bits |= 1 << self._labels.setdefault(label, len(self._labels))
        self._bits.append(bits)

    def remove(self, number: int) -> None:
        """An accepted row turned out to repeat another one."""
        self._bits[number] = 0

    def reject(self, error: RowError) -> None:
        """One more row that is not used."""
        problem, raw = error.problems[0], error.raw
        self.reasons[problem.kind] += 1
        if self.reasons[problem.kind] <= SHOWN:
            self.first_errors.append(error)
        column = (
            problem.kind == "missing_field" and isinstance(raw, dict) and problem.field.partition("[")[0] not in raw
        )
        if isinstance(raw, dict) and (column or problem.kind in ("unknown_columns", "ambiguous_columns")):
            self.unknown_columns = self.unknown_columns or raw
            self.unknown_column_rows += 1

    @property
    def accepted(self) -> int:
        """Rows that are used."""
        return self.rows - sum(self.reasons.values())

    @property
    def repeated(self) -> int:
        """Rows left out because another one says the same."""
        return sum(self.reasons[kind] for kind in REPEATED)

    @property
    def broken(self) -> int:
        """Rows left out for any other reason."""
        return self.rows - self.accepted - self.repeated

    def columns_question(self) -> tuple[str, str] | None:
        """If most of what is wrong are column names: the columns with an example of each, and how to name them."""
        if 2 * self.unknown_column_rows <= self.broken or not self.unknown_columns:
            return None
        row = self.unknown_columns
        columns = [f"    {shown(name)}: {shown(str(value))[:60]}" for name, value in list(row.items())[:12]]
        todo = f'{advice([name for name in row if shown(name) == name])} ("user=a+b" joins two columns)'
        return "\n".join(["  The columns, with what the first such row holds:", *columns]), todo

    def facts(self) -> dict[str, Any]:
        """The counts, as a card and `data check --json` show them."""
        bits = np.frombuffer(self._bits, np.uint64)
        labels = {name: int((bits >> np.uint64(n) & np.uint64(1)).sum()) for name, n in self._labels.items()}
        lengths = {name: labels.pop(name, 0) for name in BIN_NAMES}
        used = [place for place, count in enumerate(lengths.values()) if count]
        languages = {name: labels.pop(name, 0) for name in LANGUAGES}
        trimmed = labels.pop("trimmed", 0)
        return {
            "rows": self.rows,
            "accepted": self.accepted,
            "rejected": self.rows - self.accepted,
            "duplicates": self.repeated,
            "trimmed": trimmed,
            "reasons": _largest_first(self.reasons),
            "warnings": _largest_first(labels | {"templated": self.templated}),
            "languages": _largest_first(languages),
            "characters": dict(list(lengths.items())[used[0] : used[-1] + 1]) if used else {},
        }


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in Counter(counts).most_common() if count > 0}


def language(messages: list[dict[str, Any]]) -> str:
    """zh or en by the script of the user's turns; a Chinese character weighs as much as three Latin letters."""
    text = " ".join([message["content"] for message in messages if message["role"] == "user"])
    ascii_text = text.encode("ascii", "ignore")
    latin = len(ascii_text.translate(None, NO_LETTERS))
    chinese = len(text) - len(ascii_text) if CJK.search(text) else 0
    if not chinese and not latin:
        return "other"
    return "zh" if 3 * chinese >= latin else "en"


def _length_bin(messages: list[dict[str, Any]]) -> int:
    return bisect_left(BINS, sum([len(message["content"] or "") for message in messages]))


class Report:
    """What `data check` found: `data` for programs, `text` for people."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def text(self) -> str:
        """A short table, the first problems, what to do next."""
        data = self.data
        lines = [
            f"{'files':<10} {', '.join(f'{name} ({rows} rows)' for name, rows in data['files'].items())}",
            f"{'rows':<10} {data['rows']} = {data['accepted']} accepted + {data['rejected']} rejected",
            *_column("rejected", data["reasons"]),
            *_column("warnings", data["warnings"]),
            f"{'languages':<10} {counts_text(data['languages'])}",
        ]
        if lengths := data["lengths"]:
            limit = lengths["max_length"]
            lines.append(f"{'lengths':<10} the longest row has {lengths['longest']} tokens")
            if limit:
                lines[-1] += f"; {lengths['over']} of {lengths['rows']} rows are over {limit}: {lengths['tokens_cut']} "
                lines[-1] += f"tokens would be cut, {lengths['stop_lost']} rows would lose their stop token"
        first = {problem["kind"]: problem for problem in reversed(data["problems"])}
        lines += ["", "The first of each kind:"] * bool(first)
        lines += [f"  {describe(first[kind])}" for kind in reversed(first)]
        lines += ["", "Worth a look (the rows are kept):"] * bool(data["examples"])
        lines += [f"  {text}" for text in data["examples"]]
        return "\n".join([*lines, "", *data["next"]])


def _column(title: str, counts: dict[str, int]) -> Iterator[str]:
    names = [title] + [""] * len(counts)
    return (f"{name:<10} {count:>9}  {kind}" for name, (kind, count) in zip(names, counts.items(), strict=False))
