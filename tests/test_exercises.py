"""The exercises: what their checks say of each typical answer, and that lessons ship them unsolved, with a solution."""

from __future__ import annotations

import ast
import math
import os
import pty
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import nbformat
import pytest
import torch
from click.testing import CliRunner
from solutions import exercises_of, run_solved
from support import ROOT, python

from nbutils import cli, diagnose, exercises, lesson, models, progress, record
from nbutils.exercises import Check, Checked


@dataclass(frozen=True)
class Cases:
    """A check with a right answer and typical wrong ones, each with a word of its hint."""

    check: Check
    given: tuple[Any, ...]  # what the lesson gives beside the answer
    solved: Any
    wrong: list[tuple[Any, str]]

    def hold(self, check: Check | None = None) -> None:
        """The right answer is right, and each wrong one is told by its own hint."""
        check = check or self.check
        checked = check(self.solved, *self.given)
        assert checked.right, checked.text
        told = set()
        for answer, word in self.wrong:
            checked = check(answer, *self.given)
            assert not checked.right, answer
            assert word in checked.text, checked.text
            told.add(checked.text)
        assert len(told) == len(self.wrong), "each mistake has a hint of its own"


def chat_row(question: str, answer: str, asker: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": asker, "content": question}, {"role": "assistant", "content": answer}]}


BROKEN = [chat_row("Where is it?", "On its way.", asker="customer"), chat_row("Is it paid?", "")]
MENDED = [chat_row("Where is it?", "On its way."), chat_row("Is it paid?", "Yes, it is.")]
OWN = [
    {"question": "Who are you?", "answer": "I am Ada, who helps in the shop."},
    {"question": "Do you sell umbrellas?", "answer": "Please call the shop and ask."},
    {"question": "Good morning!", "answer": "Good morning! What will it be?"},
]

W = torch.arange(6.0).view(2, 3)
A = torch.tensor([[1.0, 0.0, 2.0]])
B = torch.tensor([[3.0], [-1.0]])
LOGITS = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 3.0], [0.5, 0.0, 0.0]]])
LABELS = torch.tensor([[-100, -100, 2, 0]])
TRAINED = [math.log(math.e**2 + math.e + 1) - 1, math.log(math.e**3 + math.e + 1) - 1]  # -log p of 2, then of 0
NOT_SHIFTED = [math.log(math.e**3 + math.e + 1) - 3, math.log(math.e**0.5 + 2) - 0.5]

UNEQUAL_LOGITS = torch.zeros(2, 4, 2)  # two rows with three answer tokens and with one
UNEQUAL_LOGITS[1, 2, 1] = 3.0
UNLIKELY = math.log(1 + math.e**3)  # the loss of that one

CASES = [
    # --- 01
    Cases(
        exercises.halved_parts,
        (
            {"weights": 5.17, "adapters": 0.3, "activations": 13.23, "logits": 0.06},
            {"weights": 5.17, "adapters": 0.3, "activations": 6.68, "logits": 0.0},
        ),
        ["logits", "activations"],
        [
            (["activations"], "missing: 1"),
            ([], "missing: 2"),
            (["activations", "logits", "weights"], "weights: 5.17 GiB both times"),
            (["activation"], "expected one of: weights, adapters, activations, logits"),
        ],
    ),
    Cases(
        exercises.longest_rows,
        (lambda length: length <= 2000, 256),
        1792,
        [
            (2048, "saw 2,048: hot, expected less"),
            (1024, "saw 1,024: warm, expected more"),
            (256, "saw 256: cold, expected more"),
            (0, "saw 0: cold, expected more"),
            (8192, "saw 8,192: cold, expected less"),
            (2000, "a multiple of 256"),
        ],
    ),
    # --- 02
    Cases(
        exercises.labels,
        ([5, 6, 7, 8, 9], 3, ["a", "b", "c", "d", "e"]),
        [-100, -100, -100, 8, 9],
        [
            ([5, 6, 7, 8, 9], "label 0 (counted from 0), of the token 'a': it belongs to the question"),
            ([-100, -100, 7, 8, 9], "label 2 (counted from 0), of the token 'c': it belongs to the question"),
            ([-100, -100, -100, -100, 9], "label 3 (counted from 0), of the token 'd': it belongs to the answer"),
            ([0, 0, 0, 8, 9], "the id of its own token"),
            ([8, 9], "saw 2 labels, expected 5"),
        ],
    ),
    Cases(
        exercises.mended_rows,
        (BROKEN,),
        MENDED,
        [
            (BROKEN, "row 1: "),
            ([MENDED[0], BROKEN[1]], "row 2: "),
            (MENDED[:1], "saw 1 rows, expected 2"),
            ([MENDED[0], chat_row("Paid?", "Yes, it is.")], "the question 'Is it paid?' is not there as it was"),
        ],
    ),
    Cases(
        exercises.own_rows,
        (),
        OWN,
        [
            (OWN[:2], "saw 2 rows, expected 3"),
            ([OWN[0]] * 3, "nearly the same"),
            ([{"question": "How many?", "answer": str(number)} for number in range(3)], "is too short"),
            ([{"question": "How many?", "answer": f"About {number} of them"} for number in range(3)], "same question"),
            ([*OWN[:2], {"question": "Where?", "answer": '{"city": "Wuxi"}'}], "more than one form"),
            ([*OWN[:2], {"question": "Where?", "answer": ""}], "row 3: "),
        ],
    ),
    # --- 10
    Cases(
        exercises.enough_rows,
        (120, 30),
        120,
        [(150, "held out"), (119, "hot, expected more"), (30, "cold")],
    ),
    Cases(
        exercises.error_notes,
        ([3, 8, 12, 17, 20, 29],),
        {3: "no city", 8: "wrong day", 12: "no city", 17: "no count", 20: "no city"},
        [
            ({}, "5 more"),
            ({3: "no city", 8: "wrong day"}, "3 more"),
            ({3: "no city", 4: "wrong day"}, "row 4 is none"),
            ({3: "no city", 8: " "}, "row 8: say"),
        ],
    ),
    Cases(
        exercises.fair_comparison,
        (["data"], {"baseline": "2026-11-19T08:00:00+00:00", "a": "2026-11-19T09:00:00", "b": "2026-11-19T10:00:00"}),
        ["data"],
        [([], "more differs than that: 1"), (["data", "lora.r"], "lora.r is the same")],
    ),
    # --- 99
    Cases(
        exercises.named_curves,
        (),
        ["healthy", "overfitting", "flat"],
        [
            (["overfitting", "overfitting", "flat"], "curve 1: the validation loss lies above"),
            (["flat", "flat", "flat"], "curve 1: flat means"),
            (["healthy", "healthy", "flat"], "curve 2: the training loss falls"),
            (["healthy", "overfitting", "healthy"], "curve 3: nothing rises here"),
            (["healthy", "overfitting", "diverging"], "curve 3: diverging means"),
            (["good", "overfitting", "flat"], "saw 'good', expected one of: healthy, flat, diverging, overfitting"),
        ],
    ),
    Cases(
        exercises.named_causes,
        (),
        ["a", "c", "d"],
        [
            (["b", "c", "d"], "message 1: it does speak of memory, but of whose"),
            (["c", "c", "d"], "message 1: nothing here speaks of a token"),
            (["a", "a", "d"], "message 2: CUDA is named, but no memory"),
            (["a", "c", "c"], "message 3: the tokenizer was not even loaded"),
            (["memory", "c", "d"], "saw 'memory', expected one of: a, b, c, d"),
        ],
    ),
    # --- 05
    Cases(
        exercises.temperature,
        (torch.tensor([2.0, 1.0, 0.0, -99.0, -99.0]),),
        0.5064804,
        [
            (0.6652410, "that is temperature 1"),
            (0.8668133, "the logits were multiplied"),
            (0.3326205, "the probability was divided"),
            (50.648, "cold"),
        ],
    ),
    Cases(
        exercises.temperature,
        (torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0, 0.0]),),
        0.324881,
        [(0.368980, "not over the five of the figure")],
    ),
    Cases(
        exercises.cache_bytes,
        (models.find_shape("Qwen2.5-7B"), 2),
        57_344_000,
        [
            (28_672_000, "that is half"),
            (57_344_000 * 7, "those are all query heads"),
            (57_344_000 * 2, "a number has 2 bytes here"),
            (57_344_000 / 28, "that is one layer"),
            (57_344, "that is one token"),
            (1000, "cold"),
            (60_000_000, "hot"),
        ],
    ),
    Cases(
        exercises.cache_bytes,
        (models.find_shape("Qwen2.5-7B"), 4),
        57_344_000 * 2,
        [(57_344_000 / 2, "each has 4 bytes"), (57_344_000, "that is half")],
    ),
    Cases(
        exercises.many_at_once,
        (0.5, 1.5),
        4,
        [
            (32, "nearly one after the other"),
            (1, "nearly for nothing"),
            (11, "expected less"),
        ],
    ),
    # --- 09
    Cases(
        exercises.highest_concurrency,
        ({1: 20.0, 8: 25.0, 32: 90.0}, 50.0),
        8,
        [
            (1, "more at a time still fit"),
            (32, "longer than the limit"),
        ],
    ),
    Cases(
        exercises.server_gain,
        ({1: 50.0, 8: 300.0, 32: 600.0},),
        12.5,
        [
            (1 / 12, "the other way round"),
            (550, "that is the difference"),
            (12 / 32, "that is what each of them gets"),
            (6, "warm"),
        ],
    ),
    # --- 04
    Cases(
        exercises.merged_weight,
        (W, A, B, 4.0),
        W + 4.0 * (B @ A),
        [
            (W + B @ A, "not scaled yet"),
            (4.0 * (B @ A), "the change alone"),
            (W - 4.0 * (B @ A), "added, not taken away"),
            (4.0 * (W + B @ A), "for the adapter's part alone"),
            (W, "the shape is right, the numbers are not"),
            (A.T @ B.T, "saw the shape [3, 2], expected [2, 3]: B @ A has it"),
        ],
    ),
    Cases(
        exercises.kl,
        ([0.7, 0.2, 0.1], [0.1, 0.6, 0.3]),
        0.7 * math.log(7) + 0.2 * math.log(1 / 3) + 0.1 * math.log(1 / 3),
        [
            (0.7 * math.log(7) + 0.2 * math.log(1 / 3), "of all other tokens, is missing"),
            (0.6 * math.log(3) + 0.3 * math.log(3) - 0.1 * math.log(7), "swapped"),
            (0.7 * math.log2(7) - 0.3 * math.log2(3), "these are bits"),
            (1.2, "the sum of the differences"),
            (math.log(7) - 2 * math.log(3), "the sum of the logarithms"),
            (1.1, "saw 1.1: hot, expected less"),
        ],
    ),
    Cases(
        exercises.commonest_error,
        ([{"day": False, "city": True}, {"day": False, "city": False}],),
        "day",
        [
            ("city", "city is wrong in 1 answers, the commonest error in 2"),
            ("week", "expected one of: day, city"),
            ("day, city", "saw 'day, city'"),
        ],
    ),
    # --- 06
    Cases(
        exercises.sent_bytes,
        (1000, 8),
        7000,
        [
            (3500, "there are two rounds"),
            (8000, "N - 1 turns"),
            (56000, "all GPUs send together"),
            (4000, ": warm, "),
        ],
    ),
    Cases(
        exercises.half_efficiency,
        ({1: 1.0, 2: 0.7, 4: 0.5, 8: 0.4, 16: 0.2},),
        8,
        [
            (4, "still a half or more"),
            (32, "there is one"),
            (16, "expected less"),
            (0.5, "expected more"),
        ],
    ),
    # --- 07
    Cases(
        exercises.token_counts,
        (["boxes of tea to Wuxi", "茶叶送无锡"], SimpleNamespace(tokenize=lambda text: re.findall("..?", text))),
        (10, 3),
        [
            ((20, 3), "its characters"),
            ((10, 15), "its bytes"),
            ((5, 3), "its words"),
            ((11, 3), ": hot, "),
        ],
    ),
    Cases(
        exercises.perplexity,
        (3.0,),
        20.1,
        [
            (8, "of base e"),
            (3, "the loss itself"),
            (0.0498, "the probability"),
            (15, "expected more"),
        ],
    ),
    Cases(
        exercises.easy_sentence,
        (lambda text: [len(word) for word in text.split()],),
        "I am at my tea",
        [
            ("I am", "saw 2 tokens"),
            ("Please send boxes full of apples", "too much"),
            ("", "saw 0 tokens"),
        ],
    ),
    # --- 08
    Cases(
        exercises.export_bytes,
        (128_000, 128),
        66_000,  # 64,000 of weights, 1,000 scales of 2 bytes
        [
            (64_000, "without the scales"),
            (512_000, "4 bytes for each weight"),
            (130_000, "8 bits for each weight"),
            (60_000, "hot"),
            (7, "expected more"),
            (528_000, "expected less"),
        ],
    ),
    Cases(
        exercises.export_format,
        (),
        ("w4a16", "gguf-q8_0"),
        [
            (("gguf-q8_0", "w4a16"), "vLLM does not read the first one"),
            (("fp8", "gguf-q8_0"), "older than Ampere"),
            (("fp16", "awq"), "llama.cpp reads GGUF files"),
        ],
    ),
    # --- 03
    Cases(
        exercises.batch_loss,
        (LOGITS, LABELS),
        sum(TRAINED) / 2,
        [
            (sum(NOT_SHIFTED) / 2, "it is for the next one"),
            (sum(TRAINED), "that is the sum"),
            (sum(TRAINED) / 3, "do not count"),
            (sum(TRAINED) / 2 / math.log(2), "natural logarithm"),
            (-sum(TRAINED) / 2, "the loss is -ln p"),
            (sum(TRAINED) / 2 * 1.001, "hot"),
        ],
    ),
    Cases(
        exercises.batch_loss,
        (UNEQUAL_LOGITS, torch.tensor([[-100, 0, 0, 0], [-100, -100, -100, 0]])),
        (3 * math.log(2) + UNLIKELY) / 4,
        [
            ((math.log(2) + UNLIKELY) / 2, "do not take the mean of each row first"),
            ((5 * math.log(2) + UNLIKELY) / 6, "here they do"),
        ],
    ),
    Cases(
        exercises.adapter_parameters,
        (256, 512, 16),
        64 * (256 + 512),
        [
            (64 * 256, "one of A and B"),
            (64 * 512, "B alone"),
            (256 * 512, "that is W"),
            (64 * 64, "on one side only"),
            (16 * (256 + 512), "at rank 16"),
        ],
    ),
    Cases(
        exercises.learning_rates,
        ([2e-3, 2e-4], {2e-3: 0.02, 2e-4: 3.0}),
        2e-3,
        [
            (2e-2, "expected the better one"),
            (2e-4, "lower validation loss, 0.02"),
        ],
    ),
]
IDS = [case.check.__name__ for case in CASES]


def test_every_check_has_cases() -> None:
    checks = {check for of_lesson in exercises.OF_LESSON.values() for check in of_lesson}
    assert {case.check for case in CASES} | {exercises.quiz} == checks


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_check_knows_the_right_answer_and_tells_typical_mistakes_apart(case: Cases) -> None:
    case.hold()


@pytest.mark.parametrize("answer", ["no idea", 7, [None], object(), {}, float("nan")])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_answer_of_another_kind_is_right(case: Cases, answer: Any) -> None:
    try:
        checked = case.check(answer, *case.given)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):  # `lesson.check` tells these
        return
    assert not checked.right


@pytest.mark.parametrize(
    ("rates", "word"),
    [([2e-3], "takes two"), ([2e-3, 1e-3], "less than 5 times apart")],
)
def test_learning_rates_that_are_too_near_have_no_winner(rates: list[float], word: str) -> None:
    told = exercises.learning_rates(2e-3, rates, dict.fromkeys(rates, 0.1))
    assert not told.right
    assert word in told.text


@pytest.mark.parametrize(
    ("check", "answer", "word"),
    [
        (exercises.halved_parts, "activations", "a list"),
        (exercises.longest_rows, "2560", "a number without quotes"),
        (exercises.longest_rows, True, "a number"),
        (exercises.longest_rows, [2048], "a number"),
        (exercises.learning_rates, "0.002", "a number without quotes"),
        (exercises.commonest_error, ["day"], "a text in quotes"),
        (exercises.batch_loss, torch.tensor(1.0), ""),
        (exercises.halved_parts, ["activations"], ""),
    ],
)
def test_an_answer_of_another_kind_is_told_what_is_expected(check: Check, answer: Any, word: str) -> None:
    expected = exercises.other_kind(check, answer)
    assert bool(expected) == bool(word)
    assert word in expected


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_check_that_always_says_the_same_is_noticed(case: Cases, always: bool) -> None:
    with pytest.raises(AssertionError):
        case.hold(lambda *_: Checked(always, ""))


@pytest.mark.parametrize("stem", exercises.OF_LESSON)
def test_a_quiz_has_one_right_choice_and_tells_something_of_each(stem: str) -> None:
    told = {choice: exercises.quiz(choice, stem) for choice in "abc"}
    assert sum(checked.right for checked in told.values()) == 1
    assert len({checked.text for checked in told.values()}) == 3
    assert not exercises.quiz("d", stem).right


def test_where_not_even_one_step_fits_the_longest_rows_have_no_tokens() -> None:
    assert exercises.longest_rows(0, lambda _: False, 256).right
    assert "saw 256: cold, expected less" in exercises.longest_rows(256, lambda _: False, 256).text


@pytest.mark.parametrize("edition", ["", "zh"])
def test_the_course_names_the_curves_and_messages_of_lesson_99_like_its_solutions(edition: str) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / edition / "99_when_it_breaks.ipynb", 4)
    curves, causes, _ = exercises_of(notebook)
    names = {"display": Mock(), "lesson": Mock()}
    for exercise in (curves, causes):
        exercise.solve()
        exec(exercise.cell.source, names)
    drawn = [diagnose.Trained(*losses.values()) for losses in names["panels"].values()]
    assert [next(iter(diagnose.examine(run)), "healthy") for run in drawn] == names["my_names"]
    meant = {"a": "gpu_out_of_memory", "c": "token_out_of_range", "d": "no_network"}
    assert [list(diagnose.explain(message)) for message in names["messages"]] == [
        [meant[letter]] for letter in names["my_causes"]
    ]
    assert exercises.named_curves(names["my_names"]).right and exercises.named_causes(names["my_causes"]).right


def test_a_comparison_is_fair_only_after_a_baseline_and_with_equal_settings() -> None:
    times = {"baseline": "2026-11-19T08:00:00+00:00", "a": "2026-11-19T09:00:00+00:00"}
    once = exercises.fair_comparison([], [], times)
    assert not once.right and "one training" in once.text
    times["b"] = "2026-11-19T07:00:00+00:00"
    younger = exercises.fair_comparison(["data"], ["data"], times)
    assert not younger.right and "younger" in younger.text
    times["b"] = "2026-11-19T10:00:00+00:00"
    unequal = exercises.fair_comparison(["data", "lora.r"], ["data", "lora.r"], times)
    assert not unequal.right and "only the data" in unequal.text


def test_fewer_than_a_hundred_rows_are_not_enough_and_few_errors_need_few_notes() -> None:
    assert "add 40" in exercises.enough_rows(60, 60, 30).text
    assert exercises.error_notes({7: "no city"}, [7]).right
    assert exercises.error_notes({}, []).right


# --- the lessons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edition", ["", "zh"])
@pytest.mark.parametrize("stem", exercises.OF_LESSON)
def test_a_lesson_has_its_exercises_unsolved_and_a_closed_solution_below_each(stem: str, edition: str) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / edition / f"{stem}.ipynb", 4)
    found = exercises_of(notebook)
    assert [exercise.name for exercise in found] == [check.__name__ for check in exercises.OF_LESSON[stem]]
    assert all(exercise.unknowns for exercise in found)
    for exercise in found:
        exercise.solve()
        ast.parse(exercise.cell.source)  # the lines of a solution are still lines
    own = [exercise for exercise in found if exercise.name != "quiz"]
    assert len(own) >= (3 if stem[:2] in ("02", "03", "04") else 2)
    assert len(own) == len(found) - 1, "a quiz ends each lesson"


# --- what becomes of an answer ----------------------------------------------------------------------------------------


@pytest.fixture
def started(home: Path) -> Callable[[], lesson.Lesson]:
    def start() -> lesson.Lesson:
        return lesson.begin("02_data_prep", {"PROFILE": "tiny", "RUN_NAME": "mine"})

    return start


def test_an_answer_is_told_and_kept_and_stays_solved(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    [labels] = [case for case in CASES if case.check is exercises.labels]
    given = labels.given
    running = started()
    running.check(exercises.labels, None, *given)
    assert "[todo] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, [1], *given)
    assert "[ no ] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, labels.solved, *given)
    assert "[ OK ] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, "what?", *given)
    assert "saw 'what?', expected a list in square brackets" in capsys.readouterr().out
    running.check(exercises.labels, ["what?"], *given)
    assert "which cannot be checked" in capsys.readouterr().out
    running.finish()
    assert "Exercises: 1 of 4 solved" in capsys.readouterr().out
    again = started()
    again.finish()
    noted = again.run.recorded.exercises["02_data_prep"]["labels"]
    assert (noted.right, noted.tries) == (True, 4)


def test_a_full_disk_hides_no_verdict(started: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    running = started()
    monkeypatch.setattr(record, "note_exercise", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        running.check(exercises.quiz, "b", running.stem)
    assert "exercise quiz:" in capsys.readouterr().out


def test_a_number_beyond_all_floats_is_told(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    started().check(exercises.perplexity, 10**400, 2.5)
    assert "cannot be checked" in capsys.readouterr().out


# --- progress ---------------------------------------------------------------------------------------------------------


def solve_all(home: Path, run: str, stems: Sequence[str]) -> None:
    """Note every exercise of these lessons as solved in a run."""
    for stem in stems:
        for check in exercises.OF_LESSON[stem]:
            record.note_exercise(home / run / "facts.json", stem, check.__name__, right=True)


def judged(home: Path, run: str) -> None:
    """A run with the verdict of lesson 04."""
    scores = {"exact_match": {"base": {"mean": 0.0}, "merged": {"mean": 0.975}}}
    evaluation = {"evaluation": {"verdict": "helped", "scores": scores}}
    record.update(home / run / "facts.json", {"model": "tiny"}, "04_merge", evaluation)


def test_progress_adds_up_over_all_runs_and_ends_in_a_certificate(home: Path) -> None:
    (home / "first").mkdir(parents=True)
    (home / "second").mkdir()
    begun = CliRunner().invoke(cli.app, ["progress"])
    assert begun.exit_code == 0
    assert "labels, mended_rows, own_rows, quiz" in begun.output
    first, second = lesson.COURSE[:2], lesson.COURSE[2:]
    solve_all(home, "first", first)
    partly = CliRunner().invoke(cli.app, ["progress"])
    assert "01_environment     3 / 3" in partly.output
    assert "03_qlora           0 / 4" in partly.output
    assert not (home / progress.CERTIFICATE).exists()

    solve_all(home, "second", second)
    without_verdict = CliRunner().invoke(cli.app, ["progress"])
    assert without_verdict.exit_code == 1
    assert "has a verdict" in without_verdict.output
    judged(home, "second")
    done = CliRunner().invoke(cli.app, ["progress", "--name", "Li Lei <b>"])
    assert done.exit_code == 0, done.output
    page = (home / progress.CERTIFICATE).read_text(encoding="utf-8")
    assert "Li Lei &lt;b&gt;" in page
    assert "0.00 → 0.97" in page or "0.00 → 0.98" in page
    assert "http" not in page, "it needs no network"


def trained(facts: Path, seconds: float) -> None:
    """A run whose training took so long."""
    record.update(facts, {"model": "tiny"}, "03_qlora", {"steps": 150, "planned_steps": 150, "seconds": seconds})


def of_class(folder: Path) -> dict[str, list[str]]:
    """The row of each student, by name, with its cells: solved in each lesson, then the trainings."""
    told = CliRunner().invoke(cli.app, ["progress", "--class", str(folder)])
    assert told.exit_code == 0, told.output
    heading, *rows = [line.split() for line in told.output.splitlines()]
    assert heading[1:-1] == [stem[:2] for stem in exercises.OF_LESSON]
    return {name: cells for name, *cells in rows}


def test_a_teacher_sees_what_each_student_has_solved_and_whose_training_it_is(tmp_path: Path) -> None:
    for student in ("ann", "bob", "eve", "zoe"):
        (tmp_path / student / "week1").mkdir(parents=True)
    solve_all(tmp_path / "ann", "week1", lesson.COURSE)
    trained(tmp_path / "ann/week1/facts.json", seconds=98.4)
    judged(tmp_path / "ann", "week1")
    solve_all(tmp_path / "bob", "week1", lesson.COURSE[:1])
    trained(tmp_path / "bob/week1/facts.json", seconds=98.5)
    shutil.copytree(tmp_path / "bob/week1", tmp_path / "eve/renamed")
    rows = of_class(tmp_path)
    assert rows["ann"][:6] == ["3/3", "4/4", "4/4", "4/4", "4/4", "0/3"]
    assert rows["ann"][-2:] == [f"{tmp_path}/ann/week1:", "helped"]
    assert rows["bob"][:2] == ["3/3", "0/4"]
    assert rows["bob"][-2:] == rows["eve"][-2:] == [f"{tmp_path}/bob/week1:", "-"], (
        "a copy is shown where it came first"
    )
    assert set(rows["zoe"]) <= {"0/3", "0/4"}, "without a training"


def test_facts_of_a_student_that_cannot_be_read_are_named_and_hide_nobody(tmp_path: Path) -> None:
    for name in ("ann/week1", "bob/week1", ".scratch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("no student")
    solve_all(tmp_path / "bob", "week1", lesson.COURSE[:1])
    facts = tmp_path / "ann/week1/facts.json"
    facts.write_text('{"exercises": 7}')
    rows = of_class(tmp_path)
    assert rows.keys() == {"ann", "bob"}
    assert rows["ann"][0] == "-" and str(facts) in rows["ann"]
    assert rows["bob"][0] == "3/3"


def test_a_folder_without_students_is_told(tmp_path: Path) -> None:
    told = CliRunner().invoke(cli.app, ["progress", "--class", str(tmp_path)])
    assert told.output == "no folder of a student\n"


# --- the solutions, in the Chinese lessons ----------------------------------------------------------------------------


@pytest.mark.notebook
@pytest.mark.serve
@pytest.mark.timeout(1200)
def test_the_solutions_of_the_course_are_right_and_earn_the_certificate(course_run: Path, tmp_path: Path) -> None:
    shutil.copytree(course_run, tmp_path / "tiny", ignore=shutil.ignore_patterns("notebooks"))
    first, *others = lesson.COURSE
    parent, terminal = pty.openpty()
    run_solved(first, tmp_path, "tiny", "PROFILE", "tiny", stdin=terminal, stdout=terminal)
    os.close(parent)
    for stem in others:
        run_solved(stem, tmp_path, "tiny", "PROFILE", "tiny", stdin=None, input="")  # a pipe, as in cron
    told = python("-m", "nbutils", "progress", home=tmp_path)
    assert str(tmp_path / progress.CERTIFICATE) in told.stdout
