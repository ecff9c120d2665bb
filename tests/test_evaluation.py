"""evaluation: answers that survive a kill, scores that are right, and a verdict that tells content from form."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import refused, wait_for

from nbutils import chat, data, evaluation, files, merging, profiles, record
from nbutils.config import Evaluation
from nbutils.evaluation import evaluator as storage
from nbutils.evaluation import inference, metrics, report
from nbutils.evaluation.inference import Answer, RowLoss

Tiny = tuple[Any, Any]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(files.TINY_MODEL)


def rows_of(name: str, limit: int | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files.SAMPLES / name).read_text(encoding="utf-8").splitlines()[:limit]]


def evaluator_of(tokenizer: Any, run: Path, rows: Any = 6, new_tokens: int = 8, count: int = 0, **more: Any) -> Any:
    rows = rows_of("eval.jsonl", rows) if isinstance(rows, int) else rows
    size = Evaluation(batch_size=4, max_new_tokens=new_tokens, rows=count)
    return evaluation.Evaluator(run, tokenizer, rows, size, "float32", **more)


def test_an_answer_is_the_same_alone_in_a_batch_and_with_a_static_cache(tiny: Tiny) -> None:
    model, tokenizer = tiny
    questions = evaluation.questions_of(rows_of("eval.jsonl", 5))[0]
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
        return evaluator_of(tokenizer, tmp_path, **{"rows": 8, **more}, new_tokens=most).max_new_tokens

    longest = max(len(tiny[1](one).input_ids) for one in evaluation.questions_of(rows_of("eval.jsonl", 8))[1])
    assert tokens(512) == tokens(512, count=1) == int(1.5 * longest) > 32 and tokens(8) == 8
    thoughtful = deepcopy(tiny[1])
    thoughtful.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert tokens(512, thoughtful) == 512 and tokens(512, thoughtful, thinking=False) < 512


def test_rows_that_do_not_fit_are_left_out(tiny: Tiny, tmp_path: Path) -> None:
    rows, long = rows_of("eval.jsonl", 3), "苹果" * 300
    wordy = [{"role": "user", "content": long}, {"role": "assistant", "content": "好"}]
    endless = [{"role": "user", "content": "还有吗"}, {"role": "assistant", "content": long}]
    evaluator = evaluator_of(
        tiny[1], tmp_path, [rows[0], {"messages": wordy}, {"messages": endless}, *rows[1:]], limit=200
    )
    assert evaluator.rows == rows and len(evaluator.references) == 3
    assert evaluator.left_out == evaluator.facts()["rows_left_out"] == 2
    with refused("evaluation.no_row_fits", rows=3, limit=200, new_tokens=190):
        evaluator_of(tiny[1], tmp_path, rows, 190, limit=200)
    with refused("evaluation.no_rows"):
        evaluator_of(tiny[1], tmp_path, [])
    config = tiny[0].config
    assert inference.context_length(config) == 1024 and inference.context_length(config, 512) == 512


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
    assert storage.reference_of(view, {"messages": turns}) == "<tool_call>find</tool_call>"


PROMPTS = [[1], [1, 2], [1, 2, 3]]


def ask_into(asked: list[int]) -> storage.Ask:
    def ask(prompts: dict[int, list[int]]) -> Any:
        for number, prompt in prompts.items():
            asked.append(number)
            yield number, Answer(prompt, [7, number], f"答案 {number}\u2028\x85", number != 1)

    return ask


CHANGES = [("答案 1", "答案 2"), ("[7, 1]", "[7, 2]"), ("false", "true"), ('"row": 1', '"row": 0')]


@pytest.mark.parametrize(("change", "missing"), [(None, []), ("torn", [2]), *((change, [1]) for change in CHANGES)])
def test_answers_are_asked_once_and_what_was_torn_or_changed_again(tmp_path: Path, change: Any, missing: Any) -> None:
    file, asked = tmp_path / "a.jsonl", list[int]()
    whole = storage.resume_answers(file, {"model": "m"}, PROMPTS, ask_into([]))
    if change == "torn":
        file.write_bytes(file.read_bytes()[:-20])
    elif change:
        file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    for _ in range(2):
        assert storage.resume_answers(file, {"model": "m"}, PROMPTS, ask_into(asked)) == whole
    assert asked == missing and [one.stopped for one in whole] == [True, False, True]


@pytest.mark.parametrize(("decided_by", "prompts"), [({"model": "x"}, PROMPTS), ({"model": "m"}, [*PROMPTS[:2], [9]])])
def test_another_fingerprint_starts_a_new_file(tmp_path: Path, decided_by: Any, prompts: Any) -> None:
    asked: list[int] = []
    storage.resume_answers(tmp_path / "a.jsonl", {"model": "m"}, PROMPTS, ask_into([]))
    storage.resume_answers(tmp_path / "a.jsonl", decided_by, prompts, ask_into(asked))
    assert asked == [0, 1, 2]


KILLED = """
import sys, time
from pathlib import Path
from nbutils.evaluation import evaluator
from nbutils.evaluation.inference import Answer
def ask(prompts):
    for number, prompt in prompts.items():
        time.sleep(0.05)
        yield number, Answer(prompt, [number], str(number))
evaluator.resume_answers(Path(sys.argv[1]), {}, [[n] for n in range(200)], ask)
"""


def test_after_a_kill_only_the_missing_answers_are_asked(tmp_path: Path) -> None:
    file, asked, prompts = tmp_path / "a.jsonl", list[int](), [[number] for number in range(200)]
    child = subprocess.Popen([sys.executable, "-c", KILLED, file], env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    wait_for(lambda: file.exists() and len(file.read_text(encoding="utf-8").splitlines()) > 8)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = storage.stored_answers(file, {}, prompts)
    storage.resume_answers(file, {}, prompts, ask_into(asked))
    assert len(kept) >= 8 and asked == sorted(set(range(200)) - set(kept))


def test_losses_that_were_changed_on_disk_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    storage.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]])
    assert storage.stored_once(file, {"model": "m"}, lambda: []) == [[8.5, 4]]
    file.write_text(file.read_text(encoding="utf-8").replace("8.5", "0.5"), encoding="utf-8")
    assert storage.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]]) == [[8.5, 4]]


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
        ("", "x", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("ＡＢＣ", "ABC", 1.0, 1.0),
        ("<think>hm, 5?</think>\n\n4", "4", 1.0, 1.0),
        ("<think>still at it", "4", 0.0, 0.0),
        ("hm, 5?</think>\n\n4", "4", 1.0, 1.0),  # the prompt opened the thinking
    ],
)
def test_scores_count_characters(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert metrics.character_f1(answer, reference) == pytest.approx(f1)
    assert metrics.rouge_l(answer, reference) == pytest.approx(rouge)


def test_content_is_what_an_answer_scores_beyond_other_rows_of_its_language() -> None:
    references = [f"答案 {number}" if number % 2 else f"answer {number}" for number in range(40)]
    rounds = metrics.other_rows(references)
    assert len(rounds) == metrics.OTHERS and rounds == metrics.other_rows(references)
    assert all(sorted(other) == list(range(40)) for other in rounds)
    assert not any(row == one for other in rounds for row, one in enumerate(other))
    assert sum(row % 2 == one % 2 for other in rounds for row, one in enumerate(other)) >= 0.85 * 40 * metrics.OTHERS
    labels = ["yes" if number % 2 else "no" for number in range(60)]
    constant, right = (metrics.content(metrics.exact, answers, labels) for answers in (["yes"] * 60, labels))
    assert abs(sum(constant)) / 60 < 0.1 and sum(right) / 60 > 0.4
    assert metrics.content(metrics.exact, ["a"], ["a"]) == [0.0]
    assert evaluation.exact_match([" a ", "b", "x"], ["a", "b", "c"]) == pytest.approx(2 / 3)


def test_intervals_are_wilsons_or_a_seeded_bootstrap() -> None:
    for right, rows, low, high in ((0, 120, 0.0, 0.031), (120, 120, 0.969, 1.0), (1, 2, 0.0945, 0.9055)):
        found = metrics.share_interval([1.0] * right + [0.0] * (rows - right))
        assert (found.mean, found.low, found.high) == pytest.approx((right / rows, low, high), abs=1e-4)
    assert vars(metrics.mean_interval([1.0, 3.0], weights=[3, 1])) == {"mean": 1.5, "low": 1.0, "high": 3.0}
    drawn = np.random.default_rng(0).random(60) < 0.3
    assert metrics.mean_interval(drawn) == metrics.mean_interval(drawn)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (8, 2, 0.109375), (3, 3, 1.0)])
def test_shares_are_compared_by_mcnemar(better: int, worse: int, p: float) -> None:
    before, after = [0.0] * better + [1.0] * (worse + 20), [1.0] * better + [0.0] * worse + [1.0] * 20
    found = metrics.paired_difference(before, after, shares=True)
    assert found.p == pytest.approx(p) and found.estimate.mean == pytest.approx((better - worse) / len(before))


def test_the_interval_of_a_difference_of_shares_is_newcombes() -> None:
    """Of 50 pairs 36 were right twice, 12 once, 2 the other time; and rows that all change leave some doubt."""
    before, after = [1.0] * 36 + [0.0] * 12 + [1.0] * 2, [1.0] * 48 + [0.0] * 2
    found = metrics.paired_difference(before, after, shares=True).estimate
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    sure = metrics.paired_difference([0.0] * 120, [1.0] * 120, shares=True).estimate
    assert sure.mean == 1.0 and sure.low == pytest.approx(0.956, abs=1e-3) and sure.high == 1.0


def test_a_difference_is_tested_in_pairs() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0.0, 10.0, size=40)
    assert metrics.paired_difference(before, before + rng.normal(1.0, 1.0, size=40)).p < 0.001
    assert metrics.paired_difference(before, before).p == 1.0
    nothing = metrics.paired_difference([1.0] * 20, [float("nan")] * 20)
    assert nothing.estimate.text() == "not a number" and nothing.p_text == "-" and nothing.facts()["p"] is None


def result(name: str, texts: Sequence[str], references: Sequence[str], loss: float = 1.0, stopped: bool = True) -> Any:
    """What an evaluator would make of these texts."""
    given = [Answer([1], [1, 2], text, stopped) for text in texts]
    evaluator = evaluation.Evaluator.__new__(evaluation.Evaluator)
    evaluator.references = list(references)
    return evaluation.Result(
        name, given, evaluator.references, [RowLoss(loss * 4, 4) for _ in texts], evaluator.score(given)
    )


NO_PROOF = "no proof that it helped"
WORDS = ["苹果", "香蕉", "西瓜", "pencils", "cookies", "juice", "信封", "纸巾"]
WANTED = [f"{{item: {WORDS[n % 8]}, count: {n}}}" for n in range(60)]
PROSE = [f"Well, I do not know about that, friend number {n * 7 % 60}." for n in range(60)]
LABELS = ["yes" if n % 2 else "no" for n in range(60)]
THINKS = ["<think>let me see"] * 13
SHUFFLED = random.Random(2).sample(WANTED, 60)  # the form of every answer, the content of none


@pytest.mark.parametrize(
    ("word", "base", "tuned", "wanted"),
    [
        ("helped", PROSE, WANTED, WANTED),
        ("helped", THINKS[:11] + PROSE[11:], WANTED, WANTED),
        (NO_PROOF, THINKS + PROSE[13:], WANTED, WANTED),  # cut off while thinking
        (NO_PROOF, PROSE, SHUFFLED, WANTED),
        (NO_PROOF, PROSE, ["yes"] * 60, LABELS),  # right half of the time
        (NO_PROOF, WANTED, WANTED, WANTED),
        ("harmed", WANTED, [WANTED[0]] * 60, WANTED),
        (NO_PROOF, PROSE[:3], WANTED[:3], WANTED[:3]),  # too few
        (NO_PROOF, PROSE, ["好的"] * 60, ["好的"] * 60),  # says one thing always
        (NO_PROOF, [one.replace("item", "thing") for one in WANTED], WANTED[:10] + [""] * 50, WANTED),  # mixed
    ],
)
def test_the_verdict(word: str, base: list[str], tuned: list[str], wanted: list[str]) -> None:
    found = report.judge(result("base", base, wanted), result("merged", tuned, wanted))
    assert found.word == word and word in str(found) and max(map(len, str(found).splitlines())) <= report.WIDTH


def test_chance_seldom_helps_or_harms() -> None:
    rng, words = random.Random(8), list[str]()
    for _ in range(40):
        base, tuned = ([rng.choice(WANTED) for _ in range(60)] for _ in range(2))
        words.append(report.judge(result("base", base, WANTED), result("merged", tuned, WANTED)).word)
    assert words.count("harmed") <= 3 and words.count("helped") <= 3


def test_table_facts_and_verdict_show_one_interval() -> None:
    rng = random.Random(3)
    after = [one if rng.random() < 0.2 else prose for one, prose in zip(WANTED, PROSE, strict=True)]
    comparison = evaluation.Comparison([result("base", PROSE, WANTED), result("merged", after, WANTED)])
    shown = next(row for row in comparison.table() if row["score"] == "content (exact)")
    assert shown["difference"] in comparison.verdict.why and shown["p"] in comparison.verdict.why
    facts = comparison.facts()["evaluation"]["scores"]["exact_content"]["difference"]
    assert facts["low"] == comparison.changes["exact_content"].estimate.low
    almost = metrics.Difference(metrics.Estimate(0.1, 0.01, 0.2), 0.03, "")  # two scores were tried: 0.05 is shared
    assert (report.direction(almost), report.direction(metrics.Difference(almost.estimate, 0.02, ""))) == (0, 1)


@pytest.mark.parametrize(
    ("base", "tuned", "flag"),
    [
        (result("base", PROSE, WANTED), result("merged", WANTED, WANTED, stopped=False), "60 of 60 of merged's"),
        (result("base", ["{"] * 60, WANTED, stopped=False), result("merged", WANTED, WANTED), "60 of 60 of base's"),
        (result("base", PROSE[:12], WANTED[:12]), result("merged", WANTED[:12], WANTED[:12]), "only 12"),
        (result("base", PROSE, WANTED, stopped=False), result("merged", WANTED, WANTED), ""),  # wordy, not cut
    ],
)
def test_what_looks_wrong_is_flagged(base: Any, tuned: Any, flag: str) -> None:
    flags = report.judge(base, tuned).flags
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
        (general(1.0, rows=12), general([0.5, 1.0, 1.2, 1.9] * 3, rows=12), "unclear"),
        (general(1.0, rows=9), general(3.0, rows=9), "unclear"),
        (general(1.0, WANTED), general(1.0, ["{}"] * 60), "forgot"),  # the answers are lost, the loss is not
        (general(1.0), general(1e9), "forgot"),
        (general(1.0), general(float("nan")), "unclear"),
    ],
)
def test_forgetting(base: Any, tuned: Any, word: str) -> None:
    found = report.forgetting(base, tuned)
    assert found.word == word and word in str(found)
    facts = evaluation.Comparison([base, tuned], [base, tuned]).facts()
    assert json.loads(json.dumps(facts, allow_nan=False))["evaluation"]["general"]["verdict"] == word


def test_the_general_rows_are_sound_and_none_resembles_another(tmp_path: Path) -> None:
    questions = [row["messages"][0]["content"] for row in evaluation.general_rows()]
    chinese = sum(metrics.CJK.search(question) is not None for question in questions)
    assert 50 <= len(questions) <= 80 and 20 <= chinese <= len(questions) - 20
    assert not data.prepare(str(files.SAMPLES / "general.jsonl"), tmp_path / "data").rejected


def test_answers_become_a_table_facts_a_page_and_a_figure(tiny: Tiny, tmp_path: Path, capsys: Any) -> None:
    evaluator = evaluator_of(tiny[1], tmp_path, new_tokens=16)
    server = SimpleNamespace(engine="vllm", url="u", answers=lambda prompts, max_tokens: [
        (number, Answer(prompt, [1], "served")) for number, prompt in prompts.items()])  # fmt: skip
    base, merged = evaluator.evaluate("base", tiny[0], "base"), evaluator.evaluate("merged", tiny[0], "merged", server)
    assert merged.texts == ["served"] * 6 and (evaluator.folder / "answers-merged-served.jsonl").exists()
    assert evaluator.kept("base", "base", files.TINY_MODEL) == base.answers == evaluator.generate(tiny[0])
    comparison = evaluation.Comparison([base, merged], [base, merged], evaluator)
    assert [row["score"] for row in comparison.table()][:2] == ["loss", "exact match"]
    assert [row["score"] for row in comparison.table("stopped")] == ["stopped"]
    facts = json.loads(json.dumps(comparison.facts()))["evaluation"]
    assert facts["verdict"] == NO_PROOF and facts["rows"] == 6
    assert facts["answers_by"] == {"base": "generate", "merged": "vllm server"}
    page = evaluation.write_report(comparison.page, "demo", evaluator, comparison, {"card": "none"})
    text = page.read_text(encoding="utf-8")
    assert comparison.verdict.word in text and "<svg" in text and evaluator.questions[0][-1]["content"] in text
    for host in ("http://www.w3.org", "http://purl.org", "http://creativecommons.org", "https://matplotlib.org"):
        text = text.replace(host, "")  # names of the SVG format, nothing that is loaded
    assert "http://" not in text and "https://" not in text and "<script" not in text
    comparison.plot("loss", "exact_match")
    assert (tmp_path / "evaluation/scores.png").stat().st_size > 5000
    comparison.show_answers(1)
    comparison.show_scores("loss")
    shown = capsys.readouterr().out
    assert evaluator.questions[0][-1]["content"] in shown and "served" in shown and "\nloss " in shown
    scores = evaluation.score_table(evaluator, {"one": base.answers, "two": merged.answers})
    assert [row["score"] for row in scores] == ["exact match", "character F1", "ROUGE-L", "stopped"]
    assert len(evaluator.general().rows) > 50


def test_thinking_that_the_prompt_opened_is_no_part_of_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    evaluator = evaluator_of(tokenizer, tmp_path, 2)
    raw = [Answer([1], [1], f"hm</think>{evaluator.references[0]}"), Answer([1], [1], "still at it")]
    tagged = evaluator.with_think_tag(raw)
    assert [one.text.startswith("<think>") for one in tagged] == [True, True]
    assert evaluator.score(tagged)["exact_match"] == [1.0, 0.0] and evaluator.score(tagged)["unfinished"] == [0.0, 1.0]
    assert evaluation.score_table(evaluator, {"server": raw})[1]["server"].startswith("0.500")
    assert evaluator_of(tiny[1], tmp_path, 2).with_think_tag(raw) == raw


@pytest.mark.parametrize("in_4_bits", [False, True])
def test_later_lessons_read_the_stored_answers_of_the_merged_model(tiny: Tiny, tmp_path: Path, in_4_bits: bool) -> None:
    run = record.RunFolder(tmp_path / "run")
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    with files.complete_folder(run.path / "merged", {"base": "tiny"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    profile = profiles.load("tiny")
    machine = profile.machine.model_copy(update={"precision": "fp32"})
    lesson: Any = SimpleNamespace(run=run, profile=profile.model_copy(update={"machine": machine}))
    assert evaluation.stored_answers(lesson, run.merged) is None
    asked = evaluation.open_evaluator(lesson, run.merged, tiny[1], in_4_bits=in_4_bits)
    ask = lambda prompts, *size: [(n, Answer(one, [n], str(n))) for n, one in prompts.items()]  # noqa: E731
    asked._ask = lambda model: ask  # type: ignore[method-assign]
    asked.evaluate("merged", tiny[0], files.stamp(run.merged))
    content = (asked.folder / "answers-merged.jsonl").read_bytes()
    found = evaluation.stored_answers(lesson, run.merged, rows=3)
    assert found and [one.text for one in found.answers] == ["0", "1", "2"] and len(found.evaluator.questions) == 3
    assert found.evaluator.dtype == asked.dtype and (asked.folder / "answers-merged.jsonl").read_bytes() == content
    exported = tmp_path / "export"
    for of, known in ((merging.model_fingerprint(merging.open_base(run.merged)), True), ("another", False)):
        shutil.rmtree(exported, ignore_errors=True)
        with files.complete_folder(exported, {"of": of}) as folder:
            shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
        assert (evaluation.stored_answers(lesson, exported) is not None) is known


def test_what_people_wrote_is_escaped_and_masked(tiny: Tiny, tmp_path: Path) -> None:
    question = {"role": "user", "content": "<script>alert(1)</script> 13812345678"}
    evaluator = evaluator_of(
        tiny[1], tmp_path, [{"messages": [question, {"role": "assistant", "content": "<b>&"}]}] * 2, 4
    )
    base = result("base", ["<img src=x>\x00", "half a character \ud83d\u202e"], evaluator.references)
    page = evaluation.write_report(
        tmp_path / "r.html", "<i>", evaluator, evaluation.Comparison([base, base]), {"<u>": "<u>"}
    )
    text = page.read_text(encoding="utf-8")
    assert not [bad for bad in ("<script>", "<img", "<u>", "<i>alert", "\x00", "\u202e", "13812345678") if bad in text]
    assert "&lt;script&gt;" in text and "&gt;\\x00" in text and "\\ud83d\\u202e" in text and "138****5678" in text
    questions = [[{"role": "user", "content": "打 13812345678"}]]
    [shown] = evaluation.before_after_table(questions, ["a@b.cn"], {"base": ["13812345678"], "merged": ["a@b.cn"]})
    assert list(shown.values()) == ["打 138****5678", "a***@b.cn", "✗ 138****5678", "✓ a***@b.cn"]


FAKE_LM_EVAL = """
import json, os, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "missing" in given["--tasks"]:
    sys.exit(f"Tasks not found: missing {os.environ.get('WANDB_API_KEY')}")
out = pathlib.Path(given["--output_path"]) / "model"; out.mkdir(parents=True)
numbers = {"alias": "shop", "acc,none": 0.75, "acc_stderr,none": 0.1, "sample_len": 3}
(out / "results_1.json").write_text(json.dumps({"results": {"shop": numbers}}))
"""


def test_public_benchmarks_run_once_in_a_process_without_secrets(tmp_path: Path, monkeypatch: Any) -> None:
    nothing = evaluation.Harness("", tmp_path, "float32")
    nothing.run("base", "nowhere", "mark")
    assert nothing.results == {} and "LM_EVAL_TASKS" in str(nothing) and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    with refused("evaluation.no_lm_eval", tasks="hellaswag"):
        evaluation.Harness("hellaswag", tmp_path, "float32")
    (tmp_path / "lm_eval.py").write_text(FAKE_LM_EVAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    bench = evaluation.Harness("shop", tmp_path / "run", "float32")
    bench.run("base", files.TINY_MODEL, "mark")
    (tmp_path / "lm_eval.py").rename(tmp_path / "later.py")  # a second time it is read
    again = evaluation.Harness("shop", tmp_path / "run", "float32")
    again.run("base", files.TINY_MODEL, "mark")
    assert again.results == bench.results == {"base": {"shop": {"acc": 0.75, "acc_stderr": 0.1}}}
    (tmp_path / "later.py").rename(tmp_path / "lm_eval.py")
    with refused("evaluation.lm_eval_failed", "Tasks not found: missing None"):
        evaluation.Harness("shop, missing", tmp_path / "run", "float32").run("base", files.TINY_MODEL, "mark")
    with refused("evaluation.comma_in_path"):
        again.run("base", "a,b", "mark")


def test_true_answers_help_and_shuffled_ones_do_not() -> None:
    """With the stored answers of tiny models after 60 steps on true and on shuffled answers."""
    stored = json.loads((HERE / "shuffled_answers.json").read_text(encoding="utf-8"))
    references = evaluation.questions_of(rows_of("eval.jsonl"))[1]
    found = {name: result(name, one["texts"], references) for name, one in stored.items()}
    for name, one in found.items():
        one.losses[:] = [RowLoss(*pair) for pair in stored[name]["losses"]]
    helped, not_helped = (evaluation.Comparison([found["base"], found[name]]) for name in ("true", "shuffled"))
    assert found["true"].mean("exact_match") > 0.3 and helped.verdict.word == "helped" and helped.verdict.flags == []
    for score in ("character_f1", "rouge_l"):  # what a naive report would call a success
        assert not_helped.changes[score].estimate.low > 0.2 and not_helped.changes[score].p < 0.001
    assert not_helped.changes["loss"].estimate.high < -2
    assert abs(found["shuffled"].mean("content")) < 0.03 and not_helped.verdict.word != "helped"
