"""distributed: one process does nothing special, several share a training, a lesson is launched and shown."""

import os
import re
import signal
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import lesson_facts, python, refused

from nbutils import distributed, files
from nbutils.distributed import launching
from nbutils.language import messages


def test_without_torchrun_there_is_one_process_whatever_a_container_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (distributed.world_size(), distributed.rank(), distributed.is_main()) == (1, 0, True)
    distributed.join()
    with distributed.main_first():
        assert distributed.broadcast(3) == 3
    assert distributed.anyone(True) and not distributed.anyone(False)
    distributed.leave_it_to_main()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("distributed.too_many_processes", processes=2):
        distributed.join()


def test_there_is_a_process_for_each_gpu_and_they_share_the_batch_of_a_step() -> None:
    shares = {(8, 2, 1): 2, (8, 8, 2): 4, (2, 2, 2): 1, (8, 3, 1): 2, (12, 8, 2): 6}  # batch, micro-batch, processes
    assert {given: distributed.micro_batch_for(*given) for given in shares} == shares
    with refused("distributed.uneven_batch", batch=8, processes=3):
        distributed.micro_batch_for(8, 2, 3)
    counts = {(0, 0): 2, (1, 0): 1, (2, 0): 2, (2, 1): 1, (0, 3): 3}  # GPUs, PROCESSES
    assert {given: distributed.processes_for(*given).value for given in counts} == counts
    with refused("distributed.too_many_processes", processes=3, gpus=2):
        distributed.processes_for(2, 3)


def test_a_lesson_that_sees_one_of_two_gpus_says_how_to_use_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "driver_gpus", lambda: ["T4", "T4"])
    assert "--nproc_per_node=2" in distributed.hint(1) and distributed.hint(2) == distributed.hint(0) == ""
    monkeypatch.setattr(launching, "this_engine", lambda: "ddp")
    assert distributed.hint(1) == ""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "03_qlora.py"


def test_a_script_gets_its_parameters_and_its_failure_is_shown_without_what_torchrun_adds(
    script: Path, capsys: Any
) -> None:
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['NBUTILS_HOME'])")
    distributed.launch(script, {"MAX_STEPS": 5}, script.parent / "runs", threads=3)
    assert f"['--MAX_STEPS', '5'] 3 {script.parent / 'runs'}" in capsys.readouterr().out
    noise = "E1115 08:08:19.998000 2141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    script.write_text(
        f"print('chatter'); print('[FAIL] the cause'); print({noise!r}); print('more of torchrun'); raise SystemExit(1)"
    )
    with refused("distributed.lesson_failed", lesson="03_qlora", status=1, output="chatter\n[FAIL] the cause"):
        distributed.launch(script, {}, script.parent, calm=True)
    assert capsys.readouterr().out == "  | [FAIL] the cause\n"


def test_the_progress_of_a_lesson_is_recognised_in_both_languages() -> None:
    shown = ["starting at step 0", "checkpoint {step} is kept ({size:,.1f} MiB, verified)"]
    shown += ["continuing from step {step}, kept in {folder}", "safe: checkpoint {step} in {folder}"]
    shown += ["training · steps {first:,} to {last:,} · the first is slow"]
    shown += ["trained before · nothing is left to train: this run has {steps} steps"]
    rooms = (messages("zh", room)["texts"] for room in ("training", "tracking", "checkpoints"))
    texts = {key: text for room in rooms for key, text in room.items()}
    for line in [*shown, *(texts[one] for one in shown)]:
        assert re.match(launching.PROGRESS, re.sub(r"{.*?}", "7", line)), line
    assert not re.match(launching.PROGRESS, "adapter: runs/tiny/adapter (1.9 MiB)")


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
    with refused("distributed.terminated", lesson="03_qlora"):
        distributed.launch(script, {}, script.parent)
    assert "saved" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) is before


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.notebook
def test_the_main_process_goes_first_broadcasts_and_goes_on_alone(script: Path) -> None:
    script.write_text(
        "import pathlib, sys\nfrom nbutils import distributed\ndistributed.join()\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "with distributed.main_first():\n    there = file.exists()\n    file.touch()\n"
        "value = distributed.broadcast(pathlib.Path('main') if distributed.is_main() else None)\n"
        "stop = distributed.anyone(distributed.rank() == 1)\n"
        "print('said by', distributed.rank())\n"
        "sys.stderr.write(f'{distributed.rank()} {there} {value} {stop}\\n')\n"  # in one piece: both write to it
        "distributed.leave_it_to_main()\nsys.stderr.write(f'went on: {distributed.rank()}\\n')\n"
    )
    ran = python(*TORCHRUN, script, script.with_name("file"), home=script.parent, threads=1)
    assert {"0 False main True", "1 True main True", "went on: 0"} <= set(ran.stderr.splitlines())
    assert "went on: 1" not in ran.stderr and ran.stdout.strip() == "said by 0"


@pytest.mark.notebook
def test_a_main_process_that_fails_says_why_and_the_other_ends_quietly(script: Path) -> None:
    script.write_text(
        "from nbutils import distributed\ndistributed.join()\n"
        "with distributed.main_first():\n    raise SystemExit('[FAIL] the cause')\n"
    )
    ran = python(*TORCHRUN, script, home=script.parent, threads=1, ok=False)
    assert ran.stderr.count("[FAIL]") == 1 and "RuntimeError" not in ran.stderr


@pytest.mark.notebook
def test_lesson_06_trains_with_two_processes_what_one_would_have_trained(tmp_path: Path) -> None:
    text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(text.replace("validation_rows: auto", "validation_rows: 8"), encoding="utf-8")
    words = [files.NOTEBOOKS / "06_scale_out.ipynb", tmp_path / "out.ipynb", "-p", "PROFILE", tmp_path / "tiny.yaml"]
    words += ["-p", "TRIAL_STEPS", "2", "-p", "MAX_STEPS", "3", "-p", "ENGINE", "ddp"]
    python("-m", "papermill", *words, home=tmp_path, timeout=590)
    scaled, trained = (lesson_facts(tmp_path / "tiny", stem) for stem in ("06_scale_out", "03_qlora"))
    assert (scaled["processes"], scaled["engine"]) == (2, "ddp") and scaled["speedup"] > 0
    assert scaled["loss_difference"] < 1e-4  # float32: the same rows, added in another order
    alone, together = (lesson_facts(tmp_path / ".scratch/tiny/trials" / name) for name in ("alone", "together"))
    assert together["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-4)  # rows are shared
    assert (trained["processes"], trained["batch"], trained["steps"], trained["base_moved"]) == (2, 2, 3, 0)
    assert files.stamp(tmp_path / "tiny/adapter") is not None
    assert "[ OK ] equal steps, equal batch, losses within 1 %" in (tmp_path / "out.ipynb").read_text()
    with tarfile.open(tmp_path / "tiny/checkpoints/checkpoint-3.tar") as tar:
        assert {"checkpoint-3/rng_state_0.pth", "checkpoint-3/rng_state_1.pth"} <= set(tar.getnames())
