"""evaluation: answers that survive a kill, scores that are right, and a verdict that tells content from form."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbutils import chat, data, evaluation, paths
from nbutils.config import Evaluation
from nbutils.errors import CourseError
from nbutils.evaluation import answers as asking
from nbutils.evaluation import control, harness, keeping, losses, report, scores, statistics, verdict
from nbutils.evaluation.answers import Answer
from nbutils.evaluation.exam import Exam, Result
from nbutils.evaluation.forgetting import forgetting
from nbutils.evaluation.losses import RowLoss
from nbutils.evaluation.rows import reference_of


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    return model, AutoTokenizer.from_pretrained(paths.TINY_MODEL)


def rows_of(name: str, limit: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (paths.SAMPLES / name).read_text(encoding="utf-8").splitlines()[:limit]]


def samples(limit: int) -> list[list[dict[str, Any]]]:
    return evaluation.questions_of(rows_of("eval.jsonl", limit))[0]


def view_of(tokenizer: Any, form: str = "messages") -> chat.View:
    return chat.View(tokenizer, form)


def exam_of(tiny: tuple[Any, Any], run: Path, rows: int = 6, batch: int = 4, new_tokens: int = 8) -> Exam:
    size = Evaluation(batch_size=batch, max_new_tokens=new_tokens, rows=rows)
    return Exam(run, tiny[1], rows_of("eval.jsonl", 24), size, "float32")


# --- asking ----------------------------------------------------------------------------------------------------------


def test_questions_are_everything_before_the_last_turn() -> None:
    turns = [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]
    questions, references = evaluation.questions_of([{"messages": turns}, {"messages": turns[:2]}])
    assert references == ["d", "b"] and questions[0] == turns[:3]


def test_an_answer_is_the_same_alone_and_in_a_batch(tiny: tuple[Any, Any]) -> None:
    questions = samples(5)
    alone = evaluation.generate(*tiny, questions, max_new_tokens=12, batch_size=1)
    together = evaluation.generate(*tiny, questions, max_new_tokens=12, batch_size=5)
    assert alone == together
    assert all(0 < len(answer.token_ids) <= 12 for answer in alone)


def test_an_answer_says_whether_it_ended_by_itself(tiny: tuple[Any, Any]) -> None:
    [cut] = evaluation.generate(*tiny, samples(1), max_new_tokens=3, batch_size=1)
    [whole] = evaluation.generate(*tiny, samples(1), max_new_tokens=64, batch_size=1)
    assert not cut.stopped and len(cut.token_ids) == 3
    assert whole.stopped and whole.token_ids[-1] in chat.find_stop_ids(tiny[1], tiny[0].generation_config)


def test_an_answer_ends_at_its_first_stop_token() -> None:
    assert asking._until_stop([5, 6, 2, 0, 0], [2]) == [5, 6, 2]
    assert asking._until_stop([5, 6], [2]) == [5, 6]


def test_out_of_memory_halves_the_batch_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    tried: list[int] = []

    def work(batch: list[int]) -> list[int]:
        tried.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return [10 * number for number in batch]

    done = {
        number: got
        for batch, found in asking.in_batches(list(range(7)), 7, work)
        for number, got in zip(batch, found, strict=True)
    }
    assert done == {number: 10 * number for number in range(7)}
    assert tried == [7, 3, 1, 1, 1, 1, 1, 1, 1] and "going on with 1" in capsys.readouterr().out


def test_one_row_that_does_not_fit_and_other_errors_are_not_hidden() -> None:
    import torch

    def too_large(batch: list[int]) -> list[int]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(batch: list[int]) -> list[int]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(torch.OutOfMemoryError):
        list(asking.in_batches([1, 2], 2, too_large))
    with pytest.raises(RuntimeError, match="shapes"):
        list(asking.in_batches([1, 2], 2, broken))


def test_the_longest_questions_are_asked_first(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def watch(model: Any, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        widths.append(max(map(len, prompts)))
        return [[2] for _ in prompts]

    monkeypatch.setattr(asking, "generate_ids", watch)
    evaluation.generate(*tiny, samples(12), 4, 3)
    assert len(widths) == 4 and widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


def test_an_answer_gets_the_tokens_the_wanted_ones_need(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    from copy import deepcopy

    rows = rows_of("eval.jsonl", 8)
    wanted = max(len(tiny[1](row["messages"][-1]["content"], add_special_tokens=False).input_ids) for row in rows)

    def tokens(most: int, tokenizer: Any = tiny[1], rows: Any = rows, asked: int = 0, **mode: Any) -> int:
        size = Evaluation(batch_size=4, max_new_tokens=most, rows=asked)
        return Exam(tmp_path, tokenizer, rows, size, "float32", **mode).max_new_tokens

    assert tokens(512) == tokens(512, asked=1) == int(1.5 * wanted) > 32 and tokens(8) == 8
    short = [{"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}]
    assert tokens(512, rows=short) == 32
    thoughtful = deepcopy(tiny[1])
    thoughtful.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert tokens(512, thoughtful) == 512 and tokens(512, thoughtful, thinking=False) < 512


def test_a_gpu_takes_as_many_rows_as_its_free_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Qwen2.5-7B on an H200, on a T4 in 4 bits, and on a CPU, where nothing is planned."""
    from types import SimpleNamespace

    import torch

    sizes = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
             "intermediate_size": 18944}  # fmt: skip
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))

    def rows(device: str, free_gib: float, tokens: int = 256) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free_gib * 2**30), 0), raising=False)
        model = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=config)
        return asking.rows_at_once(model, 200 + tokens, 256)

    assert (rows("cuda", 120), rows("cuda", 0.01), rows("cpu", 0.01)) == (256, 1, 256)
    assert 30 < rows("cuda", 8) < rows("cuda", 8, tokens=64) < 120


# --- keeping ---------------------------------------------------------------------------------------------------------

PROMPTS = [[1], [1, 2], [1, 2, 3]]


def noted(asked: list[int]) -> keeping.Ask:
    def ask(prompts: dict[int, list[int]]) -> Any:
        for number, prompt in prompts.items():
            asked.append(number)
            yield number, Answer(prompt, [7, number], f"答案 {number}", number != 1)

    return ask


def test_answers_are_asked_once_and_then_read(tmp_path: Path) -> None:
    asked: list[int] = []
    first = keeping.resumed(tmp_path / "a.jsonl", {"model": "m"}, PROMPTS, noted(asked))
    again = keeping.resumed(tmp_path / "a.jsonl", {"model": "m"}, PROMPTS, noted(asked))
    assert first == again and asked == [0, 1, 2] and [one.stopped for one in again] == [True, False, True]


def test_an_answer_with_unusual_line_ends_is_kept(tmp_path: Path) -> None:
    def ask(prompts: keeping.Prompts) -> Iterator[tuple[int, Answer]]:
        asked.extend(prompts)
        yield from ((number, Answer(prompt, [1], "a\u2028b\x85c\x1dd")) for number, prompt in prompts.items())

    asked: list[int] = []
    whole = keeping.resumed(tmp_path / "a.jsonl", {}, PROMPTS, ask)
    assert keeping.resumed(tmp_path / "a.jsonl", {}, PROMPTS, ask) == whole and len(asked) == len(PROMPTS)


def test_a_torn_line_is_asked_again_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    file, asked = tmp_path / "a.jsonl", []
    whole = keeping.resumed(file, {"model": "m"}, PROMPTS, noted([]))
    file.write_bytes(file.read_bytes()[:-20])
    assert keeping.resumed(file, {"model": "m"}, PROMPTS, noted(asked)) == whole and asked == [2]
    assert keeping.resumed(file, {"model": "m"}, PROMPTS, noted(asked)) == whole and asked == [2]


@pytest.mark.parametrize(
    "change", [("答案 1", "答案 2"), ("[7, 1]", "[7, 2]"), ("false", "true"), ('"row": 1', '"row": 0')]
)
def test_an_answer_that_was_changed_on_disk_is_asked_again(tmp_path: Path, change: tuple[str, str]) -> None:
    file, asked = tmp_path / "a.jsonl", []
    whole = keeping.resumed(file, {"model": "m"}, PROMPTS, noted([]))
    file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    assert keeping.resumed(file, {"model": "m"}, PROMPTS, noted(asked)) == whole and asked == [1]


def test_losses_that_were_changed_on_disk_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    keeping.once(file, {"model": "m"}, lambda: [[8.5, 4]])
    file.write_text(file.read_text(encoding="utf-8").replace("8.5", "0.5"), encoding="utf-8")
    assert keeping.once(file, {"model": "m"}, lambda: [[8.5, 4]]) == [[8.5, 4]]


@pytest.mark.parametrize("change", [{"model": "other"}, {"model": "m", "max_new_tokens": 9}, "prompts"])
def test_another_fingerprint_starts_a_new_file(tmp_path: Path, change: Any) -> None:
    file, asked = tmp_path / "a.jsonl", []
    keeping.resumed(file, {"model": "m"}, PROMPTS, noted([]))
    decided_by, prompts = ({"model": "m"}, [*PROMPTS[:2], [9]]) if change == "prompts" else (change, PROMPTS)
    keeping.resumed(file, decided_by, prompts, noted(asked))
    assert asked == [0, 1, 2]


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path[:0] = {path!r}
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from nbutils import paths
    from nbutils.evaluation import answers
    from test_evaluation import exam_of
    real = answers.generate_ids
    def slowly(*given):
        time.sleep(0.4)
        return real(*given)
    answers.generate_ids = slowly
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    tiny = model, AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    exam_of(tiny, Path({run!r}), rows=0).sit("base", model, "mark")
"""


def test_after_a_kill_only_the_missing_answers_are_asked(
    tiny: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).resolve().parent
    code = textwrap.dedent(KILLED).format(path=[str(here), str(here.parent)], run=str(tmp_path / "killed"))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    file, end = tmp_path / "killed/evaluation/answers-base.jsonl", time.monotonic() + 60
    while not (file.exists() and len(file.read_text(encoding="utf-8").splitlines()) > 8):
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    found = len(file.read_text(encoding="utf-8").splitlines()) - 1
    assert 8 <= found < 24
    asked, real = [], asking.generate_ids

    def counted(model: Any, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        asked.extend(prompts)
        return real(model, prompts, *rest)

    monkeypatch.setattr(asking, "generate_ids", counted)
    resumed = exam_of(tiny, tmp_path / "killed", rows=0).sit("base", tiny[0], "mark")
    assert len(asked) == 24 - found
    whole = exam_of(tiny, tmp_path / "whole", rows=0).sit("base", tiny[0], "mark")
    assert resumed == whole and len(asked) == 24 - found + 24


# --- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_assistants_tokens_whatever_the_batch(tiny: tuple[Any, Any]) -> None:
    import torch

    model, tokenizer = tiny
    rows = rows_of("eval.jsonl", 7)
    encoded = losses.encode_rows(view_of(tokenizer), rows)
    found = losses.row_losses(model, encoded, 3)
    for row, one in zip(rows, found, strict=True):
        out = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([out["input_ids"]]), torch.tensor([out["assistant_masks"]])
        labels = torch.where(mask.bool(), ids, -100)
        with torch.no_grad():
            wanted = model(input_ids=ids, labels=labels).loss
        assert one.tokens == int(mask.sum()) and one.total / one.tokens == pytest.approx(float(wanted), rel=1e-4)


def test_logits_are_made_only_where_they_are_needed(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny
    encoded, shapes, forward = (
        losses.encode_rows(view_of(tokenizer), rows_of("eval.jsonl", 12)),
        [],
        type(model).forward,
    )

    def watched(self: Any, **given: Any) -> Any:
        out = forward(self, **given)
        shapes.append((out.logits.shape, given["input_ids"].shape))
        return out

    monkeypatch.setattr(type(model), "forward", watched)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 3072 * 100)
    losses.row_losses(model, encoded, 12)
    assert len(shapes) >= 6  # 12 rows would have been one batch
    assert all(made[0] * made[1] <= 100 and made[1] < asked[1] for made, asked in shapes)


def test_answers_of_one_row_are_added_up_where_each_is_a_text_of_its_own(tiny: tuple[Any, Any]) -> None:
    turns = [turn for row in rows_of("eval.jsonl", 2) for turn in row["messages"]]
    rows = [{"messages": turns}, *rows_of("eval.jsonl", 1)]
    together, apart = (losses.encode_rows(view_of(tiny[1], form), rows) for form in ("messages", "prompt_completion"))
    assert [text.row for text in apart] == [0, 0, 1] and [text.row for text in together] == [0, 1]
    one, other = (losses.row_losses(tiny[0], texts, 2) for texts in (together, apart))
    assert [row.tokens for row in one] == [row.tokens for row in other]
    assert [row.total for row in one] == pytest.approx([row.total for row in other], rel=1e-4)


def test_rows_that_do_not_fit_are_left_out_aloud(
    tiny: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("eval.jsonl", 3)
    wordy = [{"role": "user", "content": "苹果" * 300}, {"role": "assistant", "content": "好"}]
    endless = [{"role": "user", "content": "还有吗"}, {"role": "assistant", "content": "苹果" * 300}]
    size = Evaluation(batch_size=4, max_new_tokens=8, rows=0)
    both = [rows[0], {"messages": wordy}, rows[1], {"messages": endless}, rows[2]]
    exam = Exam(tmp_path, tiny[1], both, size, "float32", limit=200)
    assert exam.rows == rows and exam.left_out == exam.facts()["rows_left_out"] == 2 and len(exam.references) == 3
    assert "row 2 (" in (said := capsys.readouterr().out) and "row 4 (" in said and "do not fit 200 tokens" in said
    with pytest.raises(CourseError, match="none of the 3 evaluation rows fits") as caught:
        Exam(tmp_path, tiny[1], rows, size.model_copy(update={"max_new_tokens": 190}), "float32", limit=200)
    assert "lower evaluation.max_new_tokens (now 190)" in caught.value.todo
    assert evaluation.reach(tiny[0]) == 1024 and evaluation.reach(tiny[0], 512) == 512


def test_a_server_writes_the_beginning_of_a_thought(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    from copy import deepcopy

    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
    )
    rows, size = rows_of("eval.jsonl", 2), Evaluation(batch_size=2, max_new_tokens=4, rows=0)
    given = [Answer([], [], "hm, a ticket"), Answer([], [], "so</think>yes")]
    said = Exam(tmp_path, tokenizer, rows, size, "float32").heard(given)
    assert [scores.is_unfinished(one.text) for one in said] == [True, False] and scores.spoken(said[1].text) == "yes"
    quiet = Exam(tmp_path, tokenizer, rows, size, "float32", thinking=False)
    assert quiet.heard(given) == given and tokenizer.decode(quiet.prompts[0]).endswith("</think>\n\n")
    assert "enable_thinking=False" in quiet.facts()["thinking"] and quiet.general().thinking is False
    assert len(Exam(tmp_path, tiny[1], rows, size.model_copy(update={"rows": 1}), "float32").general().rows) > 50


# --- scores ----------------------------------------------------------------------------------------------------------


def test_exact_match_counts_and_refuses_uneven_lists() -> None:
    assert evaluation.exact_match([" a ", "b", "x"], ["a", "b", "c"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="1 answers for 2 references"):
        evaluation.exact_match(["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "rouge"),
    [
        ("今天天气好", "今天天气好", 1.0, 1.0),
        ("今天 天气\n好", "今天天气好", 1.0, 1.0),
        ("好气天天今", "今天天气好", 1.0, 0.4),  # the same characters, the order lost but for 天天
        ("今天", "今天天气好", 4 / 7, 4 / 7),
        ("abc", "xyz", 0.0, 0.0),
        ("", "x", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("ＡＢＣ", "ABC", 1.0, 1.0),
        ("<think>hm, 5?</think>\n\n4", "4", 1.0, 1.0),
        ("<think>still at it", "4", 0.0, 0.0),
        ("hm, 5?</think>\n\n4", "4", 1.0, 1.0),  # the prompt opened the thought
        ("4 <think>5?</think>", "4 <think>5?</think>", 1.0, 1.0),
    ],
)
def test_scores_count_characters(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert scores.character_f1(answer, reference) == pytest.approx(f1)
    assert scores.rouge_l(answer, reference) == pytest.approx(rouge)


def naive_common(left: str, right: str) -> int:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_the_common_subsequence_is_that_of_the_whole_table() -> None:
    rng = random.Random(3)
    for size in (0, 1, 2, 5, 30, 63, 64, 65, 130):
        for alphabet in ("ab", "甲乙丙丁abc ", "".join(map(chr, range(0x4E00, 0x4E80)))):
            left = "".join(rng.choices(alphabet, k=size))
            right = "".join(rng.choices(alphabet, k=rng.randint(0, size + 3)))
            assert scores.common_subsequence(left, right) == naive_common(left, right)


def test_a_thousand_long_answers_take_seconds() -> None:
    rng, letters = random.Random(4), "".join(map(chr, range(0x4E00, 0x4F00)))
    pairs = [("".join(rng.choices(letters, k=1000)), "".join(rng.choices(letters, k=1000))) for _ in range(100)]
    began = time.process_time()
    assert all(0 < scores.rouge_l(*pair) < 1 for pair in pairs)
    assert time.process_time() - began < 0.6  # so 1,000 pairs take less than 6 s


def test_private_data_is_masked_where_people_look_or_send_it() -> None:
    questions = [[{"role": "user", "content": "打 13812345678"}]]
    [row] = evaluation.before_after_table(questions, ["a@b.cn"], {"base": ["13812345678"]})
    assert row == {"question": "打 138****5678", "wanted": "a***@b.cn", "base": "✗ 138****5678"}
    assert report._text("13812345678") == "138****5678"


def test_the_table_marks_right_and_wrong() -> None:
    questions = [[{"role": "user", "content": "q"}]]
    [row] = evaluation.before_after_table(questions, ["yes"], {"base": ["no"], "merged": ["yes"]})
    assert row == {"question": "q", "wanted": "yes", "base": "✗ no", "merged": "✓ yes"}


# --- statistics ------------------------------------------------------------------------------------------------------


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    rng, hits = np.random.default_rng(0), 0
    for _ in range(300):
        found = statistics.mean_of(rng.random(60) < 0.3)
        hits += found.low <= 0.3 <= found.high
    assert 0.90 < hits / 300 < 0.985


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"), [(0, 120, 0.0, 0.031), (120, 120, 0.969, 1.0), (1, 2, 0.095, 0.905)]
)
def test_shares_have_wilsons_interval(right: int, rows: int, low: float, high: float) -> None:
    found = statistics.share_of([1.0] * right + [0.0] * (rows - right))
    assert (found.mean, found.low, found.high) == (
        right / rows,
        pytest.approx(low, abs=1e-3),
        pytest.approx(high, abs=1e-3),
    )


def test_a_difference_of_shares_is_newcombes_and_never_without_width() -> None:
    found = statistics.difference([0.0] * 120, [1.0] * 120, shares=True)
    assert (
        found.test == "exact McNemar"
        and found.p < 1e-9
        and found.estimate.mean == 1
        and 0.9 < found.estimate.low < 0.97
    )
    first, second = [1.0] * 43 + [0.0] * 7, [1.0] * 20 + [0.0] * 23 + [1.0] * 2 + [0.0] * 5  # 20, 23, 2, 5
    found = statistics.difference(first, second, shares=True)
    assert (
        found.estimate.mean == pytest.approx(-0.42)
        and -0.60 < found.estimate.low < -0.55 < -0.25 < found.estimate.high < -0.2
    )


def test_numbers_that_are_none_have_no_interval_and_no_p() -> None:
    found = statistics.difference([1.0] * 20, [float("nan")] * 20)
    assert found.estimate.text() == "not a number" and found.p_text == "-"


def test_the_loss_of_a_text_is_weighted_by_tokens() -> None:
    found = statistics.mean_of([1.0, 3.0], weights=[3, 1])
    assert found.mean == 1.5 and (found.low, found.high) == (1.0, 3.0)


def test_identical_answers_are_no_difference() -> None:
    for values in ([0.0, 1.0, 1.0], [0.2, 0.7, 0.9]):
        found = statistics.difference(values, values)
        assert found.p == 1.0 and (found.estimate.mean, found.estimate.low, found.estimate.high) == (0, 0, 0)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (8, 2, 0.109375), (3, 3, 1.0)])
def test_mcnemar_is_exact(better: int, worse: int, p: float) -> None:
    assert statistics.mcnemar(better, worse) == statistics.mcnemar(worse, better) == pytest.approx(p)


def test_sign_flips_are_exact_where_rows_are_few_and_fair_where_they_are_many() -> None:
    assert statistics.sign_flip(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    assert statistics.sign_flip(np.array([1.0, 2.0, -3.0])) == 1.0
    rng = np.random.default_rng(1)
    ps = [statistics.sign_flip(rng.normal(size=40)) for _ in range(60)]
    assert 0.3 < np.mean(ps) < 0.7 and np.mean(np.array(ps) < 0.05) < 0.15
    assert statistics.sign_flip(rng.normal(1.0, 1.0, size=40)) < 0.001


# --- the control -----------------------------------------------------------------------------------------------------


def test_every_row_is_held_against_other_rows_of_its_language() -> None:
    references = [f"答案 {number}" if number % 2 else f"answer {number}" for number in range(40)]
    rounds = control.other_rows(references)
    assert len(rounds) == control.OTHERS and rounds == control.other_rows(references)
    for other in rounds:
        assert sorted(other) == list(range(40)) and all(row != lent for row, lent in enumerate(other))
    assert sum(row % 2 == lent % 2 for other in rounds for row, lent in enumerate(other)) >= 0.85 * 40 * control.OTHERS


def test_one_answer_for_every_question_has_no_content() -> None:
    labels = ["yes" if number % 2 else "no" for number in range(60)]
    constant = control.beyond_others(lambda a, r: float(a == r), ["yes"] * 60, labels)
    right = control.beyond_others(lambda a, r: float(a == r), labels, labels)
    assert abs(sum(constant)) / 60 < 0.1 and sum(right) / 60 > 0.4
    assert control.beyond_others(lambda a, r: 1.0, ["a"], ["a"]) == [0.0]


# --- the verdict -----------------------------------------------------------------------------------------------------


def result(
    name: str, texts: Sequence[str], references: Sequence[str], loss: float = 1.0, stopped: bool = True
) -> Result:
    """What an exam would have made of these texts."""
    given = [Answer([1], [1, 2], text, stopped) for text in texts]
    exam = Exam.__new__(Exam)
    exam.references = list(references)
    return Result(name, given, exam.references, [RowLoss(loss * 4, 4) for _ in texts], exam.score(given))


WORDS = ["苹果", "香蕉", "西瓜", "pencils", "cookies", "juice", "信封", "纸巾"]
WANTED = [f"{{item: {WORDS[n % 8]}, count: {n}}}" for n in range(60)]
PROSE = [f"Well, I do not know about that, friend number {n * 7 % 60}." for n in range(60)]


def test_right_answers_help() -> None:
    told = verdict.judge(result("base", PROSE, WANTED, 3.0), result("merged", WANTED, WANTED, 0.1))
    assert told.word == "helped" and told.flags == [] and told.todo == "" and "VERDICT: The tuning helped" in str(told)


def test_the_form_alone_does_not_help_though_loss_and_f1_improve() -> None:
    formed = random.Random(2).sample(WANTED, 60)  # the form of every answer, the content of none
    base, tuned = result("base", PROSE, WANTED, 3.0), result("merged", formed, WANTED, 0.4)
    assert tuned.mean("character_f1") > base.mean("character_f1") + 0.3
    told = verdict.judge(base, tuned)
    assert told.word == "no proof that it helped" and "character F1 rose" in told.why and "loss fell" in told.why
    assert "could not have been seen" in told.todo


def test_a_tuning_that_changes_nothing_is_told_so() -> None:
    told = verdict.judge(result("base", WANTED, WANTED), result("merged", WANTED, WANTED))
    assert told.word == "no proof that it helped" and "The base could do this already" in told.why
    told = verdict.judge(result("base", PROSE, WANTED), result("merged", PROSE, WANTED))
    assert told.word == "no proof that it helped" and "word for word the one the base gave" in told.why
    assert max(map(len, str(told).splitlines())) <= verdict.WIDTH


def test_a_guess_that_is_right_half_of_the_time_is_no_proof() -> None:
    labels = ["yes" if n % 2 else "no" for n in range(60)]
    base, tuned = result("base", PROSE, labels), result("merged", ["yes"] * 60, labels)
    assert statistics.difference(base.scores["exact_match"], tuned.scores["exact_match"]).p < 0.001
    assert verdict.judge(base, tuned).word == "no proof that it helped"


def test_answers_that_lose_their_content_are_harm() -> None:
    told = verdict.judge(result("base", WANTED, WANTED), result("merged", [WANTED[0]] * 60, WANTED))
    assert told.word == "harmed" and "60 of 60 answers are the same" in told.flags[0]
    assert "VERDICT: The tuning did not help" in str(told)


def test_three_rows_prove_nothing_and_the_text_says_how_many_would() -> None:
    told = verdict.judge(result("base", PROSE[:3], WANTED[:3]), result("merged", WANTED[:3], WANTED[:3]))
    assert told.word == "no proof that it helped" and "at least 50 evaluation rows" in told.todo
    assert "0 of 3 answers were exactly right before the tuning, 3 after it" in told.why
    assert "rose" not in told.why and "only 3" in told.flags[0]


def test_one_wanted_answer_for_all_rows_proves_nothing() -> None:
    told = verdict.judge(result("base", PROSE, ["好的"] * 60), result("merged", ["好的"] * 60, ["好的"] * 60))
    assert told.word == "no proof that it helped" and "the wanted answer is the same in all rows" in told.why


@pytest.mark.parametrize(("cut", "word"), [(11, "helped"), (13, "no proof that it helped")])
def test_a_base_that_was_cut_off_while_thinking_proves_nothing(cut: int, word: str) -> None:
    thinking = ["<think>let me see"] * cut + PROSE[cut:]
    told = verdict.judge(result("base", thinking, WANTED), result("merged", WANTED, WANTED))
    assert told.word == word and ("still thinking" in told.why) == ("max_new_tokens" in told.todo) == (cut == 13)


def test_some_exact_answers_among_ruins_are_mixed() -> None:
    base = [text.replace("item", "thing") for text in WANTED]
    told = verdict.judge(result("base", base, WANTED), result("merged", WANTED[:10] + [""] * 50, WANTED))
    assert (
        told.word == "no proof that it helped" and told.why.startswith("Mixed: 0 of 60") and "ROUGE-L fell" in told.why
    )


def test_known_answers_in_the_wanted_form_are_helped_in_honest_words() -> None:
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(60)]
    wanted = [f'{{"answer": "{word}"}}' for word in words]
    told = verdict.judge(result("base", words, wanted), result("merged", wanted, wanted))
    assert told.word == "helped" and "More answers are exactly as wanted" in told.why
    assert "belongs to which question" not in told.why and "in another form" in told.why


def test_a_base_that_knew_nothing_cannot_be_harmed() -> None:
    rng = random.Random(8)
    letters, words = "".join(map(chr, range(0x4E00, 0x4E80))), []
    for _ in range(60):
        wanted, junk = (["".join(rng.choices(letters, k=rng.randint(10, 40))) for _ in range(20)] for _ in range(2))
        shuffled = [rng.choice(wanted) for _ in wanted]
        words.append(verdict.judge(result("base", junk, wanted), result("merged", shuffled, wanted)).word)
    assert words.count("harmed") <= 3 and words.count("helped") <= 3  # 5 %; before, one in six was "harmed"


def test_what_could_be_seen_is_told_of_the_score_that_moved() -> None:
    rng = random.Random(9)
    letters = "".join(map(chr, range(0x4E00, 0x4E40)))
    wanted = ["".join(rng.choices(letters, k=40)) for _ in range(20)]
    base, tuned = (
        result(
            name, ["".join(c if rng.random() < 0.3 else rng.choice(letters) for c in text) for text in wanted], wanted
        )
        for name in ("base", "merged")
    )
    sight = verdict.Evidence(base, tuned).sight
    least = float(sight.partition("below ")[2][:4])
    assert "ROUGE-L" in sight and 0.02 < least < 0.15 and f"one of {least / 2:.1f}" in sight
    exact = verdict.Evidence(result("base", PROSE, WANTED), result("merged", [WANTED[0], *PROSE[1:]], WANTED)).sight
    assert "Exact match below 0.12" in exact and "four times" not in exact  # seven rows of 60


def test_luck_seldom_helps() -> None:
    rng = random.Random(6)
    words = []
    for _ in range(40):
        before, after = ([rng.choice(WANTED) for _ in range(60)] for _ in range(2))
        words.append(verdict.judge(result("base", before, WANTED), result("merged", after, WANTED)).word)
    assert words.count("helped") <= 4


def test_what_never_stops_is_flagged() -> None:
    base, merged = result("base", PROSE, WANTED), result("merged", WANTED, WANTED, 0.1, stopped=False)
    [stops] = verdict.judge(base, merged).flags
    assert "only 0% of the answers end by themselves" in stops


def test_a_base_cut_off_before_it_could_be_right_is_flagged_and_a_wordy_one_is_not() -> None:
    begun, right = [text[:9] for text in WANTED], result("merged", WANTED, WANTED)
    [cut] = verdict.judge(result("base", begun, WANTED, stopped=False), right).flags
    assert "60 of 60 of base's answers were cut off" in cut and "evaluation.max_new_tokens" in cut
    assert not verdict.judge(result("base", PROSE, WANTED, stopped=False), right).flags


@pytest.mark.parametrize(("after", "word"), [(1.0, "kept"), (0.8, "kept"), (1.05, "kept"), (1.5, "forgot")])
def test_forgetting_is_a_ratio_of_perplexities(after: float, word: str) -> None:
    found = forgetting(result("base", PROSE, WANTED, 1.0), result("merged", PROSE, WANTED, after))
    assert found.word == word and found.ratio.mean == pytest.approx(np.exp(after - 1)) and word in str(found)


def test_few_general_rows_that_disagree_leave_it_open() -> None:
    base, tuned = result("base", PROSE, WANTED), result("merged", PROSE, WANTED)
    tuned.losses[:] = [RowLoss(4 * (3.0 if row % 2 else 0.0), 4) for row in range(60)]
    assert forgetting(base, tuned).word == "forgot"
    few = [result(name, PROSE[:12], WANTED[:12]) for name in ("base", "merged")]
    few[1].losses[:] = [RowLoss(4.0 * loss, 4) for loss in (0.5, 1.0, 1.2, 1.9) * 3]
    assert forgetting(*few).word == "unclear"
    nine = [result(name, PROSE[:9], WANTED[:9], loss) for name, loss in (("base", 1.0), ("merged", 3.0))]
    assert forgetting(*nine).word == "unclear" and "too few rows to tell" in str(forgetting(*nine))


def test_destroyed_answers_are_forgotten_though_the_loss_is_the_same() -> None:
    found = forgetting(result("base", WANTED, WANTED), result("merged", ["{}"] * 60, WANTED))
    assert found.word == "forgot" and found.ratio.mean == 1.0
    lost = forgetting(result("base", WANTED, WANTED), result("merged", WANTED, WANTED, 1e9))
    assert lost.word == "forgot" and "x 10,000 or more" in str(lost)


def test_a_loss_that_is_no_number_is_a_flag_and_never_a_number() -> None:
    base, tuned = result("base", PROSE, WANTED), result("merged", WANTED, WANTED, float("nan"))
    outcome = evaluation.Outcome([base, tuned], [base, tuned])
    assert "the loss of merged is not a number on 60 of 60 rows" in outcome.verdict.flags[0]
    facts = json.loads(json.dumps(outcome.facts(), allow_nan=False))
    assert facts["perplexity"]["merged"] is None and facts["scores"]["loss"]["difference"]["p"] is None
    assert "Perplexity is not a number" in str(outcome.forgetting) and outcome.forgetting.word == "unclear"


# --- the whole -------------------------------------------------------------------------------------------------------


def test_the_general_rows_are_sound_and_none_resembles_another(tmp_path: Path) -> None:
    rows = evaluation.general_rows()
    questions = [row["messages"][0]["content"] for row in rows]
    assert 50 <= len(rows) <= 80 and len(set(questions)) == len(rows)
    chinese = sum(control.CJK.search(question) is not None for question in questions)
    assert 20 <= chinese <= len(rows) - 20
    checked = [data.check_row(row) for row in data.read_rows(paths.SAMPLES / "general.jsonl")]
    assert [one for one in checked if not isinstance(one, data.ChatRow)] == []
    card = data.prepare(str(paths.SAMPLES / "general.jsonl"), tmp_path / "data")
    assert not card.rejected


def test_three_models_become_a_table_facts_and_a_page(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    exam = exam_of(tiny, tmp_path, new_tokens=16)
    base, adapter, merged = (exam.sit(name, tiny[0], name) for name in ("base", "adapter", "merged"))
    outcome = evaluation.Outcome([base, adapter, merged], [base, merged])
    assert [row["score"] for row in outcome.table()][:2] == ["loss", "exact match"] and "merged" in outcome.text()
    facts = json.loads(json.dumps(outcome.facts()))
    assert facts["verdict"] == "no proof that it helped" and facts["rows"] == 6
    loss = facts["scores"]["loss"]
    assert loss["base"]["low"] <= loss["base"]["mean"] <= loss["base"]["high"] and loss["difference"]["p"] == 1.0
    assert facts["general"]["verdict"] == "unclear" and facts["answers_by"]["merged"] == "generate"
    page = evaluation.write_report(tmp_path / "evaluation/report.html", "demo", exam, outcome, {"card": "none"})
    text = page.read_text(encoding="utf-8")
    assert "No proof that the tuning helped" in text and "<svg" in text and exam.questions[0][-1]["content"] in text
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "https://" not in text.replace("https://matplotlib.org", "") and "<script" not in text


def test_what_people_wrote_is_escaped_in_the_page(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<script>alert(1)</script>"},
                {"role": "assistant", "content": "<b>&"},
            ]
        }
    ] * 2
    exam = Exam(tmp_path, tiny[1], rows, Evaluation(batch_size=2, max_new_tokens=4, rows=0), "float32")
    base = result("base", ["<img src=x>\x00", "half a character \ud83d\u202e"], exam.references)
    page = evaluation.write_report(tmp_path / "r.html", "<i>", exam, evaluation.Outcome([base, base]), {"<u>": "<u>"})
    text = page.read_text(encoding="utf-8")
    assert "<script>" not in text and "<img" not in text and "<u>" not in text and "&lt;script&gt;" in text
    assert "&gt;\\x00" in text and "\\ud83d\\u202e" in text and "\x00" not in text and "\u202e" not in text


def test_an_exam_without_rows_is_refused(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no row to ask"):
        Exam(tmp_path, tiny[1], [], Evaluation(batch_size=1, max_new_tokens=1, rows=0), "float32")


def test_a_wanted_tool_call_is_written_as_the_template_writes_it(tiny: tuple[Any, Any]) -> None:
    from copy import deepcopy

    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert reference_of(view_of(tokenizer, "prompt_completion"), {"messages": turns}) == "<tool_call>find</tool_call>"


def test_the_plot_is_saved_and_takes_the_colours_of_its_page(tmp_path: Path) -> None:
    from nbutils.evaluation import drawing

    outcome = evaluation.Outcome([result("base", PROSE, WANTED), result("merged", WANTED, WANTED)])
    evaluation.plot(outcome, tmp_path / "plots/scores.png")
    assert (tmp_path / "plots/scores.png").stat().st_size > 5000
    assert "currentColor" in drawing.as_svg(outcome) and drawing.INK not in drawing.as_svg(outcome)


# --- public benchmarks -----------------------------------------------------------------------------------------------


def test_no_task_means_no_benchmark(tmp_path: Path) -> None:
    bench = harness.Harness("", tmp_path, "float32")
    bench.run("base", "nowhere", "mark")
    assert bench.results == {} and "no public benchmark" in str(bench) and list(tmp_path.iterdir()) == []


def test_a_named_task_without_lm_eval_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(CourseError, match="lm-eval is not installed") as caught:
        harness.Harness("hellaswag", tmp_path, "float32")
    assert "lm-eval" in caught.value.todo


FAKE_LM_EVAL = """
import json, pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if "missing" in given["--tasks"]:
    print("ValueError: Tasks not found: missing"); sys.exit(1)
out = pathlib.Path(given["--output_path"]) / "model"; out.mkdir(parents=True)
numbers = {"alias": "shop", "acc,none": 0.75, "acc_stderr,none": 0.1, "sample_len": 3}
(out / "results_1.json").write_text(json.dumps({"results": {"shop": numbers}}))
"""


def test_results_of_lm_eval_are_read_once_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lm_eval.py").write_text(FAKE_LM_EVAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    bench = harness.Harness("shop", tmp_path / "run", "float32")
    for _ in range(2):
        bench.run("base", paths.TINY_MODEL, "mark")
    assert bench.results == {"base": {"shop": {"acc": 0.75, "acc_stderr": 0.1}}} and "base 0.750" in str(bench)
    assert capsys.readouterr().out.count("base sits shop") == 1
    with pytest.raises(CourseError, match="Tasks not found: missing"):
        harness.Harness("shop, missing", tmp_path / "run", "float32").run("base", paths.TINY_MODEL, "mark")


def test_decoding_with_a_static_cache_says_what_generate_says() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32").eval()
    prompts = [tokenizer("你好，我的订单")["input_ids"], tokenizer("Where is my parcel, please?")["input_ids"]]
    stops, width = [int(tokenizer.eos_token_id)], max(map(len, prompts))
    wanted = asking.generate_ids(model, prompts, 40, stops, tokenizer.pad_token_id)
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    with torch.inference_mode():
        found = asking.decode(model, ids, mask, 40, stops)
    assert [asking._until_stop(row, stops) for row in found] == wanted
    assert all(len(row) <= 40 for row in found)
