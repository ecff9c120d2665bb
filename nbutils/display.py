"""Tables, loss curves and live numbers: the HTML of templates/ in a notebook, plain text elsewhere."""

from __future__ import annotations

import io
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from nbutils.config import shown
from nbutils.files import read_json, replacement
from nbutils.language import joined, language, printable, tr
from nbutils.platforms import detect, in_kernel

ACCENT = "var(--jp-brand-color1, #2979c9)"
ALARM = "var(--jp-warn-color1, #e07b00)"
POINTS = 160  # of the live curve, at most
TABLE_WIDTH = 120  # of a table as text; a Chinese character takes two
CHOICE_WIDTHS = (40, 26, 50)  # of a table of choices: what, value, why
WRAPPED_WIDTH = 110  # of a line of prose
ALT_LENGTH = 300  # characters that describe a figure
LIVE_LINE = re.compile(r"\[WARN\]|[^:]* · ")  # of a training, in any language
CURVES = Path(__file__).with_name("curves.json")  # measured by benchmarks/curves.py
Point = tuple[int, float]  # step and loss
Losses = Sequence[Point]
Row = Mapping[str, Any]  # of a table: its cells by heading


def pad(text: str, columns: int) -> str:
    """A text with spaces up to so many columns of a terminal: a Chinese character takes two."""
    import wcwidth  # the export environment has none, and shows no columns

    return wcwidth.ljust(text, columns)


def wrap(text: str, columns: int = WRAPPED_WIDTH) -> list[str]:
    """A text in lines of so many columns."""
    import wcwidth

    return wcwidth.wrap(text, columns, break_on_hyphens=False)


def prose(text: str) -> str:
    """A text in lines. Chinese breaks anywhere, not at its few spaces: that is left to the screen."""
    return text if language() == "zh" else "\n".join(wrap(text))


def render(template: str, **values: Any) -> str:
    """A page of templates/, with every value escaped."""
    import jinja2

    pages = jinja2.Environment(loader=jinja2.PackageLoader("nbutils"), autoescape=True, trim_blocks=True)
    page = pages.get_template(template)
    return page.render(accent=ACCENT, alarm=ALARM, tr=tr, **values)


def show_page(template: str, text: str, **values: Any) -> None:
    """A page of templates/ in a notebook; `text` in a terminal."""
    text = printable(text)
    if not in_kernel():
        print(text)
        return
    from IPython.display import display

    display({"text/html": render(template, **values), "text/plain": text}, raw=True)


def show_table(rows: Sequence[Row], title: str = "", text: str = "") -> None:
    """A table: HTML in a notebook; in a terminal `text`, or else columns, or a line per entry if they are too wide.

    Example: display.show_table([{"question": "2 + 2?", "answer": "4"}], "Answers")
    """
    columns = aligned(rows)
    printed = columns.encode("gbk", "replace").split(b"\n")  # two bytes for a Chinese character, which is two wide
    lines = [title]
    if max(map(len, printed)) <= TABLE_WIDTH:
        lines.append(columns)
    else:
        for row in rows:
            lines += [joined([f"  {tr(name)}", str(value)], ":") for name, value in row.items()]
            lines.append("")
    show_page("table.html", text or "\n".join(lines), rows=rows, title=title)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Named values as a table of two columns.

    Example: display.show_facts({"steps": 150, "loss": 0.002})
    """
    show_table([{"what": name, "value": value} for name, value in facts.items()])


def show_choices(resolved: Any, only: Sequence[str] = ("",)) -> None:
    """The values of a resolved profile whose names begin with one of `only`, and those of SET; each with its reason.

    Example: display.show_choices(lesson.resolved, only=["lora", "sft.learning_rate"])
    """
    shown_names = (*only, *resolved.set_values)
    rows = []
    lines: list[Sequence[str]] = [[tr("what"), tr("value"), tr("why")]]
    for name, choice in resolved.choices.items():
        if name.startswith(shown_names) and name != "about":
            row = {
                "what": name,
                "value": shown(choice.value),
                "why": choice.reason,
            }
            rows.append(row)
            lines += zip_longest(*map(wrap, row.values(), CHOICE_WIDTHS), fillvalue="")
    show_table(rows, text=columns_of(lines))


def show_answers(rows: Sequence[Row], **answers: Sequence[str]) -> None:
    """The last question of each row, the answer it holds, and a column for each list of `answers` to them.

    Example: display.show_answers(eval_rows[:3], before=before, after=after)
    """
    table = []
    for number, row in enumerate(rows):
        *_, question, expected = row["messages"]
        cells = {"question": question["content"], "expected": expected["content"]}
        for name, texts in answers.items():
            cells[name] = texts[number]
        table.append(cells)
    show_table(table)


def aligned(rows: Sequence[Row]) -> str:
    """Rows of a table as columns of text, each as wide as its widest cell.

    Example: print(display.aligned([{"GPU": "T4", "GiB": 15}, {"GPU": "A100", "GiB": 40}]))
    """
    if not rows:
        return ""
    lines = [list(map(tr, rows[0]))]
    for row in rows:
        lines.append(list(map(str, row.values())))
    return columns_of(lines)


def columns_of(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text, each column as wide as its widest cell."""
    import wcwidth

    columns = zip(*lines, strict=True)
    widths = [max(map(wcwidth.width, column)) for column in columns]
    padded = []
    for cells in lines:
        line = "  ".join(map(pad, cells, widths))
        padded.append(line.rstrip())
    return printable("\n".join(padded))


def pyplot() -> Any:
    """matplotlib.pyplot, which can also write Chinese if that is the language of the course."""
    import matplotlib.pyplot as plt

    if language() == "zh":
        with suppress(ImportError):  # where matplotlib alone was installed
            import zhplot

            zhplot.matplotlib_chineseize()
    return plt


def plot_loss_examples(path: Path | None = None) -> None:
    """Four measured trainings side by side: healthy, too slow, diverging and overfitting."""
    panels = {}
    for name, example in read_json(CURVES).items():
        title = tr(name.replace("_", " "))
        panels[title] = {tr("training"): example["train"], tr("validation"): example["validation"]}
    plot_panels(panels, path)


def plot_losses(history: Row, path: Path | None = None, title: str = "Loss", kept: int | None = None) -> None:
    """The curves `train` and `validation` of a history, and the step that is kept; saved to `path` if one is given.

    Example: display.plot_losses({"train": [(1, 2.0), (2, 1.5)], "validation": [(2, 1.6)]})
    """
    curves = {tr("training"): history["train"], tr("validation"): history.get("validation")}
    plot_panels({tr(title): curves}, path, log=True, kept=kept)


def plot_panels(
    panels: Mapping[str, Mapping[str, Losses | None]],
    path: Path | None = None,
    log: bool = False,
    kept: int | None = None,
) -> None:
    """Loss curves by label, in a panel for each title; on a log axis those that are not of the training are marked."""
    if not any(panels.values()):
        return
    columns = len(panels)
    width = max(7, 3.4 * columns)
    figure = pyplot().figure(figsize=(width, 3))
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, columns, number, xlabel=tr("step"), ylabel=tr("loss"))
        axes.set_title(title, fontsize=10)
        for label, curve in curves.items():
            if curve:
                steps, losses = zip(*curve, strict=True)
                axes.plot(steps, losses, marker=".", label=label)
                if log and label != tr("training"):
                    _mark(axes, curve)
        if log:
            axes.set_yscale("log", subs=[3])
            axes.margins(y=0.2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        else:
            axes.axhline(0, color="lightgrey")
        if kept:
            axes.axvline(kept, color="black", linestyle=":", label=tr("kept: step {step}", step=kept))
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    show_figure(figure, path)


def _mark(axes: Any, curve: Losses) -> None:
    """Say where a curve begins, and where it is lowest."""
    best = min(curve, key=itemgetter(1))
    axes.plot(*best, "k*", markersize=11)
    lowest = tr("best {loss:.3g}, step {step}", loss=best[1], step=best[0])
    start = f"{curve[0][1]:.3g}"
    for text, place, shift, side in ((start, curve[0], (7, 2), "left"), (lowest, best, (-3, -15), "right")):
        axes.annotate(
            text,
            place,
            xytext=shift,
            textcoords="offset points",
            fontsize=8,
            ha=side,
        )


def show_figure(figure: Any, path: Path | None = None) -> None:
    """Show a figure in a notebook, and save it to `path` if one is given."""
    import matplotlib.pyplot as plt

    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as file:  # a link of that name is replaced, not followed
            figure.savefig(file, dpi=120, format="png")
    if in_kernel() and "inline" in plt.get_backend():
        from IPython.display import display

        display(figure, metadata={"image/png": {"alt": described(figure)}})
    elif in_kernel():
        plt.show()
    plt.close(figure)


def described(figure: Any) -> str:
    """A figure in words, for who cannot see it: for each panel its title, axes, names of what is drawn, and texts."""
    from matplotlib.ticker import FixedLocator

    panels = []
    for axes in figure.axes:
        _, names = axes.get_legend_handles_labels()
        texts = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *names]
        inside = list(axes.texts)
        if isinstance(axes.yaxis.get_major_locator(), FixedLocator):  # bars: names in the place of numbers
            inside += axes.get_yticklabels()
        texts += [text.get_text() for text in inside]
        panels.append(", ".join(filter(None, texts)))
    words = " ".join("; ".join(panels).split())
    return textwrap.shorten(words, ALT_LENGTH, placeholder=" …")


def watched() -> bool:
    """Whether someone may be looking: a kernel whose frontend can also type; papermill's and Kaggle's batch cannot."""
    if not in_kernel() or detect().batch:
        return False
    kernel = sys.modules["IPython"].get_ipython().kernel
    return bool(getattr(kernel, "_allow_stdin", True))


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


class LiveOutput:
    """One output of a cell, replaced each time; without HTML, where nobody watches, plain lines."""

    handle: Any = None

    def show(self, text: str, html: str = "") -> None:
        """Show this instead of what was there."""
        page = {"text/plain": text, "text/html": html}
        if not html:
            print(text, flush=True)
        elif self.handle:
            self.handle.update(page, raw=True)
        else:
            from IPython.display import display

            self.handle = display(page, raw=True, display_id=True)


def live_line(numbers: Mapping[str, str]) -> str:
    """The numbers of a training in one line."""
    return " · ".join(f"{tr(name)} {value}" for name, value in numbers.items())


def live_page(
    parts: Mapping[str, str], step: int, last: int, losses: Losses, validation: Losses = (), notes: Iterable[str] = ()
) -> str:
    """Numbers by name, how far the training is, its curves and notes, as HTML."""
    stride = len(losses) // POINTS + 1
    curves = [finite(losses[::stride]), finite(validation)]
    values = [loss for curve in curves for _, loss in curve] or [0.0]
    return render(
        "live.html",
        parts=parts,
        notes=notes,
        curves=curves,
        low=min(values),
        high=max(values),
        last=max(last, 1),
        step=step,
    )


def finite(curve: Losses) -> list[Point]:
    """The points of a curve whose loss is a number."""
    return [(step, loss) for step, loss in curve if math.isfinite(loss)]


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:00:07, 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


class LiveLines(io.TextIOBase):
    """A file for papermill's `stdout_file`: of all a lesson prints, the training's lines appear above the bar."""

    rest = ""
    shown = False  # whether the line before was

    def write(self, text: str) -> int:
        """Pass whole lines on, and the indented ones below them."""
        import tqdm

        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.shown = LIVE_LINE.match(line) is not None or (self.shown and line.startswith("   "))
            if self.shown:
                tqdm.tqdm.write(f"  {line}")
        return len(text)
