"""What looks wrong in an evaluation whatever its verdict: answers that never end, losses that are no number, and so on.

Not here: whether the tuning helped (verdict).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from nbutils.evaluation.scores import spoken

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

FEW = 20  # rows; an interval from fewer is rough


def find_flags(base: Result, tuned: Result) -> list[str]:
    """Everything that is wrong, each in a sentence."""
    found = [_few(tuned), _no_number(base, tuned), _cut(base), _endless(tuned), _repeated(tuned)]
    return [flag for flag in found if flag]


def _few(tuned: Result) -> str:
    rows = len(tuned.answers)
    return f"evaluation rows: only {rows}; intervals from so few are rough, 100 rows make them useful" * (rows < FEW)


def _no_number(*results: Result) -> str:
    for result in results:
        broken = sum(not math.isfinite(row.total) for row in result.losses)
        if broken:
            rows = f"{broken} of {len(result.losses)} rows"
            return f"the loss of {result.name} is not a number on {rows}: float16 overflows, bf16 or fp32 do not"
    return ""


def _cut(base: Result) -> str:
    """Cut off before it was as long as a wanted answer: whether it would have become one is not known."""
    longest, rows = max(map(len, base.references)), len(base.answers)
    short = sum(not answer.stopped and len(answer.text) < longest for answer in base.answers)
    return (short > rows / 10) * (
        f"{short} of {rows} of {base.name}'s answers were cut off while shorter than a wanted one, and so score less: "
        f"raise evaluation.max_new_tokens before you believe the difference"
    )


def _endless(tuned: Result) -> str:
    if (stops := tuned.mean("stopped")) >= 0.9:
        return ""
    return f"only {stops:.0%} of the answers end by themselves: no stop token learnt, or max_new_tokens too small"


def _repeated(tuned: Result) -> str:
    (text, count), rows = _most_common(tuned.texts), len(tuned.answers)
    often = count > 3 and count > max(rows / 4, 2 * _most_common(tuned.references)[1])
    return f"{count} of {rows} answers are the same: {text[:80] or '(nothing)'}" if often else ""


def _most_common(texts: list[str]) -> tuple[str, int]:
    return Counter(map(spoken, texts)).most_common(1)[0]
