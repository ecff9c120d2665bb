"""The data folder of a run: made once from its source, then reused; other input is refused, never written over it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import orjson
from tqdm import tqdm

from nbutils import distributed
from nbutils.data.card import (
    BIN_NAMES,
    BINS,
    CARD,
    EVAL,
    REJECTED,
    TRAIN,
    DataCard,
    Rejection,
    hash_files,
    new_run_todo,
    verify,
)
from nbutils.data.dedupe import digests, find_repeated, row_text
from nbutils.data.read import find_files, read_rows
from nbutils.data.rows import ChatRow, Json, RowError, check_row, parse_mapping
from nbutils.data.texts import CJK, Kind, Problem, short, shown
from nbutils.errors import CourseError
from nbutils.files import CHUNK, SAMPLES, replacement, write_json
from nbutils.language import say, tr

# a folder test/, test.jsonl.gz, test-00000-of-00001.parquet, the my_set-test.arrow of a hub dataset
HELD_OUT = re.compile(
    r"(?:^|/)(?:[^/]+-(?=[^/]+\.arrow$))?(?:eval|test|valid|validation|dev)"
    r"(?:/|(?:-\d{5}-of-\d{5}(?:-[0-9a-f]+)?)?\.[^/]+$)",
    re.I,
)
REPEATED: tuple[Kind, ...] = ("duplicate", "leak", "near_duplicate", "near_leak")
BUNDLED = "the bundled sample"
GROUP_END = b"\1"  # in the hash of a source: ends the training files, and the held-out ones
Side = Literal["train", "eval", "over_limit", "near_copy"]  # on which a row can end that passed its own check
ACCEPTED = "accepted.jsonl"
MOST_SHOWN = 3  # rejections or warnings of each kind
LANGUAGES = ("zh", "en", "other")
LATIN_LETTER = re.compile("[A-Za-z]")


@distributed.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", rows: int = 0, columns: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one; without `source` from `default`, or from the sample.

    Example:
        `card = prepare("my_rows.jsonl", lesson.run.data, columns="user=title, assistant=reply")`
    """
    card = DataCard(
        source=source or default or BUNDLED,
        eval_source=eval_source,
        columns=columns,
        limit=rows,
    )
    if (out / CARD).exists():
        return _reuse(out, source, card)
    train, held_out = find_sources([source or default], eval_source)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        build = Build(Path(scratch), card, train, held_out)
        build.run()
        build.publish_rejected(out / REJECTED)  # first: the learner needs it most when the data is refused
        _require_usable(card, out)
        build.publish(out)
    return card


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: `eval_source`, or else what is called `eval`, `test`, `valid` or the like."""
    if not any(sources):
        return [SAMPLES / TRAIN], find_files(eval_source or str(SAMPLES / EVAL))
    named = chain.from_iterable(map(find_files, sources))
    files = list(dict.fromkeys(named))  # each once
    if eval_source:
        return files, find_files(eval_source)
    common = os.path.commonpath(
        [file.absolute().parent for file in files]
    )  # a folder above called `test` does not count
    held_out = []
    for file in files:
        name = file.absolute().relative_to(common)
        if HELD_OUT.search(name.as_posix()):
            held_out.append(file)
    train = [file for file in files if file not in held_out]
    if not train:  # the only files are called `test`: the learner wants to train on them
        return files, []
    return train, held_out


def _reuse(out: Path, source: str, wanted: DataCard) -> DataCard:
    """The finished data, if it was made from the same input in the same way, with an equal limit.

    A source, held-out source or columns that are not named today count as the same.
    """
    card = verify(out)
    same = (
        wanted.limit == card.limit
        and parse_mapping(wanted.columns) in ({}, parse_mapping(card.columns))
        and wanted.eval_source in ("", card.eval_source)
        and (not source or _is_source_of(card, source))
    )
    if not same:
        raise CourseError(
            tr(
                "{out} already holds data made from other input: {source}, limit {card.limit}, columns "
                "{card.columns!r}.",
                out=out,
                source=tr(card.source),
                card=card,
            ),
            todo=new_run_todo(out),
        )
    say("The data of this run is ready (from {source}): nothing is repeated.", source=tr(card.source))
    return card


def _is_source_of(card: DataCard, source: str) -> bool:
    """Whether the data was made from this source: by its content, or by its name if the file is no longer there."""
    if source == card.source and not Path(source).expanduser().exists():
        return True
    train, held_out = find_sources([source], card.eval_source)
    digest = hash_files(
        train,
        held_out,
        group_end=GROUP_END,
    )
    return digest == card.source_sha256


class Build:
    """One pass over the rows of a source into a temporary folder; about 300 bytes of each row stay in memory."""

    def __init__(self, folder: Path, card: DataCard, train: list[Path], held_out: list[Path]) -> None:
        self.folder = folder
        self.card = card
        self.train_files = train
        self.eval_files = held_out
        self.file = ""  # the name of the one being read
        self.number_of = dict[int, int]()  # of the accepted rows, from 0, by digest of the row
        self.eval_questions = dict[int, int]()  # numbers of the held-out rows by digest of the question
        self.sides = list[Side]()  # this and the next three have one entry for each accepted row
        self.names = list[str]()  # of its file
        self.lines = array("Q")  # in its file
        self.offsets = array("Q", [0])  # in ACCEPTED, and the end of the last

    def run(self) -> None:
        """Read and count all rows; write ACCEPTED and REJECTED to the temporary folder."""
        with (
            open(self.folder / REJECTED, "xb") as self.rejected,
            open(self.folder / ACCEPTED, "x+b") as self.accepted,
        ):
            for file in self.eval_files:  # before the training files, whose rows are compared with them
                self._add_file(file, "eval")
            for file in self.train_files:
                self._add_file(file, "train")
            if self.card.near and self.number_of:
                self._leave_out_near_duplicates()
        self._choose_splits()
        self._complete_card()

    def _add_file(self, file: Path, side: Side) -> None:
        """Check and add every row of a file, which is called by its path if another one has its name."""
        self.file = str(file) if file.name in self.card.files else file.name
        self.card.files[self.file] = 0
        rows = tqdm(
            read_rows(file),
            tr("Checking rows"),
            unit=tr(" rows"),
            mininterval=15,
            delay=5,
        )
        for row in rows:
            self.card.files[self.file] += 1
            checked = check_row(row, self.card.columns, self.card.repair)
            if isinstance(checked, RowError):
                self._reject(checked._replace(file=self.file))
            else:
                self._add(checked, side)

    def _add(self, row: ChatRow, side: Side) -> None:
        """Reject a row that was there before, or store it."""
        stored: Json = {"messages": row.messages}
        if row.tools:
            stored["tools"] = row.tools
        digest, question = digests(row, numerals=bool(self.eval_files))
        if not self.eval_files:
            # digests are evenly spread, and a question always has the same one: so it keeps its side
            side = "eval" if question / 2**64 < self.card.eval_fraction else "train"
        if side == "train" and question in self.eval_questions:
            self._reject_copy(self.file, row.line, stored, "leak", self.eval_questions[question])
        elif digest in self.number_of:
            self._reject_copy(self.file, row.line, stored, "duplicate", self.number_of[digest])
        else:
            if side == "eval":
                self.eval_questions[question] = len(self.number_of)
            self.number_of[digest] = len(self.number_of)
            self._store(row.line, stored, side)
            self._count(row)

    def _store(self, line: int, stored: Json, side: Side) -> None:
        """Write a row to ACCEPTED, and remember where it is from and where it goes."""
        self.sides.append(side)
        self.names.append(self.file)
        self.lines.append(line)
        content = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        self.accepted.write(content)
        self.offsets.append(self.offsets[-1] + len(content))

    def _count(self, row: ChatRow) -> None:
        """Count what is in an accepted row, and what was done or is to be said about it."""
        self._count_text(row.messages, 1)
        if row.trimmed:
            self.card.trimmed += 1
        for warning in row.warnings:
            self._count_warning(row.line, warning)

    def _count_warning(self, line: int, warning: Problem) -> None:
        self.card.warnings[warning.kind] += 1
        if self.card.warnings[warning.kind] <= MOST_SHOWN:
            example = Rejection(
                file=self.file,
                line=line,
                **vars(warning),
            )
            self.card.examples.append(str(example))

    def _count_text(self, messages: list[Json], change: int) -> None:
        """Count the language and length of a row; a `change` of -1 takes it back."""
        text = "".join(message["content"] for message in messages)
        self.card.languages[language_of(text)] += change
        self.card.characters[BIN_NAMES[bisect_left(BINS, len(text))]] += change

    def _reject_copy(self, file: str, line: int, row: Json, kind: Kind, kept: int) -> None:
        """Reject a row that resembles an accepted one."""
        seen = tr("one like {file} line {line}", file=self.names[kept], line=self.lines[kept])
        self._reject(RowError(file, line, row, (Problem(kind, tr("the row"), seen),)))

    def _reject(self, error: RowError) -> None:
        """Count a row that is not used, and write it to REJECTED."""
        first = error.problems[0]
        self.card.reasons[first.kind] += 1
        if self.card.reasons[first.kind] <= MOST_SHOWN:
            self.card.problems.append(Rejection(file=error.file, line=error.line, **vars(first)))
        entry = error._asdict()
        entry["row"] = entry.pop("raw")
        try:
            text = orjson.dumps(entry, default=str)
        except TypeError:  # orjson refuses lone surrogates and deep nesting: write a short text instead
            entry["row"] = shown(short(error.raw))
            text = orjson.dumps(entry)
        self.rejected.write(text + b"\n")

    def _stored_row(self, number: int) -> Json:
        self.accepted.seek(self.offsets[number])
        return orjson.loads(self.accepted.readline())

    def _leave_out_near_duplicates(self) -> None:
        """Reject near duplicates; held-out rows come first, so that of two similar rows the training row goes."""
        order = sorted(self.number_of.values(), key=lambda number: self.sides[number] == "train")
        repeated = find_repeated(
            self.card.near,
            len(order),
            lambda position: row_text(**self._stored_row(order[position])),
        )
        for position, earlier in sorted(repeated.items()):
            copy = order[position]
            kept = order[earlier]
            row = self._stored_row(copy)
            self._count_text(row["messages"], -1)
            is_leak = self.eval_files and self.sides[copy] == "train" and self.sides[kept] == "eval"
            kind: Kind = "near_leak" if is_leak else "near_duplicate"
            self._reject_copy(self.names[copy], self.lines[copy], row, kind, kept)
            self.sides[copy] = "near_copy"

    def _choose_splits(self) -> None:
        """Hold out one row if none is, and keep as many training rows as `limit` says.

        They are taken in the order of their digests, a fixed shuffle: a smaller set is part of every larger one.
        """
        train = [number for _, number in sorted(self.number_of.items()) if self.sides[number] == "train"]
        no_eval = not self.eval_files and not self.eval_questions
        if no_eval and len(train) > 1:
            first = train.pop(0)
            self.sides[first] = "eval"
        if self.card.limit:
            for number in train[self.card.limit :]:
                self.sides[number] = "over_limit"

    def _complete_card(self) -> None:
        """Add the sums, and what identifies the files that were read."""
        card = self.card
        card.rows = card.files.total()
        card.rejected = card.reasons.total()
        card.accepted = card.rows - card.rejected
        card.train = self.sides.count("train")
        card.eval = self.sides.count("eval")
        card.unused = card.accepted - card.train - card.eval
        card.duplicates = sum(card.reasons[kind] for kind in REPEATED)
        card.source_sha256 = hash_files(
            self.train_files,
            self.eval_files,
            group_end=GROUP_END,
        )

    def publish(self, out: Path) -> None:
        """Write the rows of each side to a data folder and its card, last: a folder with a card is a finished one."""
        with (
            open(self.folder / ACCEPTED, "rb") as rows,
            replacement(out / TRAIN) as train,
            replacement(out / EVAL) as held_out,
        ):
            files = {"train": train, "eval": held_out}
            for side, row in zip(self.sides, rows, strict=True):
                if side in files:
                    files[side].write(row)
        self.card.fingerprint = hash_files([out / TRAIN, out / EVAL])
        write_json(out / CARD, self.card.model_dump())

    def publish_rejected(self, path: Path) -> None:
        """Write the rejected rows to this file."""
        with open(self.folder / REJECTED, "rb") as rows, replacement(path) as copy:
            shutil.copyfileobj(rows, copy, CHUNK)


def _require_usable(card: DataCard, out: Path) -> None:
    """Refuse data if most rows are broken, or if none is left to train on or to hold out."""
    broken = card.rejected - card.duplicates
    if card.train and card.eval and 2 * broken <= card.rows:
        return
    raise CourseError(
        f"{card}\n{card.rejected_text(out / REJECTED)}",
        allowed="at least half of the rows usable, and at least one row to train on and one to hold out",
        todo="Fix the rows, name the columns with COLUMNS, or name other files with DATA and EVAL_DATA.",
    )


def language_of(text: str) -> str:
    """zh if there is any Chinese in it, en if there are other Latin letters."""
    if not text.isascii() and CJK.search(text):
        return "zh"
    return "en" if LATIN_LETTER.search(text) else "other"
