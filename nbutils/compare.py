"""Runs side by side, from what their folders say: the settings that differ, losses, scores and the loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import display, platforms, record
from nbutils.config import shown
from nbutils.errors import CourseError
from nbutils.evaluation.comparison import SHOWN
from nbutils.evaluation.scores import Estimate
from nbutils.language import joined, tr
from nbutils.models import find_shape
from nbutils.plan.forecast import recipe_of
from nbutils.plan.speed import RAM_LINK, sent_bytes
from nbutils.record import Facts, RunFolder
from nbutils.tracking import Log, loss_history, money, read_history, validation_history

TOLERANCE = 0.01  # of the loss: sums in another order differ by a rounding each, 2^-8 of a value in bfloat16
MOST_RUNS = 4  # that lesson 03 shows
LONGEST = 40  # characters of a setting
PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")  # scores in the figure
MEASURES = {  # rows of the table: the name of a fact, and its format
    "examples": ("examples", ","),
    "steps": ("steps", ","),
    "answer tokens in the data": ("trained_tokens", ","),
    "seconds": ("train_seconds", ",.0f"),
    "last train loss": ("final_loss", ".4f"),
    "validation loss, last": ("last", ".4f"),
    "validation loss, best": ("best", ".4f"),
    "best step": ("best_step", ","),
}


@dataclass(frozen=True)
class Run:
    """What a run folder says of its run; empty: not recorded."""

    folder: str
    model: str
    settings: Facts  # profile, model, data, and the values of the profile
    trained: Facts  # the `TrainingFacts` of lesson 03
    scores: dict[str, dict[str, float | None]]  # of the merged model: mean, low and high
    verdict: str
    general: str  # the verdict on general knowledge
    history: Log


Runs = dict[str, Run]  # by name


def of_names(names: Sequence[str]) -> Runs:
    """Runs by name, or by the path of their folders."""
    runs = {name: load(record.find(name).path) for name in names}
    if len(runs) < 2:
        raise CourseError(
            tr("Named: {count} runs.", count=len(runs)),
            todo=tr("Name two runs, or the paths of their folders."),
        )
    return runs


def load(folder: Path, measured: Facts | None = None) -> Run:
    """Read a run folder; `measured`, what lesson 03 is about to record, takes the place of what is there."""
    run = RunFolder(folder)
    facts = record.load(run.facts)
    trained = facts.lessons.trained.model_dump(exclude_unset=True)
    for name, value in (measured or {}).items():
        if value is not None:
            trained[name] = value
    settings = trained.pop("settings", {})
    if settings:
        data = str(trained.get("data_fingerprint"))[:12]
        settings = {"profile": facts.profile, "data": data, **settings, "model": facts.model}
    evaluation = record.Evaluation() if run.merge_is_outdated else facts.lessons.merged.evaluation
    return Run(
        folder=str(folder),
        model=facts.model,
        settings=settings,
        trained=trained,
        scores={name: score.merged.model_dump() for name, score in evaluation.scores.items()},
        verdict=evaluation.verdict,
        general=evaluation.general.verdict,
        history=read_history(run.logs / "history.json"),
    )


def differing(runs: Runs) -> list[str]:
    """The settings that are not the same in all runs that recorded theirs."""
    recorded = [run.settings for run in runs.values() if run.settings]
    names = dict.fromkeys(name for settings in recorded for name in settings if name != "about")
    return [name for name in names if any(settings.get(name) != recorded[0].get(name) for settings in recorded)]


def plot(runs: Runs, path: Path | None = None) -> None:
    """The loss curves, one color for each run: light while training, bold on held-out rows."""
    figure, axes = display.pyplot().subplots(figsize=(8, 4))
    for number, (name, run) in enumerate(runs.items()):
        color = f"C{number}"
        axes.plot(*zip(*loss_history(run.history), strict=True), color=color, lw=1.2, alpha=0.4)
        axes.plot(*zip(*validation_history(run.history), strict=True), color=color, lw=2.6, label=name)
    axes.set(
        title=tr("Loss: light while training, bold on held-out rows"),
        xlabel=tr("step"),
        ylabel=tr("loss"),
    )
    axes.legend(frameon=False)
    figure.tight_layout()
    display.show_figure(figure, path)


def show(runs: Runs) -> None:
    """The table, and in a notebook the curves."""
    settings = differing(runs)
    columns = {name: _column(run, settings) for name, run in runs.items()}
    table = []
    for label in next(iter(columns.values())):
        cells = {name: column[label] or "-" for name, column in columns.items()}
        if set(cells.values()) != {"-"}:
            table.append({"": label} | cells)
    display.show_table(table, tr("Runs side by side"), display.aligned(table))
    fingerprints = {run.trained.get("data_fingerprint") for run in runs.values()}
    if len(fingerprints - {None}) > 1:
        print(tr("Not all of these runs were trained on the same data: their losses do not compare."))
    if platforms.in_kernel():
        plot(runs)


def _column(run: Run, settings: Sequence[str]) -> dict[str, str]:
    """A run by row of the table, with these of its settings; empty: not recorded."""
    column = {}
    for name in settings:
        value = run.settings.get(name)
        column[name] = "" if value is None else shown(value)[:LONGEST]
    column |= _measures(run)
    column |= _scores(run)
    column[tr("verdict")] = tr(run.verdict)
    column[tr("general knowledge")] = tr(run.general)
    return column


def _measures(run: Run) -> dict[str, str]:
    texts = {}
    losses = run.trained.get("validation_loss") or {}
    measured = run.trained | losses
    for label, (name, form) in MEASURES.items():
        value = measured.get(name)
        texts[tr(label)] = "" if value is None else f"{value:{form}}"
    texts[tr("cost")] = money(run.trained.get("cost") or {})
    return texts


def _scores(run: Run) -> dict[str, str]:
    texts = {}
    for name in PANELS:
        title, form, _ = SHOWN[name]
        interval: Any = run.scores.get(name, {"mean": None})
        text = "" if interval["mean"] is None else Estimate(**interval).text(form)
        texts[tr("merged: {score}", score=tr(title))] = text
    return texts


def beside(run: RunFolder, trained: Facts | None = None) -> Runs:
    """Show this run, with the facts it is about to record, and the newest finished ones of its model and data.

    Example: compare.beside(lesson.run, trained=result.facts())
    """
    mine = load(run.path, trained)
    runs = {run.name: mine}
    data = mine.trained.get("data_fingerprint")
    for folder in record.runs(run.path.parent).values():
        with suppress(CourseError):  # a damaged record is reported where its own run is opened
            other = load(folder.path)
            finished = other.trained and record.complete(other.trained)
            same = other.model == mine.model and other.trained.get("data_fingerprint") == data
            if finished and same and len(runs) < MOST_RUNS:
                runs.setdefault(folder.name, other)
    show(runs)
    return runs


@dataclass(frozen=True)
class SpeedUp:
    """The same training with one process and with several; the single process comes first in every pair."""

    numbers: dict[str, tuple[float, float]]
    times: float  # the tokens per second of one
    furthest: float  # the largest difference between two losses of the same step, relative to the loss
    same_work: bool  # equal steps over equally many rows, with equal losses

    def __str__(self) -> str:
        names = {
            "processes": tr("processes"),
            "steps": tr("steps"),
            "batch": tr("batch"),
            "tokens_per_second": tr("tokens per second"),
        }
        lines = []
        for name, (single, several) in self.numbers.items():
            lines.append(f"{display.pad(names.get(name, name), 18)} {single:>10,.6g} {several:>10,.6g}\n")
        speed = tr("{times:.2f} times the tokens per second", times=self.times)
        furthest = tr("losses differ by at most {most:.1e} of the loss", most=self.furthest)
        return "".join(lines) + joined([speed, furthest], ";")


def _trained(run: Path) -> Facts:
    """What lesson 03 recorded in a run folder."""
    facts: Facts = record.read(run / "facts.json")["lessons"]["03_qlora"]
    return facts


def speed_up(alone: Path, together: Path) -> SpeedUp:
    """Compare what lesson 03 left in two run folders, of one process and of several.

    Example: compare.speed_up(trials / "alone", trials / "together")
    """
    single = _trained(alone)
    several = _trained(together)
    losses = dict(loss_history(read_history(alone / "logs/history.json")))
    others = dict(loss_history(read_history(together / "logs/history.json")))
    numbers = {name: (single[name], several[name]) for name in ("processes", "steps", "batch", "tokens_per_second")}
    differences = []
    for step in sorted(losses.keys() & others.keys()):
        numbers[tr("loss at step {step}", step=step)] = (losses[step], others[step])
        differences.append(abs(losses[step] - others[step]) / max(abs(losses[step]), 1e-6))
    if not differences:
        raise CourseError(
            tr("{one} and {other} logged no step in common.", one=alone.name, other=together.name),
            todo=tr("Run the comparison again with a larger TRIAL_STEPS."),
        )
    furthest = max(differences)
    same_steps = single["steps"] == several["steps"] and losses.keys() == others.keys()
    return SpeedUp(
        numbers,
        times=several["tokens_per_second"] / single["tokens_per_second"],
        furthest=furthest,
        same_work=same_steps and single["batch"] == several["batch"] and furthest <= TOLERANCE,
    )


def against_arithmetic(alone: Path, together: Path, model: str, gbps: float = RAM_LINK / 1e9) -> str:
    """A step of two run folders, beside what the plan says of processes that send so many GB/s.

    Example: compare.against_arithmetic(trials / "alone", trials / "together", "Qwen3-4B-Instruct-2507")
    """
    try:
        shape = find_shape(model)
    except CourseError:
        return tr("No prediction: the shape of {model} is not known.", model=model)
    single = _trained(alone)
    several = _trained(together)
    recipe = recipe_of(several)
    share = several["batch"] / several["processes"] / single["batch"]  # of the rows that one process had
    step = single["train_seconds"] / single["steps"]
    computing = step * share
    sending = sent_bytes(shape, recipe) / (gbps * 1e9)
    return tr(
        "a step of one process takes {alone:.3f} s; of {processes}, each computes {computing:.3f} s and sends "
        "{sending:.3f} s at {gbps:g} GB/s: {predicted:.3f} s predicted, {measured:.3f} s measured",
        alone=step,
        processes=recipe.cards,
        computing=computing,
        sending=sending,
        gbps=gbps,
        predicted=computing + sending,
        measured=several["train_seconds"] / several["steps"],
    )


def speed_up_facts(compared: SpeedUp | None) -> Facts:
    """A comparison for facts.json; None keeps what an earlier run measured."""
    if compared is None:
        return {"speedup": None, "tokens_per_second": None, "loss_difference": None}
    alone, together = compared.numbers["tokens_per_second"]
    return {
        "speedup": round(compared.times, 3),
        "tokens_per_second": {"alone": alone, "together": together},
        "loss_difference": compared.furthest,
    }
