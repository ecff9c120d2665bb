"""Chat rows as the trainer and a server see them: rendered, filtered by length, checked token by token, and shown.

Rows that would lose their stop token to max_length are left out, not cut. The contract: a server's prompt is the
beginning of the training text; every token of each answer is trained up to and with its stop token, and nothing else
is (white space around an answer does not count); and the answer says all that the row says.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbutils import display, distributed, profiles
from nbutils.errors import CourseError
from nbutils.files import write_text
from nbutils.hardware import Choice, keep_4bit_layout
from nbutils.language import tr
from nbutils.record import LessonLike

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict[str, Any]
Messages = list[Message]
Tools = list[dict[str, Any]] | None
Row = dict[str, Any]  # {"messages": [...]}, and "tools" where the row has some
Conversation = tuple[int, Messages, tuple[int, ...]]  # row, messages, and the positions of the answers to train
BATCH = 256  # conversations tokenized together
TOO_LONG = "too_long.jsonl"
IGNORED = -100  # the label of a token without loss
COLLATED_ROWS = 8  # a collator treats all rows alike
QUESTION: Message = {"role": "user", "content": "a question"}  # a plain conversation to try templates with
ANSWER: Message = {"role": "assistant", "content": "an answer"}
THOUGHT: Message = {"role": "assistant", "content": "<think>\na thought\n</think>\n\nan answer"}


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


def _training_template(tokenizer: Any) -> str | None:
    """The template that marks answers for the loss: the tokenizer's own, TRL's for it, or none."""
    from trl import chat_template_utils as trl

    if not tokenizer.chat_template:
        raise CourseError(
            tr(
                "The tokenizer of {tokenizer} has no chat template.",
                tokenizer=tokenizer.name_or_path or tr("this model"),
            ),
            todo=tr("Use the instruct version of the model, or set tokenizer.chat_template."),
        )
    own: str = tokenizer.get_chat_template()
    if trl.has_generation_markers(own):
        return own
    try:
        return trl.get_training_chat_template(tokenizer)
    except Exception:  # a template can raise anything
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

        conversations = self._conversations(tqdm(rows, desc=tr("rendering"), unit=tr("row"), disable=len(rows) < 3000))
        examples = []
        for tools, group in itertools.groupby(conversations, key=lambda one: one[0]):
            while batch := [conversation for _, conversation in itertools.islice(group, BATCH)]:
                examples += self._encode(batch, tools)
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

    def _conversations(self, rows: Iterable[Row]) -> Iterator[tuple[Tools, Conversation]]:
        """The tools of a row with the whole row, or with each of its answers and what comes before it."""
        for number, row in enumerate(rows, start=1):
            messages, tools = row["messages"], row.get("tools") or None
            turns = tuple(at for at, message in enumerate(messages) if message["role"] == "assistant")
            if not turns or not turns[0]:
                raise CourseError(
                    tr("Row {row}: it has no answer to a question.", row=number),
                    todo=tr("Prepare the rows with lesson 02."),
                )
            if self.form == "messages":
                yield tools, (number, messages, turns)
            else:
                yield from ((tools, (number, messages[: turn + 1], (turn,))) for turn in turns)

    def _encode(self, conversations: list[Conversation], tools: Tools) -> list[Example]:
        """The examples of a batch; the first row that the template refuses is named."""
        marked, examples = self.form == "messages", []
        try:
            encoded = self.tokenizer.apply_chat_template(
                [messages for _, messages, _ in conversations], chat_template=self.template, tools=tools,
                return_dict=True, return_assistant_tokens_mask=marked,
            )  # fmt: skip
            before = [messages[:turn] for _, messages, turns in conversations for turn in turns]
            prompts = iter(self._prompts(before, tools))
            added = self._added_stop
        except Exception as problem:  # a template can raise anything
            if len(conversations) > 1:
                return [example for one in conversations for example in self._encode([one], tools)]
            raise CourseError(
                tr(
                    "Row {row}: the chat template of this model refuses it: {problem}.",
                    row=conversations[0][0],
                    problem=problem,
                ),
                todo=tr(
                    "Change the row (some templates know no system message, or no tools), or use another model "
                    "with its own template."
                ),
            ) from problem
        for at, (row, _, turns) in enumerate(conversations):
            ids = encoded["input_ids"][at] + added
            own = [next(prompts) for _ in turns]
            shared = tuple(common_length(prompt, ids) for prompt in own)
            mask = bytearray(encoded["assistant_masks"][at] if marked else bytes(shared[0]).ljust(len(ids), b"\1"))
            self._trim(ids, mask, shared)
            examples.append(Example(row, turns, array("i", ids), bytes(mask), shared, tuple(map(len, own))))
        return examples

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
            stop = next((at for at in range(start, end) if ids[at] in self.stops), end)
            for at in range(stop + 1, end):
                if ids[at] not in self._special and not self.blank(ids[at]):
                    break
                mask[at] = 0


def training_format(tokenizer: Any, rows: Sequence[Row] = (), thinking: bool | None = None) -> Choice:
    """`messages`, the whole conversation, where servers see the same text; else `prompt_completion`, per answer."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    problem, tries = "", [ANSWER, THOUGHT] if rows_think(rows) else [ANSWER]
    several = any(sum(message["role"] == "assistant" for message in row["messages"]) > 1 for row in rows)
    if _training_template(tokenizer) is None:
        problem = tr("its template cannot mark answers and TRL has no training template for it")
        tries = []
    for answer in tries:
        view = View(tokenizer, "messages", thinking)
        [example] = view.encode_all([{"messages": [QUESTION, answer]}])
        prompt = zip(example.ids[: example.shared[0]], example.trained, strict=False)
        if any(mask and not view.blank(token) for token, mask in prompt):  # Qwen3.5's prompt begins the thinking
            problem = tr("its training template marks what a server already writes")
        elif not is_chat_template_stop_token_trained(tokenizer, chat_template=view.template):
            problem = tr("its template marks the answers without their stop token")
        elif several:
            [example] = view.encode_all([{"messages": [QUESTION, answer] * 2}])
            trained = tokenizer.decode(list(itertools.compress(example.ids, example.trained)))
            if example.shared[-1] != example.prompts[-1] or trained.count("a thought") != 2 * (answer is THOUGHT):
                problem = tr("its template rewrites earlier answers")  # Qwen3 drops earlier thoughts
        if problem:
            break
    if not problem:
        return Choice("messages", tr("the training template marks the answers"))
    return Choice("prompt_completion", tr("{problem}, so each answer is an example of its own", problem=problem))


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether the template knows enable_thinking=False, and the rows begin with the prompts of that mode too."""
    if rows_think(rows):
        return False
    form = training_format(tokenizer, rows).value
    thinks, skips = (View(tokenizer, form, thinking) for thinking in (True, False))
    if thinks.prompt([QUESTION]) == skips.prompt([QUESTION]):
        return False
    return all(example.shared == example.prompts for example in skips.encode_all(rows))


@dataclass(frozen=True)
class FilteredRows:
    """All rows, the numbers of those that are too long, and the examples of the others."""

    form: Choice
    max_length: int
    rows: Sequence[Row] = field(repr=False)
    too_long: dict[int, int]  # number (from 1) and tokens of each row that is left out
    longest: int
    view: View = field(repr=False)
    examples: list[Example] = field(repr=False)

    @property
    def left_out(self) -> list[Row]:
        """The rows that are too long."""
        return [self.rows[number - 1] for number in self.too_long]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example that is trained."""
        return [len(example.ids) for example in self.examples]

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json."""
        return {"longest_row_tokens": self.longest, "rows_too_long": len(self.too_long)}

    def __str__(self) -> str:
        values = {"rows": len(self.rows), "longest": self.longest}
        if not self.max_length:
            return tr("all {rows} rows fit: the longest has {longest} tokens, there is no limit", **values)
        values["limit"] = self.max_length
        if not self.too_long:
            return tr("all {rows} rows fit: the longest has {longest} tokens, max_length is {limit}", **values)
        values["count"] = len(self.too_long)
        return tr(
            "{count} of {rows} rows are LEFT OUT (see too_long.jsonl): "
            "max_length {limit} would cut off their stop token\n"
            "  to train them raise sft.max_length to {longest} (memory grows with it), or shorten them",
            **values,
        )

    def write(self, folder: Path) -> None:
        """Write the rows that are left out, with their numbers, to too_long.jsonl; empty without any."""
        lines = []
        for number, tokens in self.too_long.items():
            entry = {"row": number, "tokens": tokens, "cut": tokens - self.max_length, **self.rows[number - 1]}
            lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        write_text(folder / TOO_LONG, "".join(lines))


def filter_by_length(
    tokenizer: Any, rows: Sequence[Row], max_length: int, form: str = "", thinking: bool | None = None,
    stop_ids: Iterable[int] | None = None,
) -> FilteredRows:  # fmt: skip
    """Render all rows, and leave out those whose stop token (see find_stop_ids) lies beyond `max_length` (0: none)."""
    if not rows:
        raise CourseError(tr("There are no rows to render."), todo=tr("Run lesson 02 first."))
    choice = Choice(form, tr("chosen by the caller")) if form else training_format(tokenizer, rows, thinking)
    view = View(tokenizer, choice.value, thinking, stop_ids)
    examples = view.encode_all(rows)
    longest = max(len(example.ids) for example in examples)
    too_long: dict[int, int] = {}
    for example in examples:
        if 0 < max_length <= example.trained.rfind(1):  # the stop token, in a valid example
            too_long[example.row] = max(len(example.ids), too_long.get(example.row, 0))
    if len(too_long) == len(rows):
        raise CourseError(
            tr(
                "All {rows} rows lose their stop token at max_length {max_length}; the longest has {longest} tokens.",
                rows=len(rows),
                max_length=max_length,
                longest=longest,
            ),
            todo=tr(
                'Raise sft.max_length for rows of up to {fits} tokens (SET = "sft.max_length={fits}" in '
                "lesson 01 or 03, or in the profile), and shorten longer ones.",
                fits=min(longest, tokenizer.model_max_length),
            ),
        )
    examples = [example for example in examples if example.row not in too_long]
    return FilteredRows(choice, max_length, rows, too_long, longest, view, examples)


@dataclass(frozen=True)
class ContractReport:
    """What the check counted. An example is what the trainer trains at once: a row, or one of its answers."""

    form: Choice
    examples: int
    answers: int
    trained: int  # tokens
    stop_ids: tuple[int, ...]  # those the answers end with
    text: str

    def __str__(self) -> str:
        return self.text


def check_contract(filtered: FilteredRows) -> ContractReport:
    """Check every row that is kept; the stop tokens are those that `filter_by_length` was given."""
    view, form, examples, found = filtered.view, filtered.form, filtered.examples, set[int]()
    rows = [filtered.rows[example.row - 1] for example in examples]
    for example, row in zip(examples, rows, strict=True):
        if tools := row.get("tools"):  # one row tells whether the template shows them to the model
            question = row["messages"][: example.turns[0]]
            if view.prompt(question, tools) == view.prompt(question):
                raise CourseError(
                    tr("Row {row}: the chat template of this model leaves out its tools.", row=example.row),
                    todo=tr("Use a model that can call tools, or write the tools into the system message."),
                )
            break
    for example, row in zip(examples, rows, strict=True):
        found |= _check_example(view, example, row)
    answers = sum(len(example.turns) for example in examples)
    trained, tokens = sum(example.trained.count(1) for example in examples), sum(filtered.lengths)
    stops = tr(" or ").join(view.tokenizer.decode([stop]) for stop in sorted(found))
    lines = (
        tr("format   {form}: {reason}", form=form.value, reason=form.reason),
        tr(
            "trained  {trained} of {tokens} tokens ({share}), in {answers} answers",
            trained=trained, tokens=tokens, share=f"{trained / tokens:.0%}", answers=answers,
        ),
        tr("stop     every answer ends with {stops}, and generation stops there", stops=stops),
    )  # fmt: skip
    text = "\n".join(lines)
    return ContractReport(form, len(examples), answers, trained, tuple(sorted(found)), text)


def _check_example(view: View, example: Example, row: Row) -> set[int]:
    """The stop tokens of the answers; raises at the first token that breaks the contract."""
    ids, messages, decode = example.ids, row["messages"], view.tokenizer.decode
    expected, found = bytearray(len(ids)), set[int]()
    for turn, start, length in zip(example.turns, example.shared, example.prompts, strict=True):
        if start != length:  # all that comes before an answer must be what a server would be sent
            prompt = view.prompt(messages[:turn], row.get("tools"))
            raise CourseError(
                tr(
                    "Row {row}: from token {token} on, a server would send {server!r} where training saw {training!r}.",
                    row=example.row,
                    token=start + 1,
                    server=decode(prompt[start : start + 8]),
                    training=decode(list(ids[start : start + 8])),
                ),
                todo=tr(
                    "Use the chat template that came with the model, and start answers without a line break. If "
                    "the model has a thinking mode, pass the other one (thinking=True or False) to "
                    "chat.filter_by_length, and ask servers with it."
                ),
            )
    for turn, start, end in zip(example.turns, example.shared, [*example.shared[1:], len(ids)], strict=True):
        stop = next((at for at in range(start, end) if ids[at] in view.stops), end)
        if stop == end:
            names = ", ".join(repr(decode([stop])) for stop in sorted(view.stops)) or tr("nothing")
            last = decode([ids[max(example.trained.rfind(1), 0)]])
            raise CourseError(
                tr(
                    "Row {row}: the last trained token of an answer is {last!r}, and generation stops only at {stops}.",
                    row=example.row,
                    last=last,
                    stops=names,
                ),
                todo=tr(
                    "Make the token that closes an answer in the chat template the eos_token of the tokenizer "
                    "and of the generation config; instruct versions of a model come that way."
                ),
            )
        if missing := _missing_part(view.tokenizer, messages[turn], decode(list(ids[start:stop]))):
            if (text := decode([ids[stop]])) in str(messages[turn].get("content")):
                raise CourseError(
                    tr(
                        "Row {row}: an answer contains {stop!r}, the text of a stop token: generation ends there.",
                        row=example.row,
                        stop=text,
                    ),
                    todo=tr("Take it out of the answer, or write it in another way."),
                )
            raise CourseError(
                tr("Row {row}: the chat template leaves out or changes {part}.", row=example.row, part=missing),
                todo=tr(
                    "Use the chat template that came with the model. A model whose template drops thoughts or "
                    "tool calls cannot learn them: take them out of the rows, or use another model."
                ),
            )
        expected[start : stop + 1] = b"\1" * (stop + 1 - start)
        found.add(ids[stop])
    for at, mask in enumerate(example.trained if expected != example.trained else ()):
        if mask != expected[at] and not view.blank(ids[at]):
            what = tr("is part of an answer, and is not trained")
            if mask:
                what = tr("is no part of an answer, and is trained")
            token = tr("token {number}, {text}", number=at + 1, text=repr(decode([ids[at]])))
            raise CourseError(
                tr("Row {row}: {token} {what}.", row=example.row, token=token, what=what),
                allowed=tr("each answer trained up to and with its stop token, and nothing else"),
                todo=tr(
                    "Put {{% generation %}} around each answer and its stop token in the chat template, or pass "
                    'form="prompt_completion" to chat.filter_by_length.'
                ),
            )
    return found


def _missing_part(tokenizer: Any, answer: Message, text: str) -> str:
    """The first thought, words or called function that an answer has and its text has not; white space aside."""
    content, rest = answer.get("content"), "".join(text.split())
    *thoughts, words = re.split("</?think>", content if isinstance(content, str) else "")  # tags are the template's
    for part in (answer.get("reasoning_content") or "", *thoughts, words):
        short = "".join(part.split())
        if short not in rest:  # some tokenizers normalize characters, which no template can help
            short = "".join(tokenizer.decode(tokenizer(part, add_special_tokens=False)["input_ids"]).split())
        if short not in rest:
            return repr(part.strip()[:40])
        rest = rest[rest.index(short) + len(short) :]
    for call in answer.get("tool_calls") or ():
        if (name := (call.get("function") or call).get("name", "")) not in text:
            return tr("a call of {name}", name=repr(name))
    return ""


@dataclass(frozen=True)
class ChatDataset:
    """Rows as tokens and labels for SFTTrainer, and what was checked of them."""

    train: Dataset = field(repr=False)
    eval: Dataset | None = field(repr=False)  # None: no held-out row can be validated on
    lengths: list[int] = field(repr=False)  # tokens of each example that is trained
    left_out: list[Row] = field(repr=False)  # too long
    report: ContractReport
    text: str

    @property
    def validation_rows(self) -> int:
        """How many held-out rows can be validated on."""
        return len(self.eval) if self.eval else 0

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json."""
        counts = {"examples": self.report.examples, "trained_tokens": self.report.trained}
        return {"form": self.report.form.value, **counts, "rows_left_out": len(self.left_out)}

    def __str__(self) -> str:
        return self.text


def build_dataset(
    tokenizer: Any, train_rows: Sequence[Row], eval_rows: Sequence[Row], lesson: LessonLike
) -> ChatDataset:
    """Render the rows, leave out those that are too long (too_long.jsonl lists them), and check the contract."""
    stop_ids = find_stop_ids(tokenizer, lesson.model)
    filtered = filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids=stop_ids)
    filtered.write(lesson.run.data)
    report = check_contract(filtered)
    recipe = lesson.fitted(profiles.Rows.of(filtered.lengths, len(eval_rows))).profile.course
    validation = validation_dataset(filtered, eval_rows, int(recipe.validation_rows))
    return ChatDataset(
        training_dataset(filtered), validation if len(validation) else None, filtered.lengths, filtered.left_out,
        report, f"{filtered}\n{report}",
    )  # fmt: skip


def training_dataset(filtered: FilteredRows) -> Dataset:
    """The examples of the kept rows, for SFTTrainer: it packs and shuffles these tokens, and changes none."""
    import numpy
    import pyarrow
    from datasets import Dataset

    offsets = list(itertools.accumulate(filtered.lengths, initial=0))
    ids, trained = array("i"), bytearray()
    for example in filtered.examples:
        ids += example.ids
        trained += example.trained
    tokens = numpy.frombuffer(ids, dtype=numpy.int32)
    labels = numpy.where(numpy.frombuffer(trained, dtype=bool), tokens, IGNORED).astype(numpy.int64)
    # offsets of 64 bits: those of a plain list end at 2**31 tokens
    columns = [pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values)) for values in (tokens, labels)]
    return Dataset(pyarrow.table(columns, names=["input_ids", "labels"]))


def validation_dataset(filtered: FilteredRows, held_out: Sequence[Row], count: int) -> Dataset:
    """`count` of the held-out rows, evenly spread, rendered as the training rows are; long ones are left out."""
    if count < len(held_out):
        held_out = [held_out[number * len(held_out) // count] for number in range(count)]
    examples = filtered.view.encode_all(held_out) if count and held_out else []
    usable = [one for one in examples if len(one.ids) <= (filtered.max_length or len(one.ids)) and any(one.trained)]
    if count and not usable:
        print(tr("No held-out row can be used for validation: training goes without it, and the last step is kept."))
    return training_dataset(replace(filtered, examples=usable))


def check_trainer(trainer: Any, report: ContractReport) -> None:
    """Stop unless, after packing, truncation and collation, exactly the tokens of the contract carry the loss."""
    import numpy

    dataset, trained, stops = trainer.train_dataset, 0, 0
    for batch in dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        trained += int((labels != IGNORED).sum())
        stops += int(numpy.isin(labels, report.stop_ids).sum())
    rows = [dataset[at] for at in range(min(len(dataset), COLLATED_ROWS))]
    hidden = sum(label != IGNORED for row in rows for label in row["labels"])
    hidden -= int((trainer.data_collator(rows)["labels"] != IGNORED).sum())
    if (trained, stops, hidden) != (report.trained, report.answers, 0):
        found = tr(
            "{tokens} tokens with {stops} stop tokens, and its collator hides {hidden}",
            tokens=trained, stops=stops, hidden=hidden,
        )  # fmt: skip
        expected = tr("{tokens} tokens with {stops} stop tokens", tokens=report.trained, stops=report.answers)
        raise CourseError(
            tr(
                "The trainer would train on {found}; the contract check counted {expected}.",
                found=found,
                expected=expected,
            ),
            todo=tr(
                "Pass the datasets of chat.build_dataset(...) to the trainer, with the profile's max_length, "
                "packing_strategy bfd and no data collator of your own."
            ),
        )


def answer(model: Any, tokenizer: Any, rows: Sequence[Row], max_new_tokens: int = 128) -> list[str]:
    """The model's own answer to the last question of each row, as text; greedy, so it is the same every time."""
    import torch

    if distributed.engine() in distributed.SHARDED:
        return [tr("(not asked: no process has the whole model; lesson 04 asks)")] * len(rows)
    view = View(tokenizer, "prompt_completion", False if may_skip_thinking(tokenizer, rows) else None)
    stops, training, answers = sorted(find_stop_ids(tokenizer, model.generation_config)), model.training, []
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "use_cache": True}
    keep_4bit_layout(model)
    model.eval()
    for row in rows:
        ids = torch.tensor([view.prompt(row["messages"][:-1], row.get("tools"))], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                eos_token_id=stops, pad_token_id=stops[0], **settings,
            )  # fmt: skip
        answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
    model.train(training)
    return answers


def show_row(tokenizer: Any, row: Row) -> None:
    """Show one conversation with its trained tokens in color; in [brackets] outside a notebook."""
    form = training_format(tokenizer, [row]).value
    ids, trained = View(tokenizer, form).encode(row["messages"], row.get("tools"))
    groups = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    runs = [(tokenizer.decode([token for token, _ in pairs]), mask) for mask, pairs in groups]
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    if form == "prompt_completion" and answers > 1:
        print(tr("This row has {answers} answers, each an example of its own; here is the last one.", answers=answers))
    print(tr("{trained} of {tokens} tokens are trained. They are marked:", trained=sum(trained), tokens=len(ids)))
    display.show("tokens.html", "".join(f"[{text}]" if mask else text for text, mask in runs), runs=runs)
