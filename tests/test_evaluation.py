"""evaluation: answers that survive a kill, scores that are right, and a verdict that tells content from form."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import refused

from nbutils import chat, data, evaluation, paths
from nbutils.config import Evaluation
from nbutils.evaluation import exam as exams
from nbutils.evaluation import harness, inference, metrics, report, stats, verdict
from nbutils.evaluation.inference import Answer, RowLoss

Tiny = tuple[Any, Any]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(paths.TINY_MODEL)


def rows_of(name: str, limit: int | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (paths.SAMPLES / name).read_text(encoding="utf-8").splitlines()[:limit]]


def exam_of(tokenizer: Any, run: Path, rows: Any = 6, new_tokens: int = 8, count: int = 0, **more: Any) -> Any:
    rows = rows_of("eval.jsonl", rows) if isinstance(rows, int) else rows
    size = Evaluation(batch_size=4, max_new_tokens=new_tokens, rows=count)
    return evaluation.Exam(run, tokenizer, rows, size, "float32", **more)


def test_an_answer_is_the_same_alone_in_a_batch_and_with_a_static_cache(tiny: Tiny) -> None:
    model, tokenizer = tiny
    questions, references = evaluation.questions_of(rows_of("eval.jsonl", 5))
    assert all(turns[-1]["role"] == "user" for turns in questions) and all(references)
    alone = evaluation.generate(model, tokenizer, questions, max_new_tokens=40, batch_size=1)
    together = evaluation.generate(model, tokenizer, questions, max_new_tokens=40, batch_size=5)
    stops = sorted(chat.find_stop_ids(tokenizer, model.generation_config))
    assert alone == together and all(answer.stopped and answer.token_ids[-1] in stops for answer in alone)
    [cut] = evaluation.generate(model, tokenizer, questions[:1], max_new_tokens=3, batch_size=1)
    assert not cut.stopped and cut.token_ids == alone[0].token_ids[:3]
    ids, mask = inference.padded([answer.prompt_ids for answer in alone], 0, "cpu", left=True)
    with torch.inference_mode():
        found = inference.decode(model, ids, mask, 40, stops)
    assert [inference._until_stop(row, stops) for row in found] == [answer.token_ids for answer in alone]


def test_the_longest_questions_are_asked_first(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    monkeypatch.setattr(
        inference,
        "generate_ids",
        lambda _, prompts, *rest: widths.append(max(map(len, prompts))) or [[2]] * len(prompts),
    )
    evaluation.generate(*tiny, evaluation.questions_of(rows_of("eval.jsonl", 12))[0], 4, 3)
    assert len(widths) == 4 and widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


def test_out_of_memory_halves_the_batch_and_other_errors_are_not_hidden() -> None:
    tried: list[int] = []

    def work(batch: Sequence[int]) -> list[int]:
        tried.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return [10 * number for number in batch]

    assert dict(inference.in_batches(range(7), 7, work)) == {number: 10 * number for number in range(7)}
    assert tried == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes do not match")):

        def fails(batch: Sequence[int], error: Exception = error) -> list[int]:
            raise error

        with pytest.raises(type(error), match=str(error)):
            list(inference.in_batches([1, 2], 2, fails))


def test_a_gpu_takes_as_many_rows_as_its_free_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Qwen2.5-7B on an H200, on a T4 in 4 bits, and on a CPU, where nothing is planned."""
    sizes = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
             "intermediate_size": 18944}  # fmt: skip
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))

    def rows(device: str, free_gib: float, tokens: int = 256) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free_gib * 2**30), 0), raising=False)
        model = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=config)
        return inference.fitting_batch(model, 200 + tokens, 256)

    assert (rows("cuda", 120), rows("cuda", 0.01), rows("cpu", 0.01)) == (256, 1, 256)
    assert 30 < rows("cuda", 8) < rows("cuda", 8, tokens=64) < 120


def test_an_answer_gets_the_tokens_the_references_need(tiny: Tiny, tmp_path: Path) -> None:
    def tokens(most: int, tokenizer: Any = tiny[1], **more: Any) -> int:
        return exam_of(tokenizer, tmp_path, **{"rows": 8, **more}, new_tokens=most).max_new_tokens

    longest = max(len(tiny[1](one).input_ids) for one in evaluation.questions_of(rows_of("eval.jsonl", 8))[1])
    assert tokens(512) == tokens(512, count=1) == int(1.5 * longest) > 32 and tokens(8) == 8
    short = [{"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}]
    assert tokens(512, rows=short) == 32
    thoughtful = deepcopy(tiny[1])
    thoughtful.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert tokens(512, thoughtful) == 512 and tokens(512, thoughtful, thinking=False) < 512


def test_rows_that_do_not_fit_are_left_out_and_named(tiny: Tiny, tmp_path: Path, capsys: Any) -> None:
    rows, long = rows_of("eval.jsonl", 3), "苹果" * 300
    wordy = [{"role": "user", "content": long}, {"role": "assistant", "content": "好"}]
    endless = [{"role": "user", "content": "还有吗"}, {"role": "assistant", "content": long}]
    exam = exam_of(
        tiny[1], tmp_path, [rows[0], {"messages": wordy}, rows[1], {"messages": endless}, rows[2]], limit=200
    )
    assert exam.rows == rows and exam.left_out == exam.facts()["rows_left_out"] == 2 and len(exam.references) == 3
    assert "row 2 (" in (said := capsys.readouterr().out) and "row 4 (" in said
    with refused("evaluation.no_row_fits", rows=3, limit=200, new_tokens=190):
        exam_of(tiny[1], tmp_path, rows, 190, limit=200)
    with refused("evaluation.no_rows"):
        exam_of(tiny[1], tmp_path, [])
    assert evaluation.reach(tiny[0]) == 1024 and evaluation.reach(tiny[0], 512) == 512


def test_the_thinking_that_a_prompt_opens_is_seen_as_such(tiny: Tiny, tmp_path: Path) -> None:
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
    )
    given = [Answer([], [], "hm, a ticket"), Answer([], [], "so</think>yes")]
    said = exam_of(tokenizer, tmp_path, 2).with_think_tag(given)
    assert [metrics.is_unfinished(one.text) for one in said] == [True, False]
    assert metrics.without_thinking(said[1].text) == "yes"
    quiet = exam_of(tokenizer, tmp_path, 2, thinking=False)
    assert quiet.with_think_tag(given) == given and tokenizer.decode(quiet.prompts[0]).endswith("</think>\n\n")
    assert "enable_thinking=False" in quiet.facts()["thinking"] and quiet.general().thinking is False
    assert len(exam_of(tiny[1], tmp_path, 2, count=1).general().rows) > 50


def test_a_wanted_tool_call_is_written_as_the_template_writes_it(tiny: Tiny) -> None:
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    view = chat.View(tokenizer, "prompt_completion")
    assert exams.reference_of(view, {"messages": turns}) == "<tool_call>find</tool_call>"


PROMPTS = [[1], [1, 2], [1, 2, 3]]


def ask_into(asked: list[int]) -> exams.Ask:
    def ask(prompts: dict[int, list[int]]) -> Any:
        for number, prompt in prompts.items():
            asked.append(number)
            yield number, Answer(prompt, [7, number], f"答案 {number}\u2028\x85", number != 1)

    return ask


CHANGES = [("答案 1", "答案 2"), ("[7, 1]", "[7, 2]"), ("false", "true"), ('"row": 1', '"row": 0')]


@pytest.mark.parametrize(("change", "missing"), [(None, []), ("torn", [2]), *((change, [1]) for change in CHANGES)])
def test_answers_are_asked_once_and_what_was_torn_or_changed_again(tmp_path: Path, change: Any, missing: Any) -> None:
    file, asked = tmp_path / "a.jsonl", list[int]()
    whole = exams.resume_answers(file, {"model": "m"}, PROMPTS, ask_into([]))
    if change == "torn":
        file.write_bytes(file.read_bytes()[:-20])
    elif change:
        file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    for _ in range(2):
        assert exams.resume_answers(file, {"model": "m"}, PROMPTS, ask_into(asked)) == whole
    assert asked == missing and [one.stopped for one in whole] == [True, False, True]


@pytest.mark.parametrize(
    ("decided_by", "prompts"),
    [({"model": "x"}, PROMPTS), ({"model": "m", "dtype": 9}, PROMPTS), ({"model": "m"}, [*PROMPTS[:2], [9]])],
)
def test_another_fingerprint_starts_a_new_file(tmp_path: Path, decided_by: Any, prompts: Any) -> None:
    asked: list[int] = []
    exams.resume_answers(tmp_path / "a.jsonl", {"model": "m"}, PROMPTS, ask_into([]))
    exams.resume_answers(tmp_path / "a.jsonl", decided_by, prompts, ask_into(asked))
    assert asked == [0, 1, 2]


KILLED = """
import sys, time
from pathlib import Path
from nbutils.evaluation import exam
from nbutils.evaluation.inference import Answer
def ask(prompts):
    for number, prompt in prompts.items():
        time.sleep(0.05)
        yield number, Answer(prompt, [number], str(number))
exam.resume_answers(Path(sys.argv[1]), {}, [[n] for n in range(200)], ask)
"""


def test_after_a_kill_only_the_missing_answers_are_asked(tmp_path: Path) -> None:
    file, end = tmp_path / "a.jsonl", time.monotonic() + 60
    child = subprocess.Popen([sys.executable, "-c", KILLED, file], env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    while not (file.exists() and len(file.read_text(encoding="utf-8").splitlines()) > 8):
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    prompts = [[number] for number in range(200)]
    kept = exams.stored_answers(file, {}, prompts)
    asked: list[int] = []
    exams.resume_answers(file, {}, prompts, ask_into(asked))
    assert len(kept) >= 8 and asked == sorted(set(range(200)) - set(kept))


def test_losses_that_were_changed_on_disk_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    exams.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]])
    assert exams.stored_once(file, {"model": "m"}, lambda: []) == [[8.5, 4]]
    file.write_text(file.read_text(encoding="utf-8").replace("8.5", "0.5"), encoding="utf-8")
    assert exams.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]]) == [[8.5, 4]]


def test_the_loss_is_that_of_the_assistants_tokens_whatever_the_batch(tiny: Tiny, monkeypatch: Any) -> None:
    (model, tokenizer), rows = tiny, rows_of("eval.jsonl", 7)
    shapes, forward = list[tuple[Any, Any]](), type(model).forward

    def watched(self: Any, **given: Any) -> Any:
        out = forward(self, **given)
        shapes.append((out.logits.shape, given["input_ids"].shape))
        return out

    monkeypatch.setattr(type(model), "forward", watched)
    monkeypatch.setattr(inference, "MAX_LOGITS", 3072 * 100)
    found = inference.row_losses(model, inference.encode_rows(chat.View(tokenizer, "messages"), rows), 7)
    assert len(shapes) >= 3  # 7 rows would have been one batch
    assert all(made[0] * made[1] <= 100 and made[1] < asked[1] for made, asked in shapes)  # logits where needed only
    monkeypatch.undo()
    for row, one in zip(rows, found, strict=True):
        out = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([out["input_ids"]]), torch.tensor([out["assistant_masks"]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=torch.where(mask.bool(), ids, -100)).loss
        assert one.tokens == int(mask.sum()) and one.total / one.tokens == pytest.approx(float(loss), rel=1e-4)


def test_answers_of_one_row_are_added_up_where_each_is_a_text_of_its_own(tiny: Tiny) -> None:
    turns = [turn for row in rows_of("eval.jsonl", 2) for turn in row["messages"]]
    rows = [{"messages": turns}, *rows_of("eval.jsonl", 1)]
    forms = [inference.encode_rows(chat.View(tiny[1], form), rows) for form in ("messages", "prompt_completion")]
    assert [[text.row for text in texts] for texts in forms] == [[0, 1], [0, 0, 1]]
    together, apart = (inference.row_losses(tiny[0], texts, 2) for texts in forms)
    assert np.allclose(together, apart, rtol=1e-4)


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "rouge"),
    [
        ("今天 天气\n好", "今天天气好", 1.0, 1.0),
        ("好气天天今", "今天天气好", 1.0, 0.4),  # the same characters, the order lost but for 天天
        ("今天", "今天天气好", 4 / 7, 4 / 7),
        ("abc", "xyz", 0.0, 0.0),
        ("", "x", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("ＡＢＣ", "ABC", 1.0, 1.0),
        ("<think>hm, 5?</think>\n\n4", "4", 1.0, 1.0),
        ("<think>still at it", "4", 0.0, 0.0),
        ("hm, 5?</think>\n\n4", "4", 1.0, 1.0),  # the prompt opened the thinking
        ("4 <think>5?</think>", "4 <think>5?</think>", 1.0, 1.0),
    ],
)
def test_scores_count_characters(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert metrics.character_f1(answer, reference) == pytest.approx(f1)
    assert metrics.rouge_l(answer, reference) == pytest.approx(rouge)


def test_exact_match_counts_and_refuses_uneven_lists() -> None:
    assert evaluation.exact_match([" a ", "b", "x"], ["a", "b", "c"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="1 answers for 2 references"):
        evaluation.exact_match(["a"], ["a", "b"])


def test_content_is_what_an_answer_scores_beyond_other_rows_of_its_language() -> None:
    references = [f"答案 {number}" if number % 2 else f"answer {number}" for number in range(40)]
    rounds = metrics.other_rows(references)
    assert len(rounds) == metrics.OTHERS and rounds == metrics.other_rows(references)
    assert all(
        sorted(other) == list(range(40)) and all(row != one for row, one in enumerate(other)) for other in rounds
    )
    assert sum(row % 2 == one % 2 for other in rounds for row, one in enumerate(other)) >= 0.85 * 40 * metrics.OTHERS
    labels = ["yes" if number % 2 else "no" for number in range(60)]
    constant, right = (metrics.content(metrics.exact, answers, labels) for answers in (["yes"] * 60, labels))
    assert abs(sum(constant)) / 60 < 0.1 and sum(right) / 60 > 0.4
    assert metrics.content(metrics.exact, ["a"], ["a"]) == [0.0]


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"), [(0, 120, 0.0, 0.031), (120, 120, 0.969, 1.0), (1, 2, 0.0945, 0.9055)]
)
def test_shares_have_wilsons_interval(right: int, rows: int, low: float, high: float) -> None:
    found = stats.share_interval([1.0] * right + [0.0] * (rows - right))
    assert vars(found) == {
        "mean": right / rows,
        "low": pytest.approx(low, abs=1e-4),
        "high": pytest.approx(high, abs=1e-4),
    }


def test_a_bootstrap_interval_covers_the_truth_as_often_as_it_says_and_is_seeded(monkeypatch: Any) -> None:
    assert vars(stats.mean_interval([1.0, 3.0], weights=[3, 1])) == {"mean": 1.5, "low": 1.0, "high": 3.0}
    monkeypatch.setattr(stats, "RESAMPLES", 400)
    rng, found = np.random.default_rng(0), list[stats.Estimate]()
    for _ in range(200):
        found.append(stats.mean_interval(drawn := rng.random(60) < 0.3))
        assert found[-1] == stats.mean_interval(drawn)
    assert 0.90 < sum(one.low <= 0.3 <= one.high for one in found) / 200 < 0.985


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (8, 2, 0.109375), (3, 3, 1.0)])
def test_shares_are_compared_by_mcnemar_and_newcombe(better: int, worse: int, p: float) -> None:
    before, after = [0.0] * better + [1.0] * (worse + 20), [1.0] * better + [0.0] * worse + [1.0] * 20
    found, reverse = (stats.paired_difference(*pair, shares=True) for pair in ((before, after), (after, before)))
    assert found.p == reverse.p == pytest.approx(p) and found.test == "exact McNemar"
    assert (
        found.estimate.low < found.estimate.mean < found.estimate.high and reverse.estimate.mean == -found.estimate.mean
    )


def test_newcombes_interval_is_that_of_the_paper() -> None:
    first, second = [1.0] * 43 + [0.0] * 7, [1.0] * 20 + [0.0] * 23 + [1.0] * 2 + [0.0] * 5  # 20, 23, 2, 5
    found = stats.paired_difference(first, second, shares=True).estimate
    assert found.mean == pytest.approx(-0.42) and -0.60 < found.low < -0.55 < -0.25 < found.high < -0.2


def test_sign_flips_are_exact_where_rows_are_few_and_fair_where_they_are_many() -> None:
    assert stats.sign_flip_test(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    assert stats.sign_flip_test(np.array([1.0, 2.0, -3.0])) == stats.sign_flip_test(np.zeros(9)) == 1.0
    rng = np.random.default_rng(1)
    ps = [stats.sign_flip_test(rng.normal(size=40)) for _ in range(60)]
    assert 0.3 < np.mean(ps) < 0.7 and np.mean(np.array(ps) < 0.05) < 0.15
    assert stats.sign_flip_test(rng.normal(1.0, 1.0, size=40)) < 0.001
    nothing = stats.paired_difference([1.0] * 20, [float("nan")] * 20)
    assert nothing.estimate.text() == "not a number" and nothing.p_text == "-" and nothing.facts()["p"] is None


def result(name: str, texts: Sequence[str], references: Sequence[str], loss: float = 1.0, stopped: bool = True) -> Any:
    """What an exam would have made of these texts."""
    given = [Answer([1], [1, 2], text, stopped) for text in texts]
    exam = evaluation.Exam.__new__(evaluation.Exam)
    exam.references = list(references)
    return evaluation.Result(name, given, exam.references, [RowLoss(loss * 4, 4) for _ in texts], exam.score(given))


def judge(base: Sequence[str], tuned: Sequence[str], wanted: Sequence[str], *losses: float) -> tuple[str, str]:
    """The case and the word of the verdict."""
    before, after = losses or (1.0, 1.0)
    pair = result("base", base, wanted, before), result("merged", tuned, wanted, after)
    found = verdict.judge(*pair)
    assert max(map(len, str(found).splitlines())) <= verdict.WIDTH and found.headline in str(found)
    return verdict.Evidence(*pair).case(), found.word


NO_PROOF = "no proof that it helped"
WORDS = ["苹果", "香蕉", "西瓜", "pencils", "cookies", "juice", "信封", "纸巾"]
WANTED = [f"{{item: {WORDS[n % 8]}, count: {n}}}" for n in range(60)]
PROSE = [f"Well, I do not know about that, friend number {n * 7 % 60}." for n in range(60)]
LABELS = ["yes" if n % 2 else "no" for n in range(60)]
LETTERS = ["".join(random.Random(n).choices("abcdefghij", k=6)) for n in range(60)]
THINKS = ["<think>let me see"] * 13
SHUFFLED = random.Random(2).sample(WANTED, 60)  # the form of every answer, the content of none


@pytest.mark.parametrize(
    ("case", "word", "base", "tuned", "wanted"),
    [
        ("helped", "helped", PROSE, WANTED, WANTED),
        ("helped", "helped", THINKS[:11] + PROSE[11:], WANTED, WANTED),
        ("cut_in_thinking", NO_PROOF, THINKS + PROSE[13:], WANTED, WANTED),
        ("no_proof", NO_PROOF, PROSE, SHUFFLED, WANTED),
        ("no_proof", NO_PROOF, PROSE, ["yes"] * 60, LABELS),  # right half of the time
        ("solved_before", NO_PROOF, WANTED, WANTED, WANTED),
        ("unchanged", NO_PROOF, PROSE, PROSE, WANTED),
        ("harmed", "harmed", WANTED, [WANTED[0]] * 60, WANTED),
        ("too_few_rows", NO_PROOF, PROSE[:3], WANTED[:3], WANTED[:3]),
        ("same_references", NO_PROOF, PROSE, ["好的"] * 60, ["好的"] * 60),
        ("mixed", NO_PROOF, [one.replace("item", "thing") for one in WANTED], WANTED[:10] + [""] * 50, WANTED),
        ("helped_in_form", "helped", LETTERS, [f'{{"answer": "{one}"}}' for one in LETTERS],
         [f'{{"answer": "{one}"}}' for one in LETTERS]),
    ],
)  # fmt: skip
def test_the_verdict(case: str, word: str, base: list[str], tuned: list[str], wanted: list[str]) -> None:
    assert judge(base, tuned, wanted) == (case, word)


def test_chance_seldom_helps_or_harms() -> None:
    rng, letters, words = random.Random(8), "".join(map(chr, range(0x4E00, 0x4E80))), list[str]()
    for _ in range(25):
        wanted, junk = (["".join(rng.choices(letters, k=rng.randint(10, 40))) for _ in range(20)] for _ in range(2))
        words += [judge(junk, [rng.choice(wanted) for _ in wanted], wanted)[1]]
        words += [judge(*([rng.choice(WANTED) for _ in range(60)] for _ in range(2)), WANTED)[1]]
    assert words.count("harmed") <= 4 and words.count("helped") <= 3  # 5 % of 50


def test_table_figure_and_verdict_show_one_interval_of_one_level() -> None:
    rng = random.Random(3)
    after = [one if rng.random() < 0.2 else prose for one, prose in zip(WANTED, PROSE, strict=True)]
    outcome = evaluation.Outcome([result("base", PROSE, WANTED), result("merged", after, WANTED)])
    exact = outcome.changes["exact_content"]
    shown = next(row for row in outcome.table() if row["score"] == "content (exact)")
    assert shown["difference"] in outcome.verdict.why and shown["p"] in outcome.verdict.why
    assert exact == verdict.Evidence(*outcome.results).changes["exact_content"]
    assert outcome.facts()["scores"]["exact_content"]["difference"]["low"] == exact.estimate.low
    assert f"{verdict.ALPHA:g}" in verdict.RULE and f"{stats.LEVEL:.0%}" in verdict.RULE
    almost = stats.Difference(stats.Estimate(0.1, 0.01, 0.2), 0.03, "")  # two scores were tried: 0.05 is shared
    assert (verdict.direction(almost), verdict.direction(stats.Difference(almost.estimate, 0.02, ""))) == (0, 1)


@pytest.mark.parametrize(
    ("base", "tuned", "flag"),
    [
        (result("base", PROSE, WANTED), result("merged", WANTED, WANTED, stopped=False), "only 0% of the answers end"),
        (
            result("base", [one[:9] for one in WANTED], WANTED, stopped=False),
            result("merged", WANTED, WANTED),
            "60 of 60",
        ),
        (result("base", PROSE, WANTED), result("merged", WANTED, WANTED, float("nan")), "not a number on 60 of 60"),
        (result("base", WANTED, WANTED), result("merged", [WANTED[0]] * 60, WANTED), "60 of 60 answers are the same"),
        (result("base", PROSE[:12], WANTED[:12]), result("merged", WANTED[:12], WANTED[:12]), "only 12"),
        (result("base", PROSE, WANTED, stopped=False), result("merged", WANTED, WANTED), ""),  # wordy, not cut
    ],
)
def test_what_looks_wrong_is_flagged(base: Any, tuned: Any, flag: str) -> None:
    flags = verdict.judge(base, tuned).flags
    assert len(flags) == bool(flag) and flag in "".join(flags)


def general(loss: float | list[float], texts: Sequence[str] = PROSE, rows: int = 60) -> Any:
    found = result("merged", texts[:rows], WANTED[:rows])
    losses = [loss] * rows if isinstance(loss, float) else loss
    found.losses[:] = [RowLoss(4 * one, 4) for one in losses]
    return found


@pytest.mark.parametrize(
    ("base", "tuned", "word"),
    [
        (general(1.0), general(1.05), "kept"),
        (general(1.0), general(1.5), "forgot"),
        (general(1.0), general([0.0, 3.0] * 30), "forgot"),
        (general(1.0, rows=12), general([0.5, 1.0, 1.2, 1.9] * 3, rows=12), "unclear"),
        (general(1.0, rows=9), general(3.0, rows=9), "unclear"),
        (general(1.0, WANTED), general(1.0, ["{}"] * 60), "forgot"),  # the answers are lost, the loss is not
        (general(1.0), general(1e9), "forgot"),
        (general(1.0), general(float("nan")), "unclear"),
    ],
)
def test_forgetting(base: Any, tuned: Any, word: str) -> None:
    found = verdict.forgetting(base, tuned)
    assert found.word == word and word in str(found)
    facts = evaluation.Outcome([base, tuned], [base, tuned]).facts()
    assert json.loads(json.dumps(facts, allow_nan=False))["general"]["verdict"] == word


def test_the_general_rows_are_sound_and_none_resembles_another(tmp_path: Path) -> None:
    questions = [row["messages"][0]["content"] for row in evaluation.general_rows()]
    chinese = sum(metrics.CJK.search(question) is not None for question in questions)
    assert 50 <= len(questions) <= 80 and 20 <= chinese <= len(questions) - 20
    assert not data.prepare(str(paths.SAMPLES / "general.jsonl"), tmp_path / "data").rejected


def test_an_exam_becomes_a_table_facts_a_page_and_a_figure(tiny: Tiny, tmp_path: Path) -> None:
    exam = exam_of(tiny[1], tmp_path, new_tokens=16)
    server = SimpleNamespace(engine="vllm", url="u", answers=lambda prompts, max_tokens: [
        (number, Answer(prompt, [1], "served")) for number, prompt in prompts.items()])  # fmt: skip
    base, merged = exam.sit("base", tiny[0], "base"), exam.sit("merged", tiny[0], "merged", server)
    assert merged.texts == ["served"] * 6 and (exam.folder / "answers-merged-served.jsonl").exists()
    assert [one.text for one in exam.kept("base", "base", paths.TINY_MODEL)] == base.texts == \
        [one.text for one in exam.generate(tiny[0])]  # fmt: skip
    outcome = evaluation.Outcome([base, base, merged], [base, merged])
    assert [row["score"] for row in outcome.table()][:2] == ["loss", "exact match"] and "merged" in outcome.text()
    facts = json.loads(json.dumps(outcome.facts()))
    assert facts["verdict"] == NO_PROOF and facts["rows"] == 6
    assert facts["answers_by"] == {"base": "generate", "merged": "vllm server"}
    page = evaluation.write_report(tmp_path / "evaluation/report.html", "demo", exam, outcome, {"card": "none"})
    text = page.read_text(encoding="utf-8")
    assert outcome.verdict.headline in text and "<svg" in text and exam.questions[0][-1]["content"] in text
    assert "currentColor" in text and report.INK not in text and "<script" not in text and verdict.RULE[:20] in text
    for host in ("http://www.w3.org", "http://purl.org", "http://creativecommons.org", "https://matplotlib.org"):
        text = text.replace(host, "")  # names of the SVG format, nothing that is loaded
    assert "http://" not in text and "https://" not in text
    evaluation.plot(outcome, tmp_path / "plots/scores.png")
    assert (tmp_path / "plots/scores.png").stat().st_size > 5000
    scores = evaluation.score_table(exam, {"one": base.answers, "two": merged.answers})
    assert [row["score"] for row in scores] == ["exact match", "character F1", "ROUGE-L", "stopped"]


def test_what_people_wrote_is_escaped_and_masked(tiny: Tiny, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "<script>alert(1)</script> 13812345678"},
        {"role": "assistant", "content": "<b>&"},
    ]
    exam = exam_of(tiny[1], tmp_path, [{"messages": turns}] * 2, 4)
    base = result("base", ["<img src=x>\x00", "half a character \ud83d\u202e"], exam.references)
    page = evaluation.write_report(tmp_path / "r.html", "<i>", exam, evaluation.Outcome([base, base]), {"<u>": "<u>"})
    text = page.read_text(encoding="utf-8")
    assert not [bad for bad in ("<script>", "<img", "<u>", "<i>alert", "\x00", "\u202e", "13812345678") if bad in text]
    assert "&lt;script&gt;" in text and "&gt;\\x00" in text and "\\ud83d\\u202e" in text and "138****5678" in text
    questions = [[{"role": "user", "content": "打 13812345678"}]]
    [row] = evaluation.before_after_table(questions, ["a@b.cn"], {"base": ["13812345678"], "merged": ["a@b.cn"]})
    assert row == {
        "question": "打 138****5678",
        "wanted": "a***@b.cn",
        "base": "✗ 138****5678",
        "merged": "✓ a***@b.cn",
    }


FAKE_LM_EVAL = """
import json, os, pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if "missing" in given["--tasks"]:
    print("ValueError: Tasks not found: missing", os.environ.get("WANDB_API_KEY")); sys.exit(1)
out = pathlib.Path(given["--output_path"]) / "model"; out.mkdir(parents=True)
numbers = {"alias": "shop", "acc,none": 0.75, "acc_stderr,none": 0.1, "sample_len": 3}
(out / "results_1.json").write_text(json.dumps({"results": {"shop": numbers}}))
"""


def test_public_benchmarks_run_once_in_a_process_without_secrets(tmp_path: Path, monkeypatch: Any) -> None:
    nothing = evaluation.Harness("", tmp_path, "float32")
    nothing.run("base", "nowhere", "mark")
    assert nothing.results == {} and "LM_EVAL_TASKS" in str(nothing) and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with refused("evaluation.no_lm_eval", tasks="hellaswag"):
        evaluation.Harness("hellaswag", tmp_path, "float32")
    (tmp_path / "lm_eval.py").write_text(FAKE_LM_EVAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    bench = evaluation.Harness("shop", tmp_path / "run", "float32")
    bench.run("base", paths.TINY_MODEL, "mark")
    monkeypatch.setattr(subprocess, "run", None)  # a second time it is read
    bench.run("base", paths.TINY_MODEL, "mark")
    assert bench.results == {"base": {"shop": {"acc": 0.75, "acc_stderr": 0.1}}} and "base 0.750" in str(bench)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    with refused("evaluation.lm_eval_failed", "Tasks not found: missing None"):
        evaluation.Harness("shop, missing", tmp_path / "run", "float32").run("base", paths.TINY_MODEL, "mark")
    with refused("evaluation.comma_in_path"):
        evaluation.Harness("shop", tmp_path, "float32").run("base", "a,b", "mark")


def check_shuffled(base: Any, true: Any, shuffled: Any) -> None:
    helped, not_helped = evaluation.Outcome([base, true]), evaluation.Outcome([base, shuffled])
    assert true.mean("exact_match") > 0.3 and helped.verdict.word == "helped" and helped.verdict.flags == []
    for score in ("character_f1", "rouge_l"):  # what a naive report would call a success
        assert not_helped.changes[score].estimate.low > 0.2 and not_helped.changes[score].p < 0.001
    assert not_helped.changes["loss"].estimate.high < -2
    assert abs(shuffled.mean("content")) < 0.03 and shuffled.mean("exact_match") == 0
    assert not_helped.verdict.word != "helped" and not_helped.facts()["verdict"] != "helped"


def test_true_answers_help_and_shuffled_ones_do_not() -> None:
    """With the stored answers of tiny models after 60 steps on true and on shuffled answers."""
    stored = json.loads((HERE / "shuffled_answers.json").read_text(encoding="utf-8"))
    references = evaluation.questions_of(rows_of("eval.jsonl"))[1]
    found = {name: result(name, one["texts"], references) for name, one in stored.items()}
    for name, one in found.items():
        one.losses[:] = [RowLoss(*pair) for pair in stored[name]["losses"]]
    check_shuffled(**found)


@pytest.mark.long
def test_the_same_with_real_trainings(tiny: Tiny, tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    rows = rows_of("train.jsonl")
    answers = random.Random(1).sample([row["messages"][-1] for row in rows], len(rows))
    wrong = [{"messages": [*row["messages"][:-1], answer]} for row, answer in zip(rows, answers, strict=True)]
    exam = exam_of(tiny[1], tmp_path, 120, 64)
    found = {"base": exam.sit("base", tiny[0], "base")}
    settings = SFTConfig(
        str(tmp_path), max_length=256, packing=True, assistant_only_loss=True, per_device_train_batch_size=2,
        max_steps=60, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=5, gradient_checkpointing=False,
        bf16=False, fp16=False, use_cpu=True, seed=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    for name, train in (("true", rows), ("shuffled", wrong)):
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32"), settings,
            train_dataset=Dataset.from_list(train), processing_class=tiny[1],
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
        found[name] = exam.sit(name, trainer.model.merge_and_unload(), name)
    check_shuffled(**found)
