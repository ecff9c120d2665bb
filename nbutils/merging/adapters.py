"""What an adapter does to each weight of its base, from config and headers alone, and the arithmetic of it.

The arithmetic is PEFT's, in PEFT's order, in float32, on any range of rows: a weight never has to be whole in memory.
An adapter that does not fit the base, or cannot be merged exactly, is refused here, before anything is written.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.merging.folder import Adapter, ModelFolder
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
UNSUPPORTED = {
    "arrow_config": "Arrow", "use_bdlora": "BD-LoRA", "alora_invocation_tokens": "aLoRA", "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA", "kasa_config": "KaSA", "use_qalora": "QA-LoRA", "lora_bias": "lora_bias",
    "layer_replication": "layer replication", "target_parameters": "LoRA on the fused experts of an MoE",
    "megatron_config": "Megatron's parallel layers", "trainable_token_indices": "trainable_token_indices",
    "fan_in_fan_out": "fan_in_fan_out (Conv1D layers)",
}  # fmt: skip
BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica")  # PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA change the base
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
    """How one weight of the merged model is made: read from `source`, through 4 bits if `dequantized`, then updated."""

    source: StoredTensor
    updates: tuple[LoraUpdate, ...] = ()
    dequantized: bool = False
    replaced: bool = False  # by a weight of the adapter (modules_to_save)

    @property
    def by_rows(self) -> bool:
        """Whether it is computed row by row; otherwise each element is copied or cast by itself."""
        return bool(self.updates) or self.dequantized

    @property
    def changed(self) -> bool:
        """Whether it differs from the base's weight."""
        return bool(self.updates) or self.replaced


def plan_weights(base: ModelFolder, adapters: Iterable[Adapter]) -> tuple[dict[str, WeightPlan], bool]:
    """The plan of every weight of the merged model, and whether its output layer was untied from the embedding."""
    plans = {name: WeightPlan(tensor) for name, tensor in base.weights.items()}
    untied = False
    for adapter in adapters:
        require_supported(adapter)
        modules = _group_by_module(adapter)
        untied = _untie(plans, base, adapter, modules) or untied
        _require_known_modules(base, modules, plans)
        _require_every_layer(adapter, modules, base.weights)
        for name, parts in modules.items():
            plans |= _plan_module(name, parts, adapter.config, plans)
    return plans, untied


def init_changes_base(config: Mapping[str, Any]) -> bool:
    """Whether the adapter's init_lora_weights changed the base too, so that it does not fit the published one."""
    init = config.get("init_lora_weights", True)
    return not isinstance(init, bool) and str(init).lower() not in BASE_KEEPING_INITS


def require_supported(adapter: Adapter) -> None:
    """Refuse what is not LoRA, rsLoRA or DoRA, and an adapter for a base that its init changed."""
    config, kind = adapter.config, str(adapter.config.get("peft_type"))
    if kind != "LORA" or (kind := next((name for key, name in UNSUPPORTED.items() if config.get(key)), "")):
        raise CourseError("merging.unsupported_adapter", folder=adapter.path, kind=kind)
    if init_changes_base(config):
        raise CourseError("merging.init_changed_base", folder=adapter.path, init=config["init_lora_weights"])


def _group_by_module(adapter: Adapter) -> Modules:
    """The adapter's tensors by the module of the base they belong to, all pairs complete."""
    modules: Modules = {}
    for key, tensor in adapter.tensors.items():
        match = PARTS.fullmatch(key.removeprefix("base_model.model."))
        if match is None or ".lora_" in match["module"]:
            raise CourseError("merging.unknown_tensor", key=key)
        if not tensor.is_float:
            raise CourseError("merging.compressed_adapter", key=key, dtype=tensor.dtype)
        part = next(part for part in match.groups()[1:] if part)
        modules.setdefault(match["module"], {})[part] = tensor
    for name, parts in modules.items():
        for a, b in PAIRS:
            if (a in parts) != (b in parts):
                raise CourseError("merging.incomplete_adapter", module=name, missing=b if a in parts else a)
        if "lora_magnitude_vector" in parts and "lora_A" not in parts:
            raise CourseError("merging.unsupported_adapter", folder=adapter.path, kind="DoRA on an embedding")
    return modules


def _require_known_modules(base: ModelFolder, modules: Modules, plans: Mapping[str, WeightPlan]) -> None:
    """Refuse an adapter that is empty, or has modules that the base does not have."""
    if not modules:
        raise CourseError("merging.empty_adapter")
    unknown = [name for name in modules if f"{name}.weight" not in plans and f"{name}.bias" not in plans]
    if not unknown:
        return
    near = difflib.get_close_matches(f"{unknown[0]}.weight", list(plans), n=1, cutoff=0.6)
    hint = f" (closest: {near[0]})" if near else ""
    raise CourseError("merging.unknown_module", base=base.name, module=unknown[0], more=len(unknown) - 1, hint=hint)


def _require_every_layer(adapter: Adapter, modules: Modules, weights: Iterable[str]) -> None:
    """Refuse an adapter that lacks a target module of one layer and has it for others: a part of it was lost."""
    targets, config = adapter.config.get("target_modules"), adapter.config
    if not isinstance(targets, list) or config.get("layers_to_transform") or config.get("exclude_modules"):
        return

    def without_layer(module: str) -> str:
        return re.sub(r"\.\d+(?=\.|$)", ".*", module)

    kinds = {without_layer(name) for name, parts in modules.items() if "lora_A" in parts}
    for name in (weight.removesuffix(".weight") for weight in weights if weight.endswith(".weight")):
        is_target = any(name == target or name.endswith(f".{target}") for target in targets)
        if is_target and name not in modules and without_layer(name) in kinds:
            raise CourseError("merging.incomplete_adapter", module=name, missing="tensor at all")


def _untie(plans: dict[str, WeightPlan], base: ModelFolder, adapter: Adapter, modules: Modules) -> bool:
    """Give the output layer a weight of its own if the adapter made it differ from the embedding it was tied to.

    PEFT would add both updates to the shared matrix, and the merged model would not be the one that was trained.
    """
    embedding = next((name for name in base.weights if name.endswith("embed_tokens.weight")), "")
    head, tokens = modules.get(HEAD), modules.get(embedding.removesuffix(".weight"))
    if not base.tied or not embedding or (head is None and tokens is None):
        return False
    saved_together = adapter.config.get("ensure_weight_tying") or not adapter.config.get("modules_to_save")
    if saved_together and all(parts and set(parts) == {"weight"} for parts in (head, tokens)):
        modules.pop(HEAD)  # the same weight, saved twice
        return False
    plans.setdefault(f"{HEAD}.weight", plans[embedding])
    modules.setdefault(HEAD, {})
    return True


def _plan_module(
    name: str, parts: Mapping[str, StoredTensor], config: Mapping[str, Any], plans: Mapping[str, WeightPlan]
) -> dict[str, WeightPlan]:
    """The plans of a module's weight and bias with this adapter in them."""
    found: dict[str, WeightPlan] = {}
    updates = [
        LoraUpdate(
            parts[b], parts[a], scaling(config, name, parts[a].rows), a != "lora_A", parts.get("lora_magnitude_vector")
        )
        for a, b in PAIRS
        if a in parts
    ]
    for part, added in (("weight", updates), ("bias", [])):
        if not added and part not in parts:
            continue
        before = plans.get(f"{name}.{part}")
        if before is None:
            raise CourseError("merging.missing_part", module=name, part=part)
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

    def look_up(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        """The value of the first pattern that matches the end of the module's name, as in PEFT."""
        found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, default)

    try:
        configured = int(look_up(config.get("rank_pattern"), config["r"]))
        alpha = float(look_up(config.get("alpha_pattern"), config["lora_alpha"]))
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as problem:
        raise CourseError("merging.no_rank", module=module, problem=f"{type(problem).__name__}: {problem}") from problem
    if configured != rank:
        raise CourseError("merging.wrong_rank", module=module, configured=configured, rank=rank)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
