"""The weights around a training: their precision repaired, what moved and what stayed, how they are stored.

Not here: the trainer that moves them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError

if TYPE_CHECKING:
    from torch import Tensor, nn


def require_unquantised(model: str) -> None:
    """Stop at a base that is quantised already: its numbers would be taken for weights, or quantised twice."""
    from transformers import AutoConfig

    given = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None)
    if given:
        kind = given.get("quant_method", "unknown") if isinstance(given, dict) else type(given).__name__
        raise CourseError(
            f"{model} is quantised already (quantization_config in its config.json: {kind}).",
            "a base in 16 or 32 bits; this lesson quantises it itself",
            "set MODEL to the unquantised one (without -AWQ, -GPTQ, -FP8, -bnb-4bit in its name)",
        )


def repair_precision(model: nn.Module) -> int:
    """Put trainable weights back into float32: TRL casts QLoRA adapters to bfloat16 whatever was asked for."""
    import torch

    low = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype != torch.float32]
    for weight in low:
        weight.data = weight.data.to(torch.float32)
    return len(low)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable weights in the computer's memory."""
    return {name: one.detach().to("cpu", copy=True) for name, one in model.named_parameters() if one.requires_grad}


def load_trained_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put such copies back."""
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.data.copy_(weights[name])


@dataclass(frozen=True)
class Moved:
    """How many of the photographed weights changed."""

    adapter: int
    adapter_total: int
    base: int
    base_total: int

    def __str__(self) -> str:
        return (
            f"adapter: {self.adapter} of {self.adapter_total} tensors moved; "
            f"base: {self.base} of {self.base_total} moved"
        )


def photograph(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """A checksum of every weight, and whether it may move."""
    return {name: (weight.requires_grad, _checksum(weight)) for name, weight in model.named_parameters()}


def adapter_checksum(model: nn.Module) -> str:
    """One checksum of all trainable weights: equal for equal adapters."""
    return f"{zlib.crc32(repr(sorted(item for item in photograph(model).items() if item[1][0])).encode()):08x}"


def weight_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights are stored how: `nf4, double` for quantised ones, else the type."""
    kinds: Counter[str] = Counter()
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        double = ", double" if getattr(state, "nested", False) else ""
        kinds[f"{state.quant_type}{double}" if state else str(weight.dtype).removeprefix("torch.")] += 1
    return dict(kinds)


def compare(before: dict[str, tuple[bool, int]], model: nn.Module) -> Moved:
    """Count what moved since the photograph."""
    after = photograph(model)
    moved = {name for name in before if before[name][1] != after[name][1]}
    adapter = {name for name, (trainable, _) in before.items() if trainable}
    base = set(before) - adapter
    return Moved(len(moved & adapter), len(adapter), len(moved & base), len(base))


def _checksum(weight: Any) -> int:
    import torch

    return zlib.crc32(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
