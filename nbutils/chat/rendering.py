"""Rows as the trainer sees them: tokens, and which of them carry the loss; and as a server sees their prompts.

Every row is rendered once, in batches; what is checked, counted and trained are these very tokens. TRL's own training
templates are used wherever a tokenizer's template lacks the marks. Not here: judging (contract), lengths (fitting),
what the template itself can do (templates).
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nbutils.chat.templates import find_stop_ids, marking_template, missing_stop, probing
from nbutils.errors import CourseError

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Row = dict[str, Any]  # {"messages": [...]}, and "tools" where the row has some
FORMS = ("messages", "prompt_completion")
BATCH = 256  # rows tokenised together: every core gets some, and little is held
SHOW_PROGRESS = 3000  # rows; fewer are done before a bar is read


class Example(NamedTuple):
    """One text the trainer trains: its row (from 1), the places of its answers in the row, and its tokens.

    `trained` holds a 1 for each token with loss. The text shares `shared` tokens with the prompt of each answer, of
    `prompts` tokens; `other` says whether it also begins with the prompts of the other thinking mode.
    """

    row: int
    turns: tuple[int, ...]
    ids: array[int]
    trained: bytes
    shared: tuple[int, ...]
    prompts: tuple[int, ...]
    other: bool


class Talk(NamedTuple):
    """What becomes one example: messages, tools, and the places of the answers that are trained."""

    row: int
    messages: Messages
    tools: Tools
    turns: tuple[int, ...]


class View:
    """How one tokenizer renders rows: for training, and as a server in this thinking mode would (None: its default).

    Generation ends at `stop_ids` (None: at the tokenizer's own), so that nothing is trained after one of them.
    """

    def __init__(
        self, tokenizer: Any, form: str, thinking: bool | None = None, stop_ids: Iterable[int] | None = None
    ) -> None:
        if form not in FORMS:
            raise CourseError(f"form is {form!r}.", ", ".join(FORMS), "leave it empty to have it chosen")
        self.tokenizer, self.form, self.thinking = tokenizer, form, thinking
        self.mode = {} if thinking is None else {"enable_thinking": thinking}
        self.template = marking_template(tokenizer) if form == "messages" else None
        self.stops = find_stop_ids(tokenizer) if stop_ids is None else set(stop_ids)
        self.closing = set(tokenizer.get_added_vocab().values())
        self._blanks: dict[int, bool] = {}
        with probing():
            self.stop = missing_stop(tokenizer) if form == "prompt_completion" else ""
            self.other_mode = self._other_mode()

    def encode_all(self, rows: Sequence[Row]) -> list[Example]:
        """All examples of all rows, each rendered once; a bar where it takes a while."""
        from tqdm.auto import tqdm

        examples = []
        with tqdm(total=len(rows), desc="rendering", unit="row", disable=len(rows) < SHOW_PROGRESS) as bar:
            for tools, talks in itertools.groupby(self._talks(rows), key=lambda talk: talk.tools):
                while batch := list(itertools.islice(talks, BATCH)):
                    examples += self._named(batch, tools)
                    bar.update(batch[-1].row - bar.n)
        return examples

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of a conversation; as prompt and completion: of its last answer."""
        last = list(self._talks([{"messages": messages, "tools": tools}]))[-1:]
        example = next(self._encode(last, tools))
        return list(example.ids), [bool(bit) for bit in example.trained]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server tokenises before it answers."""
        return self._prompts([_with_parsed_arguments(messages)], tools, self.mode)[0]

    def text(self, messages: Messages, tools: Tools = None) -> str:
        """The training text of a conversation."""
        talk = list(self._talks([{"messages": messages, "tools": tools}]))[-1]
        made = self.tokenizer.apply_chat_template(
            talk.messages, chat_template=self.template, tools=talk.tools, tokenize=False
        )
        return str(made) + self.stop

    def blank(self, token: int) -> bool:
        """Whether a token is white space only."""
        if token not in self._blanks:
            self._blanks[token] = not self.tokenizer.decode([token]).strip()
        return self._blanks[token]

    def _talks(self, rows: Iterable[Row]) -> Iterator[Talk]:
        """A whole row, or each of its answers with what comes before it."""
        for number, row in enumerate(rows, start=1):
            messages, tools = _with_parsed_arguments(row["messages"]), row.get("tools") or None
            turns = tuple(at for at, message in enumerate(messages) if message["role"] == "assistant")
            if not turns or not turns[0]:
                raise CourseError(
                    f"Row {number}: no answer to a question.", "a question and an answer", "run lesson 02"
                )
            if self.form == "messages":
                yield Talk(number, messages, tools, turns)
                continue
            for turn in turns:
                yield Talk(number, messages[: turn + 1], tools, (turn,))

    def _named(self, talks: list[Talk], tools: Tools) -> list[Example]:
        """The examples of a batch; what a template refuses is told by its row."""
        from jinja2 import TemplateError

        try:
            return list(self._encode(talks, tools))
        except (TemplateError, TypeError, ValueError) as problem:
            if len(talks) > 1:
                return [example for talk in talks for example in self._named([talk], tools)]
            raise CourseError(
                f"Row {talks[0].row}: the chat template of this model refuses it: {problem}.",
                "rows the template can render",
                "change the row (some templates know no system message, or no tools), or take another model",
            ) from problem

    def _encode(self, talks: list[Talk], tools: Tools) -> Iterator[Example]:
        """Examples of talks that share their tools."""
        marked = self.form == "messages"
        out = self.tokenizer.apply_chat_template(
            [talk.messages for talk in talks], chat_template=self.template, tools=tools,
            return_dict=True, return_assistant_tokens_mask=marked,
        )  # fmt: skip
        befores = [talk.messages[:turn] for talk in talks for turn in talk.turns]
        prompts = iter(self._prompts(befores, tools, self.mode))
        others = iter(self._prompts(befores, tools, self.other_mode)) if self.other_mode else itertools.repeat([])
        for at, talk in enumerate(talks):
            ids = out["input_ids"][at] + ([self.tokenizer.convert_tokens_to_ids(self.stop)] if self.stop else [])
            own = [next(prompts) for _ in talk.turns]
            shared = tuple(common_length(prompt, ids) for prompt in own)
            other = [ids[: len(prompt)] == prompt for prompt in itertools.islice(others, len(talk.turns))]
            mask = bytearray(out["assistant_masks"][at]) if marked else bytearray(shared[0]).ljust(len(ids), b"\1")
            self._tidy(ids, mask, shared)
            self._end_at_stops(ids, mask, shared)
            yield Example(
                talk.row,
                talk.turns,
                array("i", ids),
                bytes(mask),
                shared,
                tuple(len(prompt) for prompt in own),
                all(other),
            )

    def _prompts(self, befores: list[Messages], tools: Tools, mode: dict[str, bool]) -> list[list[int]]:
        """What a server tokenises before it answers: always by the tokenizer's own template."""
        made = self.tokenizer.apply_chat_template(
            befores, tools=tools, add_generation_prompt=True, return_dict=False, **mode
        )
        return list(made)

    def _tidy(self, ids: list[int], mask: bytearray, starts: tuple[int, ...]) -> None:
        """Take the loss from blanks around answers, as training templates mark some that no model has to write.

        The server writes those before an answer, and has stopped before those after the closing token.
        """
        for at in starts:
            while at and mask[at - 1] and self.blank(ids[at - 1]):
                at -= 1
                mask[at] = 0
        end = mask.rfind(1) + 1
        while end > 0:
            last = end - 1
            while last and mask[last] and self.blank(ids[last]):
                last -= 1
            if mask[last] and ids[last] in self.closing:
                mask[last + 1 : end] = bytes(end - last - 1)
            end = mask.rfind(1, 0, mask.rfind(0, 0, last + 1) + 1) + 1

    def _end_at_stops(self, ids: list[int], mask: bytearray, starts: tuple[int, ...]) -> None:
        """Take the loss from special tokens and blanks after the first stop token of an answer: Phi-3 writes two."""
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            at = first_stop(ids, self.stops, start, end) + 1
            while at < end and (ids[at] in self.closing or self.blank(ids[at])):
                mask[at] = 0
                at += 1

    def _other_mode(self) -> dict[str, bool]:
        """The thinking mode whose prompts differ from those of this view; empty where the template has none."""
        probe: list[Messages] = [[{"role": "user", "content": "a question"}]]
        own = self._prompts(probe, None, self.mode)
        modes = ({"enable_thinking": thinking} for thinking in (True, False))
        return next((mode for mode in modes if self._prompts(probe, None, mode) != own), {})


def probe(answers: int, thought: bool) -> Messages:
    """A plain talk to try a template with; each of its answers holds the word `thought` where it is to have one."""
    answer = "<think>\na thought\n</think>\n\nan answer" if thought else "an answer"
    return [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}] * answers


def first_stop(ids: Sequence[int], stops: set[int], start: int, end: int) -> int:
    """Where the first stop token of a stretch is; its end if there is none."""
    return next((at for at in range(start, end) if ids[at] in stops), end)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    if one == other[: len(one)]:
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _with_parsed_arguments(messages: Messages) -> Messages:
    """Arguments of tool calls as objects, as servers hand them to the template; most data has them as JSON text."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    return [
        message | {"tool_calls": [_parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
