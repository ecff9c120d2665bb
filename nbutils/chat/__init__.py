"""Chat rows as the trainer and a server see them: rendered, filtered by length, checked token by token, and shown."""

from __future__ import annotations

from nbutils.chat.contract import ContractReport, check_contract, check_trainer
from nbutils.chat.dataset import Fitting, Long, fitting, last_place, training_dataset, validation_dataset
from nbutils.chat.render import View, find_stop_ids, may_skip_thinking, missing_stop, training_format
from nbutils.chat.show import RenderedRow, inspect_row, show_row
from nbutils.chat.types import IGNORED, Example, common_length, rows_think

__all__ = [
    "IGNORED", "ContractReport", "Example", "Fitting", "Long", "RenderedRow", "View", "check_contract", "check_trainer",
    "common_length", "find_stop_ids", "fitting", "inspect_row", "last_place", "may_skip_thinking", "missing_stop",
    "rows_think", "show_row", "training_dataset", "training_format", "validation_dataset",
]  # fmt: skip
