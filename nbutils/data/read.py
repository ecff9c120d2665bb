"""Rows of files, folders and hub datasets: jsonl, json, csv, tsv and parquet, also as .gz and .zst.

Memory does not grow with the file. A row that cannot be read is yielded as a RowError in its place; where the rest of a
file cannot be told from the fault (a broken JSON array, a quote that is not closed), that is the last one.
"""

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
from functools import partial
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, cast

import orjson

from nbutils import platforms
from nbutils.data.columns import LISTS, layout_of
from nbutils.data.text import GBK, HEAD, Decoder, Problem, Row, RowError, excerpt
from nbutils.errors import CourseError
from nbutils.masking import mask_secrets
from nbutils.paths import SAMPLES
from nbutils.platforms import network

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".zst")
ENDINGS = tuple(ending + packed for ending in FORMATS for packed in ("", *COMPRESSED))
NOT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")  # what datasets writes beside
HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<inside>[^:]+))?")
CHUNK = 1 << 20
LONGEST_LINE = 64 << 20  # bytes; a longer one is no row, and would not fit many a machine's memory
_BETWEEN = re.compile(r"[\s,]*")
LARGEST_ROW = 16 << 20  # characters of a row in a json or csv file
BATCH = 64 << 20  # bytes of parquet at a time
UNREADABLE = (ValueError, RecursionError)  # of text that is no JSON, has a number of 5,000 digits, or is too deep
DAMAGED = (EOFError, OSError, ValueError, NotImplementedError, zlib.error)  # of gzip and pyarrow
CSV_TODO = 'as many values as the header has names; quote values that hold a comma or a line break ("" for a quote)'
UNSTATED = "unstated"


def read_rows(path: Path | str) -> Iterator[Row | RowError]:
    """Every row of one file, or of each file of a folder or hub dataset in turn."""
    for file in find_files(str(path)):
        line = 0
        try:
            for row in _parquet(file) if format_of(file) == ".parquet" else _text(file):
                line = row.line
                yield row
        except DAMAGED as problem:
            if getattr(problem, "errno", None):  # the disk, not the file
                raise
            seen = f"the file is damaged or cut short: {(str(problem).splitlines() or [''])[0]}"
            todo = "copy or download the file again" + "; the rows before this place were read" * (line > 0)
            yield _error(file, line + 1, None, "damaged_file", "-", seen, todo)


def _error(file: Path, line: int, raw: Any, *problem: str) -> RowError:
    return RowError(file.name, line, raw, (Problem(*problem),))


def format_of(path: PurePath) -> str:
    """The format by the name, whether compressed or not; empty if it is none the course reads."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS and path.name.lower() not in NOT_ROWS else ""


def split_name(path: PurePath) -> str:
    """The name without endings and shard numbers: `test` for test-00000-of-00001.parquet and test.jsonl.gz."""
    return re.sub(r"(-\d{5}-of-\d{5}(-[0-9a-f]+)?)?\.(jsonl?|csv|tsv|parquet)(\.gz|\.zst)?$", "", path.name, flags=re.I)


def bundled(name: str) -> Path | None:
    """The folder of a dataset that comes with the course, if this is its name and no file of the learner's."""
    named = re.fullmatch(r"\w+", name) and not Path(name).exists() and (SAMPLES / name / "train.jsonl").is_file()
    return SAMPLES / name if named else None


def find_files(source: str) -> list[Path]:
    """The data files a source stands for: a file, a folder, attached data (Kaggle), a bundled or a hub dataset."""
    path = bundled(source) or Path(source).expanduser()
    if not path.exists():
        path = platforms.find_input(platforms.folders(platforms.detect()).inputs, source) or path
    name = HUB_NAME.fullmatch(source)
    if not path.exists() and name and not format_of(Path(name["repo"])) and not path.parent.exists():
        path = _download(name["repo"], name["inside"] or "")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and format_of(file))
        if not files:
            inner = sorted({f"{file.relative_to(path).parts[0]}/" for file in path.rglob("*") if format_of(file)})
            held = inner or sorted(file.name for file in path.iterdir())
            raise CourseError("data.folder_without_rows", folder=path, held=", ".join(held[:8]) or "nothing")
        return files
    if not path.exists():
        beside = sorted(file.name for file in path.parent.iterdir() if format_of(file)) if path.parent.is_dir() else []
        raise CourseError("data.no_such_file", path=path.absolute(), beside=", ".join(beside[:8]) or "no data file")
    if not path.is_file() or not format_of(path):
        raise CourseError("data.unknown_format", path=path, ending=path.suffix if path.is_file() else "no plain file")
    return [path]


def _download(repo: str, inside: str) -> Path:
    """The local folder (or file) with the rows of a hub dataset, downloaded once; only what is read is fetched."""
    from huggingface_hub import HfApi, snapshot_download

    online, endpoint = network.hub_online(), os.environ.get("HF_ENDPOINT") or None  # the mirror as it is now
    fetch = partial(snapshot_download, repo, repo_type="dataset", endpoint=endpoint, local_files_only=not online)
    try:
        if online:
            names = HfApi(endpoint=endpoint).list_repo_files(repo, repo_type="dataset")
        else:  # a pattern nothing fits gives the folder alone
            folder = Path(fetch(allow_patterns=["-"]))
            names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        chosen = _choose(repo, inside, names)
        if online:
            place = mask_secrets(endpoint or network.HUB)
            print(f"The dataset {repo} comes from {place}, or from an earlier download")
        if chosen.lower().endswith(ENDINGS):
            return Path(fetch(allow_patterns=[chosen])) / chosen
        within = "" if chosen == "." else f"{chosen}/"
        patterns = [f"{within}*{ending}" for ending in ENDINGS]
        return Path(fetch(allow_patterns=patterns, ignore_patterns=[f"{within}*/*"])) / chosen
    except CourseError:
        raise
    except Exception as problem:  # the client's errors are of several libraries, by version
        raise _hub_error(repo, problem, online) from problem


def _choose(repo: str, inside: str, names: list[str]) -> str:
    """The one folder or file of the dataset to read: the one named, or the only one with data in it."""
    visible = sorted(name for name in names if not name.startswith("."))
    files = [PurePosixPath(name) for name in visible if name.lower().endswith(ENDINGS)]
    named = PurePosixPath(inside.strip("/") or ".")
    folders = sorted({str(file.parent) for file in files if named in file.parents})
    if named in files or (inside and str(named) in folders):
        return str(named)
    if len(folders) == 1:
        return folders[0]
    choices = [str(file) for file in files if str(file.parent) == "."] + [name for name in folders if name != "."]
    if not folders:
        held = ", ".join(dict.fromkeys(name.split("/")[0] for name in visible[:200])) or "nothing"
        raise CourseError("data.dataset_without_rows", name=f"{repo}:{inside}".rstrip(":"), held=held)
    raise CourseError("data.dataset_of_several", repo=repo, choices=", ".join(choices[:12]), first=choices[0])


def _hub_error(repo: str, problem: Exception, online: bool) -> CourseError:
    kind = type(problem).__name__
    if kind in ("GatedRepoError", "RepositoryNotFoundError", "HFValidationError"):
        gated = kind == "GatedRepoError"
        reason = "is gated: accept its terms on its page of the hub" if gated else "is not there, or private"
        return CourseError("data.dataset_refused", repo=repo, reason=reason)
    if online:
        reason = f"the download failed: {kind}: {next(iter(str(problem).splitlines()), '')}"
    else:
        reason = "HF_HUB_OFFLINE forbids the network" if network.offline() else "the hub does not answer"
    return CourseError("data.dataset_unreachable", repo=repo, reason=reason)


def licence_of(source: str) -> str:
    """The license in the front matter of the README of a folder or hub dataset, or `unstated`."""
    path, name = Path(source).expanduser(), HUB_NAME.fullmatch(source)
    try:
        from huggingface_hub import hf_hub_download, metadata_load

        readme = path / "README.md"
        if name and not path.exists():
            fetch = partial(hf_hub_download, name["repo"], "README.md", repo_type="dataset")
            endpoint = os.environ.get("HF_ENDPOINT") or None
            readme = Path(fetch(endpoint=endpoint, local_files_only=not network.hub_online()))
        fields = metadata_load(readme) or {}
    except Exception:  # without it the rows are as good; the client's errors are of several libraries
        return UNSTATED
    stated = fields.get("license") or fields.get("licence")
    text = ", ".join(map(str, stated)) if isinstance(stated, list) else str(stated or "")
    return f"{text} ({fields['license_name']})" if text and fields.get("license_name") else text or UNSTATED


def _open(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed as they are read, after the byte order mark of UTF-8."""
    if path.suffix.lower() == ".zst":
        import pyarrow

        raw = cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), HEAD))
    else:
        packed = path.suffix.lower() == ".gz"
        raw = cast(BinaryIO, gzip.open(path, "rb")) if packed else open(path, "rb", CHUNK)  # noqa: SIM115
    if raw.peek(3)[:3] == codecs.BOM_UTF8:  # type: ignore[attr-defined]
        raw.read(3)
    return raw


def _text(file: Path) -> Iterator[Row | RowError]:
    ending = format_of(file)
    with _open(file) as raw:
        head = bytes(raw.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            todo = "save it again with the encoding UTF-8"
            yield _error(file, 1, None, "encoding", "-", "the file is UTF-16 text", todo)
            return
        decoder = Decoder(head)
        document = ending in (".json", ".jsonl") and _is_document(raw, decoder, ending == ".jsonl")
    with _open(file) as raw:
        if document:
            encoding = GBK if decoder.is_gbk else "utf-8"
            text = io.TextIOWrapper(raw, encoding, "surrogateescape", newline="")
            yield from _document(file, Window(text), GBK if decoder.is_gbk else "")
        elif ending in (".csv", ".tsv"):
            yield from _table(file, raw, decoder)
        else:
            yield from _json_lines(file, raw, decoder)


def _lines(raw: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long a byte more than is allowed."""
    while line := raw.readline(LONGEST_LINE + 1):
        yield line
        rest = line
        while rest and len(line) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = raw.readline(CHUNK)


def _json_lines(file: Path, raw: BinaryIO, decoder: Decoder) -> Iterator[Row | RowError]:
    """One row per line; what orjson refuses may be GBK, or what only Python's reader accepts."""
    for number, line in enumerate(_lines(raw), start=1):
        if len(line) > LONGEST_LINE:
            seen = f"a line of more than {LONGEST_LINE >> 20} MiB: {line[:40].decode('utf-8', 'replace')}"
            todo = "one row for each line; split or leave out what is longer"
            yield _error(file, number, None, "long_line", "-", seen, todo)
            continue
        try:
            yield Row(file.name, number, orjson.loads(line))
        except orjson.JSONDecodeError:
            if not line.strip():
                continue
            text, encoding = decoder(line)
            try:
                yield Row(file.name, number, json.loads(text), encoding)
            except UNREADABLE as problem:
                yield _malformed(file, number, text.rstrip("\r\n"), getattr(problem, "pos", 0), problem)


def _malformed(file: Path, line: int, text: str, at: int, problem: Exception, rest: str = "") -> RowError:
    """A row that is not JSON, with the place where reading stopped."""
    reason = getattr(problem, "msg", "nested too deeply, or a number of too many digits")
    if re.match(r"\s*\{\s*'", text):
        reason = "JSON wants double quotes, and this is a Python dict"
    todo, at = f"{reason}: fix it, or write the file with json.dumps{rest}", min(at, len(text))
    seen = " ".join(excerpt(text, at).split())
    return _error(file, line, text[:2000], "malformed_json", f"character {at + 1}", seen, todo)


def _table(file: Path, raw: BinaryIO, decoder: Decoder) -> Iterator[Row | RowError]:
    """The rows under the names of the first line; Excel separates by ; in much of Europe."""
    csv.field_size_limit(LARGEST_ROW)
    lines = (decoder(line)[0] for line in _lines(raw))
    first = next(lines, "")
    tabs = format_of(file) == ".tsv"
    delimiter = "\t" if tabs else next((mark for mark in ",;\t" if mark in first), ",")
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line, converted = reader.line_num + 1, decoder.converted
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            lost = "" if header and reader.line_num == line else "; nothing after this line was read"
            yield _error(file, line, None, "malformed_csv", "-", f"{problem}{lost}", CSV_TODO)
            if lost:
                return
            continue
        if not header:
            header = _distinct(values)
        elif len(values) == len(header):
            encoding = GBK if decoder.converted > converted else ""
            yield Row(file.name, line, dict(zip(header, values, strict=True)), encoding)
        elif values:
            seen = f"{len(values)} values for {len(header)} columns: {excerpt(','.join(values), 0, 40)}"
            yield _error(file, line, values, "malformed_csv", "-", seen, CSV_TODO)


def _distinct(header: list[str]) -> list[str]:
    """The names of the columns; one that was there before gets its number, so that no value is lost."""
    first = {name: number for number, name in reversed(list(enumerate(header, start=1)))}
    return [name if first[name] == n else f"{name} (column {n})" for n, name in enumerate(header, start=1)]


def _is_document(raw: BinaryIO, decoder: Decoder, jsonl: bool) -> bool:
    """Whether a JSON file is one document and not one row for each line."""
    pieces = (piece.strip() for piece in iter(partial(raw.readline, CHUNK), b""))
    filled = filter(None, pieces)
    first = next(filled, b"")
    if first[:1] not in (b"[", b"{"):
        return False
    if len(first) > CHUNK - 3:
        return first[:1] == b"[" or not jsonl
    second = next(filled, b"")
    try:
        json.loads(decoder(first)[0])
    except UNREADABLE:
        return first[:1] == b"[" or first[-1:] in b"{[" or (not jsonl and not second)
    return not second


class Window:
    """The part of a long JSON text that is being read."""

    def __init__(self, file: io.TextIOBase) -> None:
        self.file, self.text, self.at, self.line = file, "", 0, 1

    def grow(self) -> bool:
        """Read on, and drop what was read before; False at the end."""
        more = self.file.read(max(CHUNK, len(self.text) - self.at))
        if more:
            self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)

    def move(self, to: int) -> None:
        """Go on to a place in the text, counting lines."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is neither space nor comma; empty at the end."""
        while True:
            self.move(_BETWEEN.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def decode(self) -> tuple[Any, int]:
        """The JSON value that begins here, and where it ends."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
                if end < len(self.text) or not self.grow():  # a number may go on
                    return value, end
            except json.JSONDecodeError as problem:
                cut = problem.msg.startswith("Unterminated") or problem.pos > len(self.text) - 16
                if not cut or len(self.text) - self.at > LARGEST_ROW or not self.grow():
                    raise


def _document(file: Path, window: Window, encoding: str) -> Iterator[Row | RowError]:
    """The rows of an array, of an object that holds one, or objects; nothing is read after a fault."""
    inside = False
    try:
        while begins := window.peek():
            if begins == "[" and not inside:
                inside = True
                window.at += 1
            elif begins == "]" and inside:
                return
            elif begins == "{" and not inside and (start := _held_array(file, window)):
                window.move(start)
            else:
                value, end = window.decode()
                yield Row(file.name, window.line, value, encoding)
                window.move(end)
        if inside:
            raise json.JSONDecodeError("the list is not closed", window.text, window.at)
    except UNREADABLE as problem:
        text, at = window.text[window.at :], getattr(problem, "pos", window.at) - window.at
        yield _malformed(file, window.line, text, at, problem, "; nothing after this place was read")


def _held_array(file: Path, window: Window) -> int:
    """Where the list of rows begins that an object holds; 0 if the object is a row itself."""
    names = [""]
    try:
        value = window.decode()[0]
        layout = layout_of(tuple(value))
        turns = [one for one in LISTS if {"role", "from"} & set(next(iter(value.get(one) or [""])))]
        lists = [name for name, held in value.items() if isinstance(held, list) and held and isinstance(held[0], dict)]
        names = lists if not turns and (layout.problem or layout.messages) else []
    except json.JSONDecodeError:
        if len(window.text) - window.at <= LARGEST_ROW:
            raise  # a larger object is no row
    if len(names) > 1:
        raise CourseError("data.several_lists", file=file.name, names=", ".join(names))
    held = re.compile(r'"(?:[^"\\]|\\.)*"\s*:\s*(?=\[\s*\{)').search(window.text, window.at) if names else None
    return held.end() if held else 0


def _parquet(file: Path) -> Iterator[Row | RowError]:
    """Rows of a parquet file; a compressed one is unpacked to a temporary file first, for it is read from its end."""
    import pyarrow.parquet

    with tempfile.TemporaryFile() as unpacked:
        source: Any = file
        if file.suffix.lower() in COMPRESSED:
            with _open(file) as raw:
                shutil.copyfileobj(raw, unpacked, CHUNK)
            source = unpacked
        opened = pyarrow.parquet.ParquetFile(source)
        number = 0
        for batch in opened.iter_batches(batch_size=_batch_size(opened.metadata)):
            for row in batch.to_pylist():
                number += 1
                yield Row(file.name, number, row)


def _batch_size(metadata: Any) -> int:
    """How many rows to hold at a time. A value may be repeated by every row: it counts as large as its column."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    row = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return int(min(512, max(1, BATCH / max(row, 1)), max(16, 4 * BATCH / max(largest, 1))))
