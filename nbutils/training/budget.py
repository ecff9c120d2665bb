"""The end of a session seen coming: the run saves, ends normally and says how to go on, before the machine is taken.

Not here: what is saved (the trainer) or how it gets home (keeping).
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbutils import platforms, scaling

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from nbutils.checkpoints import Carrier
    from nbutils.lessons import Lesson

TRAIL_SECONDS = 300.0  # for what follows the training: the adapter, the plots, the record
UNKNOWN_WAY_SECONDS = 60.0  # a first guess at saving and carrying, until one was measured
GO_ON = {
    "colab": "Connect again (Runtime > Connect) and run all cells: the run continues from here.",
    "kaggle": "Open the notebook, add this version's output as an input (Add Input > Your Work) and run it again.",
}


class Clock:
    """Seconds left: of MAX_HOURS since the lesson began, else of the platform's limit since the machine did."""

    def __init__(self, lesson: Lesson, max_hours: float, now: Callable[[], float] = time.monotonic) -> None:
        limit = max_hours or platforms.time_limit_hours(lesson.platform)
        used = 0.0 if max_hours else platforms.session_seconds(lesson.platform) - (now() - lesson.started)
        self.hours, self.now = limit, now
        self.whose = "MAX_HOURS" if max_hours else f"the {limit:g} h of {lesson.platform.name}"
        if used > limit * 3600 and not max_hours:  # it lives on after its end, so that was not its end (Colab Pro)
            limit = 0.0
        self.end = lesson.started - used + limit * 3600 if limit else float("inf")

    def left(self) -> float:
        """Seconds until the end; infinite where nobody counts."""
        return self.end - self.now()

    @property
    def trail(self) -> float:
        """What is kept free at the end: minutes of a long budget, a twentieth of a short one."""
        return min(TRAIL_SECONDS, self.hours * 180)


class Pace:
    """What the next step, its saving and the way to keep will take, from what they took so far."""

    def __init__(self, way_home: Carrier, clock: Clock) -> None:
        self.way_home, self.clock = way_home, clock
        self.steps: deque[float] = deque(maxlen=20)
        self.saving: float | None = None
        self.mark = clock.now()

    def step_ended(self) -> None:
        """One more step measured."""
        self.steps.append(self.clock.now() - self.mark)
        self.mark = self.clock.now()

    def saved(self) -> None:
        """The time since the step ended was saving."""
        self.saving = self.clock.now() - self.mark
        self.mark = self.clock.now()

    def needed(self) -> float:
        """Seconds for one more step and for ending well after it, with a half on top."""
        guess = min(UNKNOWN_WAY_SECONDS, self.clock.trail)
        way = (self.saving + self.way_home.seconds) if self.saving is not None and self.way_home.seconds else guess
        return 1.5 * (max(self.steps, default=0.0) + way) + self.clock.trail


_before: list[Any] = []  # what SIGTERM did before `listen`


def listen(asked_to_end: threading.Event) -> None:
    """Let SIGTERM ask the training to end, until what it saved is home; a second one acts as it always did."""
    if threading.current_thread() is not threading.main_thread():
        return

    def ask(number: int, frame: Any) -> None:
        asked_to_end.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, ask)
    _before[:] = _before or [before or signal.SIG_DFL]


def stop_listening() -> None:
    """SIGTERM does again what it did before."""
    if _before and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _before.pop())


def time_budget(lesson: Lesson, way_home: Carrier, max_hours: float, clock: Clock | None = None) -> TrainerCallback:
    """A callback that saves and ends the training before its time is up, and when the machine says SIGTERM."""
    from transformers import TrainerCallback

    watch = clock or Clock(lesson, max_hours)
    go_on = GO_ON.get(lesson.platform.name, "Run the same notebook again: it continues from here.")

    class TimeBudget(TrainerCallback):
        """Looks at the clock after every step."""

        def __init__(self) -> None:
            self.pace, self.asked_to_end = Pace(way_home, watch), threading.Event()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.pace.mark = watch.now()
            listen(self.asked_to_end)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.pace.step_ended()
            reason = self.why_now()
            if control.should_training_stop or not scaling.anyone(bool(reason)):
                return
            reason = reason or "Another process of this training was asked to end."
            print(f"\n{reason} Saving at step {state.global_step} of {state.max_steps} and ending here. {go_on}")
            control.should_log = control.should_save = control.should_training_stop = True

        def why_now(self) -> str:
            """Why the training ends after this step; empty if it goes on."""
            if self.asked_to_end.is_set():
                return "The machine asked this run to end (SIGTERM)."
            left, needed = watch.left(), self.pace.needed()
            return f"{left / 60:.1f} minutes of {watch.whose} are left, {needed / 60:.1f} are needed to end well." \
                if left < needed else ""  # fmt: skip

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.pace.saved()

    return TimeBudget()
