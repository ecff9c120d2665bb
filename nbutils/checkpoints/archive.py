"""One checkpoint as one archive and its manifest: packed, checked, unpacked.

The archive goes first, its manifest (step, size, sha256, fingerprint) last. Files are written under their final name
and read back: a rename on a network disk may not stick, and without a matching manifest nothing is trusted anyway.
An archive may come from elsewhere: only what `pack` writes is unpacked, plain files and folders below `checkpoint-N`.
Not here: which archives there are (store), or when they are carried (carrier).
"""

from __future__ import annotations

import collections
import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from nbutils.paths import CHUNK, read_json, sha256

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it; the names of others differ
MEMBERS, LONGEST_NAME = 10_000, 255  # of files in a checkpoint, of their names with folders
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
UNREADABLE = "it cannot be read"
NO_SYNC_HERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # some network disks have no fsync


@dataclass(frozen=True)
class Manifest:
    """What a kept archive must be."""

    step: int
    size: int
    sha256: str
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """A checkpoint in a store: its archive, and what the manifest beside it says."""

    archive: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step


class HashingFile:
    """A file to write to that knows its size and sha256 so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def tell(self) -> int:
        """Where it is; tarfile asks."""
        return self.size

    def write(self, piece: bytes) -> int:
        """Write and count."""
        self.digest.update(piece)
        self.size += len(piece)
        return self.file.write(piece)


def fingerprint(**parts: Any) -> dict[str, Any]:
    """What must be equal for a run to be continued, as plain JSON values."""
    return json.loads(json.dumps(parts, sort_keys=True, default=str))


def manifest_of(archive: Path) -> Path:
    """Where the manifest of an archive lies."""
    return archive.with_suffix(".json")


def pack(folder: Path, store: Path, mark: dict[str, Any]) -> Kept:
    """A checkpoint folder as an archive in `store`, its manifest written last."""
    archive = store / f"{folder.name}.tar"
    forget(archive)
    with open(archive, "wb") as file:
        counted = HashingFile(file)
        with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
            tar.add(folder, arcname=folder.name)
        flush(file)
    step = int(folder.name.rsplit("-", 1)[1])
    return _seal(Kept(archive, Manifest(step, counted.size, counted.digest.hexdigest(), mark)))


def copy(one: Kept, store: Path, progress: Callable[[int], None] = lambda count: None) -> Kept:
    """The same checkpoint in another store, read back there before its manifest says that it can be trusted."""
    target = Kept(store / one.archive.name, one.manifest)
    forget(target.archive)
    with open(one.archive, "rb") as source, open(target.archive, "wb") as file:
        while piece := source.read(CHUNK):  # its sha256 is taken from what is read back
            file.write(piece)
            progress(len(piece))
        flush(file)
        with suppress(OSError, AttributeError):  # so that the check below reads the disk and not the memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if problem := defect(target):
        raise OSError(errno.EIO, f"the copy does not verify: {problem}")
    return _seal(target)


def _seal(one: Kept) -> Kept:
    text = json.dumps(asdict(one.manifest), indent=2, ensure_ascii=False) + "\n"
    place = manifest_of(one.archive)
    with open(place, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        flush(file)
    if place.read_text(encoding="utf-8") != text:
        raise OSError(errno.EIO, "the manifest was written but reads differently")
    return one


def flush(file: IO[Any]) -> None:
    """Everything on disk, where the disk can say so."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as problem:
        if problem.errno not in NO_SYNC_HERE:
            raise


def forget(archive: Path) -> None:
    """Remove a checkpoint, its manifest first: what is left of a removal cut short is not trusted."""
    manifest_of(archive).unlink(missing_ok=True)
    archive.unlink(missing_ok=True)


def read_manifest(place: Path) -> Manifest:
    """The manifest in a file; ValueError if it is none, or belongs to another file than its name says."""
    written = read_json(place)
    if not isinstance(written, dict) or set(written) != {"step", "size", "sha256", "fingerprint"}:
        raise ValueError("it is no manifest")
    types = {"step": int, "size": int, "sha256": str, "fingerprint": dict}
    if not all(type(written[name]) is kind for name, kind in types.items()):
        raise ValueError("it is no manifest")
    if place.stem != f"checkpoint-{written['step']}" or not NAME.fullmatch(place.stem):
        raise ValueError(f"its name says {place.stem}, its content step {written['step']}: renamed or duplicated")
    return Manifest(**written)


def defect(one: Kept, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted; None if it can. `thorough` also reads it and compares the sha256."""
    try:
        if not one.archive.is_file():
            return "the archive is missing"
        size = one.archive.stat().st_size
        if size != one.manifest.size:
            return f"{size:,} bytes, {one.manifest.size:,} expected: cut off or still uploading"
        if thorough and sha256(one.archive) != one.manifest.sha256:
            return "its sha256 differs: damaged"
        if thorough:
            with tarfile.open(one.archive, "r:") as tar:
                collections.deque(_members(tar, one), maxlen=0)
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as problem:  # tarfile lets all of them out
        return f"it is no checkpoint archive of this course ({problem})"
    except OSError as problem:
        return f"{UNREADABLE} ({problem.strerror})"
    return None


def unpack(one: Kept, folder: Path) -> Path:
    """The checkpoint as a folder below `folder`; it has its name only once it is whole."""
    target, partial = folder / one.archive.stem, folder / f".{one.archive.stem}.partial"
    for old in (target, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(one.archive, "r:") as tar:
        for member in _members(tar, one):
            place = partial / member.name
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "xb") as file:
                shutil.copyfileobj(cast(IO[bytes], tar.extractfile(member)), file, CHUNK)
    os.replace(partial / one.archive.stem, target)
    shutil.rmtree(partial)
    return target


def _members(tar: tarfile.TarFile, one: Kept) -> Iterator[tarfile.TarInfo]:
    """The files and folders of an archive; TarError at the first thing that `pack` would not have written."""
    top, room = PurePosixPath(one.archive.stem), one.manifest.size
    folder_at = {top: True}  # False at files
    for member in tar:
        if len(member.name.encode()) > LONGEST_NAME:
            raise tarfile.TarError(f"{member.name[:80]!r}... is too long a name")
        place = PurePosixPath(member.name)
        room -= member.size
        if member.type not in PLAIN or member.issparse() or member.size < 0 or tar.pax_headers:
            raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder")
        below = place.parts[:1] == top.parts and ".." not in place.parts and "\0" not in member.name
        if not below:
            raise tarfile.TarError(f"{member.name!r} lies outside {top}")
        twice = place in folder_at and not (folder_at[place] and member.isdir())
        if twice or not all(folder_at.setdefault(above, True) for above in place.parents):
            raise tarfile.TarError(f"{member.name!r} is there twice, or below a file")
        folder_at[place] = member.isdir()
        if room < 0 or len(folder_at) > MEMBERS:
            raise tarfile.TarError("it is larger than its manifest says, or has too many files")
        yield member
    if all(folder_at.values()):
        raise tarfile.TarError("it has no file")
