"""The data folder of a run: made once from its source, reused afterwards, never quietly exchanged for another.

Not here: the pass over the rows (building) and the rules of a single row (rows).
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nbutils import scaling
from nbutils.data.building import Build
from nbutils.data.card import AGAIN, CARD, EVAL, TRAIN, DataCard, verify
from nbutils.data.columns import parse_mapping
from nbutils.data.files import bundled, files_of, stem_of
from nbutils.data.licence import licence_of
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import GIB, SAMPLES

HELD_OUT_NAMES = ("eval", "test", "valid", "validation", "dev")
BUNDLED = "the bundled sample"
NEAR = 0.8
TEXT, PACKED = (".jsonl", ".json", ".csv", ".tsv"), 6  # other files grow about sixfold when they are unpacked
BUILDING, STALE_SECONDS = ".building-", 3600
COMPARED = ("eval_fraction", "limit", "columns", "near", "repair")


@scaling.main_first()
def prepare(
    source: str,
    out: Path,
    *,
    default: str = "",
    eval_source: str = "",
    eval_fraction: float = 0.1,
    rows: int = 0,
    licence: str = "",
    columns: str = "",
    near: float | None = None,
    repair: bool | None = None,
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one that came from the same source and settings.

    `default` is the source where none is named and no data is there yet ("": the bundled sample).
    `columns` names columns the course does not know, as "user=title+body, assistant=reply"; `near` is the overlap from
    which a row counts as a near duplicate (0: do not look; default 0.8); `repair` mends text that was read in the wrong
    encoding (default: yes). What is not named is taken from the card of finished data.
    """
    if rows < 0:
        raise CourseError(f"rows is {rows}.", "0 (all) or the number of training rows", "choose 0 or more")
    asked = settings(eval_fraction, columns, near, repair) | {"limit": rows}
    asked |= {"source": source, "eval_source": eval_source}
    unnamed = {
        name for name, value in (("columns", columns or None), ("near", near), ("repair", repair)) if value is None
    }
    reuse = partial(_reuse, out, asked.copy(), unnamed)
    if (out / CARD).exists():
        return reuse()
    source = source or default
    train_files, eval_files = find_sources([source] if source else [], eval_source)
    own = "CC0-1.0, written for this course"
    ours = not source or bundled(source) is not None
    asked |= {"source": source or BUNDLED, "licence": licence or (own if ours else licence_of(source))}
    asked |= {"source_sha256": sha256_of(train_files, eval_files)}
    with building(out, asked, train_files + eval_files) as build:
        build.run(train_files, eval_files)
        build.refuse_bad_source(out)
        return reuse() if (out / CARD).exists() else build.publish(out)  # another process may have been faster


def settings(eval_fraction: float, columns: str, near: float | None, repair: bool | None) -> dict[str, Any]:
    """The wishes that decide what the rows become, once they make sense."""
    if not 0 < eval_fraction < 1:
        raise CourseError(
            f"eval_fraction is {eval_fraction}.", "more than 0 and less than 1", "0.1 keeps a tenth apart"
        )
    near = NEAR if near is None else near
    if near and not 0.5 <= near <= 1:
        raise CourseError(f"near is {near}.", "0 (do not look for near duplicates), or 0.5 to 1", f"leave it at {NEAR}")
    mapping = str(parse_mapping(columns) or "")
    return {"eval_fraction": eval_fraction, "columns": mapping, "near": float(near), "repair": repair is not False}


@contextlib.contextmanager
def building(out: Path, asked: dict[str, Any], files: list[Path]) -> Iterator[Build]:
    """A build in a folder below `out` that is gone afterwards, whatever happens."""
    size = sum(file.stat().st_size * (1 if file.suffix in TEXT else PACKED) for file in files) / GIB
    require_disk(out, 3 * size, "preparing the data")
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        _remove_left_over(out)
        with tempfile.TemporaryDirectory(dir=out, prefix=BUILDING) as folder:
            yield Build(Path(folder), asked)


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """What a disk refuses, in words a learner can act on."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None:  # a library's own error, not one of the disk
            raise
        raise CourseError(
            f"Preparing the data failed at {problem.filename or out}: {problem.strerror}.",
            "files that can be read, and a folder that can be written to, with room for three times the data",
            "choose another folder, or free some room there, and run it again",
        ) from problem


def _remove_left_over(out: Path) -> None:
    """What builds left that were killed: folders in which nothing was written for an hour."""
    for folder in out.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in [folder, *folder.iterdir()]) > STALE_SECONDS:
                shutil.rmtree(folder)


def find_sources(sources: Sequence[str], eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files: those named so, or `eval`, `test` or `valid` files beside others."""
    if not sources:
        return [SAMPLES / TRAIN], files_of(eval_source) if eval_source else [SAMPLES / EVAL]
    files = list(dict.fromkeys(file for source in sources for file in files_of(source)))
    if eval_source:
        return files, files_of(eval_source)
    held_out = [file for file in files if stem_of(file).lower() in HELD_OUT_NAMES]
    return ([file for file in files if file not in held_out], held_out) if len(held_out) < len(files) else (files, [])


def sha256_of(*groups: list[Path]) -> str:
    """The content of the source files, in order; names and places do not count."""
    digest = hashlib.sha256()
    for group in groups:
        for path in group:
            with disk_errors(path), open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            digest.update(b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def _reuse(out: Path, asked: dict[str, Any], unnamed: set[str]) -> DataCard:
    """The finished data, if it is what was asked for; what is not named is taken from its card."""
    card = verify(out)
    changed = [key for key in COMPARED if key not in unnamed and getattr(card, key) not in (asked[key], None)]
    if not _same_source(card, asked["source"], asked["eval_source"]):
        changed = ["source", "eval_source", *changed]
    if changed:
        had = ", ".join(f"{key} {getattr(card, key)!r}" for key in changed)
        want = ", ".join(f"{key} {asked[key]!r}" for key in changed)
        raise CourseError(
            f"{out} already holds data made from other input.\n  There: {had}\n  Asked: {want}",
            "one data set per run",
            AGAIN.format(out=out),
        )
    print(f"The data of this run is ready (from {card.source}): nothing is repeated.")
    return card


def _same_source(card: DataCard, source: str, eval_source: str) -> bool:
    """Whether a run's data came from this source: by content, or by name when the file has gone with its machine."""
    if not source:
        return eval_source in ("", card.eval_source)
    eval_source = eval_source or card.eval_source
    gone = [name for name in (source, eval_source) if name and not Path(name).expanduser().exists()]
    if gone and (source, eval_source) == (card.source, card.eval_source):
        return True
    return sha256_of(*find_sources([source], eval_source)) == card.source_sha256
