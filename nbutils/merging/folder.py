"""Model and adapter folders: opened by their headers, told apart by fingerprints, filled with what is not a weight.

Weights are read in pieces, by offset: nothing is mapped into memory, and none has to be read whole.
"""

from __future__ import annotations

import hashlib
import json
import math
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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
QUANTIZED_SUFFIX = re.compile(
    r"[-_](unsloth-)?(bnb-4bit|4bit|8bit|awq|gptq|fp8|gguf|w4a16|w8a8|int4|int8|mlx)\b.*$", re.I
)
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.py")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
SAMPLE = 2**12  # bytes at the beginning, in the middle and at the end of each weight
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in FLOATS.items()}
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BLOCK = 2**18  # elements computed at a time: what fits in the CPU's cache is three times as fast
MIN_ROWS = 32  # smaller products may be rounded differently
ALL = slice(None)


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

    def code_as(self, dtype: str) -> str:
        """The safetensors code it is written in, for this torch dtype; integers keep theirs."""
        if dtype == "auto" or self.dtype not in FLOATS:
            return self.dtype
        return CODES[dtype]

    def bytes_as(self, dtype: str) -> int:
        """The bytes it takes when it is written in this torch dtype."""
        code = self.code_as(dtype)
        if code == self.dtype:
            return self.size
        return math.prod(self.shape) * FLOAT_BYTES[code]

    def blocks(self) -> Iterator[slice]:
        """Row ranges of about BLOCK elements."""
        row = math.prod(self.shape[1:])
        return split_rows(self.rows, BLOCK // row)

    def read(self, rows: slice) -> memoryview:
        """The bytes of some rows."""
        first, last, _ = rows.indices(self.rows)
        row_size = self.size // self.rows
        start = self.start + first * row_size
        count = (last - first) * row_size
        content = np.fromfile(self.file, np.uint8, count, offset=start)  # the header was checked: the file has them
        return content.data

    def tensor(self, rows: slice = ALL) -> torch.Tensor:
        """Some rows in the stored dtype."""
        import torch

        dtype = getattr(torch, FLOATS[self.dtype])
        return torch.frombuffer(self.read(rows), dtype=dtype).reshape(-1, *self.shape[1:])


def split_rows(total: int, rows: int) -> Iterator[slice]:
    """All rows in ranges of about `rows`, none of them shorter than MIN_ROWS unless the whole is."""
    rows = max(MIN_ROWS, rows)
    first = 0
    while first < total:
        last = first + rows
        if total - last < MIN_ROWS:
            last = total
        yield slice(first, last)
        first = last


def damaged(file: Path, reason: object) -> CourseError:
    """The error for a file of weights that is not whole."""
    return CourseError(
        tr("{file} is missing or damaged: {reason}.", file=file, reason=reason),
        todo=tr(
            "Delete it and download or make it again; if it exists only as .bin, load it and save it "
            "with save_pretrained."
        ),
    )


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
        raise damaged(file, problem) from problem
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(file, entry["dtype"], shape, start=8 + length + first, size=last - first)
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
        """The tensors of all files by name."""
        weights: dict[str, StoredTensor] = {}
        for tensors in self.shards.values():
            weights |= tensors
        return weights

    @property
    def dtype(self) -> str:
        """The torch name of the weights' dtype; "auto" if there are several."""
        codes = {tensor.dtype for tensor in self.weights.values()} & FLOATS.keys()
        return FLOATS[codes.pop()] if len(codes) == 1 else "auto"


def open_base(base: str | Path) -> ModelFolder:
    """A model folder, or a Hub model that is downloaded if it is not cached; a quantized one is refused."""
    path = Path(base)
    if not path.is_dir():
        with models.download_errors(str(base), "hub"):
            path = models.snapshot(str(base))
    models.require_plain(path)
    config = models.read_config(path / "config.json")
    names = {SINGLE}
    if (path / INDEX).is_file():
        index = models.read_config(path / INDEX)
        names = {Path(file).name for file in index["weight_map"].values()}
    shards = {name: read_header(path / name) for name in sorted(names)}
    model = ModelFolder(path, model_name(base), config, shards)
    if is_quantized(config):
        raise CourseError(
            tr("{name} is a quantized model.", name=model.name),
            todo=tr("Use {original}.", original=QUANTIZED_SUFFIX.sub("", model.name)),
        )
    return model


def open_adapter(path: Path) -> ModelFolder:
    """An adapter folder as PEFT saves it."""
    files.require_inside(path, path.rglob("*"))
    file = path / ADAPTER_WEIGHTS
    tensors = read_header(file)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if not dtypes or not dtypes <= FLOATS.keys():
        raise damaged(file, tr("it holds no numbers in 16 or 32 bits"))
    config = models.read_config(path / ADAPTER_CONFIG)
    return ModelFolder(path, path.name, config, shards={ADAPTER_WEIGHTS: tensors})


def read_weight(folder: str | Path, name: str) -> torch.Tensor:
    """One weight of a model folder in float32.

    Example: `merging.read_weight("runs/tiny/merged", "model.norm.weight")`
    """
    model = open_base(folder)
    return model.weights[name].tensor().float()


def model_name(base: str | Path) -> str:
    """The Hub id, also of a folder in the Hub's cache; of any other folder its own name."""
    if not Path(base).is_dir():
        return str(base)
    path = Path(base).absolute()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.name


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are quantized."""
    return any(config.get(key) for key in ("quantization_config", "compression_config", "quantization"))


def weights_fingerprint(model: ModelFolder) -> str:
    """A checksum of the config, of every weight's name, dtype and shape, and of samples of every weight."""
    config = json.dumps(model.config, sort_keys=True)
    digest = hashlib.sha256(config.encode())
    for shard, tensors in sorted(model.shards.items()):
        with open(model.path / shard, "rb", buffering=0) as file:
            for name, tensor in tensors.items():
                digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
                last = max(0, tensor.size - SAMPLE)
                offsets = {0, last // 2, last}
                for offset in sorted(offsets):
                    file.seek(tensor.start + offset)
                    sample = file.read(min(SAMPLE, tensor.size))
                    digest.update(sample)
    return digest.hexdigest()[:16]


def copy_companions(out: Path, base: ModelFolder, adapter: Path, dtype: str, untied: bool) -> None:
    """Config, tokenizer and other small files: the base's, but the tokenizer files of the adapter if it has any."""
    sources = [(base.path, pattern) for pattern in (*SMALL_FILES, *TOKENIZER_FILES)]
    sources += [(adapter, pattern) for pattern in TOKENIZER_FILES]
    for folder, pattern in sources:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    config = dict(base.config)
    if dtype != "auto":
        config.pop("torch_dtype", None)  # the former name of dtype
        config["dtype"] = dtype
    if untied:
        config["tie_word_embeddings"] = False
    files.write_json(out / "config.json", config)
