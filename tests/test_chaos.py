"""Killed at any moment, nothing that was announced is lost: a training in `chaos_driver` is SIGKILLed again and again.

    CHAOS_KILLS=500 CHAOS_SEED=1 pytest tests/test_chaos.py     a longer campaign, or one to be seen again

Then the faults of a network disk (S8), one by one, each in a process of its own with a clean environment. The campaign
is marked `notebook`, not because it is one but because it takes as long; kills of lesson 03 itself are in test_resume.
"""

from __future__ import annotations

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
import textwrap
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import chaos_driver as driver
import pytest
from simulate import ROOT, Machine

from nbutils import checkpoints

KILLS = int(os.environ.get("CHAOS_KILLS") or 50)
SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**32))
RUNS: dict[str, list[str]] = {
    "a quiet disk": [],
    "a disk with errors": ["errors"],
    "a mount that comes and goes": ["vanishing"],
    "a disk that forgets": ["stale", "errors"],
    "machines that die": ["dying"],  # scratch gone, and the newest archive was not uploaded yet
}
PHASES = ("restoring", "training", "saving", *driver.CARRIER_PHASES)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: where it landed, what had been announced as kept, and what a restore finds afterwards."""

    run: str
    phases: tuple[str, str]
    announced: int
    found: int
    whole: set[int]  # in scratch or keep, by the test's own reckoning
    in_keep: set[int]


@dataclass
class Campaign:
    """All kills, and what the last start of each run said."""

    kills: list[Kill] = field(default_factory=list)
    restarts: list[tuple[int, str]] = field(default_factory=list)  # what a restore found, what the next start said
    ends: dict[str, tuple[int, str]] = field(default_factory=dict)


class Run:
    """One run: starts that are killed, until it is allowed to end."""

    def __init__(self, name: str, home: Path, dice: random.Random) -> None:
        self.name, self.home, self.dice, self.announced, self.found = name, home, dice, 0, 0
        self.keep, self.scratch = home / "run/checkpoints", home / "scratch"
        self.stores = [self.scratch / "run/sealed", self.keep]
        home.mkdir()

    def start(self, steps: int) -> subprocess.Popen[bytes]:
        """Start the training in a process group of its own, its output in a file."""
        plan = {"steps": steps, "seed": self.dice.randrange(2**32), "faults": RUNS[self.name]}
        words = [sys.executable, str(ROOT / "tests/chaos_driver.py"), str(self.home), json.dumps(plan)]
        (self.home / "phase").unlink(missing_ok=True)
        with open(self.home / "output", "wb") as out:
            env = Machine(self.home, {"PYTHONUNBUFFERED": "1"}).environment()
            return subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True)

    def output(self) -> str:
        """What the last start said."""
        return (self.home / "output").read_text(encoding="utf-8")

    def kill(self, target: str | None) -> Kill:
        """Start, wait for a moment by chance (inside a phase if one is wanted), SIGKILL, and look at what is left."""
        process = self.start(steps=10**6)
        time.sleep(self.dice.uniform(0, 0.8 if target != "restoring" else 0))
        self.wait_for(target, process)
        assert process.poll() is None, self.output()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.announced = max([self.announced, *map(int, re.findall(r"checkpoint (\d+) is kept", self.output()))])
        if "dying" in RUNS[self.name] and self.dice.random() < 0.5:
            self.die()
        return self.look()

    def wait_for(self, target: str | None, process: subprocess.Popen[bytes]) -> None:
        """Until one of the threads is in that phase, at most 2 s; the kill comes a little later."""
        end = time.monotonic() + 2
        while target and target not in driver.read_phases(self.home / "phase") and time.monotonic() < end:
            time.sleep(0.0003)
        time.sleep(self.dice.uniform(0, 0.004) if target else 0)

    def die(self) -> None:
        """The machine is gone: its scratch, and what was not uploaded of the newest archive or its manifest."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        newest = max(self.keep.glob("checkpoint-*.tar"), key=lambda place: int(place.stem[11:]), default=None)
        if newest is not None:
            os.truncate(newest, int(newest.stat().st_size * self.dice.choice([0, self.dice.random(), 0.999])))
            if self.dice.random() < 0.3:
                newest.with_suffix(".json").unlink(missing_ok=True)
        self.announced = min(self.announced, max(whole_steps([self.keep]), default=0))

    def look(self) -> Kill:
        """What a restore would take now, and what it may take by the test's own reckoning."""
        with redirect_stdout(io.StringIO()):
            best = checkpoints.newest_verified(self.stores, driver.MARK)
        self.found = best.step if best else 0
        phases = driver.read_phases(self.home / "phase")
        return Kill(self.name, phases, self.announced, self.found, *map(whole_steps, (self.stores, [self.keep])))

    def end(self) -> tuple[int, str]:
        """Let it run to its end."""
        process = self.start(self.found + 50)
        return process.wait(timeout=120), self.output()


def whole_steps(stores: list[Path]) -> set[int]:
    """The checkpoints whose content is right, found without the code under test."""
    return {int(place.stem[11:]) for store in stores for place in store.glob("checkpoint-*.json") if is_whole(place)}


def is_whole(manifest: Path) -> bool:
    """Whether a manifest can be read, its archive has that checksum, and the state inside is the one of that step."""
    try:
        said, payload = json.loads(manifest.read_text()), manifest.with_suffix(".tar").read_bytes()
    except (ValueError, FileNotFoundError):
        return False
    if hashlib.sha256(payload).hexdigest() != said["sha256"]:
        return False
    with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
        state, weights = (tar.extractfile(f"{manifest.stem}/{name}") for name in ("state.json", "weights.bin"))
        assert state and weights
        value = driver.state_at(said["step"])
        right = json.load(state) == {"step": said["step"], "value": value}
        return right and weights.read() == random.Random(value).randbytes(driver.SIZE)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """Every run killed its share of times, then ended; every other kill waits for the phase that was hit least."""
    dice, whole, began = random.Random(SEED), Campaign(), time.monotonic()
    print(f"CHAOS_SEED={SEED} CHAOS_KILLS={KILLS}")
    hits: Counter[str] = Counter()
    for number, name in enumerate(RUNS):
        run = Run(name, tmp_path_factory.mktemp("chaos") / "home", dice)
        for one in range(number, KILLS, len(RUNS)):
            found = run.found
            target = min(dice.sample(PHASES, len(PHASES)), key=hits.__getitem__) if one % 2 else None
            whole.kills.append(run.kill(target))
            whole.restarts.append((found, run.output()))
            hits.update(whole.kills[-1].phases)
        whole.ends[name] = run.end()
    print(f"{len(whole.kills)} kills in {time.monotonic() - began:.0f} s")
    for number, thread in enumerate(("training", "carrier")):
        print(f"the {thread} thread was {dict(Counter(kill.phases[number] for kill in whole.kills))}")
    return whole


@pytest.mark.notebook
def test_what_was_announced_as_kept_is_found_after_every_kill(campaign: Campaign) -> None:
    assert len(campaign.kills) == KILLS
    assert [kill for kill in campaign.kills if kill.found < kill.announced] == []
    assert [kill for kill in campaign.kills if max(kill.in_keep, default=0) < kill.announced] == []
    assert max(kill.announced for kill in campaign.kills) > 0


@pytest.mark.notebook
def test_only_what_is_whole_is_found_and_the_newest_of_it(campaign: Campaign) -> None:
    assert [kill for kill in campaign.kills if kill.found != max(kill.whole, default=0)] == []


@pytest.mark.notebook
def test_every_start_continues_from_what_was_found(campaign: Campaign) -> None:
    said = [(found, re.findall(r"continuing from step (\d+)", output)) for found, output in campaign.restarts]
    assert [one for one in said if one[1] and one[1] != [str(one[0])]] == []
    assert not [output for _, output in campaign.restarts if "WRONG" in output or "Traceback" in output]
    assert sum(bool(steps) for _, steps in said) >= len(said) // 3  # the others were killed before they said it


@pytest.mark.notebook
def test_every_run_completes_in_the_end(campaign: Campaign) -> None:
    assert set(campaign.ends) == set(RUNS)
    for status, output in campaign.ends.values():
        assert status == 0, output
        assert (kept := re.search(r"complete at step (\d+), kept (\d+)", output)) and kept[1] == kept[2], output


@pytest.mark.notebook
def test_the_kills_landed_in_every_phase(campaign: Campaign) -> None:
    if 5 * len(PHASES) <= KILLS:  # fewer are no promise
        assert set(PHASES) <= {name for kill in campaign.kills for name in kill.phases}


PRELUDE = """
import errno, os, shutil, signal, time
from pathlib import Path
import chaos_driver as driver
from nbutils import checkpoints
from nbutils.checkpoints import archive, carrier

carrier.FIRST_PAUSE, carrier.LONGEST_PAUSE = 0.05, 0.1
home = Path.cwd()
keep, sealed = home / "mount/run/checkpoints", home / "scratch/sealed"
keep.parent.mkdir(parents=True)
broken, takes = [], []

def fault(place):
    if broken and home / "mount" in Path(place).parents:
        broken[0](place)

def slow_open(place, mode="r", **options):
    if "w" not in mode:
        return open(place, mode, **options)
    fault(place)
    return driver.SlowFile(open(place, mode, **options), lambda: fault(place))

def carry(*steps, wait=0.4):
    for step in steps:
        folder = driver.save(home / f"trainer/checkpoint-{step}", step, driver.state_at(step))
        began = time.monotonic()
        way_home.take(folder)
        takes.append(time.monotonic() - began)
        time.sleep(wait)
        for line in way_home.messages():
            print(line, flush=True)

def unplug():
    (home / "scratch/logs").mkdir()
    (home / "scratch/logs/events").write_text("loss")
    def gone(place):
        raise OSError(errno.ENOTCONN, "not mounted any more")
    broken.append(gone)
    os.rename(home / "mount", home / "elsewhere")
    (home / "mount").mkdir()

def settle():
    while way_home.waiting is not None:
        time.sleep(0.01)

archive.open = slow_open
route = checkpoints.Route(sealed, keep, 3, lambda: fault(keep))
way_home = checkpoints.Carrier(route, driver.MARK, (home / "scratch/logs", home / "mount/run/logs"))
carry(10)
settle()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a carrier on it that has brought checkpoint 10 home."""
    return Machine(tmp_path, {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PYTHONUNBUFFERED": "1"})


def carry_on(machine: Machine, code: str, status: int = 0) -> str:
    """What the machine says after the prelude and this code."""
    ran = machine.python("-c", PRELUDE + textwrap.dedent(code), timeout=60)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout


FAULTS = {
    "S8a the endpoint is not connected": "raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))",
    "S8b the quota of operations is used up": "raise OSError(errno.EIO, os.strerror(errno.EIO))",
    "S8e the disk is full": "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))",
    "files that were there are not found": "raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))",
}


@pytest.mark.parametrize("raising", FAULTS.values(), ids=FAULTS)
def test_a_keep_that_fails_costs_one_line_and_is_caught_up_with(machine: Machine, raising: str) -> None:
    said = carry_on(
        machine,
        f"""
        def slowly_fail(place):
            time.sleep(0.6)
            {raising}
        broken.append(slowly_fail)
        carry(20, 30, 40)
        print("training goes on", way_home.problem is not None)
        broken.clear()
        kept = way_home.finish(patience=20, bar=False)
        print("slowest take", max(takes), "kept", kept.step)
        """,
    )
    before, after = said.split("training goes on True")
    assert before.count("[WARN]") == 1 and "Training goes on" in before and "works again" not in before
    assert after.count("works again") == 1 and "checkpoint 40 is kept" in after and "[WARN]" not in after
    assert float(re.findall(r"slowest take (\S+) kept 40", said)[0]) < 0.3
    assert {10, 40} <= whole_steps([machine.root / "mount/run/checkpoints"])


def test_s8d_a_file_that_stays_the_old_one_is_noticed(machine: Machine) -> None:
    said = carry_on(
        machine,
        """
        keep.joinpath("checkpoint-20.tar").write_bytes(b"of an earlier attempt")
        keep.joinpath("checkpoint-20 (1).tar").write_bytes(b"a duplicate")
        keep.joinpath("checkpoint-20 (1).json").write_text('{"step": 20, "size": 11, "sha256": "", "fingerprint": {}}')
        unlink = Path.unlink
        Path.unlink = lambda place, missing_ok=False: None if place.parent == keep else unlink(place, missing_ok)
        archive.open = lambda place, mode="r", **options: open(
            os.devnull if "w" in mode and Path(place).parent == keep else place, mode, **options)
        carry(20)
        print("no manifest yet", not keep.joinpath("checkpoint-20.json").exists())
        Path.unlink, archive.open = unlink, open
        print("kept", way_home.finish(patience=20, bar=False).step)
        print("restore", checkpoints.newest_verified([keep], driver.MARK).step)
        """,
    )
    before, after = said.split("no manifest yet True")
    assert (
        before.count("[WARN]") == 1 and "the copy does not verify" in before and "checkpoint 20 is kept" not in before
    )
    assert "works again" in after and "kept 20" in after and "restore 20" in after
    assert "skipping checkpoint-20 (1): its manifest cannot be used" in after
    assert whole_steps([machine.root / "mount/run/checkpoints"]) == {10, 20}


def test_s8c_what_was_not_uploaded_when_the_machine_died_is_skipped(machine: Machine) -> None:
    said = carry_on(
        machine,
        """
        carry(20, 30)
        settle()
        shutil.rmtree(home / "scratch")
        os.truncate(keep / "checkpoint-30.tar", 0)
        print("restore", checkpoints.newest_verified([sealed, keep], driver.MARK).step)
        """,
    )
    assert "checkpoint 30 is kept" in said
    assert re.search(r"skipping checkpoint-30.tar in \S+: 0 bytes, [\d,]+ expected: cut off or still uploading", said)
    assert said.endswith("restore 20\n")


def test_killed_between_the_archive_and_its_manifest(machine: Machine) -> None:
    carry_on(
        machine,
        """
        seal = archive._seal
        archive._seal = lambda one: os.kill(os.getpid(), signal.SIGKILL) if one.archive.parent == keep else seal(one)
        carry(20, wait=30)
        """,
        status=-signal.SIGKILL,
    )
    keep, sealed = machine.root / "mount/run/checkpoints", machine.root / "scratch/sealed"
    assert (keep / "checkpoint-20.tar").stat().st_size == (sealed / "checkpoint-20.tar").stat().st_size
    with redirect_stdout(io.StringIO()) as said:
        found = [checkpoints.newest_verified(stores, driver.MARK) for stores in ([sealed, keep], [keep])]
    assert [one and one.step for one in found] == [20, 10]
    assert "skipping checkpoint-20.tar: it has no manifest, so its copy was never finished" in said.getvalue()


def test_a_mount_that_vanishes_is_left_alone_until_it_is_back(machine: Machine) -> None:
    said = carry_on(
        machine,
        """
        unplug()
        carry(20)
        print("untouched", not list((home / "mount").iterdir()))
        (home / "mount").rmdir()
        os.rename(home / "elsewhere", home / "mount")
        broken.clear()
        print("kept", way_home.finish(patience=20, bar=False).step, (home / "mount/run/logs/events").read_text())
        """,
    )
    assert said.count("[WARN]") == 1 and "not mounted any more" in said and "untouched True" in said
    assert "works again" in said and "kept 20 loss" in said


def test_a_mount_that_vanishes_when_all_is_kept_costs_the_logs_only(machine: Machine) -> None:
    said = carry_on(
        machine,
        """
        unplug()
        print("kept", way_home.finish(patience=1, bar=False).step)
        print("untouched", not list((home / "mount").iterdir()))
        """,
    )
    assert "kept 10" in said and "untouched True" in said
    assert said.count("[WARN]") == 1 and "logs" in said


NEVER = {
    "at once": "raise OSError(errno.EIO, os.strerror(errno.EIO))",
    "after a while of copying": "time.sleep(0.1); written.append(1); len(written) % 5 or os.write(-1, b'')",
}


@pytest.mark.parametrize("raising", NEVER.values(), ids=NEVER)
def test_a_keep_that_never_works_ends_the_patience_with_a_way_on(machine: Machine, raising: str) -> None:
    said = carry_on(
        machine,
        f"""
        written = []
        archive.CHUNK = 2**19
        def fail(place):
            {raising}
        broken.append(fail)
        carry(20)
        began = time.monotonic()
        try:
            way_home.finish(patience=1.5, bar=False)
        except checkpoints.carrier.CourseError as problem:
            print("after", time.monotonic() - began)
            print(problem)
        broken.clear()
        print("again", way_home.finish(patience=20, bar=False).step)
        """,
    )
    assert 1.4 < float(re.findall(r"after (\S+)", said)[0]) < 20
    assert f"could not be brought to {machine.root / 'mount/run/checkpoints'}" in said and "To do:" in said
    assert str(machine.root / "scratch/sealed/checkpoint-20.tar") in said and "again 20" in said


def test_a_carrier_that_is_replaced_gives_its_copy_up(machine: Machine) -> None:
    said = carry_on(
        machine,
        """
        archive.CHUNK = 2**17
        broken.append(lambda place: time.sleep(0.25))  # 2 MiB take 8 s
        carry(20)
        checkpoints.end_earlier(sealed)  # as the cell does when it is run again
        print("still there", way_home._thread.is_alive(), *checkpoints.look(keep)[1])
        """,
    )
    assert "still there False skipping checkpoint-20.tar: it has no manifest" in said


def test_k6_a_full_output_folder_is_caught_up_with_once_there_is_room(machine: Machine) -> None:
    keep = machine.root / "mount"
    keep.mkdir()
    mount = f"mount -t tmpfs -o size=6m tmpfs {keep}"
    if os.getuid() or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and a mount namespace")
    code = """
        (home / "mount/big").write_bytes(b"x" * 3 * 2**20)
        carry(20)
        print("full", way_home.problem is not None)
        (home / "mount/big").unlink()
        print("kept", way_home.finish(patience=20, bar=False).step)
        """
    words = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c"]
    words += [PRELUDE + textwrap.dedent(code)]
    ran = subprocess.run(words, env=machine.environment(), cwd=machine.root, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("[WARN]") == 1 and "GiB free" in ran.stdout and "full True" in ran.stdout
    assert "works again" in ran.stdout and "kept 20" in ran.stdout
