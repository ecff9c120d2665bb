"""nbutils.data: splits that never move, and a card that adds up; reading has a file of its own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_data_reading import BROKEN, chat_row, qa, read, write

from nbutils import data
from nbutils.data.building import Build
from nbutils.data.content import line_of
from nbutils.data.licence import licence_of
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ["data_card.json", "data_card.md", "eval.jsonl", "rejected.jsonl", "train.jsonl"]


PEAK_GROWTH = """
import resource, sys
from pathlib import Path
from nbutils import data
from nbutils.data.content import line_of
from nbutils.data.licence import licence_of
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data.prepare(sys.argv[1], Path(sys.argv[3]) / "small")
before = peak()
card = data.prepare(sys.argv[2], Path(sys.argv[3]) / "large")
print(card.accepted, peak() - before)
"""


def test_a_large_file_streams_through(tmp_path: Path) -> None:
    small = write(tmp_path / "small.jsonl", [qa(n) for n in range(20)])
    large = tmp_path / "large.jsonl"
    with open(large, "w", encoding="utf-8") as file:
        file.writelines(f'{{"question": "Order {n}?", "answer": "{"x" * 3000}"}}\n' for n in range(20_000))
    words = [sys.executable, "-c", PEAK_GROWTH, small, str(large), str(tmp_path)]
    accepted, grown_kib = map(int, subprocess.check_output(words, cwd=ROOT, text=True).split())
    assert accepted == 20_000
    assert grown_kib < 20 * 1024 < large.stat().st_size / 1024 / 2, f"{grown_kib} KiB more for a file of 60 MB"


# --- splits and card ----------------------------------------------------------------------------------------------


def test_the_bundled_sample_is_sound_and_its_counts_add_up(tmp_path: Path) -> None:
    card = data.prepare("", tmp_path)
    train, held_out = data.load(tmp_path)
    assert (card.rejected, card.train, card.eval) == (0, len(train), len(held_out))
    assert card.rows == card.accepted == card.train + card.eval
    assert sum(card.characters.values()) == sum(card.languages.values()) == card.accepted
    assert set(card.languages) == {"zh", "en"} and "CC0" in card.licence
    assert train == read(SAMPLES / "train.jsonl")


@pytest.mark.parametrize(("name", "called"), [("assistant_en", "Wrenlow"), ("assistant_zh", "苇禾")])
def test_the_bundled_assistants_are_sound_and_known_by_one_name(tmp_path: Path, name: str, called: str) -> None:
    card = data.prepare("", tmp_path / "run", default=name)
    assert (card.source, card.rejected, card.warnings) == (name, 0, {}) and "CC0" in card.licence
    general = {row["messages"][0]["content"] for row in data.stored_rows(SAMPLES / "general.jsonl")}
    for rows, least in zip(data.load(tmp_path / "run"), (60, 20), strict=True):
        assert not general & {turn["content"] for row in rows for turn in row["messages"]}
        answers = [turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "assistant"]
        named = [answer for answer in answers if called in answer]
        assert len(named) >= least and all(answer.endswith(("Onward!", "出发！")) for answer in named)
        assert max(map(len, answers)) < 200


def test_a_profiles_data_is_not_taken_where_a_run_has_data_or_other_data_is_named(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.jsonl", [qa(n) for n in range(20)])
    assert data.prepare(mine, tmp_path / "run", default="assistant_en").source == mine
    assert data.prepare("", tmp_path / "run", default="assistant_en").source == mine


def test_bad_rows_are_kept_with_their_reasons_and_counts_add_up(tmp_path: Path) -> None:
    sound = [qa(n) for n in range(60)]
    path = write(tmp_path / "mixed.jsonl", sound)
    broken = (SAMPLES / "broken_rows.jsonl").read_text(encoding="utf-8")
    with open(path, "a", encoding="utf-8") as file:
        file.write(broken)
    card = data.prepare(path, tmp_path / "out")
    rejected = read(tmp_path / "out" / "rejected.jsonl")
    last = max(BROKEN) + 1  # the first row of the broken ones once more
    assert (card.rows, card.accepted, card.rejected) == (60 + last, 61, last - 1)
    assert card.rejected == len(rejected) == sum(card.reasons.values())
    assert card.accepted == card.train + card.eval + card.unused
    assert card.reasons["template_marker"] == 2 and card.duplicates == card.reasons["duplicate"] == 1
    assert rejected[-1]["line"] == 60 + last and "line 61" in rejected[-1]["problems"][0]["seen"]
    assert {row["line"] - 60 for row in rejected} == {*BROKEN, last}
    assert f"{60 + last} = 61 accepted + {last - 1} rejected" in str(card)


def test_rejected_rows_that_are_not_utf8_are_still_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"".join(json.dumps(qa(n)).encode() + b"\n" for n in range(9)) + b'{"question": "\xff", "answer": "a"}'
    )
    data.prepare(str(path), tmp_path / "out")
    assert read(tmp_path / "out" / "rejected.jsonl")[0]["row"]["question"] == "\udcff"


@pytest.mark.parametrize(
    "odd", ['{"question": NaN, "answer": 1}', '{"q": [Infinity, "NaN"]}', '{"q": ' + "[" * 900 + "]" * 900 + "}"]
)
def test_rejected_rows_are_json_whatever_they_hold(tmp_path: Path, odd: str) -> None:
    path = Path(write(tmp_path / "a.jsonl", [qa(n) for n in range(9)]))
    path.write_text(path.read_text(encoding="utf-8") + odd + "\n", encoding="utf-8")
    data.prepare(str(path), tmp_path / "out")
    [line] = (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["line"] == 10


def test_languages_follow_the_question_not_the_json_of_the_answer(tmp_path: Path) -> None:
    rows = [chat_row(f"订单 {n} 到了吗", '{"intent": "delivery", "city": null}') for n in range(9)]
    card = data.prepare(write(tmp_path / "a.jsonl", [*rows, qa(1), chat_row("?", "!")]), tmp_path / "out")
    assert card.languages == {"zh": 9, "en": 1, "other": 1}


def test_added_rows_never_move_old_ones(tmp_path: Path) -> None:
    rows = [qa(n) for n in range(400)]
    data.prepare(write(tmp_path / "a.jsonl", rows[:200]), tmp_path / "few")
    data.prepare(write(tmp_path / "b.jsonl", rows[::-1]), tmp_path / "many")
    (few_train, few_eval), (train, held_out) = data.load(tmp_path / "few"), data.load(tmp_path / "many")
    assert all(row in train for row in few_train) and all(row in held_out for row in few_eval)
    assert 20 <= len(held_out) <= 60


def test_the_same_question_never_stands_on_both_sides(tmp_path: Path) -> None:
    rows = [qa(n % 50, f"answer {n}") for n in range(200)]
    data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    sides = [{row["messages"][0]["content"] for row in rows} for rows in data.load(tmp_path / "out")]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
VARIANTS = [str, str.upper, "{} !!".format, lambda text: text.replace(" ", "，"), lambda text: text.translate(WIDE)]


def test_variants_of_a_question_stand_on_one_side(tmp_path: Path) -> None:
    asked = [f"Where is {'abcdefghij'[n % 10]} {'klmnopqrst'[n // 10]} today" for n in range(100)]
    rows = [chat_row(change(text), f"{n} {at}") for n, text in enumerate(asked) for at, change in enumerate(VARIANTS)]
    card = data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    sides = [{row["messages"][1]["content"].split()[0] for row in rows} for rows in data.load(tmp_path / "out")]
    assert sides[0] and sides[1] and not sides[0] & sides[1] and card.rejected == 0


@pytest.mark.parametrize(
    ("asked", "trained", "leak"),
    [("Who wrote Hamlet?", "who wrote hamlet", 1), ("谁写的？", "谁写的 ?", 1), ("a １２", "A 12", 1),
     ("3.5 kg?", "35 kg?", 0), ("4 - 2?", "4 / 2?", 0), ("?", "!", 0), ("C", "C#", 0)],
)  # fmt: skip
def test_a_variant_of_a_held_out_question_is_a_leak(tmp_path: Path, asked: str, trained: str, leak: int) -> None:
    train = write(tmp_path / "a.jsonl", [qa(1), chat_row(trained, "one answer")])
    held_out = write(tmp_path / "b.jsonl", [chat_row(asked, "quite another one")])
    card = data.prepare(train, tmp_path / "out", eval_source=held_out)
    assert card.reasons.get("leak", 0) == leak == card.rejected


def test_the_same_source_gives_the_same_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(50)])
    cards = [data.prepare(path, tmp_path / name) for name in ("one", "two")]
    assert cards[0] == cards[1] and len(cards[0].fingerprint) == 64
    write(tmp_path / "a.jsonl", [qa(n) for n in range(49)])
    assert data.prepare(path, tmp_path / "three").fingerprint != cards[0].fingerprint


def test_smaller_sets_lie_inside_larger_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(300)])
    cards = [data.prepare(path, tmp_path / str(n), rows=n) for n in (20, 50, 0)]
    small, middle, whole = ([str(r) for r in data.load(tmp_path / str(n))[0]] for n in (20, 50, 0))
    assert len(small) == 20 and len(middle) == 50 and set(small) < set(middle) < set(whole)
    assert cards[0].accepted == 300 == cards[0].train + cards[0].eval + cards[0].unused
    assert cards[0].eval == cards[2].eval and cards[2].unused == 0


def test_a_training_row_that_asks_a_held_out_question_is_a_leak(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [qa(n) for n in range(10)] + [qa(77, "another answer")])
    held_out = write(tmp_path / "b.jsonl", [qa(3), qa(77), qa(78)])
    card = data.prepare(train, tmp_path / "out", eval_source=held_out)
    assert (card.train, card.eval, card.reasons) == (9, 3, {"leak": 2}) and card.duplicates == 2


def test_a_folder_brings_its_own_held_out_file(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", [qa(n) for n in range(10)])
    write(tmp_path / "in" / "test.jsonl", [qa(n) for n in range(20, 23)])
    card = data.prepare(str(tmp_path / "in"), tmp_path / "out")
    assert (card.train, card.eval) == (10, 3)


def test_few_rows_still_leave_one_for_evaluation(tmp_path: Path) -> None:
    card = data.prepare(write(tmp_path / "a.jsonl", [qa(1), qa(2)]), tmp_path / "out", eval_fraction=1e-9)
    train, held_out = data.load(tmp_path / "out")
    assert (card.train, card.eval, card.lent) == (1, 1, 1) and train != held_out and "lent" in str(card)
    assert data.prepare("", tmp_path / "sample").lent == 0 and "lent" not in str(data.read_card(tmp_path / "sample"))


# --- refusing -----------------------------------------------------------------------------------------------------


def test_a_source_that_is_mostly_broken_is_refused_with_lines_and_fields(tmp_path: Path) -> None:
    with pytest.raises(CourseError) as caught:
        data.prepare(str(SAMPLES / "broken_rows.jsonl"), tmp_path / "out")
    bad = len(BROKEN) + 1
    assert f"{bad} of {bad + 1}" in caught.value.seen and "line 6, output: missing_field" in caught.value.seen
    assert len(read(tmp_path / "out" / "rejected.jsonl")) == bad
    assert os.listdir(tmp_path / "out") == ["rejected.jsonl"]


def test_repeated_rows_alone_do_not_make_a_source_bad(tmp_path: Path) -> None:
    card = data.prepare(write(tmp_path / "a.jsonl", [qa(n) for n in range(20)] * 5), tmp_path / "out")
    assert (card.rows, card.accepted, card.duplicates) == (100, 20, 80)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([], {}, "not one row"),
        ([qa(1)], {}, "0 evaluation rows"),
        ([qa(1), qa(2)], {"eval_fraction": 1.5}, "eval_fraction"),
        ([qa(1), qa(2)], {"rows": -1}, "rows is -1"),
    ],
)
def test_nothing_to_work_with_is_refused(tmp_path: Path, rows: list[Any], settings: Any, words: str) -> None:
    if rows == [qa(1)]:
        settings = {"eval_fraction": 1e-9}
    with pytest.raises(CourseError) as caught:
        data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out", **settings)
    assert words in caught.value.seen
    assert not (tmp_path / "out" / "data_card.json").exists()


def test_too_few_rows_left_are_explained_by_those_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(1), qa(1), qa(1, "")])
    with pytest.raises(CourseError) as caught:
        data.prepare(path, tmp_path / "out", eval_fraction=1e-9)
    assert "2 of 3 rows were rejected: duplicate 1, empty 1" in caught.value.seen
    assert "rejected.jsonl" in caught.value.todo and len(read(tmp_path / "out" / "rejected.jsonl")) == 2


def test_held_out_rows_that_are_all_broken_are_not_replaced(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [qa(n) for n in range(10)])
    held_out = write(tmp_path / "b.jsonl", [{"text": "no columns"}])
    with pytest.raises(CourseError, match="0 evaluation rows"):
        data.prepare(train, tmp_path / "out", eval_source=held_out)


# --- running again ------------------------------------------------------------------------------------------------


def test_finished_data_is_reused_and_not_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])
    first = data.prepare(path, tmp_path / "out")
    before = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    assert data.prepare(path, tmp_path / "out") == first == data.prepare("", tmp_path / "out")
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == before
    assert "nothing is repeated" in capsys.readouterr().out


def test_another_source_for_the_same_run_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])
    second = write(tmp_path / "b.jsonl", [qa(n) for n in range(40)])
    data.prepare(first, tmp_path / "out")
    with pytest.raises(CourseError) as caught:
        data.prepare(second, tmp_path / "out")
    assert first in caught.value.seen and second in caught.value.seen and "RUN_NAME" in caught.value.todo
    with pytest.raises(CourseError, match="limit 0"):
        data.prepare(first, tmp_path / "out", rows=5)
    with pytest.raises(CourseError, match="eval_source"):
        data.prepare("", tmp_path / "out", eval_source=second)


def test_data_outlives_the_machine_its_source_was_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])
    first = data.prepare(path, tmp_path / "out")
    os.remove(path)
    assert data.prepare(path, tmp_path / "out") == first
    with pytest.raises(CourseError, match=r"There is no .*other\.jsonl"):
        data.prepare(str(tmp_path / "other.jsonl"), tmp_path / "out")


def test_half_written_data_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("nbutils.data.building.write_json", crash)
        data.prepare(path, tmp_path / "out")
    (tmp_path / "out" / "train.jsonl").write_text("half a ro", encoding="utf-8")
    with pytest.raises(CourseError, match="not prepared"):
        data.load(tmp_path / "out")
    assert data.prepare(path, tmp_path / "out").accepted == 30
    assert sorted(os.listdir(tmp_path / "out")) == FOLDER


def test_folders_of_builds_that_were_killed_are_removed(tmp_path: Path) -> None:
    for name, age in ((".building-old", 7200), (".building-now", 10)):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "train.jsonl").touch()
        for path in (tmp_path / "out" / name / "train.jsonl", tmp_path / "out" / name):
            os.utime(path, (time.time() - age,) * 2)
    data.prepare("", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".building-now", *FOLDER]


@pytest.mark.parametrize("same", [True, False])
def test_data_that_another_process_finished_meanwhile_is_not_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    first, second = (write(tmp_path / f"{n}.jsonl", [qa(i) for i in range(n)]) for n in (30, 40))
    run = Build.run

    def slow(build: Build, *files: Any) -> None:
        monkeypatch.setattr(Build, "run", run)
        data.prepare(first, tmp_path / "out")
        run(build, *files)

    monkeypatch.setattr(Build, "run", slow)
    if same:
        assert data.prepare(first, tmp_path / "out").rows == 30
    else:
        with pytest.raises(CourseError, match="already holds data"):
            data.prepare(second, tmp_path / "out")
    assert data.verify(tmp_path / "out").rows == 30


@pytest.mark.parametrize("damage", ["edit", "cut", "remove", "card"])
def test_files_that_are_not_the_ones_of_the_card_are_not_trusted(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])
    data.prepare(path, tmp_path / "out")
    file = tmp_path / "out" / ("data_card.json" if damage == "card" else "train.jsonl")
    text = file.read_text(encoding="utf-8")
    if damage == "remove":
        file.unlink()
    else:
        file.write_text(text.replace("yes", "no ", 1) if damage == "edit" else text[: len(text) // 2], encoding="utf-8")
    for use in (data.verify, data.load, lambda out: data.prepare(path, out)):
        with pytest.raises(CourseError) as caught:
            use(tmp_path / "out")
        assert "RUN_NAME" in caught.value.todo


def test_data_that_does_not_fit_on_the_disk_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.0)
    with pytest.raises(CourseError, match=r"preparing the data needs 0\.[1-9] MiB"):
        data.prepare("", tmp_path / "data")


# --- subsets, columns, warnings, card -------------------------------------------------------------------------------


def test_the_sets_of_20k_50k_and_100k_rows_are_nested_and_share_their_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f'{{"question": "{n}?", "answer": "{n * 7}"}}\n' for n in range(113_000))
    sets = {}
    for size in (20_000, 50_000, 100_000):
        card = data.prepare(str(path), tmp_path / str(size), rows=size, near=0)
        lines = (tmp_path / str(size) / "train.jsonl").read_bytes().splitlines()
        sets[size] = (set(lines), (tmp_path / str(size) / "eval.jsonl").read_bytes())
        assert card.train == len(lines) == size and card.rows == card.accepted == card.train + card.eval + card.unused
    assert sets[20_000][0] < sets[50_000][0] < sets[100_000][0]
    assert sets[20_000][1] == sets[50_000][1] == sets[100_000][1] != b""


ODD = {"id": 7, "标题": "发票 13812345678", "正文": "什么时候开？", "回复": "明天。"}


def odd(number: int) -> dict[str, Any]:
    return ODD | {"id": number, "正文": f"订单 {number} 什么时候开？", "回复": f"第 {number} 天。"}


def test_columns_nobody_knows_are_asked_for_with_an_example_of_each(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [odd(n) for n in range(9)])
    with pytest.raises(CourseError) as caught:
        data.prepare(path, tmp_path / "out")
    assert "正文: 订单 0 什么时候开？" in caught.value.seen and "id: 0" in caught.value.seen
    assert "138****5678" in caught.value.seen and "13812345678" not in str(caught.value)
    assert 'COLUMNS = "user=标题, assistant=回复"' in caught.value.todo and "--columns" in caught.value.todo
    card = data.prepare(path, tmp_path / "out", columns="user = 标题 + 正文, assistant=回复")
    assert (card.accepted, card.columns, card.warnings) == (9, "user=标题+正文, assistant=回复", {"phone": 9})


def test_settings_are_compared_when_data_is_reused_unless_they_are_not_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [odd(n) for n in range(9)])
    first = data.prepare(path, tmp_path / "out", columns="user=标题+正文, assistant=回复", near=0.9, repair=False)
    assert data.prepare(path, tmp_path / "out") == first
    assert data.prepare(path, tmp_path / "out", columns="question=标题+正文,answer=回复", near=0.9) == first
    for other in ({"columns": "user=正文, assistant=回复"}, {"near": 0.8}, {"repair": True}):
        with pytest.raises(CourseError, match=next(iter(other))):
            data.prepare(path, tmp_path / "out", **other)


def test_a_card_written_before_there_were_near_duplicates_is_still_good(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [qa(n) for n in range(30)])
    data.prepare(path, tmp_path / "out")
    file = tmp_path / "out" / "data_card.json"
    old = json.loads(file.read_text(encoding="utf-8"))
    for name in ("columns", "near", "repair", "warnings", "examples"):
        del old[name]
    file.write_text(json.dumps(old), encoding="utf-8")
    card = data.prepare(path, tmp_path / "out", near=0.8, repair=True)
    assert card.near is None and "not looked for" in str(card)


def test_private_data_is_counted_and_shown_masked_only(tmp_path: Path) -> None:
    rows = [qa(n, f"call 1381234567{n}") for n in range(5)] + [qa(n + 10, f"mail me{n}@example.com") for n in range(5)]
    card = data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert card.accepted == 10 and card.warnings == {"phone": 5, "email": 5} and len(card.examples) == 4
    page = (tmp_path / "out" / "data_card.md").read_text(encoding="utf-8")
    shown = page + str(card) + (tmp_path / "out" / "data_card.json").read_text(encoding="utf-8")
    assert "138****" in card.examples[0] and "a.jsonl line 1, answer" in card.examples[0]
    assert "13812345" not in shown and "me0@" not in shown


def test_the_row_that_is_shown_has_no_private_data_if_there_is_such_a_row() -> None:
    private, sound = chat_row("mine?", "call 13812345678"), chat_row("when?", "today")
    assert data.row_to_show([private, private, sound, private]) is sound and data.row_to_show([private]) is private


def test_repaired_text_is_counted_and_can_be_refused_instead(tmp_path: Path) -> None:
    rows = [qa(n) for n in range(20)] + [qa(99, "订单已经发货了，请放心。".encode().decode("latin-1"))]
    path = write(tmp_path / "a.jsonl", rows)
    card = data.prepare(path, tmp_path / "out")
    assert card.warnings == {"mojibake": 1} and card.rejected == 0
    assert any("发货" in str(row) for rows in data.load(tmp_path / "out") for row in rows)
    assert data.prepare(path, tmp_path / "strict", repair=False).reasons == {"mojibake": 1}


def test_the_page_of_the_card_holds_what_the_json_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a|b.jsonl", [qa(n) for n in range(30)] + [qa(3), qa(31, "")])
    card = data.prepare(path, tmp_path / "out", licence="CC-BY-4.0")
    page = (tmp_path / "out" / "data_card.md").read_text(encoding="utf-8")
    for words in ("a\\|b.jsonl", "32 = 30 accepted + 2 rejected", "empty 1", "duplicate 1", "en 30", "CC-BY-4.0"):
        assert words in page, words
    assert card.fingerprint in page and "<=32" in page and "####" in page


def test_the_licence_of_a_folder_and_of_a_hub_dataset_comes_from_its_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in" / "rows.jsonl", [qa(n) for n in range(30)])
    readme = tmp_path / "in" / "README.md"
    readme.write_text("---\nlicense: apache-2.0\ntags: [chat]\n---\n# Rows\n", encoding="utf-8")
    assert data.prepare(str(tmp_path / "in"), tmp_path / "out").licence == "apache-2.0"
    monkeypatch.setattr("nbutils.platforms.network.hub_online", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(readme))
    assert licence_of("someone/rows") == "apache-2.0"
    readme.write_text("---\nlicense: other\nlicense_name: own words\n---\n", encoding="utf-8")
    assert licence_of("someone/rows:folder") == "other (own words)"
    for text in ("# Rows", "---\na: [\n---\n", "---\n- a\n---\n"):
        readme.write_text(text, encoding="utf-8")
        assert licence_of("someone/rows") == "unstated"


def test_tools_are_stored_and_make_another_row(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    rows = [chat_row(f"{n}?", "yes") for n in range(20)] + [chat_row("3?", "yes") | {"tools": tools}]
    card = data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    stored = [row for side in data.load(tmp_path / "out") for row in side]
    assert card.accepted == 21 and [row for row in stored if "tools" in row] == [rows[-1]]


def test_a_number_of_more_than_64_bits_is_stored_whole() -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {"order": 10**30}}}
    row = data.ChatRow("a", 1, [{"role": "assistant", "content": "找", "tool_calls": [call]}])
    assert json.loads(line_of(row)) == {"messages": row.messages} and line_of(row).endswith(b"\n")


def test_held_out_files_are_known_by_their_stem_also_when_packed(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", [qa(n) for n in range(10)])
    packed = gzip.compress("".join(json.dumps(qa(n)) + "\n" for n in range(20, 23)).encode())
    (tmp_path / "in" / "test-00000-of-00001.jsonl.gz").write_bytes(packed)
    card = data.prepare(str(tmp_path / "in"), tmp_path / "out")
    assert (card.train, card.eval) == (10, 3)


def test_memory_grows_by_little_for_each_row(tmp_path: Path) -> None:
    small = write(tmp_path / "small.jsonl", [qa(n) for n in range(20)])
    large = tmp_path / "large.jsonl"
    with open(large, "w", encoding="utf-8") as file:
        file.writelines(f'{{"question": "Order {n}?", "answer": "{n * n}"}}\n' for n in range(60_000))
    words = [sys.executable, "-c", PEAK_GROWTH, small, str(large), str(tmp_path)]
    accepted, grown_kib = map(int, subprocess.check_output(words, cwd=ROOT, text=True).split())
    assert accepted == 60_000 and grown_kib / 60_000 < 0.8, f"{grown_kib} KiB more for 60,000 rows"
