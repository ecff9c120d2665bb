"""Near duplicates: rows that say the same but for a comma, a letter's case or width, or a word in a long text.

Candidates come from MinHash bands, the most similar one for each row, and are compared exactly (alike): time grows with
the rows, not their square. Missed: a few pairs close to `least`, pairs in other words, pairs that differ in symbols
alone (`**bold**`), and pairs whose bucket another row opened, but for those equal in all that counts.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nbutils.data.alike import Text, similarity
from nbutils.data.letters import MARK, compared, counts

BINS = 64  # four bins to a band: a pair that overlaps by 0.8 shares a band in 99.9 of 100 cases
EMPTY = 0xFFFF
BATCH = 60_000  # characters hashed at once: the arrays stay in the processor's cache
TEMPLATE = 8  # so many rows that resemble one row are a form filled in, not copies


class Alike(NamedTuple):
    """A row that is left out, and the row that stands for it."""

    row: int
    kept: int


class NearDuplicates:
    """Collects a signature of every row (128 bytes each), then finds the rows that repeat another."""

    def __init__(self, least: float) -> None:
        self.least, self.compared, self.templated = least, 0, 0
        self._signatures, self._numbers = bytearray(), bytearray()
        self._waiting: list[Text] = []
        self._characters = 0

    def add(self, text: Text) -> None:
        """The next row."""
        self._waiting.append(text)
        self._characters += len(text.question) + len(text.answer)
        if self._characters > BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            signatures, numbers = _signatures(self._waiting)
            self._signatures += signatures.tobytes()
            self._numbers += numbers.tobytes()
        self._waiting, self._characters = [], 0

    def find(self, order: np.ndarray, read: Callable[[int], Text]) -> list[Alike]:
        """The rows to leave out, where a row that comes earlier in `order` is kept; `read` gives the text of a row."""
        self._flush()
        best = self._candidates(order)
        twins: dict[int, int] = {}  # rows that say the very same as another
        resembled: dict[int, int] = {}
        for row in order[best[order] >= 0].tolist():
            other = twins.get(int(best[row]), int(best[row]))
            alike = self._compare(read(row), read(other))
            if alike == 1:
                twins[row] = other
                continue
            if other in resembled:
                other = resembled[other]
                alike = self._compare(read(row), read(other))
            if alike:
                resembled[row] = other
        left_out = self._without_templates(resembled)
        left_out |= {row: left_out.get(other, other) for row, other in twins.items()}
        return sorted(Alike(row, kept) for row, kept in left_out.items())

    def _compare(self, one: Text, other: Text) -> float:
        self.compared += 1
        return similarity(one, other, self.least)

    def _without_templates(self, resembled: dict[int, int]) -> dict[int, int]:
        """What resembles one row in small numbers; where it is many rows, they are a form that was filled in."""
        many = {kept for kept, count in Counter(resembled.values()).items() if count > TEMPLATE}
        self.templated = sum(kept in many for kept in resembled.values())
        return {row: kept for row, kept in resembled.items() if kept not in many}

    def _candidates(self, order: np.ndarray) -> np.ndarray:
        """For each row the most similar one that opened a bucket it is in, by signature; -1 where none comes close."""
        signatures = np.frombuffer(self._signatures, np.uint16).reshape(-1, BINS)
        numbers = np.frombuffer(self._numbers, np.uint64)[order]
        best, score = np.full(len(order), -1, np.int64), np.zeros(len(order), np.uint8)
        least = max(1, int((self.least - 0.15) * BINS))
        for keys in _keys(signatures.view(np.uint64)):
            rows, firsts = _bucket_mates(keys[order] ^ numbers)
            for part in np.array_split(np.arange(len(rows)), 1 + len(rows) // 100_000):
                row, first = order[rows[part]], order[firsts[part]]
                same = (signatures[row] == signatures[first]).sum(axis=1, dtype=np.uint8)
                better = (same > score[row]) & (same >= least)
                best[row[better]], score[row[better]] = first[better], same[better]
        return best


def _keys(bands: np.ndarray) -> Iterator[np.ndarray]:
    """A key of each row for each of its bands, and one for all of them: copies in a crowd of similar rows share it."""
    whole = np.zeros(len(bands), np.uint64)
    for band in bands.T:
        yield band
        whole *= np.uint64(0x9E3779B97F4A7C15)
        whole += band ^ (band >> np.uint64(29))
    yield whole


def _bucket_mates(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every place whose key was seen before, and the first place of that key."""
    places = np.argsort(keys, kind="stable")
    inside = np.flatnonzero(keys[places[1:]] == keys[places[:-1]]) + 1
    opens = np.arange(len(places))
    opens[inside] = 0
    return places[inside], places[np.maximum.accumulate(opens)[inside]]


def _signatures(texts: list[Text]) -> tuple[np.ndarray, np.ndarray]:
    """MinHash of each row, one hash for all bins, and a number that rows with equal numbers, symbols, system share."""
    codes = compared(MARK + MARK.join([side for text in texts for side in (text.question, text.answer)]) + MARK)
    codes = codes[codes != 0]
    ends = np.flatnonzero(codes == ord(MARK))
    wide = codes.astype(np.uint32)
    return _minima(wide, ends), _counted_hashes(wide, counts(codes), ends) ^ _fixed_hashes(texts)


def _minima(codes: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The smallest hash of the row's 3-grams in each bin; `ends` are the marks around questions and answers in turn."""
    sides = np.arange(len(ends) - 1, dtype=np.uint32)
    lengths, rows = np.diff(ends), len(sides) // 2
    grams = codes[:-2] * np.uint32(0x9E3779B1)
    _stir(grams, codes[1:-1], 15, 0x85EBCA77)
    _stir(grams, codes[2:], 13, 0xC2B2AE3D)
    _stir(grams, np.repeat((sides & 1) * np.uint32(0x27D4EB2F), lengths)[1:], 16, 0x165667B1)
    grams ^= grams >> np.uint32(16)
    places = (grams >> np.uint32(26)) + np.repeat((sides >> 1) * np.uint32(BINS), lengths)[1:]
    places[ends[1:-1] - 1] = rows * BINS  # a mark in the middle: no 3-gram, counted nowhere
    minima = np.full(rows * BINS + 1, EMPTY, np.uint16)
    np.minimum.at(minima, places, grams.astype(np.uint16))
    return _filled(minima[:-1].reshape(rows, BINS))


def _stir(hashes: np.ndarray, more: np.ndarray, shift: int, factor: int) -> None:
    hashes ^= hashes >> np.uint32(shift)
    hashes += more
    hashes *= np.uint32(factor)


def _filled(minima: np.ndarray) -> np.ndarray:
    """Empty bins of short rows borrow from others, in an order that is the same for every row."""
    short = np.flatnonzero((minima == EMPTY).any(axis=1) & (minima != EMPTY).any(axis=1))
    found = minima[short]
    filled, bins = found.copy(), np.arange(BINS)
    for attempt in range(4 * BINS):
        if not (filled == EMPTY).any():
            break
        donors = found[:, (bins * (2 * attempt + 1) + 37 * attempt + 11) % BINS]
        filled = np.where(filled == EMPTY, donors, filled)
    minima[short] = filled
    return minima


def _counted_hashes(codes: np.ndarray, counted: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """One number for the numerals and symbols of each row; which stand together counts, their order is compared."""
    places = np.flatnonzero(counted)
    hashes = codes[places].astype(np.uint64) + (codes[places - 1] * counted[places - 1]).astype(np.uint64) * 65536
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes)])
    return np.diff(totals[np.searchsorted(places, ends[::2])])


def _fixed_hashes(texts: list[Text]) -> np.ndarray:
    return np.array([zlib.crc32(text.fixed.encode()) << 32 if text.fixed else 0 for text in texts], np.uint64)
