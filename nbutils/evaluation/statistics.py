"""How sure a number is: intervals of means and shares, and paired tests of a difference on the same rows.

Shares (so many of so many rows) get Wilson's interval, which 0 of 120 does not fool; everything else is bootstrapped.
All of it is seeded, so the same answers give the same report. Not here: what the numbers mean (verdict).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Values = np.ndarray[Any, np.dtype[np.float64]]

RESAMPLES, FLIPS, SEED = 2_000, 10_000, 2026
AT_ONCE = 2**22  # numbers drawn together, so that memory does not grow with the rows
EXACT_UP_TO = 13  # pairs whose signs can all be tried


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval that covers the true one in `level` of all cases."""

    mean: float
    low: float
    high: float
    level: float = 0.95

    def text(self, form: str = ".3f") -> str:
        """For people."""
        if not math.isfinite(self.mean):
            return "not a number"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class Difference:
    """A paired difference: its mean with interval, and how probable one as large is if nothing had changed."""

    estimate: Estimate
    p: float
    test: str

    @property
    def p_text(self) -> str:
        """For people; a permutation test cannot tell smaller ones apart."""
        return "-" if math.isnan(self.p) else "<0.001" if self.p < 0.001 else f"{self.p:.3f}"


NO_NUMBER = Estimate(math.nan, math.nan, math.nan)


def mean_of(values: Any, weights: Any = None, level: float = 0.95) -> Estimate:
    """The (weighted) mean with its bootstrap percentile interval; rows are drawn, with their weights."""
    import numpy as np

    numbers = np.asarray(values, dtype=float)
    shares = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=float)
    if not len(numbers):
        raise ValueError("no values to average")
    if not np.isfinite(numbers).all():
        return NO_NUMBER
    rng, means = np.random.default_rng(SEED), []
    block = max(1, AT_ONCE // len(numbers))
    for first in range(0, RESAMPLES, block):
        drawn = rng.integers(len(numbers), size=(min(block, RESAMPLES - first), len(numbers)))
        means.append((numbers[drawn] * shares[drawn]).sum(axis=1) / shares[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float((numbers * shares).sum() / shares.sum()), float(low), float(high), level)


def share_of(values: Any, level: float = 0.95) -> Estimate:
    """The mean of 0/1 values with Wilson's interval, which is right near 0 and 1 too."""
    count, share = len(values), sum(map(float, values)) / len(values)
    z2 = z_of(level) ** 2 / count
    middle, half = share + z2 / 2, math.sqrt(z2 * share * (1 - share) + z2**2 / 4)
    return Estimate(share, max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2)), level)


def z_of(level: float) -> float:
    """How many standard errors either side an interval of this level reaches."""
    return NormalDist().inv_cdf((1 + level) / 2)


def difference(before: Any, after: Any, weights: Any = None, level: float = 0.95, shares: bool = False) -> Difference:
    """after - before on the same rows: exact McNemar for 0/1 `shares`, else a sign-flip permutation test."""
    import numpy as np

    first, second = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if shares:
        p = mcnemar(int((second > first).sum()), int((first > second).sum()))
        return Difference(_between_shares(first, second, level), p, "exact McNemar")
    change = second - first
    if not np.isfinite(change).all():
        return Difference(NO_NUMBER, math.nan, "none")
    weighed = change if weights is None else change * np.asarray(weights, dtype=float)
    return Difference(mean_of(change, weights, level), sign_flip(weighed), "sign-flip permutation")


def _between_shares(first: Values, second: Values, level: float) -> Estimate:
    """Newcombe's interval of a paired difference of shares: the Wilson intervals of both, and how they go together."""
    import numpy as np

    one, two = share_of(first, level), share_of(second, level)
    together = float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else 0.0

    def reach(left: float, right: float) -> float:
        return math.sqrt(max(0.0, left**2 - 2 * together * left * right + right**2))

    change = two.mean - one.mean
    low = change - reach(two.mean - two.low, one.high - one.mean)
    return Estimate(change, low, change + reach(two.high - two.mean, one.mean - one.low), level)


def mcnemar(better: int, worse: int) -> float:
    """Two-sided exact p: of the rows that changed, each would be a fair coin if nothing had been learnt."""
    changed, fewer = better + worse, min(better, worse)
    term, tail = 1, 1
    for k in range(1, fewer + 1):
        term = term * (changed - k + 1) // k
        tail += term
    return min(1.0, 2 * tail / 2**changed)


def sign_flip(change: Values) -> float:
    """Two-sided p of a mean change: how often random signs make a sum as large; all signs where there are few rows."""
    import numpy as np

    change = change[change != 0]
    if not len(change):
        return 1.0
    seen = abs(change.sum()) * (1 - 1e-12)
    if len(change) <= EXACT_UP_TO:
        bits = (np.arange(2 ** len(change))[:, None] >> np.arange(len(change))) & 1
        return float((abs((1 - 2 * bits) @ change) >= seen).mean())
    rng, hits = np.random.default_rng(SEED), 0
    block = max(1, AT_ONCE // len(change))
    for first in range(0, FLIPS, block):
        signs = rng.integers(0, 2, size=(min(block, FLIPS - first), len(change)), dtype=np.int8) * 2 - 1
        hits += int((abs(signs @ change) >= seen).sum())
    return (hits + 1) / (FLIPS + 1)


def standard_error(values: Any) -> float:
    """Of the mean."""
    import numpy as np

    numbers = np.asarray(values, dtype=float)
    return float(numbers.std(ddof=1) / np.sqrt(len(numbers))) if len(numbers) > 1 else float("inf")
