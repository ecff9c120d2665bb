"""Rows of any known shape as `{"messages": [{"role", "content"}, ...]}`, and the rules they have to pass.

A row goes through four steps: its columns (columns), its turns with their roles and tool calls, the rules for text
(text), and the order of the turns. Nothing is tokenized.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson

from nbutils.data.columns import MEDIA, Layout, Mapping, layout_of
from nbutils.data.text import Problem, Row, RowError, examine, is_plain, mask

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    "function_call": "assistant", "tool_call": "assistant",
    "用户": "user", "助手": "assistant", "系统": "system",
}  # fmt: skip
CALLS = ("function_call", "tool_call")
NOT_TEXT = "this course trains plain text: leave it empty"
TOO_LARGE = "nested too deeply, or a number of too many digits"
ORDER = "system first if at all, then user and assistant in turn; tool turns only after an assistant that calls tools"
FOLLOWS = {"": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u00[01][0-9a-f]|[bf]))")  # an invisible character, as JSON writes it
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")


class ChatRow(NamedTuple):
    """A row that passed: its messages and tools, where it came from, and what was done or is to be said about it."""

    file: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trimmed: bool = False
    repaired: bool = False
    warnings: tuple[Problem, ...] = ()


class Turn(NamedTuple):
    """One turn as the row has it; `extras` are the keys beside role and content that a chat template reads."""

    field: str
    role: str
    content: Any
    extras: dict[str, Any] = {}  # noqa: RUF012 (never changed: a turn without extras shares this one)
    calls: bool = False


def check_row(row: Row | RowError, mapping: Mapping | None = None, repair: bool = True) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used."""
    if isinstance(row, RowError):
        return row
    problems: list[Problem] = []
    warnings: list[Problem] = []
    turns, tools = _turns(row.raw, mapping, problems)
    sound = is_plain("\n".join([turn.content for turn in turns if isinstance(turn.content, str)]))
    messages = [_message(turn, sound, repair, problems, warnings) for turn in turns]
    for turn in turns:
        if turn.extras:
            _check_json(_turn_name(turn), turn.extras, problems, warnings)
    if tools:
        _check_json("tools", tools, problems, warnings)
    problems = problems or _order_problems(turns)
    if problems:
        return RowError(row.file, row.line, row.raw, tuple(problems))
    repaired = any(warning.kind == "mojibake" for warning in warnings)
    changed = any(turn.content != made["content"] for turn, made in zip(turns, messages, strict=True) if turn.content)
    if row.encoding:
        todo = "nothing: it was converted; look whether it reads well"
        warnings.append(Problem("encoding", "-", f"written in {row.encoding}", todo))
    return ChatRow(row.file, row.line, messages, tools, changed and not repaired, repaired, tuple(warnings))


def problems_of(raw: Any, mapping: Mapping | None = None) -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used."""
    checked = check_row(Row("row", 1, raw), mapping)
    return list(checked.problems) if isinstance(checked, RowError) else []


def _turns(
    raw: Any, mapping: Mapping | None, problems: list[Problem]
) -> tuple[list[Turn], list[dict[str, Any]] | None]:
    """The turns of a row and its tools, whatever columns it uses."""
    if not isinstance(raw, dict):
        problems.append(Problem("wrong_type", "-", short(raw), 'a row is an object: {"messages": [...]}'))
        return [], None
    layout = layout_of(tuple(raw), mapping)
    if layout.problem:
        problems.append(layout.problem)
        return [], None
    problems += [
        Problem("unsupported_field", name, f"{name} is filled", NOT_TEXT) for name in layout.media if raw[name]
    ]
    if layout.user:
        turns = _question_and_answer(layout, raw, problems)
    else:
        turns = _from_messages(layout.messages[0], raw[layout.messages[0]], problems)
    if layout.history:
        turns = _from_history(layout.history[0], raw[layout.history[0]], problems) + turns
    if layout.system:
        turns = _with_system("+".join(layout.system), _joined(layout.system, raw, problems), turns, problems)
    return turns, _tools(layout.tools[0], raw[layout.tools[0]], problems) if layout.tools else None


def _is_given(value: Any) -> bool:
    """Whether a column holds anything: nothing and blank text are left out, a 0 or a list is not."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def _with_system(field: str, content: Any, turns: list[Turn], problems: list[Problem]) -> list[Turn]:
    """The turns with the system text of a column before them."""
    if not _is_given(content):
        return turns
    if not turns or turns[0].role != "system":
        return [Turn(field, "system", content), *turns]
    if not isinstance(content, str) or content.strip() != str(turns[0].content).strip():
        todo = f"keep one of them: empty the column, or remove {turns[0].field}"
        problems.append(Problem("role_order", field, f"another system text than {turns[0].field}", todo))
    return turns


def _question_and_answer(layout: Layout, raw: dict[str, Any], problems: list[Problem]) -> list[Turn]:
    """The turns of question and answer columns, which may also be lists of messages."""
    question, answer = _joined(layout.user, raw, problems), _joined(layout.assistant, raw, problems)
    if isinstance(question, list) and isinstance(answer, list):
        turns = _from_messages(layout.user[0], question, problems)
        return turns + _from_messages(layout.assistant[0], answer, problems)
    if layout.reasoning:
        reasoning = _joined(layout.reasoning, raw, problems)
        answer = _with_reasoning("+".join(layout.reasoning), answer, reasoning, problems)
    return [Turn("+".join(layout.user), "user", question), Turn("+".join(layout.assistant), "assistant", answer)]


def _joined(names: tuple[str, ...], raw: dict[str, Any], problems: list[Problem]) -> Any:
    """The value of one column, or the texts of several with line breaks between."""
    if len(names) == 1:
        return raw[names[0]]
    for name in names:
        if raw[name] is not None and not isinstance(raw[name], str):
            todo = "write text in quotes, or name the columns to take (COLUMNS)"
            problems.append(Problem("wrong_type", name, short(raw[name]), todo))
    return "\n".join(raw[name] for name in names if isinstance(raw[name], str) and raw[name].strip())


def _with_reasoning(field: str, content: Any, reasoning: Any, problems: list[Problem], calls: bool = False) -> Any:
    """The content with its reasoning before it, in the form the chat templates of thinking models take apart again."""
    if not _is_given(reasoning):
        return content
    if not isinstance(reasoning, str):
        problems.append(Problem("wrong_type", field, short(reasoning), "write text in quotes"))
        return content
    answered = isinstance(content, str) and content.strip() and not content.lstrip().startswith("<think>")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content or ''}" if answered or calls else content


def _from_history(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """Earlier rounds: [[question, answer], ...] as alpaca writes them, or messages."""
    value = _from_json(column, value, problems)
    if value is None or value == []:
        return []
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return _from_messages(column, value, problems)
    turns: list[Turn] = []
    for index, pair in enumerate(value if isinstance(value, list) else [value]):
        field = f"{column}[{index}]" if isinstance(value, list) else column
        if isinstance(pair, list | tuple) and len(pair) == 2:
            turns += [Turn(field, "user", pair[0]), Turn(field, "assistant", pair[1])]
        else:
            problems.append(Problem("wrong_type", field, short(pair), "a list of pairs: [[question, answer], ...]"))
    return turns


def _from_messages(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """A list of messages: OpenAI's role/content or ShareGPT's from/value."""
    before = len(problems)
    value = _from_json(column, value, problems)
    if len(problems) == before and not isinstance(value, list):
        todo = 'a list: [{"role": "user", "content": "..."}, ...]'
        problems.append(Problem("wrong_type", column, short(value), todo))
    if len(problems) > before:
        return []
    if not value:
        problems.append(Problem("empty", column, "[]", "give at least one question and one answer"))
    turns = (_from_message(f"{column}[{index}]", message, problems) for index, message in enumerate(value))
    return [turn for turn in turns if turn is not None]


def _from_message(field: str, message: Any, problems: list[Problem]) -> Turn | None:
    """One message as a turn, or nothing when its role or its text cannot be found."""
    if not isinstance(message, dict):
        problems.append(Problem("wrong_type", field, short(message), 'an object: {"role": "user", "content": "..."}'))
        return None
    role_key, text_key = ("from", "value") if "from" in message and not message.get("role") else ("role", "content")
    for name in MEDIA:
        if message.get(name):
            problems.append(Problem("unsupported_field", f"{field}.{name}", f"{name} is filled", NOT_TEXT))
    calls_key = next((name for name in ("tool_calls", *CALLS) if message.get(name)), "")
    absent = [key for key in (role_key, text_key) if key not in message and not (key == text_key and calls_key)]
    for key in absent:
        problems.append(Problem("missing_field", f"{field}.{key}", f"only {', '.join(message)}", f"add {key!r}"))
    name = str(message.get(role_key)).strip().lower()
    role = ALIASES.get(name, name)
    if not absent and role not in ROLES:
        todo = f"use one of: {', '.join(ROLES)} (or human, gpt, function_call, observation)"
        problems.append(Problem("unknown_role", f"{field}.{role_key}", short(message[role_key]), todo))
    if absent or role not in ROLES:
        return None
    place = f"{field}.{text_key}"
    if name in CALLS:  # ShareGPT: the text of the turn is the call
        return Turn(place, role, None, _tool_calls(place, message.get(text_key), problems), True)
    content = _text_parts(place, message.get(text_key), problems)
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        content = _with_reasoning(f"{field}.reasoning_content", content, reasoning, problems, bool(calls_key))
        calls = _tool_calls(f"{field}.{calls_key}", message[calls_key], problems) if calls_key else {}
        return Turn(place, role, content, calls, bool(calls_key))
    if calls_key:
        seen = f"filled in a turn of {role}"
        problems.append(Problem("unsupported_field", f"{field}.{calls_key}", seen, "only the assistant calls tools"))
    names = [key for key in ("name", "tool_call_id") if message.get(key)] if role == "tool" else []
    return Turn(place, role, content, {key: str(message[key]) for key in names})


def _text_parts(field: str, content: Any, problems: list[Problem]) -> Any:
    """The text of content given in parts, [{"type": "text", "text": "..."}]; anything else stays as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return content
    for part in content:
        if part["type"] != "text":
            problems.append(Problem("unsupported_field", field, f"a part of type {part['type']}", NOT_TEXT))
        elif not isinstance(part.get("text"), str):
            todo = 'a part has text: {"type": "text", "text": "..."}'
            problems.append(Problem("wrong_type", field, short(part), todo))
    return "\n".join(str(part.get("text")) for part in content)


def _from_json(field: str, value: Any, problems: list[Problem]) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if isinstance(value, str) and not value.strip() else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        todo = f"{getattr(problem, 'msg', TOO_LARGE)}: write it with json.dumps"
        problems.append(Problem("malformed_json", field, short(value), todo))
        return None


def _tool_calls(field: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    """The calls of a turn, {"tool_calls": [...]}, from a list, a single call, or the JSON text of either."""
    value = _from_json(field, value, problems)
    listed = enumerate(value if isinstance(value, list) else [value])
    calls = [_tool_call(f"{field}[{index}]", call, problems) for index, call in listed]
    return {"tool_calls": [call for call in calls if call]}


def _tool_call(field: str, call: Any, problems: list[Problem]) -> dict[str, Any] | None:
    """{"type": "function", "function": {"name", "arguments"}}, the arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        todo = 'a call names its function: {"function": {"name": "...", "arguments": {...}}}'
        problems.append(Problem("wrong_type", field, short(call), todo))
        return None
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments in (None, "", []) else _from_json(f"{field}.arguments", arguments, problems)
    if not isinstance(arguments, dict):
        if arguments is not None:
            todo = 'an object by the names of the parameters: {"city": "Bergen"}'
            problems.append(Problem("wrong_type", f"{field}.arguments", short(arguments), todo))
        return None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(call["id"]), **made} if call.get("id") else made


def _tools(column: str, value: Any, problems: list[Problem]) -> list[dict[str, Any]] | None:
    """The tools a row offers, each as {"type": "function", "function": {...}}; None if there are none."""
    value = _from_json(column, value, problems)
    if value in (None, [], {}):
        return None
    tools = []
    for index, tool in enumerate(value if isinstance(value, list) else [value]):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            tools.append({"type": "function", "function": function})
        else:
            todo = 'a tool has a name: {"type": "function", "function": {"name": "...", "parameters": {...}}}'
            problems.append(Problem("wrong_type", f"{column}[{index}]", short(tool), todo))
    return tools


def short(value: Any) -> str:
    """What was seen, with its type, on one short line, private data masked."""
    try:
        text = json.dumps(value if not isinstance(value, str) else value[:400], ensure_ascii=False, default=str)[:400]
    except (ValueError, RecursionError):
        text = TOO_LARGE
    text = mask(text)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def _message(turn: Turn, sound: bool, repair: bool, problems: list[Problem], warnings: list[Problem]) -> dict[str, Any]:
    """One message of the stored row; what is wrong with its text goes to `problems`."""
    text = turn.content
    if isinstance(text, str) and text and not text.isspace():
        text = text if sound else examine(turn.field, text, repair, problems, warnings)
        return {"role": turn.role, "content": _trimmed(text), **turn.extras}
    if text is not None and not isinstance(text, str):
        problems.append(Problem("wrong_type", turn.field, short(text), "write it as text, in quotes"))
    elif not turn.calls:  # an assistant that calls tools need not say anything
        problems.append(Problem("empty", turn.field, short(text), "write the text, or remove the row"))
    return {"role": turn.role, "content": "", **turn.extras}


def _trimmed(text: str) -> str:
    """The text without blank lines at its edges, which would melt into the template's own line breaks."""
    if not text[0].isspace() and not text[-1].isspace() and "\r" not in text:
        return text
    text = text.replace("\r\n", "\n").rstrip()
    return text[_BLANK_LINES.match(text).end() :]  # type: ignore[union-attr]


def _check_json(field: str, value: Any, problems: list[Problem], warnings: list[Problem]) -> None:
    """The rules of a text for the calls and tools of a row, which must be JSON; nothing in them is repaired."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
        if "null" in text:
            json.dumps(value, allow_nan=False)  # orjson writes null for NaN
    except (TypeError, ValueError) as problem:
        todo = "plain JSON: text in UTF-8, numbers of at most 64 bits, no NaN, no dates"
        problems.append(Problem("wrong_type", field, str(problem), todo))
        return
    if "\\" in text and (found := _ESCAPED.search(text)):
        seen = f"{found[1]} in {short(value)}"
        problems.append(Problem("control_character", field, seen, "remove the invisible character"))
    if not is_plain(text):
        examine(field, text, False, problems, warnings)


def _order_problems(turns: list[Turn]) -> list[Problem]:
    """system once and first, then user and assistant in turn, tools where they were called, the assistant last."""
    if [turn.role for turn in turns] == ["user", "assistant"]:
        return []
    talk = turns[1:] if turns and turns[0].role == "system" else turns
    if not any(turn.role == "assistant" for turn in talk):
        seen = ", ".join(turn.role for turn in turns) or "no turns"
        field = _turn_name(turns[-1]) if turns else "-"
        return [Problem("no_assistant", field, seen, "add the answer the model should learn")]
    expected = FOLLOWS[""]
    for turn in talk:
        if turn.role not in expected:
            seen = f"{turn.role}, expected {' or '.join(expected)}"
            return [Problem("role_order", _turn_name(turn), seen, ORDER)]
        expected = ("tool",) if turn.calls else FOLLOWS[turn.role]
    if talk[-1].role != "assistant":
        seen = "a question at the end" if talk[-1].role == "user" else "the result of a tool at the end"
        return [Problem("role_order", _turn_name(talk[-1]), seen, "add the answer, or cut it")]
    return []


def _turn_name(turn: Turn) -> str:
    return turn.field.removesuffix(".content").removesuffix(".value")
