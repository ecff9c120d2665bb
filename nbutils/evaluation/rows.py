"""The rows of an exam: their questions, the wanted answers as a model would write them, and which of them fit.

Not here: asking them (exam).
"""

from __future__ import annotations

from collections.abc import Sequence

from nbutils.chat import View
from nbutils.chat.types import common_length, rows_think
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.evaluation.answers import Message, Row
from nbutils.paths import SAMPLES

LEAST_TOKENS, LONGER = 32, 1.5  # of an answer; than the longest wanted one


def questions_of(rows: Sequence[Row]) -> tuple[list[list[Message]], list[str]]:
    """Prompts and reference answers of chat rows: everything before the last turn, and that turn."""
    chosen = [row["messages"] for row in rows]
    return [messages[:-1] for messages in chosen], [str(messages[-1]["content"] or "") for messages in chosen]


def prompts_of(view: View, rows: Sequence[Row]) -> list[list[int]]:
    """What a model is sent for each row."""
    return [view.prompt(row["messages"][:-1], row.get("tools")) for row in rows]


def enough_tokens(view: View, rows: Sequence[Row], most: int) -> int:
    """How many tokens an answer may have: half as many again as the longest wanted one; `most` where it may think."""
    if rows_think(rows) or (view.thinking is not False and "think>" in str(view.tokenizer.chat_template)):
        return most
    wanted = view.tokenizer([reference_of(view, row) for row in rows], add_special_tokens=False)["input_ids"]
    return min(most, max(LEAST_TOKENS, int(LONGER * max(map(len, wanted)))))


def fitting_rows(view: View, rows: list[Row], new_tokens: int, limit: int) -> list[Row]:
    """The rows that a model which reads `limit` tokens can be asked; the others are told."""
    needed = [len(prompt) + new_tokens for prompt in prompts_of(view, rows)]
    for example in view.encode_all(rows):
        needed[example.row - 1] = max(needed[example.row - 1], len(example.ids))
    long = [number for number, tokens in enumerate(needed) if tokens > limit]
    if len(long) == len(rows):
        raise CourseError(
            f"none of the {len(rows)} evaluation rows fits: question and answer need {min(needed):,} tokens or more.",
            f"at most {limit:,} tokens",
            f"lower evaluation.max_new_tokens (now {new_tokens}), raise serve.max_model_len if that is the limit, "
            f"or give shorter rows",
        )
    if long:
        named = ", ".join(f"row {number + 1} ({needed[number]:,} tokens)" for number in long[:5])
        more = f" and {len(long) - 5} more" if len(long) > 5 else ""
        print(f"[WARN] left out, as they do not fit {limit:,} tokens with their answer: {named}{more}")
    return [row for row, tokens in zip(rows, needed, strict=True) if tokens <= limit]


def general_rows() -> list[Row]:
    """Everyday questions in Chinese and English that have nothing to do with any training data of the course."""
    return stored_rows(SAMPLES / "general.jsonl")


def reference_of(view: View, row: Row) -> str:
    """The wanted answer as a model would write it; a call of a tool is written the way the template writes it."""
    *before, last = row["messages"]
    if not last.get("tool_calls"):
        return str(last["content"] or "")
    tools = row.get("tools")
    ids, _ = view.encode(row["messages"], tools)
    begins = common_length(view.prompt(before, tools), ids)
    return str(view.tokenizer.decode(ids[begins:], skip_special_tokens=True)).strip()
