"""Lessons executed for real with the tiny model: alone, interrupted, on simulated platforms; not the course run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import simulate
from support import ROOT, lesson_facts, python, wait_for

from nbutils import paths

pytestmark = pytest.mark.notebook
LESSON_03 = ROOT / "notebooks/03_qlora.ipynb"
QUICK = ("-p", "PROFILE", "tiny", "-p", "MAX_STEPS", "4", "-p", "SAVE_STEPS", "2")


# --- single lessons --------------------------------------------------------------------------------------------------


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    machine = simulate.local(tmp_path, NBUTILS_HOME=str(tmp_path / "runs"))
    run, out = tmp_path / "runs/tiny", tmp_path / "out.ipynb"
    words = ["-m", "papermill", str(LESSON_03), str(out), "-p", "MAX_STEPS", "30", "-p", "SAVE_STEPS", "5"]
    options: dict[str, Any] = {"env": machine.environment(), "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *words], cwd=machine.root, **options) as running:
        wait_for((run / "checkpoints/checkpoint-5.json").exists)
        running.terminate()
        assert running.wait(timeout=60) == 0
    steps = lesson_facts(run)["steps"]
    assert 5 <= steps < 30 and (run / f"checkpoints/checkpoint-{steps}.json").exists()
    assert "Run the same notebook again" in out.read_text(encoding="utf-8")
    assert machine.python(*words).returncode == 0
    assert (lesson_facts(run)["resumed_from_step"], lesson_facts(run)["steps"]) == (steps, 30)


def test_output_redirected_into_a_notebook_is_the_executed_notebook(tmp_path: Path) -> None:
    lesson = ROOT / "notebooks/01_environment.ipynb"
    with open(tmp_path / "out.ipynb", "w") as out:
        python("-m", "papermill", lesson, home=tmp_path, stdout=out)
    assert nbformat.read(tmp_path / "out.ipynb", 4).metadata.papermill.exception is None
    refused = python("-m", "papermill", lesson, tmp_path / "o.ipynb", "-p", "PROFIEL", "x", home=tmp_path, ok=False)
    assert "unknown parameter PROFIEL" in refused.stderr and "did you mean PROFILE?" in refused.stderr


def test_a_hub_model_without_network_is_an_error_not_the_tiny_one(tmp_path: Path) -> None:
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    refused = python(ROOT / "notebooks/03_qlora.py", "--MODEL", model, home=tmp_path, ok=False)
    assert model in refused.stderr and "To do:" in refused.stderr and not list(tmp_path.rglob("adapter"))


def test_a_model_is_pretrained_from_scratch(tmp_path: Path) -> None:
    small = ["-p", "STEPS", "5", "-p", "TEXTS", "2000"]
    python("-m", "papermill", ROOT / "notebooks/07_from_scratch.ipynb", tmp_path / "o.ipynb", *small, home=tmp_path)
    assert list(tmp_path.rglob("from_scratch/model.safetensors"))


@pytest.mark.long
def test_lesson_04_alone_makes_what_it_needs_with_the_learners_own_profile(tmp_path: Path) -> None:
    """And where the model does not fit: it asks in 4 bits, and merges into the dequantized base."""
    text = (paths.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    text = text.replace("max_steps: 212", "max_steps: 3").replace("  rows: 0             #", "  rows: 4             #")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    words = [str(ROOT / "notebooks/04_merge.py"), "--PROFILE", str(tmp_path / "mine.yaml")]
    assert "Lesson 03_qlora has not run" in python(*words, home=tmp_path / "runs").stdout
    run = tmp_path / "runs/mine"
    assert lesson_facts(run)["steps"] == 3 and lesson_facts(run, "04_merge")["rows"] == 4
    tight = "import runpy, sys; from nbutils.parity import fitting; sys.argv = sys.argv[1:]; "
    tight += "fitting.decide = lambda gib, card, ram: (False, {'cpu': '8MiB'}); "
    tight += "runpy.run_path(sys.argv[0], run_name='__main__')"
    ran = python("-c", tight, *words, "--MERGE_ONTO", "dequantized", home=tmp_path / "runs")
    entry = lesson_facts(run, "04_merge")
    assert "do NOT fit into RAM" in ran.stdout and entry["merge"]["onto"] == "dequantized" and entry["parity"]["holds"]
    assert entry["parity"]["gaps"]["merged against 4bit"]["mean"] < 1e-6 and not list(run.rglob("offload"))


# --- simulated platforms ---------------------------------------------------------------------------------------------

START = """
import nbutils
PROFILE: str = "tiny"
lesson = nbutils.start("03_qlora", globals())
print("SAW", lesson.platform.name, lesson.run.path, lesson.scratch)
"""


@pytest.mark.parametrize(
    ("machine", "run", "scratch"),
    [
        (simulate.autodl, "root/autodl-fs/runs/tiny", "root/autodl-tmp/scratch/tiny"),
        (lambda folder: simulate.colab(folder, gpu=False), "content/runs/tiny", "content/scratch/tiny"),
        (lambda folder: simulate.mounted(simulate.colab(folder, gpu=False)),
         "content/drive/MyDrive/finetune-course/tiny", "content/scratch/tiny"),
    ],
    ids=["autodl", "headless colab", "colab with Drive"],
)  # fmt: skip
def test_a_run_is_kept_in_the_folder_that_lasts(machine: Any, run: str, scratch: str, tmp_path: Path) -> None:
    there: simulate.Machine = machine(tmp_path)
    there.env |= {"FAKE_DRIVE": "headless"}
    ran = there.python("-c", START)
    assert ran.returncode == 0, ran.stderr
    assert f"SAW {there.root.name} {there.root / run} {there.root / scratch}" in ran.stdout
    assert (there.root / run / "facts.json").exists()
    assert ("may go away with this machine" in ran.stdout) == (run == "content/runs/tiny")
    assert not (there.root / "shutdown.log").exists()  # nobody asked for it


def test_kaggle_keeps_the_run_in_its_output_and_the_next_version_continues_it(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path, batch=True)
    ran = machine.python("-m", "papermill", str(LESSON_03), *QUICK)
    assert ran.returncode == 0, ran.stderr[-4000:]
    run = machine.root / "kaggle/working/runs/tiny"
    assert paths.stamp(run / "adapter") is not None and lesson_facts(run)["steps"] == 4
    assert sorted(file.name for file in (run / "checkpoints").glob("*.tar")) == ["checkpoint-2.tar", "checkpoint-4.tar"]
    later = simulate.kaggle(tmp_path / "next version", batch=True)
    later.make("kaggle/input/notebooks/me")
    (machine.root / "kaggle/working").rename(later.root / "kaggle/input/notebooks/me/qlora")
    ran = later.python("-m", "papermill", str(LESSON_03), *QUICK, "-p", "MAX_STEPS", "6")
    assert ran.returncode == 0, ran.stderr[-4000:]
    again = later.root / "kaggle/working/runs/tiny"
    assert (lesson_facts(again)["resumed_from_step"], lesson_facts(again)["steps"]) == (4, 6)
    assert (again / "checkpoints/checkpoint-4.json").exists()  # the chain can go on from this version alone


def test_a_drive_that_vanishes_does_not_stop_the_training_and_is_not_written_into(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path, gpu=False))
    root, drive, log = machine.root, machine.root / "content/drive", tmp_path / "log"
    words = ["-p", "PROFILE", "tiny", "-p", "MAX_STEPS", "40", "-p", "SAVE_STEPS", "5", "--log-output"]
    command = [sys.executable, "-m", "papermill", str(LESSON_03), str(tmp_path / "out.ipynb"), *words]
    options: dict[str, Any] = {"env": machine.environment(), "cwd": root, "stdin": subprocess.DEVNULL}
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=output, **options) as running:
        kept = drive / "MyDrive/finetune-course/tiny/checkpoints/checkpoint-5.json"
        wait_for(kept.exists)
        mounts = (root / "proc/mounts").read_text()
        (root / "proc/mounts").write_text("")
        drive.rename(root / "unplugged")
        drive.mkdir()
        time.sleep(4)
        assert not list(drive.iterdir())  # an empty mount point stays empty, or Drive could not be mounted again
        drive.rmdir()
        (root / "unplugged").rename(drive)
        (root / "proc/mounts").write_text(mounts)
        running.wait(timeout=200)
    assert running.returncode == 0, log.read_text()[-4000:]
    assert "is not mounted any more" in log.read_text() and "works again" in log.read_text()
    assert lesson_facts(kept.parents[1])["steps"] == 40
