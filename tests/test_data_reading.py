"""nbutils.data: sources, encodings, columns and the rules of a single row."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nbutils import data
from nbutils.data import files, reading
from nbutils.data.reading import Row, RowError, read_rows
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

ROOT = Path(__file__).resolve().parent.parent

BROKEN = {  # line of broken_rows.jsonl -> (kind, field)
    2: ("malformed_json", "character 113"),
    3: ("malformed_json", "character 2"),
    4: ("wrong_type", "-"),
    5: ("unknown_columns", "-"),
    6: ("missing_field", "output"),
    7: ("empty", "answer"),
    8: ("wrong_type", "答案"),
    9: ("empty", "messages[1].content"),
    10: ("wrong_type", "messages"),
    11: ("missing_field", "messages[0].content"),
    12: ("unknown_role", "conversations[0].from"),
    13: ("role_order", "messages[0]"),
    14: ("role_order", "messages[1]"),
    15: ("no_assistant", "messages[0]"),
    16: ("role_order", "messages[2]"),
    17: ("template_marker", "prompt"),
    18: ("template_marker", "answer"),
    19: ("control_character", "answer"),
    20: ("mojibake", "答案"),
    21: ("ambiguous_columns", "instruction, output, question, answer"),
    22: ("unknown_columns", "-"),
    23: ("mojibake", "answer"),
    24: ("role_order", "messages[1]"),
    25: ("wrong_type", "messages[1].tool_calls[0]"),
    26: ("malformed_json", "messages[1].tool_calls[0].arguments"),
    27: ("unsupported_field", "images"),
}


def qa(number: int, answer: str = "yes") -> dict[str, str]:
    return {"question": f"Is order {number} on its way?", "answer": answer}


def chat_row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def messages_of(path: Path | str) -> list[list[tuple[str, str]]]:
    """Every row of a file as (role, content) pairs; a rejected row fails the test."""
    rows = [data.check_row(row) for row in data.read_rows(path)]
    assert all(isinstance(row, data.ChatRow) for row in rows), rows
    return [[(m["role"], m["content"]) for m in row.messages] for row in rows]


# --- the rules ----------------------------------------------------------------------------------------------------


def test_each_broken_row_is_named_by_line_kind_and_field() -> None:
    checked = [data.check_row(row) for row in data.read_rows(SAMPLES / "broken_rows.jsonl")]
    found = {e.line: (e.problems[0].kind, e.problems[0].field) for e in checked if isinstance(e, data.RowError)}
    assert found == BROKEN
    assert all(p.todo and p.seen for e in checked if isinstance(e, data.RowError) for p in e.problems)


def test_a_bad_line_never_hides_the_next() -> None:
    checked = [data.check_row(row) for row in data.read_rows(SAMPLES / "broken_rows.jsonl")]
    assert len(checked) == 28
    assert [row.line for row in checked if isinstance(row, data.ChatRow)] == [1, 28]


@pytest.mark.parametrize(
    "raw",
    [
        chat_row("你好", "您好"),
        {"instruction": "你好", "input": "", "output": "您好"},
        {"instruction": "你好", "output": "您好"},
        {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "您好"}]},
        {"prompt": "你好", "completion": "您好"},
        {"prompt": chat_row("你好", "您好")["messages"][:1], "completion": chat_row("你好", "您好")["messages"][1:]},
        {"Question ": "你好", "Answer": "您好", "id": 7},
        {"问题": "你好", "答案": "您好"},
        {"指令": "你好", "输入": None, "输出": "您好"},
        {"messages": json.dumps(chat_row("你好", "您好")["messages"])},
        {"question": "\n \n你好 \r\n", "answer": "您好\n"},
    ],
)
def test_every_known_shape_becomes_the_same_messages(tmp_path: Path, raw: dict[str, Any]) -> None:
    assert messages_of(write(tmp_path / "rows.jsonl", [raw])) == [[("user", "你好"), ("assistant", "您好")]]


def test_input_joins_the_instruction_and_system_comes_first(tmp_path: Path) -> None:
    raw = {"system": "Be short.", "instruction": "Translate.", "input": "    你好", "output": "hello"}
    expected = [("system", "Be short."), ("user", "Translate.\n    你好"), ("assistant", "hello")]
    assert messages_of(write(tmp_path / "rows.jsonl", [raw])) == [expected]


def test_indentation_at_the_start_of_an_answer_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "code?", "answer": "\n    return 1\n"}])
    assert messages_of(path)[0][1] == ("assistant", "    return 1")


@pytest.mark.parametrize(
    ("raw", "kind", "field"),
    [
        ("text", "wrong_type", "-"),
        ({}, "unknown_columns", "-"),
        ({"messages": []}, "empty", "messages"),
        ({"messages": ["hello"]}, "wrong_type", "messages[0]"),
        ({"messages": "[{"}, "malformed_json", "messages"),
        ({"messages": [{"content": "hello"}]}, "missing_field", "messages[0].role"),
        ({"output": "yes"}, "missing_field", "instruction"),
        ({"instruction": "a", "input": 3, "output": "b"}, "wrong_type", "input"),
        ({"instruction": "a", "output": "b", "history": [["c", "d", "e"]]}, "wrong_type", "history[0]"),
        ({"messages": [{"role": "boss", "content": "b"}]}, "unknown_role", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [1]}]},
            "wrong_type",
            "messages[1].tool_calls[0]",
        ),
        ({"question": "a", "answer": "b [/INST]"}, "template_marker", "answer"),
        ({"question": "a", "answer": "<｜end▁of▁sentence｜>"}, "template_marker", "answer"),
        ({"question": "a\x85", "answer": "b"}, "control_character", "question"),
        ({"question": "a", "answer": "\ud83d"}, "control_character", "answer"),
        ({"question": "a", "answer": float("nan")}, "wrong_type", "answer"),
        *(({"instruction": "a", "input": empty, "output": "b"}, "wrong_type", "input") for empty in (0, False, [])),
        ({"question": "a", "answer": "b", "system": 0}, "wrong_type", "system"),
        ({"question": "a", "answer": "b", "history": 0}, "wrong_type", "history"),
        ({"question": "a", "answer": "b", "tools": False}, "wrong_type", "tools[0]"),
        ({"question": "a", "answer": "b", "reasoning_content": 5}, "wrong_type", "reasoning_content"),
        ({"question": "a", "Answer": "b", "answer": "c"}, "ambiguous_columns", "Answer, answer"),
        ({**qa(1), "system": "a", "system_prompt": "b"}, "ambiguous_columns", "system, system_prompt"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "role_order", "system"),
        ({"question": "a", "answer": "<unk>"}, "template_marker", "answer"),
        ({"question": json.loads("[" * 900 + "]" * 900), "answer": "b"}, "wrong_type", "question"),
        ({"question": 10**5000, "answer": "b"}, "wrong_type", "question"),
    ],
)  # fmt: skip
def test_rules_of_a_row(raw: Any, kind: str, field: str) -> None:
    problem = data.problems_of(raw)[0]
    assert (problem.kind, problem.field) == (kind, field)


SEARCH = {"function": {"name": "search", "arguments": {"q": "天气"}}, "type": "function"}
ASKED = {"role": "user", "content": "天气?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [SEARCH]}
RESULT = {"role": "tool", "content": "晴", "name": "search", "tool_call_id": "1"}
SAID = {"role": "assistant", "content": "今天晴。"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def checked_row(raw: Any, mapping: str = "") -> data.ChatRow:
    row = data.check_row(data.Row("row", 1, raw), data.parse_mapping(mapping))
    assert isinstance(row, data.ChatRow), row
    return row


def test_a_conversation_with_tools_keeps_what_a_template_reads() -> None:
    row = checked_row({"messages": [ASKED, CALLED, RESULT, RESULT, SAID, ASKED, SAID], "tools": [TOOL]})
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [SEARCH]}
    assert row.messages[2] == RESULT and row.tools == [TOOL] and not row.trimmed
    assert checked_row({"messages": [ASKED, SAID], "tools": []}).tools is None


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": json.dumps([ASKED, CALLED, RESULT, SAID]), "tools": json.dumps([TOOL])},
        {"messages": [ASKED, CALLED, RESULT, SAID], "tools": json.dumps(TOOL["function"])},
        {
            "messages": [
                ASKED,
                {"role": "assistant", "tool_calls": [{"name": "search", "arguments": json.dumps({"q": "天气"})}]},
                RESULT,
                SAID,
            ],
            "tools": [TOOL["function"]],
        },
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": "", "function_call": {"name": "search", "arguments": {"q": "天气"}}},
                {**RESULT, "role": "function"},
                SAID,
            ],
            "tools": [TOOL],
        },
        {
            "conversations": [
                {"from": "human", "value": "天气?"},
                {"from": "function_call", "value": json.dumps({"name": "search", "arguments": {"q": "天气"}})},
                {"from": "observation", "value": "晴", "name": "search", "tool_call_id": "1"},
                {"from": "gpt", "value": "今天晴。"},
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
    ],
)
def test_every_way_to_write_a_tool_call_becomes_the_same(raw: Any) -> None:
    row = checked_row(raw)
    assert row.messages == [ASKED, {**CALLED, "content": ""}, RESULT, SAID] and row.tools == [TOOL]


@pytest.mark.parametrize(
    ("messages", "kind", "field"),
    [
        ([ASKED, RESULT, SAID], "role_order", "messages[1]"),
        ([ASKED, SAID, RESULT, SAID], "role_order", "messages[2]"),
        ([ASKED, CALLED, ASKED, SAID], "role_order", "messages[2]"),
        ([ASKED, CALLED, RESULT], "role_order", "messages[2]"),
        ([ASKED, CALLED, RESULT, ASKED, SAID], "role_order", "messages[3]"),
        ([ASKED, {"role": "system", "content": "a"}, SAID], "role_order", "messages[1]"),
        ([ASKED, {**CALLED, "tool_calls": [{"function": "search"}]}], "wrong_type", "messages[1].tool_calls[0]"),
        ([ASKED, {**CALLED, "tool_calls": [{"function": {"name": " "}}]}], "wrong_type", "messages[1].tool_calls[0]"),
        (
            [ASKED, {**CALLED, "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}],
            "wrong_type",
            "messages[1].tool_calls[0].arguments",
        ),
        ([{**ASKED, "tool_calls": [SEARCH]}, SAID], "unsupported_field", "messages[0].tool_calls"),
        ([ASKED, {**SAID, "images": ["a.png"]}], "unsupported_field", "messages[1].images"),
        ([{**ASKED, "content": [{"type": "image_url"}]}, SAID], "unsupported_field", "messages[0].content"),
        ([{**ASKED, "content": [{"type": "text"}]}, SAID], "wrong_type", "messages[0].content"),
        ([ASKED, {"role": "assistant", "content": ""}], "empty", "messages[1].content"),
        ([ASKED, {"role": "assistant", "content": "", "reasoning_content": "hm"}], "empty", "messages[1].content"),
    ],
)
def test_rules_of_a_conversation(messages: list[Any], kind: str, field: str) -> None:
    problem = data.problems_of({"messages": messages})[0]
    assert (problem.kind, problem.field) == (kind, field)


def test_a_call_may_be_the_last_thing_said() -> None:
    assert checked_row({"messages": [ASKED, CALLED]}).messages[-1]["tool_calls"] == [SEARCH]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("\ud83d", "wrong_type"),
        (2**70, "wrong_type"),
        (float("nan"), "wrong_type"),
        (datetime(2020, 1, 1), "wrong_type"),
        ("\x07", "control_character"),
        ("a\\\x00", "control_character"),
        ("<|im_end|>", "template_marker"),
        ("CafÃ© Ã  Paris", "mojibake"),
        ("锟斤拷", "mojibake"),
    ],
)
def test_the_arguments_of_a_call_follow_the_rules_of_text(value: Any, kind: str) -> None:
    call = {"function": {"name": "a", "arguments": {"b": value}}}
    problem = data.problems_of({"messages": [ASKED, {**CALLED, "tool_calls": [call]}]})[0]
    assert (problem.kind, problem.field) == (kind, "messages[1]")


def test_a_call_may_hold_null_backslashes_and_line_breaks() -> None:
    call = {"function": {"name": "a", "arguments": {"b": None, "c": "\\u0007\\b\n\t\\"}}}
    assert data.problems_of({"messages": [ASKED, {**CALLED, "tool_calls": [call]}]}) == []


def test_private_data_in_a_call_is_a_warning_too() -> None:
    call = {"function": {"name": "a", "arguments": {"b": "13812345678"}}}
    [warning] = checked_row({"messages": [ASKED, {**CALLED, "tool_calls": [call]}]}).warnings
    assert (warning.kind, warning.field, warning.seen) == ("phone", "messages[1]", "138****5678")


def test_bad_tools_are_named() -> None:
    for tools, kind, field in [([{"type": "x"}], "wrong_type", "tools[0]"), ("[{", "malformed_json", "tools")]:
        problem = data.problems_of({"messages": [ASKED, SAID], "tools": tools})[0]
        assert (problem.kind, problem.field) == (kind, field)


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [ASKED, {**SAID, "reasoning_content": "想\n"}]},
        {"question": "天气?", "Complex_CoT": "想", "response": "今天晴。"},
        {"input": "天气?", "reasoning_content": "想", "content": "今天晴。"},
    ],
)
def test_reasoning_stands_before_the_answer(raw: Any) -> None:
    assert checked_row(raw).messages[1]["content"] == "<think>\n想\n</think>\n\n今天晴。"


def test_history_becomes_earlier_turns() -> None:
    raw = {"system": "短", "instruction": "c", "input": "", "output": "d", "history": [["a", "b"], ["e", "f"]]}
    found = [(message["role"][0], message["content"]) for message in checked_row(raw).messages]
    assert found == [("s", "短"), ("u", "a"), ("a", "b"), ("u", "e"), ("a", "f"), ("u", "c"), ("a", "d")]
    spoken = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [m["content"] for m in checked_row({**raw, "history": spoken}).messages] == ["短", "a", "b", "c", "d"]
    assert len(checked_row({**raw, "history": ""}).messages) == len(checked_row({**raw, "history": None}).messages) == 3


def test_content_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_row({"messages": [{"role": "user", "content": parts}, SAID]}).messages[0]["content"] == "a\nb"


# --- columns ------------------------------------------------------------------------------------------------------


def test_a_mapping_joins_columns_and_ignores_the_rest() -> None:
    raw = {"标题": "订单", "正文": "到哪里了？", "回复": "在路上。", "角色": "客服", "question": "x", "answer": "y"}
    row = checked_row(raw, "user=标题+正文, assistant=回复, system=角色")
    assert [m["content"] for m in row.messages] == ["客服", "订单\n到哪里了？", "在路上。"]
    assert [m["content"] for m in checked_row({**raw, "标题": None}, "问题=标题+正文，答案=回复").messages] == [
        "到哪里了？",
        "在路上。",
    ]
    assert checked_row({"Chat": [ASKED, SAID]}, "messages=chat").messages == [ASKED, SAID]
    assert checked_row({"question": "a", "answer": "b", "who": "c"}, "system=who").messages[0]["content"] == "c"


def test_a_mapping_that_names_an_absent_column_says_which_are_there() -> None:
    row = data.check_row(data.Row("a", 1, qa(1)), data.parse_mapping("user=question, assistant=reply"))
    assert isinstance(row, data.RowError)
    assert (row.problems[0].kind, row.problems[0].field) == ("missing_field", "reply")
    assert "question, answer" in row.problems[0].todo


@pytest.mark.parametrize("extra", ["context", "input"])
def test_a_passage_beside_the_question_joins_it(extra: str) -> None:
    assert checked_row({"question": "a", extra: "b", "answer": "c"}).messages[0]["content"] == "a\nb"


def test_a_column_that_is_there_twice_is_asked_about_and_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,notes,answer,notes\na,b,c,d,e\n", encoding="utf-8")
    [row] = data.read_rows(tmp_path / "a.csv")
    error = data.check_row(row)
    assert isinstance(error, data.RowError) and error.problems[0].kind == "ambiguous_columns"
    assert 'COLUMNS = "user=question, assistant=answer"' in error.problems[0].todo
    for column, said in (("answer", "b"), ("answer (column 4)", "d")):
        checked = data.check_row(row, data.parse_mapping(f"user=question, assistant={column}"))
        assert isinstance(checked, data.ChatRow) and checked.messages[1]["content"] == said


def test_names_that_no_mapping_can_hold_are_not_suggested() -> None:
    for raw in ({"a,b": "x", "c": "y"}, {"a=b": "x", "c+d": "y"}):
        todo = data.problems_of(raw)[0].todo
        assert "rename" in todo and "COLUMNS" not in todo
    assert "user=text, assistant=reply" in data.problems_of({"a;b": "x", "text": "y", "reply": "z"})[0].todo


def test_what_is_said_about_a_row_can_be_shown() -> None:
    bad = "13812345678\ud83d\x1b[2J"
    rows = [{bad: "a", "b": "c"}, {"messages": [{bad: "a"}]}, {"question": "a", bad: 1}, {"messages": [{"role": bad}]}]
    for raw in rows:
        for problem in data.problems_of(raw):
            said = f"{problem.field} {problem.seen} {problem.todo}"
            assert said.isprintable() and "13812345678" not in said, said


def test_a_mapping_reads_back_and_nothing_is_none() -> None:
    text = "user=a+b, assistant=c, system=d"
    assert str(data.parse_mapping(text)) == text and data.parse_mapping(f" {text};\n") == data.parse_mapping(text)
    assert data.parse_mapping("") is data.parse_mapping(" ") is None


@pytest.mark.parametrize(
    "text",
    ["question", "user=", "boss=a, assistant=b", "user=a", "user=a, user=b", "messages=a, user=b, assistant=c",
     "user=a, assistant=a", "user=a+A, assistant=b"],
)  # fmt: skip
def test_a_mapping_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(CourseError) as caught:
        data.parse_mapping(text)
    assert text.split(",")[0] in caught.value.seen and "user=" in caught.value.todo


@pytest.mark.parametrize(
    ("raw", "mapping"),
    [
        ({"title": "a", "body": "b", "reply": "c", "date": "d"}, "user=title, assistant=reply"),
        ({"编号": "1", "顾客留言": "a", "客服回复": "b"}, "user=顾客留言, assistant=客服回复"),
        ({**qa(1), "instruction": "a", "output": "b"}, "user=instruction, assistant=output"),
        ({**qa(1), "response": "x"}, "user=question, assistant=answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "user=…, assistant=…"),  # not the wrong one as an example
    ],
)
def test_columns_nobody_can_know_are_asked_for(raw: Any, mapping: str) -> None:
    problem = data.problems_of(raw)[0]
    assert f'COLUMNS = "{mapping}"' in problem.todo and "--columns" in problem.todo
    assert all(name in problem.seen + problem.field for name in raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"instruction": "a", "input": "", "output": "b", "text": "whole", "prompt": "whole"},
        {"instruction": "a", "context": "", "response": "b", "category": "qa"},
        {"prompt": "a", "prompt_id": "7", **chat_row("a", "b")},
        {"\ufeffQuestion": "a", " ANSWER ": "b"},
        {"": "0", "question": "a", "answer": "b"},
        {"problem": "a", "solution": "b"},
        {"用户": "a", "助手": "b"},
        {"q": "a", "a": "b"},
        {"问": "a", "答": "b"},
        {"問題": "a", "答案": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": " "},
        {"Question": "a", "Answer": "b", "Reasoning Content": ""},
    ],
)  # fmt: skip
def test_columns_beside_the_known_ones_do_no_harm(raw: Any) -> None:
    assert [message["content"] for message in checked_row(raw).messages] == ["a", "b"]


def test_a_sound_row_has_no_problems_and_html_is_no_marker() -> None:
    assert data.problems_of({"question": "What is <s>this</s> and a <| b |> c?", "answer": "\tstruck\nout"}) == []


def test_all_problems_of_a_row_are_reported_at_once() -> None:
    raw = {
        "messages": [
            {"role": "boss", "content": "a"},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": 1},
        ]
    }
    assert [p.kind for p in data.problems_of(raw)] == ["unknown_role", "empty", "wrong_type"]


def test_the_table_of_problems_shows_line_field_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    checked = map(data.check_row, data.read_rows(SAMPLES / "broken_rows.jsonl"))
    data.show_problems(row for row in checked if isinstance(row, data.RowError))
    shown = capsys.readouterr().out
    assert "line 2, character 113" in shown and "答案" in shown and "<|im_start|>" in shown and "json.dumps" in shown


# --- reading ------------------------------------------------------------------------------------------------------


def _json_array(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")


def _bom_crlf(path: Path, rows: list[Any]) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row) for row in rows).encode())


def _csv(path: Path, rows: list[Any]) -> None:
    lines = ["question,answer", *(f'"{row["question"]}","{row["answer"]}"' for row in rows)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())


def _parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("a.jsonl", lambda path, rows: write(path, rows)),
        ("lines.json", lambda path, rows: write(path, rows)),
        ("a.json", _json_array),
        ("array.jsonl", _json_array),
        ("bom.jsonl", _bom_crlf),
        ("a.csv", _csv),
        ("a.parquet", _parquet),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, writer: Any) -> None:
    rows = [qa(1, "yes,\n是"), qa(2, "[no]"), qa(3, "{maybe}")]
    writer(tmp_path / name, rows)
    expected = [[("user", row["question"]), ("assistant", row["answer"])] for row in rows]
    assert messages_of(tmp_path / name) == expected


def test_rows_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"two\nlines",yes\nb,no\n', encoding="utf-8")
    assert [row.line for row in data.read_rows(path)] == [2, 4]
    _json_array(tmp_path / "a.json", [qa(1), qa(2)])
    assert [row.line for row in data.read_rows(tmp_path / "a.json")] == [2, 6]


@pytest.mark.parametrize(("indent", "line"), [(None, 3), (2, 14)])
def test_a_broken_element_of_an_array_does_not_hide_the_next(tmp_path: Path, indent: int | None, line: int) -> None:
    parts = [json.dumps(chat_row(str(n), "yes"), indent=indent) for n in range(3)]
    parts[1] = parts[1].replace('"role"', '"role', 1)
    inner = "\n".join("  " + line for line in ",\n".join(parts).splitlines())
    (tmp_path / "a.json").write_text("[\n" + inner + "\n]", encoding="utf-8")
    rows = list(data.read_rows(tmp_path / "a.json"))
    assert [isinstance(row, data.RowError) for row in rows] == [False, True, False]
    assert rows[1].line == line


@pytest.mark.parametrize("held", ["%s", '{"data": %s}', '{"version": 1, "data": %s, "by": ["me"]}'])
@pytest.mark.parametrize("broken", [0, 10, 2999])
@pytest.mark.parametrize("fault", [('", "', '" "'), ('": "Is', '": Is'), ('"}]}', '"}]'), ('"messages"', '"messages')])
def test_a_broken_element_on_one_line_hides_none(tmp_path: Path, held: str, broken: int, fault: Any) -> None:
    parts = [json.dumps(chat_row(f"Is it {n}?", "x" * 500)) for n in range(3000)]
    parts[broken] = parts[broken].replace(*fault, 1)
    (tmp_path / "a.json").write_text(held % f"[{', '.join(parts)}]", encoding="utf-8")
    rows = list(data.read_rows(tmp_path / "a.json"))
    assert [n for n, row in enumerate(rows) if isinstance(row, data.RowError)] == [broken] and len(rows) == 3000


def test_the_place_in_a_broken_element_is_told(tmp_path: Path) -> None:
    broken = '{"question": "c" "answer": "d"}'
    (tmp_path / "a.json").write_text(f"[{json.dumps(qa(1))}, {broken}]", encoding="utf-8")
    _, error = data.read_rows(tmp_path / "a.json")
    assert error.raw == broken and error.problems[0].field == "character 18" and '"c" "ans' in error.problems[0].seen


def test_a_list_may_begin_with_what_is_no_row(tmp_path: Path) -> None:
    for first in ('"a note"', '{"question": "a" "answer": "b"}'):
        (tmp_path / "a.json").write_text(f'{{"data": [{first}, {json.dumps(qa(1))}]}}', encoding="utf-8")
        bad, good = (data.check_row(row) for row in data.read_rows(tmp_path / "a.json"))
        assert isinstance(bad, data.RowError) and isinstance(good, data.ChatRow)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("first", [True, False])
def test_a_number_of_5000_digits_spoils_its_own_row_only(tmp_path: Path, name: str, first: bool) -> None:
    rows = ['{"question": "a", "answer": %s}' % ("1" * 5000), json.dumps(qa(1))][:: 1 if first else -1]
    (tmp_path / name).write_text("\n".join(rows) if name == "a.jsonl" else f"[{', '.join(rows)}]", encoding="utf-8")
    checked = [data.check_row(row) for row in data.read_rows(tmp_path / name)]
    assert [isinstance(row, data.RowError) for row in checked] == [first, not first]


def test_an_array_larger_than_the_window_is_read_whole(tmp_path: Path) -> None:
    rows = [qa(n, "x" * 700) for n in range(4000)]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    assert [row.raw for row in data.read_rows(tmp_path / "a.json")] == rows


def test_a_broken_row_of_a_csv_does_not_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\na\nb,c,d\n"e"x,f\ng,h\n', encoding="utf-8")
    rows = list(data.read_rows(tmp_path / "a.csv"))
    assert [getattr(row, "problems", None) and row.problems[0].kind for row in rows] == ["malformed_csv"] * 3 + [None]
    assert rows[-1].raw == {"question": "g", "answer": "h"} and rows[-1].line == 5


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\na,"b\nc,d\n"e\nf","g"\nh,"i\n', encoding="utf-8")
    rows = list(data.read_rows(tmp_path / "a.csv"))
    assert [(row.line, isinstance(row, data.Row)) for row in rows] == [(2, False), (3, True), (4, True), (6, False)]
    assert rows[1].raw == {"question": "c", "answer": "d"} and rows[2].raw == {"question": "e\nf", "answer": "g"}
    assert 'a,"b' in rows[0].problems[0].seen and "quoting" in rows[0].problems[0].todo


@pytest.mark.parametrize(
    "line", ['what is item %d","the item number %d\n', '"open %d,and never closed %d\n', '%d,"%d\n']
)
def test_quotes_that_are_never_closed_cost_little(tmp_path: Path, line: str) -> None:
    lines = "".join(line % (n, n) for n in range(20_001))
    (tmp_path / "a.csv").write_text("question,answer\n" + lines, encoding="utf-8")
    begun = time.process_time()
    rows = list(data.read_rows(tmp_path / "a.csv"))
    assert time.process_time() - begun < 2 and rows[-1].line == 20_002 and isinstance(rows[0], data.RowError)
    assert rows[0].raw == (line % (0, 0)).rstrip()


@pytest.mark.parametrize("text", ["[" + '{"q":"a" "a":"b"},' * 20_000 + "]", '[{"q" "a"}' + "\n" * 60_000 + "]"])
def test_broken_json_costs_little(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    begun = time.process_time()
    rows = list(data.read_rows(tmp_path / "a.json"))
    assert time.process_time() - begun < 3 and len(rows) == text.count("{")


def test_a_long_cell_is_a_cell(tmp_path: Path) -> None:
    cell = "line\n" * 400_000
    (tmp_path / "a.csv").write_text(f'question,answer\na,"{cell}"\nb,c\n', encoding="utf-8")
    assert [row.raw["answer"] for row in data.read_rows(tmp_path / "a.csv")] == [cell, "c"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_long_row_is_a_row_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    for room in ("reading", "documents"):
        monkeypatch.setattr(f"nbutils.data.{room}.LARGEST_ROW", 1000)
    rows = [qa(1), qa(2)]
    rows[place] = qa(3, "x" * 5000)
    assert [row.raw for row in data.read_rows(write(tmp_path / "a.jsonl", rows))] == rows


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_csv_may_be_separated_by_another_sign(tmp_path: Path, mark: str) -> None:
    (tmp_path / "a.csv").write_text(f"question{mark}answer\nwhy, then?{mark}so\n", encoding="utf-8")
    assert [row.raw for row in data.read_rows(tmp_path / "a.csv")] == [{"question": "why, then?", "answer": "so"}]


def test_bytes_that_are_not_utf8_spoil_their_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    broken = json.dumps({"question": "价格是多少", "answer": "很低"}, ensure_ascii=False).encode()
    broken = broken.replace("很".encode(), b"\xe5\xbe", 1)
    path.write_bytes(broken + b"\n" + json.dumps(qa(1)).encode())
    bad, good = (data.check_row(row) for row in data.read_rows(path))
    assert isinstance(bad, data.RowError) and isinstance(good, data.ChatRow)
    assert (bad.problems[0].kind, bad.problems[0].field) == ("encoding", "answer") and "UTF-8" in bad.problems[0].todo


def _packed(ending: str, pack: Any, writer: Any) -> Any:
    def write_packed(path: Path, rows: list[Any]) -> None:
        plain = path.with_name(path.name.removesuffix(ending))
        writer(plain, rows)
        path.write_bytes(pack(plain.read_bytes()))
        plain.unlink()

    return write_packed


def _zstd(content: bytes) -> bytes:
    half = len(content) // 2  # two frames, as parallel compressors and `cat` write them
    return b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))


def _checked_zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)  # as the command line tool does


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("a.jsonl.gz", _packed(".gz", gzip.compress, write)),
        ("a.jsonl.zst", _packed(".zst", _zstd, write)),
        ("a.json.gz", _packed(".gz", gzip.compress, _json_array)),
        ("a.json.zst", _packed(".zst", _zstd, _json_array)),
        ("a.csv.gz", _packed(".gz", gzip.compress, _csv)),
        ("a.csv.zst", _packed(".zst", _zstd, _csv)),
        ("A.CSV.GZ", _packed(".GZ", gzip.compress, _csv)),
        ("a.parquet.gz", _packed(".gz", gzip.compress, _parquet)),
        ("a.parquet.zst", _packed(".zst", _zstd, _parquet)),
    ],
)
def test_compressed_files_give_the_same_rows(tmp_path: Path, name: str, writer: Any) -> None:
    rows = [qa(1, "yes,\n是"), qa(2, "[no]"), qa(3, "{maybe}")]
    writer(tmp_path / name, rows)
    assert messages_of(tmp_path / name) == [[("user", r["question"]), ("assistant", r["answer"])] for r in rows]


def test_a_tsv_is_a_table_too(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes("问题\t答案\r\n你好，朋友\t您好\r\n".encode())
    assert messages_of(tmp_path / "a.tsv") == [[("user", "你好，朋友"), ("assistant", "您好")]]


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", _checked_zstd)])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_gives_its_first_rows_and_then_says_so(
    tmp_path: Path, ending: str, pack: Any, damage: str
) -> None:
    rng = random.Random(1)
    rows = [qa(n, f"{rng.getrandbits(256):064x}") for n in range(20_000)]
    content = bytearray(pack("".join(json.dumps(row) + "\n" for row in rows).encode()))
    half = len(content) // 2
    if damage == "cut":
        del content[half:]
    else:
        content[half : half + 400] = bytes(400)
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(content)
    *read_before, last = data.read_rows(path)
    assert isinstance(last, data.RowError) and "damaged or cut short" in last.problems[0].seen
    sound = [row.raw for row in read_before if isinstance(row, data.Row)]
    assert len(sound) > 1000 and sound[:1000] == rows[:1000] and last.line == read_before[-1].line + 1


def test_a_parquet_file_damaged_inside_gives_its_first_rows_and_then_says_so(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", [qa(n, str(random.Random(n).getrandbits(900))) for n in range(20_000)])
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    (tmp_path / "a.parquet").write_bytes(content)
    *before, last = data.read_rows(tmp_path / "a.parquet")
    assert isinstance(last, data.RowError) and last.problems[0].kind == "damaged_file" and last.line == len(before) + 1


def test_a_file_that_is_not_what_its_name_says_is_named_once(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.csv.zst", "c.parquet.gz", "d.parquet"):
        (tmp_path / name).write_bytes(b"this was never compressed")
        [only] = data.read_rows(tmp_path / name)
        assert isinstance(only, data.RowError) and only.problems[0].kind == "damaged_file"
        assert "before this place" not in only.problems[0].todo


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("question,answer\na,b\n".encode("utf-16"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    write(tmp_path / "c.jsonl", [qa(1)])
    rows = list(data.read_rows(tmp_path))
    assert [row.problems[0].kind for row in rows[:2]] == ["encoding", "damaged_file"] and rows[2].raw == qa(1)


@pytest.mark.parametrize(
    "document",
    [
        {"data": [qa(1), qa(2)]},
        {"version": "1.0", "numbers": [1, 2], "train": [qa(1), qa(2)], "note": {"by": ["me"]}},
        [qa(1), qa(2)],
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_may_hold_the_list_of_rows(tmp_path: Path, document: Any, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document, indent=indent), encoding="utf-8")
    assert [row.raw for row in data.read_rows(tmp_path / "a.json")] == [qa(1), qa(2)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("row", [qa(1), {"id": 7, "tags": [{"a": 1}], **qa(1)}, {"messages": [{"role": "user"}]}])
def test_a_row_by_itself_is_one_row(tmp_path: Path, row: Any, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps(row, indent=indent) + "\n", encoding="utf-8")
    assert [one.raw for one in data.read_rows(tmp_path / "a.json")] == [row]


def test_objects_on_several_lines_each_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(qa(n), indent=2) for n in range(3)), encoding="utf-8")
    assert [(row.line, row.raw) for row in data.read_rows(tmp_path / "a.jsonl")] == [(1, qa(0)), (5, qa(1)), (9, qa(2))]


def test_an_object_with_several_lists_shows_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"train": [qa(1)], "test": [qa(2)]}, indent=1), encoding="utf-8")
    with pytest.raises(CourseError, match="2 lists of rows: train, test"):
        list(data.read_rows(tmp_path / "a.json"))


def test_an_array_that_is_not_closed_is_told_and_its_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([qa(1), qa(2)])[:-1], encoding="utf-8")
    one, two, error = data.read_rows(tmp_path / "a.json")
    assert (one.raw, two.raw) == (qa(1), qa(2)) and "not closed" in error.problems[0].todo


def test_lines_that_are_lists_are_not_taken_for_one_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat_row("a", "b")["messages"], chat_row("c", "d")["messages"]])
    assert [row.line for row in data.read_rows(path)] == [1, 2]


@pytest.mark.parametrize("first", ['{"question": "a", "answer', '{"messages": [{"role": "user", "content": "a"},'])
def test_a_first_line_that_is_broken_does_not_hide_the_next(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{first}\n{json.dumps(qa(1))}\n", encoding="utf-8")
    bad, good = data.read_rows(tmp_path / "a.jsonl")
    assert bad.line == 1 and good.raw == qa(1)


PEAK = """
import resource, sys
from nbutils import data
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(data.read_rows(sys.argv[1]))
before = peak()
print(sum(1 for _ in data.read_rows(sys.argv[2])), peak() - before)
"""


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json", "held.json", "a.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    for folder, count in (("small", 2000), ("large", 20_000)):
        (tmp_path / folder).mkdir()
        rows = [qa(n, "x" * 1500) for n in range(count)]
        text = "\n".join(json.dumps(row) for row in rows)
        if name.endswith(".json"):
            text = "[" + text.replace("\n", ",") + "]"
            text = '{"rows": ' + text + "}" if name == "held.json" else text
        elif name == "a.csv":
            text = "question,answer\n" + "\n".join(f"{r['question']},{r['answer']}" for r in rows)
        pack = {"gz": lambda b: gzip.compress(b, 1), "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
        (tmp_path / folder / name).write_bytes(pack(text.encode()))
    words = [sys.executable, "-c", PEAK, str(tmp_path / "small" / name), str(tmp_path / "large" / name)]
    count, grown_kib = map(int, subprocess.check_output(words, cwd=ROOT, text=True).split())
    assert count == 20_000 and grown_kib < 8 * 1024, f"{grown_kib} KiB more for 27 MB more"


# --- encodings ----------------------------------------------------------------------------------------------------

CHINESE = [
    {"问题": "我的订单到哪里了？", "答案": "您好，正在路上，预计明天下午送达。"},
    {"问题": "一些", "答案": "是"},
    {"问题": "退款要多久", "答案": "一般三个工作日内到账。"},
    {"问题": "ok", "答案": "ok"},
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gbk", "gb18030"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "flat.json"])
def test_chinese_is_read_whatever_it_was_saved_as(tmp_path: Path, name: str, encoding: str) -> None:
    if name.endswith("sv"):
        comma = "," if name == "a.csv" else "\t"
        text = "\r\n".join(comma.join(line) for line in [("问题", "答案"), *(tuple(row.values()) for row in CHINESE)])
    elif name == "a.jsonl":
        text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in CHINESE)
    else:
        text = json.dumps(CHINESE, ensure_ascii=False, indent=None if name == "flat.json" else 2)
    (tmp_path / name).write_bytes(text.encode(encoding))
    rows = [data.check_row(row) for row in data.read_rows(tmp_path / name)]
    assert [[m["content"] for m in row.messages] for row in rows] == [list(row.values()) for row in CHINESE]
    warned = [any(warning.kind == "encoding" for warning in row.warnings) for row in rows]
    assert any(warned) == encoding.startswith("gb") and (not name.endswith("sv") or not warned[3])


def test_lines_in_two_encodings_are_each_read_in_their_own(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in CHINESE]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join(line.encode("gbk" if n % 2 == 0 else "utf-8") for n, line in enumerate(lines))
    )
    rows = [data.check_row(row) for row in data.read_rows(tmp_path / "a.jsonl")]
    assert [row.messages[0]["content"] for row in rows] == [row["问题"] for row in CHINESE]
    assert [bool(row.warnings) for row in rows] == [True, False, True, False]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_what_is_utf8_is_never_taken_for_gbk(tmp_path: Path, name: str) -> None:
    rows = [{"question": "我的订单到哪里了？", "answer": "正在路上"}] + [
        {"question": text, "answer": "é"} for text in ("Où est le café ?", "Pärt größe", "где")
    ]
    form = (
        (lambda row: ",".join(row.values())) if name == "a.csv" else (lambda row: json.dumps(row, ensure_ascii=False))
    )
    lines = [form(row).encode("gbk" if n == 0 else "utf-8") for n, row in enumerate(rows)]
    (tmp_path / name).write_bytes(b"\n".join([b"question,answer"] * (name == "a.csv") + lines))
    assert [row.raw for row in data.read_rows(tmp_path / name)] == rows


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("head", ["问题", "問題"])
def test_a_file_in_gbk_may_hold_any_character(tmp_path: Path, name: str, head: str) -> None:
    pairs = [("骆驼", "鹦鹉"), ("什麼是機器學習？", "是人工智慧的一個分支"), ("你好", "😀😀😀"), ("玫瑰", "花")]
    lines = [json.dumps({head: a, "答案": b}, ensure_ascii=False) for a, b in pairs]
    if name == "a.csv":
        lines = [f"{head},答案", *map(",".join, pairs)]
    (tmp_path / name).write_bytes("\n".join(lines).encode("gb18030"))
    assert [tuple(row.raw.values()) for row in data.read_rows(tmp_path / name)] == pairs


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("byte", [b"\xff", b"\xe4", b"\x80", b"\xb0", b"\xc4\xe3"])
def test_a_broken_line_of_utf8_is_not_taken_for_gbk(tmp_path: Path, name: str, byte: bytes) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in CHINESE[:1] * 3]
    if name == "a.csv":
        lines = ["问题,答案", *(",".join(row.values()) for row in CHINESE[:1] * 3)]
    content = [line.encode() for line in lines]
    content[-2] = content[-2].replace("正".encode(), byte)
    (tmp_path / name).write_bytes(b"\n".join(content))
    rows = [data.check_row(row) for row in data.read_rows(tmp_path / name)]
    assert [isinstance(row, data.ChatRow) for row in rows] == [True, False, True]
    assert rows[1].problems[0].kind == "encoding" and rows[1].problems[0].field == "答案"
    assert not rows[0].warnings and not rows[2].warnings


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Où est la fenêtre ? Déjà fermée", "latin-1"),
        ("Größe über Maß", "cp1252"),
        ("где мой заказ", "cp1251"),
        ("訂單到哪裡了？謝謝您的幫忙", "big5"),
        ("ご注文はどこですか", "shift-jis"),
    ],
)
def test_other_encodings_are_not_taken_for_chinese(tmp_path: Path, text: str, encoding: str) -> None:
    line = json.dumps({"question": text, "answer": "yes"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(line.encode(encoding))
    [row] = map(data.check_row, data.read_rows(tmp_path / "a.jsonl"))
    assert isinstance(row, data.RowError), row


def test_a_stray_byte_in_french_does_not_make_it_chinese(tmp_path: Path) -> None:
    line = json.dumps({"question": "Été, déjà prévu à Orléans", "answer": "né à"}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(line.replace(b"Orl", b"O\xe4l"))
    [row] = map(data.check_row, data.read_rows(tmp_path / "a.jsonl"))
    assert isinstance(row, data.RowError) and row.problems[0].kind == "encoding"


# --- sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("test.jsonl", "test"),
        ("test.jsonl.gz", "test"),
        ("test-00000-of-00001.parquet", "test"),
        ("validation-00000-of-00002-a09b74b3ef9c3b56.parquet", "validation"),
        ("TEST.CSV.ZST", "TEST"),
        ("my.test.json", "my.test"),
    ],
)
def test_the_stem_of_a_file_is_the_name_of_its_split(name: str, stem: str) -> None:
    assert files.stem_of(Path(name)) == stem


def test_a_folder_of_folders_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "zh" / "a.jsonl", [qa(1)])
    write(tmp_path / "en" / "a.jsonl.gz", [qa(1)])
    with pytest.raises(CourseError, match="en, zh"):
        files.files_of(str(tmp_path))


def test_a_folder_gives_its_data_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [qa(2)])
    write(tmp_path / "a.jsonl", [qa(1)])
    (tmp_path / "notes.txt").write_text("no data", encoding="utf-8")
    assert [row.file for row in data.read_rows(tmp_path)] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "missing.jsonl"),
        ("rows.xlsx", b"PK", ".xlsx"),
        ("wide.jsonl", "﻿{}".encode("utf-16"), "UTF-16"),
        ("torn.parquet", b"PAR1 and no more", "parquet"),
        ("folder/readme.txt", b"no data", "readme.txt"),
    ],
)
def test_sources_that_cannot_be_read_say_so(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CourseError) as caught:
        data.prepare(str(path.parent if name.startswith("folder") else path), tmp_path / "out")
    assert words in caught.value.seen and caught.value.todo


def test_a_hub_name_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CourseError, match="hub dataset") as caught:
        data.prepare("someone/chat-rows", tmp_path / "out")
    assert "HF_ENDPOINT" in caught.value.todo


def test_data_is_found_among_attached_inputs_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = tmp_path / "kaggle/input/datasets/me/orders/mine.jsonl"
    attached.parent.mkdir(parents=True)
    attached.write_text(json.dumps({"question": "a", "answer": "b"}), encoding="utf-8")
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert files.files_of("mine.jsonl") == files.files_of("orders/mine.jsonl") == [attached]
    with pytest.raises(CourseError, match="other"):
        files.files_of("other.jsonl")


def test_a_line_without_end_is_named_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 22)
    path = tmp_path / "bomb.jsonl.gz"
    good = b'{"instruction": "a", "output": "b"}\n'
    with gzip.open(path, "wb") as file:
        for lines in (good, b'{"text": "' + bytes(1 << 27) + b'"}\n', good * 3, b'"' + b"x" * (1 << 24)):
            file.write(lines)
    tracemalloc.start()
    found = list(read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [isinstance(row, Row) for row in found] == [True, False, True, True, True, False]
    assert [row.line for row in found] == [1, 2, 3, 4, 5, 6] and peak < 64 << 20


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.gz"])
def test_one_line_that_is_the_whole_file_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 20 << 20)
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(b'{"a": "')
        for _ in range(256):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    found = list(read_rows(tmp_path / name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found and all(isinstance(row, RowError) for row in found) and peak < 200 << 20


def test_blank_lines_without_end_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b"\r\n" * 5000 + b'{"instruction": "a", "output": "b"}\n')
    with open(path, "rb") as raw:
        assert len(reading._first_lines(raw, reading.Decoder(b""), True)[0]) == reading.BLANK_LINES
    [row] = read_rows(path)
    assert isinstance(row, Row) and row.line == 5001


def test_a_value_that_every_row_of_a_parquet_file_repeats_takes_bounded_memory(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "bomb.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 120), pyarrow.array(["x" * (1 << 24)]))
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd")
    assert path.stat().st_size < 1 << 16
    tracemalloc.start()
    count = sum(1 for _ in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 120 and peak < 600 << 20 and pyarrow.default_memory_pool().max_memory() < 1200 << 20


def test_a_table_of_many_columns_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{number % 99_999}" for number in range(100_000)) + "\n", encoding="utf-8")
    code = f"from nbutils.data import reading; assert list(reading.read_rows({str(path)!r})) == []"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # with all pairs compared: minutes


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(CourseError, match="no plain file"):
        files.files_of(str(tmp_path / "rows.jsonl"))
