"""Which columns of a row are the question, the answer and the rest: by their names, or by the learner's mapping."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from nbutils.data.text import Problem
from nbutils.errors import CourseError

LISTS = ("messages", "conversations", "conversation")
OPTIONAL = {  # parts that a row may have beside the question and the answer, by the names of their columns
    "system": ("system", "system_prompt", "系统", "系统提示"),
    "tools": ("tools", "工具"),
    "history": ("history", "历史"),
    "reasoning": ("reasoning_content", "complex_cot", "思考过程"),
}
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_DUPLICATE = re.compile(r" \(column \d+\)$")
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


class Pair(NamedTuple):
    """Columns that make a question and an answer; `extra` is an optional second part of the question."""

    question: str
    answer: str
    extra: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.question, self.extra, self.answer) if part)


PAIRS = [Pair(*names.split("/")) for names in (
    "instruction/output/input", "instruction/response/context", "instruction/response/input", "prompt/completion",
    "prompt/response", "question/answer/context", "question/answer/input", "question/response", "query/response",
    "query/answer", "user/assistant", "problem/solution", "input/output", "input/content", "指令/输出/输入",
    "问题/答案", "问题/回答", "問題/答案", "問題/回答", "提问/回答", "用户/助手", "输入/输出", "q/a", "问/答",
)]  # fmt: skip
KNOWN_COLUMNS = "messages, conversations, " + ", ".join(map(str, PAIRS))


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
    """A mapping with the column names of the file, its media columns, and what is wrong with them."""

    media: tuple[str, ...] = ()
    problem: Problem | None = None


def parse_mapping(text: str) -> Mapping | None:
    """The mapping a learner wrote, such as `user=标题+正文, assistant=回复`; None for an empty text."""
    parts: dict[str, tuple[str, ...]] = {}
    for piece in filter(None, (piece.strip() for piece in re.split("[,，;；\n]", text))):
        name, _, value = piece.replace("＝", "=").partition("=")
        columns = tuple(filter(None, (column.strip() for column in re.split("[+＋]", value))))
        part = MAPPING_NAMES.get(_normalized(name), "")
        if not part or not columns:
            raise _bad_mapping(text, f"{piece!r} is not `part=column`")
        if part in parts:
            raise _bad_mapping(text, f"{part} is there twice")
        parts[part] = columns
    named = Counter(column.lower() for columns in parts.values() for column in columns)
    if repeated := [column for column, count in named.items() if count > 1]:
        raise _bad_mapping(text, f"the column {repeated[0]!r} is there twice")
    mapping = Mapping(**parts)
    if bool(mapping.user) != bool(mapping.assistant) or (mapping.messages and mapping.user):
        raise _bad_mapping(text, f"it names {', '.join(parts)}")
    return mapping if parts else None


def _bad_mapping(text: str, reason: str) -> CourseError:
    parts = ", ".join(field.name for field in fields(Mapping))
    return CourseError("data.bad_mapping", mapping=text, reason=reason, parts=parts, example=MAPPING_EXAMPLE)


@lru_cache(maxsize=1024)
def layout_of(columns: tuple[str, ...], mapping: Mapping | None = None) -> Layout:
    """What each column holds; decided once for all rows that have the same columns."""
    known: dict[str, str] = {}
    for name in columns:
        known.setdefault(_normalized(name), name)
    parts = dict(mapping.parts()) if mapping else {}
    if absent := [name for names in parts.values() for name in names if _normalized(name) not in known]:
        todo = f"the mapping names it: correct it to the columns that are there: {', '.join(known.values())}"
        seen = f"only {', '.join(known.values()) or 'no columns'}"
        return Layout(problem=Problem("missing_field", ", ".join(absent), seen, todo))
    named = {
        part: tuple(name if name in columns else known[_normalized(name)] for name in names)
        for part, names in parts.items()
    }
    complete = "user" in named or "messages" in named
    layout = replace(Layout() if complete else _recognized(known), **named)  # type: ignore[arg-type]
    return layout if layout.problem else replace(layout, problem=_rival_columns(layout, columns, parts))


def _rival_columns(layout: Layout, columns: tuple[str, ...], parts: dict[str, tuple[str, ...]]) -> Problem | None:
    """Two columns for the same thing, of which one would be left out unasked."""
    mapped = {name for names in parts.values() for name in names}
    for part, names in layout.parts():
        for taken in names:
            same = {_normalized(taken), *(OPTIONAL.get(part, ()) if part not in parts else ())}
            rivals = [name for name in columns if _normalized(name) in same]
            if len(rivals) > 1 and taken not in mapped:
                answers = ("user", "assistant") if part in ("user", "assistant") else (part,)
                todo = _mapping_advice({one: getattr(layout, one) for one in answers})
                return Problem("ambiguous_columns", ", ".join(rivals), f"each of them may be the {part}", todo)
    return None


def _normalized(name: object) -> str:
    """A name without what differs between files: case, spaces, the number a csv adds to a name that is there twice."""
    return _DUPLICATE.sub("", str(name).strip().strip("\ufeff")).strip().lower().replace(" ", "_")


def _recognized(known: dict[str, str]) -> Layout:
    """The layout by the names of the columns alone."""
    lists = [name for name in LISTS if name in known]
    fits = {
        frozenset(known.keys() & set(pair)): pair
        for pair in reversed(PAIRS)
        if {pair.question, pair.answer} <= known.keys()
    }
    pairs = [pair for used, pair in reversed(fits.items()) if not any(used < other for other in fits)]
    if len(lists) + len(pairs) > 1:
        seen = f"fits {', '.join([*lists, *map(str, pairs)])}"
        return Layout(problem=Problem("ambiguous_columns", ", ".join(known.values()), seen, advice(known.values())))
    if not lists and not pairs:
        return Layout(problem=_unknown_columns(known))
    parts = {part: tuple(known[name] for name in names if name in known)[:1] for part, names in OPTIONAL.items()}
    if lists:
        parts |= {"messages": (known[lists[0]],), "reasoning": ()}
    else:
        question, answer, extra = pairs[0]
        parts["user"] = tuple(known[name] for name in (question, extra) if name in known)
        parts["assistant"] = (known[answer],)
    return Layout(media=tuple(known[name] for name in MEDIA if name in known), **parts)  # type: ignore[arg-type]


def _unknown_columns(known: dict[str, str]) -> Problem:
    """The missing half of a pair, or columns nobody knows."""
    names, todo = ", ".join(known.values()), advice(known.values())
    for pair in PAIRS:
        for there, absent in ((pair.question, pair.answer), (pair.answer, pair.question)):
            if there in known and len(there) > 1:  # a column called "a" may be anything
                return Problem("missing_field", absent, f"only {names}", f"add the column {absent!r}, or {todo}")
    return Problem("unknown_columns", "-", names or "no columns", todo)


def advice(columns: Collection[str]) -> str:
    """How the learner names the columns, with columns of theirs as an example where their names tell."""
    names = [name for name in columns if _can_be_mapped(name)]
    if len(names) < 2 <= len(columns):
        return _mapping_advice({"user": tuple(columns)})
    known = {_normalized(name): name for name in reversed(names)}
    for pair in PAIRS:
        if {pair.question, pair.answer} <= known.keys():
            return _mapping_advice({"user": [known[pair.question]], "assistant": [known[pair.answer]]})
    answers = [name for name in names if _ANSWERS.search(_normalized(name))]
    questions = [name for name in names if _QUESTIONS.search(_normalized(name)) and name not in answers]
    question, answer = (questions[0], answers[-1]) if questions and answers else ("…", "…")
    return _mapping_advice({"user": [question], "assistant": [answer]})


def _can_be_mapped(name: str) -> bool:
    return name == name.strip() and name != "" and not _SIGNS.search(name)


def _mapping_advice(parts: dict[str, Sequence[str]]) -> str:
    """The line that names the columns, or how to make that possible."""
    if not all(_can_be_mapped(name) for names in parts.values() for name in names):
        return "rename the columns: a name that can be given holds no , ; + = and has no space around it"
    mapping = ", ".join(f"{part}={'+'.join(names)}" for part, names in parts.items())
    return f'say which columns to take: COLUMNS = "{mapping}" in lesson 02, --columns "{mapping}" on the command line'
