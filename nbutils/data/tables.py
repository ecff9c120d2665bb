"""Rows of csv and tsv files; a quote that is never closed spoils its own line only, and no line is read thrice.

Not here: other formats and which one a file has (reading).
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from itertools import chain

from nbutils.data.documents import LARGEST_ROW
from nbutils.data.encodings import Decoder
from nbutils.data.private import mask
from nbutils.data.raw import Problem, Row, RowError

CSV_TODO = "as many values as the header has names; quote values that hold a comma or a line break"
QUOTE_TODO = f'mend the quoting ("" for a quote inside quotes); a row may have {LARGEST_ROW >> 20} million characters'


class Feed:
    """Lines for the csv reader, which come back when a quote that is never closed swallowed them.

    Whatever begins on such a line and is open at its end would swallow what follows, and fail, just the same. So these
    lines are read once more, each as a row of its own: `alone` counts those to come.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines, self.taken, self.again = lines, list[str](), deque[str]()
        self.line = self.length = self.alone = 0
        self.single = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.taken and (self.single or self.length > LARGEST_ROW):
            raise csv.Error("a quote is not closed" if self.single else "a quote is not closed, or the row is too long")
        self.taken.append(self.again.popleft() if self.again else next(self.lines))
        self.line += 1
        self.length += len(self.taken[-1])
        return self.taken[-1]

    def begin(self) -> int:
        """Begin a row; the number of its line."""
        self.single, self.alone, self.length = self.alone > 0, max(0, self.alone - 1), 0
        self.taken.clear()
        return self.line + 1

    def keep_first(self, inside: bool) -> str:
        """The first line taken; the others will be given out once more, the last one freely if the fault is inside."""
        first, *others = self.taken or [""]
        self.again.extendleft(reversed(others))
        self.line -= len(others)
        self.alone += max(0, len(others) - inside)
        return first


def table(name: str, lines: Iterator[str], decoder: Decoder, tabs: bool) -> Iterator[Row | RowError]:
    """Every row under the names of the first line; one that cannot be read does not hide the next."""
    csv.field_size_limit(LARGEST_ROW)
    first = next(lines, "")
    feed, header = Feed(chain([first], lines)), list[str]()
    reader = csv.reader(feed, delimiter="\t" if tabs else _delimiter(first), strict=True)
    while True:
        line, before = feed.begin(), decoder.converted
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield _unquoted(name, line, feed, str(problem))
            continue
        if not header:
            header = _distinct(values)
        elif len(values) == len(header):
            encoding = decoder.encoding if decoder.converted > before else ""
            yield Row(name, line, dict(zip(header, values, strict=True)), encoding)
        elif values:
            seen = f"{len(values)} values for {len(header)} columns: {mask(','.join(values)[:2000])[:40]}"
            yield RowError(name, line, values, (Problem("malformed_csv", "-", seen, CSV_TODO),))


def _unquoted(name: str, line: int, feed: Feed, fault: str) -> RowError:
    """A row whose quotes do not close."""
    text = feed.keep_first("not closed" not in fault and "end of data" not in fault).rstrip("\r\n")[:2000]
    return RowError(name, line, text, (Problem("malformed_csv", "-", f"{fault}: {mask(text)[:40]}", QUOTE_TODO),))


def _delimiter(header: str) -> str:
    """A comma, or what stands between the names where there is none: Excel writes ; in much of Europe."""
    return next((mark for mark in ",;\t" if mark in header), ",")


def _distinct(header: list[str]) -> list[str]:
    """The names of the columns; one that was there before says its place, so that no value is lost (columns asks)."""
    first = {name: n for n, name in reversed(list(enumerate(header, start=1)))}
    return [name if first[name] == n else f"{name} (column {n})" for n, name in enumerate(header, start=1)]
