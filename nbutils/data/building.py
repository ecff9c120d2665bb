"""One pass over the source: check, deduplicate, split by content, count everything.

Not here: the rules of a single row (rows). Rows stream through; a 16-byte digest and a place of each stay in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from nbutils.data.card import CARD, EVAL, REJECTED, TRAIN, DataCard, fingerprint, language, length_bin, length_bins
from nbutils.data.reading import FORMATS_TEXT, Problem, RowError, read_rows
from nbutils.data.rows import SHAPES_TEXT, ChatRow, check_row
from nbutils.errors import CourseError
from nbutils.paths import write_json

BAR_FROM_BYTES = 20_000_000
SHOWN = 5
REPEATED = ("duplicate", "leak")


class Build:
    """One pass over the source into a temporary folder, and the move into place."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self.asked = folder, asked
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.characters: Counter[str] = Counter()
        self.first_errors: list[RowError] = []
        self.places: dict[bytes, tuple[str, int]] = {}
        self.eval_prompts: dict[bytes, tuple[str, int]] = {}
        self.order = array("Q")  # one number per training row, from its content: decides what a smaller set keeps

    def run(self, train_files: list[Path], eval_files: list[Path], out: Path) -> DataCard:
        """Read everything, then publish: splits first, card last."""
        with contextlib.ExitStack() as stack:
            self.files = {name: stack.enter_context(_create(self.folder / name)) for name in (TRAIN, EVAL, REJECTED)}
            for checked in _checked(eval_files):
                self._add(checked, EVAL)
            for checked in _checked(train_files):
                self._add(checked, TRAIN if eval_files else "")
        self._refuse_bad_source(out)
        self._select(split_here=not eval_files)
        card = self._card()
        for name in (REJECTED, EVAL, TRAIN):
            _publish(self.folder / name, out / name)
        write_json(out / CARD, card.model_dump())
        return card

    def _add(self, checked: ChatRow | RowError, split: str) -> None:
        """Count one row and write it where it belongs."""
        self.counts["rows"] += 1
        if isinstance(checked, ChatRow):
            text = json.dumps({"messages": checked.messages}, ensure_ascii=False)
            key, prompt = _digest(checked.messages), _digest(checked.messages[:-1])
            split = split or (EVAL if _fraction(prompt) < self.asked["eval_fraction"] else TRAIN)
            repeated = self._repeated(key, prompt, split)
            if repeated is None:
                self._accept(checked, text, key, prompt, split)
                return
            checked = RowError(checked.file, checked.line, {"messages": checked.messages}, (repeated,))
        self.reasons[checked.problems[0].kind] += 1
        if len(self.first_errors) < SHOWN and checked.problems[0].kind not in REPEATED:
            self.first_errors.append(checked)
        problems = [vars(problem) for problem in checked.problems]
        entry = {"file": checked.file, "line": checked.line, "problems": problems, "row": checked.raw}
        self.files[REJECTED].write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")

    def _repeated(self, key: bytes, prompt: bytes, split: str) -> Problem | None:
        """Why this row was seen before: the same row, or a training row that asks a held-out question."""
        if split == TRAIN and prompt in self.eval_prompts:
            file, line = self.eval_prompts[prompt]
            return Problem(
                "leak", "-", f"asks what {file} line {line} asks", "train on questions that eval does not ask"
            )
        if key in self.places:
            file, line = self.places[key]
            return Problem("duplicate", "-", f"the same as {file} line {line}", "nothing: one copy is kept")
        return None

    def _accept(self, row: ChatRow, text: str, key: bytes, prompt: bytes, split: str) -> None:
        self.places[key] = (row.file, row.line)
        if split == EVAL:
            self.eval_prompts[prompt] = (row.file, row.line)
        else:
            self.order.append(int.from_bytes(key[:8], "big"))
        self.files[split].write(text + "\n")
        self.counts.update(accepted=1, trimmed=int(row.trimmed))
        self.languages[language(row.messages)] += 1
        self.characters[length_bin(row.messages)] += 1

    def _refuse_bad_source(self, out: Path) -> None:
        """Stop when nothing, or less than half, of the source can be used; rejected.jsonl stays for the learner."""
        rows, accepted = self.counts["rows"], self.counts["accepted"]
        if not rows:
            raise CourseError(f"There is not one row in {self.asked['source']}.", FORMATS_TEXT, "give a file with rows")
        broken = rows - accepted - sum(self.reasons[kind] for kind in REPEATED)
        if accepted and 2 * broken <= rows:
            return
        _publish(self.folder / REJECTED, out / REJECTED)
        lines = [
            f"    {e.file} line {e.line}, {p.field}: {p.kind}, saw {p.seen}; {p.todo}"
            for e in self.first_errors
            for p in e.problems[:1]
        ]
        raise CourseError(
            "\n".join(
                [f"{rows - accepted} of {rows} rows of {self.asked['source']} cannot be used. The first:", *lines]
            ),
            f"rows with the columns {SHAPES_TEXT}; at least half of them sound",
            f"mend the rows; all of them with their reasons are in {out / REJECTED}",
        )

    def _select(self, split_here: bool) -> None:
        """Keep the asked number of training rows (smaller sets lie inside larger ones), and never leave eval empty."""
        lacks_eval = split_here and self.counts["accepted"] == len(self.order) > 1
        held_out = min(self.order) if lacks_eval else None
        kept = sorted(number for number in self.order if number != held_out)
        limit = self.asked["limit"] or len(kept)
        if held_out is None and limit >= len(kept):
            return
        last = kept[min(limit, len(kept)) - 1]
        with (
            open(self.folder / TRAIN, encoding="utf-8") as old,
            _create(self.folder / "kept") as new,
            open(self.folder / EVAL, "a", encoding="utf-8", newline="\n") as held,
        ):
            for number, line in zip(self.order, old, strict=True):
                if number == held_out:
                    held.write(line)
                elif number <= last:
                    new.write(line)
        os.replace(self.folder / "kept", self.folder / TRAIN)

    def _card(self) -> DataCard:
        """Count what is on disk, not what should be."""
        found, train, held_out = fingerprint(self.folder)
        if not train or not held_out:
            raise CourseError(
                f"{train} training and {held_out} evaluation rows came out of {self.asked['source']}.",
                "at least one row in each",
                "give more rows, or a file of its own for evaluation",
            )
        return DataCard(
            **self.asked,
            rows=self.counts["rows"],
            accepted=self.counts["accepted"],
            rejected=self.counts["rows"] - self.counts["accepted"],
            train=train,
            eval=held_out,
            unused=self.counts["accepted"] - train - held_out,
            duplicates=sum(self.reasons[kind] for kind in REPEATED),
            trimmed=self.counts["trimmed"],
            reasons={kind: count for kind, count in self.reasons.most_common() if count},
            languages=dict(self.languages.most_common()),
            characters={name: self.characters[name] for name in length_bins() if self.characters[name]},
            fingerprint=found,
        )


def _checked(files: list[Path]) -> Iterator[ChatRow | RowError]:
    """Every row of the files, checked, with a progress bar when there is much to read."""
    small = sum(file.stat().st_size for file in files) < BAR_FROM_BYTES
    with tqdm(desc="Checking rows", unit=" rows", mininterval=2, disable=small) as bar:
        for file in files:
            for row in read_rows(file):
                bar.update(1)
                yield check_row(row)


def _create(path: Path) -> TextIO:
    # characters UTF-8 cannot hold only occur in rejected rows; as \\uXXXX they are still JSON
    return open(path, "x", encoding="utf-8", errors="backslashreplace", newline="\n")


def _publish(made: Path, final: Path) -> None:
    """Move a finished file into place once its bytes are on disk."""
    with open(made, "rb") as file:
        os.fsync(file.fileno())
    os.replace(made, final)


def _digest(messages: list[dict[str, str]]) -> bytes:
    # checked rows hold no control characters, so these two can stand between fields
    text = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in messages)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _fraction(digest: bytes) -> float:
    """A number from 0 to 1 that depends on nothing but the content."""
    return int.from_bytes(digest[:8], "big") / 2**64
