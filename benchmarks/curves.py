"""Four loss curves for lesson 03: a healthy training, one that is too slow, one that diverges, one that overfits.

    python benchmarks/curves.py MODEL OUT [STEPS]

MODEL is a folder (SmolLM2-135M-Instruct), OUT the JSON file that `display.plot_loss_examples` draws. Plain TRL and
PEFT, no network; about a minute on a GPU. STEPS limits each training, for a try on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

SAMPLES = Path(__file__).parents[1] / "data_samples"
SEED, BATCH, RANK, VALIDATIONS = 42, 8, 16, 20  # about so many validations in each curve
SETTINGS: dict[str, dict[str, Any]] = {
    "healthy": {"rows": "train.jsonl", "row_count": 800, "learning_rate": 2e-4, "epochs": 1},
    "too_slow": {"rows": "train.jsonl", "row_count": 800, "learning_rate": 1e-6, "epochs": 1},
    "diverging": {"rows": "train.jsonl", "row_count": 800, "learning_rate": 5e-2, "epochs": 1},
    "overfitting": {"rows": "assistant_en/train.jsonl", "row_count": 32, "learning_rate": 1e-3, "epochs": 25},
}


def read_rows(path: Path, count: int | None = None) -> Dataset:
    """Rows as prompt and completion, so that TRL computes the loss on the answers alone."""
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()][:count]
    return Dataset.from_list([{"prompt": messages[:-1], "completion": messages[-1:]} for messages in rows])


def curve(log: list[dict[str, Any]], name: str) -> list[list[float]]:
    """[step, loss] pairs; a loss that is not finite ends the curve, as JSON has no number for it."""
    pairs = []
    for entry in log:
        if name in entry:
            if not torch.tensor(entry[name]).isfinite():
                break
            pairs.append([entry["step"], round(entry[name], 4)])
    return pairs


def train(model_folder: str, settings: dict[str, Any], limit: int) -> dict[str, Any]:
    """Train once; the settings and both curves."""
    set_seed(SEED)
    gpu = torch.cuda.is_available()
    path = SAMPLES / settings["rows"]
    rows, held_back = read_rows(path, settings["row_count"]), read_rows(path.with_name("eval.jsonl"))
    planned = -(-len(rows) // BATCH) * settings["epochs"]
    steps = min(planned, limit or planned)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16 if gpu else torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=steps, learning_rate=settings["learning_rate"], lr_scheduler_type="cosine",
            warmup_steps=min(5, steps // 10), per_device_train_batch_size=BATCH, per_device_eval_batch_size=32,
            max_length=None, bf16=gpu, use_cpu=not gpu, seed=SEED, logging_steps=1, eval_strategy="steps",
            eval_steps=max(steps // VALIDATIONS, 1), eval_on_start=True, save_strategy="no", report_to=[],
            logging_nan_inf_filter=False, disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=rows, eval_dataset=held_back,
            processing_class=AutoTokenizer.from_pretrained(model_folder),
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
    log = trainer.state.log_history
    shown = settings | {"batch": BATCH, "steps": steps, "rank": RANK, "model": Path(model_folder).resolve().name}
    return {"settings": shown, "train": curve(log, "loss"), "validation": curve(log, "eval_loss")}


def main() -> None:
    """Train four times and write the file."""
    model_folder, out, *rest = sys.argv[1:]
    curves = {}
    for name, settings in SETTINGS.items():
        curves[name] = train(model_folder, settings, limit=int(rest[0]) if rest else 0)
        (_, first), *_, (step, last) = curves[name]["validation"]
        best_step, best = min(curves[name]["validation"], key=lambda point: point[1])
        print(f"{name}: validation {first} -> {last} at step {step}, best {best} at step {best_step}", flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in curves.items())
    Path(out).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
