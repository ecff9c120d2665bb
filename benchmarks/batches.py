"""How long the collator takes for a batch of 8 packed rows: from lists, as `datasets` hands them out, and from arrays.

    python benchmarks/batches.py

The GPU waits for a batch between two steps. `training.patch_lora_kernels` asks for arrays. Result: results/batches.json
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nbutils import files
from nbutils.training import model as attention

MICRO_BATCH, LENGTH, EXAMPLE, BATCHES = 8, 2048, 256, 40
RESULT = Path(__file__).parent / "results/batches.json"


def rows() -> Dataset:
    """Packed rows of examples of the mean length of instruction data, with labels as lesson 03 has them."""
    random = np.random.default_rng(0)
    sizes = [EXAMPLE] * (LENGTH // EXAMPLE)
    tokens = [random.integers(5, 2000, LENGTH).tolist() for _ in range(MICRO_BATCH * BATCHES)]
    return Dataset.from_list([{"input_ids": row, "labels": row, "seq_lengths": sizes} for row in tokens])


def milliseconds(dataset: Any) -> list[float]:
    """Of every batch: fetching its rows and laying them end to end."""
    collate = attention.with_boundaries(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    found = []
    for start in range(0, len(dataset), MICRO_BATCH):
        began = time.perf_counter()
        collate(dataset.__getitems__([*range(start, start + MICRO_BATCH)]))
        found.append(1e3 * (time.perf_counter() - began))
    return found


def main() -> None:
    """Both ways, twice in turn, so that neither is only the first."""
    dataset = rows()
    lists, arrays = [], []
    for _ in range(2):
        lists += milliseconds(dataset)
        arrays += milliseconds(dataset.with_format("numpy"))
    medians = {"lists_ms": statistics.median(lists), "arrays_ms": statistics.median(arrays)}
    result = {name: round(value, 2) for name, value in medians.items()} | {
        "ratio": round(medians["lists_ms"] / medians["arrays_ms"], 1), "batches": len(lists),
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "python": platform.python_version(),
        "versions": {name: version(name) for name in ("datasets", "torch", "trl")},
    }  # fmt: skip
    files.write_json(RESULT, result)
    print(*(f"{name:10} {value}" for name, value in result.items()), sep="\n")


if __name__ == "__main__":
    main()
