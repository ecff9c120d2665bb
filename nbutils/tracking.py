"""Experiment tracking: TensorBoard always, W&B online with a key and else offline, loss curves, live numbers.

Never a prompt, never a lost run.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from nbutils import display, distributed, hardware, platforms
from nbutils.files import make_folder, write_json
from nbutils.masking import mask_secrets
from nbutils.plan import gpus
from nbutils.record import LessonLike

YUAN = ("autodl", "pai_dsw", "modelscope", "featurize", "gpushare", "matpool")
NO_RENT = ("colab", "kaggle", "studio_lab")  # free, or paid in units without a price per hour
LINES, SHORTEST, LONGEST = 50, 5.0, 300.0  # lines per training, and the seconds between two of them
Clock = Callable[[], float]
Curve = list[tuple[int, float]]  # (step, loss)


def begin(logs: Path, run: str) -> list[str]:
    """Start the W&B run that the trainer will use, offline if it cannot be online; the values for `report_to`."""
    if not distributed.is_main():
        return []
    import wandb

    make_folder(logs, "logs")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / "tensorboard")
    os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    excepthook = sys.excepthook  # wandb.init replaces it, and prints a traceback before a CourseError
    wandb.finish()  # of an earlier run of this cell
    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "finetune-course"), "name": run, "dir": logs}
    key, host = platforms.secret("WANDB_API_KEY"), os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    mode = f"offline: {'WANDB_MODE says so, or no network' if key else 'no WANDB_API_KEY'}"
    if key and os.environ.get("WANDB_MODE", "online") == "online" and platforms.answers(host, seconds=5):
        os.environ["WANDB_API_KEY"] = key
        try:
            wandb.init(**options, mode="online", settings=wandb.Settings(init_timeout=30))
            mode = "online"
        except Exception as problem:  # a refused key, a dead network: neither may cost the training
            mode = mask_secrets(f"offline: {type(problem).__name__}: {problem}")[:130]
    if mode != "online":
        os.environ["WANDB_MODE"] = "offline"
        wandb.init(**options, mode="offline")
    print(f"logs      TensorBoard; W&B {mode}")
    sys.excepthook = excepthook
    return ["tensorboard", "wandb"]


def end() -> None:
    """Finish an offline W&B run; an online one finishes by itself."""
    import wandb

    if wandb.run is not None and wandb.run.offline:
        wandb.finish()


def loss_history(log_history: Iterable[dict[str, Any]]) -> Curve:
    """(step, loss) pairs of the training log."""
    return [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]


def validation_history(log_history: Iterable[dict[str, Any]]) -> Curve:
    """(step, loss) pairs of the validation log; the last one of each step."""
    return sorted({entry["step"]: entry["eval_loss"] for entry in log_history if "eval_loss" in entry}.items())


def best_of(validation: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """The step with the lowest finite loss."""
    return min((point for point in validation if math.isfinite(point[1])), key=lambda point: point[1], default=None)


def write_history(log_history: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the curves as [{step, loss}, {step, eval_loss}, ...]; values that are not finite are left out."""
    points = [(one["step"], name, one[name]) for one in log_history for name in ("loss", "eval_loss") if name in one]
    write_json(path, [{"step": step, name: loss} for step, name, loss in points if math.isfinite(loss)])


class LiveNumbers:
    """Step, losses, speed, memory, time left and cost: a panel in a notebook, about fifty lines elsewhere."""

    def __init__(self, lesson: LessonLike, now: Clock = monotonic) -> None:
        self.gpu, self.now, where, price = lesson.gpu, now, lesson.platform.name, gpus.hourly_price(lesson.gpu)
        self.price: dict[str, float] = {}  # of an hour, by currency; empty where it is free or not known
        if price and where not in NO_RENT:
            self.price |= {"¥": price.yuan} if price.yuan and where in (*YUAN, "local") else {}
            self.price |= {"$": price.dollars} if price.dollars and where not in YUAN else {}
        self.output, self.watched = display.LiveOutput(), display.watched()
        self.notes: deque[str] = deque(maxlen=3)  # the newest lines below the numbers of the panel
        self.started = self.start_step = -1.0
        self.shown_at = -math.inf
        self.skipped = 0  # steps of float16 while it looks for its loss scale
        self.tokens = 0.0

    def note(self, line: str) -> None:
        """Show a line: in the panel, or below what was printed."""
        self.notes.append(line)
        if not self.watched:
            print(line, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.started < 0:  # else it continues after it ran out of memory
            self.started, self.start_step = self.now(), state.global_step
        self._show(state, f"training steps {state.global_step + 1:,} to {state.max_steps:,}; the first is slow", {})

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.skipped += bool(getattr(optimizer, "step_was_skipped", False))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}):
            return
        first, self.tokens, spent = not self.tokens, logs.get("num_tokens", 0.0), self.now() - self.started
        left = spent / max(state.global_step - self.start_step, 1) * (state.max_steps - state.global_step)
        pause = 1.0 if self.watched else min(max((spent + left) / LINES, SHORTEST), LONGEST)
        if first or self.now() - self.shown_at >= pause:
            numbers = self._numbers(state) | {"left": display.clock(left)}
            self._show(state, f"step {state.global_step:,} of {state.max_steps:,}", numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        spent = display.clock(self.now() - self.started)
        steps = f"trained {state.global_step:,} of {state.max_steps:,} steps in {spent}"
        self._show(state, steps, self._numbers(state))

    def cost(self, seconds: float) -> dict[str, float]:
        """What so many seconds cost by currency, where a price is known."""
        return {sign: round(hourly * seconds / 3600, 2) for sign, hourly in self.price.items()}

    def _numbers(self, state: Any) -> dict[str, str]:
        spent, of = self.now() - self.started, f" of {self.gpu.memory_gib:.1f}" if self.gpu else ""
        curves = {"loss": loss_history(state.log_history), "validation": validation_history(state.log_history)}
        shown = {"loss": "{1:.3f}", "validation": "{1:.3f} (step {0})"}
        numbers = {name: shown[name].format(*curve[-1]) if curve else "" for name, curve in curves.items()} | {
            "tokens/s": f"{self.tokens / spent:,.0f}" if self.tokens and spent else "",
            "memory": f"peak {hardware.peak_memory_gib():.2f}{of} GiB",
            "cost": " or ".join(f"{sign}{money:.2f}" for sign, money in self.cost(spent).items()),
        }
        return {name: text for name, text in numbers.items() if text}

    def _show(self, state: Any, steps: str, numbers: dict[str, str]) -> None:
        self.shown_at, page = self.now(), ""
        if self.watched:
            curves = loss_history(state.log_history), validation_history(state.log_history)
            page = display.live_page({"": steps, **numbers}, state.global_step, state.max_steps, *curves, self.notes)
        self.output.show(" · ".join(filter(None, [steps, display.live_line(numbers)])), page)
