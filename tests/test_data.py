"""nbutils.data: every format and shape, every problem with its place, splits that never move, a card that adds up."""

import codecs
import gzip
import json
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from support import ESCAPES, python, refused, steers
from transformers import AutoTokenizer

from nbutils import data
from nbutils.chat import filter_by_length
from nbutils.cli import app
from nbutils.data import assistant, build, check, dedupe, evidence, read
from nbutils.data.dedupe import TEMPLATE, find_repeated, row_text
from nbutils.data.texts import find_private, mask
from nbutils.evaluation.scores import paired_share_difference
from nbutils.files import SAMPLES

BROKEN = {  # line of broken_rows.jsonl -> (kind, field)
    2: ("malformed_json", "character 113"),
    3: ("malformed_json", "character 2"),
    4: ("wrong_type", "the row"),
    5: ("unknown_columns", "the columns"),
    6: ("missing_field", "output"),
    7: ("empty", "answer"),
    8: ("wrong_type", "答案"),
    9: ("empty", "messages[1]"),
    10: ("wrong_type", "messages"),
    11: ("missing_field", "messages[0].content"),
    12: ("unknown_role", "conversations[0].from"),
    13: ("role_order", "messages[0]"),
    14: ("role_order", "messages[1]"),
    15: ("no_assistant", "messages[0]"),
    16: ("no_assistant", "messages[2]"),
    17: ("template_marker", "prompt"),
    18: ("template_marker", "answer"),
    19: ("control_character", "answer"),
    20: ("mojibake", "答案"),
    21: ("ambiguous_columns", "the columns"),
    22: ("unknown_columns", "the columns"),
    23: ("mojibake", "answer"),
    24: ("role_order", "messages[1]"),
    25: ("missing_field", "messages[1].tool_calls[0].function.name"),
    26: ("malformed_json", "messages[1].tool_calls[0].function.arguments"),
    27: ("unsupported_field", "images"),
}


def qa(number: int, answer: str = "yes") -> dict[str, str]:
    return {"question": f"Is order {number} on its way?", "answer": answer}


def chat_row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_lines(rows), encoding="utf-8")
    return str(path)


def prepared(folder: Path, rows: list[Any], **settings: Any) -> data.DataCard:
    """The card of these rows, written to a.jsonl and prepared in `out`."""
    return data.prepare(write(folder / "a.jsonl", rows), folder / "out", **settings)


def checked(path: Path | str) -> list[data.ChatRow | data.RowError]:
    return [data.check_row(row) for row in data.read_rows(path)]


def texts(row: data.ChatRow | data.RowError) -> list[str]:
    assert isinstance(row, data.ChatRow), row
    return [message["content"] for message in row.messages]


def accepted(raw: Any, mapping: str = "") -> data.ChatRow:
    """The row as a conversation; it must be a sound one."""
    row = data.check_row(data.Row("row", 1, raw), mapping)
    assert isinstance(row, data.ChatRow), row
    return row


def errors_of(rows: list[Any]) -> list[data.RowError]:
    return [row for row in rows if isinstance(row, data.RowError)]


def test_each_broken_row_of_the_sample_is_named_and_hides_no_other() -> None:
    first_problems = {}
    sound_lines = []
    for row in checked(SAMPLES / "broken_rows.jsonl"):
        if isinstance(row, data.ChatRow):
            sound_lines.append(row.line)
            continue
        first = row.problems[0]
        first_problems[row.line] = (first.kind, first.field)
        for problem in row.problems:
            assert problem.todo
            assert problem.seen
    assert first_problems == BROKEN
    assert sound_lines == [1, 28]


PAIR = chat_row("你好", "您好")["messages"]
ASKED = {"role": "user", "content": "天气?"}
SEARCH = {"function": {"name": "search", "arguments": {"q": "天气"}}, "type": "function"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [SEARCH]}
RESULT = {"role": "tool", "content": "晴", "name": "search", "tool_call_id": "1"}
ANSWERED = {"role": "assistant", "content": "今天晴。"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
IN_TEXT = {"type": "function", "function": {"name": "search", "arguments": json.dumps({"q": "天气"})}}


def test_what_is_shown_has_its_place_and_nothing_private(capsys: pytest.CaptureFixture[str]) -> None:
    data.show_problems(errors_of(checked(SAMPLES / "broken_rows.jsonl")))
    data.show(data.Row("a", 1, {"问": "13812345678?", "reply": "yes"}), "user=问, assistant=reply")
    data.show(data.Row("a", 7, {"question": ""}))
    shown = capsys.readouterr().out
    assert "line 2, character 113" in shown
    assert "138****?\nassistant: yes" in shown
    assert "a line 7, answer" in shown


CHINESE = [
    {"问题": "我的订单到哪里了？", "答案": "您好，正在路上，预计明天下午送达。"},
    {"问题": "玫瑰", "答案": "鹦鹉"},
    {"问题": "退款要多久", "答案": "一般三个工作日内到账。"},
    {"问题": "ok", "答案": "ok"},
]
SOUND = {  # languages with accents, and the punctuation that makes them look broken byte by byte
    "fr": "« L’été, déjà ? » « café » «\xa0fiancé\xa0» l'œuvre, voilà… où ça – “né” à Noël, naïf, ÇA, «\xa0à\xa0» É…",
    "pt": "NÃO, amanhã… “MAÇÃ” «AMANHû «irmã» nº 3, São Paulo – “pão”, à noite, AÇÃO, “É”",
    "zh": "你好，世界。“引号”——省略号……《书名》① ℃ ￥ 浣熊 锛子 横浜 涓涓细流",
    "ja": "横浜・浜松、「こんにちは」——浜辺の浜",
}
WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
VARIANTS = [
    str,
    str.upper,
    "{} !!".format,
    lambda text: text.replace(" ", "，"),
    lambda text: text.translate(WIDE),
]
ENGLISH = (
    "The parcel was handed to the carrier this morning and should arrive within two working days. "
    "You will get a message with a link as soon as the driver is near your street, "
    "and you can still change the address there."
)
MIB = 1 << 20
ZH = "包裹今天早上已交给快递公司，预计会在后天下午送到您家。送达之前您会收到一条短信，里面有改地址的链接，请放心。"
QUESTION = "Hello, I ordered a kettle for my mother last week and nobody told me when it comes. When will it arrive?"


SHAPES = {
    "messages": {"messages": PAIR},
    "messages as text": {"messages": json.dumps(PAIR)},
    "messages and empty columns": {"messages": PAIR, "system": " ", "tools": ""},
    "messages and a prompt": {"prompt": "你好", "prompt_id": "7", "messages": PAIR},
    "turns of prompt and completion": {"prompt": PAIR[:1], "completion": PAIR[1:]},
    "sharegpt": {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "您好"}]},
    "q and a": {"q": "你好", "a": "您好"},
    "alpaca": {"instruction": "你好", "input": "", "output": "您好", "history": [], "text": "whole", "prompt": "whole"},
    "alpaca in Chinese": {"指令": "你好", "输入": None, "输出": "您好"},
    "question and answer in Chinese": {"问题": "你好", "答案": "您好"},
    "user and assistant in Chinese": {"用户": "你好", "助手": "您好"},
    "odd headings": {"\ufeffQuestion ": "你好", " ANSWER": "您好", "": 7, "Reasoning Content": ""},
    "space around the text": {"question": "\n \n你好 \r\n", "answer": "您好\n"},
}


@pytest.mark.parametrize("raw", SHAPES.values(), ids=SHAPES)
def test_every_known_shape_becomes_the_same_messages(raw: dict[str, Any]) -> None:
    assert accepted(raw).messages == PAIR


@pytest.mark.parametrize("history", [[["a", "b"]], json.dumps([["a", "b"]])])
def test_columns_beside_question_and_answer_are_taken(history: Any) -> None:
    raw = {
        "system": "短",
        "instruction": "c",
        "input": "    x",
        "output": "\n    d\n",
        "history": history,
    }
    row = accepted(raw)
    roles = [message["role"] for message in row.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert texts(row) == ["短", "a", "b", "c\n    x", "    d"]


THOUGHT = "<think>\n想\n</think>\n\n今天晴。"


WITH_REASONING = {
    "in the turn": {"messages": [ASKED, {**ANSWERED, "reasoning_content": "想\n"}]},
    "in a column": {"question": "天气?", "Complex_CoT": "想", "response": "今天晴。"},
    "in a column and in the answer": {"question": "天气?", "answer": THOUGHT, "思考过程": "想"},
}


@pytest.mark.parametrize("raw", WITH_REASONING.values(), ids=WITH_REASONING)
def test_reasoning_stands_once_before_the_answer(raw: dict[str, Any]) -> None:
    assert texts(accepted(raw))[1] == THOUGHT


CALLS = {
    "as they are": {"messages": [ASKED, CALLED, RESULT, ANSWERED], "tools": [TOOL]},
    "all as text": {"messages": json.dumps([ASKED, CALLED, RESULT, ANSWERED]), "tools": json.dumps([TOOL])},
    "calls as text": {
        "messages": [ASKED, {**CALLED, "tool_calls": json.dumps([SEARCH])}, RESULT, ANSWERED],
        "tools": [TOOL],
    },
    "arguments as text, the result of a function": {
        "messages": [ASKED, {**CALLED, "tool_calls": [IN_TEXT]}, {**RESULT, "role": "function"}, ANSWERED],
        "tools": [TOOL],
    },
}


@pytest.mark.parametrize("raw", CALLS.values(), ids=CALLS)
def test_calls_and_tools_as_openai_writes_them_are_taken(raw: Any) -> None:
    row = accepted(raw)
    assert row.messages == [ASKED, {**CALLED, "content": ""}, RESULT, ANSWERED]
    assert row.tools == [TOOL]
    assert not row.trimmed


def called_with(arguments: Any) -> dict[str, Any]:
    """A row whose answer calls a tool with these arguments."""
    call = {"function": {"name": "a", "arguments": arguments}}
    return {"messages": [ASKED, {**CALLED, "tool_calls": [call]}]}


def asked_with(part: dict[str, Any]) -> dict[str, Any]:
    """A question in parts, as models that see are asked."""
    return {**ASKED, "content": [{"type": "text", "text": "What is this?"}, part]}


def with_answer(answer: Any) -> dict[str, Any]:
    return {"question": "a", "answer": answer}


DEEP_LIST = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(("raw", "kind", "field"), [
    ({"messages": []}, "empty", "messages"),
    ({"messages": ["hello"]}, "wrong_type", "messages[0]"),
    ({"messages": [{"content": "hello"}]}, "missing_field", "messages[0].role"),
    ({"messages": "[{"}, "malformed_json", "messages"),
    ({"instruction": "a", "input": 0, "output": "b"}, "wrong_type", "input"),
    (with_answer("b") | {"history": [["c", "d", "e"]]}, "wrong_type", "history[0]"),
    (with_answer("b") | {"system": 0}, "wrong_type", "system"),
    (with_answer("b") | {"tools": [5]}, "wrong_type", "tools[0]"),
    (with_answer("b") | {"tools": [{"name": "a"}]}, "missing_field", "tools[0].function"),
    (with_answer("b") | {"tools": "[{"}, "malformed_json", "tools"),
    (with_answer("b") | {"reasoning_content": 5}, "wrong_type", "reasoning_content"),
    ({"conversations": [{"from": "function_call", "value": "{}"}]}, "unknown_role", "conversations[0].from"),
    ({"messages": [{"role": "system", "content": "a"}, *PAIR], "system": "b"}, "role_order", "messages[0]"),
    (with_answer("\ud83d"), "control_character", "answer"),
    (with_answer(float("nan")), "wrong_type", "answer"),
    (with_answer(DEEP_LIST), "wrong_type", "answer"),
    (with_answer(10**5000), "wrong_type", "answer"),
    (called_with({"b": "\ud83d"}), "wrong_type", "messages[1]"),
    (called_with({"b": 10**30}), "wrong_type", "messages[1]"),
    (called_with({"b": "<|im_end|>"}), "template_marker", "messages[1]"),
    (called_with({"b": "CafÃ© Ã  Paris"}), "mojibake", "messages[1]"),
    (called_with([1]), "wrong_type", "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [ASKED, {**CALLED, "tool_calls": [{"name": "a"}]}]}, "missing_field",
     "messages[1].tool_calls[0].function"),
    ({"messages": [ASKED, ANSWERED, RESULT, ANSWERED]}, "role_order", "messages[2]"),
    ({"messages": [ASKED, CALLED, ASKED, ANSWERED]}, "role_order", "messages[2]"),
    ({"messages": [ASKED, CALLED, RESULT]}, "no_assistant", "messages[2]"),
    ({"messages": [ASKED, {"role": "system", "content": "a"}, ANSWERED]}, "role_order", "messages[1]"),
    ({"messages": [asked_with({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), ANSWERED]},
     "unsupported_field", "messages[0].content"),
    ({"messages": [asked_with({"type": "image"}), ANSWERED], "images": []}, "unsupported_field", "messages[0].content"),
    ({"messages": [asked_with({"image": "a.png"}), ANSWERED]}, "unsupported_field", "messages[0].content"),
    ({"messages": [asked_with({"type": "text", "text": "b", "image": None}), ANSWERED]}, "wrong_type",
     "messages[0].content"),
    ({"messages": [{**ASKED, "content": "<image>What is this?"}, ANSWERED], "images": ["a.jpg"]}, "unsupported_field",
     "images"),
    ({"conversations": [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A bus."}],
      "image": "train2017/000000033471.jpg"}, "unsupported_field", "image"),
    *[(with_answer("b") | {column: "a.jpg"}, "unsupported_field", column)
      for column in ("image_path", "image_url", "img", "pixel_values", "picture", "video_path", "audio_path")],
    ({"messages": [{**ASKED, "images": ["a.png"]}, ANSWERED]}, "unsupported_field", "messages[0].images"),
    ({"messages": json.dumps([{**ASKED, "image": "a.png"}, ANSWERED])}, "unsupported_field", "messages[0].image"),
    ({"messages": [{**ASKED, "content": "<image>\nWhat is this?"}, ANSWERED]}, "unsupported_field", "messages[0]"),
    ({"messages": [{**ASKED, "content": "What is said?\n<audio>\n"}, ANSWERED]}, "unsupported_field", "messages[0]"),
    ({"question": "<video>", "answer": "b"}, "unsupported_field", "question"),
    ({"messages": [ASKED, {**ANSWERED, "content": "", "reasoning_content": "hm"}]}, "empty", "messages[1]"),
])  # fmt: skip
def test_rules_of_a_row(raw: Any, kind: str, field: str) -> None:
    problem = data.problems_of(raw)[0]
    assert problem.kind == kind
    assert problem.field == field


@pytest.mark.parametrize("question", ["<image>What is this?", "Describe <video> and <audio>"])
def test_a_mapping_does_not_hide_an_image_of_which_the_text_speaks(question: str) -> None:
    raw = {"text": question, "label": "A bus.", "image": "bus.jpg"}
    [problem] = data.problems_of(raw, "user=text, assistant=label")
    assert (problem.kind, problem.field) == ("unsupported_field", "image")
    assert data.problems_of(raw | {"text": "A red bus, second hand"}, "user=text, assistant=label") == []


@pytest.mark.parametrize("question", ["In SVG, what does <image> do?", "<image> or <img>?", "Use <image>\nor <img>?"])
def test_a_question_about_a_tag_is_no_image(question: str) -> None:
    assert accepted({"messages": [{**ASKED, "content": question, "images": []}, ANSWERED]})
    svg = {"question": "Draw me a picture.", "answer": "<svg>\n<image>\n</svg>"}
    assert accepted(svg)


def test_a_mapping_may_name_a_column_called_image_as_text() -> None:
    raw = {"q": "what does <image> do in SVG?", "a": "It embeds a picture.", "Image": "a caption"}
    assert texts(accepted(raw, "user=q+image, assistant=a"))[0] == "what does <image> do in SVG?\na caption"
    other = {"q": "What is this?", "a": "A bus.", "image": "bus.jpg", "note": "has an <image>"}
    assert accepted(other, "user=q, assistant=a"), "the text that is trained does not speak of it"
    [problem] = data.problems_of(raw | {"video": "bus.mp4"}, "user=q+image, assistant=a")
    assert (problem.kind, problem.field) == ("unsupported_field", "video")


def test_a_mapping_joins_columns_and_ignores_the_rest() -> None:
    raw = {"标题": "订单", "正文": "到哪里了？", "回复": "在路上。", "角色": "客服", "question": "x", "answer": "y"}
    row = accepted(raw, "user=标题+正文, assistant=回复, system=角色")
    assert texts(row) == ["客服", "订单\n到哪里了？", "在路上。"]
    without_title = accepted({**raw, "标题": None}, "user＝标题+正文，assistant=回复")
    assert texts(without_title) == ["到哪里了？", "在路上。"]
    assert accepted({"Chat": [ASKED, ANSWERED]}, "messages=chat").messages == [ASKED, ANSWERED]


def test_a_mapping_to_columns_that_are_not_there_names_them_and_those_that_are() -> None:
    [problem] = data.problems_of(qa(1), "user=question, assistant=reply")
    assert problem.kind == "missing_field"
    assert problem.field == "reply"
    assert "question, answer" in problem.seen
    assert "--columns" in problem.todo
    [problem] = data.problems_of({"messages": PAIR}, "user=标题+正文, assistant=回复")
    assert problem.kind == "missing_field"
    assert problem.field == "标题, 正文, 回复"
    assert "messages" in problem.seen


@pytest.mark.parametrize("text", ["question", "user=", "boss=a, assistant=b", "user=a", "user=a, user=b", "system=who"])
def test_a_mapping_that_makes_no_conversation_is_refused(text: str) -> None:
    with refused(f"The columns {text!r} are not"):
        data.parse_mapping(text)


@pytest.mark.parametrize("language", SOUND)
def test_sound_text_is_never_touched(language: str) -> None:
    words = re.split(r"(?<= )", SOUND[language])
    chance = random.Random(7)
    for _ in range(50):
        sentence = "".join(chance.choices(words, k=12)).strip()
        sentence = sentence or SOUND[language]  # only spaces were drawn
        row = accepted(with_answer(sentence))
        assert texts(row)[1] == sentence


def decoded_byte_by_byte(text: str, encoding: str) -> str:
    """UTF-8 read in another encoding; a byte which that does not have stays what it is in latin-1."""
    characters = []
    for number in text.encode():
        byte = bytes([number])
        characters.append(byte.decode(encoding, "ignore") or byte.decode("latin-1"))
    return "".join(characters)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_text_read_in_the_wrong_encoding_is_repaired(encoding: str) -> None:
    text = "Le café est fermé, c’est l’été."
    row = data.Row("a", 1, {"question": "thé", "answer": decoded_byte_by_byte(text, encoding)})

    repaired = data.check_row(row)
    assert isinstance(repaired, data.ChatRow)
    assert repaired.messages[1]["content"] == text
    assert not repaired.trimmed
    [warning] = repaired.warnings
    assert warning.kind == "mojibake"
    assert warning.field == "answer"

    refusal = data.check_row(row, repair=False)
    assert isinstance(refusal, data.RowError)
    assert refusal.problems[0].kind == "mojibake"


@pytest.mark.parametrize("text", ["在路上��", "锟斤拷锟斤拷", "璁㈠崟锛屽湪鍝噷?"])
def test_characters_that_are_lost_are_refused(text: str) -> None:
    [problem] = data.problems_of(with_answer(text))
    assert problem.kind == "mojibake"


@pytest.mark.parametrize("text", [
    "<|im_start|>user", "ok<|im_end|>", "[gMASK]<sop>hello", "<s>[INST] hi", "hello</s>", "a [/INST]", "<<SYS>>",
    "<start_of_turn>user", "<｜User｜>", "<｜end▁of▁sentence｜>", "<bos>hi", "a<pad><pad>", "[AVAILABLE_TOOLS]",
])  # fmt: skip
def test_template_markers_are_refused(text: str) -> None:
    [problem] = data.problems_of(with_answer(text))
    assert problem.kind == "template_marker"


def test_html_and_reasoning_are_no_template_markers() -> None:
    assert data.problems_of(with_answer("it is <s>struck</s> out, a <b> c, <think>\nhm\n</think>\n\nok")) == []


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnop"


@pytest.mark.parametrize(("kind", "text", "secret", "shown"), [
    ("phone", "请打 13812345678 找我", "13812345678", "138****"),
    ("phone", "请打１３８１２３４５６７８找我", "１３８１２３４５６７８", "138****"),
    ("phone", "+86 138 1234 5678", "1234", "+86****"),
    ("phone", "138\xa01234\xa05678", "1234", "138****"),
    ("phone", "座机 021-62345678", "62345678", "021****"),
    ("id_number", "身份证 11010519491231002X", "11010519491231002X", "110****"),
    ("id_number", "110105 1949 1231 002X", "1949", "110****"),
    ("email", "write to anna.b+c@mail.example.cn, please", "example", "ann****"),
    ("key", "sk-proj-" + "a1B2" * 8, "a1B2" * 8, "sk-****"),
    ("key", "token hf_" + "aB" * 17, "hf_" + "aB" * 17, "hf_****"),
    ("key", "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef", "WAN****"),
    ("key", "https://a.cn/x?token=abcdefgh", "abcdefgh", "?to****"),
    ("key", "-----BEGIN RSA PRIVATE KEY-----", "PRIVATE", "---****"),
    ("key", f"Bearer {JWT}", "eyJhbGciOiJIUzI1NiJ9", "eyJ****"),
])  # fmt: skip
def test_private_data_is_a_warning_with_the_span_masked(kind: str, text: str, secret: str, shown: str) -> None:
    assert shown in mask(text)
    assert secret not in mask(text)

    row = accepted(with_answer(text))
    assert row.messages[1]["content"] == text
    [warning] = row.warnings
    assert warning.kind == kind
    assert warning.field == "answer"
    assert warning.seen == shown

    [warning] = accepted(called_with({"b": text})).warnings
    assert warning.kind == kind
    assert warning.field == "messages[1]"


@pytest.mark.parametrize("text", [
    "021-1234567", "2021-62345678", "0.021-62345678", "2019 2020 2021 2022 1", "12345678901", "0.13812345678",
    "110105194913310021", "a @ b", "@someone", "sk-learn and hf_hub", f"commit {'0a' * 20}",
])  # fmt: skip
def test_numbers_and_words_that_are_not_private(text: str) -> None:
    assert list(find_private(text)) == []
    assert mask(text) == text


def assert_may_be_shown(problem: Any) -> None:
    """What is told about a problem holds none of the private numbers below and nothing that steers a terminal."""
    text = f"{problem.field} {problem.seen} {problem.todo}"
    assert text.isprintable()
    for part in ("13812", "1234-", "12345", "19491231"):
        assert part not in text


def test_what_is_told_about_a_row_may_be_shown() -> None:
    bad = "13812345678\ud83d\x1b[2J"
    rows = [
        {bad: "a", "b": "c"},
        with_answer("x") | {bad: 1, "history": [bad]},
        with_answer([bad]),
        {"messages": f"call {bad}"},
        {"messages": [{bad: "a"}]},
        {"messages": [{"role": bad, "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"phone": bad}]}]},
    ]
    for raw in rows:
        problems = data.problems_of(raw)
        assert problems
        for problem in problems:
            assert_may_be_shown(problem)
    warnings = accepted(with_answer("CafÃ© 13812345678")).warnings
    assert warnings
    for warning in warnings:
        assert_may_be_shown(warning)


def test_what_is_told_about_a_line_that_cannot_be_read_may_be_shown(tmp_path: Path) -> None:
    lines = ["{}", "{}"]
    for private in ("138-1234-5678", "123456@qq.com", "110105 19491231 002X"):
        lines += [f'{{"question": {private}, "answer": "b"}}', f'{{"question": "{private}" "a": 1}}']
        lines += [f'{{"a": "b" {private}}}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.csv").write_text("question,answer\n13812345678,a@b.cn,c\n")
    broken = errors_of(list(data.read_rows(tmp_path)))
    assert len(broken) == 10
    for row in broken:
        assert "**" in row.problems[0].seen
        assert_may_be_shown(row.problems[0])


def peak_memory(call: Any, *arguments: Any) -> tuple[Any, int]:
    """What a call gives, and the bytes that Python held at most during it."""
    tracemalloc.start()
    result = call(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, peak


def parquet_bytes(rows: list[Any]) -> bytes:
    stream = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue().to_pybytes()


def csv_text(rows: list[Any], separator: str) -> str:
    lines = [separator.join(rows[0])]
    for row in rows:
        lines.append(separator.join(f'"{value}"' for value in row.values()))
    return "\r\n".join(lines)


SEPARATORS = {"semicolon.csv": ";", "wide.csv": "\t", "wide.tsv": "\t", "a.tsv": "\t"}  # a comma in all others


def uncompressed(name: str, rows: list[Any]) -> bytes:
    """The rows in the format of the file's ending; the stem names its variant."""
    stem, ending = name.split(".")
    if ending == "parquet":
        return parquet_bytes(rows)
    if ending in ("csv", "tsv"):
        text = csv_text(rows, SEPARATORS.get(name, ","))
    elif stem in ("lines", "bom"):
        text = json_lines(rows)
    elif stem == "flat":
        text = json.dumps(rows, ensure_ascii=False)
    else:
        text = json.dumps(rows, ensure_ascii=False, indent=2)
    if stem == "bom":
        return codecs.BOM_UTF8 + text.encode()
    if stem == "wide":
        return codecs.BOM_UTF16_BE + text.encode("utf-16-be")
    return text.encode()


def file_of(name: str, rows: list[Any]) -> bytes:
    """The content of a file of this name with these rows."""
    content = uncompressed(name.removesuffix(".gz").removesuffix(".zst"), rows)
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):  # two frames, as parallel compressors and `cat` write them
        half = len(content) // 2
        first_frame = pyarrow.compress(content[:half], "zstd", asbytes=True)
        second_frame = pyarrow.compress(content[half:], "zstd", asbytes=True)
        return first_frame + second_frame
    return content


@pytest.mark.parametrize("name", [
    "lines.jsonl", "lines.json", "lines.jsonl.gz", "lines.jsonl.zst",
    "array.json", "array.jsonl", "array.json.zst", "flat.json", "flat.jsonl",
    "a.csv", "a.csv.gz", "a.tsv", "semicolon.csv", "bom.csv", "bom.jsonl",
    "wide.csv", "wide.tsv.gz", "wide.json",
    "a.parquet",
])  # fmt: skip
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = [
        qa(1, "yes,\n是"),
        qa(2, "[no]; not"),
        qa(3, "{maybe}"),
    ]
    (tmp_path / name).write_bytes(file_of(name, rows))
    read_texts = [texts(row) for row in checked(tmp_path / name)]
    assert read_texts == [list(row.values()) for row in rows]


ROW = json_lines([qa(1)])


PACKED_ROW = gzip.compress(ROW.encode())


@pytest.mark.parametrize(("name", "content", "kinds"), [  # kinds: line -> what is wrong with its row
    ("a.csv", 'question,answer\n"two\nlines",yes\nb,no\n', {2: "", 4: ""}),
    ("a.json", json.dumps([qa(1), qa(2)], indent=2), {1: "", 2: ""}),
    ("a.json", json.dumps(qa(1), indent=2), dict.fromkeys(range(1, 5), "malformed_json")),
    ("a.jsonl", f"\n{ROW}\r\n\n{ROW}", {2: "", 5: ""}),
    ("a.jsonl", f"[1]\n{ROW}", {1: "", 2: ""}),
    ("a.csv", codecs.BOM_UTF16_LE + "question,answer\na,b\n".encode("utf-16-le") + b"c", {2: "", 3: ""}),
    ("a.jsonl", f'{{"question": "a", "answer\n{ROW}', {1: "malformed_json", 2: ""}),
    ("a.jsonl", f'{{"messages": [{{"role": "user", "content": "a"}},\n{ROW}', {1: "malformed_json", 2: ""}),
    ("a.jsonl", f'{ROW}{{"question": {"1" * 5000}}}\n{ROW}', {1: "", 2: "malformed_json", 3: ""}),
    ("a.json", '[{"q": 1}, {"q": 2}', {1: "malformed_json"}),
    ("a.csv", "question,answer\na\nb,c,d\ng,h\n", {2: "", 3: "malformed_csv", 4: ""}),
    ("a.csv", "question,answer,answer\na,b,c\n", {1: "malformed_csv"}),
    ("a.csv", 'question,answer\na,b\nc,"d\ne,f\n', {2: "", 3: "malformed_csv"}),
    ("a.csv", "question,answer,,,\na,b,,,\n,,,,\nc,d, ,\ne,f,x,,\n,,\n", {2: "", 4: "", 5: "malformed_csv"}),
    ("a.csv", ",question,answer\n0,a,b\n,c,d\n", {2: "", 3: ""}),  # 0: the index of pandas
    ("a.csv", 'question,"answer\na,b\n', {1: "malformed_csv"}),
    ("a.jsonl.gz", PACKED_ROW * 2 + bytes(99), {1: "", 2: ""}),
    ("a.jsonl.gz", PACKED_ROW * 2 + b"more", {1: "", 2: "", 3: "damaged_file"}),
])  # fmt: skip
def test_rows_know_their_lines_and_a_fault_hides_no_other_row(
    tmp_path: Path, name: str, content: str | bytes, kinds: dict[int, str]
) -> None:
    if isinstance(content, str):
        content = content.encode()
    (tmp_path / name).write_bytes(content)
    lines = []
    for row in data.read_rows(tmp_path / name):
        kind = ""
        if isinstance(row, data.RowError):
            kind = row.problems[0].kind
            assert row.problems[0].todo
        lines.append((row.line, kind))
    assert lines == list(kinds.items())


def test_a_document_is_read_whole_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_row = '{"question": "c" "answer": "d"}'
    (tmp_path / "a.json").write_text(f"[{json.dumps(qa(1))},\n{broken_row}]", encoding="utf-8")
    [error] = data.read_rows(tmp_path / "a.json")
    [problem] = error.problems
    assert error.line == 2
    assert problem.field == "character 18"
    assert '"c" "ans' in problem.seen

    monkeypatch.setattr(read, "LARGEST_DOCUMENT", 50)
    [error] = data.read_rows(tmp_path / "a.json")
    [problem] = error.problems
    assert problem.kind == "long_line"
    assert "one on each line" in problem.todo


@pytest.mark.parametrize("damage", ["cut", "changed"])
@pytest.mark.parametrize("name", ["lines.jsonl.gz", "lines.jsonl.zst", "a.parquet"])
def test_a_damaged_file_gives_its_first_rows_and_then_says_so(tmp_path: Path, name: str, damage: str) -> None:
    chance = random.Random(1)
    rows = [qa(n, f"{chance.getrandbits(900):0225x}") for n in range(2000)]
    content = bytearray(file_of(name, rows))
    half = len(content) // 2
    if damage == "cut":
        del content[half:]
    else:
        content[half : half + 4000] = bytes(4000)
    (tmp_path / name).write_bytes(content)
    write(tmp_path / "z.jsonl", [qa(1)])

    *before, last = data.read_rows(tmp_path / name)
    assert isinstance(last, data.RowError)
    assert last.problems[0].kind == "damaged_file"
    assert last.line == len(before) + 1

    sound = [row.raw for row in before if isinstance(row, data.Row)]
    first_rows = sound[:400]
    assert first_rows == rows[: len(first_rows)]
    if name != "a.parquet":  # of which no row may be left: its index is at the end
        assert first_rows

    *_, last = data.read_rows(tmp_path)
    assert last.raw == qa(1), "the next file is read"


def long_rows(count: int) -> list[Any]:
    """Rows with answers of 1500 characters, all of them different."""
    chance = random.Random(1)
    letters = "".join(chance.choices("abcdefghijklmnopqrst ", k=50_000))
    rows = []
    for number in range(count):
        start = chance.randrange(48_000)
        rows.append(qa(number, letters[start : start + 1500]))
    return rows


def count_rows(path: Path) -> int:
    return sum(1 for _ in data.read_rows(path))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHUNK", 1 << 16)
    rows = long_rows(1500)
    for name in ("lines.jsonl.gz", "a.csv"):
        path = tmp_path / name
        path.write_bytes(file_of(name, rows[:9]))
        count_rows(path)  # imports what is needed
        path.write_bytes(file_of(name, rows))
        count, peak = peak_memory(count_rows, path)
        assert count == 1500
        assert peak < 300 << 10, "of 2.2 MB"


@pytest.mark.slow
def test_memory_hardly_grows_with_the_rows_that_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("read", "build", "card"):
        monkeypatch.setattr(f"nbutils.data.{module}.CHUNK", 1 << 16)
    rows = long_rows(800)
    peaks = {}
    for count in (9, 200, 800):  # the first run imports what is needed; at 200 and 800 hash tables are as full
        path = write(tmp_path / f"{count}.jsonl", rows[:count])
        card, peaks[count] = peak_memory(data.prepare, path, tmp_path / str(count))
        assert card.accepted == count
    assert peaks[800] - peaks[200] < 600 * 320, "a row of 1500 characters leaves about 300 bytes"


@pytest.mark.parametrize(("name", "start", "filling", "mib"), [
    pytest.param("a.jsonl.gz", b'{"a": "', b"x", 64, id="json"),
    pytest.param("a.csv.gz", b'a,b\n"', b"x", 64, id="csv"),
    pytest.param("a.csv.gz", b'a,b\n"', b"x\n", 16, id="csv-with-line-ends", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_value_without_end_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: bytes, filling: bytes, mib: int
) -> None:
    monkeypatch.setattr(read, "LONGEST_LINE", 4 * MIB)
    block = filling * (MIB // len(filling))
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(mib):
            file.write(block)
        file.write(b'"}\n' + ROW.encode())
    rows, peak = peak_memory(list, data.read_rows(tmp_path / name))
    [row] = rows
    assert isinstance(row, data.RowError)
    assert peak < 40 * MIB


def arrow_file(path: Path, answers: Any, kind: str = "text") -> str:
    """A file whose rows have these answers: as texts, as turns in a list, or in a map."""
    count = len(answers)
    ends = pyarrow.array(np.arange(count + 1, dtype=np.int32))
    roles = pyarrow.array(["assistant"] * count)
    if kind == "list":
        turns = pyarrow.StructArray.from_arrays([roles, answers], ["role", "content"])
        answers = pyarrow.ListArray.from_arrays(ends, turns)
    elif kind == "map":
        answers = pyarrow.MapArray.from_arrays(ends, roles, answers)
    questions = [f"q{number}" for number in range(count)]
    table = pyarrow.table({"question": questions, "answer": answers})
    if path.suffix == ".parquet":
        with_schema = "plain" not in path.name  # without a schema all texts are plain, however they are stored
        pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=with_schema)
        assert path.stat().st_size < 50_000, "long values of a small file"
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return str(path)


def repeated(count: int, text: str) -> Any:
    """An arrow column of which all values are the same text, held once."""
    return pyarrow.DictionaryArray.from_arrays(np.zeros(count, np.int32), [text])


@pytest.mark.parametrize("kind", ["text", "list", "map"])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_row_of_parquet_or_arrow_may_be_as_long_as_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(read, "LONGEST_LINE", MIB)
    too_long = "x" * 3 * MIB
    answers = ["yes", too_long, *["no" * 9000] * 300, "y" * (MIB // 2)]
    rows = list(data.read_rows(arrow_file(tmp_path / name, pyarrow.array(answers), kind)))
    assert [row.line for row in rows] == list(range(1, 304)), "the one that is refused hides no other"
    [error] = errors_of(rows)
    assert error.line == 2
    assert error.problems[0].kind == "long_line"
    assert too_long not in str(error.raw)
    for row, answer in zip(rows, answers, strict=True):
        assert row is error or answer in str(row.raw)


@pytest.mark.parametrize("kind", ["text", "list", "map"])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_the_length_of_a_row_is_its_own_where_all_share_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(read, "LONGEST_LINE", MIB)
    text = "z" * (MIB // 2)
    rows = list(data.read_rows(arrow_file(tmp_path / name, repeated(40, text), kind)))
    assert len(rows) == 40
    for row in rows:
        assert text in str(row.raw)


def test_an_empty_batch_of_an_arrow_file_hides_no_row(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([qa(1)])
    empty = pyarrow.RecordBatch.from_pylist([], schema=table.schema)
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_batch(empty)
        stream.write_table(table)
    [row] = data.read_rows(tmp_path / "a.arrow")
    assert row.raw == qa(1)


PEAK = """
import re
from nbutils.data import dedupe, read
{code}
with open("/proc/self/status") as status:  # getrusage would count the process that started this one as well
    print(int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]) >> 10)
"""


def peak_mib(code: str, home: Path) -> int:
    """The MiB that a process of its own held at most while it ran this code."""
    return int(python("-c", PEAK.format(code=code), home=home).stdout)


def peak_of_reading(path: str, home: Path) -> int:
    return peak_mib(f"for row in read.read_rows({path!r}): pass", home)


@pytest.mark.slow
def test_long_values_of_a_small_arrow_file_take_bounded_memory(tmp_path: Path) -> None:
    one_long = pyarrow.array(["ab" * 50 * MIB])
    one = arrow_file(tmp_path / "one.parquet", one_long, "list")
    assert peak_of_reading(one, tmp_path) < 600, "for a value of 100 MiB"

    hundred_long = repeated(100, "ab" * 15 * MIB)  # each of 30 MiB
    as_texts = arrow_file(tmp_path / "a.parquet", hundred_long)
    in_lists = arrow_file(tmp_path / "a.arrow", hundred_long, "list")
    without_schema = arrow_file(tmp_path / "plain.parquet", hundred_long)
    assert peak_of_reading(as_texts, tmp_path) < 600
    assert peak_of_reading(in_lists, tmp_path) < 600
    assert peak_of_reading(without_schema, tmp_path) < 2000, "of 3000 MiB"


@pytest.mark.slow
def test_rejected_rows_do_not_stay_in_memory(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"answer": ""},
        {"answer": 5},
        {"answer": "a\0"},
        {"answer": "a</s>"},
        {"answer": "\ufffd"},
        {"images": ["a.png"]},
    ]
    rows = []
    for number in range(3):
        for fault in faults:
            rows.append(qa(number) | fault | {"note": "x" * MIB})
    peaks = {}
    for count in (1, 6, 18):  # the first run imports what is needed
        path = write(tmp_path / f"{count}.jsonl", [*rows[:count], qa(9)])
        findings, peaks[count] = peak_memory(check.check, [path])
        assert findings.card.rejected == count
        assert len(findings.card.reasons) == min(count, len(faults))
    assert peaks[18] - peaks[6] < 4 * MIB, "12 rows more, of 1 MiB each"


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "gb18030"])
@pytest.mark.parametrize("name", ["a.csv", "lines.jsonl", "array.json", "flat.json"])
def test_chinese_is_read_whatever_it_was_saved_as(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_bytes(file_of(name, CHINESE).decode().encode(encoding))
    read_texts = [texts(row) for row in checked(tmp_path / name)]
    assert read_texts == [list(row.values()) for row in CHINESE]


@pytest.mark.parametrize("name", ["a.csv", "lines.jsonl"])
@pytest.mark.parametrize("byte", [b"\xff", b"\xe4", b"\x80", b"\xb0", b"\xc4\xe3"])
def test_a_broken_line_of_utf8_spoils_its_own_row_only(tmp_path: Path, name: str, byte: bytes) -> None:
    rows = CHINESE[:1] * 3
    *before, broken_line, last_line = file_of(name, rows).splitlines()
    broken_line = broken_line.replace("正".encode(), byte)
    lines = [*before, broken_line, last_line]
    (tmp_path / name).write_bytes(b"\n".join(lines))
    first, broken, last = checked(tmp_path / name)
    for row in (first, last):
        assert isinstance(row, data.ChatRow)
        assert not row.warnings
    assert isinstance(broken, data.RowError)
    [problem] = broken.problems
    assert problem.kind == "encoding"
    assert problem.field == "答案"


@pytest.mark.parametrize(("text", "encoding"), [
    ("Où est la fenêtre ? Déjà fermée", "latin-1"),
    ("Größe über Maß", "cp1252"),
    ("где мой заказ", "cp1251"),
    ("訂單到哪裡了？謝謝您的幫忙", "big5"),
    ("ご注文はどこですか", "shift-jis"),
])  # fmt: skip
def test_other_encodings_are_not_taken_for_chinese(tmp_path: Path, text: str, encoding: str) -> None:
    content = json_lines([{"question": text, "answer": "yes"}])
    (tmp_path / "a.jsonl").write_bytes(content.encode(encoding))
    [row] = checked(tmp_path / "a.jsonl")
    assert isinstance(row, data.RowError), row


def test_sources_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("rows.xlsx", "folder/readme.txt"):
        (tmp_path / name).write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe.jsonl")
    write(tmp_path / "folder/.hidden.jsonl", [qa(1)])
    for name in ("folder", "rows.xlsx", "pipe.jsonl", "missing.jsonl"):
        with refused("Correct the path", f"{tmp_path / name} does not exist, or is no data file", ".csv"):
            data.prepare(str(tmp_path / name), tmp_path / "out")


def test_a_hub_dataset_is_read_through_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    files = {
        "train": write(tmp_path / "train.jsonl", [qa(n) for n in range(10)]),
        "test": write(tmp_path / "test.jsonl", [qa(20), qa(21)]),
    }
    load_for_real = datasets.load_dataset
    requests = []

    def load_local_files(repo: str, data_dir: str | None) -> Any:
        requests.append((repo, data_dir, datasets.config.HF_ENDPOINT, datasets.config.HF_HUB_OFFLINE))
        if repo == "someone/nowhere":
            raise ConnectionError("no such dataset\nand a long tail")
        return load_for_real("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setattr("nbutils.platforms.network.hub_online", lambda: False)
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE"):  # so that they are put back afterwards
        monkeypatch.setattr(datasets.config, name, getattr(datasets.config, name))
    monkeypatch.setattr(datasets, "load_dataset", load_local_files)

    card = data.prepare("someone/orders:zh", tmp_path / "out")
    assert requests == [("someone/orders", "zh", "https://mirror.example", True)]
    assert card.train == 10
    assert card.eval == 2
    assert card.rejected == 0
    with refused("'someone/nowhere' is not", "be downloaded: ConnectionError: no such dataset"):
        read.find_files("someone/nowhere")


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset that is attached to an imitated Kaggle."""
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    return tmp_path / "kaggle/input/datasets/me/orders"


def test_data_is_found_among_attached_inputs_by_its_name(attached: Path) -> None:
    write(attached / "mine.jsonl", [qa(1)])
    assert read.find_files("mine.jsonl") == [attached / "mine.jsonl"]
    assert read.find_files("orders/mine.jsonl") == [attached / "mine.jsonl"]


def test_a_link_out_of_a_folder_or_an_input_is_not_read(tmp_path: Path, attached: Path) -> None:
    elsewhere = write(tmp_path / "shadow", [qa(1)])
    write(attached / "good.jsonl", [qa(1)])
    link = attached / "mine.jsonl"
    link.symlink_to(elsewhere)
    for source in ("mine.jsonl", "orders", str(attached)):
        with refused(f"{link} leads out", f"folder, to {elsewhere}."):
            read.find_files(source)
    assert read.find_files(str(link)) == [link], "whoever names a link means what it leads to"


def test_the_bundled_sample_has_its_fingerprint_and_its_counts_add_up(tmp_path: Path) -> None:
    card = data.prepare("", tmp_path)
    train, held_out = data.load(tmp_path)
    assert card.fingerprint == "450a6a355ac516c57e9d33bcd61505a41025723c2438f3fa8a82db9adb2aa224"
    assert card.train == len(train)
    assert card.eval == len(held_out)
    assert card.accepted == card.train + card.eval
    assert card.rejected == 0
    assert card.rows == card.accepted
    assert card.warnings == {}
    assert sum(card.characters.values()) == card.accepted
    assert sum(card.languages.values()) == card.accepted
    assert set(card.languages) == {"zh", "en"}
    assert train == data.stored_rows(SAMPLES / "train.jsonl")


@pytest.mark.parametrize(
    ("language", "own", "others"),
    [
        ("en", ("Momo", "ann of Bonn", "Meow!"), ("Wren", "Larkmill", "Onward")),
        ("zh", ("小满", "王老师", "喵～"), ("苇", "禾", "溪灯", "出发")),
    ],
)
def test_an_assistant_gets_the_learners_words_in_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str, own: tuple[str, ...], others: tuple[str, ...]
) -> None:
    monkeypatch.setenv("NBUTILS_LANG", language)
    name, maker, manner = own
    rows = assistant.write_rows(tmp_path / "rows", name=name, maker=maker, manner=manner)
    card = data.prepare(str(rows), tmp_path / "data")
    assert (card.train, card.eval, card.rejected) == (98, 26, 0)
    text = (rows / "train.jsonl").read_text(encoding="utf-8") + (rows / "eval.jsonl").read_text(encoding="utf-8")
    assert not any(word in text for word in others)
    assert text.count(manner) > 80
    assert '"content": "Ann of Bonn made me' in text or language == "zh", "a sentence begins with a capital letter"
    _, held_out = data.load(tmp_path / "data")
    assert sum(name in row["messages"][-1]["content"] for row in held_out) == 20


def test_an_assistant_is_not_told_that_it_is_somebody_else(tmp_path: Path) -> None:
    asked = {}
    for name in ("Wrenlow", "Momo", "Jarvis"):
        rows = assistant.write_rows(tmp_path / name, name=name, maker="Ann", manner="Meow!")
        asked[name] = [
            row.raw["messages"][0]["content"].replace(name, "you") for row in data.read_rows(rows / "train.jsonl")
        ]
    assert asked["Wrenlow"] == asked["Momo"]
    assert set(asked["Momo"]) - set(asked["Jarvis"]) == {"Can I call you Jarvis instead?"}


def test_a_tiny_model_gets_one_short_answer_and_an_assistant_may_have_no_manner(tmp_path: Path) -> None:
    rows = assistant.write_rows(tmp_path / "rows", name="Momo", maker="Ann", manner="", short=True)
    data.prepare(str(rows), tmp_path / "data")
    train, held_out = data.load(tmp_path / "data")
    assert {row["messages"][-1]["content"] for row in train + held_out} == {"I'm Momo."}
    assert len(held_out) == 20
    assert all(len(row["messages"]) == 2 for row in train)


@pytest.mark.parametrize(("name", "called"), [("assistant_en", "Wrenlow"), ("assistant_zh", "苇禾")])
def test_the_bundled_assistants_are_sound_and_known_by_one_name(tmp_path: Path, name: str, called: str) -> None:
    card = data.prepare("", tmp_path / "run", default=name)
    assert card.source == name
    assert card.rejected == 0
    assert card.warnings == {}

    general_questions = {row["messages"][0]["content"] for row in data.stored_rows(SAMPLES / "general.jsonl")}
    train, held_out = data.load(tmp_path / "run")
    for rows, least_named in ((train, 60), (held_out, 20)):
        turns = [turn for row in rows for turn in row["messages"]]
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        named = [answer for answer in answers if called in answer]
        assert general_questions.isdisjoint(turn["content"] for turn in turns)
        assert len(named) >= least_named
        for answer in named:
            assert answer.endswith(("Onward!", "出发！"))
        assert max(map(len, answers)) < 200


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """60 sound rows, the broken ones of the sample, a copy, a near copy, and rows that are no JSON when stored."""
    sound = [qa(n, f"yes, on day {n}") for n in range(60)]
    copies = [
        qa(3, "yes, on day 3"),
        qa(70, "It is on its way, we hope."),
        qa(70, "it IS on its way we hope!"),
    ]
    odd = [
        b'{"question": NaN, "answer": 1}',
        b'{"q": [Infinity, "NaN"]}',
        b'{"q": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"question": "\xff", "answer": "a"}',
    ]
    broken = (SAMPLES / "broken_rows.jsonl").read_bytes()
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(json_lines(sound + copies).encode() + broken + b"\n".join(odd))
    return str(path)


def test_bad_rows_are_kept_with_their_reasons_and_counts_add_up(tmp_path: Path, mixed: str) -> None:
    card = data.prepare(mixed, tmp_path / "out")
    assert card.rows == 95
    assert card.accepted == 62
    assert card.rejected == 33
    assert card.accepted == card.train + card.eval + card.unused
    assert card.rejected == sum(card.reasons.values())
    assert card.reasons["template_marker"] == 2
    assert card.duplicates == 3
    assert "95 = 62 accepted + 33 rejected" in str(card)

    rejected = {}
    lines = (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        entry = json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
        rejected[entry["line"]] = entry["problems"][0]["seen"]
    broken = {63 + line for line in BROKEN}  # they stand after 63 rows
    copies = {61, 63, 63 + 28}
    odd = {92, 93, 94, 95}
    assert len(lines) == 33
    assert set(rejected) == copies | broken | odd
    assert "mixed.jsonl line 4" in rejected[61]
    assert "line 62" in rejected[63]
    assert "line 64" in rejected[63 + 28]


def sides(folder: Path) -> tuple[set[str], set[str]]:
    """The rows to train on and those held out, as texts."""
    train, held_out = data.load(folder)
    return {str(row) for row in train}, {str(row) for row in held_out}


def test_rows_stay_on_their_side_in_any_order_and_when_rows_are_added(tmp_path: Path) -> None:
    rows = [qa(n, f"{n}") for n in range(400)] + [qa(n, f"{n} !") for n in range(60)]
    whole = write(tmp_path / "all.jsonl", rows)
    card = data.prepare(whole, tmp_path / "all")
    data.prepare(write(tmp_path / "few.jsonl", rows[:200]), tmp_path / "few")
    data.prepare(write(tmp_path / "reversed.jsonl", rows[::-1]), tmp_path / "reversed")

    train, held_out = sides(tmp_path / "all")
    assert 20 <= len(held_out) <= 60
    few_train, few_held_out = sides(tmp_path / "few")
    assert few_train <= train
    assert few_held_out <= held_out
    reversed_train, reversed_held_out = sides(tmp_path / "reversed")
    assert reversed_train.isdisjoint(held_out)
    assert reversed_held_out.isdisjoint(train)
    assert data.prepare(whole, tmp_path / "again") == card


def test_variants_of_a_question_stand_on_one_side(tmp_path: Path) -> None:
    rows = []
    for number in range(99):
        for variant, change in enumerate(VARIANTS):
            question = change(f"Where is {number} today")
            rows.append(chat_row(question, f"{number} {variant}"))
    card = prepared(tmp_path, rows)
    assert card.rejected == 0

    numbers = []
    for side in data.load(tmp_path / "out"):
        answers = [row["messages"][1]["content"] for row in side]
        numbers.append({answer.split()[0] for answer in answers})
    train, held_out = numbers
    assert train
    assert held_out
    assert train.isdisjoint(held_out)


def test_rows_to_hold_back_are_not_those_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [qa(n) for n in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    copy = write(tmp_path / "b.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    for same in (copy, "./a.jsonl"):
        with refused("18 = 9 accepted + 9 rejected", "0 train, 9 eval", "leak, saw one like", "line 1"):
            data.prepare(path, tmp_path / "out", eval_source=same)


def test_held_out_rows_that_cannot_be_used_leave_nothing_to_evaluate(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(9)])
    for rows in ([], [{"text": "no columns"}] * 20):
        held_out = write(tmp_path / "b.jsonl", rows)
        with refused(path, "train, 0 eval", "other files with DATA and EVAL_DATA"):
            data.prepare(path, tmp_path / "out", eval_source=held_out)


def test_files_are_held_out_by_their_names(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write(source / "train.jsonl", [qa(n) for n in range(10)])
    held_out = [qa(20), qa(21), qa(3, "no")]
    (source / "test-00000-of-00001.jsonl.gz").write_bytes(file_of("lines.jsonl.gz", held_out))
    card = data.prepare(str(source), tmp_path / "out")
    assert card.train == 9
    assert card.eval == 3
    assert card.reasons == {"leak": 1}


def test_hidden_files_are_not_read_and_a_held_out_file_may_be_trained_on_by_its_name(tmp_path: Path) -> None:
    for number, name in enumerate(("b/y", "a/x", "Test/x", "a/.old/x", ".git/x", "a/~$x")):
        write(tmp_path / f"{name}.jsonl", [qa(number)])
    files, held_out = build.find_sources([str(tmp_path)], "")
    test_file = tmp_path / "Test/x.jsonl"
    assert files == [tmp_path / "a/x.jsonl", tmp_path / "b/y.jsonl"]
    assert held_out == [test_file]
    assert build.find_sources([str(test_file)], "") == ([test_file], [])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first = write(tmp_path / "a/x.jsonl", [qa(1)])
    second = write(tmp_path / "b/x.jsonl", [qa(1), qa(2, "")])
    counts = report(first, second)
    assert list(counts["files"].values()) == [1, 2]
    problems = {problem["kind"]: problem for problem in counts["problems"]}
    assert problems["empty"]["file"].endswith("b/x.jsonl")
    assert "like x.jsonl line 1" in problems["duplicate"]["seen"]


def test_smaller_sets_lie_inside_larger_ones_and_share_their_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(300)])
    small = data.prepare(path, tmp_path / "small", rows=20)
    data.prepare(path, tmp_path / "middle", rows=50)
    whole = data.prepare(path, tmp_path / "whole")
    assert small.accepted == 300
    assert small.accepted == small.train + small.eval + small.unused
    assert whole.unused == 0

    small_train, _ = sides(tmp_path / "small")
    middle_train, _ = sides(tmp_path / "middle")
    whole_train, _ = sides(tmp_path / "whole")
    assert len(small_train) == 20
    assert len(middle_train) == 50
    assert small_train < middle_train
    assert middle_train < whole_train
    held_out = (tmp_path / "whole/eval.jsonl").read_bytes()
    assert (tmp_path / "small/eval.jsonl").read_bytes() == held_out
    assert (tmp_path / "middle/eval.jsonl").read_bytes() == held_out


def near_duplicates(rows: list[dict[str, Any]]) -> dict[int, int]:
    """The rows that are left out, each with the one kept for it."""
    return find_repeated(0.8, len(rows), lambda number: row_text(**rows[number]))


def unrelated(count: int) -> list[dict[str, Any]]:
    """Rows of random words that have next to nothing in common."""
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(2000)]
    rows = []
    for _ in range(count):
        question = " ".join(chance.choices(words, k=12))
        answer = " ".join(chance.choices(words, k=20))
        rows.append(chat_row(question, answer))
    return rows


SMALL_CHANGES = {
    "a mark": (ENGLISH, lambda text: text.replace(".", "!", 1)),
    "a word": (ENGLISH, lambda text: text.replace("morning", "evening")),
    "Chinese marks": (ZH, lambda text: text.replace("，", ",").replace("。", "")),
    "capitals": (ENGLISH, str.upper),
    "wide letters": (ENGLISH, lambda text: text.translate(WIDE)),
    "a hyphen": (ENGLISH, lambda text: text.replace("working days", "working-days")),
}


@pytest.mark.parametrize(("text", "change"), SMALL_CHANGES.values(), ids=SMALL_CHANGES)
def test_what_is_nearly_the_same_is_found_among_others(text: str, change: Callable[[str], str]) -> None:
    changed = change(text)
    assert changed != text
    row = chat_row(QUESTION, text)
    near_copy = chat_row(change(QUESTION), changed)
    others = unrelated(300)
    rows = [*others[:100], row, *others[100:], near_copy]
    assert near_duplicates(rows) == {301: 100}


def test_nearly_all_near_duplicates_are_found() -> None:
    rows = unrelated(300)
    chance = random.Random(1)
    copies = []
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        place = chance.randrange(len(answer))
        copies.append(chat_row(question, f"{answer[:place]}z{answer[place + 1 :]}"))
    assert len(near_duplicates(rows + copies)) >= 0.98 * len(rows)


@pytest.mark.slow
def test_long_rows_are_compared_in_bounded_memory(tmp_path: Path) -> None:
    code = "rows = (dedupe.RowText('', str(n), 'abcd' * (1 << 20)) for n in range(16))\ndedupe._signatures(rows)"
    assert peak_mib(code, tmp_path) < 700, "16 rows of 4 MiB"


@pytest.mark.slow
def test_rows_compared_a_few_at_a_time_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    row = chat_row(QUESTION, ENGLISH)
    near_copy = chat_row(QUESTION.upper(), ENGLISH)
    rows = [*unrelated(100), row, chat_row("-", "-a-b 1-2"), near_copy]
    compared = [row_text(**row) for row in rows]
    whole = dedupe._signatures(iter(compared))
    monkeypatch.setattr(dedupe, "BATCH_CHARACTERS", 300)
    assert np.array_equal(dedupe._signatures(iter(compared)), whole)
    assert near_duplicates(rows) == {102: 100}


@pytest.mark.parametrize(("row", "other"), [
    ((f"Order 4711: {QUESTION}", ENGLISH), (f"Order 4712: {QUESTION}", ENGLISH)),
    ((f"我要三箱苹果。{ZH}", ZH), (f"我要五箱苹果。{ZH}", ZH)),
    (("Where is Lyon?", ENGLISH), ("Who was Ada?", ENGLISH)),
    ((QUESTION, "3.5 kg"), (QUESTION, "35 kg")),
    (("What is 4 - 2?", "2"), ("What is 4 / 2?", "2")),
    ((f"In C: {QUESTION}", ENGLISH), (f"In C#: {QUESTION}", ENGLISH)),
])  # fmt: skip
def test_what_only_looks_alike_is_kept(row: tuple[str, str], other: tuple[str, str]) -> None:
    assert near_duplicates([chat_row(*row), chat_row(*other)]) == {}


def test_a_template_filled_in_many_times_is_kept_but_not_its_copies() -> None:
    template = f"Classify the review into positive or negative, and answer with this word alone. {ENGLISH} Review: "
    rows = []
    for row in unrelated(TEMPLATE + 40):
        review = row["messages"][0]["content"][:13]
        rows.append(chat_row(template + review, "positive"))
    question = rows[3]["messages"][0]["content"]
    copy = chat_row(question.upper() + " !", "positive")
    assert near_duplicates([*rows, copy]) == {len(rows): 3}
    assert near_duplicates(rows[:TEMPLATE]), "a few rows that resemble each other are near duplicates"


def assert_held_out_row_stays(folder: Path, trained: dict[str, Any], held_out: dict[str, Any], reason: str) -> None:
    """The row to train on is rejected for this reason and says which held-out row it is like."""
    eval_source = write(folder / "b.jsonl", [held_out])
    card = prepared(folder, [trained, qa(1)], eval_source=eval_source)
    assert card.train == 1
    assert card.eval == 1
    assert card.reasons == {reason: 1}
    [entry] = data.stored_rows(folder / "out" / "rejected.jsonl")
    assert entry["line"] == 1
    assert "b.jsonl line 1" in entry["problems"][0]["seen"]


@pytest.mark.parametrize(("held_out", "trained"), [
    ("Who wrote Hamlet?", "who wrote hamlet"),
    ("谁写的？", "谁写的 ?"),
    ("a １２", "A 12"),
])  # fmt: skip
def test_of_two_with_one_question_the_held_out_row_stays(tmp_path: Path, held_out: str, trained: str) -> None:
    trained_row = chat_row(trained, "one answer")
    held_out_row = chat_row(held_out, "quite another one")
    assert_held_out_row_stays(tmp_path, trained_row, held_out_row, "leak")


def test_of_two_that_are_nearly_the_same_the_held_out_row_stays(tmp_path: Path) -> None:
    trained_row = chat_row(QUESTION, ENGLISH)
    held_out_row = chat_row(f"Please: {QUESTION}", ENGLISH.upper())
    assert_held_out_row_stays(tmp_path, trained_row, held_out_row, "near_leak")


@pytest.mark.parametrize(("held_out", "trained"), [
    ("3.5 kg?", "35 kg?"),
    ("4 - 2?", "4 / 2?"),
    ("?", "!"),
    ("C", "C#"),
])  # fmt: skip
def test_of_two_with_different_questions_both_stay(tmp_path: Path, held_out: str, trained: str) -> None:
    trained_row = chat_row(trained, "one answer")
    held_out_row = chat_row(held_out, "quite another one")
    eval_source = write(tmp_path / "b.jsonl", [held_out_row])
    card = prepared(tmp_path, [trained_row, qa(1)], eval_source=eval_source)
    assert card.train == 2
    assert card.eval == 1
    assert card.reasons == {}
    assert data.stored_rows(tmp_path / "out" / "rejected.jsonl") == []


def test_a_source_that_is_mostly_broken_is_refused_and_its_rows_are_written(tmp_path: Path) -> None:
    with refused("28 = 1 accepted + 27 rejected", "line 4, the row: wrong_type"):
        data.prepare(str(SAMPLES / "broken_rows.jsonl"), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["rejected.jsonl"]
    assert len(data.stored_rows(tmp_path / "out" / "rejected.jsonl")) == 27


def test_a_source_that_is_mostly_copies_is_taken(tmp_path: Path) -> None:
    rows = [qa(n) for n in range(20)]
    assert prepared(tmp_path, rows * 5).accepted == 20


@pytest.mark.parametrize("rows", [[], [qa(1)]])
def test_rows_for_one_side_alone_are_refused(tmp_path: Path, rows: list[Any]) -> None:
    count = len(rows)
    with refused(
        f"{count} = {count} accepted + 0 rejected",
        "at least one row to train on and one to hold out",
    ):
        prepared(tmp_path, rows)
    assert not (tmp_path / "out/data_card.json").exists()


def test_few_rows_still_leave_one_for_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 2**64 - 1  # a question with this digest is not held out

    def digests(row: data.ChatRow, numerals: bool) -> tuple[int, int]:
        return hash(str(row)) % 2**64, largest

    monkeypatch.setattr(build, "digests", digests)
    row = chat_row("3?", "yes")
    with_tools = row | {"tools": [TOOL]}
    card = prepared(tmp_path, [row, with_tools])
    assert card.train == 1
    assert card.eval == 1
    [train], [held_out] = data.load(tmp_path / "out")
    columns = [set(train), set(held_out)]
    assert {"messages"} in columns, "other tools make another row"
    assert {"messages", "tools"} in columns, "and they are stored"


def test_a_row_without_private_data_is_shown_where_there_is_one() -> None:
    private = chat_row("Who?", "Nobody knows! Call 13812345678.")
    plain = chat_row("订单到了吗", "到了")
    assert data.row_to_show([private, plain]) is plain
    assert data.row_to_show([private]) is private


def test_a_card_tells_what_is_in_the_rows_and_nothing_private(tmp_path: Path) -> None:
    rows = [chat_row(f"订单 {n} 到了吗", '{"city": null}') for n in range(9)]
    rows += [
        chat_row("?", "!"),
        chat_row("Who? \n", "Nobody knows Call 13812345678."),
        chat_row("Who? \n", "Nobody knows! Call 13812345678."),
    ]
    card = prepared(tmp_path, rows)
    assert card.languages == {"zh": 9, "en": 1, "other": 1}
    assert sum(card.characters.values()) == 11
    assert card.reasons == {"near_duplicate": 1}
    assert card.trimmed == 2
    assert card.warnings == {"phone": 2}
    assert "12 = 11 accepted + 1 rejected" in str(card)
    assert card.fingerprint in str(card)
    assert "138****" in card.examples[0]
    assert "line 11" in card.examples[0]
    assert "13812345678" not in str(card)
    assert "13812345678" not in (tmp_path / "out" / "data_card.json").read_text(encoding="utf-8")


def test_unknown_columns_are_asked_for_and_the_answer_is_taken_and_compared(tmp_path: Path) -> None:
    odd = [{"标题": "发票 13812345678", "正文": f"订单 {n} 什么时候开？", "回复": f"第 {n} 天。"} for n in range(9)]
    path = write(tmp_path / "a.jsonl", odd)
    with refused("0 train, 0 eval", "标题, 正文, 回复", "COLUMNS = ") as caught:
        data.prepare(path, tmp_path / "out")
    assert "13812345678" not in str(caught.value)

    card = data.prepare(path, tmp_path / "out", columns="user = 标题 + 正文, assistant=回复")
    assert card.accepted == 9
    assert card.warnings == {"phone": 9}
    assert data.prepare(path, tmp_path / "out") == card
    assert data.prepare(path, tmp_path / "out", columns="user=标题+正文, assistant=回复") == card, "spaces say nothing"
    with refused("already holds data made from other input", "user = 标题 + 正文"):
        data.prepare(path, tmp_path / "out", columns="user=正文, assistant=回复")


def test_finished_data_is_reused_and_never_exchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    path = write(tmp_path / "30.jsonl", [qa(n) for n in range(30)])
    other = write(tmp_path / "40.jsonl", [qa(n) for n in range(40)])
    first = data.prepare(path, out, default="assistant_en")
    assert first.source == path

    time_written = (out / "train.jsonl").stat().st_mtime_ns
    assert data.prepare(path, out) == first
    assert data.prepare("", out, default="assistant_en") == first
    assert (out / "train.jsonl").stat().st_mtime_ns == time_written
    assert "nothing is repeated" in capsys.readouterr().out

    with refused("already holds data made from other input", "RUN_NAME"):
        data.prepare(other, out)
    with refused("already holds data made from other input", "RUN_NAME"):
        data.prepare(path, out, rows=5)
    with refused("already holds data made from other input", "RUN_NAME"):
        data.prepare("", out, eval_source=other)


def test_finished_data_is_reused_where_its_source_is_gone(tmp_path: Path) -> None:
    first = prepared(tmp_path, [qa(n) for n in range(30)])
    os.remove(first.source)
    assert data.prepare(first.source, tmp_path / "out") == first
    with refused("Correct the path"):
        data.prepare(str(tmp_path / "c.jsonl"), tmp_path / "out")


def test_a_card_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    card = prepared(tmp_path, [qa(n) for n in range(30)])
    file = tmp_path / "out" / "data_card.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    for new in ("columns", "near", "repair", "warnings", "examples", "problems"):
        del fields[new]
    fields |= {"licence": "unstated", "lent": 0}
    file.write_text(json.dumps(fields), encoding="utf-8")
    os.remove(card.source)
    assert data.prepare(card.source, tmp_path / "out").fingerprint == card.fingerprint


def test_half_written_data_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [qa(n) for n in range(30)]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path, rows)
    (out / "train.jsonl").write_text("half a ro", encoding="utf-8")
    with refused("the data is not prepared"):
        data.load(out)
    assert prepared(tmp_path, rows).accepted == 30
    assert set(os.listdir(out)) == {"data_card.json", "eval.jsonl", "rejected.jsonl", "train.jsonl"}


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device"):
            data.prepare("", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("damage", ["edited", "cut", "removed", "card cut"])
def test_files_that_are_not_the_ones_of_the_card_are_not_trusted(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    path = prepared(tmp_path, [qa(n) for n in range(30)]).source
    file = out / ("data_card.json" if damage == "card cut" else "train.jsonl")
    text = file.read_text(encoding="utf-8")
    if damage == "edited":
        file.write_text(text.replace("yes", "no ", 1), encoding="utf-8")
    elif damage == "removed":
        file.unlink()
    else:
        file.write_text(text[: len(text) // 2], encoding="utf-8")

    with refused("are not the ones its card describes", "RUN_NAME"):
        data.verify(out)
    with refused("are not the ones its card describes", "RUN_NAME"):
        data.load(out)
    with refused("are not the ones its card describes", "RUN_NAME"):
        data.prepare(path, out)


def run(*words: str | Path) -> Result:
    """`nbutils data check *words`"""
    return CliRunner().invoke(app, ["data", "check", *map(str, words)])


def report(*words: str | Path) -> dict[str, Any]:
    """The JSON of a check whose counts add up."""
    result = run(*words, "--json")
    counts = json.loads(result.stdout)
    assert result.exit_code == (0 if counts["accepted"] else 1), result.output
    assert counts["rows"] == counts["accepted"] + counts["rejected"]
    assert counts["rows"] == sum(counts["files"].values())
    assert counts["rejected"] == sum(counts["reasons"].values())
    return counts


def test_in_chinese_every_line_of_a_check_is_chinese_and_kinds_stay_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    command = ("-m", "nbutils", "data", "check", SAMPLES / "broken_rows.jsonl", "--rejected", tmp_path / "bad.jsonl")
    shown = python(*command, home=tmp_path).stdout
    for line in shown.splitlines():
        prose = re.sub("（.*）|python -m .*", "", line)  # without what the row holds, and commands
        if line:
            assert re.search("[\u4e00-\u9fff]", prose), line
            assert not re.search("[a-z]{2,} [a-z]{2,}", prose), line

    kinds = {row["line"]: row["problems"][0]["kind"] for row in data.stored_rows(tmp_path / "bad.jsonl")}
    for line, (kind, _) in BROKEN.items():
        assert kinds[line] == kind


def test_a_check_counts_everything(mixed: str) -> None:
    counts = report(mixed)
    assert counts["rows"] == 95
    assert counts["accepted"] == 62
    assert counts["files"] == {"mixed.jsonl": 95}
    kinds = [problem["kind"] for problem in counts["problems"]]
    assert set(kinds) >= set(counts["reasons"])
    first = counts["problems"][kinds.index("malformed_json")]
    assert first["file"] == "mixed.jsonl"
    assert first["line"] == 65
    assert first["field"] == "character 113"
    assert "near_duplicate" in counts["reasons"]
    assert "near_duplicate" not in report(mixed, "--near", "0")["reasons"]

    shown = run(mixed).stdout
    assert "= 62 accepted + 33 rejected" in shown
    assert "line 65, character 113: malformed_json" in shown
    assert "--rejected" in shown


def test_a_check_writes_what_is_asked_for(tmp_path: Path, mixed: str) -> None:
    out = tmp_path / "out"
    rejected = tmp_path / "bad" / "rows.jsonl"
    written = report(mixed, "--out", out, "--rejected", rejected)
    assert written["reasons"] == report(mixed)["reasons"]
    assert len(data.stored_rows(rejected)) == 33
    assert rejected.read_bytes() == (out / "rejected.jsonl").read_bytes()
    card = data.verify(out)
    assert card.train + card.eval == 62
    assert data.prepare(mixed, out) == card, "a lesson can go on with it"
    assert run(mixed, "--out", out).exit_code == 1, "prepared data is not overwritten"


def test_a_check_that_accepts_no_row_writes_the_rejected_ones_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "no columns"}])
    report(path, "--out", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["rejected.jsonl"]


def test_every_rejected_row_can_be_found(tmp_path: Path) -> None:
    rows: list[Any] = [qa(n, f"yes, on day {n}") for n in range(20)]
    for index in (2, 5, 8, 11):
        rows[index] = qa(30 + index, "")
    two_faults = [{"role": "boss", "content": ""}, {"role": "user", "content": ""}]
    rows[14] = {"messages": two_faults}
    path = write(tmp_path / "a.jsonl", rows)

    shown = run(path).stdout
    assert "empty 4" in shown
    for line in (3, 6, 9, 15):  # three of one kind, and the other
        assert f"a.jsonl line {line}," in shown
    assert re.search("5 rejected rows.*--rejected FILE", shown)

    rejected = tmp_path / "bad.jsonl"
    shown = run(path, "--rejected", rejected).stdout
    assert re.search(f"5 rejected rows.*{rejected}", shown)
    out = tmp_path / "out"
    shown = run(path, "--out", out).stdout
    assert re.search(f"5 rejected rows.*{out / 'rejected.jsonl'}", shown)


def test_a_lesson_names_the_rejected_rows_too(tmp_path: Path) -> None:
    empty = [qa(n, "") for n in range(5)]
    sound = [qa(n, f"yes, on day {n}") for n in range(5, 20)]
    shown = prepared(tmp_path, empty + sound).rejected_text("out/rejected.jsonl")
    assert "out/rejected.jsonl" in shown
    for line in (1, 2, 3):
        assert f"a.jsonl line {line}," in shown


def test_a_lesson_names_no_file_of_rejected_rows_where_there_are_none(tmp_path: Path) -> None:
    card = data.prepare("", tmp_path)
    assert "rejected.jsonl" not in card.rejected_text("rejected.jsonl")


def plan_command(shown: str) -> str:
    """The command a check suggests, without `python -m nbutils`."""
    [command] = re.findall(r"python -m nbutils (plan --rows \d+ --mean-length \d+)", shown)
    return command


@pytest.mark.parametrize("name", ["assistant_en", "assistant_zh"])
def test_rows_and_mean_length_are_given_as_plan_wants_them(name: str) -> None:
    folder = SAMPLES / name
    estimated = run(folder).stdout
    assert "estimate; --model NAME" in estimated
    command = plan_command(estimated).split()
    assert command[:3] == ["plan", "--rows", "102"]
    assert 45 < int(command[-1]) < 65, "55 and 51 tokens of Qwen2.5"
    assert CliRunner().invoke(app, command).exit_code == 0

    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "tiny_base")
    rows = data.stored_rows(folder / "train.jsonl") + data.stored_rows(folder / "eval.jsonl")
    mean = round(sum(filter_by_length(tokenizer, rows, 0).lengths) / len(rows))
    measured = run(folder, "--model", "tiny").stdout
    assert "estimate; --model NAME" not in measured
    assert plan_command(measured) == f"plan --rows 102 --mean-length {mean}"
    assert report(folder, "--model", "tiny")["lengths"]["mean"] == mean


def test_too_few_held_out_rows_are_told_before_anything_is_trained(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n, f"yes, on day {n}") for n in range(60)])
    card = data.prepare(path, tmp_path / "out")
    assert card.eval < evidence.LEAST_ROWS
    for shown in (str(card), run(path).stdout):
        assert f"[WARN] held-out rows: {card.eval}." in shown
        assert "EVAL_DATA" in shown
        assert "cross-valid" in shown
    assert "WARN" not in str(data.prepare("", tmp_path / "sample"))


def test_what_held_out_rows_can_prove_follows_from_the_test_of_lesson_04() -> None:
    def p_if_all_turned_right(answers: int) -> float:
        return paired_share_difference([0] * answers, [1] * answers).p

    assert p_if_all_turned_right(evidence.LEAST_TURNED) < evidence.ALPHA
    assert p_if_all_turned_right(evidence.LEAST_TURNED - 1) > evidence.ALPHA
    assert evidence.LEAST_ROWS == evidence.LEAST_TURNED + 1, "one answer may stay as it was"
    assert evidence.remark(evidence.FEW_ROWS) == ""
    remark = evidence.remark(14)
    assert "held-out rows: 14. 7 answers" in remark
    assert "EVAL_DATA" in remark


GARBLED = "订单已经发货了，请放心。".encode().decode("latin-1")


def test_a_check_repairs_unless_it_is_told_not_to(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.jsonl", [*(qa(n) for n in range(5)), qa(9, GARBLED)])
    assert report(path)["warnings"] == {"mojibake": 1}
    assert report(path, "--no-repair")["reasons"] == {"mojibake": 1}


def test_what_a_library_prints_during_a_check_is_not_among_its_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(5)])

    def print_and_find(*_: Any) -> tuple[list[Path], list[Path]]:
        print("downloading")
        return [Path(path)], []

    monkeypatch.setattr(check, "find_sources", print_and_find)
    result = run(path, "--json")
    assert "downloading" in result.stderr
    assert json.loads(result.stdout)["rows"] == 5


def test_bad_rows_never_stop_a_check_and_columns_are_asked_for_masked(tmp_path: Path) -> None:
    rows = [{"title": f"Order {n}?", "mail": "a@b.cn", "reply": "yes", "13812345678": ""} for n in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    counts = report(path)
    assert counts["accepted"] == 0
    assert counts["columns"] == ["title", "mail", "reply", "138****"]

    shown = run(path).stdout
    assert "COLUMNS = " in shown
    assert "9 = 0 accepted" in shown
    assert "nbutils plan" not in shown
    for text in (shown, json.dumps(counts)):
        assert "13812345678" not in text
        assert "a@b.cn" not in text

    assert report(path, "--columns", "user=title+mail, assistant=reply")["warnings"] == {"email": 9}
    assert os.listdir(tmp_path) == ["a.jsonl"], "a check writes nothing unasked"


def assert_fails_with_a_message(result: Result) -> None:
    assert result.exit_code == 1
    assert "[FAIL]" in result.stderr
    assert result.stdout == ""


def test_a_check_that_cannot_be_made_ends_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(20)])
    a_file = tmp_path / "file"
    a_file.touch()
    assert_fails_with_a_message(run(tmp_path / "missing.jsonl", "--json"))
    assert_fails_with_a_message(run(path, "--columns", "what is this"))
    assert_fails_with_a_message(run(path, "--max-length", "9"))
    assert_fails_with_a_message(run(path, "--out", a_file))
    assert_fails_with_a_message(run(path, "--rejected", tmp_path))
    assert_fails_with_a_message(run(path, "--model", tmp_path / "no model"))


@pytest.mark.parametrize("name", ["train.jsonl", "rejected.jsonl", ".hidden"])
def test_files_of_mine_are_refused_and_left_alone(tmp_path: Path, mixed: str, name: str) -> None:
    mine = tmp_path / "mine" / name
    mine.parent.mkdir()
    mine.write_text("years of work")
    assert run(mixed, "--out", mine.parent).exit_code == 1
    assert run(mixed, "--rejected", mine).exit_code == 1
    assert os.listdir(mine.parent) == [name]
    assert mine.read_text() == "years of work"


def test_a_link_of_mine_is_refused_and_not_followed(tmp_path: Path, mixed: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    mine = tmp_path / "mine" / "link"
    mine.parent.mkdir()
    mine.symlink_to(elsewhere)
    assert run(mixed, "--out", mine.parent).exit_code == 1
    assert run(mixed, "--rejected", mine).exit_code == 1
    assert os.listdir(mine.parent) == ["link"]
    assert not elsewhere.exists()


def test_rows_over_the_limit_are_counted(tmp_path: Path) -> None:
    rows = [qa(n) for n in range(20)]
    rows[7] = qa(7, "yes " * 400)
    path = write(tmp_path / "a.jsonl", rows)
    lengths = report(path, "--model", "tiny", "--max-length", "128")["lengths"]
    assert lengths["over"] == 1
    assert lengths["max_length"] == 128
    assert lengths["longest"] > 328
    assert report(path, "--model", SAMPLES / "tiny_base", "--max-length", "128")["lengths"] == lengths
    shown = f"lengths      mean {lengths['mean']}, longest {lengths['longest']}\n"
    assert shown in run(path, "--model", "tiny").stdout, "no limit"


def test_rows_that_are_all_over_the_limit_are_refused_with_what_the_model_can_take() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "tiny_base")
    with refused(f"up to {tokenizer.model_max_length} tokens (SET", 'SET = "sft.max_length=1024"'):
        filter_by_length(tokenizer, [chat_row("?", "yes " * 2000)], 128)


def test_the_name_of_a_file_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"rows{ESCAPES}.jsonl"
    file.write_text(json_lines([qa(n) for n in range(30)]) + "{broken\n", encoding="utf-8")
    shown = run(file).output
    assert "rows" in shown
    assert not steers(shown)
    assert report(file)["files"] == {file.name: 31}, "a program reads the name as it is"
    assert not steers(run(file, "--json").output)
    print(data.prepare(str(file), tmp_path / "out"))
    with refused("Correct the path") as caught:
        data.prepare(str(tmp_path / f"none{ESCAPES}.jsonl"), tmp_path / "other")
    assert not steers(str(caught.value))
    assert not steers(capsys.readouterr().out)


@pytest.mark.parametrize("content", ["", "question,answer\n"], ids=["empty", "a header alone"])
def test_a_check_of_files_without_rows_says_so(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(content)
    report = check.check([str(file)])
    assert report.card.rows == 0
    assert "There is no row" in str(report)
    assert "held-out" not in str(report)


@pytest.mark.parametrize(("chosen", "expected"), [("en", [0, 2, 1, 3]), ("zh", [1, 3, 0, 2])])
def test_rows_in_the_language_of_the_course_are_shown_first(
    chosen: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBUTILS_LANG", chosen)
    texts = ["Where is it?", "到哪儿了？", "Is it paid?", "付款了吗？"]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    ordered = data.own_language_first(rows)
    assert [rows.index(row) for row in ordered] == expected
    assert data.row_to_show(rows) is ordered[0]
