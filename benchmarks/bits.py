"""What 4 bits cost a base model: its loss on held-out rows as lesson 03 measures it, and as 4 bits really are.

    python benchmarks/bits.py OUT.json MODEL FILE…

MODEL is `tiny`, `tiny_hybrid` or a folder with a real chat model; each FILE becomes train and held-out rows as in
lesson 02 (the tiny ones: the bundled sample). For each, the losses of lesson 03 (unquantized, and with the weights
rounded to 4 bits in place), the loss of the same model loaded in 4 bits by bitsandbytes, the method that `auto` takes,
and the seconds. OUT.json gets one more entry for each file. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from nbutils import chat, data, files, hardware, models, platforms, profiles
from nbutils.evaluation import bits
from nbutils.plan.recipe import BaseLosses


def in_4_bits(resolved: profiles.Resolved, examples: Any) -> float:
    """The loss of the model loaded in 4 bits."""
    dtype = getattr(torch, resolved.profile.from_pretrained.dtype)
    settings = dict(resolved.profile.quantization) | {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(
        resolved.model,
        quantization_config=BitsAndBytesConfig(**settings),
        dtype=dtype,
        device_map={"": 0 if resolved.gpu else "cpu"},
    )
    hardware.keep_4bit_layout(model)
    return bits.mean_loss(model, examples)


def measured(model: str, file: str) -> dict[str, Any]:
    """All numbers of one model on the rows of one file."""
    gpu = hardware.gpu()
    bundled = models.bundled_name(model)
    profile = bundled or "hopper_141gb"
    resolved = profiles.resolve(
        profile, model, gpu=gpu, platform=platforms.detect(), online=lambda: False,
        overrides=lambda name: {"sft.max_length": (512, "benchmark")},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data.prepare("" if bundled else file, Path(folder), default=resolved.profile.course.data)
        train, held_out = data.load(Path(folder))
    dataset = chat.filter_by_length(AutoTokenizer.from_pretrained(resolved.model), train, 512)
    examples = chat.held_out_examples(dataset, held_out, most=64)
    began = time.perf_counter()
    loss = bits.measure(resolved, examples)
    seconds = time.perf_counter() - began
    losses = BaseLosses(len(examples), loss, needed_gib=dict.fromkeys(loss, 0.0))  # the rule asks for no memory
    rows = profiles.Rows.of(dataset.lengths)
    return {
        "date": date.today().isoformat(),
        "machine": gpu.name if gpu else "cpu",
        "dtype": resolved.profile.from_pretrained.dtype,
        "model": Path(model).name,
        "rows": Path(file).stem,
        "examples": losses.rows,
        "tokens": sum(example.trained.count(1) for example in examples),
        "loss unquantized": round(loss["lora"], 4),
        "loss rounded in place": round(loss["qlora"], 4),
        "loss loaded in 4 bits": round(in_4_bits(resolved, examples), 4),
        "4 bits cost": round(loss["qlora"] - loss["lora"], 4),
        "method": profiles.fit(resolved, rows, losses).profile.method,
        "seconds": round(seconds, 1),
    }


def main(out: Path, model: str, names: list[str]) -> None:
    """Measure, print, and add to a list in `out`."""
    for name in names:
        entry = measured(model, name)
        print(json.dumps(entry), flush=True)
        entries = files.read_json(out) if out.exists() else []
        files.write_json(out, [*entries, entry])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
