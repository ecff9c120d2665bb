"""One row as the trainer sees it, with the trained tokens in color."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from nbutils import dashboard
from nbutils.chat.render import View, training_format
from nbutils.chat.types import Messages, Tools


@dataclass(frozen=True)
class RenderedRow:
    """One row: `trained[i]` says whether token i carries the loss. The tokens joined are the text."""

    text: str
    tokens: list[str]
    ids: list[int]
    trained: list[bool]

    def runs(self) -> list[tuple[str, bool]]:
        """The text in stretches that are all trained or all not."""
        groups = itertools.groupby(zip(self.tokens, self.trained, strict=True), key=lambda pair: pair[1])
        return [("".join(token for token, _ in pairs), trained) for trained, pairs in groups]

    def __str__(self) -> str:
        return "".join(f"[{text}]" if trained else text for text, trained in self.runs())


def inspect_row(tokenizer: Any, messages: Messages, form: str = "", tools: Tools = None) -> RenderedRow:
    """One conversation exactly as the trainer will see it; as prompt and completion: its last answer.

    A character made of several tokens stands at its first.
    """
    view = View(tokenizer, form or training_format(tokenizer, [{"messages": messages}]).value)
    text = view.text(messages, tools)
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ends = [0, *(end for _, end in spans)]
    return RenderedRow(text, [text[a:b] for a, b in itertools.pairwise(ends)], *view.encode(messages, tools))


def show_row(tokenizer: Any, messages: Messages, form: str = "", tools: Tools = None) -> None:
    """Show one conversation with its trained tokens in color; in [brackets] outside a notebook."""
    form = form or training_format(tokenizer, [{"messages": messages}]).value
    row = inspect_row(tokenizer, messages, form, tools)
    answers = sum(message["role"] == "assistant" for message in messages)
    if form == "prompt_completion" and answers > 1:
        print(f"This row has {answers} answers, each an example of its own; here is the last one.")
    print(f"{sum(row.trained)} of {len(row.ids)} tokens are trained. They are marked:")
    dashboard.show("tokens.html", str(row), runs=row.runs())
