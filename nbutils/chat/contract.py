"""Which rows are trained, and the contract between training and serving that they keep.

Rows that would lose their stop token to max_length are left out, not cut. The contract: a server's prompt is the
beginning of the training text; every token of each answer is trained up to and with its stop token, and nothing else
is (white space around an answer does not count); and the answer says all that the row says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbutils.chat.render import Example, Message, Row, View, first_stop, training_format
from nbutils.errors import CourseError
from nbutils.files import write_text
from nbutils.hardware import Choice

TOO_LONG = "too_long.jsonl"
THINK_TAGS = re.compile(r"</?think>")


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
        if not self.too_long:
            limit = f"max_length is {self.max_length}" if self.max_length else "there is no limit"
            return f"all {len(self.rows)} rows fit: the longest has {self.longest} tokens, {limit}"
        share = f"{len(self.too_long)} of {len(self.rows)} rows are LEFT OUT (see {TOO_LONG})"
        todo = f"  to train them raise train.max_length to {self.longest} (memory grows with it), or shorten them"
        return f"{share}: max_length {self.max_length} would cut off their stop token\n{todo}"

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
        raise CourseError("chat.no_rows")
    choice = Choice(form, "chosen by the caller") if form else training_format(tokenizer, rows, thinking)
    view = View(tokenizer, choice.value, thinking, stop_ids)
    examples = view.encode_all(rows)
    longest = max(len(example.ids) for example in examples)
    too_long: dict[int, int] = {}
    for example in examples:
        if 0 < max_length <= example.trained.rfind(1):  # the stop token, in a valid example
            too_long[example.row] = max(len(example.ids), too_long.get(example.row, 0))
    if len(too_long) == len(rows):
        raise CourseError("chat.all_rows_too_long", rows=len(rows), max_length=max_length, longest=longest)
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
    _require_tools(filtered)
    for example in examples:
        found |= _check_example(view, example, filtered.rows[example.row - 1])
    answers = sum(len(example.turns) for example in examples)
    trained, tokens = sum(example.trained.count(1) for example in examples), sum(filtered.lengths)
    stops = " or ".join(view.tokenizer.decode([stop]) for stop in sorted(found))
    text = (
        f"format   {form.value}: {form.reason}\n"
        f"trained  {trained} of {tokens} tokens ({trained / tokens:.0%}), in {answers} answers\n"
        f"stop     every answer ends with {stops}, and generation stops there"
    )
    return ContractReport(form, len(examples), answers, trained, tuple(sorted(found)), text)


def _require_tools(filtered: FilteredRows) -> None:
    """Refuse a template that does not show its tools to the model; one row with tools tells."""
    for example in filtered.examples:
        row = filtered.rows[example.row - 1]
        if row.get("tools"):
            question = row["messages"][: example.turns[0]]
            if filtered.view.prompt(question, row["tools"]) == filtered.view.prompt(question):
                raise CourseError("chat.tools_not_shown", row=example.row)
            return


def _check_example(view: View, example: Example, row: Row) -> set[int]:
    """The stop tokens of the answers; raises at the first token that breaks the contract."""
    ids, messages, decode = example.ids, row["messages"], view.tokenizer.decode
    expected, found = bytearray(len(ids)), set[int]()
    for turn, start, length in zip(example.turns, example.shared, example.prompts, strict=True):
        if start != length:  # all that comes before an answer must be what a server would be sent
            prompt = view.prompt(messages[:turn], row.get("tools"))[start : start + 8]
            texts = {"server": decode(prompt), "training": decode(list(ids[start : start + 8]))}
            raise CourseError("chat.prompt_mismatch", row=example.row, token=start + 1, **texts)
    for turn, start, end in zip(example.turns, example.shared, [*example.shared[1:], len(ids)], strict=True):
        stop = first_stop(ids, view.stops, start, end)
        if stop == end:
            names = ", ".join(repr(decode([stop])) for stop in sorted(view.stops)) or "nothing"
            last = decode([ids[max(example.trained.rfind(1), 0)]])
            raise CourseError("chat.no_stop_token", row=example.row, last=last, stops=names)
        if missing := _missing_part(view.tokenizer, messages[turn], decode(list(ids[start:stop]))):
            if (text := decode([ids[stop]])) in str(messages[turn].get("content")):
                raise CourseError("chat.stop_token_in_answer", row=example.row, stop=text)
            raise CourseError("chat.answer_changed", row=example.row, part=missing)
        expected[start : stop + 1] = b"\1" * (stop + 1 - start)
        found.add(ids[stop])
    if expected != example.trained:
        _require_mask(view, example, expected)
    return found


def _require_mask(view: View, example: Example, expected: bytearray) -> None:
    for at, (mask, answer) in enumerate(zip(example.trained, expected, strict=True)):
        if mask != answer and not view.blank(example.ids[at]):
            what = "is no part of an answer, and is trained" if mask else "is part of an answer, and is not trained"
            token = f"token {at + 1}, {view.tokenizer.decode([example.ids[at]])!r}"
            raise CourseError("chat.wrong_loss_mask", row=example.row, token=token, what=what)


def _missing_part(tokenizer: Any, answer: Message, text: str) -> str:
    """The first thought, words or called function that an answer has and its text has not; white space aside."""
    content, rest = answer.get("content"), _squeeze(text)
    *thoughts, words = THINK_TAGS.split(content if isinstance(content, str) else "")  # the template writes the tags
    for part in (answer.get("reasoning_content") or "", *thoughts, words):
        short = _squeeze(part)
        if short not in rest:  # some tokenizers normalize characters, which no template can help
            short = _squeeze(tokenizer.decode(tokenizer(part, add_special_tokens=False)["input_ids"]))
        if short not in rest:
            return repr(part.strip()[:40])
        rest = rest[rest.index(short) + len(short) :]
    for call in answer.get("tool_calls") or ():
        if (name := (call.get("function") or call).get("name", "")) not in text:
            return f"a call of {name!r}"
    return ""


def _squeeze(text: str) -> str:
    return "".join(text.split())
