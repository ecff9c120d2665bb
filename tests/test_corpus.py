"""The sample rows, the pre-training text, the tokenizer and the bundled tiny model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbutils import corpus
from nbutils.corpus import dialogues, messages, samples, stories, texts, tokens, words
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES, TINY_MODEL


def rows_of(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    settings = json.loads((TINY_MODEL / "training.json").read_text(encoding="utf-8"))["settings"]
    return corpus.build_tokenizer(corpus.pretraining_texts(20000, settings["SEED"]), settings["VOCAB"])


@pytest.fixture(scope="module")
def shipped() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


def test_the_committed_sample_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "nbutils.corpus", str(tmp_path)], check=True, capture_output=True)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (SAMPLES / name).read_bytes() == (tmp_path / name).read_bytes(), f"{name}: run python -m nbutils.corpus"


def test_training_and_evaluation_rows_have_nothing_in_common() -> None:
    train, evaluation = rows_of("train.jsonl"), rows_of("eval.jsonl")
    assert len(train) == samples.TRAIN_ROWS >= 600 and len(evaluation) == samples.EVAL_ROWS >= 100
    for turn in (0, 1):
        seen = {row[turn]["content"] for row in train}
        assert not seen & {row[turn]["content"] for row in evaluation}


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_every_ticket_is_one_line_of_json_that_repeats_its_message(name: str) -> None:
    for user, assistant in rows_of(name):
        assert (user["role"], assistant["role"]) == ("user", "assistant") and "\n" not in assistant["content"]
        ticket = json.loads(assistant["content"])
        assert list(ticket) == ["intent", "item", "count", "city", "day"] and ticket["intent"] in messages.INTENTS
        assert ticket["item"] in user["content"]
        assert all(ticket[key] is None or ticket[key] in user["content"] for key in ("city", "day"))
        assert ticket["count"] is None or _says(user["content"], ticket["count"])


def _says(text: str, count: int) -> bool:
    spelled = [words.number_zh(count), words.number_en(count)] if count <= words.LARGEST else []
    return any(form in text for form in [str(count), *spelled, *(["两"] if count == 2 else [])])


def test_each_fact_is_sometimes_missing_and_every_intent_and_language_occurs() -> None:
    tickets = [json.loads(row[1]["content"]) for row in rows_of("eval.jsonl")]
    assert {ticket["intent"] for ticket in tickets} == set(messages.INTENTS)
    assert all(any(ticket[key] is None for ticket in tickets) for key in ("count", "city", "day"))
    assert 0.3 < sum(ticket["item"].isascii() for ticket in tickets) / len(tickets) < 0.7


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    assert list(corpus.pretraining_texts(50, 1)) == list(corpus.pretraining_texts(50, 1))
    assert list(corpus.pretraining_texts(50, 1)) != list(corpus.pretraining_texts(50, 2))
    assert corpus.sample_rows(5, 1) == corpus.sample_rows(5, 1) != corpus.sample_rows(5, 2)


def test_pretraining_never_shows_a_ticket() -> None:
    for text in corpus.pretraining_texts(5000, 3):
        assert '{"' not in text and '"intent":' not in text


def test_combinations_of_the_sample_rows_are_kept_out_of_pretraining() -> None:
    rng = random.Random(0)
    for wanted in (True, False):
        scenes = [messages.draw_scene(rng, for_samples=wanted) for _ in range(200)]
        assert all(messages.kept_for_samples(scene.item, scene.city, scene.day) is wanted for scene in scenes)


@pytest.mark.parametrize("kind", texts.SHARES, ids=lambda kind: kind.__name__)
def test_every_kind_of_text_is_filled_in_and_balanced(kind: Any) -> None:
    rng = random.Random(5)
    for text in (kind(rng) for _ in range(100)):
        assert text.strip() and not any(f"{{{slot}}}" in text for slot in ("item", "amount", "city", "day", "who"))
        assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant")
        assert text.count("<|im_start|>") == text.count("<|im_end|>")


def test_the_shop_repeats_what_the_customer_said() -> None:
    rng = random.Random(2)
    for _ in range(100):
        message = messages.draw_message(rng)
        answer = dialogues.reply(rng, message)
        assert all(str(message.fields[key]) in answer for key in ("item", "city", "day") if message.fields[key])


def test_number_words() -> None:
    assert [words.number_zh(value) for value in (1, 10, 12, 20)] == ["一", "十", "十二", "二十"]
    assert [words.number_en(value) for value in (1, 12, 20)] == ["one", "twelve", "twenty"]
    assert len({words.number_zh(value) for value in range(1, words.LARGEST + 1)}) == words.LARGEST


def test_counting_adds_up() -> None:
    sums = [line for seed in range(60) for line in stories.counting(random.Random(seed)).splitlines() if " + " in line]
    assert sums
    for line in sums:
        left, right = line.split(";")[0].split(" = ")
        assert sum(map(int, left.split(" + "))) == int(right)


@pytest.mark.parametrize(
    "text", ["三箱苹果，周五送到杭州。", "Please send 12.\n\n", "漢字 🙂 {x}", "<|im_start|>user\nhi<|im_end|>"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_come_first_and_end_a_turn(tokenizer: Any, shipped: Any) -> None:
    for one in (tokenizer, shipped):
        assert one.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
        assert (one.eos_token, one.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_listed_chinese_word_is_the_same_token_wherever_it_stands(shipped: Any) -> None:
    for word in ("苹果", "杭州", "周五"):
        [token] = shipped(word)["input_ids"]
        assert token in shipped(f"请把{word}给我")["input_ids"] and token in shipped(f'"{word}"')["input_ids"]


def test_the_template_writes_chatml_and_trains_the_stop_token(shipped: Any) -> None:
    trl = pytest.importorskip("trl.chat_template_utils")
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]
    assert shipped.chat_template == corpus.CHAT_TEMPLATE
    assert shipped.apply_chat_template(turns, tokenize=False) == corpus.chat("你好", "您好！")
    asked = shipped.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == corpus.chat("你好") + "<|im_start|>assistant\n"
    coded = shipped.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, masked in zip(coded["input_ids"], coded["assistant_masks"], strict=True) if masked]
    assert shipped.decode(trained) == "您好！<|im_end|>"
    assert trl.has_generation_markers(shipped.chat_template) and trl.is_chat_template_stop_token_trained(shipped)


def test_rows_are_full_and_open_with_a_document(tokenizer: Any) -> None:
    made = list(corpus.pretraining_texts(200, 7))
    rows = corpus.token_rows(made, tokenizer, 64)
    starts = {tuple(tokenizer(text)["input_ids"][:8]) for text in made}
    assert rows.shape[1] == 64 and all(tuple(row[:8].tolist()) in starts for row in rows)


def test_what_cannot_work_is_refused(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="vocabulary of 100"):
        corpus.build_tokenizer(["text"], 100)
    with pytest.raises(CourseError, match="too little text"):
        corpus.token_rows(["short"], tokenizer, 64)


def test_a_finished_training_is_used_again_and_never_overwritten(tmp_path: Path) -> None:
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) is None
    (tmp_path / "training.json").write_text('{"settings": {"STEPS": 1}, "losses": []}')
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) == {"settings": {"STEPS": 1}, "losses": []}
    with pytest.raises(CourseError, match="STEPS 1"):
        corpus.finished_training(tmp_path, {"STEPS": 2})
    (tmp_path / "training.json").write_text('{"settings": {"STE')
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) is None


def test_the_bundled_model_is_small_and_says_how_it_was_made() -> None:
    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 12e6
    made = json.loads((TINY_MODEL / "training.json").read_text(encoding="utf-8"))
    config = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["tie_word_embeddings"]) == ("qwen2", True)
    assert config["hidden_size"] == made["settings"]["WIDTH"] and config["intermediate_size"] % 64 == 0
    assert made["losses"][-1][1] < 1 < made["losses"][0][1] and {"date", "hardware", "versions"} <= set(made)
    assert json.loads((TINY_MODEL / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2


def test_the_bundled_tokenizer_can_be_rebuilt(tokenizer: Any, shipped: Any) -> None:
    assert tokenizer.get_vocab() == shipped.get_vocab()


def test_the_bundled_model_answers_in_prose_and_copies(shipped: Any) -> None:
    from transformers import AutoModelForCausalLM

    from nbutils.evaluation import generate

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype="float32")
    asked = [[{"role": "user", "content": text}] for text in ("请周五给我送三箱苹果到杭州。", "Repeat: rice 7 Paris")]
    shop, copied = [answer.text for answer in generate(model, shipped, asked, max_new_tokens=40, batch_size=2)]
    assert all(word in shop for word in ("三箱苹果", "杭州", "周五")) and "{" not in shop
    assert copied == "rice 7 Paris"


def test_pieces_never_join_a_listed_word_with_its_sentence() -> None:
    assert tokens.pieces("<|im_start|>请送三箱苹果到杭州。") == ["请送", "三", "箱", "苹果", "到", "杭州", "。"]
