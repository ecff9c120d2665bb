"""What people look at: tables, the loss curve, live numbers. Plain text where no frontend is attached.

The HTML is in templates/. Labels in plots are English: Colab has no Chinese font.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.platforms import detect, in_kernel

ACCENT = "var(--jp-brand-color1, #2979c9)"
ALARM = "var(--jp-warn-color1, #e07b00)"
WIDTH, HEIGHT, POINTS = 760, 96, 160  # of the live curve
LIVE_LINE = re.compile(r"(training|step|trained) \d|\[WARN\]|out of memory |.* Saving at step ")
Parts = Mapping[str, str]  # live numbers by their names
Reach = tuple[int, int]  # the step, and the last step
Losses = Sequence[tuple[int, float]]  # step and loss


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader

    folder = Path(__file__).with_name("templates")
    return Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True)


def render_html(template: str, **values: Any) -> str:
    """A page of templates/, with every value escaped."""
    return str(_templates().get_template(template).render(accent=ACCENT, alarm=ALARM, **values))


def show(template: str, text: str, **values: Any) -> None:
    """A page of templates/ in a notebook; `text` in a terminal."""
    if not in_kernel():
        print(text)
        return
    from IPython.display import display

    display({"text/html": render_html(template, **values), "text/plain": text}, raw=True)


def show_table(rows: Sequence[dict[str, Any]], title: str = "", text: str = "") -> None:
    """A table: HTML in a notebook; in a script `text`, or else one line per entry."""
    if not text:
        entries = ["".join(f"  {name}: {value}\n" for name, value in row.items()) for row in rows]
        text = "\n".join([title, *entries] if title else entries)
    show("table.html", text, rows=rows, title=title)


def show_choices(choices: Mapping[str, Choice], text: str) -> None:
    """Every decided value with its reason; `text` is the same for a terminal."""
    rows = [{"what": name, "value": choice.value, "why": choice.reason} for name, choice in choices.items()]
    show_table(rows, text=text)


def aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a table as columns of text."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot_losses(history: Losses, path: Path | None = None, title: str = "Loss", validation: Losses = ()) -> None:
    """The loss curves, shown in a notebook and saved to `path` if one is given."""
    import matplotlib.pyplot as plt

    if not history:
        print("No loss was logged: nothing to plot.")
        return
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot(*zip(*history, strict=True), linewidth=1.5, alpha=0.6, label="training")
    if validation:
        step, loss = min(validation, key=lambda point: point[1])
        best = f"best: {loss:.3f} at step {step}"
        axes.plot(*zip(*validation, strict=True), "o-", linewidth=2, markersize=4, label="validation")
        axes.plot(step, loss, "o", markersize=9, fillstyle="none", color="black", label=best)
        axes.legend(frameon=False)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    show_figure(figure, path)


def show_figure(figure: Any, path: Path | None = None) -> None:
    """Show a figure in a notebook, and save it to `path` if one is given; only figures of ours are overwritten."""
    import matplotlib.pyplot as plt

    if path:
        if os.path.lexists(path) and (path.is_symlink() or b"Matplotlib" not in path.read_bytes()[:1000]):
            raise CourseError("dashboard.foreign_file", path=path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, format="png")
    if in_kernel():
        plt.show()
    plt.close(figure)


def watched() -> bool:
    """Whether someone may be looking: a kernel whose frontend can also type; papermill's and Kaggle's batch cannot."""
    if not in_kernel() or detect().batch:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return bool(getattr(shell.kernel, "_allow_stdin", True))


def calm_bars() -> None:
    """Progress bars as text, seldom drawn, where no one watches: a widget stays at 0 % in an executed notebook."""
    if not in_kernel() or watched():
        return
    import tqdm.auto
    import tqdm.std

    class CalmBar(tqdm.std.tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{"mininterval": 15, "maxinterval": 15, "delay": 0.5, **settings})

    tqdm.auto.tqdm = CalmBar  # type: ignore[assignment]  # before transformers and datasets look it up


class LivePanel:
    """One output of a cell that is drawn over: a bar, numbers, a small curve, notes. Needs no widgets."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.cell = -1

    def draw(self, parts: Parts, reach: Reach, losses: Losses, notes: Sequence[str], validation: Losses = ()) -> None:
        """Draw it again, below the running cell the first time."""
        from IPython.display import display

        page = {"text/html": live_page(parts, reach, losses, notes, validation), "text/plain": live_line(parts)}
        cell = sys.modules["IPython"].get_ipython().execution_count
        if self.handle is None or cell != self.cell:
            self.handle, self.cell = display(page, raw=True, display_id=True), cell
        else:
            self.handle.update(page, raw=True)


def live_line(parts: Parts) -> str:
    """The numbers in one line."""
    formats = {"memory": "{1}", "tokens/s": "{1} {0}", "left": "{1} {0}", "skipped": "{1} {0}"}
    return " · ".join(formats.get(name, "{0} {1}").format(name, text) for name, text in parts.items())


def live_page(parts: Parts, reach: Reach, losses: Losses, notes: Sequence[str], validation: Losses = ()) -> str:
    """The numbers, notes and curve as HTML."""
    numbers = {"parts": parts, "percent": 100 * reach[0] / max(reach[1], 1), "notes": notes}
    curve = _loss_curve(losses, reach[1], validation)
    return render_html("live.html", **numbers, curve=curve, width=WIDTH, height=HEIGHT)


def _loss_curve(losses: Losses, steps: int, validation: Losses) -> dict[str, Any]:
    """SVG points of a curve that grows with the bar: matplotlib would take longer than a step. Empty without two."""
    thinned = dict([*losses[:: -(-len(losses) // POINTS) or 1], *losses[-1:]])
    training = [(step, loss) for step, loss in thinned.items() if math.isfinite(loss)]
    if len(training) < 2:
        return {}
    held_back = [(step, loss) for step, loss in validation if math.isfinite(loss)]
    low, high = (limit(loss for _, loss in [*training, *held_back]) for limit in (min, max))
    x, y = WIDTH / max(steps, training[-1][0]), HEIGHT / ((high - low) or 1.0)
    line, dots = (
        " ".join(f"{step * x:.1f},{16 + (high - loss) * y:.1f}" for step, loss in points)
        for points in (training, held_back)
    )
    return {"low": low, "high": high, "training": line, "validation": dots}


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class LiveLines:
    """A file for papermill's `stdout_file`: of all a lesson prints, the training's lines appear above the bar."""

    def __init__(self) -> None:
        self.rest = ""

    def write(self, text: str) -> None:
        """Pass whole lines on."""
        from tqdm import tqdm

        *lines, self.rest = (self.rest + text).split("\n")
        for line in filter(LIVE_LINE.match, lines):
            tqdm.write(f"  {line}")

    def flush(self) -> None:
        """Nothing is held back but an unfinished line."""
        sys.stdout.flush()
