"""What the gaps mean: which forms must be one model, which gaps are a price, and the verdict in words.

How far rounding moves a model is measured: the merged model is read twice. Its weights are proven by merging.prove.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nbutils import display
from nbutils.errors import CourseError
from nbutils.parity.predictions import RESOLUTION, Gap, PredictionStore

FAR = 30  # times the noise: no kernels of another program round that differently, it runs another model
LABELS = {
    "base": "the base without the tuning", "4bit": "adapter on the 4-bit base it was trained on",
    "full": "adapter on the unquantized base", "merged": "merged", "vllm": "merged, in vLLM",
}  # fmt: skip
ONTO = {"full": "full", "dequantized": "4bit"}  # what a merged model must equal, by what it was merged into


@dataclass(frozen=True)
class Line:
    """One comparison: `other` against `reference`; only a judged one can fail, and `why` says why it does."""

    reference: str
    other: str
    gap: Gap
    judged: bool = False
    why: str = ""

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.judged:
            return "what the tuning changed" if self.other == "base" else "a price"
        return "FAILS" if self.why else "the same model"

    def __str__(self) -> str:
        start = "THE MODEL CHANGED: " if self.why else ""
        distance = f"{LABELS[self.other]}, {self.gap.columns['KL mean']} nats per token from {LABELS[self.reference]}"
        return f"{start}{distance}: {self.why or self.verdict}."


class Report:
    """All comparisons of a run."""

    def __init__(self, predictions: PredictionStore) -> None:
        self.predictions, about, again = predictions, predictions.about, predictions.gap("merged", "again")
        self.target = ONTO.get(str(about.get("onto")), "full") if isinstance(about, dict) else "full"
        self.noise = max(RESOLUTION, again.mean if again else 0.0)  # the same model, in other batches
        self.lines = list(self._compare())
        judged = [line for line in self.lines if line.judged]
        self.holds = bool(judged) and not any(line.why for line in judged)
        self.verdict = "\n".join(map(str, self.lines))

    def _compare(self) -> Iterator[Line]:
        """Prices first, then what must be the same model, down to the server."""
        prices = [("full", "base"), ("4bit", "full")] + ([("full", "merged")] if self.target != "full" else [])
        for reference, other in prices:
            if found := self.predictions.gap(reference, other):
                yield Line(reference, other, found)
        for reference, other in ((self.target, "merged"), ("merged", "vllm")):
            if found := self.predictions.gap(reference, other):
                yield Line(reference, other, found, True, self._why(other, found))

    def _why(self, other: str, found: Gap) -> str:
        """Why two forms are not the same model; empty if they are."""
        base, merged = self.predictions.gap("base", other), self.predictions.gap(self.target, "merged")
        if base and found.mean > base.mean + self.noise:
            return f"it is nearer to {LABELS['base']} ({base.mean:.2g})"
        noise = max(self.noise, merged.mean if merged else 0.0)  # the merge, proven by weight, is rounding too
        if other == "vllm" and found.mean > FAR * noise:
            return f"that is {found.mean / noise:.0f} times the noise of this run"
        return ""

    def summary(self) -> str:
        """What was judged, and what leaving the 4-bit base costs, in a sentence or two."""
        [same, *_] = [line.gap for line in self.lines if line.judged]
        price = self.predictions.gap("4bit", "full") if self.target == "full" else None
        text = f"{same.positions} predictions compared: {same.columns['KL mean']} nats per token apart on average, "
        text += f"the same next token at {same.same_choices}"
        return text + (f"; leaving the 4-bit base costs {price.columns['KL mean']} nats per token" if price else "")

    def table(self) -> list[dict[str, str]]:
        """For display: a row for each comparison."""
        return [
            {"model": LABELS[line.other], "compared with": LABELS[line.reference], **line.gap.columns,
             "times noise": f"{line.gap.mean / self.noise:.2g}", "verdict": line.verdict}
            for line in self.lines
        ]  # fmt: skip

    def text(self) -> str:
        """The same table for a terminal."""
        return display.aligned(self.table()) or "nothing was compared"

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        gaps = {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines}
        return {"holds": self.holds, "verdict": self.verdict, "noise": self.noise, "gaps": gaps}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained, or nothing was compared."""
        if not self.holds:
            raise CourseError("parity.model_changed", verdict=self.verdict or "Nothing was compared.", far=FAR)
