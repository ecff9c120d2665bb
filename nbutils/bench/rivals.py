"""Plain `model.generate` on the same prompts: what a lesson would do without a server.

Not here: `transformers serve`, which is a server like any other (asking starts it, load measures it).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils.bench.numbers import Level, Request, summarise
from nbutils.bench.prompts import Prompt

WARM_TOKENS = 8


def generate(model: Any, prompts: Sequence[Prompt], tokens: int, batch: int) -> Level:
    """Static batches of `batch` prompts, one after the other, each answer exactly `tokens` long."""
    own, model.generation_config = model.generation_config, _endless(model)
    try:
        _batch(model, prompts[:batch], WARM_TOKENS)
        done, started = list[Request](), time.perf_counter()
        for first in range(0, len(prompts), batch):
            done += _batch(model, prompts[first : first + batch], tokens)
        seconds = time.perf_counter() - started
    finally:
        model.generation_config = own
    return summarise("generate", batch, done, seconds)


def _batch(model: Any, prompts: Sequence[Prompt], tokens: int) -> list[Request]:
    """One batch; nothing is streamed, so every answer is there when the last one is."""
    import torch

    ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens).tolist()
    seconds = time.perf_counter() - began
    lengths = [len(answer) - ids.shape[1] for answer in out]
    return [Request(None, seconds, had, "" if had == tokens else f"{had} of {tokens} tokens") for had in lengths]


def _endless(model: Any) -> Any:
    """Greedy, without a stop token."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, pad_token_id=model.generation_config.pad_token_id or 0)


def alone(folder: Path, dtype: str, prompts: Sequence[Prompt], tokens: int, batches: Sequence[int]) -> dict[str, Any]:
    """`generate` with a model loaded for it, and the card's bandwidth (0 without one); for a process that then ends."""
    import torch
    from transformers import AutoModelForCausalLM

    from nbutils.bench.limits import copy_bandwidth

    cuda = torch.cuda.is_available()
    bandwidth = copy_bandwidth() if cuda else 0.0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": 0 if cuda else "cpu"}).eval()
    levels = [generate(model, prompts[: max(2, batch)], tokens, batch) for batch in batches]
    return {"bandwidth": bandwidth, "levels": levels}
