"""evaluation: answers that survive a kill, scores that are right, and a verdict that tells content from form."""

import json
import random
import shutil
from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import merge_models
import numpy as np
import pytest
import torch
from support import python, refused

from nbutils import chat, data, display, evaluation, files, hardware, profiles, record
from nbutils.config import settings_in
from nbutils.data.build import CJK
from nbutils.evaluation import bits, comparison, harness, inference, scores
from nbutils.evaluation import evaluator as evaluating
from nbutils.evaluation.comparison import Comparison
from nbutils.evaluation.inference import Answer
from nbutils.hardware import GPU
from nbutils.plan.recipe import Begun
from nbutils.platforms import Platform
from nbutils.training import practice

Tiny = tuple[Any, Any]  # the tiny model and its tokenizer
Patch = pytest.MonkeyPatch
HERE = Path(__file__).resolve().parent
RTX = GPU("RTX 4090", (8, 9), 23.6, 1)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(files.TINY_MODEL)


def rows_of(name: str, limit: int | None = None) -> list[dict[str, Any]]:
    lines = (files.SAMPLES / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def row_of(question: str, answer: str, **more: Any) -> dict[str, Any]:
    user = {"role": "user", "content": question}
    assistant = {"role": "assistant", "content": answer, **more}
    return {"messages": [user, assistant]}


def references_of(name: str, limit: int | None = None) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows_of(name, limit)]


def evaluator_of(
    tokenizer: Any,
    run: Path,
    rows: Sequence[Any],
    max_new_tokens: int = 8,
    used_rows: int = 0,
    **more: Any,
) -> evaluation.Evaluator:
    size = evaluation.Size(rows=used_rows, batch_size=4, max_new_tokens=max_new_tokens)
    return evaluation.Evaluator(run, tokenizer, rows, size, "float32", **more)


@pytest.fixture(scope="module")
def prompts(tiny: Tiny) -> dict[int, list[int]]:
    """The prompts of five held-out rows, numbered."""
    _, tokenizer = tiny
    renderer = chat.Renderer(tokenizer, "messages")
    numbered = {}
    for number, row in enumerate(rows_of("eval.jsonl", 5)):
        question = row["messages"][:-1]
        numbered[number] = renderer.prompt(question)
    return numbered


def answers_to(tiny: Tiny, prompts: dict[int, list[int]], max_new_tokens: int, batch_size: int) -> list[Answer]:
    """The answers in the order of the prompts."""
    numbered = dict(inference.answer_prompts(*tiny, prompts, max_new_tokens, batch_size))
    return [numbered[number] for number in prompts]


def test_an_answer_is_the_same_alone_in_a_batch_and_with_a_static_cache(tiny: Tiny, prompts: Any) -> None:
    model, tokenizer = tiny
    stops = sorted(chat.find_stop_ids(tokenizer, model.generation_config))

    alone = answers_to(tiny, prompts, 40, batch_size=1)
    together = answers_to(tiny, prompts, 40, batch_size=5)
    with torch.inference_mode():
        decoded = inference.decode(model, [answer.prompt_ids for answer in alone], 40, stops)

    assert alone == together
    for answer, generated in zip(alone, decoded, strict=True):
        assert answer.stopped
        assert answer.token_ids[-1] in stops
        assert generated[: len(answer.token_ids)] == answer.token_ids


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The text model of a random hybrid one whose weights are large enough to say something."""
    model = merge_models.load(merge_models.make_seeing_base(tmp_path_factory.mktemp("hybrid") / "base")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    return model


LENGTHS = (9, 3, 70, 1)


def test_a_hybrid_model_answers_the_same_alone_in_a_batch_and_with_a_static_cache(hybrid: Any) -> None:
    prompts = [list(range(20, 20 + length)) for length in LENGTHS]
    alone = [inference.generate_ids(hybrid, [prompt], 12, [1])[0] for prompt in prompts]
    assert len({tuple(answer) for answer in alone}) == len(prompts)
    assert inference.generate_ids(hybrid, prompts, 12, [1]) == alone
    with torch.inference_mode():
        assert inference.decode(hybrid, prompts, 12, [1]) == alone


def test_a_hybrid_model_has_the_same_losses_alone_and_in_a_batch(hybrid: Any) -> None:
    examples = []
    for row, length in enumerate(LENGTHS, 1):
        ids = array("i", range(20, 21 + length))
        examples.append(chat.Example(row, (), ids, b"\0" + b"\1" * length, [1], [1]))
    alone = [inference.example_losses(hybrid, [example])[0] for example in examples]
    assert [tokens for _, tokens in alone] == list(LENGTHS)
    for (expected, _), (loss, _) in zip(alone, inference.example_losses(hybrid, examples), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_an_answer_that_gets_too_few_tokens_is_cut_and_says_so(tiny: Tiny, prompts: Any) -> None:
    first_prompt = {0: prompts[0]}
    [whole] = answers_to(tiny, first_prompt, 40, batch_size=1)
    [cut] = answers_to(tiny, first_prompt, 3, batch_size=1)
    assert not cut.stopped
    assert cut.token_ids == whole.token_ids[:3]


def test_a_lesson_asks_some_rows_and_leaves_the_model_as_it_was(tiny: Tiny) -> None:
    model, tokenizer = tiny
    rows = rows_of("eval.jsonl", 2)
    model.train()

    first, second = evaluation.answer_rows(model, tokenizer, rows, max_new_tokens=8)
    again = evaluation.answer_rows(model, tokenizer, rows, max_new_tokens=8)

    assert model.training
    model.eval()
    assert again == [first, second]
    assert first != ""
    assert first != second
    assert len(tokenizer(first)["input_ids"]) <= 9


def test_out_of_memory_halves_the_batch() -> None:
    tried: list[int] = []

    def work(batch: Sequence[int]) -> list[int]:
        tried.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return [10 * number for number in batch]

    results = dict(inference.in_batches(range(7), 7, work))

    assert results == {0: 0, 1: 10, 2: 20, 3: 30, 4: 40, 5: 50, 6: 60}
    assert tried == [7, 3, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes do not match")])
def test_an_error_that_a_smaller_batch_does_not_solve_is_not_hidden(error: RuntimeError) -> None:
    fails = Mock(side_effect=error)
    with pytest.raises(type(error), match=str(error)):
        list(inference.in_batches([1, 2], 2, fails))


def test_an_answer_gets_the_tokens_the_references_need(tiny: Tiny, tmp_path: Path) -> None:
    _, tokenizer = tiny
    rows = rows_of("eval.jsonl", 8)
    lengths = [len(tokenizer(reference).input_ids) for reference in references_of("eval.jsonl", 8)]
    needed = int(1.5 * max(lengths))
    assert needed > 32

    all_rows = evaluator_of(tokenizer, tmp_path, rows, 512)
    one_row = evaluator_of(tokenizer, tmp_path, rows, 512, used_rows=1)
    short = evaluator_of(tokenizer, tmp_path, rows, 8)

    assert all_rows.max_new_tokens == needed
    assert one_row.max_new_tokens == needed  # the rows that are not asked count too
    assert short.max_new_tokens == 8  # what was allowed is never passed


def test_a_model_that_may_think_gets_all_tokens(tiny: Tiny, tmp_path: Path) -> None:
    rows = rows_of("eval.jsonl", 8)
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    thinking = evaluator_of(tokenizer, tmp_path, rows, 512)
    not_thinking = evaluator_of(tokenizer, tmp_path, rows, 512, thinking=False)
    assert thinking.max_new_tokens == 512
    assert not_thinking.max_new_tokens < 512


def test_rows_that_do_not_fit_are_left_out(tiny: Tiny, tmp_path: Path) -> None:
    _, tokenizer = tiny
    rows = rows_of("eval.jsonl", 3)
    too_long = row_of("苹果" * 300, "好")

    evaluator = evaluator_of(tokenizer, tmp_path, [rows[0], too_long, *rows[1:]], limit=200)

    assert evaluator.rows == rows
    assert len(evaluator.references) == 3
    assert evaluator.left_out == 1
    for no_row_fits in (rows, []):
        with refused(
            "No evaluation row fits 200 tokens",
            "course.max_new_tokens (now 190)",
            "vllm.max_model_len",
        ):
            evaluator_of(tokenizer, tmp_path, no_row_fits, 190, limit=200)


def test_a_wanted_tool_call_is_written_as_the_template_writes_it(tiny: Tiny) -> None:
    tokenizer = deepcopy(tiny[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    row = row_of("q", "", tool_calls=[call])
    renderer = chat.Renderer(tokenizer, "prompt_completion")
    assert evaluating.reference_of(renderer, row) == "<tool_call>find</tool_call>"


PROMPTS = [[1], [1, 2], [1, 2, 3]]


def ask_into(asked: list[int]) -> evaluating.Ask:
    """A model that notes which prompts it is asked; only its answer to prompt 1 does not stop."""

    def ask(prompts: dict[int, list[int]]) -> Any:
        for number, prompt in prompts.items():
            asked.append(number)
            text = f"答案 {number}\u2028\x85"  # with what Python takes for ends of lines
            yield number, Answer(prompt, [7, number], text, stopped=number != 1)

    return ask


@pytest.mark.parametrize(("torn_bytes", "missing"), [(0, []), (20, [2])])
def test_answers_are_asked_once_and_what_was_torn_again(tmp_path: Path, torn_bytes: int, missing: list[int]) -> None:
    file = tmp_path / "a.jsonl"
    whole = evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask_into([]))
    written = file.read_bytes()
    file.write_bytes(written[: len(written) - torn_bytes])

    asked: list[int] = []
    ask = ask_into(asked)
    second = evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask)
    third = evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask)

    assert second == whole
    assert third == whole
    assert asked == missing
    assert [answer.stopped for answer in whole] == [True, False, True]


def test_another_model_or_another_prompt_starts_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    evaluating.complete_answers(file, {"model": "m"}, PROMPTS, ask_into([]))
    asked_of_other_model: list[int] = []
    evaluating.complete_answers(file, {"model": "x"}, PROMPTS, ask_into(asked_of_other_model))
    assert asked_of_other_model == [0, 1, 2]
    other_prompts = [[1], [1, 2], [9]]
    asked_with_other_prompt: list[int] = []
    evaluating.complete_answers(file, {"model": "x"}, other_prompts, ask_into(asked_with_other_prompt))
    assert asked_with_other_prompt == [0, 1, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
from nbutils.evaluation import evaluator
from nbutils.evaluation.inference import Answer
def ask(prompts):
    for number, prompt in prompts.items():
        if number == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        yield number, Answer(prompt, [number], str(number))
evaluator.complete_answers(Path(sys.argv[1]), {}, [[n] for n in range(200)], ask)
"""


def test_after_a_kill_only_the_missing_answers_are_asked(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    prompts = [[number] for number in range(200)]
    killed = python("-c", KILLED, file, home=tmp_path, ok=False)
    assert killed.returncode == -9

    stored = evaluating.read_answers(file, {}, prompts)
    assert [answer.prompt_ids for answer in stored.values()] == prompts[:9]
    asked: list[int] = []
    evaluating.complete_answers(file, {}, prompts, ask_into(asked))
    assert asked == list(range(9, 200))


def test_losses_are_measured_once_and_again_for_another_model(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    evaluating.stored_once(file, {"model": "m"}, lambda: [[8.5, 4]])
    same_model = evaluating.stored_once(file, {"model": "m"}, lambda: [])
    other_model = evaluating.stored_once(file, {"model": "x"}, lambda: [])
    assert same_model == [[8.5, 4]]
    assert other_model == []


def loss_by_transformers(model: Any, tokenizer: Any, row: Any) -> tuple[float, int]:
    """The mean loss of a row's assistant tokens, and how many they are."""
    encoded = tokenizer.apply_chat_template(
        row["messages"],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = torch.tensor([encoded["input_ids"]])
    trained = torch.tensor([encoded["assistant_masks"]]).bool()
    labels = torch.where(trained, ids, -100)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).loss
    return float(loss), int(trained.sum())


def test_the_loss_is_that_of_the_assistants_tokens_whatever_the_batch(tiny: Tiny, monkeypatch: Patch) -> None:
    model, tokenizer = tiny
    rows = rows_of("eval.jsonl", 7)
    examples = chat.Renderer(tokenizer, "messages").encode_all(rows)
    calls: list[Any] = []

    def note(_: Any, args: Any, inputs: Any, output: Any) -> None:
        calls.append((output.logits.shape, inputs["input_ids"].shape))

    monkeypatch.setattr(inference, "MAX_LOGITS", 3072 * 100)  # of 100 positions: the vocabulary has 3,072 tokens
    with model.register_forward_hook(note, with_kwargs=True):
        losses = inference.row_losses(model, examples, 7)

    assert len(calls) >= 3  # 7 rows would have been one batch
    for (batch, positions, _), (_, width) in calls:
        assert batch * positions <= 100
        assert positions < width  # logits only where they are needed
    for row, (total, tokens) in zip(rows, losses, strict=True):
        expected_loss, expected_tokens = loss_by_transformers(model, tokenizer, row)
        assert tokens == expected_tokens
        assert total / tokens == pytest.approx(expected_loss, rel=1e-4)


def test_answers_of_one_row_are_added_up_where_each_is_a_text_of_its_own(tiny: Tiny) -> None:
    model, tokenizer = tiny
    first, second = rows_of("eval.jsonl", 2)
    two_answers = {"messages": first["messages"] + second["messages"]}
    rows = [two_answers, first]

    whole = chat.Renderer(tokenizer, "messages").encode_all(rows)
    by_answer = chat.Renderer(tokenizer, "prompt_completion").encode_all(rows)

    assert [example.row for example in whole] == [1, 2]
    assert [example.row for example in by_answer] == [1, 1, 2]
    losses = inference.row_losses(model, whole, 2)
    assert np.allclose(losses, inference.row_losses(model, by_answer, 2), rtol=1e-4)


@pytest.mark.parametrize(("answer", "reference", "f1", "rouge"), [
    ("今天 天气\n好", "今天天气好", 1.0, 1.0),
    ("今天", "今天天气好", 4 / 7, 4 / 7),
    ("ＡＢＣ", "ABC", 1.0, 1.0),
    ("好气天天今", "今天天气好", 1.0, 0.4),  # the same characters, the order lost but for 天天
    ("", "x", 0.0, 0.0),
    ("", "", 1.0, 1.0),
    ("<think>hm, 5?</think>\n\n4", "4", 1.0, 1.0),
    ("<think>still at it", "4", 0.0, 0.0),
    ("hm, 5?</think>\n\n4", "4", 1.0, 1.0),  # the prompt opened the thinking
])  # fmt: skip
def test_scores_count_characters(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert scores.character_f1(answer, reference) == pytest.approx(f1)
    assert scores.rouge_l(answer, reference) == pytest.approx(rouge)


def test_an_exact_answer_is_the_reference_but_for_surrounding_white_space() -> None:
    assert scores.exact("b", "b") == 1.0
    assert scores.exact(" a ", "a") == 1.0
    assert scores.exact("x", "c") == 0.0


def test_answers_are_compared_with_other_rows_of_their_language_and_never_with_their_own() -> None:
    mixed: list[str] = []
    for number in range(20):
        mixed += [f"answer {number}", f"答案 {number}"]

    def same_language(answer: str, reference: str) -> float:
        return float(answer[0] == reference[0])

    # The language alone is hardly content: nearly all rows that an answer is compared with have it too.
    assert fmean(scores.content(same_language, mixed, mixed)) <= 0.15
    # Each text is there once. If its own row were among those it is compared with, this were below 1.
    assert scores.content(scores.exact, mixed, mixed) == [1.0] * 40


def test_content_is_what_an_answer_scores_beyond_other_rows() -> None:
    labels = ["no", "yes"] * 30
    constant = scores.content(scores.exact, ["yes"] * 60, labels)
    right = scores.content(scores.exact, labels, labels)
    assert abs(fmean(constant)) < 0.1
    assert fmean(right) > 0.4
    assert scores.content(scores.exact, ["a"], ["a"]) == [0.0]  # no other row to compare with


@pytest.mark.parametrize(("right", "rows", "low", "high"), [
    (0, 120, 0.0, 0.031),
    (120, 120, 0.969, 1.0),
    (1, 2, 0.0945, 0.9055),
])  # fmt: skip
def test_the_interval_of_a_share_is_wilsons(right: int, rows: int, low: float, high: float) -> None:
    wrong = rows - right
    share = scores.estimate_share([1.0] * right + [0.0] * wrong)
    assert share.mean == right / rows
    assert share.low == pytest.approx(low, abs=1e-4)
    assert share.high == pytest.approx(high, abs=1e-4)


def test_the_interval_of_a_mean_is_a_seeded_bootstrap() -> None:
    weighted = scores.estimate([1.0, 3.0], weights=[3, 1])
    assert weighted == scores.Estimate(mean=1.5, low=1.0, high=3.0)
    rng = np.random.default_rng(0)
    drawn = rng.random(60) < 0.3
    first = scores.estimate(drawn)
    again = scores.estimate(drawn)
    assert again == first


@pytest.mark.parametrize(("risen", "fallen", "same", "p", "low", "high"), [
    (0, 0, 20, 1.0, -0.126, 0.126),
    (5, 0, 20, 0.0625, 0.0063, 0.3641),
    (8, 2, 20, 0.109375, -0.0145, 0.3895),
    (3, 3, 20, 1.0, -0.198, 0.198),
    (12, 2, 36, 0.012939, 0.0509, 0.3337),
    (120, 0, 0, 0.0, 0.9516, 1.0),  # rows that all change leave some doubt
])  # fmt: skip
def test_shares_compare_by_mcnemar_and_bonett_price(
    risen: int, fallen: int, same: int, p: float, low: float, high: float
) -> None:
    before = [0.0] * risen + [1.0] * fallen + [1.0] * same
    after = [1.0] * risen + [0.0] * fallen + [1.0] * same
    rows = risen + fallen + same

    change = scores.paired_share_difference(before, after)

    assert change.p == pytest.approx(p, abs=1e-6)
    assert change.mean == pytest.approx((risen - fallen) / rows)
    assert change.low == pytest.approx(low, abs=1e-3)
    assert change.high == pytest.approx(high, abs=1e-3)


def test_a_difference_is_tested_in_pairs() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0.0, 10.0, size=40)
    after = before + rng.normal(1.0, 1.0, size=40)  # a small rise of each row, beside large differences between rows
    assert scores.paired_difference(before, after).p < 0.001
    assert scores.paired_difference(before, before).p == 1.0


def test_a_difference_without_numbers_is_shown_as_such() -> None:
    nothing = scores.paired_difference([1.0] * 20, [float("nan")] * 20)
    assert nothing.text() == "nan [nan, nan]"
    assert nothing.p_text == "nan"


def result(
    name: str,
    texts: Sequence[str],
    references: Sequence[str],
    losses: Sequence[Any] = (),
    stopped: bool = True,
) -> Any:
    """What an evaluator would make of these texts; without `losses` that of each token is 1."""
    evaluator: Any = SimpleNamespace(references=references, left_out=0, mode="", folder=Path("evaluation"))
    answers = [Answer([1], [1, 2], text, stopped) for text in texts]
    losses = losses or [(4.0, 4)] * len(texts)
    scored = evaluating.score_answers(answers, references)
    scored["loss"] = [total / tokens for total, tokens in losses]
    return evaluating.Result(evaluator, name, answers, scored, losses)


def compared(base: Any, tuned: Any, general_base: Any = None, general_tuned: Any = None) -> Comparison:
    """Without general rows those of the base take their place, before and after: nothing is forgotten."""
    return Comparison(base, tuned, general_base or base, general_tuned or base)


NO_PROOF = "no proof that it helped"
WORDS = ["苹果", "香蕉", "西瓜", "pencils", "cookies", "juice", "信封", "纸巾"]
WANTED = [f"{{item: {WORDS[n % 8]}, count: {n}}}" for n in range(60)]
PROSE = [f"Well, I do not know about that, friend number {n * 7 % 60}." for n in range(60)]
LABELS = ["no", "yes"] * 30
FEW_CUT_OFF = ["<think>let me see"] * 11 + PROSE[11:]
MANY_CUT_OFF = ["<think>let me see"] * 13 + PROSE[13:]
SHUFFLED = random.Random(2).sample(WANTED, 60)  # the form of every answer, the content of none
OTHER_KEY = [text.replace("item", "thing") for text in WANTED]


@pytest.mark.parametrize(("base", "tuned", "references", "word"), [
    pytest.param(PROSE, WANTED, WANTED, "helped", id="all right now"),
    pytest.param(FEW_CUT_OFF, WANTED, WANTED, "helped", id="few cut off while thinking"),
    pytest.param(MANY_CUT_OFF, WANTED, WANTED, NO_PROOF, id="many cut off while thinking"),
    pytest.param(PROSE, SHUFFLED, WANTED, NO_PROOF, id="the form alone"),
    pytest.param(PROSE, ["yes"] * 60, LABELS, NO_PROOF, id="right half of the time"),
    pytest.param(WANTED, WANTED, WANTED, NO_PROOF, id="right before and after"),
    pytest.param(WANTED, [WANTED[0]] * 60, WANTED, "harmed", id="one answer to everything"),
    pytest.param(PROSE[:3], WANTED[:3], WANTED[:3], NO_PROOF, id="too few rows"),
    pytest.param(PROSE, ["好的"] * 60, ["好的"] * 60, NO_PROOF, id="one reference for everything"),
    pytest.param(OTHER_KEY, WANTED[:10] + [""] * 50, WANTED, NO_PROOF, id="some right, the others lost"),
])  # fmt: skip
def test_the_verdict(base: list[str], tuned: list[str], references: list[str], word: str) -> None:
    before = result("base", base, references)
    after = result("merged", tuned, references)
    verdict = compared(before, after).verdict
    assert verdict.word == word
    text = str(verdict)
    assert word in text
    assert max(map(len, text.splitlines())) <= display.WRAPPED_WIDTH


@pytest.mark.slow
def test_chance_seldom_helps_or_harms() -> None:
    rng = random.Random(8)
    words: list[str] = []
    for _ in range(40):
        base = result("base", rng.choices(WANTED, k=60), WANTED)
        tuned = result("merged", rng.choices(WANTED, k=60), WANTED)
        words.append(compared(base, tuned).verdict.word)
    assert words.count("harmed") <= 3
    assert words.count("helped") <= 3


@pytest.fixture
def partly_right() -> Comparison:
    """The tuned model answers about a fifth of the rows right, the base none."""
    rng = random.Random(3)
    answers = []
    for right, prose in zip(WANTED, PROSE, strict=True):
        answers.append(right if rng.random() < 0.2 else prose)
    base = result("base", PROSE, WANTED)
    tuned = result("merged", answers, WANTED)
    return compared(base, tuned)


def test_table_facts_and_verdict_show_one_interval(partly_right: Comparison) -> None:
    table = {row["score"]: row for row in partly_right.table()}
    shown = table["content (exact)"]
    facts = partly_right.facts()["evaluation"]["scores"]
    stored = facts["exact_content"]["difference"]
    assert shown["difference"] in partly_right.verdict.why
    assert shown["p"] in partly_right.verdict.why
    assert stored["low"] == partly_right.changes["exact_content"].low


@pytest.mark.parametrize(("p", "word"), [(0.03, NO_PROOF), (0.02, "helped")])
def test_the_two_scores_that_decide_share_the_probability_of_an_error(
    p: float, word: str, partly_right: Comparison, monkeypatch: Patch
) -> None:
    """0.05 in all, 0.025 each."""
    change = scores.Difference(mean=0.1, low=0.01, high=0.2, p=p, test="")
    monkeypatch.setattr(evaluating.Result, "change", lambda *_: change)
    assert partly_right.verdict.word == word


def test_a_tuned_model_that_does_not_stop_is_flagged() -> None:
    base = result("base", PROSE, WANTED)
    endless = result("merged", WANTED, WANTED, stopped=False)
    [flag] = compared(base, endless).verdict.flags
    assert "60 of 60 answers" in flag


def test_a_base_that_does_not_stop_is_not_flagged() -> None:
    endless = result("base", PROSE, WANTED, stopped=False)
    tuned = result("merged", WANTED, WANTED)
    assert compared(endless, tuned).verdict.flags == []


def general(loss: float | list[float], texts: Sequence[str] = PROSE, rows: int = 60) -> Any:
    """General rows whose tokens have this loss, the same in every row or a loss for each."""
    losses = loss if isinstance(loss, list) else [loss] * rows
    return result("merged", texts[:rows], WANTED[:rows], [(4 * row_loss, 4) for row_loss in losses])


@pytest.mark.parametrize(("base", "tuned", "word"), [
    (general(1.0), general(1.05), "kept"),
    (general(1.0), general(1.5), "forgot"),
    (general(1.0, rows=12), general([0.5, 1.0, 1.2, 1.9] * 3, rows=12), "unclear"),
    (general(1.0, rows=9), general(3.0, rows=9), "unclear"),
    (general(1.0, WANTED), general(1.0, ["{}"] * 60), "forgot"),  # the answers are lost, the loss is not
    (general(1.0), general(1e9), "forgot"),
    (general(1.0), general(float("nan")), "unclear"),
])  # fmt: skip
def test_forgetting(base: Any, tuned: Any, word: str) -> None:
    comparison = compared(base, tuned, base, tuned)
    assert word in str(comparison.forgetting)
    assert comparison.facts()["evaluation"]["general"]["verdict"] == word


def test_the_verdict_names_what_was_forgotten() -> None:
    base = result("base", PROSE, WANTED)
    tuned = result("merged", WANTED, WANTED)
    verdict = compared(base, tuned, general(1.0), general(1.5)).verdict
    title, *_ = str(verdict).splitlines()
    assert "helped" in title
    assert "forgot" in title


def test_the_general_rows_are_sound_and_none_resembles_another(tmp_path: Path) -> None:
    questions = [row["messages"][0]["content"] for row in rows_of("general.jsonl")]
    chinese = [question for question in questions if CJK.search(question)]
    others = len(questions) - len(chinese)
    prepared = data.prepare(str(files.SAMPLES / "general.jsonl"), tmp_path / "data")
    assert 50 <= len(questions) <= 80
    assert len(chinese) >= 20
    assert others >= 20
    assert not prepared.rejected


@pytest.mark.slow
def test_answers_become_a_table_facts_a_page_and_a_figure(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    model, tokenizer = tiny
    evaluator = evaluator_of(tokenizer, tmp_path, rows_of("eval.jsonl", 6), 16)
    first_question = evaluator.questions[0][-1]["content"]
    base = evaluator.evaluate("base", model, "base")
    assert evaluator.stored_answers("base", "base", files.TINY_MODEL) == base.answers
    merged_answers = [replace(answer, text="merged") for answer in base.answers]
    merged = evaluator.result("merged", merged_answers, base.losses)
    comparison = compared(base, merged)

    loss, exact_match, *_ = comparison.table()
    assert loss["score"] == "loss"
    assert exact_match["score"] == "exact match"
    [stopped] = comparison.table("stopped")
    assert stopped["score"] == "stopped"

    facts = json.loads(json.dumps(comparison.facts()))["evaluation"]
    assert facts["verdict"] == NO_PROOF
    assert facts["rows"] == 6
    assert facts["answers_by"] == {"base": "generate", "merged": "generate"}

    comparison.write_page("demo")
    page = comparison.page.read_text(encoding="utf-8")
    assert comparison.verdict.word in page
    assert first_question in page
    for from_elsewhere in ("http://", "https://", "<script"):
        assert from_elsewhere not in page
    with monkeypatch.context() as chinese:
        chinese.setenv("NBUTILS_LANG", "zh")
        comparison.write_page("demo")
    assert "微调有用吗" in comparison.page.read_text(encoding="utf-8")

    comparison.show_answers(6)
    comparison.show_scores("loss")
    printed = capsys.readouterr().out
    assert first_question in printed
    assert "merged" in printed
    assert "\nloss " in printed

    table = evaluation.score_table(evaluator, {"one": base.answers, "two": merged.answers})
    assert [row["score"] for row in table] == ["exact match", "character F1", "ROUGE-L", "stopped"]
    assert len(evaluator.general().rows) > 50


def test_thinking_that_the_prompt_opened_is_no_part_of_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    opens_thinking = deepcopy(tiny[1])
    opens_thinking.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    evaluator = evaluator_of(opens_thinking, tmp_path, rows_of("eval.jsonl", 2))
    right = Answer([1], [1], f"hm</think>{evaluator.references[0]}")
    unfinished = Answer([1], [1], "still at it")
    raw = [right, unfinished]

    for answer in evaluator.with_think_tag(raw):
        assert answer.text.startswith("<think>")
    scored = evaluator.result("server", raw).scores
    assert scored["exact_match"] == [1.0, 0.0]
    assert scored["unfinished"] == [0.0, 1.0]
    _, character_f1, *_ = evaluation.score_table(evaluator, {"server": raw})
    assert character_f1["server"].startswith("0.500")


def test_where_the_prompt_opens_no_thinking_answers_stay_as_they_are(tiny: Tiny, tmp_path: Path) -> None:
    evaluator = evaluator_of(tiny[1], tmp_path, rows_of("eval.jsonl", 2))
    raw = [Answer([1], [1], "hm</think>4"), Answer([1], [1], "still at it")]
    assert evaluator.with_think_tag(raw) == raw


def tiny_profile() -> Any:
    profile = profiles.load("tiny")
    load = profile.from_pretrained.model_copy(update={"dtype": "float32"})
    return profile.model_copy(update={"from_pretrained": load})


def numbers_as_answers(model: Any, tokenizer: Any, prompts: dict[int, list[int]], *size: int) -> Any:
    """In place of `inference.answer_prompts`: each prompt is answered with its number."""
    return [(number, Answer(prompt, [number], str(number))) for number, prompt in prompts.items()]


@pytest.mark.slow
def test_later_lessons_read_the_stored_answers_of_the_merged_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: Patch
) -> None:
    run = record.RunFolder(tmp_path / "run")
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    with files.complete_folder(run.path / "merged", {"base": "tiny"}) as folder:
        shutil.copytree(files.TINY_MODEL, folder, dirs_exist_ok=True)
    profile = tiny_profile()
    _, before = evaluation.stored_answers(run, profile, run.merged)
    assert before == []

    asked = evaluation.open_evaluator(run, profile, run.merged)
    monkeypatch.setattr(inference, "answer_prompts", numbers_as_answers)
    asked.evaluate("merged", tiny[0], files.stamp(run.merged))
    file = asked.folder / "answers-merged.jsonl"
    written = file.read_bytes()
    evaluator, answers = evaluation.stored_answers(run, profile, run.merged, rows=3)

    assert [answer.text for answer in answers] == ["0", "1", "2"]
    assert len(evaluator.questions) == 3
    assert file.read_bytes() == written


def test_what_people_wrote_is_escaped_and_masked_on_the_page(tiny: Tiny, tmp_path: Path) -> None:
    row = row_of("<script>alert(1)</script> 13812345678", "<b>&")
    evaluator = evaluator_of(tiny[1], tmp_path, [row, row])
    answers = [
        Answer([1], [1, 2], "<img src=x>\x00"),
        Answer([1], [1, 2], "half a character \ud83d\u202e"),
    ]
    base = evaluator.result("base", answers, [(4.0, 4), (4.0, 4)])
    evaluator.folder.mkdir()
    comparison = compared(base, base)

    comparison.write_page("<i>")

    page = comparison.page.read_text(encoding="utf-8")
    for raw in ("<script>", "<img", "<i>alert", "\x00", "\u202e", "13812345678"):
        assert raw not in page
    for escaped in ("&lt;script&gt;", "&gt;\\x00", "\\ud83d\\u202e", "138****"):
        assert escaped in page


def test_private_data_is_masked_in_the_table(tiny: Tiny, tmp_path: Path) -> None:
    evaluator = evaluator_of(tiny[1], tmp_path, [row_of("打 13812345678", "a@b.cn")])
    [row] = evaluator.table({"base": ["13812345678"], "merged": ["a@b.cn"]})
    assert list(row.values()) == ["打 138****", "a@b****", "✗ 138****", "✓ a@b****"]


FAKE_LM_EVAL = """
import json, os, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "missing" in options["--tasks"]:
    sys.exit(f"Tasks not found: missing {os.environ.get('WANDB_API_KEY')}")
out = pathlib.Path(options["--output_path"]) / "model"
out.mkdir(parents=True)
numbers = {"alias": "shop", "acc,none": 0.75, "acc_stderr,none": 0.1, "sample_len": 3}
(out / "results_1.json").write_text(json.dumps({"results": {"shop": numbers}}))
"""


def test_the_tasks_of_a_public_benchmark_need_lm_eval(monkeypatch: Patch) -> None:
    assert evaluation.parse_tasks("") == []
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with refused("LM_EVAL_TASKS is 'hellaswag', and lm-eval"):
        evaluation.parse_tasks("hellaswag")
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    assert evaluation.parse_tasks("shop, mine.yaml,") == ["shop", "mine.yaml"]


def test_public_benchmarks_run_once_in_a_process_without_secrets(tmp_path: Path, monkeypatch: Patch) -> None:
    program = tmp_path / "lm_eval.py"
    program.write_text(FAKE_LM_EVAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    file = tmp_path / "run/lm_eval/base.json"

    measured = evaluation.run_tasks(["--tasks", "shop"], files.TINY_MODEL, file)
    assert measured["shop"]["acc,none"] == 0.75
    with refused("lm-eval could not run", "Tasks not found: missing None"):
        evaluation.run_tasks(["--tasks", "shop,missing"], files.TINY_MODEL, file)
    program.unlink()
    again = evaluation.run_tasks(["--tasks", "shop"], files.TINY_MODEL, file)  # read from its file
    assert again == measured


@pytest.fixture(scope="module")
def stored_results() -> dict[str, Any]:
    """The stored answers of tiny models: the base, and after 60 steps on true and on shuffled answers."""
    stored = json.loads((HERE / "shuffled_answers.json").read_text(encoding="utf-8"))
    references = references_of("eval.jsonl")
    results = {}
    for name, model in stored.items():
        results[name] = result(name, model["texts"], references, model["losses"])
    return results


def test_true_answers_help(stored_results: dict[str, Any]) -> None:
    verdict = compared(stored_results["base"], stored_results["true"]).verdict
    assert stored_results["true"].mean("exact_match") > 0.3
    assert verdict.word == "helped"
    assert verdict.flags == []


def test_practice_runs_that_lesson_03_left_out_are_trained_where_they_are_judged(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(practice, "RUNS", {"too short": practice.Practice(rows=4, steps=1)})
    monkeypatch.setattr(comparison, "PRACTICE_SIZE", evaluation.Size(rows=2, batch_size=2, max_new_tokens=2))
    monkeypatch.setattr(comparison, "PRACTICE_GENERAL_ROWS", 2)
    judged = evaluation.compare_practice(tmp_path)
    assert judged["too short"].tuned.mean("loss") < judged["too short"].base.mean("loss")
    assert [len(judged["too short"].tuned.answers), len(judged["too short"].general_tuned.answers)] == [2, 2]


def test_shuffled_answers_do_not_help(stored_results: dict[str, Any]) -> None:
    comparison = compared(stored_results["base"], stored_results["shuffled"])
    for score in ("character_f1", "rouge_l"):  # what a naive report would call a success
        change = comparison.changes[score]
        assert change.low > 0.2
        assert change.p < 0.001
    assert comparison.changes["loss"].high < -2
    assert abs(stored_results["shuffled"].mean("content")) < 0.03
    assert comparison.verdict.word != "helped"


HELD_OUT = [row_of(f"How many rivets for order {number}?", f"{number} rivets, by Friday.") for number in range(6)]


def resolved_for(model: str = "tiny", gpu: GPU | None = None, text: str = "") -> profiles.Resolved:
    """The tiny profile with SET; another one where a model is named."""
    overrides = {name: (value, "SET") for name, value in settings_in(text).items()}
    return profiles.resolve(
        "tiny" if model == "tiny" else "ampere_24gb",
        model,
        gpu=gpu,
        platform=Platform("local", "a test says so"),
        online=lambda: True,
        overrides=lambda name: overrides,
    )


@pytest.mark.parametrize(
    "text", ["", "quantization.bnb_4bit_quant_type=fp4, quantization.bnb_4bit_use_double_quant=false"]
)
def test_what_4_bits_cost_is_measured_as_if_the_model_were_loaded_in_4_bits(tiny: Tiny, text: str) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    resolved = resolved_for(text=text)
    examples = chat.filter_by_length(tiny[1], HELD_OUT, 256).examples
    loss = bits.measure(resolved, examples)

    quantization = BitsAndBytesConfig(**resolved.profile.quantization, bnb_4bit_compute_dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(
        files.TINY_MODEL, quantization_config=quantization, dtype="float32", device_map={"": "cpu"}
    )
    hardware.keep_4bit_layout(loaded)
    assert loss["qlora"] == pytest.approx(bits.mean_loss(loaded, examples), abs=1e-4)
    assert loss["lora"] == pytest.approx(bits.mean_loss(tiny[0], examples), abs=1e-4)
    assert abs(loss["qlora"] - loss["lora"]) > 0.01, "4 bits do something"


def test_lesson_03_is_told_what_4_bits_cost_and_what_both_need(tiny: Tiny, monkeypatch: Patch, capsys: Any) -> None:
    dataset = chat.filter_by_length(tiny[1], HELD_OUT, 256)
    measured = evaluation.base_losses(resolved_for(), dataset, HELD_OUT[:4])
    assert measured and (measured.rows, measured.needed_gib) == (4, {})
    monkeypatch.setattr(bits, "measure", lambda *_: {"lora": 2.06, "qlora": 2.66})
    monkeypatch.setattr(bits.placement, "fit", lambda *_: True)
    measured = evaluation.base_losses(resolved_for("Qwen2.5-7B", RTX), dataset, HELD_OUT)
    assert measured and measured.needed_gib["lora"] > measured.needed_gib["qlora"] + 5
    shown = capsys.readouterr().out
    for number in (
        "2.060",
        "2.660",
        f"{measured.needed_gib['lora']:.1f} GiB",
        f"{measured.needed_gib['qlora']:.1f} GiB",
    ):
        assert number in shown


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"model": "Qwen2.5-14B"}, "needs at least"),
        ({"gpu": None}, "takes a GPU"),
        ({"model": "me/unknown"}, "known size"),
        ({"text": "method=qlora"}, "not named in the profile"),
        ({"text": "quantization.load_in_4bit=false"}, "still open"),
        ({"begun": "lora"}, "an earlier session"),
        ({"strategy": "fsdp"}, "no FSDP"),
        ({"free": False}, "in use"),
        ({"rows": []}, "held-out row"),
        ({"rows": [row_of("?", "a long answer " * 200)]}, "longer than"),
    ],
)
def test_what_cannot_be_measured_is_not_and_nothing_is_loaded(
    case: dict[str, Any], reason: str, tiny: Tiny, monkeypatch: Patch, capsys: Any
) -> None:
    loaded = Mock(return_value={"lora": 2.0, "qlora": 2.0})
    monkeypatch.setattr(bits, "measure", loaded)
    monkeypatch.setattr(bits.placement, "fit", lambda *_: case.get("free", True))
    monkeypatch.setattr(bits.distributed, "strategy", lambda: case.get("strategy", ""))
    resolved = resolved_for(case.get("model", "Qwen2.5-7B"), case.get("gpu", RTX), case.get("text", ""))
    resolved = replace(resolved, begun=Begun(method=case.get("begun", "")))
    dataset = chat.filter_by_length(tiny[1], HELD_OUT, 256)
    assert evaluation.base_losses(resolved, dataset, case.get("rows", HELD_OUT)) is None
    assert reason in capsys.readouterr().out
    loaded.assert_not_called()
