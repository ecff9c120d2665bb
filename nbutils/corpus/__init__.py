"""The text this project writes: the bundled sample rows, the pre-training text of the tiny model, and its tokenizer."""

from __future__ import annotations

from nbutils.corpus.pretraining import build_tokenizer, chat, finished_training, pretraining_texts, token_rows
from nbutils.corpus.samples import write_samples

__all__ = ["build_tokenizer", "chat", "finished_training", "pretraining_texts", "token_rows", "write_samples"]
