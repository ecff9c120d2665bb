"""The pre-training corpus as a stream: draws the kinds of text in fixed shares; how each is written is not here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from nbutils.corpus import dialogues, stories

SHARES: dict[Callable[[random.Random], str], int] = {
    dialogues.shop: 28,
    dialogues.questions: 16,
    dialogues.key_points: 8,
    dialogues.translation: 8,
    dialogues.numerals: 5,
    dialogues.sums: 4,
    dialogues.repetition: 8,
    dialogues.small_talk: 2,
    stories.story: 10,
    stories.facts: 5,
    stories.counting: 3,
    stories.meanings: 3,
}


def pretraining_texts(count: int, seed: int) -> Iterator[str]:
    """Yield `count` documents; the same seed gives the same text on every machine."""
    rng = random.Random(seed)
    kinds, weights = list(SHARES), list(SHARES.values())
    for _ in range(count):
        yield rng.choices(kinds, weights)[0](rng)
