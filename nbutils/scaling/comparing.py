"""The same training with one process and with several, side by side.

Not here: running them (launching).
"""

from __future__ import annotations

import json
import math
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import checkpoints, record
from nbutils.errors import CourseError

TINY = 1e-6  # a loss below this is as good as none
TOLERANCE = 0.01  # sums in another order: a rounding each, 2^-8 of a value in bfloat16


@dataclass(frozen=True)
class Comparison:
    """The same training with one process and with several, the one first in every pair."""

    processes: tuple[int, int]
    steps: tuple[int, int]
    batch: tuple[int, int]
    tokens_per_second: tuple[float, float]
    losses: dict[int, tuple[float, float]]

    @property
    def speedup(self) -> float:
        """How many times the tokens a second."""
        one, other = self.tokens_per_second
        return other / one if one and other else math.nan

    @property
    def furthest(self) -> float:
        """The largest difference between two losses of the same step, as a part of the loss."""
        return max(_apart(one, other) for one, other in self.losses.values())

    @property
    def same_work(self) -> bool:
        """Whether both took the same steps over the same number of rows and learned the same from them."""
        return self.steps[0] == self.steps[1] and self.batch[0] == self.batch[1] and self.furthest <= TOLERANCE

    def __str__(self) -> str:
        rows: dict[str, tuple[float, float]] = {"processes": self.processes, "steps": self.steps}
        rows |= {"rows in a step": self.batch}
        rows |= {f"loss at step {step}": pair for step, pair in self.losses.items()}
        rows |= {"tokens a second": self.tokens_per_second}
        lines = [f"{name:18} {one:>10,.6g} {other:>10,.6g}" for name, (one, other) in rows.items()]
        result = (
            f"{self.speedup:.2f} times the tokens a second; losses differ by at most {self.furthest:.1e} of the loss"
        )
        return "\n".join([*lines, result])


def _apart(one: float, other: float) -> float:
    """The difference as a part of the first; a loss that is no number is as far as can be."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), TINY)


def compare(alone: Path, together: Path) -> Comparison:
    """What lesson 03 left in two run folders, side by side."""
    pairs = [(record.read(run / "facts.json")["lessons"]["03_qlora"], losses(run)) for run in (alone, together)]
    (one, first), (other, second) = pairs
    numbers = {name: (one[name], other[name]) for name in ("processes", "steps", "batch", "tokens_per_second")}
    common = {step: (first[step], second[step]) for step in sorted(first) if step in second}
    if not common:
        raise CourseError(
            f"{alone.name} and {together.name} logged no step in common.", "two runs of the same length",
            "run the comparison again with a larger TRIAL_STEPS",
        )  # fmt: skip
    return Comparison(**numbers, losses=common)


def losses(run: Path) -> dict[int, float]:
    """The loss at each logged step, from the trainer's state in the newest checkpoint of a run."""
    newest = checkpoints.look(run / "checkpoints")[0][0].archive
    with tarfile.open(newest, "r:") as tar:
        state = tar.extractfile(f"{newest.stem}/trainer_state.json")
        assert state
        history = json.load(state)["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def facts(compared: Comparison | None) -> dict[str, Any]:
    """A comparison for facts.json; None leaves what an earlier start measured."""
    if compared is None:
        return dict.fromkeys(("speedup", "tokens_per_second", "loss_difference"))
    pair = dict(zip(("alone", "together"), compared.tokens_per_second, strict=True))
    return {"speedup": round(compared.speedup, 3), "tokens_per_second": pair, "loss_difference": compared.furthest}
