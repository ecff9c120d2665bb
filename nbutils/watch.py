"""`python -m nbutils watch`: a training seen from another terminal, by its `progress.json`. Loads no torch."""

from __future__ import annotations

import time
from pathlib import Path

import click

from nbutils import display, platforms
from nbutils.errors import CourseError
from nbutils.language import printable, tr
from nbutils.tracking import Progress, State, trainings

PAUSE = 2.0  # seconds between two looks

STATES = {
    "training": "the training goes on",
    "finished": "the training has finished",
    "stopped": "the training has stopped; the same lesson continues it",
    "failed": "the training failed",
    "died": "the training died: its process is gone",
}


def describe_state(progress: Progress) -> str:
    """The state, for people."""
    return tr(
        "{state} (step {step:,} of {steps:,}, updated {ago} ago)",
        state=tr(STATES[progress.state]),
        step=progress.step,
        steps=progress.steps,
        ago=display.clock(progress.age),
    )


def find_training(name: str) -> tuple[Path, Progress]:
    """The folder and training of a run (its name or folder); without one that which trains now, or else the newest."""
    folders = platforms.folders()
    folder = Path(name).expanduser()
    keep = folder.parent if name and folder.is_dir() else folders.keep
    newest = trainings(folders.scratch, keep, run=folder.name or "*")  # copied to the run folder with each checkpoint
    if not newest:
        raise CourseError(
            "No training has left its progress in {folder}.",
            todo="Name a run, set NBUTILS_HOME to the folder of your runs, or start lesson 03.",
            folder=keep / name,
        )
    run, progress = max(newest.items(), key=lambda training: (training[1].state == "training", training[1].updated))
    return keep / run, progress


def _show(run: Path, progress: Progress) -> None:
    """What is known, in place in a terminal."""
    click.clear()  # where this is no terminal, nothing happens
    lines = [
        display.pad(tr("run"), 10) + f"{run}: {describe_state(progress)}",
        display.pad(tr("now"), 10) + display.live_line(progress.parts()),
        *progress.notes,
    ]
    print("\n".join(map(printable, lines)), flush=True)


def follow(name: str, once: bool = False) -> State:
    """Show a training again with each update until it ends; how it ended."""
    shown = None
    while True:
        run, progress = find_training(name)
        name = str(run)
        if progress != shown:
            _show(run, progress)
        shown = progress
        if progress.state != "training" or once:
            return progress.state
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # the watching ends, not the training
            return progress.state
