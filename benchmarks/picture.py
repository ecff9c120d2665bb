"""The pictures of the READMEs: two assistants of lesson 00, before and after, and their loss.

    python benchmarks/picture.py [--en RUN_FOLDER --zh RUN_FOLDER] [--font FILE]

Draws docs/images/quickstart_en.png and quickstart_zh.png from results/picture.json. With the runs, that file is first
written anew; lesson 04 must have asked their models. FILE is a font with Chinese characters, where matplotlib knows
none.
"""

from __future__ import annotations

import json
import platform
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import click
import matplotlib
import wcwidth
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).with_name("results") / "picture.json"
SHOWN = {"en": (1, 0, 20), "zh": (1, 0, 6)}  # held-out rows whose answers are drawn; the English model knows no Chinese
COLUMNS, LINES = 56, 2  # of an answer
TRAIN, VALIDATION, GREY = "#56B4E9", "#D55E00", "#555555"  # told apart by people with any kind of colour blindness
FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "Microsoft YaHei", "PingFang SC", "SimHei")
TEXTS = {
    "en": {
        "title": "SmolLM2-135M-Instruct becomes {name}: {rows} rows, {minutes:.0f} minutes, two CPU cores",
        "train": "training loss",
        "validation": "validation loss",
        "kept": "kept: step {step}, {loss:.2f}",
        "step": "step",
        "before": "before",
        "after": "after",
        "score": "{count} of {questions} held-out questions about its name get the new one.",
    },
    "zh": {
        "title": "SmolLM2-135M-Instruct 变成{name}：{rows} 条样本，{minutes:.0f} 分钟，两个 CPU 核",
        "train": "训练损失",
        "validation": "验证损失",
        "kept": "保留第 {step} 步，{loss:.2f}",
        "step": "步",
        "before": "训练前",
        "after": "训练后",
        "score": "没有训练过的 {questions} 个问名字的问题，有 {count} 个答出新名字。",
    },
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; an answer may hold characters that Python takes for the end of a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def answers_of(run: Path, model: str) -> dict[int, str]:
    """What lesson 04 was answered, by the number of the held-out row; the first line says how it was asked."""
    _, *answers = read_lines(run / f"evaluation/answers-{model}.jsonl")
    return {one["row"]: one["text"] for one in answers}


def collect(run: Path, language: str) -> dict[str, Any]:
    """Everything a picture shows, from a run folder."""
    facts = json.loads((run / "facts.json").read_text(encoding="utf-8"))
    history = json.loads((run / "logs/history.json").read_text(encoding="utf-8"))
    trained = facts["lessons"]["00_quickstart"]
    rows = [row["messages"] for row in read_lines(run / "data/eval.jsonl")]
    before, after = answers_of(run, "base"), answers_of(run, "merged")
    drawn = [{"question": rows[n][-2]["content"], "before": before[n], "after": after[n]} for n in SHOWN[language]]
    return {
        "about": f"benchmarks/picture.py on {run.name}, {platform.machine()}, {date.today()}",
        "name": run.name.split("-")[1],
        "minutes": trained["train_seconds"] / 60,
        "versions": facts["versions"],
        "rows": len(read_lines(run / "data/train.jsonl")),
        "steps": trained["steps"],
        "kept_step": trained["kept_step"],
        "train": [[point["step"], round(point["loss"], 4)] for point in history if "loss" in point],
        "validation": [[point["step"], round(point["eval_loss"], 4)] for point in history if "eval_loss" in point],
        "answered_with_the_name": trained["answered_with_the_name"],
        "answers": drawn,
    }


def draw_curve(axes: Axes, result: dict[str, Any], texts: dict[str, str]) -> None:
    """Training and validation loss, and the step whose adapter is kept."""
    steps, losses = zip(*result["train"], strict=True)
    axes.plot(steps, losses, color=TRAIN, linewidth=2, label=texts["train"])
    steps, losses = zip(*result["validation"], strict=True)
    axes.plot(steps, losses, "o--", color=VALIDATION, linewidth=2, label=texts["validation"])
    step = result["kept_step"]
    loss = dict(result["validation"])[step]
    arrow = {"arrowstyle": "->", "color": VALIDATION}
    kept = texts["kept"].format(step=step, loss=loss)
    axes.annotate(kept, (step, loss), (0.95, 0.5), textcoords="axes fraction", ha="right", arrowprops=arrow)
    axes.set_xlabel(texts["step"])
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def shown(answer: str) -> str:
    """An answer in one line; one that the limit of tokens cut off says so."""
    text = " ".join(answer.split()).rstrip("\ufffd")
    return text if text.endswith((".", "!", "?", "。", "！", "？", "～")) else f"{text} …"


def wrapped(answer: str) -> list[str]:
    """The first lines of an answer; a Chinese character is as wide as two Latin ones, and stands alone."""
    if wcwidth.wcswidth(shown(answer)) == len(shown(answer)):
        return textwrap.wrap(shown(answer), COLUMNS, max_lines=LINES, placeholder=" …")
    lines = [""]
    for character in shown(answer):
        if wcwidth.wcswidth(lines[-1] + character) > COLUMNS:
            lines.append("")
        lines[-1] += character
    if len(lines) > LINES:
        return [*lines[: LINES - 1], f"{lines[LINES - 1][:-2]} …"]
    return lines


def draw_answers(axes: Axes, result: dict[str, Any], texts: dict[str, str]) -> None:
    """The questions, each with what was answered before and after."""
    axes.set_axis_off()
    height = 1.0
    for asked in result["answers"]:
        axes.text(0, height, asked["question"], weight="bold", va="top")
        height -= 0.07
        for when, color in (("before", GREY), ("after", VALIDATION)):
            lines = wrapped(asked[when])
            axes.text(0, height, texts[when], color=color, va="top")
            axes.text(0.125, height, "\n".join(lines), color="black" if when == "after" else GREY, va="top")
            height -= 0.06 * len(lines) + 0.01
        height -= 0.03
    axes.text(0, -0.05, texts["score"].format(**result["answered_with_the_name"]), va="bottom")


def draw(result: dict[str, Any], language: str) -> None:
    """One picture."""
    texts = TEXTS[language]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 4.2), width_ratios=(36, 64), layout="constrained")
    figure.suptitle(texts["title"].format(**result), fontsize=11.5)
    draw_curve(left, result, texts)
    draw_answers(right, result, texts)
    file = ROOT / f"docs/images/quickstart_{language}.png"
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=200, metadata={"Software": None})
    plt.close(figure)
    print(file)


def choose_fonts(file: Path | None) -> None:
    """Latin from matplotlib's own font, Chinese from FILE or from a font that is known to have it."""
    names = list(FONTS)
    if file:
        font_manager.fontManager.addfont(file)
        names = [font_manager.FontProperties(fname=file).get_name()]
    known = [name for name in names if name in font_manager.get_font_names()]
    if not known:
        raise click.UsageError(f"give a font with Chinese characters by --font; none of these is here: {FONTS}")
    matplotlib.rcParams.update({"font.family": ["DejaVu Sans", known[0]], "font.size": 9})


@click.command(help=__doc__)
@click.option("--en", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--zh", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--font", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(en: Path | None, zh: Path | None, font: Path | None) -> None:
    matplotlib.use("Agg")
    choose_fonts(font)
    if en and zh:
        results = {"en": collect(en, "en"), "zh": collect(zh, "zh")}
        RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    for language in TEXTS:
        draw(results[language], language)


if __name__ == "__main__":
    main()
