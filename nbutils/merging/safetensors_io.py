"""Safetensors files read in pieces, by offset: nothing is mapped into memory, no weight has to be whole."""

from __future__ import annotations

import json
import math
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
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BLOCK = 2**18  # elements computed at a time: what fits in the CPU's cache is three times as fast
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
        return math.prod(self.shape[1:]) or 1

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def flat(self) -> StoredTensor:
        """The same tensor in one dimension: a row of stacked experts is too large to be read at once."""
        return replace(self, shape=(math.prod(self.shape),))

    def size_as(self, dtype: str) -> int:
        """Bytes of the tensor in another safetensors dtype."""
        return self.size if dtype == self.dtype else math.prod(self.shape) * FLOAT_BYTES[dtype]

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
                raise CourseError("merging.damaged_file", file=self.file, reason="it ends too early")
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


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file in the order they are stored, and the file's metadata; no weight is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks the whole header, and that the file is complete
            pass
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError, SafetensorError) as problem:
        raise CourseError("merging.damaged_file", file=file, reason=problem) from problem
    metadata = entries.pop("__metadata__", {})
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return tensors, metadata


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The header of a file that holds these tensors (dtype, shape and bytes), one after another."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
