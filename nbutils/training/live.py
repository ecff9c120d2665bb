"""Numbers while it trains: step, loss, tokens a second, memory, time left, cost; drawn in a notebook, lines elsewhere.

Nothing here makes the card wait: loss and tokens are those the trainer logs anyway, and a step only leaves a time.
Not here: the arithmetic (meter), how it looks (dashboard), or what is written down afterwards (numbers).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from nbutils import dashboard, hardware
from nbutils.errors import CourseError
from nbutils.paths import GIB
from nbutils.plan import cards
from nbutils.training.meter import Meter
from nbutils.training.numbers import loss_history
from nbutils.training.validation import validation_history

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from nbutils.lessons import Lesson

LINES, OFTEN, SELDOM = 50, 5.0, 300.0  # about so many lines a training, and the seconds between two of them
REFRESH = 1.0  # seconds between two drawings in a notebook
SECONDS = "NBUTILS_LIVE_SECONDS"  # instead of both, if it is set; 0 shows every step
YUAN = ("autodl", "pai_dsw", "modelscope", "featurize", "gpushare", "matpool")
NO_RENT = ("colab", "kaggle", "studio_lab")  # free, or paid in units no table here knows


class Teller:
    """Shows a meter: at most once a second to someone who looks at a notebook, and in some fifty lines elsewhere."""

    def __init__(self, lesson: Lesson, meter: Meter, seconds: float | None) -> None:
        self.card, self.meter, self.seconds, self.price = lesson.card, meter, seconds, hourly_price(lesson)
        self.remark = " if rented" if self.price and lesson.platform.name == "local" else ""  # it may be one's own
        self.panel = dashboard.LivePanel() if dashboard.watched() else None
        self.shown_at, self.told = -math.inf, 0  # when, and how many notes

    def begin(self) -> None:
        """Say that it starts, because the first step may take a minute."""
        left = self.meter.steps - self.meter.step
        self.show({"training": f"{left:,} steps to go, the first takes longest"})

    def tell(self, always: bool = False) -> None:
        """Show where the training is, if it is time to."""
        if always or len(self.meter.notes) > self.told or self.meter.now() - self.shown_at >= self.pause():
            self.show({"step": self.steps()} | self.numbers(self.meter.tokens_per_second))

    def end(self) -> None:
        """The last words, which stay in the notebook."""
        spent = dashboard.clock(self.meter.spent)
        self.show({"trained": f"{self.steps()} steps in {spent}"} | self.numbers(self.meter.average, over=True))

    def pause(self) -> float:
        """Seconds between two showings; lines come the rarer the longer the training is."""
        if self.seconds is not None:
            return self.seconds
        whole = self.meter.spent + (self.meter.seconds_left or 0.0)
        return REFRESH if self.panel else min(max(whole / LINES, OFTEN), SELDOM)

    def steps(self) -> str:
        return f"{self.meter.step:,} of {self.meter.steps:,}"

    def numbers(self, speed: float | None, over: bool = False) -> dict[str, str]:
        """Every number that is known, as text by its name."""
        loss, left, skipped = self.meter.loss, self.meter.seconds_left, self.meter.skipped
        known = {
            "loss": "" if loss is None else f"{loss:.3f}",
            "validation": f"{self.meter.validation[-1][1]:.3f}" if self.meter.validation else "",
            "tokens/s": "" if speed is None else f"{speed:,.0f}",
            "memory": memory(self.card, over),
            "left": "" if over or left is None else dashboard.clock(left),
            "cost": " or ".join(f"{sign}{money:.2f}" for sign, money in self.cost().items()) + self.remark,
            "skipped": f"{skipped:,}" if skipped else "",
        }
        return {name: text for name, text in known.items() if text}

    def cost(self) -> dict[str, float]:
        """What it cost so far by currency, where a price is known."""
        return {sign: round(hourly * self.meter.spent / 3600, 2) for sign, hourly in self.price.items()}

    def show(self, parts: dict[str, str]) -> None:
        """Draw it, or print what is new."""
        notes, self.shown_at = self.meter.notes, self.meter.now()
        if self.panel:
            self.panel.draw(parts, (self.meter.step, self.meter.steps), self.meter.losses, notes, self.meter.validation)
        else:
            print(*notes[self.told :], dashboard.live_line(parts), sep="\n", flush=True)
        self.told = len(notes)


def live_numbers(
    lesson: Lesson, seconds: float | None = None, now: Callable[[], float] = time.monotonic
) -> TrainerCallback:
    """A callback that shows the numbers of a training; `training.train` takes the trainer's own bars away."""
    from transformers import TrainerCallback

    class LiveNumbers(TrainerCallback):
        """Tells the meter of every process; the first one's is shown."""

        def __init__(self) -> None:
            self.meter = Meter(now)
            self.teller = Teller(lesson, self.meter, wished_seconds() if seconds is None else seconds)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter.begin(state.global_step, state.max_steps, loss_history(state.log_history))
            self.meter.validation = validation_history(state.log_history)
            if state.is_world_process_zero:
                self.teller.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            self.meter.step_ended(state.global_step, bool(getattr(optimizer, "step_was_skipped", False)))
            if state.is_world_process_zero and not control.should_log:  # else a moment later, with a fresh loss
                self.teller.tell()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "eval_loss" in (logs or {}):
                self.meter.validation = validation_history(state.log_history)
            if "loss" not in (logs or {}):  # a validation, or the trainer's own summary
                return
            first = self.meter.last_log <= self.meter.first
            self.meter.logged(state.global_step, logs["loss"], logs.get("num_tokens"))
            if state.is_world_process_zero:
                self.teller.tell(always=first)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter.end()
            if state.is_world_process_zero:
                self.teller.end()

    return LiveNumbers()


def replace_bars(trainer: Trainer) -> None:
    """Take away the trainer's own displays, of which it adds one unasked."""
    from transformers import PrinterCallback, ProgressCallback
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # another one in notebooks

    for kind in (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(kind)


def memory(card: hardware.Card | None, over: bool = False) -> str:
    """What this process holds of the card's memory, or of the computer's, and the most it held."""
    of_all = f" of {card.memory_gib:.1f}" if card else ""
    peak = f"{hardware.peak_memory_gib():.2f}{of_all} GiB"
    return f"peak {peak}" if over else f"{held_gib(card):.2f} GiB, peak {peak}"


def held_gib(card: hardware.Card | None) -> float:
    """Memory of the card that is in use now, by torch's own count; without one, memory of this process."""
    if card:
        import torch

        return torch.cuda.memory_allocated() / GIB
    return psutil.Process().memory_info().rss / GIB


def hourly_price(lesson: Lesson) -> dict[str, float]:
    """What an hour of this card costs by currency; nothing where it is free, on a CPU, or where no price is known."""
    where = lesson.platform.name
    if lesson.card is None or where in NO_RENT:
        return {}
    try:
        price = cards.hourly_price(lesson.card)
    except CourseError:  # a mistake in an edited price table must not end a training
        return {}
    yuan = price.yuan if price and where in (*YUAN, "local") else None
    dollars = price.dollars if price and where not in YUAN else None
    return {sign: hourly for sign, hourly in (("¥", yuan), ("$", dollars)) if hourly}


def wished_seconds() -> float | None:
    """Seconds between two showings, if the environment says so."""
    text = os.environ.get(SECONDS)
    try:
        seconds = float(text) if text else None
        if seconds is None or 0 <= seconds < math.inf:
            return seconds
        raise ValueError
    except ValueError:
        raise CourseError(f"{SECONDS} is {text!r}.", "a number of seconds; 0 shows every step", "unset it") from None
