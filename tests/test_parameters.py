"""parameters: typed, named, and nothing unknown slips through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbutils import parameters
from nbutils.errors import CourseError

TYPES = {"PROFILE": str, "MAX_STEPS": int, "MAX_HOURS": float, "SHOW": bool}


def test_the_command_line_gives_typed_values() -> None:
    given = ["--PROFILE", "tiny", "--MAX_STEPS=20", "--MAX_HOURS", "0.5", "--SHOW", "no"]
    values = parameters.from_command_line(given, TYPES)
    assert values == {"PROFILE": "tiny", "MAX_STEPS": 20, "MAX_HOURS": 0.5, "SHOW": False}


def test_an_unknown_name_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lesson.py", "--MAX_STEP", "3"])
    with pytest.raises(CourseError, match=r"unknown parameter MAX_STEP\.") as caught:
        parameters.from_command_line(["--MAX_STEP", "3"], TYPES)
    assert "did you mean MAX_STEPS?" in str(caught.value)


def test_a_missing_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lesson.py", "--PROFILE"])
    with pytest.raises(CourseError, match="could not be read"):
        parameters.from_command_line(["--PROFILE"], TYPES)


@pytest.mark.parametrize(("name", "text"), [("MAX_STEPS", "many"), ("SHOW", "perhaps"), ("MAX_HOURS", "1h")])
def test_a_wrong_type_on_the_command_line_is_named(name: str, text: str) -> None:
    with pytest.raises(CourseError, match=f"parameter {name} is '{text}'"):
        parameters.parse(name, text, TYPES[name])


def test_a_wrong_type_in_a_cell_is_named_and_whole_numbers_are_floats() -> None:
    assert parameters.check_type("MAX_HOURS", 3, float) == 3.0
    assert parameters.check_type("RUN_NAME", 2024, str) == "2024"
    with pytest.raises(CourseError, match="parameter MAX_STEPS is '20'"):
        parameters.check_type("MAX_STEPS", "20", int)
    with pytest.raises(CourseError, match="parameter MAX_STEPS is True"):
        parameters.check_type("MAX_STEPS", True, int)


@pytest.mark.parametrize(("name", "value"), [("MAX_STEPS", -5), ("MAX_HOURS", -1.0), ("MAX_HOURS", float("nan"))])
def test_a_number_below_zero_is_refused(name: str, value: float) -> None:
    with pytest.raises(CourseError, match="zero or more"):
        parameters.check_type(name, value, TYPES[name])


def test_what_papermill_injected_is_found_in_the_history() -> None:
    history = ["", "x = 1", '# Parameters\nPROFILE = "tiny"\nPROFIEL = "x"\nPAPERMILL_OUTPUT_PATH = "o"\n', "Y = 2"]
    assert parameters._injected_names(history) == ["PROFILE", "PROFIEL"]


def test_declared_parameters_are_read_from_the_source_without_running_it(tmp_path: Path) -> None:
    source = tmp_path / "09_x.py"
    source.write_text('PROFILE: str = "auto"\nlower: int = 1\nraise SystemExit\nSTEPS: int = 3\n')
    assert parameters.declared_in(source) == {"PROFILE": str, "STEPS": int}


def test_a_plain_script_takes_its_parameters_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "lesson.py"
    script.write_text(
        "STEPS: int = 3\nfrom nbutils import parameters\nprint(parameters.collect(globals()), STEPS)\n",
        encoding="utf-8",
    )
    ran = subprocess.run([sys.executable, script, "--STEPS", "7"], capture_output=True, text=True)
    assert ran.stdout.strip() == "{'STEPS': 7} 7", ran.stderr
    refused = subprocess.run([sys.executable, script, "--STEP", "7"], capture_output=True, text=True)
    assert refused.returncode != 0 and "unknown parameter STEP" in refused.stderr
