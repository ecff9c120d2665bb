"""scaling: one process does nothing special, several share one training, a lesson is launched and its output shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import refused

from nbutils import checkpoints, lessons, paths, platforms, scaling

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes that it is the second of two."""
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_there_is_one_process_whatever_a_container_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (scaling.world_size(), scaling.rank(), scaling.is_main()) == (1, 0, True)
    scaling.join()
    with scaling.main_first():
        assert scaling.told_by_main(lambda value: value + 1)(2) == 3
    assert scaling.anyone(True) and not scaling.anyone(False)
    scaling.leave_it_to_main()


@pytest.mark.parametrize(
    ("gpus", "here", "code"),
    [(1, "2", "scaling.more_processes_than_gpus"), (2, "1", "scaling.several_machines")],
)
def test_processes_that_cannot_train_together_are_refused(
    second: None, monkeypatch: pytest.MonkeyPatch, gpus: int, here: str, code: str
) -> None:
    import torch

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with refused(code, processes=2):
        scaling.join()


@pytest.mark.parametrize(
    ("batch", "micro_batch", "count", "expected"),
    [(8, 2, 1, 2), (8, 2, 2, 2), (8, 8, 2, 4), (2, 2, 2, 1), (8, 3, 1, 2), (12, 8, 2, 6), (8, 8, 8, 1)],
)
def test_processes_share_the_batch_of_a_step(batch: int, micro_batch: int, count: int, expected: int) -> None:
    assert scaling.micro_batch_for(batch, micro_batch, count) == expected


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with refused("scaling.uneven_batch", batch=8, processes=3):
        scaling.micro_batch_for(8, 2, 3)


def test_a_run_of_two_processes_keeps_its_effective_batch(home: Path, second: None) -> None:
    assert (scaling.world_size(), scaling.rank(), scaling.is_main()) == (2, 1, False)
    local = platforms.Platform("local", "test")
    _, resolved = lessons.open_run({"PROFILE": "tiny"}, local, platforms.folders(local), None)
    train = resolved.profile.train
    assert (train.batch, train.micro_batch, train.accumulation_on(2)) == (2, 1, 1)


@pytest.mark.parametrize(("gpus", "asked", "count"), [(0, 0, 2), (1, 0, 1), (2, 0, 2), (2, 1, 1), (0, 3, 3)])
def test_there_is_a_process_for_each_gpu(gpus: int, asked: int, count: int) -> None:
    assert scaling.processes_for(gpus, asked).value == count
    with refused("scaling.too_many_processes", processes=3, gpus=2):
        scaling.processes_for(2, 3)


@pytest.mark.parametrize(("listed", "hinted"), [("GPU 0: T4\nGPU 1: T4", True), ("No devices were found", False)])
def test_a_lesson_that_sees_one_of_two_gpus_says_how_to_use_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, hinted: bool
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert ("--nproc_per_node=2" in scaling.hint(1)) is hinted
    assert scaling.hint(2) == scaling.hint(0) == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert scaling.hint(1) == ""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "03_qlora.py"


def test_a_launched_script_gets_parameters_threads_and_folder(script: Path, capsys: Any) -> None:
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['NBUTILS_HOME'])")
    scaling.launch(script, {"MAX_STEPS": 5}, script.parent / "runs", threads=3)
    assert f"['--MAX_STEPS', '5'] 3 {script.parent / 'runs'}" in capsys.readouterr().out


def test_a_failed_lesson_is_shown_calmly_and_without_what_torchrun_adds(script: Path, capsys: Any) -> None:
    noise = "E1115 08:08:19.998000 2141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    script.write_text(
        f"print('chatter'); print('[FAIL] the cause'); print({noise!r}); print('more of torchrun'); raise SystemExit(1)"
    )
    with refused("scaling.lesson_failed", lesson="03_qlora", status=1, output="chatter\n[FAIL] the cause"):
        scaling.launch(script, {}, script.parent, calm=True)
    assert capsys.readouterr().out == "\r  | [FAIL] the cause\n"


def test_sigterm_reaches_the_launched_script(script: Path, capsys: Any) -> None:
    ready = script.with_name("ready")
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )

    def send() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=send, daemon=True).start()
    with refused("scaling.terminated", lesson="03_qlora"):
        scaling.launch(script, {}, script.parent)
    assert "saved" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) is before


def run_folder(folder: Path, processes: int, losses: dict[int, float], speed: float) -> Path:
    """A run folder as lesson 03 leaves it, as far as a comparison looks at it."""
    saved = folder / "checkpoint-20"
    saved.mkdir(parents=True)
    history = [{"step": step, "loss": loss} for step, loss in losses.items()] + [{"step": 20, "train_loss": 1.0}]
    (saved / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / "checkpoints").mkdir()
    checkpoints.pack(saved, folder / "checkpoints", {"seed": 42})
    facts = {"processes": processes, "steps": 20, "batch": 2, "tokens_per_second": speed}
    (folder / "facts.json").write_text(json.dumps({"lessons": {"03_qlora": facts}}))
    return folder


def test_two_runs_are_compared(tmp_path: Path) -> None:
    alone = run_folder(tmp_path / "alone", 1, {10: 4.0, 20: 2.0}, 1000.0)
    compared = scaling.compare(alone, run_folder(tmp_path / "together", 2, {10: 4.0, 20: 2.01}, 1800.0))
    assert compared.furthest == pytest.approx(0.005) and compared.same_work and "1.80 times" in str(compared)
    facts = scaling.facts(compared)
    assert facts["tokens_per_second"] == {"alone": 1000.0, "together": 1800.0} and facts["speedup"] == 1.8
    assert scaling.facts(None) == dict.fromkeys(facts)
    for name, losses in {"apart": {20: 2.1}, "diverged": {20: float("nan")}}.items():
        assert not scaling.compare(alone, run_folder(tmp_path / name, 2, losses, 0.0)).same_work
    with refused("scaling.no_common_step"):
        scaling.compare(alone, run_folder(tmp_path / "shorter", 2, {5: 4.0}, 1.0))


def torchrun(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Two processes of a script on the CPU, one thread each."""
    env = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.notebook
def test_the_main_process_goes_first_broadcasts_and_goes_on_alone(script: Path) -> None:
    script.write_text(
        "import pathlib, sys\nfrom nbutils import scaling\nscaling.join()\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "with scaling.main_first():\n    there = file.exists()\n    file.touch()\n"
        "value = scaling.told_by_main(lambda: pathlib.Path('from main') if scaling.is_main() else 1 / 0)()\n"
        "stop = scaling.anyone(scaling.rank() == 1)\n"
        "print('said by', scaling.rank())\n"
        "sys.stderr.write(f'{scaling.rank()} {there} {value} {stop}\\n')\n"  # in one piece: both write to it
        "scaling.leave_it_to_main()\nsys.stderr.write(f'went on: {scaling.rank()}\\n')\n"
    )
    ran = torchrun(script, str(script.with_name("file")))
    assert ran.returncode == 0, ran.stderr
    assert {"0 False from main True", "1 True from main True", "went on: 0"} <= set(ran.stderr.splitlines())
    assert "went on: 1" not in ran.stderr and ran.stdout.strip() == "said by 0"


@pytest.mark.notebook
def test_a_main_process_that_fails_says_why_and_the_other_ends_quietly(script: Path) -> None:
    script.write_text(
        "from nbutils import scaling\nscaling.join()\n"
        "with scaling.main_first():\n    raise SystemExit('[FAIL] the cause')\n"
    )
    ran = torchrun(script)
    assert ran.returncode != 0 and ran.stderr.count("[FAIL]") == 1 and "RuntimeError" not in ran.stderr


@pytest.mark.notebook
def test_lesson_06_trains_with_two_processes_what_one_would_have_trained(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    env |= {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    words = [str(paths.NOTEBOOKS / "06_scale_out.ipynb"), str(tmp_path / "out.ipynb")]
    words += ["-p", "TRIAL_STEPS", "10", "-p", "MAX_STEPS", "12"]
    command = [sys.executable, "-m", "papermill", *words]
    ran = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts = json.loads((tmp_path / "tiny/facts.json").read_text())["lessons"]
    assert facts["06_scale_out"]["processes"] == 2 and facts["06_scale_out"]["speedup"] > 0
    assert facts["06_scale_out"]["loss_difference"] < 1e-4  # float32: the same rows, added in another order
    alone, together = (
        json.loads((tmp_path / f".scratch/tiny/trials/{name}/facts.json").read_text())["lessons"]["03_qlora"]
        for name in ("alone", "together")
    )
    assert together["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-4)  # rows are shared
    trained = facts["03_qlora"]
    assert (trained["processes"], trained["batch"], trained["steps"], trained["base_moved"]) == (2, 2, 12, 0)
    assert paths.stamp(tmp_path / "tiny/adapter") is not None
    assert "[ OK ] equal steps, equal batch, losses within 1 %" in (tmp_path / "out.ipynb").read_text()
    with tarfile.open(tmp_path / "tiny/checkpoints/checkpoint-12.tar") as tar:
        assert {"checkpoint-12/rng_state_0.pth", "checkpoint-12/rng_state_1.pth"} <= set(tar.getnames())
