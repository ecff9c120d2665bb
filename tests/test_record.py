"""record: facts that add up, and no secrets in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbutils import record
from nbutils.errors import CourseError


def test_lessons_are_merged_and_none_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 5, "speed": 7.5})
    record.update(file, {"profile": "tiny"}, "04_merge", {"rows": 1})
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 6, "speed": None})
    assert json.loads(file.read_text())["lessons"] == {"03_qlora": {"steps": 6, "speed": 7.5}, "04_merge": {"rows": 1}}


@pytest.mark.parametrize("value", ["hf_" + "a" * 30, {"inner": "sk-" + "b" * 30}, "f" * 40])
def test_a_secret_is_refused_and_not_shown(tmp_path: Path, value: object) -> None:
    with pytest.raises(CourseError, match="looks like a secret") as caught:
        record.update(tmp_path / "facts.json", {}, "x", {"note": value})
    assert "a" * 10 not in str(caught.value) and "b" * 10 not in str(caught.value)
    assert not (tmp_path / "facts.json").exists()


def test_a_broken_facts_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"half":')
    with pytest.raises(CourseError, match="not valid JSON"):
        record.read(tmp_path / "facts.json")


def test_versions_name_the_stack() -> None:
    assert {"torch", "transformers", "peft", "trl", "bitsandbytes"} <= set(record.versions())


def test_the_report_is_readable(tmp_path: Path) -> None:
    facts = {
        "platform": {"name": "local"}, "profile": "tiny", "model": "m", "card": None, "versions": {"torch": "2"},
        "lessons": {"04_merge": {"exact_match": {"base": 0.0, "merged": 0.95}}},
    }  # fmt: skip
    record.write_report(tmp_path / "report.md", "demo", facts)
    text = (tmp_path / "report.md").read_text()
    assert "# Run demo" in text and "| exact_match | base 0, merged 0.95 |" in text
