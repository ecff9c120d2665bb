"""The scores as a picture: each model a dot with its interval. Labels are English, as Colab has no Chinese font.

Not here: the numbers (comparing) or the page around it (report).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from nbutils import dashboard
from nbutils.evaluation.comparing import SHOWN, Outcome

PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")
COLOURS = ("#8a8f98", "#7a5cc9", "#2979c9")
INK = "#010203"  # replaced by the colour of the text around it, so that the picture is readable in the dark


def plot(outcome: Outcome, path: Path | None = None) -> None:
    """Show it in a notebook, and save it to `path` if one is given."""
    dashboard.show_figure(draw(outcome, "black"), path)


def as_svg(outcome: Outcome) -> str:
    """The same as SVG, to stand inside a page and take its colours."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "course", "font.family": "sans-serif"}):
        figure = draw(outcome, INK)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def draw(outcome: Outcome, ink: str) -> Any:
    """Six small panels, the models from left to right."""
    import matplotlib.pyplot as plt

    shapes: Any = {
        key: ink for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    }
    with plt.rc_context(shapes | {"font.size": 9}):
        figure, axes = plt.subplots(2, 3, figsize=(8.4, 4.4))
        for panel, score in zip(axes.flat, PANELS, strict=True):
            _draw_score(panel, outcome, score)
        figure.tight_layout()
    return figure


def _draw_score(panel: Any, outcome: Outcome, score: str) -> None:
    means = outcome.means[score]
    for place, (one, colour) in enumerate(zip(means.values(), COLOURS, strict=False)):
        panel.plot([place, place], [one.low, one.high], color=colour, linewidth=5, alpha=0.4, solid_capstyle="butt")
        panel.plot([place], [one.mean], "o", color=colour, markersize=7)
    panel.set_title(SHOWN[score][0], loc="left")
    panel.set_xticks(range(len(means)), list(means))
    panel.set_xlim(-0.5, len(means) - 0.5)
    panel.grid(axis="y", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if score in ("exact_match", "character_f1", "rouge_l", "stopped"):
        panel.set_ylim(-0.05, 1.05)
    elif score == "loss":
        panel.set_ylim(0, None)
