"""A raw row as turns: whatever columns and role names it uses.

Not here: which columns are meant (columns), tool calls (calls), and the rules for text and order (rows).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbutils.data.calls import calls_of, from_json, short, tools_of
from nbutils.data.columns import MEDIA, Layout, Mapping, layout_of
from nbutils.data.raw import Problem

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    "function_call": "assistant", "tool_call": "assistant",
    "用户": "user", "助手": "assistant", "系统": "system",
}  # fmt: skip
CALLS = ("function_call", "tool_call")
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
    if layout.system:
        turns = _with_system(layout.system, _joined(layout.system, raw, problems), turns, problems)
    tools = tools_of(layout.tools[0], raw[layout.tools[0]], problems) if layout.tools else None
    return Turns(turns, tools, problems)


def _given(value: Any) -> bool:
    """Whether a column holds anything: nothing and blank text are left out, a 0 or a list is not."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def _with_system(names: tuple[str, ...], content: Any, turns: list[Turn], problems: list[Problem]) -> list[Turn]:
    """The turns with the system text of a column before them."""
    if not _given(content):
        return turns
    field = "+".join(names)
    if not turns or turns[0].role != "system":
        return [Turn(field, "system", content), *turns]
    if not isinstance(content, str) or content.strip() != str(turns[0].content).strip():
        todo = f"keep one of them: empty the column, or remove {turns[0].field}"
        problems.append(Problem("role_order", field, f"another system text than {turns[0].field}", todo))
    return turns


def _paired(layout: Layout, raw: dict[str, Any], problems: list[Problem]) -> list[Turn]:
    """Question and answer columns; both may also be lists of messages."""
    asked = _joined(layout.user, raw, problems)
    answered = _joined(layout.assistant, raw, problems)
    if isinstance(asked, list) and isinstance(answered, list):
        return _listed(layout.user[0], asked, problems) + _listed(layout.assistant[0], answered, problems)
    if layout.reasoning:
        reasoning = _joined(layout.reasoning, raw, problems)
        answered = _with_reasoning("+".join(layout.reasoning), answered, reasoning, problems)
    return [Turn("+".join(layout.user), "user", asked), Turn("+".join(layout.assistant), "assistant", answered)]


def _joined(names: tuple[str, ...], raw: dict[str, Any], problems: list[Problem]) -> Any:
    """The text of one column, or the filled ones of several with line breaks between."""
    if len(names) == 1:
        return raw[names[0]]
    values = [raw[name] for name in names]
    filled = [value for value in values if _given(value)]
    if len(filled) == 1 and isinstance(filled[0], str):
        return filled[0]
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            todo = "write text in quotes, or name the columns to take (COLUMNS)"
            problems.append(Problem("wrong_type", name, short(value), todo))
    return "\n".join(value for value in filled if isinstance(value, str))


def _with_reasoning(field: str, content: Any, reasoning: Any, problems: list[Problem], calling: bool = False) -> Any:
    """The content with its reasoning before it, in the form the chat templates of thinking models take apart again."""
    if not _given(reasoning):
        return content
    if not isinstance(reasoning, str):
        problems.append(Problem("wrong_type", field, short(reasoning), "write text in quotes"))
        return content
    answered = isinstance(content, str) and content.strip() and not content.lstrip().startswith("<think>")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content or ''}" if answered or calling else content


def _history(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """Earlier rounds: [[question, answer], ...] as alpaca writes them, or messages."""
    value = from_json(column, value, problems)
    if value is not None and not isinstance(value, list):
        problems.append(Problem("wrong_type", column, short(value), "a list of pairs: [[question, answer], ...]"))
    if not isinstance(value, list) or not value:
        return []
    if all(isinstance(one, dict) for one in value):
        return _listed(column, value, problems)
    turns: list[Turn] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            problems.append(Problem("wrong_type", f"{column}[{index}]", short(pair), "a pair: [question, answer]"))
            continue
        turns += [Turn(f"{column}[{index}]", role, text) for role, text in zip(ROLES[1:], pair, strict=False)]
    return turns


def _listed(column: str, value: Any, problems: list[Problem]) -> list[Turn]:
    """A list of messages: OpenAI's role/content or ShareGPT's from/value."""
    before = len(problems)
    value = from_json(column, value, problems)
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
    """One message as a turn, or nothing when its role or its text cannot be found."""
    if not isinstance(message, dict):
        todo = 'an object: {"role": "user", "content": "..."}'
        problems.append(Problem("wrong_type", field, short(message), todo))
        return None
    role_key, text_key = ("from", "value") if "from" in message and not message.get("role") else ("role", "content")
    for name in MEDIA:
        if message.get(name):
            problems.append(Problem("unsupported_field", f"{field}.{name}", f"{name} is filled", NOT_TEXT))
    calls = next((name for name in ("tool_calls", *CALLS) if message.get(name)), "")
    absent = [key for key in (role_key, text_key) if key not in message and not (key == text_key and calls)]
    for key in absent:
        problems.append(Problem("missing_field", f"{field}.{key}", f"only {', '.join(message)}", f"add {key!r}"))
    said = str(message.get(role_key)).strip().lower()
    role = ALIASES.get(said, said)
    if not absent and role not in ROLES:
        todo = f"use one of: {', '.join(ROLES)} (or human, gpt, function_call, observation)"
        problems.append(Problem("unknown_role", f"{field}.{role_key}", short(message[role_key]), todo))
    if absent or role not in ROLES:
        return None
    if said in CALLS:  # ShareGPT: the text of the turn is the call
        return Turn(
            f"{field}.{text_key}", role, None, calls_of(f"{field}.{text_key}", message.get(text_key), problems), True
        )
    return _spoken(field, role, message, text_key, calls, problems)


def _spoken(
    field: str, role: str, message: dict[str, Any], text_key: str, calls: str, problems: list[Problem]
) -> Turn | None:
    """A turn with its text, its reasoning and the tools it calls or answers for."""
    place = f"{field}.{text_key}"
    content = _parts(place, message.get(text_key), problems)
    if role == "assistant":
        thought = message.get("reasoning_content")
        content = _with_reasoning(f"{field}.reasoning_content", content, thought, problems, bool(calls))
        made = calls_of(f"{field}.{calls}", message[calls], problems) if calls else {}
        return Turn(place, role, content, made, bool(calls))
    if calls:
        seen = f"filled in a turn of {role}"
        problems.append(Problem("unsupported_field", f"{field}.{calls}", seen, "only the assistant calls tools"))
    kept = {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)} if role == "tool" else {}
    return Turn(place, role, content, kept)


def _parts(field: str, content: Any, problems: list[Problem]) -> Any:
    """The text of content given in parts, [{"type": "text", "text": "..."}]; anything else stays as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return content
    for part in content:
        if part["type"] != "text":
            problems.append(Problem("unsupported_field", field, f"a part of type {part['type']}", NOT_TEXT))
        elif not isinstance(part.get("text"), str):
            problems.append(
                Problem("wrong_type", field, short(part), 'a part has text: {"type": "text", "text": "..."}')
            )
    return "\n".join(str(part.get("text")) for part in content)
