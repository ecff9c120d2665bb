"""evaluation: answers that survive a kill, scores that are right, and a verdict that tells content from form."""

import json
import random
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import python, refused

from nbutils import chat, data, display, evaluation, files, profiles, record
from nbutils.data.build import CJK
from nbutils.evaluation import evaluator as evaluating
from nbutils.evaluation import harness, inference, scores
from nbutils.evaluation.comparison import Comparison
from nbutils.evaluation.inference import Answer

Tiny = tuple[Any, Any]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(files.TINY_MODEL)


def rows_of(name: str, limit: int | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files.SAMPLES / name).read_text(encoding="utf-8").splitlines()[:limit]]


def row_of(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def references_of(name: str, limit: int | None = None) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows_of(name, limit)]


def evaluator_of(tokenizer: Any, run: Path, rows: Any = 6, new_tokens: int = 8, count: int = 0, **more: Any) -> Any:
    rows = rows_of("eval.jsonl", rows) if isinstance(rows, int) else rows
    size = evaluation.Size(batch_size=4, max_new_tokens=new_tokens, rows=count)
    return evaluation.Evaluator(run, tokenizer, rows, size, "float32", **more)


def test_an_answer_is_the_same_alone_in_a_batch_and_with_a_static_cache(tiny: Tiny) -> None:
    model, tokenizer = tiny
    questions = [row["messages"][:-1] for row in rows_of("eval.jsonl", 5)]
    prompts = dict(enumerate(map(chat.Renderer(tokenizer, "messages").prompt, questions)))

    def answers(prompts: Any, max_new_tokens: int, batch_size: int) -> list[Answer]:
        numbered = dict(inference.answer_prompts(model, tokenizer, prompts, max_new_tokens, batch_size))
        return [numbered[number] for number in prompts]

    alone, together = answers(prompts, 40, batch_size=1), answers(prompts, 40, batch_size=5)
    stops = sorted(chat.find_stop_ids(tokenizer, model.generation_config))
    assert alone == together and all(answer.stopped and answer.token_ids[-1] in stops for answer in alone)
    [cut] = answers({0: prompts[0]}, 3, batch_size=1)
    assert not cut.stopped and cut.token_ids == alone[0].token_ids[:3]
    with torch.inference_mode():
        decoded = inference.decode(model, [answer.prompt_ids for answer in alone], 40, stops)
    for generated, answer in zip(decoded, alone, strict=True):
        assert generated[: len(answer.token_ids)] == answer.token_ids


def test_a_lesson_asks_some_rows_and_leaves_the_model_as_it_was(tiny: Tiny) -> None:
    model, tokenizer = tiny
    rows = rows_of("eval.jsonl", 2)
    model.train()
    first, second = evaluation.answer_rows(model, tokenizer, rows, max_new_tokens=8)
    assert [first, second] == evaluation.answer_rows(model, tokenizer, rows, max_new_tokens=8) and model.training
    assert first and first != second and len(tokenizer(first)["input_ids"]) <= 9
    model.eval()


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
        fails = Mock(side_effect=error)
        with pytest.raises(type(error), match=str(error)):
            list(inference.in_batches([1, 2], 2, fails))


def test_an_answer_gets_the_tokens_the_references_need(tiny: Tiny, tmp_path: Path) -> None:
    def tokens(most: int, tokenizer: Any = tiny[1], **more: Any) -> int:
        return evaluator_of(tokenizer, tmp_path, **{"rows": 8, **more}, new_tokens=most).max_new_tokens

    longest = max(len(tiny[1](reference).input_ids) for reference in references_of("eval.jsonl", 8))
    assert tokens(512) == tokens(512, count=1) == int(1.5 * longest) > 32 and tokens(8) == 8
    thoughtful = deepcopy(tiny[1])
    thoughtful.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert tokens(512, thoughtful) == 512 and tokens(512, thoughtful, thinking=False) < 512


def test_rows_that_do_not_fit_are_left_out(tiny: Tiny, tmp_path: Path) -> None:
    rows, long = rows_of("eval.jsonl", 3), "苹果" * 300
    evaluator = evaluator_of(tiny[1], tmp_path, [rows[0], row_of(long, "好"), *rows[1:]], limit=200)
    assert evaluator.rows == rows and len(evaluator.references) == 3 and evaluator.left_out == 1
    for none in (rows, []):
        with refused(
            "No evaluation row fits 200 tokens",
            "course.max_new_tokens (now 190)",
            "vllm.max_model_len",
        ):
            evaluator_of(tiny[1], tmp_path, none, 190, limit=200)


def test_a_wanted_tool_call_is_written_as_the_template_writes_it(tiny: Tiny) -> None:
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = row_of("q", "", tool_calls=[{"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}])
    assert evaluating.reference_of(chat.Renderer(tokenizer, "prompt_completion"), row) == "<tool_call>find</tool_call>"


PROMPTS = [[1], [1, 2], [1, 2, 3]]


def ask_into(asked: list[int]) -> evaluating.Ask:
    def ask(prompts: dict[int, list[int]]) -> Any:
        for number, prompt in prompts.items():
            asked.append(number)
            yield number, Answer(prompt, [7, number], f"答案 {number}\u2028\x85", number != 1)

    return ask


@pytest.mark.parametrize(("torn", "missing"), [(0, []), (20, [2])])
def test_answers_are_asked_once_and_what_was_torn_again(tmp_path: Path, torn: int, missing: list[int]) -> None:
    file, asked = tmp_path / "a.jsonl", list[int]()
    whole = evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask_into([]))
    written = file.read_bytes()
    file.write_bytes(written[: len(written) - torn])
    for _ in range(2):
        assert evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask_into(asked)) == whole
    assert asked == missing and [answer.stopped for answer in whole] == [True, False, True]
    for decided_by, prompts in (({"model": "x"}, PROMPTS), ({"model": "x"}, [*PROMPTS[:2], [9]])):
        asked.clear()
        evaluating.complete_answers(file, decided_by, prompts, ask_into(asked))
        assert asked == [0, 1, 2], "another model, or another prompt, starts a new file"


KILLED = """
import os, signal, sys
from pathlib import Path
from nbutils.evaluation import evaluator
from nbutils.evaluation.inference import Answer
def ask(prompts):
    for number, prompt in prompts.items():
        os.kill(os.getpid(), signal.SIGKILL) if number == 9 else None
        yield number, Answer(prompt, [number], str(number))
evaluator.complete_answers(Path(sys.argv[1]), {}, [[n] for n in range(200)], ask)
"""


def test_after_a_kill_only_the_missing_answers_are_asked(tmp_path: Path) -> None:
    file, asked, prompts = tmp_path / "a.jsonl", list[int](), [[number] for number in range(200)]
    assert python("-c", KILLED, file, home=tmp_path, ok=False).returncode == -9
    assert [answer.prompt_ids for answer in evaluating.read_answers(file, {}, prompts).values()] == prompts[:9]
    evaluating.complete_answers(file, {}, prompts, ask_into(asked))
    assert asked == list(range(9, 200))


def test_losses_are_measured_once_and_again_for_another_model(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    evaluating.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]])
    assert evaluating.stored_once(file, {"model": "m"}, lambda: []) == [[8.5, 4]]
    assert evaluating.stored_once(file, {"model": "x"}, lambda: []) == []


def test_the_loss_is_that_of_the_assistants_tokens_whatever_the_batch(tiny: Tiny, monkeypatch: Any) -> None:
    (model, tokenizer), rows = tiny, rows_of("eval.jsonl", 7)
    shapes, examples = list[tuple[Any, Any]](), chat.Renderer(tokenizer, "messages").encode_all(rows)
    note = lambda _, args, inputs, out: shapes.append((out.logits.shape, inputs["input_ids"].shape))  # noqa: E731
    monkeypatch.setattr(inference, "MAX_LOGITS", 3072 * 100)
    with model.register_forward_hook(note, with_kwargs=True):
        losses = inference.row_losses(model, examples, 7)
    assert len(shapes) >= 3  # 7 rows would have been one batch
    for (batch, positions, _), (_, width) in shapes:
        assert batch * positions <= 100 and positions < width  # logits only where they are needed
    for row, (total, tokens) in zip(rows, losses, strict=True):
        out = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([out["input_ids"]]), torch.tensor([out["assistant_masks"]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=torch.where(mask.bool(), ids, -100)).loss
        assert tokens == int(mask.sum()) and total / tokens == pytest.approx(float(loss), rel=1e-4)


def test_answers_of_one_row_are_added_up_where_each_is_a_text_of_its_own(tiny: Tiny) -> None:
    turns = [turn for row in rows_of("eval.jsonl", 2) for turn in row["messages"]]
    rows = [{"messages": turns}, *rows_of("eval.jsonl", 1)]
    forms = [chat.Renderer(tiny[1], form).encode_all(rows) for form in ("messages", "prompt_completion")]
    assert [[example.row for example in examples] for examples in forms] == [[1, 2], [1, 1, 2]]
    together, apart = (inference.row_losses(tiny[0], examples, 2) for examples in forms)
    assert np.allclose(together, apart, rtol=1e-4)


@pytest.mark.parametrize(("answer", "reference", "f1", "rouge"), [
    ("今天 天气\n好", "今天天气好", 1.0, 1.0), ("今天", "今天天气好", 4 / 7, 4 / 7), ("ＡＢＣ", "ABC", 1.0, 1.0),
    ("好气天天今", "今天天气好", 1.0, 0.4),  # the same characters, the order lost but for 天天
    ("", "x", 0.0, 0.0), ("", "", 1.0, 1.0),
    ("<think>hm, 5?</think>\n\n4", "4", 1.0, 1.0), ("<think>still at it", "4", 0.0, 0.0),
    ("hm, 5?</think>\n\n4", "4", 1.0, 1.0),  # the prompt opened the thinking
])  # fmt: skip
def test_scores_count_characters(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert scores.character_f1(answer, reference) == pytest.approx(f1)
    assert scores.rouge_l(answer, reference) == pytest.approx(rouge)


def test_content_is_what_an_answer_scores_beyond_other_rows_of_its_language() -> None:
    mixed = [f"答案 {number}" if number % 2 else f"answer {number}" for number in range(40)]
    against = scores.content(lambda answer, other: float((answer[0] == "答") == (other[0] == "答")), mixed, mixed)
    assert sum(against) / 40 <= 0.15  # others are mostly of the same language, and never the row itself
    assert scores.content(scores.exact, mixed, mixed) == [1.0] * 40
    labels = ["yes" if number % 2 else "no" for number in range(60)]
    constant, right = (scores.content(scores.exact, answers, labels) for answers in (["yes"] * 60, labels))
    assert abs(sum(constant)) / 60 < 0.1 and sum(right) / 60 > 0.4
    assert scores.content(scores.exact, ["a"], ["a"]) == [0.0]
    assert [scores.exact(*pair) for pair in ((" a ", "a"), ("b", "b"), ("x", "c"))] == [1.0, 1.0, 0.0]


def test_intervals_are_wilsons_or_a_seeded_bootstrap() -> None:
    for right, rows, low, high in ((0, 120, 0.0, 0.031), (120, 120, 0.969, 1.0), (1, 2, 0.0945, 0.9055)):
        found = scores.estimate_share([1.0] * right + [0.0] * (rows - right))
        assert (found.mean, found.low, found.high) == pytest.approx((right / rows, low, high), abs=1e-4)
    assert vars(scores.estimate([1.0, 3.0], weights=[3, 1])) == {"mean": 1.5, "low": 1.0, "high": 3.0}
    drawn = np.random.default_rng(0).random(60) < 0.3
    assert scores.estimate(drawn) == scores.estimate(drawn)


@pytest.mark.parametrize(("better", "worse", "same", "p", "interval"), [
    (0, 0, 20, 1.0, (-0.126, 0.126)), (5, 0, 20, 0.0625, (0.0063, 0.3641)), (8, 2, 20, 0.109375, (-0.0145, 0.3895)),
    (3, 3, 20, 1.0, (-0.198, 0.198)), (12, 2, 36, 0.012939, (0.0509, 0.3337)),
    (120, 0, 0, 0.0, (0.9516, 1.0)),  # rows that all change leave some doubt
])  # fmt: skip
def test_shares_compare_by_mcnemar_and_bonett_price(
    better: int, worse: int, same: int, p: float, interval: Any
) -> None:
    before, after = [0.0] * better + [1.0] * (worse + same), [1.0] * better + [0.0] * worse + [1.0] * same
    change = scores.paired_share_difference(before, after)
    assert change.p == pytest.approx(p, abs=1e-6) and change.mean == pytest.approx((better - worse) / len(before))
    assert (change.low, change.high) == pytest.approx(interval, abs=1e-3)


def test_a_difference_is_tested_in_pairs() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0.0, 10.0, size=40)
    assert scores.paired_difference(before, before + rng.normal(1.0, 1.0, size=40)).p < 0.001
    assert scores.paired_difference(before, before).p == 1.0
    nothing = scores.paired_difference([1.0] * 20, [float("nan")] * 20)
    assert nothing.text() == "nan [nan, nan]" and nothing.p_text == "nan"


def result(name: str, texts: Sequence[str], references: Sequence[str], losses: Any = 1.0, stopped: bool = True) -> Any:
    """What an evaluator would make of these texts; `losses` of each row and its tokens, or one of every token."""
    given = [Answer([1], [1, 2], text, stopped) for text in texts]
    about = {"references": references, "left_out": 0, "mode": "", "folder": Path("evaluation")}
    losses = [(losses * 4, 4) for _ in texts] if isinstance(losses, float) else losses
    scored = evaluating.score_answers(given, references) | {"loss": [total / tokens for total, tokens in losses]}
    return evaluating.Result(SimpleNamespace(**about), name, given, scored, losses)  # type: ignore[arg-type]


def compared(base: Any, tuned: Any, general_base: Any = None, general_tuned: Any = None) -> Comparison:
    """Where no general rows matter, the held-out ones take their place."""
    return Comparison(base, tuned, general_base or base, general_tuned or base)


NO_PROOF = "no proof that it helped"
WORDS = ["苹果", "香蕉", "西瓜", "pencils", "cookies", "juice", "信封", "纸巾"]
WANTED = [f"{{item: {WORDS[n % 8]}, count: {n}}}" for n in range(60)]
PROSE = [f"Well, I do not know about that, friend number {n * 7 % 60}." for n in range(60)]
LABELS = ["yes" if n % 2 else "no" for n in range(60)]
THINKS = ["<think>let me see"] * 13
SHUFFLED = random.Random(2).sample(WANTED, 60)  # the form of every answer, the content of none


@pytest.mark.parametrize(("word", "base", "tuned", "wanted"), [
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
])  # fmt: skip
def test_the_verdict(word: str, base: list[str], tuned: list[str], wanted: list[str]) -> None:
    found = compared(result("base", base, wanted), result("merged", tuned, wanted)).verdict
    assert found.word == word and word in str(found) and max(map(len, str(found).splitlines())) <= display.WRAPPED_WIDTH


@pytest.mark.slow
def test_chance_seldom_helps_or_harms() -> None:
    rng, words = random.Random(8), list[str]()
    for _ in range(40):
        base, tuned = ([rng.choice(WANTED) for _ in range(60)] for _ in range(2))
        words.append(compared(result("base", base, WANTED), result("merged", tuned, WANTED)).verdict.word)
    assert words.count("harmed") <= 3 and words.count("helped") <= 3


def test_table_facts_and_verdict_show_one_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    after = [one if rng.random() < 0.2 else prose for one, prose in zip(WANTED, PROSE, strict=True)]
    found = compared(result("base", PROSE, WANTED), result("merged", after, WANTED))
    shown = next(row for row in found.table() if row["score"] == "content (exact)")
    assert shown["difference"] in found.verdict.why and shown["p"] in found.verdict.why
    facts = found.facts()["evaluation"]["scores"]["exact_content"]["difference"]
    assert facts["low"] == found.changes["exact_content"].low
    for p, word in ((0.03, NO_PROOF), (0.02, "helped")):  # two scores were tried: 0.05 is shared
        change = scores.Difference(0.1, 0.01, 0.2, p, "")
        monkeypatch.setattr(evaluating.Result, "change", lambda *_, change=change: change)
        assert compared(found.base, found.tuned).verdict.word == word


def test_what_looks_wrong_is_flagged() -> None:
    base, tuned = result("base", PROSE, WANTED), result("merged", WANTED, WANTED)
    endless = result("merged", WANTED, WANTED, stopped=False)
    wordy = result("base", PROSE, WANTED, stopped=False)
    for pair, words in [((base, endless), "60 of 60 answers"), ((wordy, tuned), "")]:
        flags = compared(*pair).verdict.flags
        assert len(flags) == bool(words) and words in "".join(flags)


def general(loss: float | list[float], texts: Sequence[str] = PROSE, rows: int = 60) -> Any:
    losses = [loss] * rows if isinstance(loss, float) else loss
    return result("merged", texts[:rows], WANTED[:rows], [(4 * one, 4) for one in losses])


@pytest.mark.parametrize(("base", "tuned", "word"), [
    (general(1.0), general(1.05), "kept"), (general(1.0), general(1.5), "forgot"),
    (general(1.0, rows=12), general([0.5, 1.0, 1.2, 1.9] * 3, rows=12), "unclear"),
    (general(1.0, rows=9), general(3.0, rows=9), "unclear"),
    (general(1.0, WANTED), general(1.0, ["{}"] * 60), "forgot"),  # the answers are lost, the loss is not
    (general(1.0), general(1e9), "forgot"), (general(1.0), general(float("nan")), "unclear"),
])  # fmt: skip
def test_forgetting(base: Any, tuned: Any, word: str) -> None:
    found = compared(base, tuned, base, tuned)
    assert word in str(found.forgetting)
    assert found.facts()["evaluation"]["general"]["verdict"] == word


def test_the_verdict_names_what_was_forgotten() -> None:
    pair = [result("base", PROSE, WANTED), result("merged", WANTED, WANTED)]
    found = compared(*pair, general(1.0), general(1.5))
    title = str(found.verdict).splitlines()[0]
    assert "helped" in title and "forgot" in title


def test_the_general_rows_are_sound_and_none_resembles_another(tmp_path: Path) -> None:
    questions = [row["messages"][0]["content"] for row in rows_of("general.jsonl")]
    chinese = sum(CJK.search(question) is not None for question in questions)
    assert 50 <= len(questions) <= 80 and 20 <= chinese <= len(questions) - 20
    assert not data.prepare(str(files.SAMPLES / "general.jsonl"), tmp_path / "data").rejected


@pytest.mark.slow
def test_answers_become_a_table_facts_a_page_and_a_figure(
    tiny: Tiny, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    evaluator = evaluator_of(tiny[1], tmp_path, new_tokens=16)
    base = evaluator.evaluate("base", tiny[0], "base")
    assert evaluator.stored_answers("base", "base", files.TINY_MODEL) == base.answers
    merged = evaluator.result("merged", [replace(one, text="merged") for one in base.answers], base.losses)
    found = compared(base, merged)
    assert [row["score"] for row in found.table()][:2] == ["loss", "exact match"]
    assert [row["score"] for row in found.table("stopped")] == ["stopped"]
    facts = json.loads(json.dumps(found.facts()))["evaluation"]
    assert facts["verdict"] == NO_PROOF and facts["rows"] == 6
    assert facts["answers_by"] == {"base": "generate", "merged": "generate"}
    found.write_page("demo")
    text = found.page.read_text(encoding="utf-8")
    assert found.verdict.word in text and evaluator.questions[0][-1]["content"] in text
    assert "http://" not in text and "https://" not in text and "<script" not in text
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    found.write_page("demo")
    assert "微调有用吗" in found.page.read_text(encoding="utf-8")
    monkeypatch.undo()
    found.plot("loss", "exact_match")
    assert (tmp_path / "evaluation/scores.png").stat().st_size > 5000
    found.show_answers(1)
    found.show_scores("loss")
    shown = capsys.readouterr().out
    assert evaluator.questions[0][-1]["content"] in shown and "merged" in shown and "\nloss " in shown
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
    scored = evaluator.result("server", raw).scores
    assert scored["exact_match"] == [1.0, 0.0] and scored["unfinished"] == [0.0, 1.0]
    assert evaluation.score_table(evaluator, {"server": raw})[1]["server"].startswith("0.500")
    assert evaluator_of(tiny[1], tmp_path, 2).with_think_tag(raw) == raw


@pytest.mark.slow
def test_later_lessons_read_the_stored_answers_of_the_merged_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: Any
) -> None:
    run = record.RunFolder(tmp_path / "run")
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    with files.complete_folder(run.path / "merged", {"base": "tiny"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    profile = profiles.load("tiny")
    load = profile.from_pretrained.model_copy(update={"dtype": "float32"})
    profile = profile.model_copy(update={"from_pretrained": load})
    assert evaluation.stored_answers(run, profile, run.merged)[1] == []
    asked = evaluation.open_evaluator(run, profile, run.merged)
    answers = lambda model, tokenizer, prompts, *size: [(n, Answer(one, [n], str(n))) for n, one in prompts.items()]  # noqa: E731
    monkeypatch.setattr(inference, "answer_prompts", answers)
    asked.evaluate("merged", tiny[0], files.stamp(run.merged))
    content = (asked.folder / "answers-merged.jsonl").read_bytes()
    evaluator, found = evaluation.stored_answers(run, profile, run.merged, rows=3)
    assert [one.text for one in found] == ["0", "1", "2"] and len(evaluator.questions) == 3
    assert (asked.folder / "answers-merged.jsonl").read_bytes() == content


def test_what_people_wrote_is_escaped_and_masked(tiny: Tiny, tmp_path: Path) -> None:
    evaluator = evaluator_of(tiny[1], tmp_path, [row_of("<script>alert(1)</script> 13812345678", "<b>&")] * 2, 4)
    texts = ["<img src=x>\x00", "half a character \ud83d\u202e"]
    base = evaluator.result("base", [Answer([1], [1, 2], text) for text in texts], [(4.0, 4)] * 2)
    evaluator.folder.mkdir()
    (found := compared(base, base)).write_page("<i>")
    text = found.page.read_text(encoding="utf-8")
    assert not [bad for bad in ("<script>", "<img", "<i>alert", "\x00", "\u202e", "13812345678") if bad in text]
    assert "&lt;script&gt;" in text and "&gt;\\x00" in text and "\\ud83d\\u202e" in text and "138****" in text
    evaluator = evaluator_of(tiny[1], tmp_path, [row_of("打 13812345678", "a@b.cn")])
    [shown] = evaluator.table({"base": ["13812345678"], "merged": ["a@b.cn"]})
    assert list(shown.values()) == ["打 138****", "a@b****", "✗ 138****", "✓ a@b****"]


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
    assert evaluation.parse_tasks("") == []
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with refused("LM_EVAL_TASKS is 'hellaswag', and lm-eval"):
        evaluation.parse_tasks("hellaswag")
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    assert evaluation.parse_tasks("shop, mine.yaml,") == ["shop", "mine.yaml"]
    (tmp_path / "lm_eval.py").write_text(FAKE_LM_EVAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    file = tmp_path / "run/lm_eval/base.json"
    measured = evaluation.run_tasks(["--tasks", "shop"], files.TINY_MODEL, file)
    with refused("lm-eval could not run", "Tasks not found: missing None"):
        evaluation.run_tasks(["--tasks", "shop,missing"], files.TINY_MODEL, file)
    (tmp_path / "lm_eval.py").unlink()  # a second time it is read
    again = evaluation.run_tasks(["--tasks", "shop"], files.TINY_MODEL, file)
    assert again == measured and measured["shop"]["acc,none"] == 0.75


def test_true_answers_help_and_shuffled_ones_do_not() -> None:
    """With the stored answers of tiny models after 60 steps on true and on shuffled answers."""
    stored = json.loads((HERE / "shuffled_answers.json").read_text(encoding="utf-8"))
    references = references_of("eval.jsonl")
    found = {name: result(name, one["texts"], references, one["losses"]) for name, one in stored.items()}
    helped, not_helped = (compared(found["base"], found[name]) for name in ("true", "shuffled"))
    assert found["true"].mean("exact_match") > 0.3 and helped.verdict.word == "helped" and helped.verdict.flags == []
    for score in ("character_f1", "rouge_l"):  # what a naive report would call a success
        assert not_helped.changes[score].low > 0.2 and not_helped.changes[score].p < 0.001
    assert not_helped.changes["loss"].high < -2
    assert abs(found["shuffled"].mean("content")) < 0.03 and not_helped.verdict.word != "helped"
