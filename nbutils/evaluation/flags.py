"""What looks wrong in an evaluation whatever its verdict: answers that never end, losses that are no number, and so on.

Not here: whether the tuning helped (verdict).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from nbutils.evaluation import statistics
from nbutils.evaluation.scores import spoken

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

FEW = 20  # rows; an interval from fewer is rough


def find_flags(base: Result, tuned: Result, adapter: Result | None) -> list[str]:
    """Everything that is wrong, each in a sentence."""
    found = [_few(tuned), _no_number(base, tuned), _cut(base), _endless(tuned), _repeated(tuned)]
    return [flag for flag in [*found, merge_gap(adapter, tuned) if adapter else ""] if flag]


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
    if (stops := base.mean("stopped")) >= 0.9:
        return ""
    return (
        f"only {stops:.0%} of {base.name}'s answers end by themselves, the others were cut off and so score less: "
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


def merge_gap(adapter: Result, merged: Result) -> str:
    """In what the merged model is not the adapter it was made from; "" if rounding explains all."""
    loss = abs(merged.loss - adapter.loss)
    if loss > 0.02 + 0.05 * adapter.loss:
        return f"merged is not the adapter: loss {merged.loss:.3f} against {adapter.loss:.3f} on the same rows"
    change = statistics.difference(adapter.scores["rouge_l"], merged.scores["rouge_l"])
    if change.p < 0.01:
        return f"merged is not the adapter: ROUGE-L differs by {change.estimate.text('+.3f')}"
    return ""
