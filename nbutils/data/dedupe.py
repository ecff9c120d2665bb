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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from nbutils.data.rows import ChatRow

SEPARATOR = "\x1e"  # a control character, which no checked row holds: it stands between texts
NUMERALS = "0123456789〇零一二两三四五六七八九十百千万亿"
SYMBOLS = "-*/%#&\\^"  # Unicode takes them for punctuation; mathematical signs and currencies count as well
PERMUTATIONS, SEED = 64, 42  # four to a band: a pair that overlaps by 0.8 shares a band in 99.9 of 100 cases
BATCH_CHARACTERS = 1 << 15  # of rows hashed at once; one takes 25 bytes
RowText = tuple[str, str, str]  # see row_text
_json = functools.partial(json.dumps, sort_keys=True, ensure_ascii=False, default=str)
TEMPLATE = 8  # more rows than this that are similar to one row are a template filled in, not copies


def digests(row: ChatRow, numbers: bool = False) -> tuple[int, int]:
    """Of the whole row as it is, and of its question as questions are compared; with `numbers` 3.5 is not 35."""
    fields = []
    for message in row.messages:
        fields.append(f"{message['role']}\x1f{message['content']}")
        if len(message) > 2:
            extras = {name: value for name, value in message.items() if name not in ("role", "content")}
            fields[-1] += f"\x1f{_json(extras)}"
    prompt = SEPARATOR.join(fields[:-1]) + (f"\x1d{_json(row.tools)}" if row.tools else "")
    compared = normalized(prompt).tobytes().decode("utf-16-le", "surrogatepass")
    question = compared.replace("\0", "").encode("utf-8", "surrogatepass")
    if not question or question[-1] <= 0x1F:  # punctuation alone: it is compared as it is
        question = prompt.encode()
    if numbers:
        question += SEPARATOR.join(re.findall(f"[{NUMERALS}]+", compared)).encode()
    return _hash(f"{prompt}{SEPARATOR}{fields[-1]}".encode()), _hash(question)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=16).digest()[:8], "big")


def normalized(text: str) -> np.ndarray:
    """Each UTF-16 unit of a text as it is compared, 0 where it does not count."""
    table, letters, _ = _tables()
    codes = table.take(np.frombuffer(text.encode("utf-16-le"), np.uint16))
    if "-" in text or "\uff0d" in text:  # the hyphen of `well-known` does not count, the minus of `x - y` does
        places = np.flatnonzero(codes[2:-2] == ord("-")) + 2
        for step in (-2, -1, 1, 2):
            places = places[letters.take(codes[places + step])]
        codes[places] = 0
    return codes


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each UTF-16 unit: what it is compared as, whether it is a letter, and whether it is a numeral or symbol."""
    codes, (letters, exact) = np.arange(1 << 16, dtype=np.uint16), np.zeros((2, 1 << 16), np.bool_)
    for code, character in enumerate(map(chr, range(1 << 16))):
        category, simple = unicodedata.category(character), unicodedata.normalize("NFKC", character).lower()
        letters[code] = category[0] == "L"
        exact[code] = character in NUMERALS + SYMBOLS + SEPARATOR or category in ("Sm", "Sc")
        simple = simple if len(simple) == 1 and simple <= "\uffff" else character
        kind = unicodedata.category(simple)  # Cs: half of a character beyond the table, such as an emoji
        ignored = kind[0] in "PZC" and kind != "Cs" and simple not in SYMBOLS and not 0x1D <= code < 0x20
        codes[code] = 0 if ignored else ord(simple)
    return codes, letters, exact


def row_text(messages: Sequence[dict[str, Any]], tools: Any = None) -> RowText:
    """What is compared of a row: what has to be equal, the question with all earlier turns, the answer."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    texts = [f"{m['content'] or ''}\n{m['tool_calls']}" if "tool_calls" in m else m["content"] for m in messages]
    return f"{system}{SEPARATOR}{tools or ''}", "\n".join(texts[bool(system) : -1]), texts[-1]


def _numbers_and_symbols(codes: np.ndarray) -> list[str]:
    kept = np.where(_tables()[2].take(codes), codes, ord(" ")).tobytes().decode("utf-16-le", "surrogatepass")
    return [" ".join(text.split()) for text in kept.split(SEPARATOR)[1:-1]]


def _trigrams(codes: np.ndarray) -> np.ndarray:
    return codes[:-2] << np.uint64(32) | codes[1:-1] << np.uint64(16) | codes[2:]


def similarity(one: RowText, other: RowText) -> float:
    """The smaller overlap of questions and of answers; 0 where something differs that has to be equal."""
    found = float(one[0] == other[0])
    for texts in zip(one[1:], other[1:], strict=True):
        first, second = (normalized(f"{SEPARATOR}{text}{SEPARATOR}") for text in texts)
        if not found or _numbers_and_symbols(first) != _numbers_and_symbols(second):
            return 0.0
        one_set, other_set = (np.unique(_trigrams(codes[codes != 0].astype(np.uint64))) for codes in (first, second))
        shared = len(np.intersect1d(one_set, other_set, assume_unique=True))
        either = len(one_set) + len(other_set) - shared
        found = min(found, shared / either) if either else found
    return found


def find_repeated(
    near: float, texts: Iterable[RowText], order: np.ndarray, read: Callable[[int], RowText]
) -> tuple[dict[int, int], int]:
    """The rows to leave out, each with the row that is kept for it: of two the one that is earlier in `order`.

    And how many rows are similar to others only because they fill in the same template; they stay.
    """
    candidates = _candidates(_signatures(texts), near, order)
    same: dict[int, int] = {}
    similar: dict[int, int] = {}
    for row in order[candidates[order] >= 0].tolist():
        kept = same.get(int(candidates[row]), int(candidates[row]))
        found = similarity(read(row), read(kept))
        if found == 1:
            same[row] = kept
            continue
        if kept in similar:
            kept = similar[kept]
            found = similarity(read(row), read(kept))
        if found >= near:
            similar[row] = kept
    templates = {kept for kept, count in Counter(similar.values()).items() if count > TEMPLATE}
    copies = {row: kept for row, kept in similar.items() if kept not in templates}
    return copies | {row: copies.get(kept, kept) for row, kept in same.items()}, len(similar) - len(copies)


def _signatures(texts: Iterable[RowText]) -> np.ndarray:
    """The MinHash signature of every row, 128 bytes each; what has to be equal is mixed into every 3-gram."""
    from rensa import RMinHash

    signatures, stream = bytearray(), iter(texts)
    while rows := list(_batch(stream)):
        codes = normalized(SEPARATOR + SEPARATOR.join([text for row in rows for text in row[1:]]) + SEPARATOR)
        exact = _numbers_and_symbols(codes)
        keys = (f"{row[0]}\x1d{exact[2 * n]}\x1d{exact[2 * n + 1]}" for n, row in enumerate(rows))
        codes = codes[codes != 0].astype(np.uint64)
        starts = np.flatnonzero(codes == ord(SEPARATOR))[::2]
        tokens = _trigrams(codes)
        tokens ^= np.repeat(np.array([_hash(key.encode()) for key in keys], np.uint64), np.diff(starts))[: len(tokens)]
        tokens = np.delete(tokens, starts[1:-1] - 1)  # those across two rows
        offsets = starts - np.arange(len(starts))
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(tokens, offsets.astype(np.uint64), PERMUTATIONS, SEED)
        signatures += np.array(matrix.to_rows(), np.uint32).astype(np.uint16).tobytes()
    return np.frombuffer(signatures, np.uint16).reshape(-1, PERMUTATIONS)


def _batch(stream: Iterator[RowText]) -> Iterator[RowText]:
    """The next rows of a stream that are hashed at once."""
    characters = 0
    for row in stream:
        yield row
        characters += sum(map(len, row))
        if characters > BATCH_CHARACTERS:
            return


def _candidates(signatures: np.ndarray, near: float, order: np.ndarray) -> np.ndarray:
    """For each row the most similar of the rows that come first in its LSH buckets; -1 where there is none."""
    best = np.full(len(order), -1, np.int64)
    score = np.full(len(order), int((near - 0.15) * PERMUTATIONS), np.uint8)  # less is no candidate
    bands = signatures.view(np.uint64).T
    whole = np.zeros(len(order), np.uint64)  # copies in a crowd of similar rows share the whole signature
    for band in bands:
        whole = whole * np.uint64(0x9E3779B97F4A7C15) + band
    for band in (*bands, whole):
        places = np.argsort(band[order], kind="stable")
        keys = band[order][places]
        begins = np.concatenate([[True], keys[1:] != keys[:-1]])
        first = places[np.maximum.accumulate(np.where(begins, np.arange(len(places)), 0))]
        for part in np.array_split(np.flatnonzero(~begins), 1 + len(order) // 100_000):
            rows, others = order[places[part]], order[first[part]]
            same = (signatures[rows] == signatures[others]).sum(axis=1, dtype=np.uint8)
            better = same > score[rows]
            best[rows[better]], score[rows[better]] = others[better], same[better]
    return best
