"""Model and adapter folders: opened by their headers, told apart by fingerprints, filled with what is not a weight.

Weights are read in pieces, by offset: nothing is mapped into memory, and none has to be read whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils import files, models
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.models import QUANTIZED_SUFFIX, is_quantized

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HEAD = "lm_head.weight"
TEXT_PART = "language_model."  # in the names of a model that also sees; the text model alone does without
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
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
CODES = {name: code for code, name in FLOATS.items()}
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
        """How many rows there are; a row runs along the last dimension."""
        return math.prod(self.shape[:-1])

    def blocks(self) -> list[slice]:
        """Row ranges of about BLOCK elements, none of them shorter than MIN_ROWS unless the whole is."""
        step = max(MIN_ROWS, BLOCK // math.prod(self.shape[-1:]))
        starts = range(0, max(1, self.rows - MIN_ROWS + 1), step)
        return [slice(first, last) for first, last in pairwise([*starts, self.rows])]

    def read_bytes(self, offset: int, count: int) -> memoryview:
        """Some bytes; `offset` is from the beginning of the tensor."""
        content = np.fromfile(self.file, np.uint8, count, offset=self.start + offset)
        return content.data

    def read(self, rows: slice) -> memoryview:
        """The bytes of some rows."""
        first, last, _ = rows.indices(self.rows)
        row_size = self.size // self.rows
        return self.read_bytes(first * row_size, (last - first) * row_size)

    def tensor(self, rows: slice = ALL) -> torch.Tensor:
        """Some rows in the stored dtype."""
        import torch

        dtype = getattr(torch, FLOATS[self.dtype])
        return torch.frombuffer(self.read(rows), dtype=dtype).reshape(-1, *self.shape[-1:])


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file in the order they are stored; no weight is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks the whole header, and that the file is complete
            pass
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries: dict[str, Any] = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        if not entries:
            raise ValueError(tr("it holds no weights"))
    except (OSError, ValueError, SafetensorError) as problem:
        raise CourseError(
            "{file} is missing or damaged: {reason}.",
            todo=(
                "Delete it and download or make it again; if it exists only as .bin, load it and save it "
                "with save_pretrained."
            ),
            file=file,
            reason=problem,
        ) from problem
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(file, entry["dtype"], shape, start=8 + length + first, size=last - first)
    return tensors


@dataclass(frozen=True)
class ModelFolder:
    """A model or an adapter on disk: its config, and where each weight is, in the order they are stored."""

    path: Path
    name: str
    config: models.Config
    weights: dict[str, StoredTensor]

    @property
    def text_weights(self) -> dict[str, StoredTensor]:
        """The weights that training on text loads: none of those for vision or for predicting several tokens."""
        if not any(TEXT_PART in name for name in self.weights):
            return self.weights
        return {name: tensor for name, tensor in self.weights.items() if TEXT_PART in name or name == HEAD}

    @property
    def dtype(self) -> str:
        """The torch name of the dtype that most of the text model is stored in."""
        sizes: Counter[str] = Counter()
        for tensor in self.text_weights.values():
            if tensor.dtype in FLOATS:
                sizes[FLOATS[tensor.dtype]] += tensor.size
        return sizes.most_common(1)[0][0] if sizes else "auto"


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
    weights: dict[str, StoredTensor] = {}
    for file in sorted(names):
        weights |= read_header(path / file)
    name = model_name(base)
    if is_quantized(config):
        raise CourseError(
            "{name} is a quantized model.",
            todo="Use {original}.",
            name=name,
            original=QUANTIZED_SUFFIX.sub("", name),
        )
    return ModelFolder(path, name, config, weights)


def open_adapter(path: Path) -> ModelFolder:
    """An adapter folder as PEFT saves it."""
    files.require_inside(path, path.rglob("*"))
    config = models.read_config(path / ADAPTER_CONFIG)
    return ModelFolder(path, path.name, config, read_header(path / ADAPTER_WEIGHTS))


def read_weight(folder: str | Path, name: str) -> torch.Tensor:
    """One weight of a model folder in float32, by the name it has in the text model.

    Example: `merging.read_weight("runs/tiny/merged", "model.norm.weight")`
    """
    weights = {text_name(stored): tensor for stored, tensor in open_base(folder).weights.items()}
    stored = weights[name]
    return stored.tensor().reshape(stored.shape).float()


def text_name(name: str) -> str:
    """What the text model alone calls a weight of a checkpoint: transformers renames them so when it loads one."""
    return name.replace(TEXT_PART, "", 1)


def model_name(base: str | Path) -> str:
    """The Hub id, also of a folder in the Hub's cache; of any other folder its own name."""
    if not Path(base).is_dir():
        return str(base)
    path = Path(base).absolute()
    cached = re.search(r"/models--([^/]+)", str(path))
    return cached[1].replace("--", "/") if cached else path.name


def weights_fingerprint(model: ModelFolder) -> str:
    """A checksum of the config, of every weight's name, dtype and shape, and of samples of every weight."""
    config = json.dumps(model.config, sort_keys=True)
    digest = hashlib.sha256(config.encode())
    for name, tensor in model.weights.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        last = max(0, tensor.size - SAMPLE)
        offsets = {0, last // 2, last}
        for offset in sorted(offsets):
            sample = tensor.read_bytes(offset, min(SAMPLE, tensor.size))
            digest.update(sample)
    return digest.hexdigest()[:16]


def copy_companions(out: Path, base: ModelFolder, adapter: Path, dtype: str, untied: bool) -> None:
    """Config, tokenizer and other small files: the base's, but the tokenizer files of the adapter if it has any.

    The index is left out: it names the weights of the base, and their size.
    """
    companions = [file for pattern in SMALL_FILES + TOKENIZER_FILES for file in base.path.glob(pattern)]
    companions += [file for pattern in TOKENIZER_FILES for file in adapter.glob(pattern)]
    for file in companions:
        if file.is_file() and file.name != INDEX:
            shutil.copyfile(file, out / file.name)
    config = dict(base.config)
    parts = [config]
    if "text_config" in config:
        config["text_config"] = dict(config["text_config"])
        parts.append(config["text_config"])
    if dtype != "auto":
        for part in [part for part in parts if "dtype" in part or "torch_dtype" in part] or [config]:
            part.pop("torch_dtype", None)  # the former name of dtype
            part["dtype"] = dtype
    if untied:
        for part in parts:
            part["tie_word_embeddings"] = False
    files.write_json(out / "config.json", config)
