"""Runs side by side, from what their folders say: the settings that differ, losses, scores and the loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import BaseModel

from nbutils import display, platforms, record
from nbutils.config import shown
from nbutils.evaluation.comparison import SHOWN_SCORES
from nbutils.evaluation.scores import Estimate
from nbutils.language import say, tr
from nbutils.record import Evaluation, Facts, RunFolder, Score
from nbutils.tracking import Log, loss_history, read_history, validation_history

TOLERANCE = 0.01  # of the loss: sums in another order differ by a rounding each, 2^-8 of a value in bfloat16
LONGEST = 40  # characters of a setting
PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")  # scores in the figure
MEASURES = (  # facts of lesson 03 in the table
    "examples",
    "steps",
    "trained_tokens",
    "train_seconds",
    "final_loss",
    "validation_loss",
    "best_step",
    "cost",
)


class Run(BaseModel):
    """What a run folder says of its run; empty: not recorded."""

    model: str
    settings: Facts  # profile, model, data, and the values of the profile
    trained: Facts  # the `TrainingFacts` of lesson 03
    evaluation: Evaluation  # of the merged model
    history: Log


Runs = dict[str, Run]  # by name


def load_run(run: RunFolder) -> Run:
    """What a run folder says."""
    facts = run.recorded
    trained = facts.trained.model_dump(exclude_unset=True)
    settings = trained.get("settings", {})
    if settings:
        data = str(trained.get("data_fingerprint"))[:12]
        settings = {"profile": facts.profile, "data": data, **settings, "model": facts.model}
    return Run(
        model=facts.model,
        settings=settings,
        trained=trained,
        evaluation=facts.evaluation,
        history=read_history(run.logs / "history.json"),
    )


def differing(runs: Runs) -> list[str]:
    """The settings that are not the same in all runs that recorded theirs."""
    recorded = [run.settings for run in runs.values() if run.settings]
    names = dict.fromkeys(chain.from_iterable(recorded))
    names.pop("about", None)
    different = []
    for name in names:
        values = {shown(settings.get(name)) for settings in recorded}
        if len(values) > 1:
            different.append(name)
    return different


def plot_runs(runs: Runs, path: Path | None = None) -> None:
    """The loss curves, while training and on held-out rows."""
    panels = {
        tr("training"): {name: loss_history(run.history) for name, run in runs.items()},
        tr("validation"): {name: validation_history(run.history) for name, run in runs.items()},
    }
    display.plot_panels(panels, path)


def show_runs(runs: Runs) -> None:
    """The table, and in a notebook the curves."""
    settings = differing(runs)
    columns = {name: _column(run, settings) for name, run in runs.items()}
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    table = []
    for label in labels:
        row = {"": label}
        for name, column in columns.items():
            row[name] = column.get(label, "-")
        table.append(row)
    title = tr("Runs side by side") if table else tr("Nothing to compare: lesson 03 has not finished in these runs.")
    display.show_table(table, title, display.aligned(table))
    if "data" in settings:
        say("Not all of these runs were trained on the same data: their losses do not compare.")
    if platforms.in_kernel():
        plot_runs(runs)


def _column(run: Run, settings: Sequence[str]) -> dict[str, str]:
    """What is recorded of a run, with these of its settings, by row of the table."""
    column = {}
    for name in settings:
        if run.settings.get(name) is not None:
            column[name] = shown(run.settings[name])[:LONGEST]
    for name in MEASURES:
        if text := record.readable_value(run.trained.get(name)):
            column[tr(record.label(name))] = text
    for name in PANELS:
        score = run.evaluation.scores.get(name, Score()).merged
        if score.mean is not None:
            shown_as = SHOWN_SCORES[name]
            label = tr("merged: {score}", score=tr(shown_as.label))
            column[label] = Estimate(**score.model_dump()).text(shown_as.form)
    verdict = run.evaluation.verdict
    if verdict:
        column[tr("verdict")] = record.outcome(verdict, run.evaluation.general.verdict)
    return column


@dataclass(frozen=True)
class SpeedUp:
    """The same training with one process and with several: what lesson 03 measured of each, and what that says."""

    alone: Facts
    together: Facts
    speedup: float  # the tokens per second of one process
    loss_difference: float  # the largest between two losses of the same step, relative to the loss
    same_work: bool  # equal steps over equally many rows, with equal losses


def speed_up(alone: Path, together: Path) -> SpeedUp:
    """Compare what lesson 03 left in two run folders, of one process and of several.

    Example: compare.speed_up(trials / "alone", trials / "together")
    """
    single = load_run(RunFolder(alone))
    several = load_run(RunFolder(together))
    losses = dict(loss_history(single.history))
    others = dict(loss_history(several.history))
    differences = [abs(losses[step] - others[step]) / (losses[step] or 1e-6) for step in losses.keys() & others.keys()]
    difference = max(differences, default=math.inf)
    same_rows = all(single.trained[name] == several.trained[name] for name in ("steps", "batch"))
    same_log = losses.keys() == others.keys()  # a loss that is not a number is not logged
    return SpeedUp(
        alone=single.trained,
        together=several.trained,
        speedup=round(several.trained["tokens_per_second"] / single.trained["tokens_per_second"], 3),
        loss_difference=difference,
        same_work=same_rows and same_log and difference <= TOLERANCE,
    )
