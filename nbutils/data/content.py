"""A row by its content: the line it is stored as, and the numbers that decide its side, its copies and its subset.

They depend on nothing but the text, so that a row stays where it is whatever is added, and on every machine. Questions
that differ in case, width, blanks or punctuation are one question.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson

from nbutils.data.letters import numbers_of, plain
from nbutils.data.raw import RowError
from nbutils.data.rows import ChatRow


def stored(row: ChatRow) -> dict[str, Any]:
    """A row as it is written."""
    return {"messages": row.messages, "tools": row.tools} if row.tools else {"messages": row.messages}


def line_of(row: ChatRow) -> bytes:
    """The row as one line of JSON."""
    try:
        return orjson.dumps(stored(row), option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a tool's argument may be a number of more than 64 bits
        return (json.dumps(stored(row), ensure_ascii=False, default=str) + "\n").encode()


def rejected_line(error: RowError) -> bytes:
    """A rejected row with its problems as one line of JSON, whatever it holds."""
    problems = [vars(problem) for problem in error.problems]
    entry = {"file": error.file, "line": error.line, "problems": problems, "row": error.raw}
    try:
        text = json.dumps(entry, ensure_ascii=False, default=str)
        if "NaN" in text or "Infinity" in text:  # no JSON as numbers: kept as words
            text = json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    except (ValueError, RecursionError):  # too deep, or a number of thousands of digits
        text = json.dumps(entry | {"row": None}, ensure_ascii=False)
    # characters UTF-8 cannot hold only occur in rejected rows; as \\uXXXX they are still JSON
    return f"{text}\n".encode("utf-8", "backslashreplace")


def digests(row: ChatRow, numbers: bool = False) -> tuple[int, int]:
    """Two numbers of 64 bits: of the whole row as it is, and of all but its last answer as questions are compared.

    Whether 3.5 and 35 are then two questions, as `numbers` asks for, matters to a leak only: on which side a row falls
    does not.
    """
    # checked rows hold no control characters, so these can stand between fields
    fields = [_field(message) for message in row.messages]
    prompt = "\x1e".join(fields[:-1]) + (f"\x1d{_json(row.tools)}" if row.tools else "")
    asked = plain(prompt) + numbers_of(prompt) if numbers else plain(prompt)
    return _number(f"{prompt}\x1e{fields[-1]}".encode()), _number(asked)


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=16).digest()[:8], "big")


def _field(message: dict[str, Any]) -> str:
    said = f"{message['role']}\x1f{message['content']}"
    if len(message) == 2:
        return said
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return f"{said}\x1f{_json(more)}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
