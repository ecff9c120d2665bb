"""`python -m nbutils watch`: a training seen from another terminal, by its `progress.json`. Loads no torch."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nbutils import checkpoints, display, platforms
from nbutils.errors import CourseError
from nbutils.language import printable, tr
from nbutils.record import RunFolder
from nbutils.tracking import Progress, at_step, money, trainings

PAUSE = 2.0  # seconds between two looks
SILENT = 600.0  # seconds without an update after which a training on another machine is not called training any more


@dataclass(frozen=True)
class Watched:
    """A run and how far its training was when it was looked at."""

    run: RunFolder
    progress: Progress

    @property
    def age(self) -> float:
        """Seconds since the last update."""
        return max(time.time() - self.progress.updated, 0.0)

    @cached_property
    def state(self) -> str:
        """What it wrote last; `died` if its process is gone, `silent` if that cannot be seen and it is long ago."""
        if self.progress.state != "training":
            return self.progress.state
        if self.progress.host != socket.gethostname():  # another machine or container: its processes cannot be seen
            return "training" if self.age < SILENT else "silent"
        return "training" if self.progress.alive else "died"

    def state_text(self) -> str:
        """The state, for people."""
        step = self.progress.step
        steps = self.progress.steps
        ago = display.clock(self.age)
        if self.state == "training":
            return tr("training (updated {ago} ago)", ago=ago)
        if self.state == "finished":
            return tr("finished at step {step:,}", step=step)
        if self.state == "stopped":
            return tr("stopped at step {step:,} of {steps:,}; the same lesson continues it", step=step, steps=steps)
        if self.state == "failed":
            return tr("failed at step {step:,} of {steps:,}", step=step, steps=steps)
        if self.state == "silent":
            return tr("no update for {ago}; its machine, {host}, is not this one", ago=ago, host=self.progress.host)
        return tr(
            "died at step {step:,} of {steps:,}: its process is gone, no update for {ago}",
            step=step,
            steps=steps,
            ago=ago,
        )

    def lines(self) -> list[str]:
        """What is known, for people."""
        progress = self.progress
        numbers = progress.parts()
        if self.state != "training":
            numbers.pop("left", None)
        step = tr("starting")
        if progress.steps:
            step = tr("step {step:,} of {steps:,}", step=progress.step, steps=progress.steps)
        rows = {
            tr("run"): f"{self.run.path}: {self.state_text()}",
            tr("now"): f"{step} · {display.live_line(numbers)}",
        }
        if progress.best:
            rows[tr("best")] = at_step(*progress.best)
        if progress.cost:
            rows[tr("cost")] = self._cost()
        rows[tr("saved")] = self._checkpoints()
        lines = [display.pad(name, 10) + text for name, text in rows.items()]
        return [printable(line) for line in lines + progress.notes]

    def _cost(self) -> str:
        cost = money(self.progress.cost)
        if self.state != "training":
            return cost
        return tr("{cost} so far, about {forecast} in the end", cost=cost, forecast=money(self.progress.forecast))

    def _checkpoints(self) -> str:
        """The kept checkpoints, checked by size and manifest."""
        kept = checkpoints.look(self.run.checkpoints)
        steps = []
        for checkpoint in kept:
            problem = checkpoints.defect(checkpoint, thorough=False)
            steps.append(f"{checkpoint.step} ({problem})" if problem else str(checkpoint.step))
        return tr("checkpoints of steps {steps}", steps=", ".join(steps)) if steps else tr("no checkpoint yet")


def find(name: str) -> Watched:
    """The training of a run (its name or folder); without one that which trains now, or else the newest."""
    folders = platforms.folders(platforms.detect())
    given = Path(name).expanduser()
    keep = given.parent if name and given.is_dir() else folders.keep
    newest = trainings(folders.scratch, keep, run=given.name or "*")  # copied to the run folder with each checkpoint
    if not newest:
        raise CourseError(
            tr("No training of {run} has left its progress in {folder}.", run=name or tr("any run"), folder=keep),
            todo=tr(
                "Name one, set NBUTILS_HOME to the folder of your runs, or start lesson 03; `python -m "
                "nbutils compare` shows finished runs."
            ),
        )
    seen = [Watched(RunFolder(keep / run), progress) for run, progress in newest.items()]
    return max(seen, key=lambda watched: (watched.state == "training", watched.progress.updated))


def follow(name: str, once: bool = False) -> str:
    """Show a training until it ends, drawn over in a terminal, else a line per update; how it ended."""
    drawn_lines = 0
    shown_update = 0.0
    while True:
        watched = find(name)
        name = name or str(watched.run.path)
        is_last = watched.state != "training" or once
        lines = watched.lines()
        if sys.stdout.isatty():
            drawn_lines = _draw_over(lines, drawn_lines)
        elif is_last or not shown_update:
            print("\n".join(lines), flush=True)
        elif watched.progress.updated != shown_update:
            print(lines[1], flush=True)
        shown_update = watched.progress.updated
        if is_last:
            return watched.state
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # the watching ends, not the training
            return watched.state


def _draw_over(lines: list[str], drawn_lines: int) -> int:
    """Draw lines over those drawn before; how many they are in this terminal."""
    columns = shutil.get_terminal_size().columns - 1
    wrapped = [part for line in lines for part in display.wrap(line, columns)]
    if drawn_lines:
        print(f"\x1b[{drawn_lines}A\x1b[J", end="")
    print("\n".join(wrapped), flush=True)
    return len(wrapped)
