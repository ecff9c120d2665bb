"""What changed between two models on the same rows, further than chance explains, and that in sentences.

Not here: what follows from it (verdict).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from nbutils.evaluation import scores, statistics
from nbutils.evaluation.control import chance_of

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

DECIDING = {"exact_content": "Exact match", "content": "ROUGE-L"}  # beyond other rows' references
LEVEL = 1 - 0.05 / len(DECIDING)  # Bonferroni: two chances to rise by luck, so each must be surer
POWER = 0.8416  # standard normal quantile of 80 %


class Evidence:
    """Two results of one exam, and how the deciding scores moved between them."""

    def __init__(self, base: Result, tuned: Result) -> None:
        self.base, self.tuned, self.rows = base, tuned, len(base.answers)
        self.changes = {name: self._change(name) for name in DECIDING}

    def _change(self, score: str) -> statistics.Difference:
        return statistics.difference(self.base.scores[score], self.tuned.scores[score], level=LEVEL)

    @property
    def risen(self) -> list[str]:
        """The deciding scores that surely rose."""
        return [name for name, one in self.changes.items() if _surely(one) > 0]

    @property
    def fallen(self) -> list[str]:
        """Those that surely fell."""
        return [name for name, one in self.changes.items() if _surely(one) < 0]

    @cached_property
    def answers_fell(self) -> bool:
        """Whether the answers as a whole are surely further from the wanted ones."""
        return _surely(self._change("rouge_l")) < 0

    def had(self, score: str) -> bool:
        """Whether the base's answers surely had to do with their own questions, so that there was something to lose."""
        against = scores.is_exact if score == "exact_content" else scores.rouge_l
        return chance_of(against, self.base.texts, self.base.references) <= 1 - LEVEL

    def told(self, score: str) -> str:
        """A deciding number in a sentence."""
        change = self.changes[score]
        verb = {-1: "fell", 0: "did not surely change", 1: "rose"}[_surely(change)]
        return (
            f"{DECIDING[score]}, beyond what the same answers score against the references of other rows, {verb}: "
            f"{self.base.mean(score):.3f} before, {self.tuned.mean(score):.3f} after "
            f"(difference {change.estimate.text('+.3f')}, p {change.p_text}, {self.rows} rows)."
        )

    @property
    def exact(self) -> str:
        """Right answers before and after, in a few words."""
        before, after = (round(one.mean("exact_match") * self.rows) for one in (self.base, self.tuned))
        return f"{before} of {self.rows} answers were exactly right before the tuning, {after} after it"

    @property
    def form(self) -> str:
        """What improved although the content did not."""
        base, tuned, better = self.base, self.tuned, []
        if tuned.loss < base.loss:
            better.append(f"loss fell from {base.loss:.2f} to {tuned.loss:.2f}")
        if tuned.mean("character_f1") > base.mean("character_f1"):
            better.append(f"character F1 rose from {base.mean('character_f1'):.2f} to {tuned.mean('character_f1'):.2f}")
        return f"; {' and '.join(better)}, but wrong answers of the right form do that too" if better else ""

    @property
    def sight(self) -> str:
        """The smallest true change these rows would have shown four times out of five, in a sentence."""
        exact = self.base.mean("exact_match") + self.tuned.mean("exact_match") > 0
        score = "exact_content" if exact else "content"
        pairs = zip(self.base.scores[score], self.tuned.scores[score], strict=True)
        spread = (POWER + statistics.z_of(LEVEL)) * statistics.standard_error(
            [after - before for before, after in pairs]
        )
        turned = math.ceil(1 - math.log2(1 - LEVEL)) / self.rows if exact else 0.0  # fewer turning right may be luck
        seen = min(1.0, max(spread, turned))
        more = f", four times as many rows would show one of {spread / 2:.2f}" if 1.0 > spread > turned else ""
        told = f"with these {self.rows} evaluation rows a change of {DECIDING[score]} below {seen:.2f}"
        return f"{told} could not have been seen{more}"


def _surely(change: statistics.Difference) -> int:
    """1 for risen, -1 for fallen, 0 where chance would do: the interval and the test must agree."""
    if not change.p < 1 - LEVEL:
        return 0
    return (change.estimate.low > 0) - (change.estimate.high < 0)
