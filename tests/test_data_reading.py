"""nbutils.data: sources, encodings, columns and the rules of a single row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbutils import data
from nbutils.data import files
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

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
    assert len(checked) == 22
    assert [row.line for row in checked if isinstance(row, data.ChatRow)] == [1, 22]


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
    ],
)  # fmt: skip
def test_rules_of_a_row(raw: Any, kind: str, field: str) -> None:
    problem = data.problems_of(raw)[0]
    assert (problem.kind, problem.field) == (kind, field)


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
    data.print_problems(row for row in checked if isinstance(row, data.RowError))
    shown = capsys.readouterr().out
    assert "broken_rows.jsonl" in shown and "答案" in shown and "<|im_start|>" in shown and "json.dumps" in shown


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


def test_an_array_larger_than_the_window_is_read_whole(tmp_path: Path) -> None:
    rows = [qa(n, "x" * 700) for n in range(4000)]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    assert [row.raw for row in data.read_rows(tmp_path / "a.json")] == rows


def test_a_broken_row_of_a_csv_does_not_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\na\nb,c,d\n"e"x,f\ng,h\n', encoding="utf-8")
    rows = list(data.read_rows(tmp_path / "a.csv"))
    assert [getattr(row, "problems", None) and row.problems[0].kind for row in rows] == ["malformed_csv"] * 3 + [None]
    assert rows[-1].raw == {"question": "g", "answer": "h"} and rows[-1].line == 5


def test_bytes_that_are_not_utf8_spoil_their_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    broken = json.dumps({"question": "价格是多少", "answer": "很低"}, ensure_ascii=False).encode()
    broken = broken.replace("很".encode(), b"\xe5\xbe", 1)
    path.write_bytes(broken + b"\n" + json.dumps(qa(1)).encode())
    bad, good = (data.check_row(row) for row in data.read_rows(path))
    assert isinstance(bad, data.RowError) and isinstance(good, data.ChatRow)
    assert (bad.problems[0].kind, bad.problems[0].field) == ("encoding", "answer") and "UTF-8" in bad.problems[0].todo


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
