"""Scores of answers against their references, their means with intervals, and paired differences.

Scores count characters, as Chinese has no spaces. Content: trained on shuffled answers a model learns what answers look
like, its loss falls and its F1 rises. So only what an answer scores beyond the references of other rows is content.
"""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbutils.data.texts import CJK

THINKING = re.compile(r"(?s)^\s*<think>.*?(</think>|\Z)|^((?!<think>).)*?</think>")  # or the prompt opened it
OTHERS = 5  # references of other rows that each answer is scored against
OTHERS_SEED = 5
LEVEL = 0.95  # of every interval: in the table, the figure, the texts and the verdict
RESAMPLES = 2_000
SEED = 2026
Score = Callable[[str, str], float]


def without_thinking(text: str) -> str:
    """The text without the thinking before it (unfinished thinking: nothing is left)."""
    return THINKING.sub("", text, count=1).strip()


def normalized(text: str) -> str:
    """The characters that are counted: full width and half width alike, and no white space."""
    return "".join(unicodedata.normalize("NFKC", without_thinking(text)).split())


def exact(answer: str, reference: str) -> float:
    """1 if the answer is the reference, surrounding white space aside, else 0."""
    return float(without_thinking(answer) == without_thinking(reference))


def character_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the characters, in any order."""
    left = normalized(answer)
    right = normalized(reference)
    shared = (Counter(left) & Counter(right)).total()
    return _harmonic_mean(shared, left, right)


def rouge_l(answer: str, reference: str) -> float:
    """The same of the longest common subsequence of characters: order counts, gaps are allowed."""
    from rapidfuzz.distance import LCSseq

    left = normalized(answer)
    right = normalized(reference)
    return _harmonic_mean(LCSseq.similarity(left, right), left, right)


def _harmonic_mean(shared: int, left: str, right: str) -> float:
    characters = len(left) + len(right)
    return 2 * shared / characters if characters else 1.0


def unfinished(answer: str) -> float:
    """1 if the answer was cut off while the model was thinking, else 0."""
    return float(answer.lstrip().startswith("<think>") and "</think>" not in answer)


def content(score: Score, answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Score against the own reference minus the mean against other rows' references; 0 where there is no other row.

    Which rows lend theirs is fixed: the next ones in a shuffled circle, in which rows of one language stand together.
    """
    circle = list(range(len(references)))
    random.Random(OTHERS_SEED).shuffle(circle)
    circle.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a language the shuffle stays
    others = min(OTHERS, len(references) - 1)
    contents = [0.0] * len(references)
    if not others:
        return contents
    twice_around = circle * 2
    for place, row in enumerate(circle):
        first = place + 1
        lenders = twice_around[first : first + others]
        against = [score(answers[row], references[lender]) for lender in lenders]
        own = score(answers[row], references[row])
        contents[row] = own - sum(against) / others
    return contents


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text is; empty if it is none."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def right_fields(answer: str, reference: str) -> dict[str, bool]:
    """Whether each field of the reference is right in an answer, both as JSON objects; empty if the reference is none.

    Example: right = list(map(right_fields, result.texts, result.evaluator.references))
    """
    given = json_object(without_thinking(answer)).items()
    return {field: (field, value) in given for field, value in json_object(reference).items()}


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """For display."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference with its interval, and the probability of one as large if nothing had changed."""

    p: float
    test: str

    @property
    def p_text(self) -> str:
        """For display."""
        return "<0.001" if self.p < 0.001 else f"{self.p:.3f}"


def estimate_share(values: Sequence[float]) -> Estimate:
    """The mean of values that are 0 or 1, with Wilson's interval: right near 0 and 1 too."""
    from scipy.stats import binomtest

    rows = len(values)
    right = round(sum(values))
    interval = binomtest(right, rows).proportion_ci(LEVEL, method="wilson")
    return Estimate(right / rows, float(interval.low), float(interval.high))


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The (weighted) mean with the interval of a bootstrap, which draws rows together with their weights."""
    from scipy.stats import bootstrap

    if weights is None:
        weights = [1.0] * len(values)
    mean = float(np.average(values, weights=weights))
    if len(values) == 1 or math.isnan(mean):
        return Estimate(mean, mean, mean)
    interval = bootstrap(
        (values, weights),
        lambda drawn, weight, axis: (drawn * weight).sum(axis) / weight.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=100,
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high))


def paired_difference(
    before: Sequence[float], after: Sequence[float], weights: Sequence[float] | None = None
) -> Difference:
    """after - before on the same rows, with a paired t-test."""
    from scipy.stats import ttest_1samp

    change = np.subtract(after, before)
    p = 1.0
    if change.any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same change in every row is certain, not imprecise
            p = float(ttest_1samp(change if weights is None else change * weights, 0.0).pvalue)
    mean = estimate(change.tolist(), weights)
    return Difference(mean.mean, mean.low, mean.high, p, "paired t")


def paired_share_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """The same of values that are 0 or 1: exact McNemar, and the interval of Bonett and Price.

    A bootstrap would have no width where every row changed alike, and be too sure: so a change each way is added.
    """
    from scipy.stats import binomtest, norm

    change = np.subtract(after, before)
    risen = int(np.count_nonzero(change > 0))
    fallen = int(np.count_nonzero(change < 0))
    p = 1.0
    if risen or fallen:
        p = float(binomtest(risen, risen + fallen).pvalue)
    rows = len(change) + 2
    up = (risen + 1) / rows
    down = (fallen + 1) / rows
    middle = up - down
    error = math.sqrt((up + down - middle**2) / rows)
    margin = float(norm.ppf((1 + LEVEL) / 2)) * error
    return Difference(
        mean=float(change.mean()),
        low=max(-1.0, middle - margin),
        high=min(1.0, middle + margin),
        p=p,
        test="exact McNemar",
    )
