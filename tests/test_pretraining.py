"""Pre-training on real text: what is read, rows of tokens, sizes and forecasts; lesson 07 killed and continued."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from solutions import run_solved
from support import ROOT, ci_module, lesson_facts, python, refused, wait_for

from nbutils import chat, files, models
from nbutils.models import Shape
from nbutils.plan import gpus
from nbutils.plan import pretraining as plan
from nbutils.training import pretraining
from nbutils.training.pretraining import Texts, TokenRows

SMALL = {"VOCAB": "600", "WIDTH": "128", "DEPTH": "1", "LENGTH": "32", "BATCH": "4", "STEPS": "60", "SAVE_STEPS": "5"}
LESSON = ROOT / "notebooks/07_from_scratch.py"
DATA = str(ROOT / "docs/faq.md")
SMALL_WORDS = [word for name, value in (SMALL | {"DATA": DATA}).items() for word in (f"--{name}", value)]


def run_cells(*words: str, **names: Any) -> dict[str, Any]:
    """The names after the cells of lesson 07 that hold these words have run with those given."""
    cells = json.loads((ROOT / "notebooks/07_from_scratch.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names |= {"pretraining": pretraining}
    for word in words:
        [code] = [text for text in texts if word in text]
        exec(code, names)
    return names


def trained_tokenizer(texts: Texts, vocab_size: int, length: int = 128) -> Any:
    """The tokenizer that lesson 07 trains on the texts."""
    names = {"texts": texts, "VOCAB": vocab_size, "TOKENIZER": "", "LENGTH": length}
    return run_cells("bpe = Tokenizer(", "tokenizer = Qwen2Tokenizer(", **names)["tokenizer"]


def token_rows(texts: Texts, tokenizer: Any, length: int, folder: Path) -> TokenRows:
    """The rows into which lesson 07 cuts the texts."""
    names = {"texts": texts, "tokenizer": tokenizer, "LENGTH": length, "lesson": SimpleNamespace(scratch=folder)}
    rows: TokenRows = run_cells("def cut_into_rows", **names)["rows"]
    return rows


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer("tiny", "TOKENIZER")


def test_texts_come_from_files_rows_and_folders_in_several_encodings(tmp_path: Path) -> None:
    import pyarrow.parquet

    (tmp_path / "a.txt").write_bytes("第一篇。天地玄黄，宇宙洪荒，日月盈昃，辰宿列张。\n".encode("gbk") * 9)
    (tmp_path / "b.md").write_text("# Second\n" + "A paragraph of some words.\n\n" * 6000, encoding="utf-16")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("the third")
    rows = [{"text": "fourth \ud800"}, {"text": " "}, {"title": "no", "body": "text"}, {"text": None}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["fifth"], "n": [1]}), tmp_path / "e.parquet")
    texts = Texts(str(tmp_path), 0, 0)
    first, *pieces, third, fourth, fifth = texts
    assert first.startswith("第一篇") and (third, fourth, fifth) == ("the third", "fourth ?", "fifth")
    assert len(pieces) == 3 and "".join(pieces).count("paragraph") == 6000, "a long file is several documents"
    assert texts.left_out == 3
    assert list(texts) == [first, *pieces, third, fourth, fifth], "a second loop reads it all again"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.jsonl", b'{"title": "a", "body": "b"}\n', "No text was found in"),
        ("x.txt", b"\n \n", "No text was found in"),
        ("x.txt", "Größe\n".encode("latin1") * 3, "x.txt cannot be read: the bytes are neither UTF-8, UTF-16 nor GBK"),
        ("x.txt.gz", gzip.compress(b"text " * 9999)[:60], "x.txt.gz cannot be read"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9999)[:60], "x.jsonl.gz cannot be read"),
        ("x.pdf", b"%PDF", ".pdf"),
    ],
    ids=["other columns", "empty", "Latin-1", "cut short", "rows cut short", "PDF"],
)  # fmt: skip
def test_what_holds_no_text_is_refused(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(problem):
        list(Texts(str(tmp_path / name), 0, 0))


def test_rows_hold_every_token_in_order_and_are_made_once(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Please send 3 boxes of apples. 请周五送到杭州。\n\n" * 100)
    texts = Texts(str(file), 0, 0)
    rows = token_rows(texts, tokenizer, 32, tmp_path / "work")
    both = [*rows.train["input_ids"], *rows.eval["input_ids"]]
    expected = [*tokenizer(file.read_text())["input_ids"], tokenizer.pad_token_id]
    count = len(expected) // 32
    cut = [expected[32 * at : 32 * at + 32] for at in range(count)]
    assert sorted(map(list, both)) == sorted(cut) and len(rows.eval) == count // 10 + 1
    assert rows.train[0]["labels"].tolist() == rows.train[0]["input_ids"].tolist()
    written = (tmp_path / "work/tokens/tokens.arrow").stat().st_mtime_ns
    again = token_rows(texts, tokenizer, 32, tmp_path / "work")
    assert again.card == rows.card and (tmp_path / "work/tokens/tokens.arrow").stat().st_mtime_ns == written
    file.write_text("Other text. " * 200)
    other = token_rows(texts, tokenizer, 32, tmp_path / "work")
    assert other.card.fingerprint != rows.card.fingerprint
    with refused("The text has"):
        token_rows(texts, tokenizer, 5000, tmp_path / "work")


def test_a_tokenizer_is_trained_on_the_text_or_named(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("zyzzyva quokka " * 500)
    own = trained_tokenizer(Texts(str(tmp_path), 0, 0), 600, length=4096)
    assert len(own(" quokka")["input_ids"]) == 1 < len(tokenizer(" quokka")["input_ids"])
    assert own.model_max_length == 4096 and own.chat_template == tokenizer.chat_template
    assert len(tokenizer) == 3072
    (tmp_path / "config.json").write_text("{}")
    with refused("no tokenizer for TOKENIZER"):
        models.load_tokenizer(str(tmp_path), "TOKENIZER")


def test_a_tokenizer_begins_with_the_special_tokens_loses_nothing_and_joins_no_listed_words(tokenizer: Any) -> None:
    for trained in (trained_tokenizer(Texts("", 200, 1), 600), tokenizer):
        assert trained.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
        assert (trained.eos_token, trained.pad_token) == ("<|im_end|>", "<|endoftext|>")
        for text in ("Please send 12.\n\n", "漢字 🙂 {x}", "<|im_start|>user\nhi<|im_end|>"):
            assert trained.decode(trained(text)["input_ids"]) == text
        assert not any("im_" in token for token in trained.get_vocab() if token not in trained.all_special_tokens)
    pieces = [tokenizer.decode([token]) for token in tokenizer("周五送到杭州")["input_ids"]]
    assert "周五" in pieces and "杭州" in pieces


@pytest.mark.long
def test_the_bundled_tokenizer_can_be_rebuilt(tokenizer: Any) -> None:
    from tokenizers import Regex, pre_tokenizers

    corpus = ci_module("corpus")
    names = run_cells("bpe = Tokenizer(", VOCAB=3072, TOKENIZER="trained below", LENGTH=128)
    words = pre_tokenizers.Split(Regex("|".join(corpus.listed_words())), "isolated")
    names["bpe"].pre_tokenizer = pre_tokenizers.Sequence([words, names["bpe"].pre_tokenizer])
    names["bpe"].train_from_iterator(corpus.pretraining_texts(20_000, 0), names["bpe_trainer"])
    rebuilt = run_cells("tokenizer = Qwen2Tokenizer(", **names | {"TOKENIZER": ""})["tokenizer"]
    assert rebuilt.get_vocab() == tokenizer.get_vocab()


def test_the_text_of_the_course_makes_the_same_rows_for_ever(tmp_path: Path, tokenizer: Any) -> None:
    rows = token_rows(Texts("", 300, 0), tokenizer, 64, tmp_path)
    assert rows.card == pretraining.Card(documents=300, tokens=12480, left_out=0, fingerprint="4faa693951bb1724")
    assert sum(1 for _ in Texts("", 0, 0)) == 20_000, "0 is all of them"


def test_the_plan_counts_every_weight_and_the_micro_batch_fits(tokenizer: Any) -> None:
    from transformers import Qwen2ForCausalLM

    config = run_cells("Qwen2Config(", WIDTH=256, DEPTH=2, LENGTH=2048, tokenizer=tokenizer)["config"]
    assert config.max_position_embeddings == 2048
    shape = pretraining.shape_of(config)
    biases = 2 * (256 + 2 * 128)  # of q, k and v
    assert Qwen2ForCausalLM(config).num_parameters() == shape.params + biases
    pretraining.require_sizes(256, 2, 512)
    for width, depth, vocab_size in ((100, 2, 512), (0, 2, 512), (128, 0, 512), (256, 2, 100)):
        with refused(f"WIDTH is {width}, DEPTH {depth} and VOCAB {vocab_size}."):
            pretraining.require_sizes(width, depth, vocab_size)
    large = models.Shape(
        layers=24, hidden=2048, heads=32, kv_heads=16, head_dim=64, intermediate=5120, vocab=32000, tied=True
    )
    on = {name: plan.pretraining(large, gpus.find(name), 2048, 64, 100) for name in ("A100-40GB", "H200", "T4")}
    assert on["H200"].fits and on["H200"].per_device_train_batch_size > on["A100-40GB"].per_device_train_batch_size
    assert on["A100-40GB"].hours > 2 * on["H200"].hours > 0 and on["A100-40GB"].fits and not on["T4"].fits
    assert on["T4"].per_device_train_batch_size == 1, "the smallest"
    assert on["H200"].tokens == 100 * 64 * 2048 and on["H200"].peak_gib > 16 * large.params / files.GIB
    unknown = plan.pretraining(large, gpus.find("a GPU", vram=100), 2048, 64, 100)
    assert unknown.hours is None and "unknown" in plan.describe(large, [unknown])


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lesson 07 with a small model, run once."""
    home = tmp_path_factory.mktemp("whole")
    parameters = [word for parameter in (SMALL | {"DATA": DATA}).items() for word in parameter]
    run_solved("07_from_scratch", home, "from_scratch", *parameters, threads=1)
    return home / "from_scratch"


@pytest.mark.notebook
def test_lesson_07_makes_a_model_that_can_be_tuned(small_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = lesson_facts(small_run, "07_from_scratch")["validation_loss"]
    assert files.stamp(small_run / "base") is not None and losses["best"] < losses["first"] - 0.5
    tokenizer = AutoTokenizer.from_pretrained(small_run / "base")
    model = AutoModelForCausalLM.from_pretrained(small_run / "base")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    stops = [model.generation_config.eos_token_id]
    filtered = chat.filter_by_length(tokenizer, [{"messages": messages}], 0, stop_ids=stops)
    assert "in 1 answers" in chat.check_contract(filtered)


@pytest.mark.notebook
@pytest.mark.long
def test_a_killed_pretraining_continues_with_the_same_rows(small_run: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed/from_scratch"
    with open(tmp_path / "log", "w") as log:
        started = "import os, runpy, sys; os.environ |= {'NBUTILS_HOME': sys.argv[1], 'OMP_NUM_THREADS': '1'}; "
        started += "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", started, str(tmp_path / "killed"), str(LESSON), *SMALL_WORDS]
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as running:
            wait_for((killed / "checkpoints/checkpoint-5.json").exists)
            running.send_signal(signal.SIGKILL)
    assert not (killed / "base").exists()
    python(LESSON, *SMALL_WORDS, home=tmp_path / "killed", threads=1)
    facts = lesson_facts(killed, "07_from_scratch")
    assert 5 <= facts["resumed_from_step"] < facts["steps"] == lesson_facts(small_run, "07_from_scratch")["steps"]
    whole, continued = (files.read_json(run / "logs/history.json") for run in (small_run, killed))
    assert whole == continued, "the same losses at the same steps"


def test_the_forecast_is_what_an_h200_measured() -> None:
    measured = files.read_json(ROOT / "benchmarks/results/from_scratch_h200.json")["runs"]
    for run in measured:
        shape, size, times = Shape(**run["shape"]), run["micro_batch"], run["batch"] // run["micro_batch"]
        seconds = plan.step_seconds(shape, gpus.find("H200"), run["length"], size, times)
        assert seconds == pytest.approx(run["step_seconds"], rel=0.1)
        peak = sum(plan.memory(shape, size * run["length"]).values())
        assert peak == pytest.approx(run["peak_gib"], rel=0.06)
    assert len(measured) == 12
