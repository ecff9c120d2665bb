"""Rows of files, folders and hub datasets; a row that cannot be read is yielded as a RowError in its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TextIO

from nbutils import platforms
from nbutils.data.rows import Row, RowError
from nbutils.data.texts import Kind, Problem, encoding_of, mask, short
from nbutils.errors import CourseError
from nbutils.files import SAMPLES, require_inside
from nbutils.language import tr
from nbutils.masking import describe
from nbutils.platforms import network

Formats = tuple[str, ...]
TEXT = (".jsonl", ".json", ".csv", ".tsv")
FORMATS = (*TEXT, ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")  # after the ending of a text
BUNDLED = ("assistant_en", "assistant_zh")  # in data_samples
HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<folder>[^:]+))?")
HEAD = 1 << 16  # bytes at the beginning of a file that decide about its encoding
CHUNK = 1 << 20  # bytes read at a time
LONGEST_LINE = 64 << 20  # characters, also of a csv value; a longer one would not fit many a machine's memory
LARGEST_DOCUMENT = 512 << 20  # characters of a json file
PARQUET_ROWS = 8  # at a time: each may hold a value of many megabytes
Rows = Iterator[Row | RowError]
DAMAGED = (EOFError, OSError, ValueError, NotImplementedError, zlib.error)  # of gzip, pyarrow and long lines


def read_rows(path: Path | str) -> Rows:
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
            yield _error(file, line + 1, "damaged_file", tr("the file"), seen)


def _rows_of(file: Path) -> Rows:
    form = format_of(file)
    if form in (".jsonl", ".json"):
        return _json_rows(file)
    return _table_rows(file) if form in (".csv", ".tsv") else _arrow_rows(file)


def _error(file: Path, line: int, kind: Kind, field: str, seen: str, raw: Any = None) -> RowError:
    return RowError(file.name, line, raw, (Problem(kind, field, seen),))


def _too_long(file: Path, line: int, limit: int) -> RowError:
    return _error(file, line, "long_line", tr("the row"), tr("over {mib} MiB", mib=limit >> 20))


def format_of(path: Path, formats: Formats = FORMATS) -> str:
    """The format by the name, whether compressed or not; empty if it is none of these."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
    return suffix if suffix in formats else ""


def local_path(source: str) -> Path:
    """The file or folder of a source: bundled, of this machine, or attached (Kaggle); it need not be there."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source in BUNDLED:
        return SAMPLES / source
    inputs = platforms.folders().inputs
    return platforms.find_input(inputs, source) or path


def hub_dataset(source: str, formats: Formats = FORMATS) -> re.Match[str] | None:
    """The repo and the folder of a hub dataset, if the source names one, and nothing on this machine."""
    name = HUB_NAME.fullmatch(source)
    if name is None or local_path(source).parent.exists():
        return None
    names_a_file = format_of(Path(name["repo"]), formats)
    return None if names_a_file else name


def find_files(source: str, formats: Formats = FORMATS) -> list[Path]:
    """The data files a source stands for: a file, a folder, attached data (Kaggle), a bundled or a hub dataset."""
    hub = hub_dataset(source, formats)
    if hub:
        return _download(hub["repo"], hub["folder"])
    path = local_path(source)
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = []
    for file in inside:
        hidden = any(part.startswith((".", "~$")) for part in file.relative_to(path).parts)  # ~$: a lock of Excel
        if file.is_file() and format_of(file, formats) and not hidden:
            files.append(file)
    if not files:
        raise CourseError(
            "{path} does not exist, or is no data file and holds none.",
            allowed=(
                "a file that ends in {formats} (or in .gz or .zst after that), a folder of them, or a hub dataset as "
                "owner/name"
            ),
            todo="Correct the path, or save the file in one of these formats, in UTF-8.",
            path=path.absolute(),
            formats=", ".join(formats),
        )
    if not Path(source).expanduser().is_file():  # whoever names a link means what it leads to
        require_inside(path if path.is_dir() else path.parent, files)
    return files


def _download(repo: str, folder: str | None) -> list[Path]:
    """The files of a hub dataset in the local cache."""
    import datasets

    datasets.config.HF_ENDPOINT = os.environ.get("HF_ENDPOINT") or network.HUB  # the mirror as it is now
    datasets.config.HF_HUB_OFFLINE = not network.hub_online()
    try:
        splits = datasets.load_dataset(repo, data_dir=folder).values()
    except Exception as problem:  # the errors are of several libraries, by version
        raise CourseError(
            "{repo!r} is not a local file, and the hub dataset of that name cannot be downloaded: {reason}",
            todo="Correct the name, set HF_TOKEN if it is private, or set HF_ENDPOINT to a mirror that answers.",
            repo=repo,
            reason=describe(problem).partition("\n")[0],
        ) from problem
    return [Path(file["filename"]) for rows in splits for file in rows.cache_files]


def _open(path: Path) -> Any:
    """The bytes of a file, decompressed as they are read."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), HEAD)
    if suffix == ".gz":  # pyarrow would lose the first rows of one that is cut short
        return gzip.open(path)
    return open(path, "rb", CHUNK)


def open_text(file: Path) -> TextIO:
    """A text in UTF-8, UTF-16 or GBK; bytes that are none of these become U+DCxx or U+FFFD, which no row may hold."""
    raw = _open(file)
    encoding = encoding_of(raw.peek(HEAD)[:HEAD])
    errors = "replace" if encoding == "utf-16" else "surrogateescape"
    return io.TextIOWrapper(raw, encoding, errors, newline="\n")


def _lines(text: TextIO) -> Iterator[str]:
    """The lines of a text, in bounded memory."""
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise ValueError(tr("a line has {count:,} characters or more", count=LONGEST_LINE))
        yield line


def _json_rows(file: Path) -> Rows:
    """The rows of an array, or one of each line, whatever the name of the file says."""
    with open_text(file) as text:
        is_array = text.readline(HEAD).lstrip().startswith("[")
    with open_text(file) as text:
        if is_array:
            yield from _array_rows(file, text.read(LARGEST_DOCUMENT + 1))
        else:
            yield from _json_lines(file, text)


def _array_rows(file: Path, document: str) -> Rows:
    if len(document) > LARGEST_DOCUMENT:
        yield _too_long(file, 1, LARGEST_DOCUMENT)
        return
    try:
        rows = json.loads(document)
    except (ValueError, RecursionError) as problem:
        if getattr(problem, "msg", "") == "Extra data":  # the first row of several is an array
            yield from _json_lines(file, io.StringIO(document))
        else:
            line = getattr(problem, "lineno", 1)
            yield _malformed(file, line, document.splitlines()[line - 1], problem)
        return
    for number, row in enumerate(rows, start=1):
        yield Row(file.name, number, row)


def _json_lines(file: Path, text: TextIO) -> Rows:
    for number, line in enumerate(_lines(text), start=1):
        line = line.strip()
        try:
            if line:
                yield Row(file.name, number, json.loads(line))
        except (ValueError, RecursionError) as problem:
            yield _malformed(file, number, line, problem)


def _malformed(file: Path, line: int, text: str, problem: Exception) -> RowError:
    """A row that is no JSON, with the place where the reader stopped."""
    place = tr("character {column}", column=getattr(problem, "colno", 1))
    seen = f"{getattr(problem, 'msg', type(problem).__name__)}: {mask(text[:400])[:60]}"
    return _error(file, line, "malformed_json", place, seen, raw=text[:2000])


def _table_rows(file: Path) -> Rows:
    """The rows under the names of the first line."""
    csv.field_size_limit(LONGEST_LINE)
    with open_text(file) as text:
        lines = _lines(text)
        first = next(lines, "")
        sign = max("\t;,", key=first.count)  # Excel has ; in much of Europe
        reader = csv.reader(chain([first], lines), delimiter=sign, strict=True)
        names: list[str] = []
        end = 0  # the line on which the last row ended
        try:
            for values in reader:
                while values and not values[-1].strip():  # Excel goes on with empty columns, and then with empty rows
                    values.pop()
                if not names:
                    names = values
                    if len(set(names)) < len(names):
                        raise csv.Error(tr("a name is twice in the header"))
                elif len(values) > len(names):
                    counts = tr("{count} values for {width} columns", count=len(values), width=len(names))
                    yield _error(file, end + 1, "malformed_csv", tr("the line"), f"{counts}: {short(values)}")
                elif values:
                    yield Row(file.name, end + 1, dict(zip_longest(names, values, fillvalue="")))
                end = reader.line_num
        except csv.Error as problem:
            seen = tr("{problem}; the rest is not read", problem=problem)
            yield _error(file, end + 1, "malformed_csv", tr("the line"), seen)


def _arrow_rows(file: Path) -> Rows:
    """Rows of a parquet file, or of a file that `datasets` wrote; no long ones become Python's objects together."""
    import pyarrow.ipc
    import pyarrow.parquet

    number = 0
    with open(file, "rb") as raw:
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
                    number += 1
                    yield _too_long(file, number, LONGEST_LINE)
                    continue
                for row in rows.to_pylist():
                    number += 1
                    yield Row(file.name, number, row)


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text file."""
    with open_text(file) as text:
        yield from text
