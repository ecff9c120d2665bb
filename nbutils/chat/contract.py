"""The contract between training and serving, checked before any training; a breach names its row and token.

A server's prompt is the beginning of the training text; every token of each answer is trained up to and with its
stop token, and nothing else is (blanks around an answer do not count); no stop token is cut off by max_length.
Not here: rendering (rendering), rows too long to be trained (fitting), rows that are not chat rows at all (data).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from nbutils.chat.fitting import Fitting, fitting, last_place
from nbutils.chat.rendering import Example, Row, View
from nbutils.errors import CourseError
from nbutils.hardware import Choice

RULE = "text that begins with the server's prompt, and trains each answer with its stop token and nothing else"


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


def find_stop_ids(tokenizer: Any, generation: Any = None) -> set[int]:
    """The tokens generation ends at: those of a generation config, or of the one in a model's folder or repository.

    Where it names none, servers end at the tokenizer's own.
    """
    if isinstance(generation, str | PathLike):
        generation = _generation_config(generation)
    ends = getattr(generation, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
    return {end for end in ends if end is not None}


def _generation_config(model: str | PathLike[str]) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # many base models have none
        return None


def check_contract(
    tokenizer: Any,
    rows: Sequence[Row] | Fitting,
    max_length: int,
    stop_ids: Iterable[int] | None = None,
    form: str = "",
    thinking: bool | None = None,
) -> ContractReport:
    """Check every row, or what `fitting` kept without rendering it again; `max_length` 0 means that nothing is cut.

    `thinking` is the mode a server will be asked in, where the template has two; None is the template's default.
    """
    fitted = rows if isinstance(rows, Fitting) else fitting(tokenizer, rows, 0, form, thinking)
    stops = set(stop_ids) if stop_ids is not None else find_stop_ids(tokenizer)
    view, examples = fitted.view, fitted.examples
    kept = dict(zip(fitted.numbers, fitted.kept, strict=True))
    _require_tools(view, kept)
    ends = {end for one in examples for end in _Check(view, one, kept[one.row], stops, max_length).ends()}
    return ContractReport(
        form=fitted.form,
        rows=len(fitted.kept),
        examples=len(examples),
        answers=sum(len(example.prompts) for example in examples),
        tokens=sum(len(example.ids) for example in examples),
        trained=sum(example.trained.count(1) for example in examples),
        longest=max(len(example.ids) for example in examples),
        max_length=max_length,
        stop_ids=tuple(sorted(ends)),
        stop_tokens=tuple(tokenizer.decode([stop]) for stop in sorted(ends)),
        notes=tuple(_notes(view, fitted, ends)),
    )


def _notes(view: View, fitted: Fitting, ends: set[int]) -> Iterator[str]:
    """What a learner should know although nothing is broken."""
    if len(fitted.examples) > len(fitted.kept):
        several = len({a.row for a, b in zip(fitted.examples, fitted.examples[1:], strict=False) if a.row == b.row})
        yield f"rows with several answers: {several}; each answer is trained, as an example of its own"
    if view.tokenizer.pad_token_id in ends:
        yield "padding is also the stop token: a collator that masks padding by its id would hide it (TRL's does not)"
    if not view.other_mode:
        return
    ((name, value),) = view.other_mode.items()
    own = f"{name}={not value} as checked" if view.thinking is not None else f"{name}={not value}, the default"
    unlike = sorted({example.row for example in fitted.examples if not example.other})
    if not unlike:
        yield f"thinking: a server may be asked with {own}, and with {name}={value} as well"
    else:
        yield (
            f"thinking: ask a server with {own}; with {name}={value} {len(unlike)} rows differ, the first is row "
            f"{unlike[0]}: for that mode train rows {'with' if value else 'without'} thinking, thinking={value}"
        )


def _require_tools(view: View, rows: dict[int, Row]) -> None:
    """Tools a template does not show are tools the model never hears of."""
    found = next(((number, row) for number, row in rows.items() if row.get("tools")), None)
    if found is None:
        return
    number, row = found
    first = next(at for at, message in enumerate(row["messages"]) if message["role"] == "assistant")
    if view.prompt(row["messages"][:first], row["tools"]) == view.prompt(row["messages"][:first]):
        raise CourseError(
            f"Row {number}: the chat template of this model leaves out its tools.",
            "a template that shows the tools to the model",
            "take a model that can call tools, or write the tools into the system message",
        )


class _Check:
    """One example under check."""

    def __init__(self, view: View, example: Example, row: Row, stops: set[int], max_length: int) -> None:
        self.view, self.example, self.row, self.stops, self.max_length = view, example, row, stops, max_length
        self.ids, self.trained = example.ids, example.trained

    def ends(self) -> Iterator[int]:
        """The token each answer ends with; raises at the first breach."""
        if 1 not in self.trained:
            todo = 'use form="prompt_completion", or a template with {% generation %} around its answers'
            raise self._breach("not one of its tokens is trained", todo)
        starts = [self._start(at) for at in range(len(self.example.prompts))]
        self._refuse_trained(0, starts[0])
        for start, end in zip(starts, [*starts[1:], len(self.ids)], strict=True):
            yield self.ids[self._check_answer(start, end)]
        self._refuse_cut()
        if any(message.get("tool_calls") for message in self.row["messages"]):
            self._require_calls()

    def _start(self, at: int) -> int:
        """Where an answer begins; everything before it must be what a server would be sent."""
        same = self.example.shared[at]
        if same == self.example.prompts[at]:
            return same
        prompt = self.view.prompt(self.row["messages"][: self.example.turns[at]], self.row.get("tools"))
        server, training = (self._decode(ids[same : same + 8]) for ids in (prompt, self.ids))
        way = "leave the chat template as the model came with it; start answers without a line break; "
        if self.example.other and self.view.other_mode:
            (value,) = self.view.other_mode.values()
            way = f"ask servers with enable_thinking={value} and check with thinking={value}; "
        raise self._breach(
            f"from token {same + 1} on a server would be sent {server!r} where training saw {training!r}",
            way + 'train conversations with several answers as form="prompt_completion"',
        )

    def _check_answer(self, start: int, end: int) -> int:
        """Everything up to the first stop token is trained, nothing after it; returns where it is."""
        stop = next((at for at in range(start, end) if self.ids[at] in self.stops), None)
        if stop is None:
            raise self._no_stop(start, end)
        for at in self._places(0, start, stop + 1):
            what = "the stop token" if at == stop else "a token of the answer"
            raise self._breach(f"{what} is not trained: {self._name(at)}", "let the mask cover the whole answer")
        self._refuse_trained(stop + 1, end)
        return stop

    def _no_stop(self, start: int, end: int) -> CourseError:
        last = max(self._places(1, start, end), default=end - 1)
        wanted = ", ".join(repr(self._decode([stop])) for stop in sorted(self.stops)) or "nothing"
        return self._breach(
            f"the last trained token of an answer is {self._name(last)}, and generation stops only at {wanted}",
            "make the token that closes an answer in the chat template the eos_token of the tokenizer and of the "
            "generation config; instruct versions of a model come that way",
        )

    def _refuse_trained(self, start: int, end: int) -> None:
        for at in self._places(1, start, end):
            raise self._breach(
                f"a token outside the answers is trained: {self._name(at)}", "let the mask cover answers only"
            )

    def _refuse_cut(self) -> None:
        stop, tokens = last_place(self.view, self.example), len(self.ids)
        if 0 < self.max_length <= stop:
            raise self._breach(
                f"it has {tokens} tokens; at max_length {self.max_length} the last {tokens - self.max_length} are cut, "
                f"and with them the stop token ({self._name(stop)})",
                f"train the rows that chat.fitting keeps, raise train.max_length to {tokens}, or shorten the row",
            )

    def _require_calls(self) -> None:
        """Every tool call of the answers must be in the trained text, or it is never learnt."""
        text = self._decode([token for token, mark in zip(self.ids, self.trained, strict=True) if mark])
        answers = (self.row["messages"][turn] for turn in self.example.turns)
        for call in (call for answer in answers for call in answer.get("tool_calls") or ()):
            name = call.get("function", call).get("name", "")
            if name not in text:
                raise self._breach(
                    f"the chat template leaves out a call of {name!r}", "take a model that can call tools"
                )

    def _places(self, value: int, start: int, end: int) -> Iterator[int]:
        """Where in a stretch the mask has this value, blanks left aside."""
        at = self.trained.find(value, start, end)
        while at >= 0:
            if not self.view.blank(self.ids[at]):
                yield at
            at = self.trained.find(value, at + 1, end)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.view.tokenizer.decode(list(ids)))

    def _name(self, at: int) -> str:
        text = self._decode([self.ids[at]])
        shown = "part of a character" if "\ufffd" in text else repr(text)
        return f"token {at + 1}, {shown}"

    def _breach(self, seen: str, todo: str) -> CourseError:
        return CourseError(f"Row {self.example.row}: {seen}.", RULE, todo)
