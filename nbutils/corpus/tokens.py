"""From text to token rows: trains the tiny model's tokenizer, carries its chat template, fills rows; no model here."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nbutils.corpus.words import all_words
from nbutils.errors import CourseError

if TYPE_CHECKING:
    import torch

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SMALLEST_VOCABULARY = 512

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@functools.cache
def _seams() -> re.Pattern[str]:
    """Return a pattern of the places where a text is cut: chat markers (dropped) and listed words (kept)."""
    markers = [re.escape(marker) for marker in (END_OF_TEXT, TURN_START, TURN_END)]
    chinese = [re.escape(word) for word in all_words() if not word.isascii()]
    return re.compile("|".join([*markers, f"({'|'.join(chinese)})"]))


def pieces(text: str) -> list[str]:
    """Cut a text around the listed words, so that no token learns to join a word with its sentence."""
    return [piece for piece in _seams().split(text) if piece]


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on our own text and dress it as a Qwen2 chat tokenizer."""
    from transformers import Qwen2Tokenizer

    if vocab_size < SMALLEST_VOCABULARY:
        raise CourseError(
            f"a vocabulary of {vocab_size}",
            f"{SMALLEST_VOCABULARY} or more: 256 bytes come first",
            "raise VOCAB; the bundled model has 3072",
        )
    learned = _learn_merges(texts, vocab_size, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer)
    merges: Any = [tuple(pair) for pair in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def _learn_merges(texts: Iterable[str], vocab_size: int, pre_tokenizer: Any) -> dict[str, Any]:
    """Return vocabulary and merges; special tokens come first, so their ids are 0, 1, 2 at every size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator((pieces(text) for text in texts), trainer)
    return json.loads(bare.to_str())["model"]


def token_rows(texts: Iterable[str], tokenizer: Any, length: int, batch: int = 2000) -> torch.Tensor:
    """Fill rows of `length` tokens; each row opens with the start of a document, the last document is cut to fit."""
    import torch

    end, stream = tokenizer.pad_token_id, iter(texts)
    rows: list[list[int]] = []
    row: list[int] = []
    while chunk := list(itertools.islice(stream, batch)):
        for ids in tokenizer(chunk, add_special_tokens=False)["input_ids"]:
            row.extend([*ids, end])
            if len(row) >= length:
                rows.append(row[:length])
                row = []
    if not rows:
        raise CourseError("too little text for one row", f"{length} tokens or more", "draw more texts or lower LENGTH")
    return torch.tensor(rows, dtype=torch.int32)
