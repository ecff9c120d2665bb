"""The OOM ladder on a real gpu: a memory cap that forces two rungs, and the same training without one beside it.

    python benchmarks/gpu_ladder.py [FOLDER]

Makes a random model of Qwen2.5-0.5B's shape in FOLDER (or a temporary one); measures what steps of 1, 2 and 4 rows at
a time need. Then it trains with 4 under a cap that only lets 2 through, and after step 3 under one that only lets 1
through: two rungs, one at the beginning and one on the way. The last line is JSON. Ends with an error if steps, batch,
rows or rates differ from those of the training without a cap.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from random_model import make
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from nbutils.files import GIB
from nbutils.training import oom

BATCH, STEPS, LENGTH, COUNT = 8, 6, 2048, 30
SIZE = "per_device_train_batch_size"
FIRST = 2000  # the first token of row n is FIRST + n


class Diary(TrainerCallback):
    """Which rows and which rate each finished step had."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.steps: dict[int, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen = []

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        assert state.global_step not in self.steps, f"step {state.global_step} was done twice"
        self.steps[state.global_step] = (self.seen, lr_scheduler.get_last_lr()[0])


def rows() -> Dataset:
    """Packed rows of two examples each."""
    tokens = [[FIRST + n, *((n * 31 + k * k) % 1900 + 10 for k in range(LENGTH - 1))] for n in range(COUNT)]
    half = LENGTH // 2
    return Dataset.from_list([{"input_ids": row, "labels": row, "seq_lengths": [half, half]} for row in tokens])


def build(model_folder: Path, folder: Path, micro_batch: int, steps: int = STEPS) -> Any:
    """A LoRA trainer with a diary; nothing of it is left on the GPU once it is dropped."""
    settings = SFTConfig(
        output_dir=str(folder), max_length=LENGTH, packing=True, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=BATCH // micro_batch, max_steps=steps, learning_rate=2e-4,
        lr_scheduler_type="cosine", gradient_checkpointing=False, bf16=True, report_to="none", disable_tqdm=True,
        logging_steps=2, save_steps=1000, save_total_limit=1, seed=1, data_seed=1,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, device_map={"": 0}, attn_implementation="sdpa"
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    trainer: Any = SFTTrainer(
        model=model, args=settings, train_dataset=rows(), processing_class=tokenizer, peft_config=lora
    )
    trainer.diary = Diary()
    trainer.add_callback(trainer.diary)
    loss = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **words: Any) -> Any:
        found = inputs["input_ids"].flatten().tolist()
        trainer.diary.seen += [token - FIRST for token in found if FIRST <= token < FIRST + COUNT]
        return loss(model, inputs, **words)

    trainer.compute_loss = compute_loss
    return trainer


class Cap(TrainerCallback):
    """Lets the process have this much of the GPU from the end of a step on."""

    def __init__(self, step: int, gib: float) -> None:
        self.step, self.gib = step, gib

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            allow(self.gib)


def allow(gib: float) -> None:
    """Cap what this process may take of the GPU; what it holds unused goes back first."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)


def clean() -> None:
    """An empty gpu, and a fresh peak."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(model_folder: Path, folder: Path, micro_batch: int, steps: int) -> tuple[dict[int, Any], list, float]:
    """The diary, the losses and the peak in GiB of a training without a cap."""
    clean()
    trainer = build(model_folder, folder, micro_batch, steps)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.diary.steps, losses, torch.cuda.max_memory_allocated() / GIB


def main(work: Path) -> None:
    """Measure, cap, train, compare."""
    began = time.perf_counter()
    make("Qwen2.5-0.5B", work / "model")
    peaks = {size: measure(work / "model", work / f"peak{size}", size, 2)[2] for size in (1, 2)}
    expected, losses, peaks[4] = measure(work / "model", work / "whole", 4, STEPS)
    caps = [peaks[size] + 0.7 * (peaks[2 * size] - peaks[size]) for size in (2, 1)]
    clean()
    allow(caps[0])
    run_folder = work / "run"
    run_folder.mkdir()
    trainer = build(work / "model", work / "capped", 4)
    trainer.add_callback(Cap(3, caps[1]))
    oom.train_within_memory(trainer, run_folder, None)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / GIB  # since the last rung
    after = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    rungs = oom.oom_changes(run_folder)
    result = {
        "card": torch.cuda.get_device_name(0),
        "caps_gib": [round(cap, 2) for cap in caps],
        "peak_gib_without_cap": {str(size): round(peak, 2) for size, peak in peaks.items()},
        "peak_gib": round(peak, 2),
        "rungs": [(rung["step"], rung["from"][SIZE], rung["to"][SIZE]) for rung in rungs],
        "steps": trainer.state.global_step,
        "batch": trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps,
        "same_rows_and_rates": trainer.diary.steps == expected,
        "largest_loss_difference": round(max(abs(a - b) for a, b in zip(after, losses, strict=True)), 5),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(result))
    assert result["rungs"] == [(1, 4, 2), (4, 2, 1)] and result["steps"] == STEPS and result["batch"] == BATCH
    assert result["same_rows_and_rates"] and result["largest_loss_difference"] < 0.02 and result["peak_gib"] <= caps[1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
