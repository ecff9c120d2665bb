"""Runs side by side, from what their folders say: the settings that differ, losses, scores and the loss curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import display, platforms, record
from nbutils.config import shown
from nbutils.errors import CourseError
from nbutils.evaluation.comparison import PANELS, SHOWN
from nbutils.evaluation.scores import Estimate
from nbutils.language import joined, tr
from nbutils.models import find_shape
from nbutils.plan.forecast import recipe_of
from nbutils.plan.speed import RAM_LINK, sent_bytes
from nbutils.record import RunFolder
from nbutils.tracking import loss_history, read_history

Runs = dict[str, dict[str, Any]]  # by name, as `load` gives them
TOLERANCE = 0.01  # of the loss: sums in another order differ by a rounding each, 2^-8 of a value in bfloat16
MOST, LONGEST = 4, 40  # runs that lesson 03 shows, characters of a setting
MEASURES = {
    "examples": ("examples", ","), "steps": ("steps", ","), "answer tokens in the data": ("trained_tokens", ","),
    "seconds": ("train_seconds", ",.0f"), "last train loss": ("final_loss", ".4f"),
    "validation loss, last": ("last", ".4f"), "validation loss, best": ("best", ".4f"), "best step": ("best_step", ","),
}  # fmt: skip


def of_names(names: Sequence[str]) -> Runs:
    """Runs by name, or by the path of their folders."""
    found = {name: record.find(name).path for name in names}
    if len(found) < 2:
        raise CourseError(
            tr("Named: {count} runs.", count=len(found)), todo=tr("Name two runs, or the paths of their folders.")
        )
    return {name: load(folder) for name, folder in found.items()}


def load(folder: Path, trained: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run folder says of its run; `trained`, the facts of lesson 03, in place of what is there."""
    run = RunFolder(folder)
    facts = record.read(run.facts)
    recorded, merged = (facts.get("lessons", {}).get(stem, {}) for stem in ("03_qlora", "04_merge"))
    trained = recorded | {name: value for name, value in (trained or {}).items() if value is not None}
    with record.reading(run.facts):
        judged = {} if run.merge_is_outdated else merged.get("evaluation", {})
        settings = {key: one for key, one in (trained.get("settings") or {}).items() if key not in ("about", "model")}
        data = str(trained.get("data_fingerprint"))[:12]
        own = {"profile": facts.get("profile"), "model": facts.get("model"), "data": data}
        found = {
            "folder": str(folder), "settings": own | settings if settings else {},
            "trained": {name: value for name, value in trained.items() if name != "settings"},
            "scores": {name: judged.get("scores", {}).get(name, {}).get("merged") for name in PANELS},
            "verdict": judged.get("verdict"), "general": judged.get("general", {}).get("verdict"),
            "history": read_history(run.logs / "history.json"),
        }  # fmt: skip
        _column(found, settings)  # what cannot be shown is told here, where its file is known
    return found


def differing(runs: Runs) -> list[str]:
    """The settings that are not the same in all runs that recorded theirs."""
    recorded = [run["settings"] for run in runs.values() if run["settings"]]
    names = dict.fromkeys(name for settings in recorded for name in settings)
    return [name for name in names if any(one.get(name) != recorded[0].get(name) for one in recorded)]


def plot(runs: Runs, path: Path | None = None) -> None:
    """The loss curves, one color for each run: light while training, bold on held-out rows."""
    figure, axes = display.pyplot().subplots(figsize=(8, 4))
    for place, (label, run) in enumerate(runs.items()):
        for name, look in (("loss", {"lw": 1.2, "alpha": 0.4}), ("eval_loss", {"lw": 2.6, "label": label})):
            points = [(entry["step"], entry[name]) for entry in run["history"] if name in entry]
            axes.plot([at for at, _ in points], [loss for _, loss in points], color=f"C{place}", **look)
    title = tr("Loss: light while training, bold on held-out rows")
    axes.set(title=title, xlabel=tr("step"), ylabel=tr("loss"))
    axes.legend(frameon=False)
    figure.tight_layout()
    display.show_figure(figure, path)


def show(runs: Runs) -> None:
    """The table, and in a notebook the curves."""
    columns = {label: _column(run, differing(runs)) for label, run in runs.items()}
    names = [name for name in next(iter(columns.values())) if any(column[name] for column in columns.values())]
    table = [{"": name} | {label: column[name] or "-" for label, column in columns.items()} for name in names]
    display.show_table(table, tr("Runs side by side"), display.aligned(table))
    if len({str(run["trained"].get("data_fingerprint")) for run in runs.values()} - {"None"}) > 1:
        print(tr("Not all of these runs were trained on the same data: their losses do not compare."))
    if platforms.in_kernel():
        plot(runs)


def _column(run: Mapping[str, Any], settings: Iterable[str]) -> dict[str, str]:
    """A run by row of the table, with these of its settings; empty: not recorded."""
    texts, trained, recorded = dict[str, str](), run["trained"], run["settings"]
    values = {**trained, **(trained.get("validation_loss") or {})}
    for name in settings:
        texts[name] = shown(recorded[name])[:LONGEST] if recorded.get(name) is not None else ""
    for label, (name, form) in MEASURES.items():
        texts[tr(label)] = "" if values.get(name) is None else f"{values[name]:{form}}"
    texts[tr("cost")] = " / ".join(f"{sign}{money:.2f}" for sign, money in (trained.get("cost") or {}).items())
    for name, one in run["scores"].items():
        known, label = one is not None and one["mean"] is not None, tr("merged: {score}", score=tr(SHOWN[name][0]))
        texts[label] = Estimate(**one).text(SHOWN[name][1]) if known else ""
    texts[tr("verdict")] = tr(run["verdict"] or "")
    texts[tr("general knowledge")] = tr(run["general"] or "")
    return texts


def beside(run: RunFolder, trained: Mapping[str, Any] | None = None) -> Runs:
    """Show this run, with the facts it is about to record, and finished others: those of its model and data first."""
    others = sorted(record.runs(run.path.parent).values(), key=lambda one: one.facts.stat().st_mtime, reverse=True)
    found = {run.name: load(run.path, trained)}
    for other in (other for other in others if other.name != run.name):
        with suppress(CourseError, ValueError):  # a damaged record is reported where its own run is opened
            one = load(other.path)
            found |= {other.name: one} if one["trained"] and record.complete(one["trained"]) else {}
    kinds = {name: [one["settings"].get(key) for key in ("model", "data")] for name, one in found.items()}
    shown = {name: found[name] for name in sorted(found, key=lambda name: kinds[name] != kinds[run.name])[:MOST]}
    show(shown)
    return shown


@dataclass(frozen=True)
class SpeedUp:
    """The same training with one process and with several; the single process comes first in every pair."""

    numbers: dict[str, tuple[float, float]]
    times: float  # the tokens per second of one
    furthest: float  # the largest difference between two losses of the same step, relative to the loss
    same_work: bool  # equal steps over equally many rows, with equal losses

    def __str__(self) -> str:
        names = {"processes": tr("processes"), "steps": tr("steps"), "batch": tr("batch")}
        names["tokens_per_second"] = tr("tokens per second")
        lines = [
            f"{display.pad(names.get(name, name), 18)} {one:>10,.6g} {several:>10,.6g}\n"
            for name, (one, several) in self.numbers.items()
        ]
        speed = tr("{times:.2f} times the tokens per second", times=self.times)
        furthest = tr("losses differ by at most {most:.1e} of the loss", most=self.furthest)
        return "".join(lines) + joined([speed, furthest], ";")


def speed_up(alone: Path, together: Path) -> SpeedUp:
    """What lesson 03 left in two run folders."""
    one, several = (record.read(run / "facts.json")["lessons"]["03_qlora"] for run in (alone, together))
    numbers = {name: (one[name], several[name]) for name in ("processes", "steps", "batch", "tokens_per_second")}
    first, second = (dict(loss_history(read_history(run / "logs/history.json"))) for run in (alone, together))
    if not (losses := {step: (first[step], second[step]) for step in first if step in second}):
        raise CourseError(
            tr("{one} and {other} logged no step in common.", one=alone.name, other=together.name),
            todo=tr("Run the comparison again with a larger TRIAL_STEPS."),
        )
    furthest = max(abs(a - b) / max(abs(a), 1e-6) for a, b in losses.values())
    same = first.keys() == second.keys() and all(len(set(numbers[name])) == 1 for name in ("steps", "batch"))
    speeds = numbers["tokens_per_second"]
    numbers |= {tr("loss at step {step}", step=step): pair for step, pair in losses.items()}
    return SpeedUp(numbers, speeds[1] / speeds[0], furthest, same and furthest <= TOLERANCE)


def against_arithmetic(alone: Path, together: Path, model: str, gbps: float = RAM_LINK / 1e9) -> str:
    """A step of two run folders, beside what the plan says of processes that send so many GB/s."""
    try:
        shape = find_shape(model)
    except CourseError:
        return tr("No prediction: the shape of {model} is not known.", model=model)
    one, several = (record.read(run / "facts.json")["lessons"]["03_qlora"] for run in (alone, together))
    recipe, share = recipe_of(several), several["batch"] / several["processes"] / one["batch"]  # of the rows one had
    first, second = (facts["train_seconds"] / facts["steps"] for facts in (one, several))
    computing = first * share
    sending = sent_bytes(shape, recipe) / (gbps * 1e9)
    return tr(
        "a step of one process takes {alone:.3f} s; of {processes}, each computes {computing:.3f} s and sends "
        "{sending:.3f} s at {gbps:g} GB/s: {predicted:.3f} s predicted, {measured:.3f} s measured",
        alone=first, processes=recipe.cards, computing=computing, sending=sending, gbps=gbps,
        predicted=computing + sending, measured=second,
    )  # fmt: skip


def speed_up_facts(compared: SpeedUp | None) -> dict[str, Any]:
    """A comparison for facts.json; None keeps what an earlier run measured."""
    if compared is None:
        return dict.fromkeys(("speedup", "tokens_per_second", "loss_difference"))
    speeds = dict(zip(("alone", "together"), compared.numbers["tokens_per_second"], strict=True))
    return {"speedup": round(compared.times, 3), "tokens_per_second": speeds, "loss_difference": compared.furthest}
