"""Lesson 03 under papermill on imitated platforms: each ends with an adapter in the folder that lasts there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import simulate

pytestmark = pytest.mark.notebook
QUICK = ("-p", "PROFILE", "tiny", "-p", "MAX_STEPS", "4", "-p", "SAVE_STEPS", "2")


def papermill(machine: simulate.Machine, *words: str, **options: object) -> str:
    """`papermill notebooks/03_qlora.ipynb` there, nobody at its input; what it printed."""
    lesson = simulate.ROOT / "notebooks/03_qlora.ipynb"
    ran = machine.python("-m", "papermill", str(lesson), *QUICK, *words, "--log-output", **options)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def facts(run: Path) -> dict:
    return json.loads((run / "facts.json").read_text(encoding="utf-8"))


def assert_trained(run: Path, steps: int = 4) -> None:
    assert (run / "adapter/adapter_model.safetensors").exists() and (run / "adapter/complete.json").exists()
    assert facts(run)["lessons"]["03_qlora"]["steps"] == steps
    assert sorted(place.name for place in (run / "checkpoints").glob("*.tar")) == [
        "checkpoint-2.tar",
        "checkpoint-4.tar",
    ]


def test_autodl_keeps_the_run_in_the_file_storage_and_works_on_the_data_disk(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    papermill(machine)
    run = machine.root / "root/autodl-fs/runs/tiny"
    assert_trained(run)
    assert facts(run)["platform"]["name"] == "autodl"
    assert (machine.root / "root/autodl-tmp/scratch/tiny").is_dir()
    assert (machine.root / "root/autodl-fs/runs/notebooks/03_qlora.ipynb").exists()
    assert not (machine.root / "shutdown.log").exists()  # nobody asked for it


def test_kaggle_batch_keeps_the_run_in_its_output_and_the_next_version_continues_it(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path, batch=True)
    papermill(machine)
    run = machine.root / "kaggle/working/runs/tiny"
    assert_trained(run)
    assert facts(run)["platform"] | {"evidence": ""} == {"name": "kaggle", "evidence": "", "batch": True}
    later = simulate.kaggle(tmp_path / "next version", batch=True)
    attached = later.make("kaggle/input/notebooks/me").root / "kaggle/input/notebooks/me/qlora"
    (machine.root / "kaggle/working").rename(attached)
    said = papermill(later, "-p", "MAX_STEPS", "6")
    again = later.root / "kaggle/working/runs/tiny"
    assert facts(again)["lessons"]["03_qlora"]["resumed_from_step"] == 4 and "continuing from step 4" in said
    assert facts(again)["lessons"]["03_qlora"]["steps"] == 6
    assert (again / "checkpoints/checkpoint-4.json").exists()  # the chain can go on from this version alone


def test_headless_colab_keeps_the_run_on_its_disk_and_says_that_it_goes_away(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path, gpu=False)
    machine.env |= {"FAKE_DRIVE": "headless"}
    said = papermill(machine)
    assert_trained(machine.root / "content/runs/tiny")
    assert "may go away with this machine" in said and "Drive" in said
    assert not list((machine.root / "content/drive").glob("*"))


def test_colab_with_drive_keeps_the_run_there(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path, gpu=False))
    papermill(machine)
    assert_trained(machine.root / "content/drive/MyDrive/finetune-course/tiny")


def test_a_drive_that_vanishes_does_not_stop_the_training_and_is_not_written_into(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path, gpu=False))
    root, drive = machine.root, machine.root / "content/drive"
    words = [*QUICK[:5], "60", "-p", "SAVE_STEPS", "5"]
    lesson, out, log = simulate.ROOT / "notebooks/03_qlora.ipynb", tmp_path / "out.ipynb", tmp_path / "log"
    command = [sys.executable, "-m", "papermill", lesson, out, *words, "--log-output"]
    options = {"env": machine.environment(), "cwd": root, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, **options) as running:  # type: ignore[call-overload]
        kept = drive / "MyDrive/finetune-course/tiny/checkpoints/checkpoint-5.json"
        _wait_for(kept.exists)
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
    said = log.read_text()
    assert running.returncode == 0, said[-4000:]
    assert "is not mounted any more" in said and "works again" in said
    assert facts(kept.parents[1])["lessons"]["03_qlora"]["steps"] == 60


def test_sigterm_to_papermill_saves_ends_normally_and_says_how_to_go_on(tmp_path: Path) -> None:
    machine = simulate.local(tmp_path, NBUTILS_HOME=str(tmp_path / "runs"))
    lesson, out = simulate.ROOT / "notebooks/03_qlora.ipynb", tmp_path / "out.ipynb"
    command = [sys.executable, "-m", "papermill", lesson, out, "-p", "PROFILE", "tiny", "-p", "SAVE_STEPS", "5"]
    options = {"env": machine.environment(), "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=machine.root, **options) as running:  # type: ignore[call-overload]
        _wait_for((tmp_path / "runs/tiny/checkpoints/checkpoint-5.json").exists)
        running.terminate()
        assert running.wait(timeout=60) == 0
    entry = facts(tmp_path / "runs/tiny")["lessons"]["03_qlora"]
    assert 5 <= entry["steps"] < entry["planned_steps"]
    assert (tmp_path / f"runs/tiny/checkpoints/checkpoint-{entry['steps']}.json").exists()
    assert "Run the same notebook again" in out.read_text(encoding="utf-8")


def _wait_for(condition: object, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
