"""The comparison of logits that lesson 04 uses until it is switched to parity; then this file goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils.disk import require_disk
from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# How far rounding alone may move the logits, as a share of their spread. The adapter is computed beside the weights and
# the merged sum is rounded once, so in 16 bits the two can never be equal to the last digit.
ROUNDING = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}


@dataclass(frozen=True)
class Parity:
    """How far the merged model's logits are from the adapter's and from the base's, as shares of their spread."""

    adapter_gap: float
    base_gap: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Merged equals adapter up to rounding, and is nearer to it than to the base."""
        return self.adapter_gap <= self.allowed and self.adapter_gap < self.base_gap

    def __str__(self) -> str:
        verdict = "the merge kept the tuning" if self.holds else "THE MERGE CHANGED THE MODEL"
        return (
            f"{verdict}: logits are {self.adapter_gap:.2g} from the adapter's (rounding explains {self.allowed:g}) "
            f"and {self.base_gap:.2g} from the base's, in units of their spread"
        )


def require_room(target: Path, model: PreTrainedModel) -> None:
    """Stop before saving a model that does not fit on the disk."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    require_disk(target, size * 1.1 / 2**30, "saving the merged model")


def logits(model: PreTrainedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every prompt token, one prompt at a time, in float32 on the CPU."""
    import torch

    with torch.inference_mode():
        rows = [torch.tensor([prompt], device=model.device) for prompt in prompts]
        return [model(input_ids=row).logits[0].float().cpu() for row in rows]


def parity(merged: list[torch.Tensor], adapter: list[torch.Tensor], base: list[torch.Tensor], dtype: str) -> Parity:
    """Compare three models' logits on the same prompts."""
    return Parity(_gap(merged, adapter), _gap(merged, base), ROUNDING[dtype])


def _gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Root mean square difference over the spread of the reference."""
    import torch

    one, other = torch.cat([row.flatten() for row in left]), torch.cat([row.flatten() for row in right])
    return float((one - other).pow(2).mean().sqrt() / other.std())


def require_parity(result: Parity) -> None:
    """Stop the lesson if the merged model is not the one that was trained."""
    if not result.holds:
        raise CourseError(
            f"{result}.", f"at most {result.allowed:g} from the adapter, and farther from the base",
            "merge again in float32; if it stays, the adapter and the base do not belong together",
        )  # fmt: skip
