"""Rows of any known shape as `{"messages": [{"role", "content"}, ...]}`, and the rules that they pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import NotRequired, TypedDict

from nbutils.data.texts import (
    Kind,
    Problem,
    find_private,
    find_problems,
    fix_encoding,
    short,
)
from nbutils.errors import CourseError
from nbutils.files import read_yaml
from nbutils.language import tr

PARTS = {"user", "assistant", "system", "reasoning", "messages", "tools"}
TABLE = read_yaml(Path(__file__).with_name("shapes.yaml"))
WIDE_SIGNS = str.maketrans("，；＝＋\n;", ",,=+,,")
ROLES = {name: role for role, names in TABLE["roles"].items() for name in names}
EXTRAS = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}  # what chat templates read beside the text
FOLLOWS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("assistant", "tool"),
}
KINDS: dict[str, Kind] = {  # of pydantic's errors; the others are a wrong type
    "missing": "missing_field",
    "literal_error": "unknown_role",
    "value_error": "malformed_json",
    "too_short": "empty",
}
MEDIA = TABLE["media"]
MEDIA_COLUMNS = TABLE["optional"]["unsupported"]
PLACEHOLDER = re.compile("<(image|video|audio)>")  # in a text, of what another column holds
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
Json = dict[str, Any]  # an object of JSON: a row, a message, a tool, a report
Columns = tuple[str, ...]
Parts = dict[str, Columns]  # the columns of each part of a row


class Row(NamedTuple):
    """A row as the file has it."""

    file: str
    line: int
    raw: Any


class RowError(NamedTuple):
    """A row that cannot be used, with every reason found."""

    file: str
    line: int
    raw: Any
    problems: tuple[Problem, ...]


class ChatRow(NamedTuple):
    """A row that passed: its line, messages and tools, and what was done or is to be said about it."""

    line: int
    messages: list[Json]
    tools: list[Json] | None = None
    trimmed: bool = False
    warnings: tuple[Problem, ...] = ()


class Turn(NamedTuple):
    """One message of a row, with its place in the row."""

    place: str
    message: Json


class InvalidRow(ValueError):
    """Raised with the problems of a row, or of a part of it, that cannot be read."""


def _from_json(value: Any) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return json.loads(value)
    return value


def _role(name: Any) -> str:
    lower = str(name).strip().lower()
    return ROLES.get(lower, lower)


class Function(TypedDict):
    """A function that is called."""

    name: str
    arguments: Annotated[Json, BeforeValidator(_from_json)]


class Call(TypedDict):
    """A call of an assistant."""

    id: NotRequired[str]
    type: NotRequired[str]
    function: Function


class Tool(TypedDict):
    """A tool that is offered; it is stored as it is."""

    function: Json


@with_config(ConfigDict(extra="allow"))
class Message(TypedDict):
    """A message as OpenAI or ShareGPT writes it."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(_role),
        Field(validation_alias=AliasChoices("role", "from")),
    ]
    content: Annotated[str | None, Field(validation_alias=AliasChoices("content", "value"))]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[Call] | None, BeforeValidator(_from_json)]]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


MESSAGES = TypeAdapter[Any](Annotated[list[Message], Field(min_length=1), BeforeValidator(_from_json)])
PAIRS = TypeAdapter[Any](Annotated[list[tuple[str, str]], BeforeValidator(_from_json)])
TOOLS = TypeAdapter[Any](Annotated[list[Tool], BeforeValidator(_from_json)])


def parse_mapping(text: str) -> Parts:
    """The columns of each part, as a learner wrote them.

    Example:
        `parse_mapping("user=标题+正文, assistant=回复")` is `{"user": ("标题", "正文"), "assistant": ("回复",)}`.
    """
    pieces = [piece for piece in text.translate(WIDE_SIGNS).split(",") if piece.strip()]
    parts: Parts = {}
    for piece in pieces:
        part, _, names = piece.partition("=")
        parts[part.strip()] = tuple(filter(None, map(str.strip, names.split("+"))))
    once_each = len(parts) == len(pieces)
    complete = "messages" in parts or {"user", "assistant"} <= parts.keys()
    if pieces and not (once_each and complete and all(parts.values()) and parts.keys() <= PARTS):
        raise CourseError(
            "The columns {mapping!r} are not a valid mapping.",
            todo=(
                'Write them like "user=title+body, assistant=reply", or like "messages=chat"; the parts are user, '
                "assistant, system, reasoning, messages and tools, each once."
            ),
            mapping=text,
        )
    return parts


@lru_cache(maxsize=1024)
def layout_of(columns: Columns, mapping: str = "") -> Parts:
    """Which columns hold which part; decided once for all rows that have the same columns."""
    known = {_normalized(column): column for column in reversed(columns)}
    names = ", ".join(columns)
    if mapping:
        parts = parse_mapping(mapping)
        absent = [column for column in _columns_of(parts) if _normalized(column) not in known]
        if absent:
            raise InvalidRow(Problem("missing_field", ", ".join(absent), names))
        return _present(parts | {"unsupported": MEDIA_COLUMNS}, known)
    complete = []
    partly = []  # what the shapes lack of which a part is there
    for shape in map(parse_mapping, TABLE["shapes"]):
        needed = [joined[0] for joined in shape.values()]
        absent = [column for column in needed if column not in known]
        if not absent:
            complete.append(_present(shape, known))
        elif len(absent) < len(needed):
            partly.append(absent)
    if not complete and partly:
        raise InvalidRow(Problem("missing_field", ", ".join(partly[0]), names))
    if not complete:
        raise InvalidRow(Problem("unknown_columns", tr("the columns"), names))
    used = set(_columns_of(complete[0]))
    if not all(used.issuperset(_columns_of(parts)) for parts in complete):
        raise InvalidRow(Problem("ambiguous_columns", tr("the columns"), names))
    return complete[0] | _present(TABLE["optional"], known)


def _normalized(column: object) -> str:
    return str(column).strip("\ufeff ").lower().replace(" ", "_")


def _columns_of(parts: Parts) -> list[str]:
    return [column for columns in parts.values() for column in columns]


def _present(parts: Parts, known: dict[str, str]) -> Parts:
    """The parts that a row has, with its own names for the columns."""
    present = {}
    for part, columns in parts.items():
        names = [known[name] for name in map(_normalized, columns) if name in known]
        if names:
            present[part] = tuple(names)
    return present


def _validated(adapter: TypeAdapter[Any], value: Any, place: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise InvalidRow(*[_problem_of(details, place) for details in error.errors()]) from error


def _problem_of(error: ErrorDetails, place: str) -> Problem:
    """An error of pydantic as a problem of a row."""
    for part in error["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    value = error["input"]
    kind = KINDS.get(error["type"], "wrong_type")
    if isinstance(value, list) and any(map(_is_medium, value)):
        kind = "unsupported_field"
    return Problem(kind, place, short(value))


def _is_medium(part: Any) -> bool:
    """Whether a part of a message's content is an image, a video or a sound."""
    if not isinstance(part, dict):
        return False
    return part.get("type") in MEDIA or any(part.get(name) for name in MEDIA)


def check_row(row: Row | RowError, mapping: str = "", repair: bool = True) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used.

    Example:
        `check_row(Row("mine", 1, {"question": "Hello?", "answer": "Hi."})).messages`
    """
    if isinstance(row, RowError):
        return row
    check = _Check(repair)
    try:
        parts = _parts_of(row.raw, mapping)
        turns = _turns(row.raw, parts)
        messages = [check.message(turn) for turn in turns]
        tools = check.tools(row.raw, parts)
        if not check.problems:
            _require_order(turns)
    except InvalidRow as invalid:
        check.problems += invalid.args
    if check.problems:
        return RowError(row.file, row.line, row.raw, tuple(check.problems))
    return ChatRow(row.line, messages, tools, check.trimmed, tuple(check.warnings))


def problems_of(raw: Any, mapping: str = "") -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used.

    Example:
        `problems_of({"question": "Hello?", "answer": ""})[0].kind` is `"empty"`.
    """
    checked = check_row(Row("row", 1, raw), mapping)
    return list(checked.problems) if isinstance(checked, RowError) else []


def _parts_of(raw: Any, mapping: str) -> Parts:
    if not isinstance(raw, dict):
        raise InvalidRow(Problem("wrong_type", tr("the row"), short(raw)))
    parts = layout_of(tuple(raw), mapping)
    trained = _columns_of(parts | {"unsupported": ()})
    media = [column for column in parts.get("unsupported", ()) if column not in trained]
    texts = [raw[column] for column in trained if mapping]
    if not mapping or PLACEHOLDER.search(str(texts)):  # of what a mapping leaves out, a text may still speak
        _refuse_media("", raw, media)
    return parts


def _refuse_media(place: str, raw: Json, media: Iterable[str]) -> None:
    """Refuse a row or a message that holds an image, a video or a sound in one of these columns."""
    for column in filter(raw.get, media):
        raise InvalidRow(Problem("unsupported_field", place + column, short(raw[column])))


def _turns(raw: Json, parts: Parts) -> list[Turn]:
    turns = []
    if "system" in parts and _text_of(raw, parts["system"]):
        turns.append(_from_columns("system", raw, parts))
    if "messages" in parts:
        return turns + _from_list(raw, parts["messages"][0])
    question = parts["user"][0]
    if isinstance(raw[question], list):  # TRL: prompt and completion
        answer = parts["assistant"][0]
        return turns + _from_list(raw, question) + _from_list(raw, answer)
    if "history" in parts:
        turns += _from_history(raw, parts["history"][0])
    turns.append(_from_columns("user", raw, parts))
    turns.append(_from_columns("assistant", raw, parts))
    return turns


def _from_list(raw: Json, column: str) -> list[Turn]:
    messages = _validated(MESSAGES, raw[column], column)
    return [Turn(f"{column}[{index}]", message) for index, message in enumerate(messages)]


def _from_history(raw: Json, column: str) -> list[Turn]:
    """Earlier rounds of an alpaca row: [[question, answer], ...]."""
    turns = []
    pairs = _validated(PAIRS, raw[column] or [], column)
    for index, (question, answer) in enumerate(pairs):
        place = f"{column}[{index}]"
        turns.append(Turn(place, {"role": "user", "content": question}))
        turns.append(Turn(place, {"role": "assistant", "content": answer}))
    return turns


def _from_columns(role: str, raw: Json, parts: Parts) -> Turn:
    columns = parts[role]
    message = {"role": role, "content": _text_of(raw, columns)}
    if role == "assistant" and "reasoning" in parts:
        message["reasoning_content"] = _text_of(raw, parts["reasoning"])
    place = "+".join(columns)
    return Turn(place, message)


def _text_of(raw: Json, columns: Columns) -> str:
    """The text of one column, or the texts of several with line breaks between."""
    texts = []
    for column in columns:
        value = raw[column]
        if value is not None and not isinstance(value, str):
            raise InvalidRow(Problem("wrong_type", column, short(value)))
        if value and value.strip():
            texts.append(value)
    return "\n".join(texts)


class _Check:
    """The check of the texts of one row, and what it found."""

    def __init__(self, repair: bool) -> None:
        self.repair = repair
        self.trimmed = False
        self.problems = list[Problem]()
        self.warnings = list[Problem]()

    def message(self, turn: Turn) -> Json:
        """The message of a turn, with what the chat template reads beside its text."""
        message = turn.message
        _refuse_media(f"{turn.place}.", message, MEDIA_COLUMNS)
        role = message["role"]
        text = message["content"] or ""
        extras = {key: message[key] for key in EXTRAS.get(role, ()) if message.get(key)}
        if extras:
            self.text(turn.place, _as_json(turn.place, extras), repair=False)
        if not text.strip() and "tool_calls" not in extras:
            self.problems.append(Problem("empty", turn.place, short(message["content"])))
        if role == "assistant":
            text = _with_reasoning(text, message.get("reasoning_content") or "")
        text = self.text(turn.place, text, self.repair)
        return {"role": role, "content": text, **extras}

    def text(self, field: str, text: str, repair: bool) -> str:
        """The text, repaired where that is wanted and certain, without blanks that melt into the template's."""
        fixed = fix_encoding(text)
        if fixed != text:
            problem = Problem("mojibake", field, short(text))
            if repair:
                self.warnings.append(problem)
                text = fixed
            else:
                self.problems.append(problem)
        self.problems += find_problems(field, text)
        self.warnings += [Problem(span.kind, field, span.masked) for span in find_private(text)]
        trimmed = text.replace("\r\n", "\n").rstrip()
        if trimmed[:1].isspace():
            trimmed = _BLANK_LINES.sub("", trimmed)
        self.trimmed |= trimmed != text
        return trimmed

    def tools(self, raw: Json, parts: Parts) -> list[Json] | None:
        """The tools that a row offers."""
        value = raw[parts["tools"][0]] if "tools" in parts else None
        if not value or not _validated(TOOLS, value, "tools"):
            return None
        tools: list[Json] = _from_json(value)
        self.text("tools", _as_json("tools", tools), repair=False)
        return tools


def _with_reasoning(text: str, reasoning: str) -> str:
    """The text with its reasoning before it, in the form the chat templates of thinking models take apart again."""
    if not reasoning.strip() or text.lstrip().startswith("<think>"):
        return text
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"


def _as_json(place: str, value: Any) -> str:
    """Calls or tools as they are stored."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidRow(Problem("wrong_type", place, short(value))) from error


def _require_order(turns: list[Turn]) -> None:
    """system once and first, then user and assistant in turn, tools where they were called, the assistant last."""
    expected: tuple[str, ...] = ("system", "user")
    for place, message in turns:
        role = message["role"]
        if role not in expected:
            seen = tr("{role}, expected {roles}", role=role, roles=" / ".join(expected))
            raise InvalidRow(Problem("role_order", place, seen))
        expected = ("tool",) if message.get("tool_calls") else FOLLOWS[role]
    if role != "assistant":
        raise InvalidRow(Problem("no_assistant", place, role))
