"""Base and merged side by side: every score with its interval, the verdict, and all of it as facts.

Not here: deciding (verdict), or how it looks (report, drawing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nbutils import dashboard
from nbutils.evaluation import statistics
from nbutils.evaluation.answers import Answer
from nbutils.evaluation.exam import Exam, Result
from nbutils.evaluation.forgetting import Forgetting, forgetting
from nbutils.evaluation.verdict import Verdict, judge

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
SHARES = ("exact_match", "stopped")  # of rows: 0 or 1 for each


@dataclass(frozen=True)
class Outcome:
    """The results of one exam, the first of them the one before the tuning and the last the one after."""

    results: Sequence[Result]
    general: Sequence[Result] = ()

    @property
    def base(self) -> Result:
        """Before."""
        return self.results[0]

    @property
    def tuned(self) -> Result:
        """After."""
        return self.results[-1]

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it helped."""
        return judge(self.base, self.tuned)

    @cached_property
    def forgetting(self) -> Forgetting | None:
        """What became of general knowledge, if it was asked for."""
        return forgetting(self.general[0], self.general[-1]) if self.general else None

    @cached_property
    def means(self) -> dict[str, dict[str, statistics.Estimate]]:
        """Each score of each model with its interval."""
        return {score: {one.name: _mean(one, score) for one in self.results} for score in SHOWN}

    @cached_property
    def changes(self) -> dict[str, statistics.Difference]:
        """Each score, after minus before, on the same rows."""
        return {score: _change(self.base, self.tuned, score) for score in SHOWN}

    def table(self) -> list[dict[str, str]]:
        """For display: one row for each score."""
        return [self._row(score) for score in SHOWN]

    def _row(self, score: str) -> dict[str, str]:
        label, form, _ = SHOWN[score]
        plus, change = form if form.startswith("+") else f"+{form}", self.changes[score]
        means = {name: one.text(form) for name, one in self.means[score].items()}
        return {
            "score": label,
            **means,
            "difference": change.estimate.text(plus),
            "p": change.p_text,
        }

    def text(self) -> str:
        """The same table for a terminal."""
        return dashboard.aligned(self.table())

    def summary(self) -> list[str]:
        """What a tired reader wants to know, a line each."""
        exact, content = (self._row(score) for score in ("exact_match", "content"))
        names = self.base.name, self.tuned.name
        lines = [f"verdict: {self.verdict.word}"]
        lines += [f"{row['score']}: " + ", ".join(f"{name} {row[name]}" for name in names) for row in (exact, content)]
        lines += [f"general knowledge: {self.forgetting.word}"] if self.forgetting else []
        lines += [f"warning: {flag}" for flag in self.verdict.flags]
        return [*lines, "all of it: [evaluation/report.html](evaluation/report.html)"]

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        scores = {
            score: {name: _numbers(one) for name, one in means.items()} | {"difference": _tested(self.changes[score])}
            for score, means in self.means.items()
        }
        told = asdict(self.verdict)
        found: dict[str, Any] = {"verdict": told.pop("word"), "rows": len(self.base.answers), **told, "scores": scores}
        found["summary"] = self.summary()
        found["perplexity"] = {one.name: perplexity(one) for one in self.results}
        found["answers_by"] = {one.name: one.by for one in self.results}
        return found | ({"general": self._general_facts(self.forgetting)} if self.forgetting else {})

    def _general_facts(self, kept: Forgetting) -> dict[str, Any]:
        return {
            "verdict": kept.word,
            "perplexity_ratio": _numbers(kept.ratio),
            "loss": {one.name: _json(one.loss) for one in self.general},
            "rows": len(self.general[0].answers),
            "character_f1_difference": _tested(kept.f1),
        }


def perplexity(result: Result) -> float | None:
    """e to the loss: among how many tokens, all alike, the model would have to choose to be as surprised."""
    return math.exp(result.loss) if result.loss < 50 else None


def _json(number: float) -> float | None:
    """JSON knows no NaN."""
    return number if math.isfinite(number) else None


def _mean(result: Result, score: str) -> statistics.Estimate:
    return _estimate(score, *_values(result, score))


def _estimate(score: str, values: list[float], weights: list[float] | None = None) -> statistics.Estimate:
    return statistics.share_of(values) if score in SHARES else statistics.mean_of(values, weights)


def _values(result: Result, score: str) -> tuple[list[float], list[float] | None]:
    """Row by row; the loss is weighted by tokens, so that its mean is the loss of the whole text."""
    if score == "loss":
        return [row.total / row.tokens for row in result.losses], [float(row.tokens) for row in result.losses]
    return result.scores[score], None


def _change(before: Result, after: Result, score: str) -> statistics.Difference:
    (first, weights), (second, _) = _values(before, score), _values(after, score)
    return statistics.difference(first, second, weights, shares=score in SHARES)


def _numbers(estimate: statistics.Estimate) -> dict[str, float | None]:
    return {"mean": _json(estimate.mean), "low": _json(estimate.low), "high": _json(estimate.high)}


def _tested(change: statistics.Difference) -> dict[str, Any]:
    return _numbers(change.estimate) | {"p": _json(change.p), "test": change.test}


def score_table(exam: Exam, answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, str]]:
    """The means of several sets of answers to one exam, for display."""
    scored = {name: exam.score(exam.heard(given)) for name, given in answers.items()}
    table = []
    for score in ("exact_match", "character_f1", "rouge_l", "stopped"):
        label, form, _ = SHOWN[score]
        table.append({"score": label} | {name: _estimate(score, one[score]).text(form) for name, one in scored.items()})
    return table
