"""A store is a folder of archives and manifests: what is in it, the newest that verifies, restoring by hand."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from nbutils import platforms
from nbutils.checkpoints.archive import NAME, StoredCheckpoint, defect, forget, read_manifest, unpack
from nbutils.config import flat
from nbutils.errors import CourseError

CHECKPOINTS, BEGAN_ANEW = "checkpoints", "began_anew.txt"
RETRY_SECONDS = 1.0  # before a disk that gave an error is read again; then three and nine times as long
Given = TypeVar("Given")
Result = TypeVar("Result")


def stores(folders: platforms.Folders, run: str) -> list[Path]:
    """Where checkpoints of a run may lie: scratch (of a former version), the run folder, an earlier one, inputs."""
    local, own = folders.scratch / run / "sealed", folders.keep / run / CHECKPOINTS
    if (own / BEGAN_ANEW).exists():  # after RESUME="never" or a chosen step, other places no longer count
        return [local, own]
    earlier = [place / run / CHECKPOINTS for place in folders.earlier]
    attached = platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")
    return list(dict.fromkeys([local, own, *earlier, *attached]))


def look(store: Path) -> tuple[list[StoredCheckpoint], list[str]]:
    """The checkpoints of a store, newest first, and a line for each file that cannot be one."""
    found, remarks = [], []
    try:
        paths = sorted(store.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    for path in paths:
        if path.suffix == ".tar" and path.with_suffix(".json") not in paths:
            remarks.append(f"skipping {path.name}: it has no manifest, so its copy was never finished")
        if path.suffix == ".json" and path.name.startswith("checkpoint-"):
            try:
                found.append(read_manifest(path))
            except ValueError as problem:
                remarks.append(f"skipping {path.stem}: its manifest cannot be used ({problem})")
    return sorted(found, key=lambda one: one.step, reverse=True), remarks


def newest_verified(
    stores: Iterable[Path], fingerprint: dict[str, Any], step: int | None = None
) -> StoredCheckpoint | None:
    """The newest checkpoint of this training that verifies, or that of `step`; only others' are an error."""
    found: list[StoredCheckpoint] = []
    for store in stores:
        kept, remarks = _with_retries(look, store, store)
        print(*remarks, sep="\n", end="\n" if remarks else "")
        found += kept
    found.sort(key=lambda one: one.step, reverse=True)  # equal steps stay in the order of the stores
    own = [one for one in found if one.manifest.fingerprint == fingerprint]
    if (best := _first_verified([one for one in own if step in (None, one.step)])) is not None:
        return best
    if step is not None and (own or not found):
        raise _step_missing(f"step {step}", sorted({one.step for one in own} - {step}))
    other = _first_verified([one for one in found if one.manifest.fingerprint != fingerprint])
    if other is not None:
        there, here = flat(other.manifest.fingerprint), flat(fingerprint)
        names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        shown = (f"{name}: kept {there.get(name)!r}, requested {here.get(name)!r}" for name in names)
        raise CourseError("checkpoints.other_training", differences="; ".join(shown))
    return None


def _with_retries(read: Callable[[Given], Result], given: Given, path: Path) -> Result:
    """What `read` returns; a disk that cannot be read stops the run, because starting at step 0 would overwrite it."""
    wait = tenacity.wait_exponential(RETRY_SECONDS, exp_base=3)
    again = tenacity.retry_if_exception_type(OSError)
    try:
        return tenacity.Retrying(stop=tenacity.stop_after_attempt(4), wait=wait, retry=again, reraise=True)(read, given)
    except OSError as problem:
        raise CourseError("checkpoints.unreadable", path=path, why=problem.strerror) from problem


def _first_verified(candidates: Sequence[StoredCheckpoint]) -> StoredCheckpoint | None:
    """The first that verifies; a line for each that does not."""
    for one in candidates:
        problem = _with_retries(defect, one, one.archive)
        if problem is None:
            return one
        print(f"skipping {one.archive.name} in {one.archive.parent}: {problem}")
    return None


def prune(store: Path, newest: StoredCheckpoint, keep_last: int) -> None:
    """Drop all but the `keep_last` newest up to `newest`; later steps are of a run that got further and stay."""
    found = [one for one in look(store)[0] if one.step <= newest.step and defect(one, thorough=False) is None]
    keep = {newest.archive, *(one.archive for one in found[:keep_last])}
    for archive in store.glob("checkpoint-*.tar"):
        name = NAME.fullmatch(archive.stem)
        if name and int(name[1]) <= newest.step and archive not in keep:
            forget(archive)


def clear(store: Path) -> int:
    """Remove every checkpoint of a store; how many there were."""
    files = [*store.glob("checkpoint-*.json"), *store.glob("checkpoint-*.tar")]  # manifests first
    found = [path for path in files if NAME.fullmatch(path.stem)]
    for path in found:
        path.unlink(missing_ok=True)
    return len({path.stem for path in found})


def unsafe(store: Path) -> str | None:
    """Why the work in a store is not safe: nothing is kept, or its newest checkpoint does not verify."""
    found, _ = look(store)
    return defect(found[0]) if found else f"no checkpoint is kept in {store}"


@dataclass(frozen=True)
class Line:
    """A row of `checkpoints list`: a checkpoint and its defect."""

    one: StoredCheckpoint
    problem: str | None

    def __str__(self) -> str:
        folder, size = self.one.archive.parent, f"{self.one.manifest.size / 2**20:,.1f} MiB"
        kept = time.localtime(self.one.archive.with_suffix(".json").stat().st_mtime)
        when = time.strftime("%Y-%m-%d %H:%M", kept)
        return f"{self.one.step:>8}  {size:>12}  {when:16}  {self.problem or 'whole':30}  {folder}"


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


def restore(run: str, target: Path | None, step: int | None) -> Path:
    """Unpack the newest checkpoint that verifies (or that of `step`) into a folder that did not exist."""
    kept = [line.one for line in listing(run, thorough=False)[0]]
    chosen = _first_verified([one for one in kept if step in (None, one.step)])
    if chosen is None:
        raise _step_missing("any step" if step is None else f"step {step}", sorted({one.step for one in kept}))
    target = target or Path.cwd() / chosen.archive.stem
    if target.exists():
        raise CourseError("checkpoints.target_exists", path=target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unpack(chosen, Path(folder)).rename(target)
    return target


def _step_missing(requested: str, steps: list[int]) -> CourseError:
    return CourseError("checkpoints.step_missing", requested=requested, steps=", ".join(map(str, steps)) or "none")
