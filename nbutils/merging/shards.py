"""Safetensors files in small pieces: where each tensor lies, reading some of its rows, writing at a known place.

Everything is read and written by offset, so no file is ever mapped into memory and no more is held than asked for.
Not here: what is computed with the pieces (formula), which pieces make up a model (bases, plan).
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in FLOATS.items()}
BITS = {  # every type of the format
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
COUNTS = ("BOOL", "I64", "U64")  # masks and positions; other types that are no ordinary floats hold quantised weights
LARGEST_HEADER = 100 * 2**20  # what the format itself allows
BLOCK = 2**21  # elements read and written at a time
LEAST = 32  # rows of a piece
STEP = 2**18  # elements computed at a time: what fits in a processor's own cache is three times as fast

Piece = tuple[int, int, int]  # offset, length and checksum of bytes that were written


@dataclass(frozen=True)
class Stored:
    """One tensor on disk; `start` counts from the beginning of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def rows(self) -> int:
        """How many rows can be read one by one."""
        return self.shape[0] if self.shape else 1

    @property
    def is_float(self) -> bool:
        """Whether it holds ordinary floating-point numbers."""
        return self.dtype in FLOATS

    @property
    def is_packed(self) -> bool:
        """Whether it is a matrix of quantised weights."""
        return not self.is_float and self.dtype not in COUNTS and len(self.shape) > 1 and self.rows > 1

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def flat(self) -> Stored:
        """The same as a row of single numbers, for what is done to each by itself: rows of a stack can be huge."""
        return self if BITS[self.dtype] < 8 else replace(self, shape=(self.elements,))

    def blocks(self, whole: bool = False) -> Iterator[tuple[int, int]]:
        """First and last row of pieces of about BLOCK elements; whole: everything at once."""
        return self.cut(0, self.rows, self.rows if whole else BLOCK // self.width)

    def steps(self, first: int, last: int, whole: bool = False) -> Iterator[tuple[int, int]]:
        """The same within a block, by about STEP elements."""
        return self.cut(first, last, last - first if whole else STEP // self.width)

    def cut(self, first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
        """Rows `first` to `last` in pieces of so many, none of few rows: one by itself would be rounded otherwise."""
        rows, begin = max(LEAST, rows), first
        while begin < last:
            end = last if last - begin - rows < LEAST else begin + rows
            yield begin, end
            begin = end

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:]) or 1

    def read(self, first: int = 0, last: int | None = None, scratch: bool = False) -> memoryview:
        """The bytes of rows `first` to `last`; scratch: in memory that this thread's next such read overwrites."""
        width = self.size // max(self.rows, 1)
        count = ((self.rows if last is None else last) - first) * width
        view = memoryview(_scratch(count) if scratch else bytearray(count))[:count]
        if _read_into(self.file, self.start + first * width, view) < count:
            raise damaged(self.file, "it ends too early")
        return view

    def tensor(self, first: int = 0, last: int | None = None, scratch: bool = False) -> torch.Tensor:
        """Rows `first` to `last` as a tensor of their own type."""
        import torch

        rows = (self.rows if last is None else last) - first
        shape = (rows, *self.shape[1:]) if self.shape else ()
        data = self.read(first, last, scratch)
        flat = torch.frombuffer(data, dtype=getattr(torch, FLOATS[self.dtype])) if len(data) else torch.empty(0)
        return flat.reshape(shape)


_held = threading.local()
_writing = threading.Lock()  # a file takes one writer at a time anyway, and who waits here leaves the processor free


def _scratch(size: int) -> bytearray:
    """Memory of this thread, used again and again: fresh memory for each block costs more than computing it."""
    if len(getattr(_held, "memory", b"")) < size:
        _held.memory = bytearray(size)
    memory: bytearray = _held.memory
    return memory


def _read_into(file: Path, offset: int, view: memoryview) -> int:
    """Fill the view from there; how many bytes there were."""
    got = 0
    with open(file, "rb", buffering=0) as opened:
        opened.seek(offset)
        while got < len(view) and (count := opened.readinto(view[got:])):
            got += count
    return got


def damaged(file: Path, why: str) -> CourseError:
    """The error for a file that is no whole safetensors file."""
    return CourseError(
        f"{file} is damaged: {why}.", "a complete safetensors file",
        "delete it and fetch or make it again (a download that was cut off looks like this)",
    )  # fmt: skip


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Where each tensor of a file lies, in the order of the file, and its metadata; no weight is read."""
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > LARGEST_HEADER:
                raise damaged(file, "it is no safetensors file")
            written: dict[str, Any] = json.loads(opened.read(length))
    except (struct.error, ValueError) as problem:
        raise damaged(file, "its header cannot be read") from problem
    try:
        metadata = written.pop("__metadata__", {})
        entries = sorted(written.items(), key=lambda item: item[1]["data_offsets"])
        found = {name: _stored(file, 8 + length, entry) for name, entry in entries}
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise damaged(file, "its header is not one of safetensors") from problem
    if strange := next(
        (one.dtype for one in found.values() if one.size * 8 != one.elements * BITS.get(one.dtype, -1)), ""
    ):
        raise damaged(file, f"a tensor of type {strange} has another size than its shape says, or the type is unknown")
    if max((one.start + one.size for one in found.values()), default=0) > file.stat().st_size:
        raise damaged(file, "it ends too early")
    return found, metadata


def _stored(file: Path, data: int, entry: Mapping[str, Any]) -> Stored:
    first, last = entry["data_offsets"]
    return Stored(file, entry["dtype"], tuple(entry["shape"]), data + first, last - first)


def lay_out(file: Path, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Stored]]:
    """The header of a file to be written, and where its tensors (type, shape) will lie in it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in wanted.items():
        size = math.prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    del entries["__metadata__"]
    return struct.pack("<Q", len(text)) + text, {
        name: _stored(file, 8 + len(text), entry) for name, entry in entries.items()
    }


def write_at(file: Path, offset: int, data: bytes | bytearray | memoryview) -> Piece:
    """Write bytes into a file that is there; what was written, with its checksum."""
    view = memoryview(data)
    with open(file, "r+b", buffering=0) as opened, _writing:
        opened.seek(offset)
        written = 0
        while written < len(view):
            written += opened.write(view[written:]) or 0
    return offset, len(view), checksum(view)


def is_intact(file: Path, piece: Piece) -> bool:
    """Whether the file holds there what was written."""
    offset, length, wanted = piece
    view = memoryview(_scratch(length))[:length]
    return _read_into(file, offset, view) == length and checksum(view) == wanted


def checksum(data: memoryview) -> int:
    """A checksum as fast as memory: every byte is summed twice, and a merge should cost little more than a copy."""
    import xxhash  # comes with datasets

    return int(xxhash.xxh3_64_intdigest(data))
