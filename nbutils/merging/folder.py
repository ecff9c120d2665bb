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

from nbutils import disk, paths
from nbutils.errors import CourseError
from nbutils.merging.safetensors_io import FLOATS, StoredTensor, damaged, read_header

if TYPE_CHECKING:
    from nbutils.lessons import RunFolder
    from nbutils.platforms import Folders

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUANTIZED_SUFFIX = re.compile(
    r"[-_](unsloth-)?(bnb-4bit|4bit|8bit|awq|gptq|fp8|gguf|w4a16|w8a8|int4|int8|mlx)\b.*$", re.I
)
QUANTIZED_KEYS = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.py")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip
VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
SAMPLE = 2**12  # bytes at the beginning, in the middle and at the end of each weight


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk: its config, and where each weight is stored (file name -> weight name -> tensor)."""

    path: Path
    name: str
    config: dict[str, Any]
    shards: Mapping[str, Mapping[str, StoredTensor]]

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The weights of all files."""
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


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its config, and where each tensor is stored."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]


def open_base(base: str | Path) -> ModelFolder:
    """A model folder, or a Hub model that is downloaded if it is not cached; a quantized one is refused."""
    path = find_folder(base)
    assert path is not None
    config = read_config(path / "config.json")
    require_unquantized(base, config)
    index = read_config(path / INDEX).get("weight_map") if (path / INDEX).is_file() else {}
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise damaged(path / INDEX, "it does not name the files of the weights")
    files = sorted({Path(file).name for file in index.values()}) or [SINGLE]
    model = ModelFolder(path, model_name(base), config, {file: read_header(path / file)[0] for file in files})
    if missing := sorted(index.keys() - model.weights.keys()):
        raise damaged(path, f"no file has {missing[0]}, which is in {INDEX}")
    require_unquantized(base, config, model.weights)
    return model


def open_adapter(path: Path) -> Adapter:
    """An adapter folder as PEFT saves it."""
    config = read_config(path / ADAPTER_CONFIG)
    return Adapter(path, config, read_header(path / ADAPTER_WEIGHTS)[0])


def read_config(file: Path) -> dict[str, Any]:
    """A JSON file that must be there and hold an object."""
    try:
        config = paths.read_json(file)
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return config
    except (OSError, ValueError) as problem:
        raise CourseError("merging.unreadable_config", file=file) from problem


def find_folder(base: str | Path, download: bool = True) -> Path | None:
    """The folder of a model; a Hub id is looked up in the cache, then downloaded. None: not on this machine."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    wanted, ignored = [*SMALL_FILES, "*.safetensors"], ["consolidated*", "original/*"]
    try:
        return Path(
            snapshot_download(str(base), allow_patterns=wanted, ignore_patterns=ignored, local_files_only=not download)
        )
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
    """Whether a model's config, or that of a part of it, says that its weights are quantized."""
    parts = [config, *(part for key, part in config.items() if key.endswith("_config") and isinstance(part, Mapping))]
    return any(part.get(key) for part in parts for key in QUANTIZED_KEYS)


def require_unquantized(
    base: str | Path, config: Mapping[str, Any], weights: Mapping[str, StoredTensor] | None = None
) -> None:
    """Refuse a model that is quantized by its config, or by its weights where the config does not say so."""
    if is_quantized(config) or any(tensor.is_quantized for tensor in (weights or {}).values()):
        name = model_name(base)
        original = QUANTIZED_SUFFIX.sub("", name)
        original = original if original != name else "the model it was quantized from"
        raise CourseError("merging.quantized_base", name=name, original=original)


def model_fingerprint(model: ModelFolder) -> str:
    """A checksum of the config, of every weight's name, dtype and shape, and of samples of every weight.

    Another training changes every weight a little, so samples tell them apart, in a moment even for a 7B.
    """
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
    if (stamp := paths.stamp(adapter)) is not None:
        return stamp
    files = [adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return hashlib.sha256("".join(paths.sha256(file) for file in files if file.is_file()).encode()).hexdigest()[:16]


def copy_companions(out: Path, base: ModelFolder, adapter: Path | None, dtype: str, untied: bool) -> None:
    """Config, tokenizer and other small files: the base's, but the tokenizer of the training if the adapter has it."""

    def matching(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
        return {file.name: file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}

    tokenizer = matching(base.path, TOKENIZER_FILES)
    others = {name: file for name, file in matching(base.path, SMALL_FILES).items() if name not in tokenizer}
    if adapter and (adapter / "tokenizer_config.json").is_file():
        complete = matching(adapter, VOCABULARY_FILES)  # otherwise its files go over the base's
        tokenizer = ({} if complete else tokenizer) | matching(adapter, TOKENIZER_FILES)
    for name, file in (others | tokenizer).items():
        if name not in (INDEX, "config.json"):
            shutil.copyfile(file, out / name)
    config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    if dtype != "auto":
        config.pop("torch_dtype", None)  # the former name of dtype
        config["dtype"] = dtype
    paths.write_json(out / "config.json", config | ({"tie_word_embeddings": False} if untied else {}))


def choose_place(run: RunFolder, folders: Folders, gib: float) -> Path:
    """Where the merged model goes: the run folder if it fits there, else scratch, with a note for later lessons."""
    if run.has("04_merge"):
        return run.merged
    kept = run.path / "merged"
    if disk.free_gib(run.path) + disk.folder_gib(paths.partial_of(kept)) >= gib:
        run.elsewhere.unlink(missing_ok=True)
        return kept
    scratch = paths.make_folder(folders.scratch / run.name, "the merged model") / "merged"
    written = disk.folder_gib(paths.partial_of(scratch))  # by an interrupted merge, which continues
    disk.require_disk(scratch.parent, max(0.0, gib - written), "the merged model")
    paths.write_json(run.elsewhere, {"folder": str(scratch)})
    print(
        f"[WARN] {run.path} has no room for {gib:.1f} GiB: the merged model goes to {scratch}, which is lost when this "
        "machine ends. The adapter is kept, and merging it again takes minutes."
    )
    return scratch
