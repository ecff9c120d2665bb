"""Data: read, normalize, check, deduplicate, split and fingerprint chat rows."""

from nbutils.data.build import prepare
from nbutils.data.card import (
    DataCard,
    load,
    own_language_first,
    row_to_show,
    show,
    show_problems,
    stored_rows,
    verify,
    write_rows,
)
from nbutils.data.read import read_rows
from nbutils.data.rows import ChatRow, Row, RowError, check_row, parse_mapping, problems_of
from nbutils.data.texts import Problem
