"""A row by its content: the line it is stored as, and the numbers that decide its side, its copies and its subset.

They depend on nothing but the text, so that a row stays where it is whatever is added, and on every machine.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson

from nbutils.data.rows import ChatRow


def stored(row: ChatRow) -> dict[str, Any]:
    """A row as it is written."""
    return {"messages": row.messages, "tools": row.tools} if row.tools else {"messages": row.messages}


def line_of(row: ChatRow) -> bytes:
    """The row as one line of JSON."""
    try:
        return orjson.dumps(stored(row), option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a tool's argument may be a number of more than 64 bits
        return (json.dumps(stored(row), ensure_ascii=False) + "\n").encode()


def digests(row: ChatRow) -> tuple[int, int]:
    """Two numbers of 64 bits: of the whole row, and of all but the last answer."""
    # checked rows hold no control characters, so these can stand between fields
    fields = [_field(message) for message in row.messages]
    digest = hashlib.blake2b("\x1e".join(fields[:-1]).encode(), digest_size=16)
    if row.tools:
        digest.update(f"\x1d{json.dumps(row.tools, sort_keys=True, ensure_ascii=False)}".encode())
    prompt = int.from_bytes(digest.digest()[:8], "big")
    digest.update(f"\x1e{fields[-1]}".encode())
    return int.from_bytes(digest.digest()[:8], "big"), prompt


def _field(message: dict[str, Any]) -> str:
    plain = f"{message['role']}\x1f{message['content']}"
    if len(message) == 2:
        return plain
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return f"{plain}\x1f{json.dumps(more, sort_keys=True, ensure_ascii=False)}"
