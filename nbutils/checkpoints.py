"""Checkpoints that can be trusted: tar archives with a manifest, which is written last and read back.

Files get their final names at once, because a rename on a network disk may not stick. Archives may come from strangers.
A store is a folder of archives and manifests; `CheckpointSync` copies what the trainer saves to that of the run folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

import tenacity
from pydantic import BaseModel, Field

from nbutils import former_names, platforms
from nbutils.config import flat
from nbutils.disk import folder_gib, free_gib
from nbutils.errors import CourseError
from nbutils.files import CHUNK, read_json, read_object, sha256
from nbutils.language import joined, tr

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it
MAX_MEMBERS = 10_000
PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
MEMBER = re.compile(rb"[^\0/]{1,255}(/[^\0/]{1,255}){0,7}")  # names and paths that every disk takes
STATE = "trainer_state.json"  # in a checkpoint folder
CHECKPOINTS = "checkpoints"
BEGAN_ANEW = "began_anew.txt"
RETRY_SECONDS = 1.0  # before a disk that gave an error is read again; then three and nine times as long
PAUSE = 20.0  # before the copy of a checkpoint is tried again
THREAD_NAME = "checkpoint-sync"
_RUNNING: dict[Path, CheckpointSync] = {}  # by outbox
Fingerprint = dict[str, Any]


class StoredCheckpoint(BaseModel, frozen=True, extra="forbid", strict=True):
    """An archive, and what it must be by the manifest beside it."""

    archive: Path = Field(exclude=True)  # not in the manifest
    step: int
    size: int
    sha256: str
    fingerprint: Fingerprint
    validation_rows: int = 0  # of the run, which keeps them; 0 in manifests of versions that did not note it


@dataclass
class _HashingFile:
    """A file for writing that counts bytes and computes their sha256; writing ends once `stopped` says so."""

    file: IO[bytes]
    stopped: Callable[[], bool]
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

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
    if path is None:
        return 0
    return int(path.name.removesuffix(".tar").rpartition("-")[2])


def pack(
    folder: Path,
    store: Path,
    fingerprint: Fingerprint,
    validation_rows: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> StoredCheckpoint:
    """Write a checkpoint folder to `store` as an archive; its manifest is written once the archive verifies there."""
    archive = store / f"{folder.name}.tar"
    with _room_for(archive):
        with open(archive, "wb") as file:
            counted = _HashingFile(file, stopped)
            with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
                tar.add(folder, arcname=folder.name)
            _flush(file)
        checkpoint = StoredCheckpoint(
            archive=archive,
            step=step_of(folder),
            size=counted.size,
            sha256=counted.digest.hexdigest(),
            fingerprint=fingerprint,
            validation_rows=validation_rows,
        )
        _write_manifest(checkpoint)
    return checkpoint


def copy(checkpoint: StoredCheckpoint, store: Path) -> StoredCheckpoint:
    """Copy a checkpoint to another store; the manifest is written once the copy verifies there."""
    target = checkpoint.model_copy(update={"archive": store / checkpoint.archive.name})
    with _room_for(target.archive):
        shutil.copyfile(checkpoint.archive, target.archive)
        _write_manifest(target)
    return target


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


def _write_manifest(checkpoint: StoredCheckpoint) -> None:
    """Write the manifest of an archive that verifies, and read it back."""
    name = checkpoint.archive.name
    if problem := defect(checkpoint):
        raise OSError(errno.EIO, tr("{name} does not verify: {problem}", name=name, problem=problem))
    text = checkpoint.model_dump_json(indent=2) + "\n"
    path = checkpoint.archive.with_suffix(".json")
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        _flush(file)
    if path.read_text(encoding="utf-8") != text:
        raise OSError(errno.EIO, tr("the manifest reads differently than it was written"))


def _flush(file: IO[Any]) -> None:
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
    try:
        content = {**content, "fingerprint": former_names.fingerprint(content["fingerprint"])}
    except (AttributeError, KeyError, TypeError) as problem:  # of no version of the course
        raise ValueError("it is no manifest of this course") from problem
    checkpoint = StoredCheckpoint.model_validate(content | {"archive": path.with_suffix(".tar")})
    if path.stem != f"checkpoint-{checkpoint.step}":
        raise ValueError(f"it belongs to step {checkpoint.step}")
    return checkpoint


def defect(checkpoint: StoredCheckpoint, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted, None if it can; `thorough` also reads it, with OSError if the disk fails."""
    try:
        status = checkpoint.archive.stat()
    except FileNotFoundError:
        return tr("the archive is missing")
    if not stat.S_ISREG(status.st_mode) or status.st_size != checkpoint.size:
        return tr(
            "{found:,} bytes, {size:,} expected: cut off or still uploading",
            found=status.st_size,
            size=checkpoint.size,
        )
    if not thorough:
        return None
    if sha256(checkpoint.archive) != checkpoint.sha256:
        return tr("its sha256 differs: damaged")
    try:
        with tarfile.open(checkpoint.archive, "r:") as tar:
            for _ in _checked_members(tar, checkpoint):
                pass
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as problem:  # tarfile raises all of them
        return tr("it is no checkpoint archive of this course ({problem})", problem=problem)
    return None


def unpack(checkpoint: StoredCheckpoint, folder: Path) -> Path:
    """Unpack below `folder`; the checkpoint folder gets its name once it is complete."""
    name = checkpoint.archive.stem
    target = folder / name
    partial = folder / f".{name}.partial"
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(checkpoint.archive, "r:") as tar:
        for member in _checked_members(tar, checkpoint):
            tar.extract(member, partial, set_attrs=False)  # `filter` is not known to every Python 3.10
    os.replace(partial / name, target)
    partial.rmdir()
    return target


def _checked_members(tar: tarfile.TarFile, checkpoint: StoredCheckpoint) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; TarError at the first that `pack` would not have written."""
    top = PurePosixPath(checkpoint.archive.stem)
    folders = {top.parent}
    seen: set[PurePosixPath] = set()
    for member in tar:
        path = PurePosixPath(member.name)
        plain = member.type in PLAIN_TYPES and not member.issparse() and not tar.pax_headers
        fits = 0 <= member.size <= checkpoint.size and MEMBER.fullmatch(os.fsencode(member.name))
        inside = path.is_relative_to(top) and path.parent in folders and path.name != ".."
        if not (plain and fits and inside) or path in seen or len(seen) > MAX_MEMBERS:
            raise tarfile.TarError(tr("{name!r} is not what a checkpoint holds", name=member.name[:80]))
        seen.add(path)
        if member.isdir():
            folders.add(path)
        yield member
    if top not in folders:
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
    places = [own]
    for earlier in folders.earlier:
        places.append(earlier / run / CHECKPOINTS)
    return places + platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")


def look(store: Path) -> list[StoredCheckpoint]:
    """The checkpoints of a store, newest first; OSError if the disk fails."""
    kept = []
    for archive in _archives_in(store):
        with suppress(ValueError, FileNotFoundError):  # without a usable manifest its copy was never finished
            kept.append(read_manifest(archive.with_suffix(".json")))
    return sorted(kept, key=lambda checkpoint: checkpoint.step, reverse=True)


def _archives_in(store: Path) -> set[Path]:
    """The archives of a store, also where only the manifest is left; files of other names are somebody else's."""
    try:
        paths = list(store.iterdir())  # `glob` would hide that a disk fails
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {
        path.with_suffix(".tar") for path in paths if path.suffix in (".tar", ".json") and NAME.fullmatch(path.stem)
    }


def newest_first(stores: Iterable[Path]) -> list[StoredCheckpoint]:
    """The checkpoints of all stores; equal steps stay in the order of the stores."""
    kept = [checkpoint for store in stores for checkpoint in _with_retries(look, store, store)]
    return sorted(kept, key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_verified(
    stores: Sequence[Path], fingerprint: Fingerprint, step: int | None = None
) -> StoredCheckpoint | None:
    """The newest checkpoint of this training that verifies, or that of `step`; an error if only others' are left."""
    kept = newest_first(stores)
    own = [checkpoint for checkpoint in kept if checkpoint.fingerprint == fingerprint]
    best = first_verified(own, step)
    if best is not None:
        return best
    others = [checkpoint for checkpoint in kept if checkpoint.fingerprint != fingerprint]
    if step is not None and (own or not others):
        raise _step_missing(step, own)
    if others:
        raise CourseError(
            tr(
                "The checkpoints in this run are of another training ({differences}).",
                differences=_differences(flat(others[0].fingerprint), flat(fingerprint)),
            ),
            todo=tr(
                "Choose another RUN_NAME, set what differs back to what was kept (SET), or start this run "
                'over with RESUME="never".'
            ),
        )
    return None


def _differences(kept: dict[str, Any], requested: dict[str, Any]) -> str:
    names = sorted(kept.keys() | requested.keys())
    lines = [
        tr("{name}: kept {kept!r}, requested {asked!r}", name=name, kept=kept.get(name), asked=requested.get(name))
        for name in names
        if kept.get(name) != requested.get(name)
    ]
    return joined(lines, ";")


def first_verified(checkpoints: Iterable[StoredCheckpoint], step: int | None = None) -> StoredCheckpoint | None:
    """The first (of `step`) that verifies; a line for each that does not."""
    for checkpoint in checkpoints:
        if step not in (None, checkpoint.step):
            continue
        archive = checkpoint.archive
        problem = _with_retries(defect, checkpoint, archive)
        if problem is None:
            return checkpoint
        print(tr("skipping {name} in {folder}: {why}", name=archive.name, folder=archive.parent, why=problem))
    return None


def _with_retries(read: Callable[[Any], Any], source: Any, path: Path) -> Any:
    """What `read` returns; a disk that cannot be read stops the run, because starting at step 0 would overwrite it."""
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(4),
        wait=tenacity.wait_exponential(RETRY_SECONDS, exp_base=3),
        retry=tenacity.retry_if_exception_type(OSError),
        reraise=True,
    )
    try:
        return attempts(read, source)
    except OSError as problem:
        raise CourseError(
            tr("{path} cannot be read ({why}), and it may hold trained checkpoints.", path=path, why=problem.strerror),
            todo=tr('Mount it again (Colab: restart the session) and run this cell again; RESUME="never" starts over.'),
        ) from problem


def prune(store: Path, newest: StoredCheckpoint, keep_last: int, best_step: int | None = None) -> None:
    """Drop all but the `keep_last` newest up to `newest`, and the best; later steps are of a run that got further."""
    keep = {newest.archive}
    whole = 0
    for checkpoint in look(store):
        if checkpoint.step > newest.step or defect(checkpoint, thorough=False):
            continue
        whole += 1
        if whole <= keep_last or checkpoint.step == best_step:
            keep.add(checkpoint.archive)
    for archive in _archives_in(store) - keep:
        if step_of(archive) <= newest.step:
            forget(archive)


def clear(store: Path) -> int:
    """Remove every checkpoint of a store; how many there were."""
    archives = _archives_in(store)
    for archive in archives:
        forget(archive)
    return len(archives)


def require_step(folders: platforms.Folders, run: str, resume: str) -> None:
    """Refuse a RESUME that names a step of which the run keeps no checkpoint.

    Example: `checkpoints.require_step(lesson.folders, lesson.run.name, RESUME)`
    """
    if not resume.isdecimal():
        return
    step = int(resume)
    kept = newest_first(stores(folders, run))
    if not any(checkpoint.step == step for checkpoint in kept):
        raise _step_missing(step, kept)


def _step_missing(step: int | None, kept: Iterable[StoredCheckpoint]) -> CourseError:
    steps = sorted({str(checkpoint.step) for checkpoint in kept if checkpoint.step != step}, key=int)
    return CourseError(
        tr("This run has no complete checkpoint of step {step}.", step="*" if step is None else step),
        todo=tr(
            'Set RESUME (or --step) to one of: {steps}; or RESUME to "auto".',
            steps=", ".join(steps) or tr("none"),
        ),
    )


def listing(run: str, thorough: bool) -> tuple[list[dict[str, Any]], bool]:
    """A row for each checkpoint of a run (its name, or the path of its folder); whether there are some, all whole."""
    rows = []
    whole = True
    for checkpoint in newest_first(_stores_of(run)):
        problem = defect(checkpoint, thorough)
        whole = whole and problem is None
        rows.append(
            {
                tr("step"): checkpoint.step,
                tr("size"): f"{checkpoint.size / 2**20:,.1f} MiB",
                tr("state"): problem or tr("whole"),
                tr("where"): checkpoint.archive.parent,
            }
        )
    return rows, whole and bool(rows)


def _stores_of(run: str) -> list[Path]:
    """The stores of a run that exist."""
    given = Path(run).expanduser() / CHECKPOINTS
    if given.is_dir():
        return [given]
    folders = platforms.folders(platforms.detect())
    places = [place for place in stores(folders, run) if place.is_dir()]
    if not places:
        raise CourseError(
            tr("There is no run {run!r} with checkpoints in {folder}.", run=run, folder=folders.keep),
            todo=tr("Name a run there, give the path of a run folder, or set NBUTILS_HOME to the folder of your runs."),
        )
    return places


def restore(run: str, target: Path | None, step: int | None) -> Path:
    """Unpack the newest checkpoint that verifies (or that of `step`) into a folder that did not exist."""
    kept = newest_first(_stores_of(run))
    chosen = first_verified(kept, step)
    if chosen is None:
        raise _step_missing(step, kept)
    target = target or Path.cwd() / chosen.archive.stem
    if target.exists():
        raise CourseError(tr("{path} exists already.", path=target), todo=tr("Name another folder with --to."))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unpack(chosen, Path(folder)).rename(target)
    return target


@dataclass(eq=False)
class CheckpointSync:
    """Copies from `outbox` to `keep` in a thread; `check` raises OSError while that is gone; `logs` go from, to."""

    outbox: Path
    keep: Path
    fingerprint: Fingerprint
    keep_last: int = 3
    check: Callable[[], None] = lambda: None
    logs: tuple[Path, Path] | None = None
    validation_rows: int = 0
    kept: StoredCheckpoint | None = None  # the newest that verified in the run folder
    seconds: float = 0.0  # of the last whole sync
    problem: str | None = None

    def __post_init__(self) -> None:
        self._messages: list[str] = []
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self.outbox.mkdir(parents=True, exist_ok=True)
        end_earlier(self.outbox)
        _RUNNING[self.outbox] = self
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
        return [self._messages.pop(0) for _ in range(len(self._messages))]  # the thread may append meanwhile

    @property
    def waiting(self) -> Path | None:
        """The newest checkpoint folder that is not in the run folder yet; None when everything is."""
        return max(self.outbox.glob("checkpoint-*"), key=step_of, default=None)

    def finish(self, patience: float = 600.0) -> StoredCheckpoint | None:
        """Wait until the newest checkpoint is in the run folder, and show that; an error after `patience` seconds."""
        self._wake.set()
        started = time.monotonic()
        announced = False
        while folder := self.waiting:
            waited = time.monotonic() - started
            if waited > patience:
                raise CourseError(
                    tr(
                        "The last checkpoint could not be copied to {folder}: {problem}.",
                        folder=self.keep,
                        problem=self.problem or tr("no answer"),
                    ),
                    todo=tr(
                        "Make it reachable or free some space, then run this cell again; until then the checkpoint "
                        "is {path}.",
                        path=folder,
                    ),
                )
            if waited > 1 and not announced:
                announced = True
                print(
                    tr("copying checkpoint {step} to {folder} ...", step=step_of(folder), folder=self.keep), flush=True
                )
            time.sleep(0.05)
        with suppress(OSError):  # the checkpoint is safe; logs are no reason for an error
            self._copy_logs()
        for line in self.messages():
            print(line)
        return self.kept

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(PAUSE if self.problem else None)
            self._wake.clear()
            try:
                self._sync()
            except Exception as problem:  # whatever it is, training goes on
                text = f"{type(problem).__name__}: {problem}"
                if self.problem is None:
                    warning = tr(
                        "[WARN] a checkpoint could not be copied to {folder}: {problem}. Training goes on; the copy is "
                        "retried.",
                        folder=self.keep,
                        problem=text,
                    )
                    self._messages.append(warning)
                self.problem = text

    def _sync(self) -> None:
        """Pack the newest folder into the run folder, prune there, copy the logs."""
        while folder := self.waiting:
            started = time.monotonic()
            best = read_object(folder / STATE).get("best_global_step")
            kept = self._pack(folder)
            self.seconds = time.monotonic() - started
            self._messages.append(
                tr("checkpoint {step} is kept ({size:,.1f} MiB, verified)", step=kept.step, size=kept.size / 2**20)
            )
            self.kept = kept
            self.problem = None
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
            earlier = read_manifest(self.keep / f"{folder.name}.json")
            if earlier.fingerprint == self.fingerprint and defect(earlier) is None:
                return earlier  # a whole one is never overwritten
        if free_gib(self.keep) < folder_gib(folder):  # on Kaggle the disk has more than is saved
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pack(folder, self.keep, self.fingerprint, self.validation_rows, self._stopped.is_set)

    def _copy_logs(self) -> None:
        """Copy the logs; no parents are made where a mount was."""
        if self.logs is None:
            return
        self.check()
        source, target = self.logs
        target.mkdir(exist_ok=True)
        shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)


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
