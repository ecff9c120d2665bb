"""The figures of the lessons: each draws numbers that the lesson has at hand, and stores nothing but a picture.

Colours are those of Okabe and Ito, which people tell apart however they see colours; where a figure says something by
colour, it says it by position or in words, too. Labels are in the language of the course.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
MARKERS = "os^Dv"
WIDTH = 8.4  # inches: a notebook's column
COLUMNS = 10  # tokens in a line
IGNORED = -100


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
    labels = list(dict.fromkeys(label for values in parts.values() for label in values))
    thickness = 0.7 if stacked else 0.8 / len(labels)
    rows = len(parts) * (1 if stacked else len(labels))
    figure, axes = pyplot().subplots(figsize=(WIDTH, 1.2 + 0.34 * rows), layout="constrained")
    left = [0.0] * len(parts)
    for number, label in enumerate(labels):
        sizes = [values.get(label, 0.0) for values in parts.values()]
        shift = 0.0 if stacked else (number - (len(labels) - 1) / 2) * thickness
        places = [place + shift for place in range(len(parts))]
        color = COLORS[number % len(COLORS)]
        axes.barh(places, sizes, thickness, left=left, label=label, color=color, edgecolor="white")
        if stacked:
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", label=tr("limit {limit:.3g}", limit=limit))
    axes.set_yticks(range(len(parts)), list(parts))
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
    figure, axes = pyplot().subplots(figsize=(WIDTH, 3.4), layout="constrained")
    for number, (label, points) in enumerate(series.items()):
        across, up = zip(*points.values(), strict=True)
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(across, up, marker=marker, label=label, color=COLORS[number % len(COLORS)])
        for name, place in points.items():
            axes.annotate(name, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.margins(0.12)
    if len(series) > 1:
        axes.legend(frameon=False)
    show_figure(figure, path)


# --- 02: the data -----------------------------------------------------------------------------------------------------


def token_labels(tokens: Sequence[str], ids: Sequence[int], labels: Sequence[int], path: Path | None = None) -> None:
    """A row as boxes: the text of each token, its id, and its label, green where it is trained.

    Example: figures.token_labels(["Hi", "<|im_end|>"], [13048, 151645], [-100, 151645])
    """
    lines = math.ceil(len(tokens) / COLUMNS)
    figure, axes = pyplot().subplots(figsize=(WIDTH, 0.68 * lines + 0.3), layout="constrained")
    for number, token in enumerate(tokens):
        line, column = divmod(number, COLUMNS)
        trained = labels[number] != IGNORED
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#c5eadb" if trained else "#eeeeee", "edgecolor": "none"}
        text = f"{_short(token):^9}\n{ids[number]:^9}\n{labels[number]:^9}"
        axes.text(column, -line, text, ha="center", va="center", fontsize=8, bbox=box)
    for line in range(lines):
        names = "\n".join([tr("token"), tr("id"), tr("label")])
        axes.text(-0.6, -line, names, ha="right", va="center", fontsize=8, color=GREY)
    axes.set(xlim=(-1.1, COLUMNS - 0.5), ylim=(0.5 - lines, 0.5))
    axes.axis("off")
    show_figure(figure, path)


def lengths(lengths: Sequence[int], limit: int, path: Path | None = None) -> None:
    """How many training examples have how many tokens, and the limit.

    Example: figures.lengths(examples.lengths, examples.max_length)
    """
    figure, axes = pyplot().subplots(figsize=(WIDTH, 2.5), layout="constrained")
    axes.hist(lengths, bins=30, color=BLUE)
    axes.axvline(limit, color=RED, linestyle="--", label=f"max_length {limit}")
    axes.set(title=tr("Tokens of a training example"), xlabel=tr("tokens"), ylabel=tr("examples"))
    axes.legend(frameon=False)
    show_figure(figure, path)


# --- 03: the training -------------------------------------------------------------------------------------------------


def levels(weights: Any, levels: Mapping[str, Sequence[float]], path: Path | None = None) -> None:
    """How often weights have which value, and the values to which they are rounded, in a panel for each title.

    Example: figures.levels(shares, {"nf4": state.code, "fp4": other.code})
    """
    size = (WIDTH, 3.4)
    figure, rows = pyplot().subplots(len(levels), figsize=size, sharex=True, layout="constrained")
    for axes, (title, values) in zip(rows, levels.items(), strict=True):
        axes.hist(weights, bins=100, color=SKY)
        for value in values:
            axes.axvline(value, color=RED)
        axes.set_title(title, fontsize=10)
        axes.set_yticks([])
    axes.set_xlabel(tr("weight, as a share of the largest in its block of 64"))
    show_figure(figure, path)


def matrices(matrices: Mapping[str, Any], path: Path | None = None) -> None:
    """Matrices as colours, to scale: orange below zero, violet above, white at zero.

    Example: figures.matrices({"W": weight, "B": b, "A": a})
    """
    widths = [values.shape[1] for values in matrices.values()]
    figure, row = pyplot().subplots(
        1,
        len(widths),
        figsize=(WIDTH, 3.0),
        width_ratios=widths,
        layout="constrained",
    )
    for axes, (title, values) in zip(row, matrices.items(), strict=True):
        most = abs(values).max()
        axes.imshow(
            values,
            cmap="PuOr",
            vmin=-most,
            vmax=most,
            interpolation="nearest",
        )
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    show_figure(figure, path)


def _short(token: str, most: int = 9) -> str:
    """A token as a label: its spaces and line breaks visible, its middle left out where it is long."""
    text = token.replace("\n", "⏎").replace(" ", "·")
    return text if len(text) <= most else f"{text[: most - 4]}…{text[-3:]}"
