"""How many steps the tiny profile needs: exact match of the merged model after lessons 02-04, by steps and seed.

    CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=2 python benchmarks/tiny_steps.py OUT.json 8 120 150 180

8 runs at a time; the numbers after it are `sft.max_steps`. A run takes some minutes of two CPU cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEEDS = (42, 0, 1, 2, 3)
LESSONS = [option for lesson in ("02", "03", "04") for option in ("--only", lesson)]


def exact_match(steps: int, seed: int) -> float:
    """The share of the sample's held-out rows that this run answers exactly."""
    with tempfile.TemporaryDirectory() as home:
        changed = ["--profile", "tiny", "--set", f"sft.max_steps={steps}", "-p", "SEED", str(seed)]
        command = [sys.executable, "-m", "nbutils", "run", *changed, *LESSONS]
        subprocess.run(command, env=os.environ | {"NBUTILS_HOME": home}, capture_output=True, check=True)
        facts = json.loads(Path(home, "tiny/facts.json").read_text(encoding="utf-8"))
        return facts["lessons"]["04_merge"]["exact_match"]["merged"]


if __name__ == "__main__":
    out, at_a_time, *steps = sys.argv[1:]
    pairs = [(int(count), seed) for count in steps for seed in SEEDS]
    with ThreadPoolExecutor(int(at_a_time)) as pool:
        scores = list(pool.map(exact_match, *zip(*pairs, strict=True)))
    found = {count: scores[place * len(SEEDS) : (place + 1) * len(SEEDS)] for place, count in enumerate(steps)}
    Path(out).write_text(json.dumps({"seeds": SEEDS, "exact_match": found}, indent=1) + "\n", encoding="utf-8")
    print(found)
