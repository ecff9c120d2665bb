"""Runs side by side: the settings that differ, what the training took, losses, scores with intervals, and the curves.

Not here: measuring. All of it stands in the run folders (facts.json, logs/history.json); what a run lacks is a dash.
"""

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
from nbutils.evaluation.comparing import SHOWN
from nbutils.evaluation.drawing import PANELS
from nbutils.evaluation.statistics import Estimate
from nbutils.lessons import RunFolder

Runs = dict[str, dict[str, Any]]  # by name, as `load` gives them
MOST, LONGEST = 4, 40  # runs that lesson 04 shows, characters of a setting
FORMS = {
    "examples": ("examples", ","), "steps": ("steps", ","), "trained tokens": ("trained_tokens", ","),
    "seconds": ("train_seconds", ",.0f"), "last train loss": ("final_loss", ".4f"),
}  # fmt: skip


def of_names(names: Sequence[str]) -> Runs:
    """Runs by name, or by the path of their folders."""
    keep = platforms.folders(platforms.detect()).keep
    known = {place.parent.name: place.parent for place in sorted(keep.glob("*/facts.json"))}
    found = {name: known.get(name) or Path(name).expanduser() for name in names}
    absent = [name for name, folder in found.items() if not (folder / "facts.json").is_file()]
    if absent or len(found) < 2:
        near = difflib.get_close_matches(absent[0], known, n=1) if absent else []
        raise CourseError(
            f"there is no run {absent[0]!r} in {keep}." if absent else f"{len(found)} of the two runs this needs.",
            f"two or more of: {', '.join(known) or 'none yet'}; or paths of run folders",
            f"did you mean {near[0]}?" if near else "name runs, or set NBUTILS_HOME to where your runs are",
        )
    return {name: load(folder) for name, folder in found.items()}


def load(folder: Path, evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run folder says of its run; `evaluation` in place of the one that is there."""
    run = RunFolder(folder)
    facts = record.read(run.facts)
    trained, merged = (facts.get("lessons", {}).get(stem, {}) for stem in ("03_qlora", "04_merge"))
    judged = evaluation or merged.get("evaluation", {})
    own = {"profile": facts.get("profile"), "model": facts.get("model")}
    own["data"] = str(trained.get("data_fingerprint"))[:12]
    settings = {
        name: value for name, value in (trained.get("settings") or {}).items() if name not in ("about", "model")
    }
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


def rows(runs: Runs) -> list[dict[str, str]]:
    """The table: settings that differ, then what came of them."""
    columns = {}
    for label, run in runs.items():
        settings = {name: run["settings"].get(name) for name in differing(runs)}
        told = {name: "" if value is None else shown(value)[:LONGEST] for name, value in settings.items()}
        columns[label] = told | _measures(run)
    names = next(iter(columns.values()))
    return [{"": name} | {label: column[name] or "-" for label, column in columns.items()} for name in names]


def _measures(run: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of a run as text, empty where there is none."""
    trained, loss = run["trained"], run["trained"].get("validation_loss") or {}
    older = "" if run["settings"] else ", settings not recorded"
    told = {"lesson 03": f"finished{older}" if trained else "has not finished here"}
    told |= {label: _text(trained.get(name), form) for label, (name, form) in FORMS.items()}
    told["validation loss, last"] = _text(loss.get("last"), ".4f")
    told["validation loss, best"] = _text(loss.get("best"), ".4f")
    told["best step"] = _text(trained.get("best_step"), ",")
    told["cost"] = " or ".join(f"{sign}{money:.2f}" for sign, money in (trained.get("cost") or {}).items())
    for name, one in run["scores"].items():
        known = one is not None and one["mean"] is not None
        told[f"merged: {SHOWN[name][0]}"] = Estimate(**one).text(SHOWN[name][1]) if known else ""
    return told | {"verdict": run["verdict"] or ""}


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def plot(runs: Runs, path: Path | None = None) -> None:
    """The curves, one colour for each run: light while training, bold on held-back rows."""
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
    table = rows(runs)
    dashboard.show_table(table, "Runs side by side", dashboard.aligned(table))
    if platforms.in_kernel():
        plot(runs)


def beside(run: RunFolder, evaluation: Mapping[str, Any]) -> None:
    """This run, with the evaluation it is about to record, and the newest others that were trained to their end."""
    others = sorted(run.path.parent.glob("*/facts.json"), key=lambda place: place.stat().st_mtime, reverse=True)
    found = {run.name: load(run.path, evaluation)}
    for folder in (place.parent for place in others if place != run.facts):
        with suppress(CourseError):  # a damaged record is told where its own run is opened
            one = load(folder)
            found |= {folder.name: one} if one["trained"] and record.complete(one["trained"]) else {}
    if len(found) == 1:
        print("This is the only finished run here.")
    else:
        show(dict(list(found.items())[:MOST]))
