"""Everything the bundled tiny model and the sample rows are made of: word lists, messages, text, tokenizer.

Not here: the model and its training loop; lesson 07 shows both.
"""

from __future__ import annotations

from nbutils.corpus.dialogues import chat
from nbutils.corpus.messages import sample_rows
from nbutils.corpus.samples import write_samples
from nbutils.corpus.texts import pretraining_texts
from nbutils.corpus.tokens import CHAT_TEMPLATE, build_tokenizer, token_rows
from nbutils.corpus.training import finished_training

__all__ = [
    "CHAT_TEMPLATE",
    "build_tokenizer",
    "chat",
    "finished_training",
    "pretraining_texts",
    "sample_rows",
    "token_rows",
    "write_samples",
]
