"""Checkpoints for people: which a run has and where, whether they are whole, one of them as a folder.

Not here: the command line (cli). A run is named as in RUN_NAME, or by the path of its folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nbutils import platforms
from nbutils.checkpoints import archive, store
from nbutils.checkpoints.archive import Kept
from nbutils.checkpoints.store import CHECKPOINTS, stores
from nbutils.errors import CourseError


@dataclass(frozen=True)
class Line:
    """One checkpoint as it is shown: what it is, and what is wrong with it."""

    one: Kept
    problem: str | None

    def __str__(self) -> str:
        place = self.one.archive
        when = datetime.fromtimestamp(place.stat().st_mtime).strftime("%Y-%m-%d %H:%M") if place.exists() else "-"
        size = f"{self.one.manifest.size / 2**20:,.1f} MiB"
        return f"{self.one.step:>8}  {size:>12}  {when:16}  {self.problem or 'whole':30}  {place.parent}"


def stores_of(run: str) -> list[Path]:
    """The stores of a run on this machine that exist; CourseError with the runs there are if it has none."""
    folders = platforms.folders(platforms.detect())
    given = Path(run).expanduser()
    wanted = [given / CHECKPOINTS] if (given / CHECKPOINTS).is_dir() else stores(folders, given.name)
    found = [place for place in wanted if place.is_dir()]
    if not found:
        known = sorted(place.parent.name for place in folders.keep.glob(f"*/{CHECKPOINTS}"))
        raise CourseError(
            f"no run {run!r} with checkpoints in {folders.keep}.", ", ".join(known) or "there is none there yet",
            "name one of these, give the path of a run folder, or set NBUTILS_HOME to where your runs are",
        )  # fmt: skip
    return found


def listing(run: str, thorough: bool) -> tuple[list[Line], list[str]]:
    """Every checkpoint of a run, newest first, and remarks on files that are none; `thorough` reads them whole."""
    lines, remarks = [], []
    for place in stores_of(run):
        found, skipped = store.look(place)
        lines += [Line(one, archive.defect(one, thorough)) for one in found]
        remarks += [f"{line} ({place})" for line in skipped]
    return sorted(lines, key=lambda line: line.one.step, reverse=True), remarks


def restore_for_people(run: str, target: Path | None, step: int | None) -> Path:
    """The newest checkpoint that verifies (or the one of `step`) as a folder that was not there before."""
    lines, _ = listing(run, thorough=False)
    wanted = [line.one for line in lines if step is None or line.one.step == step]
    whole = store.first_whole(wanted)
    if whole is None:
        steps = ", ".join(str(line.one.step) for line in lines) or "none"
        raise CourseError(
            f"run {run!r} has no whole checkpoint{'' if step is None else f' of step {step}'}.",
            f"a step among: {steps}", f"look at `python -m nbutils checkpoints verify {run}`",
        )  # fmt: skip
    target = target or Path.cwd() / whole.archive.stem
    if target.exists():
        raise CourseError(f"{target} exists already.", "a folder that does not exist yet", "name another with --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        archive.unpack(whole, Path(folder)).rename(target)
    return target
