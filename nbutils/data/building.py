"""One pass over the source and a short second one: check, deduplicate, split by content, count, write.

Not here: the rules of a single row (rows), what near duplicates are (near), the counters (tally).
Rows stream through; what stays of each in memory is about 300 bytes: its digests, its places and a signature.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nbutils.data.alike import Text, text_of
from nbutils.data.card import CARD, CARD_TEXT, EVAL, REJECTED, TRAIN, DataCard, fingerprint
from nbutils.data.columns import SHAPES_TEXT, parse_mapping
from nbutils.data.content import digests, line_of, rejected_line, stored
from nbutils.data.near import Alike, NearDuplicates
from nbutils.data.raw import Problem, RowError
from nbutils.data.reading import FORMATS_TEXT, read_rows
from nbutils.data.rows import ChatRow, check_row
from nbutils.data.tally import REPEATED, Tally, columns_question, describe, entries, labels, positive
from nbutils.errors import CourseError
from nbutils.paths import write_json, write_text

BAR_FROM_BYTES = 20_000_000
SPLITS = (TRAIN, EVAL)
SHOWN = 5


class Build:
    """The rows of a source on their way into a temporary folder, and the move into place."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self.asked, self.tally = folder, asked, Tally()
        self.near = NearDuplicates(asked["near"]) if asked["near"] else None
        self.seen: dict[int, int] = {}  # content of every row used -> its number
        self.eval_prompts: dict[int, int] = {}
        self.sources: list[str] = []
        self.source, self.line = array("I"), array("Q")  # of each row used, as those below
        self.keys, self.held, self.at, self.marks = array("Q"), array("B"), array("Q"), array("H")
        self.ends = [0, 0]  # bytes written to the two splits

    def run(self, train_files: list[Path], eval_files: list[Path]) -> None:
        """Read everything into the folder; afterwards the three files there are as they will be published."""
        self.split_here = not eval_files
        self.labels = labels([*train_files, *eval_files])
        with contextlib.ExitStack() as stack:
            self.files = [stack.enter_context(open(self.folder / name, "xb", 1 << 20)) for name in SPLITS]
            self.rejected = stack.enter_context(open(self.folder / REJECTED, "xb"))
            for checked in self._checked(eval_files):
                self._add(checked, 1)
            for checked in self._checked(train_files):
                self._add(checked, None if self.split_here else 0)
        with open(self.folder / REJECTED, "ab") as self.rejected:
            self._select(self._without_near_duplicates())

    def _checked(self, files: list[Path]) -> Iterator[ChatRow | RowError]:
        """Every row of the files, checked, with a progress bar when there is much to read."""
        small = sum(file.stat().st_size for file in files) < BAR_FROM_BYTES
        often = 1 if sys.stderr.isatty() else 15
        mapping, repair = parse_mapping(self.asked["columns"]), self.asked["repair"]
        with tqdm(desc="Checking rows", unit=" rows", mininterval=often, delay=2, disable=small) as bar:
            for file in files:
                label = self.labels[file]
                self.sources.append(label)
                self.tally.files[label] += 0  # a file without rows is named as well
                for row in read_rows(file):
                    bar.update()
                    self.tally.files[label] += 1
                    checked = check_row(row, mapping, repair)
                    yield checked if checked.file == label else checked._replace(file=label)

    def _add(self, checked: ChatRow | RowError, held: int | None) -> None:
        """Count one row and write it where it belongs; without a side given, its question decides."""
        self.tally.rows += 1
        if isinstance(checked, RowError):
            self._reject(checked)
            return
        key, prompt = digests(checked, numbers=not self.split_here)
        if held is None:
            held = int(prompt / 2**64 < self.asked["eval_fraction"])
        repeated = self._repeated(key, prompt, held)
        if repeated:
            self._reject(RowError(checked.file, checked.line, stored(checked), (repeated,)))
        else:
            self._accept(checked, key, prompt, held)

    def _repeated(self, key: int, prompt: int, held: int) -> Problem | None:
        """Why this row was seen before: the same row, or a training row that asks a held-out question."""
        if not held and prompt in self.eval_prompts:
            place = self._place(self.eval_prompts[prompt])
            return Problem("leak", "-", f"asks what {place} asks", "train on questions that eval does not ask")
        if key in self.seen:
            return Problem("duplicate", "-", f"the same as {self._place(self.seen[key])}", "nothing: one copy is kept")
        return None

    def _accept(self, row: ChatRow, key: int, prompt: int, held: int) -> None:
        number = self.seen[key] = len(self.keys)
        if held and not self.split_here:
            self.eval_prompts[prompt] = number
        line = line_of(row)
        self.files[held].write(line)
        self.source.append(len(self.sources) - 1)
        self.line.append(row.line)
        self.keys.append(key)
        self.held.append(held)
        self.at.append(self.ends[held])
        self.ends[held] += len(line)
        if self.near:
            self.near.add(text_of(row.messages, row.tools))
        self.marks.append(self.tally.accept(row))

    def _reject(self, error: RowError) -> None:
        self.tally.reject(error)
        self.rejected.write(rejected_line(error))

    def _place(self, number: int) -> str:
        return f"{self.sources[self.source[number]]} line {self.line[number]}"

    def _without_near_duplicates(self) -> np.ndarray:
        """Which rows stay. Held-out rows come first, so that of two alike the training row goes."""
        stays = np.ones(len(self.keys), np.bool_)
        if self.near is None or not len(stays):
            return stays
        order = np.argsort(1 - np.frombuffer(self.held, np.int8), kind="stable")
        with contextlib.ExitStack() as stack:
            self.written = [stack.enter_context(open(self.folder / name, "rb")) for name in SPLITS]
            for found in self.near.find(order, self._text):
                stays[found.row] = False
                self._reject_near(found)
        self.tally.warnings["templated"] += self.near.templated
        return stays

    def _row(self, number: int) -> dict[str, Any]:
        file = self.written[self.held[number]]
        file.seek(self.at[number])
        return json.loads(file.readline())

    def _text(self, number: int) -> Text:
        row = self._row(number)
        return text_of(row["messages"], row.get("tools"))

    def _reject_near(self, found: Alike) -> None:
        row, place = self._row(found.row), self._place(found.kept)
        self.tally.take_back(row["messages"], self.marks[found.row])
        leak = not self.split_here and self.held[found.kept] > self.held[found.row]
        if leak:
            problem = Problem(
                "near_leak", "-", f"nearly what {place} holds back", "train on rows that eval does not hold"
            )
        else:
            problem = Problem("near_duplicate", "-", f"nearly the same as {place}", "nothing: one of them is kept")
        name = self.sources[self.source[found.row]]
        self._reject(RowError(name, self.line[found.row], row, (problem,)))

    def _select(self, stays: np.ndarray) -> None:
        """Keep the asked number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        keys, held = np.frombuffer(self.keys, np.uint64), np.frombuffer(self.held, np.bool_)
        train = np.flatnonzero(stays & ~held)
        train = train[np.argsort(keys[train], kind="stable")]
        lacks_eval = self.split_here and len(train) > 1 and not (stays & held).any()
        moved, self.lent = train[0] if lacks_eval else -1, int(lacks_eval)
        train = train[int(lacks_eval) :]
        limit = self.asked["limit"] or len(train)
        stays = stays.copy()
        stays[train[limit:]] = False
        if lacks_eval or not stays.all():
            self._rewrite(stays, held, moved)

    def _rewrite(self, stays: np.ndarray, held: np.ndarray, moved: int) -> None:
        """The two files with the rows that stay, in the order they were read; one row may change sides."""
        with contextlib.ExitStack() as stack:
            old = [stack.enter_context(open(self.folder / name, "rb")) for name in SPLITS]
            new = [stack.enter_context(open(self.folder / f"{name}.kept", "xb", 1 << 20)) for name in SPLITS]
            for number, (kept, side) in enumerate(zip(stays.tolist(), held.tolist(), strict=True)):
                line = old[side].readline()
                if kept:
                    new[int(side or number == moved)].write(line)
        for name in SPLITS:
            os.replace(self.folder / f"{name}.kept", self.folder / name)

    def refuse_bad_source(self, out: Path) -> None:
        """Stop when nothing, or less than half, of the source can be used; rejected.jsonl stays for the learner."""
        tally = self.tally
        if not tally.rows:
            raise CourseError(f"There is not one row in {self.asked['source']}.", FORMATS_TEXT, "give a file with rows")
        if tally.accepted and 2 * tally.broken <= tally.rows:
            return
        publish(self.folder / REJECTED, out / REJECTED)
        broken = [error for error in tally.first_errors if error.problems[0].kind not in REPEATED]
        first = [f"  {describe(entries(error)[0])}" for error in broken[:SHOWN]]
        unusable = f"{tally.rows - tally.accepted} of {tally.rows} rows of {self.asked['source']} cannot be used."
        allowed = f"rows with the columns {SHAPES_TEXT}; at least half of them sound"
        todo = f"mend the rows; all of them with their reasons are in {out / REJECTED}"
        if tally.asks_for_columns():
            columns, todo = columns_question(tally.unnamed)
            first = [*first, columns]
        raise CourseError("\n".join([f"{unusable} The first:", *first]), allowed, todo)

    def card(self, out: Path) -> DataCard:
        """Count what is on disk, not what should be; without rows on both sides only the rejected ones stay."""
        found, train, held_out = fingerprint(self.folder)
        if not train or not held_out:
            publish(self.folder / REJECTED, out / REJECTED)
            raise self._too_few(train, held_out, out)
        unused = self.tally.accepted - train - held_out
        return DataCard(
            **self.asked, **self.tally.facts(), train=train, eval=held_out, unused=unused, lent=self.lent,
            examples=self.tally.first_warnings, fingerprint=found,
        )  # fmt: skip

    def _too_few(self, train: int, held_out: int, out: Path) -> CourseError:
        tally, todo = self.tally, "give more rows, or a file of its own for evaluation"
        seen = f"{train} training and {held_out} evaluation rows came out of {self.asked['source']}."
        if tally.rows > tally.accepted:
            reasons = ", ".join(f"{kind} {count}" for kind, count in positive(tally.reasons).items())
            seen += f" {tally.rows - tally.accepted} of {tally.rows} rows were rejected: {reasons}."
            todo = f"mend the rejected rows (all of them with their reasons are in {out / REJECTED}), or {todo}"
        return CourseError(seen, "at least one row in each", todo)

    def publish(self, out: Path) -> DataCard:
        """Splits first, card last: a folder with a card is a finished one."""
        card = self.card(out)
        for name in (REJECTED, EVAL, TRAIN):
            publish(self.folder / name, out / name)
        write_text(out / CARD_TEXT, card.markdown())
        write_json(out / CARD, card.model_dump())
        return card


def publish(made: Path, final: Path) -> None:
    """Move a finished file into place once its bytes are on disk."""
    with open(made, "rb") as file:
        os.fsync(file.fileno())
    os.replace(made, final)
