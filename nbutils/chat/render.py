"""Rows as the trainer sees them, tokens with a loss mask, and as a server sees their prompts; each is rendered once."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

from nbutils.errors import CourseError
from nbutils.hardware import Choice

Message = dict[str, Any]
Messages = list[Message]
Tools = list[dict[str, Any]] | None
Row = dict[str, Any]  # {"messages": [...]}, and "tools" where the row has some
BATCH = 256  # conversations tokenized together
QUESTION: Message = {"role": "user", "content": "a question"}  # a plain conversation to try templates with
ANSWER: Message = {"role": "assistant", "content": "an answer"}
THOUGHT: Message = {"role": "assistant", "content": "<think>\na thought\n</think>\n\nan answer"}


class Conversation(NamedTuple):
    """What becomes one example: messages, and the positions of the answers that are trained."""

    row: int
    messages: Messages
    tools: Tools
    turns: tuple[int, ...]


class Example(NamedTuple):
    """One text the trainer trains on."""

    row: int  # from 1
    turns: tuple[int, ...]  # its answers, as indices of the row's messages
    ids: array[int]
    trained: bytes  # a 1 for each token with loss
    shared: tuple[int, ...]  # for each answer: the tokens of the server's prompt that the text begins with
    prompts: tuple[int, ...]  # for each answer: the tokens of the server's prompt


def rows_think(rows: Sequence[Row]) -> bool:
    """Whether any answer has a thought that is not empty; servers often write the opening <think> themselves."""
    for answer in (message for row in rows for message in row["messages"] if message["role"] == "assistant"):
        thought, closed, _ = str(answer.get("content") or "").partition("</think>")
        if answer.get("reasoning_content") or (closed and thought.replace("<think>", "").strip()):
            return True
    return False


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    if one == other[: len(one)]:
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def find_stop_ids(tokenizer: Any, generation: Any = None) -> set[int]:
    """The tokens generation ends at: of a generation config, of the one in a model's folder, or the tokenizer's own."""
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


def _training_template(tokenizer: Any) -> str | None:
    """The template that marks answers for the loss: the tokenizer's own, TRL's for it, or none."""
    from jinja2 import TemplateError
    from trl import chat_template_utils as trl

    if not tokenizer.chat_template:
        raise CourseError("chat.no_chat_template", tokenizer=tokenizer.name_or_path or "this model")
    own: str = tokenizer.get_chat_template()
    if trl.has_generation_markers(own):
        return own
    try:
        return trl.get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):
        return None


class View:
    """How a tokenizer renders rows: for training, up to `stop_ids`, and as a server in a thinking mode would."""

    def __init__(
        self, tokenizer: Any, form: str, thinking: bool | None = None, stop_ids: Iterable[int] | None = None
    ) -> None:
        self.tokenizer, self.form, self.thinking = tokenizer, form, thinking
        self.template = _training_template(tokenizer) if form == "messages" else None
        self.stops = find_stop_ids(tokenizer) if stop_ids is None else set(stop_ids)
        self._special = set(tokenizer.get_added_vocab().values())
        self._blank: dict[int, bool] = {}

    def encode_all(self, rows: Sequence[Row]) -> list[Example]:
        """All examples of all rows, each rendered once."""
        from tqdm.auto import tqdm

        conversations = self._conversations(tqdm(rows, desc="rendering", unit="row", disable=len(rows) < 3000))
        examples = []
        for tools, group in itertools.groupby(conversations, key=lambda one: one.tools):
            while batch := list(itertools.islice(group, BATCH)):
                examples += self._encode_or_refuse(batch, tools)
        return examples

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of one conversation; as prompt and completion: of its last answer."""
        example = self.encode_all([{"messages": messages, "tools": tools}])[-1]
        return list(example.ids), [bool(mask) for mask in example.trained]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server tokenizes before it answers."""
        return self._prompts([messages], tools)[0]

    def blank(self, token: int) -> bool:
        """Whether a token is white space only."""
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    @cached_property
    def _added_stop(self) -> list[int]:
        """The stop token to add where the template leaves the last answer open (GLM-4), else nothing."""
        if self.form == "messages" or self.tokenizer.eos_token is None:
            return []
        closing = self.tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False).rpartition("an answer")[2]
        closed = any(token in closing for token in self.tokenizer.get_added_vocab())
        return [] if closed else [self.tokenizer.eos_token_id]

    def _conversations(self, rows: Iterable[Row]) -> Iterator[Conversation]:
        """A whole row, or each of its answers with what comes before it."""
        for number, row in enumerate(rows, start=1):
            messages, tools = row["messages"], row.get("tools") or None
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
        marked = self.form == "messages"
        encoded = self.tokenizer.apply_chat_template(
            [one.messages for one in conversations], chat_template=self.template, tools=tools,
            return_dict=True, return_assistant_tokens_mask=marked,
        )  # fmt: skip
        prompts = iter(self._prompts([one.messages[:turn] for one in conversations for turn in one.turns], tools))
        for at, one in enumerate(conversations):
            ids = encoded["input_ids"][at] + self._added_stop
            own = [next(prompts) for _ in one.turns]
            shared = tuple(common_length(prompt, ids) for prompt in own)
            mask = bytearray(encoded["assistant_masks"][at] if marked else bytes(shared[0]).ljust(len(ids), b"\1"))
            self._trim(ids, mask, shared)
            yield Example(one.row, one.turns, array("i", ids), bytes(mask), shared, tuple(map(len, own)))

    def _prompts(self, before: list[Messages], tools: Tools) -> list[list[int]]:
        """What a server tokenizes before it answers: always by the tokenizer's own template."""
        mode = {} if self.thinking is None else {"enable_thinking": self.thinking}
        render = self.tokenizer.apply_chat_template
        return list(render(before, tools=tools, add_generation_prompt=True, return_dict=False, **mode))

    def _trim(self, ids: list[int], mask: bytearray, starts: tuple[int, ...]) -> None:
        """No loss on white space before an answer, which the server writes, nor on what follows its stop token."""
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            while start and mask[start - 1] and self.blank(ids[start - 1]):
                start -= 1
                mask[start] = 0
            stop = first_stop(ids, self.stops, start, end)
            for at in range(stop + 1, end):
                if ids[at] not in self._special and not self.blank(ids[at]):
                    break
                mask[at] = 0


def training_format(tokenizer: Any, rows: Sequence[Row] = (), thinking: bool | None = None) -> Choice:
    """`messages`, the whole conversation, where servers see the same text; else `prompt_completion`, per answer."""
    if _training_template(tokenizer) is None:
        problem = "its template cannot mark answers and TRL has no training template for it"
    else:
        problem = _server_mismatch(View(tokenizer, "messages", thinking), rows)
    if not problem:
        return Choice("messages", "the training template marks the answers")
    return Choice("prompt_completion", f"{problem}, so each answer is an example of its own")


def _server_mismatch(view: View, rows: Sequence[Row]) -> str:
    """Why whole conversations would not be what servers see; empty if they are."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    several = any(sum(message["role"] == "assistant" for message in row["messages"]) > 1 for row in rows)
    for answer in [ANSWER, THOUGHT] if rows_think(rows) else [ANSWER]:
        [example] = view.encode_all([{"messages": [QUESTION, answer]}])
        prompt = zip(example.ids[: example.shared[0]], example.trained, strict=False)
        if any(mask and not view.blank(token) for token, mask in prompt):  # Qwen3.5's prompt begins the thinking
            return "its training template marks what a server already writes"
        if not is_chat_template_stop_token_trained(view.tokenizer, chat_template=view.template):
            return "its template marks the answers without their stop token"
        if several:
            [example] = view.encode_all([{"messages": [QUESTION, answer] * 2}])
            trained = view.tokenizer.decode(list(itertools.compress(example.ids, example.trained)))
            if example.shared[-1] != example.prompts[-1] or trained.count("a thought") != 2 * (answer is THOUGHT):
                return "its template rewrites earlier answers"  # Qwen3 drops earlier thoughts
    return ""


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether the template knows enable_thinking=False, and the rows begin with the prompts of that mode too."""
    if rows_think(rows):
        return False
    form = training_format(tokenizer, rows).value
    thinks, skips = (View(tokenizer, form, thinking) for thinking in (True, False))
    if thinks.prompt([QUESTION]) == skips.prompt([QUESTION]):
        return False
    return all(example.shared == example.prompts for example in skips.encode_all(rows))
