"""Tables, loss curves and live numbers: the HTML of templates/ in a notebook, plain text elsewhere."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nbutils.config import shown
from nbutils.errors import CourseError
from nbutils.files import read_json
from nbutils.language import joined, language, printable, tr
from nbutils.platforms import detect, in_kernel

ACCENT, ALARM = "var(--jp-brand-color1, #2979c9)", "var(--jp-warn-color1, #e07b00)"
WIDTH, HEIGHT, POINTS = 760, 96, 160  # of the live curve
TEXT_WIDTH, VALUE_WIDTH = 120, 34  # of a table of choices
WRAPPED_WIDTH = 110  # of a line of prose
LIVE_LINE = re.compile(r"\[WARN\]|[^:]* · ")  # of a training, in any language
FONT = "fonts/NotoSansSC-Regular.ttf"  # in the package zhplot: matplotlib's own font has no Chinese
CURVES = Path(__file__).with_name("curves.json")  # measured by benchmarks/curves.py
PIECE = re.compile(r"(?:[\u2e80-\uffef]|[^\s\u2e80-\uffef]+)[，。：；、）》”]*|\s+")  # lines break between two of them
Losses = Sequence[tuple[int, float]]  # step and loss


def width(text: str) -> int:
    """The columns a text takes in a terminal: a Chinese character takes two."""
    from wcwidth import wcswidth  # the export environment has none, and shows no columns

    columns = wcswidth(text)
    return columns if columns >= 0 else len(text)  # control characters have no width


def pad(text: str, columns: int) -> str:
    """A text with spaces up to so many columns."""
    return text + " " * (columns - width(text))


def wrap(text: str, columns: int = WRAPPED_WIDTH) -> list[str]:
    """A text in lines of so many columns, broken at spaces and between Chinese characters."""
    lines = [""]
    for piece in PIECE.findall(text):
        for part in [piece] if width(piece) <= columns else piece:
            if width(lines[-1] + part) > columns:
                lines.append("")
            lines[-1] += part if lines[-1] else part.lstrip()
    return [line.rstrip() for line in lines if line]


def render_html(template: str, **values: Any) -> str:
    """A page of templates/, with every value escaped."""
    import jinja2

    pages = jinja2.Environment(loader=jinja2.PackageLoader("nbutils"), autoescape=True, trim_blocks=True)
    return str(pages.get_template(template).render(accent=ACCENT, alarm=ALARM, tr=tr, **values))


def show(template: str, text: str, **values: Any) -> None:
    """A page of templates/ in a notebook; `text` in a terminal."""
    text = printable(text)
    if not in_kernel():
        print(text)
        return
    from IPython.display import display

    display({"text/html": render_html(template, **values), "text/plain": text}, raw=True)


def show_table(rows: Sequence[dict[str, Any]], title: str = "", text: str = "") -> None:
    """A table: HTML in a notebook; in a script `text`, or else one line per entry."""
    entries = ["".join(f"  {joined([tr(name), str(value)], ':')}\n" for name, value in row.items()) for row in rows]
    show("table.html", text or "\n".join([title, *entries]), rows=rows, title=title)


def show_choices(resolved: Any, only: Sequence[str] = ("",)) -> None:
    """The values of a resolved profile whose names begin with one of `only`, and those of SET; 120 columns wide."""
    wanted = (*only, *resolved.set_values)
    choices = {name: one for name, one in resolved.choices.items() if name.startswith(wanted) and name != "about"}
    first, second = (max(map(width, column)) for column in (choices, [shown(one.value) for one in choices.values()]))
    second = min(second, VALUE_WIDTH)
    lines = [tr("The values of the profile {name}, each with its reason.", name=resolved.name)]
    for name, one in choices.items():
        columns = [name], wrap(shown(one.value), second), wrap(one.reason, TEXT_WIDTH - first - second - 4)
        for head, middle, tail in zip_longest(*columns, fillvalue=""):
            lines.append(f"{pad(head, first)}  {pad(middle, second)}  {tail}".rstrip())
    heads = (tr("what"), tr("value"), tr("why"))
    rows = [dict(zip(heads, (name, shown(one.value), one.reason), strict=True)) for name, one in choices.items()]
    show_table(rows, text="\n".join(lines))


def show_answers(rows: Sequence[Mapping[str, Any]], **answers: Sequence[str]) -> None:
    """The last question of each row, the answer it holds, and a column for each list of `answers` to them."""
    table, named = [], {"before": tr("before"), "after": tr("after")}
    for row, *given in zip(rows, *answers.values(), strict=True):
        *_, question, expected = (message["content"] for message in row["messages"])
        heads = (tr("question"), tr("expected"), *(named.get(name, name) for name in answers))
        table.append(dict(zip(heads, (question, expected, *given), strict=True)))
    show_table(table)


def aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a table as columns of text."""
    lines = [[tr(name) for name in rows[0]], *([str(value) for value in row.values()] for row in rows)] if rows else []
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    padded = (map(pad, line, widths) for line in lines)
    return printable("\n".join("  ".join(cells).rstrip() for cells in padded))


def pyplot() -> Any:
    """matplotlib.pyplot, which can also write Chinese if that is the language of the course."""
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    package = importlib.util.find_spec("zhplot")
    if language() == "zh" and package and package.origin:
        font = Path(package.origin).parent / FONT
        font_manager.fontManager.addfont(font)
        plt.rcParams["font.family"] = ["DejaVu Sans", font_manager.FontProperties(fname=font).get_name()]
    return plt


def plot_loss_examples(path: Path | None = None) -> None:
    """Four measured trainings side by side: healthy, too slow, diverging and overfitting."""
    titles = {}
    for name, example in read_json(CURVES).items():
        settings = {key: example["settings"][key] for key in ("learning_rate", "row_count", "steps")}
        about = tr("rate {learning_rate:g}, {row_count} rows, {steps} steps", **settings)
        titles[f"{tr(name.replace('_', ' '))}\n{about}"] = example
    plot_losses({}, path, panels=titles)


def plot_losses(history: Mapping[str, Any], path: Path | None = None, title: str = "Loss", panels: Any = None) -> None:
    """The curves `train` and `validation` of a history, or of several in `panels`; saved to `path` if one is given."""
    shown = panels or {tr(title): history}
    figure, [axes_of] = pyplot().subplots(1, len(shown), figsize=(max(7, 3.4 * len(shown)), 3), squeeze=False)
    for axes, (title, curves) in zip(axes_of, shown.items(), strict=True):
        axes.plot(*zip(*curves["train"], strict=True), label=tr("training"))
        if validation := curves.get("validation"):
            step, loss = min(validation, key=lambda point: point[1])
            label = tr("validation, best: {loss:.3f} at step {step}", loss=loss, step=step)
            axes.plot(*zip(*validation, strict=True), "o-", ms=4, label=label)
        axes.set(xlabel=tr("step"), ylabel=tr("loss"), ylim=(0, None))
        axes.set_title(title, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    show_figure(figure, path)


def show_figure(figure: Any, path: Path | None = None) -> None:
    """Show a figure in a notebook, and save it to `path` if one is given; only figures of ours are overwritten."""
    import matplotlib.pyplot as plt

    if path:
        if os.path.lexists(path) and (path.is_symlink() or b"Matplotlib" not in path.read_bytes()[:1000]):
            raise CourseError(
                tr("{path} exists, and is not a plot of this course.", path=path),
                todo=tr("Move it away, or name another file."),
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, format="png")
    if in_kernel():
        plt.show()
    plt.close(figure)


def watched() -> bool:
    """Whether someone may be looking: a kernel whose frontend can also type; papermill's and Kaggle's batch cannot."""
    kernel = sys.modules["IPython"].get_ipython().kernel if in_kernel() and not detect().batch else None
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", True))


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
    """One output of a cell, replaced each time; where nobody watches, at most `most_lines` plain lines."""

    def __init__(self, most_lines: float = math.inf) -> None:
        self.lines_left = most_lines
        self.handle: Any = None

    def show(self, text: str, html: str = "") -> None:
        """Show this instead of what was there."""
        page = {"text/plain": text} | ({"text/html": html} if html else {})
        if self.handle is not None:
            self.handle.update(page, raw=True)
        elif watched():
            from IPython.display import display

            self.handle = display(page, raw=True, display_id=True)
        elif self.lines_left > 0:
            self.lines_left -= 1
            print(text, flush=True)


def live_line(parts: Mapping[str, str]) -> str:
    """The numbers in one line."""

    def named(name: str, value: str) -> str:
        texts = {
            "loss": tr("loss {value}", value=value), "validation": tr("validation {value}", value=value),
            "tokens/s": f"{value} tokens/s", "GPU": f"GPU {value}", "left": tr("{value} left", value=value),
        }  # fmt: skip
        return texts.get(name, value)

    return " · ".join(map(named, parts, parts.values()))


def live_page(
    parts: Mapping[str, str], step: int, last: int, losses: Losses, validation: Losses = (), notes: Iterable[str] = ()
) -> str:
    """Numbers by name, how far the training is, its curves and notes, as HTML."""
    thinned = dict([*losses[:: -(-len(losses) // POINTS) or 1], *losses[-1:]])
    curves = [[point for point in curve if math.isfinite(point[1])] for curve in (thinned.items(), validation)]
    low, high = (limit([loss for curve in curves for _, loss in curve], default=0.0) for limit in (min, max))
    x, y = WIDTH / max(last, 1), HEIGHT / ((high - low) or 1.0)
    lines = [" ".join(f"{at * x:.1f},{16 + (high - loss) * y:.1f}" for at, loss in curve) for curve in curves]
    sizes = {"low": low, "high": high, "width": WIDTH, "height": HEIGHT, "percent": 100 * step / max(last, 1)}
    labels = {"loss": tr("loss"), "validation": tr("validation"), "memory": tr("in use"), "cost": tr("cost")}
    labels["left"] = tr("time left")
    return render_html("live.html", parts=parts, labels=labels, notes=notes, lines=lines, **sizes)


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class LiveLines(io.TextIOBase):
    """A file for papermill's `stdout_file`: of all a lesson prints, the training's lines appear above the bar."""

    rest = ""

    def write(self, text: str) -> int:
        """Pass whole lines on."""
        import tqdm

        *lines, self.rest = (self.rest + text).split("\n")
        for line in filter(LIVE_LINE.match, lines):
            tqdm.tqdm.write(f"  {line}")
        return len(text)
