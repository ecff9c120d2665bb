"""Model and adapter folders: opened by their headers, told apart by fingerprints, filled with what is not a weight."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import files
from nbutils.errors import CourseError
from nbutils.merging.safetensors_io import FLOATS, StoredTensor, read_header

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUANTIZED_SUFFIX = re.compile(
    r"[-_](unsloth-)?(bnb-4bit|4bit|8bit|awq|gptq|fp8|gguf|w4a16|w8a8|int4|int8|mlx)\b.*$", re.I
)
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.py")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip
SAMPLE = 2**12  # bytes at the beginning, in the middle and at the end of each weight


@dataclass(frozen=True)
class ModelFolder:
    """A model or an adapter on disk: its config, and where each weight is (file name -> weight name -> tensor)."""

    path: Path
    name: str
    config: dict[str, Any]
    shards: Mapping[str, Mapping[str, StoredTensor]]

    @property
    def weights(self) -> dict[str, StoredTensor]:
        return {name: tensor for shard in self.shards.values() for name, tensor in shard.items()}

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings", "lm_head.weight" not in self.weights))

    @property
    def dtype(self) -> str:
        """The torch name of the weights' dtype; "auto" if there are several."""
        found = {FLOATS[tensor.dtype] for tensor in self.weights.values() if tensor.is_float}
        return found.pop() if len(found) == 1 else "auto"


def open_base(base: str | Path) -> ModelFolder:
    """A model folder, or a Hub model that is downloaded if it is not cached; a quantized one is refused."""
    path, name = find_folder(base), model_name(base)
    assert path is not None
    config = read_config(path / "config.json")
    index = read_config(path / INDEX)["weight_map"] if (path / INDEX).is_file() else {}
    files = sorted({Path(file).name for file in index.values()}) or [SINGLE]
    model = ModelFolder(path, name, config, {file: read_header(path / file)[0] for file in files})
    if missing := sorted(index.keys() - model.weights.keys()):
        raise CourseError("merging.damaged_file", file=path / INDEX, reason=f"no file has {missing[0]}")
    if is_quantized(config):
        raise CourseError("merging.quantized_base", name=name, original=QUANTIZED_SUFFIX.sub("", name))
    return model


def read_weight(folder: str | Path, name: str) -> torch.Tensor:
    """One weight of a model folder in float32."""
    return open_base(folder).weights[name].tensor().float()


def open_adapter(path: Path) -> ModelFolder:
    """An adapter folder as PEFT saves it."""
    shards = {ADAPTER_WEIGHTS: read_header(path / ADAPTER_WEIGHTS)[0]}
    return ModelFolder(path, path.name, read_config(path / ADAPTER_CONFIG), shards)


def read_config(file: Path) -> dict[str, Any]:
    """A JSON file that must be there and hold an object."""
    try:
        return dict(files.read_json(file))
    except (OSError, ValueError, TypeError) as problem:
        raise CourseError("merging.unreadable_config", file=file) from problem


def find_folder(base: str | Path, download: bool = True) -> Path | None:
    """The folder of a model; a Hub id is looked up in the cache, then downloaded. None: not on this machine."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    files, ignored = [*SMALL_FILES, "*.safetensors"], ["consolidated*", "original/*"]
    options: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": ignored, "local_files_only": not download}
    try:
        return Path(snapshot_download(str(base), **options))
    except Exception as problem:
        if not download:
            return None
        raise CourseError("merging.download_failed", base=base, problem=type(problem).__name__) from problem


def model_name(base: str | Path) -> str:
    """The Hub id, also of a folder in the Hub's cache; of any other folder its own name."""
    parts = Path(base).absolute().parts if Path(base).is_dir() else Path(base).parts
    if "snapshots" in parts and (cache := parts[parts.index("snapshots") - 1]).startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return parts[-1] if Path(base).is_dir() else str(base)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are quantized."""
    return any(config.get(key) for key in ("quantization_config", "compression_config", "quantization"))


def model_fingerprint(model: ModelFolder) -> str:
    """A checksum of the config, of every weight's name, dtype and shape, and of samples of every weight."""
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for shard in sorted(model.shards):
        with open(model.path / shard, "rb", buffering=0) as file:
            for name, tensor in model.shards[shard].items():
                digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
                last = max(0, tensor.size - SAMPLE)
                for offset in sorted({0, last // 2, last}):
                    digest.update(os.pread(file.fileno(), min(SAMPLE, tensor.size), tensor.start + offset))
    return digest.hexdigest()[:16]


def adapter_fingerprint(adapter: Path) -> Any:
    """The stamp of an adapter that lesson 03 wrote; of any other a checksum of its files."""
    if (stamp := files.stamp(adapter)) is not None:
        return stamp
    checksums = [files.sha256(adapter / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]


def copy_companions(out: Path, base: ModelFolder, adapter: Path, dtype: str, untied: bool) -> None:
    """Config, tokenizer and other small files: the base's, but the tokenizer files of the adapter if it has any."""

    def matching(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
        return {file.name: file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}

    small = matching(base.path, (*SMALL_FILES, *TOKENIZER_FILES)) | matching(adapter, TOKENIZER_FILES)
    for name, file in small.items():
        if name not in (INDEX, "config.json"):
            shutil.copyfile(file, out / name)
    config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    if dtype != "auto":
        config.pop("torch_dtype", None)  # the former name of dtype
        config["dtype"] = dtype
    files.write_json(out / "config.json", config | ({"tie_word_embeddings": False} if untied else {}))
