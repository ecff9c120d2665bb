"""`data check`: the pass that prepares data, over the learner's files, with a report instead of a training."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import models, plan
from nbutils.data.build import Build, find_sources
from nbutils.data.card import EVAL, NEAR_OVERLAP, REJECTED, TRAIN, DataCard, stored_rows
from nbutils.data.rows import Json
from nbutils.errors import CourseError
from nbutils.language import tr

# Tokens of a row without a tokenizer, from its bytes as JSON: 0.94 to 1.02 times Qwen2.5's for the bundled rows, 1.11
# to 1.19 times for three sets people train on (benchmarks/row_length.py).
BYTES_PER_TOKEN = 4
TEMPLATE_TOKENS = 12


@dataclass(frozen=True)
class DataReport:
    """The card that these files would get, and what to do next."""

    card: DataCard
    columns: list[str]  # of the first row whose columns are not known
    rejected_file: Path | None
    next: list[str]

    def as_json(self) -> Json:
        """The report for programs."""
        return self.card.model_dump() | {"columns": self.columns, "next": self.next}

    def __str__(self) -> str:
        place = self.rejected_file or tr("--rejected FILE writes them")
        return "\n".join([str(self.card), self.card.rejected_text(place), *self.card.examples, "", *self.next])


def check(
    sources: Sequence[str],
    *,
    columns: str = "",
    near: float = NEAR_OVERLAP,
    repair: bool = True,
    model: str = "",
    max_length: int = 0,
    out: Path | None = None,
    rejected: Path | None = None,
) -> DataReport:
    """`data check`: the same pass; bad rows never stop it, and only `out` and `rejected` are written.

    Example:
        `print(check(["my_rows.jsonl"], columns="user=title, assistant=reply"))`
    """
    _require_new(out, rejected)
    rejected_in_out = out and out / REJECTED
    card = DataCard(source=", ".join(sources), columns=columns, near=near, repair=repair)
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as scratch:  # no part of the report
        tokenizer = models.load_tokenizer(model, "--model") if model or max_length else None
        build = Build(Path(scratch), card, *find_sources(sources, ""))
        build.run()
        build.publish(build.folder)
        if tokenizer and card.accepted:
            card.lengths = _token_lengths(build.folder, tokenizer, max_length)
        bytes_per_row = build.offsets[-1] / max(len(build.number_of), 1)
        mean = card.lengths.get("mean") or bytes_per_row / BYTES_PER_TOKEN + TEMPLATE_TOKENS
        for path in filter(None, (rejected, rejected_in_out)):
            path.parent.mkdir(parents=True, exist_ok=True)
            build.publish_rejected(path)
        if out and card.train and card.eval:
            build.publish(out)
    unknown = [problem.seen for problem in card.problems if problem.kind == "unknown_columns"]
    return DataReport(
        card=card,
        columns=unknown[0].split(", ") if unknown else [],
        rejected_file=rejected or rejected_in_out,
        next=_next_steps(card, mean, estimated=not model),
    )


def _require_new(out: Path | None, rejected: Path | None) -> None:
    """Refuse to write over anything."""
    for path in (out, rejected):
        if path and os.path.lexists(path):
            raise CourseError(
                "{path} is there already.",
                todo="Choose another name; nothing was written.",
                path=path,
            )


def _token_lengths(folder: Path, tokenizer: Any, max_length: int) -> dict[str, int]:
    """Tokens of the accepted rows, and how many rows are over the limit."""
    from nbutils.chat import filter_by_length

    rows = stored_rows(folder / TRAIN) + stored_rows(folder / EVAL)
    filtered = filter_by_length(tokenizer, rows, 0)
    lengths = {
        "mean": round(sum(filtered.lengths) / len(rows)),
        "longest": filtered.longest,
    }
    if max_length:
        over = sum(length > max_length for length in filtered.lengths)
        lengths |= {"max_length": max_length, "over": over}
    return lengths


def _next_steps(card: DataCard, mean_length: float, estimated: bool) -> list[str]:
    if not card.rows:
        return [tr("[FAIL] There is no row in these files.")]
    if not card.train:
        return []
    command = plan.command(card.train, mean_length)
    step = tr("Memory, time and cost of a training on these rows: {command}", command=command)
    return [tr("The mean length is an estimate; --model NAME counts the tokens."), step] if estimated else [step]
