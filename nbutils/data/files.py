"""Which files a source stands for, and their bytes: a file, a folder, a hub dataset, compressed or not.

Not here: downloading (hub), what the bytes say (reading).
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import IO, BinaryIO, cast

from nbutils import platforms
from nbutils.data import hub
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".zst")
ENDINGS = tuple(ending + packed for ending in FORMATS for packed in ("", *COMPRESSED))
FORMATS_TEXT = (
    "a .jsonl, .json, .csv, .tsv or .parquet file (also .gz or .zst of it), a folder of them, "
    "or a hub dataset as owner/name or owner/name:folder"
)
NOT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")  # what datasets writes beside
SHARD = re.compile(r"-\d{5}-of-\d{5}(?:-[0-9a-f]+)?$")
CHUNK = 1 << 20


def format_of(path: PurePath) -> str:
    """The format by the name, whether compressed or not; empty if it is none the course reads."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS and path.name.lower() not in NOT_ROWS else ""


def stem_of(path: PurePath) -> str:
    """The name without endings and shard numbers: `test` for test-00000-of-00001.parquet and test.jsonl.gz."""
    name = path.name
    for endings in (COMPRESSED, FORMATS):
        if name.lower().endswith(endings):
            name = name[: name.rindex(".")]
    return SHARD.sub("", name)


def bundled(name: str) -> Path | None:
    """The folder of a set that comes with the course, if this is its name and no file or folder of the learner's."""
    named = re.fullmatch(r"\w+", name) and not Path(name).exists() and (SAMPLES / name / "train.jsonl").is_file()
    return SAMPLES / name if named else None


def files_of(source: str) -> list[Path]:
    """The data files a source stands for, also below what is attached (Kaggle), bundled or on the hub."""
    path = bundled(source) or Path(source).expanduser()
    if not path.exists():
        path = platforms.find_input(platforms.folders(platforms.detect()).inputs, source) or path
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        if not path.is_file():
            raise CourseError(f"{path} is no plain file.", FORMATS_TEXT, "copy what it gives into a file")
        if not format_of(path):
            todo = "export it in one of these formats (Excel: CSV UTF-8)"
            raise CourseError(f"{path} ends in {path.suffix or 'nothing'!r}.", FORMATS_TEXT, todo)
        return [path]
    name = hub.HUB_NAME.fullmatch(source)
    if name and not format_of(Path(name["repo"])) and not path.parent.exists():
        folder = hub.download(name["repo"], name["inside"] or "", ENDINGS)
        return [folder] if folder.is_file() else _in_folder(folder)
    raise _missing(source, path)


def _in_folder(path: Path) -> list[Path]:
    """Every data file of a folder itself, in the order of their names."""
    found = sorted(file for file in path.iterdir() if file.is_file() and format_of(file))
    if found:
        return found
    inner = sorted(one.name for one in path.iterdir() if one.is_dir() and any(map(format_of, _inside(one))))
    if inner:
        seen = f"The folder {path} holds data files only in its own folders: {', '.join(inner[:8])}."
        raise CourseError(seen, FORMATS_TEXT, f"give one of them, such as {path / inner[0]}")
    held = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    raise CourseError(f"The folder {path} holds no data file (it holds: {held}).", FORMATS_TEXT, "put one in it")


def _inside(folder: Path) -> Iterable[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def _missing(source: str, path: Path) -> CourseError:
    """The error for a path that is not there, with what lies beside it."""
    near = sorted(p.name for p in path.parent.iterdir() if format_of(p)) if path.parent.is_dir() else []
    beside = f"; beside it: {', '.join(near[:8])}" if near else ""
    return CourseError(
        f"There is no {source!r} (looked at {path.absolute()}{beside}).", FORMATS_TEXT, "correct the path"
    )


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed as they are read."""
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_Zstd(open(path, "rb")), CHUNK)
    return open(path, "rb", buffering=CHUNK)


class _Zstd(io.RawIOBase):
    """A zstd file frame by frame; unlike the library's own reader it notices a file that ends too early."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file, self._new = file, zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._frame, self._ready, self._begun = self._new(), memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready and self._fill():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompress a little more; False at the end of the file."""
        left = self._frame.unused_data if self._frame.eof else b""
        chunk = left or self._file.read(1 << 12)  # a bomb makes 128 MiB of it
        if self._frame.eof:
            self._frame, self._begun = self._new(), False
        if not chunk and self._begun:
            raise EOFError("the file ends in the middle of a zstd frame")
        if chunk:
            self._begun = True
            self._ready = memoryview(self._frame.decompress(chunk))  # cut below without being copied
        return bool(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()


def damages() -> tuple[type[Exception], ...]:
    """What reading a damaged or truncated compressed file can raise."""
    import zstandard

    return EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError
