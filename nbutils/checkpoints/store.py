"""A store is a folder of archives and manifests: scratch has one, keep has one, attached inputs may hold several.

Here: what is in it, the newest that verifies, dropping old ones. Not here: how one archive is made (archive).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbutils import platforms
from nbutils.checkpoints.archive import NAME, UNREADABLE, Kept, defect, forget, manifest_of, read_manifest
from nbutils.config import flat
from nbutils.errors import CourseError

CHECKPOINTS, SEALED, BEGAN_ANEW = "checkpoints", "sealed", "began_anew.txt"
WAITS = (1.0, 3.0, 9.0)  # seconds between looks at a store that cannot be listed


def sealed(folders: platforms.Folders, run: str) -> Path:
    """The store in scratch: archives on their way to keep."""
    return folders.scratch / run / SEALED


def stores(folders: platforms.Folders, run: str) -> list[Path]:
    """Where checkpoints of a run may lie: scratch, keep, an earlier keep, attached outputs of a former run."""
    own = folders.keep / run / CHECKPOINTS
    if (own / BEGAN_ANEW).exists():  # RESUME="never" was said, and what others still have is not meant any more
        return [sealed(folders, run), own]
    homes = [own, *(place / run / CHECKPOINTS for place in folders.earlier)]
    attached = platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")
    return list(dict.fromkeys([sealed(folders, run), *homes, *attached]))


def look(store: Path) -> tuple[list[Kept], list[str]]:
    """The checkpoints of a store, newest first, and a line for each file that cannot be one."""
    found, remarks = [], []
    try:
        names = {place.name for place in store.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        names = set()
    for name in sorted(names):
        place = store / name
        if place.suffix == ".tar" and manifest_of(place).name not in names:
            remarks.append(f"skipping {name}: it has no manifest, so its copy was never finished")
        if place.suffix != ".json" or not name.startswith("checkpoint-"):
            continue
        try:
            found.append(Kept(place.with_suffix(".tar"), read_manifest(place)))
        except (ValueError, OSError) as problem:
            remarks.append(f"skipping {place.stem}: its manifest cannot be used ({problem})")
    return sorted(found, key=lambda one: one.step, reverse=True), remarks


def newest_verified(stores: Iterable[Path], mark: dict[str, Any], step: int | None = None) -> Kept | None:
    """The newest checkpoint of this very training that verifies, or the one of `step`; each skipped one told in a line.

    If there are only checkpoints of another training, that is an error: its work is not to be overwritten unasked.
    """
    found = [one for store in stores for one in _look_patiently(store)]
    found.sort(key=lambda one: one.step, reverse=True)  # equal steps stay in the order of the stores
    own = [one for one in found if one.manifest.fingerprint == mark]
    wanted = [one for one in own if step in (None, one.step)]
    if (best := first_whole(wanted)) is not None:
        return best
    if hidden := [one for one in wanted if (defect(one) or "").startswith(UNREADABLE)]:
        raise _unreadable(hidden[0].archive, "the disk gives an error for it")
    if step is not None and (own or not found):
        raise CourseError(
            f"this run has no whole checkpoint of step {step}.",
            f"a step among: {', '.join(str(at) for at in sorted({one.step for one in own} - {step})) or 'none'}",
            "set RESUME to one of these or to auto; `python -m nbutils checkpoints verify RUN` reads them all",
        )
    if (other := first_whole([one for one in found if one.manifest.fingerprint != mark])) is not None:
        refuse_other_run(other.manifest.fingerprint, mark)
    return None


def _unreadable(place: Path, why: str | None) -> CourseError:
    """The error for work that may be there and cannot be seen: starting at step 0 would write over it."""
    return CourseError(
        f"{place} cannot be read ({why}), and what was trained may be in it.",
        "a disk that can be read",
        'mount it again (Colab: restart the session) or wait, and run this cell again; RESUME="never" starts anew',
    )


def _look_patiently(store: Path) -> list[Kept]:
    """What a store holds; a store that cannot be listed is asked again, then it stops the run: work may be in it."""
    for wait in (*WAITS, None):
        try:
            found, remarks = look(store)
        except OSError as problem:
            if wait is None:
                raise _unreadable(store, problem.strerror) from problem
            time.sleep(wait)
        else:
            print(*remarks, sep="\n", end="\n" if remarks else "")
            return found
    raise AssertionError("unreachable")


def first_whole(candidates: Sequence[Kept]) -> Kept | None:
    """The first that verifies; a line for each that does not."""
    for one in candidates:
        problem = defect(one)
        if problem and problem.startswith(UNREADABLE):  # a network disk's bad moment: it gets a second one
            time.sleep(WAITS[0])
            problem = defect(one)
        if problem is None:
            return one
        print(f"skipping {one.archive.name} in {one.archive.parent}: {problem}")
    return None


def refuse_other_run(there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Stop if a checkpoint belongs to a different training than the one asked for."""
    kept, asked = flat(there), flat(wanted)
    different = [name for name in sorted(set(kept) | set(asked)) if kept.get(name) != asked.get(name)]
    if different:
        shown = "; ".join(f"{name}: kept {kept.get(name)!r}, asked {asked.get(name)!r}" for name in different)
        raise CourseError(
            f"the checkpoints in this run are of another training ({shown}).",
            "the same model, data, adapter, way of training and seed as the run began with",
            'choose another RUN_NAME, or set RESUME="never" to start this run anew',
        )


def prune(store: Path, newest: Kept, keep_last: int) -> None:
    """Drop what is older than the `keep_last` newest up to `newest`, which was verified just now.

    Later steps are left alone: they are of a run that got further, and are written anew when this one gets there.
    """
    found, _ = look(store)
    up_to_now = [one for one in found if one.step <= newest.step]
    whole = [one for one in up_to_now if defect(one, thorough=False) is None]
    staying = {one.archive for one in whole[:keep_last]} | {newest.archive}
    for place in sorted(store.glob("checkpoint-*.tar")):
        step = NAME.fullmatch(place.stem)
        if place not in staying and step and int(step[1]) <= newest.step:
            _forget_if_possible(place)
    for one in up_to_now:
        if one.archive not in staying:
            _forget_if_possible(one.archive)


def _forget_if_possible(archive: Path) -> None:
    with suppress(OSError):  # one that will not go must not keep the others
        forget(archive)


def clear(store: Path) -> int:
    """Remove every checkpoint of a store, and say how many there were."""
    files = sorted(store.glob("checkpoint-*.json")) + sorted(store.glob("checkpoint-*.tar"))
    found = [place for place in files if NAME.fullmatch(place.stem) and not place.is_dir()]
    for place in found:
        place.unlink(missing_ok=True)
    return len({place.stem for place in found})


def unsafe(store: Path) -> str | None:
    """Why the work in a store is not safe yet: nothing is kept, or its newest checkpoint does not verify."""
    found, _ = look(store)
    if not found:
        return f"no checkpoint is kept in {store}"
    problem = defect(found[0])
    return f"{found[0].archive.name}: {problem}" if problem else None
