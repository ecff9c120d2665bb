"""Data: read, normalize, check, deduplicate, split and fingerprint chat rows."""

from __future__ import annotations

from nbutils.data.build import prepare
from nbutils.data.card import DataCard, load, read_card, row_to_show, show, show_problems, stored_rows, verify
from nbutils.data.read import read_rows
from nbutils.data.rows import ChatRow, check_row, parse_mapping, problems_of
from nbutils.data.text import Problem, Row, RowError

__all__ = [
    "ChatRow", "DataCard", "Problem", "Row", "RowError", "check_row", "load", "parse_mapping", "prepare",
    "problems_of", "read_card", "read_rows", "row_to_show", "show", "show_problems", "stored_rows", "verify",
]  # fmt: skip
