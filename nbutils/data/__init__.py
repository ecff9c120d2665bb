"""Data: read, normalize, check, deduplicate, split and fingerprint chat rows."""

from nbutils.data.build import (
    DataCard,
    load,
    prepare,
    row_to_show,
    show,
    show_problems,
    show_rejected,
    stored_rows,
    verify,
)
from nbutils.data.read import read_rows
from nbutils.data.rows import ChatRow, Problem, Row, RowError, check_row, parse_mapping, problems_of

__all__ = [
    "ChatRow", "DataCard", "Problem", "Row", "RowError", "check_row", "load", "parse_mapping", "prepare",
    "problems_of", "read_rows", "row_to_show", "show", "show_problems", "show_rejected", "stored_rows", "verify",
]  # fmt: skip
