"""A run that was interrupted and continued is the run that was not: the same losses, the same adapter.

Lesson 03 is started as a learner starts it, killed, disturbed and started again with the same words. Losses are
averages since the last logged step, and a continued run begins with an empty average; therefore saving steps are logged
too. Only a save at a step that nobody planned (SIGTERM) leaves one more logged step, and splits the average of the next
one in two.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbutils import paths

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**32))
STEPS, SAVE_STEPS, LOGGING_STEPS = 30, 5, 3  # the two do not divide each other
TOLERANCE = 1e-6
pytestmark = pytest.mark.notebook


@dataclass
class Training:
    """One run of lesson 03, started by the same command each time."""

    home: Path
    process: subprocess.Popen[bytes] | None = None
    steps: int = STEPS
    resume: str = "auto"

    @property
    def checkpoints(self) -> Path:
        """The store in keep."""
        return self.home / "tiny/checkpoints"

    @property
    def sealed(self) -> Path:
        """The store in scratch."""
        return self.home / ".scratch/tiny/sealed"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the lesson in a process group of its own, one thread, its output added to a file."""
        env = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
        env |= {"NBUTILS_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env["NBUTILS_LIVE_SECONDS"] = "0"  # a line for every step
        env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "WANDB_MODE": "offline", "MPLBACKEND": "agg"}
        words = [sys.executable, str(ROOT / "notebooks/03_qlora.py"), "--PROFILE", str(self.home / "tiny.yaml")]
        words += ["--MAX_STEPS", str(self.steps), "--SAVE_STEPS", str(SAVE_STEPS), "--RESUME", self.resume]
        with open(self.home / "output", "wb") as out:
            self.process = subprocess.Popen(words, env=env, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        return self.process

    def output(self) -> str:
        """What the last start said."""
        return (self.home / "output").read_text(encoding="utf-8", errors="replace")

    def step(self) -> int:
        """The last step it told of; -1 before there is one."""
        return int((re.findall(rf"\bstep (\d+) of {STEPS}\b", self.output()) or [-1])[-1])

    def interrupt(self, step: int, wait: float, how: signal.Signals) -> subprocess.Popen[bytes]:
        """Start, and send a signal to the whole process group a moment after a step."""
        process = self.start()
        while self.step() < step:
            assert process.poll() is None, self.output()[-3000:]
            time.sleep(0.01)
        time.sleep(wait)
        if how is signal.SIGTERM:
            process.send_signal(how)
        else:
            os.killpg(process.pid, how)
        return process

    def kill(self, dice: random.Random, earliest: int, latest: int) -> None:
        """SIGKILL by chance, between two steps, or inside one, or inside its saving."""
        step, wait = dice.randint(earliest, latest), dice.uniform(0, 0.4)
        self.interrupt(step, wait, signal.SIGKILL).wait()
        print(f"killed {wait:.3f} s after step {step}, at {self.step()}; kept are {steps_in(self.checkpoints)}")

    def complete(self) -> None:
        """Start, unless it is running already, and let it end."""
        process = self.process if self.process and self.process.returncode is None else self.start()
        assert process.wait(timeout=300) == 0, self.output()[-3000:]

    def log(self) -> dict[int, dict[str, float]]:
        """What was logged at each step, from the trainer state inside the last kept archive."""
        with tarfile.open(self.checkpoints / f"checkpoint-{STEPS}.tar") as tar:
            state = tar.extractfile(f"checkpoint-{STEPS}/trainer_state.json")
            assert state
            history: list[dict[str, Any]] = [one for one in json.load(state)["log_history"] if "loss" in one]
        assert len({entry["step"] for entry in history}) == len(history)
        return {entry["step"]: entry for entry in history}

    def adapter(self) -> dict[str, Any]:
        """The tensors of the finished adapter."""
        from safetensors.numpy import load_file

        return load_file(self.home / "tiny/adapter/adapter_model.safetensors")


def training_in(home: Path) -> Training:
    """A run of its own, with the tiny profile logging every third step."""
    home.mkdir()
    text = (paths.CONFIGS / "tiny.yaml").read_text(encoding="utf-8")
    text = re.sub(r"logging_steps: \d+", f"logging_steps: {LOGGING_STEPS}", text)
    (home / "tiny.yaml").write_text(text, encoding="utf-8")
    return Training(home)


def steps_in(store: Path) -> list[int]:
    """The steps of the checkpoints of a store that have a manifest."""
    return sorted(int(place.stem.rsplit("-", 1)[1]) for place in store.glob("checkpoint-*.json"))


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two adapters of the same shape."""
    assert set(one) == set(other) and len(one) > 0
    return max(float(abs(one[name] - other[name]).max()) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The run nobody interrupts; it trains beside the first test, which waits for it when it compares."""
    run = training_in(tmp_path_factory.mktemp("whole") / "runs")
    run.start()
    return run


def log_of(whole: Training) -> dict[int, dict[str, float]]:
    """What the uninterrupted run logged: every third step, and the saving steps."""
    if not (whole.home / "tiny/facts.json").exists():
        whole.complete()
    log = whole.log()
    assert set(log) == {*range(LOGGING_STEPS, STEPS + 1, LOGGING_STEPS), *range(SAVE_STEPS, STEPS + 1, SAVE_STEPS)}
    return log


def differing(got: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> set[int]:
    """The steps at which a number of the training differs."""
    numbers = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy")
    return {at for at in expected for name in numbers if abs(got[at][name] - expected[at][name]) > TOLERANCE}


def assert_same(run: Training, whole: Training) -> None:
    """The same steps logged, the same losses, the same adapter."""
    got, expected = run.log(), log_of(whole)
    assert sorted(got) == sorted(expected)
    assert differing(got, expected) == set()
    assert furthest(run.adapter(), whole.adapter()) <= TOLERANCE


def only_the_process_died(run: Training) -> str:
    """What the next start must say when both stores are as they were left."""
    return rf"continuing from step {max(steps_in(run.sealed) + steps_in(run.checkpoints))},"


def damage_the_newest(run: Training, dice: random.Random) -> str:
    """The newest archive is cut off in keep, and in scratch it is gone with the machine or has a flipped byte."""
    newest = max(steps_in(run.checkpoints) + steps_in(run.sealed))
    for archive in (store / f"checkpoint-{newest}.tar" for store in (run.checkpoints, run.sealed)):
        if archive.exists():
            damage(archive, dice)
    if dice.random() < 0.5 and newest in steps_in(run.checkpoints):
        shutil.rmtree(run.home / ".scratch")
    older = [step for step in steps_in(run.checkpoints) if step < newest][-1]
    return rf"(?s)skipping checkpoint-{newest}\S* in .*continuing from step {older},"


def damage(archive: Path, dice: random.Random) -> None:
    """Cut it off, or flip a bit."""
    content = bytearray(archive.read_bytes())
    content[dice.randrange(len(content))] ^= 1
    archive.write_bytes(content if dice.random() < 0.5 else content[: dice.randrange(len(content))])


def test_a_run_killed_twice_is_the_run_nobody_interrupted(whole: Training, tmp_path: Path) -> None:
    dice, run = random.Random(SEED), training_in(tmp_path / "runs")
    print(f"CHAOS_SEED={SEED}")
    run.kill(dice, 6, 14)
    expected = only_the_process_died(run)
    run.kill(dice, 17, 27)
    assert re.search(expected, run.output()), (expected, run.output()[-3000:])
    expected = damage_the_newest(run, dice)
    run.complete()
    assert re.search(expected, run.output()), (expected, run.output()[-3000:])
    assert_same(run, whole)


def test_sigterm_saves_brings_it_home_ends_well_and_the_next_start_goes_on(whole: Training, tmp_path: Path) -> None:
    run = training_in(tmp_path / "runs")
    process, began = run.interrupt(16, 0.0, signal.SIGTERM), time.monotonic()
    assert process.wait(timeout=120) == 0, run.output()[-3000:]
    took, said = time.monotonic() - began, run.output()
    found = re.search(rf"\(SIGTERM\)\. Saving at step (\d+) of {STEPS} and ending here\. (.*)", said)
    assert found, said[-3000:]
    at = int(found[1])
    assert "Run the same notebook again: it continues from here." in found[2]
    assert at >= 16 and f"safe: checkpoint {at} in " in said and "Traceback" not in said
    assert took < 30, f"{took:.0f} s from SIGTERM to the end"
    shutil.rmtree(run.home / ".scratch")  # the next start is on a new machine: keep is all there is
    run.complete()
    assert re.search(rf"continuing from step {at}, kept in \S+/tiny/checkpoints", run.output())
    assert_same_but_the_split_average(run, whole, at)
    assert furthest(run.adapter(), whole.adapter()) <= TOLERANCE


def assert_same_but_the_split_average(run: Training, whole: Training, at: int) -> None:
    """An unplanned save at `at` is logged too; it and the next logged step share what is one average without it."""
    got, expected = run.log(), log_of(whole)
    planned = sorted(expected)
    after = next(step for step in planned if step >= at)
    before = max([step for step in planned if step < at], default=0)
    assert sorted(got) == sorted({*planned, at})
    assert differing(got, expected) <= ({after} if after != at else set())
    parts = (at - before) * got[at]["loss"] + (after - at) * got[after]["loss"]
    assert parts == pytest.approx((after - before) * expected[after]["loss"], abs=1e-5)


def test_a_chosen_checkpoint_becomes_the_adapter_and_can_be_gone_on_from(whole: Training, tmp_path: Path) -> None:
    from safetensors.numpy import load

    log_of(whole)
    shutil.copytree(whole.home, tmp_path / "runs")
    chosen = steps_in(whole.checkpoints)[0]
    with tarfile.open(whole.checkpoints / f"checkpoint-{chosen}.tar") as tar:
        saved = tar.extractfile(f"checkpoint-{chosen}/adapter_model.safetensors")
        assert saved
        weights = load(saved.read())
    run = Training(tmp_path / "runs", steps=chosen, resume=str(chosen))
    run.complete()
    facts = json.loads((run.home / "tiny/facts.json").read_text(encoding="utf-8"))["lessons"]["03_qlora"]
    assert facts["steps"] == facts["planned_steps"] == chosen < STEPS
    assert furthest(run.adapter(), weights) == 0.0
    assert {entry["step"] for entry in history_of(run)} == {step for step in log_of(whole) if step <= chosen}
    run = Training(tmp_path / "runs")
    run.complete()
    assert re.search(rf"continuing from step {chosen},", run.output()), run.output()[-3000:]
    assert_same(run, whole)
    assert {entry["step"]: entry["loss"] for entry in history_of(run)} == {
        step: entry["loss"] for step, entry in run.log().items()
    }


def history_of(run: Training) -> list[dict[str, float]]:
    """The training curve lesson 03 left."""
    entries = json.loads((run.home / "tiny/logs/history.json").read_text(encoding="utf-8"))
    return [entry for entry in entries if "loss" in entry]
