"""The data folder of a run: made once from its source, reused afterwards, never replaced by another without a word."""

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
END = b"\1"  # in the hash of a source, between training and held-out files
EVAL_FRACTION = 0.1
NEAR = 0.8
IN_TRAIN = 0  # the sides that an accepted row can be on
IN_EVAL = 1
UNUSED = 2
LEFT_OUT = 3
COPIES = 3  # of the data, while it is prepared
UNPACKED = 6  # compressed and parquet files grow about sixfold
ACCEPTED = "accepted.jsonl"
BUILDING = ".building-"
SHOWN = 3  # rejected rows of each kind that are kept to be shown
WARNED = 2  # warnings of each kind
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BIN_NAMES = (*(f"<={edge}" for edge in BINS), f">{BINS[-1]}")
LANGUAGES = ("zh", "en", "other")
CJK = re.compile(r"[\u3400-\u9fff]")
LATIN_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class DataSettings:
    """What a data folder is made from, and how; the card keeps it."""

    source: str
    eval_source: str = ""
    columns: str = ""
    limit: int = 0
    near: float = NEAR
    repair: bool = True


@distributed.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", rows: int = 0, columns: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one; without a source from `default` or the sample.

    Example:
        `card = prepare("my_rows.jsonl", lesson.run.data, columns="user=title, assistant=reply")`
    """
    named = source or default
    settings = DataSettings(
        source=named or BUNDLED,
        eval_source=eval_source,
        columns=columns,
        limit=rows,
    )
    if (out / CARD).exists():
        return _reuse(out, source, settings)
    train, held_out = find_sources([named] if named else [], eval_source)
    with building(out, settings, train, held_out) as build:
        card = build.card()
        build.publish_file(REJECTED, out)
        _require_usable(card, out)
        build.publish(card, out)
        return card


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: those named so, or files and folders called `eval`, `test` or `valid`."""
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
    if not train:  # a file called test is what the learner wants to train on
        return files, []
    return train, held_out


def _is_held_out(name: Path) -> bool:
    folders = {folder.lower() for folder in name.parts[:-1]}
    return bool(EVAL_FILE.fullmatch(name.name)) or not folders.isdisjoint(EVAL_NAMES)


def _reuse(out: Path, source: str, settings: DataSettings) -> DataCard:
    """The finished data, if it was made from this input, in this way."""
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
    """Whether the data was made from this source: by content, or by name where a file went with its machine."""
    gone = not Path(source).expanduser().exists()
    if gone and source == card.source:
        return True
    train, held_out = find_sources([source], card.eval_source)
    return hash_files(train, held_out, end=END) == card.source_sha256


@contextlib.contextmanager
def building(out: Path, settings: DataSettings, train: list[Path], held_out: list[Path]) -> Iterator[Build]:
    """A finished build in a folder below `out` that is gone afterwards, whatever happens."""
    size = 0
    for file in train + held_out:
        growth = 1 if file.suffix in TEXT else UNPACKED
        size += growth * file.stat().st_size
    require_disk(out, COPIES * size / GIB, tr("preparing the data"))
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
        self.names = list[str]()  # of the files
        self.rows = Counter[str]()  # of each file
        self.reasons = Counter[str]()  # each rejected row under its first problem
        self.problems = list[Rejection]()  # the first of each reason
        self.warnings = Counter[str]()
        self.examples = list[str]()  # the first warnings of each kind
        self.trimmed = 0
        self.languages = Counter[str]()
        self.characters = Counter(dict.fromkeys(BIN_NAMES, 0))
        self.seen = dict[int, int]()  # digest of every row used -> its number
        self.eval_prompts = dict[int, int]()
        self.file = array("I")  # of each row used, as these:
        self.line = array("Q")
        self.keys = array("Q")
        self.sides = array("B")
        self.offsets = array("Q", [0])

    def run(self) -> None:
        """Read everything into the folder; afterwards the three files there are as they will be published."""
        with open(self.folder / REJECTED, "xb") as self.rejected:
            with open(self.folder / ACCEPTED, "xb", CHUNK) as self.accepted:
                for file in self.eval_files:
                    self._add_file(file, IN_EVAL)
                for file in self.train_files:
                    self._add_file(file, IN_TRAIN)
            self._leave_out_near_duplicates()
        self._choose_splits()
        self._write_splits()

    def _add_file(self, file: Path, side: int) -> None:
        names = [other.name for other in self.eval_files + self.train_files]
        name = file.name if names.count(file.name) == 1 else str(file)
        self.names.append(name)
        self.rows[name] = 0
        rows = tqdm(
            read_rows(file),
            tr("Checking rows"),
            unit=tr(" rows"),
            mininterval=15,
            delay=5,
        )
        for row in rows:
            checked = check_row(row, self.settings.columns, self.settings.repair)
            self.rows[name] += 1
            self._add(checked, side)

    def _add(self, row: ChatRow | RowError, side: int) -> None:
        if isinstance(row, RowError):
            self._reject(row.line, row.raw, *row.problems)
            return
        stored: dict[str, Any] = {"messages": row.messages}
        if row.tools:
            stored["tools"] = row.tools
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        key, prompt = digests(row, numbers=bool(self.eval_files))
        if not self.eval_files:
            side = IN_EVAL if prompt / 2**64 < EVAL_FRACTION else IN_TRAIN
        problem = self._repetition(key, prompt, side)
        if problem:
            self._reject(row.line, stored, problem)
            return
        number = len(self.keys)
        if side == IN_EVAL:
            self.eval_prompts[prompt] = number
        self.seen[key] = number
        self.file.append(len(self.names) - 1)
        self.line.append(row.line)
        self.keys.append(key)
        self.sides.append(side)
        self.offsets.append(self.offsets[-1] + len(line))
        self.accepted.write(line)
        self.trimmed += row.trimmed
        self._count(row.messages, 1)
        self._count_warnings(number, row.warnings)

    def _repetition(self, key: int, prompt: int, side: int) -> Problem | None:
        if side == IN_TRAIN and prompt in self.eval_prompts:
            return self._repeats("leak", self.eval_prompts[prompt])
        return self._repeats("duplicate", self.seen[key]) if key in self.seen else None

    def _repeats(self, kind: Kind, kept: int) -> Problem:
        return Problem(kind, tr("the row"), tr("one like {place}", place=self._place(kept)))

    def _count(self, messages: list[dict[str, Any]], step: int) -> None:
        """Count a row that is used, or with -1 take it back."""
        length = 0
        asked = ""
        for message in messages:
            length += len(message["content"])
            if message["role"] == "user":
                asked += message["content"]
        language = language_of(asked)
        self.languages[language] += step
        bin_name = BIN_NAMES[bisect_left(BINS, length)]
        self.characters[bin_name] += step

    def _count_warnings(self, number: int, warnings: tuple[Problem, ...]) -> None:
        for warning in warnings:
            self.warnings[warning.kind] += 1
            if self.warnings[warning.kind] <= WARNED:
                example = tr(
                    "{place}, {field}: {kind} {seen}",
                    place=self._place(number),
                    field=warning.field,
                    kind=tr(warning.kind),
                    seen=warning.seen,
                )
                self.examples.append(example)

    def _reject(self, line: int, raw: Any, *problems: Problem, file: str = "") -> None:
        file = file or self.names[-1]
        first = problems[0]
        self.reasons[first.kind] += 1
        if self.reasons[first.kind] <= SHOWN:
            self.problems.append(Rejection(file=file, line=line, **vars(first)))
        entry: dict[str, Any] = {
            "file": file,
            "line": line,
            "problems": [vars(problem) for problem in problems],
            "row": raw,
        }
        try:
            text = orjson.dumps(entry, default=str)
        except TypeError:  # characters that UTF-8 does not have, or nested too deeply
            entry["row"] = shown(short(raw))
            text = orjson.dumps(entry)
        self.rejected.write(text + b"\n")

    def _place(self, number: int) -> str:
        return tr("{file} line {line}", file=self.names[self.file[number]], line=self.line[number])

    def _leave_out_near_duplicates(self) -> None:
        """Held-out rows are compared first, so that of two alike the training row goes."""
        if not self.settings.near or not self.sides:
            return
        sides = np.array(self.sides)
        order = np.argsort(sides != IN_EVAL, kind="stable")
        with open(self.folder / ACCEPTED, "rb") as accepted:

            def read(number: int) -> dict[str, Any]:
                accepted.seek(self.offsets[number])
                return orjson.loads(accepted.readline())

            repeated, self.warnings["templated"] = find_repeated(self.settings.near, order, read)
            for number, kept in sorted(repeated.items()):
                self.sides[number] = LEFT_OUT
                row = read(number)
                self._count(row["messages"], -1)
                kind: Kind = "near_duplicate"
                if self.eval_files and sides[kept] != sides[number]:
                    kind = "near_leak"
                problem = self._repeats(kind, kept)
                file = self.names[self.file[number]]
                self._reject(self.line[number], row, problem, file=file)

    def _choose_splits(self) -> None:
        """Keep the given number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        train = [number for number, side in enumerate(self.sides) if side == IN_TRAIN]
        train.sort(key=self.keys.__getitem__)
        no_eval = not self.eval_files and IN_EVAL not in self.sides
        if no_eval and len(train) > 1:
            moved = train.pop(0)
            self.sides[moved] = IN_EVAL
        if self.settings.limit:
            for number in train[self.settings.limit :]:
                self.sides[number] = UNUSED
        self.train = self.sides.count(IN_TRAIN)
        self.eval = self.sides.count(IN_EVAL)

    def _write_splits(self) -> None:
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
        """What became of the rows."""
        rows = self.rows.total()
        accepted = rows - self.reasons.total()
        return DataCard(
            **vars(self.settings),
            source_sha256=hash_files(self.train_files, self.eval_files, end=END),
            eval_fraction=EVAL_FRACTION,
            files=dict(self.rows),
            rows=rows,
            accepted=accepted,
            rejected=rows - accepted,
            train=self.train,
            eval=self.eval,
            unused=accepted - self.train - self.eval,
            duplicates=sum(self.reasons[kind] for kind in REPEATED),
            trimmed=self.trimmed,
            reasons=dict(self.reasons.most_common()),
            warnings=dict((+self.warnings).most_common()),
            examples=self.examples,
            problems=self.problems,
            languages=dict((+self.languages).most_common()),
            characters=dict(+self.characters),
            fingerprint=hash_files([self.folder / TRAIN, self.folder / EVAL]),
        )

    def publish(self, card: DataCard, out: Path) -> None:
        """Write rows and card, the card last: a folder with a card is a finished one."""
        self.publish_file(EVAL, out)
        self.publish_file(TRAIN, out)
        write_json(out / CARD, card.model_dump())

    def publish_file(self, name: str, out: Path) -> None:
        """Move a file into the data folder, once it is on disk."""
        with open(self.folder / name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.folder / name, out / name)


def _require_usable(card: DataCard, out: Path) -> None:
    """Refuse data of which most is broken, or nothing is left to train on or to hold out."""
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
