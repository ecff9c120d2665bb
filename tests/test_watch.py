"""watch: what a training left in progress.json, told truthfully whatever became of its process."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ESCAPES, python, refused, steers

from nbutils import watch
from nbutils.files import write_json
from nbutils.tracking import Progress


def leave(folder: Path, process: int = 0, **values: Any) -> None:
    """The progress of a training of this process, in the logs of a run."""
    began = psutil.Process(process or os.getpid()).create_time()
    known: dict[str, Any] = {"state": "training", "step": 7, "steps": 30, "updated": time.time(), "began": began}
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    progress = Progress(**known | {"pid": process or os.getpid()} | values)
    write_json(folder / "logs/progress.json", progress.model_dump())


def state_now() -> str:
    """What became of the training of the run `demo`."""
    _, progress = watch.find_training("demo")
    return progress.state


def test_only_a_training_whose_process_lives_is_training(home: Path) -> None:
    def state(**values: Any) -> str:
        leave(home / "demo", **values)
        return state_now()

    assert state() == "training" and state(updated=0) == "training", "a slow step is no death"
    for ended in ("finished", "stopped", "failed"):
        assert state(state=ended) == ended
    assert state(began=1.0) == "died", "another process has its number now"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert state(process=other.pid) == "training"
        other.kill()
        other.wait()
    assert state_now() == "died"
    assert state(host="another", began=1.0) == "training" and state(host="another", updated=1.0) == "died"


def test_the_one_that_trains_is_watched_else_the_newest_and_the_newer_copy_counts(home: Path) -> None:
    with refused("has left its progress in"):
        watch.find_training("")
    leave(home / "old", state="finished", updated=5.0)
    leave(home / "new", state="stopped", updated=9.0)
    assert [watch.find_training(name)[0] for name in ("", "old")] == [home / "new", home / "old"]
    leave(home / ".scratch/old", step=9)  # on the fast disk; the run folder gets a copy with each checkpoint
    run, progress = watch.find_training("")
    assert (run, progress.step) == (home / "old", 9)
    assert watch.find_training(str(home / "new"))[0] == home / "new"
    leave(home / "new", left=1.0)
    endless = (home / "new/logs/progress.json").read_text().replace('"left": 1.0', '"left": 1e999')
    for damaged in (endless, "{"):
        (home / "new/logs/progress.json").write_text(damaged)
        with refused("training has left its progress in", "new"):
            watch.find_training("new")


def test_everything_is_shown_without_torch_and_a_failure_is_the_exit_status(home: Path) -> None:
    leave(
        home / "demo", state="failed", loss=(7, 1.5), validation=(4, 1.25), cost={"¥": 0.5}, notes=["[FAIL] disk full"]
    )
    ran = python("-X", "importtime", "-m", "nbutils", "watch", "demo", home=home, ok=False)
    assert "torch" not in ran.stderr.replace("pytorch", "") and "| transformers" not in ran.stderr
    for text in ("the training failed (step 7 of 30", "loss 1.500", "1.250 (step 4)", "¥0.50", "[FAIL] disk full"):
        assert text in ran.stdout


@pytest.mark.parametrize("once", [True, False])
def test_a_training_is_followed_until_it_ends(home: Path, capsys: Any, monkeypatch: Any, once: bool) -> None:
    steps = iter([8, 9])

    def later(seconds: float) -> None:
        step = next(steps)
        leave(home / "demo", step=step, state="training" if step < 9 else "finished")

    leave(home / "demo")
    monkeypatch.setattr(watch.time, "sleep", later)
    assert watch.follow("", once) == ("training" if once else "finished")
    shown = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [n for n in (7, 8, 9) if any(f"step {n} of 30" in line for line in shown)] == ([7] if once else [7, 8, 9])


def test_a_planted_run_does_not_steer_the_terminal(home: Path, capsys: Any) -> None:
    leave(home / f"demo{ESCAPES}", state="failed", notes=[f"[FAIL] disk {ESCAPES} full"], cost={ESCAPES: 1.0})
    watch.follow("", once=True)
    shown = capsys.readouterr().out
    assert "demo" in shown and "[FAIL] disk" in shown and not steers(shown)
