"""Killed at any moment, nothing that was reported as kept is lost; a resumed run is the run nobody interrupted.

    CHAOS_KILLS=500 CHAOS_SEED=1 pytest -m long tests/test_chaos.py     a longer campaign, or one to be repeated

A training in `chaos_driver` is SIGKILLed again and again; then lesson 03 itself, started as a learner starts it.
"""

import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chaos_driver as driver
import pytest
from safetensors.numpy import load_file
from simulate import ROOT, Machine
from support import wait_for

from nbutils import checkpoints, files

KILLS = int(os.environ.get("CHAOS_KILLS") or 50)
SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**32))
FAULTS = [["vanishing"], ["stale", "errors"], ["dying"]]  # a mount, a disk that forgets, a machine


class Run:
    """One run: starts that are killed, until it is allowed to end."""

    def __init__(self, home: Path, faults: list[str]) -> None:
        self.home, self.faults, self.dice, self.announced, self.found = home, faults, random.Random(SEED), 0, 0
        self.keep, self.scratch = home / "run/checkpoints", home / "scratch"
        home.mkdir()

    def start(self, steps: int) -> subprocess.Popen[bytes]:
        plan = {"steps": steps, "seed": self.dice.randrange(2**32), "faults": self.faults}
        words = [sys.executable, str(ROOT / "tests/chaos_driver.py"), str(self.home), json.dumps(plan)]
        with open(self.home / "output", "wb") as out:
            env = Machine(self.home, {"PYTHONUNBUFFERED": "1"}).environment()
            return subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True)

    def output(self) -> str:
        return (self.home / "output").read_text(encoding="utf-8")

    def kill(self, after: str = "started") -> None:
        """Start, SIGKILL at a moment by chance after these words, and check what is left."""
        found_before, process = self.found, self.start(steps=10**6)
        wait_for(lambda: after in self.output() or process.poll() is not None)
        time.sleep(self.dice.uniform(0, 0.8))
        assert process.poll() is None, self.output()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        said = self.output()
        assert "Traceback" not in said, said
        assert re.findall(r"continuing from step (\d+)", said) in ([], [str(found_before)])
        self.announced = max([self.announced, *map(int, re.findall(r"checkpoint (\d+) is kept", said))])
        if "dying" in self.faults and self.dice.random() < 0.5:
            self.lose_the_machine()
        best = checkpoints.newest_verified([self.keep], driver.FINGERPRINT)
        self.found = best.step if best else 0  # the newest that is whole, and at least what was announced
        assert self.found == max(whole_steps(self.keep), default=0) >= self.announced

    def lose_the_machine(self) -> None:
        """Scratch is gone, and so is what was not uploaded of the newest archive or its manifest."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        newest = max(self.keep.glob("checkpoint-*.tar"), key=lambda path: int(path.stem[11:]), default=None)
        if newest is not None:
            os.truncate(newest, int(newest.stat().st_size * self.dice.choice([0, self.dice.random(), 0.999])))
            if self.dice.random() < 0.3:
                newest.with_suffix(".json").unlink(missing_ok=True)
        self.announced = min(self.announced, max(whole_steps(self.keep), default=0))

    def end(self) -> None:
        """Let it run to its end."""
        process = self.start(self.found + 50)
        assert process.wait(timeout=120) == 0, self.output()
        assert (kept := re.search(r"complete at step (\d+), kept (\d+)", self.output())) and kept[1] == kept[2]


def whole_steps(store: Path) -> set[int]:
    """The checkpoints whose content is right, found without the code under test."""
    return {int(path.stem[11:]) for path in store.glob("checkpoint-*.json") if is_whole(path)}


def is_whole(manifest: Path) -> bool:
    try:
        said, content = json.loads(manifest.read_text()), manifest.with_suffix(".tar").read_bytes()
    except (ValueError, FileNotFoundError):
        return False
    if hashlib.sha256(content).hexdigest() != said["sha256"]:
        return False
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        state, weights = (tar.extractfile(f"{manifest.stem}/{name}") for name in ("state.json", "weights.bin"))
        assert state and weights
        value = driver.state_at(said["step"])
        right = json.load(state) == {"step": said["step"], "value": value}
        return right and weights.read() == random.Random(value).randbytes(driver.SIZE)


@pytest.mark.slow
def test_three_kills_lose_nothing_that_was_announced(tmp_path: Path) -> None:
    print(f"CHAOS_SEED={SEED}")
    run = Run(tmp_path / "home", ["errors"])
    for after in ("started", " is kept ", " is kept "):
        run.kill(after)
    assert run.announced > 0
    run.end()


@pytest.mark.long
def test_a_campaign_of_kills(tmp_path: Path) -> None:
    print(f"CHAOS_SEED={SEED} CHAOS_KILLS={KILLS}")

    def campaign(faults: list[str]) -> None:
        run = Run(tmp_path / faults[0], faults)
        for number in range(KILLS // len(FAULTS)):
            run.kill("started" if number % 2 else " is kept ")
        run.end()

    with ThreadPoolExecutor() as pool:  # side by side: they wait most of the time
        assert len([*pool.map(campaign, FAULTS)]) == len(FAULTS)


# Lesson 03 itself. Losses are means since the last logged step, and a resumed run begins with an empty mean; therefore
# saving steps are logged too. Only an unplanned save (SIGINT) splits the mean of the next logged step in two.

STEPS, SAVE_STEPS, LOGGING_STEPS = 18, 4, 3  # the last two do not divide each other


class Lesson03:
    """One run of lesson 03, started by the same command each time."""

    def __init__(self, home: Path) -> None:
        self.home, self.store = home, home / "tiny/checkpoints"
        home.mkdir()
        text = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
        text = re.sub(r"logging_steps: \d+", f"logging_steps: {LOGGING_STEPS}", text)
        (home / "tiny.yaml").write_text(text.replace("validation_rows: auto", "validation_rows: 4"))

    def start(self) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
        env |= {"NBUTILS_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env |= {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "MPLBACKEND": "agg"}
        words = [sys.executable, str(ROOT / "notebooks/03_qlora.py"), "--PROFILE", str(self.home / "tiny.yaml")]
        words += ["--MAX_STEPS", str(STEPS), "--SAVE_STEPS", str(SAVE_STEPS)]
        with open(self.home / "output", "wb") as out:
            options: dict[str, Any] = {"stdout": out, "stderr": out, "start_new_session": True}
            options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may be ignored here
            return subprocess.Popen(words, env=env, cwd=ROOT, **options)

    def output(self) -> str:
        return (self.home / "output").read_text(encoding="utf-8", errors="replace")

    def interrupt(self, step: int, how: signal.Signals) -> subprocess.Popen[bytes]:
        """Start, and send a signal after the checkpoint of a step was kept."""
        process = self.start()
        while max([0, *map(int, re.findall(r"checkpoint (\d+) is kept", self.output()))]) < step:
            assert process.poll() is None, self.output()[-3000:]
            time.sleep(0.01)
        os.killpg(process.pid, how) if how is signal.SIGKILL else process.send_signal(how)
        process.wait(timeout=120)
        return process

    def complete(self) -> None:
        assert self.start().wait(timeout=300) == 0, self.output()[-3000:]

    def steps(self) -> list[int]:
        return sorted(int(path.stem[11:]) for path in self.store.glob("checkpoint-*.json"))

    def log(self) -> dict[int, list[float]]:
        """What was logged at each step, from the trainer state inside the last archive."""
        with tarfile.open(self.store / f"checkpoint-{STEPS}.tar") as tar:
            state = tar.extractfile(f"checkpoint-{STEPS}/trainer_state.json")
            assert state
            history = [one for one in json.load(state)["log_history"] if "loss" in one]
        return {one["step"]: [one[name] for name in ("loss", "grad_norm", "learning_rate")] for one in history}


@pytest.mark.notebook
@pytest.mark.long
def test_a_run_that_was_ended_killed_and_damaged_is_the_run_nobody_interrupted(tmp_path: Path) -> None:
    whole, run = Lesson03(tmp_path / "whole"), Lesson03(tmp_path / "runs")
    whole.complete()
    expected = whole.log()
    assert set(expected) == {step for step in range(1, STEPS + 1) if not (step % LOGGING_STEPS and step % SAVE_STEPS)}
    assert run.interrupt(SAVE_STEPS, signal.SIGINT).returncode == 1  # Ctrl-C; SIGTERM: test_notebook_runs
    found = re.search(rf"\(SIGINT\)\. Saving at step (\d+) of {STEPS}", run.output())
    assert found and f"safe: checkpoint {found[1]} in " in run.output() and "[FAIL] You stopped" in run.output()
    assert "Traceback" not in run.output()
    run.interrupt(12, signal.SIGKILL)
    assert f"continuing from step {found[1]}," in run.output()
    shutil.rmtree(run.home / ".scratch")  # the next start is on a new machine
    *_, older, newest = run.steps()
    os.truncate(run.store / f"checkpoint-{newest}.tar", 5000)
    run.complete()
    assert f"checkpoint-{newest}.tar: " in run.output() and f"continuing from step {older}," in run.output()
    split = {int(found[1]), min(step for step in expected if step >= int(found[1]))}
    got = run.log()
    assert set(got) - split == set(expected) - split
    for step in set(expected) - split:
        assert got[step] == pytest.approx(expected[step], abs=1e-6), step
    weights, theirs = (load_file(one.home / "tiny/adapter/adapter_model.safetensors") for one in (run, whole))
    assert max(float(abs(weights[name] - theirs[name]).max()) for name in theirs) <= 1e-6
