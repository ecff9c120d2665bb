"""Rows as the trainer sees them, tokens with a loss mask, and as a server sees their prompts.

Every row is rendered once; what is checked, counted and trained are these very tokens. Where the model's chat template
does not mark its answers, TRL's training template for it is used.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

from nbutils.chat.types import Example, Messages, Row, Tools, common_length, rows_think
from nbutils.errors import CourseError
from nbutils.hardware import Choice

FORMS = ("messages", "prompt_completion")
BATCH = 256  # conversations tokenized together
PROGRESS_ROWS = 3000  # from here on a progress bar is worth it


def _training_template(tokenizer: Any) -> str | None:
    """The template that marks answers for the loss: the tokenizer's own, TRL's for it, or none."""
    from jinja2 import TemplateError
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template:
        raise CourseError("chat.no_chat_template", tokenizer=tokenizer.name_or_path or "this model")
    own: str = tokenizer.get_chat_template()
    if has_generation_markers(own):
        return own
    try:
        return get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):
        return None


def missing_stop(tokenizer: Any) -> str:
    """The stop token to add where the template leaves the last answer open (GLM-4), else nothing."""
    rendered = tokenizer.apply_chat_template(_conversation(1, thought=False), tokenize=False)
    closing = rendered.rpartition("an answer")[2]
    return "" if any(token in closing for token in tokenizer.get_added_vocab()) else str(tokenizer.eos_token or "")


def find_stop_ids(tokenizer: Any, generation: Any = None) -> set[int]:
    """The tokens generation ends at: those of a generation config, or of the one in a model's folder or repository.

    Where it names none, servers stop at the tokenizer's own.
    """
    if isinstance(generation, str | PathLike):
        from transformers import GenerationConfig

        try:
            generation = GenerationConfig.from_pretrained(generation)
        except OSError:  # many base models have none
            generation = None
    stops = getattr(generation, "eos_token_id", None)
    stops = stops if isinstance(stops, list) else [tokenizer.eos_token_id if stops is None else stops]
    return {stop for stop in stops if stop is not None}


def first_stop(ids: Sequence[int], stops: set[int], start: int, end: int) -> int:
    """The position of the first stop token from `start` on; `end` if there is none."""
    return next((at for at in range(start, end) if ids[at] in stops), end)


class Conversation(NamedTuple):
    """What becomes one example: messages, and the positions of the answers that are trained."""

    row: int
    messages: Messages
    tools: Tools
    turns: tuple[int, ...]


class View:
    """How one tokenizer renders rows: for training, and as a server in a thinking mode would (None: its default).

    Generation ends at `stop_ids` (None: at the tokenizer's own); nothing after one of them is trained.
    """

    def __init__(
        self, tokenizer: Any, form: str, thinking: bool | None = None, stop_ids: Iterable[int] | None = None
    ) -> None:
        if form not in FORMS:
            raise CourseError("chat.unknown_form", form=form, forms=", ".join(FORMS))
        self.tokenizer, self.form, self.thinking = tokenizer, form, thinking
        self.template = _training_template(tokenizer) if form == "messages" else None
        self.stops = find_stop_ids(tokenizer) if stop_ids is None else set(stop_ids)
        self._special = set(tokenizer.get_added_vocab().values())
        self._blank: dict[int, bool] = {}
        with _template_errors():
            self._added_stop = missing_stop(tokenizer) if form == "prompt_completion" else ""
            self.prompt(_conversation(1, thought=False)[:1])

    def encode_all(self, rows: Sequence[Row]) -> list[Example]:
        """All examples of all rows, each rendered once."""
        from tqdm.auto import tqdm

        examples = []
        with tqdm(total=len(rows), desc="rendering", unit="row", disable=len(rows) < PROGRESS_ROWS) as bar:
            for tools, conversations in itertools.groupby(self._conversations(rows), key=lambda one: one.tools):
                while batch := list(itertools.islice(conversations, BATCH)):
                    examples += self._encode_or_refuse(batch, tools)
                    bar.update(batch[-1].row - bar.n)
        return examples

    def example(self, messages: Messages, tools: Tools = None) -> Example:
        """One conversation; as prompt and completion: its last answer."""
        *_, last = self._conversations([{"messages": messages, "tools": tools}])
        return next(self._encode([last], tools))

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of one conversation; as prompt and completion: of its last answer."""
        example = self.example(messages, tools)
        return list(example.ids), [bool(mask) for mask in example.trained]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server tokenizes before it answers."""
        return self._prompts([_parse_arguments(messages)], tools)[0]

    def text(self, messages: Messages, tools: Tools = None) -> str:
        """The training text of a conversation."""
        *_, last = self._conversations([{"messages": messages, "tools": tools}])
        rendered = self.tokenizer.apply_chat_template(
            last.messages, chat_template=self.template, tools=last.tools, tokenize=False
        )
        return str(rendered) + self._added_stop

    def blank(self, token: int) -> bool:
        """Whether a token is white space only."""
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def _conversations(self, rows: Iterable[Row]) -> Iterator[Conversation]:
        """A whole row, or each of its answers with what comes before it."""
        for number, row in enumerate(rows, start=1):
            messages, tools = _parse_arguments(row["messages"]), row.get("tools") or None
            turns = tuple(at for at, message in enumerate(messages) if message["role"] == "assistant")
            if not turns or not turns[0]:
                raise CourseError("chat.no_answer", row=number)
            if self.form == "messages":
                yield Conversation(number, messages, tools, turns)
            else:
                yield from (Conversation(number, messages[: turn + 1], tools, (turn,)) for turn in turns)

    def _encode_or_refuse(self, conversations: list[Conversation], tools: Tools) -> list[Example]:
        """The examples of a batch; the first row that the template refuses is named."""
        from jinja2 import TemplateError

        try:
            return list(self._encode(conversations, tools))
        except (TemplateError, TypeError, ValueError) as problem:
            if len(conversations) > 1:
                return [example for one in conversations for example in self._encode_or_refuse([one], tools)]
            raise CourseError("chat.row_refused", row=conversations[0].row, problem=problem) from problem

    def _encode(self, conversations: list[Conversation], tools: Tools) -> Iterator[Example]:
        """Examples of conversations that share their tools."""
        marked = self.form == "messages"
        encoded = self.tokenizer.apply_chat_template(
            [one.messages for one in conversations], chat_template=self.template, tools=tools,
            return_dict=True, return_assistant_tokens_mask=marked,
        )  # fmt: skip
        added = [self.tokenizer.convert_tokens_to_ids(self._added_stop)] if self._added_stop else []
        before = [one.messages[:turn] for one in conversations for turn in one.turns]
        prompts = iter(self._prompts(before, tools))
        for at, one in enumerate(conversations):
            ids = encoded["input_ids"][at] + added
            own = [next(prompts) for _ in one.turns]
            shared = tuple(common_length(prompt, ids) for prompt in own)
            mask = bytearray(encoded["assistant_masks"][at] if marked else bytes(shared[0]).ljust(len(ids), b"\1"))
            self._trim(ids, mask, shared)
            yield Example(one.row, one.turns, array("i", ids), bytes(mask), shared, tuple(map(len, own)))

    def _prompts(self, before: list[Messages], tools: Tools) -> list[list[int]]:
        """What a server tokenizes before it answers: always by the tokenizer's own template."""
        mode = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return list(
            self.tokenizer.apply_chat_template(
                before, tools=tools, add_generation_prompt=True, return_dict=False, **mode
            )
        )

    def _trim(self, ids: list[int], mask: bytearray, starts: tuple[int, ...]) -> None:
        """No loss on white space before an answer, which the server writes, nor on what follows its stop token.

        Training templates mark some white space that no model has to write, and Phi-3 closes with two special tokens.
        """
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            while start and mask[start - 1] and self.blank(ids[start - 1]):
                start -= 1
                mask[start] = 0
            stop = first_stop(ids, self.stops, start, end)
            for at in range(stop + 1, end):
                if ids[at] not in self._special and not self.blank(ids[at]):
                    break
                mask[at] = 0

    def has_thinking_modes(self) -> bool:
        """Whether a server of this template can be asked with and without thinking."""
        question = _conversation(1, thought=False)[:1]
        views = (View(self.tokenizer, "prompt_completion", thinking) for thinking in (True, False))
        return next(views).prompt(question) != next(views).prompt(question)


def training_format(tokenizer: Any, rows: Sequence[Row] = (), thinking: bool | None = None) -> Choice:
    """`messages`, the whole conversation, where servers see the same text; else `prompt_completion`, per answer."""
    template = _training_template(tokenizer)
    if template is None:
        problem = "its template cannot mark answers and TRL has no training template for it"
    else:
        with _template_errors():
            problem = _whole_conversation_problem(tokenizer, template, rows, thinking)
    if problem:
        apart = "so each answer is an example of its own, after what a server would be sent"
        return Choice("prompt_completion", f"{problem}, {apart}")
    source = "its template marks" if template == tokenizer.get_chat_template() else "TRL's training template marks"
    return Choice("messages", f"{source} the answers")


def _whole_conversation_problem(tokenizer: Any, template: str, rows: Sequence[Row], thinking: bool | None) -> str:
    """Why whole conversations would not be what servers see; empty if they are."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        return "its template marks the answers without their stop token"
    view = View(tokenizer, "messages", thinking)
    several = any(sum(message["role"] == "assistant" for message in row["messages"]) > 1 for row in rows)
    for thought in {False, rows_think(rows)}:
        example = view.example(_conversation(1, thought))
        prompt = zip(example.ids[: example.shared[0]], example.trained, strict=False)
        if any(mask and not view.blank(token) for token, mask in prompt):  # Qwen3.5's prompt begins the thinking
            return "its training template marks what a server already writes"
        if several:
            example = view.example(_conversation(2, thought))
            thoughts = tokenizer.decode(example.trained_ids()).count("a thought")
            if example.shared[-1] != example.prompts[-1] or thoughts != 2 * thought:  # Qwen3 drops earlier thoughts
                return "its template rewrites earlier answers"
    return ""


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether a server may be asked with enable_thinking=False: the template knows it, no row has a thought, and the
    training text begins with the prompts of that mode too."""
    if rows_think(rows):
        return False
    view = View(tokenizer, training_format(tokenizer, rows).value, thinking=False)
    return view.has_thinking_modes() and all(example.shared == example.prompts for example in view.encode_all(rows))


def _conversation(answers: int, thought: bool) -> Messages:
    """A plain conversation to try a template with."""
    answer = "<think>\na thought\n</think>\n\nan answer" if thought else "an answer"
    return [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}] * answers


@contextmanager
def _template_errors() -> Iterator[None]:
    """A template that cannot render a plain conversation is refused."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError) as problem:
        raise CourseError("chat.template_error", problem=problem) from problem


def _parse_arguments(messages: Messages) -> Messages:
    """Messages as servers hand them to the template: arguments of tool calls are objects, not JSON text."""
    return [
        message | {"tool_calls": list(map(parse_call, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object; most data has them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
