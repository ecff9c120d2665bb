"""What a training is told to have done, and what follows: recent speed, time left, time spent, steps skipped, warnings.

Plain arithmetic on what the trainer says; the clock is given, so that a test can turn it.
Not here: showing it (live), or the trainer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

RECENT = 50  # steps, and logged points, that a speed is taken from
NO_SCALE = 20  # skipped steps in a row; GradScaler begins at 65,536 and halves it each time
SKIPPED = "step {} skipped: float16 looks for its loss scale, normal in the first steps and now and then later"
NEVER_FITS = (
    "[WARN] {} steps in a row were skipped: float16 finds no loss scale, and nothing is learnt. "
    "To do: stop, and train on a card with bfloat16 (RTX 30, A10, A100 or newer) or with another model."
)
NOT_A_NUMBER = (
    "[WARN] the loss is {} at step {}: the weights are spoilt, and going on teaches them nothing. "
    'To do: stop, halve train.learning_rate in the profile, and run again with RESUME = "never".'
)


class Meter:
    """What a training told so far, and what follows from it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.step = self.steps = self.first = self.last_log = self.skipped = self.streak = 0
        self.tokens = self.counter = 0.0  # of this callback's trainings; as the trainer last logged them
        self.losses: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.notes: list[str] = []
        self.begun = False  # whether a training of this meter's trainer has begun before
        self.before, self.began = 0.0, math.nan  # seconds of earlier trainings; when the one that runs began
        self.begin(0, 0)
        self.end()

    def begin(self, step: int, steps: int, losses: list[tuple[int, float]] | None = None) -> None:
        """A training begins at this step: a fresh one, a continued one, or the same again after an out-of-memory."""
        self.before, self.began = self.spent, self.now()
        self.step, self.first, self.steps, self.streak = step, step, steps, 0
        self.losses = [(at, loss) for at, loss in losses or [] if at <= step]
        self.last_log = min(self.last_log, step) if self.begun else step  # the same trainer's mean and count go on
        self.begun = steps > 0
        self.skipped_at_log = self.skipped
        self.ends: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)  # when steps ended; the first is the warm-up
        self.counts: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)  # tokens at logged steps

    def end(self) -> None:
        """The training is over: its clock stands still."""
        self.before, self.began = self.spent, math.nan

    @property
    def spent(self) -> float:
        """Seconds of training so far, those before an out-of-memory included."""
        return self.before if math.isnan(self.began) else self.before + self.now() - self.began

    def step_ended(self, step: int, skipped: bool) -> None:
        """One more step; the first of a training compiles and warms up, so that counting begins where it ends."""
        self.step = step
        self.ends.append((self.now(), step))
        if len(self.ends) == 1:
            self.warm = self.now()
        self.streak = self.streak + 1 if skipped else 0
        self.skipped += skipped
        if skipped and self.skipped == 1:
            self.notes.append(SKIPPED.format(step))
        if self.streak == NO_SCALE:
            self.notes.append(NEVER_FITS.format(NO_SCALE))

    def logged(self, step: int, loss: float | None, tokens: float | None) -> None:
        """The trainer logged: a mean loss since the last time, and all real tokens of all processes since it began."""
        if loss is not None:
            if not math.isfinite(loss) and self.skipped == self.skipped_at_log:  # a skipped step spoils nothing
                self._once(NOT_A_NUMBER.format(loss, step))
            self.losses.append((step, loss))
        if tokens is not None:
            self._count(step, tokens)
        self.last_log, self.skipped_at_log = step, self.skipped

    def _count(self, step: int, tokens: float) -> None:
        if tokens < self.counter:  # another trainer, which counts from zero
            self.counter, self.last_log = 0.0, self.first
        new = tokens - self.counter
        self.tokens, self.counter = self.tokens + new, tokens
        if not self.counts and self.ends:  # the share of what was done when the first step ended
            share = (self.first + 1 - self.last_log) / (step - self.last_log)
            self.counts.append((self.warm, self.tokens - new * (1 - share)))
        if step > self.first + 1:
            self.counts.append((self.now(), self.tokens))

    def _once(self, warning: str) -> None:
        kind = warning.split(" is ")[0]
        if not any(note.startswith(kind) for note in self.notes):
            self.notes.append(warning)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the recent steps; None before two were logged."""
        if len(self.counts) < 2 or self.counts[-1][0] <= self.counts[0][0]:
            return None
        return (self.counts[-1][1] - self.counts[0][1]) / (self.counts[-1][0] - self.counts[0][0])

    @property
    def average(self) -> float | None:
        """Tokens per second of everything trained so far, warm-up and saving included."""
        return self.tokens / self.spent if self.tokens and self.spent else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the recent steps, saving included."""
        if len(self.ends) < 2 or self.ends[-1][1] <= self.ends[0][1]:
            return None
        (since, first), (until, last) = self.ends[0], self.ends[-1]
        return (self.steps - self.step) * (until - since) / (last - first)

    @property
    def loss(self) -> float | None:
        """The last one logged."""
        return self.losses[-1][1] if self.losses else None
