"""The figures of the lessons: each draws numbers that the lesson has at hand, and stores nothing but a picture.

Colours are those of Okabe and Ito, which people tell apart however they see colours; where a figure says something by
colour, it says it by position or in words, too. Labels are in the language of the course.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
WIDTH = 8.4  # inches: a notebook's column
IGNORED = -100


# --- 02: the data -----------------------------------------------------------------------------------------------------


def token_labels(tokens: Sequence[str], ids: Sequence[int], labels: Sequence[int], path: Path | None = None) -> None:
    """A row as boxes: the text of each token, its id, and its label, green where it is trained.

    Example: figures.token_labels(["Hi", "<|im_end|>"], [13048, 151645], [-100, 151645])
    """
    columns = 10
    lines = -(-len(tokens) // columns)
    figure, axes = pyplot().subplots(figsize=(WIDTH, 0.9 * lines + 0.3), layout="constrained")
    for number, (token, token_id, label) in enumerate(zip(tokens, ids, labels, strict=True)):
        line, column = divmod(number, columns)
        top = -1.45 * line
        trained = label != IGNORED
        color = GREEN if trained else GREY
        box = pyplot().Rectangle((column, top - 1.2), 0.94, 1.2, facecolor=color, alpha=0.25 if trained else 0.12)
        axes.add_patch(box)
        middle = column + 0.47
        axes.text(middle, top - 0.25, _short(token), ha="center", va="center", fontsize=8, weight="bold")
        axes.text(middle, top - 0.62, str(token_id), ha="center", va="center", fontsize=8)
        axes.text(middle, top - 0.97, str(label), ha="center", va="center", fontsize=8, color=color)
    axes.set(xlim=(-0.9, columns), ylim=(-1.45 * lines, 0.1))
    for name, height in ((tr("token"), 0.25), (tr("id"), 0.62), (tr("label"), 0.97)):
        axes.text(-0.1, -height, name, ha="right", va="center", fontsize=8)
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


def _short(token: str, most: int = 9) -> str:
    """A token as a label: its spaces and line breaks visible, its middle left out where it is long."""
    text = token.replace("\n", "⏎").replace(" ", "·")
    return text if len(text) <= most else f"{text[: most - 4]}…{text[-3:]}"
