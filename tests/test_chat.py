"""nbutils.chat: what is trained, what a server is sent, and every way the two have been seen to part."""

from __future__ import annotations

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


def test_stop_ids_are_those_of_the_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert chat.find_stop_ids(tokenizer) == chat.find_stop_ids(tokenizer, GenerationConfig()) == {2}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=[0, 3])) == {0, 3}
    assert chat.find_stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == {0}
    assert chat.find_stop_ids(tokenizer, paths.TINY_MODEL) == chat.find_stop_ids(tokenizer, str(tmp_path)) == {2}
    GenerationConfig(eos_token_id=[0, 3]).save_pretrained(tmp_path)
    assert chat.find_stop_ids(tokenizer, tmp_path) == {0, 3}


# --- the contract is broken ---------------------------------------------------------------------------------------


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


def test_text_after_the_stop_token_is_not_trained(tokenizer: Any) -> None:
    rows = [{"messages": talk("Where?", "On its way.<|im_end|> Or is it?")}]
    assert "outside the answers is trained" in broken(tokenizer, rows=rows).seen


def test_a_literal_prefix_the_server_does_not_send(bare: Any) -> None:
    prefixed = "{% if not add_generation_prompt %}<s>{% endif %}" + MARKED
    problem = broken(with_template(bare, prefixed))
    assert "from token 1 on" in problem.seen and "'<s>" in problem.seen


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


def test_a_tokenizer_without_a_template(bare: Any) -> None:
    with pytest.raises(CourseError, match="no chat template"):
        chat.training_format(with_template(bare, None))


def test_an_unknown_form(tokenizer: Any) -> None:
    with pytest.raises(CourseError, match="form is 'text'"):
        chat.inspect_row(tokenizer, ONE, "text")
