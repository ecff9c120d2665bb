"""Checkpoints that can be trusted: written to scratch, carried to keep as one archive, restored only if it verifies.

The archive goes first, its manifest (size, sha256, step, fingerprint) last: an archive without a manifest, or one that
does not match it, is as good as absent. Not here: what is in a checkpoint (the trainer decides that).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils.disk import folder_gib, require_disk
from nbutils.errors import CourseError
from nbutils.paths import write_json

CHUNK = 2**22
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.10.11, 3.11.3 lack it


@dataclass(frozen=True)
class Manifest:
    """What a kept archive must be."""

    step: int
    size: int
    sha256: str
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """A kept checkpoint: its archive, and the manifest beside it."""

    archive: Path
    manifest: Manifest


def fingerprint(**parts: Any) -> dict[str, Any]:
    """What must be equal for a run to be continued, as plain JSON values."""
    return json.loads(json.dumps(parts, sort_keys=True, default=str))


def publish(checkpoint: Path, keep: Path, mark: dict[str, Any], keep_last: int = 3) -> Kept:
    """Carry one finished checkpoint folder to `keep`, verify it there, then drop the oldest ones."""
    step = int(checkpoint.name.rsplit("-", 1)[1])
    keep.mkdir(parents=True, exist_ok=True)
    require_disk(keep, folder_gib(checkpoint) * 1.1, f"keeping checkpoint {step}")
    archive = keep / f"{checkpoint.name}.tar"
    partial = keep / f".{archive.name}.partial"
    with tarfile.open(partial, "w") as tar:
        tar.add(checkpoint, arcname=checkpoint.name)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    manifest = Manifest(step, partial.stat().st_size, sha256(partial), mark)
    os.replace(partial, archive)
    write_json(archive.with_suffix(".json"), asdict(manifest))
    kept = Kept(archive, manifest)
    if (problem := defect(kept)) is None:
        _prune(keep, keep_last)
        return kept
    raise CourseError(f"{archive} was written but does not verify: {problem}.", "an intact copy", "check that disk")


def kept(keep: Path) -> list[Kept]:
    """All checkpoints that have a readable manifest, newest first."""
    found = []
    for file in keep.glob("checkpoint-*.json"):
        try:
            manifest = Manifest(**json.loads(file.read_text(encoding="utf-8")))
            found.append(Kept(file.with_suffix(".tar"), replace(manifest, step=int(manifest.step))))
        except (ValueError, TypeError, OSError):
            print(f"skipping {file.name}: its manifest cannot be read")
    return sorted(found, key=lambda one: one.manifest.step, reverse=True)


def defect(one: Kept) -> str | None:
    """Why a kept checkpoint cannot be trusted; None if it can."""
    if not one.archive.exists():
        return "the archive is missing"
    size = one.archive.stat().st_size
    if size != one.manifest.size:
        return f"{size} bytes, {one.manifest.size} expected"
    return None if sha256(one.archive) == one.manifest.sha256 else "its sha256 differs"


def restore(keep: Path, scratch: Path, mark: dict[str, Any]) -> Path | None:
    """Unpack the newest checkpoint that verifies into `scratch`; None if there is none to continue from."""
    for one in kept(keep):
        if problem := defect(one):
            print(f"skipping {one.archive.name}: {problem}")
            continue
        refuse_other_run(one.manifest.fingerprint, mark)
        return _unpack(one, scratch)
    return None


def refuse_other_run(there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Stop if a checkpoint belongs to a different training than the one asked for."""
    names = sorted(set(there) | set(wanted))
    different = [name for name in names if there.get(name) != wanted.get(name)]
    if different:
        shown = "; ".join(f"{name}: kept {there.get(name)!r}, asked {wanted.get(name)!r}" for name in different)
        raise CourseError(
            f"the checkpoints in this run are of another training ({shown}).",
            "the same model, data, adapter and batch as the run began with",
            'choose another RUN_NAME, or set RESUME="never" to start this run anew',
        )


def _unpack(one: Kept, scratch: Path) -> Path:
    target = scratch / one.archive.stem
    partial = scratch / f".{one.archive.stem}.partial"
    for old in (target, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(one.archive) as tar:
        tar.extractall(partial, **SAFELY)
    os.replace(partial / one.archive.stem, target)
    shutil.rmtree(partial)
    return target


def _prune(keep: Path, keep_last: int) -> None:
    for old in kept(keep)[keep_last:]:
        old.archive.with_suffix(".json").unlink()
        old.archive.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
