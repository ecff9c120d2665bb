"""How fast a model is served: the same prompts to vLLM, to `transformers serve` and to plain `generate`."""

from __future__ import annotations

from nbutils.bench.client import Level, Settings, Target, drive, find_target, make_prompts, measure, target_of
from nbutils.bench.run import Benchmark, Results, copy_bandwidth, limit, parse_rivals

__all__ = [
    "Benchmark", "Level", "Results", "Settings", "Target", "copy_bandwidth", "drive", "find_target", "limit",
    "make_prompts", "measure", "parse_rivals", "target_of",
]  # fmt: skip
