"""How near an answer is to the one that was wanted, row by row, character by character.

Chinese has no spaces between words, so characters are counted, in English too: that keeps one measure for mixed data.
White space never counts, nor does what a model thought before it spoke. Not here: means and intervals (statistics).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from nbutils.data.text import mask
from nbutils.evaluation.answers import Message

THINKING = re.compile(r"(?s)^\s*<think>.*?(</think>|\Z)|^((?!<think>).)*?</think>")  # or the prompt opened it


def spoken(text: str) -> str:
    """What was said aloud: the text without a thought before it (an unfinished thought says nothing)."""
    return THINKING.sub("", text, count=1).strip()


def is_unfinished(text: str) -> bool:
    """Whether the text is a thought that was cut off before anything was said."""
    return text.lstrip().startswith("<think>") and "</think>" not in text


def characters(text: str) -> str:
    """The text as it is counted: full width and half width alike, and no white space."""
    return "".join(unicodedata.normalize("NFKC", spoken(text)).split())


def is_exact(answer: str, reference: str) -> bool:
    """Whether the answer is the reference, surrounding white space aside."""
    return spoken(answer) == spoken(reference)


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers equal to their reference, surrounding white space aside."""
    if not references or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers for {len(references)} references")
    return sum(map(is_exact, answers, references)) / len(references)


def character_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the characters, whatever their order."""
    left, right = characters(answer), characters(reference)
    return _f1((Counter(left) & Counter(right)).total(), len(left), len(right))


def rouge_l(answer: str, reference: str) -> float:
    """The same of the longest common subsequence of characters: order counts, gaps are allowed."""
    left, right = characters(answer), characters(reference)
    return _f1(common_subsequence(left, right), len(left), len(right))


def _f1(shared: int, left: int, right: int) -> float:
    if left == 0 and right == 0:
        return 1.0
    return 2 * shared / (left + right)


def common_subsequence(left: str, right: str) -> int:
    """The length of the longest common subsequence: one column of the table is one long integer (Hyyrö 2004)."""
    if left == right:
        return len(left)
    places: dict[str, int] = {}
    for place, letter in enumerate(left):
        places[letter] = places.get(letter, 0) | 1 << place
    everywhere = (1 << len(left)) - 1
    column = everywhere  # a zero bit is a step of the table's last row
    for letter in right:
        hits = column & places.get(letter, 0)
        column = ((column + hits) | (column - hits)) & everywhere
    return len(left) - column.bit_count()


def before_after_table(
    questions: Sequence[list[Message]], references: Sequence[str], columns: dict[str, Sequence[str]], rows: int = 6
) -> list[dict[str, str]]:
    """Rows for display: the question, what was wanted, and each model's answer with a tick or a cross."""
    table = []
    for index in range(min(rows, len(references))):
        row = {"question": mask(str(questions[index][-1]["content"])), "wanted": mask(references[index])}
        for name, answers in columns.items():
            right = "✓" if is_exact(answers[index], references[index]) else "✗"
            row[name] = f"{right} {mask(answers[index].strip())}"
        table.append(row)
    return table
