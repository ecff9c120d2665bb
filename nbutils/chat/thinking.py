"""Thoughts in answers: which rows have some, and whether a model trained on rows without may be asked not to think.

Not here: whether training and serving agree on the text (contract).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nbutils.chat.forms import training_format
from nbutils.chat.rendering import Row, View

THOUGHT = re.compile(r"(.*?)</think>", re.DOTALL)


def has_thought(message: dict[str, Any]) -> bool:
    """Whether an answer holds a thought that is not empty; the mark that opens it is often written by the server."""
    if message.get("reasoning_content"):
        return True
    found = THOUGHT.match(str(message.get("content") or ""))
    return bool(found and found[1].replace("<think>", "").strip())


def rows_think(rows: Sequence[Row]) -> bool:
    """Whether any answer of any row holds a thought."""
    return any(has_thought(one) for row in rows for one in row["messages"] if one["role"] == "assistant")


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether a server may be asked with enable_thinking=False: the template knows it, no row thinks, and the text a
    model is trained on begins with the prompts of that mode too."""
    if rows_think(rows):
        return False
    view = View(tokenizer, training_format(tokenizer, rows).value, thinking=False)
    return bool(view.other_mode) and all(example.shared == example.prompts for example in view.encode_all(rows))
