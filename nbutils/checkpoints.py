"""Checkpoints that can be trusted: tar archives with a manifest, which is written last and read back.

Files get their final names at once, because a rename on a network disk may not stick. Archives may come from strangers.
A store is a folder of archives and manifests; `CheckpointSync` copies what the trainer saves to that of the run folder.
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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any

import tenacity
from pydantic import BaseModel, Field

from nbutils import display, former_names, platforms
from nbutils.config import flat
from nbutils.disk import folder_gib, free_gib
from nbutils.errors import CourseError
from nbutils.files import CHUNK, read_json, read_object, sha256
from nbutils.language import joined, tr

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it
MAX_MEMBERS, PLAIN_TYPES = 10_000, (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
MEMBER = re.compile(rb"[^\0/]{1,255}(/[^\0/]{1,255}){0,7}")  # names and paths that every disk takes
STATE = "trainer_state.json"  # in a checkpoint folder
CHECKPOINTS, BEGAN_ANEW = "checkpoints", "began_anew.txt"
RETRY_SECONDS = 1.0  # before a disk that gave an error is read again; then three and nine times as long
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before the copy of a checkpoint is tried again
THREAD_NAME = "checkpoint-sync"
_RUNNING: dict[Path, CheckpointSync] = {}  # by outbox


class StoredCheckpoint(BaseModel, frozen=True, extra="forbid", strict=True):
    """An archive, and what it must be by the manifest beside it."""

    archive: Path = Field(exclude=True)  # not in the manifest
    step: int
    size: int
    sha256: str
    fingerprint: dict[str, Any]
    validation_rows: int = 0  # of the run, which keeps them; 0 in manifests of versions that did not note it


class _HashingFile:
    """A file for writing that counts bytes and computes their sha256; writing ends once `stopped` says so."""

    def __init__(self, file: IO[bytes], stopped: Callable[[], bool]) -> None:
        self.file, self.stopped, self.size, self.digest = file, stopped, 0, hashlib.sha256()

    def tell(self) -> int:  # tarfile asks for it
        return self.size

    def write(self, chunk: bytes) -> int:
        if self.stopped():  # the cell ran again: this copy would turn up in the new run
            raise InterruptedError(errno.EINTR, "another sync took over")
        self.digest.update(chunk)
        self.size += len(chunk)
        return self.file.write(chunk)


def step_of(path: Path | None) -> int:
    """The step in the name of a checkpoint folder; 0 without one."""
    return int(path.name.rsplit("-", 1)[1]) if path else 0


def pack(
    folder: Path, store: Path, fingerprint: dict[str, Any], stopped: Callable[[], bool] = lambda: False,
    validation_rows: int = 0,
) -> StoredCheckpoint:  # fmt: skip
    """Write a checkpoint folder to `store` as an archive; its manifest is written once the archive verifies there."""
    archive = store / f"{folder.name}.tar"
    with _room_for(archive):
        with open(archive, "wb") as file:
            counted = _HashingFile(file, stopped)
            with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
                tar.add(folder, arcname=folder.name)
            flush(file)
        found: dict[str, Any] = {"step": step_of(folder), "size": counted.size, "sha256": counted.digest.hexdigest()}
        found["validation_rows"] = validation_rows
        return _with_manifest(StoredCheckpoint(archive=archive, fingerprint=fingerprint, **found))


def copy(one: StoredCheckpoint, store: Path) -> StoredCheckpoint:
    """Copy a checkpoint to another store; the manifest is written once the copy verifies there."""
    target = one.model_copy(update={"archive": store / one.archive.name})
    with _room_for(target.archive):
        shutil.copyfile(one.archive, target.archive)
        return _with_manifest(target)


@contextmanager
def _room_for(archive: Path) -> Iterator[None]:
    """Remove an older one of this name first; and what was written, if the disk is full."""
    forget(archive)
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            forget(archive)
        raise


def _with_manifest(one: StoredCheckpoint) -> StoredCheckpoint:
    """Write the manifest of an archive that verifies, and read it back."""
    if problem := defect(one):
        raise OSError(errno.EIO, tr("{name} does not verify: {problem}", name=one.archive.name, problem=problem))
    text = json.dumps(one.model_dump(), indent=2, ensure_ascii=False) + "\n"
    path = one.archive.with_suffix(".json")
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        flush(file)
    if path.read_text(encoding="utf-8") != text:
        raise OSError(errno.EIO, tr("the manifest reads differently than it was written"))
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
    content = read_json(path)
    if not isinstance(content, dict) or "archive" in content:
        raise ValueError("it is no manifest")
    one = StoredCheckpoint.model_validate(content | {"archive": path.with_suffix(".tar")})
    try:
        fingerprint = former_names.fingerprint(one.fingerprint)
    except (AttributeError, KeyError, TypeError) as problem:  # of no version of the course
        raise ValueError("its fingerprint is none of this course") from problem
    one = one.model_copy(update={"fingerprint": fingerprint})
    if path.stem != f"checkpoint-{one.step}" or not NAME.fullmatch(path.stem):
        raise ValueError(f"it belongs to step {one.step}")
    return one


def defect(one: StoredCheckpoint, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted, None if it can; `thorough` also reads it, with OSError if the disk fails."""
    try:
        found = one.archive.stat()
    except FileNotFoundError:
        return tr("the archive is missing")
    if not stat.S_ISREG(found.st_mode) or found.st_size != one.size:
        sizes = {"found": found.st_size, "size": one.size}
        return tr("{found:,} bytes, {size:,} expected: cut off or still uploading", **sizes)
    if not thorough:
        return None
    if sha256(one.archive) != one.sha256:
        return tr("its sha256 differs: damaged")
    try:
        with tarfile.open(one.archive, "r:") as tar:
            for _ in _checked_members(tar, one):
                pass
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as problem:  # tarfile raises all of them
        return tr("it is no checkpoint archive of this course ({problem})", problem=problem)
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
        plain = member.type in PLAIN_TYPES and not member.issparse() and not tar.pax_headers
        inside = is_folder.get(path.parent, False) and path.name != ".." if is_folder else path == top
        fits = 0 <= member.size <= one.size and MEMBER.fullmatch(os.fsencode(member.name))
        if not plain or not fits or not inside or path in is_folder or len(is_folder) > MAX_MEMBERS:
            raise tarfile.TarError(tr("{name!r} is not what a checkpoint holds", name=member.name[:80]))
        is_folder[path] = member.isdir()
        yield member
    if not is_folder.get(top):
        raise tarfile.TarError(tr("it holds no folder {name}", name=top))
    rest: Any = tar.fileobj
    rest.seek(tar.offset)
    if any(rest.read(tarfile.RECORDSIZE)):  # some versions of tarfile take a bad header for the end
        raise tarfile.TarError(tr("it goes on after its last member"))


def stores(folders: platforms.Folders, run: str) -> list[Path]:
    """Where checkpoints of a run may lie: the run folder, an earlier one, inputs."""
    own = folders.keep / run / CHECKPOINTS
    if (own / BEGAN_ANEW).exists():  # after RESUME="never" or a chosen step, other places no longer count
        return [own]
    earlier = [place / run / CHECKPOINTS for place in folders.earlier]
    attached = platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")
    return list(dict.fromkeys([own, *earlier, *attached]))


def look(store: Path) -> tuple[list[StoredCheckpoint], list[str]]:
    """The checkpoints of a store, newest first, and a line for each file that cannot be one."""
    found, remarks, paths = [], [], []
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = sorted(store.iterdir())
    for path in paths:
        if path.suffix == ".tar" and path.with_suffix(".json") not in paths:
            why = tr("it has no manifest, so its copy was never finished")
            remarks.append(tr("skipping {name}: {why}", name=path.name, why=why))
        if path.suffix == ".json" and path.name.startswith("checkpoint-"):
            try:
                found.append(read_manifest(path))
            except ValueError:
                remarks.append(tr("skipping {name}: {why}", name=path.stem, why=tr("its manifest cannot be used")))
    return sorted(found, key=lambda one: one.step, reverse=True), remarks


def newest(folders: platforms.Folders, run: str) -> StoredCheckpoint | None:
    """The newest checkpoint of a run, verified or not."""
    found, _ = _newest_first(stores(folders, run))
    return found[0] if found else None


def _newest_first(stores: Iterable[Path]) -> tuple[list[StoredCheckpoint], list[str]]:
    """The checkpoints of all stores, and the lines about what is none; equal steps stay in the order of the stores."""
    looked = [_with_retries(look, store, store) for store in stores]
    found = sorted((one for kept, _ in looked for one in kept), key=lambda one: one.step, reverse=True)
    return found, [line for _, remarks in looked for line in remarks]


def newest_verified(
    stores: Iterable[Path], fingerprint: dict[str, Any], step: int | None = None
) -> StoredCheckpoint | None:
    """The newest checkpoint of this training that verifies, or that of `step`; an error if only other trainings' do."""
    found, remarks = _newest_first(stores)
    print(*remarks, sep="\n", end="\n" if remarks else "")
    own = [one for one in found if one.fingerprint == fingerprint]
    if (best := _first_verified([one for one in own if step in (None, one.step)])) is not None:
        return best
    if step is not None and (own or not found):
        raise _step_missing(step, {one.step for one in own} - {step})
    other = _first_verified([one for one in found if one.fingerprint != fingerprint])
    if other is not None:
        there, here = flat(other.fingerprint), flat(fingerprint)
        names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        both = [{"name": name, "kept": there.get(name), "asked": here.get(name)} for name in names]
        shown = (tr("{name}: kept {kept!r}, requested {asked!r}", **one) for one in both)
        raise CourseError(
            tr("The checkpoints in this run are of another training ({differences}).", differences=joined(shown, ";")),
            todo=tr(
                "Choose another RUN_NAME, set what differs back to what was kept (SET), or start this run "
                'over with RESUME="never".'
            ),
        )
    return None


def verified_at(stores: Iterable[Path], fingerprint: dict[str, Any], step: int) -> StoredCheckpoint | None:
    """The checkpoint of a step of this training, if one verifies."""
    found, _ = _newest_first(stores)
    return _first_verified([one for one in found if one.fingerprint == fingerprint and one.step == step])


def _with_retries(read: Callable[[Any], Any], given: Any, path: Path) -> Any:
    """What `read` returns; a disk that cannot be read stops the run, because starting at step 0 would overwrite it."""
    wait = tenacity.wait_exponential(RETRY_SECONDS, exp_base=3)
    again = tenacity.retry_if_exception_type(OSError)
    try:
        return tenacity.Retrying(stop=tenacity.stop_after_attempt(4), wait=wait, retry=again, reraise=True)(read, given)
    except OSError as problem:
        raise CourseError(
            tr("{path} cannot be read ({why}), and it may hold trained checkpoints.", path=path, why=problem.strerror),
            todo=tr('Mount it again (Colab: restart the session) and run this cell again; RESUME="never" starts over.'),
        ) from problem


def _first_verified(candidates: Sequence[StoredCheckpoint]) -> StoredCheckpoint | None:
    """The first that verifies; a line for each that does not."""
    for one in candidates:
        problem = _with_retries(defect, one, one.archive)
        if problem is None:
            return one
        place = {"name": one.archive.name, "folder": one.archive.parent, "why": problem}
        print(tr("skipping {name} in {folder}: {why}", **place))
    return None


def prune(store: Path, newest: StoredCheckpoint, keep_last: int, best_step: int | None = None) -> None:
    """Drop all but the `keep_last` newest up to `newest`, and the best; later steps are of a run that got further."""
    found = [one for one in look(store)[0] if one.step <= newest.step and defect(one, thorough=False) is None]
    keep = {newest.archive, *(one.archive for one in found[:keep_last])}
    keep |= {one.archive for one in found if one.step == best_step}
    for archive in store.glob("checkpoint-*.tar"):
        name = NAME.fullmatch(archive.stem)
        if name and int(name[1]) <= newest.step and archive not in keep:
            forget(archive)


def clear(store: Path) -> int:
    """Remove every checkpoint of a store; how many there were."""
    files = [*store.glob("checkpoint-*.json"), *store.glob("checkpoint-*.tar")]
    found = {path.with_suffix(".tar") for path in files if NAME.fullmatch(path.stem)}
    for archive in found:
        forget(archive)
    return len(found)


def require_step(folders: platforms.Folders, run: str, resume: str) -> None:
    """Refuse a RESUME that names a step of which the run keeps no checkpoint."""
    if resume.isdecimal():
        steps = {one.step for store in stores(folders, run) for one in _with_retries(look, store, store)[0]}
        if int(resume) not in steps:
            raise _step_missing(int(resume), steps)


@dataclass(frozen=True)
class Line:
    """A row of `checkpoints list`."""

    one: StoredCheckpoint
    problem: str | None

    def row(self, thorough: bool) -> dict[str, Any]:
        """The row, for people."""
        when = datetime.fromtimestamp(self.one.archive.with_suffix(".json").stat().st_mtime)
        return {
            tr("step"): self.one.step, tr("size"): f"{self.one.size / 2**20:,.1f} MiB",
            tr("kept at"): f"{when:%Y-%m-%d %H:%M}",
            tr("verified") if thorough else tr("size and manifest"): self.problem or tr("whole"),
            tr("where"): self.one.archive.parent,
        }  # fmt: skip


def listing(run: str, thorough: bool) -> tuple[list[Line], list[str]]:
    """Every checkpoint of a run (its name, or the path of its folder), newest first, and remarks on other files."""
    folders, given = platforms.folders(platforms.detect()), Path(run).expanduser() / CHECKPOINTS
    found = [path for path in ([given] if given.is_dir() else stores(folders, Path(run).name)) if path.is_dir()]
    if not found:
        known = sorted(path.parent.name for path in folders.keep.glob(f"*/{CHECKPOINTS}"))
        raise CourseError(
            tr("There is no run {run!r} with checkpoints in {folder}.", run=run, folder=folders.keep),
            allowed=", ".join(known) or tr("none yet"),
            todo=tr(
                "Name one of these, give the path of a run folder, or set NBUTILS_HOME to the folder of your runs."
            ),
        )
    looked = [(path, *look(path)) for path in found]
    lines = [Line(one, defect(one, thorough)) for _, kept, _ in looked for one in kept]
    remarks = [f"{remark} ({path})" for path, _, skipped in looked for remark in skipped]
    return sorted(lines, key=lambda line: line.one.step, reverse=True), remarks


def restore(run: str, target: Path | None, step: int | None) -> Path:
    """Unpack the newest checkpoint that verifies (or that of `step`) into a folder that did not exist."""
    kept = [line.one for line in listing(run, thorough=False)[0]]
    chosen = _first_verified([one for one in kept if step in (None, one.step)])
    if chosen is None:
        raise _step_missing(step, {one.step for one in kept})
    target = target or Path.cwd() / chosen.archive.stem
    if target.exists():
        raise CourseError(tr("{path} exists already.", path=target), todo=tr("Name another folder with --to."))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unpack(chosen, Path(folder)).rename(target)
    return target


def _step_missing(step: int | None, steps: set[int]) -> CourseError:
    requested = tr("any step") if step is None else tr("step {step}", step=step)
    known = ", ".join(map(str, sorted(steps))) or tr("none")
    return CourseError(
        tr("This run has no complete checkpoint of {requested}.", requested=requested),
        allowed=tr("a step among: {steps}", steps=known),
        todo=tr(
            'Set RESUME (or --step) to one of these steps, or RESUME to "auto". `python -m nbutils '
            "checkpoints verify RUN` checks them all."
        ),
    )


class CheckpointSync:
    """Copies from `outbox` to `keep` in a thread; `check` raises OSError while that is gone; `logs` go from, to."""

    def __init__(
        self, outbox: Path, keep: Path, fingerprint: dict[str, Any], keep_last: int = 3,
        check: Callable[[], None] = lambda: None, logs: tuple[Path, Path] | None = None, validation_rows: int = 0,
    ) -> None:  # fmt: skip
        self.outbox, self.keep, self.fingerprint, self.keep_last = outbox, keep, fingerprint, keep_last
        self.check, self.logs, self.validation_rows = check, logs, validation_rows
        self.kept: StoredCheckpoint | None = None  # the newest that verified in the run folder
        self.seconds = 0.0  # of the last whole sync
        self.problem: str | None = None
        self._messages: deque[str] = deque()
        self._pause = FIRST_PAUSE
        self._wake, self._stopped = threading.Event(), threading.Event()
        outbox.mkdir(parents=True, exist_ok=True)
        end_earlier(outbox)
        _RUNNING[outbox] = self
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def take(self, folder: Path) -> None:
        """Accept a finished checkpoint folder; the trainer may delete it, and must not write into it again."""
        if self._stopped.is_set():
            raise CourseError(
                tr("The checkpoint sync of this training was stopped, because this run was started again."),
                todo=tr("Run the cells again from the one that loads the model, in order."),
            )
        partial = self.outbox / f".{folder.name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder, partial, copy_function=_link)
        os.replace(partial, self.outbox / folder.name)
        self._wake.set()

    def messages(self) -> list[str]:
        """Lines for the learner since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    @property
    def waiting(self) -> Path | None:
        """The newest checkpoint folder that is not in the run folder yet; None when everything is."""
        return max(self.outbox.glob("checkpoint-*"), key=step_of, default=None)

    def finish(self, patience: float = 600.0) -> StoredCheckpoint | None:
        """Wait until the newest checkpoint is in the run folder, and show that; an error after `patience` seconds."""
        self._pause = FIRST_PAUSE
        self._wake.set()
        output, started, shown = display.LiveOutput(most_lines=1), time.monotonic(), 0
        while (path := self.waiting) is not None:
            waited = time.monotonic() - started
            if waited > patience:
                problem = self.problem or tr("no answer")
                raise CourseError(
                    tr(
                        "The last checkpoint could not be copied to {folder}: {problem}.",
                        folder=self.keep,
                        problem=problem,
                    ),
                    todo=tr(
                        "Make it reachable or free some space, then run this cell again; until then the checkpoint "
                        "is {path}.",
                        path=path,
                    ),
                )
            if int(waited) > shown:
                shown = int(waited)
                about = {"step": step_of(path), "folder": self.keep, "seconds": shown, "problem": self.problem or ""}
                output.show(tr("copying checkpoint {step} to {folder}: {seconds} s. {problem}", **about))
            time.sleep(0.05)
        with suppress(OSError):  # the checkpoint is safe; logs are no reason for an error
            self._copy_logs()
        for line in self.messages():
            print(line)
        return self.kept

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause if self.problem else None)
            self._wake.clear()
            try:
                self._sync()
                self.problem, self._pause = None, FIRST_PAUSE
            except Exception as problem:  # whatever it is, training goes on
                text = f"{getattr(problem, 'strerror', None) or problem} ({type(problem).__name__})"
                if self.problem is None:
                    about = {"folder": self.keep, "problem": text}
                    warning = tr("[WARN] a checkpoint could not be copied to {folder}: {problem}.", **about)
                    self._messages.append(f"{warning} {tr('Training goes on; the copy is retried.')}")
                self.problem, self._pause = text, min(self._pause * 2, LONGEST_PAUSE)

    def _sync(self) -> None:
        """Pack the newest folder into the run folder, prune there, copy the logs."""
        while (folder := self.waiting) is not None:
            started, best = time.monotonic(), read_object(folder / STATE).get("best_global_step")
            kept = self._pack(folder)
            self.seconds = time.monotonic() - started
            about = {"step": kept.step, "size": kept.size / 2**20}
            self._messages.append(tr("checkpoint {step} is kept ({size:,.1f} MiB, verified)", **about))
            if self.problem:
                self._messages.append(tr("copying works again"))
            self.kept, self.problem = kept, None
            best_folder = self.outbox / f"checkpoint-{best}"
            if best != kept.step and best_folder.is_dir():  # it waited beside the newest, and nothing else keeps it
                self._pack(best_folder)
            for older in self.outbox.glob("checkpoint-*"):
                if step_of(older) <= kept.step:
                    shutil.rmtree(older)
            with suppress(OSError):  # the checkpoint is safe; this is done again next time
                prune(self.keep, kept, self.keep_last, best)
                self._copy_logs()

    def _pack(self, folder: Path) -> StoredCheckpoint:
        self.check()
        self.keep.mkdir(exist_ok=True)  # not its parents: if the run folder is gone, so is the disk
        with suppress(FileNotFoundError, ValueError):
            there = read_manifest(self.keep / f"{folder.name}.json")
            if there.fingerprint == self.fingerprint and defect(there) is None:
                return there  # a whole one is never overwritten
        if (free := free_gib(self.keep)) < (size := folder_gib(folder)):
            raise OSError(errno.ENOSPC, tr("{size:.2f} GiB needed, {free:.2f} GiB free", size=size, free=free))
        return pack(folder, self.keep, self.fingerprint, self._stopped.is_set, self.validation_rows)

    def _copy_logs(self) -> None:
        if self.logs is None:
            return
        self.check()  # folders must not be made where a mount was
        source, target = self.logs
        for file in (path for path in source.rglob("*") if path.is_file() and not path.is_symlink()):
            name = file.relative_to(source)
            copy = target / name
            there, here = copy.stat() if copy.exists() else None, file.stat()
            if there is None or there.st_size != here.st_size or there.st_mtime < here.st_mtime:
                for parent in reversed(name.parents):  # below the run folder only: its disk may go at any moment
                    (target / parent).mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _link(source: str, target: str) -> None:
    """The same file under another name; a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def end_earlier(outbox: Path) -> None:
    """Stop the sync that an earlier run of the cell started for this run; a copy under way is given up."""
    if old := _RUNNING.pop(outbox, None):
        old._stopped.set()
        old._wake.set()
        old._thread.join(timeout=30)  # a disk that hangs must not hang the cell
