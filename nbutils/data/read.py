"""Rows of files, folders and hub datasets; a row that cannot be read is yielded as a RowError in its place."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import orjson

from nbutils import platforms
from nbutils.data.rows import Row, RowError
from nbutils.data.texts import GBK, Problem, decode, is_gbk, mask, short
from nbutils.errors import CourseError
from nbutils.files import SAMPLES, require_inside
from nbutils.language import tr
from nbutils.platforms import network

TEXT = (".jsonl", ".json", ".csv", ".tsv")
BINARY = (".parquet", ".arrow")
FORMATS = (*TEXT, *BINARY)
COMPRESSED = (".gz", ".zst")
HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<folder>[^:]+))?")
HEAD = 1 << 16  # bytes at the beginning of a file that decide about its encoding
CHUNK = 1 << 20  # bytes read at a time
LONGEST_LINE = 64 << 20  # bytes, also of a parquet row; a longer one would not fit many a machine's memory
LARGEST_DOCUMENT = 512 << 20  # bytes of a json file
LARGEST_VALUE = 16 << 20  # characters in a csv file
PARQUET_ROWS = 8  # at a time: each may hold a value of many megabytes
DAMAGED = (EOFError, OSError, ValueError, NotImplementedError, zlib.error)  # of gzip and pyarrow


def read_rows(path: Path | str) -> Iterator[Row | RowError]:
    """Every row of one file, or of each file of a folder or hub dataset in turn.

    Example:
        `for row in read_rows("my_rows.jsonl"): print(row.line, row.raw)`
    """
    for file in find_files(str(path)):
        line = 0
        try:
            for row in _rows_of(file):
                line = row.line
                yield row
        except DAMAGED as problem:
            if getattr(problem, "errno", None):  # the disk, not the file
                raise
            seen = tr("the file is damaged or cut short: {problem}", problem=str(problem).partition("\n")[0])
            yield _error(file, line + 1, Problem("damaged_file", tr("the file"), seen))


def _rows_of(file: Path) -> Iterator[Row | RowError]:
    form = format_of(file)
    if form in (".jsonl", ".json"):
        return _json_rows(file)
    return _table_rows(file) if form in (".csv", ".tsv") else _arrow_rows(file)


def _error(file: Path, line: int, problem: Problem, raw: Any = None) -> RowError:
    return RowError(file.name, line, raw, (problem,))


def too_long() -> Problem:
    """The problem of a row that is longer than the longest line."""
    return Problem("long_line", tr("the row"), tr("over {mib} MiB", mib=LONGEST_LINE >> 20))


def format_of(path: Path, formats: tuple[str, ...] = FORMATS) -> str:
    """The format by the name, whether compressed or not; empty if it is none of these."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
    return suffix if suffix in formats else ""


def bundled(name: str) -> Path | None:
    """The folder of a dataset that comes with the course, if this is its name and no file of the learner's."""
    if not re.fullmatch(r"\w+", name) or Path(name).exists():
        return None
    folder = SAMPLES / name
    return folder if (folder / "train.jsonl").is_file() else None


def find_files(source: str, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """The data files a source stands for: a file, a folder, attached data (Kaggle), a bundled or a hub dataset."""
    path = bundled(source) or Path(source).expanduser()
    named = path.is_file()
    if not path.exists():
        inputs = platforms.folders(platforms.detect()).inputs
        path = platforms.find_input(inputs, source) or path
    hub = HUB_NAME.fullmatch(source)
    if hub and not path.parent.exists() and not format_of(Path(hub["repo"]), formats):
        return _download(hub["repo"], hub["folder"])
    files = [file for file in _below(path) if file.is_file() and format_of(file, formats)]
    if not files:
        reason = tr("is no data file, and holds none") if path.exists() else tr("does not exist")
        raise CourseError(
            tr("{path} {reason}.", path=path.absolute(), reason=reason),
            allowed=tr(
                "a file that ends in {formats} (or in .gz or .zst after that), a folder of them, or a hub dataset as "
                "owner/name",
                formats=", ".join(formats),
            ),
            todo=tr("Correct the path, or save the file in one of these formats, in UTF-8."),
        )
    if not named:  # whoever names a link means what it leads to
        require_inside(path if path.is_dir() else path.parent, files)
    return files


def _below(path: Path) -> Iterator[Path]:
    """The path itself, or everything below a folder but hidden files and Excel's locks."""
    if not path.is_dir():
        yield path
        return
    for name in sorted(file.relative_to(path) for file in path.rglob("*")):
        if not any(part.startswith((".", "~$")) for part in name.parts):
            yield path / name


def _download(repo: str, folder: str | None) -> list[Path]:
    """The files of a hub dataset in the local cache."""
    import datasets

    datasets.config.HF_ENDPOINT = os.environ.get("HF_ENDPOINT") or network.HUB  # the mirror as it is now
    datasets.config.HF_HUB_OFFLINE = not network.hub_online()
    try:
        splits = datasets.load_dataset(repo, data_dir=folder).values()
    except Exception as problem:  # the errors are of several libraries, by version
        first_line = str(problem).partition("\n")[0]
        raise CourseError(
            tr(
                "{repo!r} is not a local file, and the hub dataset of that name cannot be downloaded: {reason}",
                repo=repo,
                reason=f"{type(problem).__name__}: {first_line}",
            ),
            allowed=tr("a hub dataset as owner/name or owner/name:folder, or a file of your own"),
            todo=tr("Correct the name, set HF_TOKEN if it is private, or set HF_ENDPOINT to a mirror that answers."),
        ) from problem
    return [Path(file["filename"]) for rows in splits for file in rows.cache_files]


def _open(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed as they are read, text as UTF-8 without a byte order mark."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        raw = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), HEAD)
    elif suffix == ".gz":  # pyarrow would lose the first rows of one that is cut short
        raw = cast(io.BufferedReader, gzip.open(path, "rb"))  # noqa: SIM115
    else:
        raw = io.BufferedReader(io.FileIO(path), CHUNK)
    if raw.peek(3).startswith(codecs.BOM_UTF8):
        raw.read(3)
    if raw.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _copy(codecs.EncodedFile(raw, "utf-8", "utf-16", "replace"))
    if suffix in COMPRESSED and format_of(path) in BINARY:  # parquet is not read in order
        return _copy(raw)
    return raw


def _copy(source: Any) -> io.BufferedReader:
    """What a stream holds, in a file that is gone when it is closed."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with source:
        shutil.copyfileobj(source, copy, CHUNK)
    copy.seek(0)
    return cast(io.BufferedReader, copy)


def _lines(raw: io.BufferedReader) -> Iterator[bytes]:
    """The lines of a file; of one that is too long a byte more than is allowed."""
    while line := raw.readline(LONGEST_LINE + 1):
        yield line
        rest = line
        while len(line) > LONGEST_LINE and rest and not rest.endswith(b"\n"):
            rest = raw.readline(CHUNK)


def _json_rows(file: Path) -> Iterator[Row | RowError]:
    """The rows of an array, of {"data": [...]}, or one row; what has one object on each line is read line by line."""
    with _open(file) as raw:
        if format_of(file) == ".jsonl" and not raw.peek(HEAD).lstrip().startswith(b"["):
            yield from _json_lines(file, raw)
            return
        content = raw.read(LARGEST_DOCUMENT + 1)
    if len(content) > LARGEST_DOCUMENT:
        raise CourseError(
            tr(
                "{file} is larger than {limit} MiB, and a .json document or an array is read whole.",
                file=file,
                limit=LARGEST_DOCUMENT >> 20,
            ),
            todo=tr("Save it as .jsonl, one row on each line."),
        )
    text, encoding = decode(content, is_gbk(content[:HEAD]))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        if getattr(problem, "msg", "") == "Extra data":
            with _open(file) as raw:
                yield from _json_lines(file, raw)
        else:
            line = getattr(problem, "lineno", 1)
            yield _malformed(file, line, text.splitlines()[line - 1], problem)
        return
    if isinstance(value, dict):
        value = value.get("data", [value])
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield Row(file.name, number, row, encoding)


def _json_lines(file: Path, raw: io.BufferedReader) -> Iterator[Row | RowError]:
    """One row per line; what orjson refuses may be GBK, or what only Python's reader accepts."""
    gbk = is_gbk(raw.peek(HEAD)[:HEAD])
    for number, line in enumerate(_lines(raw), start=1):
        if len(line) > LONGEST_LINE:
            yield _error(file, number, too_long())
            continue
        try:
            yield Row(file.name, number, orjson.loads(line))
        except orjson.JSONDecodeError:
            text, encoding = decode(line.strip(), gbk)
            try:
                if text:
                    yield Row(file.name, number, json.loads(text), encoding)
            except (ValueError, RecursionError) as problem:
                yield _malformed(file, number, text, problem)


def _malformed(file: Path, line: int, text: str, problem: Exception) -> RowError:
    """A row that is no JSON, with what stands where the reader stopped."""
    column = getattr(problem, "colno", 1)
    seen = f"{getattr(problem, 'msg', type(problem).__name__)}: {mask(text[:400])[:60]}"
    return _error(file, line, Problem("malformed_json", tr("character {column}", column=column), seen), text[:2000])


def _table_rows(file: Path) -> Iterator[Row | RowError]:
    """The rows under the names of the first line."""
    csv.field_size_limit(LARGEST_VALUE)
    with _open(file) as raw:
        gbk = is_gbk(raw.peek(HEAD)[:HEAD])
        lines = (decode(line, gbk)[0] for line in _lines(raw))
        first = next(lines, "")
        if first.startswith("PK\3\4"):  # a zip archive, as .xlsx files are
            raise CourseError(
                tr("{file} begins with PK: it looks like an Excel workbook, whatever its name.", file=file),
                todo=tr("Open it in Excel and save it as CSV UTF-8."),
            )
        tabs = format_of(file) == ".tsv"
        sign = "\t" if tabs else next((sign for sign in ",;\t" if sign in first), ",")  # Excel has ; in much of Europe
        reader = csv.reader(chain([first], lines), delimiter=sign, strict=True)
        line = 1
        try:
            header = _without_blanks(next(reader, []), 0)
            if len(set(header)) < len(header):
                raise csv.Error(tr("a name is twice in the header"))
            line = reader.line_num + 1
            for values in reader:
                first_line = line
                line = reader.line_num + 1
                values = _without_blanks(values, len(header))
                if len(values) == len(header):
                    row = dict(zip(header, values, strict=True))
                    yield Row(file.name, first_line, row, GBK if gbk else "")
                elif values:
                    counts = tr("{count} values for {width} columns", count=len(values), width=len(header))
                    yield _bad_line(file, first_line, f"{counts}: {short(values)}")
        except csv.Error as problem:
            yield _bad_line(file, line, tr("{problem}; the rest is not read", problem=problem))


def _without_blanks(values: list[str], width: int) -> list[str]:
    """The values; Excel goes on with empty columns after the last name, and with empty rows after the last row."""
    if not any(map(str.strip, values)):
        return []
    while len(values) > width and not values[-1].strip():
        values.pop()
    return values


def _bad_line(file: Path, line: int, seen: str) -> RowError:
    return _error(file, line, Problem("malformed_csv", tr("the line"), seen))


def _arrow_rows(file: Path) -> Iterator[Row | RowError]:
    """Rows of a parquet file, or of a file that `datasets` wrote; no long ones become Python's objects together."""
    import pyarrow.ipc
    import pyarrow.parquet

    line = 0
    with _open(file) as raw:
        if format_of(file) == ".arrow":
            batches = pyarrow.ipc.open_stream(raw)
        else:  # so few rows come faster without threads
            batches = pyarrow.parquet.ParquetFile(raw).iter_batches(PARQUET_ROWS, use_threads=False)
        for batch in batches:
            together = batch.nbytes * PARQUET_ROWS <= LONGEST_LINE  # otherwise one by one: all may share one value
            size = max(batch.num_rows, 1) if together else 1  # a batch may be empty
            for start in range(0, batch.num_rows, size):
                rows = batch.slice(start, size)
                if rows.nbytes > LONGEST_LINE:
                    line += 1
                    yield _error(file, line, too_long())
                    continue
                for row in rows.to_pylist():
                    line += 1
                    yield Row(file.name, line, row)


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text file; bytes that are neither UTF-8 nor GBK become U+DCxx."""
    with _open(file) as raw:
        gbk = is_gbk(raw.peek(HEAD)[:HEAD])
        for line in raw:
            yield decode(line, gbk)[0]
