"""Greedy answers and losses of a model, in batches that halve themselves when GPU memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from nbutils import distributed, hardware
from nbutils.chat import Example, Renderer, Row, find_stop_ids, may_skip_thinking
from nbutils.language import say, tr

STOP_CHECK = 16  # decoding steps between two checks whether all answers have ended: a check makes the GPU wait
MAX_LOGITS = 2**28  # of one batch of losses: half a GiB in 16 bits, whatever the vocabulary
Tokens = list[int]
RowLoss = tuple[float, int]  # the summed loss of a row's assistant tokens, in nats, and the number of these tokens


@dataclass(frozen=True)
class Answer:
    """One greedy answer: prompt, generated tokens (with the stop token, if it was reached) and their text."""

    prompt_ids: Tokens
    token_ids: Tokens
    text: str
    stopped: bool = True


def in_batches(
    items: Sequence[Any],
    batch_size: int,
    work: Callable[[Sequence[Any]], list[Any]],
    title: str = "",
) -> Iterator[tuple[Any, Any]]:
    """Each item with its result; where GPU memory runs out, the batch is halved and the work goes on.

    Similar lengths should be neighbors, the longest first: then little is padded, and short memory shows at once.
    """
    done = 0
    hidden = not title or not items
    with tqdm(total=len(items), desc=title, unit=tr("row"), disable=hidden, leave=False) as progress:
        while done < len(items):
            batch = items[done : done + batch_size]
            results: list[Any] = []
            try:
                results = work(batch)
            except RuntimeError as problem:
                if len(batch) == 1 or not hardware.out_of_memory(problem):
                    raise
            if not results:
                batch_size = len(batch) // 2
                say("out of memory with {count} rows at a time: going on with half of them", count=len(batch))
                hardware.free_memory()  # out here, where the failed call's tensors are no longer held by its error
            done += len(results)
            progress.update(len(results))
            yield from zip(batch, results, strict=False)


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> tuple[Any, Any, Any]:
    """Token ids, attention mask and positions of a batch, padded at the left: so all texts end at the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(text, device=device) for text in texts]
    ones = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(ones, batch_first=True, padding_side="left")
    positions = mask.cumsum(-1) - 1
    return ids, mask, positions.clamp(min=0)


def answer_rows(model: Any, tokenizer: Any, rows: Sequence[Row], max_new_tokens: int = 128) -> list[str]:
    """What the model itself answers to the last question of each row; greedy, so it is the same every time.

    Example:
        [text] = evaluation.answer_rows(model, tokenizer, [{"messages": [question, expected_answer]}])
    """
    if distributed.strategy() in distributed.SHARDED:
        return [tr("(not asked: no process has the whole model; lesson 04 asks)")] * len(rows)
    thinking = False if may_skip_thinking(tokenizer, rows) else None
    renderer = Renderer(tokenizer, "prompt_completion", thinking)
    prompts = [renderer.prompt(row["messages"][:-1], row.get("tools")) for row in rows]
    stops = sorted(find_stop_ids(tokenizer, model.generation_config))
    training = model.training
    hardware.keep_4bit_layout(model)
    model.eval()
    answers = []
    for prompt in prompts:  # one by one: the attention of a training may know no padding
        [ids] = generate_ids(model, [prompt], max_new_tokens, stops)
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    model.train(training)
    return answers


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Mapping[int, Tokens],
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[int, Answer]]:
    """Answers to numbered prompts as they come."""
    stops = sorted(find_stop_ids(tokenizer, model.generation_config))

    def generate(numbers: Sequence[int]) -> list[Tokens]:
        batch = [prompts[number] for number in numbers]
        decoded = decode_on_gpu(model, batch, max_new_tokens, stops)
        return decoded or generate_ids(model, batch, max_new_tokens, stops)

    order = sorted(prompts, key=lambda number: len(prompts[number]), reverse=True)
    for number, generated in in_batches(order, batch_size, generate, tr("answers")):
        end = next((at for at, token in enumerate(generated) if token in stops), len(generated))
        ids = generated[: end + 1]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        yield number, Answer(prompts[number], ids, text, stopped=end < len(generated))


def generate_ids(model: Any, prompts: Sequence[Tokens], max_new_tokens: int, stops: Tokens) -> list[Tokens]:
    """The generated tokens of one batch; after its first stop token an output has only stop tokens."""
    import torch

    ids, mask, _ = padded(prompts, stops[0], model.device)
    with torch.inference_mode():
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,  # these three: or transformers warns that they are not used
            top_p=None,
            top_k=None,
            pad_token_id=stops[0],
            eos_token_id=stops,
            use_cache=True,
        )
    rows: list[Tokens] = generated[:, ids.shape[1] :].tolist()
    return rows


def decode_on_gpu(model: Any, prompts: Sequence[Tokens], max_new_tokens: int, stops: Tokens) -> list[Tokens]:
    """`decode` where it is faster than transformers' own loop, on a GPU with SDPA; [] where it cannot be used."""
    import torch

    if model.device.type != "cuda" or model.config.get_text_config()._attn_implementation != "sdpa":
        return []
    try:
        with torch.inference_mode():
            return decode(model, prompts, max_new_tokens, stops)
    except Exception as problem:
        if hardware.out_of_memory(problem):
            raise
        name = type(problem).__name__
        say("[WARN] no CUDA graph of this model ({name}): answers come more slowly", name=name)
        return []


def decode(model: Any, prompts: Sequence[Tokens], max_new_tokens: int, stops: Tokens) -> list[Tokens]:
    """Greedy decoding with a static cache. On a GPU a step is recorded once as a CUDA graph and then replayed: a small
    model spends most of a step starting its kernels."""
    import torch
    from transformers import StaticCache

    ids, mask, positions = padded(prompts, stops[0], model.device)
    width = ids.shape[1]
    longest = width + max_new_tokens
    stop_ids = torch.tensor(stops, device=ids.device)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=longest)

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


def row_losses(model: Any, examples: Sequence[Example], batch_size: int) -> list[RowLoss]:
    """The loss of every row, in order; a row may have several examples."""
    positions = max(map(loss_positions, examples))
    logits = positions * model.config.get_text_config().vocab_size
    most = max(1, MAX_LOGITS // logits)
    rows = [(0.0, 0)] * examples[-1].row
    losses = in_batches(
        sorted(examples, key=lambda example: len(example.ids), reverse=True),
        min(batch_size, most),
        partial(example_losses, model),
        tr("losses"),
    )
    for example, (loss, trained) in losses:
        row = example.row - 1
        total, tokens = rows[row]
        rows[row] = (total + loss, tokens + trained)
    return rows


def loss_positions(example: Example) -> int:
    """How many tokens there are from the first trained one on."""
    first = max(1, example.trained.index(1))  # the first token of a text has nothing to be predicted from
    return len(example.ids) - first


def example_losses(model: Any, examples: Sequence[Example]) -> list[RowLoss]:
    """Of one batch, with logits only where a loss may be."""
    import torch

    losses = []
    with torch.inference_mode():
        counts = [loss_positions(example) for example in examples]
        texts = [list(example.ids) for example in examples]
        logits = end_logits(
            model,
            [text[:-1] for text in texts],
            max(counts),
        )
        for row, count in enumerate(counts):
            predicted = logits[row, -count:].float()  # by row: a batch of float32 would double the memory
            expected = torch.tensor(texts[row][-count:], device=model.device)
            by_token = torch.nn.functional.cross_entropy(predicted, expected, reduction="none")
            mask = examples[row].trained[-count:]
            trained = torch.tensor(list(mask), device=model.device)
            loss = (by_token * trained).sum()
            losses.append((float(loss), mask.count(1)))
    return losses


def end_logits(model: Any, texts: Sequence[Tokens], count: int) -> Any:
    """The logits at the last `count` positions of each text of a batch."""
    ids, mask, positions = padded(texts, 0, model.device)
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=count,
    ).logits
