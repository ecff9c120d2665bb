"""course and cli: selecting, splitting parameters, failing with a message and an exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from nbutils import course, lessons
from nbutils.errors import CourseError


def nbutils(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nbutils", *words], capture_output=True, text=True)


def test_lessons_are_chosen_by_number_or_name() -> None:
    assert course.select([]) == list(lessons.COURSE)
    assert course.select(["03", "01_environment"]) == ["03_qlora", "01_environment"]
    with pytest.raises(CourseError, match="no lesson '99'"):
        course.select(["99"])


def test_parameters_go_to_the_lessons_that_have_them() -> None:
    split = course.split_parameters({"MAX_STEPS": "5", "PROFILE": "tiny"}, ["01_environment", "03_qlora"])
    assert split == {"01_environment": {"PROFILE": "tiny"}, "03_qlora": {"PROFILE": "tiny", "MAX_STEPS": 5}}
    with pytest.raises(CourseError, match="unknown parameter MAX_STEP"):
        course.split_parameters({"MAX_STEP": "5"}, ["03_qlora"])


def test_a_failing_cell_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("raise ValueError('on purpose')")],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(broken, tmp_path / "09_broken.ipynb")
    monkeypatch.setattr(course, "NOTEBOOKS", tmp_path)
    with pytest.raises(CourseError, match=r"(?s)lesson 09_broken failed in cell 1.*ValueError: on purpose"):
        course.execute("09_broken", tmp_path / "out.ipynb", {})
    assert (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--profile", "tinny"], "tiny"),
        (["run", "--only", "42"], "no lesson '42'"),
        (["run", "-p", "MAX_STEP", "3"], "did you mean MAX_STEPS?"),
        (["run", "--only", "03", "-p", "MAX_STEPS", "few"], "MAX_STEPS is 'few'"),
        (["run", "--only", "03", "-p", "MODEL", "./no/such/model"], "no/such/model"),
        (["run", "--set", "lora.rnk=8"], "did you mean lora.rank?"),
        (["run", "-p", "SET", "method=lora"], "quantization.type"),
        (["plan", "--gpu", "T4", "--set", "lora.rnk=8"], "did you mean lora.rank?"),
    ],
)
def test_mistakes_on_the_command_line_exit_1_with_a_message(home: Path, words: list[str], said: str) -> None:
    ran = nbutils(*words)
    assert ran.returncode == 1 and said in ran.stderr and "Traceback" not in ran.stderr
    assert "To do:" in ran.stderr
