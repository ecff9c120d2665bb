"""Rows of any known shape as `{"messages": [{"role", "content"}, ...]}`, and the rules they and their texts pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import orjson

from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.masking import KEY

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
AS_TEXT = "write it as text, in quotes"
ORDER = "system first if at all, then user and assistant in turn; tool turns only after an assistant that calls tools"
MESSAGE = '{"role": "user", "content": "..."}'
FOLLOWS = {"": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
Parts = dict[str, tuple[str, ...]]  # the columns of each part of a row
Kind = Literal[  # of a problem or a warning
    "ambiguous_columns", "control_character", "damaged_file", "duplicate", "email", "empty", "encoding", "id_number",
    "key", "leak", "long_line", "malformed_csv", "malformed_json", "missing_field", "mojibake", "near_duplicate",
    "near_leak", "no_assistant", "phone", "role_order", "template_marker", "templated", "unknown_columns",
    "unknown_role", "unmapped", "unsupported_field", "wrong_type",
]  # fmt: skip

GBK = "GB18030"
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\xfe]")
_COMMON_PAIR = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")  # punctuation and the 3,755 most frequent characters
# what no repair brings back: replaced characters, and the Chinese comma and full stop of UTF-8 read as GBK
LOST = re.compile("\ufffd|锟斤拷|锛[屼屽屾岀岃岄]|銆[備傚傛傜傝傞]")
_LATIN = re.compile("[\xc2-\xf4][^\x00-\x7f]")  # every character of UTF-8 that was read as Latin-1 begins like this
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
MARKERS = re.compile(
    r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:[se]op|unk|pad)>"
    r"|<(?:start|end)_of_turn>|\[/?AVAILABLE_TOOLS\]|^\s*<(?:s|bos)>|</s>\s*$|<eos>\s*$"
)
INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_GAP = r"[ .\-\xa0\u2002-\u200a\u2010-\u2015\u202f\u3000]"  # between groups of digits
PHONE = re.compile(
    rf"(?<![0-9])(?<![0-9]\.)(?:(?:(?:\+|00)?86{_GAP}?)?1[3-9][0-9]({_GAP}?)[0-9]{{4}}\1[0-9]{{4}}"
    rf"|(?:0(?:10|2[0-9]){_GAP}[2-8][0-9]{{7}}|0[3-9][0-9]{{2}}{_GAP}[2-8][0-9]{{6,7}}))(?![0-9])"
)
ID_NUMBER = re.compile(  # district, day of birth, serial; a mistyped one is as private, so the checksum does not count
    rf"(?<![0-9])[1-8][0-9]{{5}}{_GAP}?(?:19|20)[0-9]{{2}}{_GAP}?(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01]){_GAP}?"
    r"[0-9]{3}[0-9Xx](?![0-9])"
)
EMAIL = re.compile(r"(?<![\w.+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.ASCII)
_WIDE = {ord("０") + digit: str(digit) for digit in range(10)} | {ord("Ｘ"): "X", ord("＠"): "@", ord("－"): "-"}

# Cheap tests on the UTF-8 bytes of a text: few texts have as many digits in all, or as long a word, as private data.
_NOT_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
_IN_KEYS = bytes(120 if chr(code).isalnum() or code in b"_=.~+/:?&-" else 32 for code in range(128)) + b" " * 128
_KEY_LENGTH = b"x" * 15


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a row, or worth a warning: its kind, a code; for people where, what was seen, what to do."""

    kind: Kind
    field: str
    seen: str
    todo: str

    def __post_init__(self) -> None:
        for name in ("field", "seen", "todo"):
            object.__setattr__(self, name, shown(getattr(self, name)))


class Problems(list[Problem]):
    """What is wrong with a row."""

    def add(self, kind: Kind, field: str, seen: str, todo: str) -> None:
        """One more."""
        self.append(Problem(kind, field, seen, todo))


class Row(NamedTuple):
    """A row as the file has it; `encoding` is named where its text had to be converted."""

    file: str
    line: int
    raw: Any
    encoding: str = ""


class RowError(NamedTuple):
    """A row that cannot be used, with every reason found."""

    file: str
    line: int
    raw: Any
    problems: tuple[Problem, ...]


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

    @property
    def name(self) -> str:
        """The place of the turn in its row."""
        return self.field.removesuffix(".content").removesuffix(".value")


def parse_mapping(text: str) -> Parts:
    """The columns of each part, as a learner wrote them: `user=标题+正文, assistant=回复`."""
    found: Parts = {}
    for piece in filter(str.strip, text.translate(WIDE_SIGNS).split(",")):
        part, _, names = piece.partition("=")
        columns = tuple(filter(None, map(str.strip, names.split("+"))))
        if part.strip() not in PARTS or part.strip() in found or not columns:
            raise CourseError(
                tr(
                    "The columns {mapping!r} are not a valid mapping; the problem is in {reason!r}.",
                    mapping=text,
                    reason=piece.strip(),
                ),
                allowed=tr(
                    "each of {parts} once as part=column; user and assistant, or messages alone; + between "
                    "columns of one part",
                    parts=", ".join(PARTS),
                ),
                todo=tr('Write them like "user=title+body, assistant=reply".'),
            )
        found[part.strip()] = columns
    if ("user" in found) != ("assistant" in found) or {"messages", "user"} <= found.keys():
        raise CourseError(
            tr(
                "The columns {mapping!r} are not a valid mapping; the problem is in {reason!r}.",
                mapping=text,
                reason=", ".join(found),
            ),
            allowed=tr(
                "each of {parts} once as part=column; user and assistant, or messages alone; + between "
                "columns of one part",
                parts=", ".join(PARTS),
            ),
            todo=tr('Write them like "user=title+body, assistant=reply".'),
        )
    return {part: found[part] for part in PARTS if part in found}


@lru_cache(maxsize=1024)
def layout_of(columns: tuple[str, ...], mapping: str = "") -> Parts | Problem:
    """Which columns hold which part; decided once for all rows that have the same columns."""
    known, shown = {_normalized(name): name for name in reversed(columns)}, ", ".join(columns)
    named = parse_mapping(mapping)
    wanted = [name for names in named.values() for name in names]
    if absent := [name for name in wanted if _normalized(name) not in known]:
        other = layout_of(columns)  # of a file that the mapping is not for; some of its columns may be a typing mistake
        if isinstance(other, dict) and ("messages" in other or len(absent) == len(wanted)):
            return other | {"unmapped": tuple(absent)}
        todo = tr("correct COLUMNS (or --columns): a row has all columns it names, or is in a format the course knows")
        return Problem("missing_field", ", ".join(absent), tr("only {names}", names=shown), todo)
    named = {part: tuple(known[_normalized(name)] for name in names) for part, names in named.items()}
    if "user" in named or "messages" in named:
        return named
    lists = [name for name in LISTS if name in known]
    fits = {frozenset(known.keys() & set(pair)): pair for pair in reversed(PAIRS) if set(pair[:2]) <= known.keys()}
    pairs = [pair for used, pair in reversed(fits.items()) if not any(used < other for other in fits)]
    if len(lists) + len(pairs) > 1:
        seen = tr("fits {shapes}", shapes=", ".join([*lists, *map("/".join, pairs)]))
        return Problem("ambiguous_columns", shown, seen, tr(NAME_COLUMNS))
    if not lists and not pairs:
        halves = [half for pair in PAIRS for half in (pair[:2], pair[1::-1]) if half[0] in known and len(half[0]) > 1]
        if halves:
            todo = tr("add the column, or {name_columns}", name_columns=tr(NAME_COLUMNS))
            return Problem("missing_field", halves[0][1], tr("only {names}", names=shown), todo)
        return Problem("unknown_columns", tr("the columns"), shown or tr("no columns"), tr(NAME_COLUMNS))
    parts = {part: tuple(known[name] for name in names if name in known)[:1] for part, names in OPTIONAL.items()}
    parts["media"] = tuple(known[name] for name in MEDIA if name in known)
    if lists:
        parts |= {"messages": (known[lists[0]],), "reasoning": ()}
    else:
        question, answer, extra = pairs[0]
        parts["user"] = tuple(known[name] for name in (question, extra) if name in known)
        parts["assistant"] = (known[answer],)
    return {part: names for part, names in parts.items() if names} | named


def _normalized(name: object) -> str:
    return str(name).strip().strip("\ufeff").strip().lower().replace(" ", "_")


def check_row(row: Row | RowError, mapping: str = "", repair: bool = True) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used."""
    if isinstance(row, RowError):
        return row
    problems, warnings = Problems(), Problems()
    turns, tools = _turns(row.raw, mapping, problems, warnings)
    messages, trimmed = [], False
    for turn in turns:
        text = turn.content
        if isinstance(text, str) and text and not text.isspace():
            text = examine(turn.field, text, repair, problems, warnings)
            if text[0].isspace() or text[-1].isspace() or "\r" in text:  # would melt into the template's line breaks
                text = _BLANK_LINES.sub("", text.replace("\r\n", "\n").rstrip(), count=1)
        else:
            if text is not None and not isinstance(text, str):
                problems.add("wrong_type", turn.field, short(text), tr(AS_TEXT))
            elif "tool_calls" not in turn.extras:  # an assistant that calls tools need not say anything
                problems.add("empty", turn.field, short(text), tr("write the text, or remove the row"))
            text = ""
        trimmed |= bool(turn.content) and text != turn.content
        messages.append({"role": turn.role, "content": text, **turn.extras})
    parts = [(turn.name, turn.extras) for turn in turns if turn.extras] + ([("tools", tools)] if tools else [])
    for field, value in parts:  # calls and tools must be JSON; the rules of a text hold, and nothing is repaired
        try:
            text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
            json.dumps(value, allow_nan=False)  # orjson writes null for NaN
            examine(field, text, False, problems, warnings)
        except (TypeError, ValueError) as problem:
            todo = tr("plain JSON: UTF-8, numbers of 64 bits, no NaN, no dates")
            problems.add("wrong_type", field, str(problem), todo)
    if not problems:
        _check_order(turns, problems)
    if problems:
        return RowError(row.file, row.line, row.raw, tuple(problems))
    trimmed = trimmed and all(warning.kind != "mojibake" for warning in warnings)
    if row.encoding:
        seen = tr("written in {encoding}", encoding=row.encoding)
        warnings.add("encoding", tr("the row"), seen, tr("it was converted: look whether it is right"))
    return ChatRow(row.file, row.line, messages, tools, trimmed, tuple(warnings))


def problems_of(raw: Any, mapping: str = "") -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used."""
    checked = check_row(Row("row", 1, raw), mapping)
    return list(checked.problems) if isinstance(checked, RowError) else []


def _turns(
    raw: Any, mapping: str, problems: Problems, warnings: Problems
) -> tuple[list[Turn], list[dict[str, Any]] | None]:
    if not isinstance(raw, dict):
        todo = tr("a row is an object: {example}", example='{"messages": [...]}')
        problems.add("wrong_type", tr("the row"), short(raw), todo)
        return [], None
    parts = layout_of(tuple(raw), mapping)
    if isinstance(parts, Problem):
        problems.append(parts)
        return [], None
    if "unmapped" in parts:
        used = parts.get("messages") or parts["user"] + parts["assistant"]
        seen = tr("no such column; read as {columns}", columns="/".join(used))
        warnings.add("unmapped", ", ".join(parts["unmapped"]), seen, tr("nothing, if COLUMNS is for other files"))
    for name in parts.get("media", ()):
        if raw[name]:
            todo = tr("this course trains plain text: leave it empty")
            problems.add("unsupported_field", name, tr("{name} is filled", name=name), todo)
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
                problems.add("wrong_type", name, short(value), tr(AS_TEXT))
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
        problems.add("wrong_type", field, short(reasoning), tr(AS_TEXT))
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
            problems.add("wrong_type", field, short(pair), tr("a list of pairs: [[question, answer], ...]"))
    return turns


def _from_messages(column: str, value: Any, problems: Problems) -> list[Turn]:
    before, value = len(problems), _from_json(column, value, problems)
    if not isinstance(value, list) and len(problems) == before:
        problems.add("wrong_type", column, short(value), tr("a list: {example}", example=f"[{MESSAGE}, ...]"))
    elif value == []:
        problems.add("empty", column, "[]", tr("give at least one question and one answer"))
    messages = enumerate(value) if isinstance(value, list) else ()
    turns = [_from_message(f"{column}[{index}]", message, problems) for index, message in messages]
    return [turn for turn in turns if turn is not None]


def _from_message(field: str, message: Any, problems: Problems) -> Turn | None:
    if not isinstance(message, dict):
        problems.add("wrong_type", field, short(message), tr("an object: {example}", example=MESSAGE))
        return None
    role_key, text_key = ("from", "value") if "from" in message and not message.get("role") else ("role", "content")
    calls_key = next((name for name in ("tool_calls", *CALLS) if message.get(name)), "")
    if absent := [key for key in (role_key, text_key) if key not in message and not (key == text_key and calls_key)]:
        for key in absent:
            seen = tr("only {names}", names=", ".join(message))
            problems.add("missing_field", f"{field}.{key}", seen, tr("add {key!r}", key=key))
        return None
    name = str(message.get(role_key)).strip().lower()
    if (role := ALIASES.get(name, name)) not in ROLES:
        todo = tr("use one of: {roles} (or human, gpt, function_call, observation)", roles=", ".join(ROLES))
        problems.add("unknown_role", f"{field}.{role_key}", short(message[role_key]), todo)
        return None
    place, content = f"{field}.{text_key}", message.get(text_key)
    if isinstance(content, list):  # of parts, [{"type": "text", "text": "..."}]; one with an image stays as it is
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "\n".join(texts) if texts and len(texts) == len(content) else content
    if name in CALLS:  # ShareGPT: the text of the turn is the call
        return Turn(place, role, None, _tool_calls(place, content, problems))
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        content = _with_reasoning(f"{field}.reasoning_content", content, reasoning, problems, bool(calls_key))
        calls = _tool_calls(f"{field}.{calls_key}", message[calls_key], problems) if calls_key else {}
        return Turn(place, role, content, calls)
    names = [key for key in ("name", "tool_call_id") if message.get(key)] if role == "tool" else []
    return Turn(place, role, content, {key: str(message[key]) for key in names})


def _from_json(field: str, value: Any, problems: Problems) -> Any:
    """The value itself, or what stands in its text: a csv can hold a list or an object only as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if _is_blank(value) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        problems.add("malformed_json", field, short(value), tr("{problem}: write it with json.dumps", problem=problem))
        return None


def _tool_calls(field: str, value: Any, problems: Problems) -> dict[str, Any]:
    calls = []
    for place, call, function in _functions(field, value, problems):
        arguments = function.get("arguments", function.get("parameters")) or {}
        before, arguments = len(problems), _from_json(f"{place}.arguments", arguments, problems)
        if not isinstance(arguments, dict) and len(problems) == before:
            todo = tr("an object by the names of the parameters: {example}", example='{"city": "Bergen"}')
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
            example = '{"type": "function", "function": {"name": "...", ...}}'
            todo = tr("a function has a name: {example}", example=example)
            problems.add("wrong_type", f"{field}[{index}]", short(entry), todo)


def _check_order(turns: list[Turn], problems: Problems) -> None:
    """system once and first, then user and assistant in turn, tools where they were called, the assistant last."""
    talk = turns[1:] if turns and turns[0].role == "system" else turns
    if all([turn.role != "assistant" for turn in talk]):
        field = turns[-1].name if turns else tr("the row")
        problems.add("no_assistant", field, ", ".join(turn.role for turn in turns), tr("add the answer to learn"))
        return
    expected = FOLLOWS[""]
    for turn in talk:
        if turn.role not in expected:
            seen = tr("{role}, expected {roles}", role=turn.role, roles=" / ".join(expected))
            problems.add("role_order", turn.name, seen, tr(ORDER))
            return
        expected = ("tool",) if "tool_calls" in turn.extras else FOLLOWS[turn.role]
    if talk[-1].role != "assistant":
        seen = tr("{role} at the end", role=talk[-1].role)
        problems.add("role_order", talk[-1].name, seen, tr("add the answer, or cut it"))


def is_gbk(head: bytes) -> bool:
    """Whether a text that begins like this is Chinese in GBK: no UTF-8, and most pairs of bytes frequent characters."""
    try:
        head[: head.rfind(b"\n") + 1 or None].decode()
        return False
    except UnicodeDecodeError:
        pairs = _PAIR.findall(head)
        return sum(1 for pair in pairs if _COMMON_PAIR.match(pair)) >= 0.6 * len(pairs) > 0


def decode(line: bytes, gbk: bool) -> tuple[str, str]:
    """The text, and the encoding it was converted from; bytes that fit none become U+DCxx, which no row may hold."""
    try:
        return line.decode(), ""
    except UnicodeDecodeError:
        return line.decode(GBK if gbk else "utf-8", "surrogateescape"), GBK if gbk else ""


def mask(text: str) -> str:
    """The text with private data made unreadable: 138****5678, a***@b.cn, sk-****."""
    parts, end = [], 0
    for kind, start, stop in find_private(text):
        parts += [text[end:start], _masked(kind, text[start:stop])]
        end = stop
    return "".join([*parts, text[end:]])


def shown(text: str) -> str:
    """The text as it may stand on a screen: private data masked, control characters spelled out."""
    return mask(INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text))


def short(value: Any) -> str:
    """What was seen, with its type, on one short line, private data masked."""
    try:
        text = json.dumps(value[:400] if isinstance(value, str) else value, ensure_ascii=False, default=str)[:400]
    except (ValueError, RecursionError):
        text = tr("nested too deeply, or a number of too many digits")
    text = mask(text)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def excerpt(text: str, at: int, width: int = 20) -> str:
    """What stands around a place, private data starred out before it is cut."""
    begin = max(0, at - 2000)
    part = text[begin : at + 2000]
    for _, start, stop in find_private(part):
        part = part[:start] + "*" * (stop - start) + part[stop:]
    return part[max(0, at - begin - width) : at - begin + width]


def examine(field: str, text: str, repair: bool, problems: Problems, warnings: Problems) -> str:
    """The text of a field, repaired where that is wanted and certain; what is wrong with it goes to the two lists."""
    fixed = text
    if not text.isascii() and _LATIN.search(text):  # UTF-8 that was perhaps read as Latin-1 or Windows-1252
        from ftfy import TextFixerConfig, fix_encoding

        # runs inside of otherwise correct text are left alone: « café » looks broken byte by byte
        fixed = fix_encoding(text, TextFixerConfig(fix_c1_controls=False, decode_inconsistent_utf8=False))
    if fixed != text:
        seen = tr("{text!r} for {fixed!r}", text=mask(text)[:20], fixed=mask(fixed)[:20])
        if repair:
            warnings.add("mojibake", field, seen, tr("nothing: it was repaired"))
            text = fixed
        else:
            problems.add("mojibake", field, seen, tr("UTF-8 read as another encoding: read the source as UTF-8"))
    if not text.isascii() and (lost := LOST.search(text)):
        todo = tr("the characters are lost: save the source again in the right encoding (GBK is not UTF-8)")
        problems.add("mojibake", field, tr("{what} at {place}", what=lost[0], place=lost.start() + 1), todo)
    if ("<" in text or "[" in text) and (found := MARKERS.search(text)):
        todo = tr("remove it: the chat template adds these markers itself")
        problems.add("template_marker", field, found[0].strip(), todo)
    if found := CONTROL.search(text):
        seen = tr("{what} at {place}", what=ascii(found[0]), place=found.start() + 1)
        if 0xDC80 <= ord(found[0]) <= 0xDCFF:  # a byte that `decode` could not read
            problems.add("encoding", field, seen, tr("not UTF-8 and not GBK: save the file again as UTF-8"))
        else:
            problems.add("control_character", field, seen, tr("remove the invisible character"))
    for kind, start, stop in find_private(text):
        warnings.add(kind, field, _masked(kind, text[start:stop]), tr("decide whether the model may learn it"))
    return text


def find_private(text: str) -> Iterator[tuple[Kind, int, int]]:
    """Kind, start and end of each phone or identity number, e-mail address and key, in the order of the text."""
    if not text.isascii() and ("０" in text or "１" in text or "＠" in text):
        text = text.translate(_WIDE)  # the digits of Chinese keyboards; no place changes
    raw = text.encode("utf-8", "surrogatepass")
    found: list[tuple[Kind, int, int]] = []
    if _KEY_LENGTH in raw.translate(_IN_KEYS) or b"-----BEGIN" in raw:
        found += [("key", *match.span()) for match in KEY.finditer(text)]
    if b"@" in raw:
        found += [("email", *match.span()) for match in EMAIL.finditer(text)]
    if len(raw.translate(None, _NOT_DIGITS)) >= 10:
        found += [("id_number", *match.span()) for match in ID_NUMBER.finditer(text)]
        found += [("phone", *match.span()) for match in PHONE.finditer(text)]
    end = 0
    for kind, start, stop in sorted(found, key=lambda span: span[1:]):
        if start >= end:
            yield kind, start, stop
            end = stop


def _masked(kind: str, span: str) -> str:
    if kind == "phone":
        return f"{span[: -8 if span[-5].isdigit() else -10].rstrip(' -')}****{span[-4:]}"
    if kind == "id_number":
        return f"{span[:3]}****{span[-2:]}"
    if kind == "email":
        return f"{span[0]}***@{span.translate(_WIDE).partition('@')[2]}"
    head = re.match(r"(?i:wandb)|sk-|hf_|gh._|github_pat_|-----BEGIN|....", span)
    return f"{head[0] if head else ''}****"
