"""Weights around a training: dtypes, copies, and checksums that show what changed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from nbutils.errors import CourseError


def require_unquantised(model: str) -> None:
    """Stop at a base model that is quantized already: it would be quantized twice."""
    given = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None)
    if given:
        method = given.get("quant_method", "unknown") if isinstance(given, dict) else type(given).__name__
        raise CourseError("training.quantized_base", model=model, method=method)


def repair_precision(model: nn.Module) -> int:
    """Cast trainable weights to float32 and count them: TRL casts QLoRA adapters to bfloat16 unasked."""
    low = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype != torch.float32]
    for weight in low:
        weight.data = weight.data.to(torch.float32)
    return len(low)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """CPU copies of the trainable weights."""
    return {name: one.detach().to("cpu", copy=True) for name, one in model.named_parameters() if one.requires_grad}


def load_trained_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load such copies."""
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.data.copy_(weights[name])


def weight_kinds(model: nn.Module) -> dict[str, int]:
    """How many weights have which dtype; quantized ones as `nf4, double`."""
    kinds: Counter[str] = Counter()
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        double = ", double" if getattr(state, "nested", False) else ""
        kinds[f"{state.quant_type}{double}" if state else str(weight.dtype).removeprefix("torch.")] += 1
    return dict(kinds)


@dataclass(frozen=True)
class Changed:
    """How many weight tensors changed."""

    adapter: int
    adapter_total: int
    base: int
    base_total: int

    def __str__(self) -> str:
        adapter, base = f"{self.adapter} of {self.adapter_total}", f"{self.base} of {self.base_total}"
        return f"adapter: {adapter} tensors changed; base: {base} changed"


def weight_checksums(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """By name: whether a weight is trainable, and its checksum."""
    return {name: (weight.requires_grad, _checksum(weight)) for name, weight in model.named_parameters()}


def adapter_checksum(model: nn.Module) -> str:
    """One checksum of all trainable weights."""
    trainable = sorted(item for item in weight_checksums(model).items() if item[1][0])
    return f"{zlib.crc32(repr(trainable).encode()):08x}"


def changed_weights(before: dict[str, tuple[bool, int]], model: nn.Module) -> Changed:
    """What changed since `before = weight_checksums(model)`."""
    after = weight_checksums(model)
    changed = {name for name in before if before[name][1] != after[name][1]}
    adapter = {name for name, (trainable, _) in before.items() if trainable}
    base = set(before) - adapter
    return Changed(len(changed & adapter), len(adapter), len(changed & base), len(base))


def _checksum(weight: Any) -> int:
    return zlib.crc32(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
