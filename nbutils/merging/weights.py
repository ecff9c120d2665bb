"""What becomes of each weight: copied, replaced by the adapter's own, or W + scale * B @ A, computed in float32.

What cannot be merged exactly is refused here, before anything is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.config import BASE_KEEPING_INITS, UNMERGEABLE
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.merging.folder import ModelFolder, StoredTensor

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
EITHER = re.compile(r"\.(lm_head|embed_tokens)\.")
Apply = Callable[["torch.Tensor", slice], "torch.Tensor"]  # some rows of a weight of the base -> the same, tuned


@dataclass(frozen=True)
class LoraUpdate:
    """scale * B @ A is added; with a magnitude it is DoRA."""

    b: StoredTensor
    a: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None

    def load(self, device: str) -> Apply:
        """Read the factors; the function that applies them to a range of rows."""
        import torch

        b = self.b.tensor().to(device, torch.float32)
        a = self.a.tensor().to(device, torch.float32)
        magnitude = None
        if self.magnitude:
            magnitude = self.magnitude.tensor().to(device, torch.float32)

        def apply(base: torch.Tensor, rows: slice) -> torch.Tensor:
            weight = b[rows] @ a
            weight.mul_(self.scale).add_(base)
            if magnitude is None:
                return weight
            factor = magnitude[rows] / torch.linalg.norm(weight, dim=1)
            return factor.view(-1, 1) * weight

        return apply


@dataclass(frozen=True)
class WeightPlan:
    """How one weight of the merged model is made: read from `source`, through 4 bits (settings), then updated."""

    source: StoredTensor
    shard: str  # the file it is written to
    update: LoraUpdate | None = None
    dequantized: Mapping[str, Any] | None = None
    replaced: bool = False  # by a weight of the adapter (modules_to_save)

    @property
    def is_tuned(self) -> bool:
        """Whether the adapter changes it."""
        return self.replaced or self.update is not None


def plan_weights(base: ModelFolder, adapter: ModelFolder) -> dict[str, WeightPlan]:
    """The plan of every weight of the merged model, by name."""
    plans = {name: WeightPlan(tensor, shard=tensor.file.name) for name, tensor in base.weights.items()}
    if unties_head(base, adapter):
        plans.setdefault(HEAD, plans[EMBEDDING])
    _require_mergeable(adapter)
    _add_adapter(plans, adapter)
    return plans


def unties_head(base: ModelFolder, adapter: ModelFolder) -> bool:
    """Whether output layer and embedding, one matrix in the base, differ after the merge."""
    names = base.weights
    tied = base.config.get("tie_word_embeddings", HEAD not in names)
    return tied and EMBEDDING in names and any(EITHER.search(key) for key in adapter.weights)


def _require_mergeable(adapter: ModelFolder) -> None:
    """Refuse what is not LoRA, rsLoRA or DoRA."""
    config = adapter.config
    problems = [key for key in UNMERGEABLE if config.get(key)]
    if config.get("peft_type") != "LORA":
        problems.append(str(config.get("peft_type")))
    if init_changes_base(config):
        problems.append(tr("init_lora_weights={init}, which changed the base", init=config["init_lora_weights"]))
    if problems:
        raise CourseError(
            tr("{folder} uses {kind}, which cannot be merged here.", folder=adapter.path, kind=problems[0]),
            todo=tr("Merge it with PEFT's merge_and_unload on a machine with enough memory, or serve it unmerged."),
        )


def init_changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter's init changed its base: such an adapter means nothing without that changed base."""
    init = config.get("init_lora_weights", True)
    return not isinstance(init, bool) and str(init).lower() not in BASE_KEEPING_INITS


def _add_adapter(plans: dict[str, WeightPlan], adapter: ModelFolder) -> None:
    """Give each weight what the adapter has for it; a tensor that fits no weight is refused."""
    unused = {_bare_key(key): tensor for key, tensor in adapter.weights.items()}
    for name, plan in plans.items():
        shape = plan.source.shape
        if name in unused and unused[name].shape == shape:
            plan = replace(plan, source=unused.pop(name), replaced=True)
        module = name.removesuffix(".weight")
        a = unused.get(f"{module}.lora_A")
        b = unused.get(f"{module}.lora_B")
        if a and b and a.rows == adapter.config["r"] and (b.rows, a.shape[-1]) == shape:
            magnitude = unused.pop(f"{module}.lora_magnitude_vector", None)
            plan = replace(plan, update=LoraUpdate(b, a, _scale_of(adapter.config), magnitude))
            del unused[f"{module}.lora_A"], unused[f"{module}.lora_B"]
        plans[name] = plan
    if unused:
        key = min(unused)
        raise CourseError(
            tr("The adapter's {key}, of shape {shape}, fits no weight of the base.", key=key, shape=unused[key].shape),
            todo=tr(
                "Use the base that adapter_config.json names, with its embeddings resized as before training; save "
                "the adapter again if a part is missing; merge a LoRA on an embedding with PEFT's merge_and_unload."
            ),
        )


def _bare_key(key: str) -> str:
    """The module and the part of it, without what PEFT writes around them."""
    key = key.removeprefix("base_model.model.").replace(".base_layer.", ".")  # untouched, beside a LoRA on it
    return re.sub(r"\.(lora_A|lora_B|lora_magnitude_vector)\.weight$", r".\1", key)


def _scale_of(config: Mapping[str, Any]) -> float:
    """What B @ A is multiplied with."""
    rank = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    return float(config["lora_alpha"] / rank)


def quantized_weights(folder: Path) -> set[str]:
    """The weights that transformers loads in 4 bits: linear layers, but not the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):  # no memory for weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    skipped = get_keys_to_not_convert(model)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return {f"{name}.weight" for name in linear if should_convert_module(name, skipped)}


def compute_rows(plan: WeightPlan, apply: Apply | None, dtype: str, rows: slice, device: str = "cpu") -> torch.Tensor:
    """Some rows of a merged weight: the update added in float32, rounded once to the torch `dtype`."""
    import torch

    weight = plan.source.tensor(rows).to(device)
    if plan.dequantized:
        weight = _through_4_bits(weight, plan.dequantized)
    weight = weight.float()
    if apply:
        weight = apply(weight, rows)
    return weight.to("cpu", getattr(torch, dtype))


def _through_4_bits(weight: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """A weight of the base as 4-bit training saw it."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    if settings["dtype"]:
        weight = weight.to(getattr(torch, settings["dtype"]))
    packed, state = quantize_4bit(
        weight.contiguous(),
        quant_type=settings["bnb_4bit_quant_type"],
        compress_statistics=settings["bnb_4bit_use_double_quant"],
    )
    return dequantize_4bit(packed, state)
