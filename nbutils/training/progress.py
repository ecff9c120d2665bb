"""What a training reports: its curves, the facts of a finished run, live numbers."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import torch
from transformers import Trainer, TrainerCallback

from nbutils import dashboard, hardware, tracking
from nbutils.errors import CourseError
from nbutils.lessons import Lesson
from nbutils.paths import GIB, write_json
from nbutils.plan import cards

Curve = list[tuple[int, float]]  # (step, loss)
YUAN = ("autodl", "pai_dsw", "modelscope", "featurize", "gpushare", "matpool")
NO_RENT = ("colab", "kaggle", "studio_lab")  # free, or paid in units without a price per hour
LINES, SHORTEST, LONGEST = 50, 5.0, 300.0  # live lines per training, and the seconds between two of them
LIVE_SECONDS = "NBUTILS_LIVE_SECONDS"  # instead of those seconds; 0 shows every step
RECENT = 50  # steps and logs that a speed is computed from
NO_SCALE = 20  # skipped steps in a row; GradScaler starts at 65,536 and halves it each time
SKIPPED = "step {} skipped: float16 looks for its loss scale, normal in the first steps and now and then later"
NEVER_FITS = (
    "[WARN] {} steps in a row were skipped: float16 finds no loss scale, and nothing is learned. "
    "To do: stop, and train on a GPU with bfloat16 (RTX 30, A10, A100 or newer) or with another model."
)
NOT_FINITE = (
    "[WARN] the loss is {} at step {}: the weights are broken, and further training does not repair them. "
    'To do: stop, halve train.learning_rate in the profile, and run again with RESUME = "never".'
)


def loss_history(log_history: Iterable[dict[str, Any]]) -> Curve:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def validation_history(log_history: Iterable[dict[str, Any]]) -> Curve:
    """(step, loss) pairs of the validation log; the last one of each step."""
    return sorted({entry["step"]: entry["eval_loss"] for entry in log_history if "eval_loss" in entry}.items())


def best_of(validation: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """The step with the lowest finite loss."""
    return min((point for point in validation if math.isfinite(point[1])), key=lambda point: point[1], default=None)


def stopped_early(log_history: Iterable[dict[str, Any]], patience: int) -> bool:
    """Whether the last `patience` validation losses are all later than the best."""
    validation = validation_history(log_history)
    best = best_of(validation)
    return bool(patience and best and sum(step > best[0] for step, _ in validation) >= patience)


def validation_callback(trainer: Any) -> Any:
    """The validation callback of a trainer, connected to it; None without one."""
    if (found := _callback_with(trainer, "best_step")) is not None:
        found.trainer = trainer
    return found


def _callback_with(trainer: Any, attribute: str) -> Any:
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    return next((one for one in callbacks if hasattr(one, attribute)), None)


def write_history(log_history: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the curves as [{step, loss}, {step, eval_loss}, ...]; values that are not finite are left out."""
    points = [(one["step"], name, one[name]) for one in log_history for name in ("loss", "eval_loss") if name in one]
    write_json(path, [{"step": step, name: loss} for step, name, loss in points if math.isfinite(loss)])


def bookkeeping(lesson: Lesson, seed: int) -> dict[str, Any]:
    """The SFTConfig settings that are about this machine and this run, not about learning."""
    train = lesson.profile.train
    return {
        "seed": seed,
        "data_seed": seed,
        "use_cpu": lesson.card is None,
        "dataloader_pin_memory": lesson.card is not None,
        "ddp_find_unused_parameters": False,  # every adapter weight is used in every step
        "save_strategy": "steps",
        "save_steps": train.save_steps,
        "save_total_limit": 1,  # in scratch; the run folder keeps more
        "logging_steps": train.logging_steps,
        "logging_nan_inf_filter": False,  # it would hide a loss that is not a number
        "report_to": tracking.begin(lesson.scratch / lesson.run.logs.name, lesson.run.name),
        "run_name": lesson.run.name,
    }


def measured(trainer: Trainer, seconds: float, first_step: int) -> dict[str, Any]:
    """The numbers of a finished training for facts.json; None where this session trained nothing."""
    state, args, live = trainer.state, trainer.args, _callback_with(trainer, "average_speed")
    history: list[dict[str, Any]] = state.log_history
    losses, validation = loss_history(history), validation_history(history)
    early = stopped_early(history, getattr(validation_callback(trainer), "patience", 0))
    best = best_of(validation)
    facts: dict[str, Any] = {
        "steps": state.global_step,
        "planned_steps": state.global_step if early else state.max_steps,
        "resumed_from_step": first_step,
        "final_loss": round(losses[-1][1], 5) if losses else None,
        "validation_loss": None,
        "best_step": best and best[0],
    }
    if best:
        last = validation[-1][1] if math.isfinite(validation[-1][1]) else None
        facts["validation_loss"] = {"first": validation[0][1], "best": best[1], "last": last}
    tokens = [entry["num_tokens"] for entry in history if "num_tokens" in entry and entry["step"] > first_step]
    if not tokens:
        empty = ("tokens_per_second", "train_seconds", "skipped_steps", "processes", "batch", "peak_memory_gib")
        return facts | dict.fromkeys((*empty, "cost"))
    cost = live.cost() if live else None
    return facts | {
        "tokens_per_second": round((live and live.average_speed) or tokens[-1] / seconds, 1),
        "train_seconds": round(seconds, 1),
        "skipped_steps": live.skipped if live else None,
        "processes": args.world_size,
        "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "peak_memory_gib": round(hardware.peak_memory_gib(), 3),
    } | ({} if cost == {} else {"cost": cost})  # {}: no price is known  # fmt: skip


def hourly_price(lesson: Lesson) -> dict[str, float]:
    """What an hour of this GPU costs by currency; empty where it is free or no price is known."""
    where = lesson.platform.name
    if lesson.card is None or where in NO_RENT:
        return {}
    try:
        price = cards.hourly_price(lesson.card)
    except CourseError:  # a mistake in an edited price table must not stop a training
        return {}
    yuan = price.yuan if price and where in (*YUAN, "local") else None
    dollars = price.dollars if price and where not in YUAN else None
    return {sign: hourly for sign, hourly in (("¥", yuan), ("$", dollars)) if hourly}


class LiveNumbers(TrainerCallback):
    """Step, losses, tokens per second, memory, time left and cost: a panel in a notebook, about fifty lines elsewhere.

    The GPU never waits: losses and tokens are those the trainer logs anyway, and a step only leaves a time.
    """

    def __init__(self, lesson: Lesson, seconds: float | None = None, now: Callable[[], float] = monotonic) -> None:
        text = os.environ.get(LIVE_SECONDS, "")
        if text and not re.fullmatch(r"\d+(\.\d+)?", text):
            raise CourseError("training.live_seconds", name=LIVE_SECONDS, value=text)
        self.seconds = float(text) if text and seconds is None else seconds
        self.card, self.price, self.now = lesson.card, hourly_price(lesson), now
        self.remark = " if rented" if self.price and lesson.platform.name == "local" else ""
        self.panel = dashboard.LivePanel() if dashboard.watched() else None
        self.step = self.steps = self.skipped = self.skipped_at_log = self.skipped_in_a_row = self.notes_shown = 0
        self.tokens, self.shown_at = 0.0, -math.inf
        self.spent_before, self.started = 0.0, math.nan  # seconds before an out-of-memory; nan: not training
        self.losses: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.notes: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spent_before, self.started = self.spent, self.now()
        self.step, self.steps, self.skipped_in_a_row = state.global_step, state.max_steps, 0
        self.losses, self.validation = loss_history(state.log_history), validation_history(state.log_history)
        self.step_ends: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)  # the first step is warm-up
        self.token_counts: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        self._show(state, {"training": f"{self.steps - self.step:,} steps to go, the first takes longest"})

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        skipped = bool(getattr(optimizer, "step_was_skipped", False))
        self.step = state.global_step
        self.step_ends.append((self.now(), self.step))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.skipped += skipped
        if skipped and self.skipped == 1:
            self.notes.append(SKIPPED.format(self.step))
        if self.skipped_in_a_row == NO_SCALE:
            self.notes.append(NEVER_FITS.format(NO_SCALE))
        if not control.should_log:  # else a moment later, with a fresh loss
            self._show_if_due(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        logs = logs or {}
        self.validation = validation_history(state.log_history)
        if "loss" not in logs:
            return
        broken = not math.isfinite(logs["loss"]) and self.skipped == self.skipped_at_log  # skipped steps are harmless
        if broken and not any(note.startswith("[WARN] the loss is") for note in self.notes):
            self.notes.append(NOT_FINITE.format(logs["loss"], self.step))
        first, self.skipped_at_log = not self.token_counts, self.skipped
        self.losses.append((self.step, logs["loss"]))
        self.tokens = logs.get("num_tokens", self.tokens)
        self.token_counts.append((self.now(), self.tokens))
        self._show_if_due(state, first)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spent_before, self.started = self.spent, math.nan
        text = f"{self.step:,} of {self.steps:,} steps in {dashboard.clock(self.spent)}"
        self._show(state, {"trained": text} | self._numbers(done=True))

    @property
    def spent(self) -> float:
        """Seconds of training so far."""
        return self.spent_before + (0.0 if math.isnan(self.started) else self.now() - self.started)

    @property
    def speed(self) -> float | None:
        """Tokens per second of the recent steps; None before two logs."""
        return _rate(self.token_counts)

    @property
    def average_speed(self) -> float | None:
        """Tokens per second of everything so far, warm-up and saving included."""
        return self.tokens / self.spent if self.tokens and self.spent else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the recent steps, saving included."""
        pace = _rate(self.step_ends)
        return (self.steps - self.step) / pace if pace else None

    def cost(self) -> dict[str, float]:
        """The cost so far by currency, where a price is known."""
        return {sign: round(hourly * self.spent / 3600, 2) for sign, hourly in self.price.items()}

    def _show_if_due(self, state: Any, always: bool = False) -> None:
        total = self.spent + (self.seconds_left or 0.0)
        pause = 1.0 if self.panel else min(max(total / LINES, SHORTEST), LONGEST)
        due = self.now() - self.shown_at >= (pause if self.seconds is None else self.seconds)
        if always or due or len(self.notes) > self.notes_shown:
            self._show(state, {"step": f"{self.step:,} of {self.steps:,}"} | self._numbers())

    def _numbers(self, done: bool = False) -> dict[str, str]:
        speed = self.average_speed if done or self.speed is None else self.speed
        left = None if done else self.seconds_left
        known = {
            "loss": f"{self.losses[-1][1]:.3f}" if self.losses else "",
            "validation": f"{self.validation[-1][1]:.3f}" if self.validation else "",
            "tokens/s": f"{speed:,.0f}" if speed is not None else "",
            "memory": memory_text(self.card, done),
            "left": dashboard.clock(left) if left is not None else "",
            "cost": " or ".join(f"{sign}{money:.2f}" for sign, money in self.cost().items()) + self.remark,
            "skipped": f"{self.skipped:,}" if self.skipped else "",
        }
        return {name: text for name, text in known.items() if text}

    def _show(self, state: Any, parts: dict[str, str]) -> None:
        if not state.is_world_process_zero:
            return
        self.shown_at = self.now()
        if self.panel:
            self.panel.draw(parts, (self.step, self.steps), self.losses, self.notes, self.validation)
        else:
            print(*self.notes[self.notes_shown :], dashboard.live_line(parts), sep="\n", flush=True)
        self.notes_shown = len(self.notes)


def _rate(points: Sequence[tuple[float, float]]) -> float | None:
    """Units per second between the first and the last (time, count)."""
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def memory_text(card: hardware.Card | None, done: bool) -> str:
    """GPU memory in use and its peak, by torch's count; without a GPU, memory of this process."""
    peak = f"peak {hardware.peak_memory_gib():.2f}{f' of {card.memory_gib:.1f}' if card else ''} GiB"
    used = torch.cuda.memory_allocated() if card else psutil.Process().memory_info().rss
    return peak if done else f"{used / GIB:.2f} GiB, {peak}"
