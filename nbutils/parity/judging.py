"""What the gaps mean: which of them must be nothing but rounding, which are a price, and the verdict in words.

Not here: measuring (reading, served) or the gaps themselves (gaps).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nbutils.errors import CourseError
from nbutils.evaluation.comparing import aligned
from nbutils.parity.gaps import Gap
from nbutils.parity.keeping import Readings

# Nats per token that rounding explains. The adapter is computed beside the weights and the merged sum is rounded once,
# and two programs add in different orders: in 16 bits two forms of one model are never equal to the last digit.
# benchmarks/parity.py saw 6e-4 (6 layers) and 4e-3 (28 layers) in bfloat16, 1e-5 and 6e-5 in float16; depth adds up.
ALLOWED = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2e-2}
# Where the tuning itself is small, that much could be a lost part of it. A share of what the tuning changed is
# allowed then, and never less than what two right forms of a model of 64 layers may differ by.
LEAST_ALLOWED = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 1e-2}
SHARE = 0.25
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
    """One comparison: `other` against `reference`; only one with an allowance can fail."""

    reference: str
    other: str
    gap: Gap
    allowed: float | None
    why: str = ""  # it fails, if it does

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.allowed is None:
            return "what the tuning changed" if self.other == "base" else "a price"
        return "FAILS" if self.why else "the same"


@dataclass(frozen=True)
class Report:
    """All comparisons of a run, in the precision the models were merged in."""

    readings: Readings
    dtype: str

    @property
    def onto(self) -> str:
        """What the adapter was merged into."""
        about = self.readings.about
        return str(about.get("onto", "full")) if isinstance(about, dict) else "full"

    @cached_property
    def lines(self) -> list[Line]:
        """The comparisons that could be made."""
        return list(self._compared())

    def _compared(self) -> Iterator[Line]:
        """Prices first, then what must be the same, down to the server."""
        target = ONTO.get(self.onto, "full")
        told = [("full", "base"), ("4bit", "full")] + ([("full", "merged")] if target != "full" else [])
        for reference, other in told:
            if found := self.readings.gap(reference, other):
                yield Line(reference, other, found, None)
        for reference, other in ((target, "merged"), ("merged", "vllm")):
            if found := self.readings.gap(reference, other):
                allowed = self._allowed(reference, other)
                yield Line(reference, other, found, allowed, self._why(reference, other, found, allowed))

    def _allowed(self, reference: str, other: str) -> float:
        """Nats per token: what rounding explains; for the merge also no more than a share of the tuning."""
        most, tuned = ALLOWED[self.dtype], self.readings.gap(reference, "base")
        if other != "merged" or tuned is None:
            return most
        return min(most, max(LEAST_ALLOWED[self.dtype], SHARE * tuned.mean))

    def _why(self, reference: str, other: str, found: Gap, allowed: float) -> str:
        """The reason why two forms are not the same model; empty if they are."""
        base = self.readings.gap("base", other)
        if not found.mean <= allowed:
            return f"{found.mean:.2g} nats per token apart, and rounding to {self.dtype} explains {allowed:.2g}"
        if base and base.mean <= found.mean:
            return f"no nearer to {CALLED[reference]} ({found.mean:.2g}) than to {CALLED['base']} ({base.mean:.2g})"
        if self.dtype == "float32" and found.same_answers is not None and found.same_answers < found.answers:
            return f"{found.answers - found.same_answers} of {found.answers} greedy answers differ"
        return ""

    @property
    def holds(self) -> bool:
        """Nothing that must be the same differs, and something was compared."""
        judged = [line for line in self.lines if line.allowed is not None]
        return bool(judged) and not any(line.why for line in judged)

    def table(self) -> list[dict[str, str]]:
        """For display: a row for each comparison."""
        return [_row(line) for line in self.lines]

    def text(self) -> str:
        """The same table for a terminal."""
        return aligned(self.table()) if self.lines else "nothing was compared"

    @property
    def verdict(self) -> str:
        """What a learner should know, a sentence each."""
        return "\n".join([*self._judgements(), *self._prices()])

    def _judgements(self) -> Iterator[str]:
        for line in self.lines:
            if line.allowed is None:
                continue
            if line.why:
                yield f"THE MODEL CHANGED: {CALLED[line.other]} is not {CALLED[line.reference]}: {line.why}."
            elif line.other == "merged":
                yield f"The merge kept the tuning: {line.gap.mean:.2g} nats per token from {CALLED[line.reference]}."
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
        if self.onto == "dequantized" and ours and moved:
            yield (
                f"Merged into the dequantised base it is {ours.mean:.2g} from what was trained, instead of "
                f"{moved.mean:.2g}; the price is a base that stays as coarse as 4 bits."
            )

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        gaps = {
            f"{line.other} against {line.reference}": asdict(line.gap) | {"allowed": line.allowed}
            for line in self.lines
        }
        return {"holds": self.holds, "verdict": self.verdict, "gaps": gaps}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained."""
        if self.holds:
            return
        allowed = [line.allowed for line in self.lines if line.allowed is not None]
        if not allowed:
            target = ONTO.get(self.onto, "full")
            raise CourseError(
                "nothing was compared that must be the same.", f'the readings "{target}" and "merged"',
                "run the cells of this lesson from the first one on",
            )  # fmt: skip
        raise CourseError(
            self.verdict,
            f"at most {min(allowed):.2g} nats per token in {self.dtype}, and nearer to the adapter than the base",
            "delete the merged folder and run lesson 04 again; if it stays: an adapter that hardly learned is lost in "
            "rounding (train longer), else adapter and base do not belong together",
        )


def report(readings: Readings, dtype: str) -> Report:
    """Judge the readings of a run; `dtype` is the precision of the merged model (`bfloat16`)."""
    if dtype not in ALLOWED:
        raise CourseError(f"the precision is {dtype!r}.", ", ".join(ALLOWED), "name the dtype the model was merged in")
    return Report(readings, dtype)


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


def _row(line: Line) -> dict[str, str]:
    return {
        "model": CALLED[line.other],
        "compared with": CALLED[line.reference],
        **line.gap.columns,
        "allowed": "" if line.allowed is None else f"{line.allowed:.2g}",
        "verdict": line.verdict,
    }
