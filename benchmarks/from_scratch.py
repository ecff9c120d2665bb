"""Lesson 07 on real text, its first steps timed, beside the forecast: by default 6 layers x 768, rows of 512 tokens.

    python benchmarks/from_scratch.py FOLDER_OF_TEXT RESULT.json
    python benchmarks/from_scratch.py FOLDER RESULT.json --STEPS 20 --WIDTH 128 --DEPTH 2 --VOCAB 600   # any parameter

Needs no network. The steps are those of the lesson, checkpoints and validations left out of the timing; on a text that
is small they are several epochs of it, which changes no speed.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nbutils import files, record
from nbutils.plan import gpus
from nbutils.plan import pretraining as plan
from nbutils.plan.recipe import rows_per_step
from nbutils.training import pretraining

JOB = {"WIDTH": 768, "DEPTH": 6, "LENGTH": 512, "BATCH": 64, "VOCAB": 32000, "STEPS": 200, "SAVE_STEPS": 100}
WARM_UP = 0.1  # share of the steps that are not counted: kernels are chosen, memory is reserved
BILLION = 10**9


class Timed(pretraining.PretrainingCallback):
    """The callback of the lesson; notes how long each step takes, before anything is validated or saved."""

    seconds: list[float]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        Timed.seconds.append(time.perf_counter() - self.began)
        super().on_step_end(args, state, control, optimizer)


def shown(one: plan.Pretraining) -> dict[str, Any]:
    """A forecast, rounded; hours are of a billion tokens."""
    rate = one.tokens_per_second
    return {
        "tokens_per_second": rate and round(rate), "hours_per_billion_tokens": rate and round(BILLION / rate / 3600, 2),
        "peak_gib": round(one.peak_gib, 3), "parts": {part: round(size, 3) for part, size in one.parts.items()},
        "per_device_train_batch_size": one.per_device_train_batch_size,
    }  # fmt: skip


def main(text: str, out: Path, given: list[str]) -> None:
    """Run the lesson in a folder of its own and write forecast and measurement."""
    Timed.seconds, pretraining.PretrainingCallback = [], Timed  # type: ignore[misc]
    words = [word for name, value in JOB.items() for word in (f"--{name}", str(value))]
    lesson = str(files.NOTEBOOKS / "07_from_scratch.py")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"NBUTILS_HOME": home, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        sys.argv = [lesson, "--DATA", text, *words, *given]
        done = runpy.run_path(lesson, run_name="__main__")
    shape, rows, result, gpu = pretraining.shape_of(done["config"]), done["rows"], done["result"], done["lesson"].gpu
    sft, steps = done["profile"].sft, len(Timed.seconds)
    batch = rows_per_step(sft)
    step = median(Timed.seconds[int(WARM_UP * steps) :])
    rate, flops = batch * rows.length / step, plan.flops_per_token(shape, rows.length)
    here = gpus.of_machine(gpu) if gpu else None
    cards = [one for one in (here, gpus.find("3090"), gpus.find("4090")) if one]
    made = {one.name: plan.pretraining(shape, one, rows.length, batch, steps) for one in cards}
    measured: dict[str, Any] = {
        "tokens_per_second": round(rate), "step_seconds": round(step, 5), "peak_gib": round(result.peak_gib, 3),
        "loss": result.facts()["validation_loss"],
    }  # fmt: skip
    if here and here.tflops:
        measured["model_flops_share"] = round(rate * flops / (here.tflops * 1e12), 4)
        measured["speed_to_forecast"] = round(rate / (made[here.name].tokens_per_second or math.nan), 3)
        measured["memory_to_forecast"] = round(result.peak_gib / made[here.name].peak_gib, 3)
    found = {
        "gpu": gpu.name if gpu else None, "parameters": shape.params, "shape": shape.model_dump(),
        "text": rows.facts(), "length": rows.length, "batch": batch, "steps": steps,
        "per_device_train_batch_size": int(sft.per_device_train_batch_size),
        "dtype": done["profile"].from_pretrained.dtype,
        "measured": measured, "forecast": {name: shown(one) for name, one in made.items()},
        "versions": record.versions(),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(out, found)
    print({name: found[name] for name in ("measured", "forecast")})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
