"""The exam of lesson 04: answers one at a time against batches, and the memory that losses take.

    python benchmarks/evaluator.py MODEL_FOLDER [ROWS]     results: benchmarks/results/exam_<cpu or gpu>.json

Rows are the sample's, repeated. A model without training stops when it likes, so every answer gets all its tokens.
Losses are also computed the plain way, with the logits of whole batches, to see what leaving most of them out saves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbutils import chat, files
from nbutils.evaluation import inference as losses
from nbutils.evaluation.inference import answer_prompts

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS, BATCH = 32, 32
CUDA = torch.cuda.is_available()


def measured(work: Any) -> tuple[float, float]:
    """Seconds, and GiB of the GPU beyond what was held before."""
    held = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return time.perf_counter() - began, round((peak - held) / 2**30, 2)


def answers(model: Any, tokenizer: Any, prompts: list[list[int]], batch: int) -> dict[str, float]:
    """Tokens a second with so many prompts at a time."""
    model.generation_config.min_new_tokens = NEW_TOKENS
    asked = dict(enumerate(prompts))
    seconds, peak = measured(lambda: list(answer_prompts(model, tokenizer, asked, NEW_TOKENS, batch)))
    return {"tokens_per_second": round(len(prompts) * NEW_TOKENS / seconds, 1), "gib": peak}


def plain_losses(model: Any, texts: list[chat.Example]) -> None:
    """All logits of a batch at once, as a trainer's evaluation makes them."""
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        width = max(len(text.ids) for text in batch)
        ids = torch.tensor([list(text.ids) + [0] * (width - len(text.ids)) for text in batch], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits.float()
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main(folder: str, count: int) -> None:
    """Both parts of the evaluator, one after the other on the same rows."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if CUDA else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": 0 if CUDA else "cpu"}).eval()
    with open(files.SAMPLES / "eval.jsonl", encoding="utf-8") as file:
        sample = [json.loads(line) for line in file]
    rows = [sample[number % len(sample)] for number in range(count)]
    renderer = chat.Renderer(tokenizer, chat.training_format(tokenizer, rows))
    prompts = [renderer.prompt(row["messages"][:-1]) for row in rows]
    texts = renderer.encode_all(rows)
    answers(model, tokenizer, prompts[:BATCH], BATCH)  # warm
    few = prompts[: max(4, count // 16)]
    alone, together = answers(model, tokenizer, few, 1), answers(model, tokenizer, prompts, BATCH)
    kept, all_of_them = partial(losses.row_losses, batch_size=BATCH), plain_losses
    ways: dict[str, Callable[..., Any]] = {"kept_logits": kept, "all_logits": all_of_them}
    measured_losses = {}
    for name, work in ways.items():
        seconds, peak = measured(partial(work, model, texts))
        measured_losses[name] = {"rows_per_second": round(count / seconds, 1), "gib": peak}
    result = {
        "model": {"parameters": model.num_parameters(), "vocabulary": model.config.vocab_size, "dtype": str(dtype)},
        "machine": torch.cuda.get_device_name() if CUDA else "cpu", "rows": count, "new_tokens": NEW_TOKENS,
        "answers": {"batch_1": alone, f"batch_{BATCH}": together},
        "batched_over_single": round(together["tokens_per_second"] / alone["tokens_per_second"], 1),
        "losses": measured_losses,
    }  # fmt: skip
    files.write_json(ROOT / f"benchmarks/results/exam_{'card' if CUDA else 'cpu'}.json", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 120)
