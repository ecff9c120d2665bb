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
        self.home = home
        self.faults = faults
        self.dice = random.Random(SEED)
        self.store = home / "run/checkpoints"
        self.scratch = home / "scratch"
        self.announced = 0  # the newest step that was reported as kept
        self.newest_whole = 0  # the step to continue from
        home.mkdir()

    def start(self, steps: int) -> subprocess.Popen[bytes]:
        plan = {"steps": steps, "seed": self.dice.randrange(2**32), "faults": self.faults}
        script = ROOT / "tests/chaos_driver.py"
        command = [sys.executable, str(script), str(self.home), json.dumps(plan)]
        machine = Machine(self.home, {"PYTHONUNBUFFERED": "1"})
        with open(self.home / "output", "wb") as out:
            return subprocess.Popen(command, env=machine.environment(), stdout=out, stderr=out, start_new_session=True)

    def output(self) -> str:
        return (self.home / "output").read_text(encoding="utf-8")

    def kill(self, after: str = "started") -> None:
        """Start, SIGKILL at a moment by chance after these words, and check what is left."""
        process = self.start(steps=10**6)
        wait_for(lambda: after in self.output() or process.poll() is not None)
        time.sleep(self.dice.uniform(0, 0.8))
        assert process.poll() is None, self.output()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

        output = self.output()
        assert "Traceback" not in output, output
        continued_from = [int(step) for step in re.findall(r"continuing from step (\d+)", output)]
        assert continued_from in ([], [self.newest_whole])
        for kept in re.findall(r"checkpoint (\d+) is kept", output):
            self.announced = max(self.announced, int(kept))
        if "dying" in self.faults and self.dice.random() < 0.5:
            self.lose_the_machine()

        verified = checkpoints.newest_verified([self.store], driver.FINGERPRINT)
        self.newest_whole = verified.step if verified else 0
        assert self.newest_whole == newest_whole_step(self.store)
        assert self.newest_whole >= self.announced

    def lose_the_machine(self) -> None:
        """Scratch is gone, and so is what was not uploaded of the newest archive or its manifest."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        archives = sorted(self.store.glob("checkpoint-*.tar"), key=step_of)
        if archives:
            newest = archives[-1]
            uploaded_share = self.dice.choice([0, self.dice.random(), 0.999])
            os.truncate(newest, int(newest.stat().st_size * uploaded_share))
            if self.dice.random() < 0.3:
                newest.with_suffix(".json").unlink(missing_ok=True)
        self.announced = min(self.announced, newest_whole_step(self.store))

    def end(self) -> None:
        """Let it run to its end."""
        process = self.start(self.newest_whole + 50)
        assert process.wait(timeout=120) == 0, self.output()
        completion = re.search(r"complete at step (\d+), kept (\d+)", self.output())
        assert completion
        assert completion[1] == completion[2]


def step_of(file: Path) -> int:
    """The step in the name of an archive or manifest."""
    return int(file.stem.removeprefix("checkpoint-"))


def newest_whole_step(store: Path) -> int:
    """The newest checkpoint whose content is right, found without the code under test; 0 if there is none."""
    whole = [step_of(manifest) for manifest in store.glob("checkpoint-*.json") if is_whole(manifest)]
    return max(whole, default=0)


def is_whole(manifest: Path) -> bool:
    try:
        promised = json.loads(manifest.read_text())
        archive = manifest.with_suffix(".tar").read_bytes()
    except (ValueError, FileNotFoundError):
        return False
    if hashlib.sha256(archive).hexdigest() != promised["sha256"]:
        return False
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        state = tar.extractfile(f"{manifest.stem}/state.json")
        weights = tar.extractfile(f"{manifest.stem}/weights.bin")
        assert state
        assert weights
        step = promised["step"]
        value = driver.state_at(step)
        if json.load(state) != {"step": step, "value": value}:
            return False
        return weights.read() == driver.weights_of(value)


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
            saves_first = number % 2 == 0
            run.kill(" is kept " if saves_first else "started")
        run.end()

    with ThreadPoolExecutor() as pool:  # side by side: they wait most of the time
        campaigns = [pool.submit(campaign, faults) for faults in FAULTS]
    for ended in campaigns:
        ended.result()  # raises what failed in its thread


# Lesson 03 itself. Losses are means since the last logged step, and a resumed run begins with an empty mean; therefore
# saving steps are logged too. Only an unplanned save (SIGINT) splits the mean of the next logged step in two.

STEPS = 18
SAVE_STEPS = 4
LOGGING_STEPS = 3  # does not divide SAVE_STEPS, nor the other way round


class Lesson03:
    """One run of lesson 03, started by the same command each time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = home / "tiny/checkpoints"
        home.mkdir()
        profile = (files.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
        profile = re.sub(r"logging_steps: \d+", f"logging_steps: {LOGGING_STEPS}", profile)
        profile = profile.replace("validation_rows: auto", "validation_rows: 4")
        (home / "tiny.yaml").write_text(profile)

    def start(self) -> subprocess.Popen[bytes]:
        env = os.environ | {
            "NBUTILS_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline",
            "MPLBACKEND": "agg",
        }
        env.pop("WANDB_API_KEY", None)
        command = [sys.executable, str(ROOT / "notebooks/03_qlora.py"), "--PROFILE", str(self.home / "tiny.yaml")]
        command += ["--MAX_STEPS", str(STEPS), "--SAVE_STEPS", str(SAVE_STEPS)]
        with open(self.home / "output", "wb") as out:
            return subprocess.Popen(
                command,
                env=env,
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
            )

    def output(self) -> str:
        return (self.home / "output").read_text(encoding="utf-8", errors="replace")

    def newest_kept(self) -> int:
        """The newest step that the output reports as kept."""
        kept = re.findall(r"checkpoint (\d+) is kept", self.output())
        return max(map(int, kept), default=0)

    def interrupt(self, step: int, how: signal.Signals) -> subprocess.Popen[bytes]:
        """Start, and send a signal after the checkpoint of a step was kept."""
        process = self.start()
        while self.newest_kept() < step:
            assert process.poll() is None, self.output()[-3000:]
            time.sleep(0.01)
        if how is signal.SIGKILL:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        process.wait(timeout=120)
        return process

    def complete(self) -> None:
        assert self.start().wait(timeout=300) == 0, self.output()[-3000:]

    def steps(self) -> list[int]:
        return sorted(step_of(manifest) for manifest in self.store.glob("checkpoint-*.json"))

    def log(self) -> dict[int, list[float]]:
        """Loss, gradient norm and learning rate at each logged step, from the trainer state in the last archive."""
        with tarfile.open(self.store / f"checkpoint-{STEPS}.tar") as tar:
            state = tar.extractfile(f"checkpoint-{STEPS}/trainer_state.json")
            assert state
            history = json.load(state)["log_history"]
        log = {}
        for entry in history:
            if "loss" in entry:
                log[entry["step"]] = [entry["loss"], entry["grad_norm"], entry["learning_rate"]]
        return log

    def adapter(self) -> dict[str, Any]:
        return dict(load_file(self.home / "tiny/adapter/adapter_model.safetensors"))


@pytest.mark.notebook
@pytest.mark.long
def test_a_run_that_was_ended_killed_and_damaged_is_the_run_nobody_interrupted(tmp_path: Path) -> None:
    uninterrupted = Lesson03(tmp_path / "whole")
    uninterrupted.complete()
    expected = uninterrupted.log()
    logging_steps = range(LOGGING_STEPS, STEPS + 1, LOGGING_STEPS)
    saving_steps = range(SAVE_STEPS, STEPS + 1, SAVE_STEPS)
    assert set(expected) == {*logging_steps, *saving_steps}

    # Ctrl-C is answered with a save. (SIGTERM: test_notebook_runs)
    run = Lesson03(tmp_path / "runs")
    stopped = run.interrupt(SAVE_STEPS, signal.SIGINT)
    assert stopped.returncode == 1
    unplanned_save = re.search(rf"\(SIGINT\)\. Saving at step (\d+) of {STEPS}", run.output())
    assert unplanned_save
    stopped_at = int(unplanned_save[1])
    assert f"safe: checkpoint {stopped_at} in " in run.output()
    assert "[FAIL] You stopped" in run.output()
    assert "Traceback" not in run.output()

    run.interrupt(12, signal.SIGKILL)
    assert f"continuing from step {stopped_at}," in run.output()

    # The next start is on a new machine, and the newest checkpoint is damaged.
    shutil.rmtree(run.home / ".scratch")
    *_, older, newest = run.steps()
    os.truncate(run.store / f"checkpoint-{newest}.tar", 5000)
    run.complete()
    assert f"checkpoint-{newest}.tar: " in run.output()
    assert f"continuing from step {older}," in run.output()

    logged = run.log()
    next_logged = min(step for step in expected if step >= stopped_at)
    split_means = {stopped_at, next_logged}
    comparable_steps = set(expected) - split_means
    assert set(logged) - split_means == comparable_steps
    for step in comparable_steps:
        assert logged[step] == pytest.approx(expected[step], abs=1e-6), step
    weights = run.adapter()
    for name, expected_weight in uninterrupted.adapter().items():
        assert abs(weights[name] - expected_weight).max() <= 1e-6, name
