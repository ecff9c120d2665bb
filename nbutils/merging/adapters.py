"""What an adapter does to each weight of its base, in PEFT's order, in float32, on any range of rows.

An adapter that does not fit the base, or cannot be merged exactly, is refused here, before anything is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.merging.folder import ModelFolder
from nbutils.merging.safetensors_io import StoredTensor

if TYPE_CHECKING:
    import torch

HEAD = "lm_head"
PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
PARTS = re.compile(
    r"(?P<module>.+?)\.(?:(lora_[AB])\.weight|(lora_embedding_[AB])|(lora_magnitude_vector)(?:\.weight)?"
    r"|(?:base_layer\.|modules_to_save\.)?(weight|bias))"
)
# Settings that make an adapter more than W + scale * B @ A.
UNSUPPORTED = (
    "arrow_config", "use_bdlora", "alora_invocation_tokens", "velora_config", "monteclora_config", "kasa_config",
    "use_qalora", "lora_bias", "layer_replication", "target_parameters", "megatron_config", "trainable_token_indices",
    "fan_in_fan_out",
)  # fmt: skip
BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica")  # PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA change the base
# How lesson 03 loads the base in 4 bits; `dtype` is the one it is loaded in, None: the base's own.
FOUR_BIT: dict[str, Any] = {"quant_type": "nf4", "double_quant": True, "dtype": None}
Modules = dict[str, dict[str, StoredTensor]]  # module -> lora_A, lora_B, ... and weight, bias: replacements
# weight so far, weight of the base, first row, last row -> weight with the update
Apply = Callable[["torch.Tensor", "torch.Tensor", int, int], "torch.Tensor"]


@dataclass(frozen=True)
class LoraUpdate:
    """scale * B @ A is added, to an embedding transposed; with a magnitude it is DoRA."""

    b: StoredTensor
    a: StoredTensor
    scale: float
    transposed: bool = False
    magnitude: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight it fits."""
        shape = (self.b.shape[0], self.a.shape[-1])
        return shape[::-1] if self.transposed else shape

    def load(self, device: str) -> Apply:
        """Read the factors; the function that applies them to a range of rows."""
        import torch

        b, a = (tensor.tensor().float().to(device) for tensor in (self.b, self.a))
        scale = self.scale
        if math.frexp(scale)[0] == 0.5:  # a power of two is exact: scaling B once gives the same bits
            b, scale = b * scale, 1.0
        magnitude = self.magnitude.tensor().float().to(device) if self.magnitude else None

        def apply(weight: torch.Tensor, base: torch.Tensor, first: int, last: int) -> torch.Tensor:
            delta = (b @ a[:, first:last]).T if self.transposed else b[first:last] @ a
            delta = delta if scale == 1.0 else delta.mul_(scale)
            if magnitude is None:
                return weight.add_(delta)
            norm = torch.linalg.norm(base + delta, dim=1)
            return (magnitude[first:last] / norm).view(-1, 1) * (weight + delta)

        return apply


@dataclass(frozen=True)
class WeightPlan:
    """How one weight of the merged model is made: read from `source`, through 4 bits (settings), then updated."""

    source: StoredTensor
    updates: tuple[LoraUpdate, ...] = ()
    dequantized: Mapping[str, Any] | None = None
    replaced: bool = False  # by a weight of the adapter (modules_to_save)

    @property
    def by_rows(self) -> bool:
        """Whether it is computed row by row; otherwise each element is copied or cast by itself."""
        return bool(self.updates or self.dequantized)

    @property
    def changed(self) -> bool:
        """Whether it differs from the base's weight."""
        return bool(self.updates or self.replaced)


def plan_weights(base: ModelFolder, adapters: Iterable[ModelFolder]) -> tuple[dict[str, WeightPlan], bool]:
    """The plan of every weight of the merged model, and whether its output layer was untied from the embedding."""
    plans = {name: WeightPlan(tensor) for name, tensor in base.weights.items()}
    untied = False
    for adapter in adapters:
        _require_supported(adapter)
        modules = _group_by_module(adapter)
        untied = _untie(plans, base, adapter, modules) or untied
        for name, parts in modules.items():
            plans |= _plan_module(name, parts, adapter.config, plans)
    return plans, untied


def init_changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter's init changed its base: such an adapter means nothing without that changed base."""
    init = config.get("init_lora_weights", True)
    return not isinstance(init, bool) and str(init).lower() not in BASE_KEEPING_INITS


def _require_supported(adapter: ModelFolder) -> None:
    """Refuse what is not LoRA, rsLoRA or DoRA, and an adapter for a base that its init changed."""
    config = adapter.config
    problems = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA":
        problems.append(str(config.get("peft_type")))
    if init_changes_base(config):
        problems.append(f"init_lora_weights={config['init_lora_weights']}, which changed the base")
    if problems:
        raise CourseError("merging.unsupported_adapter", folder=adapter.path, kind=problems[0])


def _group_by_module(adapter: ModelFolder) -> Modules:
    """The adapter's tensors by the module of the base they belong to, all pairs complete."""
    modules: Modules = {}
    for key, tensor in adapter.weights.items():
        match = PARTS.fullmatch(key.removeprefix("base_model.model."))
        if match is None or ".lora_" in match["module"] or not tensor.is_float:
            raise CourseError("merging.unknown_tensor", key=key, dtype=tensor.dtype)
        part = next(part for part in match.groups()[1:] if part)
        modules.setdefault(match["module"], {})[part] = tensor
    for name, parts in modules.items():
        for a, b in PAIRS:
            if (a in parts) != (b in parts):
                raise CourseError("merging.incomplete_adapter", module=name, missing=b if a in parts else a)
        if "lora_magnitude_vector" in parts and "lora_A" not in parts:
            raise CourseError("merging.unsupported_adapter", folder=adapter.path, kind="DoRA on an embedding")
    if not modules:
        raise CourseError("merging.incomplete_adapter", module="any module", missing="tensors")
    return modules


def _untie(plans: dict[str, WeightPlan], base: ModelFolder, adapter: ModelFolder, modules: Modules) -> bool:
    """Give the output layer a weight of its own if the adapter made it differ from the embedding it was tied to."""
    embedding = next((name for name in base.weights if name.endswith("embed_tokens.weight")), "")
    head, tokens = modules.get(HEAD), modules.get(embedding.removesuffix(".weight"))
    if not base.tied or not embedding or (head is None and tokens is None):
        return False
    saved_together = adapter.config.get("ensure_weight_tying") or not adapter.config.get("modules_to_save")
    if saved_together and all(parts and set(parts) == {"weight"} for parts in (head, tokens)):
        modules.pop(HEAD)  # the same weight, saved twice
        return False
    plans.setdefault(f"{HEAD}.weight", plans[embedding])
    return True


def _plan_module(
    name: str, parts: Mapping[str, StoredTensor], config: Mapping[str, Any], plans: Mapping[str, WeightPlan]
) -> dict[str, WeightPlan]:
    """The plans of a module's weight and bias with this adapter in them."""
    found: dict[str, WeightPlan] = {}
    magnitude = parts.get("lora_magnitude_vector")
    updates = [
        LoraUpdate(parts[b], parts[a], scaling(config, name, parts[a].rows), a != "lora_A", magnitude)
        for a, b in PAIRS
        if a in parts
    ]
    for part, added in (("weight", updates), ("bias", [])):
        if not added and part not in parts:
            continue
        before = plans.get(f"{name}.{part}")
        if before is None:
            raise CourseError("merging.unknown_module", weight=f"{name}.{part}")
        source = parts.get(part, before.source)
        for shape in [source.shape, *(update.shape for update in added)]:
            if shape != before.source.shape:
                wrong = {"weight": f"{name}.{part}", "adapter": shape, "base": before.source.shape}
                raise CourseError("merging.wrong_shape", **wrong)
        # PEFT also saves the untouched embedding beside a LoRA on it
        replaced = before.replaced or (part in parts and not any(key.startswith("lora_") for key in parts))
        found[f"{name}.{part}"] = replace(before, source=source, updates=(*before.updates, *added), replaced=replaced)
    return found


def scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor before B @ A: alpha / r, or alpha / sqrt(r) for rsLoRA, with rank_pattern and alpha_pattern."""

    def look_up(patterns: str, default: str) -> float:
        """The value of the first pattern that matches the end of the module's name, as in PEFT."""
        items = (config.get(patterns) or {}).items()
        return float(next((value for key, value in items if re.match(rf"(.*\.)?({key})$", module)), config[default]))

    if look_up("rank_pattern", "r") != rank:
        raise CourseError("merging.wrong_rank", module=module, rank=rank)
    alpha = look_up("alpha_pattern", "lora_alpha")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


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


def round_trip(weight: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """The weight quantized to 4 bits and dequantized, in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    loaded = weight.to(getattr(torch, settings["dtype"])) if settings["dtype"] else weight
    packed, state = quantize_4bit(
        loaded.contiguous(), quant_type=settings["quant_type"], compress_statistics=settings["double_quant"]
    )
    return dequantize_4bit(packed, state).float()
