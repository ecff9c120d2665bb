"""The practice runs of lessons 03 and 04 with several seeds: where each is best, and what it is judged to be.

python benchmarks/practice.py SEEDS     results/practice.json
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from nbutils import evaluation, files
from nbutils.training import practice

RESULT = Path(__file__).parent / "results/practice.json"


def measured(seed: int) -> dict[str, dict[str, object]]:
    """The three runs with one seed."""
    seeded = {name: replace(run, seed=seed) for name, run in practice.RUNS.items()}
    practice.RUNS.update(seeded)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        judged = evaluation.compare_practice(Path(folder))
        for name, run in seeded.items():
            best_step, best_loss = practice.train(run, practice.folder(Path(folder), name)).best
            result[name] = {
                "steps": run.steps,
                "best_step": best_step,
                "best_validation_loss": round(best_loss, 3),
                "exact_match": judged[name].tuned.mean("exact_match"),
                "verdict": judged[name].verdict.word,
            }
    return result


if __name__ == "__main__":
    files.write_json(RESULT, {str(seed): measured(seed) for seed in range(int(sys.argv[1]))})
