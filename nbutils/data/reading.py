"""Raw rows from files: jsonl, json, csv, tsv and parquet, one at a time, each with its file and line.

Not here: which files (files), their encoding (encodings), what a row must look like (rows). A row that cannot be read
is yielded as a RowError in its place, so that a bad line never hides the next one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from nbutils.data.documents import CHUNK, LARGEST_ROW, UNREADABLE, document, malformed
from nbutils.data.encodings import Decoder, head_of, is_utf16, lines_of
from nbutils.data.files import COMPRESSED, FORMATS_TEXT, damages, files_of, format_of, open_bytes
from nbutils.data.raw import Problem, Row, RowError
from nbutils.data.tables import table

LONGEST_LINE = 64 << 20  # bytes; a longer one is no row, and would not fit many a machine's memory
BLANK_LINES = 1000  # at the beginning of a file that could still be one JSON document
BATCH = 64 << 20  # bytes of parquet at a time
__all__ = ["FORMATS_TEXT", "Problem", "Row", "RowError", "files_of", "read_rows"]


def read_rows(path: Path | str) -> Iterator[Row | RowError]:
    """Every row of one file, or of each file of a folder or hub dataset in turn."""
    for file in files_of(str(path)):
        rows = _parquet(file) if format_of(file) == ".parquet" else _text(file)
        yield from _guarded(file, rows) if file.suffix.lower() in COMPRESSED else rows


def _guarded(file: Path, rows: Iterator[Row | RowError]) -> Iterator[Row | RowError]:
    """The rows of a compressed file up to where it is damaged, and one error that says so."""
    line = 0
    try:
        for row in rows:
            line = row.line
            yield row
    except damages() as problem:
        yield _damaged(file, line + 1, problem)


def _damaged(file: Path, line: int, problem: Exception) -> RowError:
    """The one error at the end of a file that is not whole."""
    seen = f"the file is damaged or cut short: {(str(problem).splitlines() or [''])[0]}"
    todo = "copy or download the file again" + "; the rows before this place were read" * (line > 1)
    return RowError(file.name, line, None, (Problem("damaged_file", "-", seen, todo),))


def _text(file: Path) -> Iterator[Row | RowError]:
    with open_bytes(file) as raw:
        head = head_of(raw)
        if is_utf16(head):
            problem = Problem("encoding", "-", "the file is UTF-16 text", "save it again with the encoding UTF-8")
            yield RowError(file.name, 1, None, (problem,))
            return
        decoder = Decoder(head)
        if format_of(file) in (".csv", ".tsv"):
            yield from table(file.name, lines_of(raw, decoder, LARGEST_ROW), decoder, format_of(file) == ".tsv")
            return
        first, whole = _first_lines(raw, decoder, format_of(file) == ".jsonl")
        if not whole:
            yield from _lines(file, first, raw, decoder)
            return
    yield from _document(file, decoder)


def _first_lines(raw: BinaryIO, decoder: Decoder, lines: bool) -> tuple[list[bytes], bool]:
    """The beginning of a JSON file, and whether it is one document: lines of JSON end with each line."""
    first, filled = list[bytes](), list[bytes]()
    while line := raw.readline(LARGEST_ROW):
        if len(line) == LARGEST_ROW and (first or (lines and line.lstrip()[:1] == b"{")):
            line = _whole_line(raw, line)  # a row as long as this is a row all the same
        first.append(line)
        filled += [line.strip()] if line.strip() else []
        if len(filled) == 2 or len(first) == BLANK_LINES:
            break
    if not filled or filled[0][:1] not in (b"[", b"{"):
        return first, False
    try:
        json.loads(decoder(filled[0])[0])
    except UNREADABLE:
        alone = len(filled) == 1 and not lines
        return first, alone or filled[0][:1] == b"[" or filled[0][-1:] in b"{[,:" or len(filled[0]) >= LARGEST_ROW - 2
    return first, len(filled) == 1


def _document(file: Path, decoder: Decoder) -> Iterator[Row | RowError]:
    def text() -> Iterator[str]:
        with open_bytes(file) as raw:
            head_of(raw)
            yield from lines_of(raw, decoder, CHUNK)

    for row in document(file.name, text):
        yield row._replace(encoding=decoder.encoding) if decoder.converted and isinstance(row, Row) else row


def _lines(file: Path, first: list[bytes], raw: BinaryIO, decoder: Decoder) -> Iterator[Row | RowError]:
    """One row per line; whatever the fast reader refuses is read again by the patient one."""
    name, number = file.name, 0
    for lines in (first, _bounded(raw)):
        for line in lines:
            number += 1
            if len(line) > LONGEST_LINE:
                seen = f"a line of more than {LONGEST_LINE >> 20} MiB: {line[:40].decode('utf-8', 'replace')}"
                problem = Problem("long_line", "-", seen, "one row for each line; split or leave out what is longer")
                yield RowError(name, number, None, (problem,))
                continue
            try:
                yield Row(name, number, orjson.loads(line))
            except orjson.JSONDecodeError:
                if line.strip():
                    yield _patient(name, number, decoder, line)


def _bounded(raw: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long its beginning, in memory that does not grow with it."""
    while line := raw.readline(CHUNK):
        yield line if line.endswith(b"\n") else _whole_line(raw, line)


def _whole_line(raw: BinaryIO, begun: bytes) -> bytes:
    """The rest of a line; where it is too long, a byte more than is allowed, and the file is at the next one."""
    line = begun + raw.readline(max(1, LONGEST_LINE + 1 - len(begun)))
    piece = line
    while len(line) > LONGEST_LINE and piece and not piece.endswith(b"\n"):
        piece = raw.readline(CHUNK)
    return line


def _patient(name: str, number: int, decoder: Decoder, line: bytes) -> Row | RowError:
    """A line that may be GBK, hold what only Python's reader accepts, or be broken at a place to be named."""
    text, encoding = decoder(line)
    try:
        return Row(name, number, json.loads(text), encoding)
    except UNREADABLE as problem:
        return malformed(name, number, text.rstrip("\r\n"), problem)


def _parquet(file: Path) -> Iterator[Row | RowError]:
    """Rows of a parquet file; a compressed one is unpacked to a temporary file first, for it is read from its end."""
    if file.suffix.lower() not in COMPRESSED:
        yield from _batches(file, file)
        return
    with tempfile.TemporaryFile() as unpacked:
        with open_bytes(file) as raw:
            shutil.copyfileobj(raw, unpacked, CHUNK)
        yield from _batches(file, unpacked)


def _batches(file: Path, source: Any) -> Iterator[Row | RowError]:
    import pyarrow
    import pyarrow.parquet

    broken = (pyarrow.ArrowException, OSError, ValueError)
    number = 0
    try:
        opened = pyarrow.parquet.ParquetFile(source)
    except broken as problem:
        yield _damaged(file, 1, problem)
        return
    try:
        for batch in opened.iter_batches(batch_size=_batch_size(opened.metadata)):
            for row in batch.to_pylist():
                number += 1
                yield Row(file.name, number, row)
    except broken as problem:
        yield _damaged(file, number + 1, problem)


def _batch_size(about: Any) -> int:
    """How many rows to hold at a time. A value may be repeated by every row: it counts as large as its column."""
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    rows = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return int(min(512, max(1, BATCH / max(rows, 1)), max(16, 4 * BATCH / max(largest, 1))))
