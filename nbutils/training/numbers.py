"""What a training measured, and the trainer settings that are about this machine and this run.

Not here: settings about learning; they stand in lesson 03.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import tracking
from nbutils.paths import write_json
from nbutils.training import validation

if TYPE_CHECKING:
    from transformers import Trainer

    from nbutils.lessons import Lesson
    from nbutils.training.meter import Meter


def measured(trainer: Trainer, seconds: float, first_step: int) -> dict[str, Any]:
    """The numbers of a finished training for facts.json."""
    from nbutils import hardware

    history = trainer.state.log_history
    losses = loss_history(history)
    tokens = [entry["num_tokens"] for entry in history if "num_tokens" in entry and entry["step"] > first_step]
    watcher = _watcher(trainer)
    live: Meter | None = watcher and watcher.meter
    whole = trainer.state.global_step if validation.ended_early(trainer, history) else trainer.state.max_steps
    speed = (live and live.average) or (tokens[-1] / seconds if tokens else None)
    cost = watcher.teller.cost() if watcher and tokens else None  # {}: no price is known, and it is left out
    return {
        "steps": trainer.state.global_step,
        "planned_steps": whole,  # more than the steps done: the run ended before its time was up
        "resumed_from_step": first_step,
        "final_loss": round(losses[-1][1], 5) if losses else None,
        "tokens_per_second": round(speed, 1) if speed else None,  # None: nothing was left to train
        "train_seconds": round(seconds, 1) if tokens else None,
        "skipped_steps": live.skipped if live and tokens else None,  # float16 looking for its loss scale
        "processes": trainer.args.world_size if tokens else None,
        "batch": _batch(trainer.args) if tokens else None,
        "peak_memory_gib": round(hardware.peak_memory_gib(), 3) if tokens else None,
        **validation.facts(history),
    } | ({} if cost == {} else {"cost": cost})


def _batch(args: Any) -> int:
    """Rows of a step on all cards."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _watcher(trainer: Trainer) -> Any:
    """`live_numbers`, if the trainer was given it."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    return next((one for one in callbacks if hasattr(one, "meter")), None)


def loss_history(log_history: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def write_history(log_history: Iterable[dict[str, Any]], path: Path) -> None:
    """The curves of a training as [{step, loss}, {step, eval_loss}, ...]; what is not a number is left out."""
    names = ("loss", "eval_loss")
    losses = [(entry["step"], name, entry[name]) for entry in log_history for name in names if name in entry]
    write_json(path, [{"step": step, name: loss} for step, name, loss in losses if math.isfinite(loss)])


def bookkeeping(lesson: Lesson, seed: int) -> dict[str, Any]:
    """The trainer settings that are about this machine and this run, not about learning."""
    train = lesson.profile.train
    return {
        "seed": seed,
        "data_seed": seed,
        "use_cpu": lesson.card is None,
        "dataloader_pin_memory": lesson.card is not None,
        "ddp_find_unused_parameters": False,  # every adapter weight is used in every step
        "save_strategy": "steps",
        "save_steps": train.save_steps,
        "save_total_limit": 1,  # in scratch; the ones that count are in the run folder
        "logging_steps": train.logging_steps,
        "logging_nan_inf_filter": False,  # it would write a plausible loss over one that is not a number
        "report_to": tracking.begin(lesson.scratch / lesson.run.logs.name, lesson.run.name),
        "run_name": lesson.run.name,
    }
