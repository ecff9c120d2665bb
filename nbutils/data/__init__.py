"""Data: read, normalise, check, deduplicate, split and fingerprint chat rows. Nothing here tokenises.

reading: raw rows from files; rows: what a row must look like; building: one pass over the source;
splits: the data folder of a run; card: what became of it.
"""

from __future__ import annotations

from nbutils.data.card import DataCard, load, print_problems, read_card, verify
from nbutils.data.reading import Problem, Row, RowError, read_rows
from nbutils.data.rows import ChatRow, check_row, problems_of
from nbutils.data.splits import prepare

__all__ = [
    "ChatRow",
    "DataCard",
    "Problem",
    "Row",
    "RowError",
    "check_row",
    "load",
    "prepare",
    "print_problems",
    "problems_of",
    "read_card",
    "read_rows",
    "verify",
]
