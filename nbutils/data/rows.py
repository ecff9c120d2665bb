"""Rows of any known shape as `{"messages": [{"role", "content"}, ...]}`, and the rules they have to pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from nbutils.data.text import Problem, Problems, Row, RowError, examine, short
from nbutils.errors import CourseError

LISTS = ("messages", "conversations", "conversation")
PAIRS = [  # question, answer, and an optional second part of the question
    (*names.split("/"), "")[:3]
    for names in (
        "instruction/output/input", "instruction/response/context", "instruction/response/input", "prompt/completion",
        "prompt/response", "question/answer/context", "question/answer/input", "question/response", "query/response",
        "query/answer", "user/assistant", "problem/solution", "input/output", "input/content", "指令/输出/输入",
        "问题/答案", "问题/回答", "問題/答案", "問題/回答", "提问/回答", "用户/助手", "输入/输出", "q/a", "问/答",
    )
]  # fmt: skip
OPTIONAL = {  # parts that a row may have beside the question and the answer, by the names of their columns
    "system": ("system", "system_prompt", "系统", "系统提示"),
    "tools": ("tools", "工具"),
    "history": ("history", "历史"),
    "reasoning": ("reasoning_content", "complex_cot", "思考过程"),
}
PARTS = ("user", "assistant", "system", "reasoning", "messages", "tools", "history")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
WIDE_SIGNS = str.maketrans("，；＝＋\n;", ",,=+,,")
NAME_COLUMNS = 'name the columns: COLUMNS = "user=first+second, assistant=third" in lesson 02, or --columns "..."'
ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool", "用户": "user",
    "function_call": "assistant", "tool_call": "assistant", "助手": "assistant", "系统": "system",
}  # fmt: skip
CALLS = ("function_call", "tool_call")
NOT_TEXT = "this course trains plain text: leave it empty"
AS_TEXT = "write it as text, in quotes"
ORDER = "system first if at all, then user and assistant in turn; tool turns only after an assistant that calls tools"
FOLLOWS = {"": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")
Parts = dict[str, tuple[str, ...]]  # the columns of each part of a row


class ChatRow(NamedTuple):
    """A row that passed: its messages and tools, where it came from, and what was done or is to be said about it."""

    file: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trimmed: bool = False
    warnings: tuple[Problem, ...] = ()


class Turn(NamedTuple):
    """One turn as the row has it; `extras` are the keys beside role and content that a chat template reads."""

    field: str
    role: str
    content: Any
    extras: dict[str, Any] = {}  # noqa: RUF012 (never changed: a turn without extras shares this one)
    calls: bool = False


def parse_mapping(text: str) -> Parts:
    """The columns of each part, as a learner wrote them: `user=标题+正文, assistant=回复`."""
    found: Parts = {}
    for piece in filter(str.strip, text.translate(WIDE_SIGNS).split(",")):
        part, _, names = piece.partition("=")
        columns = tuple(filter(None, map(str.strip, names.split("+"))))
        if part.strip() not in PARTS or part.strip() in found or not columns:
            raise CourseError("data.bad_mapping", mapping=text, reason=piece.strip(), parts=", ".join(PARTS))
        found[part.strip()] = columns
    if ("user" in found) != ("assistant" in found) or {"messages", "user"} <= found.keys():
        raise CourseError("data.bad_mapping", mapping=text, reason=", ".join(found), parts=", ".join(PARTS))
    return {part: found[part] for part in PARTS if part in found}


@lru_cache(maxsize=1024)
def layout_of(columns: tuple[str, ...], mapping: str = "") -> Parts | Problem:
    """Which columns hold which part; decided once for all rows that have the same columns."""
    known = {_normalized(name): name for name in reversed(columns)}
    named = parse_mapping(mapping)
    if absent := [name for names in named.values() for name in names if _normalized(name) not in known]:
        return Problem("missing_field", ", ".join(absent), f"only {', '.join(columns)}", NAME_COLUMNS)
    named = {part: tuple(known[_normalized(name)] for name in names) for part, names in named.items()}
    found = {} if "user" in named or "messages" in named else _recognized(known, ", ".join(columns))
    return found if isinstance(found, Problem) else found | named


def _normalized(name: object) -> str:
    return str(name).strip().strip("\ufeff").strip().lower().replace(" ", "_")


def _recognized(known: dict[str, str], columns: str) -> Parts | Problem:
    lists = [name for name in LISTS if name in known]
    fits = {frozenset(known.keys() & set(pair)): pair for pair in reversed(PAIRS) if set(pair[:2]) <= known.keys()}
    pairs = [pair for used, pair in reversed(fits.items()) if not any(used < other for other in fits)]
    if len(lists) + len(pairs) > 1:
        seen = f"fits {', '.join([*lists, *map('/'.join, pairs)])}"
        return Problem("ambiguous_columns", columns, seen, NAME_COLUMNS)
    if not lists and not pairs:
        halves = [half for pair in PAIRS for half in (pair[:2], pair[1::-1]) if half[0] in known and len(half[0]) > 1]
        if halves:
            return Problem("missing_field", halves[0][1], f"only {columns}", f"add the column, or {NAME_COLUMNS}")
        return Problem("unknown_columns", "-", columns or "no columns", NAME_COLUMNS)
    parts = {part: tuple(known[name] for name in names if name in known)[:1] for part, names in OPTIONAL.items()}
    parts["media"] = tuple(known[name] for name in MEDIA if name in known)
    if lists:
        parts |= {"messages": (known[lists[0]],), "reasoning": ()}
    else:
        question, answer, extra = pairs[0]
        parts["user"] = tuple(known[name] for name in (question, extra) if name in known)
        parts["assistant"] = (known[answer],)
    return {part: names for part, names in parts.items() if names}


def check_row(row: Row | RowError, mapping: str = "", repair: bool = True) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used."""
    if isinstance(row, RowError):
        return row
    problems, warnings = Problems(), Problems()
    turns, tools = _turns(row.raw, mapping, problems)
    messages = [_message(turn, repair, problems, warnings) for turn in turns]
    for turn in turns:
        if turn.extras:
            _check_json(_turn_name(turn), turn.extras, problems, warnings)
    if tools:
        _check_json("tools", tools, problems, warnings)
    if not problems:
        _check_order(turns, problems)
    if problems:
        return RowError(row.file, row.line, row.raw, tuple(problems))
    changed = any(
        [turn.content != message["content"] for turn, message in zip(turns, messages, strict=True) if turn.content]
    )
    trimmed = changed and all(warning.kind != "mojibake" for warning in warnings)
    if row.encoding:
        todo = "nothing: it was converted; look whether it reads well"
        warnings.add("encoding", "-", f"written in {row.encoding}", todo)
    return ChatRow(row.file, row.line, messages, tools, trimmed, tuple(warnings))


def problems_of(raw: Any, mapping: str = "") -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used."""
    checked = check_row(Row("row", 1, raw), mapping)
    return list(checked.problems) if isinstance(checked, RowError) else []


def _turns(raw: Any, mapping: str, problems: Problems) -> tuple[list[Turn], list[dict[str, Any]] | None]:
    if not isinstance(raw, dict):
        problems.add("wrong_type", "-", short(raw), 'a row is an object: {"messages": [...]}')
        return [], None
    parts = layout_of(tuple(raw), mapping)
    if isinstance(parts, Problem):
        problems.append(parts)
        return [], None
    for name in parts.get("media", ()):
        if raw[name]:
            problems.add("unsupported_field", name, f"{name} is filled", NOT_TEXT)
    if "messages" in parts:
        turns = _from_messages(parts["messages"][0], raw[parts["messages"][0]], problems)
    elif all(isinstance(raw[parts[part][0]], list) for part in ("user", "assistant")):  # TRL: prompt and completion
        columns = (parts["user"][0], parts["assistant"][0])
        turns = [turn for column in columns for turn in _from_messages(column, raw[column], problems)]
    else:
        turns = [_from_columns("user", parts, raw, problems), _from_columns("assistant", parts, raw, problems)]
    if "history" in parts:
        turns = _from_history(parts["history"][0], raw[parts["history"][0]], problems) + turns
    if "system" in parts and not _is_blank((system := _from_columns("system", parts, raw, problems)).content):
        turns = [system, *turns]
    offered = _functions("tools", raw[parts["tools"][0]], problems) if "tools" in parts else ()
    return turns, [{"type": "function", "function": function} for _, _, function in offered] or None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _from_columns(role: str, parts: Parts, raw: dict[str, Any], problems: Problems) -> Turn:
    """The value of one column, or the texts of several with line breaks between."""
    names = parts[role]
    values = [raw[name] for name in names]
    field, content = "+".join(names), values[0]
    if len(names) > 1:
        for name, value in zip(names, values, strict=True):
            if value is not None and not isinstance(value, str):
                problems.add("wrong_type", name, short(value), AS_TEXT)
        content = "\n".join([value for value in values if isinstance(value, str) and value.strip()])
    if role == "assistant" and "reasoning" in parts:
        reasoning = _from_columns("reasoning", parts, raw, problems)
        content = _with_reasoning(reasoning.field, content, reasoning.content, problems)
    return Turn(field, role, content)


def _with_reasoning(field: str, content: Any, reasoning: Any, problems: Problems, calls: bool = False) -> Any:
    """The content with its reasoning before it, in the form the chat templates of thinking models take apart again."""
    if _is_blank(reasoning):
        return content
    if not isinstance(reasoning, str):
        problems.add("wrong_type", field, short(reasoning), AS_TEXT)
        return content
    answered = isinstance(content, str) and content.strip() and not content.lstrip().startswith("<think>")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content or ''}" if answered or calls else content


def _from_history(column: str, value: Any, problems: Problems) -> list[Turn]:
    """Earlier rounds: [[question, answer], ...], or messages."""
    turns: list[Turn] = []
    value = _from_json(column, value, problems)
    if value and isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return _from_messages(column, value, problems)
    for index, pair in enumerate([] if value is None else value if isinstance(value, list) else [value]):
        field = f"{column}[{index}]"
        if isinstance(pair, list) and len(pair) == 2:
            turns += [Turn(field, "user", pair[0]), Turn(field, "assistant", pair[1])]
        else:
            problems.add("wrong_type", field, short(pair), "a list of pairs: [[question, answer], ...]")
    return turns


def _from_messages(column: str, value: Any, problems: Problems) -> list[Turn]:
    before, value = len(problems), _from_json(column, value, problems)
    if not isinstance(value, list):
        if len(problems) == before:
            problems.add("wrong_type", column, short(value), 'a list: [{"role": "user", "content": "..."}, ...]')
        return []
    if not value:
        problems.add("empty", column, "[]", "give at least one question and one answer")
    turns = [_from_message(f"{column}[{index}]", message, problems) for index, message in enumerate(value)]
    return [turn for turn in turns if turn is not None]


def _from_message(field: str, message: Any, problems: Problems) -> Turn | None:
    if not isinstance(message, dict):
        problems.add("wrong_type", field, short(message), 'an object: {"role": "user", "content": "..."}')
        return None
    role_key, text_key = ("from", "value") if "from" in message and not message.get("role") else ("role", "content")
    calls_key = next((name for name in ("tool_calls", *CALLS) if message.get(name)), "")
    absent = [key for key in (role_key, text_key) if key not in message and not (key == text_key and calls_key)]
    for key in absent:
        problems.add("missing_field", f"{field}.{key}", f"only {', '.join(message)}", f"add {key!r}")
    name = str(message.get(role_key)).strip().lower()
    role = ALIASES.get(name, name)
    if not absent and role not in ROLES:
        todo = f"use one of: {', '.join(ROLES)} (or human, gpt, function_call, observation)"
        problems.add("unknown_role", f"{field}.{role_key}", short(message[role_key]), todo)
    if absent or role not in ROLES:
        return None
    place, content = f"{field}.{text_key}", _joined_parts(message.get(text_key))
    if name in CALLS:  # ShareGPT: the text of the turn is the call
        return Turn(place, role, None, _tool_calls(place, content, problems), True)
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        content = _with_reasoning(f"{field}.reasoning_content", content, reasoning, problems, bool(calls_key))
        calls = _tool_calls(f"{field}.{calls_key}", message[calls_key], problems) if calls_key else {}
        return Turn(place, role, content, calls, bool(calls_key))
    names = [key for key in ("name", "tool_call_id") if message.get(key)] if role == "tool" else []
    return Turn(place, role, content, {key: str(message[key]) for key in names})


def _joined_parts(content: Any) -> Any:
    """The text of content in parts, [{"type": "text", "text": "..."}]; anything else, an image too, stays as it is."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts and len(texts) == len(parts) else content


def _from_json(field: str, value: Any, problems: Problems) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if _is_blank(value) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        problems.add("malformed_json", field, short(value), f"{problem}: write it with json.dumps")
        return None


def _tool_calls(field: str, value: Any, problems: Problems) -> dict[str, Any]:
    calls = []
    for place, call, function in _functions(field, value, problems):
        arguments = function.get("arguments", function.get("parameters")) or {}
        before, arguments = len(problems), _from_json(f"{place}.arguments", arguments, problems)
        if not isinstance(arguments, dict) and len(problems) == before:
            todo = 'an object by the names of the parameters: {"city": "Bergen"}'
            problems.add("wrong_type", f"{place}.arguments", short(arguments), todo)
        entry = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({"id": str(call["id"]), **entry} if call.get("id") else entry)
    return {"tool_calls": calls}


def _functions(field: str, value: Any, problems: Problems) -> Iterator[tuple[str, Any, Any]]:
    """Place, entry and function of each tool or call in a list, a single one, or the JSON text of either."""
    value = _from_json(field, value, problems)
    for index, entry in enumerate(value if isinstance(value, list) else [value] if value not in (None, {}) else []):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"].strip():
            yield f"{field}[{index}]", entry, function
        else:
            todo = 'a function has a name: {"type": "function", "function": {"name": "...", ...}}'
            problems.add("wrong_type", f"{field}[{index}]", short(entry), todo)


def _message(turn: Turn, repair: bool, problems: Problems, warnings: Problems) -> dict[str, Any]:
    text = turn.content
    if isinstance(text, str) and text and not text.isspace():
        text = _trimmed(examine(turn.field, text, repair, problems, warnings))
        return {"role": turn.role, "content": text, **turn.extras}
    if text is not None and not isinstance(text, str):
        problems.add("wrong_type", turn.field, short(text), AS_TEXT)
    elif not turn.calls:  # an assistant that calls tools need not say anything
        problems.add("empty", turn.field, short(text), "write the text, or remove the row")
    return {"role": turn.role, "content": "", **turn.extras}


def _trimmed(text: str) -> str:
    """The text without blank lines at its edges, which would melt into the template's own line breaks."""
    if not text[0].isspace() and not text[-1].isspace() and "\r" not in text:
        return text
    text = text.replace("\r\n", "\n").rstrip()
    return text[_BLANK_LINES.match(text).end() :]  # type: ignore[union-attr]


def _check_json(field: str, value: Any, problems: Problems, warnings: Problems) -> None:
    """The rules of a text for the calls and tools of a row, which must be JSON; nothing in them is repaired."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
        json.dumps(value, allow_nan=False)  # orjson writes null for NaN
    except (TypeError, ValueError) as problem:
        problems.add("wrong_type", field, str(problem), "plain JSON: UTF-8, numbers of 64 bits, no NaN, no dates")
        return
    examine(field, text, False, problems, warnings)


def _check_order(turns: list[Turn], problems: Problems) -> None:
    """system once and first, then user and assistant in turn, tools where they were called, the assistant last."""
    talk = turns[1:] if turns and turns[0].role == "system" else turns
    if all([turn.role != "assistant" for turn in talk]):
        field = _turn_name(turns[-1]) if turns else "-"
        problems.add("no_assistant", field, ", ".join(turn.role for turn in turns), "add the answer to learn")
        return
    expected = FOLLOWS[""]
    for turn in talk:
        if turn.role not in expected:
            problems.add("role_order", _turn_name(turn), f"{turn.role}, expected {' or '.join(expected)}", ORDER)
            return
        expected = ("tool",) if turn.calls else FOLLOWS[turn.role]
    if talk[-1].role != "assistant":
        problems.add("role_order", _turn_name(talk[-1]), f"{talk[-1].role} at the end", "add the answer, or cut it")


def _turn_name(turn: Turn) -> str:
    return turn.field.removesuffix(".content").removesuffix(".value")
