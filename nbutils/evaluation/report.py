"""Did the tuning help? The verdict, what was forgotten, table and figure, facts, and one HTML page.

Form is cheap: loss and character F1 improve on any answers, right or wrong. So only content decides (metrics.content),
and it must rise further than chance explains. Texts: verdict.yaml; in the page they are escaped and masked.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from nbutils import display
from nbutils.data.text import mask, shown
from nbutils.evaluation import metrics
from nbutils.evaluation.evaluator import Evaluator, Result
from nbutils.evaluation.inference import Answer, Message
from nbutils.evaluation.metrics import Difference, Estimate
from nbutils.files import write_text

# what is shown, and how: its name, its format, and in a few words what it is
SHOWN = {
    "loss": ("loss", ".3f", "nats per token of the reference; perplexity is e to this"),
    "exact_match": ("exact match", ".1%", "answers that are the reference, to the letter"),
    "character_f1": ("character F1", ".3f", "characters shared, in any order"),
    "rouge_l": ("ROUGE-L", ".3f", "characters shared, in order"),
    "exact_content": ("content (exact)", "+.3f", "exact match beyond other rows' references"),
    "content": ("content (ROUGE-L)", "+.3f", "ROUGE-L beyond other rows' references"),
    "characters": ("length", ".0f", "characters of an answer"),
    "tokens": ("tokens", ".1f", "tokens of an answer"),
    "stopped": ("stopped", ".1%", "answers that end by themselves within the tokens allowed"),
}
SHARES = ("exact_match", "stopped")  # 0 or 1 for each row
PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")
DECIDING = ("exact_content", "content")
ALPHA = 0.05 / len(DECIDING)  # Bonferroni: two chances to rise by luck, so p of each must be smaller
RULE = f"content rose if its {metrics.LEVEL:.0%} interval is above 0 and p < {ALPHA:g} (0.05, shared by two scores)"
LEAST_ROWS, FEW_ROWS, LEAST_GENERAL = 8, 20, 10  # below: no verdict; a flag; no word on forgetting
CUT_OFF = 0.2  # share of unfinished thinking that makes a comparison worthless
FORGOT_PERPLEXITY, FORGOT_F1 = 1.10, -0.05  # ratio above, change below
WIDTH = 110  # of a line on a screen
SAMPLES, LONGEST = 6, 1200  # rows of each list in the page, characters of a text


@cache
def _texts() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("verdict.yaml").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Verdict:
    """One word, why, what to do next, and what else looks wrong."""

    word: str
    why: str
    todo: str
    flags: list[str]

    def __str__(self) -> str:
        todo = [f"To do: {self.todo}"] if self.todo else []
        lines = [f"VERDICT: {self.word}", self.why, *todo, *(f"[WARN] {flag}" for flag in self.flags)]
        return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge: the ratio of perplexities, after to before, and F1 of the answers."""

    word: str
    ratio: Estimate
    f1: Difference

    @property
    def text(self) -> str:
        """The numbers and what they mean, in a sentence."""
        means = _texts()["forgetting"][self.word]
        return f"Perplexity x {self.ratio.text('.3g')}, character F1 {self.f1.estimate.text('+.3f')}: {means}."

    def __str__(self) -> str:
        return f"GENERAL KNOWLEDGE: {self.word}\n{textwrap.fill(self.text, WIDTH)}"


def change(base: Result, tuned: Result, score: str) -> Difference:
    """A score, after minus before, on the same rows: one number for table, figure and verdict."""
    (before, weights), (after, _) = base.values(score), tuned.values(score)
    return metrics.paired_difference(before, after, weights, shares=score in SHARES)


def direction(found: Difference) -> int:
    """1 for risen, -1 for fallen, 0 where chance would do: interval and test must agree (RULE)."""
    return (found.estimate.low > 0) - (found.estimate.high < 0) if found.p < ALPHA else 0


def judge(base: Result, tuned: Result) -> Verdict:
    """Compare the answers of two models to the same rows."""
    rows, changes = len(base.answers), {score: change(base, tuned, score) for score in DECIDING}
    moved = {direction(one) for one in changes.values()}
    if rows < LEAST_ROWS:
        case = "too_few_rows"
    elif max(base.mean("unfinished"), tuned.mean("unfinished")) > CUT_OFF:
        case = "cut_in_thinking"
    else:
        case = {1: "helped", -1: "harmed", 0: "no_proof"}[sum(moved)]  # one up and one down: no proof
    right = [round(sum(one.scores["exact_match"])) for one in (base, tuned)]
    gained = [f"{SHOWN[score][0]} {one.estimate.text('+.3f')}, p {one.p_text}" for score, one in changes.items()]
    values = {"rows": rows, "before": right[0], "after": right[1], "content": "; ".join(gained)}
    texts = {name: text.format(**values) for name, text in _texts()["cases"][case].items()}
    flags = [_texts()["few_rows"].format(rows=rows)] if rows < FEW_ROWS else []
    longest = max(map(len, base.references))
    for one, enough in ((base, longest), (tuned, math.inf)):  # a base may be wordy
        count = sum(not answer.stopped and len(answer.text) < enough for answer in one.answers)
        flags += [_texts()["cut_off"].format(name=one.name, count=count, rows=rows)] if count > rows / 10 else []
    return Verdict(**texts, flags=flags)


def forgetting(base: Result, tuned: Result) -> Forgetting:
    """Whether perplexity on the general rows surely rose by more than a tenth, or F1 fell by more than 0.05."""
    loss, f1 = change(base, tuned, "loss").estimate, change(base, tuned, "character_f1")
    ratio = Estimate(*(math.exp(min(one, 50.0)) for one in (loss.mean, loss.low, loss.high)))
    answers_lost = f1.estimate.mean < FORGOT_F1 and f1.estimate.high < 0 and f1.p < 0.05
    word = "kept" if ratio.high <= FORGOT_PERPLEXITY else "unclear"
    if ratio.low > FORGOT_PERPLEXITY or answers_lost:
        word = "forgot"
    return Forgetting(word if len(base.answers) >= LEAST_GENERAL else "unclear", ratio, f1)


@dataclass(frozen=True)
class Comparison:
    """The results of one evaluator: the first is the one before the tuning, the last the one after."""

    results: Sequence[Result]
    general: Sequence[Result] = ()
    evaluator: Evaluator | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it helped."""
        return judge(self.results[0], self.results[-1])

    @cached_property
    def forgetting(self) -> Forgetting | None:
        """What became of general knowledge, if it was asked for."""
        return forgetting(self.general[0], self.general[-1]) if self.general else None

    @cached_property
    def means(self) -> dict[str, dict[str, Estimate]]:
        """Each score of each model with its interval."""
        return {score: {one.name: _mean(score, *one.values(score)) for one in self.results} for score in SHOWN}

    @cached_property
    def changes(self) -> dict[str, Difference]:
        """Each score, after minus before, on the same rows."""
        return {score: change(self.results[0], self.results[-1], score) for score in SHOWN}

    @property
    def page(self) -> Path:
        """The HTML report."""
        assert self.evaluator
        return self.evaluator.folder / "report.html"

    def table(self, *scores: str) -> list[dict[str, str]]:
        """For display: one row for each score, or for those named."""
        rows = []
        for score in scores or SHOWN:
            label, form, _ = SHOWN[score]
            means = {name: one.text(form) for name, one in self.means[score].items()}
            change = self.changes[score]
            signed = change.estimate.text(f"+{form.lstrip('+')}")
            rows.append({"score": label} | means | {"difference": signed, "p": change.p_text})
        return rows

    def show_scores(self, *scores: str) -> None:
        """The table in a notebook, or as text."""
        display.show_table(table := self.table(*scores), text=display.aligned(table))

    def show_answers(self, rows: int = 6, *, general: bool = False) -> None:
        """The first answers of each model beside the reference; a tick if they are equal."""
        results = self.general if general else self.results
        columns = {one.name: one.texts for one in results}
        display.show_table(before_after_table(results[0].questions, results[0].references, columns, rows))

    def plot(self, *scores: str) -> None:
        """The scores as a figure, also in evaluation/scores.png."""
        display.show_figure(_figure(self, scores), self.page.with_name("scores.png"))

    def summary(self) -> list[str]:
        """The main numbers, a line each."""
        lines = [f"verdict: {self.verdict.word}"]
        for score in ("exact_match", "content"):
            label, form, _ = SHOWN[score]
            means = [f"{name} {one.text(form)}" for name, one in self.means[score].items()]
            lines.append(f"{label}: {', '.join(means)}")
        lines += [f"general knowledge: {self.forgetting.word}"] if self.forgetting else []
        lines += [f"warning: {flag}" for flag in self.verdict.flags]
        return [*lines, "all of it: [evaluation/report.html](evaluation/report.html)"]

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        first, verdict = self.results[0], asdict(self.verdict)
        evaluation = {
            "verdict": verdict.pop("word"), "rows": len(first.answers), **verdict,
            "scores": {
                score: {name: one.facts() for name, one in means.items()} | {"difference": self.changes[score].facts()}
                for score, means in self.means.items()
            },
            "summary": self.summary(),
            "perplexity": {one.name: math.exp(one.loss) if one.loss < 50 else None for one in self.results},
            "answers_by": {one.name: one.by for one in self.results},
        }  # fmt: skip
        if self.forgetting:
            evaluation["general"] = {
                "verdict": self.forgetting.word, "perplexity_ratio": self.forgetting.ratio.facts(),
                "loss": {one.name: one.loss if math.isfinite(one.loss) else None for one in self.general},
                "rows": len(self.general[0].answers), "character_f1_difference": self.forgetting.f1.facts(),
            }  # fmt: skip
        if self.evaluator:
            evaluation |= self.evaluator.facts() | {"report": str(self.page)}
        return {
            "exact_match": {one.name: one.mean("exact_match") for one in self.results}, "rows": len(first.answers),
            "rows_left_out": evaluation.get("rows_left_out", 0), "verdict": self.verdict.word, "evaluation": evaluation,
        }  # fmt: skip


def _mean(score: str, values: list[float], weights: list[float] | None = None) -> Estimate:
    return metrics.share_interval(values) if score in SHARES else metrics.mean_interval(values, weights)


def score_table(evaluator: Evaluator, answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, str]]:
    """The means of several sets of answers to one evaluator, for display."""
    scored = {name: evaluator.score(evaluator.with_think_tag(given)) for name, given in answers.items()}
    return [
        {"score": SHOWN[score][0]}
        | {name: _mean(score, one[score]).text(SHOWN[score][1]) for name, one in scored.items()}
        for score in ("exact_match", "character_f1", "rouge_l", "stopped")
    ]


def before_after_table(
    questions: Sequence[list[Message]], references: Sequence[str], columns: Mapping[str, Sequence[str]], rows: int = 6
) -> list[dict[str, str]]:
    """For display: the question, the reference, and each model's answer with a tick or a cross; private data masked."""
    table = []
    for index in range(min(rows, len(references))):
        row = {"question": mask(str(questions[index][-1]["content"])), "reference": mask(references[index])}
        for name, answers in columns.items():
            tick = "✓" if metrics.exact(answers[index], references[index]) else "✗"
            row[name] = f"{tick} {mask(answers[index].strip())}"
        table.append(row)
    return table


def _figure(comparison: Comparison, scores: Sequence[str] = ()) -> Any:
    """Small panels, three in a line, the models from left to right: a dot with its interval each."""
    import matplotlib.pyplot as plt

    scores = scores or PANELS
    lines = -(-len(scores) // 3)
    figure, axes = plt.subplots(lines, 3, figsize=(8.4, 2.2 * lines), squeeze=False)
    for panel, score in zip(axes.flat, scores, strict=False):
        for name, one in comparison.means[score].items():
            panel.errorbar([name], [one.mean], [[one.mean - one.low], [one.high - one.mean]], fmt="o", lw=4)
        panel.set_title(SHOWN[score][0], loc="left")
        panel.margins(x=0.4)
        panel.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    return figure


def write_report(path: Path, run: str, evaluator: Evaluator, comparison: Comparison, about: Mapping[str, Any]) -> Path:
    """Write the page; `about` says how it was measured (GPU, versions, dtype)."""
    import jinja2
    import matplotlib.pyplot as plt

    template, svg = Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), io.StringIO()
    figure = _figure(comparison)
    figure.savefig(svg, format="svg")
    plt.close(figure)  # a notebook shows every figure that is left open
    tuned, before = comparison.results[-1].scores, comparison.results[0].scores["exact_match"]
    wrong = [row for row, right in enumerate(tuned["exact_match"]) if not right]
    worst = sorted(wrong, key=lambda row: (-before[row], tuned["rouge_l"][row]))  # those first that were right before
    page = jinja2.Environment(autoescape=True).from_string(template).render(
        run=run, date=f"{datetime.now():%Y-%m-%d %H:%M}", evaluator=evaluator, comparison=comparison, about=about,
        first=range(min(SAMPLES, len(evaluator.rows))), worst=worst[:SAMPLES], rule=RULE, level=f"{metrics.LEVEL:.0%}",
        descriptions=[text for _, _, text in SHOWN.values()], shown=_shown, answer=metrics.without_thinking,
        svg=svg.getvalue().partition("<svg")[2],
    )  # fmt: skip
    write_text(path, page.encode("utf-8", "replace").decode("utf-8") + "\n")
    return path


def _shown(value: Any) -> str:
    """A text for other eyes: private data masked, control characters visible, cut if it is very long."""
    text = "\n".join(map(shown, str(value or "").split("\n")))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text)} characters)"
