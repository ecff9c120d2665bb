"""Data: read, normalise, check, deduplicate, split and fingerprint chat rows. Nothing here tokenises.

raw, files, hub, encodings, documents, tables, reading: rows as the files have them; columns, calls, turns, rows: the
one shape they become; text, mojibake, private: what a text may hold; building, tally, checking: passes over the source;
content, letters, alike, near: rows compared; splits: the data folder of a run; card, licence: what became of it.
"""

from __future__ import annotations

from nbutils.data.card import DataCard, load, read_card, row_to_show, show_problems, stored_rows, verify
from nbutils.data.columns import Mapping, parse_mapping
from nbutils.data.raw import Problem, Row, RowError
from nbutils.data.reading import read_rows
from nbutils.data.rows import ChatRow, check_row, problems_of
from nbutils.data.splits import prepare

__all__ = [
    "ChatRow",
    "DataCard",
    "Mapping",
    "Problem",
    "Row",
    "RowError",
    "check_row",
    "load",
    "parse_mapping",
    "prepare",
    "problems_of",
    "read_card",
    "read_rows",
    "row_to_show",
    "show_problems",
    "stored_rows",
    "verify",
]
