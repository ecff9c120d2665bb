"""`python -m nbutils watch`: a training seen from another terminal, by its `progress.json`. Loads no torch."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import click

from nbutils import checkpoints, display, platforms
from nbutils.errors import CourseError
from nbutils.language import printable, tr
from nbutils.record import RunFolder
from nbutils.tracking import Progress, State, trainings

PAUSE = 2.0  # seconds between two looks
SILENT = 600.0  # seconds without an update after which a training on another machine is taken for dead

STATES = {
    "training": "the training goes on",
    "finished": "the training has finished",
    "stopped": "the training has stopped; the same lesson continues it",
    "failed": "the training failed",
    "died": "the training died: its process is gone",
}


@dataclass(frozen=True)
class Watched:
    """A run and how far its training was when it was looked at."""

    run: RunFolder
    progress: Progress

    @property
    def age(self) -> float:
        """Seconds since the last update."""
        return max(time.time() - self.progress.updated, 0.0)

    @property
    def state(self) -> State:
        """What it wrote last; `died` if its process is gone, or silent for long where that cannot be seen from here."""
        if self.progress.state != "training":
            return self.progress.state
        is_here = self.progress.host == socket.gethostname()
        lives = self.progress.alive if is_here else self.age < SILENT
        return "training" if lives else "died"

    def state_text(self) -> str:
        """The state, for people."""
        return tr(
            "{state} (step {step:,} of {steps:,}, updated {ago} ago)",
            state=tr(STATES[self.state]),
            step=self.progress.step,
            steps=self.progress.steps,
            ago=display.clock(self.age),
        )

    def lines(self) -> list[str]:
        """What is known, for people."""
        numbers = self.progress.parts()
        if self.state != "training":
            numbers.pop("time left", None)
        rows = {
            tr("run"): f"{self.run.path}: {self.state_text()}",
            tr("now"): display.live_line(numbers),
        }
        kept = checkpoints.look(self.run.checkpoints)
        if kept:
            steps = ", ".join(str(checkpoint.step) for checkpoint in kept)
            rows[tr("saved")] = tr("checkpoints of steps {steps}", steps=steps)
        lines = [display.pad(name, 10) + text for name, text in rows.items()]
        return [printable(line) for line in lines + self.progress.notes]


def find_training(name: str) -> Watched:
    """The training of a run (its name or folder); without one that which trains now, or else the newest."""
    folders = platforms.folders(platforms.detect())
    folder = Path(name).expanduser()
    keep = folder.parent if name and folder.is_dir() else folders.keep
    newest = trainings(folders.scratch, keep, run=folder.name or "*")  # copied to the run folder with each checkpoint
    if not newest:
        raise CourseError(
            tr("No training of {run} has left its progress in {folder}.", run=name or tr("any run"), folder=keep),
            todo=tr("Name a run, set NBUTILS_HOME to the folder of your runs, or start lesson 03."),
        )
    seen = [Watched(RunFolder(keep / run), progress) for run, progress in newest.items()]
    return max(seen, key=lambda watched: (watched.state == "training", watched.progress.updated))


def follow(name: str, once: bool = False) -> State:
    """Show a training again with each update until it ends, in place in a terminal; how it ended."""
    shown = None
    while True:
        watched = find_training(name)
        name = name or str(watched.run.path)
        is_last = watched.state != "training" or once
        if is_last or watched.progress != shown:
            click.clear()  # where this is no terminal, nothing happens
            print("\n".join(watched.lines()), flush=True)
        shown = watched.progress
        if is_last:
            return watched.state
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # the watching ends, not the training
            return watched.state
