"""The control: how well an answer would do as the answer to another row.

A model can learn what answers look like without learning which one belongs where: trained on shuffled answers its loss
falls and its F1 rises. So each answer is also held against other rows' references, and only what it scores beyond that
counts as content. Rows are compared with rows of their kind, which is coarse: with Chinese characters or without. Where
answers come in several other languages, the right language alone counts as some content.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache

OTHERS = 5  # references of other rows each answer is held against
DEALS, MOST = 79, 250  # how often answers are dealt out anew, and among how many rows
SEED = 5
CJK = re.compile(r"[\u3400-\u9fff]")


def other_rows(references: Sequence[str], count: int = OTHERS) -> list[list[int]]:
    """For each of `count` rounds, which other row lends its reference to each row: fixed, mostly one of its kind."""
    order = list(range(len(references)))
    random.Random(SEED).shuffle(order)
    order.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a kind the shuffle stays
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


def chance_of(score: Callable[[str, str], float], answers: Sequence[str], references: Sequence[str]) -> float:
    """How probable these answers' mean score is if none belongs to its row: they are dealt out anew, one-sided p."""
    rng, known = random.Random(SEED), cache(lambda answer, row: score(answers[answer], references[row]))
    rows = rng.sample(range(len(answers)), min(len(answers), MOST))
    kinds = [[row for row in rows if bool(CJK.search(references[row])) == kind] for kind in (False, True)]
    own, as_good = sum(known(row, row) for row in rows), 1
    for _ in range(DEALS):
        dealt = [pair for kind in kinds for pair in zip(rng.sample(kind, len(kind)), kind, strict=True)]
        as_good += sum(known(*pair) for pair in dealt) >= own - 1e-9
    return as_good / (DEALS + 1)
