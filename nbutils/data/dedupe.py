"""Rows compared: exact copies, the same question, and near duplicates by MinHash.

Case, width, blanks and punctuation do not count; numbers and symbols (`+ - * / % = < > # & | $ …`) do. Two rows are
near duplicates if their system texts, tools, numbers and symbols are equal, and the character 3-grams of the questions
and of the answers overlap (Jaccard) by at least `near` each.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from nbutils.data.rows import ChatRow, Json

SEPARATOR = "\x1e"  # a control character, which no checked row holds: it stands between texts
NUMERALS = "0123456789〇零一二两三四五六七八九十百千万亿"
SYMBOLS = "-*/%#&\\^"  # Unicode takes them for punctuation; mathematical signs and currencies count as well
UNITS = 1 << 16  # of UTF-16
PERMUTATIONS = 64  # four to a band: a pair that overlaps by 0.8 shares a band in 99.9 of 100 cases
SEED = 42
BATCH_CHARACTERS = 1 << 15  # of rows hashed at once; one takes 25 bytes
TEMPLATE = 8  # more rows than this that are similar to one row are a template filled in, not copies
_NUMBER = re.compile(f"[{NUMERALS}]+")
_LETTERS = r"[^\W\d_²³¹\u2070-\u209f\u2150-\u218f\u2460-\u249b\U00010000-\U0010ffff]{2}"
_HYPHEN = re.compile(f"(?<={_LETTERS})[-\uff0d](?={_LETTERS})")  # of `well-known`; the minus of `x - y` counts
_json = functools.partial(
    json.dumps,
    sort_keys=True,
    ensure_ascii=False,
    default=str,
)


class RowText(NamedTuple):
    """What is compared of a row: what has to be equal, the question with all earlier turns, the answer."""

    exact: str
    question: str
    answer: str


def digests(row: ChatRow, numerals: bool) -> tuple[int, int]:
    """Of the whole row as it is, and of its question as questions are compared; with `numerals` 3.5 is not 35."""
    fields = [_field(message) for message in row.messages]
    prompt = SEPARATOR.join(fields[:-1])
    if row.tools:
        prompt += f"\x1d{_json(row.tools)}"
    compared = _decoded(normalized(prompt))
    question = compared.replace("\0", "")
    if not question or question[-1] <= "\x1f":  # punctuation alone: it is compared as it is
        question = prompt
    if numerals:
        question += SEPARATOR.join(_NUMBER.findall(compared))
    whole = f"{prompt}{SEPARATOR}{fields[-1]}"
    return _hash(whole), _hash(question)


def _field(message: Json) -> str:
    extras = dict(message)
    role = extras.pop("role")
    content = extras.pop("content")
    text = f"{role}\x1f{content}"
    return f"{text}\x1f{_json(extras)}" if extras else text


def _hash(text: str) -> int:
    content = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(digest[:8], "big")


def normalized(text: str) -> np.ndarray:
    """Each UTF-16 unit of a text as it is compared, 0 where it does not count."""
    if "-" in text or "\uff0d" in text:
        text = _HYPHEN.sub("", text)
    units = np.frombuffer(text.encode("utf-16-le"), np.uint16)
    return _compared_table().take(units)


def _decoded(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-16-le", "surrogatepass")


@functools.cache
def _compared_table() -> np.ndarray:
    """What each UTF-16 unit is compared as."""
    return np.array([_compared_as(chr(code)) for code in range(UNITS)], np.uint16)


@functools.cache
def _exact_table() -> np.ndarray:
    """Whether each UTF-16 unit is a numeral or symbol."""
    known = NUMERALS + SYMBOLS + SEPARATOR
    return np.array([unit in known or unicodedata.category(unit) in ("Sm", "Sc") for unit in map(chr, range(UNITS))])


def _compared_as(character: str) -> int:
    """The code that a character is compared as; 0 if it does not count."""
    simple = unicodedata.normalize("NFKC", character).lower()
    if len(simple) != 1 or ord(simple) >= UNITS:
        simple = character
    category = unicodedata.category(simple)
    if simple in SYMBOLS or "\x1d" <= character < " ":
        return ord(simple)
    if category[0] in "PZC" and category != "Cs":  # Cs: half of a character beyond the table, such as an emoji
        return 0
    return ord(simple)


def row_text(messages: list[Json], tools: Any = None) -> RowText:
    """What is compared of a row."""
    texts = [f"{message['content']}{message.get('tool_calls', '')}" for message in messages]
    system = texts.pop(0) if messages[0]["role"] == "system" else ""
    answer = texts.pop()
    return RowText(
        exact=f"{system}{SEPARATOR}{tools or ''}",
        question="\n".join(texts),
        answer=answer,
    )


def _numbers_and_symbols(codes: np.ndarray) -> list[str]:
    """The numbers and symbols of each text between separators."""
    exact = _exact_table().take(codes)
    kept = np.where(exact, codes, ord(" "))
    texts = _decoded(kept).split(SEPARATOR)
    words = [text.split() for text in texts]
    return [" ".join(of_text) for of_text in words]


def _trigrams(codes: np.ndarray) -> np.ndarray:
    """Each three codes that count and follow each other, as one number."""
    counting = codes[codes != 0]
    units = counting.astype(np.uint64)
    first = units[:-2] << np.uint64(32)
    second = units[1:-1] << np.uint64(16)
    third = units[2:]
    return first | second | third


def similarity(row: RowText, other: RowText) -> float:
    """The smaller overlap of questions and of answers; 0 where something differs that has to be equal."""
    if row.exact != other.exact:
        return 0.0
    return min(_overlap(row.question, other.question), _overlap(row.answer, other.answer))


def _overlap(text: str, other: str) -> float:
    """The share of 3-grams that two texts have in common; 0 if their numbers or symbols differ."""
    codes = normalized(f"{SEPARATOR}{text}{SEPARATOR}")
    other_codes = normalized(f"{SEPARATOR}{other}{SEPARATOR}")
    if _numbers_and_symbols(codes) != _numbers_and_symbols(other_codes):
        return 0.0
    grams = _trigrams(codes)
    other_grams = _trigrams(other_codes)
    either = np.union1d(grams, other_grams)
    both = np.intersect1d(grams, other_grams)
    return len(both) / len(either) if len(either) else 1.0


def find_repeated(
    near: float,
    count: int,
    text_of: Callable[[int], RowText],
) -> dict[int, int]:
    """Which of so many rows to leave out, each with the row that is kept for it, an earlier one."""
    signatures = _signatures(map(text_of, range(count)))
    candidates = _candidates(signatures, near)
    same: dict[int, int] = {}
    similar: dict[int, int] = {}
    for row in np.flatnonzero(candidates >= 0).tolist():
        kept = int(candidates[row])
        kept = same.get(kept, kept)
        overlap = similarity(text_of(row), text_of(kept))
        if overlap == 1:
            same[row] = kept
            continue
        if kept in similar:
            kept = similar[kept]
            overlap = similarity(text_of(row), text_of(kept))
        if overlap >= near:
            similar[row] = kept
    rows_like = Counter(similar.values())
    repeated = {row: kept for row, kept in similar.items() if rows_like[kept] <= TEMPLATE}
    for row, kept in same.items():
        repeated[row] = repeated.get(kept, kept)
    return repeated


def _signatures(texts: Iterator[RowText]) -> np.ndarray:
    """The MinHash signature of every row, 128 bytes each."""
    from rensa import RMinHash

    signatures = bytearray()
    while rows := list(_batch(texts)):
        tokens, starts = _tokens(rows)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            tokens,
            starts,
            PERMUTATIONS,
            SEED,
        )
        hashes = np.array(matrix.to_rows(), np.uint32)
        signatures += hashes.astype(np.uint16).tobytes()
    return np.frombuffer(signatures, np.uint16).reshape(-1, PERMUTATIONS)


def _batch(stream: Iterator[RowText]) -> Iterator[RowText]:
    """The next rows of a stream that are hashed at once: one by one takes twice as long."""
    characters = 0
    for row in stream:
        yield row
        characters += sum(map(len, row))
        if characters > BATCH_CHARACTERS:
            return


def _tokens(rows: list[RowText]) -> tuple[np.ndarray, np.ndarray]:
    """The 3-grams of all rows, with what has to be equal mixed in, and where each row begins among them."""
    pair = SEPARATOR * 2  # between two rows: no 3-gram reaches over it
    texts = [f"{row.question}{SEPARATOR}{row.answer}" for row in rows]
    codes = normalized(pair.join(["", *texts, ""]))
    numbers = _numbers_and_symbols(codes)
    keys = []
    questions = numbers[2::3]  # each row has three texts, the first of them empty
    answers = numbers[3::3]
    for row, asked, answered in zip(rows, questions, answers, strict=False):
        key = f"{row.exact}\x1d{asked}\x1d{answered}"
        keys.append(_hash(key))
    counting = codes[codes != 0]
    separators = np.flatnonzero(counting == ord(SEPARATOR))
    starts = separators[::3]  # a row has three; the last one begins what follows the last row
    lengths = np.diff(starts)
    mixed_in = np.repeat(np.array(keys, np.uint64), lengths)
    tokens = _trigrams(codes) ^ mixed_in
    return tokens, starts.astype(np.uint64)


def _candidates(signatures: np.ndarray, near: float) -> np.ndarray:
    """For each row the most similar of the rows that come first in its LSH buckets; -1 where there is none."""
    best = np.full(len(signatures), -1, np.int64)
    least = int(max(near - 0.15, 0) * PERMUTATIONS)  # less is no candidate
    score = np.full(len(signatures), least, np.uint8)  # of the best so far
    whole = np.array([hash(row.tobytes()) for row in signatures])  # copies in a crowd of similar rows share all of it
    for band in (*signatures.view(np.uint64).T, whole):
        _, first, bucket = np.unique(
            band,
            return_index=True,
            return_inverse=True,
        )
        earliest = first[bucket]
        rows = np.flatnonzero(earliest < np.arange(len(band)))
        others = earliest[rows]
        equal = signatures[rows] == signatures[others]
        same = equal.sum(axis=1, dtype=np.uint8)
        better = same > score[rows]
        improved = rows[better]
        best[improved] = others[better]
        score[improved] = same[better]
    return best
