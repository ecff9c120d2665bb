"""Which columns of a row are the question, the answer and the rest: by their names, or as the learner says.

Not here: what stands in the columns (turns) and whether it may be used (rows).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from nbutils.data.raw import Problem
from nbutils.errors import CourseError

LISTS = ("messages", "conversations", "conversation")
SYSTEM = ("system", "system_prompt", "系统", "系统提示")
TOOLS = ("tools", "工具")
HISTORY = ("history", "历史")
REASONING = ("reasoning_content", "complex_cot", "思考过程")
KIN = {"system": SYSTEM, "tools": TOOLS, "history": HISTORY, "reasoning": REASONING}
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_PLACE = re.compile(r" \(column \d+\)$")
_SIGNS = re.compile("[,，;；+＋=＝\n]")
_ANSWERS = re.compile("答|回复|回覆|输出|译文|结果|answer|reply|response|output|completion|solution|assistant")
_QUESTIONS = re.compile(
    "问|問|留言|正文|内容|输入|原文|指令|标题|question|query|prompt|input|text|body|content|title|user|instruction|message"
)
MAPPING_EXAMPLE = "user=标题+正文, assistant=回复, system=角色"
MAPPING_NAMES = {
    "user": "user", "question": "user", "prompt": "user", "问题": "user",
    "assistant": "assistant", "answer": "assistant", "response": "assistant", "答案": "assistant", "回答": "assistant",
    "system": "system", "系统": "system", "messages": "messages", "conversations": "messages", "对话": "messages",
    "tools": "tools", "工具": "tools", "history": "history", "历史": "history",
    "reasoning": "reasoning", "思考": "reasoning",
}  # fmt: skip


class Shape(NamedTuple):
    """Columns that make a question and an answer; `extra` is an optional second part of the question."""

    question: str
    answer: str
    extra: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.question, self.extra, self.answer) if part)


SHAPES = (
    Shape("instruction", "output", "input"),
    Shape("instruction", "response", "context"),
    Shape("instruction", "response", "input"),
    Shape("prompt", "completion"),
    Shape("prompt", "response"),
    Shape("question", "answer", "context"),
    Shape("question", "answer", "input"),
    Shape("question", "response"),
    Shape("query", "response"),
    Shape("query", "answer"),
    Shape("user", "assistant"),
    Shape("problem", "solution"),
    Shape("input", "output"),
    Shape("input", "content"),
    Shape("指令", "输出", "输入"),
    Shape("问题", "答案"),
    Shape("问题", "回答"),
    Shape("問題", "答案"),
    Shape("問題", "回答"),
    Shape("提问", "回答"),
    Shape("用户", "助手"),
    Shape("输入", "输出"),
    Shape("q", "a"),
    Shape("问", "答"),
)
SHAPES_TEXT = "messages, conversations, " + ", ".join(str(shape) for shape in SHAPES)


@dataclass(frozen=True)
class Mapping:
    """Which columns take which part, as the learner said; several columns of one part are joined by line breaks."""

    user: tuple[str, ...] = ()
    assistant: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    history: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{part}={'+'.join(names)}" for part, names in self.parts())

    def parts(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every part that was named, with its columns."""
        for field in fields(Mapping):
            if names := getattr(self, field.name):
                yield field.name, names


@dataclass(frozen=True)
class Layout(Mapping):
    """A mapping as the file has it: the columns by their own names, those of media, and what is wrong with them."""

    media: tuple[str, ...] = ()
    problem: Problem | None = None


def parse_mapping(text: str) -> Mapping | None:
    """The mapping a learner wrote, such as `user=标题+正文, assistant=回复`; None for an empty text."""
    parts: dict[str, tuple[str, ...]] = {}
    for piece in filter(None, (piece.strip() for piece in re.split("[,，;；\n]", text))):
        name, _, value = piece.replace("＝", "=").partition("=")
        columns = tuple(filter(None, (column.strip() for column in re.split("[+＋]", value))))
        part = MAPPING_NAMES.get(_plain(name), "")
        if not part or not columns:
            raise _bad_mapping(f"{piece!r} in the mapping {text!r} is not `part=column`.")
        if part in parts:
            raise _bad_mapping(f"The mapping {text!r} names {part} twice.")
        parts[part] = columns
    named = Counter(column.lower() for columns in parts.values() for column in columns)
    if twice := [column for column, count in named.items() if count > 1]:
        raise _bad_mapping(f"The mapping {text!r} takes the column {twice[0]!r} twice.")
    found = Mapping(**parts)
    if bool(found.user) != bool(found.assistant) or (found.messages and found.user):
        raise _bad_mapping(f"The mapping {text!r} names {', '.join(parts)}.")
    return found if parts else None


def _bad_mapping(seen: str) -> CourseError:
    parts = ", ".join(field.name for field in fields(Mapping))
    return CourseError(
        seen,
        f"user and assistant, or messages alone; besides: {parts}; several columns of one part with + between",
        f'write it like "{MAPPING_EXAMPLE}"',
    )


@lru_cache(maxsize=1024)
def layout_of(columns: tuple[str, ...], mapping: Mapping | None = None) -> Layout:
    """What each column holds; decided once for all rows that have the same columns."""
    known: dict[str, str] = {}
    for name in columns:
        known.setdefault(_plain(name), name)
    parts = dict(mapping.parts()) if mapping else {}
    absent = [name for names in parts.values() for name in names if _plain(name) not in known]
    if absent:
        todo = f"the mapping names it: correct it to the columns that are there: {', '.join(known.values())}"
        seen = f"only {', '.join(known.values()) or 'no columns'}"
        return Layout(problem=Problem("missing_field", ", ".join(absent), seen, todo))
    named: dict[str, Any] = {
        part: tuple(name if name in columns else known[_plain(name)] for name in names) for part, names in parts.items()
    }
    layout = Layout(**named) if "user" in named or "messages" in named else replace(_automatic(known), **named)
    return layout if layout.problem else replace(layout, problem=_rivals(layout, columns, parts))


def _rivals(layout: Layout, columns: tuple[str, ...], parts: dict[str, tuple[str, ...]]) -> Problem | None:
    """Two columns for the same thing, of which one would be left out unasked."""
    said = {name for names in parts.values() for name in names}
    for part in Mapping.__dataclass_fields__:
        for taken in getattr(layout, part):
            same = {_plain(taken), *(KIN.get(part, ()) if part not in parts else ())}
            rivals = [name for name in columns if _plain(name) in same]
            if len(rivals) > 1 and taken not in said:
                wanted = ("user", "assistant") if part in ("user", "assistant") else (part,)
                todo = _say({one: getattr(layout, one) for one in wanted})
                return Problem("ambiguous_columns", ", ".join(rivals), f"each of them may be the {part}", todo)
    return None


def _plain(name: object) -> str:
    """A name without what differs between files: case, spaces, the place a csv adds to a name that is there twice."""
    return _PLACE.sub("", str(name).strip().strip("\ufeff")).strip().lower().replace(" ", "_")


def _automatic(known: dict[str, str]) -> Layout:
    """The layout by the names of the columns alone."""
    lists = [name for name in LISTS if name in known]
    shapes = _matching(known)
    if len(lists) + len(shapes) > 1:
        names = ", ".join([*lists, *map(str, shapes)])
        todo = advice(known.values())
        return Layout(problem=Problem("ambiguous_columns", ", ".join(known.values()), f"fits {names}", todo))
    if not lists and not shapes:
        return Layout(problem=_unmatched(known))

    def first(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known[name] for name in names if name in known)[:1]

    media = tuple(known[name] for name in MEDIA if name in known)
    rest = Layout(system=first(SYSTEM), tools=first(TOOLS), history=first(HISTORY), media=media)
    if lists:
        return replace(rest, messages=(known[lists[0]],))
    question, answer, extra = shapes[0]
    user = tuple(known[name] for name in (question, extra) if name and name in known)
    return replace(rest, user=user, assistant=(known[answer],), reasoning=first(REASONING))


def _matching(known: dict[str, str]) -> list[Shape]:
    """The shapes whose question and answer are both there, without those that are part of a larger one."""
    fits = {
        frozenset(known.keys() & set(shape)): shape
        for shape in reversed(SHAPES)
        if {shape.question, shape.answer} <= known.keys()
    }
    return [shape for used, shape in reversed(fits.items()) if not any(used < other for other in fits)]


def _unmatched(known: dict[str, str]) -> Problem:
    """The missing half of a shape, or the columns nobody knows."""
    names, todo = ", ".join(known.values()), advice(known.values())
    for shape in SHAPES:
        for there, absent in ((shape.question, shape.answer), (shape.answer, shape.question)):
            if there in known and len(there) > 1:  # a column called "a" may be anything
                return Problem("missing_field", absent, f"only {names}", f"add the column {absent!r}, or {todo}")
    return Problem("unknown_columns", "-", names or "no columns", todo)


def writable(name: str) -> bool:
    """Whether a mapping can name the column: it has no sign that separates parts or columns there."""
    return name == name.strip() and name != "" and not _SIGNS.search(name)


def _suggested(columns: Collection[str]) -> tuple[str, str]:
    """Columns whose names are a known pair, or sound like a question and an answer; dots where they do not tell."""
    names = [name for name in columns if writable(name)]
    known = {_plain(name): name for name in reversed(names)}
    for shape in SHAPES:
        if {shape.question, shape.answer} <= known.keys():
            return known[shape.question], known[shape.answer]
    answers = [name for name in names if _ANSWERS.search(_plain(name))]
    questions = [name for name in names if _QUESTIONS.search(_plain(name)) and name not in answers]
    return (questions[0], answers[-1]) if questions and answers else ("…", "…")


def advice(columns: Collection[str]) -> str:
    """How the learner names the columns, with columns of theirs as an example where their names tell."""
    if len([name for name in columns if writable(name)]) < 2 <= len(columns):
        return _say({"user": tuple(columns)})
    question, answer = _suggested(columns)
    return _say({"user": [question], "assistant": [answer]})


def _say(parts: dict[str, Sequence[str]]) -> str:
    """The line that names the columns, or how to make that possible."""
    if not all(writable(name) for names in parts.values() for name in names):
        return "rename the columns: a name that can be given holds no , ; + = and has no space around it"
    wish = ", ".join(f"{part}={'+'.join(names)}" for part, names in parts.items())
    return f'say which columns to take: COLUMNS = "{wish}" in lesson 02, --columns "{wish}" on the command line'
