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
from nbutils.tracking import Progress, money, trainings

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
        one = self.progress
        if one.state != "training":
            return one.state
        if one.host != socket.gethostname():  # another machine or container: its processes cannot be seen
            return "training" if self.age < SILENT else "silent"
        return "training" if one.alive else "died"

    @property
    def told(self) -> str:
        """The state, for people."""
        one, ago = self.progress, display.clock(self.age)
        about = {"step": one.step, "steps": one.steps, "ago": ago}
        return {
            "training": tr("training (updated {ago} ago)", ago=ago),
            "finished": tr("finished at step {step:,}", step=one.step),
            "stopped": tr("stopped at step {step:,} of {steps:,}; the same lesson continues it", **about),
            "failed": tr("failed at step {step:,} of {steps:,}", **about),
            "died": tr("died at step {step:,} of {steps:,}: its process is gone, no update for {ago}", **about),
            "silent": tr("no update for {ago}; its machine, {host}, is not this one", ago=ago, host=one.host),
        }[self.state]

    def lines(self) -> list[str]:
        """What is known, for people."""
        one, parts = self.progress, self.progress.parts()
        if self.state != "training":
            parts.pop("left", None)
        step = tr("step {step:,} of {steps:,}", step=one.step, steps=one.steps) if one.steps else tr("starting")
        rows = {
            tr("run"): f"{self.run.path}: {self.told}",
            tr("now"): " · ".join([step, display.live_line(parts)]),
            tr("best"): tr("{loss:.3f} (step {step})", step=one.best[0], loss=one.best[1]) if one.best else "",
            tr("cost"): self._cost(),
            tr("saved"): self._checkpoints(),
        }
        lines = [display.pad(name, 10) + text for name, text in rows.items() if text]
        return list(map(printable, lines + one.notes))

    def _cost(self) -> str:
        one = self.progress
        if not one.cost or self.state != "training":
            return money(one.cost)
        return tr("{cost} so far, about {forecast} in the end", cost=money(one.cost), forecast=money(one.forecast))

    def _checkpoints(self) -> str:
        """The kept checkpoints, checked by size and manifest."""
        found = {one.step: checkpoints.defect(one, False) for one in checkpoints.look(self.run.checkpoints)}
        texts = (f"{step} ({problem})" if problem else str(step) for step, problem in found.items())
        return tr("checkpoints of steps {steps}", steps=", ".join(texts)) if found else tr("no checkpoint yet")


def find(name: str) -> Watched:
    """The training of a run (its name or folder); without one that which trains now, or else the newest."""
    folders, given = platforms.folders(platforms.detect()), Path(name).expanduser()
    keep = given.parent if name and given.is_dir() else folders.keep
    found = trainings(folders.scratch, keep, run=given.name or "*")  # copied to the run folder with each checkpoint
    if not found:
        raise CourseError(
            tr("No training of {run} has left its progress in {folder}.", run=name or tr("any run"), folder=keep),
            todo=tr(
                "Name one, set NBUTILS_HOME to the folder of your runs, or start lesson 03; `python -m "
                "nbutils compare` shows finished runs."
            ),
        )
    seen = [Watched(RunFolder(keep / run), progress) for run, progress in found.items()]
    return max(seen, key=lambda one: (one.state == "training", one.progress.updated))


def follow(name: str, once: bool = False) -> str:
    """Show a training until it ends, drawn over in a terminal, else a line per update; how it ended."""
    drawn, shown = 0, 0.0
    while True:
        one = find(name)
        name = name or str(one.run.path)
        over = one.state != "training" or once
        if sys.stdout.isatty():
            columns = shutil.get_terminal_size().columns
            lines = [part for line in one.lines() for part in display.wrap(line, columns - 1)]
            print((f"\x1b[{drawn}A\x1b[J" if drawn else "") + "\n".join(lines), flush=True)
            drawn = len(lines)
        elif over or not shown:
            print(*one.lines(), sep="\n", flush=True)
        elif one.progress.updated != shown:
            print(one.lines()[1], flush=True)
        shown = one.progress.updated
        if over:
            return one.state
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # the watching ends, not the training
            return one.state
