"""Greedy answers to the held-back questions: what is asked, how it is generated, when an answer has ended.

Not here: loading models (the lessons do that), keeping answers over a restart (keeping), judging them (scores).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbutils import hardware
from nbutils.chat import View, find_stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOOK = 16  # decoding steps between two looks at whether all answers have ended: a look makes the GPU wait
FREE_SHARE = 0.5  # of the GPU's free memory is planned for; the rest is for copies while the KV cache grows
Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One greedy answer: what went in, what came out (with the stop token, if it was reached), its text."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    stopped: bool = True


def reach(model: Any, *limits: int) -> int:
    """How many tokens this model can read, or fewer where another limit is tighter; 0 if nothing is known."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0
    return min(filter(None, (int(own), *limits)), default=0)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    max_new_tokens: int,
    batch_size: int,
) -> list[Answer]:
    """Greedy answers to all conversations, in the order they were asked."""
    view = View(tokenizer, "prompt_completion")
    prompts = [view.prompt(conversation) for conversation in conversations]
    return greedy(model, tokenizer, prompts, max_new_tokens, batch_size)


def greedy(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int
) -> list[Answer]:
    """The same for prompts that are tokens already."""
    found = dict(answer_prompts(model, tokenizer, dict(enumerate(prompts)), max_new_tokens, batch_size))
    return [found[number] for number in range(len(prompts))]


def answer_prompts(
    model: Any, tokenizer: Any, prompts: dict[int, list[int]], max_new_tokens: int, batch_size: int
) -> Iterator[tuple[int, Answer]]:
    """Answers to numbered prompts, batch by batch, the longest first: if memory is short, that shows at once."""
    from tqdm.auto import tqdm

    batch_size = rows_at_once(model, max(map(len, prompts.values())) + max_new_tokens, batch_size)
    stops = sorted(find_stop_ids(tokenizer, model.generation_config))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    order = sorted(prompts, key=lambda number: -len(prompts[number]))

    def work(batch: list[int]) -> list[list[int]]:
        return generate_ids(model, [prompts[number] for number in batch], max_new_tokens, stops, pad)

    with tqdm(total=len(order), desc="answers", unit="row") as bar:
        for batch, outputs in in_batches(order, batch_size, work):
            for number, ids in zip(batch, outputs, strict=True):
                text = str(tokenizer.decode(ids, skip_special_tokens=True))
                yield number, Answer(prompts[number], ids, text, bool(ids) and ids[-1] in stops)
            bar.update(len(batch))


def rows_at_once(model: Any, tokens: int, most: int) -> int:
    """Rows of one batch: a decoding step takes as long for 200 as for one, so as many as a GPU's free memory holds."""
    import torch

    if model.device.type != "cuda":
        return most
    hardware.free_memory()
    config, heads = model.config.get_text_config(), model.config.get_text_config().num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_cache = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    activations = 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    row = tokens * (kv_cache + activations) * model.dtype.itemsize
    return max(1, min(most, int(FREE_SHARE * torch.cuda.mem_get_info(model.device)[0] / row)))


def in_batches(
    order: list[int], batch_size: int, work: Callable[[list[int]], list[Any]]
) -> Iterator[tuple[list[int], list[Any]]]:
    """Work done batch by batch; where the card's memory runs out, the batch is halved and the work goes on."""
    at = 0
    while at < len(order):
        batch = order[at : at + batch_size]
        try:
            results = work(batch)
        except RuntimeError as problem:
            if len(batch) == 1 or not hardware.out_of_memory(problem):
                raise
            batch_size = len(batch) // 2
            print(f"out of memory with {len(batch)} rows at a time: going on with {batch_size}")
            results = []
        if not results:
            hardware.free_memory()  # out here, where the failed call's tensors are no longer held by its error
            continue
        yield batch, results
        at += len(batch)


def generate_ids(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, stops: list[int], pad: int
) -> list[list[int]]:
    """One left-padded batch; each output ends at its first stop token."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    with torch.inference_mode():
        if model.device.type == "cuda" and model.config.get_text_config()._attn_implementation == "sdpa":
            try:
                return [_until_stop(row, stops) for row in decode(model, ids, mask, max_new_tokens, stops)]
            except Exception as problem:
                if hardware.out_of_memory(problem):
                    raise
                print(f"[WARN] no CUDA graph of this model ({type(problem).__name__}): answers come more slowly")
        outputs = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
            pad_token_id=pad, eos_token_id=stops, use_cache=True,
        )  # fmt: skip
    return [_until_stop(row, stops) for row in outputs[:, width:].tolist()]


def decode(model: Any, ids: Any, mask: Any, max_new_tokens: int, stops: list[int]) -> list[list[int]]:
    """Greedy decoding with a static cache. On a GPU a step is recorded once as a CUDA graph and then replayed: a small
    model spends most of a step starting its kernels."""
    import torch
    from transformers import StaticCache

    (rows, width), ends = ids.shape, torch.tensor(stops, device=ids.device)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=width + max_new_tokens)
    seen = torch.zeros(rows, 1, 1, width + max_new_tokens, dtype=torch.bool, device=ids.device)
    seen[:, 0, 0, :width] = mask.bool()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    shared: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, **shared).logits
    token, place = logits[:, -1].argmax(-1, keepdim=True), places[:, -1:] + 1

    def step() -> None:
        logits = model(input_ids=token, attention_mask=seen, position_ids=place, **shared).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        place.add_(1)

    replay, made = step, [token.clone()]
    ended = torch.isin(token, ends)
    for number in range(1, max_new_tokens):
        seen[..., width + number - 1] = True
        replay()
        made.append(token.clone())
        ended |= torch.isin(token, ends)
        if number == 1 and ids.device.type == "cuda":  # what is made at the first call is made by now
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        if number % LOOK == 0 and bool(ended.all()):
            break
    return torch.cat(made, dim=1).tolist()


def _until_stop(ids: list[int], stops: list[int]) -> list[int]:
    ends = [position for position, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids
