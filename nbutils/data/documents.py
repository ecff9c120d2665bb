"""JSON that is one document and not lines: an array of rows, an object that holds one, or a row by itself.

Not here: lines of JSON (reading). A window moves over the text, so memory does not grow with the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from nbutils.data.columns import LISTS, layout_of
from nbutils.data.private import excerpt
from nbutils.data.raw import Problem, Row, RowError
from nbutils.errors import CourseError

CHUNK = 1 << 20
LARGEST_ROW = 16 << 20  # characters; beyond this a row counts as broken, not as unfinished
_BETWEEN = re.compile(r"[\s,]*")
NEARBY, SLACK = 200, 1 << 16
_OBJECT = re.compile(r'\{(?!\s*"(?:role|from)")')  # a message is no row
_CLOSING = re.compile(r"(?=\][\s}]*\Z)")
_FIRST_KEY = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:')
_DECODER = json.JSONDecoder()
UNREADABLE = (ValueError, RecursionError)  # of text that is no JSON, has a number of 5,000 digits, or is too deep


class Window:
    """The part of a long JSON text that is being read, with its place."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.pieces, self.text, self.at, self.line = pieces, "", 0, 1

    def grow(self) -> bool:
        """Drop what was read and read on; False at the end of the text."""
        self.drop()
        parts = [self.text]
        wanted = max(CHUNK, len(self.text))
        while wanted > 0 and (piece := next(self.pieces, "")):
            parts.append(piece)
            wanted -= len(piece)
        self.text = "".join(parts)
        return len(parts) > 1

    def drop(self) -> None:
        """Forget what was read, but for a little that tells how far right this place is."""
        kept = max(0, self.at - NEARBY)
        self.text, self.at = self.text[kept:], self.at - kept

    def move(self, to: int) -> None:
        """Go on to a place in the window, counting lines."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is neither space nor comma; empty at the end."""
        while True:
            self.move(_BETWEEN.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def value(self) -> Any:
        """The JSON value that begins here."""
        if self.at > SLACK:
            self.drop()  # where reading fails, Python counts the lines from the beginning of the text
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except UNREADABLE as problem:
                if self._cut(problem) and len(self.text) - self.at < LARGEST_ROW and self.grow():
                    continue
                raise
            if end == len(self.text) and self.grow():  # a number may go on
                continue
            self.move(end)
            return value

    def _cut(self, problem: Exception) -> bool:
        """Whether reading may have failed only because the window ends there."""
        return isinstance(problem, json.JSONDecodeError) and (
            problem.msg.startswith("Unterminated") or problem.pos > len(self.text) - 16
        )

    def skip(self, keys: set[str], closing: str) -> str:
        """Go on to what looks like the next element, an object that begins with one of the keys; what was skipped."""
        while not (end := _next_element(self.text, self.at, keys)):
            if len(self.text) - self.at >= LARGEST_ROW or not self.grow():
                break
        if not end and closing and (last := _CLOSING.search(self.text, max(self.at + 1, len(self.text) - CHUNK))):
            end = last.start()
        end = end or len(self.text)
        skipped = self.text[self.at : end]
        self.move(end)
        return skipped


def elements(file: str, window: Window, closing: str) -> Iterator[Row | RowError]:
    """The values up to the closing bracket, or up to the end; a broken one does not hide the next."""
    keys: set[str] = set()  # what rows begin with: an object inside of a broken row is not taken for the next row
    while (seen := window.peek()) != closing and seen:
        line = window.line
        if len(keys) < 16 and (own := _FIRST_KEY.match(window.text, window.at)):
            keys.add(own[1])
        try:
            yield Row(file, line, window.value())
        except UNREADABLE as problem:
            start = window.at
            yield malformed(file, line, window.skip(keys, closing), problem, start)


def _next_element(text: str, at: int, keys: set[str]) -> int:
    """Where the row after a broken one probably begins: like another row, or on a line of its own as far left; or 0."""
    column = _column(text, at)
    for found in _OBJECT.finditer(text, at + 1):
        before = text[max(0, found.start() - NEARBY) : found.start()].rstrip(" \t")
        own = _FIRST_KEY.match(text, found.start())
        if (not keys or (own and own[1] in keys)) and before.rstrip()[-1:] != ":":
            return found.start()
        if before.endswith("\n") and _column(text, found.start()) <= column:
            return found.start()
    return 0


def _column(text: str, at: int) -> int:
    return at - text.rfind("\n", max(0, at - NEARBY), at) - 1 if "\n" in text[max(0, at - NEARBY) : at] else NEARBY


def malformed(file: str, line: int, text: str, problem: Exception, start: int = 0) -> RowError:
    """A row that is not JSON, with the place where reading stopped."""
    text = text.rstrip(" \r\n,")
    at = min(getattr(problem, "pos", start) - start, len(text))
    todo = f"{why(problem)}: mend it, or write the file with json.dumps"
    if re.match(r"\s*\{\s*'", text):
        todo = "JSON wants double quotes: this is a Python dict, write it with json.dumps"
    seen = " ".join(excerpt(text, at).split())
    return RowError(file, line, text[:2000], (Problem("malformed_json", f"character {at + 1}", seen, todo),))


def why(problem: Exception) -> str:
    """What the reader of JSON says, in few words."""
    if isinstance(problem, ValueError) and not isinstance(problem, json.JSONDecodeError):
        return "a number of too many digits"
    return getattr(problem, "msg", "nested too deeply")


def document(file: str, text: Callable[[], Iterator[str]]) -> Iterator[Row | RowError]:
    """The rows of a whole JSON document; `text` begins it anew, for an object is looked through before it is read."""
    window = Window(text())
    if window.peek() == "[":
        yield from _array(file, window)
        return
    held = _survey(file, window)
    if _is_row(held):
        yield from elements(file, Window(text()), "")
        return
    lists = [name for name, first in held.items() if isinstance(first, dict)]
    if len(lists) > 1:
        raise CourseError(
            f"{file} holds {len(lists)} lists of rows: {', '.join(lists)}.",
            "one list of rows in a .json file",
            "save each list in a file of its own, and give one as the data (and another to evaluate on)",
        )
    window = Window(text())
    window.peek()
    for name in _members(window):
        if lists == [name]:
            yield from _array(file, window)
            return
        window.value()


def _array(file: str, window: Window) -> Iterator[Row | RowError]:
    window.peek()
    window.move(window.at + 1)
    yield from elements(file, window, "]")
    if window.peek() == "":
        yield malformed(file, window.line, "", json.JSONDecodeError("the list is not closed", "", 0))


def _members(window: Window) -> Iterator[str]:
    """The names in an object; whoever asks reads the value of each before the next."""
    window.move(window.at + 1)
    while window.peek() == '"':
        name = window.value()
        if window.peek() != ":":
            return
        window.move(window.at + 1)
        window.peek()
        yield str(name)


def _survey(file: str, window: Window) -> dict[str, Any]:
    """The names in an object, each with the first object in it if it holds a list."""
    held: dict[str, Any] = {}
    try:
        for name in _members(window):
            held[name] = None
            if window.peek() != "[":
                window.value()
                continue
            window.move(window.at + 1)
            for row in elements(file, window, "]"):
                if held[name] is None and isinstance(row.raw, dict):
                    held[name] = row.raw
            window.move(window.at + 1)
    except UNREADABLE:
        pass  # what is broken is reported when the rows are read
    return held


def _is_row(held: dict[str, Any]) -> bool:
    """Whether an object is a row by itself: its names are known columns, or it holds one list of messages."""
    for name in LISTS:
        first = held.get(name)
        if isinstance(first, dict) and ({"role", "from"} & first.keys()):
            return True
        if isinstance(first, dict):
            return False
    return layout_of(tuple(held)).problem is None or not any(isinstance(first, dict) for first in held.values())
