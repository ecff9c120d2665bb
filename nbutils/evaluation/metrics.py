"""How near an answer is to its reference, how much of that is content, and how sure a mean or a difference is.

Characters are counted, as Chinese has no spaces. Content: trained on shuffled answers a model learns what answers look
like, its loss falls and its F1 rises. So each answer is also scored against the references of other rows, and only what
it scores beyond that is content. Every interval has the same level.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

THINKING = re.compile(r"(?s)^\s*<think>.*?(</think>|\Z)|^((?!<think>).)*?</think>")  # or the prompt opened it
CJK = re.compile(r"[\u3400-\u9fff]")
OTHERS, OTHERS_SEED = 5, 5  # references of other rows that each answer is scored against
LEVEL = 0.95  # of every interval: in the table, the figure, the texts and the verdict
RESAMPLES, SEED = 2_000, 2026
Score = Callable[[str, str], float]


def without_thinking(text: str) -> str:
    """The text without the thinking before it (unfinished thinking: nothing is left)."""
    return THINKING.sub("", text, count=1).strip()


def is_unfinished(text: str) -> bool:
    """Whether the text was cut off while the model was still thinking."""
    return text.lstrip().startswith("<think>") and "</think>" not in text


def normalized(text: str) -> str:
    """The characters that are counted: full width and half width alike, and no white space."""
    return "".join(unicodedata.normalize("NFKC", without_thinking(text)).split())


def exact(answer: str, reference: str) -> float:
    """1 if the answer is the reference, surrounding white space aside, else 0."""
    return float(without_thinking(answer) == without_thinking(reference))


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers equal to their reference, surrounding white space aside."""
    return sum(exact(*pair) for pair in zip(answers, references, strict=True)) / len(references)


def character_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the characters, in any order."""
    left, right = normalized(answer), normalized(reference)
    shared = (Counter(left) & Counter(right)).total()
    return 2 * shared / (len(left) + len(right)) if left or right else 1.0


def rouge_l(answer: str, reference: str) -> float:
    """The same of the longest common subsequence of characters: order counts, gaps are allowed."""
    from rapidfuzz.distance import LCSseq

    left, right = normalized(answer), normalized(reference)
    return 2 * LCSseq.similarity(left, right) / (len(left) + len(right)) if left or right else 1.0


def other_rows(references: Sequence[str]) -> list[list[int]]:
    """For each round, which other row lends its reference to each row: fixed, and mostly a row of the same kind."""
    order = list(range(len(references)))
    random.Random(OTHERS_SEED).shuffle(order)
    order.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a kind the shuffle stays
    place = {row: at for at, row in enumerate(order)}
    rounds = range(1, min(OTHERS, len(references) - 1) + 1)
    return [[order[(place[row] + step) % len(order)] for row in range(len(references))] for step in rounds]


def content(score: Score, answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Score against the own reference minus the mean against other rows' references; 0 where there is no other row."""
    rounds, found = other_rows(references), []
    for row, answer in enumerate(answers):
        against = [score(answer, references[other[row]]) for other in rounds]
        found.append(score(answer, references[row]) - sum(against) / len(against) if against else 0.0)
    return found


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """For display."""
        if not math.isfinite(self.mean):
            return "not a number"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def facts(self) -> dict[str, float | None]:
        """For JSON, which has no NaN."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


@dataclass(frozen=True)
class Difference:
    """A paired difference with its interval, and the probability of one as large if nothing had changed."""

    estimate: Estimate
    p: float
    test: str

    @property
    def p_text(self) -> str:
        """For display."""
        return "-" if math.isnan(self.p) else "<0.001" if self.p < 0.001 else f"{self.p:.3f}"

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return self.estimate.facts() | {"p": None if math.isnan(self.p) else self.p, "test": self.test}


def mean_interval(values: Any, weights: Any = None) -> Estimate:
    """The (weighted) mean with its bootstrap percentile interval; rows are drawn together with their weights."""
    import numpy as np
    from scipy.stats import bootstrap

    numbers = np.asarray(values, dtype=float)
    shares = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=float)
    mean = float((numbers * shares).sum() / shares.sum()) if np.isfinite(numbers).all() else math.nan
    if math.isnan(mean) or len(numbers) == 1:
        return Estimate(mean, mean, mean)
    found = bootstrap(
        (numbers, shares), lambda drawn, weights, axis: (drawn * weights).sum(axis) / weights.sum(axis), paired=True,
        vectorized=True, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile",
        batch=100, random_state=np.random.default_rng(SEED),
    ).confidence_interval  # fmt: skip
    return Estimate(mean, float(found.low), float(found.high))


def share_interval(values: Any) -> Estimate:
    """The mean of 0/1 values with Wilson's interval, which is right near 0 and 1 too."""
    from scipy.stats import binomtest

    right = round(sum(map(float, values)))
    found = binomtest(right, len(values)).proportion_ci(LEVEL, method="wilson")
    return Estimate(right / len(values), float(found.low), float(found.high))


def paired_difference(before: Any, after: Any, weights: Any = None, shares: bool = False) -> Difference:
    """after - before on the same rows: exact McNemar for 0/1 `shares`, else the paired t-test."""
    import numpy as np
    from scipy.stats import binomtest, ttest_1samp

    first, second = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    change = second - first
    changed = int((change != 0).sum())
    if shares:
        p = float(binomtest(int((change > 0).sum()), changed).pvalue) if changed else 1.0
        return Difference(_share_difference(first, second), p, "exact McNemar")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same change in every row is certain, not imprecise
        weighted = change * np.asarray(1.0 if weights is None else weights)
        p = float(ttest_1samp(weighted, 0.0).pvalue) if changed else 1.0
    return Difference(mean_interval(change, weights), p, "paired t")


def _share_difference(first: Any, second: Any) -> Estimate:
    """Newcombe's interval of a paired difference of shares: both Wilson intervals and the rows' correlation.

    A bootstrap would have no width where every row changed alike, and be too sure.
    """
    import numpy as np

    one, two = share_interval(first), share_interval(second)
    correlation = float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else 0.0

    def width(left: float, right: float) -> float:
        return math.sqrt(max(0.0, left**2 - 2 * correlation * left * right + right**2))

    change = two.mean - one.mean
    low = change - width(two.mean - two.low, one.high - one.mean)
    return Estimate(change, low, change + width(two.high - two.mean, one.mean - one.low))
