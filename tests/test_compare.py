"""compare: runs side by side, from what their folders say."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nbutils import compare, lessons, paths, profiles, record, training
from nbutils.cli import app
from nbutils.config import flat
from nbutils.errors import CourseError

ESTIMATE = {"mean": 0.912, "low": 0.85, "high": 0.95}
EVALUATION = {
    "verdict": "helped", "scores": {name: {"base": ESTIMATE, "merged": ESTIMATE} for name in compare.PANELS},
}  # fmt: skip


def a_run(home: Path, name: str, steps: int = 200, **settings: Any) -> lessons.RunFolder:
    """A run folder as lessons 03 and 04 leave it."""
    run = lessons.RunFolder(home / name)
    run.path.mkdir(parents=True)
    record.begin(run.facts, {"profile": "tiny", "profile_source": "tiny", "model": "tiny"}, by_auto=False)
    record.update(
        run.facts, {}, "03_qlora",
        {
            "steps": steps, "planned_steps": steps, "examples": 800, "trained_tokens": 30367, "train_seconds": 1450.3,
            "cost": {"¥": 1.25}, "final_loss": 0.18607, "validation_loss": {"first": 2.0, "best": 0.3, "last": 0.4},
            "best_step": steps // 2, "data_fingerprint": "450a6a355ac5",
            "settings": flat(profiles.load("tiny").model_dump()) | settings,
        },
    )  # fmt: skip
    record.update(run.facts, {}, "04_merge", {"verdict": "helped", "evaluation": EVALUATION})
    dice, rate = random.Random(name), settings.get("train.learning_rate", 2e-3)
    fall = [(at, 0.15 + 2.3 * math.exp(-at * rate * 12)) for at in range(5, steps + 1, 5)]
    log = [{"step": at, "loss": loss * dice.uniform(0.85, 1.15), "num_tokens": 5.0} for at, loss in fall]
    log += [{"step": at, "eval_loss": loss + 0.08 + at * 4e-4} for at, loss in fall if at % 20 == 0]
    training.write_history(
        [*log, {"step": 3, "loss": math.nan}, {"step": steps, "train_runtime": 9.0}], run.logs / "history.json"
    )
    return run


def asked(*words: str) -> Any:
    ran = CliRunner().invoke(app, ["compare", *words])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output) if "--json" in words else ran.output


def cells(text: str, row: str) -> list[str]:
    """The columns of a row of the table."""
    line = next(line for line in text.splitlines() if line.startswith(row))
    return [cell.strip() for cell in line.removeprefix(row).strip().split("  ") if cell.strip()]


def test_settings_that_differ_and_what_came_of_them_are_shown(home: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", 100, **{"lora.rank": 64, "train.learning_rate": 1e-4})
    text = asked("one", str(home / "two"))
    assert cells(text, "lora.rank") == ["16", "64"] and cells(text, "train.learning_rate") == ["0.002", "0.0001"]
    assert "lora.alpha" not in text and "profile" not in text and "about" not in text
    assert cells(text, "steps") == ["200", "100"] and cells(text, "best step") == ["100", "50"]
    assert cells(text, "merged: exact match") == ["91.2% [85.0%, 95.0%]"] * 2
    assert cells(text, "cost") == ["¥1.25"] * 2 and cells(text, "verdict") == ["helped"] * 2


def test_programs_get_the_whole_comparison_and_the_plot_is_written_where_asked(home: Path, tmp_path: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", **{"lora.rank": 64})
    whole = asked("one", "two", "--json", "--out", str(tmp_path / "out"))
    assert whole["differing"] == ["lora.rank"] and whole["runs"]["two"]["settings"]["lora.rank"] == 64
    one = whole["runs"]["one"]
    assert one["trained"]["validation_loss"]["best"] == 0.3 and one["scores"]["exact_match"] == ESTIMATE
    assert {name for entry in one["history"] for name in entry} == {"step", "loss", "eval_loss"}
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000


def test_what_a_run_lacks_is_a_dash_and_said(home: Path) -> None:
    a_run(home, "one", **{"lora.rank": 8})
    older = a_run(home, "older")
    facts = json.loads(older.facts.read_text())
    for name in ("settings", "validation_loss", "best_step", "cost"):
        del facts["lessons"]["03_qlora"][name]
    paths.write_json(older.facts, facts)
    (older.logs / "history.json").unlink()
    begun = lessons.RunFolder(home / "begun")
    begun.path.mkdir()
    record.begin(begun.facts, {"profile": "tiny"}, by_auto=False)
    text = asked("one", "older", "begun")
    assert cells(text, "validation loss, best") == ["0.3000", "-", "-"] and cells(text, "steps") == ["200", "200", "-"]
    assert cells(text, "lesson 03") == ["finished", "finished, settings not recorded", "has not finished here"]
    assert "lora.rank" not in text, "one run alone differs from nothing"


def test_other_data_differ_too(home: Path) -> None:
    a_run(home, "one")
    two = a_run(home, "two")
    facts = json.loads(two.facts.read_text())
    facts["lessons"]["03_qlora"]["data_fingerprint"] = "other"
    paths.write_json(two.facts, facts)
    assert cells(asked("one", "two"), "data") == ["450a6a355ac5", "other"]


@pytest.mark.parametrize(("names", "said"), [(["one", "twoo"], "two"), (["one"], "1 of the two"), ([], "0 of the two")])
def test_unknown_runs_and_fewer_than_two_are_refused(home: Path, names: list[str], said: str) -> None:
    a_run(home, "one")
    a_run(home, "two")
    with pytest.raises(CourseError) as caught:
        compare.of_names(names)
    assert said in str(caught.value) and "one, two" in caught.value.allowed
    assert CliRunner().invoke(app, ["compare", *names]).exit_code == 1


def test_lesson_04_shows_finished_runs_beside_its_own(home: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run = a_run(home, "mine")
    record.update(run.facts, {}, "04_merge", {"rows": 3})  # this start of lesson 04 has not recorded its own yet
    begun = a_run(home, "begun")
    record.update(begun.facts, {}, "03_qlora", {"steps": 5, "planned_steps": 9})
    (home / "broken").mkdir()
    (home / "broken/facts.json").write_text("{")
    compare.beside(run, EVALUATION)
    assert capsys.readouterr().out == "This is the only finished run here.\n"
    a_run(home, "other", **{"lora.rank": 4})
    compare.beside(run, EVALUATION)
    text = capsys.readouterr().out
    assert cells(text, "lora.rank") == ["16", "4"] and cells(text, "verdict") == ["helped"] * 2


def test_a_damaged_history_is_none(tmp_path: Path) -> None:
    for text in ("[{", "[1, 2]", '[{"loss": 1}]', "{}"):
        (tmp_path / "history.json").write_text(text)
        assert compare._history(tmp_path / "history.json") == []
    assert compare._history(tmp_path / "absent.json") == []
