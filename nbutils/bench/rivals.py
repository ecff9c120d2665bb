"""Who a server is measured against, and plain `model.generate` on the same prompts: a lesson without a server.

Not here: `transformers serve`, which is a server like any other (asking starts it, load measures it), and the process
of its own that generate may get (alone).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from nbutils.bench.numbers import Level, Request, summarise
from nbutils.bench.prompts import Prompt, Settings
from nbutils.errors import CourseError

RIVALS = ("generate", "transformers-serve")
BATCHES = (1, 32)
WARM_TOKENS, FEWEST = 8, 2


def chosen(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in RIVALS]:
        raise CourseError(
            f"rivals are {', '.join(unknown)}.", f"{', '.join(RIVALS)} with a comma between, or nothing",
            "mend the name, or leave it out",
        )  # fmt: skip
    return names


def static(model: Any, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """`generate` one at a time and in batches, on the first prompts that servers get with as many at a time."""
    for batch in BATCHES:
        prompts = settings.prompts(tokenizer, batch)[: max(FEWEST, batch)]
        yield generate(model, prompts, settings.answer_tokens, batch)


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
