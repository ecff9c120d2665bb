"""The figures of the lessons: each draws numbers that the lesson has at hand, and stores nothing but a picture.

Colours are those of Okabe and Ito, which people tell apart however they see colours; where a figure says something by
colour, it says it by position or in words, too. Labels are in the language of the course.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils.chat import IGNORED
from nbutils.display import pyplot, show_figure
from nbutils.language import tr

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
SKY = "#56B4E9"
PINK = "#CC79A7"
GREY = "#999999"
COLORS = (BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY)
MARKERS = list("os^DvPX")
TRAINED = "#c5eadb"
UNTRAINED = "#eeeeee"
SMALL = 8  # points
WIDTH = 8.4  # inches: a notebook's column
COLUMNS = 10  # tokens in a line


def bars(
    parts: Mapping[str, Mapping[str, float]],
    title: str,
    unit: str,
    limit: float | None = None,
    stacked: bool = True,
    path: Path | None = None,
) -> None:
    """A horizontal bar for each name, made of its parts, or with its parts one below the other; a limit is dashed.

    Example: figures.bars({"LoRA": {"weights": 14.2, "adapter": 0.6}}, "Memory of a 7B", "GiB", limit=15.0)
    """
    from pandas import DataFrame

    table = DataFrame.from_dict(parts, orient="index")
    height = 0.34 * len(table) if stacked else 0.2 * table.size
    figure, axes = _axes(1.2 + height)
    table.plot.barh(
        ax=axes,
        stacked=stacked,
        color=COLORS,
        width=0.75,
        edgecolor="white",
        legend=False,
    )
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", label=tr("limit {limit:.3g}", limit=limit))
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
    figure.legend(ncols=4, loc="outside lower center", frameon=False)
    show_figure(figure, path)


def dots(
    series: Mapping[str, Mapping[str, tuple[float, float]]],
    title: str,
    x: str,
    y: str,
    log: str = "",
    path: Path | None = None,
) -> None:
    """Points with their names, joined within a series; `log` is "x", "y" or "xy".

    Example: figures.dots({"vLLM": {"1": (120.0, 8.0), "8": (700.0, 11.0)}}, "Speed", "tokens/s", "ms", log="x")
    """
    figure, axes = _axes(3.4)
    axes.set_prop_cycle(color=COLORS, marker=MARKERS)
    for label, points in series.items():
        axes.plot(*zip(*points.values(), strict=True), label=label)
        for name, place in points.items():
            axes.annotate(
                name,
                place,
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=SMALL,
            )
    pyplot().rcParams["axes.formatter.min_exponent"] = 6  # a log axis says 1000, not 10³
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.margins(0.12)
    if len(series) > 1:
        axes.legend(frameon=False)
    show_figure(figure, path)


def _axes(height: float, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """A figure as wide as a notebook's column, and its axes."""
    size = (WIDTH, height)
    return pyplot().subplots(rows, columns, figsize=size, layout="constrained", **options)


# --- 02: the data -----------------------------------------------------------------------------------------------------


def token_labels(tokens: Sequence[str], ids: Sequence[int], labels: Sequence[int]) -> None:
    """A row as boxes: the text of each token, its id, and its label, green where it is trained.

    Example: figures.token_labels(["Hi", "<|im_end|>"], [13048, 151645], [-100, 151645])
    """
    lines = math.ceil(len(tokens) / COLUMNS)
    figure, axes = _axes(0.68 * lines + 0.3)
    middle = {"va": "center", "fontsize": SMALL}
    for number, token in enumerate(tokens):
        line, column = divmod(number, COLUMNS)
        color = UNTRAINED if labels[number] == IGNORED else TRAINED
        axes.text(
            column,
            -line,
            f"{_short(token)}\n{ids[number]}\n{labels[number]}",
            ha="center",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "none"},
            **middle,
        )
    names = "\n".join(["token", tr("id"), tr("label")])
    for line in range(lines):
        axes.text(-0.6, -line, names, ha="right", color=GREY, **middle)
    axes.set(xlim=(-1.1, COLUMNS - 0.5), ylim=(0.5 - lines, 0.5))
    axes.axis("off")
    show_figure(figure)


def lengths(lengths: Sequence[int], limit: int, path: Path | None = None) -> None:
    """How many training examples have how many tokens, and the limit.

    Example: figures.lengths(examples.lengths, examples.max_length)
    """
    figure, axes = _axes(2.5)
    shortest, longest = min(lengths), max(lengths)
    width = (longest - shortest) // 30 + 1  # of a bar: whole tokens, or one bar in some stays empty
    axes.hist(lengths, bins=range(shortest, longest + width + 1, width), color=BLUE)
    axes.axvline(limit, color=RED, linestyle="--", label=f"max_length {limit}")
    axes.set(
        title=tr("Tokens of a training example"),
        xlabel=tr("tokens"),
        ylabel=tr("examples"),
    )
    axes.legend(frameon=False)
    show_figure(figure, path)


# --- 03: the training -------------------------------------------------------------------------------------------------


def levels(weights: Any, levels: Mapping[str, Sequence[float]]) -> None:
    """How often weights have which value, and the values to which they are rounded, in a panel for each title.

    Example: figures.levels(shares, {"nf4": state.code, "fp4": other.code})
    """
    figure, rows = _axes(3.4, rows=len(levels), sharex=True)
    for axes, title in zip(rows, levels, strict=True):
        axes.hist(weights, bins=100, color=SKY)
        for value in levels[title]:
            axes.axvline(value, color=RED)
        axes.set_title(title, fontsize=10)
        axes.set_yticks([])
    axes.set_xlabel(tr("weight, as a share of the largest in its block of 64"))
    show_figure(figure)


def matrices(matrices: Mapping[str, Any]) -> None:
    """Matrices as colours, to scale: orange below zero, violet above, white at zero.

    Example: figures.matrices({"W": weight, "B": b, "A": a})
    """
    widths = [values.shape[1] for values in matrices.values()]
    figure, row = _axes(3.0, columns=len(widths), width_ratios=widths)
    for axes, title in zip(row, matrices, strict=True):
        values = matrices[title]
        most = float(abs(values).max()) or 1.0
        axes.imshow(
            values,
            cmap="PuOr",
            vmin=-most,
            vmax=most,
            interpolation="nearest",
        )
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    show_figure(figure)


def _short(token: str, most: int = 9) -> str:
    """A token as a label: its spaces and line breaks visible, its middle left out where it is long."""
    text = token.replace("\n", "⏎").replace(" ", "·")
    return text if len(text) <= most else f"{text[: most - 4]}…{text[-3:]}"
