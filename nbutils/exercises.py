"""The checks of the exercises: each compares a learner's own values with the right ones, and says how far off and why.

A check is a pure function of the answer and of what it is checked against; it prints nothing and stores nothing.
`Lesson.check` shows what it says, and notes it in facts.json. What is said of each choice is in quiz.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from nbutils.chat import IGNORED
from nbutils.files import read_yaml
from nbutils.language import joined, tr

HOT = 1.25  # times too much or too little, at most
WARM = 2.0
LARGE = 1000
OWN_ROWS = 3
SHORTEST_ANSWER = 3  # characters
RANK = 64  # of the exercise about the size of an adapter
LEAST_ROWS = 100  # to train on
NOTES = 5  # on errors
APART = 5.0  # times, between two learning rates that are compared


@dataclass(frozen=True)
class Checked:
    """Whether an answer is right, and what a learner is told of it."""

    right: bool
    text: str


Check = Callable[..., Checked]


def right(text: str, **values: Any) -> Checked:
    """The answer is right; the text is translated here, as that of an error is."""
    return Checked(True, tr(text, **values))


def wrong(text: str, **values: Any) -> Checked:
    """The answer is not right yet."""
    return Checked(False, tr(text, **values))


def near(answer: Any, expected: float, within: float, mistakes: Mapping[str, float] = {}) -> Checked:
    """Whether a number is the expected positive one, give or take a share; else why not, or hot or cold.

    `mistakes`: by the hint that explains it, the number that a typical mistake gives.
    """
    number = float(answer)
    saw = tr("saw {number}", number=shown(number))
    if math.isclose(number, expected, rel_tol=within):
        return right(joined([saw, tr("expected {number}", number=shown(expected))]))
    direction = tr("expected more") if number < expected else tr("expected less")
    hint = joined([heat(number, expected), direction])
    for told, mistake in mistakes.items():
        if math.isclose(number, mistake, rel_tol=max(within, 1e-6)):
            hint = told
            break
    return wrong(joined([saw, hint], ":"))


def other_kind(check: Check, answer: Any) -> str:
    """What an answer should be, by the annotation of its check; empty if it is that."""
    kind = check.__annotations__["answer"]
    is_text = isinstance(answer, str)
    if kind == "str":
        return "" if is_text else tr("a text in quotes")
    if kind.startswith("Mapping"):
        return "" if isinstance(answer, dict) else tr("braces with notes by row: {example}", example='{3: "…"}')
    if kind.startswith("Sequence"):
        return tr("a list in square brackets") if isinstance(answer, (str, float, int, dict)) else ""
    return tr("a number without quotes") if isinstance(answer, (str, bool, list, tuple, dict)) else ""


def shown(number: float) -> str:
    """A number for people: a large one with all its digits."""
    return f"{number:,.0f}" if abs(number) >= LARGE else f"{number:.6g}"


def heat(number: float, expected: float) -> str:
    """How near a number is to the expected one: hot, warm or cold."""
    if not (number > 0 and expected):  # nor is it for what is not a number
        return tr("cold")
    times = max(number / expected, expected / number)
    if times <= HOT:
        return tr("hot")
    return tr("warm") if times <= WARM else tr("cold")


def not_among(answer: Any, choices: Iterable[str]) -> Checked:
    """The answer is none of the choices."""
    return wrong("saw {answer!r}, expected one of: {choices}", answer=answer, choices=", ".join(choices))


@cache
def quizzes() -> dict[str, dict[str, Any]]:
    """For each lesson, and for each curve and message of lesson 99: the right choice, and what is said of each."""
    return dict(read_yaml(Path(__file__).with_name("quiz.yaml")))


def quiz(answer: str, stem: str) -> Checked:
    """The question at the end of a lesson, with the choices a, b and c."""
    question = quizzes()[stem]
    told = question["told"]
    if answer not in told:
        return not_among(answer, told)
    return Checked(answer == question["right"], tr(told[answer]))


# --- 01: the machine --------------------------------------------------------------------------------------------------


def halved_parts(answer: Sequence[str], whole: Mapping[str, float], half: Mapping[str, float]) -> Checked:
    """Lesson 01: the parts of the memory that are smaller in `half`, where rows have half as many tokens."""
    shrinking = [part for part in whole if half[part] < whole[part]]
    for part in answer:
        if part not in whole:
            return not_among(part, whole)
        if part not in shrinking:
            return wrong("{part}: {size:.2f} GiB both times", part=part, size=whole[part])
    missing = len(shrinking) - len(set(answer))
    if missing:
        return wrong("what you named shrinks; parts that are missing: {count}", count=missing)
    return right("these parts shrink, and no others")


def longest_rows(answer: int, fits: Callable[[int], bool], step: int) -> Checked:
    """Lesson 01: the largest multiple of `step` tokens that rows may have for the training to fit."""
    if answer % step:
        return wrong("a multiple of {step} is expected", step=step)
    longest = 0
    while fits(longest + step):
        longest += step
    return near(answer, longest, 0)


# --- 02: the data -----------------------------------------------------------------------------------------------------


def labels(answer: Sequence[int], ids: Sequence[int], first: int, tokens: Sequence[str]) -> Checked:
    """Lesson 02: the labels of a row are its ids from the `first` token of the answer on, and -100 before it."""
    given = [int(label) for label in answer]
    if len(given) != len(ids):
        return wrong(
            "saw {saw} labels, expected {expected}: every token has one, in the question and in the answer",
            saw=len(given),
            expected=len(ids),
        )
    expected = [IGNORED] * first + list(ids[first:])
    differing = [place for place, label in enumerate(given) if label != expected[place]]
    if not differing:
        return right("{trained} tokens are trained, {ignored} are not", trained=len(ids) - first, ignored=first)
    place = differing[0]
    if given[place] not in (IGNORED, ids[place]):
        hint = tr("a label is the id of its own token, or -100")
    elif place < first:
        hint = tr("it belongs to the question and would be trained")
    else:
        hint = tr("it belongs to the answer and would not be trained")
    return wrong(
        "label {place} (counted from 0), of the token {token!r}: {hint}", place=place, token=tokens[place], hint=hint
    )


def mended_rows(answer: Sequence[Any], broken: Sequence[Any]) -> Checked:
    """Lesson 02: rows without their mistakes, which still ask what they asked."""
    if problem := _first_problem(answer):
        return wrong(problem)
    if len(answer) != len(broken):
        return wrong("saw {saw} rows, expected {expected}", saw=len(answer), expected=len(broken))
    for before, after in zip(broken, answer, strict=True):
        if _asked(before) != _asked(after):
            return wrong(
                "the question {asked!r} is not there as it was: keep the form of the row, and mend the mistake alone",
                asked=_asked(before),
            )
    return right("all {count} rows can be trained on", count=len(answer))


def own_rows(answer: Sequence[Any]) -> Checked:
    """Lesson 02: at least three rows of one's own: valid, different from each other, with answers of one form."""
    from nbutils import data
    from nbutils.data.card import NEAR_OVERLAP
    from nbutils.data.dedupe import find_repeated, row_text

    if problem := _first_problem(answer):
        return wrong(problem)
    if len(answer) < OWN_ROWS:
        return wrong("saw {saw} rows, expected {expected} or more", saw=len(answer), expected=OWN_ROWS)
    texts = []
    for raw in answer:
        row: Any = data.check_row(data.Row("row", 1, raw))  # it was checked above
        texts.append(row_text(row.messages, row.tools))
    for number, text in enumerate(texts, 1):
        if len(text.answer.strip()) < SHORTEST_ANSWER:
            return wrong(
                "row {number}: the answer {answer!r} is too short to be judged here", number=number, answer=text.answer
            )
    for row, kept in find_repeated(NEAR_OVERLAP, len(texts), texts.__getitem__).items():
        return wrong("rows {kept} and {row} say nearly the same", kept=kept + 1, row=row + 1)
    if len({text.question for text in texts}) < len(texts):
        return wrong("two rows ask the same question")
    if len({_form_of(text.answer) for text in texts}) > 1:
        return wrong("the answers have more than one form: JSON with the same keys in all of them, or prose in all")
    return right("{count} rows, all different, all of one form", count=len(texts))


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
    texts = [message["content"] for message in row.get("messages", []) if message["role"] != "assistant"]
    return "\n".join(texts)


def _form_of(answer: str) -> str:
    """The keys of a JSON object; all prose is of one form."""
    from nbutils.evaluation.scores import json_object

    return str(sorted(json_object(answer)))


# --- 03: the training -------------------------------------------------------------------------------------------------


def batch_loss(answer: float, logits: Any, labels: Any) -> Checked:
    """Lesson 03: the loss of a batch, the mean over the tokens with a label, each predicted one position before it."""
    from torch.nn.functional import cross_entropy  # it leaves out the label -100

    guesses, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = float(cross_entropy(guesses, targets))
    total = loss * int((targets != IGNORED).sum())
    by_row = [float(cross_entropy(*row)) for row in zip(logits[:, :-1], labels[:, 1:], strict=True)]
    places = targets % logits.shape[-1]  # a list is read from its end where a place is below 0
    mistakes = {
        tr("each score was compared with its own token; it is for the next one"): float(
            cross_entropy(logits.flatten(0, 1), labels.flatten())
        ),
        tr("that is the sum; the loss is the mean"): total,
        tr("that is the mean over all positions; those with the label -100 do not count"): total / len(targets),
        tr("positions with the label -100 do not count; here they do"): float(cross_entropy(guesses, places)),
        tr("ln p is negative, and the loss is -ln p"): -loss,
        tr("every token counts alike; do not take the mean of each row first"): fmean(by_row),
        tr("that is in bits; take the natural logarithm"): loss / math.log(2),
    }
    return near(answer, loss, 1e-4, mistakes)


def adapter_parameters(answer: int, d_in: int, d_out: int, own_rank: int) -> Checked:
    """Lesson 03: how many parameters A and B of a layer have at rank 64."""
    mistakes = {
        tr("that is one of A and B alone; both are trained"): RANK * d_in,
        tr("that is B alone; A is trained, too"): RANK * d_out,
        tr("that is W, which is frozen"): d_in * d_out,
        tr("A and B have the rank on one side only; the other side is one of W"): RANK * RANK,
        tr("that is at rank {rank}, which this lesson trains with", rank=own_rank): own_rank * (d_in + d_out),
    }
    return near(answer, RANK * (d_in + d_out), 1e-6, mistakes)


def learning_rates(answer: float, rates: Sequence[float], losses: Mapping[float, float]) -> Checked:
    """Lesson 03: of learning rates far apart, the one with the lowest validation loss."""
    rates = sorted(rates)
    if len(rates) < 2:
        return wrong("it takes two learning rates to compare")
    if rates[-1] < APART * rates[0]:
        return wrong("these are less than {times:g} times apart, and may differ by chance only", times=APART)
    if answer not in rates:
        return wrong("saw {winner}, expected the better one of these: look at the figure", winner=answer)
    lowest = min(rates, key=losses.__getitem__)
    if answer != lowest:
        return wrong("another one reached a lower validation loss, {loss:.3g}", loss=losses[lowest])
    return right("it reached a validation loss of {loss:.3g}", loss=losses[lowest])


# --- 04: the merged model ---------------------------------------------------------------------------------------------


def merged_weight(answer: Any, W: Any, A: Any, B: Any, scale: float) -> Checked:
    """Lesson 04: a weight with its adapter merged into it, W + scale * (B @ A)."""
    import torch

    given = torch.as_tensor(answer)
    if given.shape != W.shape:
        saw = list(given.shape)
        return wrong("saw the shape {saw}, expected {expected}: B @ A has it", saw=saw, expected=list(W.shape))
    change = scale * (B @ A)
    merged = W + change
    told = {
        tr("the weight, with what the adapter adds to it"): merged,
        tr("the product of the matrices is not scaled yet"): W + change / scale,
        tr("this is the change alone, without the weight that it is added to"): change,
        tr("the change is added, not taken away"): W - change,
        tr("the scale is for the adapter's part alone"): scale * W + change,
    }
    for text, weight in told.items():
        if torch.allclose(given, weight, atol=1e-6):
            return Checked(weight is merged, text)
    return wrong("the shape is right, the numbers are not")


def kl(answer: Any, p: Sequence[float], q: Sequence[float]) -> Checked:
    """Lesson 04: the KL divergence of two distributions in nats, the sum of p * ln(p / q)."""
    import numpy as np

    logs = np.log(p) - np.log(q)
    nats = np.dot(p, logs)
    mistakes = {
        tr("p and q are swapped: the terms are p * ln(p / q)"): -np.dot(q, logs),
        tr("these are bits: nats take the natural logarithm"): nats / math.log(2),
        tr("this is the sum of the differences: a term is p times a logarithm"): abs(np.subtract(p, q)).sum(),
        tr("this is the sum of the logarithms: each is weighted by its p"): logs.sum(),
        tr("the last term, of all other tokens, is missing"): np.dot(p[:-1], logs[:-1]),
    }
    return near(answer, nats, 1e-5, mistakes)


def commonest_error(answer: str, right: Sequence[Mapping[str, bool]]) -> Checked:
    """Lesson 04: the field that is wrong most often, by which fields of each answer are right."""
    errors = {field: sum(not fields[field] for fields in right) for field in right[0]}
    if answer not in errors:
        return not_among(answer, errors)
    count = errors[answer]
    most = max(errors.values())
    told = tr(
        "{field} is wrong in {count} answers, the commonest error in {most}", field=answer, count=count, most=most
    )
    return Checked(count == most, told)


# --- 05: the server ---------------------------------------------------------------------------------------------------


def temperature(answer: float, logits: Any) -> Checked:
    """Lesson 05: the probability of the likeliest token at temperature 2, from the logits of all tokens."""
    divided, as_they_are, multiplied = [float((logits * by).softmax(-1).max()) for by in (0.5, 1.0, 2.0)]
    mistakes = {
        tr("that is temperature 1: the logits were not divided"): as_they_are,
        tr("the logits were multiplied, which makes the likeliest token likelier"): multiplied,
        tr("the probability was divided; divide the logits, before the softmax"): as_they_are / 2,
        tr("the softmax is over all tokens, not over the five of the figure"): float(
            (logits.topk(5).values / 2).softmax(-1).max()
        ),
    }
    return near(answer, divided, 0.01, mistakes)


def cache_bytes(answer: float, shape: Any, number_bytes: int) -> Checked:
    """Lesson 05: the KV cache of 1,000 tokens."""
    expected = 1000 * shape.cache_bytes(number_bytes)
    sharing = shape.heads / shape.kv_heads
    mistakes = {
        tr("that is one layer; each keeps its own keys and values"): expected / shape.softmax_layers,
        tr("that is half: count keys and values, each key/value head, and {n} bytes", n=number_bytes): expected / 2,
        tr("that is one token"): expected / 1000,
        tr("these are numbers, and each has {n} bytes", n=number_bytes): expected / number_bytes,
        tr("those are all query heads; several of them share a key and a value"): expected * sharing,
        tr("a number has {n} bytes here", n=number_bytes): expected * 2,
    }
    return near(answer, expected, 0.01, mistakes)


def many_at_once(answer: float, alone: float, together: float) -> Checked:
    """Lesson 05: a guess, how many times as long as one request 32 take that are sent at once; a factor of 2 counts."""
    mistakes = {
        tr("nearly one after the other: is one step for 32 requests as much work as 32 steps?"): 32.0,
        tr("nearly for nothing: a step with 32 requests is more work than one with a single request"): 1.0,
    }
    return near(answer, together / alone, 0.5, mistakes)


# --- 06: several GPUs -------------------------------------------------------------------------------------------------


def sent_bytes(answer: float, adapter_parameters: int, gpus: int) -> Checked:
    """Lesson 06: the bytes that each GPU sends in a step with DDP, of float32 gradients in a ring."""
    sent = 8 * adapter_parameters * (gpus - 1) / gpus
    mistakes = {
        tr("a number in float32 has 4 bytes, and there are two rounds"): sent / 2,
        tr("a round has N - 1 turns, not N"): 8 * adapter_parameters,
        tr("that is what all GPUs send together"): sent * gpus,
    }
    return near(answer, sent, 0.01, mistakes)


def half_efficiency(answer: int, efficiency: Mapping[int, float]) -> Checked:
    """Lesson 06: the smallest number of GPUs with an efficiency below a half; if there is none, twice the largest."""
    none = 2 * max(efficiency)
    smallest = min((gpus for gpus, share in efficiency.items() if share < 0.5), default=none)
    mistakes = {
        tr("with so many it is still a half or more"): smallest / 2,
        tr("there is one in the table of FSDP"): none,
    }
    return near(answer, smallest, 0, mistakes)


# --- 07: a model from scratch -----------------------------------------------------------------------------------------


def token_counts(answer: Sequence[int], sentences: Sequence[str], tokenizer: Any) -> Checked:
    """Lesson 07: how many tokens each sentence has."""
    checks = []
    for tokens, sentence in zip(answer, sentences, strict=True):
        mistakes = {
            tr("these are its characters"): len(sentence),
            tr("these are its bytes"): len(sentence.encode()),
            tr("these are its words"): len(sentence.split()),
        }
        checks.append(near(tokens, len(tokenizer.tokenize(sentence)), 0, mistakes))
    told = joined((checked.text for checked in checks), ";")
    return Checked(all(checked.right for checked in checks), told)


def perplexity(answer: float, loss: float) -> Checked:
    """Lesson 07: the perplexity of a loss."""
    mistakes = {
        tr("the logarithm in the loss is the natural one, of base e"): 2**loss,
        tr("that is the loss itself"): loss,
        tr("that is the probability of a token, 1 / perplexity"): math.exp(-loss),
    }
    return near(answer, math.exp(loss), 0.01, mistakes)


def easy_sentence(answer: str, losses_of: Callable[[str], Sequence[float]]) -> Checked:
    """Lesson 07: a sentence of one's own whose tokens, at least five, have a loss below 4 on average."""
    losses = losses_of(answer)
    if len(losses) < 5:
        return wrong("saw {tokens} tokens, expected five or more", tokens=len(losses))
    loss = fmean(losses)
    if loss < 4:
        return right("saw a loss of {loss:.2f}", loss=loss)
    return wrong("saw a loss of {loss:.2f}, {more:.2f} too much: try words of the texts", loss=loss, more=loss - 4)


# --- 08: smaller files ------------------------------------------------------------------------------------------------


def export_bytes(answer: float, weights: int, group: int) -> Checked:
    """Lesson 08: the bytes of weights of 4 bits, with a scale of 2 bytes for each group of them."""
    scales = 2 * weights / group
    return near(
        answer,
        weights / 2 + scales,
        0.01,
        {
            tr("that is without the scales"): weights / 2,
            tr("these are 4 bytes for each weight, not 4 bits"): 4 * weights,
            tr("these are 8 bits for each weight: two weights of 4 bits share a byte"): weights + scales,
        },
    )


def export_format(answer: Sequence[str]) -> Checked:
    """Lesson 08: a format that vLLM runs on a T4, and one that llama.cpp runs."""
    from nbutils.exporting.make import FORMATS

    served, local = map(FORMATS.__getitem__, answer)
    if "vllm" not in served.load:
        return wrong("vLLM does not read the first one; see the column with what it runs on")
    if served.capability > (7, 5):  # of a T4
        return wrong("a T4 is older than Ampere, too old for the first one")
    if local.work != "gguf":
        return wrong("llama.cpp reads GGUF files, and the second one is none")
    return right("both run there")


# --- 09: speed --------------------------------------------------------------------------------------------------------


def highest_concurrency(answer: int, times: Mapping[int, float], limit: float) -> Checked:
    """Lesson 09: the most requests at a time of which 90 % take no longer than a limit in milliseconds."""
    time = times[answer]
    if time > limit:
        return wrong("there 90 % take up to {time:,.1f} ms, longer than the limit", time=time)
    fitting = [users for users in times if times[users] <= limit]
    if answer < max(fitting):
        return wrong("more at a time still fit")
    return right("there 90 % take {time:,.1f} ms at most", time=time)


def server_gain(answer: float, speeds: Mapping[int, float]) -> Checked:
    """Lesson 09: tokens/s of all requests together at the highest concurrency, by those of one; 10 % off counts."""
    (_, alone), *_, (users, together) = speeds.items()
    gain = together / alone
    mistakes = {
        tr("the other way round: divide the tokens/s of many by those of one"): 1 / gain,
        tr("that is the difference; how many times as many are they?"): together - alone,
        tr("that is what each of them gets; together they get more"): gain / users,
    }
    return near(answer, gain, 0.1, mistakes)


# --- 10: a model of one's own -----------------------------------------------------------------------------------------


def enough_rows(answer: int, train: int, held_out: int) -> Checked:
    """Lesson 10: how many rows the first training has, which must be at least a hundred."""
    if train < LEAST_ROWS:
        return wrong("{train} rows are too few to learn from: add {more}", train=train, more=LEAST_ROWS - train)
    return near(answer, train, 0, {tr("your questions are held out: nothing is trained on them"): train + held_out})


def error_notes(answer: Mapping[int, str], errors: Sequence[int]) -> Checked:
    """Lesson 10: a note for each of five errors, by the number of the row."""
    for number, note in answer.items():
        if number not in errors:
            return wrong("row {number} is none of the errors", number=number)
        if len(note.strip()) < SHORTEST_ANSWER:
            return wrong("row {number}: say in a few words what went wrong", number=number)
    missing = min(NOTES, len(errors)) - len(answer)
    if missing > 0:
        return wrong("errors without a note: {missing} more are to be read", missing=missing)
    return right("notes on {count} errors", count=len(answer))


def fair_comparison(answer: Sequence[str], differing: Sequence[str], times: Mapping[str, str]) -> Checked:
    """Lesson 10: what differs between the two trainings, which may be the data alone; the baseline was there before."""
    if len(times) < 3:
        return wrong("there is one training so far: add rows, and run the lesson again")
    if min(times, key=times.__getitem__) != "baseline":
        return wrong("the baseline is younger than a training: take another RUN_NAME")
    for name in answer:
        if name not in differing:
            return wrong("{name} is the same in both", name=name)
    missing = set(differing) - set(answer)
    if missing:
        return wrong("more differs than that: {count}", count=len(missing))
    if list(differing) != ["data"]:
        return wrong("that is right, and no fair comparison: only the data should differ")
    return right("only the data differs, and the baseline is older than both trainings")


# --- 99: what went wrong ----------------------------------------------------------------------------------------------


def named_curves(answer: Sequence[str]) -> Checked:
    """Lesson 99: what is wrong with each training that is drawn."""
    return _all_right(answer, ["curve 1", "curve 2", "curve 3"])


def named_causes(answer: Sequence[str]) -> Checked:
    """Lesson 99: the cause of each error message, by its letter."""
    return _all_right(answer, ["message 1", "message 2", "message 3"])


def _all_right(answer: Sequence[str], names: Sequence[str]) -> Checked:
    """What quiz.yaml says of the first wrong one of several choices; if there is none, of the last."""
    for choice, name in zip(answer, names, strict=True):
        checked = quiz(choice, name)
        if not checked.right:
            break
    return checked


OF_LESSON: Mapping[str, Sequence[Check]] = {
    "01_environment": (halved_parts, longest_rows, quiz),
    "02_data_prep": (labels, mended_rows, own_rows, quiz),
    "03_qlora": (batch_loss, adapter_parameters, learning_rates, quiz),
    "04_merge": (merged_weight, kl, commonest_error, quiz),
    "05_serve": (temperature, cache_bytes, many_at_once, quiz),
    "06_scale_out": (sent_bytes, half_efficiency, quiz),
    "07_from_scratch": (token_counts, perplexity, easy_sentence, quiz),
    "08_export": (export_bytes, export_format, quiz),
    "09_benchmark": (highest_concurrency, server_gain, quiz),
    "10_your_model": (enough_rows, error_notes, fair_comparison, quiz),
    "99_when_it_breaks": (named_curves, named_causes, quiz),
}


def names_of(stem: str) -> list[str]:
    """The exercises of a lesson."""
    return [check.__name__ for check in OF_LESSON.get(stem, ())]
