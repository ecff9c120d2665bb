"""Did the tuning help? A verdict that can say no, with its reasons in plain words.

Form is cheap: loss and character F1 improve on any answers, right or wrong. So only what an answer scores beyond the
references of other rows counts (control), and it must rise further than chance explains. Not here: the numbers.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbutils.evaluation import statistics
from nbutils.evaluation.scores import spoken

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

HELPED, HARMED, NO_PROOF = "helped", "harmed", "no proof that it helped"
HEADLINES = {
    HELPED: "The tuning helped",
    HARMED: "The tuning did not help: it harmed",
    NO_PROOF: "No proof that the tuning helped",
}
DECIDING = {"exact_content": "Exact match", "content": "ROUGE-L"}  # beyond other rows' references
LEVEL = 1 - 0.05 / len(DECIDING)  # Bonferroni: two chances to rise by luck, so each must be surer
POWER = 0.8416  # standard normal quantile of 80 %
REACH = 2.2414  # and of LEVEL, both sides
WIDTH = 110  # of a line on a screen
FORGOT_ABOVE = 1.10  # ratio of perplexities


@dataclass(frozen=True)
class Verdict:
    """One word, the two sentences that explain it, what to do next, and what else looks wrong."""

    word: str
    why: str
    todo: str
    flags: list[str] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The word as a sentence."""
        return HEADLINES[self.word]

    def __str__(self) -> str:
        todo = [f"To do: {self.todo}"] if self.todo else []
        lines = [f"VERDICT: {self.headline}", self.why, *todo, *(f"[WARN] {flag}" for flag in self.flags)]
        return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def judge(base: Result, tuned: Result, adapter: Result | None = None) -> Verdict:
    """Compare the answers of two models to the same rows."""
    changes = {name: statistics.difference(base.scores[name], tuned.scores[name], level=LEVEL) for name in DECIDING}
    risen = [name for name, one in changes.items() if one.estimate.low > 0 and one.p < 1 - LEVEL]
    fallen = [name for name, one in changes.items() if one.estimate.high < 0 and one.p < 1 - LEVEL]
    word = HELPED if risen else HARMED if fallen else NO_PROOF
    named = (risen or fallen or ["content"])[0]
    first = _told(named, base, tuned, changes[named])
    second = {HELPED: _helped(fallen), HARMED: _harmed(base, tuned), NO_PROOF: _no_proof(base, tuned)}[word]
    return Verdict(word, f"{first} {second}", _todo(word, base, tuned), find_flags(tuned, adapter))


def _told(name: str, base: Result, tuned: Result, change: statistics.Difference) -> str:
    """The deciding number in a sentence."""
    verb = {-1: "fell", 0: "stayed", 1: "rose"}[(change.estimate.low > 0) - (change.estimate.high < 0)]
    verb = verb if verb != "stayed" else "did not surely change"
    return (
        f"{DECIDING[name]}, beyond what the same answers score against the references of other rows, {verb} from "
        f"{base.mean(name):.3f} to {tuned.mean(name):.3f} (difference {change.estimate.text('+.3f')}, "
        f"p {change.p_text}, {len(base.answers)} rows)."
    )


def _helped(fallen: list[str]) -> str:
    but = f" The same in {DECIDING[fallen[0]]} fell, so read the samples." if fallen else ""
    return f"So the model learnt which answer belongs to which question, and not only what answers look like.{but}"


def _harmed(base: Result, tuned: Result) -> str:
    return f"So the answers now have less to do with their questions than before the tuning{_form(base, tuned)}."


def _no_proof(base: Result, tuned: Result) -> str:
    nothing = statistics.mean_of(tuned.scores["content"]).low <= 0
    fit = "other rows' questions as well as they fit their own" if nothing else "their questions no better than before"
    return f"So the answers fit {fit}{_form(base, tuned)}."


def _form(base: Result, tuned: Result) -> str:
    """What improved although the content did not."""
    better = []
    if tuned.loss < base.loss:
        better.append(f"loss fell from {base.loss:.2f} to {tuned.loss:.2f}")
    if tuned.mean("character_f1") > base.mean("character_f1"):
        better.append(f"character F1 rose from {base.mean('character_f1'):.2f} to {tuned.mean('character_f1'):.2f}")
    return f"; {' and '.join(better)}, but wrong answers of the right form do that too" if better else ""


def _todo(word: str, base: Result, tuned: Result) -> str:
    if word == HELPED:
        return ""
    wrong = "check in the training rows that each answer belongs to its question (lesson 02 shows them)"
    if word == HARMED:
        return f"{wrong}; then a smaller learning rate or fewer steps"
    seen = visible_change(base, tuned)
    return (
        f"{wrong}; train longer or on more rows; with these {len(base.answers)} evaluation rows a change below "
        f"{seen:.2f} could not have been seen, four times as many rows would show one of {seen / 2:.2f}; "
        f"if form was all you wanted, the samples show whether you have it"
    )


def visible_change(base: Result, tuned: Result) -> float:
    """The smallest true change in exact match or content that these rows would have shown four times out of five."""
    rows = len(base.answers)
    enough = math.ceil(1 - math.log2(1 - LEVEL))  # that many rows turning right, and none wrong, are beyond luck
    pairs = [(base.scores[name], tuned.scores[name]) for name in DECIDING]
    spreads = [statistics.standard_error([b - a for a, b in zip(*pair, strict=True)]) for pair in pairs]
    return min(1.0, max(enough / rows, (POWER + REACH) * min(spreads)))


def find_flags(tuned: Result, adapter: Result | None) -> list[str]:
    """What looks wrong whatever the verdict."""
    flags = []
    if (stops := tuned.mean("stopped")) < 0.9:
        flags.append(
            f"only {stops:.0%} of the answers end by themselves: no stop token learnt, or max_new_tokens too small"
        )
    text, count = _most_common(tuned.texts)
    if count > 3 and count > max(len(tuned.answers) / 4, 2 * _most_common(tuned.references)[1]):
        flags.append(f"{count} of {len(tuned.answers)} answers are the same: {text[:80]}")
    if adapter is not None and (gap := merge_gap(adapter, tuned)):
        flags.append(gap)
    return flags


def _most_common(texts: list[str]) -> tuple[str, int]:
    return Counter(map(spoken, texts)).most_common(1)[0]


def merge_gap(adapter: Result, merged: Result) -> str:
    """In what the merged model is not the adapter it was made from; "" if rounding explains all."""
    loss = abs(merged.loss - adapter.loss)
    if loss > 0.02 + 0.05 * adapter.loss:
        return f"merged is not the adapter: loss {merged.loss:.3f} against {adapter.loss:.3f} on the same rows"
    change = statistics.difference(adapter.scores["rouge_l"], merged.scores["rouge_l"])
    if change.p < 0.01:
        return f"merged is not the adapter: ROUGE-L differs by {change.estimate.text('+.3f')}"
    return ""


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge: the ratio of perplexities, after to before, and F1 of the answers."""

    word: str
    ratio: statistics.Estimate
    f1: statistics.Difference

    def __str__(self) -> str:
        return f"GENERAL KNOWLEDGE: {self.word}\n{textwrap.fill(self.told, WIDTH)}"

    @property
    def told(self) -> str:
        """The numbers and what they mean, in a sentence."""
        meaning = {
            "kept": "what the model knew before is still there",
            "forgot": "mix general rows into the training data, or train with a smaller learning rate or fewer steps",
            "unclear": "too few rows to tell",
        }[self.word]
        ratio, f1 = self.ratio.text(".2f"), self.f1.estimate.text("+.3f")
        return f"Perplexity x {ratio}, character F1 {f1}: {meaning}."


def forgetting(base: Result, tuned: Result) -> Forgetting:
    """Whether perplexity on the general rows rose by more than a tenth, surely."""
    weights = [row.tokens for row in base.losses]
    before, after = ([row.total / row.tokens for row in result.losses] for result in (base, tuned))
    change = statistics.difference(before, after, weights).estimate
    ratio = statistics.Estimate(*(math.exp(min(50.0, value)) for value in (change.mean, change.low, change.high)))
    word = "forgot" if ratio.low > FORGOT_ABOVE else "kept" if ratio.high <= FORGOT_ABOVE else "unclear"
    return Forgetting(word, ratio, statistics.difference(base.scores["character_f1"], tuned.scores["character_f1"]))
