"""What becomes of each weight: copied, replaced by the adapter's own, or W + scale * B @ A, computed in float32.

What cannot be merged exactly is refused here, before anything is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import models
from nbutils.config import BASE_KEEPING_INITS, UNMERGEABLE
from nbutils.errors import CourseError
from nbutils.merging.folder import CODES, FLOAT_BYTES, FLOATS, HEAD, ModelFolder, StoredTensor, text_name

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
A = "lora_A"
B = "lora_B"
MAGNITUDE = "lora_magnitude_vector"
Factors = Mapping[str, "torch.Tensor"]
FourBits = Mapping[str, Any]  # settings of BitsAndBytesConfig, and the `dtype` that is loaded
EITHER = re.compile(r"\.(lm_head|embed_tokens)\.")


@dataclass(frozen=True)
class WeightPlan:
    """How one weight of the merged model is made: read from `source`, through 4 bits (settings), then tuned by LoRA."""

    source: StoredTensor
    shard: str  # the file it is written to
    dtype: str  # the code of safetensors that it is written in
    lora: Mapping[str, StoredTensor] = field(default_factory=dict)  # A, B, with DoRA a magnitude, by their PEFT names
    scale: float = 1.0  # of B @ A
    dequantized: FourBits | None = None
    replaced: bool = False  # by a weight of the adapter (modules_to_save)

    @property
    def is_tuned(self) -> bool:
        """Whether the adapter changes it."""
        return self.replaced or bool(self.lora)

    @property
    def size(self) -> int:
        """The bytes it takes when it is written."""
        return self.source.size * FLOAT_BYTES.get(self.dtype, 1) // FLOAT_BYTES.get(self.source.dtype, 1)


def plan_weights(
    base: ModelFolder, adapter: ModelFolder, dtype: str = "auto", four_bit: FourBits | None = None
) -> dict[str, WeightPlan]:
    """The plan of every weight of the merged model, by name.

    `dtype` is torch's name. Of the text model, what is stored as most of it is gets it; what is stored otherwise, as
    are weights for vision, keeps its own. With settings for 4 bits, it is the base as such training saw it.
    """
    plans = {name: WeightPlan(tensor, tensor.file.name, tensor.dtype) for name, tensor in base.weights.items()}
    if dtype != "auto":
        stored = base.dtype
        for name, tensor in base.text_weights.items():
            if FLOATS.get(tensor.dtype) == stored:
                plans[name] = replace(plans[name], dtype=CODES[dtype])
    if unties_head(base, adapter):
        plans.setdefault(HEAD, plans[embedding_name(base)])
    _require_mergeable(adapter)
    _add_adapter(plans, adapter)
    if four_bit:
        quantized = quantized_weights(base.path)
        for name, plan in plans.items():
            if text_name(name) in quantized and not plan.replaced:
                plans[name] = replace(plan, dequantized=four_bit)
    return plans


def unties_head(base: ModelFolder, adapter: ModelFolder) -> bool:
    """Whether output layer and embedding, one matrix in the base, differ after the merge."""
    config = models.text_config(base.config)
    tied = config.get("tie_word_embeddings", HEAD not in base.weights)
    return tied and bool(embedding_name(base)) and any(EITHER.search(key) for key in adapter.weights)


def embedding_name(base: ModelFolder) -> str:
    """What the checkpoint calls the embedding; empty if it has none."""
    return next((name for name in base.weights if text_name(name) == EMBEDDING), "")


def _require_mergeable(adapter: ModelFolder) -> None:
    """Refuse what is not LoRA, rsLoRA or DoRA."""
    config = adapter.config
    problems = [key for key in UNMERGEABLE if config.get(key)]
    if config.get("peft_type") != "LORA":
        problems.append(str(config.get("peft_type")))
    if init_changes_base(config):
        problems.append("init_lora_weights")
    if problems:
        raise CourseError(
            "{folder} uses {kind}, which cannot be merged here.",
            todo="Merge it with PEFT's merge_and_unload on a machine with enough memory, or serve it unmerged.",
            folder=adapter.path,
            kind=problems[0],
        )


def init_changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter's init changed its base: such an adapter means nothing without that changed base."""
    init = str(config.get("init_lora_weights", True))
    return init.lower() not in BASE_KEEPING_INITS


def _add_adapter(plans: dict[str, WeightPlan], adapter: ModelFolder) -> None:
    """Give each weight what the adapter has for it; a tensor that fits no weight is refused."""
    config = adapter.config
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    unused = {}
    for key, tensor in adapter.weights.items():
        name = text_name(key).removeprefix("base_model.model.").removesuffix(".weight")
        unused[name.replace(".base_layer", "")] = tensor  # that of an untouched weight beside a LoRA on it
    for name, plan in plans.items():
        shape = plan.source.shape
        module = text_name(name).removesuffix(".weight")
        if module in unused and unused[module].shape == shape:
            plan = replace(plan, source=unused.pop(module), replaced=True)
        lora = {part: unused[f"{module}.{part}"] for part in (A, B, MAGNITUDE) if f"{module}.{part}" in unused}
        if A in lora and B in lora and (lora[A].shape, lora[B].shape) == ((rank, shape[-1]), (shape[0], rank)):
            plan = replace(plan, lora=lora, scale=scale)
            for part in lora:
                del unused[f"{module}.{part}"]
        plans[name] = plan
    if unused:
        key = min(unused)
        raise CourseError(
            "The adapter's {key}, of shape {shape}, fits no weight of the base.",
            todo=(
                "Use the base that adapter_config.json names, with its embeddings resized as before training; save "
                "the adapter again if a part is missing; merge a LoRA on an embedding with PEFT's merge_and_unload."
            ),
            key=key,
            shape=unused[key].shape,
        )


def quantized_weights(folder: Path) -> set[str]:
    """The weights that transformers loads in 4 bits: linear layers, but not the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # no memory for weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    return {f"{name}.weight" for name, _ in _quantized_layers(model)}


def round_to_4_bits(model: Any, settings: FourBits) -> None:
    """Replace the weights of a loaded model, in place, by what training in 4 bits would see of them."""
    for _, layer in _quantized_layers(model):
        layer.weight.data = _through_4_bits(layer.weight.data, settings)


def _quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that transformers loads in 4 bits, and their names."""
    import torch

    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module is not head:
            yield name, module


def read_factors(plan: WeightPlan, device: str = "cpu") -> Factors:
    """The matrices of a plan's LoRA in float32."""
    import torch

    return {name: stored.tensor().to(device, torch.float32) for name, stored in plan.lora.items()}


def compute_rows(plan: WeightPlan, factors: Factors, rows: slice, device: str = "cpu") -> torch.Tensor:
    """Some rows of a merged weight: the product added in float32, the sum rounded once."""
    import torch

    weight = plan.source.tensor(rows).to(device)
    if plan.dequantized:
        weight = _through_4_bits(weight, plan.dequantized)
    weight = weight.float()
    if factors:
        product = factors[B][rows] @ factors[A]
        weight = product.mul_(plan.scale).add_(weight)
    if MAGNITUDE in factors:
        length = factors[MAGNITUDE].view(-1)[rows]
        factor = length / torch.linalg.norm(weight, dim=1)
        weight = factor.view(-1, 1) * weight
    return weight.to("cpu", getattr(torch, FLOATS[plan.dtype]))


def _through_4_bits(weight: torch.Tensor, settings: FourBits) -> torch.Tensor:
    """A weight of the base as 4-bit training saw it."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    if settings.get("dtype"):
        weight = weight.to(getattr(torch, settings["dtype"]))
    packed, state = quantize_4bit(
        weight.contiguous(),
        quant_type=settings["bnb_4bit_quant_type"],
        compress_statistics=settings["bnb_4bit_use_double_quant"],
    )
    return dequantize_4bit(packed, state)
