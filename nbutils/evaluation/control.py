"""The control: how well an answer would do as the answer to another row.

A model can learn what answers look like without learning which one belongs where: trained on shuffled answers its loss
falls and its F1 rises. So each answer is also held against other rows' references, and only what it scores beyond that
counts as content.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

OTHERS = 5  # references of other rows each answer is held against
SEED = 5
CJK = re.compile(r"[\u3400-\u9fff]")


def other_rows(references: Sequence[str], count: int = OTHERS) -> list[list[int]]:
    """For each of `count` rounds, which other row lends its reference to each row: fixed, and one of its language."""
    order = list(range(len(references)))
    random.Random(SEED).shuffle(order)
    order.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a language the shuffle stays
    place = {row: at for at, row in enumerate(order)}
    rounds = range(1, min(count, len(references) - 1) + 1)
    return [[order[(place[row] + step) % len(order)] for row in range(len(references))] for step in rounds]


def beyond_others(score: Callable[[str, str], float], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Own score minus the mean score against the other rows; 0 where there is no other row."""
    rounds = other_rows(references)
    if not rounds:
        return [0.0] * len(answers)
    found = []
    for row, answer in enumerate(answers):
        against = [score(answer, references[other[row]]) for other in rounds]
        found.append(score(answer, references[row]) - sum(against) / len(against))
    return found
