"""A raw row as turns: whatever columns, role names and ways to write a tool call it uses.

Not here: which columns are meant (columns), and the rules for text and order (rows).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from nbutils.data.columns import Layout, Mapping, layout_of
from nbutils.data.raw import Problem
from nbutils.data.text import mask

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    "function_call": "assistant", "tool_call": "assistant",
    "用户": "user", "助手": "assistant", "系统": "system",
}  # fmt: skip
CALLS = ("function_call", "tool_call")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
NOT_TEXT = "this course trains plain text: leave it empty"


class Turn(NamedTuple):
    """One turn as the row has it; `extras` are the keys beside role and content a chat template reads."""

    field: str
    role: str
    content: Any
    extras: dict[str, Any] = {}  # noqa: RUF012 (never changed: a turn without extras shares this one)
    calls: bool = False


class Turns(NamedTuple):
    """A row on its way: its turns, the tools it offers, and what could not be understood."""

    turns: list[Turn]
    tools: list[dict[str, Any]] | None
    problems: list[Problem]


def turns_of(raw: Any, mapping: Mapping | None = None) -> Turns:
    """The row as turns, whatever columns it uses."""
    if not isinstance(raw, dict):
        return Turns([], None, [Problem("wrong_type", "-", short(raw), 'a row is an object: {"messages": [...]}')])
    layout = layout_of(tuple(raw), mapping)
    if layout.problem:
        return Turns([], None, [layout.problem])
    problems = [Problem("unsupported_field", name, f"{name} is filled", NOT_TEXT) for name in layout.media if raw[name]]
    turns = _listed(layout.messages[0], raw[layout.messages[0]], problems) if layout.messages else []
    if layout.user:
        turns = _paired(layout, raw, problems)
    if layout.history:
        turns = _history(layout.history[0], raw[layout.history[0]], problems) + turns
    if layout.system and not (turns and turns[0].role == "system"):
        content = _joined(layout.system, raw, problems)
        turns = [Turn("+".join(layout.system), "system", content), *turns] if content else turns
    tools = tools_of(layout.tools[0], raw[layout.tools[0]], problems) if layout.tools else None
    return Turns(turns, tools, problems)


def _paired(layout: Layout, raw: dict[str, Any], problems: list[Problem]) -> list[Turn]:
    """Question and answer columns; both may also be lists of messages."""
    asked = _joined(layout.user, raw, problems)
    answered = _joined(layout.assistant, raw, problems)
    if isinstance(asked, list) and isinstance(answered, list):
        return _listed(layout.user[0], asked, problems) + _listed(layout.assistant[0], answered, problems)
    if layout.reasoning:
        answered = _with_reasoning(answered, _joined(layout.reasoning, raw, problems))
    return [Turn("+".join(layout.user), "user", asked), Turn("+".join(layout.assistant), "assistant", answered)]


def _joined(names: tuple[str, ...], raw: dict[str, Any], problems: list[Problem]) -> Any:
    """The text of one column, or the filled ones of several with line breaks between."""
    if len(names) == 1:
        return raw[names[0]]
    values = [raw[name] for name in names]
    filled = [value for value in values if value]
    if len(filled) == 1 and isinstance(filled[0], str):
        return filled[0]
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            problems.append(Problem("wrong_type", name, short(value), "write text in quotes"))
    return "\n".join(str(value) for value in values if value is not None and str(value).strip())


def _with_reasoning(content: Any, reasoning: Any, calling: bool = False) -> Any:
    """The content with its reasoning before it, in the form the chat templates of thinking models take apart again."""
    if not isinstance(reasoning, str) or not reasoning.strip():
        return content
    answered = isinstance(content, str) and content.strip() and not content.lstrip().startswith("<think>")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content or ''}" if answered or calling else content


def _history(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """Earlier rounds, as alpaca writes them: [[question, answer], ...]."""
    value = _from_json(column, value, problems)
    turns: list[Turn] = []
    for index, pair in enumerate(value or []) if isinstance(value, list) else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            problems.append(Problem("wrong_type", f"{column}[{index}]", short(pair), "a pair: [question, answer]"))
            continue
        turns += [Turn(f"{column}[{index}]", role, text) for role, text in zip(ROLES[1:], pair, strict=False)]
    if value and not isinstance(value, list):
        problems.append(Problem("wrong_type", column, short(value), "a list of pairs: [[question, answer], ...]"))
    return turns


def _from_json(column: str, value: Any, problems: list[Problem]) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if isinstance(value, str) and not value.strip() else value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as problem:
        todo = f"{getattr(problem, 'msg', 'nested too deeply')}: write it with json.dumps"
        problems.append(Problem("malformed_json", column, short(value), todo))
        return None


def _listed(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """A list of messages: OpenAI's role/content or ShareGPT's from/value."""
    before = len(problems)
    value = _from_json(column, value, problems)
    if len(problems) > before:
        return []
    if not isinstance(value, list):
        todo = 'a list: [{"role": "user", "content": "..."}, ...]'
        problems.append(Problem("wrong_type", column, short(value), todo))
        return []
    if not value:
        problems.append(Problem("empty", column, "[]", "give at least one question and one answer"))
    turns = [_message(f"{column}[{index}]", message, problems) for index, message in enumerate(value)]
    return [turn for turn in turns if turn is not None]


def _message(field: str, message: Any, problems: list[Problem]) -> Turn | None:
    if not isinstance(message, dict):
        todo = 'an object: {"role": "user", "content": "..."}'
        problems.append(Problem("wrong_type", field, short(message), todo))
        return None
    role_key, text_key = ("from", "value") if "from" in message and not message.get("role") else ("role", "content")
    for name in MEDIA:
        if message.get(name):
            problems.append(Problem("unsupported_field", f"{field}.{name}", f"{name} is filled", NOT_TEXT))
    calls = message.get("tool_calls") or message.get("function_call")
    absent = [key for key in (role_key, text_key) if key not in message and not (key == text_key and calls)]
    for key in absent:
        problems.append(Problem("missing_field", f"{field}.{key}", f"only {', '.join(message)}", f"add {key!r}"))
    if absent:
        return None
    said = str(message[role_key]).strip().lower()
    role, content = ALIASES.get(said, said), message.get(text_key)
    if role not in ROLES:
        todo = f"use one of: {', '.join(ROLES)} (or human, gpt, function_call, observation)"
        problems.append(Problem("unknown_role", f"{field}.{role_key}", short(message[role_key]), todo))
        return None
    place = f"{field}.{text_key}"
    if said in CALLS:
        return _calling(place, None, _from_json(place, content, problems), f"{field}.{text_key}", problems)
    content = _parts(place, content, problems)
    if role == "assistant":
        content = _with_reasoning(content, message.get("reasoning_content"), bool(calls))
    if calls:
        named = "tool_calls" if message.get("tool_calls") else "function_call"
        if role != "assistant":
            todo = "only the assistant calls tools"
            problems.append(Problem("unsupported_field", f"{field}.{named}", f"filled in a turn of {role}", todo))
            return None
        return _calling(place, content, calls, f"{field}.{named}", problems)
    kept = {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)} if role == "tool" else {}
    return Turn(place, role, content, kept)


def _parts(field: str, content: Any, problems: list[Problem]) -> Any:
    """The text of content given in parts, [{"type": "text", "text": "..."}]; anything else stays as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return content
    for part in content:
        if part["type"] != "text":
            problems.append(Problem("unsupported_field", field, f"a part of type {part['type']}", NOT_TEXT))
    return "\n".join(str(part.get("text", part["type"])) for part in content)


def _calling(field: str, content: Any, calls: Any, place: str, problems: list[Problem]) -> Turn | None:
    """An assistant turn that calls tools, with every call in the one form of the course."""
    calls = _from_json(place, calls, problems)
    found = [
        _call(f"{place}[{index}]", call, problems)
        for index, call in enumerate(calls if isinstance(calls, list) else [calls])
    ]
    return Turn(field, "assistant", content, {"tool_calls": [call for call in found if call]}, calls=True)


def _call(field: str, call: Any, problems: list[Problem]) -> dict[str, Any] | None:
    """{"type": "function", "function": {"name", "arguments"}}, the arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        todo = 'a call names its function: {"function": {"name": "...", "arguments": {...}}}'
        problems.append(Problem("wrong_type", field, short(call), todo))
        return None
    arguments = function.get("arguments", function.get("parameters"))
    arguments = _from_json(f"{field}.arguments", arguments, problems) if arguments else {}
    if not isinstance(arguments, dict):
        if arguments is not None:
            todo = 'an object by the names of the parameters: {"city": "Bergen"}'
            problems.append(Problem("wrong_type", f"{field}.arguments", short(arguments), todo))
        return None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(call["id"]), **made} if call.get("id") else made


def tools_of(column: str, value: Any, problems: list[Problem]) -> list[dict[str, Any]] | None:
    """The tools a row offers, each as {"type": "function", "function": {...}}; None if there are none."""
    value = _from_json(column, value, problems)
    if not value:
        return None
    tools = []
    for index, tool in enumerate(value if isinstance(value, list) else [value]):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            todo = 'a tool has a name: {"type": "function", "function": {"name": "...", "parameters": {...}}}'
            problems.append(Problem("wrong_type", f"{column}[{index}]", short(tool), todo))
            continue
        tools.append({"type": "function", "function": function})
    return tools


def short(value: Any) -> str:
    """What was seen, with its type, on one short line, private data masked."""
    text = mask(json.dumps(value if not isinstance(value, str) else value[:400], ensure_ascii=False, default=str)[:400])
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
