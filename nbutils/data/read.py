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
from typing import Any, BinaryIO, cast

import orjson

from nbutils import platforms
from nbutils.data.rows import GBK, Kind, Problem, Row, RowError, decode, excerpt, is_gbk, layout_of
from nbutils.errors import CourseError
from nbutils.files import SAMPLES, require_inside
from nbutils.language import tr
from nbutils.platforms import network

TEXT = (".jsonl", ".json", ".csv", ".tsv")
BINARY = (".parquet", ".arrow")
FORMATS = (*TEXT, *BINARY)
COMPRESSED = (".gz", ".zst")
HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<folder>[^:]+))?")
HEAD, CHUNK = 1 << 16, 1 << 20  # bytes at the beginning of a file that decide about its encoding; read at a time
LONGEST_LINE = 64 << 20  # bytes, also of a parquet row; a longer one would not fit many a machine's memory
LARGEST_DOCUMENT = 512 << 20  # bytes of a json file
LARGEST_VALUE = 16 << 20  # characters in a csv file
PARQUET_ROWS = 8  # at a time: each may hold a value of many megabytes
DAMAGED = (EOFError, OSError, ValueError, NotImplementedError, zlib.error)  # of gzip and pyarrow
CSV_TODO = 'as many values as the header has names; quote values that hold a comma or a line break ("" for a quote)'


def read_rows(path: Path | str) -> Iterator[Row | RowError]:
    """Every row of one file, or of each file of a folder or hub dataset in turn."""
    readers = {".jsonl": _document, ".json": _document, ".csv": _table, ".tsv": _table}
    for file in find_files(str(path)):
        line = 0
        try:
            for row in readers.get(format_of(file), _arrow)(file):
                line = row.line
                yield row
        except DAMAGED as problem:
            if getattr(problem, "errno", None):  # the disk, not the file
                raise
            seen = tr("the file is damaged or cut short: {problem}", problem=str(problem).partition("\n")[0])
            todo = tr("copy or download the file again")
            yield _error(file, line + 1, None, "damaged_file", tr("the file"), seen, todo)


def _error(file: Path, line: int, raw: Any, kind: Kind, *texts: str) -> RowError:
    return RowError(file.name, line, raw, (Problem(kind, *texts),))


def too_long() -> Problem:
    """The problem of a row that is longer than the longest line."""
    return Problem("long_line", tr("the row"), tr("over {mib} MiB", mib=LONGEST_LINE >> 20), tr("split it"))


def format_of(path: Path, formats: tuple[str, ...] = FORMATS) -> str:
    """The format by the name, whether compressed or not; empty if it is none of these."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return suffixes[-1] if suffixes and suffixes[-1] in formats else ""


def bundled(name: str) -> Path | None:
    """The folder of a dataset that comes with the course, if this is its name and no file of the learner's."""
    named = re.fullmatch(r"\w+", name) and not Path(name).exists() and (SAMPLES / name / "train.jsonl").is_file()
    return SAMPLES / name if named else None


def find_files(source: str, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """The data files a source stands for: a file, a folder, attached data (Kaggle), a bundled or a hub dataset."""
    path = bundled(source) or Path(source).expanduser()
    is_named = path.is_file()
    if not path.exists():
        path = platforms.find_input(platforms.folders(platforms.detect()).inputs, source) or path
    name = HUB_NAME.fullmatch(source)
    if name and not path.exists() and not path.parent.exists() and not format_of(Path(name["repo"]), formats):
        import datasets

        datasets.config.HF_ENDPOINT = os.environ.get("HF_ENDPOINT") or network.HUB  # the mirror as it is now
        datasets.config.HF_HUB_OFFLINE = not network.hub_online()
        try:
            loaded = datasets.load_dataset(name["repo"], data_dir=name["folder"])
            return [Path(file["filename"]) for rows in loaded.values() for file in rows.cache_files]
        except Exception as problem:  # the errors are of several libraries, by version
            reason = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
            raise CourseError(
                tr(
                    "{repo!r} is not a local file, and the hub dataset of that name cannot be downloaded: {reason}",
                    repo=name["repo"],
                    reason=reason,
                ),
                allowed=tr("a hub dataset as owner/name or owner/name:folder, or a file of your own"),
                todo=tr(
                    "Correct the name, set HF_TOKEN if it is private, or set HF_ENDPOINT to a mirror that answers."
                ),
            ) from problem
    if not path.exists():
        raise _no_data_file(path.absolute(), tr("does not exist"), formats)
    below = sorted(file.relative_to(path) for file in path.rglob("*")) if path.is_dir() else [Path()]
    names = [name for name in below if not any(part.startswith((".", "~$")) for part in name.parts)]  # ~$: Excel's lock
    if not (found := [path / name for name in names if (path / name).is_file() and format_of(path / name, formats)]):
        held = ", ".join(map(str, names[:8]))
        reason = tr("holds {names}", names=held) if held else tr("holds no data file")
        reason = reason if path.is_dir() else tr("is no regular file, or of a format the course does not read")
        raise _no_data_file(path, reason, formats)
    if not is_named:  # whoever names a link means what it leads to
        require_inside(path if path.is_dir() else path.parent, found)
    return found


def _no_data_file(path: Path, reason: str, formats: tuple[str, ...]) -> CourseError:
    return CourseError(
        tr("{path} {reason}.", path=path, reason=reason),
        allowed=tr(
            "a file that ends in {formats} (or in .gz or .zst after that), a folder of them, or a hub dataset as "
            "owner/name",
            formats=", ".join(formats),
        ),
        todo=tr("Correct the path, or save the file in one of these formats, in UTF-8."),
    )


def _open(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed as they are read, text as UTF-8 without a byte order mark."""
    if path.suffix.lower() == ".zst":
        import pyarrow

        raw = cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), HEAD))
    else:  # pyarrow would lose the first rows of a .gz that is cut short
        packed = path.suffix.lower() == ".gz"
        raw = cast(BinaryIO, gzip.open(path, "rb")) if packed else open(path, "rb", CHUNK)  # noqa: SIM115
    if raw.peek(3)[:3] == codecs.BOM_UTF8:  # type: ignore[attr-defined]
        raw.read(3)
    utf16 = raw.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # type: ignore[attr-defined]
    if utf16 or (path.suffix.lower() in COMPRESSED and format_of(path) in BINARY):  # parquet is not read in order
        with codecs.EncodedFile(raw, "utf-8", "utf-16", "replace") if utf16 else raw as source:
            shutil.copyfileobj(source, copy := tempfile.TemporaryFile(), CHUNK)  # noqa: SIM115
        copy.seek(0)
        return cast(BinaryIO, copy)
    return raw


def _lines(raw: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long a byte more than is allowed."""
    while line := raw.readline(LONGEST_LINE + 1):
        yield line
        rest = line
        while rest and len(line) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = raw.readline(CHUNK)


def _json_lines(file: Path) -> Iterator[Row | RowError]:
    """One row per line; what orjson refuses may be GBK, or what only Python's reader accepts."""
    with _open(file) as raw:
        gbk = is_gbk(raw.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]
        for number, line in enumerate(_lines(raw), start=1):
            if len(line) > LONGEST_LINE:
                yield RowError(file.name, number, None, (too_long(),))
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
    at, column = getattr(problem, "pos", 0), getattr(problem, "colno", 1)
    wrong, seen = getattr(problem, "msg", "") or tr("nested too deeply"), " ".join(excerpt(text, at).split())
    todo = tr("{wrong}: fix it, or write the file with json.dumps", wrong=wrong)
    return _error(file, line, text[:2000], "malformed_json", tr("character {column}", column=column), seen, todo)


def _document(file: Path) -> Iterator[Row | RowError]:
    """The rows of an array, of {"data": [...]}, or one row; what has one object on each line is read line by line."""
    with _open(file) as raw:
        lines = format_of(file) == ".jsonl" and raw.peek(HEAD).lstrip()[:1] != b"["  # type: ignore[attr-defined]
        content = b"" if lines else raw.read(LARGEST_DOCUMENT + 1)  # nothing is no JSON, and goes on below
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
        if lines or getattr(problem, "msg", "") == "Extra data":
            yield from _json_lines(file)
        else:
            yield _malformed(file, getattr(problem, "lineno", 1), text, problem)
        return
    if isinstance(value, dict) and isinstance(layout_of(tuple(value)), Problem):  # no row
        lists = [held for held in value.values() if isinstance(held, list) and held and isinstance(held[0], dict)]
        value = lists[0] if len(lists) == 1 else value
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield Row(file.name, number, row, encoding)


def _table(file: Path) -> Iterator[Row | RowError]:
    """The rows under the names of the first line; Excel separates by ; in much of Europe."""
    csv.field_size_limit(LARGEST_VALUE)
    with _open(file) as raw:
        gbk = is_gbk(raw.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]
        lines = (decode(line, gbk)[0] for line in _lines(raw))
        first = next(lines, "")
        if first.startswith("PK\3\4"):  # a zip archive, as .xlsx files are
            seen = tr("it begins with PK: it looks like an Excel workbook, whatever its name")
            todo = tr("open it in Excel and save it as CSV UTF-8")
            yield _error(file, 1, None, "malformed_csv", tr("the file"), seen, todo)
            return
        delimiter = "\t" if format_of(file) == ".tsv" else next((sign for sign in ",;\t" if sign in first), ",")
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        line = 1
        try:
            header = next(reader, [])
            names = [name for name in header if name.strip()]
            if len(set(names)) < len(names):
                raise csv.Error(tr("a name is twice in the header"))
            width = header.index(names[-1]) + 1 if names else 0
            line = reader.line_num + 1
            for values in reader:
                if not any(map(str.strip, values[width:])):  # Excel goes on with empty columns after the last name
                    values = values[:width]
                filled = any(map(str.strip, values))
                if filled and len(values) == width:
                    row = [pair for pair in zip(header, values, strict=False) if any(map(str.strip, pair))]
                    if len(dict(row)) < len(row):
                        raise csv.Error(tr("two columns without a name hold values"))
                    yield Row(file.name, line, dict(row), GBK if gbk else "")
                elif filled:
                    some = {"count": len(values), "width": width, "text": excerpt(",".join(values), 0, 40)}
                    seen = tr("{count} values for {width} columns: {text}", **some)
                    yield _error(file, line, values, "malformed_csv", tr("the line"), seen, tr(CSV_TODO))
                line = reader.line_num + 1
        except csv.Error as problem:
            seen = tr("{problem}; the rest is not read", problem=problem)
            yield _error(file, line, None, "malformed_csv", tr("the line"), seen, tr(CSV_TODO))


def _arrow(file: Path) -> Iterator[Row | RowError]:
    """Rows of a parquet file, or of a file that `datasets` wrote; no long ones become Python's objects together."""
    import pyarrow.ipc
    import pyarrow.parquet

    with _open(file) as raw:
        if format_of(file) == ".arrow":
            batches = pyarrow.ipc.open_stream(raw)
        else:  # so few rows come faster without threads
            batches = pyarrow.parquet.ParquetFile(raw).iter_batches(PARQUET_ROWS, use_threads=False)
        line = 0
        for batch in batches:
            together = batch.nbytes * PARQUET_ROWS <= LONGEST_LINE  # otherwise one by one: all may share one value
            for rows in [batch] if together else (batch.slice(row, 1) for row in range(batch.num_rows)):
                if rows.nbytes > LONGEST_LINE:
                    line += 1
                    yield RowError(file.name, line, None, (too_long(),))
                    continue
                for row in rows.to_pylist():
                    line += 1
                    yield Row(file.name, line, row)


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text file; bytes that are neither UTF-8 nor GBK become U+DCxx."""
    with _open(file) as raw:
        gbk = is_gbk(raw.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]
        yield from (decode(line, gbk)[0] for line in raw)
