"""Greedy answers and losses of a model, in batches that halve themselves when GPU memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from nbutils import hardware
from nbutils.chat import Renderer, find_stop_ids
from nbutils.language import tr

STOP_CHECK = 16  # decoding steps between two checks whether all answers have ended: a check makes the GPU wait
MEMORY_SHARE = 0.5  # of the free GPU memory is planned for; the rest is for copies while the KV cache grows
MAX_LOGITS = 2**28  # of one batch of losses: half a GiB in 16 bits, whatever the vocabulary
Tokens = list[int]
Message = dict[str, Any]
Row = dict[str, Any]
RowLoss = tuple[float, int]  # the summed loss of a row's assistant tokens, in nats, and the number of these tokens


@dataclass(frozen=True)
class Answer:
    """One greedy answer: prompt, generated tokens (with the stop token, if it was reached) and their text."""

    prompt_ids: Tokens
    token_ids: Tokens
    text: str
    stopped: bool = True


class Encoded(NamedTuple):
    """A row as token ids, and the positions whose prediction counts (one before each trained token)."""

    row: int
    ids: Tokens
    places: list[int]


def in_batches(
    order: Sequence[int],
    batch_size: int,
    work: Callable[[Sequence[int]], list[Any]],
) -> Iterator[tuple[int, Any]]:
    """Results of `work` row by row; where GPU memory runs out, the batch is halved and the work goes on."""
    done = 0
    while done < len(order):
        batch = order[done : done + batch_size]
        results: list[Any] = []
        try:
            results = work(batch)
        except RuntimeError as problem:
            if len(batch) == 1 or not hardware.out_of_memory(problem):
                raise
        if not results:
            batch_size = len(batch) // 2
            text = tr(
                "out of memory with {count} rows at a time: going on with {half}",
                count=len(batch),
                half=batch_size,
            )
            print(text)
            hardware.free_memory()  # out here, where the failed call's tensors are no longer held by its error
        yield from zip(batch, results, strict=False)
        done += len(results)


def longest_first(
    model: Any,
    lengths: Mapping[int, int],
    batch_size: int,
    work: Callable[[Sequence[int]], list[Any]],
    title: str,
) -> Iterator[tuple[int, Any]]:
    """Results for numbered texts of these lengths, in batches of similar ones: if memory is short, it shows at once."""
    order = sorted(lengths, key=lengths.__getitem__, reverse=True)
    batch_size = fitting_batch(model, lengths[order[0]], batch_size)
    results = in_batches(order, batch_size, work)
    yield from tqdm(results, total=len(order), desc=title, unit=tr("row"))


def fitting_batch(model: Any, tokens: int, most: int) -> int:
    """Rows of one batch: a decoding step takes as long for 200 as for one, so as many as free GPU memory holds."""
    import torch

    if model.device.type != "cuda":
        return most
    hardware.free_memory()
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    activations = 4 * config.intermediate_size
    row_bytes = tokens * (kv_cache + activations) * model.dtype.itemsize
    free_bytes, _ = torch.cuda.mem_get_info(model.device)
    fitting = int(MEMORY_SHARE * free_bytes / row_bytes)
    return max(1, min(most, fitting))


def padded(texts: Sequence[Tokens], pad: int, device: Any, *, left: bool) -> tuple[Any, Any]:
    """Token ids and attention mask of a batch, padded on one side."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    side = "left" if left else "right"
    rows = [torch.tensor(text) for text in texts]
    ones = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Mapping[int, Tokens],
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[int, Answer]]:
    """Answers to numbered prompts as they come."""
    stops = sorted(find_stop_ids(tokenizer, model.generation_config))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def generate(batch: Sequence[int]) -> list[Tokens]:
        return generate_ids(model, [prompts[number] for number in batch], max_new_tokens, stops, pad)

    lengths = {number: len(prompt) + max_new_tokens for number, prompt in prompts.items()}
    for number, ids in longest_first(model, lengths, batch_size, generate, tr("answers")):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        stopped = bool(ids) and ids[-1] in stops
        yield number, Answer(prompts[number], ids, text, stopped)


def generate_ids(
    model: Any,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    stops: Tokens,
    pad: int,
) -> list[Tokens]:
    """The generated tokens of one batch; each output ends at its first stop token."""
    import torch

    ids, mask = padded(prompts, pad, model.device, left=True)
    with torch.inference_mode():
        rows = decode_on_gpu(model, ids, mask, max_new_tokens, stops)
        if not rows:
            generated = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=pad,
                eos_token_id=stops,
                use_cache=True,
            )
            rows = generated[:, ids.shape[1] :].tolist()
    for row in rows:
        end = next((at for at, token in enumerate(row) if token in stops), len(row))
        del row[end + 1 :]
    return rows


def decode_on_gpu(model: Any, ids: Any, mask: Any, max_new_tokens: int, stops: Tokens) -> list[Tokens]:
    """`decode` where it is faster than transformers' own loop, on a GPU with SDPA; [] where it cannot be used."""
    if model.device.type != "cuda" or model.config.get_text_config()._attn_implementation != "sdpa":
        return []
    try:
        return decode(model, ids, mask, max_new_tokens, stops)
    except Exception as problem:
        if hardware.out_of_memory(problem):
            raise
        name = type(problem).__name__
        print(tr("[WARN] no CUDA graph of this model ({name}): answers come more slowly", name=name))
        return []


def decode(model: Any, ids: Any, mask: Any, max_new_tokens: int, stops: Tokens) -> list[Tokens]:
    """Greedy decoding with a static cache. On a GPU a step is recorded once as a CUDA graph and then replayed: a small
    model spends most of a step starting its kernels."""
    import torch
    from transformers import StaticCache

    width = ids.shape[1]
    longest = width + max_new_tokens
    stop_ids = torch.tensor(stops, device=ids.device)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=longest)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def next_tokens(ids: Any, attended: Any, positions: Any) -> Any:
        output = model(
            input_ids=ids,
            attention_mask=attended,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].argmax(-1, keepdim=True)

    token = next_tokens(ids, mask, positions)
    position = positions[:, -1:] + 1
    attended = torch.zeros(len(ids), 1, 1, longest, dtype=torch.bool, device=ids.device)
    attended[:, 0, 0, :width] = mask.bool()

    def step() -> None:
        """One token more, in the tensors that a CUDA graph reads and writes again when it is replayed."""
        token.copy_(next_tokens(token, attended, position))
        position.add_(1)

    replay = step
    generated = [token.clone()]
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


def encode_rows(renderer: Renderer, rows: Sequence[Row]) -> list[Encoded]:
    """Rows as training sees them."""
    encoded = []
    for example in renderer.encode_all(rows):
        trained = [position for position, mask in enumerate(example.trained) if mask and position]
        before = [position - 1 for position in trained]
        ids = list(example.ids)
        encoded.append(Encoded(example.row - 1, ids, before))
    return encoded


def row_losses(model: Any, texts: Sequence[Encoded], batch_size: int) -> list[RowLoss]:
    """The loss of every row, in order."""
    config = model.config.get_text_config()
    spans = [text.places[-1] - text.places[0] + 1 for text in texts]
    logits = config.vocab_size * max(spans)
    most = max(1, MAX_LOGITS // logits)

    def losses(batch: Sequence[int]) -> list[float]:
        return summed_losses(model, [texts[number] for number in batch])

    lengths = {number: len(text.ids) for number, text in enumerate(texts)}
    rows = [(0.0, 0)] * (1 + texts[-1].row)
    measured = longest_first(
        model,
        lengths,
        min(batch_size, most),
        losses,
        tr("losses"),
    )
    for number, loss in measured:
        text = texts[number]
        total, tokens = rows[text.row]
        rows[text.row] = (total + loss, tokens + len(text.places))
    return rows


def summed_losses(model: Any, texts: Sequence[Encoded]) -> list[float]:
    """Of one batch, with logits only between the first and the last position that any of its texts needs."""
    import torch

    ids, mask = padded([text.ids for text in texts], 0, model.device, left=False)
    first = min(text.places[0] for text in texts)
    last = max(text.places[-1] for text in texts)
    needed = torch.arange(first, last + 1, device=model.device)
    losses = []
    with torch.inference_mode():
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=needed,
        ).logits
        for row, text in enumerate(texts):
            places = torch.tensor(text.places, device=model.device)
            predicted = logits[row, places - first].float()  # by row: a batch of float32 would double the memory
            expected = ids[row, places + 1]
            loss = torch.nn.functional.cross_entropy(predicted, expected, reduction="sum")
            losses.append(float(loss))
    return losses
