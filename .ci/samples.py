"""Writes the generated files of data_samples, the same text every time: train.jsonl, eval.jsonl, pretraining.jsonl.gz.

python .ci/samples.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import corpus

from nbutils.files import SAMPLES, write_text

FILES = {"train.jsonl": (800, 2026), "eval.jsonl": (120, 2027)}  # rows and seed
TEXTS, TEXTS_SEED = 20_000, 43


def write_tickets(folder: Path) -> None:
    """Write customers' messages, each with its ticket; no two rows share a ticket."""
    taken: set[str] = set()
    for name, (count, seed) in FILES.items():
        rng = random.Random(seed)
        lines: list[str] = []
        while len(lines) < count:
            _, text, facts = corpus.draw_message(rng, for_samples=True)
            ticket = json.dumps(facts, ensure_ascii=False)
            if ticket in taken:
                continue
            taken.add(ticket)
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ticket}]
            lines.append(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
        write_text(folder / name, "".join(lines))


def main(folder: Path) -> None:
    """Write all files."""
    write_tickets(folder)
    corpus.write_texts(folder / "pretraining.jsonl.gz", TEXTS, TEXTS_SEED)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else SAMPLES)
