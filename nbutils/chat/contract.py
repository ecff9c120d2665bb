"""The contract between training and serving, checked before any training; a breach names its row and token.

Not here: the check of one example (breaches), rendering (rendering), rows too long to be trained (fitting), rows that
are not chat rows at all (data).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbutils.chat.breaches import Check, Rules
from nbutils.chat.fitting import Fitting, fitting
from nbutils.chat.rendering import Row, View
from nbutils.chat.thinking import holds
from nbutils.errors import CourseError
from nbutils.hardware import Choice


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
    tokenizer: Any,
    rows: Sequence[Row] | Fitting,
    max_length: int,
    stop_ids: Iterable[int] | None = None,
    form: str = "",
    thinking: bool | None = None,
) -> ContractReport:
    """Check every row, or what `fitting` kept without rendering it again; `max_length` 0 means that nothing is cut.

    `thinking` is the mode a server will be asked in, where the template has two; None is the template's default.
    `stop_ids` are the tokens generation ends at; None: those `fitting` was given.
    """
    stops = None if stop_ids is None else set(stop_ids)
    fitted = rows if isinstance(rows, Fitting) else fitting(tokenizer, rows, 0, form, thinking, stops)
    view, examples = fitted.view, fitted.examples
    kept = dict(zip(fitted.numbers, fitted.kept, strict=True))
    _require_tools(view, kept)
    rules = Rules(view, view.stops if stops is None else stops, max_length, all(one.other for one in examples))
    ends = {end for one in examples for end in Check(rules, one, kept[one.row]).ends()}
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
    elif holds(View(view.tokenizer, view.form, thinking=value), thought=value):
        yield (
            f"thinking: ask a server with {own}; with {name}={value} {len(unlike)} rows differ, the first is row "
            f"{unlike[0]}: for that mode train rows {'with' if value else 'without'} thinking, thinking={value}"
        )
    else:
        yield f"thinking: ask a server with {own}; no row can be trained for the prompts of {name}={value}"


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
