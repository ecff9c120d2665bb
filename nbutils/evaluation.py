"""The same prompts before and after: greedy answers, exact match, a table a person can read.

Not here: network judges, or loading models (the lessons do that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One greedy answer: what went in, what came out (with the stop token, if it was reached), and its text."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str


def questions_of(rows: Sequence[dict[str, Any]], limit: int = 0) -> tuple[list[list[Message]], list[str]]:
    """Prompts and reference answers of chat rows: everything before the last turn, and that turn."""
    chosen = [row["messages"] for row in (rows[:limit] if limit else rows)]
    return [messages[:-1] for messages in chosen], [messages[-1]["content"] for messages in chosen]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, conversation: list[Message]) -> list[int]:
    """The tokens the model sees before it answers."""
    encoded: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    max_new_tokens: int,
    batch_size: int,
) -> list[Answer]:
    """Greedy answers to all conversations, longest first in each batch, in the order they were asked."""
    from tqdm.auto import tqdm

    prompts = [prompt_ids(tokenizer, conversation) for conversation in conversations]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: dict[int, Answer] = {}
    with tqdm(total=len(prompts), desc="answers", unit="row") as bar:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            outputs = _generate_batch(model, tokenizer, [prompts[index] for index in batch], max_new_tokens)
            for index, ids in zip(batch, outputs, strict=True):
                answers[index] = Answer(prompts[index], ids, str(tokenizer.decode(ids, skip_special_tokens=True)))
            bar.update(len(batch))
    return [answers[index] for index in range(len(prompts))]


def _generate_batch(model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """One left-padded batch; each output ends at its first stop token."""
    import torch

    stops = stop_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
            pad_token_id=pad, eos_token_id=stops, use_cache=True,
        )  # fmt: skip
    return [_until_stop(row, stops) for row in outputs[:, width:].tolist()]


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer, from the generation config (what a server reads) or else the tokenizer."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
    return list(configured) if isinstance(configured, list | tuple) else [configured]


def _until_stop(ids: list[int], stops: list[int]) -> list[int]:
    ends = [position for position, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers equal to their reference, surrounding white space aside."""
    if not references or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers for {len(references)} references")
    return sum(a.strip() == r.strip() for a, r in zip(answers, references, strict=True)) / len(references)


def before_after_table(
    questions: Sequence[list[Message]], references: Sequence[str], columns: dict[str, Sequence[str]], rows: int = 6
) -> list[dict[str, str]]:
    """Rows for display: the question, what was wanted, and each model's answer with a tick or a cross."""
    table = []
    for index in range(min(rows, len(references))):
        row = {"question": questions[index][-1]["content"], "wanted": references[index]}
        for name, answers in columns.items():
            mark = "✓" if answers[index].strip() == references[index].strip() else "✗"
            row[name] = f"{mark} {answers[index].strip()}"
        table.append(row)
    return table
