"""Whether a merged folder turns words into the tokens of the training: predictions are compared by token only.

Not here: the predictions (reading), and which tokenizer is written (merging.companions).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError

ROWS = 32


def require_tokenizer(folder: Path, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> int:
    """Refuse a folder whose own tokenizer and template make other tokens of these rows; how many were compared."""
    from transformers import AutoTokenizer

    seen = f"the tokenizer of {folder} makes other tokens than the training's"
    try:
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        compared = [row["messages"] for row in rows[:ROWS]]
        same = all(_tokens(own, one) == _tokens(tokenizer, one) for one in compared)
    except Exception as problem:  # missing files end in errors of many kinds
        seen, same = f"{folder} has no tokenizer that can be used ({type(problem).__name__})", False
    if not same:
        raise CourseError(
            f"{seen}.", "the vocabulary and the chat template the adapter was trained with",
            "save the training's tokenizer beside the adapter (tokenizer.save_pretrained), delete the merged folder "
            "and merge again",
        )  # fmt: skip
    return len(compared)


def _tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
