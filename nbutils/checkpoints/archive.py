"""One checkpoint as an uncompressed tar archive and a manifest: pack, copy, verify, unpack.

The archive is written first and its manifest last, each under its final name (a rename on a network disk may not
stick), and both are read back: nothing is trusted without a manifest that matches. Archives may come from strangers,
so only what `pack` writes is unpacked: plain files and folders below `checkpoint-N`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from pydantic import BaseModel, ValidationError

from nbutils.paths import CHUNK, read_json, sha256

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it
MAX_MEMBERS, MAX_NAME_BYTES = 10_000, 255
PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
UNREADABLE = "it cannot be read"
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # some network disks have none


class Manifest(BaseModel, frozen=True, extra="forbid", strict=True):
    """What an archive must be."""

    step: int
    size: int
    sha256: str
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """An archive and the manifest beside it."""

    archive: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step


class HashingFile:
    """A file for writing that counts bytes and computes their sha256."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def tell(self) -> int:
        """The position, which tarfile asks for."""
        return self.size

    def write(self, chunk: bytes) -> int:
        """Write and count."""
        self.digest.update(chunk)
        self.size += len(chunk)
        return self.file.write(chunk)


def fingerprint(**parts: Any) -> dict[str, Any]:
    """What must be equal for a run to be resumed, as plain JSON values."""
    return json.loads(json.dumps(parts, sort_keys=True, default=str))


def step_of(path: Path | None) -> int:
    """The step in the name of a checkpoint folder; 0 without one."""
    return int(path.name.rsplit("-", 1)[1]) if path else 0


def pack(folder: Path, store: Path, fingerprint: dict[str, Any]) -> Kept:
    """Write a checkpoint folder to `store` as an archive and its manifest."""
    archive = store / f"{folder.name}.tar"
    forget(archive)
    with open(archive, "wb") as file:
        counted = HashingFile(file)
        with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
            tar.add(folder, arcname=folder.name)
        flush(file)
    size, digest = counted.size, counted.digest.hexdigest()
    manifest = Manifest(step=step_of(folder), size=size, sha256=digest, fingerprint=fingerprint)
    return write_manifest(Kept(archive, manifest))


def copy(one: Kept, store: Path, progress: Callable[[int], None] = lambda count: None) -> Kept:
    """Copy a checkpoint to another store; the manifest is written once the copy verifies there."""
    target = Kept(store / one.archive.name, one.manifest)
    forget(target.archive)
    with open(one.archive, "rb") as source, open(target.archive, "wb") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
            progress(len(chunk))
        flush(file)
        with suppress(OSError, AttributeError):  # so that the check below reads the disk and not the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if problem := defect(target):
        raise OSError(errno.EIO, f"the copy does not verify: {problem}")
    return write_manifest(target)


def write_manifest(one: Kept) -> Kept:
    """Write the manifest and read it back."""
    text = json.dumps(one.manifest.model_dump(), indent=2, ensure_ascii=False) + "\n"
    path = one.archive.with_suffix(".json")
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        flush(file)
    if path.read_text(encoding="utf-8") != text:
        raise OSError(errno.EIO, "the manifest reads differently than it was written")
    return one


def flush(file: IO[Any]) -> None:
    """Flush to disk, where the disk supports fsync."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as problem:
        if problem.errno not in NO_FSYNC:
            raise


def forget(archive: Path) -> None:
    """Remove a checkpoint, manifest first: half of a removal is not trusted."""
    archive.with_suffix(".json").unlink(missing_ok=True)
    archive.unlink(missing_ok=True)


def read_manifest(path: Path) -> Kept:
    """The checkpoint of a manifest file; ValueError if it is no manifest or belongs to another file name."""
    try:
        manifest = Manifest.model_validate(read_json(path))
    except ValidationError as problem:
        raise ValueError("it is no manifest") from problem
    if path.stem != f"checkpoint-{manifest.step}" or not NAME.fullmatch(path.stem):
        raise ValueError(f"its name says {path.stem}, its content step {manifest.step}: renamed or duplicated")
    return Kept(path.with_suffix(".tar"), manifest)


def defect(one: Kept, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted; None if it can. `thorough` also reads the archive."""
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
                for _ in _checked_members(tar, one):
                    pass
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as problem:  # tarfile raises all of them
        return f"it is no checkpoint archive of this course ({problem})"
    except OSError as problem:
        return f"{UNREADABLE} ({problem.strerror})"
    return None


def unpack(one: Kept, folder: Path) -> Path:
    """Unpack below `folder`; the checkpoint folder gets its name once it is complete."""
    target, partial = folder / one.archive.stem, folder / f".{one.archive.stem}.partial"
    for old in (target, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(one.archive, "r:") as tar:
        for member in _checked_members(tar, one):
            path = partial / member.name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                shutil.copyfileobj(cast(IO[bytes], tar.extractfile(member)), file, CHUNK)
    os.replace(partial / one.archive.stem, target)
    shutil.rmtree(partial)
    return target


def _checked_members(tar: tarfile.TarFile, one: Kept) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; TarError at the first that `pack` would not have written."""
    top, room = PurePosixPath(one.archive.stem), one.manifest.size
    is_folder = {top: True}
    for member in tar:
        path = PurePosixPath(member.name)
        room -= member.size
        if len(member.name.encode()) > MAX_NAME_BYTES:
            raise tarfile.TarError(f"{member.name[:80]!r}... is too long a name")
        if member.type not in PLAIN_TYPES or member.issparse() or member.size < 0 or tar.pax_headers:
            raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder")
        if path.parts[:1] != top.parts or ".." in path.parts or "\0" in member.name:
            raise tarfile.TarError(f"{member.name!r} lies outside {top}")
        repeated = path in is_folder and not (is_folder[path] and member.isdir())
        if repeated or not all(is_folder.setdefault(parent, True) for parent in path.parents):
            raise tarfile.TarError(f"{member.name!r} is there twice, or below a file")
        is_folder[path] = member.isdir()
        if room < 0 or len(is_folder) > MAX_MEMBERS:
            raise tarfile.TarError("it is larger than its manifest says, or has too many files")
        yield member
    if all(is_folder.values()):
        raise tarfile.TarError("it has no file")
