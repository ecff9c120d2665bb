"""evaluation: greedy answers that do not depend on their batch, and a metric that counts."""

from __future__ import annotations

import json

import pytest

from nbutils import evaluation, paths


@pytest.fixture(scope="module")
def tiny():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32"), AutoTokenizer.from_pretrained(
        paths.TINY_MODEL
    )


def samples(limit: int) -> list[list[dict[str, str]]]:
    lines = (paths.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").split("\n")[:limit]
    return evaluation.questions_of([json.loads(line) for line in lines])[0]


def test_questions_are_everything_before_the_last_turn() -> None:
    turns = [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]
    questions, references = evaluation.questions_of([{"messages": turns}, {"messages": turns[:2]}])
    assert references == ["d", "b"] and questions[0] == turns[:3]
    assert evaluation.questions_of([{"messages": turns}, {"messages": turns[:2]}], limit=1)[1] == ["d"]


def test_an_answer_is_the_same_alone_and_in_a_batch(tiny) -> None:  # type: ignore[no-untyped-def]
    questions = samples(5)
    alone = evaluation.generate(*tiny, questions, max_new_tokens=12, batch_size=1)
    together = evaluation.generate(*tiny, questions, max_new_tokens=12, batch_size=5)
    assert alone == together
    assert all(0 < len(answer.token_ids) <= 12 for answer in alone)


def test_an_answer_ends_at_its_first_stop_token() -> None:
    assert evaluation._until_stop([5, 6, 2, 0, 0], [2]) == [5, 6, 2]
    assert evaluation._until_stop([5, 6], [2]) == [5, 6]


def test_exact_match_counts_and_refuses_uneven_lists() -> None:
    assert evaluation.exact_match([" a ", "b", "x"], ["a", "b", "c"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="1 answers for 2 references"):
        evaluation.exact_match(["a"], ["a", "b"])


def test_the_table_marks_right_and_wrong() -> None:
    questions = [[{"role": "user", "content": "q"}]]
    [row] = evaluation.before_after_table(questions, ["yes"], {"base": ["no"], "merged": ["yes"]})
    assert row == {"question": "q", "wanted": "yes", "base": "✗ no", "merged": "✓ yes"}
