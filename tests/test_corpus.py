"""The sample rows, the pre-training text and the bundled tiny model."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, ci_module, python

from nbutils.files import SAMPLES, TINY_MODEL

corpus = ci_module("corpus")


@pytest.fixture(scope="module")
def bundled() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the generator writes."""
    folder = tmp_path_factory.mktemp("samples")
    python(ROOT / ".ci/samples.py", folder, home=folder)
    return folder


def test_the_bundled_rows_are_what_the_generator_writes_and_no_ticket_is_there_twice(made: Path) -> None:
    tickets = []
    for name in ("train.jsonl", "eval.jsonl"):
        content = (made / name).read_bytes()
        assert (SAMPLES / name).read_bytes() == content, f"{name}: run python .ci/samples.py"
        for line in content.decode().splitlines():
            _, answer = json.loads(line)["messages"]
            tickets.append(answer["content"])
    assert len(tickets) == 920
    assert len(set(tickets)) == 920
    assert set(json.loads(tickets[0])) == {"intent", "item", "count", "city", "day"}


def test_the_documents_of_lesson_10_are_what_the_generator_writes_with_tickets_of_their_own(made: Path) -> None:
    bundled_files = sorted(file for file in (SAMPLES / "your_model").rglob("*") if file.is_file())
    assert len(bundled_files) == 9
    for file in bundled_files:
        again = made / file.relative_to(SAMPLES)
        assert again.read_bytes() == file.read_bytes(), f"{file}: run python .ci/samples.py"
    others = [(SAMPLES / name).read_text(encoding="utf-8") for name in ("train.jsonl", "eval.jsonl")]
    for line in (SAMPLES / "your_model/questions.jsonl").read_text(encoding="utf-8").splitlines():
        message, ticket = json.loads(line)["messages"]
        for text in others:
            assert json.dumps(message, ensure_ascii=False) not in text
            assert json.dumps(ticket, ensure_ascii=False) not in text


def test_the_bundled_pretraining_text_is_what_the_generator_writes(made: Path) -> None:
    name = "pretraining.jsonl.gz"
    bundled_file = (SAMPLES / name).read_bytes()
    text = gzip.decompress((made / name).read_bytes())
    assert gzip.decompress(bundled_file) == text, f"{name}: run python .ci/samples.py"
    assert bundled_file[4:8] == bytes(4), "no time in it"


def test_the_pretraining_text_never_changes_and_never_shows_a_ticket() -> None:
    texts = list(corpus.pretraining_texts(3000, 1))
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    assert digest == "0e076bf51dcc0a96708bbad2cfe422127959a6d7dad0425d240d1cfdf1fcd7b2"
    for text in texts:
        assert '{"' not in text
        assert '"intent":' not in text


def test_the_chat_template_of_the_tiny_model_writes_the_dialogues_of_its_text(bundled: Any) -> None:
    from nbutils.training import pretraining

    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]
    assert bundled.chat_template == pretraining.CHAT_TEMPLATE
    assert bundled.apply_chat_template(turns, tokenize=False) == corpus.chat("你好", "您好！")
    prompt = bundled.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == corpus.chat("你好") + "<|im_start|>assistant\n"


@pytest.mark.slow
def test_the_bundled_model_is_small_and_answers_in_prose(bundled: Any) -> None:
    from transformers import AutoModelForCausalLM

    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 12e6
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype="float32")

    def answer(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        prompt = bundled.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        [generated] = model.generate(**prompt, max_new_tokens=40, do_sample=False)
        prompt_length = prompt["input_ids"].shape[1]
        return bundled.decode(generated[prompt_length:], skip_special_tokens=True)

    reply = answer("请周五给我送三箱苹果到杭州。")
    assert "三箱苹果" in reply
    assert "杭州" in reply
    assert "周五" in reply
    assert "{" not in reply, "a ticket is what lesson 03 teaches"
    assert answer("Repeat: rice 7 Paris") == "rice 7 Paris"
