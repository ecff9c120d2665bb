"""What one request took, and what many of them at once come to.

Not here: making requests (load) and showing the numbers (board).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

POINTS = {50: 1, 90: 10, 99: 100}  # percentiles, and the requests from which on they mean something
Spread = dict[str, float]


@dataclass(frozen=True)
class Request:
    """One request: seconds until its first token and until its last, and its tokens; or what went wrong."""

    first: float | None
    seconds: float
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Level:
    """One engine with so many requests in flight."""

    engine: str
    concurrency: int
    requests: int
    errors: int
    first_error: str
    seconds: float
    tokens_per_second: float
    ttft_ms: Spread | None  # until the first token; None where the answer comes whole
    tpot_ms: Spread | None  # for each token after the first
    latency_ms: Spread | None
    during: dict[str, float] = field(default_factory=dict)

    @property
    def dead(self) -> bool:
        """Whether there is nothing but errors."""
        return self.errors == self.requests > 0

    def __str__(self) -> str:
        wrong = f", {self.errors} ERRORS ({self.first_error})" if self.errors else ""
        last = f", half of the answers within {self.latency_ms['p50'] / 1000:.2f} s" if self.latency_ms else ""
        return f"{self.engine}, {self.concurrency} at a time: {self.tokens_per_second:,.1f} tokens/s{last}{wrong}"


def summarise(
    engine: str,
    concurrency: int,
    requests: Sequence[Request],
    seconds: float,
    during: dict[str, float] | None = None,
) -> Level:
    """The numbers of a level; a request that failed counts as an error and in nothing else."""
    good = [request for request in requests if not request.error]
    wrong = [request.error for request in requests if request.error]
    streamed = [(one, one.first) for one in good if one.first is not None]
    return Level(
        engine, concurrency, len(requests), len(wrong), wrong[0] if wrong else "", round(seconds, 3),
        round(sum(one.tokens for one in good) / seconds, 1),
        spread([first for _, first in streamed]),
        spread([(one.seconds - first) / (one.tokens - 1) for one, first in streamed if one.tokens > 1]),
        spread([one.seconds for one in good]),
        during or {},
    )  # fmt: skip


def spread(seconds: Sequence[float]) -> Spread | None:
    """Milliseconds that half, nine of ten and all but one of a hundred stay below; p90 from 10 on, p99 from 100 on."""
    import numpy as np

    if not seconds:
        return None
    told = [point for point, least in POINTS.items() if len(seconds) >= least]
    values = np.percentile(np.asarray(seconds) * 1000, told)
    return {f"p{point}": round(float(value), 2) for point, value in zip(told, values, strict=True)}
