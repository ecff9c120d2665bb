"""course, cli and papermill_io: selecting lessons, parameters, failures with a message, outputs, SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import nbformat
import pytest
from click.testing import CliRunner
from support import python, refused

from nbutils import cli, course, lesson, papermill_io, record
from nbutils.processes import AT_ONCE


def test_lessons_are_chosen_by_number_or_name() -> None:
    assert course.select([]) == list(lesson.COURSE)
    assert course.select(["03", "01_environment"]) == ["03_qlora", "01_environment"]
    with refused("--only is '77'.", "03, ", "03_qlora"):
        course.select(["77"])


def test_parameters_go_to_the_lessons_that_have_them() -> None:
    split = course.split_parameters({"MAX_STEPS": "5", "PROFILE": "tiny"}, ["01_environment", "03_qlora"])
    assert split == {"01_environment": {"PROFILE": "tiny"}, "03_qlora": {"PROFILE": "tiny", "MAX_STEPS": 5}}
    with refused("There is no parameter MAX_STEP."):
        course.split_parameters({"MAX_STEP": "5"}, ["03_qlora"])


def test_a_failing_cell_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cell = nbformat.v4.new_code_cell("raise ValueError('on purpose')")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), tmp_path / "09_broken.ipynb")
    monkeypatch.setattr(course, "NOTEBOOKS", tmp_path)
    problem, failed = "ValueError: on purpose", tmp_path / "out.unfinished.ipynb"
    (tmp_path / "out.ipynb").write_text("of an earlier run")
    with refused(f"Lesson 09_broken failed in cell 1: {problem}", f"{failed} shows the cell."):
        course.execute("09_broken", tmp_path / "out.ipynb", {})
    assert failed.exists() and (tmp_path / "out.ipynb").read_text() == "of an earlier run"


@pytest.mark.parametrize(
    "group", [cli.app, *(command for command in cli.app.commands.values() if isinstance(command, click.Group))]
)
def test_help_shows_every_summary_whole(group: click.Group) -> None:
    shown = " ".join(CliRunner().invoke(group, ["--help"]).output.split())
    for command in group.commands.values():
        assert command.help and " ".join(command.help.split()) in shown


def test_what_is_said_in_the_end_names_what_the_tuning_lost_too(tmp_path: Path) -> None:
    evaluation = {"verdict": "helped", "general": {"verdict": "forgot"}}
    facts = {"lessons": {"04_merge": {"seconds": 9.0, "verdict": "helped", "evaluation": evaluation}}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    summary = record.summary(record.RunFolder(tmp_path))
    assert "helped" in summary and "forgot" in summary


def test_mistakes_on_the_command_line_exit_1_with_a_message(tmp_path: Path) -> None:
    ran = python("-m", "nbutils", "run", "-p", "MAX_STEP", "3", home=tmp_path, ok=False)
    assert ran.returncode == 1 and "MAX_STEPS" in ran.stderr and "Traceback" not in ran.stderr


# --- papermill without an output path --------------------------------------------------------------------------------


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a lesson and another notebook."""
    monkeypatch.chdir(tmp_path)
    for name in ("03_qlora.ipynb", "other.ipynb"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_lesson_alone_goes_to_the_runs_and_overwrites_nothing(folder: Path, home: Path) -> None:
    first = home / "notebooks/03_qlora.ipynb"
    for words in (["03_qlora.ipynb", "--log-output"], ["-p", "PROFILE", "tiny", "03_qlora.ipynb"]):
        assert papermill_io.output_for(words) == first
    first.write_text("old")
    (folder / "zh").mkdir()
    (folder / "zh/03_qlora.ipynb").write_text("{}")
    for name in ("03_qlora.ipynb", "zh/03_qlora.ipynb"):
        second = papermill_io.output_for([name])
        assert second and second.parent == first.parent and not second.exists()


def test_other_calls_are_left_to_papermill(folder: Path) -> None:
    lesson = "03_qlora.ipynb"
    for words in (f"{lesson} out", f"{lesson} -", "other.ipynb", "no.ipynb", ""):
        assert papermill_io.output_for(words.split()) is None


@pytest.mark.parametrize(("number", "again"), AT_ONCE.items())
def test_a_signal_goes_to_the_kernel_ctrl_c_as_it_is_and_the_parent_lives_on(number: int, again: Any) -> None:
    before = signal.signal(number, signal.default_int_handler)  # SIGINT may be ignored here
    with papermill_io.signals_to_kernel() as received:
        kernel = subprocess.Popen(["sleep", "60"])
        os.kill(os.getpid(), number)
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        assert kernel.wait(timeout=10) == -sent and received == [number]
        assert signal.getsignal(number) == again
    signal.signal(number, before)


def test_without_a_kernel_sigterm_is_what_it_always_was() -> None:
    code = (
        "import os, signal, time\nfrom nbutils.papermill_io import signals_to_kernel\nwith signals_to_kernel():\n    "
    )
    ran = subprocess.run([sys.executable, "-c", f"{code}os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"])
    assert ran.returncode == -signal.SIGTERM
