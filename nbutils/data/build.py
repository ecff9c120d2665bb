"""The data folder of a run: made once from its source, reused afterwards, never quietly exchanged for another.

Rows stream through one pass: check, deduplicate, split by content, count, write. What stays of each in memory is about
300 bytes: its digests, its places and a signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm import tqdm

from nbutils import models, platforms, scaling
from nbutils.data import card as cards
from nbutils.data.card import CARD, CARD_TEXT, EVAL, REJECTED, REPEATED, TRAIN, Counts, DataCard, Report
from nbutils.data.columns import KNOWN_COLUMNS, parse_mapping
from nbutils.data.dedupe import NearDuplicates, digests, row_text
from nbutils.data.read import LONGEST_LINE, bundled, find_files, licence_of, read_rows, split_name
from nbutils.data.rows import ChatRow, check_row
from nbutils.data.text import Problem, RowError, shown
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import CHUNK, GIB, SAMPLES, write_json, write_text
from nbutils.platforms import network

EVAL_NAMES = ("eval", "test", "valid", "validation", "dev")
BUNDLED, BUNDLED_LICENCE = "the bundled sample", "CC0-1.0, written for this course"
NEAR = 0.8
SPLITS = (TRAIN, EVAL)
UNPACKED = 6  # compressed and parquet files grow about sixfold
BUILDING, STALE_SECONDS = ".building-", 3600
PROGRESS_FROM_BYTES = 20_000_000
TOKENIZED_AT_ONCE = 2000


@scaling.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", eval_fraction: float = 0.1, rows: int = 0,
    licence: str = "", columns: str = "", near: float | None = None, repair: bool | None = None,
) -> DataCard:  # fmt: skip
    """Make the data folder of a run, or reuse the finished one that came from the same source and settings.

    `default` is the source where none is named and no data is there yet ("": the bundled sample).
    `columns` names columns the course does not know, as "user=title+body, assistant=reply"; `near` is the overlap from
    which a row counts as a near duplicate (0: do not look; default 0.8); `repair` fixes text that was read in the wrong
    encoding (default: yes). What is not named is taken from the card of finished data.
    """
    settings = _settings(eval_fraction, rows, columns, near, repair)
    named = {"eval_fraction", "limit"} | {
        name
        for name, value in {"columns": columns or None, "near": near, "repair": repair}.items()
        if value is not None
    }
    if (out / CARD).exists():
        return _reuse(out, settings, named, source, eval_source)
    asked_source, source = source, source or default
    train_files, eval_files = find_sources([source] if source else [], eval_source)
    ours = not source or bundled(source) is not None
    settings |= {
        "source": source or BUNDLED, "eval_source": eval_source, "source_sha256": _sha256(train_files, eval_files),
        "licence": licence or (BUNDLED_LICENCE if ours else licence_of(source)),
    }  # fmt: skip
    with _building(out, settings, train_files + eval_files) as build:
        build.run(train_files, eval_files)
        build.refuse_bad_source(out)
        if (out / CARD).exists():  # another process was faster
            return _reuse(out, settings, named, asked_source, eval_source)
        return build.publish(out)


def check(
    sources: Sequence[str], *, columns: str = "", near: float | None = None, repair: bool = True, model: str = "",
    max_length: int = 0, out: Path | None = None, rejected: Path | None = None,
) -> Report:  # fmt: skip
    """`data check`: the same pass; bad rows never stop it, and only `out` and `rejected` are written."""
    if max_length and not model:
        raise CourseError("data.needs_tokenizer")
    if rejected and not _may_replace(rejected):
        raise CourseError("data.foreign_files", path=rejected, held="something that is no list of rejected rows")
    if out and out.is_dir() and (held := sorted(one.name for one in out.iterdir() if not _may_replace(one))):
        raise CourseError("data.foreign_files", path=out, held=", ".join(held[:3]))
    settings = _settings(0.1, 0, columns, near, repair) | {"eval_source": "", "source": ", ".join(sources)}
    with contextlib.redirect_stdout(sys.stderr):  # what is printed meanwhile is no part of the report
        tokenizer = _tokenizer(model) if model else None
        train, held_out = find_sources(sources, "")
        settings |= {"licence": licence_of(sources[0]), "source_sha256": _sha256(train, held_out)}
        with tempfile.TemporaryDirectory() as scratch, _building(out or Path(scratch), settings, train) as build:
            build.run(train, held_out)
            counts = build.counts
            lengths = _token_lengths(build.folder, tokenizer, max_length) if tokenizer and counts.accepted else None
            if rejected:
                rejected.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(build.folder / REJECTED, rejected)
            written = ""
            if out:
                try:
                    build.publish(out)
                    written = f"{out} holds {TRAIN}, {EVAL}, {REJECTED} and the data card."
                except CourseError as problem:  # without rows on both sides
                    written = f"{out} holds only {REJECTED}: {problem.seen}"
    names = [shown(name) for name in counts.unknown_columns] if counts.columns_question() else []
    problems = [entry for error in counts.first_errors for entry in cards.entries(error)]
    more = {"files": counts.files, "problems": problems, "examples": counts.first_warnings, "lengths": lengths}
    more |= {"columns": names, "next": _next_steps(counts, written, bool(rejected), lengths)}
    return Report(counts.facts() | more)


def _settings(eval_fraction: float, rows: int, columns: str, near: float | None, repair: bool | None) -> dict[str, Any]:
    """The settings that decide what the rows become, once they make sense."""
    near = NEAR if near is None else float(near)
    for name, value, sound, allowed in (
        ("eval_fraction", eval_fraction, 0 < eval_fraction < 1, "more than 0 and less than 1"),
        ("rows", rows, rows >= 0, "0 (all rows) or more"),
        ("near", near, not near or 0.5 <= near <= 1, "0 (do not look for near duplicates), or 0.5 to 1"),
    ):
        if not sound:
            raise CourseError("data.bad_setting", name=name, value=value, allowed=allowed)
    mapping, repair = str(parse_mapping(columns) or ""), repair is not False
    return {"eval_fraction": eval_fraction, "limit": rows, "columns": mapping, "near": near, "repair": repair}


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: those named so, or `eval`, `test` or `valid` files beside others."""
    if not sources:
        return [SAMPLES / TRAIN], find_files(eval_source) if eval_source else [SAMPLES / EVAL]
    files = list(dict.fromkeys(file for source in sources for file in find_files(source)))
    if eval_source:
        return files, find_files(eval_source)
    held_out = [file for file in files if split_name(file).lower() in EVAL_NAMES]
    return ([file for file in files if file not in held_out], held_out) if len(held_out) < len(files) else (files, [])


def _sha256(*groups: list[Path]) -> str:
    """The content of the source files, in order; names and places do not count."""
    digest = hashlib.sha256()
    for group in groups:
        for path in group:
            with _disk_errors(path), open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
            digest.update(b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def _reuse(out: Path, settings: dict[str, Any], named: set[str], source: str, eval_source: str) -> DataCard:
    """The finished data, if it is what is asked for; what is not named is taken from its card."""
    card = cards.verify(out)
    there = {name: getattr(card, name) for name in ("eval_fraction", "limit", "columns", "near", "repair")}
    changed = {name: value for name, value in there.items() if name in named and value not in (settings[name], None)}
    if not _same_source(card, source, eval_source):
        changed |= {"source": card.source, "eval_source": card.eval_source}
    if changed:
        asked = settings | {"source": source, "eval_source": eval_source}
        differences = ", ".join(f"{name} is {value!r} there, not {asked[name]!r}" for name, value in changed.items())
        raise CourseError("data.other_input", out=out, differences=differences)
    print(f"The data of this run is ready (from {card.source}): nothing is repeated.")
    return card


def _same_source(card: DataCard, source: str, eval_source: str) -> bool:
    """Whether a run's data came from this source: by content, or by name when the file has gone with its machine."""
    if not source:
        return eval_source in ("", card.eval_source)
    eval_source = eval_source or card.eval_source
    gone = [name for name in (source, eval_source) if name and not Path(name).expanduser().exists()]
    if gone and (source, eval_source) == (card.source, card.eval_source):
        return True
    return _sha256(*find_sources([source], eval_source)) == card.source_sha256


@contextlib.contextmanager
def _building(out: Path, settings: dict[str, Any], files: list[Path]) -> Iterator[Build]:
    """A build in a folder below `out` that is gone afterwards, whatever happens."""
    plain = (".jsonl", ".json", ".csv", ".tsv")
    size = sum(file.stat().st_size * (1 if file.suffix in plain else UNPACKED) for file in files) / GIB
    require_disk(out, 3 * size, "preparing the data")
    with _disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(f"{BUILDING}*"):  # by a process that was killed
            with contextlib.suppress(OSError):
                if time.time() - max(path.stat().st_mtime for path in [left, *left.iterdir()]) > STALE_SECONDS:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=out, prefix=BUILDING) as folder:
            yield Build(Path(folder), settings)


@contextlib.contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno is None:  # a library's own error, not one of the disk
            raise
        raise CourseError("data.disk_error", place=problem.filename or place, reason=problem.strerror) from problem


class Build:
    """One pass over the rows of a source into a temporary folder, and the move of its files into place."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings, self.counts = folder, settings, Counts()
        self.near = NearDuplicates(settings["near"]) if settings["near"] else None
        self.seen: dict[int, int] = {}  # digest of every row used -> its number
        self.eval_prompts: dict[int, int] = {}
        self.files: list[str] = []
        self.file, self.line = array("I"), array("Q")  # of each row used, as those below
        self.keys, self.held_out, self.offsets = array("Q"), array("B"), array("Q")
        self.sizes = [0, 0]  # bytes written to the two splits

    def run(self, train_files: list[Path], eval_files: list[Path]) -> None:
        """Read everything into the folder; afterwards the three files there are as they will be published."""
        self.split_here = not eval_files
        self.names = _short_names([*eval_files, *train_files])
        with contextlib.ExitStack() as stack:
            self.splits = [stack.enter_context(open(self.folder / name, "xb", 1 << 20)) for name in SPLITS]
            self.rejected = stack.enter_context(open(self.folder / REJECTED, "xb"))
            for checked in self._checked(eval_files):
                self._add(checked, 1)
            for checked in self._checked(train_files):
                self._add(checked, None if self.split_here else 0)
        with open(self.folder / REJECTED, "ab") as self.rejected:
            self._select(self._without_near_duplicates())

    def _checked(self, files: list[Path]) -> Iterator[ChatRow | RowError]:
        """Every row of the files, checked, with a progress bar when there is much to read."""
        small = sum(file.stat().st_size for file in files) < PROGRESS_FROM_BYTES
        mapping, repair = parse_mapping(self.settings["columns"]), self.settings["repair"]
        every = 1 if sys.stderr.isatty() else 15
        with tqdm(desc="Checking rows", unit=" rows", mininterval=every, delay=2, disable=small) as bar:
            for file in files:
                name = self.names[file]
                self.files.append(name)
                self.counts.files[name] += 0  # a file without rows is named as well
                for row in read_rows(file):
                    bar.update()
                    self.counts.files[name] += 1
                    checked = check_row(row, mapping, repair)
                    yield checked if checked.file == name else checked._replace(file=name)

    def _add(self, row: ChatRow | RowError, held_out: int | None) -> None:
        """Count one row and write it where it belongs; without a side given, its question decides."""
        self.counts.rows += 1
        if isinstance(row, RowError):
            self._reject(row)
            return
        key, prompt = digests(row, numbers=not self.split_here)
        if held_out is None:
            held_out = int(prompt / 2**64 < self.settings["eval_fraction"])
        repeated = None
        if not held_out and prompt in self.eval_prompts:
            seen = f"asks what {self._place(self.eval_prompts[prompt])} asks"
            repeated = Problem("leak", "-", seen, "train on questions that eval does not ask")
        elif key in self.seen:
            repeated = Problem(
                "duplicate", "-", f"the same as {self._place(self.seen[key])}", "nothing: one copy is kept"
            )
        if repeated:
            self._reject(RowError(row.file, row.line, _stored(row), (repeated,)))
        else:
            self._accept(row, key, prompt, held_out)

    def _accept(self, row: ChatRow, key: int, prompt: int, held_out: int) -> None:
        number = self.seen[key] = len(self.keys)
        if held_out and not self.split_here:
            self.eval_prompts[prompt] = number
        line = orjson.dumps(_stored(row), option=orjson.OPT_APPEND_NEWLINE)
        self.splits[held_out].write(line)
        self.file.append(len(self.files) - 1)
        self.line.append(row.line)
        self.keys.append(key)
        self.held_out.append(held_out)
        self.offsets.append(self.sizes[held_out])
        self.sizes[held_out] += len(line)
        if self.near:
            self.near.add(row_text(row.messages, row.tools))
        self.counts.accept(row)

    def _reject(self, error: RowError) -> None:
        self.counts.reject(error)
        self.rejected.write(_rejected_line(error))

    def _place(self, number: int) -> str:
        return f"{self.files[self.file[number]]} line {self.line[number]}"

    def _without_near_duplicates(self) -> np.ndarray:
        """Which rows stay. Held-out rows come first, so that of two alike the training row goes."""
        stays = np.ones(len(self.keys), np.bool_)
        if self.near is None or not len(stays):
            return stays
        order = np.argsort(1 - np.frombuffer(self.held_out, np.int8), kind="stable")
        with contextlib.ExitStack() as stack:
            written = [stack.enter_context(open(self.folder / name, "rb")) for name in SPLITS]

            def read(number: int) -> dict[str, Any]:
                written[self.held_out[number]].seek(self.offsets[number])
                return json.loads(written[self.held_out[number]].readline())

            repeated = self.near.find(order, lambda number: row_text(**read(number)))
            for number, kept in sorted(repeated.items()):
                stays[number] = False
                self.counts.remove(number)
                self._reject_near(number, kept, read(number))
        self.counts.templated = self.near.templated
        return stays

    def _reject_near(self, number: int, kept: int, row: dict[str, Any]) -> None:
        problem = Problem(
            "near_duplicate", "-", f"nearly the same as {self._place(kept)}", "nothing: one of them is kept"
        )
        if not self.split_here and self.held_out[kept] > self.held_out[number]:
            seen = f"nearly what {self._place(kept)} holds back"
            problem = Problem("near_leak", "-", seen, "train on rows that eval does not hold")
        self._reject(RowError(self.files[self.file[number]], self.line[number], row, (problem,)))

    def _select(self, stays: np.ndarray) -> None:
        """Keep the asked number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        keys, held_out = np.frombuffer(self.keys, np.uint64), np.frombuffer(self.held_out, np.bool_)
        train = np.flatnonzero(stays & ~held_out)
        train = train[np.argsort(keys[train], kind="stable")]
        self.lent = int(self.split_here and len(train) > 1 and not (stays & held_out).any())
        moved = train[0] if self.lent else -1
        limit = self.settings["limit"] or len(train)
        stays[train[self.lent + limit :]] = False
        if not self.lent and stays.all():
            return
        with contextlib.ExitStack() as stack:
            old = [stack.enter_context(open(self.folder / name, "rb")) for name in SPLITS]
            new = [stack.enter_context(open(self.folder / f"{name}.kept", "xb", 1 << 20)) for name in SPLITS]
            for number, (kept, side) in enumerate(zip(stays.tolist(), held_out.tolist(), strict=True)):
                line = old[side].readline()
                if kept:
                    new[int(side or number == moved)].write(line)
        for name in SPLITS:
            os.replace(self.folder / f"{name}.kept", self.folder / name)

    def refuse_bad_source(self, out: Path) -> None:
        """Stop when nothing, or less than half, of the source can be used; rejected.jsonl stays for the learner."""
        counts, source = self.counts, self.settings["source"]
        if not counts.rows:
            raise CourseError("data.no_rows", source=source)
        if counts.accepted and 2 * counts.broken <= counts.rows:
            return
        _publish(self.folder / REJECTED, out / REJECTED)
        broken = [error for error in counts.first_errors if error.problems[0].kind not in REPEATED]
        first = [f"  {cards.describe(cards.entries(error)[0])}" for error in broken[:5]]
        todo = f"fix the rows; all of them with their reasons are in {out / REJECTED}"
        if question := counts.columns_question():
            first, todo = [*first, question[0]], question[1]
        raise CourseError(
            "data.mostly_broken", rejected=counts.rows - counts.accepted, rows=counts.rows, source=source,
            first="\n".join(first), columns=KNOWN_COLUMNS, todo=todo,
        )  # fmt: skip

    def publish(self, out: Path) -> DataCard:
        """Splits first, card last: a folder with a card is a finished one."""
        found, train, held_out = cards.fingerprint(self.folder)  # what is on disk, not what should be
        _publish(self.folder / REJECTED, out / REJECTED)
        if not train or not held_out:
            reasons = cards.counts_text(self.counts.facts()["reasons"])
            source = self.settings["source"]
            raise CourseError("data.too_few_rows", train=train, eval=held_out, source=source, reasons=reasons, out=out)
        unused = self.counts.accepted - train - held_out
        card = DataCard(
            **self.settings, **self.counts.facts(), train=train, eval=held_out, unused=unused, lent=self.lent,
            examples=self.counts.first_warnings, fingerprint=found,
        )  # fmt: skip
        for name in (EVAL, TRAIN):
            _publish(self.folder / name, out / name)
        write_text(out / CARD_TEXT, card.markdown())
        write_json(out / CARD, card.model_dump())
        return card


def _publish(made: Path, final: Path) -> None:
    """Move a finished file into place once its bytes are on disk."""
    with open(made, "rb") as file:
        os.fsync(file.fileno())
    os.replace(made, final)


def _stored(row: ChatRow) -> dict[str, Any]:
    return {"messages": row.messages, "tools": row.tools} if row.tools else {"messages": row.messages}


def _rejected_line(error: RowError) -> bytes:
    """A rejected row with its problems as one line of JSON, whatever it holds."""
    problems = [vars(problem) for problem in error.problems]
    entry = {"file": error.file, "line": error.line, "problems": problems, "row": error.raw}
    try:
        text = json.dumps(entry, ensure_ascii=False, default=str)
        if "NaN" in text or "Infinity" in text:  # no JSON as numbers: kept as words
            text = json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    except (ValueError, RecursionError):  # too deep, or a number of thousands of digits
        text = json.dumps(entry | {"row": None}, ensure_ascii=False)
    # characters UTF-8 cannot hold only occur in rejected rows; as \uXXXX they are still JSON
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _short_names(files: list[Path]) -> dict[Path, str]:
    """The name of each file, with its whole path where another has the same name."""
    often = Counter(file.name for file in files)
    return {file: file.name if often[file.name] == 1 else file.as_posix() for file in files}


def _may_replace(file: Path) -> bool:
    """Whether nothing is lost when a file is written anew: missing, empty, or an earlier list of rejected rows."""
    if not os.path.lexists(file):
        return True
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with open(file, encoding="utf-8") as lines:
            first = json.loads(lines.readline(LONGEST_LINE) or '{"line": 0, "problems": 0, "row": 0}')
        return isinstance(first, dict) and {"line", "problems", "row"} <= set(first)
    except (OSError, ValueError, RecursionError):
        return False


def _next_steps(counts: Counts, written: str, rejected: bool, lengths: dict[str, Any] | None) -> list[str]:
    """What to do now."""
    lines = [written] if written else []
    if empty := [name for name, rows in counts.files.items() if not rows]:
        lines.append(f"Without a row: {', '.join(empty)}. Is it the right file, and complete? A csv needs a header.")
    if question := counts.columns_question():
        lines += [question[0], f"To do: {question[1]}"]
    elif counts.rows > counts.accepted and not (written or rejected):
        lines.append("All rejected rows with their reasons: add --rejected rejected.jsonl")
    if lengths and lengths["stop_lost"]:
        lines.append(f"Raise max_length to {lengths['longest']} (memory grows with it), or shorten the long rows.")
    if counts.accepted and not written:
        lines.append("To train on them: lesson 02 with DATA set to the same file, or --out FOLDER here.")
    return lines


def _token_lengths(folder: Path, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Tokens of every accepted row: how many are over the limit, what would be cut, how many stop tokens go with it."""
    from nbutils.chat import fitting, last_place

    form = ""
    found = {"max_length": max_length, "rows": 0, "longest": 0, "over": 0, "tokens_cut": 0, "stop_lost": 0}
    for rows in _chunks(folder):
        fitted = fitting(tokenizer, rows, 0, form)
        form = fitted.form.value
        over: set[int] = set()
        lost: set[int] = set()
        for example in fitted.examples:
            tokens = len(example.ids)
            found["longest"] = max(found["longest"], tokens)
            if 0 < max_length < tokens:
                over.add(example.row)
                found["tokens_cut"] += tokens - max_length
                lost |= {example.row} if last_place(fitted.view, example) >= max_length else set()
        found["rows"] += len(rows)
        found["over"] += len(over)
        found["stop_lost"] += len(lost)
    return found


def _chunks(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for name in SPLITS:
        with open(folder / name, "rb") as file:
            while rows := [json.loads(line) for line in islice(file, TOKENIZED_AT_ONCE)]:
                yield rows


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model as MODEL names it in the lessons: a course name, a folder, a hub id."""
    from transformers import AutoTokenizer

    name = str(Path(model).expanduser().absolute())
    if not Path(name).is_dir():
        places = platforms.folders(platforms.detect())
        name = models.meant(model, places.inputs).value
        downloaded = models.modelscope_folder(name, places.work)
        name = str(downloaded.absolute()) if (downloaded / models.DOWNLOADED).exists() else name
    offline = not Path(name).is_absolute() and not network.hub_online()
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        reason = f"{name} is not in the cache, and the model hub does not answer" if offline else str(problem)
        raise CourseError("data.no_tokenizer", model=model, reason=reason.splitlines()[0]) from problem
