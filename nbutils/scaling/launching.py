"""Starting a lesson as one process or several: how many, with which words, its output shown as it comes.

Not here: what the processes do once they run (processes).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbutils.dashboard import LIVE_LINE
from nbutils.errors import CourseError
from nbutils.hardware import Choice, ask_driver
from nbutils.masking import mask_secrets
from nbutils.paths import NOTEBOOKS
from nbutils.scaling.processes import launched

ON_CPU = 2  # processes where there is no card
SAVING_SECONDS = "600"  # what the launcher gives a training that was asked to end; its own 30 s may be less than a step
# Of a launched lesson, the lines worth reading in the lesson that launched it.
CALM = re.compile(
    rf"{LIVE_LINE.pattern}|\[FAIL\]|resuming |starting at step|checkpoint \d+ is kept|safe: |Nothing is left|Lesson "
)
PROGRESS = re.compile(r"\d%\|")
LAUNCHER_ENDS = re.compile(r"elastic/multiprocessing/api\.py:\d+\] failed")  # from here on it speaks of itself


def processes_for(cards: int, asked: int = 0) -> Choice:
    """How many processes train together: one for each card, or two on the CPU, unless the learner says otherwise."""
    if cards and asked > cards:
        raise CourseError(
            f"PROCESSES is {asked}, and there {'is 1 card' if cards == 1 else f'are {cards} cards'}.",
            "one process for each card", f"choose at most {cards}, or 0 for all",
        )  # fmt: skip
    if asked:
        return Choice(asked, "parameter PROCESSES")
    if not cards:
        return Choice(ON_CPU, "no card: a core each plays the part of a card")
    if cards == 1:
        return Choice(1, "this machine has one card, so this is lesson 03 as you know it; with two it would use both")
    return Choice(cards, f"one for each of the {cards} cards")


def cards_in_machine() -> int:
    """How many cards the driver lists, also those torch was not shown; 0 where there is no driver to ask."""
    return sum(line.startswith("GPU ") for line in ask_driver("-L").splitlines())


def hint(seen: int) -> str:
    """What a lesson that trains with one process says on a machine with several cards; empty elsewhere."""
    cards = cards_in_machine() if seen and not launched() else 0
    if cards <= max(seen, 1):
        return ""
    return (
        f"cards     {cards} are here, and this lesson uses one. Lesson 06 trains on all of them, as does\n"
        f"          torchrun --nproc_per_node={cards} {NOTEBOOKS / '03_qlora.py'}"
    )


def command_line(script: Path, values: dict[str, Any], processes: int) -> list[str]:
    """The words that start a lesson as a script, with one process or with several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [sys.executable, *(launcher if processes > 1 else []), str(script), *words]


def launch(
    script: Path, values: dict[str, Any], keep: Path, processes: int = 1, threads: int = 0, calm: bool = False
) -> None:
    """Run a lesson as a script, its output shown as it comes, or with `calm` the lines that tell how far it is.

    `threads` limits each process; 0 leaves it to torch.
    """
    env = os.environ | {"NBUTILS_HOME": str(keep), "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
    threads = threads or (max((os.cpu_count() or 1) // processes, 1) if processes > 1 else 0)
    env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SAVING_SECONDS} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    command = command_line(script, values, processes)
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with child, _sigterm_goes_to(child) as asked_to_end:
        tail = _show(child, calm)
    if asked_to_end:
        raise CourseError(
            f"the machine asked lesson {script.stem} to end (SIGTERM); what it had trained until then is saved.",
            "a machine that stays", "run this notebook again, unchanged: it goes on from there",
        )  # fmt: skip
    if child.returncode != 0:
        raise CourseError(
            f"lesson {script.stem} failed (exit status {child.returncode}):\n" + "\n".join(tail),
            "a lesson that runs to its end",
            f"open {script.stem}.ipynb and run it on its own; the first error there is the cause",
        )  # fmt: skip


def _show(child: subprocess.Popen[str], calm: bool) -> list[str]:
    """Print what a process says, line by line, and return its last words, without what its launcher adds to them."""
    assert child.stdout
    tail: list[str] = []
    over = False
    try:
        for line in filter(str.strip, child.stdout):
            over = over or LAUNCHER_ENDS.search(line) is not None
            if over:
                continue
            tail = [*tail[-14:], line.rstrip()]
            if calm and not CALM.match(line):
                continue
            moving = PROGRESS.search(line) is not None  # a bar is drawn over itself, as it was meant
            print(f"\r  | {mask_secrets(line.rstrip())}", end="" if moving else "\n", flush=True)
    except BaseException:  # the stop button: what was started here must not train on alone
        child.terminate()
        raise
    return tail


@contextmanager
def _sigterm_goes_to(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Within this block SIGTERM asks the child to save and end; the list says that one came."""
    came: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        child.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
