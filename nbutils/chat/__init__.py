"""Chat rows as the trainer and a server see them: rendered, filtered by length, checked token by token, and shown."""

from __future__ import annotations

from nbutils.chat.contract import ContractReport, FilteredRows, check_contract, filter_by_length
from nbutils.chat.dataset import ChatDataset, answer, build_dataset, check_trainer, show_row, training_dataset
from nbutils.chat.render import View, common_length, find_stop_ids, may_skip_thinking, rows_think, training_format

__all__ = [
    "ChatDataset", "ContractReport", "FilteredRows", "View", "answer", "build_dataset", "check_contract",
    "check_trainer", "common_length", "filter_by_length", "find_stop_ids", "may_skip_thinking",
    "rows_think", "show_row", "training_dataset", "training_format",
]  # fmt: skip
