"""Where a training resumes, and the sync of its new checkpoints. Loads no torch."""

from __future__ import annotations

import errno
import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, Timeout

from nbutils import checkpoints, distributed, files, platforms
from nbutils.checkpoints import CheckpointSync, Fingerprint, StoredCheckpoint
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.files import CHUNK
from nbutils.language import say, tr
from nbutils.plan.forecast import STEP_ARGUMENTS
from nbutils.plan.recipe import rows_per_step
from nbutils.record import RunFolder
from nbutils.tracking import read_history

MODEL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
SAMPLES, SAMPLE_BYTES = 64, 2**16  # blocks hashed of a weights file: a moment even for 15 GB
# Of `sft:` in a profile, what may change when a run is resumed. The rows of a step may not.
MAY_CHANGE = {
    *STEP_ARGUMENTS, "num_train_epochs", "max_steps", "save_steps", "save_total_limit", "logging_steps",
    "load_best_model_at_end", "use_liger_kernel", "optim", "report_to",
}  # fmt: skip
OOM_FILE = "memory.json"  # in the run folder: what `oom` changed
_LOCKS: dict[Path, BaseFileLock] = {}


def resume_point(run: RunFolder, folders: platforms.Folders, fingerprint: Fingerprint, resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    scratch = files.make_folder(folders.scratch / run.name)
    _lock_run(scratch)
    checkpoints.end_earlier(scratch / "outbox")
    for unproven in ("trainer", "outbox"):  # left by a killed run; only archives that verify count
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    keep = files.make_folder(run.checkpoints)
    stores = checkpoints.stores(folders, run.name)
    if resume == "never":
        (run.path / OOM_FILE).unlink(missing_ok=True)
        for store in stores:
            if not folders.is_attached(store):
                checkpoints.clear(store)
        say('RESUME is "never": the earlier checkpoints were removed.')
        _begin_anew(keep)
        return None
    step = int(resume) if resume.isdecimal() else None
    newest = checkpoints.newest_verified(stores, fingerprint, step)
    if newest is None:
        return None
    say("continuing from step {step}, kept in {folder}", step=newest.step, folder=newest.archive.parent)
    if folders.is_attached(newest.archive):
        say("[WARN] That folder is attached: go on only if it is yours.")
    folder = _unpack(newest, keep, scratch / "trainer")
    if step is not None:
        _begin_anew(keep)
        _set_later_aside(keep, step)
    bring_best(folder, keep, fingerprint, stores)
    return folder


def _unpack(checkpoint: StoredCheckpoint, keep: Path, folder: Path) -> Path:
    """Unpack a checkpoint; one of an earlier or attached folder is kept here too, as the next start may not see it."""
    unpacked = checkpoints.unpack(checkpoint, folder / checkpoint.archive.stem)
    if checkpoint.archive.parent != keep:
        checkpoints.pack(unpacked, keep, checkpoint.fingerprint, checkpoint.validation_rows)
    return unpacked


def _lock_run(scratch: Path) -> None:
    """Keep the run for this process until it ends: a second trainer would delete the files of this one."""
    try:
        _LOCKS[scratch] = _LOCKS.get(scratch) or files.lock(scratch / "training.lock")
        _LOCKS[scratch].acquire(timeout=0)
    except Timeout:
        raise CourseError(
            "Another process is training in {run} right now.",
            todo="Wait for it, stop it (restart its kernel), or choose another RUN_NAME.",
            run=scratch.name,
        ) from None


def unlock_run(scratch: Path) -> None:
    """The training is over and its checkpoint is in the run folder."""
    if lock := _LOCKS.pop(scratch, None):
        lock.release(force=True)


def _begin_anew(keep: Path) -> None:
    """From now on only the checkpoints of the run folder count, not those of earlier or attached folders."""
    files.write_text(keep / checkpoints.BEGAN_ANEW, "Started over, or at a chosen step: only what is here counts.\n")
    say('Set RESUME back to "auto" for the next start.')


def _set_later_aside(keep: Path, step: int) -> None:
    """Rename the checkpoints after a step, so that nothing takes them for those of this training."""
    for later in checkpoints.look(keep):
        archive = later.archive
        if later.step > step and archive.exists():
            say("The checkpoint of step {step} is set aside: {file}.aside", step=later.step, file=archive)
            for path in (archive.with_suffix(".json"), archive):  # an archive alone does not count
                path.replace(f"{path}.aside")


def bring_best(newest: Path, keep: Path, fingerprint: Fingerprint, stores: list[Path]) -> None:
    """Unpack the checkpoint of the best step beside the newest one, and let the trainer's state know where it is."""
    file = newest / checkpoints.STATE
    state = files.read_object(file)  # `seconds_until` refuses a damaged one
    step = state.get("best_global_step")
    is_step = isinstance(step, int)  # a stranger's state may name anything
    best = newest.parent / f"checkpoint-{step}"
    if is_step and not best.exists():
        own = [checkpoint for checkpoint in checkpoints.newest_first(stores) if checkpoint.fingerprint == fingerprint]
        if stored := checkpoints.first_verified(own, step):
            _unpack(stored, keep, newest.parent)
        else:
            say("the checkpoint of step {step}, the best so far, is gone: the best from here on counts", step=step)
    if is_step and best.exists():
        state["best_model_checkpoint"] = str(best)
    else:
        state |= dict.fromkeys(("best_model_checkpoint", "best_global_step", "best_metric"))
    state["global_step"] = checkpoints.step_of(newest)
    files.write_json(file, state)


def seconds_until(checkpoint: Path) -> float:
    """How long the sessions before a checkpoint trained."""
    log = read_history(checkpoint / checkpoints.STATE, "log_history")
    return float(log[-1].get("train_seconds", 0.0)) if log else 0.0


def start_sync(run: RunFolder, scratch: Path, fingerprint: Fingerprint, profile: Profile) -> CheckpointSync:
    """Start copying this run's checkpoints and logs to the run folder."""
    return CheckpointSync(
        scratch / "outbox",
        run.checkpoints,
        fingerprint,
        keep_last=profile.sft.save_total_limit,
        check=partial(mount_check, platforms.mount_point_of(run.path)),
        logs=(scratch / run.logs.name, run.logs),
        validation_rows=int(profile.course.validation_rows),
    )


def mount_check(mount: Path | None) -> None:
    """Raise once the disk with this mount point is gone: it is then an ordinary, empty folder."""
    if mount is not None and not platforms.is_mount(mount):
        raise OSError(errno.ENOTCONN, tr("{mount} is not mounted any more", mount=mount))


def run_fingerprint(profile: Profile, model: Any, data: str, seed: int) -> Fingerprint:
    """What must be equal for any run to be resumed: the model, the data, the way of training, the seed."""
    return {
        "model": model,
        "data": data,
        "sft": profile.sft.model_dump(mode="json", exclude=MAY_CHANGE),
        "rows_per_step": rows_per_step(profile.sft, distributed.world_size()),
        "seed": seed,
    }


def model_fingerprint(model: str, name: str) -> dict[str, str]:
    """What the base model is: its name, and a checksum of config, tokenizer and samples of the weights.

    Example:
        model_fingerprint(lesson.model, lesson.model_name)
    """
    from transformers.utils import cached_file

    folder = Path(str(cached_file(model, "config.json"))).parent
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in MODEL_FILES and path.suffix != ".safetensors":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(CHUNK))
            if not Path(model).is_dir() or size <= CHUNK:  # Hub files never change under a name
                continue
            for part in range(SAMPLES + 1):
                file.seek(CHUNK + max(size - CHUNK - SAMPLE_BYTES, 0) * part // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    if Path(name).is_absolute():
        name = Path(name).name
    return {"name": name, "content": digest.hexdigest()[:16]}
