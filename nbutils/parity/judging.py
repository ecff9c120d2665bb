"""What the gaps mean: which forms must be one model, which gaps are a price, and the verdict in words.

How far rounding moves a model depends on its depth and precision, so it is measured: the merged model is read twice.
Whether its weights are right is proven elsewhere (merging.prove); a distance to the adapter is then a price.

Not here: measuring (reading, served) or the gaps themselves (gaps).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nbutils import dashboard
from nbutils.errors import CourseError
from nbutils.parity.gaps import RESOLVED, Gap
from nbutils.parity.keeping import Readings

FAR = 30  # times the noise: no kernels of another program round that differently, it runs another model
CALLED = {
    "base": "the base without the tuning",
    "4bit": "adapter on the 4-bit base it was trained on",
    "full": "adapter on the unquantised base",
    "merged": "merged",
    "vllm": "merged, in vLLM",
}
ONTO = {"full": "full", "dequantized": "4bit"}  # what a merged model must equal, by what it was merged into


@dataclass(frozen=True)
class Line:
    """One comparison: `other` against `reference`; only a judged one can fail."""

    reference: str
    other: str
    gap: Gap
    judged: bool = False
    why: str = ""  # it fails, if it does

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.judged:
            return "what the tuning changed" if self.other == "base" else "a price"
        return "FAILS" if self.why else "the same model"


@dataclass(frozen=True)
class Report:
    """All comparisons of a run."""

    readings: Readings

    @property
    def target(self) -> str:
        """The reading a merged model is compared with, by what the adapter was merged into."""
        about = self.readings.about
        return ONTO.get(str(about.get("onto")), "full") if isinstance(about, dict) else "full"

    @property
    def noise(self) -> float:
        """Nats per token between two readings of the merged model that differ in their batches only."""
        again = self.readings.gap("merged", "again")
        return max(RESOLVED, again.mean if again else 0.0)

    @cached_property
    def lines(self) -> list[Line]:
        """The comparisons that could be made."""
        return list(self._compared())

    def _compared(self) -> Iterator[Line]:
        """Prices first, then what must be the same model, down to the server."""
        told = [("full", "base"), ("4bit", "full")] + ([("full", "merged")] if self.target != "full" else [])
        for reference, other in told:
            if found := self.readings.gap(reference, other):
                yield Line(reference, other, found)
        for reference, other in ((self.target, "merged"), ("merged", "vllm")):
            if found := self.readings.gap(reference, other):
                yield Line(reference, other, found, True, self._why(reference, other, found))

    def _why(self, reference: str, other: str, found: Gap) -> str:
        """The reason why two forms are not the same model; empty if they are."""
        base = self.readings.gap("base", other)
        if base and found.mean > base.mean + self.noise:
            return f"nearer to {CALLED['base']} ({base.mean:.2g}) than to {CALLED[reference]} ({found.mean:.2g})"
        return self._served_another(found) if other == "vllm" else ""

    def _served_another(self, found: Gap) -> str:
        """Whether a server is further away than rounding explains, which the merge, proven by weight, tells too."""
        merged = self.readings.gap(self.target, "merged")
        noise = max(self.noise, merged.mean if merged else 0.0)
        if found.mean > FAR * noise:
            return f"{found.mean:.2g} nats per token apart, {found.mean / noise:.0f} times the noise of this run"
        if merged and 2 * (merged.same_answers or 0) > merged.answers and found.same_answers == 0:
            return f"none of {found.answers} greedy answers is the same, as {merged.same_answers} are of the adapter"
        return ""

    @property
    def holds(self) -> bool:
        """Nothing that must be the same differs, and something was compared."""
        judged = [line for line in self.lines if line.judged]
        return bool(judged) and not any(line.why for line in judged)

    def table(self) -> list[dict[str, str]]:
        """For display: a row for each comparison."""
        return [self._row(line) for line in self.lines]

    def text(self) -> str:
        """The same table for a terminal."""
        return dashboard.aligned(self.table()) if self.lines else "nothing was compared"

    @property
    def verdict(self) -> str:
        """What a learner should know, a sentence each."""
        return "\n".join([*self._judgements(), *self._prices()])

    def _judgements(self) -> Iterator[str]:
        for line in (one for one in self.lines if one.judged):
            if line.why:
                yield f"THE MODEL CHANGED: {CALLED[line.other]} is not {CALLED[line.reference]}: {line.why}."
            elif line.other == "merged":
                yield (
                    f"The merge kept the tuning: {line.gap.mean:.2g} nats per token from {CALLED[line.reference]}, "
                    f"{line.gap.mean / self.noise:.2g} times the noise of this run ({self.noise:.2g})."
                )
            else:
                least = "at least " if line.gap.coarse else ""  # it tells its likeliest tokens only
                yield f"vLLM says the same: {least}{line.gap.mean:.2g} nats per token from the merged model."

    def _prices(self) -> Iterator[str]:
        tuned, moved = self.readings.gap("full", "base"), self.readings.gap("4bit", "full")
        if tuned and moved:
            size = "hardly" if moved.mean < 0.01 else "a little" if moved.mean < 0.1 else "clearly"
            yield (
                f"It was trained on a 4-bit base; on the unquantised one it speaks {size} differently: "
                f"{moved.mean:.2g} nats per token (the tuning itself moved it by {tuned.mean:.2g}){_said(moved)}."
            )
        ours = self.readings.gap("4bit", "merged")
        if self.target == "4bit" and ours and moved:
            yield (
                f"Merged into the dequantised base it is {ours.mean:.2g} from what was trained, instead of "
                f"{moved.mean:.2g}; the price is a base that stays as coarse as 4 bits."
            )

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        gaps = {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines}
        return {"holds": self.holds, "verdict": self.verdict, "noise": self.noise, "gaps": gaps}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained."""
        if self.holds:
            return
        raise CourseError(
            self.verdict if any(line.judged for line in self.lines) else "nothing was compared that must be the same.",
            f"a merged model nearer to the adapter than to the base, and a server within {FAR} times the noise of it",
            "serve the folder lesson 04 wrote; if the merged model itself is named, an adapter that hardly learned was "
            "lost in rounding (train longer), or adapter and base do not belong together",
        )

    def _row(self, line: Line) -> dict[str, str]:
        return {
            "model": CALLED[line.other],
            "compared with": CALLED[line.reference],
            **line.gap.columns,
            "times noise": f"{line.gap.mean / self.noise:.2g}",
            "verdict": line.verdict,
        }


def require_onto(onto: str, method: str) -> None:
    """Stop early where there is no 4-bit base to merge into: the adapter was trained on another."""
    if onto not in ONTO:
        raise CourseError(f"MERGE_ONTO is {onto!r}.", ", ".join(ONTO), "choose one of these")
    if onto == "dequantized" and method != "qlora":
        raise CourseError(
            f"MERGE_ONTO is {onto!r}, and with method {method} nothing was trained on 4 bits.",
            'full; "dequantized" is for adapters of a qlora profile', 'set MERGE_ONTO = "full"',
        )  # fmt: skip


def _said(found: Gap) -> str:
    return "" if found.same_answers is None else f", {found.same_answers} of {found.answers} answers the same"
