"""The base as the adapter saw it in training: weights that went through bitsandbytes' 4-bit form and back.

Merging onto these keeps what QLoRA learned to compensate, and keeps the rounding of the 4-bit base for good.
Not here: which of the two is better for an adapter; lesson 04 measures that (parity).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.merging.shards import CODES

if TYPE_CHECKING:
    import torch

# What lesson 03 trains on; `dtype` is the type the base was loaded in, None: the base's own.
DEFAULTS: dict[str, Any] = {"quant_type": "nf4", "double_quant": True, "dtype": None}


def settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The 4-bit form: quant_type, double_quant and dtype, also under bitsandbytes' own names."""
    short = {"type": "quant_type", "double": "double_quant", "bnb_4bit_use_double_quant": "double_quant"}
    named = {short.get(key, key.removeprefix("bnb_4bit_")): value for key, value in (given or {}).items()}
    unknown = sorted(set(named) - set(DEFAULTS))
    known = named.get("quant_type", "nf4") in ("nf4", "fp4") and named.get("dtype") in (None, *CODES)
    if unknown or not known:
        raise CourseError(
            f"the 4-bit form was given as {dict(given or {})}.", "quant_type (nf4 or fp4), double_quant, dtype",
            "write down the settings the adapter was trained with (lesson 03 shows them)",
        )  # fmt: skip
    return DEFAULTS | named


def quantised_modules(folder: Path) -> set[str]:
    """Names of the weights that transformers turns into 4 bits: linear layers, but not the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):  # shapes and kinds only, no memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    kept = get_keys_to_not_convert(model)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return {f"{name}.weight" for name in linear if should_convert_module(name, kept)}


def require_library() -> None:
    """Stop before a merge whose 4-bit form nothing here can compute."""
    try:
        import bitsandbytes.functional  # noqa: F401
    except Exception as problem:
        raise CourseError(
            f"the 4-bit form needs bitsandbytes, which does not load here ({type(problem).__name__}).",
            "a machine with bitsandbytes", 'merge with onto="full", or install bitsandbytes',
        ) from problem  # fmt: skip


def there_and_back(weight: torch.Tensor, form: Mapping[str, Any]) -> torch.Tensor:
    """The weight after 4 bits, as bitsandbytes' layers compute with it, in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    seen = weight.to(getattr(torch, form["dtype"])) if form["dtype"] else weight
    packed, state = quantize_4bit(
        seen.contiguous(), quant_type=form["quant_type"], compress_statistics=form["double_quant"]
    )
    return dequantize_4bit(packed, state).float()
