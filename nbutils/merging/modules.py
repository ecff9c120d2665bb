"""An adapter's tensors sorted by the module of the base they belong to, and whether none of them is missing.

Not here: what they do to the weights (plan), and where they lie (shards).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbutils.errors import CourseError
from nbutils.merging.bases import Adapter
from nbutils.merging.shards import Stored

PREFIX = "base_model.model."
PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass
class Module:
    """What one adapter has for one module of the base."""

    parts: dict[str, Stored] = field(default_factory=dict)  # lora_A, lora_B, … and weight, bias: replacements

    @property
    def missing(self) -> str:
        """The first tensor without which the others mean nothing; "" if all are there."""
        lone = (
            right if left in self.parts else left
            for left, right in PAIRS
            if (left in self.parts) != (right in self.parts)
        )
        if absent := next(lone, ""):
            return absent
        extra = any(part.startswith("lora_") for part in self.parts)
        return "lora_A" if extra and not any(left in self.parts for left, _ in PAIRS) else ""


def read_modules(adapter: Adapter) -> dict[str, Module]:
    """The adapter's tensors by module; refused if one is of a type that is no number, or half of a pair."""
    found: dict[str, Module] = {}
    for key, place in adapter.tensors.items():
        name, part = _split(key.removeprefix(PREFIX))
        found.setdefault(name, Module()).parts[part] = place
        if not place.is_float:
            raise CourseError(
                f"the adapter holds {key} as {place.dtype}.", "an adapter in 16 or 32 bits",
                "save the adapter again as it was trained; a compressed one cannot be merged",
            )  # fmt: skip
    for name, module in found.items():
        if module.missing:
            there = ", ".join(sorted(module.parts))
            raise _incomplete(f"the adapter has {there} for {name}, and no {module.missing}.")
    return found


def require_targets(adapter: Adapter, modules: Mapping[str, Module], weights: Iterable[str]) -> None:
    """Refuse an adapter without a module that its settings name, where it has the same one of other layers."""
    targets, settings = adapter.config.get("target_modules"), adapter.config
    if not isinstance(targets, list) or settings.get("layers_to_transform") or settings.get("exclude_modules"):
        return
    kinds = {_kind(name) for name, module in modules.items() if "lora_A" in module.parts}
    for weight in weights:
        name = weight.removesuffix(".weight")
        if name == weight or name in modules or _kind(name) not in kinds:
            continue
        if any(name == target or name.endswith(f".{target}") for target in targets):
            raise _incomplete(f"the adapter has nothing for {name}, which its settings name.")


def _kind(name: str) -> str:
    """A module's name without the number of its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _incomplete(seen: str) -> CourseError:
    return CourseError(
        seen, "an adapter with all its tensors", "fetch or save it again: a part of adapter_model.safetensors was lost"
    )


def _split(key: str) -> tuple[str, str]:
    """Module and part of a key: `x.lora_A.weight` is part lora_A of x, `x.base_layer.bias` its bias."""
    ways = r"(lora_[AB])\.weight|(lora_B\.bias)|(lora_embedding_[AB])|(lora_magnitude_vector)(?:\.weight)?"
    ways += r"|token_adapter\.(trainable_tokens_delta)|(?:base_layer\.|modules_to_save\.)?(weight|bias)"
    match = re.fullmatch(rf"(.+?)\.(?:{ways})", key)
    if match is None or ".lora_" in match[1]:
        raise CourseError(
            f"the adapter holds {key}, which no LoRA has.", "lora_A, lora_B, biases, trained tokens, whole modules",
            "save the adapter again with a current PEFT",
        )  # fmt: skip
    name, *parts = match.groups()
    return name, next(part for part in parts if part)
