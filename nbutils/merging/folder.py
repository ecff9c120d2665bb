"""Model and adapter folders: opened by their headers, told apart by fingerprints, filled with what is not a weight.

Weights are read in pieces, by offset: nothing is mapped into memory, and none has to be read whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils import files, models
from nbutils.errors import CourseError
from nbutils.language import tr

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
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in FLOATS.items()}
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BLOCK = 2**18  # elements computed at a time: what fits in the CPU's cache is three times as fast
MIN_ROWS = 32  # smaller products may be rounded differently


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk; `start` is its offset from the beginning of the file, `dtype` the code of safetensors."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def written_as(self, dtype: str) -> tuple[str, int]:
        """The safetensors dtype and the bytes it is written in, for this torch dtype; integers keep theirs."""
        code = self.dtype if dtype == "auto" or self.dtype not in FLOATS else CODES[dtype]
        return code, self.size if code == self.dtype else math.prod(self.shape) * FLOAT_BYTES[code]

    def blocks(self, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Row ranges of about BLOCK elements; all rows at once if `whole`."""
        return split_rows(self.rows, self.rows if whole else BLOCK // (math.prod(self.shape[1:]) or 1))

    def read(self, first: int, last: int) -> memoryview:
        """The bytes of rows `first` to `last`."""
        row_size = self.size // max(self.rows, 1)
        count = (last - first) * row_size
        data = np.fromfile(self.file, np.uint8, count, offset=self.start + first * row_size)
        if len(data) < count:
            raise CourseError(
                tr("{file} is missing or damaged: {reason}.", file=self.file, reason=tr("it ends too early")),
                todo=tr(
                    "Delete it and download or make it again; if it exists only as .bin, load it and save it "
                    "with save_pretrained."
                ),
            )
        return data.data

    def tensor(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows `first` to `last` in the stored dtype."""
        import torch

        last = self.rows if last is None else last
        data = self.read(first, last)
        flat = torch.frombuffer(data, dtype=getattr(torch, FLOATS[self.dtype])) if len(data) else torch.empty(0)
        return flat.reshape((last - first, *self.shape[1:]) if self.shape else ())


def split_rows(total: int, rows: int) -> Iterator[tuple[int, int]]:
    """All rows in ranges of about `rows`, none of them shorter than MIN_ROWS unless the whole is."""
    first, rows = 0, max(MIN_ROWS, rows)
    while first < total:
        end = total if total - first - rows < MIN_ROWS else first + rows
        yield first, end
        first = end


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file in the order they are stored; no weight is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks the whole header, and that the file is complete
            pass
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError, SafetensorError) as problem:
        raise CourseError(
            tr("{file} is missing or damaged: {reason}.", file=file, reason=problem),
            todo=tr(
                "Delete it and download or make it again; if it exists only as .bin, load it and save it "
                "with save_pretrained."
            ),
        ) from problem
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return tensors


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
    def dtype(self) -> str:
        """The torch name of the weights' dtype; "auto" if there are several."""
        found = {FLOATS[tensor.dtype] for tensor in self.weights.values() if tensor.dtype in FLOATS}
        return found.pop() if len(found) == 1 else "auto"


def open_base(base: str | Path) -> ModelFolder:
    """A model folder, or a Hub model that is downloaded if it is not cached; a quantized one is refused."""
    path, name = Path(base), model_name(base)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        try:
            wanted, ignored = list(models.WANTED), list(models.NOT_WANTED)
            path = Path(snapshot_download(str(base), allow_patterns=wanted, ignore_patterns=ignored))
        except Exception as problem:
            raise CourseError(
                tr("The base {base} cannot be downloaded: {problem}.", base=base, problem=type(problem).__name__),
                todo=tr("Check the name and the network."),
            ) from problem
    models.require_plain(path)
    config = models.read_config(path / "config.json")
    index = models.read_config(path / INDEX)["weight_map"] if (path / INDEX).is_file() else {}
    names = sorted({Path(file).name for file in index.values()}) or [SINGLE]
    model = ModelFolder(path, name, config, {file: read_header(path / file) for file in names})
    if missing := sorted(index.keys() - model.weights.keys()):
        raise CourseError(
            tr(
                "{file} is missing or damaged: {reason}.",
                file=path / INDEX,
                reason=tr("no file has {name}", name=missing[0]),
            ),
            todo=tr(
                "Delete it and download or make it again; if it exists only as .bin, load it and save it "
                "with save_pretrained."
            ),
        )
    if is_quantized(config):
        raise CourseError(
            tr("{name} is a quantized model.", name=name),
            todo=tr("Use {original}.", original=QUANTIZED_SUFFIX.sub("", name)),
        )
    return model


def open_adapter(path: Path) -> ModelFolder:
    """An adapter folder as PEFT saves it."""
    files.require_inside(path, path.rglob("*"))
    shards = {ADAPTER_WEIGHTS: read_header(path / ADAPTER_WEIGHTS)}
    return ModelFolder(path, path.name, models.read_config(path / ADAPTER_CONFIG), shards)


def read_weight(folder: str | Path, name: str) -> torch.Tensor:
    """One weight of a model folder in float32."""
    return open_base(folder).weights[name].tensor().float()


def model_name(base: str | Path) -> str:
    """The Hub id, also of a folder in the Hub's cache; of any other folder its own name."""
    parts = Path(base).absolute().parts if Path(base).is_dir() else Path(base).parts
    if "snapshots" in parts and (cache := parts[parts.index("snapshots") - 1]).startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return parts[-1] if Path(base).is_dir() else str(base)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are quantized."""
    return any(config.get(key) for key in ("quantization_config", "compression_config", "quantization"))


def weights_fingerprint(model: ModelFolder) -> str:
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


def copy_companions(out: Path, base: ModelFolder, adapter: Path, dtype: str, untied: bool) -> None:
    """Config, tokenizer and other small files: the base's, but the tokenizer files of the adapter if it has any."""
    small: dict[str, Path] = {}
    for folder, patterns in ((base.path, (*SMALL_FILES, *TOKENIZER_FILES)), (adapter, TOKENIZER_FILES)):
        small |= {file.name: file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for name, file in small.items():
        if name not in (INDEX, "config.json"):
            shutil.copyfile(file, out / name)
    config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    if dtype != "auto":
        config.pop("torch_dtype", None)  # the former name of dtype
        config["dtype"] = dtype
    files.write_json(out / "config.json", config | ({"tie_word_embeddings": False} if untied else {}))
