"""What the gaps mean: which forms must be one model, which gaps are a price, and the verdict in words.

How far rounding moves a model depends on its depth and precision, so it is measured: the merged model is read twice.
Whether its weights are right is proven elsewhere (merging.prove); a distance to the adapter is then a price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbutils import dashboard
from nbutils.errors import CourseError
from nbutils.parity.predictions import RESOLUTION, Gap, Readings

FAR = 30  # times the noise: no kernels of another program round that differently, it runs another model
LABELS = {
    "base": "the base without the tuning",
    "4bit": "adapter on the 4-bit base it was trained on",
    "full": "adapter on the unquantised base",
    "merged": "merged",
    "vllm": "merged, in vLLM",
}
TOKENIZED_ROWS = 32
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


class Report:
    """All comparisons of a run."""

    def __init__(self, readings: Readings) -> None:
        self.readings, about, again = readings, readings.about, readings.gap("merged", "again")
        self.target = ONTO.get(str(about.get("onto")), "full") if isinstance(about, dict) else "full"
        self.noise = max(RESOLUTION, again.mean if again else 0.0)  # the same model, in other batches
        self.lines = list(self._compare())
        judged = [line for line in self.lines if line.judged]
        self.holds = bool(judged) and not any(line.why for line in judged)
        self.verdict = "\n".join([*map(self._judgement, judged), *self._prices()])

    def _compare(self) -> Iterator[Line]:
        """Prices first, then what must be the same model, down to the server."""
        prices = [("full", "base"), ("4bit", "full")] + ([("full", "merged")] if self.target != "full" else [])
        for reference, other in prices:
            if found := self.readings.gap(reference, other):
                yield Line(reference, other, found)
        for reference, other in ((self.target, "merged"), ("merged", "vllm")):
            if found := self.readings.gap(reference, other):
                yield Line(reference, other, found, True, self._why(reference, other, found))

    def _why(self, reference: str, other: str, found: Gap) -> str:
        """Why two forms are not the same model; empty if they are."""
        base, merged = self.readings.gap("base", other), self.readings.gap(self.target, "merged")
        if base and found.mean > base.mean + self.noise:
            return f"nearer to {LABELS['base']} ({base.mean:.2g}) than to {LABELS[reference]} ({found.mean:.2g})"
        if other != "vllm":
            return ""
        noise = max(self.noise, merged.mean if merged else 0.0)  # the merge, proven by weight, is rounding too
        if found.mean > FAR * noise:
            return f"{found.mean:.2g} nats per token apart, {found.mean / noise:.0f} times the noise of this run"
        if merged and 2 * (merged.same_answers or 0) > merged.answers and found.same_answers == 0:
            return f"none of {found.answers} greedy answers is the same, as {merged.same_answers} are of the adapter"
        return ""

    def _judgement(self, line: Line) -> str:
        mean, reference = f"{line.gap.mean:.2g}", LABELS[line.reference]
        if line.why:
            return f"THE MODEL CHANGED: {LABELS[line.other]} is not {reference}: {line.why}."
        if line.other == "merged":
            times = f"{line.gap.mean / self.noise:.2g} times the noise of this run ({self.noise:.2g})"
            return f"The merge kept the tuning: {mean} nats per token from {reference}, {times}."
        least = "at least " if line.gap.coarse else ""
        return f"vLLM says the same: {least}{mean} nats per token from the merged model."

    def _prices(self) -> Iterator[str]:
        tuned, moved, ours = (
            self.readings.gap(*pair) for pair in (("full", "base"), ("4bit", "full"), ("4bit", "merged"))
        )
        if tuned and moved:
            size = "hardly" if moved.mean < 0.01 else "a little" if moved.mean < 0.1 else "clearly"
            same = f", {moved.same_answers} of {moved.answers} answers the same" if moved.answers else ""
            yield (
                f"It was trained on a 4-bit base; on the unquantised one it speaks {size} differently: "
                f"{moved.mean:.2g} nats per token (the tuning itself moved it by {tuned.mean:.2g}){same}."
            )
        if self.target == "4bit" and ours and moved:
            yield (
                f"Merged into the dequantised base it is {ours.mean:.2g} from what was trained, instead of "
                f"{moved.mean:.2g}; the price is a base that stays as coarse as 4 bits."
            )

    def table(self) -> list[dict[str, str]]:
        """For display: a row for each comparison."""
        return [
            {"model": LABELS[line.other], "compared with": LABELS[line.reference], **line.gap.columns,
             "times noise": f"{line.gap.mean / self.noise:.2g}", "verdict": line.verdict}
            for line in self.lines
        ]  # fmt: skip

    def text(self) -> str:
        """The same table for a terminal."""
        return dashboard.aligned(self.table()) if self.lines else "nothing was compared"

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        gaps = {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines}
        return {"holds": self.holds, "verdict": self.verdict, "noise": self.noise, "gaps": gaps}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained."""
        if not any(line.judged for line in self.lines):
            raise CourseError("parity.nothing_compared")
        if not self.holds:
            raise CourseError("parity.model_changed", verdict=self.verdict, far=FAR)


def require_onto(onto: str, method: str) -> None:
    """Stop early where there is no 4-bit base to merge into: the adapter was trained on another."""
    if onto not in ONTO or (onto == "dequantized" and method != "qlora"):
        raise CourseError("parity.wrong_onto", onto=onto, method=method)


def require_tokenizer(folder: Path, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> int:
    """Refuse a folder whose own tokenizer and template make other tokens of these rows; how many were compared."""
    from transformers import AutoTokenizer

    compared = [row["messages"] for row in rows[:TOKENIZED_ROWS]]
    try:
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        same = all(_tokens(own, one) == _tokens(tokenizer, one) for one in compared)
    except Exception as problem:  # missing files end in errors of many kinds
        raise CourseError("parity.no_tokenizer", folder=folder, problem=type(problem).__name__) from problem
    if not same:
        raise CourseError("parity.other_tokens", folder=folder)
    return len(compared)


def _tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
