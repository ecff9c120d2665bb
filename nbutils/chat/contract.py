"""The contract between training and serving, checked before any training; a breach names its row and token.

A server's prompt is the beginning of the training text; every token of each answer is trained up to and with its
stop token, and nothing else is (blanks around an answer do not count); truncation leaves stop tokens in place.
Not here: rendering (rendering), and rows that are not chat rows at all (data).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbutils.chat.rendering import Messages, View, common_length, training_format
from nbutils.errors import CourseError
from nbutils.hardware import Choice

RULE = "text that begins with the server's prompt, and trains each answer with its stop token and nothing else"


@dataclass(frozen=True)
class ContractReport:
    """What the check counted; `cut` lists the rows, from 1, whose last stop token lies beyond max_length."""

    form: Choice
    rows: int
    tokens: int
    trained: int
    longest: int
    max_length: int
    stop_tokens: tuple[str, ...]
    cut: tuple[int, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        cut = f"{len(self.cut)} rows lose their stop token (first: row {self.cut[0]})" if self.cut else "no row is cut"
        lines = [
            f"format   {self.form.value}: {self.form.reason}",
            f"trained  {self.trained} of {self.tokens} tokens ({self.trained / self.tokens:.0%}) in {self.rows} rows",
            f"length   the longest row has {self.longest} tokens; at max_length {self.max_length} {cut}",
            f"stop     every answer ends with {' or '.join(self.stop_tokens)}, and generation stops there",
        ]
        return "\n".join(lines + [f"note     {note}" for note in self.notes])


def find_stop_ids(tokenizer: Any, generation_config: Any = None) -> set[int]:
    """The tokens generation ends at: those of the generation config, and the tokenizer's own."""
    ends = getattr(generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def check_contract(
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    max_length: int,
    stop_ids: Iterable[int] | None = None,
    form: str = "",
) -> ContractReport:
    """Check every row; `max_length` 0 means that nothing is truncated."""
    choice = Choice(form, "as asked") if form else training_format(tokenizer, rows)
    if not rows:
        raise CourseError("There are no rows to check.", "at least one row", "run lesson 02 first")
    stops = set(stop_ids) if stop_ids is not None else find_stop_ids(tokenizer)
    view = View(tokenizer, choice.value)
    checked = [_Row(view, number, row["messages"]).check(stops) for number, row in enumerate(rows, start=1)]
    cut = tuple(number for number, row in enumerate(checked, start=1) if 0 < max_length <= row.last_stop)
    longest = max(row.tokens for row in checked)
    if len(cut) == len(checked):
        raise CourseError(
            f"All {len(cut)} rows lose their stop token at max_length {max_length}; the longest has {longest} tokens.",
            "rows that fit: a model that never sees the stop token never stops",
            f"raise train.max_length in the profile to {longest}, or shorten the rows",
        )
    used = {row.stop_id for row in checked}
    padded = "padding is also the stop token: a collator that masks padding by its id hides the stop"
    return ContractReport(
        form=choice,
        rows=len(checked),
        tokens=sum(row.tokens for row in checked),
        trained=sum(row.trained for row in checked),
        longest=longest,
        max_length=max_length,
        stop_tokens=tuple(tokenizer.decode([stop]) for stop in sorted(used)),
        cut=cut,
        notes=(padded,) if tokenizer.pad_token_id in used else (),
    )


@dataclass(frozen=True)
class _Counted:
    tokens: int
    trained: int
    last_stop: int
    stop_id: int


class _Row:
    """One row under check."""

    def __init__(self, view: View, number: int, messages: Messages) -> None:
        self.view, self.number, self.messages = view, number, messages
        self.ids, self.trained = view.encode(messages)

    def check(self, stops: set[int]) -> _Counted:
        """Answer by answer; raises at the first breach."""
        if not any(self.trained):
            todo = 'use form="prompt_completion", or a template with {% generation %} around its answers'
            raise self._breach("not one of its tokens is trained", todo)
        turns = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        starts = [self._start(turn) for turn in (turns if self.view.form == "messages" else turns[-1:])]
        self._refuse_trained(range(starts[0]))
        stop = 0
        for start, end in zip(starts, [*starts[1:], len(self.ids)], strict=True):
            stop = self._check_answer(start, end, stops)
        return _Counted(len(self.ids), sum(self.trained), stop, self.ids[stop])

    def _start(self, turn: int) -> int:
        """Where an answer begins; everything before it must be what a server would be sent."""
        prompt = self.view.prompt(self.messages[:turn])
        same = common_length(prompt, self.ids)
        if same == len(prompt):
            return same
        server, training = (self._decode(ids[same : same + 8]) for ids in (prompt, self.ids))
        raise self._breach(
            f"from token {same + 1} on a server would be sent {server!r} where training saw {training!r}",
            "leave the chat template as the model came with it; start answers without a line break; "
            'train conversations with several answers as form="prompt_completion"',
        )

    def _check_answer(self, start: int, end: int, stops: set[int]) -> int:
        """Everything up to the first stop token is trained, nothing after it; returns where it is."""
        stop = next((at for at in range(start, end) if self.ids[at] in stops), None)
        if stop is None:
            raise self._no_stop(start, end, stops)
        for at in range(start, stop + 1):
            if not self.trained[at] and not self._blank(at):
                what = "the stop token" if at == stop else "a token of the answer"
                raise self._breach(f"{what} is not trained: {self._name(at)}", "let the mask cover the whole answer")
        self._refuse_trained(range(stop + 1, end))
        return stop

    def _no_stop(self, start: int, end: int, stops: set[int]) -> CourseError:
        last = next((at for at in reversed(range(start, end)) if self.trained[at] and not self._blank(at)), end - 1)
        wanted = ", ".join(repr(self._decode([stop])) for stop in sorted(stops)) or "nothing"
        return self._breach(
            f"the last trained token of an answer is {self._name(last)}, and generation stops only at {wanted}",
            "make the token that closes an answer in the chat template the eos_token of the tokenizer and of the "
            "generation config; instruct versions of a model come that way",
        )

    def _refuse_trained(self, places: Iterable[int]) -> None:
        for at in places:
            if self.trained[at] and not self._blank(at):
                raise self._breach(
                    f"a token outside the answers is trained: {self._name(at)}", "let the mask cover answers only"
                )

    def _decode(self, ids: list[int]) -> str:
        return str(self.view.tokenizer.decode(ids))

    def _blank(self, at: int) -> bool:
        return not self._decode([self.ids[at]]).strip()

    def _name(self, at: int) -> str:
        text = self._decode([self.ids[at]])
        shown = "part of a character" if "\ufffd" in text else repr(text)
        return f"token {at + 1}, {shown}"

    def _breach(self, seen: str, todo: str) -> CourseError:
        return CourseError(f"Row {self.number}: {seen}.", RULE, todo)
