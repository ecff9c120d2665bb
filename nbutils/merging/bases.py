"""The two folders a merge starts from: the base model, and the adapter with its settings.

Both are known by the headers of their files; no weight is read. A Hub id is fetched, or found in the cache.
Not here: whether the two belong together (plan), and what is done with them (streaming).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.merging.shards import FLOATS, Stored, damaged, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head"
QUANTISED_NAME = re.compile(
    r"[-_](unsloth-)?(bnb-4bit|4bit|8bit|awq|gptq|fp8|gguf|w4a16|w8a8|int4|int8|mlx)\b.*$", re.I
)
QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's
NEEDED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.py"]


@dataclass(frozen=True)
class Base:
    """A model folder: its settings, and where each weight lies."""

    folder: Path
    called: str
    config: dict[str, Any]
    shards: Mapping[str, Mapping[str, Stored]]  # file name -> weight name -> place

    @property
    def weights(self) -> dict[str, Stored]:
        """Every weight of every file."""
        return {name: place for shard in self.shards.values() for name, place in shard.items()}

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings", f"{HEAD}.weight" not in self.weights))

    @property
    def dtype(self) -> str:
        """The type of its weights, as torch calls it; "auto" if they are of several."""
        found = Counter(FLOATS[place.dtype] for place in self.weights.values() if place.is_float)
        return next(iter(found)) if len(found) == 1 else "auto"


@dataclass(frozen=True)
class Adapter:
    """An adapter folder: its settings, and where each of its tensors lies."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, Stored]


def called(base: str | Path) -> str:
    """The base as it is written down: a Hub id, or the name of a folder; a folder of the cache is named by its id."""
    parts = Path(base).absolute().parts if Path(base).is_dir() else Path(base).parts
    if "snapshots" in parts and (cache := parts[parts.index("snapshots") - 1]).startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return parts[-1] if Path(base).is_dir() else str(base)


def plain_name(name: str) -> str:
    """A model's name without its owner and without what says how it was quantised."""
    return QUANTISED_NAME.sub("", Path(name).name).lower()


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a model's settings, or those of a part of it, say that its weights are quantised."""
    parts = [config, *(part for key, part in config.items() if key.endswith("_config") and isinstance(part, Mapping))]
    return any(part.get(key) for part in parts for key in QUANTISED_KEYS)


def require_unquantised(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a base whose settings say that it is quantised, and say which one to use."""
    if is_quantised(config):
        raise quantised(name)


def quantised(name: str) -> CourseError:
    """The error for a quantised base."""
    full = QUANTISED_NAME.sub("", name)
    instead = full if full != name else "the model this one was quantised from (its page names it)"
    return CourseError(
        f"{name} is a quantised model.", "the 16-bit (or 32-bit) model it was made from",
        f"use {instead}: merging into quantised weights would round the tuning away",
    )  # fmt: skip


def find_folder(base: str | Path, fetch: bool = True) -> Path | None:
    """The folder of a base; a Hub id is looked up in the cache, and fetched if asked to. None: not on this machine."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    ignored = ["consolidated*", "original/*"]
    try:
        return Path(
            snapshot_download(str(base), allow_patterns=NEEDED, ignore_patterns=ignored, local_files_only=not fetch)
        )
    except Exception as problem:
        if not fetch:
            return None
        raise CourseError(
            f"the base {base} cannot be fetched: {type(problem).__name__}.",
            "a folder with config.json and safetensors files, or a Hub id that can be reached",
            "check the name and the network; the merge needs the full model, not only the adapter",
        ) from problem


def open_base(base: str | Path) -> Base:
    """A base with the headers of all its files."""
    folder = find_folder(base)
    assert folder is not None
    config = read_settings(folder / "config.json", "a model folder")
    require_unquantised(called(base), config)
    shards = {name: read_header(folder / name)[0] for name in _file_names(folder)}
    _require_all(folder, shards)
    if any(place.is_packed for shard in shards.values() for place in shard.values()):
        raise quantised(called(base))  # also where the settings do not say so
    return Base(folder, called(base), config, shards)


def _file_names(folder: Path) -> list[str]:
    """The weight files of a model folder."""
    names = sorted({Path(name).name for name in _index(folder).values()}) or [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return names
    old = " It has weights in PyTorch's old format (.bin)." if any(folder.glob("*.bin")) else ""
    raise CourseError(
        f"{folder} lacks {missing[0]}.{old}", "all files of a model in safetensors format",
        "fetch the model again; one that exists only as .bin: load it with transformers and call save_pretrained",
    )  # fmt: skip


def _index(folder: Path) -> dict[str, str]:
    """Which weight is in which file, if there are several."""
    found = read_settings(folder / INDEX, "a model folder").get("weight_map") if (folder / INDEX).is_file() else {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise damaged(folder / INDEX, "it does not say which weight is where")
    return found


def _require_all(folder: Path, shards: Mapping[str, Mapping[str, Stored]]) -> None:
    """Refuse files that do not hold what the index says, or hold a weight twice."""
    held = Counter(name for shard in shards.values() for name in shard)
    missing = next((name for name in _index(folder) if name not in held), "")
    twice = next((name for name, times in held.items() if times > 1), "")
    if missing or twice:
        raise damaged(folder, f"no file has {missing}, which is in {INDEX}" if missing else f"two files have {twice}")


def open_adapter(folder: Path) -> Adapter:
    """An adapter with the header of its file."""
    config = read_settings(folder / "adapter_config.json", "an adapter folder")
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise CourseError(
            f"{folder} has no adapter_model.safetensors.", "an adapter saved in safetensors format",
            "run lesson 03, or load the adapter with PEFT and save it again with save_pretrained",
        )  # fmt: skip
    return Adapter(folder, config, read_header(file)[0])


def read_settings(file: Path, kind: str) -> dict[str, Any]:
    """A JSON file of a folder that must be there."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no settings")
        return found
    except (OSError, ValueError) as problem:
        raise CourseError(
            f"{file} is missing or cannot be read.", f"{kind} with a readable {file.name}",
            "check the path, and make or fetch that folder again",
        ) from problem  # fmt: skip
