"""The exercises: what their checks say of each typical answer, and that lessons ship them unsolved, with a solution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from solutions import exercises_of
from support import ROOT

from nbutils import exercises, lesson, record
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

LOGITS = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 3.0], [0.5, 0.0, 0.0]]])
LABELS = torch.tensor([[-100, -100, 2, 0]])
TRAINED = [math.log(math.e**2 + math.e + 1) - 1, math.log(math.e**3 + math.e + 1) - 1]  # -log p of 2, then of 0
NOT_SHIFTED = [math.log(math.e**3 + math.e + 1) - 3, math.log(math.e**0.5 + 2) - 0.5]

CASES = [
    # --- 02
    Cases(
        exercises.labels,
        ([5, 6, 7, 8, 9], 3, ["a", "b", "c", "d", "e"]),
        [-100, -100, -100, 8, 9],
        [
            ([5, 6, 7, 8, 9], "label 0, of the token 'a': it belongs to the question"),
            ([-100, -100, 7, 8, 9], "label 2, of the token 'c': it belongs to the question"),
            ([-100, -100, -100, -100, 9], "label 3, of the token 'd': it belongs to the answer"),
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
            ([MENDED[0], chat_row("Paid?", "Yes, it is.")], "the question 'Is it paid?' has changed"),
        ],
    ),
    Cases(
        exercises.own_rows,
        (),
        OWN,
        [
            (OWN[:2], "saw 2 rows, expected 3"),
            ([OWN[0]] * 3, "nearly the same"),
            ([{"question": "How many?", "answer": str(number)} for number in range(3)], "teaches nothing"),
            ([{"question": "How many?", "answer": f"About {number} of them"} for number in range(3)], "same question"),
            ([*OWN[:2], {"question": "Where?", "answer": '{"city": "Wuxi"}'}], "more than one form"),
            ([*OWN[:2], {"question": "Where?", "answer": ""}], "row 3: "),
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
            (sum(TRAINED) / 2 * 1.001, "hot"),
        ],
    ),
    Cases(
        exercises.adapter_parameters,
        (256, 512, 16),
        64 * (256 + 512),
        [
            (64 * 256, "A alone"),
            (64 * 512, "B alone"),
            (256 * 512, "that is W"),
            (64 * 64, "on one side only"),
            (16 * (256 + 512), "at rank 16"),
        ],
    ),
    Cases(
        exercises.learning_rates,
        (2e-3, {2e-2: 0.01, 2e-3: 0.02, 2e-4: 3.0}),
        [2e-3, 2e-4],
        [
            ([2e-3], "takes two"),
            ([2e-3, 1e-3], "less than 5 times apart"),
            ([2e-2, 2e-4], "expected the better one"),
            ([2e-3, 2e-2], "lower validation loss, 0.01"),
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


# --- the lessons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edition", ["", "zh"])
@pytest.mark.parametrize("stem", exercises.OF_LESSON)
def test_a_lesson_has_its_exercises_unsolved_and_a_closed_solution_below_each(stem: str, edition: str) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / edition / f"{stem}.ipynb", 4)
    found = exercises_of(notebook)
    assert [exercise.name for exercise in found] == [check.__name__ for check in exercises.OF_LESSON[stem]]
    assert all(exercise.unknowns for exercise in found)
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
    given = CASES[0].given
    running = started()
    running.check(exercises.labels, None, *given)
    assert "[todo] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, [1], *given)
    assert "[ no ] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, CASES[0].solved, *given)
    assert "[ OK ] exercise labels" in capsys.readouterr().out
    running.check(exercises.labels, "what?", *given)
    assert "saw 'what?', which cannot be checked" in capsys.readouterr().out
    running.finish()
    assert "Exercises: 1 of 4 solved" in capsys.readouterr().out
    again = started()
    again.finish()
    noted = record.load_facts(again.run.facts).exercises["02_data_prep"]["labels"]
    assert (noted.right, noted.tries) == (True, 3)
