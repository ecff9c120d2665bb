"""What an answer says, against the text that is trained of it: its words, its thought, its tool calls.

White space is left aside. Not here: where an answer begins and ends in the tokens (breaches).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Answer = dict[str, Any]
MARKS = re.compile(r"</?think>")
SHOWN = 40  # characters of what is lost


class Lost(NamedTuple):
    """What of an answer is not in its text, and what to do about it."""

    what: str
    todo: str


def has_thought(answer: Answer) -> bool:
    """Whether an answer holds a thought that is not empty; the mark that opens it is often left to the server."""
    thought, closed, _ = _content(answer).partition("</think>")
    return bool(answer.get("reasoning_content") or (closed and thought.replace("<think>", "").strip()))


def rows_think(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether any answer of any row holds a thought."""
    return any(has_thought(one) for row in rows for one in row["messages"] if one["role"] == "assistant")


def find_lost(tokenizer: Any, answer: Answer, text: str) -> Lost | None:
    """The first words, thought or part of a call that a text leaves out."""
    squeezed, at = _squeeze(text), 0
    for piece in _pieces(answer):
        at = _end_of(piece, squeezed, at)
        if at < 0:
            at = _end_of(_round_trip(tokenizer, piece), squeezed, 0)
        if at < 0:
            return _lost_words(answer, piece)
    calls = (_lost_part(call, squeezed) for call in answer.get("tool_calls") or ())
    return next((lost for lost in calls if lost), None)


def _content(answer: Answer) -> str:
    content = answer.get("content")
    return content if isinstance(content, str) else ""


def _pieces(answer: Answer) -> Iterator[str]:
    """What an answer says, in order: its thought, its words; the marks between them are the template's to write."""
    pieces = [answer.get("reasoning_content") or "", *MARKS.split(_content(answer))]
    return (piece for piece in pieces if piece and not piece.isspace())


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _end_of(piece: str, squeezed: str, start: int) -> int:
    """Where a piece ends in a text; -1 if it is not there."""
    short = _squeeze(piece)
    at = squeezed.find(short, start) if short else -1
    return at + len(short) if at >= 0 else -1


def _round_trip(tokenizer: Any, text: str) -> str:
    """A text as the tokenizer gives it back: some normalise characters, which no template can help."""
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


def _lost_words(answer: Answer, piece: str) -> Lost:
    words = piece.strip()
    shown = repr(words if len(words) <= SHOWN else words[:SHOWN] + "…")
    if has_thought(answer) and piece not in MARKS.split(_content(answer))[-1:]:
        return Lost(f"the thought {shown}", "take a model whose template keeps thoughts, or take them out of the rows")
    return Lost(f"{shown} of an answer", "leave the chat template as the model came with it, or take another model")


def _lost_part(call: dict[str, Any], squeezed: str) -> Lost | None:
    """What a text leaves out of one tool call: its name, or a text or number among its arguments."""
    function = call.get("function") or call
    name, todo = str(function.get("name", "")), "take a model that can call tools"
    if not _written(name, squeezed):
        return Lost(f"a call of {name!r}", todo)
    lost = next((leaf for leaf in _leaves(_arguments(function)) if not _written(leaf, squeezed)), None)
    return None if lost is None else Lost(f"{lost!r} of a call of {name!r}", todo)


def _arguments(function: dict[str, Any]) -> Any:
    """Arguments as an object; most data has them as JSON text, which the template is handed as an object too."""
    given = function.get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers in arguments."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)


def _written(text: str, squeezed: str) -> bool:
    """Whether a text is there: as it is, in JSON, or in JSON within JSON."""
    for ascii_only in (False, True):
        way = text
        for _ in range(3):
            if _squeeze(way) in squeezed:
                return True
            way = json.dumps(way, ensure_ascii=ascii_only)[1:-1]
    return False
