"""The share of validation in the time of a training: lesson 03 runs, and its evaluations are timed.

    python benchmarks/validation.py OUT.json [--PROFILE laptop --RUN_NAME mine …]

OUT.json gets one more entry; all other words are parameters of the lesson. Needs no GPU.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from nbutils import files
from nbutils.training.validation import TokenMean

STEM = "03_qlora"


def main(out: Path) -> None:
    """Run the lesson with its other parameters; add what was measured to a list in `out`."""
    seconds: list[float] = []
    evaluate = TokenMean.evaluate

    def timed(trainer: Any, *words: Any, **options: Any) -> dict[str, float]:
        started = time.perf_counter()
        metrics = evaluate(trainer, *words, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        return metrics

    TokenMean.evaluate = timed  # type: ignore[method-assign, assignment]
    lesson = runpy.run_path(str(files.NOTEBOOKS / f"{STEM}.py"), run_name="__main__")["lesson"]
    trained = files.read_json(lesson.run.facts)["lessons"][STEM]
    rows = trained["settings"]["course.validation_rows"]
    measured = {
        "date": date.today().isoformat(),
        "machine": lesson.gpu.name if lesson.gpu else "cpu",
        "model": lesson.model_name,
        "examples": trained["examples"],
        "steps": trained["steps"],
        "validation rows": rows,
        "validations": len(seconds),
        "training seconds": trained["train_seconds"],
        "validation seconds": round(sum(seconds), 2),
        "share": round(sum(seconds) / trained["train_seconds"], 4),
    }
    print(json.dumps(measured))
    entries = files.read_json(out) if out.exists() else []
    files.write_json(out, [*entries, measured])


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)).resolve())
