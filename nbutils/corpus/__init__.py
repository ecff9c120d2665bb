"""Everything the bundled tiny model and the sample rows are made of: word lists, messages, pre-training text, tokenizer."""

from __future__ import annotations

from nbutils.corpus.messages import sample_rows
from nbutils.corpus.samples import write_samples
from nbutils.corpus.texts import pretraining_texts
from nbutils.corpus.tokens import CHAT_TEMPLATE, build_tokenizer, token_rows

__all__ = ["CHAT_TEMPLATE", "build_tokenizer", "pretraining_texts", "sample_rows", "token_rows", "write_samples"]
