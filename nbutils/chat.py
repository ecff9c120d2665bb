"""Chat rows as the trainer and a server see them: rendered, filtered by length, checked token by token, and shown.

Rows that would lose their stop token to max_length are left out, not cut. The contract: a server's prompt is the
beginning of the training text; every token of each answer is trained up to and with its stop token, and nothing else
is (white space around an answer does not count); and the trained text of an answer says all that the row's answer says.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from os import PathLike
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbutils import display
from nbutils.errors import CourseError
from nbutils.files import write_text
from nbutils.language import say, tr

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict[str, Any]
Messages = list[Message]
Tools = list[Message] | None
Turns = list[int]  # answers, as indices of the messages of a row
Row = dict[str, Any]  # {"messages": [...]}, and "tools" where the row has some
BATCH = 256  # conversations tokenized together
IGNORED = -100  # the label of a token without loss
QUESTION: Message = {"role": "user", "content": "a question"}  # a plain conversation to try templates with
ANSWER: Message = {"role": "assistant", "content": "an answer"}
THOUGHT: Message = {"role": "assistant", "content": "<think>\na thought\n</think>\n\nan answer"}


class Conversation(NamedTuple):
    """A whole row, or a row up to and with one of its answers."""

    row: int  # from 1
    messages: Messages
    tools: Tools
    turns: Turns  # the answers to train


class Example(NamedTuple):
    """One text the trainer trains on."""

    row: int  # from 1
    turns: Turns  # its answers
    ids: array[int]
    trained: bytes  # for each token 1 if it has loss, else 0
    shared: list[int]  # for each answer: how many tokens of the server's prompt the text begins with
    prompt_lengths: list[int]  # for each answer: of the server's prompt; equal to `shared` in a valid example

    @property
    def labels(self) -> list[int]:
        """For each token its id if it has loss, else -100."""
        return [token if trained else IGNORED for token, trained in zip(self.ids, self.trained, strict=True)]

    def first_answer(self) -> tuple[list[int], int]:
        """The ids up to the end of the first answer, and the position where that answer begins."""
        first = self.trained.index(1)
        end = self.trained.find(0, first)
        if end < 0:
            end = len(self.ids)
        return list(self.ids[:end]), first


def answer_turns(row: Row) -> Turns:
    """The positions of a row's answers among its messages."""
    return [turn for turn, message in enumerate(row["messages"]) if message["role"] == "assistant"]


def rows_think(rows: Sequence[Row]) -> bool:
    """Whether any answer has a thought that is not empty.

    Only the closing tag counts: the opening one is often part of the prompt, not of the answer.
    """
    for row in rows:
        for turn in answer_turns(row):
            message = row["messages"][turn]
            thought, closed, _ = str(message.get("content") or "").partition("</think>")
            inline_thought = closed and thought.replace("<think>", "").strip()
            if inline_thought or message.get("reasoning_content"):
                return True
    return False


def find_stop_ids(tokenizer: Any, generation: Any = None) -> set[int]:
    """The tokens at which generation ends: by a generation config, or by that in a model's folder, or by the tokenizer.

    Example:
        stop_ids = chat.find_stop_ids(tokenizer, "models/Qwen3-4B")
    """
    if isinstance(generation, str | PathLike):
        from transformers import GenerationConfig

        try:
            generation = GenerationConfig.from_pretrained(generation)
        except OSError:  # many base models have none
            generation = None
    stops = getattr(generation, "eos_token_id", None)
    if stops is None:
        stops = tokenizer.eos_token_id
    if isinstance(stops, list):
        return set(stops)
    return set() if stops is None else {stops}


def _training_template(tokenizer: Any) -> str | None:
    """A template that marks answers with {% generation %}: the tokenizer's own, or TRL's patched one, or None."""
    from trl import chat_template_utils as trl

    if not tokenizer.chat_template:
        raise CourseError(
            "The tokenizer of {tokenizer} has no chat template.",
            todo="Use the instruct version of the model, or set tokenizer.chat_template.",
            tokenizer=tokenizer.name_or_path,
        )
    own: str = tokenizer.get_chat_template()
    if trl.has_generation_markers(own):
        return own
    try:
        return trl.get_training_chat_template(tokenizer)
    except Exception:  # a template can raise anything
        return None


class Renderer:
    """Renders rows with a tokenizer: as texts to train on, and as the prompts of a server.

    `form` is one of `training_format`; `thinking` is enable_thinking of the prompts, None leaves it to the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        form: str,
        thinking: bool | None = None,
        stop_ids: Iterable[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.form = form
        self.template = _training_template(tokenizer) if form == "messages" else None
        self.stops = find_stop_ids(tokenizer) if stop_ids is None else set(stop_ids)
        self._template_options = {} if thinking is None else {"enable_thinking": thinking}
        self._special = set(tokenizer.get_added_vocab().values())
        # whether a token is white space only; each is looked at once
        self.is_blank = cache(lambda token: not tokenizer.decode([token]).strip())

    def encode_all(self, rows: Sequence[Row]) -> list[Example]:
        """All examples of all rows, each rendered once."""
        from tqdm.auto import tqdm

        shown = tqdm(rows, desc=tr("rendering"), unit=tr("row"), disable=len(rows) < 3000)
        conversations = self._conversations(shown)
        examples: list[Example] = []
        for _, group in itertools.groupby(conversations, key=attrgetter("tools")):
            while batch := list(itertools.islice(group, BATCH)):
                examples += self._encode(batch)
        return examples

    def encode(self, row: Row) -> Example:
        """The example of one row; in the form `prompt_completion` that of its last answer."""
        return self.encode_all([row])[-1]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server tokenizes before it answers."""
        return self._prompts([messages], tools)[0]

    def stop_position(self, ids: Sequence[int], start: int, end: int) -> int:
        """The position of the first stop token from `start` up to `end`; `end` if there is none."""
        for position in range(start, end):
            if ids[position] in self.stops:
                return position
        return end

    @cached_property
    def _added_stop(self) -> list[int]:
        """The stop token to append if the template does not close the last answer (GLM-4); else nothing."""
        tokenizer = self.tokenizer
        if self.form == "messages" or tokenizer.eos_token is None:
            return []
        text = tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False)
        closing = text.rpartition("an answer")[2]
        if any(token in closing for token in tokenizer.get_added_vocab()):
            return []
        return [tokenizer.eos_token_id]

    def _conversations(self, rows: Iterable[Row]) -> Iterator[Conversation]:
        """Every whole row, or each of its answers with what comes before it."""
        for number, row in enumerate(rows, start=1):
            messages = row["messages"]
            tools = row.get("tools") or None
            turns = answer_turns(row)
            if self.form == "messages":
                yield Conversation(number, messages, tools, turns)
                continue
            for turn in turns:
                yield Conversation(number, messages[: turn + 1], tools, [turn])

    def _encode(self, batch: list[Conversation]) -> list[Example]:
        """The examples of conversations with the same tools; an error names the first row that the template refuses."""
        tools = batch[0].tools
        try:
            rendered = self.tokenizer.apply_chat_template(
                [conversation.messages for conversation in batch],
                chat_template=self.template,
                tools=tools,
                return_dict=True,
                return_assistant_tokens_mask=self.form == "messages",
            )
            histories = [conversation.messages[:turn] for conversation in batch for turn in conversation.turns]
            prompts = iter(self._prompts(histories, tools))
            added_stop = self._added_stop
        except Exception as problem:  # a template can raise anything
            if len(batch) > 1:  # one by one, to find the row
                return [example for conversation in batch for example in self._encode([conversation])]
            raise CourseError(
                "Row {row}: the chat template of this model refuses it: {problem}.",
                todo=(
                    "Change the row (some templates know no system message, or no tools), or use another model "
                    "with its own template."
                ),
                row=batch[0].row,
                problem=problem,
            ) from problem
        masks = rendered.get("assistant_masks") or itertools.repeat(None)
        examples = []
        for conversation, ids, mask in zip(batch, rendered["input_ids"], masks, strict=False):
            own_prompts = [next(prompts) for _ in conversation.turns]
            examples.append(self._example(conversation, ids + added_stop, mask, own_prompts))
        return examples

    def _example(
        self, conversation: Conversation, ids: list[int], marked: list[int] | None, prompts: list[list[int]]
    ) -> Example:
        """One example; without the template's marks, all that follows the prompt is trained."""
        shared = [len(commonprefix([prompt, ids])) for prompt in prompts]  # noqa: RUF071  # it takes any sequences
        after_prompt = bytes(shared[0]).ljust(len(ids), b"\1")  # zeros, then ones to the end
        trained = bytearray(marked or after_prompt)
        self._trim(ids, trained, shared)
        prompt_lengths = [len(prompt) for prompt in prompts]
        return Example(
            conversation.row,
            conversation.turns,
            array("i", ids),
            trained=bytes(trained),
            shared=shared,
            prompt_lengths=prompt_lengths,
        )

    def _prompts(self, histories: list[Messages], tools: Tools) -> list[list[int]]:
        """What a server tokenizes before it answers: it knows only the tokenizer's own template."""
        return list(
            self.tokenizer.apply_chat_template(
                histories, tools=tools, add_generation_prompt=True, return_dict=False, **self._template_options
            )
        )

    def _trim(self, ids: list[int], trained: bytearray, starts: list[int]) -> None:
        """Take the loss off white space before an answer, and off special tokens and blanks after its stop token."""
        ends = [*starts[1:], len(ids)]
        for start, end in zip(starts, ends, strict=True):
            while start and trained[start - 1] and self.is_blank(ids[start - 1]):
                start -= 1
                trained[start] = 0
            stop = self.stop_position(ids, start, end)
            for position in range(stop + 1, end):
                token = ids[position]
                if token not in self._special and not self.is_blank(token):
                    break
                trained[position] = 0


def training_format(
    tokenizer: Any,
    rows: Sequence[Row] = (),
    thinking: bool | None = None,
    stop_ids: Iterable[int] | None = None,
) -> str:
    """`messages`, whole conversations, if such rows keep the contract; else `prompt_completion`, each answer alone."""
    if stop_ids is None:  # only the model's own config knows: here any special token may close an answer
        stop_ids = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    answers = [ANSWER]
    if rows_think(rows):
        answers.append(THOUGHT)
    rounds = 2 if any(len(answer_turns(row)) > 1 for row in rows) else 1
    if _training_template(tokenizer) is not None:
        renderer = Renderer(tokenizer, "messages", thinking, stop_ids)
        if all(_keeps_contract(renderer, {"messages": [QUESTION, answer] * rounds}) for answer in answers):
            return "messages"
    return "prompt_completion"


def _keeps_contract(renderer: Renderer, row: Row) -> bool:
    """Whether training sees such a row as a server does: the template of Qwen3 drops the first of two thoughts."""
    try:
        _check_example(renderer, renderer.encode(row), row)
    except CourseError:
        return False
    return True


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether enable_thinking=False changes the prompt, and the texts of these rows begin with such prompts too."""
    if rows_think(rows):
        return False
    form = training_format(tokenizer, rows)
    thinking = Renderer(tokenizer, form, thinking=True)
    skipping = Renderer(tokenizer, form, thinking=False)
    if thinking.prompt([QUESTION]) == skipping.prompt([QUESTION]):
        return False
    return all(example.shared == example.prompt_lengths for example in skipping.encode_all(rows))


@dataclass(frozen=True, repr=False)
class FilteredRows:
    """All rows, which of them are too long, and the examples of the others."""

    max_length: int
    rows: Sequence[Row]
    too_long: dict[int, int]  # tokens of each row that is left out, by its number (from 1)
    longest: int
    renderer: Renderer
    examples: list[Example]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example that is trained."""
        return [len(example.ids) for example in self.examples]

    @property
    def trained_tokens(self) -> int:
        """How many tokens have loss."""
        return sum(example.trained.count(1) for example in self.examples)

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json."""
        return {
            "form": self.renderer.form,
            "examples": len(self.examples),
            "trained_tokens": self.trained_tokens,
            "rows_left_out": len(self.too_long),
        }

    def __str__(self) -> str:
        if not self.too_long:
            return tr(
                "all {rows} rows fit: the longest has {longest} tokens, max_length is {limit}",
                rows=len(self.rows),
                longest=self.longest,
                limit=self.max_length,
            )
        return tr(
            "{count} of {rows} rows are LEFT OUT (see too_long.jsonl): "
            "max_length {limit} would cut off their stop token\n"
            "  to train them raise sft.max_length to {longest} (memory grows with it), or shorten them",
            count=len(self.too_long),
            rows=len(self.rows),
            longest=self.longest,
            limit=self.max_length,
        )

    def write_too_long(self, folder: Path) -> None:
        """Write the rows that are left out, with their numbers, to too_long.jsonl; the file may be empty."""
        lines = []
        for number, tokens in self.too_long.items():
            entry = {"row": number, "tokens": tokens} | self.rows[number - 1]
            lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        write_text(folder / "too_long.jsonl", "".join(lines))


def filter_by_length(
    tokenizer: Any, rows: Sequence[Row], max_length: int, stop_ids: Iterable[int] | None = None
) -> FilteredRows:
    """Render all rows, and leave out those whose stop token lies beyond `max_length` (0: no limit).

    Example:
        filtered = chat.filter_by_length(tokenizer, rows, 1024, stop_ids=chat.find_stop_ids(tokenizer, model_folder))
    """
    form = training_format(tokenizer, rows, None, stop_ids)
    renderer = Renderer(tokenizer, form, stop_ids=stop_ids)
    examples = renderer.encode_all(rows)
    longest = max(len(example.ids) for example in examples)
    too_long: dict[int, int] = {}
    for example in examples:
        last_trained = example.trained.rfind(1)  # the stop token, in a valid example
        if 0 < max_length <= last_trained:
            too_long[example.row] = max(len(example.ids), too_long.get(example.row, 0))
    if len(too_long) == len(rows):
        raise CourseError(
            "All {rows} rows lose their stop token at max_length {max_length}; the longest has {longest} tokens.",
            todo=(
                'Raise sft.max_length for rows of up to {fits} tokens (SET = "sft.max_length={fits}" in '
                "lesson 01 or 03, or in the profile), and shorten longer ones."
            ),
            rows=len(rows),
            max_length=max_length,
            longest=longest,
            fits=min(longest, tokenizer.model_max_length),
        )
    kept = [example for example in examples if example.row not in too_long]
    return FilteredRows(max_length, rows, too_long, longest=longest, renderer=renderer, examples=kept)


def check_contract(filtered: FilteredRows) -> str:
    """Check every row that is kept, and say what was counted; the stop tokens are those of `filter_by_length`.

    Example:
        print(chat.check_contract(chat.filter_by_length(tokenizer, rows, 1024)))
    """
    _require_tools_shown(filtered)
    stop_ids: set[int] = set()
    for example in filtered.examples:
        stop_ids |= _check_example(filtered.renderer, example, filtered.rows[example.row - 1])
    tokens = sum(filtered.lengths)
    trained = filtered.trained_tokens
    return tr(
        "format   {form}\n"
        "trained  {trained} of {tokens} tokens ({share}), in {answers} answers\n"
        "stop     every answer ends with {stops}, and generation stops there",
        form=filtered.renderer.form,
        trained=trained,
        tokens=tokens,
        share=f"{trained / tokens:.0%}",
        answers=sum(len(example.turns) for example in filtered.examples),
        stops=_stop_texts(filtered.renderer, stop_ids),
    )


def _stop_texts(renderer: Renderer, stop_ids: set[int]) -> str:
    return tr(" or ").join(renderer.tokenizer.decode([stop]) for stop in sorted(stop_ids))


def _require_tools_shown(filtered: FilteredRows) -> None:
    """Refuse a template that does not show tools to the model; the first row with tools is tried."""
    for example in filtered.examples:
        row = filtered.rows[example.row - 1]
        if not row.get("tools"):
            continue
        question = row["messages"][: example.turns[0]]
        if filtered.renderer.prompt(question, row["tools"]) == filtered.renderer.prompt(question):
            raise CourseError(
                "Row {row}: the chat template of this model leaves out its tools.",
                todo="Use a model that can call tools, or write the tools into the system message.",
                row=example.row,
            )
        return


def _check_example(renderer: Renderer, example: Example, row: Row) -> set[int]:
    """Raise at the first token that breaks the contract; returns the stop tokens of the answers."""
    _check_prompts(renderer, example, row)
    expected = bytearray(len(example.ids))
    stop_ids = set()
    ends = [*example.shared[1:], len(example.ids)]
    for turn, start, end in zip(example.turns, example.shared, ends, strict=True):
        stop = renderer.stop_position(example.ids, start, end)
        if stop == end:
            raise CourseError(
                "Row {row}: no stop token closes an answer; generation stops only at {stops}.",
                todo=(
                    "Make the token that closes an answer in the chat template the eos_token of the tokenizer "
                    "and of the generation config; instruct versions of a model come that way."
                ),
                row=example.row,
                stops=_stop_texts(renderer, renderer.stops),
            )
        _check_answer(renderer, example, row["messages"][turn], example.ids[start:stop])
        expected[start : stop + 1] = b"\1" * (stop + 1 - start)
        stop_ids.add(example.ids[stop])
    _check_mask(renderer, example, expected)
    return stop_ids


def _check_prompts(renderer: Renderer, example: Example, row: Row) -> None:
    """Raise unless all that comes before each answer is what a server would see."""
    decode = renderer.tokenizer.decode
    for turn, start, length in zip(example.turns, example.shared, example.prompt_lengths, strict=True):
        if start == length:
            continue
        prompt = renderer.prompt(row["messages"][:turn], row.get("tools"))
        raise CourseError(
            "Row {row}: from token {token} on, a server would send {server!r} where training saw {training!r}.",
            todo=(
                "Use the chat template that came with the model, and start answers without a line break; or use "
                "another model, as one that always thinks cannot learn answers without thoughts."
            ),
            row=example.row,
            token=start + 1,
            server=decode(prompt[start : start + 8]),
            training=decode(list(example.ids[start : start + 8])),
        )


def _check_answer(renderer: Renderer, example: Example, message: Message, ids: Sequence[int]) -> None:
    """Raise unless the tokens up to the stop token say all that the answer of the row says."""
    missing = _missing_part(message, renderer.tokenizer.decode(list(ids)))
    if missing:
        raise CourseError(
            "Row {row}: the chat template leaves out or changes {part}.",
            todo=(
                "Use the chat template that came with the model, and no text of a stop token in an answer. A model "
                "whose template drops thoughts or tool calls cannot learn them: take them out, or use another model."
            ),
            row=example.row,
            part=missing,
        )


def _check_mask(renderer: Renderer, example: Example, expected: bytearray) -> None:
    """Raise unless exactly the `expected` tokens are trained; white space may be either."""
    if example.trained == expected:
        return
    for position, token in enumerate(example.ids):
        if example.trained[position] == expected[position] or renderer.is_blank(token):
            continue
        raise CourseError(
            "Row {row}: token {number}, {text!r}, is part of an answer and not trained, or the other way round.",
            todo="Put {tag} around each answer and its stop token in the chat template.",
            row=example.row,
            number=position + 1,
            text=renderer.tokenizer.decode([token]),
            tag="{% generation %}",
        )


def _missing_part(answer: Message, text: str) -> str:
    """The first thought, content or called function of an answer that its text lacks; white space does not count."""
    content = answer.get("content") or ""
    parts = [answer.get("reasoning_content") or ""]
    parts += re.split("</?think>", content)  # tags are the template's
    parts += [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    rest = _comparable(text)
    for part in filter(str.strip, parts):
        _, separator, rest = rest.partition(_comparable(part))  # the next part must come after this one
        if not separator:
            return repr(part.strip()[:40])
    return ""


def _comparable(text: str) -> str:
    """The text without white space and in NFKC, to which many tokenizers normalize."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def build_dataset(tokenizer: Any, rows: Sequence[Row], max_length: int) -> Dataset:
    """Rows as tokens and labels for SFTTrainer, checked: what the lesson does step by step.

    Example:
        trainer = SFTTrainer(model, SFTConfig(max_length=1024), train_dataset=chat.build_dataset(tokenizer, rows, 1024))
    """
    filtered = filter_by_length(tokenizer, rows, max_length)
    check_contract(filtered)
    return training_dataset(filtered)


def training_dataset(filtered: FilteredRows) -> Dataset:
    """The tokens and labels of the examples, for SFTTrainer, which packs and shuffles them but changes none.

    Example:
        trainer = SFTTrainer(model, SFTConfig(max_length=1024), train_dataset=chat.training_dataset(filtered))
    """
    import numpy
    import pyarrow
    from datasets import Dataset

    tokens = numpy.concatenate([example.ids for example in filtered.examples])
    trained = b"".join(example.trained for example in filtered.examples)
    has_loss = numpy.frombuffer(trained, dtype=bool)
    labels = numpy.where(has_loss, tokens, IGNORED).astype(numpy.int64)
    offsets = list(itertools.accumulate(filtered.lengths, initial=0))
    # LargeListArray has offsets of 64 bits; those of ListArray end at 2**31 tokens
    columns = [pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values)) for values in (tokens, labels)]
    return Dataset(pyarrow.table(columns, names=["input_ids", "labels"]))


def validation_dataset(filtered: FilteredRows, held_out: Sequence[Row], count: int) -> Dataset | None:
    """`count` of the held-out rows, evenly spread, rendered as the training rows are; None if there are none.

    Rows that are too long are left out.

    Example:
        validation = chat.validation_dataset(filtered, eval_rows, 100)
    """
    if not count or not held_out:
        return None
    return training_dataset(replace(filtered, examples=held_out_examples(filtered, held_out, count)))


def held_out_examples(filtered: FilteredRows, held_out: Sequence[Row], most: int) -> list[Example]:
    """The examples of at most so many held-out rows, evenly spread, without those that are too long."""
    if most < len(held_out):
        held_out = [held_out[number * len(held_out) // most] for number in range(most)]
    usable = []
    for example in filtered.renderer.encode_all(held_out):
        fits = not filtered.max_length or len(example.ids) <= filtered.max_length
        if fits and any(example.trained):
            usable.append(example)
    if not usable:
        raise CourseError(
            "No held-out row can be used: there is none, or all are longer than max_length {limit}.",
            todo='Raise sft.max_length, shorten these rows, or set SET = "course.validation_rows=0".',
            limit=filtered.max_length,
        )
    return usable


def check_trainer(trainer: Any, filtered: FilteredRows) -> None:
    """Stop unless, after packing and truncation, exactly the tokens of the contract carry the loss."""
    trained = 0
    for batch in trainer.train_dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        trained += int((labels != IGNORED).sum())
    if trained != filtered.trained_tokens:
        raise CourseError(
            "The trainer would train on {trained} tokens; the contract check counted {tokens}.",
            todo=(
                "Pass the dataset of chat.training_dataset(...) to the trainer, with the profile's max_length and "
                "packing_strategy bfd."
            ),
            trained=trained,
            tokens=filtered.trained_tokens,
        )


def show_row(tokenizer: Any, row: Row) -> None:
    """Show one conversation with its trained tokens in color; in [brackets] outside a notebook.

    Example:
        chat.show_row(tokenizer, rows[0])
    """
    example = Renderer(tokenizer, training_format(tokenizer, [row])).encode(row)
    runs = []
    start = 0
    for mask, group in itertools.groupby(example.trained):
        end = start + len(list(group))
        text = tokenizer.decode(list(example.ids[start:end]))
        runs.append((text, mask))
        start = end
    plain = "".join(f"[{text}]" if mask else text for text, mask in runs)
    trained = sum(example.trained)
    say("{trained} of {tokens} tokens are trained. They are marked:", trained=trained, tokens=len(example.ids))
    display.show_page("tokens.html", plain, runs=runs)
