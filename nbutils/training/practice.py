"""Practice runs: trainings of the bundled tiny model, seconds each, of which most are meant to fail.

The course's own run succeeds. What a run looks like that was too short, memorized its rows or learned from wrong
answers is seen here, on the same rows and with the same held-out questions. Each is a plain SFTTrainer; its adapter and
its losses are kept in the run folder, so that lesson 04 can judge what lesson 03 has trained.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from nbutils import chat, data, files, platforms
from nbutils.chat import Row
from nbutils.display import Point, finite
from nbutils.language import say
from nbutils.tracking import loss_history, validation_history

FOLDER = "practice"  # below the run
MAX_LENGTH = 256  # tokens; every bundled row is shorter
VALIDATION_ROWS = 12
MEASURES = 8  # of the validation loss in a run, beside the one before the first step


@dataclass(frozen=True)
class Practice:
    """One practice run: what it trains on, and how."""

    rows: int = 0  # the first ones; 0: all
    shuffled: bool = False  # every answer belongs to another question
    steps: int = 40
    learning_rate: float = 2e-3
    batch_size: int = 4
    seed: int = 0


RUNS = {
    "too short": Practice(steps=24),
    "memorized": Practice(rows=5, steps=40, learning_rate=5e-3),
    "shuffled answers": Practice(shuffled=True, steps=24),
}


@dataclass(frozen=True)
class Practised:
    """What came of it."""

    adapter: Path
    history: dict[str, list[Point]]  # `train` and `validation`, each a loss by step

    @property
    def best(self) -> Point:
        """The step with the lowest validation loss, and that loss."""
        return min(self.history["validation"], key=itemgetter(1))


def rows_of(practice: Practice) -> list[Row]:
    """The bundled rows that a practice run trains on."""
    rows = data.stored_rows(files.SAMPLES / "train.jsonl")[: practice.rows or None]
    if not practice.shuffled:
        return rows
    answers = [row["messages"][-1] for row in rows]
    random.Random(practice.seed).shuffle(answers)
    shuffled = []
    for row, answer in zip(rows, answers, strict=True):
        question = row["messages"][0]
        shuffled.append({"messages": [question, answer]})
    return shuffled


def held_out() -> list[Row]:
    """The bundled questions that no practice run has seen."""
    return data.stored_rows(files.SAMPLES / "eval.jsonl")


def folder(run: Path, name: str) -> Path:
    """Where a practice run is kept in the folder of a run."""
    return run / FOLDER / name.replace(" ", "_")


def train_all(run: Path) -> dict[str, Practised]:
    """All RUNS by name, kept in the folder of a run; none in a script, where nobody looks at them.

    Example: runs = practice.train_all(lesson.run.path)
    """
    if not platforms.in_kernel():
        say("Practice runs are left out in a script: they are there to be looked at in a notebook.")
        return {}
    return {name: train(practice, folder(run, name)) for name, practice in RUNS.items()}


def train(practice: Practice, folder: Path) -> Practised:
    """The run in `folder`: trained now, or read, if this very one was trained before."""
    decided_by = asdict(practice)
    history_file = folder / "history.json"
    if files.stamp(folder) != decided_by:
        files.make_folder(folder.parent)
        with files.complete_folder(folder, decided_by) as partial:
            files.write_json(partial / history_file.name, _train(practice, partial))
    return Practised(folder, files.read_json(history_file))


def small_model(**options: Any) -> Any:
    """The bundled model in float32 with a new adapter, the same one after the same seed.

    Example: small = practice.small_model(attn_implementation="eager")
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        files.TINY_MODEL, dtype=torch.float32, trust_remote_code=False, **options
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def small_tokenizer() -> Any:
    """The tokenizer of the bundled model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(files.TINY_MODEL, trust_remote_code=False)


def small_batch(rows: int, **options: Any) -> Any:
    """The first bundled rows as the bundled model takes them: padded, or as the options of TRL's collator say.

    Example: batch = practice.small_batch(4); small(**batch).loss
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokenizer = small_tokenizer()
    dataset = chat.build_dataset(tokenizer, rows_of(Practice(rows=rows)), MAX_LENGTH)
    return DataCollatorForLanguageModeling(tokenizer.pad_token_id, **options)(list(dataset))


def step(model: Any, batch: Any) -> tuple[float, float]:
    """The MiB that a forward pass keeps for its backward pass, beside the weights, and the seconds of both.

    Example: mib, seconds = practice.step(small, batch)
    """
    from torch.autograd.graph import saved_tensors_hooks

    kept = {}  # bytes by address: tensors can share them

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = time.perf_counter()
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    seconds = time.perf_counter() - began
    for weight in model.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(kept.values()) / 2**20, seconds


def _train(practice: Practice, folder: Path) -> dict[str, Any]:
    from datasets import disable_progress_bars, enable_progress_bars
    from transformers import PrinterCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(practice.seed)
    tokenizer = small_tokenizer()
    examples = chat.filter_by_length(tokenizer, rows_of(practice), MAX_LENGTH)
    every = max(1, practice.steps // MEASURES)
    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=practice.steps,
        learning_rate=practice.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=practice.batch_size,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        dataloader_pin_memory=False,
        logging_steps=every,
        eval_strategy="steps",
        eval_steps=every,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=practice.seed,
    )
    disable_progress_bars()  # of TRL, for steps that change nothing here
    trainer: Any = SFTTrainer(
        model=small_model(),
        args=settings,
        train_dataset=chat.training_dataset(examples),
        eval_dataset=chat.validation_dataset(examples, held_out(), VALIDATION_ROWS),
        processing_class=tokenizer,
    )
    enable_progress_bars()
    trainer.remove_callback(PrinterCallback)  # the figure shows its numbers
    trainer.train()
    trainer.model.save_pretrained(folder)
    log = trainer.state.log_history
    return {"train": loss_history(log), "validation": finite(validation_history(log))}
