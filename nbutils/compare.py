"""Runs side by side, from what their folders say: the settings that differ, losses, scores and the loss curves."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbutils import dashboard, platforms, record
from nbutils.config import shown
from nbutils.errors import CourseError
from nbutils.evaluation.report import PANELS, SHOWN
from nbutils.evaluation.stats import Estimate
from nbutils.lessons import RunFolder

Runs = dict[str, dict[str, Any]]  # by name, as `load` gives them
MOST, LONGEST = 4, 40  # runs that lesson 04 shows, characters of a setting
MEASURES = {
    "examples": ("examples", ","), "steps": ("steps", ","), "trained tokens": ("trained_tokens", ","),
    "seconds": ("train_seconds", ",.0f"), "last train loss": ("final_loss", ".4f"),
    "validation loss, last": ("last", ".4f"), "validation loss, best": ("best", ".4f"), "best step": ("best_step", ","),
}  # fmt: skip


def of_names(names: Sequence[str]) -> Runs:
    """Runs by name, or by the path of their folders."""
    keep = platforms.folders(platforms.detect()).keep
    known = {place.parent.name: place.parent for place in sorted(keep.glob("*/facts.json"))}
    found = {name: known.get(name) or Path(name).expanduser() for name in names}
    listed = ", ".join(known) or "none yet"
    for name, folder in found.items():
        if not (folder / "facts.json").is_file():
            near = "".join(f" (did you mean {one}?)" for one in difflib.get_close_matches(name, known, n=1))
            raise CourseError("compare.no_run", name=name, near=near, keep=keep, known=listed)
    if len(found) < 2:
        raise CourseError("compare.too_few_runs", count=len(found), known=listed)
    return {name: load(folder) for name, folder in found.items()}


def load(folder: Path, evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run folder says of its run; `evaluation` in place of the one that is there."""
    run = RunFolder(folder)
    facts = record.read(run.facts)
    trained, merged = (facts.get("lessons", {}).get(stem, {}) for stem in ("03_qlora", "04_merge"))
    judged = evaluation or merged.get("evaluation", {})
    settings = {name: one for name, one in (trained.get("settings") or {}).items() if name not in ("about", "model")}
    own = {name: facts.get(name) for name in ("profile", "model")} | {"data": str(trained.get("data_fingerprint"))[:12]}
    return {
        "folder": str(folder), "settings": own | settings if settings else {},
        "trained": {name: value for name, value in trained.items() if name != "settings"},
        "scores": {name: judged.get("scores", {}).get(name, {}).get("merged") for name in PANELS},
        "verdict": judged.get("verdict"),
        "history": _history(run.logs / "history.json"),
    }  # fmt: skip


def _history(file: Path) -> list[dict[str, Any]]:
    """The logged losses; none where the file is missing or damaged."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in entries if isinstance(one, dict) and "step" in one] if isinstance(entries, list) else []


def differing(runs: Runs) -> list[str]:
    """The settings that are not the same in all runs that recorded theirs."""
    recorded = [run["settings"] for run in runs.values() if run["settings"]]
    names = dict.fromkeys(name for settings in recorded for name in settings)
    return [name for name in names if any(one.get(name) != recorded[0].get(name) for one in recorded)]


def _column(run: Mapping[str, Any], settings: Sequence[str]) -> dict[str, str]:
    """One run as text, by row of the table; empty where there is nothing to tell."""
    trained, recorded = run["trained"], run["settings"]
    values = {**trained, **(trained.get("validation_loss") or {})}
    told = {name: shown(recorded[name])[:LONGEST] if recorded.get(name) is not None else "" for name in settings}
    finished = "finished" if recorded else "finished, settings not recorded"
    told["lesson 03"] = finished if trained else "has not finished here"
    for label, (name, form) in MEASURES.items():
        told[label] = "" if values.get(name) is None else f"{values[name]:{form}}"
    told["cost"] = " or ".join(f"{sign}{money:.2f}" for sign, money in (trained.get("cost") or {}).items())
    for name, one in run["scores"].items():
        known = one is not None and one["mean"] is not None
        told[f"merged: {SHOWN[name][0]}"] = Estimate(**one).text(SHOWN[name][1]) if known else ""
    return told | {"verdict": run["verdict"] or ""}


def plot(runs: Runs, path: Path | None = None) -> None:
    """The loss curves, one color for each run: light while training, bold on held-back rows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    for place, (label, run) in enumerate(runs.items()):
        for name, look in (("loss", {"lw": 1.2, "alpha": 0.4}), ("eval_loss", {"lw": 2.6, "marker": "o", "ms": 4})):
            points = [(entry["step"], entry[name]) for entry in run["history"] if name in entry]
            axes.plot([at for at, _ in points], [loss for _, loss in points], color=f"C{place}", **look)
        axes.plot([], [], color=f"C{place}", lw=2.6, label=label)
    axes.set(title="Loss: light while training, bold on held-back rows", xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    dashboard.show_figure(figure, path)


def show(runs: Runs) -> None:
    """The table, and in a notebook the curves."""
    columns = {label: _column(run, differing(runs)) for label, run in runs.items()}
    names = next(iter(columns.values()))
    table = [{"": name} | {label: column[name] or "-" for label, column in columns.items()} for name in names]
    dashboard.show_table(table, "Runs side by side", dashboard.aligned(table))
    if platforms.in_kernel():
        plot(runs)


def beside(run: RunFolder, evaluation: Mapping[str, Any]) -> None:
    """This run, with the evaluation it is about to record, and the newest others that were trained to their end."""
    others = sorted(run.path.parent.glob("*/facts.json"), key=lambda place: place.stat().st_mtime, reverse=True)
    found = {run.name: load(run.path, evaluation)}
    for folder in (place.parent for place in others if place != run.facts):
        with suppress(CourseError):  # a damaged record is reported where its own run is opened
            one = load(folder)
            found |= {folder.name: one} if one["trained"] and record.complete(one["trained"]) else {}
    if len(found) == 1:
        print("This is the only finished run here.")
    else:
        show(dict(list(found.items())[:MOST]))
