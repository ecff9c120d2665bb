"""Greedy answers and losses of a model, in batches that halve themselves when GPU memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from nbutils import hardware
from nbutils.chat import View, find_stop_ids
from nbutils.language import tr

STOP_CHECK = 16  # decoding steps between two checks whether all answers have ended: a check makes the GPU wait
MEMORY_SHARE = 0.5  # of the free GPU memory is planned for; the rest is for copies while the KV cache grows
MAX_LOGITS = 2**28  # of one batch of losses: half a GiB in 16 bits, whatever the vocabulary
Message = dict[str, Any]
Row = dict[str, Any]
RowLoss = tuple[float, int]  # the summed loss of a row's assistant tokens, in nats, and the number of these tokens


@dataclass(frozen=True)
class Answer:
    """One greedy answer: prompt, generated tokens (with the stop token, if it was reached) and their text."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    stopped: bool = True


class Encoded(NamedTuple):
    """A row as token ids, and the positions whose prediction counts (one before each trained token)."""

    row: int
    ids: list[int]
    places: list[int]


def in_batches(
    order: Sequence[int], batch_size: int, work: Callable[[Sequence[int]], list[Any]]
) -> Iterator[tuple[int, Any]]:
    """Results of `work` row by row; where GPU memory runs out, the batch is halved and the work goes on."""
    done = 0
    while done < len(order):
        batch, results = order[done : done + batch_size], list[Any]()
        try:
            results = work(batch)
        except RuntimeError as problem:
            if len(batch) == 1 or not hardware.out_of_memory(problem):
                raise
        if not results:
            batch_size = len(batch) // 2
            counts = {"count": len(batch), "half": batch_size}
            print(tr("out of memory with {count} rows at a time: going on with {half}", **counts))
            hardware.free_memory()  # out here, where the failed call's tensors are no longer held by its error
        yield from zip(batch, results, strict=False)
        done += len(results)


def fitting_batch(model: Any, tokens: int, most: int) -> int:
    """Rows of one batch: a decoding step takes as long for 200 as for one, so as many as free GPU memory holds."""
    import torch

    if model.device.type != "cuda":
        return most
    hardware.free_memory()
    config, heads = model.config.get_text_config(), model.config.get_text_config().num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_cache = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    activations = 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    row = tokens * (kv_cache + activations) * model.dtype.itemsize
    return max(1, min(most, int(MEMORY_SHARE * torch.cuda.mem_get_info(model.device)[0] / row)))


def padded(texts: Sequence[list[int]], pad: int, device: Any, *, left: bool) -> tuple[Any, Any]:
    """Token ids and attention mask of a batch, padded on one side."""
    import torch

    rows, side = [torch.tensor(text) for text in texts], "left" if left else "right"
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value, padding_side=side).to(device)
        for values, value in ((rows, pad), ([torch.ones_like(row) for row in rows], 0))
    )
    return ids, mask


def generate(
    model: Any, tokenizer: Any, conversations: Sequence[list[Message]], max_new_tokens: int, batch_size: int
) -> list[Answer]:
    """Greedy answers to all conversations, in their order."""
    prompts = dict(enumerate(map(View(tokenizer, "prompt_completion").prompt, conversations)))
    return [one for _, one in sorted(answer_prompts(model, tokenizer, prompts, max_new_tokens, batch_size))]


def answer_prompts(
    model: Any, tokenizer: Any, prompts: Mapping[int, list[int]], max_new_tokens: int, batch_size: int
) -> Iterator[tuple[int, Answer]]:
    """Answers to numbered prompts, batch by batch, the longest first: if memory is short, that shows at once."""
    batch_size = fitting_batch(model, max(map(len, prompts.values())) + max_new_tokens, batch_size)
    stops = sorted(find_stop_ids(tokenizer, model.generation_config))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    order = sorted(prompts, key=lambda number: -len(prompts[number]))

    def work(batch: Sequence[int]) -> list[list[int]]:
        return generate_ids(model, [prompts[number] for number in batch], max_new_tokens, stops, pad)

    for number, ids in tqdm(in_batches(order, batch_size, work), total=len(order), desc=tr("answers"), unit=tr("row")):
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        yield number, Answer(prompts[number], ids, text, bool(ids) and ids[-1] in stops)


def generate_ids(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, stops: list[int], pad: int
) -> list[list[int]]:
    """The generated tokens of one batch; each output ends at its first stop token."""
    import torch

    ids, mask = padded(prompts, pad, model.device, left=True)
    rows: list[list[int]] = []
    with torch.inference_mode():
        if model.device.type == "cuda" and model.config.get_text_config()._attn_implementation == "sdpa":
            try:
                rows = decode(model, ids, mask, max_new_tokens, stops)
            except Exception as problem:
                if hardware.out_of_memory(problem):
                    raise
                name = type(problem).__name__
                print(tr("[WARN] no CUDA graph of this model ({name}): answers come more slowly", name=name))
        if not rows:
            settings = {"do_sample": False, "pad_token_id": pad, "eos_token_id": stops, "use_cache": True}
            made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **settings)
            rows = made[:, ids.shape[1] :].tolist()
    return [row[: next((at for at, token in enumerate(row) if token in stops), len(row)) + 1] for row in rows]


def decode(model: Any, ids: Any, mask: Any, max_new_tokens: int, stops: list[int]) -> list[list[int]]:
    """Greedy decoding with a static cache. On a GPU a step is recorded once as a CUDA graph and then replayed: a small
    model spends most of a step starting its kernels."""
    import torch
    from transformers import StaticCache

    (rows, width), stop_ids = ids.shape, torch.tensor(stops, device=ids.device)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=width + max_new_tokens)
    attended = torch.zeros(rows, 1, 1, width + max_new_tokens, dtype=torch.bool, device=ids.device)
    attended[:, 0, 0, :width] = mask.bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    shared: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **shared).logits
    token, position = logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1

    def step() -> None:
        logits = model(input_ids=token, attention_mask=attended, position_ids=position, **shared).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    replay, generated = step, [token.clone()]
    ended = torch.isin(token, stop_ids)
    for number in range(1, max_new_tokens):
        attended[..., width + number - 1] = True
        replay()
        generated.append(token.clone())
        ended |= torch.isin(token, stop_ids)
        if number == 1 and ids.device.type == "cuda":  # what is made at the first call is made by now
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        if number % STOP_CHECK == 0 and bool(ended.all()):
            break
    return torch.cat(generated, dim=1).tolist()


def encode_rows(view: View, rows: Sequence[Row]) -> list[Encoded]:
    """Rows as training sees them."""
    return [
        Encoded(one.row - 1, list(one.ids), [at - 1 for at, counts in enumerate(one.trained) if counts and at])
        for one in view.encode_all(rows)
    ]


def row_losses(model: Any, texts: Sequence[Encoded], batch_size: int) -> list[RowLoss]:
    """The loss of every row, in order; batches of similar length, the longest first."""
    import torch

    def work(batch: Sequence[int]) -> list[float]:
        """Summed losses, with logits only between the first and the last position that any row of the batch needs."""
        rows, losses = [texts[number] for number in batch], []
        ids, mask = padded([row.ids for row in rows], 0, model.device, left=False)
        first, last = min(row.places[0] for row in rows), max(row.places[-1] for row in rows)
        needed = torch.arange(first, last + 1, device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=needed).logits
            for row, ids_of_row, logits_of_row in zip(rows, ids, logits, strict=True):
                at = torch.tensor(row.places, device=model.device)
                chosen = logits_of_row[at - first].float()  # by row: a whole batch of float32 would double the memory
                losses.append(float(torch.nn.functional.cross_entropy(chosen, ids_of_row[at + 1], reduction="sum")))
        return losses

    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))
    found = [(0.0, 0)] * (1 + max(text.row for text in texts))
    logits = int(model.config.get_text_config().vocab_size) * max(row.places[-1] + 1 - row.places[0] for row in texts)
    batch_size = fitting_batch(model, len(texts[order[0]].ids), max(1, min(batch_size, MAX_LOGITS // logits)))
    for number, loss in tqdm(in_batches(order, batch_size, work), total=len(order), desc=tr("losses"), unit=tr("row")):
        total, tokens = found[texts[number].row]
        found[texts[number].row] = (total + loss, tokens + len(texts[number].places))
    return found
