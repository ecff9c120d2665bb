"""Did the tuning help? A verdict that can say no, what looks wrong besides, and what was forgotten.

Form is cheap: loss and character F1 improve on any answers, right or wrong. So only content decides (metrics.content),
and it must rise further than chance explains. The texts are in verdict.yaml.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nbutils.evaluation import metrics, stats
from nbutils.evaluation.exam import Result

DECIDING = {"exact_content": "Exact match", "content": "ROUGE-L"}  # beyond other rows' references
ALPHA = 0.05 / len(DECIDING)  # Bonferroni: two chances to rise by luck, so p of each must be smaller
RULE = f"content rose if its {stats.LEVEL:.0%} interval is above 0 and p < {ALPHA:g} (0.05, shared by two scores)"
SHARES = ("exact_match", "stopped")  # 0 or 1 for each row
LEAST_ROWS, FEW_ROWS, LEAST_GENERAL = 8, 20, 10  # below: no verdict; a flag; no word on forgetting
CUT_OFF = 0.2  # share of unfinished thinking that makes a comparison worthless
SOLVED = 0.95  # exact match of a base that has nothing left to learn
FORGOT_PERPLEXITY, FORGOT_F1 = 1.10, -0.05  # ratio above, change below
LARGEST = 10_000.0  # a ratio beyond this says no more than "lost"
WIDTH = 110  # of a line on a screen


@cache
def _texts() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Verdict:
    """One word, why, what to do next, and what else looks wrong."""

    word: str
    why: str
    todo: str
    flags: list[str] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The word as a sentence."""
        return str(_texts()["headlines"][self.word])

    def __str__(self) -> str:
        todo = [f"To do: {self.todo}"] if self.todo else []
        lines = [f"VERDICT: {self.headline}", self.why, *todo, *(f"[WARN] {flag}" for flag in self.flags)]
        return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def change(base: Result, tuned: Result, score: str) -> stats.Difference:
    """A score, after minus before, on the same rows: one number for table, figure and verdict."""
    (before, weights), (after, _) = base.values(score), tuned.values(score)
    return stats.paired_difference(before, after, weights, shares=score in SHARES)


def direction(found: stats.Difference) -> int:
    """1 for risen, -1 for fallen, 0 where chance would do: interval and test must agree (RULE)."""
    return (found.estimate.low > 0) - (found.estimate.high < 0) if found.p < ALPHA else 0


class Evidence:
    """Two results of one exam, and how the deciding scores moved between them."""

    def __init__(self, base: Result, tuned: Result) -> None:
        self.base, self.tuned, self.rows = base, tuned, len(base.answers)
        self.changes = {score: change(base, tuned, score) for score in DECIDING}
        self.risen = [score for score, one in self.changes.items() if direction(one) > 0]
        self.fallen = [score for score, one in self.changes.items() if direction(one) < 0]
        self.lost = [score for score in self.fallen if self._had(score)]
        self.unfinished = max(base.mean("unfinished"), tuned.mean("unfinished"))

    def case(self) -> str:
        """The case of verdict.yaml: the first that applies."""
        base, tuned = self.base, self.tuned
        if self.rows < LEAST_ROWS:
            return "too_few_rows"
        if len(set(map(metrics.without_thinking, base.references))) == 1:
            return "same_references"
        if self.unfinished > CUT_OFF:
            return "cut_in_thinking"
        if "content" in self.risen:
            all_of_it = "helped" if tuned.mean("exact_match") else "helped_not_exact"
            return "helped_but_fell" if self.fallen else all_of_it
        if self.risen:
            return "mixed" if direction(change(base, tuned, "rouge_l")) < 0 else "helped_in_form"
        if self.fallen:
            return "harmed" if self.lost else "nothing_to_lose"
        if base.mean("exact_match") >= SOLVED:
            return "solved_before"
        return "unchanged" if base.texts == tuned.texts else "no_proof"

    def values(self) -> dict[str, Any]:
        """What the texts of verdict.yaml name."""
        base, tuned, scores = self.base, self.tuned, [*self.risen, *self.lost, *self.fallen, "content"]
        before, after = (round(sum(one.scores["exact_match"])) for one in (base, tuned))
        return {
            "rows": self.rows, "unfinished": self.unfinished, "form": self._form(),
            "right": f"{before} of {self.rows} answers were exactly right before the tuning, {after} after it",
            "rouge_l": f"from {base.mean('rouge_l'):.2f} to {tuned.mean('rouge_l'):.2f}",
            "moved": self._text(scores[0]), "content": self._text("content"),
            "check_rows": "check in the training rows that each answer belongs to its question (lesson 02 shows them)",
        }  # fmt: skip

    def _had(self, score: str) -> bool:
        """Whether the base's answers belonged to their questions, so that there was something to lose."""
        against = metrics.exact if score == "exact_content" else metrics.rouge_l
        return metrics.chance_of(against, self.base.texts, self.base.references) <= ALPHA

    def _text(self, score: str) -> str:
        """A deciding score in a sentence."""
        found = self.changes[score]
        verb = {-1: "fell", 0: "did not surely change", 1: "rose"}[direction(found)]
        return (
            f"{DECIDING[score]}, beyond what the same answers score against the references of other rows, {verb}: "
            f"{self.base.mean(score):.3f} before, {self.tuned.mean(score):.3f} after (difference "
            f"{found.estimate.text('+.3f')}, p {found.p_text}, which counts below {ALPHA:g}; {self.rows} rows)."
        )

    def _form(self) -> str:
        """What improved although the content did not."""
        better, f1 = [], [one.mean("character_f1") for one in (self.base, self.tuned)]
        if self.tuned.loss < self.base.loss:
            better.append(f"loss fell from {self.base.loss:.2f} to {self.tuned.loss:.2f}")
        if f1[1] > f1[0]:
            better.append(f"character F1 rose from {f1[0]:.2f} to {f1[1]:.2f}")
        return f"; {' and '.join(better)}, but wrong answers of the right form do that too" if better else ""


def judge(base: Result, tuned: Result) -> Verdict:
    """Compare the answers of two models to the same rows."""
    evidence = Evidence(base, tuned)
    texts, values = _texts()["cases"][evidence.case()], evidence.values()
    flags = [_texts()["flags"][name].format(**details) for name, details in _flags(base, tuned)]
    return Verdict(texts["word"], texts["why"].format(**values), texts["todo"].format(**values), flags)


def _flags(base: Result, tuned: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """What looks wrong whatever the verdict: names and values for verdict.yaml."""
    rows = len(tuned.answers)
    if rows < FEW_ROWS:
        yield "few_rows", {"count": rows}
    for one in (base, tuned):
        if count := sum(not math.isfinite(row.total) for row in one.losses):
            yield "no_number", {"name": one.name, "count": count, "rows": rows}
    longest = max(map(len, base.references))
    count = sum(not answer.stopped and len(answer.text) < longest for answer in base.answers)
    if count > rows / 10:
        yield "cut_off", {"name": base.name, "count": count, "rows": rows}
    if (share := tuned.mean("stopped")) < 0.9:
        yield "endless", {"share": share}
    (text, count), (_, usual) = (
        Counter(map(metrics.without_thinking, texts)).most_common(1)[0] for texts in (tuned.texts, tuned.references)
    )
    if count > max(3, rows / 4, 2 * usual):
        yield "repeated", {"count": count, "rows": rows, "text": text[:80] or "(nothing)"}


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge: the ratio of perplexities, after to before, and F1 of the answers."""

    word: str
    ratio: stats.Estimate
    f1: stats.Difference

    def __str__(self) -> str:
        return f"GENERAL KNOWLEDGE: {self.word}\n{textwrap.fill(self.text, WIDTH)}"

    @property
    def text(self) -> str:
        """The numbers and what they mean, in a sentence."""
        f1 = self.f1.estimate.text("+.3f")
        if math.isnan(self.ratio.mean):
            return f"Perplexity is not a number, character F1 {f1}: see the warning about the loss."
        ratio = f"x {self.ratio.text('.2f')}" if self.ratio.mean < LARGEST else f"x {LARGEST:,.0f} or more"
        return f"Perplexity {ratio}, character F1 {f1}: {_texts()['forgetting'][self.word]}."


def forgetting(base: Result, tuned: Result) -> Forgetting:
    """Whether perplexity on the general rows surely rose by more than a tenth, or F1 fell by more than 0.05."""
    loss, f1 = change(base, tuned, "loss").estimate, change(base, tuned, "character_f1")
    bounds = (loss.mean, loss.low, loss.high)
    ratio = stats.Estimate(*(one if math.isnan(one) else min(LARGEST, math.exp(min(50.0, one))) for one in bounds))
    answers_lost = f1.estimate.mean < FORGOT_F1 and f1.estimate.high < 0 and f1.p < 0.05
    if len(base.answers) < LEAST_GENERAL:
        word = "unclear"
    elif ratio.low > FORGOT_PERPLEXITY or answers_lost:
        word = "forgot"
    else:
        word = "kept" if ratio.high <= FORGOT_PERPLEXITY else "unclear"
    return Forgetting(word, ratio, f1)
