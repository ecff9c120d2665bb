"""The data card of a run: what became of every row, the files it describes, and how both are shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nbutils import display
from nbutils.data import evidence
from nbutils.data.rows import Row, RowError, check_row
from nbutils.data.texts import find_private, shown
from nbutils.errors import CourseError
from nbutils.files import CHUNK
from nbutils.language import joined, tr

CARD = "data_card.json"
TRAIN = "train.jsonl"
EVAL = "eval.jsonl"
REJECTED = "rejected.jsonl"


class Rejection(BaseModel):
    """A problem of a row that was left out, with its place."""

    file: str
    line: int
    kind: str
    field: str
    seen: str
    todo: str

    def __str__(self) -> str:
        return tr(
            "{file} line {line}, {field}: {kind}, saw {seen}\n      -> {todo}",
            file=self.file,
            line=self.line,
            field=self.field,
            kind=tr(self.kind),
            seen=self.seen,
            todo=self.todo,
        )


class DataCard(BaseModel):
    """rows = accepted + rejected, accepted = train + eval + unused; each rejected row counts under its first reason."""

    model_config = ConfigDict(frozen=True)

    source: str
    eval_source: str
    source_sha256: str
    eval_fraction: float
    limit: int
    columns: str = ""
    near: float | None = None  # None: written before near duplicates were looked for, and text was repaired
    repair: bool | None = None
    files: dict[str, int] = {}  # rows of each
    rows: int
    accepted: int
    rejected: int
    train: int
    eval: int
    unused: int
    duplicates: int
    trimmed: int
    reasons: dict[str, int]
    warnings: dict[str, int] = {}
    examples: list[str] = []  # of warnings
    problems: list[Rejection] = []  # the first of each reason
    languages: dict[str, int]
    characters: dict[str, int]
    fingerprint: str

    def __str__(self) -> str:
        rows = tr(
            "{rows} = {accepted} accepted + {rejected} rejected",
            rows=self.rows,
            accepted=self.accepted,
            rejected=self.rejected,
        )
        splits = tr("{train} train, {eval} eval, {unused} unused", train=self.train, eval=self.eval, unused=self.unused)
        lines = {
            tr("source"): tr(self.source),
            tr("rows"): rows,
            tr("splits"): splits,
            tr("rejected"): counts_text(self.reasons),
            tr("warnings"): counts_text(self.warnings),
            tr("languages"): counts_text(self.languages),
            tr("characters"): counts_text(self.characters),
            tr("fingerprint"): self.fingerprint,
        }
        table = [f"{display.pad(name, 12)} {text}" for name, text in lines.items()]
        remarks = [line for remark in evidence.remarks(self.eval) for line in display.wrap(remark)]
        return "\n".join(table + remarks)

    def facts(self) -> dict[str, Any]:
        """What goes into the facts.json of a lesson."""
        return self.model_dump(include={"rows", "accepted", "rejected", "train", "eval", "fingerprint", "warnings"})

    def rejected_text(self, place: Path | str) -> str:
        """The first rejected rows of each reason, and where all of them are."""
        if not self.rejected:
            return tr("no row was rejected")
        lines = [f"  {problem}" for problem in self.problems]
        all_of_them = tr("All {count} rejected rows: {place}", count=self.rejected, place=place)
        return "\n".join([*lines, all_of_them])


def counts_text(counts: dict[str, int]) -> str:
    """Counts on one line."""
    return joined(f"{tr(name)} {count}" for name, count in counts.items()) or tr("none")


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
            tr("There is no {path}: the data is not prepared.", path=out / CARD),
            todo=tr("Run lesson 02."),
        )
    try:
        card = DataCard.model_validate_json((out / CARD).read_bytes())
        digest = hash_files([out / TRAIN, out / EVAL])
        if digest != card.fingerprint:
            raise ValueError(f"sha256 {digest[:12]}")
    except (ValueError, FileNotFoundError) as problem:
        reason = str(problem).partition("\n")[0]
        raise CourseError(
            tr("The files in {out} are not the ones its card describes: {reason}.", out=out, reason=reason),
            todo=new_run_todo(out),
        ) from problem
    return card


def new_run_todo(out: Path) -> str:
    """What to do where a folder holds other data than the lesson needs."""
    return tr(
        "Run lesson 02 with a new RUN_NAME. If nothing was trained in this run yet, you can also "
        "remove the folder {out} and run lesson 02 again.",
        out=out,
    )


def load(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The verified train and eval rows.

    Example:
        `train_rows, eval_rows = load(lesson.run.data)`
    """
    verify(out)
    return stored_rows(out / TRAIN), stored_rows(out / EVAL)


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file the course wrote."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


def row_to_show(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first row without private data, if there is one; else the first."""
    public = (row for row in rows if not any(find_private(str(row))))
    return next(public, rows[0])


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
