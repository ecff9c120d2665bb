"""Did the tuning help? A verdict that can say no, with its reasons in plain words.

Form is cheap: loss and character F1 improve on any answers, right or wrong. So only what an answer scores beyond the
references of other rows counts (control), and it must rise further than chance explains. Not here: the numbers
(evidence), or what looks wrong besides (flags).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbutils.evaluation import statistics
from nbutils.evaluation.evidence import DECIDING, Evidence
from nbutils.evaluation.flags import find_flags
from nbutils.evaluation.scores import spoken

if TYPE_CHECKING:
    from nbutils.evaluation.exam import Result

HELPED, HARMED, NO_PROOF = "helped", "harmed", "no proof that it helped"
HEADLINES = {
    HELPED: "The tuning helped",
    HARMED: "The tuning did not help: it harmed",
    NO_PROOF: "No proof that the tuning helped",
}
WIDTH = 110  # of a line on a screen
FEWEST = 8  # rows; with fewer, luck is never ruled out
CUT_OFF = 0.2  # share of unfinished thoughts that makes a comparison worthless
FULL_MARKS = 0.95  # exact match of a base that has nothing left to learn here
CHECK_ROWS = "check in the training rows that each answer belongs to its question (lesson 02 shows them)"
Found = tuple[str, str, str] | None  # word, why, what to do


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


def judge(base: Result, tuned: Result) -> Verdict:
    """Compare the answers of two models to the same rows: the first rule that has something to say decides."""
    seen = Evidence(base, tuned)
    rules = (_too_few, _all_alike, _cut_off, _mixed, _helped, _fell, _full_marks)
    word, why, todo = next(filter(None, (rule(seen) for rule in rules)), None) or _no_proof(seen)
    return Verdict(word, why, todo, find_flags(base, tuned))


def _too_few(seen: Evidence) -> Found:
    if seen.rows >= FEWEST:
        return None
    why = f"{seen.exact}. So few rows prove nothing, as luck alone can turn them."
    return NO_PROOF, why, f"give at least 50 evaluation rows (lesson 02); these are {seen.rows}"


def _all_alike(seen: Evidence) -> Found:
    if len(set(map(spoken, seen.base.references))) > 1:
        return None
    why = (
        f"{seen.exact}. But the wanted answer is the same in all rows, "
        f"so nobody can tell whether the model understood a question or says one thing always."
    )
    return NO_PROOF, why, "give evaluation rows with different answers"


def _cut_off(seen: Evidence) -> Found:
    """An answer that was cut off while the model still thought says nothing about what the model knows."""
    for one in (seen.base, seen.tuned):
        if (share := one.mean("unfinished")) > CUT_OFF:
            why = f"{share:.0%} of the answers of {one.name} were cut off while it was still thinking, and say nothing."
            return NO_PROOF, f"{why} So the two models cannot be compared.", "raise evaluation.max_new_tokens"
    return None


def _mixed(seen: Evidence) -> Found:
    if seen.risen != ["exact_content"] or not seen.answers_fell:
        return None
    before, after = (one.mean("rouge_l") for one in (seen.base, seen.tuned))
    why = (
        f"Mixed: {seen.exact}. But all in all the answers are further from the wanted ones than before: "
        f"ROUGE-L fell from {before:.2f} to {after:.2f}."
    )
    return NO_PROOF, why, f"read the worst answers in the report; {CHECK_ROWS}; then fewer steps, or more rows"


def _helped(seen: Evidence) -> Found:
    if not seen.risen:
        return None
    if "content" in seen.risen:
        so = "So the model learnt which answer belongs to which question, and not only what answers look like."
        but = [DECIDING[name] for name in seen.fallen]
        more = f" The same in {but[0]} fell, so read the samples." if but else ""
        none = "no answer is right to the letter yet: read the samples; more steps or more rows may do it"
        return HELPED, f"{seen.told(seen.risen[0])} {so}{more}", "" if seen.tuned.mean("exact_match") else none
    why = (
        f"More answers are exactly as wanted: {seen.exact}. Their content did not grow: {seen.told('content')} "
        f"So the base may have known these answers and only written them in another form; the samples show it."
    )
    return HELPED, why, ""


def _fell(seen: Evidence) -> Found:
    """Harm needs something that was lost: answers of the base that belonged to their questions."""
    if not seen.fallen:
        return None
    lost = [name for name in seen.fallen if seen.had(name)]
    if lost:
        why = f"So the answers now have less to do with their questions than before the tuning{seen.form}."
        return HARMED, f"{seen.told(lost[0])} {why}", f"{CHECK_ROWS}; then a smaller learning rate or fewer steps"
    why = f"But the base's answers fitted other rows' questions as well as their own, so nothing was lost{seen.form}."
    return NO_PROOF, f"{seen.told(seen.fallen[0])} {why}", f"{CHECK_ROWS}; train longer or on more rows"


def _full_marks(seen: Evidence) -> Found:
    if seen.base.mean("exact_match") < FULL_MARKS:
        return None
    why = f"{seen.exact}. The base could do this already, so there was nothing to gain."
    return NO_PROOF, why, "serve the base as it is, or give harder evaluation rows"


def _no_proof(seen: Evidence) -> tuple[str, str, str]:
    if seen.base.texts == seen.tuned.texts:
        why = "Every answer is word for word the one the base gave."
        return NO_PROOF, f"{why} So the tuning changed nothing that can be seen.", "train longer, or on more rows"
    nothing = statistics.mean_of(seen.tuned.scores["content"]).low <= 0
    fit = (
        "other rows' questions as well as they fit their own"
        if nothing
        else "their questions no better than before, as far as these rows tell"
    )
    form = "if form was all you wanted, the samples show whether you have it"
    todo = f"{CHECK_ROWS}; train longer or on more rows; {seen.sight}; {form}"
    return NO_PROOF, f"{seen.told('content')} So the answers fit {fit}{seen.form}.", todo
