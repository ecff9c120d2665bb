"""Tool calls and tools in the one form of the course, whatever way they were written; and values held as JSON text.

Not here: whose turn it is (turns), and which turn may follow (rows).
"""

from __future__ import annotations

import json
from typing import Any

from nbutils.data.raw import Problem
from nbutils.data.text import mask


def from_json(column: str, value: Any, problems: list[Problem]) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if isinstance(value, str) and not value.strip() else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        todo = (
            f"{getattr(problem, 'msg', 'nested too deeply, or a number of too many digits')}: write it with json.dumps"
        )
        problems.append(Problem("malformed_json", column, short(value), todo))
        return None


def calls_of(place: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    """The calls of an assistant turn: {"tool_calls": [...]}, from a list, a single call, or the JSON text of either."""
    value = from_json(place, value, problems)
    listed = enumerate(value if isinstance(value, list) else [value])
    found = [_call(f"{place}[{index}]", call, problems) for index, call in listed]
    return {"tool_calls": [call for call in found if call]}


def _call(field: str, call: Any, problems: list[Problem]) -> dict[str, Any] | None:
    """{"type": "function", "function": {"name", "arguments"}}, the arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        todo = 'a call names its function: {"function": {"name": "...", "arguments": {...}}}'
        problems.append(Problem("wrong_type", field, short(call), todo))
        return None
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments in (None, "", []) else from_json(f"{field}.arguments", arguments, problems)
    if not isinstance(arguments, dict):
        if arguments is not None:
            todo = 'an object by the names of the parameters: {"city": "Bergen"}'
            problems.append(Problem("wrong_type", f"{field}.arguments", short(arguments), todo))
        return None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(call["id"]), **made} if call.get("id") else made


def tools_of(column: str, value: Any, problems: list[Problem]) -> list[dict[str, Any]] | None:
    """The tools a row offers, each as {"type": "function", "function": {...}}; None if there are none."""
    value = from_json(column, value, problems)
    if value in (None, [], {}):
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
    try:
        text = json.dumps(value if not isinstance(value, str) else value[:400], ensure_ascii=False, default=str)[:400]
    except (ValueError, RecursionError):
        text = "nested too deeply, or a number of too many digits"
    text = mask(text)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
