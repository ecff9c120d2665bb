"""The sample rows, the pre-training text, the tokenizer and the bundled tiny model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import refused

from nbutils import corpus
from nbutils.corpus import pretraining, samples
from nbutils.paths import SAMPLES, TINY_MODEL


@pytest.fixture(scope="module")
def rebuilt() -> Any:
    settings = json.loads((TINY_MODEL / "training.json").read_text(encoding="utf-8"))["settings"]
    return corpus.build_tokenizer(corpus.pretraining_texts(20000, settings["SEED"]), settings["VOCAB"])


@pytest.fixture(scope="module")
def bundled() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


def rows_of(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]


def test_the_bundled_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "nbutils.corpus", str(tmp_path)], check=True, capture_output=True)
    for name in samples.FILES:
        assert (SAMPLES / name).read_bytes() == (tmp_path / name).read_bytes(), f"{name}: run python -m nbutils.corpus"


@pytest.mark.parametrize("name", samples.FILES)
def test_every_ticket_is_one_line_of_json_that_repeats_its_message(name: str) -> None:
    for user, assistant in rows_of(name):
        assert (user["role"], assistant["role"]) == ("user", "assistant") and "\n" not in assistant["content"]
        ticket, text = json.loads(assistant["content"]), user["content"]
        assert list(ticket) == ["intent", "item", "count", "city", "day"] and ticket["intent"] in samples.INTENTS
        assert ticket["item"] in text and all(ticket[key] is None or ticket[key] in text for key in ("city", "day"))
        assert ticket["count"] is None or any(form in text for form in spellings(ticket["count"]))


def spellings(count: int) -> list[str]:
    words = [samples.number_word(count, language) for language in samples.LANGUAGES] if count <= samples.LARGEST else []
    return [str(count), *words, *(["两"] if count == 2 else [])]


def test_evaluation_rows_are_unseen_and_varied() -> None:
    train, evaluation = rows_of("train.jsonl"), rows_of("eval.jsonl")
    for turn in (0, 1):
        assert not {row[turn]["content"] for row in train} & {row[turn]["content"] for row in evaluation}
    tickets = [json.loads(row[1]["content"]) for row in evaluation]
    assert {ticket["intent"] for ticket in tickets} == set(samples.INTENTS)
    assert all(any(ticket[key] is None for ticket in tickets) for key in ("count", "city", "day"))
    assert 0.3 < sum(ticket["item"].isascii() for ticket in tickets) / len(tickets) < 0.7


def test_text_depends_on_the_seed_alone_and_never_shows_a_ticket() -> None:
    texts = list(corpus.pretraining_texts(3000, 1))
    assert texts == list(corpus.pretraining_texts(3000, 1)) != list(corpus.pretraining_texts(3000, 2))
    assert not any('{"' in text or '"intent":' in text for text in texts)


@pytest.mark.parametrize("for_samples", [True, False])
def test_combinations_of_the_sample_rows_are_kept_out_of_pretraining(for_samples: bool) -> None:
    rng = random.Random(0)
    scenes = [samples.draw_scene(rng, for_samples) for _ in range(200)]
    assert all(samples.kept_for_samples(scene.item, scene.city, scene.day) is for_samples for scene in scenes)


@pytest.mark.parametrize("kind", pretraining.SHARES, ids=lambda kind: kind.__name__)
def test_every_kind_of_text_is_filled_in_and_balanced(kind: Any) -> None:
    rng = random.Random(5)
    for text in (kind(rng) for _ in range(100)):
        assert text.strip() and not any(f"{{{slot}}}" in text for slot in ("item", "amount", "city", "day", "who"))
        assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant")
        assert text.count("<|im_start|>") == text.count("<|im_end|>")


def test_the_bundled_tokenizer_can_be_rebuilt(rebuilt: Any, bundled: Any) -> None:
    assert rebuilt.get_vocab() == bundled.get_vocab()
    for tokenizer in (rebuilt, bundled):
        assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
        for text in ("Please send 12.\n\n", "漢字 🙂 {x}", "<|im_start|>user\nhi<|im_end|>"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_listed_word_is_the_same_token_in_every_sentence(bundled: Any) -> None:
    for word in ("苹果", "杭州", "周五"):
        [token] = bundled(word)["input_ids"]
        assert token in bundled(f"请把{word}给我")["input_ids"] and token in bundled(f'"{word}"')["input_ids"]


def test_the_template_writes_chatml_and_trains_the_stop_token(bundled: Any) -> None:
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]
    assert bundled.chat_template == corpus.CHAT_TEMPLATE
    assert bundled.apply_chat_template(turns, tokenize=False) == corpus.chat("你好", "您好！")
    prompt = bundled.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == corpus.chat("你好") + "<|im_start|>assistant\n"
    encoded = bundled.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert bundled.decode(trained) == "您好！<|im_end|>"


def test_rows_are_full_and_begin_with_a_document(bundled: Any) -> None:
    texts = list(corpus.pretraining_texts(200, 7))
    rows = corpus.token_rows(texts, bundled, 64)
    starts = {tuple(bundled(text)["input_ids"][:8]) for text in texts}
    assert rows.shape[1] == 64 and all(tuple(row[:8].tolist()) in starts for row in rows)


def test_too_small_a_vocabulary_and_too_little_text_are_refused(bundled: Any) -> None:
    with refused("corpus.vocabulary_too_small", size=100):
        corpus.build_tokenizer(["text"], 100)
    with refused("corpus.too_little_text"):
        corpus.token_rows(["short"], bundled, 64)


def test_a_finished_training_is_used_again_and_never_overwritten(tmp_path: Path) -> None:
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) is None
    (tmp_path / "training.json").write_text('{"settings": {"STEPS": 1}, "losses": []}')
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) == {"settings": {"STEPS": 1}, "losses": []}
    with refused("corpus.other_settings", settings="STEPS 1"):
        corpus.finished_training(tmp_path, {"STEPS": 2})
    (tmp_path / "training.json").write_text('{"settings": {"STE')
    assert corpus.finished_training(tmp_path, {"STEPS": 1}) is None


def test_the_bundled_model_is_small_and_answers_in_prose(bundled: Any) -> None:
    from transformers import AutoModelForCausalLM

    from nbutils.evaluation import generate

    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 12e6
    record = json.loads((TINY_MODEL / "training.json").read_text(encoding="utf-8"))
    assert {"settings", "losses", "date", "hardware", "versions"} <= set(record)
    assert json.loads((TINY_MODEL / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype="float32")
    asked = [[{"role": "user", "content": text}] for text in ("请周五给我送三箱苹果到杭州。", "Repeat: rice 7 Paris")]
    shop, copied = [answer.text for answer in generate(model, bundled, asked, max_new_tokens=40, batch_size=2)]
    assert all(word in shop for word in ("三箱苹果", "杭州", "周五")) and "{" not in shop
    assert copied == "rice 7 Paris"
