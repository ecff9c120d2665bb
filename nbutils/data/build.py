"""The data folder of a run: made once from its source, reused afterwards, never replaced by another without a word."""

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
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm import tqdm

from nbutils import distributed, models, platforms
from nbutils.data import card as cards
from nbutils.data.card import CARD, EVAL, REJECTED, REPEATED, TRAIN, Counts, DataCard, Report
from nbutils.data.dedupe import NearDuplicates, digests, row_text
from nbutils.data.read import TEXT, bundled, find_files, read_rows, split_name
from nbutils.data.rows import ChatRow, check_row, parse_mapping
from nbutils.data.text import Problem, RowError, shown
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, GIB, SAMPLES, write_json
from nbutils.platforms import network

EVAL_NAMES = ("eval", "test", "valid", "validation", "dev")
BUNDLED, BUNDLED_LICENCE = "the bundled sample", "CC0-1.0, written for this course"
EVAL_FRACTION, NEAR = 0.1, 0.8
UNPACKED = 6  # compressed and parquet files grow about sixfold
ACCEPTED, BUILDING, STALE_SECONDS = "accepted.jsonl", ".building-", 3600


@distributed.main_first()
def prepare(
    source: str, out: Path, *, default: str = "", eval_source: str = "", rows: int = 0, columns: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one; without a source from `default` or the sample."""
    mapping = _mapping(columns)
    if (out / CARD).exists():
        return _reuse(out, source, eval_source, rows, mapping)
    named = source or default
    train_files, eval_files = find_sources([named] if named else [], eval_source)
    settings = {
        "source": named or BUNDLED, "eval_source": eval_source, "source_sha256": _sha256(train_files, eval_files),
        "licence": BUNDLED_LICENCE if not named or bundled(named) else "unstated", "columns": mapping, "limit": rows,
    }  # fmt: skip
    with _building(out, settings, train_files, eval_files) as build:
        if (out / CARD).exists():  # another process was faster
            return _reuse(out, source, eval_source, rows, mapping)
        return build.publish(out)


def check(
    sources: Sequence[str], *, columns: str = "", near: float | None = None, repair: bool = True, model: str = "",
    max_length: int = 0, out: Path | None = None, rejected: Path | None = None,
) -> Report:  # fmt: skip
    """`data check`: the same pass; bad rows never stop it, and only `out` and `rejected` are written."""
    near = NEAR if near is None else near
    if max_length and not model:
        raise CourseError("data.needs_tokenizer")
    if near and not 0.5 <= near <= 1:
        raise CourseError("data.bad_overlap", near=near)
    for place in filter(None, (out, rejected)):
        if os.path.lexists(place) and (place == rejected or not place.is_dir() or any(place.iterdir())):
            raise CourseError("data.foreign_files", path=place)
    settings = {"source": ", ".join(sources), "columns": _mapping(columns), "near": near, "repair": repair}
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as scratch:  # no part of the report
        tokenizer = _tokenizer(model) if model else None
        files = find_sources(sources, "")
        with _building(out or Path(scratch), settings | {"source_sha256": _sha256(*files)}, *files) as build:
            counts = build.counts
            lengths = _token_lengths(build.folder, tokenizer, max_length) if tokenizer and build.keys else None
            if rejected:
                rejected.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(build.folder / REJECTED, rejected)
            with contextlib.suppress(CourseError):  # too few rows: only the rejected ones are written
                if out:
                    build.publish(out, strict=False)
    unknown = [error.raw for error in counts.first_errors if error.problems[0].kind == "unknown_columns"]
    report = counts.facts() | {"files": counts.files, "examples": counts.first_warnings, "lengths": lengths}
    report["problems"] = [entry for error in counts.first_errors for entry in cards.entries(error)]
    report["columns"] = [shown(name) for name in unknown[0]] if unknown else []
    todo = "To train on the accepted rows: lesson 02 with DATA set to the same file. All rejected rows: --rejected FILE"
    return Report(report | {"next": [f"{out} holds the data." if out else todo]})


def _mapping(columns: str) -> str:
    return ", ".join(f"{part}={'+'.join(names)}" for part, names in parse_mapping(columns).items())


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: those named so, or `eval`, `test` or `valid` files beside others."""
    if not sources:
        return [SAMPLES / TRAIN], find_files(eval_source) if eval_source else [SAMPLES / EVAL]
    files = list(dict.fromkeys(file for source in sources for file in find_files(source)))
    if eval_source:
        return files, find_files(eval_source)
    held_out = [file for file in files if split_name(file) in EVAL_NAMES]
    return ([file for file in files if file not in held_out], held_out) if len(held_out) < len(files) else (files, [])


def _sha256(*groups: list[Path]) -> str:
    """The content of the source files, in order; names and places do not count."""
    digest = hashlib.sha256()
    for group in groups:
        for path in group:
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
            digest.update(b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def _reuse(out: Path, source: str, eval_source: str, rows: int, mapping: str) -> DataCard:
    card = cards.verify(out)
    if not _same_source(card, source, eval_source) or card.limit != rows or mapping not in ("", card.columns):
        there = f"{card.source}, limit {card.limit}, columns {card.columns!r}"
        raise CourseError("data.other_input", out=out, there=there)
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
def _building(out: Path, settings: dict[str, Any], train: list[Path], held_out: list[Path]) -> Iterator[Build]:
    """A finished build in a folder below `out` that is gone afterwards, whatever happens."""
    sizes = [file.stat().st_size * (1 if file.suffix in TEXT else UNPACKED) for file in train + held_out]
    require_disk(out, 3 * sum(sizes) / GIB, "preparing the data")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(f"{BUILDING}*"):  # by a process that was killed
            with contextlib.suppress(OSError):
                if time.time() - max(path.stat().st_mtime for path in [left, *left.iterdir()]) > STALE_SECONDS:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=out, prefix=BUILDING) as folder:
            build = Build(Path(folder), settings)
            build.run(train, held_out)
            yield build
    except OSError as problem:
        if problem.errno is None:  # a library's own error, not one of the disk
            raise
        raise CourseError("data.disk_error", path=problem.filename or out, reason=problem.strerror) from problem


class Build:
    """One pass over the rows of a source into a temporary folder; about 300 bytes of each row stay in memory."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        defaults = {"eval_source": "", "eval_fraction": EVAL_FRACTION, "limit": 0, "licence": "unstated"}
        self.settings: dict[str, Any] = {**defaults, "near": NEAR, "repair": True, **settings}
        self.folder, self.counts = folder, Counts()
        self.near = NearDuplicates(self.settings["near"]) if self.settings["near"] else None
        self.seen: dict[int, int] = {}  # digest of every row used -> its number
        self.eval_prompts: dict[int, int] = {}
        self.files: list[str] = []
        self.file, self.line, self.offsets = array("I"), array("Q"), array("Q", [0])  # of each row used, as these:
        self.keys, self.held_out = array("Q"), array("B")

    def run(self, train: list[Path], held_out: list[Path]) -> None:
        """Read everything into the folder; afterwards the three files there are as they will be published."""
        self.split_here = not held_out
        often = Counter(file.name for file in train + held_out)
        progress = tqdm(desc="Checking rows", unit=" rows", mininterval=1 if sys.stderr.isatty() else 15, delay=5)
        with open(self.folder / REJECTED, "xb") as self.rejected:
            with open(self.folder / ACCEPTED, "xb", CHUNK) as self.accepted, progress:
                for file, side in [*((file, 1) for file in held_out), *((file, 0) for file in train)]:
                    self.files.append(file.name if often[file.name] == 1 else str(file))
                    self.counts.files[self.files[-1]] = 0
                    for row in read_rows(file):
                        self._add(check_row(row, self.settings["columns"], self.settings["repair"]), side)
                        progress.update()
            self._write_splits(self._without_near_duplicates())

    def _add(self, row: ChatRow | RowError, side: int) -> None:
        self.counts.rows += 1
        self.counts.files[self.files[-1]] += 1
        if isinstance(row, RowError):
            self._reject(row.line, row.raw, row.problems)
            return
        key, prompt = digests(row, numbers=not self.split_here)
        if self.split_here:
            side = int(prompt / 2**64 < self.settings["eval_fraction"])
        stored = {"messages": row.messages, "tools": row.tools} if row.tools else {"messages": row.messages}
        if not side and prompt in self.eval_prompts:
            seen, todo = (
                f"asks what {self._place(self.eval_prompts[prompt])} asks",
                "train on questions eval does not ask",
            )
            self._reject(row.line, stored, (Problem("leak", "-", seen, todo),))
        elif key in self.seen:
            seen, todo = f"the same as {self._place(self.seen[key])}", "nothing: one copy is kept"
            self._reject(row.line, stored, (Problem("duplicate", "-", seen, todo),))
        else:
            if side and not self.split_here:
                self.eval_prompts[prompt] = len(self.keys)
            self._accept(row, stored, key, side)

    def _accept(self, row: ChatRow, stored: dict[str, Any], key: int, side: int) -> None:
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        self.accepted.write(line)
        self.seen[key] = len(self.keys)
        self.file.append(len(self.files) - 1)
        self.line.append(row.line)
        self.keys.append(key)
        self.held_out.append(side)
        self.offsets.append(self.offsets[-1] + len(line))
        if self.near:
            self.near.add(row_text(row.messages, row.tools))
        self.counts.warn(len(self.keys) - 1, row, self.files[-1])

    def _reject(self, line: int, raw: Any, problems: tuple[Problem, ...], file: str = "") -> None:
        error = RowError(file or self.files[-1], line, raw, problems)
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
        with open(self.folder / ACCEPTED, "rb") as accepted:

            def read(number: int) -> dict[str, Any]:
                accepted.seek(self.offsets[number])
                return json.loads(accepted.readline())

            repeated = self.near.find(order, lambda number: row_text(**read(number)))
            for number, kept in sorted(repeated.items()):
                stays[number] = False
                self.counts.kinds.pop(number, None)
                leak = not self.split_here and self.held_out[kept] > self.held_out[number]
                seen, todo = f"nearly the same as {self._place(kept)}", "nothing: one of them is kept"
                problem = Problem("near_leak" if leak else "near_duplicate", "-", seen, todo)
                self._reject(self.line[number], read(number), (problem,), self.files[self.file[number]])
        self.counts.templated = self.near.templated
        return stays

    def _write_splits(self, stays: np.ndarray) -> None:
        """Keep the given number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        keys, held_out = np.frombuffer(self.keys, np.uint64), np.frombuffer(self.held_out, np.bool_).copy()
        train = np.flatnonzero(stays & ~held_out)
        train = train[np.argsort(keys[train], kind="stable")]
        self.lent = int(self.split_here and len(train) > 1 and not (stays & held_out).any())
        held_out[train[: self.lent]] = True
        unused = np.zeros(len(stays), np.bool_)
        unused[train[self.lent + (self.settings["limit"] or len(train)) :]] = True
        paths = [self.folder / name for name in (ACCEPTED, TRAIN, EVAL)]
        with open(paths[0], "rb") as rows, open(paths[1], "xb", CHUNK) as first, open(paths[2], "xb", CHUNK) as second:
            for line, used, left, side in zip(rows, stays.tolist(), unused.tolist(), held_out.tolist(), strict=True):
                if used:
                    self.counts.measure(orjson.loads(line)["messages"])
                    if not left:
                        (second if side else first).write(line)

    def publish(self, out: Path, strict: bool = True) -> DataCard:
        """Rejected rows first, card last: a folder with a card is a finished one."""
        _publish(self.folder / REJECTED, out / REJECTED)
        found, train, held_out = cards.fingerprint(self.folder)  # what is on disk, not what should be
        facts = self.counts.facts()
        if not facts["rows"]:
            raise CourseError("data.no_rows", source=self.settings["source"])
        if not train or not held_out or (strict and 2 * (facts["rejected"] - facts["duplicates"]) > facts["rows"]):
            broken = [error for error in self.counts.first_errors if error.problems[0].kind not in REPEATED]
            first = "\n".join(f"  {cards.describe(cards.entries(error)[0])}" for error in broken[:5])
            raise CourseError(
                "data.unusable", rows=facts["rows"], rejected=facts["rejected"], train=train, eval=held_out,
                source=self.settings["source"], first=first, out=out,
            )  # fmt: skip
        card = DataCard(
            **self.settings, **facts, train=train, eval=held_out, unused=facts["accepted"] - train - held_out,
            lent=self.lent, examples=self.counts.first_warnings, fingerprint=found,
        )  # fmt: skip
        for name in (EVAL, TRAIN):
            _publish(self.folder / name, out / name)
        write_json(out / CARD, card.model_dump())
        return card


def _publish(written: Path, final: Path) -> None:
    """Move a finished file into place once its bytes are on disk."""
    with open(written, "rb") as file:
        os.fsync(file.fileno())
    os.replace(written, final)


def _rejected_line(error: RowError) -> bytes:
    entry = {"file": error.file, "line": error.line, "problems": list(map(vars, error.problems)), "row": error.raw}
    try:
        text = json.dumps(entry, ensure_ascii=False, default=str, allow_nan=False)
    except (ValueError, RecursionError):  # too deep, a number of thousands of digits, NaN
        text = json.dumps(entry | {"row": None}, ensure_ascii=False)
    # characters UTF-8 cannot hold only occur in rejected rows; as \uXXXX they are still JSON
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _token_lengths(folder: Path, tokenizer: Any, max_length: int) -> dict[str, int]:
    """Tokens of every accepted row: how many are over the limit, what would be cut, how many stop tokens go with it."""
    from nbutils.chat import filter_by_length

    rows = cards.stored_rows(folder / TRAIN) + cards.stored_rows(folder / EVAL)
    filtered = filter_by_length(tokenizer, rows, 0)
    over = [example for example in filtered.examples if 0 < max_length < len(example.ids)]
    counts = {"max_length": max_length, "rows": len(rows), "longest": filtered.longest}
    counts["over"] = len({example.row for example in over})
    counts["tokens_cut"] = sum(len(example.ids) - max_length for example in over)
    counts["stop_lost"] = len({example.row for example in over if example.trained.rfind(1) >= max_length})
    return counts


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model as MODEL names it in the lessons: a course name, a folder, a hub id."""
    from transformers import AutoTokenizer

    name = models.meant(model, platforms.folders(platforms.detect()).inputs).value
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=not network.hub_online(), trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise CourseError("data.no_tokenizer", model=name, reason=str(problem).partition("\n")[0]) from problem
