"""How sure a number is: bootstrap intervals of means, and paired tests of a difference on the same rows.

Everything is seeded, so the same answers give the same report. Not here: what the numbers mean (verdict).
"""

from __future__ import annotations

from dataclasses import dataclass
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
        return "<0.001" if self.p < 0.001 else f"{self.p:.3f}"


def mean_of(values: Any, weights: Any = None, level: float = 0.95) -> Estimate:
    """The (weighted) mean with its bootstrap percentile interval; rows are drawn, with their weights."""
    import numpy as np

    numbers = np.asarray(values, dtype=float)
    shares = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=float)
    if not len(numbers):
        raise ValueError("no values to average")
    rng, means = np.random.default_rng(SEED), []
    block = max(1, AT_ONCE // len(numbers))
    for first in range(0, RESAMPLES, block):
        drawn = rng.integers(len(numbers), size=(min(block, RESAMPLES - first), len(numbers)))
        means.append((numbers[drawn] * shares[drawn]).sum(axis=1) / shares[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float((numbers * shares).sum() / shares.sum()), float(low), float(high), level)


def difference(before: Any, after: Any, weights: Any = None, level: float = 0.95) -> Difference:
    """after - before on the same rows: exact McNemar for 0/1 scores, else a sign-flip permutation test."""
    import numpy as np

    first, second = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    estimate = mean_of(second - first, weights, level)
    if weights is None and set(np.unique(np.concatenate([first, second]))) <= {0.0, 1.0}:
        return Difference(estimate, mcnemar(int((second > first).sum()), int((first > second).sum())), "exact McNemar")
    change = (second - first) if weights is None else (second - first) * np.asarray(weights, dtype=float)
    return Difference(estimate, sign_flip(change), "sign-flip permutation")


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
