"""scaling: one process does nothing special, several share one training, a lesson is launched and its words shown."""

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
from types import SimpleNamespace

import nbformat
import pytest

from nbutils import checkpoints, lessons, paths, platforms, scaling
from nbutils.errors import CourseError
from nbutils.scaling import launching, processes

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes to be the second of two."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def torchrun(script: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Two processes of a script on the CPU, one thread each."""
    around = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    around |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *words]
    return subprocess.run(command, env=around | env, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_without_a_launcher_there_is_one_process_whatever_a_container_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (scaling.world_size(), scaling.rank(), scaling.is_main()) == (1, 0, True)


def test_one_process_waits_for_nobody_and_stays() -> None:
    order = []
    scaling.join()
    with scaling.main_first():
        order.append("in")
    assert scaling.told_by_main(lambda value: value + 1)(2) == 3
    assert scaling.anyone(True) and not scaling.anyone(False)
    scaling.leave_it_to_main()
    assert order == ["in"]


def test_the_number_of_a_process_is_the_number_of_its_card(second: None) -> None:
    assert (scaling.world_size(), scaling.rank(), scaling.is_main()) == (2, 1, False)
    lesson = SimpleNamespace(card=object())
    assert lessons.Lesson.device.fget(lesson) == 1  # type: ignore[attr-defined]
    assert lessons.Lesson.device.fget(SimpleNamespace(card=None)) == "cpu"  # type: ignore[attr-defined]


def test_more_processes_than_cards_are_refused(second: None) -> None:
    with pytest.raises(CourseError, match=r"(?s)2 processes were started for 1 card\..*--nproc_per_node=1"):
        processes._refuse_too_many(1)
    processes._refuse_too_many(0)
    processes._refuse_too_many(2)


def test_several_machines_are_refused(second: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(CourseError, match="several machines"):
        processes._refuse_too_many(1)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "count", "expected"),
    [(8, 2, 1, 2), (8, 2, 2, 2), (8, 8, 2, 4), (2, 2, 2, 1), (8, 3, 1, 2), (12, 8, 2, 6), (8, 8, 8, 1)],
)
def test_processes_share_the_batch_of_a_step(batch: int, micro_batch: int, count: int, expected: int) -> None:
    found = scaling.micro_batch_for(batch, micro_batch, count)
    assert found == expected and batch % (found * count) == 0


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(CourseError, match=r"(?s)a batch of 8 rows cannot be shared by 3 cards.*that 3 divides"):
        scaling.micro_batch_for(8, 2, 3)


def test_a_run_of_two_processes_keeps_its_effective_batch(home: Path, second: None) -> None:
    local = platforms.Platform("local", "test")
    _, resolved = lessons.open_run({"PROFILE": "tiny"}, local, platforms.folders(local), None)
    train = resolved.profile.train
    assert (train.batch, train.micro_batch, train.accumulation_on(2)) == (2, 1, 1)
    assert "2 processes share it" in resolved.choices["train.micro_batch"].reason


@pytest.mark.parametrize(
    ("cards", "asked", "count", "reason"),
    [
        (0, 0, 2, "no card"),
        (1, 0, 1, "one card"),
        (2, 0, 2, "each of the 2"),
        (2, 1, 1, "PROCESSES"),
        (0, 3, 3, "PROC"),
    ],
)
def test_there_is_a_process_for_each_card(cards: int, asked: int, count: int, reason: str) -> None:
    choice = scaling.processes_for(cards, asked)
    assert choice.value == count and reason in choice.reason


def test_more_processes_than_cards_cannot_be_asked_for() -> None:
    with pytest.raises(CourseError, match=r"(?s)PROCESSES is 3, and there are 2 cards\..*at most 2"):
        scaling.processes_for(2, 3)


def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """An nvidia-smi that lists cards, first in the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_a_lesson_that_was_shown_one_of_two_cards_says_how_to_use_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(tmp_path, monkeypatch, "GPU 0: Tesla T4 (UUID: a)\nGPU 1: Tesla T4 (UUID: b)")
    assert scaling.cards_in_machine() == 2
    assert (
        "2 are here" in scaling.hint(1) and "--nproc_per_node=2" in scaling.hint(1) and "Lesson 06" in scaling.hint(1)
    )
    assert scaling.hint(2) == "" and scaling.hint(0) == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert scaling.hint(1) == ""


def test_a_driver_that_answers_nothing_lists_no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, "No devices were found")
    assert scaling.cards_in_machine() == 0
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert scaling.cards_in_machine() == 0


def test_one_process_is_a_plain_script_and_several_are_torchrun() -> None:
    one = scaling.command_line(Path("03.py"), {"MAX_STEPS": 5}, 1)
    assert one == [sys.executable, "03.py", "--MAX_STEPS", "5"]
    two = scaling.command_line(Path("03.py"), {"MAX_STEPS": 5}, 2)
    assert "torch.distributed.run" in two and "--nproc_per_node=2" in two and two[-3:] == ["03.py", "--MAX_STEPS", "5"]


def test_a_launched_script_gets_its_threads_and_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "03_qlora.py"
    script.write_text("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['NBUTILS_HOME'])")
    scaling.launch(script, {}, tmp_path / "runs", threads=3)
    assert f"3 {tmp_path / 'runs'}" in capsys.readouterr().out


def test_sigterm_reaches_the_launched_script_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "03_qlora.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )

    def send() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(CourseError, match=r"(?s)asked lesson 03_qlora to end.*run this notebook again"):
        scaling.launch(script, {}, tmp_path)
    assert "saved" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) is before


def test_what_the_launcher_says_of_itself_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = "E1115 08:08:19.998000 2141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    script = tmp_path / "03_qlora.py"
    script.write_text(
        f"print('[FAIL] the cause'); print({noise!r}); print('Traceback of torchrun'); raise SystemExit(1)"
    )
    with pytest.raises(CourseError, match="the cause") as told:
        scaling.launch(script, {}, tmp_path)
    assert "Traceback" not in str(told.value) + capsys.readouterr().out
    assert launching.LAUNCHER_ENDS.search(noise)


def left_by(folder: Path, count: int, losses: dict[int, float], speed: float) -> Path:
    """A run folder as lesson 03 leaves it, as far as a comparison looks at it."""
    saved = folder / "checkpoint-20"
    saved.mkdir(parents=True)
    history = [{"step": step, "loss": loss} for step, loss in losses.items()] + [{"step": 20, "train_loss": 1.0}]
    (saved / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / "checkpoints").mkdir()
    checkpoints.pack(saved, folder / "checkpoints", {"seed": 42})
    facts = {"processes": count, "steps": 20, "batch": 2, "tokens_per_second": speed}
    (folder / "facts.json").write_text(json.dumps({"lessons": {"03_qlora": facts}}))
    return folder


def test_two_runs_are_compared(tmp_path: Path) -> None:
    alone = left_by(tmp_path / "alone", 1, {10: 4.0, 20: 2.0}, 1000.0)
    together = left_by(tmp_path / "together", 2, {10: 4.0, 20: 2.01}, 1800.0)
    compared = scaling.compare(alone, together)
    assert compared.speedup == pytest.approx(1.8) and compared.furthest == pytest.approx(0.005)
    assert compared.same_work and "1.80 times the tokens a second" in str(compared)
    assert scaling.facts(compared)["tokens_per_second"] == {"alone": 1000.0, "together": 1800.0}
    assert set(scaling.facts(None).values()) == {None} and set(scaling.facts(None)) == set(scaling.facts(compared))
    apart = left_by(tmp_path / "apart", 2, {10: 4.0, 20: 2.1}, 1800.0)
    assert not scaling.compare(alone, apart).same_work


def test_runs_without_a_common_step_are_not_compared(tmp_path: Path) -> None:
    alone = left_by(tmp_path / "alone", 1, {10: 4.0}, 1.0)
    with pytest.raises(CourseError, match="logged no step in common"):
        scaling.compare(alone, left_by(tmp_path / "together", 2, {5: 4.0}, 1.0))


@pytest.mark.notebook
def test_the_main_process_goes_first_tells_and_goes_on_alone(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(
        "import pathlib, sys\nfrom nbutils import scaling\nscaling.join()\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "with scaling.main_first():\n    there = mark.exists()\n    mark.touch()\n"
        "told = scaling.told_by_main(lambda: pathlib.Path('from main') if scaling.is_main() else 1 / 0)()\n"
        "stop = scaling.anyone(scaling.rank() == 1)\n"
        "print('said by', scaling.rank())\n"
        "sys.stderr.write(f'{scaling.rank()} {there} {told} {stop}\\n')\n"  # in one piece: both write to it
        "scaling.leave_it_to_main()\nsys.stderr.write(f'went on: {scaling.rank()}\\n')\n"
    )
    ran = torchrun(script, str(tmp_path / "mark"))
    assert ran.returncode == 0, ran.stderr
    assert {"0 False from main True", "1 True from main True", "went on: 0"} <= set(ran.stderr.splitlines())
    assert "went on: 1" not in ran.stderr and ran.stdout.strip() == "said by 0"


@pytest.mark.notebook
def test_a_main_process_that_fails_says_why_and_the_other_ends_quietly(tmp_path: Path) -> None:
    ran = torchrun(ROOT / "notebooks/03_qlora.py", "--PROFILE", "nothing", NBUTILS_HOME=str(tmp_path))
    assert ran.returncode != 0 and ran.stderr.count("[FAIL]") == 1 and "Connection closed" not in ran.stderr


@pytest.mark.notebook
def test_lesson_06_trains_with_two_processes_what_one_would_have_trained(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "PYTHONPATH")}
    env |= {"NBUTILS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out.ipynb"
    words = ["-m", "papermill", str(paths.NOTEBOOKS / "06_scale_out.ipynb"), str(out)]
    words += ["-p", "TRIAL_STEPS", "10", "-p", "MAX_STEPS", "12"]
    ran = subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts = json.loads((tmp_path / "tiny/facts.json").read_text())["lessons"]
    assert facts["06_scale_out"]["processes"] == 2 and facts["06_scale_out"]["speedup"] > 0
    assert (
        facts["06_scale_out"]["loss_difference"] < 1e-4
    )  # float32: the same rows in every step, added in another order
    trials = tmp_path / ".scratch/tiny/trials"
    alone, together = (
        json.loads((trials / name / "facts.json").read_text())["lessons"]["03_qlora"]["validation_loss"]
        for name in ("alone", "together")
    )
    assert together == pytest.approx(alone, abs=1e-4)  # the processes share the held-back rows
    trained = facts["03_qlora"]
    assert (trained["processes"], trained["batch"], trained["steps"]) == (2, 2, 12)
    assert trained["base_moved"] == 0 and paths.stamp(tmp_path / "tiny/adapter") is not None
    said = [o.get("text", "") for c in nbformat.read(out, 4).cells if c.cell_type == "code" for o in c.outputs]
    assert "[ OK ] equal steps, equal batch, losses within 1 %" in "".join(said)
    with tarfile.open(tmp_path / "tiny/checkpoints/checkpoint-12.tar") as tar:
        names = tar.getnames()
    assert {"checkpoint-12/rng_state_0.pth", "checkpoint-12/rng_state_1.pth"} <= set(names)


def test_a_loss_that_is_no_number_is_not_the_same_work() -> None:
    pair = {"processes": (1, 2), "steps": (4, 4), "batch": (2, 2)}
    broken = scaling.Comparison(**pair, tokens_per_second=(10.0, 0.0), losses={1: (1.0, 1.0), 2: (1.0, float("nan"))})
    assert not broken.same_work and "nan times" in str(broken)
    assert scaling.Comparison(**pair, tokens_per_second=(10.0, 19.0), losses={1: (0.0, 0.0)}).same_work
