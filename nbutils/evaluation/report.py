"""Base and tuned side by side: the table, the figure, the facts, and one HTML page that opens by itself.

Everything a learner or a model wrote is escaped in the page, and private data in it masked: pages are sent around.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import dashboard, record
from nbutils.data.text import mask, shown
from nbutils.evaluation import metrics, stats
from nbutils.evaluation.exam import Exam, Result
from nbutils.evaluation.inference import Answer, Message
from nbutils.evaluation.verdict import RULE, SHARES, Forgetting, Verdict, change, forgetting, judge
from nbutils.paths import write_text

if TYPE_CHECKING:
    from nbutils.lessons import Lesson

# what is shown, and how: its name, its format, and in a few words what it is
SHOWN = {
    "loss": ("loss", ".3f", "nats per token of the wanted answer; perplexity is e to this"),
    "exact_match": ("exact match", ".1%", "answers that are the wanted one, to the letter"),
    "character_f1": ("character F1", ".3f", "characters shared, in any order"),
    "rouge_l": ("ROUGE-L", ".3f", "characters shared, in order"),
    "exact_content": ("content (exact)", "+.3f", "exact match beyond other rows' references"),
    "content": ("content (ROUGE-L)", "+.3f", "ROUGE-L beyond other rows' references"),
    "characters": ("length", ".0f", "characters of an answer"),
    "tokens": ("tokens", ".1f", "tokens of an answer"),
    "stopped": ("stopped", ".1%", "answers that end by themselves within the tokens allowed"),
}
PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")
COLORS = ("#8a8f98", "#7a5cc9", "#2979c9")
INK = "#010203"  # replaced by the color of the text around it, so that the figure is readable in the dark
SAMPLES, LONGEST = 6, 1200  # rows of each list, characters of a text


@dataclass(frozen=True)
class Outcome:
    """The results of one exam: the first is the one before the tuning, the last the one after."""

    results: Sequence[Result]
    general: Sequence[Result] = ()

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it helped."""
        return judge(self.results[0], self.results[-1])

    @cached_property
    def forgetting(self) -> Forgetting | None:
        """What became of general knowledge, if it was asked for."""
        return forgetting(self.general[0], self.general[-1]) if self.general else None

    @cached_property
    def means(self) -> dict[str, dict[str, stats.Estimate]]:
        """Each score of each model with its interval."""
        return {score: {one.name: _mean(score, *one.values(score)) for one in self.results} for score in SHOWN}

    @cached_property
    def changes(self) -> dict[str, stats.Difference]:
        """Each score, after minus before, on the same rows."""
        return {score: change(self.results[0], self.results[-1], score) for score in SHOWN}

    def table(self) -> list[dict[str, str]]:
        """For display: one row for each score."""
        rows = []
        for score, (label, form, _) in SHOWN.items():
            means = {name: one.text(form) for name, one in self.means[score].items()}
            found = self.changes[score]
            difference = found.estimate.text(f"+{form.removeprefix('+')}")
            rows.append({"score": label, **means, "difference": difference, "p": found.p_text})
        return rows

    def text(self) -> str:
        """The same table for a terminal."""
        return dashboard.aligned(self.table())

    def summary(self) -> list[str]:
        """The main numbers, a line each."""
        lines = [f"verdict: {self.verdict.word}"]
        for score in ("exact_match", "content"):
            label, form, _ = SHOWN[score]
            means = [f"{one.name} {self.means[score][one.name].text(form)}" for one in self.results]
            lines.append(f"{label}: {', '.join((means[0], means[-1]))}")
        lines += [f"general knowledge: {self.forgetting.word}"] if self.forgetting else []
        lines += [f"warning: {flag}" for flag in self.verdict.flags]
        return [*lines, "all of it: [evaluation/report.html](evaluation/report.html)"]

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        found = asdict(self.verdict)
        return {
            "verdict": found.pop("word"), "rows": len(self.results[0].answers), **found,
            "scores": {
                score: {name: one.facts() for name, one in means.items()} | {"difference": self.changes[score].facts()}
                for score, means in self.means.items()
            },
            "summary": self.summary(),
            "perplexity": {one.name: math.exp(one.loss) if one.loss < 50 else None for one in self.results},
            "answers_by": {one.name: one.by for one in self.results},
            **({"general": self._general_facts(self.forgetting)} if self.forgetting else {}),
        }  # fmt: skip

    def _general_facts(self, found: Forgetting) -> dict[str, Any]:
        losses = {one.name: one.loss if math.isfinite(one.loss) else None for one in self.general}
        return {
            "verdict": found.word, "perplexity_ratio": found.ratio.facts(), "loss": losses,
            "rows": len(self.general[0].answers), "character_f1_difference": found.f1.facts(),
        }  # fmt: skip


def _mean(score: str, values: list[float], weights: list[float] | None = None) -> stats.Estimate:
    return stats.share_interval(values) if score in SHARES else stats.mean_interval(values, weights)


def score_table(exam: Exam, answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, str]]:
    """The means of several sets of answers to one exam, for display."""
    scored = {name: exam.score(exam.with_think_tag(given)) for name, given in answers.items()}
    table = []
    for score in ("exact_match", "character_f1", "rouge_l", "stopped"):
        label, form, _ = SHOWN[score]
        table.append({"score": label} | {name: _mean(score, one[score]).text(form) for name, one in scored.items()})
    return table


def before_after_table(
    questions: Sequence[list[Message]], references: Sequence[str], columns: dict[str, Sequence[str]], rows: int = 6
) -> list[dict[str, str]]:
    """For display: the question, the reference, and each model's answer with a tick or a cross; private data masked."""
    table = []
    for index in range(min(rows, len(references))):
        row = {"question": mask(str(questions[index][-1]["content"])), "wanted": mask(references[index])}
        for name, answers in columns.items():
            tick = "✓" if metrics.exact(answers[index], references[index]) else "✗"
            row[name] = f"{tick} {mask(answers[index].strip())}"
        table.append(row)
    return table


def plot(outcome: Outcome, path: Path | None = None) -> None:
    """Show the scores as a figure in a notebook, and save it to `path` if one is given."""
    dashboard.show_figure(_figure(outcome, "black"), path)


def as_svg(outcome: Outcome) -> str:
    """The same as SVG, to stand inside a page and take its colors."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "course", "font.family": "sans-serif"}):
        figure = _figure(outcome, INK)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _figure(outcome: Outcome, ink: str) -> Any:
    """Six small panels, the models from left to right: a dot with its interval each."""
    import matplotlib.pyplot as plt

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inked, ink) | {"font.size": 9}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 3, figsize=(8.4, 4.4))
        for panel, score in zip(axes.flat, PANELS, strict=True):
            means = outcome.means[score]
            for place, (one, color) in enumerate(zip(means.values(), COLORS, strict=False)):
                panel.plot([place] * 2, [one.low, one.high], color=color, lw=5, alpha=0.4, solid_capstyle="butt")
                panel.plot([place], [one.mean], "o", color=color, markersize=7)
            panel.set_title(SHOWN[score][0], loc="left")
            panel.set_xticks(range(len(means)), list(means))
            panel.set_xlim(-0.5, len(means) - 0.5)
            panel.grid(axis="y", alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
            if score not in ("loss", "content"):
                panel.set_ylim(-0.05, 1.05)
        figure.tight_layout()
    return figure


def write_report(path: Path, run: str, exam: Exam, outcome: Outcome, about: Mapping[str, Any]) -> Path:
    """Write the page; `about` says how it was measured (GPU, versions, dtype)."""
    import jinja2

    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    tuned, before = outcome.results[-1].scores, outcome.results[0].scores["exact_match"]
    wrong = [row for row, right in enumerate(tuned["exact_match"]) if not right]
    worst = sorted(wrong, key=lambda row: (-before[row], tuned["rouge_l"][row]))  # those first that were right before
    page = jinja2.Environment(autoescape=True).from_string(template).render(
        run=run, date=f"{datetime.now():%Y-%m-%d %H:%M}", exam=exam, outcome=outcome, svg=as_svg(outcome), about=about,
        first=range(min(SAMPLES, len(exam.rows))), worst=worst[:SAMPLES], rule=RULE, level=f"{stats.LEVEL:.0%}",
        descriptions=[text for _, _, text in SHOWN.values()], shown=_shown, answer=metrics.without_thinking,
    )  # fmt: skip
    write_text(path, page.encode("utf-8", "replace").decode("utf-8") + "\n")
    return path


def about(lesson: Lesson) -> dict[str, Any]:
    """The machine and the packages a lesson ran with."""
    versions = ", ".join(f"{name} {number}" for name, number in record.versions().items())
    gpu = str(lesson.card) if lesson.card else "CPU only"
    return {"model": lesson.model_name, "machine": f"{lesson.platform.name}, {gpu}", "versions": versions}


def _shown(value: Any) -> str:
    """A text for other eyes: private data masked, control characters visible, cut if it is very long."""
    text = "\n".join(map(shown, str(value or "").split("\n")))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text)} characters)"
