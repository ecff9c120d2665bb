"""nbutils.data.near: the rows that say the same, and only those, in time that grows with the rows."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_reading import chat_row, read, write

from nbutils import data
from nbutils.data.alike import Text, similarity, text_of
from nbutils.data.near import TEMPLATE, NearDuplicates
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

ENGLISH = (
    "The parcel was handed to the carrier this morning and should arrive within two working days. You will get a "
    "message with a link as soon as the driver is near your street, and you can still change the address there."
)
CHINESE = (
    "包裹今天早上已经交给快递公司，预计会在后天下午送到您家。送达之前您会收到一条短信，里面有修改地址的链接，请您放心。"
)
QUESTION = "Hello, I ordered a kettle for my mother last week and nobody told me when it comes. When will it arrive?"


def found(rows: list[Text], least: float = 0.8) -> list[tuple[int, int]]:
    near = NearDuplicates(least)
    for row in rows:
        near.add(row)
    return [(alike.row, alike.kept) for alike in near.find(np.arange(len(rows)), rows.__getitem__)]


def words(random_: random.Random, count: int) -> str:
    return " ".join("".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(count))


def unrelated(count: int) -> list[Text]:
    chance = random.Random(7)
    return [Text("", words(chance, 12), words(chance, 20)) for _ in range(count)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text.replace(".", "!", 1), ENGLISH),
        (lambda text: text.upper(), ENGLISH),
        (lambda text: text.replace(" ", "  ") + "\n", ENGLISH),
        (lambda text: text.replace("morning", "evening"), ENGLISH),
        (lambda text: text.replace("，", ",").replace("。", ""), CHINESE),
        (lambda text: text.replace("早", "中"), CHINESE),
        (lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text), ENGLISH),
        (lambda text: text.replace("working days", "working-days"), ENGLISH),
    ],
    ids=["punctuation", "case", "blanks", "one word", "chinese punctuation", "one character", "full width", "hyphen"],
)  # fmt: skip
def test_what_is_nearly_the_same_is_found_among_others(change: Any, text: str) -> None:
    assert change(text) != text
    rows = [*unrelated(200), Text("", QUESTION, text), Text("", change(QUESTION), change(text))]
    assert found([*rows[:100], rows[-2], *rows[100:200], rows[-1]]) == [(201, 100)]


def test_short_rows_are_found_as_well() -> None:
    assert found(
        [Text("", "你好", "您好"), Text("", "hi", "yo"), Text("", "你好！", "您好。"), Text("", "Hi", "Yo!")]
    ) == [
        (2, 0),
        (3, 1),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Text("", f"Order 4711: {QUESTION}", ENGLISH), Text("", f"Order 4712: {QUESTION}", ENGLISH)),
        (Text("", f"我要三箱苹果。{CHINESE}", CHINESE), Text("", f"我要五箱苹果。{CHINESE}", CHINESE)),
        (Text("", QUESTION, "yes"), Text("", QUESTION, "no")),
        (Text("", "Where is Lyon?", ENGLISH), Text("", "Who was Ada?", ENGLISH)),
        (Text("Be rude.", QUESTION, ENGLISH), Text("Be kind.", QUESTION, ENGLISH)),
        (Text("", QUESTION, "3.5 kg"), Text("", QUESTION, "35 kg")),
        (Text("", QUESTION, "?!"), Text("", QUESTION, "...")),
        (Text("", "What is 4 - 2?", "2"), Text("", "What is 4 / 2?", "2")),
        (Text("", f"In C: {QUESTION}", ENGLISH), Text("", f"In C#: {QUESTION}", ENGLISH)),
        (Text("", QUESTION, rf"{ENGLISH} \d+"), Text("", QUESTION, rf"{ENGLISH} \d*")),
        (Text("", QUESTION, f"{ENGLISH} $ 5"), Text("", QUESTION, f"{ENGLISH} € 5")),
        (Text("", f"Is it safe? {QUESTION}", ENGLISH), Text("", f"Is it not safe? {QUESTION}", ENGLISH)),
        (Text("", QUESTION, ENGLISH), Text("", QUESTION, ENGLISH.replace("should arrive", "shouldn't arrive"))),
        (Text("", CHINESE, ENGLISH), Text("", CHINESE.replace("放心", "不放心"), ENGLISH)),
        (Text("", f"张伟怎样？{CHINESE}", f"张伟{CHINESE}"), Text("", f"李娜怎样？{CHINESE}", f"李娜{CHINESE}")),
        (Text("", f"{QUESTION} I am Anna Lee.", ENGLISH), Text("", f"{QUESTION} I am Emil Lee.", ENGLISH)),
        (Text("", f"{ENGLISH} It was great.", "positive"), Text("", f"{ENGLISH} It was superb.", "positive")),
        (Text("", QUESTION, "a lamp, torn, refund it"), Text("", QUESTION, "a lamp, worn, refund it")),
    ],
    ids=["number", "chinese number", "answer", "question", "system", "decimal point", "only punctuation", "minus",
         "sharp", "regex", "currency", "negation", "contraction", "chinese negation", "names in both", "a name",
         "label", "short answer"],
)  # fmt: skip
def test_what_only_looks_alike_is_kept(one: Text, other: Text) -> None:
    assert found([one, other]) == [] and similarity(one, other, 0.8) < 0.8


def tickets(count: int) -> list[Text]:
    chance = random.Random(1)
    things, faults, cities = (
        ["lamp", "chair", "shirt", "phone"],
        ["torn", "late", "dirty"],
        ["Rome", "Oslo", "Riga", "Bern"],
    )
    rows = []
    for thing, fault, city in chance.sample(list(itertools.product(things, faults, cities)), count):
        question = (
            f"Hello, I ordered a {thing} from your shop last week, it arrived {fault}. I live in {city}, help me."
        )
        rows.append(Text("", question, json.dumps({"product": thing, "issue": fault, "city": city, "do": "refund"})))
    return rows


def test_a_form_filled_in_with_other_words_loses_only_its_copies() -> None:
    rows = tickets(40)
    assert found(rows) == []
    copies = [Text("", row.question.upper(), row.answer.replace(",", " ,")) for row in rows]
    assert found(rows + copies) == [(40 + number, number) for number in range(40)]


def test_other_tools_make_another_row() -> None:
    messages = chat_row(QUESTION, ENGLISH)["messages"]
    one, other = (text_of(messages, [{"name": name}]) for name in ("search", "buy"))
    assert found([one, other]) == [] and found([one, one]) == [(1, 0)]


def test_a_form_filled_in_many_times_is_kept_but_not_its_copies() -> None:
    form = f"Classify the review into positive or negative, and answer with this word alone. {ENGLISH} Review: "
    chance = random.Random(1)
    rows = [Text("", form + words(chance, 2), ENGLISH) for _ in range(TEMPLATE + 40)]
    copy = rows[3]._replace(question=rows[3].question.upper() + " !")
    near = NearDuplicates(0.8)
    for row in [*rows, copy]:
        near.add(row)
    alike = near.find(np.arange(len(rows) + 1), [*rows, copy].__getitem__)
    assert alike == [(TEMPLATE + 40, 3)] and near.templated >= TEMPLATE + 30
    assert len(found(rows[:TEMPLATE])) > 0, "a few rows that resemble each other are near duplicates"


def test_the_bundled_sample_loses_nothing(tmp_path: Path) -> None:
    card = data.prepare("", tmp_path, near=0.8)
    assert card.rejected == 0 and not card.warnings


def test_rows_that_are_all_alike_are_compared_once_each() -> None:
    rows = [Text("", f"Where is order {n}? {QUESTION}", f"{ENGLISH} It is number {n}.") for n in range(20_000)]
    near = NearDuplicates(0.8)
    for row in rows:
        near.add(row)
    assert near.find(np.arange(len(rows)), rows.__getitem__) == [] and near.compared < 1000
    near = NearDuplicates(0.8)
    for number, row in enumerate([rows[0]] * 3000):
        near.add(row._replace(answer=row.answer + "!" * (number % 7)))
    assert len(near.find(np.arange(3000), lambda number: rows[0])) == near.compared == 2999


@pytest.mark.parametrize("changed", [1, 2])
def test_nearly_all_pairs_are_found(changed: int) -> None:
    chance, rows = random.Random(changed), unrelated(400)
    copies = []
    for row in rows:
        letters = list(row.answer)
        for place in chance.sample(range(len(letters)), changed):
            letters[place] = "z"
        copies.append(row._replace(answer="".join(letters)))
    alike = [n for n, (row, copy) in enumerate(zip(rows, copies, strict=True)) if similarity(row, copy, 0.8)]
    hit = {row - 400 for row, kept in found(rows + copies) if kept == row - 400}
    assert len(alike) > 350 and len(hit & set(alike)) >= 0.99 * len(alike)


# --- in the data folder of a run ------------------------------------------------------------------------------------


def mixed(tmp_path: Path) -> tuple[str, list[Any]]:
    rows = [chat_row(row.question, row.answer) for row in unrelated(300)]
    copies = [chat_row(row["messages"][0]["content"].upper(), row["messages"][1]["content"] + "!") for row in rows[:60]]
    return write(tmp_path / "a.jsonl", rows + copies), rows


def test_near_duplicates_are_rejected_with_the_row_they_repeat_and_counts_add_up(tmp_path: Path) -> None:
    path, _ = mixed(tmp_path)
    card = data.prepare(path, tmp_path / "out")
    assert card.reasons == {"near_duplicate": 60} and (card.rows, card.accepted, card.duplicates) == (360, 300, 60)
    assert card.accepted == card.train + card.eval == sum(card.languages.values()) == sum(card.characters.values())
    rejected = read(tmp_path / "out" / "rejected.jsonl")
    assert len(rejected) == 60 and all(entry["file"] == "a.jsonl" and entry["row"]["messages"] for entry in rejected)
    for entry in rejected:
        kept = int(entry["problems"][0]["seen"].rsplit("line ")[1])
        assert abs(entry["line"] - kept) == 300, "the other one of its pair"
    stored = [row for rows in data.load(tmp_path / "out") for row in rows]
    lines = {json.dumps(row, sort_keys=True) for row in stored}
    assert len(lines) == 300 and not lines & {json.dumps(entry["row"], sort_keys=True) for entry in rejected}


def test_what_is_said_of_a_row_goes_with_it(tmp_path: Path) -> None:
    noted = [chat_row(QUESTION + " \n", f"{ENGLISH}{end} Call 13812345678.") for end in ("", "!")]
    rows = [chat_row(row.question, row.answer) for row in unrelated(9)] + noted
    card = data.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert (card.accepted, card.trimmed, card.warnings) == (10, 1, {"phone": 1})


def test_zero_does_not_look(tmp_path: Path) -> None:
    path, _ = mixed(tmp_path)
    card = data.prepare(path, tmp_path / "out", near=0)
    assert card.rejected == 0 and "not looked for" in str(card)
    with pytest.raises(CourseError, match=r"near is 0\.3"):
        data.prepare(path, tmp_path / "other", near=0.3)


def test_of_two_alike_the_held_out_row_stays(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [chat_row(QUESTION, ENGLISH), chat_row("Where is Lyon?", "In France.")])
    held_out = write(tmp_path / "b.jsonl", [chat_row(f"Please: {QUESTION}", ENGLISH.upper())])
    card = data.prepare(train, tmp_path / "out", eval_source=held_out)
    assert (card.train, card.eval, card.reasons) == (1, 1, {"near_leak": 1})
    [entry] = read(tmp_path / "out" / "rejected.jsonl")
    assert "b.jsonl line 1" in entry["problems"][0]["seen"] and entry["line"] == 1


def test_rows_stay_on_their_side_in_any_order_and_when_rows_are_added(tmp_path: Path) -> None:
    path, rows = mixed(tmp_path)
    data.prepare(path, tmp_path / "all")
    data.prepare(write(tmp_path / "b.jsonl", read(Path(path))[::-1]), tmp_path / "turned")
    data.prepare(write(tmp_path / "c.jsonl", rows[:150]), tmp_path / "few")
    sides = [[{str(row) for row in side} for side in data.load(tmp_path / name)] for name in ("all", "turned", "few")]
    for train, held_out in sides[1:]:
        assert not train & sides[0][1] and not held_out & sides[0][0]
    assert data.prepare(path, tmp_path / "again") == data.prepare(path, tmp_path / "all")


def test_the_sample_is_not_only_kept_by_accident() -> None:
    """The closest rows of the sample are candidates, and the comparison keeps them."""
    rows = [text_of(row["messages"]) for row in read(SAMPLES / "train.jsonl")]
    near = NearDuplicates(0.8)
    for row in rows:
        near.add(row)
    assert near.find(np.arange(len(rows)), rows.__getitem__) == [] and near.compared > 0
