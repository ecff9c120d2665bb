"""What people look at: the loss curve, tables, a chat box. Plain output where no frontend is attached.

Not here: any logic. Labels in plots are English: Colab has no Chinese font.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbutils.hardware import Choice
from nbutils.platforms import detect, in_kernel


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


def plot_losses(history: Sequence[tuple[int, float]], path: Path | None = None, title: str = "Training loss") -> None:
    """The loss curve, shown in a notebook and saved to `path` if one is given."""
    import matplotlib.pyplot as plt

    if not history:
        print("No loss was logged: nothing to plot.")
        return
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot([step for step, _ in history], [loss for _, loss in history], linewidth=2)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    if in_kernel():
        plt.show()
    plt.close(figure)


def chat(answer: Callable[[str], str], example: str, live: bool = True) -> None:
    """One example question and its answer; below it, in a live notebook, a box to type in."""
    print(f"you    {example}\nmodel  {answer(example)}")
    if not live or not in_kernel() or detect().batch:
        return
    try:
        import ipywidgets as widgets
        from IPython.display import display
    except ImportError:
        return
    question, log = widgets.Text(placeholder="Type a message and press Enter"), widgets.Output()

    def reply(_: Any) -> None:
        text, question.value = question.value, ""
        with log:
            print(f"you    {text}\nmodel  {answer(text)}")

    button = widgets.Button(description="Send")
    button.on_click(reply)
    display(widgets.VBox([widgets.HBox([question, button]), log]))
