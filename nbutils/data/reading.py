"""Raw rows from files: jsonl, json, csv, tsv and parquet, one at a time, each with its file and line.

Not here: what a row must look like (rows) and what becomes of it (splits). A row that cannot be read is yielded
as a RowError in its place, so that a bad line never hides the next one.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from nbutils import platforms
from nbutils.data.raw import Problem, Row, RowError
from nbutils.errors import CourseError

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
FORMATS_TEXT = "a .jsonl, .json, .csv, .tsv or .parquet file, or a folder of them"
CHUNK = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
LARGEST_ROW = 16 << 20  # characters; beyond this a row of a json array counts as broken, not as unfinished


def files_of(source: str) -> list[Path]:
    """The data files a path stands for, also below what is attached (Kaggle); a folder gives all of its own."""
    path = Path(source).expanduser()
    if not path.exists():
        path = platforms.find_input(platforms.folders(platforms.detect()).inputs, source) or path
    if not path.exists():
        raise _missing(source, path)
    if path.is_file() and path.suffix.lower() not in FORMATS:
        raise CourseError(
            f"{path} ends in {path.suffix or 'nothing'!r}.",
            FORMATS_TEXT,
            "export it in one of these formats (Excel: CSV UTF-8)",
        )
    found = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix.lower() in FORMATS)
    if not found:
        held = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise CourseError(f"The folder {path} holds no data file (it holds: {held}).", FORMATS_TEXT, "put one in it")
    return found


def _missing(source: str, path: Path) -> CourseError:
    """The error for a path that is not there; `owner/name` is taken for a dataset of the hub."""
    if (
        re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source)
        and path.suffix.lower() not in FORMATS
        and not path.parent.exists()
    ):
        return CourseError(
            f"{source!r} is no file here; it looks like a hub dataset, which this lesson does not download.",
            FORMATS_TEXT,
            f'save it to a file first: datasets.load_dataset("{source}", split="train").to_json("my_data.jsonl"), '
            "then give that path",
        )
    near = sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in FORMATS) if path.parent.is_dir() else []
    beside = f"; beside it: {', '.join(near[:8])}" if near else ""
    return CourseError(
        f"There is no {source!r} (looked at {path.absolute()}{beside}).", FORMATS_TEXT, "correct the path"
    )


def read_rows(path: Path | str) -> Iterator[Row | RowError]:
    """Every row of one file, or of each file of a folder in turn."""
    for file in files_of(str(path)):
        if file.suffix.lower() == ".parquet":
            yield from _parquet(file)
            continue
        _refuse_utf16(file)
        # surrogateescape keeps bytes that are not UTF-8 inside their own row, where `rows` reports them
        table = file.suffix.lower() in (".csv", ".tsv")
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="" if table else "\n") as text:
            if table:
                yield from _csv(file, text)
            else:
                yield from _array(file, text) if _first_character(text) == "[" else _lines(file, text)


def _refuse_utf16(file: Path) -> None:
    with open(file, "rb") as raw:
        if raw.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise CourseError(f"{file} is UTF-16 text.", "UTF-8 text", "save it again with the encoding UTF-8")


def _first_character(text: TextIO) -> str:
    """The first character that is no whitespace; the file is left at its beginning."""
    found = ""
    while not found and (chunk := text.read(1024)):
        found = chunk.strip()[:1]
    text.seek(0)
    return found


def _lines(file: Path, text: TextIO) -> Iterator[Row | RowError]:
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue
        try:
            yield Row(file.name, number, json.loads(line))
        except (json.JSONDecodeError, RecursionError) as problem:
            yield _malformed(file, number, line.rstrip("\r\n"), problem)


def _malformed(file: Path, line: int, text: str, problem: Exception, start: int = 0) -> RowError:
    """A row that is not JSON, with the place where reading stopped."""
    at = min(getattr(problem, "pos", start) - start, len(text))
    near = text[max(0, at - 20) : at + 20]
    todo = f"{getattr(problem, 'msg', 'nested too deeply')}: mend it, or write the file with json.dumps"
    if re.match(r"\s*\{\s*'", text):
        todo = "JSON wants double quotes: this is a Python dict, write it with json.dumps"
    return RowError(file.name, line, text[:2000], (Problem("malformed_json", f"character {at + 1}", near, todo),))


def _array(file: Path, text: TextIO) -> Iterator[Row | RowError]:
    """The elements of one JSON array, decoded from a window that moves over the file."""
    window, decoder, more = text.read(CHUNK), json.JSONDecoder(), True
    at, line = window.index("[") + 1, 1 + window.count("\n", 0, window.index("["))
    while True:
        start = _BETWEEN.match(window, at).end()  # type: ignore[union-attr]
        line += window.count("\n", at, start)
        at = start
        if window[at : at + 1] == "]" or (at == len(window) and not more):
            return
        try:
            value, end = decoder.raw_decode(window, at)
        except (json.JSONDecodeError, RecursionError) as problem:
            if more and len(window) - at < LARGEST_ROW:
                chunk = text.read(max(CHUNK, len(window) - at))
                more, window, at = bool(chunk), window[at:] + chunk, 0
                continue
            end = _next_element(window, at)
            yield _malformed(file, line, window[at:end].rstrip(" \r\n,]"), problem, at)
        else:
            yield Row(file.name, line, value)
        line += window.count("\n", at, end)
        at = end


def _next_element(window: str, at: int) -> int:
    """Where a broken element of an array probably ends: at the next line that opens one at the same depth."""
    inner = re.compile(r'\n([ \t]*)"').search(window, at)
    depth = len(inner[1]) if inner else LARGEST_ROW  # pretty-printed: elements open further left than their keys
    for found in re.compile(r"\n([ \t]*)\{").finditer(window, at):
        if len(found[1]) < depth:
            return found.start() + 1
    return len(window)


def _csv(file: Path, text: TextIO) -> Iterator[Row | RowError]:
    csv.field_size_limit(LARGEST_ROW)
    reader = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
    header = next(reader, [])
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield RowError(file.name, line, None, (Problem("malformed_csv", "-", str(problem), "mend the quoting"),))
            continue
        if len(values) == len(header):
            yield Row(file.name, line, dict(zip(header, values, strict=True)))
        elif values:
            todo = "as many values as the header has names; quote values that hold a comma or a line break"
            seen = f"{len(values)} values for {len(header)} columns"
            yield RowError(file.name, line, values, (Problem("malformed_csv", "-", seen, todo),))


def _parquet(file: Path) -> Iterator[Row | RowError]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as problem:
        raise CourseError(f"{file} cannot be read: {problem}", "a whole parquet file", "copy it again") from problem
    number = 0
    for batch in table.iter_batches(batch_size=512):
        for raw in batch.to_pylist():
            number += 1
            yield Row(file.name, number, raw)
