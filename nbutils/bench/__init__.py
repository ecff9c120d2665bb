"""How fast a model is served: the same prompts to vLLM, to `transformers serve` and to plain `generate`."""

from __future__ import annotations

from nbutils.bench.client import Level, Prompt, Settings, Target, drive, find_target, make_prompts, measure, target_of
from nbutils.bench.run import Bench, Board, chosen, copy_bandwidth, generate, limit, static

__all__ = [
    "Bench", "Board", "Level", "Prompt", "Settings", "Target", "chosen", "copy_bandwidth", "drive",
    "find_target", "generate", "limit", "make_prompts", "measure", "static", "target_of",
]  # fmt: skip
