"""The thinking modes of a template: which of them rows can be trained for, and whether a server may be asked without.

Not here: whether a row holds a thought (answers), the check of the rows (contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbutils.chat.answers import rows_think
from nbutils.chat.forms import training_format
from nbutils.chat.rendering import Row, View, probe
from nbutils.errors import CourseError


def holds(view: View, thought: bool) -> bool:
    """Whether the training text of an answer with or without a thought begins with what a server of a view is sent."""
    try:
        (example,) = view.encode_all([{"messages": probe(1, thought)}])
    except CourseError:  # a template that refuses it
        return False
    return example.shared == example.prompts


def may_skip_thinking(tokenizer: Any, rows: Sequence[Row]) -> bool:
    """Whether a server may be asked with enable_thinking=False: the template knows it, no row thinks, and the text a
    model is trained on begins with the prompts of that mode too."""
    if rows_think(rows):
        return False
    view = View(tokenizer, training_format(tokenizer, rows).value, thinking=False)
    return bool(view.other_mode) and all(example.shared == example.prompts for example in view.encode_all(rows))
