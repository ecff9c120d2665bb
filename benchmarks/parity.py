"""What rounding does to a merged model, and what a lost part of the tuning does: does lesson 04 tell them apart?

    python benchmarks/parity.py BASE_FOLDER [--where NAME] [--serve]

Adapters of several strengths (random, rank 16, on every linear layer) are merged into BASE_FOLDER (random_model.py
makes one) in bfloat16 and float16. Each merged model is read through 16 texts of random tokens and judged against the
adapter beside the base, as lesson 04 does; then the same for a merge that lost every second layer's part.
--serve: the strongest one in vLLM too, as lesson 05 does. Results: benchmarks/results/parity_<where>.json.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import merge
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nbutils import files, hardware, merging, parity, served_model, serving

RESULTS = Path(__file__).resolve().parent / "results"
STRENGTHS = (1.0, 0.3, 0.1)
DTYPES = ("bfloat16", "float16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def texts() -> parity.FixedSet:
    """16 texts of 64 random tokens that every vocabulary of the course has; the last 16 of each are predicted."""
    dice = random.Random(3)
    rows = [[dice.randrange(100, 1000) for _ in range(64)] for _ in range(16)]
    return parity.FixedSet(rows, [16] * len(rows))


def changed(adapter: Path, folder: Path, strength: float, lost: bool) -> Path:
    """The adapter times `strength`; lost: without its part of every second layer."""
    shutil.copytree(adapter, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    for name, weight in weights.items():
        if "lora_B" in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            weight.mul_(0.0 if lost and layer % 2 else strength)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, dtype: str) -> Any:
    """A model on the GPU, or where there is none."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map={"": DEVICE})


def judged(predictions: parity.PredictionStore, merged: Path, dtype: str) -> dict[str, Any]:
    """What lesson 04 would say of this merged model."""
    predictions.measure_merged(load(merged, dtype))
    return verdict(predictions, "merged")


def verdict(predictions: parity.PredictionStore, name: str) -> dict[str, Any]:
    """The line of the report that judges this reading."""
    report = parity.ParityReport(predictions)
    line = next(line for line in report.lines if line.other == name and line.verdict in (parity.SAME, parity.FAILS))
    return {**asdict(line.gap), "noise": report.noise, "holds": line.verdict == parity.SAME}


def served(predictions: parity.PredictionStore, merged: Path, dtype: str, log: Path) -> dict[str, Any]:
    """What lesson 05 would say of it."""
    hardware.free_memory()
    gpu = hardware.gpu()
    flags = serving.flags_for(gpu, merged)
    flags |= {"served-model-name": "course", "dtype": dtype, "max-model-len": 1024}
    environment = serving.ensure_environment(str(hardware.engine(gpu).value))
    with serving.Server(merged, environment, flags=flags, log=log) as server:
        measured = served_model.measure_server(server.client(), server.model_name, predictions.fixed)
        predictions.add("vllm", measured)
    return verdict(predictions, "vllm")


def measure(base: Path, adapter: Path, folder: Path, strength: float, dtype: str, serve: bool) -> dict[str, Any]:
    """One strength in one precision: the right merge, the one that lost a part, and the server."""
    right = changed(adapter, folder / "right", strength, lost=False)
    broken = changed(adapter, folder / "broken", strength, lost=True)
    predictions = parity.new_store(folder, texts(), {"onto": "full"})
    predictions.measure_tuned("full", load(base, dtype), right)
    tuning = predictions.gap("full", "base")
    assert tuning is not None
    found: dict[str, Any] = {"dtype": dtype, "strength": strength, "tuning_nats": tuning.mean}
    for name, one in {"a part lost": broken, "right": right}.items():
        shutil.rmtree(folder / "merged", ignore_errors=True)
        merging.merge_adapter(base, one, folder / "merged", dtype=dtype, device=DEVICE)
        found[name] = judged(predictions, folder / "merged", dtype)
    if serve:
        found["in vLLM"] = served(predictions, folder / "merged", dtype, folder / "serve.log")
    print(found, flush=True)
    return found


def main(wishes: argparse.Namespace) -> None:
    """All strengths in all precisions."""
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for strength in STRENGTHS:
            with tempfile.TemporaryDirectory(dir=wishes.folder) as made:
                folder = Path(made)
                merge.make_adapter(wishes.base, folder / "adapter")
                serve = wishes.serve and strength == STRENGTHS[0]
                rows.append(measure(wishes.base, folder / "adapter", folder, strength, dtype, serve))
            files.write_json(RESULTS / f"parity_{wishes.where}.json", {"model": wishes.base.name, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("--where", default="cpu")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--serve", action="store_true")
    main(parser.parse_args())
