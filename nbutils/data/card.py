"""The data card of a run: what became of every row, the files it describes, and how both are shown."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nbutils import display
from nbutils.data import evidence
from nbutils.data.rows import Json, Row, RowError, check_row
from nbutils.data.texts import CJK, find_private, shown
from nbutils.errors import CourseError
from nbutils.files import CHUNK, make_folder, write_text
from nbutils.language import joined, language, tr

CARD = "data_card.json"
TRAIN = "train.jsonl"
EVAL = "eval.jsonl"
REJECTED = "rejected.jsonl"
NEAR_OVERLAP = 0.8  # of two rows: from here on they are near duplicates
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # characters of a row
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")


class Rejection(BaseModel):
    """A problem of a row that was left out, with its place."""

    file: str
    line: int
    kind: str
    field: str
    seen: str
    todo: str

    def __str__(self) -> str:
        text = tr(
            "{row.file} line {row.line}, {row.field}: {kind}, saw {row.seen}",
            row=self,
            kind=tr(self.kind),
        )
        return f"{text}\n      -> {self.todo}" if self.todo else text


class DataCard(BaseModel):
    """What data is made from and how, and what became of its rows.

    rows = accepted + rejected, accepted = train + eval + unused; each rejected row counts under its first reason.
    """

    source: str
    eval_source: str = ""
    columns: str = ""
    limit: int = 0  # of training rows; 0: none
    near: float = NEAR_OVERLAP
    repair: bool = True
    eval_fraction: float = 0.1  # of the questions, where no file holds rows out
    source_sha256: str = ""
    files: Counter[str] = Counter()  # rows of each
    rows: int = 0
    accepted: int = 0
    rejected: int = 0
    train: int = 0
    eval: int = 0
    unused: int = 0
    duplicates: int = 0
    trimmed: int = 0
    reasons: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    examples: list[str] = []  # of warnings
    problems: list[Rejection] = []  # the first of each reason
    languages: Counter[str] = Counter()
    characters: Counter[str] = Counter(dict.fromkeys(BIN_NAMES, 0))  # rows by length
    lengths: dict[str, int] = {}  # in tokens; `data check --model` counts them
    fingerprint: str = ""

    def __str__(self) -> str:
        return display.columns_of(list(self._shown().items()))

    def show(self) -> None:
        """The card as a table."""
        display.show_facts(self._shown())

    def _shown(self) -> dict[str, str]:
        shown = {
            tr("source"): tr(self.source),
            tr("rows"): tr("{card.rows} = {card.accepted} accepted + {card.rejected} rejected", card=self),
            tr("splits"): tr("{card.train} train, {card.eval} eval, {card.unused} unused", card=self),
            tr("rejected"): counts_text(self.reasons.most_common()),
            tr("warnings"): counts_text(self.warnings.most_common()),
            tr("languages"): counts_text(self.languages.most_common()),
            tr("characters"): counts_text(self.characters.items()),
            tr("fingerprint"): self.fingerprint,
        }
        if self.lengths:
            shown[tr("lengths")] = counts_text(self.lengths.items())
        if remark := evidence.remark(self.eval):
            shown[""] = remark
        return shown

    def facts(self) -> Json:
        """What goes into the facts.json of a lesson."""
        return self.model_dump(include={"rows", "accepted", "rejected", "train", "eval", "fingerprint", "warnings"})

    def rejected_text(self, place: Path | str) -> str:
        """The first rejected rows of each reason, and where all of them are."""
        if not self.rejected:
            return tr("no row was rejected")
        lines = [f"  {problem}" for problem in self.problems]
        all_of_them = tr("All {count} rejected rows: {place}", count=self.rejected, place=place)
        return "\n".join([*lines, all_of_them])


def counts_text(counts: Iterable[tuple[str, int]]) -> str:
    """Counts on one line, without those that are 0."""
    return joined(f"{tr(name)} {count}" for name, count in counts if count) or tr("none")


def hash_files(*groups: Sequence[Path], group_end: bytes = b"") -> str:
    """sha256 over the content of files as they are on disk, in order; names do not count, groups only with an end."""
    digest = hashlib.sha256()
    for group in groups:
        for path in group:
            with open(path, "rb") as file:
                while piece := file.read(CHUNK):
                    digest.update(piece)
            digest.update(b"\0")
        digest.update(group_end)
    return digest.hexdigest()


def verify(out: Path) -> DataCard:
    """The card, once the files beside it are found to be the ones it describes.

    Example:
        `verify(lesson.run.data).fingerprint`
    """
    if not (out / CARD).exists():
        raise CourseError(
            "There is no {path}: the data is not prepared.",
            todo="Run lesson 02.",
            path=out / CARD,
        )
    with suppress(ValueError, FileNotFoundError):
        card = DataCard.model_validate_json((out / CARD).read_bytes())
        if hash_files([out / TRAIN, out / EVAL]) == card.fingerprint:
            return card
    raise CourseError(
        tr("The files in {out} are not the ones its card describes.", out=out),
        todo=new_run_todo(out),
    )


def new_run_todo(out: Path) -> str:
    """What to do where a folder holds other data than the lesson needs."""
    return tr(
        "Set a new RUN_NAME and run the lesson again. If nothing was trained in this run yet, you can also remove the "
        "folder {out} first.",
        out=out,
    )


def load(out: Path) -> tuple[list[Json], list[Json]]:
    """The verified train and eval rows.

    Example:
        `train_rows, eval_rows = load(lesson.run.data)`
    """
    verify(out)
    return stored_rows(out / TRAIN), stored_rows(out / EVAL)


def write_rows(file: Path, rows: Iterable[Json]) -> Path:
    """The file with these rows, one on each line."""
    make_folder(file.parent)
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


def stored_rows(path: Path) -> list[Json]:
    """The rows of a file the course wrote."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


def own_language_first(rows: Iterable[Any]) -> list[Any]:
    """The rows in the language of the course, then the others; a Chinese lesson shows Chinese rows.

    Example:
        `questions = data.own_language_first(eval_rows)[:3]`
    """
    chinese = language() == "zh"
    return sorted(rows, key=lambda row: bool(CJK.search(str(row))) != chinese)  # False comes first, in the same order


def row_to_show(rows: Sequence[Json]) -> Json:
    """The first row in the language of the course without private data, if there is one; else the first."""
    ordered = own_language_first(rows)
    public = (row for row in ordered if not any(find_private(str(row))))
    shown_row: Json = next(public, ordered[0])
    return shown_row


def show(row: Row | RowError, columns: str = "") -> None:
    """Print a row turn by turn, private data masked; what is wrong with it, if it cannot be used.

    Example:
        `show(next(read_rows("my_rows.csv")), "user=title, assistant=reply")`
    """
    checked = check_row(row, columns)
    if isinstance(checked, RowError):
        show_problems([checked])
        return
    for message in checked.messages:
        print(f"{message['role']:>9}: {shown(message['content'])[:300]}")
    print()


def show_problems(errors: Iterable[RowError]) -> None:
    """Print every problem of these rows: where, what is wrong, what was seen, what to do."""
    for error in errors:
        for problem in error.problems:
            print(Rejection(file=error.file, line=error.line, **vars(problem)))
