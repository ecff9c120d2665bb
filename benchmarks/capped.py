"""Lesson 03 on a large gpu that pretends to be a small one: its memory capped, its abilities taken away.

    python benchmarks/capped.py T4 MODEL_FOLDER [--steps 20] [--out results.json]
    python benchmarks/capped.py "RTX 4090" MODEL_FOLDER

The lesson runs as it is, with PROFILE ampere_24gb (a 7B, rows of 2,048), and sees the named gpu of configs/gpus.yaml.
Torch's allocator may use that card's memory less what CUDA's context takes. For cards before capability 8.0: float16,
no Liger, and torch's attention without its flash kernel. A card's speed cannot be imitated so.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import click

from nbutils import hardware
from nbutils.plan import gpus
from nbutils.plan.forecast import STEP_ARGUMENTS
from nbutils.plan.memory import CONTEXT_GIB

hardware.leave_no_gaps()  # as a lesson does, before torch
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LESSON = ROOT / "notebooks/03_qlora.py"
SHOWN = (*STEP_ARGUMENTS, "max_length")


def pretend(name: str) -> hardware.GPU:
    """Cap this process and let the course see the named gpu."""
    facts = gpus.find(name)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((facts.memory_gib - CONTEXT_GIB) * 2**30 / total)
    gpu = hardware.GPU(name, facts.capability, facts.memory_gib, 1)
    hardware.gpu = lambda: gpu
    if facts.capability < hardware.BF16_FROM:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return gpu


def watch(seen: dict[str, Counter[str]]) -> None:
    """Note the types of gradients after each micro-batch, and of what the first one computes."""
    from transformers import Trainer

    original = Trainer.training_step

    def note(kind: str, value: Any) -> None:
        for one in value if isinstance(value, tuple | list) else (value,):
            if torch.is_tensor(one) and one.is_floating_point():
                seen[kind][str(one.dtype)] += 1

    def training_step(self: Any, model: Any, *rest: Any, **more: Any) -> Any:
        hooks = []
        if not seen["results"]:
            hooks = [part.register_forward_hook(lambda m, i, o: note("results", o)) for part in model.modules()]
        loss = original(self, model, *rest, **more)
        for hook in hooks:
            hook.remove()
        for weight in model.parameters():
            if weight.grad is not None:
                note("gradients", weight.grad)
        return loss

    Trainer.training_step = training_step  # type: ignore[method-assign]


@click.command()
@click.argument("name")
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--steps", default=20)
@click.option("--run", "run_name", default="capped")
@click.option("--out", type=click.Path(path_type=Path))
def main(name: str, model: Path, steps: int, run_name: str, out: Path | None) -> None:
    """Train on an imitated gpu and say what was seen."""
    machine, gpu = torch.cuda.get_device_name(0), pretend(name)
    seen: dict[str, Counter[str]] = {"results": Counter(), "gradients": Counter()}
    watch(seen)
    words = ["--PROFILE", "ampere_24gb", "--MODEL", model, "--MAX_STEPS", steps, "--RUN_NAME", run_name]
    sys.argv = [str(LESSON), *map(str, words)]
    found = runpy.run_path(str(LESSON), run_name="__main__")
    trainer, profile = found["trainer"], found["profile"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "date": date.today().isoformat(), "machine": machine,
        "card": str(gpu), **dict(profile.from_pretrained), **{name: profile.sft[name] for name in SHOWN},
        "steps": trainer.state.global_step, "allowed_gib": round(gpu.memory_gib - CONTEXT_GIB, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "losses": [round(loss, 3) for loss in losses], "all_finite": all(map(math.isfinite, losses)),
        "types": {kind: dict(count) for kind, count in seen.items()}, "numbers": found["numbers"],
    }  # fmt: skip
    print("\nRESULT " + json.dumps(result, default=str))
    if out:
        out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
