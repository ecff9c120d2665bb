"""One checkpoint as a tar archive and a manifest, written last and read back: nothing is trusted without one that fits.

Files get their final names at once, because a rename on a network disk may not stick. Archives may come from strangers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import BaseModel, ValidationError

from nbutils.files import CHUNK, read_json, sha256

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it
MAX_MEMBERS = 10_000
Progress = Callable[[int], None]
PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)


class Manifest(BaseModel, frozen=True, extra="forbid", strict=True):
    """What an archive must be."""

    step: int
    size: int
    sha256: str
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class StoredCheckpoint:
    """An archive and the manifest beside it."""

    archive: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step


class HashingFile:
    """A file for writing that counts bytes and computes their sha256; `progress` is called before each chunk."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self.file, self.progress, self.size, self.digest = file, progress, 0, hashlib.sha256()

    def tell(self) -> int:
        """The position, which tarfile asks for."""
        return self.size

    def write(self, chunk: bytes) -> int:
        """Write and count."""
        self.progress(len(chunk))
        self.digest.update(chunk)
        self.size += len(chunk)
        return self.file.write(chunk)


def fingerprint(**parts: Any) -> dict[str, Any]:
    """What must be equal for a run to be resumed, as plain JSON values."""
    return json.loads(json.dumps(parts, sort_keys=True, default=str))


def step_of(path: Path | None) -> int:
    """The step in the name of a checkpoint folder; 0 without one."""
    return int(path.name.rsplit("-", 1)[1]) if path else 0


def pack(
    folder: Path, store: Path, fingerprint: dict[str, Any], progress: Progress = lambda count: None
) -> StoredCheckpoint:
    """Write a checkpoint folder to `store` as an archive; its manifest is written once the archive verifies there."""
    archive = store / f"{folder.name}.tar"
    forget(archive)
    with open(archive, "wb") as file:
        counted = HashingFile(file, progress)
        with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
            tar.add(folder, arcname=folder.name)
        flush(file)
    digest = counted.digest.hexdigest()
    manifest = Manifest(step=step_of(folder), size=counted.size, sha256=digest, fingerprint=fingerprint)
    return _verified(StoredCheckpoint(archive, manifest))


def copy(one: StoredCheckpoint, store: Path) -> StoredCheckpoint:
    """Copy a checkpoint to another store; the manifest is written once the copy verifies there."""
    target = StoredCheckpoint(store / one.archive.name, one.manifest)
    forget(target.archive)
    shutil.copyfile(one.archive, target.archive)
    return _verified(target)


def _verified(one: StoredCheckpoint) -> StoredCheckpoint:
    if problem := defect(one):
        raise OSError(errno.EIO, f"{one.archive.name} does not verify: {problem}")
    return write_manifest(one)


def write_manifest(one: StoredCheckpoint) -> StoredCheckpoint:
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
    """Flush to disk; some network disks have no fsync."""
    file.flush()
    with suppress(OSError):  # what is written is read back before it counts
        os.fsync(file.fileno())


def forget(archive: Path) -> None:
    """Remove a checkpoint, manifest first: half of a removal is not trusted."""
    archive.with_suffix(".json").unlink(missing_ok=True)
    archive.unlink(missing_ok=True)


def read_manifest(path: Path) -> StoredCheckpoint:
    """The checkpoint of a manifest file; ValueError if it is no manifest or belongs to another file name."""
    try:
        manifest = Manifest.model_validate(read_json(path))
    except ValidationError as problem:
        raise ValueError("it is no manifest") from problem
    if path.stem != f"checkpoint-{manifest.step}" or not NAME.fullmatch(path.stem):
        raise ValueError(f"it belongs to step {manifest.step}")
    return StoredCheckpoint(path.with_suffix(".tar"), manifest)


def defect(one: StoredCheckpoint, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted, None if it can; `thorough` also reads it, with OSError if the disk fails."""
    try:
        found = one.archive.stat()
    except FileNotFoundError:
        return "the archive is missing"
    if not stat.S_ISREG(found.st_mode) or found.st_size != one.manifest.size:
        return f"{found.st_size:,} bytes, {one.manifest.size:,} expected: cut off or still uploading"
    if not thorough:
        return None
    if sha256(one.archive) != one.manifest.sha256:
        return "its sha256 differs: damaged"
    try:
        with tarfile.open(one.archive, "r:") as tar:
            for _ in _checked_members(tar, one):
                pass
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as problem:  # tarfile raises all of them
        return f"it is no checkpoint archive of this course ({problem})"
    return None


def unpack(one: StoredCheckpoint, folder: Path) -> Path:
    """Unpack below `folder`; the checkpoint folder gets its name once it is complete."""
    target, partial = folder / one.archive.stem, folder / f".{one.archive.stem}.partial"
    for old in (target, partial):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(one.archive, "r:") as tar:
        for member in _checked_members(tar, one):  # plain files and folders: no owners, modes or links to restore
            if member.isdir():
                (partial / member.name).mkdir(parents=True)
            elif (content := tar.extractfile(member)) is not None:
                with (partial / member.name).open("wb") as file:
                    shutil.copyfileobj(content, file, CHUNK)
    os.replace(partial / one.archive.stem, target)
    partial.rmdir()
    return target


def _checked_members(tar: tarfile.TarFile, one: StoredCheckpoint) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; TarError at the first that `pack` would not have written."""
    top = PurePosixPath(one.archive.stem)
    is_folder: dict[PurePosixPath, bool] = {}
    for member in tar:
        path = PurePosixPath(member.name)
        plain = member.type in PLAIN_TYPES and not member.issparse() and member.size >= 0 and not tar.pax_headers
        inside = is_folder.get(path.parent, False) and path.name != ".." if is_folder else path == top
        if not plain or not inside or path in is_folder or len(is_folder) > MAX_MEMBERS:
            raise tarfile.TarError(f"{member.name[:80]!r} is not what a checkpoint holds")
        is_folder[path] = member.isdir()
        yield member
    rest = tar.fileobj
    assert rest is not None
    rest.seek(tar.offset)
    if any(rest.read(tarfile.RECORDSIZE)):  # some versions of tarfile take a bad header for the end
        raise tarfile.TarError("it goes on after its last member")
