"""The data folder of a run: made once from its source, then reused; other input is refused, never written over it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm import tqdm

from nbutils import distributed
from nbutils.data.card import (
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
from nbutils.data.dedupe import digests, find_repeated
from nbutils.data.read import TEXT, find_files, read_rows
from nbutils.data.rows import ChatRow, RowError, check_row, parse_mapping
from nbutils.data.texts import Kind, Problem, short, shown
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, GIB, SAMPLES, held, remove_left, write_json
from nbutils.language import tr

EVAL_NAMES = ("eval", "test", "valid", "validation", "dev")
# test.jsonl.gz, test-00000-of-00001.parquet, the my_set-test.arrow of a hub dataset
EVAL_FILE = re.compile(
    rf"(?:.+-(?=.+\.arrow$))?(?:{'|'.join(EVAL_NAMES)})(?:-\d{{5}}-of-\d{{5}}(?:-[0-9a-f]+)?)?\..+", re.I
)
REPEATED: tuple[Kind, ...] = ("duplicate", "leak", "near_duplicate", "near_leak")
BUNDLED = "the bundled sample"
GROUP_END = b"\1"  # in the hash of a source: ends the training files, and the held-out ones
EVAL_FRACTION = 0.1
NEAR_OVERLAP = 0.8  # of two rows: from here on they are near duplicates
IN_TRAIN = 0  # the sides on which a row can end that passed its own check
IN_EVAL = 1
OVER_LIMIT = 2
NEAR_COPY = 3
COPIES_ON_DISK = 3  # of the data, while it is prepared
UNPACKED_GROWTH = 6  # compressed and parquet files grow about sixfold
ACCEPTED = "accepted.jsonl"
BUILDING = ".building-"
SHOWN_REJECTIONS = 3  # of each kind
SHOWN_WARNINGS = 2  # of each kind
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
LANGUAGES = ("zh", "en", "other")
CJK = re.compile(r"[\u3400-\u9fff]")
LATIN_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class DataSettings:
    """What a data folder is made from, and how; stored in its card."""

    source: str
    eval_source: str = ""
    columns: str = ""
    limit: int = 0
    near: float = NEAR_OVERLAP
    repair: bool = True


@distributed.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", rows: int = 0, columns: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one; without `source` from `default`, or from the sample.

    Example:
        `card = prepare("my_rows.jsonl", lesson.run.data, columns="user=title, assistant=reply")`
    """
    source_or_default = source or default
    settings = DataSettings(
        source=source_or_default or BUNDLED,
        eval_source=eval_source,
        columns=columns,
        limit=rows,
    )
    if (out / CARD).exists():
        return _reuse(out, source, settings)
    train, held_out = find_sources([source_or_default] if source_or_default else [], eval_source)
    with building(out, settings, train, held_out) as build:
        card = build.card()
        build.publish_file(REJECTED, out)  # first: the learner needs it most when the data is refused
        _require_usable(card, out)
        build.publish(card, out)
        return card


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: `eval_source`, or else what is called `eval`, `test`, `valid` or the like."""
    if not sources:
        return [SAMPLES / TRAIN], find_files(eval_source or str(SAMPLES / EVAL))
    files = []
    for source in sources:
        files += [file for file in find_files(source) if file not in files]
    if eval_source:
        return files, find_files(eval_source)
    folders = [file.absolute().parent for file in files]
    shared = os.path.commonpath(folders)
    held_out = [file for file in files if _is_held_out(file.absolute().relative_to(shared))]
    train = [file for file in files if file not in held_out]
    if not train:  # the only files are called `test`: the learner wants to train on them
        return files, []
    return train, held_out


def _is_held_out(name: Path) -> bool:
    """Whether a file's name, or that of a folder it is in, says so."""
    folders = {folder.lower() for folder in name.parts[:-1]}
    return bool(EVAL_FILE.fullmatch(name.name)) or not folders.isdisjoint(EVAL_NAMES)


def _reuse(out: Path, source: str, settings: DataSettings) -> DataCard:
    """The finished data, if it was made from the same input in the same way; what is not named counts as the same."""
    card = verify(out)
    same = (
        settings.limit == card.limit
        and parse_mapping(settings.columns) in ({}, parse_mapping(card.columns))
        and settings.eval_source in ("", card.eval_source)
        and (not source or _is_source_of(card, source))
    )
    if not same:
        raise CourseError(
            tr(
                "{out} already holds data made from other input: {source}, limit {limit}, columns {columns!r}.",
                out=out,
                source=tr(card.source),
                limit=card.limit,
                columns=card.columns,
            ),
            todo=new_run_todo(out),
        )
    print(tr("The data of this run is ready (from {source}): nothing is repeated.", source=tr(card.source)))
    return card


def _is_source_of(card: DataCard, source: str) -> bool:
    """Whether the data was made from this source: by its content, or by its name if the file is no longer there."""
    gone = not Path(source).expanduser().exists()
    if gone and source == card.source:
        return True
    train, held_out = find_sources([source], card.eval_source)
    return hash_files(train, held_out, group_end=GROUP_END) == card.source_sha256


@contextlib.contextmanager
def building(out: Path, settings: DataSettings, train: list[Path], held_out: list[Path]) -> Iterator[Build]:
    """A finished build, in a folder below `out` that is deleted at the end; publish what should stay."""
    size = 0
    for file in train + held_out:
        growth = 1 if file.suffix in TEXT else UNPACKED_GROWTH
        size += growth * file.stat().st_size
    require_disk(out, COPIES_ON_DISK * size / GIB)
    out.mkdir(parents=True, exist_ok=True)
    remove_left(out, f"{BUILDING}*")
    with tempfile.TemporaryDirectory(dir=out, prefix=BUILDING) as name:
        folder = Path(name)
        with held(folder):
            build = Build(folder, settings, train, held_out)
            build.run()
            yield build


class Build:
    """One pass over the rows of a source into a temporary folder; about 300 bytes of each row stay in memory."""

    def __init__(self, folder: Path, settings: DataSettings, train: list[Path], held_out: list[Path]) -> None:
        self.folder = folder
        self.settings = settings
        self.train_files = train
        self.eval_files = held_out
        self.file_names = list[str]()  # those read so far, the current one last
        self.rows_per_file = Counter[str]()
        self.reasons = Counter[str]()  # of rejected rows: each counts under its first problem
        self.problems = list[Rejection]()  # the first few of each reason
        self.warnings = Counter[str]()
        self.warning_examples = list[str]()  # the first few of each kind
        self.trimmed = 0
        self.languages = Counter[str]()
        self.characters = Counter(dict.fromkeys(BIN_NAMES, 0))
        self.row_numbers = dict[int, int]()  # by digest of the row
        self.eval_prompts = dict[int, int]()  # row numbers by digest of the prompt
        self.file_numbers = array("I")  # this and the next four: one entry for each accepted row
        self.line_numbers = array("Q")
        self.keys = array("Q")  # digests of the rows
        self.sides = array("B")
        self.offsets = array("Q", [0])  # in ACCEPTED; the last is its end

    def run(self) -> None:
        """Read all rows and write REJECTED, TRAIN and EVAL to the folder, ready to be published."""
        with open(self.folder / REJECTED, "xb") as self.rejected:
            with open(self.folder / ACCEPTED, "xb", CHUNK) as self.accepted:
                for file in self.eval_files:  # before the training files, whose rows are compared with them
                    self._add_file(file, IN_EVAL)
                for file in self.train_files:
                    self._add_file(file, IN_TRAIN)
            self._leave_out_near_duplicates()
        self._choose_splits()
        self._write_splits()

    def _add_file(self, file: Path, side: int) -> None:
        """Check and add every row of a file, which is called by its path where its name is not unique."""
        names = [other.name for other in self.eval_files + self.train_files]
        name = file.name if names.count(file.name) == 1 else str(file)
        self.file_names.append(name)
        self.rows_per_file[name] = 0
        rows = tqdm(
            read_rows(file),
            tr("Checking rows"),
            unit=tr(" rows"),
            mininterval=15,
            delay=5,
        )
        for row in rows:
            checked = check_row(row, self.settings.columns, self.settings.repair)
            self.rows_per_file[name] += 1
            self._add(checked, side)

    def _add(self, row: ChatRow | RowError, side: int) -> None:
        """Reject a row, or store and count it."""
        if isinstance(row, RowError):
            self._reject(row.line, row.raw, *row.problems)
            return
        stored: dict[str, Any] = {"messages": row.messages}
        if row.tools:
            stored["tools"] = row.tools
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        key, prompt = digests(row, numbers=bool(self.eval_files))
        if not self.eval_files:  # the digest is a fixed random number: a prompt is always on the same side
            side = IN_EVAL if prompt / 2**64 < EVAL_FRACTION else IN_TRAIN
        problem = self._find_repetition(key, prompt, side)
        if problem:
            self._reject(row.line, stored, problem)
            return
        number = len(self.keys)
        if side == IN_EVAL:
            self.eval_prompts[prompt] = number
        self.row_numbers[key] = number
        self.file_numbers.append(len(self.file_names) - 1)
        self.line_numbers.append(row.line)
        self.keys.append(key)
        self.sides.append(side)
        self.offsets.append(self.offsets[-1] + len(line))
        self.accepted.write(line)
        self.trimmed += row.trimmed
        self._count(row.messages, 1)
        self._count_warnings(number, row.warnings)

    def _find_repetition(self, key: int, prompt: int, side: int) -> Problem | None:
        """Whether a training row has the prompt of a held-out one, or a row was there before."""
        if side == IN_TRAIN and prompt in self.eval_prompts:
            return self._repetition_of(self.eval_prompts[prompt], "leak")
        return self._repetition_of(self.row_numbers[key], "duplicate") if key in self.row_numbers else None

    def _repetition_of(self, number: int, kind: Kind) -> Problem:
        return Problem(kind, tr("the row"), tr("one like {place}", place=self._place(number)))

    def _count(self, messages: list[dict[str, Any]], change: int) -> None:
        """Count the language and length of a row; a `change` of -1 takes it back."""
        length = 0
        questions = ""
        for message in messages:
            length += len(message["content"])
            if message["role"] == "user":
                questions += message["content"]
        language = language_of(questions)
        self.languages[language] += change
        bin_name = BIN_NAMES[bisect_left(BINS, length)]
        self.characters[bin_name] += change

    def _count_warnings(self, number: int, warnings: tuple[Problem, ...]) -> None:
        for warning in warnings:
            self.warnings[warning.kind] += 1
            if self.warnings[warning.kind] <= SHOWN_WARNINGS:
                self.warning_examples.append(
                    tr(
                        "{place}, {field}: {kind} {seen}",
                        place=self._place(number),
                        field=warning.field,
                        kind=tr(warning.kind),
                        seen=warning.seen,
                    )
                )

    def _reject(self, line: int, raw: Any, *problems: Problem, file: str = "") -> None:
        """Count a row that is not used, and write it to REJECTED; `file` is the one being read unless it is named."""
        file = file or self.file_names[-1]
        first = problems[0]
        self.reasons[first.kind] += 1
        if self.reasons[first.kind] <= SHOWN_REJECTIONS:
            self.problems.append(Rejection(file=file, line=line, **vars(first)))
        entry: dict[str, Any] = {
            "file": file,
            "line": line,
            "problems": [vars(problem) for problem in problems],
            "row": raw,
        }
        try:
            text = orjson.dumps(entry, default=str)
        except TypeError:  # orjson refuses lone surrogates and deep nesting: write a short text instead
            entry["row"] = shown(short(raw))
            text = orjson.dumps(entry)
        self.rejected.write(text + b"\n")

    def _place(self, number: int) -> str:
        return tr("{file} line {line}", file=self.file_names[self.file_numbers[number]], line=self.line_numbers[number])

    def _leave_out_near_duplicates(self) -> None:
        """Reject near duplicates; held-out rows come first, so that of two similar rows the training row goes."""
        if not self.settings.near or not self.sides:
            return
        sides = np.array(self.sides)
        order = np.argsort(sides != IN_EVAL, kind="stable")  # held-out rows first, otherwise as they were read
        with open(self.folder / ACCEPTED, "rb") as accepted:

            def read(number: int) -> dict[str, Any]:
                accepted.seek(self.offsets[number])
                return orjson.loads(accepted.readline())

            repeated, self.warnings["templated"] = find_repeated(self.settings.near, order, read)
            for number, original in sorted(repeated.items()):
                self.sides[number] = NEAR_COPY
                row = read(number)
                self._count(row["messages"], -1)
                kind: Kind = "near_duplicate"
                if self.eval_files and sides[original] != sides[number]:
                    kind = "near_leak"
                problem = self._repetition_of(original, kind)
                file = self.file_names[self.file_numbers[number]]
                self._reject(self.line_numbers[number], row, problem, file=file)

    def _choose_splits(self) -> None:
        """Hold out one row if none is, and keep as many training rows as `limit` says.

        They are taken in the order of their digests, a fixed shuffle: a smaller set is part of every larger one.
        """
        train = [number for number, side in enumerate(self.sides) if side == IN_TRAIN]
        train.sort(key=self.keys.__getitem__)
        no_eval = not self.eval_files and IN_EVAL not in self.sides
        if no_eval and len(train) > 1:
            first = train.pop(0)
            self.sides[first] = IN_EVAL
        if self.settings.limit:
            for number in train[self.settings.limit :]:
                self.sides[number] = OVER_LIMIT
        self.train_count = self.sides.count(IN_TRAIN)
        self.eval_count = self.sides.count(IN_EVAL)

    def _write_splits(self) -> None:
        """Copy each accepted row to the file of its side, if it has one."""
        with (
            open(self.folder / ACCEPTED, "rb") as rows,
            open(self.folder / TRAIN, "xb", CHUNK) as train,
            open(self.folder / EVAL, "xb", CHUNK) as held_out,
        ):
            files = {IN_TRAIN: train, IN_EVAL: held_out}
            for side, line in zip(self.sides, rows, strict=True):
                if side in files:
                    files[side].write(line)

    def card(self) -> DataCard:
        """What became of the rows. The `+` of a Counter drops what it counted 0 times."""
        rows = self.rows_per_file.total()
        accepted = rows - self.reasons.total()
        return DataCard(
            **vars(self.settings),
            source_sha256=hash_files(self.train_files, self.eval_files, group_end=GROUP_END),
            eval_fraction=EVAL_FRACTION,
            files=dict(self.rows_per_file),
            rows=rows,
            accepted=accepted,
            rejected=rows - accepted,
            train=self.train_count,
            eval=self.eval_count,
            unused=accepted - self.train_count - self.eval_count,
            duplicates=sum(self.reasons[kind] for kind in REPEATED),
            trimmed=self.trimmed,
            reasons=dict(self.reasons.most_common()),
            warnings=dict((+self.warnings).most_common()),
            examples=self.warning_examples,
            problems=self.problems,
            languages=dict((+self.languages).most_common()),
            characters=dict(+self.characters),
            fingerprint=hash_files([self.folder / TRAIN, self.folder / EVAL]),
        )

    def publish(self, card: DataCard, out: Path) -> None:
        """Move the rows into the data folder and write its card, last: a folder with a card is a finished one."""
        self.publish_file(EVAL, out)
        self.publish_file(TRAIN, out)
        write_json(out / CARD, card.model_dump())

    def publish_file(self, name: str, out: Path) -> None:
        """Move a file into the data folder, after it was flushed to the disk."""
        with open(self.folder / name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.folder / name, out / name)


def _require_usable(card: DataCard, out: Path) -> None:
    """Refuse data if most rows are broken, or if none is left to train on or to hold out."""
    broken = card.rejected - card.duplicates
    if card.train and card.eval and 2 * broken <= card.rows:
        return
    counts = tr(
        "DATA ({source}) has {rows} rows, and {rejected} of them cannot be used; {train} are left for training, "
        "{eval} for evaluation.",
        source=card.source,
        rows=card.rows,
        rejected=card.rejected,
        train=card.train,
        eval=card.eval,
    )
    rejected = card.rejected_text(out / REJECTED)
    raise CourseError(
        f"{counts}\n{rejected}",
        allowed=tr("at least half of the rows usable, and at least one row to train on and one to hold out"),
        todo=tr("Fix the rows, name the columns with COLUMNS, or name other files with DATA and EVAL_DATA."),
    )


def language_of(text: str) -> str:
    """The language that most of a text is in; a Chinese character weighs as much as a Latin word."""
    if not CJK.search(text):
        return "en" if LATIN_WORD.search(text) else "other"
    chinese = CJK.findall(text)
    latin = LATIN_WORD.findall(text)
    return "zh" if len(chinese) >= len(latin) else "en"
