"""What a row must look like: one shape, `{"messages": [{"role", "content"}, ...]}`, and the rules it has to pass.

Not here: finding the turns (turns), the rules of a text (text), comparing rows (building). Nothing is tokenised.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson

from nbutils.data.calls import short
from nbutils.data.columns import Mapping
from nbutils.data.raw import Problem, Row, RowError
from nbutils.data.text import examine, plain
from nbutils.data.turns import Turn, turns_of

ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u00[01][0-9a-f]|[bf]))")  # an invisible character, as JSON writes it
BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")
ORDER = "system first if at all, then user and assistant in turn; tool turns only after an assistant that calls tools"
FOLLOWS = {"": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}


class ChatRow(NamedTuple):
    """A row that passed: its messages and tools, where it came from, and what was done or is to be said about it."""

    file: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trimmed: bool = False
    repaired: bool = False
    warnings: tuple[Problem, ...] = ()


def check_row(row: Row | RowError, mapping: Mapping | None = None, repair: bool = True) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used."""
    if isinstance(row, RowError):
        return row
    turns, tools, problems = turns_of(row.raw, mapping)
    sound = plain("\n".join([turn.content for turn in turns if isinstance(turn.content, str)]))
    warnings: list[Problem] = []
    messages = [_message(turn, sound, repair, problems, warnings) for turn in turns]
    for field, value in [(turn.field, turn.extras) for turn in turns if turn.extras] + (
        [("tools", tools)] if tools else []
    ):
        _look_inside(_place_of(field), value, problems, warnings)
    problems = problems or _order_problems(turns)
    if problems:
        return RowError(row.file, row.line, row.raw, tuple(problems))
    trimmed = any([turn.content != made["content"] for turn, made in zip(turns, messages, strict=True) if turn.content])
    repaired = bool(warnings) and any(warning.kind == "mojibake" for warning in warnings)
    if row.encoding:
        todo = "nothing: it was converted; look whether it reads well"
        warnings.append(Problem("encoding", "-", f"written in {row.encoding}", todo))
    return ChatRow(row.file, row.line, messages, tools, trimmed and not repaired, repaired, tuple(warnings))


def problems_of(raw: Any, mapping: Mapping | None = None) -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used."""
    checked = check_row(Row("row", 1, raw), mapping)
    return list(checked.problems) if isinstance(checked, RowError) else []


def _message(turn: Turn, sound: bool, repair: bool, problems: list[Problem], warnings: list[Problem]) -> dict[str, Any]:
    """One message of the stored row; what is wrong with its text goes to `problems`."""
    text = turn.content
    if not isinstance(text, str) or not text or text.isspace():
        problems += _no_text(turn)
        return {"role": turn.role, "content": "", **turn.extras}
    if not sound:
        text, stopping, saying = examine(turn.field, text, repair)
        problems += stopping
        warnings += saying
    return {"role": turn.role, "content": _trim(text), **turn.extras}


def _no_text(turn: Turn) -> list[Problem]:
    """Content that is missing, empty or no text; an assistant that calls tools need not say anything."""
    if turn.content is not None and not isinstance(turn.content, str):
        return [Problem("wrong_type", turn.field, short(turn.content), "write it as text, in quotes")]
    if turn.calls:
        return []
    return [Problem("empty", turn.field, short(turn.content), "write the text, or remove the row")]


def _look_inside(field: str, value: Any, problems: list[Problem], warnings: list[Problem]) -> None:
    """The rules of a text for the calls and tools of a row, which must be JSON; nothing in them is repaired."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
        if "null" in text:
            json.dumps(value, allow_nan=False)  # the fast writer makes null of what is no number
    except (TypeError, ValueError) as problem:
        todo = "plain JSON: text in UTF-8, numbers of at most 64 bits, no NaN, no dates"
        problems.append(Problem("wrong_type", field, str(problem), todo))
        return
    if "\\" in text and (found := ESCAPED.search(text)):
        todo = "remove the invisible character"
        problems.append(Problem("control_character", field, f"{found[1]} in {short(value)}", todo))
    if not plain(text):
        _, stopping, saying = examine(field, text, repair=False)
        problems += stopping
        warnings += saying


def _order_problems(turns: list[Turn]) -> list[Problem]:
    """system once and first, then user and assistant in turn, tools where they were called, the assistant last."""
    if [turn.role for turn in turns] == ["user", "assistant"]:
        return []
    talk = turns[1:] if turns and turns[0].role == "system" else turns
    if not any(turn.role == "assistant" for turn in talk):
        seen = ", ".join(turn.role for turn in turns) or "no turns"
        return [Problem("no_assistant", _place(turns), seen, "add the answer the model should learn")]
    expected = FOLLOWS[""]
    for turn in talk:
        if turn.role not in expected:
            return [Problem("role_order", _place([turn]), f"{turn.role}, expected {' or '.join(expected)}", ORDER)]
        expected = ("tool",) if turn.calls else FOLLOWS[turn.role]
    if talk[-1].role != "assistant":
        seen = "a question at the end" if talk[-1].role == "user" else "the result of a tool at the end"
        return [Problem("role_order", _place(talk), seen, "add the answer, or cut it")]
    return []


def _place(turns: list[Turn]) -> str:
    """The last turn, as the row names it."""
    return _place_of(turns[-1].field) if turns else "-"


def _place_of(field: str) -> str:
    return field.removesuffix(".content").removesuffix(".value")


def _trim(text: str) -> str:
    """The text without blank lines at its edges, which would melt into the template's own line breaks."""
    if not text[0].isspace() and not text[-1].isspace() and "\r" not in text:
        return text
    text = text.replace("\r\n", "\n").rstrip()
    return text[BLANK_LINES.match(text).end() :]  # type: ignore[union-attr]
