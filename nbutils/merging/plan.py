"""What an adapter does to each weight of a base, worked out from settings and headers alone.

Here an adapter that does not belong to the base, or that cannot be merged, is refused, before anything is written.
Not here: an adapter's own tensors (modules), the arithmetic (formula), the files (shards).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nbutils.errors import CourseError
from nbutils.merging.bases import HEAD, Adapter, Base
from nbutils.merging.formula import Change, Product, Recipe, Rows, Shift
from nbutils.merging.modules import PAIRS, Module, read_modules, require_targets
from nbutils.merging.shards import Stored

# Settings that make an adapter something else than W + scale · B · A, each with what it is.
OTHER_KINDS = {
    "arrow_config": "Arrow, which chooses among experts for each token", "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA, which is active only after certain tokens", "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA", "kasa_config": "KaSA", "use_qalora": "QA-LoRA",
    "layer_replication": "layer replication", "target_parameters": "LoRA on the fused experts of a mixture (MoE)",
    "megatron_config": "Megatron's parallel layers",
}  # fmt: skip
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # the others also change the base when training begins


def recipes(base: Base, adapters: Iterable[Adapter]) -> tuple[dict[str, Recipe], bool]:
    """How each weight of the merged model is made, and whether its output layer had to be untied."""
    made = {name: Recipe(place) for name, place in base.weights.items()}
    untied = False
    for adapter in adapters:
        require_mergeable(adapter)
        modules = read_modules(adapter)
        untied = _untie(made, base, adapter, modules) or untied
        unknown = [name for name in modules if f"{name}.weight" not in made and f"{name}.bias" not in made]
        if unknown or not modules:
            raise _mismatch(base, unknown, made)
        require_targets(adapter, modules, base.weights)
        for name, module in modules.items():
            for part, recipe in _changed(name, module, adapter, made).items():
                made[f"{name}.{part}"] = recipe
    return made, untied


def require_mergeable(adapter: Adapter) -> None:
    """Refuse what is not LoRA, or a LoRA that no single weight can express."""
    config = adapter.config
    kind = str(config.get("peft_type"))
    found = "" if kind == "LORA" else f"{kind} adapter"
    found = found or next((words for key, words in OTHER_KINDS.items() if config.get(key)), "")
    if found:
        raise CourseError(
            f"{adapter.folder} cannot be merged shard by shard: it is {'an ' if kind != 'LORA' else ''}{found}.",
            "LoRA, rsLoRA and DoRA, with biases, trained tokens and modules_to_save",
            "merge it with PEFT's merge_and_unload on a machine with enough memory, if PEFT can, or serve it unmerged",
        )
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise CourseError(
            f"{adapter.folder} was begun with init_lora_weights={start!r}, which changed the base too.",
            "an adapter for the base as it was published",
            "save it again with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...) converts it",
        )


def _untie(made: dict[str, Recipe], base: Base, adapter: Adapter, modules: dict[str, Module]) -> bool:
    """Give the output layer a weight of its own where the adapter made it differ from the embedding it was tied to.

    PEFT would add both changes to the one shared matrix, and the merged model would not be the one that was trained.
    """
    embedding = next((name for name in base.weights if name.endswith("embed_tokens.weight")), "")
    if not base.tied or not embedding:
        return False
    head, tokens = modules.get(HEAD), modules.get(embedding.removesuffix(".weight"))
    if head is None and (tokens is None or set(tokens.parts) == {"trainable_tokens_delta"}):
        return False  # nothing to do, or trained tokens, which PEFT gives to both sides
    together = adapter.config.get("ensure_weight_tying") or not adapter.config.get("modules_to_save")
    if together and all(module and set(module.parts) == {"weight"} for module in (head, tokens)):
        modules.pop(HEAD)  # saved twice, and the same
        return False
    made.setdefault(f"{HEAD}.weight", made[embedding])
    modules.setdefault(HEAD, Module())
    return True


def _changed(name: str, module: Module, adapter: Adapter, made: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes of a module's weight and bias with this adapter in it."""
    found: dict[str, Recipe] = {}
    changes = {"weight": _weight_changes(name, module, adapter), "bias": _bias_changes(name, module, adapter)}
    for part, added in changes.items():
        if not added and part not in module.parts:
            continue
        before = made.get(f"{name}.{part}")
        if before is None:
            raise CourseError(
                f"the adapter has a {part} for {name}, and the base has none.", f"a base whose {name} has a {part}",
                "use the base the adapter was trained on; lora_bias cannot be merged into layers without a bias",
            )  # fmt: skip
        source = module.parts.get(part, before.source)
        _require_shapes(f"{name}.{part}", before.source, source, added)
        replaced = before.replaced or (part in module.parts and not _saved_along(part, module))
        found[part] = Recipe(source, before.changes + tuple(added), before.four_bit, replaced)
    return found


def _saved_along(part: str, module: Module) -> bool:
    """Whether a weight lies in the adapter only because PEFT saves the embeddings it was added to."""
    return part == "weight" and any(name.startswith("lora_") for name in module.parts)


def _weight_changes(name: str, module: Module, adapter: Adapter) -> list[Change]:
    parts, config = module.parts, adapter.config
    magnitude, turned = parts.get("lora_magnitude_vector"), bool(config.get("fan_in_fan_out"))
    found: list[Change] = []
    for (down, up), lies_turned in zip(PAIRS, (turned, True), strict=True):
        if up in parts:
            scale = scaling(config, name, parts[down].shape[0])
            found.append(Product(parts[up], parts[down], scale, lies_turned, magnitude))
    if "trainable_tokens_delta" in parts:
        found.append(Rows(parts["trainable_tokens_delta"], token_indices(config, name)))
    return found


def _bias_changes(name: str, module: Module, adapter: Adapter) -> list[Change]:
    if "lora_B.bias" not in module.parts:
        return []
    rank = module.parts["lora_A"].shape[0]
    return [Shift(module.parts["lora_B.bias"], scaling(adapter.config, name, rank))]


def scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """The factor before B · A: alpha / r, or alpha / sqrt(r) for rsLoRA, where patterns may change either."""
    try:
        wanted = int(_by_pattern(config.get("rank_pattern"), name, config["r"]))
        alpha = float(_by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as problem:
        raise CourseError(
            f"adapter_config.json says no rank and alpha for {name} ({type(problem).__name__}: {problem}).",
            "r and lora_alpha as numbers, patterns as PEFT writes them", "save the adapter again with PEFT",
        ) from problem  # fmt: skip
    if wanted != rank:
        raise CourseError(
            f"the adapter's settings say rank {wanted} for {name}, its weights have {rank}.",
            "settings that fit the weights",
            "the folder mixes two adapters: save the adapter again, both files together",
        )  # fmt: skip
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """The value of the first pattern that names the end of this module, as PEFT looks it up."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, otherwise)


def token_indices(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Which tokens were trained by themselves in this module."""
    wanted = config.get("trainable_token_indices") or []
    if isinstance(wanted, Mapping):
        wanted = next((value for key, value in wanted.items() if name == key or name.endswith(f".{key}")), [])
    return tuple(int(index) for index in wanted)


def _require_shapes(name: str, before: Stored, source: Stored, changes: Iterable[Change]) -> None:
    """Refuse a change whose shape is not the weight's."""
    seen = [source.shape]
    for change in changes:
        if isinstance(change, Product):
            shape = (change.up.shape[0], change.down.shape[1])
            seen.append(shape[::-1] if change.turned else shape)
        elif isinstance(change, Shift) or not change.fits(before.rows):
            seen.append(change.values.shape)
    wrong = next((shape for shape in seen if shape != before.shape), None)
    if wrong is not None:
        raise CourseError(
            f"the adapter was made for {name} of shape {wrong}, the base has {before.shape}.",
            "an adapter and the base it was trained on",
            "use that base; if tokens were added before the training, resize the base's embeddings and save it first",
        )


def _mismatch(base: Base, unknown: list[str], made: Mapping[str, Recipe]) -> CourseError:
    if not unknown:
        return CourseError(
            "the adapter is empty.", "an adapter with weights", "train and save it again (lesson 03)"
        )  # fmt: skip
    near = difflib.get_close_matches(f"{unknown[0]}.weight", list(made), n=1, cutoff=0.6)
    hint = f" (nearest: {near[0]})" if near else ""
    if "vision_config" in base.config or "text_config" in base.config:
        return CourseError(
            f"{base.called} is a multimodal model, and its files name {unknown[0]} otherwise than PEFT does.",
            "language models", "merge it with PEFT's merge_and_unload on a machine with enough memory",
        )  # fmt: skip
    return CourseError(
        f"the adapter changes {unknown[0]} and {len(unknown) - 1} more modules that {base.called} does not have{hint}.",
        "an adapter and the base it was trained on", "use the base that adapter_config.json names",
    )  # fmt: skip
