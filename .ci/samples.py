"""Writes data_samples/train.jsonl and eval.jsonl, the same bytes every time: customers' messages, each with its ticket.

python .ci/samples.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from nbutils import corpus
from nbutils.files import SAMPLES, write_text

FILES = {"train.jsonl": (800, 2026), "eval.jsonl": (120, 2027)}  # rows and seed


def main(folder: Path) -> None:
    """No two rows share a ticket."""
    taken: set[str] = set()
    for name, (count, seed) in FILES.items():
        rng, lines = random.Random(seed), list[str]()
        while len(lines) < count:
            _, text, facts = corpus.draw_message(rng, for_samples=True)
            ticket = json.dumps(facts, ensure_ascii=False)
            if ticket not in taken:
                taken.add(ticket)
                turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ticket}]
                lines.append(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
        write_text(folder / name, "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else SAMPLES)
