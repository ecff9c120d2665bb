"""What a training run needs around the trainer: precision repaired, progress kept, time watched, numbers measured.

Not here: building the trainer or choosing its settings; lesson 03 does both in full view.
"""
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import checkpoints, platforms
from nbutils.errors import CourseError
from nbutils.paths import write_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

RESUME_CHOICES = ("auto", "never")
TRAIL_MINUTES = 10.0  # kept free at the end of a session for saving and copying


def tracking(logs: Path, run: str) -> list[str]:
    """Where the trainer reports: TensorBoard always; W&B online with a key, else as an offline run; no prompt ever."""
    logs.mkdir(parents=True, exist_ok=True)
    key = platforms.secret("WANDB_API_KEY")
    if key:
        os.environ["WANDB_API_KEY"] = key
    os.environ.setdefault("WANDB_MODE", "online" if key else "offline")
    os.environ |= {"WANDB_DIR": str(logs), "WANDB_NAME": run, "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    os.environ.setdefault("WANDB_PROJECT", "finetune-course")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / "tensorboard")
    print(f"logs      {logs} (TensorBoard; W&B {os.environ['WANDB_MODE']})")
    return ["tensorboard", "wandb"]


def repair_precision(model: nn.Module) -> int:
    """Put trainable weights back into float32: TRL casts QLoRA adapters to bfloat16 whatever precision was asked for."""
    import torch

    low = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype != torch.float32]
    for weight in low:
        weight.data = weight.data.to(torch.float32)
    return len(low)


def resume_point(keep: Path, scratch: Path, mark: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    if resume not in RESUME_CHOICES:
        raise CourseError(
            f"RESUME is {resume!r}.", " or ".join(map(repr, RESUME_CHOICES)),
            '"auto" continues from the newest checkpoint that verifies, "never" starts anew',
        )  # fmt: skip
    shutil.rmtree(scratch, ignore_errors=True)  # a folder left by a killed run proves nothing; only verified ones return
    scratch.mkdir(parents=True)
    if resume == "never":
        shutil.rmtree(keep, ignore_errors=True)
        return None
    return checkpoints.restore(keep, scratch, mark)


def step_of(checkpoint: Path | None) -> int:
    """The step a checkpoint folder was saved at; 0 without one."""
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0


def keep_checkpoints(keep: Path, mark: dict[str, Any], keep_last: int) -> TrainerCallback:
    """A callback that carries each saved checkpoint to `keep`."""
    from transformers import TrainerCallback

    class KeepCheckpoints(TrainerCallback):
        """on_save -> checkpoints.publish."""

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                checkpoints.publish(saved, keep, mark, keep_last)

    return KeepCheckpoints()


def time_budget(max_hours: float, platform: platforms.Platform) -> TrainerCallback:
    """A callback that saves and stops before the session ends (MAX_HOURS, else the platform's limit)."""
    from transformers import TrainerCallback

    hours = max_hours or platforms.TIME_LIMIT_HOURS.get(platform.name, 0.0)
    seconds = hours * 3600 - min(TRAIL_MINUTES * 60, hours * 360) if hours else float("inf")
    begun = time.monotonic()

    class TimeBudget(TrainerCallback):
        """Ends training normally once the budget is used."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if time.monotonic() - begun > seconds and not control.should_training_stop:
                print(f"\nTime budget of {hours:g} h reached at step {state.global_step}: saving and stopping.")
                print("Run the same notebook again to continue from here.")
                control.should_save = control.should_training_stop = True

    return TimeBudget()


def measured(trainer: Trainer, seconds: float, first_step: int) -> dict[str, Any]:
    """The numbers of a finished training for facts.json."""
    from nbutils import hardware

    losses = loss_history(trainer.state.log_history)
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    before = [entry["num_tokens"] for entry in trainer.state.log_history if entry.get("step", 0) <= first_step and "num_tokens" in entry]
    trained = (tokens[-1] - (before[-1] if before else 0)) if tokens else 0
    return {
        "steps": trainer.state.global_step, "resumed_from_step": first_step, "final_loss": losses[-1][1] if losses else None,
        "tokens_per_second": round(trained / seconds, 1) if seconds > 0 else 0.0, "train_seconds": round(seconds, 1),
        "peak_memory_gib": round(hardware.peak_memory_gib(), 3),
    }  # fmt: skip


def loss_history(log_history: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def complete(folder: Path, **facts: Any) -> None:
    """Write the file that says a result is whole; always the last thing written into its folder."""
    write_json(folder / "complete.json", facts)
