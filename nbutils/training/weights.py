"""Weights around a training: dtypes, copies, and checksums that show what changed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from nbutils import merging
from nbutils.errors import CourseError


def require_unquantized(model: str) -> None:
    """Stop at a base model that is quantized already: it would be quantized twice."""
    if merging.is_quantized(PreTrainedConfig.get_config_dict(model)[0]):
        raise CourseError("training.quantized_base", model=model)


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
    """How many weights of the base model have which dtype; quantized ones as `nf4, double`."""
    kinds: Counter[str] = Counter()
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        double = ", double" if getattr(state, "nested", False) else ""
        kind = f"{state.quant_type}{double}" if state else str(weight.dtype).removeprefix("torch.")
        kinds[kind] += not weight.requires_grad
    return dict(+kinds)


def weight_checksums(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """By name: whether a weight is trainable, and its checksum."""

    def checksum(weight: Any) -> int:
        return zlib.crc32(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())

    return {name: (weight.requires_grad, checksum(weight)) for name, weight in model.named_parameters()}


def adapter_checksum(model: nn.Module) -> str:
    """One checksum of all trainable weights."""
    trainable = sorted(item for item in weight_checksums(model).items() if item[1][0])
    return f"{zlib.crc32(repr(trainable).encode()):08x}"


def changed_weights(before: dict[str, tuple[bool, int]], model: nn.Module) -> tuple[int, int]:
    """How many tensors of the adapter and of the base changed since `before = weight_checksums(model)`."""
    changed = Counter(before[name][0] for name, after in weight_checksums(model).items() if before[name] != after)
    return changed[True], changed[False]
