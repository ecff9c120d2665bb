"""The checks of the exercises: each compares a learner's own values with the right ones, and says how far off and why.

A check is a pure function of the answer and of what it is checked against; it prints nothing and stores nothing.
`Lesson.check` shows what it says, and notes it in facts.json. What is said of each choice of a quiz is in quiz.yaml.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nbutils.files import read_yaml
from nbutils.language import joined, tr

IGNORED = -100  # the label of a token without loss
HOT = 1.25  # times too much or too little, at most
WARM = 2.0
OWN_ROWS = 3
SHORTEST_ANSWER = 3  # characters
RANK = 64  # of the exercise about the size of an adapter
APART = 5.0  # times, between two learning rates that are compared
Mistakes = Mapping[str, float]  # by the hint that explains it, the number that a typical mistake gives


@dataclass(frozen=True)
class Checked:
    """Whether an answer is right, and what a learner is told of it."""

    right: bool
    text: str


Check = Callable[..., Checked]


def right(text: str) -> Checked:
    """The answer is right."""
    return Checked(True, text)


def wrong(text: str) -> Checked:
    """The answer is not right yet."""
    return Checked(False, text)


def near(answer: Any, expected: float, within: float, mistakes: Mistakes | None = None) -> Checked:
    """Whether a number is the expected positive one, give or take a share; else why not, or hot or cold."""
    try:
        number = float(answer)
    except (TypeError, ValueError):
        return wrong(tr("saw {answer!r}, expected a number", answer=answer))
    saw = tr("saw {number:,.6g}", number=number)
    if math.isclose(number, expected, rel_tol=within):
        return right(joined([saw, tr("expected {number:,.6g}", number=expected)]))
    for hint, mistake in (mistakes or {}).items():
        if math.isclose(number, mistake, rel_tol=max(within, 1e-6)):
            return wrong(joined([saw, hint], ":"))
    direction = tr("expected more") if number < expected else tr("expected less")
    return wrong(joined([heat(number, expected), joined([saw, direction])], ":"))


def heat(number: float, expected: float) -> str:
    """How near a number is to the expected one: hot, warm or cold."""
    if not number > 0:  # so is what is not a number
        return tr("cold")
    times = max(number / expected, expected / number)
    if times <= HOT:
        return tr("hot")
    return tr("warm") if times <= WARM else tr("cold")


@cache
def quizzes() -> dict[str, dict[str, Any]]:
    """For each lesson the right choice, and what is said of each."""
    return dict(read_yaml(Path(__file__).with_name("quiz.yaml")))


def quiz(answer: str, stem: str) -> Checked:
    """The question at the end of a lesson, with the choices a, b and c."""
    question = quizzes()[stem]
    told = question["told"]
    if answer not in told:
        return wrong(tr("saw {answer!r}, expected one of: {choices}", answer=answer, choices=", ".join(told)))
    return Checked(answer == question["right"], tr(told[answer]))


# --- 01: the machine --------------------------------------------------------------------------------------------------


# --- 02: the data -----------------------------------------------------------------------------------------------------


def labels(answer: Sequence[int], ids: Sequence[int], first: int, tokens: Sequence[str]) -> Checked:
    """Lesson 02: the labels of a row are its ids from the `first` token of the answer on, and -100 before it."""
    given = [int(label) for label in answer]
    if len(given) != len(ids):
        return wrong(
            tr(
                "saw {saw} labels, expected {expected}: the tokens of the question have one each, too",
                saw=len(given),
                expected=len(ids),
            )
        )
    expected = [IGNORED] * first + list(ids[first:])
    differing = [place for place, label in enumerate(given) if label != expected[place]]
    if not differing:
        return right(tr("{trained} tokens are trained, {ignored} are not", trained=len(ids) - first, ignored=first))
    place = differing[0]
    if given[place] not in (IGNORED, ids[place]):
        hint = tr("a label is the id of its own token, or -100")
    elif place < first:
        hint = tr("it belongs to the question and would be trained")
    else:
        hint = tr("it belongs to the answer and would not be trained")
    return wrong(tr("label {place}, of the token {token!r}: {hint}", place=place, token=tokens[place], hint=hint))


def mended_rows(answer: Sequence[Any], broken: Sequence[Any]) -> Checked:
    """Lesson 02: rows without their mistakes, which still ask what they asked."""
    if problem := _first_problem(answer):
        return wrong(problem)
    if len(answer) != len(broken):
        return wrong(tr("saw {saw} rows, expected {expected}", saw=len(answer), expected=len(broken)))
    for before, after in zip(broken, answer, strict=True):
        if _asked(before) != _asked(after):
            return wrong(tr("the question {asked!r} has changed; only the mistake should go", asked=_asked(before)))
    return right(tr("all {count} rows can be trained on", count=len(answer)))


def own_rows(answer: Sequence[Any]) -> Checked:
    """Lesson 02: at least three rows of one's own: valid, different from each other, with answers of one form."""
    from nbutils import data
    from nbutils.data.card import NEAR_OVERLAP
    from nbutils.data.dedupe import find_repeated, row_text

    if problem := _first_problem(answer):
        return wrong(problem)
    if len(answer) < OWN_ROWS:
        return wrong(tr("saw {saw} rows, expected {expected} or more", saw=len(answer), expected=OWN_ROWS))
    texts = []
    for raw in answer:
        row: Any = data.check_row(data.Row("row", 1, raw))  # it was checked above
        texts.append(row_text(row.messages, row.tools))
    for number, text in enumerate(texts, 1):
        if len(text.answer.strip()) < SHORTEST_ANSWER:
            return wrong(tr("row {number}: an answer of {answer!r} teaches nothing", number=number, answer=text.answer))
    for row, kept in find_repeated(NEAR_OVERLAP, len(texts), texts.__getitem__).items():
        return wrong(tr("rows {kept} and {row} say nearly the same", kept=kept + 1, row=row + 1))
    if len({text.question for text in texts}) < len(texts):
        return wrong(tr("two rows ask the same question"))
    if len({_form_of(text.answer) for text in texts}) > 1:
        return wrong(tr("the answers have more than one form: JSON with the same keys in all of them, or prose in all"))
    return right(tr("{count} rows, all different, all of one form", count=len(texts)))


def _first_problem(rows: Sequence[Any]) -> str:
    """The first reason why one of these rows cannot be used; empty if there is none."""
    from nbutils import data

    for number, row in enumerate(rows, 1):
        for problem in data.problems_of(row):
            told = f"{problem.field}: {tr(problem.kind)}, {problem.seen} -> {problem.todo}"
            return tr("row {number}: {problem}", number=number, problem=told)
    return ""


def _asked(row: Any) -> str:
    """What is asked in a row that has messages."""
    texts = [message["content"] for message in row["messages"] if message["role"] != "assistant"]
    return "\n".join(texts)


def _form_of(answer: str) -> str:
    """The keys of a JSON object; all prose is of one form."""
    with suppress(ValueError):
        value = json.loads(answer)
        if isinstance(value, dict):
            return str(sorted(value))
    return "prose"


# --- 03: the training -------------------------------------------------------------------------------------------------


def batch_loss(answer: float, logits: Any, labels: Any) -> Checked:
    """Lesson 03: the loss of a batch, the mean over the tokens with a label, each predicted one position before it."""
    from torch.nn.functional import cross_entropy  # it leaves out the label -100

    targets = labels[:, 1:].flatten()
    loss = float(cross_entropy(logits[:, :-1].flatten(0, 1), targets))
    total = loss * int((targets != IGNORED).sum())
    mistakes = {
        tr("each score was compared with its own token; it is for the next one"): float(
            cross_entropy(logits.flatten(0, 1), labels.flatten())
        ),
        tr("that is the sum; the loss is the mean"): total,
        tr("that is the mean over all positions; those with the label -100 do not count"): total / len(targets),
        tr("that is in bits; take the natural logarithm"): loss / math.log(2),
    }
    return near(answer, loss, 1e-4, mistakes)


def adapter_parameters(answer: int, d_in: int, d_out: int, own_rank: int) -> Checked:
    """Lesson 03: how many parameters A and B of a layer have at rank 64."""
    mistakes = {
        tr("that is A alone; B is trained, too"): RANK * d_in,
        tr("that is B alone; A is trained, too"): RANK * d_out,
        tr("that is W, which is frozen"): d_in * d_out,
        tr("A and B have the rank on one side only; the other side is one of W"): RANK * RANK,
        tr("that is at rank {rank}, which this lesson trains with", rank=own_rank): own_rank * (d_in + d_out),
    }
    return near(answer, RANK * (d_in + d_out), 1e-6, mistakes)


def learning_rates(answer: Sequence[float], winner: float | None, losses: Mapping[float, float]) -> Checked:
    """Lesson 03: two learning rates far apart, and the one with the lower validation loss."""
    rates = sorted(answer)
    if len(rates) < 2:
        return wrong(tr("it takes two learning rates to compare"))
    if rates[-1] < APART * rates[0]:
        return wrong(tr("these are less than {times:g} times apart, and may differ by chance only", times=APART))
    if winner not in rates:
        return wrong(tr("saw {winner}, expected the better one of these: look at the figure", winner=winner))
    lowest = min(rates, key=losses.__getitem__)
    if winner != lowest:
        return wrong(tr("another one reached a lower validation loss, {loss:.3g}", loss=losses[lowest]))
    return right(tr("it reached a validation loss of {loss:.3g}", loss=losses[lowest]))


# --- 04: the merged model ---------------------------------------------------------------------------------------------


# --- 05: the server ---------------------------------------------------------------------------------------------------


# --- 06: several GPUs -------------------------------------------------------------------------------------------------


# --- 07: a model from scratch -----------------------------------------------------------------------------------------


# --- 08: smaller files ------------------------------------------------------------------------------------------------


# --- 09: speed --------------------------------------------------------------------------------------------------------


# --- 99: what went wrong ----------------------------------------------------------------------------------------------


OF_LESSON: Mapping[str, Sequence[Check]] = {
    "01_environment": (quiz,),
    "02_data_prep": (labels, mended_rows, own_rows, quiz),
    "03_qlora": (batch_loss, adapter_parameters, learning_rates, quiz),
    "04_merge": (quiz,),
    "05_serve": (quiz,),
    "06_scale_out": (quiz,),
    "07_from_scratch": (quiz,),
    "08_export": (quiz,),
    "09_benchmark": (quiz,),
    "99_when_it_breaks": (quiz,),
}
