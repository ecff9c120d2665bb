"""What a training run needs around the trainer: precision repaired, progress kept, time watched, numbers measured.

Not here: building the trainer or choosing its settings; lesson 03 does both in full view.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbutils import checkpoints, platforms, tracking
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import GIB

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

    from nbutils.lessons import Lesson

RESUME_CHOICES = ("auto", "never")
CHECKPOINT_EXTRAS = 64 * 2**20  # tokenizer, trainer state, random states
_LOCKS: dict[Path, IO[str]] = {}
TRAIL_MINUTES = 10.0  # kept free at the end of a session for saving and copying


def repair_precision(model: nn.Module) -> int:
    """Put trainable weights back into float32: TRL casts QLoRA adapters to bfloat16 whatever was asked for."""
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
    _train_alone(scratch)
    shutil.rmtree(
        scratch, ignore_errors=True
    )  # a folder left by a killed run proves nothing; only verified ones return
    scratch.mkdir(parents=True)
    if resume == "never":
        shutil.rmtree(keep, ignore_errors=True)
        return None
    return checkpoints.restore(keep, scratch, mark)


def _train_alone(scratch: Path) -> None:
    """Hold the run until this process ends, however it ends; a second trainer would delete the first one's files."""
    import fcntl

    scratch.parent.mkdir(parents=True, exist_ok=True)
    handle = _LOCKS.pop(scratch, None) or open(scratch.with_suffix(".lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CourseError(
            f"another process is training in {scratch.parent.name} right now.", "one training per run at a time",
            "wait for it, stop it (restart its kernel), or choose another RUN_NAME",
        ) from None  # fmt: skip
    _LOCKS[scratch] = handle


def require_room(trainer: Trainer, keep: Path, keep_last: int) -> None:
    """Stop before a training whose checkpoints do not fit: weights and two optimizer states, in float32."""
    assert trainer.model and trainer.args.output_dir
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    one = (trainable * 12 + CHECKPOINT_EXTRAS) / GIB
    require_disk(Path(trainer.args.output_dir), 2 * one, "writing checkpoints")
    require_disk(keep, (keep_last + 1) * one, "keeping checkpoints")


def steps_left(trainer: Trainer, checkpoint: Path | None) -> int:
    """How many steps remain after a checkpoint; a run that is not counted in steps ends where its checkpoint says."""
    if checkpoint is None:
        return max(trainer.args.max_steps, 1)
    done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    wanted = trainer.args.max_steps if trainer.args.max_steps > 0 else done["max_steps"]
    return max(wanted - done["global_step"], 0)


def load_finished(trainer: Trainer, checkpoint: Path) -> None:
    """Take over the weights and the history of a training that is complete already."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import TrainerState

    set_peft_model_state_dict(trainer.model, load_file(checkpoint / "adapter_model.safetensors"))
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    print(f"Nothing is left to train: this run has {trainer.state.global_step} steps.")
    print('Set a larger MAX_STEPS to go on, or RESUME = "never" to start anew.')


def step_of(checkpoint: Path | None) -> int:
    """The step a checkpoint folder was saved at; 0 without one."""
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0


def keep_checkpoints(keep: Path, mark: dict[str, Any], keep_last: int) -> TrainerCallback:
    """A callback that carries each saved checkpoint to `keep`."""
    from transformers import TrainerCallback

    class KeepCheckpoints(TrainerCallback):
        """on_save -> checkpoints.publish; the last step is always logged, so that a short run has a loss too."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log |= state.global_step >= state.max_steps

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                checkpoints.publish(saved, keep, mark, keep_last)

    return KeepCheckpoints()


def time_budget(max_hours: float, platform: platforms.Platform) -> TrainerCallback:
    """A callback that saves and stops before the session ends (MAX_HOURS, else the platform's limit)."""
    from transformers import TrainerCallback

    hours = max_hours or platforms.time_limit_hours(platform)
    seconds = hours * 3600 - min(TRAIL_MINUTES * 60, hours * 360) if hours else float("inf")
    begun = time.monotonic()

    class TimeBudget(TrainerCallback):
        """Ends training normally once the budget is used."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if time.monotonic() - begun > seconds and not control.should_training_stop:
                print(f"\nTime budget of {hours:g} h reached at step {state.global_step}: saving and stopping.")
                print("Run the same notebook again to continue from here.")
                control.should_log = control.should_save = control.should_training_stop = True

    return TimeBudget()


def measured(trainer: Trainer, seconds: float, first_step: int) -> dict[str, Any]:
    """The numbers of a finished training for facts.json."""
    from nbutils import hardware

    history = trainer.state.log_history
    losses = loss_history(history)
    tokens = [entry["num_tokens"] for entry in history if "num_tokens" in entry and entry["step"] > first_step]
    return {
        "steps": trainer.state.global_step,
        "resumed_from_step": first_step,
        "final_loss": round(losses[-1][1], 5) if losses else None,
        "tokens_per_second": round(tokens[-1] / seconds, 1) if tokens else None,  # None: nothing was left to train
        "train_seconds": round(seconds, 1) if tokens else None,
        "peak_memory_gib": round(hardware.peak_memory_gib(), 3),
    }


def loss_history(log_history: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def bookkeeping(lesson: Lesson, seed: int) -> dict[str, Any]:
    """The trainer settings that are about this machine and this run, not about learning."""
    train = lesson.profile.train
    return {
        "seed": seed,
        "data_seed": seed,
        "use_cpu": lesson.card is None,
        "dataloader_pin_memory": lesson.card is not None,
        "save_strategy": "steps",
        "save_steps": train.save_steps,
        "save_total_limit": 1,  # in scratch; the ones that count are in the run folder
        "logging_steps": train.logging_steps,
        "report_to": tracking.begin(lesson.run.logs, lesson.run.name),
        "run_name": lesson.run.name,
    }


@dataclass(frozen=True)
class Moved:
    """How many of the photographed weights changed."""

    adapter: int
    adapter_total: int
    base: int
    base_total: int

    def __str__(self) -> str:
        return (
            f"adapter: {self.adapter} of {self.adapter_total} tensors moved; "
            f"base: {self.base} of {self.base_total} moved"
        )


def photograph(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """A checksum of every weight, and whether it may move."""
    return {name: (weight.requires_grad, _checksum(weight)) for name, weight in model.named_parameters()}


def adapter_checksum(model: nn.Module) -> str:
    """One checksum of all trainable weights: equal for equal adapters."""
    return f"{zlib.crc32(repr(sorted(item for item in photograph(model).items() if item[1][0])).encode()):08x}"


def weight_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights are stored how: `nf4, double` for quantised ones, else the type."""
    kinds: Counter[str] = Counter()
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        double = ", double" if getattr(state, "nested", False) else ""
        kinds[f"{state.quant_type}{double}" if state else str(weight.dtype).removeprefix("torch.")] += 1
    return dict(kinds)


def compare(before: dict[str, tuple[bool, int]], model: nn.Module) -> Moved:
    """Count what moved since the photograph."""
    after = photograph(model)
    moved = {name for name in before if before[name][1] != after[name][1]}
    adapter = {name for name, (trainable, _) in before.items() if trainable}
    base = set(before) - adapter
    return Moved(len(moved & adapter), len(adapter), len(moved & base), len(base))


def _checksum(weight: Any) -> int:
    import torch

    return zlib.crc32(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
