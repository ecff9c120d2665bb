"""What no engine can beat when one person asks: every token needs all weights read once from the card's memory.

Not here: measuring engines (load, rivals).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.merging.safetensors_io import read_header

EMBEDDING = "embed_tokens.weight"


def weights_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of all weights, and of those a token really reads: of an untied input embedding only one row is."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CourseError(
            f"there are no safetensors weights in {folder}.", "a model folder", "give the folder lesson 04 wrote"
        )
    sizes = {name: place.size for file in files for name, place in read_header(file)[0].items()}
    whole = sum(sizes.values())
    tied = bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))
    looked_up = sum(size for name, size in sizes.items() if name.endswith(EMBEDDING))
    return whole, whole if tied else whole - looked_up


def copy_bandwidth(device: str = "cuda", size: int = 2**30, repeats: int = 10) -> float:
    """Bytes a second that a copy reads and writes in the device's memory, the best of several."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, wait = torch.empty_like(source), torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def limit(folder: Path, bandwidth: float) -> dict[str, Any]:
    """The most tokens a second one stream can get from these weights at this bandwidth."""
    whole, read = weights_bytes(folder)
    return {
        "weights_gb": round(whole / 1e9, 3), "read_per_token_gb": round(read / 1e9, 3),
        "copy_gb_per_second": round(bandwidth / 1e9, 1),
        "tokens_per_second": round(bandwidth / whole, 1), "tokens_per_second_strict": round(bandwidth / read, 1),
    }  # fmt: skip
