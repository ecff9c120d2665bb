"""Safetensors files read in pieces, by offset: nothing is mapped into memory, no weight has to be whole."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in FLOATS.items()}
SIZES = {  # bytes per element
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
INDICES = ("BOOL", "I64", "U64")  # masks and positions; every other integer or 8-bit matrix holds quantized weights
MAX_HEADER = 100 * 2**20  # set by the format
BLOCK = 2**21  # elements read and written at a time
STEP = 2**18  # elements computed at a time: what fits in the CPU's cache is three times as fast
MIN_ROWS = 32  # smaller products may be rounded differently


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk; `start` is its offset from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:]) or 1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it holds ordinary floating-point numbers."""
        return self.dtype in FLOATS

    @property
    def is_quantized(self) -> bool:
        """Whether it is a matrix of quantized weights."""
        return self.dtype not in (*FLOATS, *INDICES) and len(self.shape) > 1 and self.rows > 1

    @property
    def flat(self) -> StoredTensor:
        """The same tensor in one dimension: a row of stacked experts is too large to be read at once."""
        return replace(self, shape=(self.elements,))

    def blocks(self, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Row ranges of about BLOCK elements; all rows at once if `whole`."""
        return split_rows(0, self.rows, self.rows if whole else BLOCK // self.width)

    def read(self, first: int = 0, last: int | None = None) -> memoryview:
        """The bytes of rows `first` to `last`."""
        row_size = self.size // max(self.rows, 1)
        count = ((self.rows if last is None else last) - first) * row_size
        data = np.empty(count, np.uint8).data
        with open(self.file, "rb") as file:
            file.seek(self.start + first * row_size)
            if file.readinto(data) < count:
                raise damaged(self.file, "it ends too early")
        return data

    def tensor(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows `first` to `last` in the stored dtype."""
        import torch

        rows = (self.rows if last is None else last) - first
        data = self.read(first, last)
        flat = torch.frombuffer(data, dtype=getattr(torch, FLOATS[self.dtype])) if len(data) else torch.empty(0)
        return flat.reshape((rows, *self.shape[1:]) if self.shape else ())


def split_rows(first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows `first` to `last` in ranges of about `rows`, none of them shorter than MIN_ROWS unless the whole is."""
    rows = max(MIN_ROWS, rows)
    while first < last:
        end = last if last - first - rows < MIN_ROWS else first + rows
        yield first, end
        first = end


def damaged(file: Path, reason: str) -> CourseError:
    """The error for a file that is not a complete safetensors file."""
    return CourseError("merging.damaged_file", file=file, reason=reason)


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file in the order they are stored, and the file's metadata; no weight is read."""
    if not file.is_file():
        raise CourseError("merging.missing_file", file=file)
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise damaged(file, "it is not in safetensors format")
            entries: dict[str, Any] = json.loads(opened.read(length))
        metadata = entries.pop("__metadata__", {})
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in ordered}
    except (struct.error, AttributeError, KeyError, TypeError, ValueError) as problem:
        raise damaged(file, "its header cannot be read") from problem
    for name, tensor in tensors.items():
        if tensor.size != tensor.elements * SIZES.get(tensor.dtype, -1):
            raise damaged(file, f"the size of {name} does not match its shape and dtype {tensor.dtype}")
    if max((tensor.start + tensor.size for tensor in tensors.values()), default=0) > file.stat().st_size:
        raise damaged(file, "it ends too early")
    return tensors, metadata


def _stored(file: Path, data_start: int, entry: Mapping[str, Any]) -> StoredTensor:
    first, last = entry["data_offsets"]
    return StoredTensor(file, entry["dtype"], tuple(entry["shape"]), data_start + first, last - first)


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The header of a file that holds these tensors (dtype and shape), one after another."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
