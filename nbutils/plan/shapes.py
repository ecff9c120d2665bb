"""The shape of a model: what memory and time follow from. Known by name (`configs/models.yaml`) or from a config.json.

Not here: loading or downloading a model; a config is only read where it lies already.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import paths
from nbutils.errors import CourseError
from nbutils.profiles import models

# What a fact is called in config.json: first as in Qwen2, Qwen3, Llama and GLM-4, then as in the first ChatGLM files.
KEYS = {
    "layers": ("num_hidden_layers", "num_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "intermediate": ("intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
}
KV_HEADS, HEAD_DIM = ("num_key_value_heads", "multi_query_group_num"), ("head_dim", "kv_channels")
# Mixtures of experts, compressed keys (MLA) and state spaces: the formulas do not know them.
STRANGE = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "kv_lora_rank", "ssm_cfg", "state_size",
)  # fmt: skip
LARGEST = 10**7  # no size of a model is larger


@dataclass(frozen=True)
class Shape:
    """A dense decoder: attention of q, k, v, o and an MLP of gate, up, down in every layer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the seven linear maps of one layer: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return (h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)

    @property
    def linear_params(self) -> int:
        """Weights in the linear maps of all layers: these are quantised, and these get adapters."""
        return self.layers * sum(wide * high for wide, high in self.linears)

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding and of the output head, which are one if the model ties them: never quantised."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def norm_params(self) -> int:
        """Weights of the norms: two in each layer and a last one."""
        return self.hidden * (2 * self.layers + 1)

    @property
    def params(self) -> int:
        """All weights."""
        return self.linear_params + self.embedding_params + self.norm_params

    def adapter_params(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear maps: rank x (in + out) for each."""
        return self.layers * rank * sum(wide + high for wide, high in self.linears)


def _shape(name: str, known: models.KnownModel) -> Shape:
    return Shape(name, *(getattr(known, key) for key in list(Shape.__dataclass_fields__)[1:]))


def course_shapes() -> list[Shape]:
    """The shapes of all course models."""
    return [_shape(name, known) for name, known in models.known_models().items()]


def find(model: str) -> Shape:
    """The shape of a course model, a hub id, or a folder with a config.json; nothing is downloaded."""
    for name, known in models.known_models().items():
        if model.casefold() in (name.casefold(), known.hub.casefold(), known.hub.partition("/")[2].casefold()):
            return _shape(name, known)
    if models.is_tiny(model):
        return of_config(paths.TINY_MODEL / "config.json", "tiny")
    if (config := _config_of(model)) is not None:
        return of_config(config, model)
    raise CourseError(
        f"the shape of {model} is not known: it is no course model, no folder with config.json, and not in the cache.",
        f"{', '.join(models.known_models())}, tiny, or a folder with config.json",
        "give --model one of these; or save the model's config.json (a few kB) into a folder and give that folder",
    )


def _config_of(model: str) -> Path | None:
    """The config.json of a folder or of a hub id in the cache."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # HFValidationError is a ValueError
        return None
    return Path(cached) if isinstance(cached, str) else None


def of_config(file: Path, name: str) -> Shape:
    """The shape a config.json describes; every key that is missing is named."""
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CourseError(f"{file} cannot be read: {problem}.", "a JSON file", "download it again") from problem
    config = whole.get("text_config", whole) if isinstance(whole, dict) else None
    if not isinstance(config, dict):
        raise CourseError(f"{file} describes no model.", "a JSON object with the model's sizes", "download it again")
    if strange := [key for key in STRANGE if config.get(key)]:
        raise CourseError(
            f"{name} is not a dense model of the usual kind ({', '.join(strange)} in its config.json).",
            "Qwen2, Qwen3, Llama, GLM-4 style",
            "plan such a model, or measure this one with a few steps on a rented card",
        )
    values = {fact: _first(config, names) for fact, names in KEYS.items()}
    missing = [" or ".join(KEYS[fact]) for fact, value in values.items() if value is None]
    if missing:
        raise CourseError(
            f"{file} lacks {', '.join(missing)}.", "whole numbers for these keys, as in Qwen2, Qwen3, Llama, GLM-4",
            f"add the missing keys to {file}, or a block for this model to {paths.CONFIGS / 'models.yaml'}",
        )  # fmt: skip
    facts = {fact: int(value) for fact, value in values.items() if value is not None}
    kv_heads = _first(config, KV_HEADS) or facts["heads"]
    head_dim = _first(config, HEAD_DIM) or max(facts["hidden"] // facts["heads"], 1)
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)) is True
    return Shape(name=name, kv_heads=kv_heads, head_dim=head_dim, tied=tied, **facts)


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these keys that holds a whole number above zero."""
    found = [config[name] for name in names if type(config.get(name)) is int and 0 < config[name] < LARGEST]
    return found[0] if found else None
