"""Chat: what the trainer trains and what a server is sent are one text, shown in colour and checked token by token.

templates: what a chat template can do; rendering: rows as tokens; forms: whole conversations or answer by answer;
showing: a row in colour; fitting: rows that max_length would cut; answers: what an answer says and what is trained of
it; thinking: the modes of a template; contract: the check before any training, breaches: of one example; handing: the
tokens to the trainer.
"""

from __future__ import annotations

from nbutils.chat.contract import ContractReport, check_contract
from nbutils.chat.fitting import Fitting, Long, fitting
from nbutils.chat.forms import training_format
from nbutils.chat.handing import check_trainer, training_dataset, validation_dataset
from nbutils.chat.rendering import Example, View
from nbutils.chat.showing import RenderedRow, inspect_row, show_row
from nbutils.chat.templates import find_stop_ids, missing_stop
from nbutils.chat.thinking import may_skip_thinking

__all__ = [
    "ContractReport",
    "Example",
    "Fitting",
    "Long",
    "RenderedRow",
    "View",
    "check_contract",
    "check_trainer",
    "find_stop_ids",
    "fitting",
    "inspect_row",
    "may_skip_thinking",
    "missing_stop",
    "show_row",
    "training_dataset",
    "validation_dataset",
    "training_format",
]
