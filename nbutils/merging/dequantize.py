"""The base as QLoRA saw it in training: weights quantized to 4 bits by bitsandbytes and dequantized again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

# The 4-bit settings of lesson 03; `dtype` is the dtype the base was loaded in, None: the base's own.
DEFAULTS: dict[str, Any] = {"quant_type": "nf4", "double_quant": True, "dtype": None}


def quantized_weights(folder: Path) -> set[str]:
    """The weights that transformers loads in 4 bits: linear layers, but not the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    try:
        import bitsandbytes.functional  # noqa: F401
    except Exception as problem:  # a broken installation fails in many ways
        raise CourseError("merging.needs_bitsandbytes", problem=type(problem).__name__) from problem
    with torch.device("meta"):  # no memory for weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    skipped = get_keys_to_not_convert(model)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return {f"{name}.weight" for name in linear if should_convert_module(name, skipped)}


def round_trip(weight: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """The weight quantized to 4 bits and dequantized, in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    loaded = weight.to(getattr(torch, settings["dtype"])) if settings["dtype"] else weight
    packed, state = quantize_4bit(
        loaded.contiguous(), quant_type=settings["quant_type"], compress_statistics=settings["double_quant"]
    )
    return dequantize_4bit(packed, state).float()
