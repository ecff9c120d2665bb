"""Chat: what the trainer trains and what a server is sent are one text, shown in colour and checked token by token.

rendering: a row as the trainer sees it; contract: the check before any training.
"""

from __future__ import annotations

from nbutils.chat.contract import ContractReport, check_contract, find_stop_ids
from nbutils.chat.rendering import (
    RenderedRow,
    inspect_row,
    missing_stop,
    show_row,
    to_prompt_completion,
    training_format,
    training_rows,
)

__all__ = [
    "ContractReport",
    "RenderedRow",
    "check_contract",
    "find_stop_ids",
    "inspect_row",
    "missing_stop",
    "show_row",
    "to_prompt_completion",
    "training_format",
    "training_rows",
]
