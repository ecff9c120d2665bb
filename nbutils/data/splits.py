"""The data folder of a run: made once from its source, reused afterwards, never quietly exchanged for another.

Not here: the pass over the rows (building) and the rules of a single row (rows).
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from nbutils import scaling
from nbutils.data.building import Build
from nbutils.data.card import AGAIN, CARD, EVAL, TRAIN, DataCard, verify
from nbutils.data.reading import files_of
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import GIB, SAMPLES

HELD_OUT_NAMES = ("eval", "test", "valid", "validation", "dev")
BUNDLED = "the bundled sample"


@scaling.main_first()
def prepare(
    source: str, out: Path, *, eval_source: str = "", eval_fraction: float = 0.1, rows: int = 0, licence: str = ""
) -> DataCard:
    """Make the data folder of a run, or reuse the finished one that came from the same source and settings."""
    if not 0 < eval_fraction < 1:
        raise CourseError(
            f"eval_fraction is {eval_fraction}.", "more than 0 and less than 1", "0.1 keeps a tenth apart"
        )
    if rows < 0:
        raise CourseError(f"rows is {rows}.", "0 (all) or the number of training rows", "choose 0 or more")
    asked = {"source": source, "eval_source": eval_source, "eval_fraction": eval_fraction, "limit": rows}
    if (out / CARD).exists():
        return _reuse(out, asked)
    train_files, eval_files = _sources(source, eval_source)
    own = "CC0-1.0, written for this course"
    asked |= {"source": source or BUNDLED, "licence": licence or ("unstated" if source else own)}
    asked |= {"source_sha256": _sha256(train_files, eval_files)}
    size = sum(file.stat().st_size for file in (*train_files, *eval_files)) / GIB
    require_disk(out, 3 * size, "preparing the data")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as building:
        return Build(Path(building), asked).run(train_files, eval_files, out)


def _sources(source: str, eval_source: str) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files; a folder with an `eval`, `test` or `valid` file brings its own."""
    if not source:
        return [SAMPLES / TRAIN], files_of(eval_source) if eval_source else [SAMPLES / EVAL]
    files = files_of(source)
    if eval_source:
        return files, files_of(eval_source)
    held_out = [file for file in files if file.stem.lower() in HELD_OUT_NAMES]
    return ([file for file in files if file not in held_out], held_out) if len(held_out) < len(files) else (files, [])


def _sha256(*groups: list[Path]) -> str:
    """The content of the source files, in order; names and places do not count."""
    digest = hashlib.sha256()
    for group in groups:
        for path in group:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            digest.update(b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def _reuse(out: Path, asked: dict[str, Any]) -> DataCard:
    """The finished data, if it is what was asked for; what is not named is taken from its card."""
    card = verify(out)
    changed = [key for key in ("eval_fraction", "limit") if getattr(card, key) != asked[key]]
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
    return _sha256(*_sources(source, eval_source)) == card.source_sha256
