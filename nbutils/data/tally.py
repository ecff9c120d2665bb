"""What a pass over the rows counts, and the first rows of each kind to show: reasons, warnings, languages, lengths.

Not here: what becomes of a row (building). Nothing grows with the rows.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbutils.data.columns import advice
from nbutils.data.raw import Problem, RowError, shown
from nbutils.data.rows import ChatRow

BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
CJK = re.compile(r"[\u3400-\u9fff]")
NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())
REPEATED = ("duplicate", "leak", "near_duplicate", "near_leak")
MAPPING_HINT = '("user=a+b" joins two columns, "system=c" may be added)'
SHOWN = 3  # rows of each kind that are kept to be shown


class Tally:
    """Counters of one pass: rows = accepted + rejected, each rejected row under its first problem."""

    def __init__(self) -> None:
        self.rows = self.accepted = self.trimmed = 0
        self.reasons: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.lengths = [0] * len(BIN_NAMES)
        self.files: Counter[str] = Counter()
        self.first_errors: list[RowError] = []
        self.first_warnings: list[str] = []
        self.unnamed: dict[str, Any] = {}  # the first row whose columns are the problem, and how many there are
        self.unnamed_rows = 0
        self._kinds: list[str] = []

    def accept(self, row: ChatRow) -> int:
        """One more row that is used; its marks, one bit for each thing said about it, are needed to take it back."""
        self.accepted += 1
        self.trimmed += row.trimmed
        self.languages[language(row.messages)] += 1
        self.lengths[length_bin(row.messages)] += 1
        return row.trimmed | (self._warn(row) if row.warnings else 0)

    def take_back(self, messages: list[dict[str, Any]], marks: int) -> None:
        """A row that was used turned out to repeat another one."""
        self.accepted -= 1
        self.trimmed -= marks & 1
        self.languages[language(messages)] -= 1
        self.lengths[length_bin(messages)] -= 1
        for place, kind in enumerate(self._kinds, start=1):
            self.warnings[kind] -= marks >> place & 1

    def _warn(self, row: ChatRow) -> int:
        marks = 0
        for seen in {warning.kind: warning for warning in row.warnings[::-1]}.values():  # the first of each kind
            if seen.kind not in self._kinds:
                self._kinds.append(seen.kind)
            marks |= 2 << self._kinds.index(seen.kind)
            self.warnings[seen.kind] += 1
            if self.warnings[seen.kind] <= 2:
                text = f"{row.file} line {row.line}, {seen.field}: {seen.kind} {seen.seen}"
                self.first_warnings.append(text.rstrip())
        return marks

    def reject(self, error: RowError) -> None:
        """One more row that is not used."""
        kind = error.problems[0].kind
        self.reasons[kind] += 1
        if self.reasons[kind] <= SHOWN:
            self.first_errors.append(error)
        if isinstance(error.raw, dict) and _by_its_columns(error.problems[0], error.raw):
            self.unnamed = self.unnamed or error.raw
            self.unnamed_rows += 1

    @property
    def repeated(self) -> int:
        """Rows left out because another one says the same."""
        return sum(self.reasons[kind] for kind in REPEATED)

    @property
    def broken(self) -> int:
        """Rows left out for any other reason."""
        return self.rows - self.accepted - self.repeated

    def asks_for_columns(self) -> bool:
        """Whether most of what is wrong comes from column names nobody knows."""
        return 2 * self.unnamed_rows > self.broken

    def facts(self) -> dict[str, Any]:
        """The counts, as a card and `data check --json` show them."""
        return {
            "rows": self.rows,
            "accepted": self.accepted,
            "rejected": self.rows - self.accepted,
            "duplicates": self.repeated,
            "trimmed": self.trimmed,
            "reasons": positive(self.reasons),
            "warnings": positive(self.warnings),
            "languages": positive(self.languages),
            "characters": self._histogram(),
        }

    def _histogram(self) -> dict[str, int]:
        """Rows by length, from the shortest bin in use to the longest."""
        used = [place for place, count in enumerate(self.lengths) if count]
        places = range(used[0], used[-1] + 1) if used else []
        return {BIN_NAMES[place]: self.lengths[place] for place in places}


def positive(counter: Counter[str]) -> dict[str, int]:
    """The counts above zero, the largest first."""
    return {name: count for name, count in counter.most_common() if count > 0}


def language(messages: list[dict[str, Any]]) -> str:
    """zh or en by the script of the user's turns; a Chinese character weighs as much as three Latin letters."""
    text = " ".join([message["content"] for message in messages if message["role"] == "user"])
    plain = text.encode("ascii", "ignore")
    latin = len(plain.translate(None, NO_LETTERS))
    chinese = len(text) - len(plain) if CJK.search(text) else 0
    if not chinese and not latin:
        return "other"
    return "zh" if 3 * chinese >= latin else "en"


def length_bin(messages: list[dict[str, Any]]) -> int:
    """The histogram bin of a row's characters."""
    return bisect_left(BINS, sum([len(message["content"] or "") for message in messages]))


def labels(files: Iterable[Path]) -> dict[Path, str]:
    """The name of each file, with as many folders before it as tell it from the others."""
    names: dict[Path, str] = {}
    left, depth = {file: file.absolute().parts for file in files}, 0
    while left:
        depth += 1
        tails = {file: Path(*parts[-depth:]).as_posix() for file, parts in left.items()}
        often = Counter(tails.values())
        names |= {file: tail for file, tail in tails.items() if often[tail] == 1 or depth >= len(left[file])}
        left = {file: parts for file, parts in left.items() if file not in names}
    return names


def entries(error: RowError) -> list[dict[str, Any]]:
    """The problems of a row, each with its place, as programs get them."""
    return [{"file": error.file, "line": error.line, **vars(problem)} for problem in error.problems]


def describe(entry: dict[str, Any]) -> str:
    """One problem for people: where, what, and below it what to do."""
    where = f"{entry['file']} line {entry['line']}, {entry['field']}"
    return f"{where}: {entry['kind']}, saw {entry['seen']}\n      -> {entry['todo']}"


def _by_its_columns(problem: Problem, row: dict[str, Any]) -> bool:
    """Whether a mapping would help: a column is missing or not understood, and not a key inside a message."""
    inside = problem.kind == "missing_field" and problem.field.partition("[")[0] in row
    return problem.kind in ("unknown_columns", "ambiguous_columns", "missing_field") and not inside


def columns_question(row: dict[str, Any]) -> tuple[str, str]:
    """The columns of a row with an example of each (masked), and the line that names which is which."""
    columns = [f"    {shown(name)}: {_example(value)}" for name, value in list(row.items())[:12]]
    asked = f"{advice([name for name in row if shown(name) == name])} {MAPPING_HINT}"
    return "\n".join(["  The columns, with what the first such row holds:", *columns]), asked


def _example(value: Any) -> str:
    return shorten(shown(str(value).replace("\n", " ")), 60)


def shorten(text: str, most: int) -> str:
    """The beginning of a text, with dots where there is more."""
    return text if len(text) <= most else text[: most - 3] + "..."
