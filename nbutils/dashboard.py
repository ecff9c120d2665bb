"""What people look at: the loss curve, live numbers, tables. Plain output where no frontend is attached.

Not here: any logic, and the chat (chatbox). Labels in plots are English: Colab has no Chinese font.
"""

from __future__ import annotations

import html
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.platforms import detect, in_kernel

DRAWN = b"Matplotlib"  # in the head of its pictures
ACCENT = "var(--jp-brand-color1, #2979c9)"
ALARM = "var(--jp-warn-color1, #e07b00)"
CURVES = {"loss": ACCENT, "validation": ALARM}  # the numbers have the colours of their curves
WIDTH, HEIGHT, POINTS = 760, 96, 160  # of the live curve
LIVE_LINE = re.compile(r"(training|step|trained) \d|\[WARN\]|out of memory |.* Saving at step ")


def show_table(rows: Sequence[dict[str, Any]], title: str = "", text: str = "") -> None:
    """A table: HTML in a notebook; in a script `text`, or else one line per entry."""
    _show(_html_table(rows, title), text or text_table(rows, title))


def show_choices(choices: Mapping[str, Choice], text: str) -> None:
    """Every decided value with its reason; `text` is the same for a terminal."""
    rows = [{"what": name, "value": choice.value, "why": choice.reason} for name, choice in choices.items()]
    show_table(rows, text=text)


def _show(page: str, text: str) -> None:
    """Both forms to a notebook, which takes the one it can draw; the text to a terminal."""
    if not in_kernel():
        print(text)
        return
    from IPython.display import display

    display({"text/html": page, "text/plain": text}, raw=True)


def _html_table(rows: Sequence[dict[str, Any]], title: str) -> str:
    cell = "style='text-align:left;vertical-align:top;padding:2px 12px 2px 0'"
    names = list(rows[0]) if rows else []
    head = "".join(f"<th {cell}>{html.escape(str(name))}</th>" for name in names)
    lines = ["".join(f"<td {cell}>{html.escape(str(row[name]))}</td>" for name in names) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = f"<caption style='text-align:left;font-weight:bold'>{html.escape(title)}</caption>" if title else ""
    return f"<table style='border-collapse:collapse'>{caption}<tr>{head}</tr>{body}</table>"


def text_table(rows: Sequence[dict[str, Any]], title: str = "") -> str:
    """The same table as text."""
    lines = [title] if title else []
    for row in rows:
        lines += [f"  {name}: {value}" for name, value in row.items()] + [""]
    return "\n".join(lines)


def aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a table as columns of text."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot_losses(
    history: Sequence[tuple[int, float]],
    path: Path | None = None,
    title: str = "Loss",
    validation: Sequence[tuple[int, float]] = (),
) -> None:
    """The loss curves, shown in a notebook and saved to `path` if one is given."""
    import matplotlib.pyplot as plt

    if not history:
        print("No loss was logged: nothing to plot.")
        return
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot([step for step, _ in history], [loss for _, loss in history], linewidth=1.5, alpha=0.6, label="training")
    if validation:
        best = min(validation, key=lambda point: point[1])
        axes.plot(*zip(*validation, strict=True), "o-", linewidth=2, markersize=4, label="validation")
        axes.plot(
            *best, "o", markersize=9, fillstyle="none", color="black", label=f"best: {best[1]:.3f} at step {best[0]}"
        )
        axes.legend(frameon=False)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    show_figure(figure, path)


def show_figure(figure: Any, path: Path | None = None) -> None:
    """Show a figure in a notebook, and save it to `path` if one is given."""
    import matplotlib.pyplot as plt

    if path:
        if os.path.lexists(path) and (path.is_symlink() or DRAWN not in path.read_bytes()[:1000]):
            raise CourseError(f"{path} is there, and not drawn here.", "a new file", "move it away, or name another")
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
    """Bars of libraries as text, where no one watches: a widget's bar would stay at 0 % in the executed notebook."""
    if not in_kernel() or watched():
        return
    import tqdm.auto
    import tqdm.std

    class Calm(tqdm.std.tqdm):
        """A bar that is drawn seldom, and once at its end."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{"mininterval": 15, "maxinterval": 15, "delay": 0.5, **settings})

    tqdm.auto.tqdm = Calm  # type: ignore[assignment]  # before transformers and datasets look it up


class LivePanel:
    """One output of a cell that is drawn over: a bar, numbers, a small curve, notes. Needs no widgets."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.cell = -1

    def draw(
        self,
        parts: Mapping[str, str],
        reach: tuple[int, int],
        losses: Sequence[tuple[int, float]],
        notes: Sequence[str],
        validation: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Draw it anew, below the running cell the first time."""
        from IPython.display import display

        page = {"text/html": live_page(parts, reach, losses, notes, validation), "text/plain": live_line(parts)}
        cell = sys.modules["IPython"].get_ipython().execution_count
        if self.handle is None or cell != self.cell:
            self.handle, self.cell = display(page, raw=True, display_id=True), cell
        else:
            self.handle.update(page, raw=True)


def live_line(parts: Mapping[str, str]) -> str:
    """The numbers in one line."""
    shapes = {"memory": "{1}", "tokens/s": "{1} {0}", "left": "{1} {0}", "skipped": "{1} {0}"}
    words = [shapes.get(name, "{0} {1}").format(name, text) for name, text in parts.items()]
    return " · ".join(words)


def live_page(
    parts: Mapping[str, str],
    reach: tuple[int, int],
    losses: Sequence[tuple[int, float]],
    notes: Sequence[str],
    validation: Sequence[tuple[int, float]] = (),
) -> str:
    """The same as a page, `reach` steps of all far: quiet, in the colours of the notebook around it, no scripts."""
    done = 100 * reach[0] / max(reach[1], 1)
    bar = f"<div style='background:{ACCENT};height:4px;border-radius:2px;width:{done:.1f}%'></div>"
    cells = "".join(
        f"<div style='margin-right:28px;min-width:56px'><div style='opacity:.6;font-size:85%'>{html.escape(name)}</div>"
        f"<div style='font-variant-numeric:tabular-nums;color:{CURVES.get(name, 'inherit')}'>"
        f"{html.escape(text)}</div></div>"
        for name, text in parts.items()
    )
    line = "margin-top:8px;padding-left:8px;border-left:3px solid"
    colours = [ALARM if note.startswith("[WARN]") else ACCENT for note in notes]
    said = "".join(
        f"<div style='{line} {one}'>{html.escape(note)}</div>" for one, note in zip(colours, notes, strict=True)
    )
    return (
        f"<div style='max-width:{WIDTH}px;font-family:sans-serif;font-size:13px;line-height:1.5'>"
        f"<div style='background:rgba(128,128,128,.2);border-radius:2px;margin:6px 0'>{bar}</div>"
        f"<div style='display:flex;flex-wrap:wrap'>{cells}</div>{said}{loss_curve(losses, reach[1], validation)}</div>"
    )


def loss_curve(losses: Sequence[tuple[int, float]], steps: int, validation: Sequence[tuple[int, float]] = ()) -> str:
    """A small curve as SVG that grows with the bar; written by hand, for matplotlib would take longer than a step."""
    few = dict([*losses[:: -(-len(losses) // POINTS) or 1], *losses[-1:]])
    known = [(step, loss) for step, loss in few.items() if math.isfinite(loss)]
    if len(known) < 2:
        return ""
    held = [(step, loss) for step, loss in validation if math.isfinite(loss)]
    low, high = (limit(loss for _, loss in [*known, *held]) for limit in (min, max))
    across, up = WIDTH / max(steps, known[-1][0]), HEIGHT / ((high - low) or 1.0)
    line, dots = (
        " ".join(f"{step * across:.1f},{16 + (high - loss) * up:.1f}" for step, loss in points)
        for points in (known, held)
    )
    label = f"x='{WIDTH}' text-anchor='end' fill='currentColor' style='font-size:11px;opacity:.6'"
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT + 34}' style='display:block;width:100%;margin-top:2px'>"
        f"<path d='M0 16H{WIDTH}M0 {HEIGHT + 18}H{WIDTH}' stroke='currentColor' stroke-opacity='.15'/>"
        f"<text y='11' {label}>{high:.3f}</text><text y='{HEIGHT + 31}' {label}>{low:.3f}</text>"
        f"<polyline points='{line}' fill='none' stroke='{ACCENT}' stroke-width='1.5'/>"
        f"<polyline points='{dots}' fill='none' stroke='{ALARM}' stroke-width='2'/></svg>"
    )


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class LiveLines:
    """A file for papermill's `stdout_file`: of all a lesson prints, a training's lines pass, above the bar."""

    def __init__(self) -> None:
        self.rest = ""

    def write(self, text: str) -> None:
        """Pass whole lines on."""
        from tqdm import tqdm

        *lines, self.rest = (self.rest + text).split("\n")
        for line in filter(LIVE_LINE.match, lines):
            tqdm.write(f"  {line}")

    def flush(self) -> None:
        """Nothing waits: a line is passed on when it is whole."""
        sys.stdout.flush()
