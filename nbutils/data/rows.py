"""What a row must look like: one shape, `{"messages": [{"role", "content"}, ...]}`, and the rules it has to pass.

Not here: reading files (reading) and comparing rows with each other (splits). Nothing is tokenised.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from nbutils.data.reading import Problem, Row, RowError

ROLES = ("system", "user", "assistant")
ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
CARRIES_TEXT = ("tool_calls", "function_call", "reasoning_content", "images", "history", "tools")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")
MARKERS = re.compile(
    r"<[|｜][A-Za-z][\w▁ ]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|\[gMASK\]|<(?:start|end)_of_turn>|^\s*<s>|</s>\s*$"
)
BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")


@dataclass(frozen=True)
class Shape:
    """Columns that make a question and an answer; `extra` is an optional second part of the question."""

    question: str
    answer: str
    extra: str = ""

    def columns(self) -> set[str]:
        """The columns this shape takes its text from."""
        return {self.question, self.answer, self.extra} - {""}

    def __str__(self) -> str:
        return "/".join(part for part in (self.question, self.extra, self.answer) if part)


SHAPES = (
    Shape("instruction", "output", "input"),
    Shape("prompt", "completion"),
    Shape("prompt", "response"),
    Shape("question", "answer"),
    Shape("query", "response"),
    Shape("input", "output"),
    Shape("指令", "输出", "输入"),
    Shape("问题", "答案"),
    Shape("问题", "回答"),
    Shape("输入", "输出"),
)
SHAPES_TEXT = "messages, conversations, " + ", ".join(str(shape) for shape in SHAPES)


@dataclass(frozen=True)
class ChatRow:
    """A row that passed: its messages, where it came from, and whether blank edges were trimmed."""

    file: str
    line: int
    messages: list[dict[str, str]]
    trimmed: bool


def check_row(row: Row | RowError) -> ChatRow | RowError:
    """The row in the one shape of the course, or every reason why it cannot be used."""
    if isinstance(row, RowError):
        return row
    turns, problems = _turns(row.raw)
    problems += [problem for turn in turns for problem in _content_problems(turn)]
    if not problems:
        problems = _order_problems(turns)
    if problems:
        return RowError(row.file, row.line, row.raw, tuple(problems))
    contents = [_trim(turn.content) for turn in turns]
    messages = [{"role": turn.role, "content": content} for turn, content in zip(turns, contents, strict=True)]
    return ChatRow(row.file, row.line, messages, any(t.content != c for t, c in zip(turns, contents, strict=True)))


def problems_of(raw: Any) -> list[Problem]:
    """What is wrong with one row held in memory; an empty list when it can be used."""
    checked = check_row(Row("row", 1, raw))
    return list(checked.problems) if isinstance(checked, RowError) else []


@dataclass(frozen=True)
class _Turn:
    field: str
    role: str
    content: Any


def _turns(raw: Any) -> tuple[list[_Turn], list[Problem]]:
    """The row as turns, whatever columns it uses."""
    if not isinstance(raw, dict):
        return [], [Problem("wrong_type", "-", _short(raw), 'a row is an object: {"messages": [...]}')]
    columns = {str(name).strip().lower(): value for name, value in raw.items()}
    problems = [_carried(name, name) for name in CARRIES_TEXT if columns.get(name)]
    listed = [name for name in ("messages", "conversations") if name in columns]
    shapes = _matching(columns)
    if len(listed) + len(shapes) > 1:
        names = ", ".join([*listed, *map(str, shapes)])
        return [], [
            Problem("ambiguous_columns", ", ".join(raw), f"fits {names}", "keep the columns of one of them only")
        ]
    if listed:
        turns, found = _listed(listed[0], columns[listed[0]])
    elif shapes:
        turns, found = _paired(shapes[0], columns)
    else:
        return [], [_unmatched(columns)]
    system = columns.get("system") or columns.get("系统")
    if system and not (turns and turns[0].role == "system"):
        turns = [_Turn("system", "system", system), *turns]
    return turns, problems + found


def _matching(columns: dict[str, Any]) -> list[Shape]:
    """The shapes whose question and answer are both there, without those that are part of a larger one."""
    fits = [shape for shape in SHAPES if {shape.question, shape.answer} <= columns.keys()]
    return [shape for shape in fits if not any(shape.columns() < other.columns() for other in fits)]


def _unmatched(columns: dict[str, Any]) -> Problem:
    """The missing half of a shape, or the columns nobody knows."""
    for shape in SHAPES:
        for there, absent in ((shape.question, shape.answer), (shape.answer, shape.question)):
            if there in columns:
                return Problem("missing_field", absent, f"only {', '.join(columns)}", f"add the column {absent!r}")
    return Problem("unknown_columns", "-", ", ".join(columns) or "no columns", f"name the columns: {SHAPES_TEXT}")


def _paired(shape: Shape, columns: dict[str, Any]) -> tuple[list[_Turn], list[Problem]]:
    """Question and answer columns; both may also be lists of messages."""
    question, answer, extra = columns[shape.question], columns[shape.answer], columns.get(shape.extra)
    if isinstance(question, list) and isinstance(answer, list):
        first, problems = _listed(shape.question, question)
        second, more = _listed(shape.answer, answer)
        return first + second, problems + more
    problems = []
    if extra is not None and not isinstance(extra, str):
        problems = [Problem("wrong_type", shape.extra, _short(extra), "write text in quotes")]
    elif extra and extra.strip() and isinstance(question, str):
        question = f"{question}\n{extra}"
    return [_Turn(shape.question, "user", question), _Turn(shape.answer, "assistant", answer)], problems


def _listed(column: str, value: Any) -> tuple[list[_Turn], list[Problem]]:
    """A list of messages: OpenAI's role/content or ShareGPT's from/value."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # a csv can only hold the list as text
        try:
            value = json.loads(value)
        except json.JSONDecodeError as problem:
            return [], [Problem("malformed_json", column, _short(value), f"{problem.msg}: write it with json.dumps")]
    if not isinstance(value, list):
        return [], [Problem("wrong_type", column, _short(value), 'a list: [{"role": "user", "content": "..."}, ...]')]
    if not value:
        return [], [Problem("empty", column, "[]", "give at least one question and one answer")]
    turns: list[_Turn] = []
    problems: list[Problem] = []
    for index, message in enumerate(value):
        turn, found = _message(f"{column}[{index}]", message)
        turns += turn
        problems += found
    return turns, problems


def _message(field: str, message: Any) -> tuple[list[_Turn], list[Problem]]:
    if not isinstance(message, dict):
        return [], [Problem("wrong_type", field, _short(message), 'an object: {"role": "user", "content": "..."}')]
    role_key, text_key = ("from", "value") if "from" in message else ("role", "content")
    problems = [_carried(f"{field}.{name}", name) for name in CARRIES_TEXT if message.get(name)]
    for key in (role_key, text_key):
        if key not in message:
            problems.append(Problem("missing_field", f"{field}.{key}", f"only {', '.join(message)}", f"add {key!r}"))
    if role_key not in message or text_key not in message:
        return [], problems
    role = str(message[role_key]).strip().lower()
    role = ALIASES.get(role, role)
    if role not in ROLES:
        todo = f"use one of: {', '.join(ROLES)} (or human, gpt)"
        return [], [*problems, Problem("unknown_role", f"{field}.{role_key}", _short(message[role_key]), todo)]
    return [_Turn(f"{field}.{text_key}", role, message[text_key])], problems


def _carried(field: str, name: str) -> Problem:
    return Problem("unsupported_field", field, f"{name} is filled", "this course trains plain text: leave it empty")


def _content_problems(turn: _Turn) -> list[Problem]:
    """Text that is missing, of the wrong type, or holds characters a model should never see."""
    text = turn.content
    if text is None or (isinstance(text, str) and not text.strip()):
        return [Problem("empty", turn.field, _short(text), "write the text, or remove the row")]
    if not isinstance(text, str):
        return [Problem("wrong_type", turn.field, _short(text), "write it as text, in quotes")]
    problems = []
    if ("<" in text or "[" in text) and (found := MARKERS.search(text)):
        todo = "remove it: the chat template adds these markers itself"
        problems.append(Problem("template_marker", turn.field, found[0].strip(), todo))
    if found := CONTROL.search(text):
        broken = found[0] == "\ufffd" or "\ud800" <= found[0] <= "\udfff"
        todo = "not UTF-8 (GBK?): save the file again as UTF-8" if broken else "remove the invisible character"
        problems.append(Problem("control_character", turn.field, f"U+{ord(found[0]):04X} at {found.start() + 1}", todo))
    return problems


def _order_problems(turns: list[_Turn]) -> list[Problem]:
    """system once and first, then user and assistant in turn, the assistant last."""
    talk = turns[1:] if turns and turns[0].role == "system" else turns
    if not any(turn.role == "assistant" for turn in talk):
        seen = ", ".join(turn.role for turn in turns) or "no turns"
        return [Problem("no_assistant", _place(turns), seen, "add the answer the model should learn")]
    for index, turn in enumerate(talk):
        expected = ("user", "assistant")[index % 2]
        if turn.role != expected:
            todo = "system first if at all, then user and assistant in turn"
            return [Problem("role_order", _place([turn]), f"{turn.role}, expected {expected}", todo)]
    if talk[-1].role != "assistant":
        return [Problem("role_order", _place(talk), "a question at the end", "add the answer, or cut the question")]
    return []


def _place(turns: list[_Turn]) -> str:
    """The last turn, as the row names it."""
    return turns[-1].field.removesuffix(".content").removesuffix(".value") if turns else "-"


def _trim(text: str) -> str:
    """The text without blank lines at its edges, which would melt into the template's own line breaks."""
    text = text.replace("\r\n", "\n").rstrip()
    return text[BLANK_LINES.match(text).end() :]  # type: ignore[union-attr]


def _short(value: Any) -> str:
    """What was seen, with its type, on one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
