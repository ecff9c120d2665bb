"""The contract between training and serving, checked before any training; an error names the first row and token.

A server's prompt is the beginning of the training text; every token of each answer is trained up to and with its stop
token, and nothing else is (white space around an answer does not count); the answer says all that the row says; no
stop token is cut off by max_length; and the trainer trains exactly these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbutils.chat.dataset import Fitting, last_place
from nbutils.chat.render import View, first_stop, parse_call
from nbutils.chat.types import IGNORED, Example, Message, Row
from nbutils.errors import CourseError
from nbutils.hardware import Choice

THINK_TAGS = re.compile(r"</?think>")
SHOWN_CHARACTERS = 40
COLLATED_ROWS = 8  # a collator treats all rows alike


@dataclass(frozen=True)
class ContractReport:
    """What the check counted. An example is what the trainer trains at once: a row, or one of its answers."""

    form: Choice
    rows: int
    examples: int
    answers: int
    tokens: int
    trained: int
    longest: int
    max_length: int
    stop_ids: tuple[int, ...]  # those the answers end with
    stop_tokens: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        cut = f"no stop token is cut at max_length {self.max_length}" if self.max_length else "no limit is set"
        share = f"{self.trained} of {self.tokens} tokens ({self.trained / self.tokens:.0%})"
        lines = [
            f"format   {self.form.value}: {self.form.reason}",
            f"trained  {share}; rows: {self.rows}, examples: {self.examples}, answers: {self.answers}",
            f"length   the longest example has {self.longest} tokens; {cut}",
            f"stop     every answer ends with {' or '.join(self.stop_tokens)}, and generation stops there",
        ]
        return "\n".join(lines + [f"note     {note}" for note in self.notes])


def check_contract(
    tokenizer: Any, fitted: Fitting, max_length: int, stop_ids: Iterable[int] | None = None
) -> ContractReport:
    """Check every row that `fitting` kept; `max_length` 0 means that nothing is cut.

    `stop_ids` are the tokens generation ends at; None: those `fitting` was given.
    """
    view, examples, rows = fitted.view, fitted.examples, dict(zip(fitted.numbers, fitted.kept, strict=True))
    stops, found = view.stops if stop_ids is None else set(stop_ids), set[int]()
    _require_tools(view, rows)
    for example in examples:
        found |= _check_example(view, example, rows[example.row], stops)
        if 0 < max_length <= last_place(view, example):
            raise CourseError("chat.stop_token_cut", row=example.row, tokens=len(example.ids), max_length=max_length)
    return ContractReport(
        form=fitted.form,
        rows=len(rows),
        examples=len(examples),
        answers=sum(len(example.turns) for example in examples),
        tokens=sum(fitted.lengths),
        trained=sum(example.trained.count(1) for example in examples),
        longest=max(fitted.lengths),
        max_length=max_length,
        stop_ids=tuple(sorted(found)),
        stop_tokens=tuple(tokenizer.decode([stop]) for stop in sorted(found)),
        notes=tuple(_notes(fitted, found)),
    )


def _notes(fitted: Fitting, stops: set[int]) -> Iterator[str]:
    """What a learner should know although nothing is broken."""
    view = fitted.view
    if view.tokenizer.pad_token_id in stops:
        yield "padding is also the stop token: a collator that masks padding by its id would hide it (TRL's does not)"
    if view.has_thinking_modes():
        mode = "in the default mode" if view.thinking is None else f"with enable_thinking={view.thinking}"
        yield f"the template has two thinking modes: ask servers {mode}, which was checked here"


def _require_tools(view: View, rows: dict[int, Row]) -> None:
    """Refuse a template that does not show its tools to the model."""
    number = next((number for number, row in rows.items() if row.get("tools")), 0)
    if not number:
        return
    messages, tools = rows[number]["messages"], rows[number]["tools"]
    question = messages[: next(at for at, message in enumerate(messages) if message["role"] == "assistant")]
    if view.prompt(question, tools) == view.prompt(question):
        raise CourseError("chat.tools_not_shown", row=number)


def _check_example(view: View, example: Example, row: Row, stops: set[int]) -> set[int]:
    """The stop tokens of the answers; raises at the first token that breaks the contract."""
    ids, number, messages = example.ids, example.row, row["messages"]
    expected, found = bytearray(len(ids)), set[int]()
    _require_prompts(view, example, row)
    for turn, start, end in zip(example.turns, example.shared, [*example.shared[1:], len(ids)], strict=True):
        stop = first_stop(ids, stops, start, end)
        if stop == end:
            trained = [at for at in range(start, end) if example.trained[at] and not view.blank(ids[at])]
            last = _token_name(view, ids, trained[-1] if trained else start)
            names = ", ".join(repr(_decode(view, [stop])) for stop in sorted(stops)) or "nothing"
            raise CourseError("chat.no_stop_token", row=number, last=last, stops=names)
        if missing := _missing_part(view.tokenizer, messages[turn], _decode(view, ids[start:stop])):
            if (text := _decode(view, [ids[stop]])) in str(messages[turn].get("content")):
                raise CourseError("chat.stop_token_in_answer", row=number, stop=text)
            raise CourseError("chat.answer_changed", row=number, part=missing)
        expected[start : stop + 1] = b"\1" * (stop + 1 - start)
        found.add(ids[stop])
    _require_mask(view, example, expected)
    return found


def _require_mask(view: View, example: Example, expected: bytearray) -> None:
    """Every token of the answers carries the loss, and no other does; white space aside."""
    if expected == example.trained:
        return
    for at, (mask, wanted) in enumerate(zip(example.trained, expected, strict=True)):
        if mask != wanted and not view.blank(example.ids[at]):
            what = "is no part of an answer, and is trained" if mask else "is part of an answer, and is not trained"
            token = _token_name(view, example.ids, at)
            raise CourseError("chat.wrong_loss_mask", row=example.row, token=token, what=what)


def _require_prompts(view: View, example: Example, row: Row) -> None:
    """Everything before an answer must be what a server would be sent."""
    for turn, same, length in zip(example.turns, example.shared, example.prompts, strict=True):
        if same != length:
            prompt = view.prompt(row["messages"][:turn], row.get("tools"))
            server, training = (_decode(view, ids[same : same + 8]) for ids in (prompt, example.ids))
            raise CourseError("chat.prompt_mismatch", row=example.row, token=same + 1, server=server, training=training)


def _decode(view: View, ids: Sequence[int]) -> str:
    fast = getattr(view.tokenizer, "backend_tokenizer", view.tokenizer)  # a third of the time
    return str(fast.decode(list(ids), skip_special_tokens=False))


def _token_name(view: View, ids: Sequence[int], at: int) -> str:
    text = _decode(view, [ids[at]])
    shown = "part of a character" if "\ufffd" in text else repr(text)
    return f"token {at + 1}, {shown}"


def _missing_part(tokenizer: Any, answer: Message, text: str) -> str:
    """The first thought, words or part of a tool call that an answer has and its text has not; white space aside."""
    whole = rest = _squeeze(text)
    for name, part in _parts(answer):
        short = _squeeze(part)
        if short not in rest:  # some tokenizers normalize characters, which no template can help
            short = _squeeze(tokenizer.decode(tokenizer(part, add_special_tokens=False)["input_ids"]))
        if short not in rest:
            return name
        rest = rest.partition(short)[2]
    for call in map(parse_call, answer.get("tool_calls") or ()):
        function = call.get("function") or call
        for value in (function.get("name", ""), *_values(function.get("arguments"))):
            if not _has_value(whole, str(value)):
                return f"{str(value)!r} of a call of {function.get('name')!r}"
    return ""


def _parts(answer: Message) -> Iterator[tuple[str, str]]:
    """What an answer says, in order and by name: its thoughts and its words; think tags are the template's to write."""
    content = answer.get("content")
    *thoughts, words = THINK_TAGS.split(content if isinstance(content, str) else "")
    thoughts = [answer.get("reasoning_content") or "", *thoughts]
    for name, part in [*(("the thought ", thought) for thought in thoughts), ("", words)]:
        if short := part.strip():
            yield name + repr(short[:SHOWN_CHARACTERS] + "…" * (len(short) > SHOWN_CHARACTERS)), part


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _values(arguments: Any) -> Iterator[str | int | float]:
    """The texts and numbers in arguments."""
    if isinstance(arguments, dict | list):
        for inner in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _values(inner)
    elif isinstance(arguments, str | int | float) and not isinstance(arguments, bool):
        yield arguments


def _has_value(squeezed: str, value: str) -> bool:
    """Whether a value is there: as it is, in JSON, or in JSON within JSON."""
    quoted = json.dumps(value, ensure_ascii=False)[1:-1]
    forms = (value, quoted, json.dumps(quoted, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(_squeeze(form) in squeezed for form in forms)


def check_trainer(trainer: Any, report: ContractReport) -> str:
    """Stop unless, after packing, truncation and collation, exactly the tokens of the contract carry the loss."""
    import numpy

    dataset, trained, stops = trainer.train_dataset, 0, 0
    for batch in dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        trained += int((labels != IGNORED).sum())
        stops += int(numpy.isin(labels, report.stop_ids).sum())
    if (trained, stops) != (report.trained, report.answers):
        expected = f"{report.trained} tokens with {report.answers} stop tokens"
        raise CourseError(
            "chat.trainer_mismatch", found=f"{trained} tokens with {stops} stop tokens", expected=expected
        )
    rows = [dataset[at] for at in range(min(len(dataset), COLLATED_ROWS))]
    expected_labels = sum(label != IGNORED for row in rows for label in row["labels"])
    labels_found = int((trainer.data_collator(rows)["labels"] != IGNORED).sum())
    if labels_found != expected_labels:
        found, expected = (f"{count} tokens of the first rows" for count in (labels_found, expected_labels))
        raise CourseError("chat.trainer_mismatch", found=found, expected=f"{expected}: its collator hides some")
    return f"collated, {trained} tokens are trained, {stops} stop tokens among them: as the contract counted"
