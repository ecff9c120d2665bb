"""Whether two rows are one: the exact comparison of the few pairs that look alike.

System text, tools, numbers and symbols must be equal, and the character 3-grams of the questions and of the answers
overlap (Jaccard) by at least `least` each, by 0.9 where an answer is short. They are two rows all the same where the
difference is a negation, a name, words that question and answer exchange alike (a form filled in), or, under an answer
of a word or two, any exchanged word: the label may hang on it. Not here: finding the pairs (near).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nbutils.data.letters import MARK, compared, numbers_and_symbols

LABEL, SHORT = 16, 150  # letters: below the first an answer is a label; a Chinese character weighs as much as three
CLOSE, FIRST_CJK = 0.9, 0x3040
CJK = "\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"[{CJK}]|[^\W\d_{CJK}]+(?:['’][^\W\d_{CJK}]+)?")
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+")  # in a sentence, not at its beginning
NEGATIONS = {"not", "no", "never", "without", "cannot", "nor", "none", "neither", *"不没无非未别否"}


class Text(NamedTuple):
    """What is compared of a row: what must be equal, the question with all earlier turns, the answer."""

    fixed: str
    question: str
    answer: str


def text_of(messages: Sequence[dict[str, Any]], tools: Any = None) -> Text:
    """The parts of a row that are compared."""
    first = messages[0]["role"] == "system"
    fixed = messages[0]["content"] if first else ""
    said = [_said(message) for message in messages[first:]]
    return Text(f"{fixed}{MARK}{tools}" if tools else fixed, "\n".join(said[:-1]), said[-1])


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"{message['content'] or ''}\n{calls}" if calls else message["content"]


def similarity(one: Text, other: Text, least: float) -> float:
    """The smaller overlap of questions and of answers where the two rows are one, 0 where they are not."""
    sides = ((one.answer, other.answer), (one.question, other.question))
    if one.fixed != other.fixed or any(_traits(a).counted != _traits(b).counted for a, b in sides):
        return 0.0
    answers, questions = (_overlap(a, b) for a, b in sides)
    if answers == questions == 1:
        return 1.0
    weight = min(_traits(one.answer).weight, _traits(other.answer).weight)
    close = max(CLOSE, least)
    if answers < (close if weight < SHORT else least) or questions < (close if weight < LABEL else least):
        return 0.0
    return 0.0 if _another_case(one, other, weight < LABEL) else min(answers, questions)


def _overlap(one: str, other: str) -> float:
    """The 3-grams two texts share, out of all they have."""
    first, second = _traits(one).grams, _traits(other).grams
    both = np.sort(np.concatenate([first, second]))
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared) if len(both) else float(one == other)


def _another_case(one: Text, other: Text, label: bool) -> bool:
    """Whether the words in which two rows differ make them two cases and not two copies."""
    gone, come = _lost(one.question, other.question), _lost(other.question, one.question)
    left, new = _lost(one.answer, other.answer), _lost(other.answer, one.answer)
    if any(word in NEGATIONS or word.endswith(("n't", "n’t")) for word in gone | come | left | new):
        return True
    if gone and come and (label or (gone & _names(one.question) and come & _names(other.question))):
        return True
    return bool(gone or come) and _shared(gone, left) and _shared(come, new)


def _shared(one: set[str], other: set[str]) -> bool:
    """Whether question and answer exchange a word alike, or neither has one to exchange."""
    return bool(one & other) or not (one or other)


def _lost(one: str, other: str) -> set[str]:
    """The words of one text (Chinese: characters) that the other has not, or not so often."""
    return set(_words(one) - _words(other))


@functools.lru_cache(maxsize=64)
def _words(text: str) -> Counter[str]:
    return Counter(WORD.findall(unicodedata.normalize("NFKC", text).lower()))


def _names(text: str) -> set[str]:
    return {name.lower() for name in NAME.findall(text)}


class _Traits(NamedTuple):
    """The numbers and symbols of a text, its 3-grams, each once, and how many letters it weighs."""

    counted: list[str]
    grams: np.ndarray
    weight: int


@functools.lru_cache(maxsize=64)  # the first row of a bucket is compared with many
def _traits(text: str) -> _Traits:
    codes = compared(f"{MARK}{text}{MARK}")
    kept = codes[codes != 0].astype(np.uint64)  # the ends count as a character: one of two letters has 3-grams as well
    grams = np.sort((kept[:-2] << np.uint64(32)) | (kept[1:-1] << np.uint64(16)) | kept[2:])
    grams = grams[np.concatenate([[True], grams[1:] != grams[:-1]])] if len(grams) else grams
    weight = len(kept) - 2 + 2 * int(np.count_nonzero(kept >= FIRST_CJK))
    return _Traits(numbers_and_symbols(codes), grams, weight)
