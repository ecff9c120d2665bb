"""Merging on a small machine: memory and speed of `merge_adapter`, against copying the folder and against PEFT's way.

    python benchmarks/merge.py [MODEL] [--where NAME] [--rounds N] [--folder FOLDER] [--no-peft]

MODEL is a course model (Qwen2.5-1.5B); a base of its shape and a rank-16 adapter on every linear layer are made at
random in FOLDER (a temporary one), which needs three times the model's size. Every merge is a process of its own:
`peak_gib` is the most memory it ever held above what it held after its imports. Copies (shutil, then fsync) and merges
take turns; `speed_over_copy` is the ratio of their median seconds, with the base in the page cache for both. A merge
needs processors and a copy hardly does: on a busy machine (`load_of_the_machine`, against `cores`) the ratio falls.
PEFT's way (load in 16 bits, merge_and_unload, save_pretrained) is run once, and its weights are compared bit by bit.
Results: benchmarks/results/merge_<WHERE>_<MODEL>.json, after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from nbutils import files, hardware
from nbutils.merging import folder as bases

ROOT = Path(__file__).resolve().parent.parent
RANK = 16


def make_adapter(base: Path, folder: Path) -> None:
    """A random adapter on every linear layer, without loading the base."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(3)
    folder.mkdir()
    tensors = {}
    for name, place in bases.open_base(base).weights.items():
        if "_proj.weight" in name:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, place.shape[1]) * 0.02
            tensors[f"{key}.lora_B.weight"] = torch.randn(place.shape[0], RANK) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    linear = sorted({key.split(".")[-3] for key in tensors})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "target_modules": linear,
        "base_model_name_or_path": str(base), "init_lora_weights": True, "bias": "none",
    }  # fmt: skip
    files.write_json(folder / "adapter_config.json", settings)


def copy(base: Path, out: Path) -> float:
    """Seconds of copying the folder to the disk."""
    began = time.perf_counter()
    out.mkdir()
    for file in base.iterdir():
        shutil.copyfile(file, out / file.name)
        with open(out / file.name, "rb") as written:
            os.fsync(written.fileno())
    return time.perf_counter() - began


def child(way: str, base: Path, adapter: Path, out: Path) -> None:
    """One merge in this process: its seconds and the memory it took, as JSON on the last line."""
    import torch
    import transformers  # noqa: F401
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from nbutils import merging

    torch.zeros(8).add(1)
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    if way == "peft":
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        model.merge_and_unload().save_pretrained(out, max_shard_size="4GB")
    else:
        print(merging.merge_adapter(base, adapter, out, device=way))
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": round(seconds, 2), "peak_gib": round((_peak() - before) / files.GIB, 3)}))


def _peak() -> int:
    """The most memory this process ever held."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def merge(way: str, base: Path, adapter: Path, out: Path) -> dict[str, float]:
    """A merge in a process of its own."""
    line = [sys.executable, __file__, "--child", way, str(base), str(adapter), str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way:8} {found}", flush=True)
    return found


def largest_difference(left: Path, right: Path) -> int:
    """How many steps of bfloat16 two models are apart at most, read block by block."""
    import torch

    one, other = bases.open_base(left).weights, bases.open_base(right).weights
    assert set(one) == set(other)

    def apart(name: str, block: slice) -> int:
        bits = [side[name].tensor(block).view(torch.int16) for side in (one, other)]
        if torch.equal(*bits):
            return 0
        ordered = [torch.where(each < 0, -32768 - each.int(), each.int()) for each in bits]
        return int((ordered[0] - ordered[1]).abs().max())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [pool.submit(apart, name, block) for name, place in one.items() for block in place.blocks()]
        return max(each.result() for each in found)


def measure(base: Path, adapter: Path, folder: Path, rounds: int, peft: bool) -> Iterator[dict[str, Any]]:
    """Copies and merges in turn, then the other ways once; what is known after each of these."""
    copies, merges = [], []
    for number in range(rounds):
        for place in base.glob("*.safetensors"):
            files.sha256(place)  # the base in the page cache, for both
        copies.append(copy(base, folder / f"copy{number}"))
        shutil.rmtree(folder / f"copy{number}")
        print(f"copy     {copies[-1]:.2f} s", flush=True)
        merges.append(merge("cpu", base, adapter, folder / "merged"))
        if number < rounds - 1:
            shutil.rmtree(folder / "merged")
    found: dict[str, Any] = {
        "copy_seconds": [round(seconds, 2) for seconds in copies], "merges": merges,
        "speed_over_copy": round(statistics.median(copies) / statistics.median(one["seconds"] for one in merges), 3),
        "peak_gib": max(one["peak_gib"] for one in merges),
        "load_of_the_machine": [round(each, 1) for each in os.getloadavg()],
    }  # fmt: skip
    yield found
    for way in ["cuda"] * (hardware.gpu() is not None) + ["peft"] * peft:
        found[way] = merge(way, base, adapter, folder / way)
        yield found
        found[way]["largest_difference_ulp"] = largest_difference(folder / "merged", folder / way)
        shutil.rmtree(folder / way)
        yield found


def main(wishes: argparse.Namespace) -> None:
    """Make the base, measure, write the results."""
    import random_model

    file = ROOT / f"benchmarks/results/merge_{wishes.where}_{wishes.model}.json"
    with tempfile.TemporaryDirectory(dir=wishes.folder) as made:
        folder = Path(made)
        random_model.make(wishes.model, folder / wishes.model)
        make_adapter(folder / wishes.model, folder / "adapter")
        size = sum(file.stat().st_size for file in (folder / wishes.model).glob("*.safetensors"))
        about = {
            "model": wishes.model, "gib": round(size / files.GIB, 2), "rank": RANK, "cores": os.cpu_count(),
            "machine": platform.machine(), "block": bases.BLOCK,
        }  # fmt: skip
        for found in measure(folder / wishes.model, folder / "adapter", folder, wishes.rounds, wishes.peft):
            files.write_json(file, about | found)
    print(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *(Path(each) for each in sys.argv[3:6]))
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="Qwen2.5-1.5B")
    parser.add_argument("--where", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--no-peft", dest="peft", action="store_false")
    main(parser.parse_args())
