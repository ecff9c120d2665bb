"""papermill_io: a lesson alone gets an output, everything else stays papermill's."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbutils import papermill_io


@pytest.fixture
def lesson(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "03_qlora.ipynb").write_text("{}")
    (tmp_path / "other.ipynb").write_text("{}")
    return "03_qlora.ipynb"


def test_a_lesson_alone_goes_to_the_runs(lesson: str) -> None:
    words = [lesson, "-p", "PROFILE", "tiny", "--log-output"]
    assert papermill_io.output_for(words, redirected=False) == "run://03_qlora.ipynb"


def test_an_ipynb_file_gets_the_notebook_a_terminal_a_pipe_or_a_log_does_not(tmp_path: Path) -> None:
    _, pipe = os.pipe()
    notebook, log = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("out.ipynb", "train.log"))
    _, terminal = pty.openpty()
    assert papermill_io.wants_the_notebook(notebook)
    assert not any(papermill_io.wants_the_notebook(other) for other in (log, terminal, pipe))


def test_an_executed_copy_is_not_overwritten(lesson: str, home: Path) -> None:
    (home / "notebooks").mkdir(parents=True)
    (home / "notebooks/03_qlora.ipynb").write_text("old")
    assert papermill_io.output_for([lesson], redirected=False) not in (None, "run://03_qlora.ipynb")


@pytest.mark.parametrize(
    "words", [["03_qlora.ipynb", "out.ipynb"], ["other.ipynb"], ["missing.ipynb"], [], ["--help-notebook", "x"]]
)
def test_other_calls_are_left_alone(lesson: str, words: list[str]) -> None:
    assert papermill_io.output_for(words, redirected=False) is None


def test_redirected_output_stays_papermills(lesson: str) -> None:
    assert papermill_io.output_for([lesson], redirected=True) is None


def test_the_scheme_writes_below_the_runs(home: Path) -> None:
    handler = papermill_io.RunHandler()
    handler.write("text", "run://a.ipynb")
    assert (home / "notebooks/a.ipynb").read_text() == "text" == handler.read("run://a.ipynb")
    assert handler.pretty_path("run://a.ipynb") == str(home / "notebooks/a.ipynb")


def test_a_keep_that_fails_does_not_end_the_lesson(home: Path, capsys: pytest.CaptureFixture) -> None:
    home.mkdir()
    (home / "notebooks").write_text("not a folder")
    papermill_io.RunHandler().write("text", "run://a.ipynb")
    assert (home / ".scratch/notebooks/a.ipynb").read_text() == "text"
    assert str(home / ".scratch/notebooks/a.ipynb") in capsys.readouterr().err


def test_sigterm_goes_to_the_kernel_and_the_parent_lives_on() -> None:
    with papermill_io.passing_on_sigterm() as came:
        kernel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        os.kill(os.getpid(), signal.SIGTERM)
        assert kernel.wait(timeout=10) == -signal.SIGTERM and came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_a_kernel_sigterm_is_what_it_always_was() -> None:
    code = (
        "import os, signal, time\nfrom nbutils.papermill_io import passing_on_sigterm\nwith passing_on_sigterm():\n    "
    )
    ran = subprocess.run([sys.executable, "-c", f"{code}os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"])
    assert ran.returncode == -signal.SIGTERM
