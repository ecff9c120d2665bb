"""How near an answer is to its reference, row by row and character by character, and how much of that is content.

Chinese has no spaces between words, so characters are counted, in English too. White space and thinking do not count.

Content: a model can learn what answers look like without learning which one belongs where; trained on shuffled answers
its loss falls and its F1 rises. So each answer is also scored against the references of other rows (of its kind: with
Chinese characters or without), and only what it scores beyond that is content.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

THINKING = re.compile(r"(?s)^\s*<think>.*?(</think>|\Z)|^((?!<think>).)*?</think>")  # or the prompt opened it
CJK = re.compile(r"[\u3400-\u9fff]")
OTHERS = 5  # references of other rows that each answer is scored against
DEALS, MOST_DEALT = 79, 250  # permutations of the answers, and among how many rows
SEED = 5
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
    if not references or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers for {len(references)} references")
    return sum(map(exact, answers, references)) / len(references)


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
    random.Random(SEED).shuffle(order)
    order.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a kind the shuffle stays
    place = {row: at for at, row in enumerate(order)}
    rounds = range(1, min(OTHERS, len(references) - 1) + 1)
    return [[order[(place[row] + step) % len(order)] for row in range(len(references))] for step in rounds]


def content(score: Score, answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Score against the own reference minus the mean against other rows' references; 0 where there is no other row."""
    rounds = other_rows(references)
    if not rounds:
        return [0.0] * len(answers)
    found = []
    for row, answer in enumerate(answers):
        against = [score(answer, references[other[row]]) for other in rounds]
        found.append(score(answer, references[row]) - sum(against) / len(against))
    return found


def chance_of(score: Score, answers: Sequence[str], references: Sequence[str]) -> float:
    """One-sided p of the mean score if no answer belongs to its row: the answers are permuted within their kind."""
    rng, known = random.Random(SEED), cache(lambda answer, row: score(answers[answer], references[row]))
    rows = rng.sample(range(len(answers)), min(len(answers), MOST_DEALT))
    kinds = [[row for row in rows if bool(CJK.search(references[row])) == kind] for kind in (False, True)]
    own, as_good = sum(known(row, row) for row in rows), 1
    for _ in range(DEALS):
        dealt = [pair for kind in kinds for pair in zip(rng.sample(kind, len(kind)), kind, strict=True)]
        as_good += sum(known(*pair) for pair in dealt) >= own - 1e-9
    return as_good / (DEALS + 1)
