"""What tells one model or adapter from another of the same name: marks of their content, for stamps.

Not here: comparing them (streaming, lessons), and whether base and adapter belong together (plan).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbutils.merging.bases import Base
from nbutils.merging.shards import Stored
from nbutils.paths import sha256, stamp

SAMPLE = 2**12  # bytes at the beginning, in the middle and at the end of each weight


def of_model(base: Base) -> str:
    """A checksum of a model's settings, of the name, type and shape of its weights, and of samples of each weight.

    Every weight is looked at, however small, so another training of one kind of layer gives another mark; and only a
    thousand places of a 7B are read, so that a finished merge is recognised in a moment.
    """
    digest = hashlib.sha256(json.dumps(base.config, sort_keys=True).encode())
    for name in sorted(base.shards):
        _add_samples(digest, base.folder / name, base.shards[name])
    return digest.hexdigest()[:16]


def _add_samples(digest: Any, file: Path, weights: Mapping[str, Stored]) -> None:
    """Put the weights of one file into a checksum, in the order they lie there."""
    with open(file, "rb", buffering=0) as opened:
        for name, place in weights.items():
            digest.update(f"{name} {place.dtype} {place.shape} ".encode())
            last = max(0, place.size - SAMPLE)
            for offset in sorted({0, last // 2, last}):
                digest.update(os.pread(opened.fileno(), min(SAMPLE, place.size), place.start + offset))


def of_adapter(adapter: Path) -> Any:
    """What an adapter is: its stamp if the course wrote it, else a checksum of its files."""
    written = stamp(adapter)
    if written is not None:
        return written
    files = [adapter / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    return hashlib.sha256("".join(sha256(file) for file in files if file.is_file()).encode()).hexdigest()[:16]
