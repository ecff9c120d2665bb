"""Chat rows, rendered examples, and what can be said of them without a tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
Messages = list[Message]
Tools = list[dict[str, Any]] | None
Row = dict[str, Any]  # {"messages": [...]}, and "tools" where the row has some
IGNORED = -100  # the label of a token without loss


class Example(NamedTuple):
    """One text the trainer trains on: its row (from 1), its answers as indices of the row's messages, its tokens.

    `trained` has a 1 for each token with loss. For each answer, the text begins with `shared` tokens of the server's
    prompt, which has `prompts` tokens.
    """

    row: int
    turns: tuple[int, ...]
    ids: array[int]
    trained: bytes
    shared: tuple[int, ...]
    prompts: tuple[int, ...]

    def trained_ids(self) -> list[int]:
        """The tokens with loss."""
        return [token for token, mask in zip(self.ids, self.trained, strict=True) if mask]


def has_thought(answer: Message) -> bool:
    """Whether an answer has a thought that is not empty; servers often write the opening <think> themselves."""
    thought, closed, _ = str(answer.get("content") or "").partition("</think>")
    return bool(answer.get("reasoning_content") or (closed and thought.replace("<think>", "").strip()))


def rows_think(rows: Sequence[Row]) -> bool:
    """Whether any answer of any row has a thought."""
    return any(has_thought(message) for row in rows for message in row["messages"] if message["role"] == "assistant")


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    if one == other[: len(one)]:
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
