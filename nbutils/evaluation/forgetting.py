"""What the tuning cost: whether general knowledge is still there. Two signs: perplexity, and the answers themselves.

Not here: asking (exam), or the verdict on what was to be learnt (verdict).
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbutils.evaluation import statistics

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

FORGOT_ABOVE = 1.10  # ratio of perplexities
FORGOT_BELOW = -0.05  # change of character F1
ENOUGH = 10  # rows; fewer tell nothing
LARGEST = 10_000.0  # a ratio beyond this says no more than "lost"
WIDTH = 110  # of a line on a screen
MEANING = {
    "kept": "by both, general answers are no worse than before; single ones may be, read some of them",
    "forgot": "mix general rows into the training data, or train with a smaller learning rate or fewer steps",
    "unclear": "too few rows to tell",
}


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge: the ratio of perplexities, after to before, and F1 of the answers."""

    word: str
    ratio: statistics.Estimate
    f1: statistics.Difference

    def __str__(self) -> str:
        return f"GENERAL KNOWLEDGE: {self.word}\n{textwrap.fill(self.told, WIDTH)}"

    @property
    def told(self) -> str:
        """The numbers and what they mean, in a sentence."""
        f1 = self.f1.estimate.text("+.3f")
        if math.isnan(self.ratio.mean):
            return f"Perplexity is not a number, character F1 {f1}: see the warning about the loss."
        ratio = f"x {self.ratio.text('.2f')}" if self.ratio.mean < LARGEST else f"x {LARGEST:,.0f} or more"
        return f"Perplexity {ratio}, character F1 {f1}: {MEANING[self.word]}."


def forgetting(base: Result, tuned: Result) -> Forgetting:
    """Whether perplexity on the general rows surely rose by more than a tenth, or F1 fell by more than 0.05."""
    weights = [row.tokens for row in base.losses]
    before, after = ([row.total / row.tokens for row in result.losses] for result in (base, tuned))
    loss = statistics.difference(before, after, weights).estimate
    ratio = statistics.Estimate(*(_exp(value) for value in (loss.mean, loss.low, loss.high)))
    f1 = statistics.difference(base.scores["character_f1"], tuned.scores["character_f1"])
    return Forgetting(_word(len(base.answers), ratio, f1), ratio, f1)


def _exp(value: float) -> float:
    return math.nan if math.isnan(value) else min(LARGEST, math.exp(min(50.0, value)))


def _word(rows: int, ratio: statistics.Estimate, f1: statistics.Difference) -> str:
    if rows < ENOUGH:
        return "unclear"
    destroyed = f1.estimate.mean < FORGOT_BELOW and f1.estimate.high < 0 and f1.p < 0.05
    if ratio.low > FORGOT_ABOVE or destroyed:
        return "forgot"
    return "kept" if ratio.high <= FORGOT_ABOVE else "unclear"
