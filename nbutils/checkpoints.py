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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

import tenacity
from pydantic import BaseModel, Field

from nbutils import former_names, platforms
from nbutils.config import flat
from nbutils.disk import folder_gib, require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, make_folder, read_json, read_object, sha256
from nbutils.former_names import Fingerprint, Settings
from nbutils.language import joined, say, tr
from nbutils.masking import describe

NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")  # as the trainer writes it
MAX_MEMBERS = 10_000
MEMBER = re.compile(rb"[^\0/]{1,255}(/[^\0/]{1,255}){0,7}")  # names and paths that every disk takes
STATE = "trainer_state.json"  # in a checkpoint folder
CHECKPOINTS = "checkpoints"
BEGAN_ANEW = "began_anew.txt"
RETRY_SECONDS = 1.0  # before a disk that gave an error is read again; then three and nine times as long
PAUSE = 20.0  # before the copy of a checkpoint is tried again
_RUNNING: dict[Path, CheckpointSync] = {}  # by outbox


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
            raise InterruptedError("another sync took over")
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
    forget(archive)  # an older one of this step
    try:
        counted = _write_archive(folder, archive, stopped)
        checkpoint = StoredCheckpoint(
            archive=archive,
            step=step_of(folder),
            size=counted.size,
            sha256=counted.digest.hexdigest(),
            fingerprint=fingerprint,
            validation_rows=validation_rows,
        )
        _write_manifest(checkpoint)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            forget(archive)
        raise
    return checkpoint


def _write_archive(folder: Path, archive: Path, stopped: Callable[[], bool]) -> _HashingFile:
    """Write a folder to an archive; size and checksum come from what was written, not from the disk."""
    with open(archive, "wb") as file:
        counted = _HashingFile(file, stopped)
        with tarfile.open(fileobj=counted, mode="w", copybufsize=CHUNK, dereference=True) as tar:  # type: ignore[call-overload]
            tar.add(folder, arcname=folder.name)
        _flush(file)
    return counted


def _write_manifest(checkpoint: StoredCheckpoint) -> None:
    """Write the manifest of an archive that verifies, and read it back."""
    if problem := defect(checkpoint):
        raise OSError(errno.EIO, problem)
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


def read_manifest(archive: Path) -> StoredCheckpoint | None:
    """What an archive must be by the manifest beside it; None without one that this course wrote for it."""
    try:
        content = read_json(archive.with_suffix(".json"))
        fingerprint = former_names.fingerprint(content["fingerprint"])
        content |= {"archive": archive, "fingerprint": fingerprint}
        checkpoint = StoredCheckpoint.model_validate(content)
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return checkpoint if archive.stem == f"checkpoint-{checkpoint.step}" else None


def defect(checkpoint: StoredCheckpoint, thorough: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted, None if it can; `thorough` also reads it, with OSError if the disk fails."""
    try:
        status = checkpoint.archive.stat()
    except FileNotFoundError:
        return tr("the archive is missing")
    if not stat.S_ISREG(status.st_mode) or status.st_size != checkpoint.size:
        return tr("its size differs: cut off or still uploading")
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


def unpack(checkpoint: StoredCheckpoint, target: Path) -> Path:
    """Unpack a checkpoint folder; it gets its name, in place of an earlier one, once it is complete."""
    make_folder(target.parent)
    with (
        tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as partial,
        tarfile.open(checkpoint.archive, "r:") as tar,
    ):
        for member in _checked_members(tar, checkpoint):
            tar.extract(member, partial, set_attrs=False)  # `filter` is not known to every Python 3.10
        shutil.rmtree(target, ignore_errors=True)
        os.replace(Path(partial, checkpoint.archive.stem), target)
    return target


def _checked_members(tar: tarfile.TarFile, checkpoint: StoredCheckpoint) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; TarError at the first that `pack` would not have written."""
    top = PurePosixPath(checkpoint.archive.stem)
    folders = {top.parent}
    seen: set[PurePosixPath] = set()
    for member in tar:
        path = PurePosixPath(member.name)
        plain = member.isfile() or member.isdir()
        special = member.issparse() or tar.pax_headers
        fits = 0 <= member.size <= checkpoint.size and MEMBER.fullmatch(os.fsencode(member.name))
        inside = path.is_relative_to(top) and path.parent in folders and path.name != ".."
        surplus = path in seen or len(seen) > MAX_MEMBERS
        if special or surplus or not (plain and fits and inside):
            raise tarfile.TarError(tr("{name!r} is not what a checkpoint holds", name=member.name[:80]))
        seen.add(path)
        if member.isdir():
            folders.add(path)
        yield member
    rest: Any = tar.fileobj
    rest.seek(tar.offset)
    ended = not any(rest.read(tarfile.RECORDSIZE))  # some versions of tarfile take a bad header for the end
    if top not in folders or not ended:
        raise tarfile.TarError(tr("it is not one whole folder {name}", name=top))


def stores(folders: platforms.Folders, run: str) -> list[Path]:
    """Where checkpoints of a run may lie: the run folder, an earlier one, inputs."""
    own = folders.keep / run / CHECKPOINTS
    if (own / BEGAN_ANEW).exists():  # after RESUME="never" or a chosen step, other places no longer count
        return [own]
    places = [own]
    for earlier in folders.earlier:
        places.append(earlier / run / CHECKPOINTS)
    return places + platforms.find_inputs(folders.inputs, f"{run}/{CHECKPOINTS}")


def look(*stores: Path) -> list[StoredCheckpoint]:
    """The checkpoints of stores, newest first, equal steps in the order of the stores; OSError if a disk fails."""
    kept: list[StoredCheckpoint] = []
    for store in stores:
        kept += filter(None, map(read_manifest, _archives_in(store)))  # without a manifest its copy was never finished
    return sorted(kept, key=lambda checkpoint: checkpoint.step, reverse=True)


def _archives_in(store: Path) -> set[Path]:
    """The archives of a store, also where only the manifest is left; files of other names are somebody else's."""
    archives = set()
    with suppress(FileNotFoundError):
        for path in store.iterdir():  # `glob` would hide that a disk fails
            if path.suffix in (".tar", ".json") and NAME.fullmatch(path.stem):
                archives.add(path.with_suffix(".tar"))
    return archives


def newest_first(stores: Iterable[Path]) -> list[StoredCheckpoint]:
    """The checkpoints of all stores; a disk that cannot be read is a CourseError."""
    kept: list[StoredCheckpoint] = _with_retries(look, *stores)
    return kept


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
    if others and (step is None or not own):
        raise CourseError(
            "The checkpoints in this run are of another training (kept and requested: {differences}).",
            todo=(
                "Choose another RUN_NAME, set what differs back to what was kept (SET), or start this run "
                'over with RESUME="never".'
            ),
            differences=_differences(flat(others[0].fingerprint), flat(fingerprint)),
        )
    if step is not None:
        raise _step_missing(step, own)
    return None


def _differences(kept: Settings, requested: Settings) -> str:
    """Where two fingerprints differ."""
    texts = []
    for name in sorted(kept.keys() | requested.keys()):
        before = kept.get(name)
        now = requested.get(name)
        if before != now:
            texts.append(f"{name} {before!r}, {now!r}")
    return joined(texts, ";")


def first_verified(checkpoints: Iterable[StoredCheckpoint], step: int | None = None) -> StoredCheckpoint | None:
    """The first (of `step`) that verifies; a line for each that does not."""
    for checkpoint in checkpoints:
        if step not in (None, checkpoint.step):
            continue
        problem = _with_retries(defect, checkpoint)
        if problem is None:
            return checkpoint
        say("skipping {archive}: {why}", archive=checkpoint.archive, why=problem)
    return None


def _with_retries(read: Callable[..., Any], *sources: Any) -> Any:
    """What `read` returns; a disk that cannot be read stops the run, because starting at step 0 would overwrite it."""
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(4),
        wait=tenacity.wait_exponential(RETRY_SECONDS, exp_base=3),
        reraise=True,
    )
    try:
        return attempts(read, *sources)
    except OSError as problem:
        raise CourseError(
            "A disk that may hold trained checkpoints cannot be read: {why}.",
            todo='Mount it again (Colab: restart the session) and run this cell again; RESUME="never" starts over.',
            why=problem,
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


def clear(store: Path) -> None:
    """Remove every checkpoint of a store."""
    for archive in _archives_in(store):
        forget(archive)


def _step_missing(step: int | None, kept: Iterable[StoredCheckpoint]) -> CourseError:
    steps = {checkpoint.step for checkpoint in kept} - {step}
    return CourseError(
        "The checkpoint that was asked for is not complete, or not there: {step}.",
        todo='Set RESUME (or --step) to one of: {steps}; or RESUME to "auto".',
        step=step or tr("the newest"),
        steps=", ".join(map(str, sorted(steps))) or tr("none"),
    )


def listing(store: Path, thorough: bool) -> tuple[list[dict[str, Any]], bool]:
    """A row for each checkpoint of a store; and whether there are some, all whole."""
    rows = []
    whole = True
    for checkpoint in newest_first([store]):
        problem = defect(checkpoint, thorough)
        whole = whole and problem is None
        rows.append(
            {
                tr("step"): checkpoint.step,
                tr("size"): f"{checkpoint.size / 2**20:,.1f} MiB",
                tr("state"): problem or tr("whole"),
                tr("where"): store,
            }
        )
    return rows, whole and bool(rows)


def restore(store: Path, target: Path | None, step: int | None) -> Path:
    """Unpack the newest checkpoint that verifies (or that of `step`) into a folder that did not exist."""
    kept = newest_first([store])
    chosen = first_verified(kept, step)
    if chosen is None:
        raise _step_missing(step, kept)
    target = target or Path(chosen.archive.stem)
    if target.exists():
        raise CourseError("{path} exists already.", todo="Name another folder with --to.", path=target)
    return unpack(chosen, target)


@dataclass(eq=False)
class CheckpointSync:
    """Copies from `outbox` to `keep` in a thread; `check` raises OSError while that is gone; `logs` go from, to."""

    outbox: Path
    keep: Path
    fingerprint: Fingerprint
    logs: tuple[Path, Path]
    check: Callable[[], None]
    keep_last: int = 3
    validation_rows: int = 0
    kept: StoredCheckpoint | None = None  # the newest that verified in the run folder
    seconds: float = 0.0  # of the last whole sync
    problem: str | None = None

    def __post_init__(self) -> None:
        self._messages: list[str] = []
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self.outbox.mkdir(parents=True, exist_ok=True)
        _RUNNING[self.outbox] = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, folder: Path) -> None:
        """Accept a finished checkpoint folder; the trainer may delete it, and must not write into it again."""
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
        deadline = time.monotonic() + patience
        if folder := self.waiting:
            say("copying checkpoint {step} to {folder} ...", step=step_of(folder), folder=self.keep)
        while folder := self.waiting:
            if time.monotonic() > deadline:
                raise CourseError(
                    "The last checkpoint could not be copied to {folder}: {problem}.",
                    todo=(
                        "Make it reachable or free some space, then run this cell again; until then the checkpoint "
                        "is {path}."
                    ),
                    folder=self.keep,
                    problem=self.problem or tr("no answer"),
                    path=folder,
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
                why = describe(problem)
                if self.problem is None:
                    warning = tr(
                        "[WARN] a checkpoint could not be copied to {folder}: {problem}. Training goes on; the copy is "
                        "retried.",
                        folder=self.keep,
                        problem=why,
                    )
                    self._messages.append(warning)
                self.problem = why

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
        earlier = read_manifest(self.keep / f"{folder.name}.tar")
        if earlier and earlier.fingerprint == self.fingerprint and defect(earlier) is None:
            return earlier  # a whole one is never overwritten
        require_disk(self.keep, folder_gib(folder))  # on Kaggle the disk has more than is saved
        return pack(folder, self.keep, self.fingerprint, self.validation_rows, self._stopped.is_set)

    def _copy_logs(self) -> None:
        """Copy the logs; no parents are made where a mount was."""
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
