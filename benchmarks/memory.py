"""Peak memory and speed of a training step over models, lengths, batches, recomputation: what the plan is fitted to.

    python benchmarks/memory.py FOLDER [--only Qwen2.5-7B] [--out results.json]

FOLDER gets random weights in the shape of each model, one after the other (30 GB at most). A process loads a model once
as lesson 03 does, and takes a few steps with full packed rows for every combination. Needs a CUDA GPU of 80 GB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))
STEPS = 3
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# group: (model, method, precision, attention, liger, rank, dropout), each with (length, micro-batch, checkpointing)
GROUPS: dict[str, tuple[tuple[str, str, str, str, bool, int, float], list[tuple[int, int, str]]]] = {
    "0.5B": (
        ("Qwen2.5-0.5B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 8, "off"), (1024, 2, "on"), (2048, 1, "off")],
    ),
    "1.5B": (
        ("Qwen2.5-1.5B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 4, "off"), (2048, 16, "offload"), (1024, 1, "on")],
    ),
    "1.5B lora": (
        ("Qwen2.5-1.5B", "lora", "bf16", "varlen", True, 16, 0.0),
        [(1024, 4, "on"), (1024, 4, "off")],
    ),
    "7B": (
        ("Qwen2.5-7B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 1, "on"), (2048, 2, "on"), (2048, 8, "on"), (2048, 8, "offload"), (2048, 2, "off"), (2048, 1, "off"),
         (2048, 4, "off"), (1024, 4, "on"), (4096, 1, "on"), (4096, 2, "on"), (2048, 2, "offload")],
    ),
    "7B rank 64": (("Qwen2.5-7B", "qlora", "bf16", "varlen", True, 64, 0.0), [(1024, 8, "on"), (1024, 2, "off")]),
    "7B dropout": (
        ("Qwen2.5-7B", "qlora", "bf16", "varlen", True, 16, 0.05),
        [(2048, 1, "on"), (2048, 8, "on"), (2048, 2, "off"), (2048, 8, "offload")],
    ),
    "7B fp16": (
        ("Qwen2.5-7B", "qlora", "fp16", "sdpa", False, 16, 0.0),
        [(1024, 1, "on"), (2048, 1, "on"), (2048, 2, "on"), (1024, 4, "offload"), (1024, 1, "off")],
    ),
    "14B": (
        ("Qwen2.5-14B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 1, "on"), (2048, 4, "on"), (2048, 8, "offload"), (2048, 2, "off"), (1024, 4, "on")],
    ),
    "hybrid 4B": (
        ("Qwen3.5-4B", "lora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 4, "off"), (2048, 1, "on"), (1024, 4, "off"), (2048, 8, "offload"), (4096, 1, "off")],
    ),
    "hybrid 4B four bits": (
        ("Qwen3.5-4B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 2, "off"), (2048, 1, "on"), (1024, 1, "off")],
    ),
    "hybrid 0.8B": (
        ("Qwen3.5-0.8B", "lora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 8, "off"), (2048, 1, "off"), (1024, 2, "on")],
    ),
    "hybrid 0.8B rank 64": (
        ("Qwen3.5-0.8B", "qlora", "bf16", "varlen", True, 64, 0.0),
        [(2048, 4, "on"), (1024, 4, "off")],
    ),
    "hybrid 9B": (
        ("Qwen3.5-9B", "lora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 1, "on"), (2048, 4, "off"), (1024, 2, "off")],
    ),
    "hybrid 9B four bits": (
        ("Qwen3.5-9B", "qlora", "bf16", "varlen", True, 16, 0.0),
        [(2048, 8, "on"), (2048, 1, "on"), (2048, 2, "off")],
    ),
}  # fmt: skip


def make_trainer(group: str, folder: Path) -> Any:
    """The trainer of lesson 03 for a group, with rows that are full already."""
    import torch
    from train import LINEAR, four_bits, load, settings

    from nbutils import training
    from nbutils.training import model as attention

    (_, method, precision, kind, liger, rank, dropout), _ = GROUPS[group]
    dtype = DTYPES[precision]
    quantization = four_bits(dtype) if method == "qlora" else None
    attention.attention("varlen")
    if kind == "sdpa":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    types = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    given = settings(1, 1, "on", 1, packing=True, max_length=4096, use_liger_kernel=liger, **types)
    given["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    lora = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": dropout, "target_modules": LINEAR}
    model = load(folder, quantization_config=quantization, dtype=dtype, attn_implementation=kind)
    trainer = trainer_on(model, folder, given, lora)
    training.patch_lora_kernels(trainer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer_and_scheduler(1000)
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    return trainer


def trainer_on(model: Any, folder: Path, given: dict[str, Any], lora: dict[str, Any]) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model, args=SFTConfig(**given), processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 8}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora),
    )  # fmt: skip


def set_checkpointing(trainer: Any, how: str) -> None:
    import contextlib

    from trl.models import get_act_offloading_ctx_manager

    if how == "off":
        trainer.model.gradient_checkpointing_disable()
    else:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    offload = how == "offload"
    trainer.maybe_activation_offload_context = (
        get_act_offloading_ctx_manager(model=trainer.model) if offload else contextlib.nullcontext()
    )


def batch_of(trainer: Any, length: int, micro: int) -> dict[str, Any]:
    """Full rows, each of examples of the mean length of instruction data."""
    import numpy as np

    random = np.random.default_rng(0)
    sizes = [256] * (length // 256)
    rows = [{"input_ids": random.integers(5, 2000, length).tolist(), "seq_lengths": sizes} for _ in range(micro)]
    batch = trainer.data_collator(rows)
    return {name: value.cuda() if hasattr(value, "cuda") else value for name, value in batch.items()}


def step(trainer: Any, batch: dict[str, Any], tokens: Any) -> Any:
    loss = trainer.training_step(trainer.model, dict(batch), tokens)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return loss


def measure(trainer: Any, length: int, micro: int, how: str) -> dict[str, Any]:
    """Peak and speed of a few steps."""
    import gc

    import torch

    set_checkpointing(trainer, how)
    trainer.model.train()
    batch = batch_of(trainer, length, micro)
    tokens = torch.tensor(length * micro, device="cuda")
    for _ in range(2):
        step(trainer, batch, tokens)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        loss = step(trainer, batch, tokens)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    return {
        "length": length, "per_device_train_batch_size": micro, "gradient_checkpointing": how != "off",
        "activation_offloading": how == "offload",
        "measured_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3), "resting_gib": round(resting / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "tokens_per_second": round(length * micro / seconds, 1), "loss": round(float(loss) , 3),
    }  # fmt: skip


def run_group(group: str, folder: Path) -> None:
    """Every combination of a group, one line of JSON each."""
    import torch

    (model, method, precision, kind, liger, rank, dropout), combinations = GROUPS[group]
    trainer = make_trainer(group, folder)
    about = {
        "model": model, "method": method, "r": rank, "dtype": DTYPES[precision], "attn_implementation": kind,
        "use_liger_kernel": liger, "optim": "paged_adamw_8bit", "lora_dropout": dropout,
    }  # fmt: skip
    for length, micro, how in combinations:
        try:
            print("RESULT " + json.dumps(about | measure(trainer, length, micro, how)), flush=True)
        except torch.OutOfMemoryError as problem:
            print(f"{group} {length} {micro} {how}: {problem}", flush=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, help="Groups whose name begins so; default: all.")
@click.option("--group", help="Measure one group in this process.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the results are written, as JSON.")
def main(folder: Path, only: tuple[str, ...], group: str | None, out: Path | None) -> None:
    """Measure all groups and write the table."""
    if group:
        run_group(group, folder / GROUPS[group][0][0])
        return
    from train import surroundings

    found, model = [], ""
    for name, ((needed, *_), _) in GROUPS.items():
        if only and not name.startswith(only):
            continue
        if model and model != needed:
            shutil.rmtree(folder / model, ignore_errors=True)
        model = needed
        if not (folder / model / "config.json").exists():
            made = [sys.executable, str(Path(__file__).with_name("random_model.py")), model, str(folder / model)]
            subprocess.run(made, check=True)
        ran = subprocess.run([sys.executable, __file__, str(folder), "--group", name], capture_output=True, text=True)
        lines = [json.loads(line[7:]) for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        print(*map(json.dumps, lines), sep="\n", flush=True)
        if ran.returncode or len(lines) < len(GROUPS[name][1]):
            print(name, "ended with", ran.returncode, (ran.stdout + ran.stderr)[-2500:])
        found += lines
    if out:
        about = {key: value for key, value in surroundings().items() if key in ("date", "card", "python", "versions")}
        out.write_text(json.dumps(about | {"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
