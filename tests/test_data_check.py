"""`python -m nbutils data check`: one pass over any files, counts that add up, nothing written unasked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_data_reading import BROKEN, chat_row, qa, read, write

from nbutils import data
from nbutils.cli import app
from nbutils.data import checking
from nbutils.paths import SAMPLES

KEYS = {
    "rows", "accepted", "rejected", "reasons", "warnings", "duplicates", "trimmed", "languages", "characters", "files",
    "problems", "examples", "lengths", "columns", "next",
}  # fmt: skip


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", "check", *words])


def report(*words: str) -> dict[str, Any]:
    """The JSON of a check whose counts add up."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rows"] == found["accepted"] + found["rejected"] == sum(found["files"].values())
    assert sum(found["reasons"].values()) == found["rejected"]
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """60 sound rows, the broken ones of the sample, a copy and a near copy."""
    long = "The parcel was handed to the carrier this morning and should arrive within some working days, we hope."
    rows = [qa(n, f"yes, on day {n}") for n in range(60)] + [qa(3, "yes, on day 3"), qa(70, long), qa(70, long.upper())]
    path = write(tmp_path / "mixed.jsonl", rows)
    with open(path, "a", encoding="utf-8") as file:
        file.write((SAMPLES / "broken_rows.jsonl").read_text(encoding="utf-8"))
    return path


def test_everything_is_counted_and_the_first_problems_are_named(mixed: str) -> None:
    found = report(mixed)
    assert set(found) == KEYS and found["files"] == {"mixed.jsonl": found["rows"]}
    assert found["reasons"]["near_duplicate"] == 1 and found["reasons"]["template_marker"] == 2
    assert found["accepted"] == 62 and found["rejected"] == len(BROKEN) + 3
    assert found["duplicates"] == found["reasons"]["duplicate"] + 1
    first = next(problem for problem in found["problems"] if problem["kind"] == "malformed_json")
    assert (first["file"], first["line"]) == ("mixed.jsonl", 65) and first["seen"] and first["todo"] and first["field"]
    assert {problem["kind"] for problem in found["problems"]} >= set(found["reasons"])


def test_bad_rows_never_stop_it_and_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "no columns"}] * 5)
    found = report(path)
    assert (found["accepted"], found["reasons"], found["columns"]) == (0, {"unknown_columns": 5}, ["text"])
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    assert report(str(tmp_path / "none.jsonl"))["rows"] == 0


def test_only_json_stands_on_stdout_also_with_a_progress_bar(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f'{{"question": "Order {n}?", "answer": "{"x" * 3000}"}}\n' for n in range(8000))
    words = [sys.executable, "-m", "nbutils", "data", "check", str(path), "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["rows"] == 8000
    assert ran.stderr.count("\n") + ran.stderr.count("\r") < 10, "calm where nobody watches"


def test_what_the_rooms_say_meanwhile_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [qa(1)])
    monkeypatch.setattr(checking, "find_sources", lambda *_: (print("downloading"), ([Path(path)], []))[1])
    assert report(path)["rows"] == 1 and "downloading" in run(path, "--json").stderr


def test_people_get_a_table_the_first_problems_and_the_next_step(mixed: str) -> None:
    shown = run(mixed).stdout
    assert (
        f"= 62 accepted + {len(BROKEN) + 3} rejected" in shown and "template_marker" in shown and "--rejected" in shown
    )
    assert "mixed.jsonl line 65, character 113: malformed_json" in shown and len(shown.splitlines()) < 80


def test_unknown_columns_are_asked_for_and_the_answer_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"title": f"Order {n}?", "mail": "a@b.cn", "reply": "yes"} for n in range(9)])
    shown = run(path).stdout
    assert 'COLUMNS = "user=title, assistant=reply"' in shown and "a***@b.cn" in shown and "a@b.cn" not in shown
    assert report(path, "--columns", "user=title+mail, assistant=reply")["warnings"] == {"email": 9}
    wrong = run(path, "--columns", "what is this")
    assert wrong.exit_code == 1 and "mapping" in wrong.output


def test_only_files_that_cannot_be_read_end_it_with_a_message(tmp_path: Path) -> None:
    result = run(str(tmp_path / "missing.jsonl"), "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1 and "missing.jsonl" in error["seen"] and set(error) == {"seen", "allowed", "todo"}
    assert run(str(tmp_path / "missing.jsonl")).stdout == "" and run().exit_code == 2


@pytest.mark.parametrize(
    ("option", "place"),
    [("--out", "file"), ("--out", "file/below"), ("--rejected", "folder"), ("--rejected", "file/x")],
)
def test_a_place_that_cannot_be_written_to_is_named_with_what_to_do(tmp_path: Path, option: str, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    result = run(write(tmp_path / "a.jsonl", [qa(n) for n in range(20)]), option, str(tmp_path / place))
    assert (
        result.exit_code == 1 and "[FAIL]" in result.stderr and str(tmp_path / place.partition("/")[0]) in result.stderr
    )


def test_a_disk_that_fails_midway_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nbutils.data.building.os.fsync", full)
    result = run(write(tmp_path / "a.jsonl", [qa(n) for n in range(20)]), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1 and "No space left" in result.stderr and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["tiny", "TINY_FOLDER"])
def test_models_are_named_as_in_the_lessons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(5)])
    model = str(SAMPLES / "tiny_base") if name == "TINY_FOLDER" else name
    assert report(path, "--model", model)["lengths"]["longest"] > 5
    monkeypatch.setattr("nbutils.platforms.network.hub_online", lambda: False)
    lost = run(path, "--model", "qwen2.5-7b")
    assert "Qwen/Qwen2.5-7B" in lost.stderr and "does not answer" in lost.stderr and lost.exit_code == 1
    assert "did you mean Qwen2.5-7B" in run(path, "--model", "Qwen2.5-7X").stderr


def test_files_without_rows_are_named_and_files_of_one_name_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.jsonl", [qa(1)])
    write(tmp_path / "b" / "x.jsonl", [qa(1), qa(2, "")])
    (tmp_path / "none.jsonl").touch()
    files = [str(tmp_path / name) for name in ("a/x.jsonl", "b/x.jsonl", "none.jsonl")]
    found = report(*files)
    assert found["files"] == {"a/x.jsonl": 1, "b/x.jsonl": 2, "none.jsonl": 0}
    places = {problem["kind"]: (problem["file"], problem["seen"]) for problem in found["problems"]}
    assert places["empty"][0] == "b/x.jsonl" and places["duplicate"] == ("b/x.jsonl", "the same as a/x.jsonl line 1")
    assert any("Without a row: none.jsonl" in line for line in found["next"])


def test_a_key_inside_a_message_is_no_matter_of_columns(tmp_path: Path) -> None:
    turns = [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]
    shown = run(write(tmp_path / "a.jsonl", [{"messages": turns}] * 3)).stdout
    assert "COLUMNS" not in shown and "add 'content'" in shown


def test_columns_that_fit_two_shapes_are_suggested_as_a_pair_of_one(tmp_path: Path) -> None:
    row = {"prompt": "p", "question": "q", "response": "r", "answer": "a"}
    assert any(
        '"user=prompt, assistant=response"' in line for line in report(write(tmp_path / "a.jsonl", [row]))["next"]
    )


def test_column_names_that_are_private_are_masked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"13812345678": "x", "zhang@qq.com": "y"}])
    found, shown = report(path), run(path).stdout
    assert found["columns"] == ["138****5678", "z***@qq.com"]
    assert not [text for text in (shown, json.dumps(found)) if "13812345678" in text or "zhang@" in text]


def test_repair_and_near_duplicates_can_be_turned_off(tmp_path: Path, mixed: str) -> None:
    assert "near_duplicate" not in report(mixed, "--near", "0")["reasons"]
    rows = [qa(n) for n in range(5)] + [qa(9, "订单已经发货了，请放心。".encode().decode("latin-1"))]
    path = write(tmp_path / "latin.jsonl", rows)
    assert report(path)["warnings"] == {"mojibake": 1}
    assert report(path, "--no-repair")["reasons"] == {"mojibake": 1}


def test_a_folder_with_a_test_file_is_checked_for_leaks(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", [qa(n) for n in range(10)])
    write(tmp_path / "in" / "test.jsonl", [qa(3, "no")])
    assert report(str(tmp_path / "in"))["reasons"] == {"leak": 1}
    files = [str(tmp_path / "in" / name) for name in ("train.jsonl", "test.jsonl")]
    assert report(*files)["reasons"] == {"leak": 1} and report(files[1])["rejected"] == 0


def test_what_is_asked_for_is_written_and_a_lesson_can_go_on_with_it(tmp_path: Path, mixed: str) -> None:
    out, rejected = tmp_path / "out", tmp_path / "bad" / "rows.jsonl"
    found = report(mixed, "--out", str(out), "--rejected", str(rejected))
    assert len(read(rejected)) == found["rejected"] and read(rejected) == read(out / "rejected.jsonl")
    card = data.verify(out)
    assert card.train + card.eval == found["accepted"] and (out / "data_card.md").exists()
    assert data.prepare(mixed, out) == card
    assert run(mixed, "--out", str(out)).exit_code == 1, "prepared data is not overwritten"


def test_without_sound_rows_only_the_rejected_ones_are_written(tmp_path: Path) -> None:
    report(write(tmp_path / "a.jsonl", [{"text": "no columns"}]), "--out", str(tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["rejected.jsonl"]


def test_tokens_over_the_limit_are_counted_with_the_stop_tokens_they_cost(tmp_path: Path) -> None:
    rows = [chat_row(f"Is order {n} on its way?", "yes " * (400 if n == 7 else 1)) for n in range(20)]
    model = str(SAMPLES / "tiny_base")
    path = write(tmp_path / "a.jsonl", rows)
    lengths = report(path, "--model", model, "--max-length", "128")["lengths"]
    assert (lengths["rows"], lengths["over"], lengths["stop_lost"], lengths["max_length"]) == (20, 1, 1, 128)
    assert lengths["longest"] - 128 == lengths["tokens_cut"] > 200
    assert "1 rows would lose their stop token" in run(path, "--model", model, "--max-length", "128").stdout
    assert report(path, "--model", model)["lengths"]["over"] == 0
    assert run(path, "--max-length", "128").exit_code == 1
    missing = run(path, "--model", str(tmp_path / "no model"))
    assert missing.exit_code == 1 and "missing model folder" in missing.stderr
    (tmp_path / "empty").mkdir()
    assert "There is no tokenizer" in run(path, "--model", str(tmp_path / "empty")).stderr
    everything = report(path, "--model", model, "--max-length", "4")["lengths"]
    assert everything["stop_lost"] == everything["over"] == 20


def test_many_rows_are_tokenised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "AT_ONCE", 3)
    path = write(tmp_path / "a.jsonl", [chat_row(f"Is order {n} on its way?", "yes") for n in range(20)])
    assert report(path, "--model", str(SAMPLES / "tiny_base"), "--max-length", "64")["lengths"]["rows"] == 20


def test_the_help_says_what_it_does() -> None:
    assert "near duplicates" in run("--help").stdout and "data" in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize("mine", ["train.jsonl", "eval.jsonl", "rejected.jsonl", ".hidden", "data_card.md"])
def test_a_folder_with_files_of_mine_is_refused_and_left_alone(tmp_path: Path, mixed: str, mine: str) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / mine).write_text('{"messages": []}\n')
    assert run(mixed, "--out", str(out)).exit_code == 1
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [(mine, '{"messages": []}\n')]


def test_a_file_of_mine_is_no_place_for_rejected_rows(tmp_path: Path, mixed: str) -> None:
    file, out = tmp_path / "thesis.txt", tmp_path / "out"
    file.write_text("years of work")
    assert run(mixed, "--rejected", str(file), "--out", str(out)).exit_code == 1
    assert file.read_text() == "years of work" and not out.exists()
    for _ in range(2):  # its own list is written anew
        report(mixed, "--rejected", str(tmp_path / "rejected.jsonl"))
