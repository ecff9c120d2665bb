"""A store is a folder of archives and manifests: what is in it, the newest that verifies, pruning, restoring by hand.

Scratch has a store, the run folder has one, and attached inputs may hold several.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nbutils import platforms
from nbutils.checkpoints.archive import NAME, UNREADABLE, Kept, defect, forget, read_manifest, unpack
from nbutils.config import flat
from nbutils.errors import CourseError

CHECKPOINTS, LOCAL_STORE, BEGAN_ANEW = "checkpoints", "sealed", "began_anew.txt"
RETRY_SECONDS = (1.0, 3.0, 9.0)  # for a disk that gives an error


def sealed(folders: platforms.Folders, run: str) -> Path:
    """The store in scratch, whose archives are copied to the run folder."""
    return folders.scratch / run / LOCAL_STORE


def stores(folders: platforms.Folders, run: str) -> list[Path]:
    """Where checkpoints of a run may lie: scratch, the run folder, an earlier one, attached outputs."""
    own = folders.keep / run / CHECKPOINTS
    if (own / BEGAN_ANEW).exists():  # after RESUME="never" or a chosen step, other places no longer count
        return [sealed(folders, run), own]
    earlier = [place / run / CHECKPOINTS for place in folders.earlier]
    attached = platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")
    return list(dict.fromkeys([sealed(folders, run), own, *earlier, *attached]))


def look(store: Path) -> tuple[list[Kept], list[str]]:
    """The checkpoints of a store, newest first, and a line for each file that cannot be one."""
    found, remarks = [], []
    try:
        names = {path.name for path in store.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        names = set()
    for path in (store / name for name in sorted(names)):
        if path.suffix == ".tar" and path.with_suffix(".json").name not in names:
            remarks.append(f"skipping {path.name}: it has no manifest, so its copy was never finished")
        if path.suffix != ".json" or not path.name.startswith("checkpoint-"):
            continue
        try:
            found.append(read_manifest(path))
        except (ValueError, OSError) as problem:
            remarks.append(f"skipping {path.stem}: its manifest cannot be used ({problem})")
    return sorted(found, key=lambda one: one.step, reverse=True), remarks


def newest_verified(stores: Iterable[Path], fingerprint: dict[str, Any], step: int | None = None) -> Kept | None:
    """The newest checkpoint of this training that verifies, or that of `step`; skipped ones are printed.

    Checkpoints of another training only are an error: they are not overwritten without being asked.
    """
    found = [one for store in stores for one in _look_with_retries(store)]
    found.sort(key=lambda one: one.step, reverse=True)  # equal steps stay in the order of the stores
    own = [one for one in found if one.manifest.fingerprint == fingerprint]
    if (best := first_whole([one for one in own if step in (None, one.step)])) is not None:
        return best
    if step is not None and (own or not found):
        raise _step_missing(f"step {step}", sorted({one.step for one in own} - {step}))
    other = first_whole([one for one in found if one.manifest.fingerprint != fingerprint])
    if other is not None:
        refuse_other_run(other.manifest.fingerprint, fingerprint)
    return None


def _look_with_retries(store: Path) -> list[Kept]:
    """What a store holds; one that cannot be listed stops the run, because starting at step 0 would overwrite it."""
    for wait in (*RETRY_SECONDS, None):
        try:
            found, remarks = look(store)
            break
        except OSError as problem:
            if wait is None:
                raise CourseError("checkpoints.unreadable", path=store, why=problem.strerror) from problem
            time.sleep(wait)
    print(*remarks, sep="\n", end="\n" if remarks else "")
    return found


def first_whole(candidates: Sequence[Kept]) -> Kept | None:
    """The first that verifies; a line for each that does not, an error for one that cannot be read now."""
    for one in candidates:
        for wait in (*RETRY_SECONDS, None):
            problem = defect(one)
            if problem is None:
                return one
            if not problem.startswith(UNREADABLE):
                break
            if wait is None:
                raise CourseError("checkpoints.unreadable", path=one.archive, why=problem)
            time.sleep(wait)
        print(f"skipping {one.archive.name} in {one.archive.parent}: {problem}")
    return None


def refuse_other_run(kept: dict[str, Any], requested: dict[str, Any]) -> None:
    """Stop if a checkpoint belongs to a different training than the requested one."""
    there, here = flat(kept), flat(requested)
    different = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if different:
        shown = (f"{name}: kept {there.get(name)!r}, requested {here.get(name)!r}" for name in different)
        raise CourseError("checkpoints.other_training", differences="; ".join(shown))


def prune(store: Path, newest: Kept, keep_last: int) -> None:
    """Drop all but the `keep_last` newest up to `newest`; later steps are of a run that got further and stay."""
    found = [one for one in look(store)[0] if one.step <= newest.step]
    whole = [one.archive for one in found if defect(one, thorough=False) is None]
    keep = {*whole[:keep_last], newest.archive}
    partial = [path for path in store.glob("checkpoint-*.tar") if (name := NAME.fullmatch(path.stem))
               and int(name[1]) <= newest.step]  # fmt: skip
    for archive in sorted({*partial, *(one.archive for one in found)} - keep):
        with suppress(OSError):  # one that cannot be removed must not keep the others
            forget(archive)


def clear(store: Path) -> int:
    """Remove every checkpoint of a store; how many there were."""
    files = [*store.glob("checkpoint-*.json"), *store.glob("checkpoint-*.tar")]  # manifests first
    found = [path for path in files if NAME.fullmatch(path.stem) and not path.is_dir()]
    for path in found:
        path.unlink(missing_ok=True)
    return len({path.stem for path in found})


def unsafe(store: Path) -> str | None:
    """Why the work in a store is not safe: nothing is kept, or its newest checkpoint does not verify."""
    found, _ = look(store)
    if not found:
        return f"no checkpoint is kept in {store}"
    problem = defect(found[0])
    return f"{found[0].archive.name}: {problem}" if problem else None


@dataclass(frozen=True)
class Line:
    """A row of `checkpoints list`: a checkpoint and its defect."""

    one: Kept
    problem: str | None

    def __str__(self) -> str:
        path = self.one.archive
        when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M") if path.exists() else "-"
        size = f"{self.one.manifest.size / 2**20:,.1f} MiB"
        return f"{self.one.step:>8}  {size:>12}  {when:16}  {self.problem or 'whole':30}  {path.parent}"


def listing(run: str, thorough: bool) -> tuple[list[Line], list[str]]:
    """Every checkpoint of a run (its name, or the path of its folder), newest first, and remarks on other files."""
    folders = platforms.folders(platforms.detect())
    given = Path(run).expanduser() / CHECKPOINTS
    found = [path for path in ([given] if given.is_dir() else stores(folders, Path(run).name)) if path.is_dir()]
    if not found:
        known = sorted(path.parent.name for path in folders.keep.glob(f"*/{CHECKPOINTS}"))
        raise CourseError("checkpoints.no_run", run=run, folder=folders.keep, known=", ".join(known) or "none yet")
    looked = [(path, *look(path)) for path in found]
    lines = [Line(one, defect(one, thorough)) for _, kept, _ in looked for one in kept]
    remarks = [f"{remark} ({path})" for path, _, skipped in looked for remark in skipped]
    return sorted(lines, key=lambda line: line.one.step, reverse=True), remarks


def restore_for_people(run: str, target: Path | None, step: int | None) -> Path:
    """Unpack the newest checkpoint that verifies (or that of `step`) into a folder that did not exist."""
    kept = [line.one for line in listing(run, thorough=False)[0]]
    whole = first_whole([one for one in kept if step in (None, one.step)])
    if whole is None:
        raise _step_missing("any step" if step is None else f"step {step}", sorted({one.step for one in kept}))
    target = target or Path.cwd() / whole.archive.stem
    if target.exists():
        raise CourseError("checkpoints.target_exists", path=target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unpack(whole, Path(folder)).rename(target)
    return target


def _step_missing(wanted: str, steps: list[int]) -> CourseError:
    return CourseError("checkpoints.step_missing", wanted=wanted, steps=", ".join(map(str, steps)) or "none")
