"""course, cli and papermill_io: selecting lessons, parameters, failures with a message, outputs, SIGTERM."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from support import python, refused

from nbutils import course, lessons, papermill_io


def test_lessons_are_chosen_by_number_or_name() -> None:
    assert course.select([]) == list(lessons.COURSE)
    assert course.select(["03", "01_environment"]) == ["03_qlora", "01_environment"]
    with refused("course.unknown_lesson", name="77"):
        course.select(["77"])


def test_parameters_go_to_the_lessons_that_have_them() -> None:
    split = course.split_parameters({"MAX_STEPS": "5", "PROFILE": "tiny"}, ["01_environment", "03_qlora"])
    assert split == {"01_environment": {"PROFILE": "tiny"}, "03_qlora": {"PROFILE": "tiny", "MAX_STEPS": 5}}
    with refused("lessons.parameter_unknown", names="MAX_STEP"):
        course.split_parameters({"MAX_STEP": "5"}, ["03_qlora"])


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise ValueError('on purpose')", "ValueError: on purpose"),
        ("from nbutils.errors import CourseError\nraise CourseError('paths.locked', folder='runs/x')", "runs/x"),
    ],
)
def test_a_failing_cell_is_named(code: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(broken, tmp_path / "09_broken.ipynb")
    monkeypatch.setattr(course, "NOTEBOOKS", tmp_path)
    with refused("course.lesson_failed", shown, lesson="09_broken", cell=1) as caught:
        course.execute("09_broken", tmp_path / "out.ipynb", {})
    assert (tmp_path / "out.ipynb").exists() and ("out.ipynb" in caught.value.todo) == (shown != "runs/x")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("run -p MAX_STEP 3", "did you mean MAX_STEPS?"),
        ("run --only 03 -p MODEL ./no/such/model", "no/such/model"),
        ("plan --gpu T4 --set lora.rnk=8", "did you mean lora.rank?"),
    ],
)
def test_mistakes_on_the_command_line_exit_1_with_a_message(words: str, shown: str, tmp_path: Path) -> None:
    ran = python("-m", "nbutils", *words.split(), home=tmp_path, ok=False)
    assert ran.returncode == 1 and shown in ran.stderr and "To do:" in ran.stderr and "Traceback" not in ran.stderr


# --- papermill without an output path --------------------------------------------------------------------------------


@pytest.fixture
def lesson(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("03_qlora.ipynb", "other.ipynb"):
        (tmp_path / name).write_text("{}")
    return "03_qlora.ipynb"


def test_a_lesson_alone_goes_to_the_runs_and_overwrites_nothing(lesson: str, home: Path) -> None:
    words = [lesson, "-p", "PROFILE", "tiny", "--log-output"]
    assert papermill_io.output_for(words, stdout=1) == "run://03_qlora.ipynb"
    assert papermill_io.output_for(["-p", "PROFILE", "tiny", lesson], stdout=1) == "run://03_qlora.ipynb"
    (home / "notebooks").mkdir(parents=True)
    (home / "notebooks/03_qlora.ipynb").write_text("old")
    assert papermill_io.output_for([lesson], stdout=1) not in (None, "run://03_qlora.ipynb")


@pytest.mark.parametrize(
    "words",
    [
        "03_qlora.ipynb out.ipynb",
        "03_qlora.ipynb out",
        "03_qlora.ipynb -",
        "other.ipynb",
        "no.ipynb",
        "",
        "--help-notebook 03_qlora.ipynb",
    ],
)
def test_other_calls_are_left_to_papermill(lesson: str, words: str) -> None:
    assert papermill_io.output_for(words.split(), stdout=1) is None


def test_only_stdout_into_a_notebook_file_is_left_to_papermill(lesson: str, tmp_path: Path) -> None:
    _, pipe = os.pipe()
    notebook, log = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("out.ipynb", "train.log"))
    _, terminal = pty.openpty()
    assert papermill_io.output_for([lesson], stdout=notebook) is None
    assert all(papermill_io.output_for([lesson], stdout=other) for other in (log, terminal, pipe))


def test_the_scheme_writes_below_the_runs_or_into_scratch(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = papermill_io.RunHandler()
    handler.write("text", "run://a.ipynb")
    assert (home / "notebooks/a.ipynb").read_text() == "text" == handler.read("run://a.ipynb")
    assert handler.pretty_path("run://a.ipynb") == str(home / "notebooks/a.ipynb")
    (home / "notebooks").rename(home / "moved")
    (home / "notebooks").write_text("not a folder")  # a disk that fails must not end the lesson
    handler.write("text", "run://b.ipynb")
    assert (home / ".scratch/notebooks/b.ipynb").read_text() == "text"
    assert str(home / ".scratch/notebooks/b.ipynb") in capsys.readouterr().err


def test_sigterm_goes_to_the_kernel_and_the_parent_lives_on() -> None:
    with papermill_io.forward_sigterm() as received:
        kernel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        os.kill(os.getpid(), signal.SIGTERM)
        assert kernel.wait(timeout=10) == -signal.SIGTERM and received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_a_kernel_sigterm_is_what_it_always_was() -> None:
    code = "import os, signal, time\nfrom nbutils.papermill_io import forward_sigterm\nwith forward_sigterm():\n    "
    ran = subprocess.run([sys.executable, "-c", f"{code}os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"])
    assert ran.returncode == -signal.SIGTERM
