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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbutils.data.rows import ChatRow

SEPARATOR = "\x1e"  # a control character, which no checked row holds: it stands between texts
NUMERALS = "0123456789〇零一二两三四五六七八九十百千万亿"
SYMBOLS = "-*/%#&\\^"  # Unicode takes them for punctuation; mathematical signs and currencies count as well
PERMUTATIONS, SEED = 64, 42  # four to a band: a pair that overlaps by 0.8 shares a band in 99.9 of 100 cases
BATCH = 64  # rows hashed at once
TEMPLATE = 8  # more rows than this that are similar to one row are a template filled in, not copies


def digests(row: ChatRow, numbers: bool = False) -> tuple[int, int]:
    """Of the whole row as it is, and of its question as questions are compared; with `numbers` 3.5 is not 35."""
    fields = [_field(message) for message in row.messages]
    prompt = SEPARATOR.join(fields[:-1]) + (f"\x1d{_json(row.tools)}" if row.tools else "")
    question = _normalized_bytes(prompt)
    if numbers:
        question += SEPARATOR.join(re.findall(f"[{NUMERALS}]+", _decoded(normalized(prompt)))).encode()
    return _hash(f"{prompt}{SEPARATOR}{fields[-1]}".encode()), _hash(question)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=16).digest()[:8], "big")


def _field(message: dict[str, Any]) -> str:
    text = f"{message['role']}\x1f{message['content']}"
    extras = {name: value for name, value in message.items() if name not in ("role", "content")}
    return f"{text}\x1f{_json(extras)}" if extras else text


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


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


def _normalized_bytes(text: str) -> bytes:
    """The same bytes for all variants of a text; of one that ends with punctuation alone the text itself."""
    kept = _decoded(normalized(text)).replace("\0", "").encode("utf-8", "surrogatepass")
    return kept if kept and kept[-1] > 0x1F else text.encode()


def _decoded(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-16-le", "surrogatepass")


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each UTF-16 unit: what it is compared as, whether it is a letter, and whether it is a numeral or symbol."""
    characters = [chr(code) for code in range(1 << 16)]
    codes = np.array([_normalized_code(character) for character in characters], np.uint16)
    codes[0x1D:0x20] = [0x1D, 0x1E, 0x1F]
    letters = np.array([unicodedata.category(character)[0] == "L" for character in characters], np.bool_)
    exact = [c in NUMERALS + SYMBOLS + SEPARATOR or unicodedata.category(c) in ("Sm", "Sc") for c in characters]
    return codes, letters, np.array(exact, np.bool_)


def _normalized_code(character: str) -> int:
    simple = unicodedata.normalize("NFKC", character).lower()
    simple = simple if len(simple) == 1 and simple <= "\uffff" else character
    category = unicodedata.category(simple)  # Cs: half of a character beyond the table, such as an emoji
    return 0 if category[0] in "PZC" and category != "Cs" and simple not in SYMBOLS else ord(simple)


class RowText(NamedTuple):
    """What is compared of a row: what has to be equal, the question with all earlier turns, the answer."""

    fixed: str
    question: str
    answer: str


def row_text(messages: Sequence[dict[str, Any]], tools: Any = None) -> RowText:
    """The parts of a row that are compared."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    texts = [f"{m['content'] or ''}\n{m['tool_calls']}" if "tool_calls" in m else m["content"] for m in messages]
    return RowText(f"{system}{SEPARATOR}{tools or ''}", "\n".join(texts[bool(system) : -1]), texts[-1])


def _numbers_and_symbols(codes: np.ndarray) -> list[str]:
    kept = _decoded(np.where(_tables()[2].take(codes), codes, ord(" ")))
    return [" ".join(text.split()) for text in kept.split(SEPARATOR)[1:-1]]


def _trigrams(codes: np.ndarray) -> np.ndarray:
    return codes[:-2] << np.uint64(32) | codes[1:-1] << np.uint64(16) | codes[2:]


def similarity(one: RowText, other: RowText) -> float:
    """The smaller overlap of questions and of answers; 0 where something differs that has to be equal."""
    found = float(one.fixed == other.fixed)
    for texts in zip(one[1:], other[1:], strict=True):
        first, second = (normalized(f"{SEPARATOR}{text}{SEPARATOR}") for text in texts)
        if not found or _numbers_and_symbols(first) != _numbers_and_symbols(second):
            return 0.0
        one_set, other_set = (np.unique(_trigrams(codes[codes != 0].astype(np.uint64))) for codes in (first, second))
        shared = len(np.intersect1d(one_set, other_set, assume_unique=True))
        either = len(one_set) + len(other_set) - shared
        found = min(found, shared / either) if either else found
    return found


class NearDuplicates:
    """Collects a MinHash signature of every row (128 bytes each), then finds the rows that repeat another."""

    def __init__(self, near: float) -> None:
        self.near, self.templated = near, 0
        self._signatures = bytearray()
        self._waiting: list[RowText] = []

    def add(self, row: RowText) -> None:
        """The next row."""
        self._waiting.append(row)
        if len(self._waiting) == BATCH:
            self._flush()

    def _flush(self) -> None:
        """The signatures of the rows that wait; what has to be equal is mixed into every 3-gram."""
        from rensa import RMinHash

        rows, self._waiting = self._waiting, []
        if not rows:
            return
        codes = normalized(SEPARATOR + SEPARATOR.join([text for row in rows for text in row[1:]]) + SEPARATOR)
        exact = _numbers_and_symbols(codes)
        keys = (f"{row.fixed}\x1d{exact[2 * n]}\x1d{exact[2 * n + 1]}" for n, row in enumerate(rows))
        codes = codes[codes != 0].astype(np.uint64)
        starts = np.flatnonzero(codes == ord(SEPARATOR))[::2]
        tokens = _trigrams(codes)
        tokens ^= np.repeat(np.array([_hash(key.encode()) for key in keys], np.uint64), np.diff(starts))[: len(tokens)]
        tokens = np.delete(tokens, starts[1:-1] - 1)  # those across two rows
        offsets = starts - np.arange(len(starts))
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(tokens, offsets.astype(np.uint64), PERMUTATIONS, SEED)
        self._signatures += np.array(matrix.to_rows(), np.uint32).astype(np.uint16).tobytes()

    def find(self, order: np.ndarray, read: Callable[[int], RowText]) -> dict[int, int]:
        """The rows to leave out, each with the row that is kept for it: of two the one that is earlier in `order`."""
        self._flush()
        candidates = self._candidates(order)
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
            if found >= self.near:
                similar[row] = kept
        templates = {kept for kept, count in Counter(similar.values()).items() if count > TEMPLATE}
        self.templated = sum(kept in templates for kept in similar.values())
        similar = {row: kept for row, kept in similar.items() if kept not in templates}
        return similar | {row: similar.get(kept, kept) for row, kept in same.items()}

    def _candidates(self, order: np.ndarray) -> np.ndarray:
        """For each row the most similar of the rows that come first in its LSH buckets; -1 where there is none."""
        signatures = np.frombuffer(self._signatures, np.uint16).reshape(-1, PERMUTATIONS)
        best = np.full(len(order), -1, np.int64)
        score = np.full(len(order), int((self.near - 0.15) * PERMUTATIONS), np.uint8)  # less is no candidate
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
