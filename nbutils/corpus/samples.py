"""Writes data_samples/train.jsonl and eval.jsonl from a fixed seed, the same bytes every time; nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from nbutils.corpus.messages import sample_rows
from nbutils.paths import SAMPLES, write_text

TRAIN_ROWS, EVAL_ROWS = 800, 120
TRAIN_SEED, EVAL_SEED = 2026, 2027


def sample_files() -> dict[str, str]:
    """Return the content of both files; no ticket of the evaluation rows occurs in the training rows."""
    train = sample_rows(TRAIN_ROWS, TRAIN_SEED)
    taken = {row["messages"][-1]["content"] for row in train}
    parts = {"train.jsonl": train, "eval.jsonl": sample_rows(EVAL_ROWS, EVAL_SEED, taken)}
    return {name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) for name, rows in parts.items()}


def write_samples(folder: Path = SAMPLES) -> list[Path]:
    """Write both files into a folder and return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sample_files().items():
        write_text(folder / name, text)
    return [folder / name for name in sample_files()]
