"""Where a training resumes, and the sync of its new checkpoints. Loads no torch."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock, Timeout

from nbutils import checkpoints, distributed, files, platforms
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.files import CHUNK, GIB
from nbutils.language import tr
from nbutils.record import LessonLike

MODEL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
SAMPLES, SAMPLE_BYTES = 64, 2**16  # blocks hashed of a weights file: a moment even for 15 GB
# Of `train:` in a profile, what may change when a run is resumed. The batch may not.
MAY_CHANGE = {
    "epochs", "max_steps", "save_steps", "keep_checkpoints", "logging_steps", "micro_batch", "gradient_checkpointing",
    "validation_rows", "keep_best", "early_stopping",
}  # fmt: skip
ANEW = "Started over, or at a chosen step: only what is here counts.\n"
OOM_FILE = "memory.json"  # in the run folder: what `oom` changed
_LOCKS: dict[Path, FileLock] = {}


def resume_point(lesson: LessonLike, fingerprint: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    step = int(resume) if resume.isdecimal() else None
    scratch, stores = lesson.scratch, checkpoints.stores(lesson.folders, lesson.run.name)
    files.make_folder(scratch, tr("working space"))
    try:  # until this process ends: a second trainer would delete the files of this one
        _LOCKS.setdefault(scratch, FileLock(scratch / "training.lock", timeout=0)).acquire()
    except Timeout:
        raise CourseError("training.run_in_use", run=scratch.name) from None
    checkpoints.end_earlier(scratch / "outbox")
    for unproven in ("trainer", "outbox"):  # left by a killed run; only archives that verify count
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    keep = files.make_folder(lesson.run.checkpoints, tr("checkpoints of this run"))
    if resume == "never":
        (lesson.run.path / OOM_FILE).unlink(missing_ok=True)
        removed = sum(checkpoints.clear(store) for store in stores if not lesson.folders.is_attached(store))
        files.write_text(keep / checkpoints.BEGAN_ANEW, ANEW)
        print(tr('RESUME is "never": {count} earlier checkpoints removed.', count=removed))
        print(tr('Set RESUME back to "auto" for the next start.'))
        return None
    best = checkpoints.newest_verified(stores, fingerprint, step)
    if best is None:
        return None
    attached = tr(", which is attached: go on only if it is yours") if lesson.folders.is_attached(best.archive) else ""
    print(tr("continuing from step {step}, kept in {folder}", step=best.step, folder=best.archive.parent) + attached)
    if best.archive.parent != keep:
        require_disk(keep, best.size / GIB, tr("keeping the checkpoint this run continues from"))
        best = checkpoints.copy(best, keep)
    if step is not None:  # it becomes the newest of its run; later ones go to a folder nothing looks into
        files.write_text(keep / checkpoints.BEGAN_ANEW, ANEW)
        aside = keep / time.strftime(f"after-{step}-%Y%m%d-%H%M%S")
        for one in (one for one in checkpoints.look(keep)[0] if one.step > step):
            aside.mkdir(exist_ok=True)
            for path in (one.archive.with_suffix(".json"), one.archive):  # an archive without manifest does not count
                if path.exists():
                    shutil.move(path, aside)
        if aside.exists():
            print(tr("Later checkpoints are in {folder}.", folder=aside))
        print(tr('Set RESUME back to "auto" for the next start.'))
    return checkpoints.unpack(best, scratch / "trainer")


def spent_until(checkpoint: Path | None) -> dict[str, Any]:
    """What was logged last before a checkpoint, with the time and cost until then; empty without one."""
    log = files.read_json(checkpoint / "trainer_state.json")["log_history"] if checkpoint else []
    return dict(log[-1]) if log else {}


def start_sync(lesson: LessonLike, fingerprint: dict[str, Any], keep_last: int, validation_rows: int = 0) -> Any:
    """Start copying this run's checkpoints and logs to the run folder; a process beside the main one copies nothing."""
    if not distributed.is_main():
        return SimpleNamespace(seconds=0.0, messages=list, finish=lambda patience=0.0: None)
    logs = (lesson.scratch / lesson.run.logs.name, lesson.run.logs)
    outbox, check = lesson.scratch / "outbox", partial(mount_check, platforms.mount_point_of(lesson.run.path))
    keep = lesson.run.checkpoints
    return checkpoints.CheckpointSync(outbox, keep, fingerprint, keep_last, check, logs, validation_rows)


def mount_check(mount: Path | None) -> None:
    """Raise once the disk with this mount point is gone: it is then an ordinary, empty folder."""
    if mount is not None and not platforms.is_mount(mount):
        raise OSError(errno.ENOTCONN, tr("{mount} is not mounted any more", mount=mount))


def unlock_run(lesson: LessonLike) -> None:
    """The training is over and its checkpoint is in the run folder."""
    if lock := _LOCKS.pop(lesson.scratch, None):
        lock.release(force=True)


def run_fingerprint(lesson: LessonLike, seed: int) -> dict[str, Any]:
    """What must be equal for a run to be resumed: the model, the data, the adapter, the way of training, the seed."""
    profile = lesson.profile
    return {
        "model": model_fingerprint(lesson),
        "data": files.read_json(lesson.run.data / "data_card.json")["fingerprint"],
        "method": [profile.method, profile.quantization.model_dump(mode="json")],
        "lora": profile.lora.model_dump(mode="json"),
        "train": profile.train.model_dump(mode="json", exclude=MAY_CHANGE),
        "seed": seed,
    }


def model_fingerprint(lesson: LessonLike) -> dict[str, str]:
    """What the base model is: its name, and a checksum of config, tokenizer and samples of the weights."""
    from transformers.utils import cached_file

    folder = Path(str(cached_file(lesson.model, "config.json"))).parent
    digest, local = hashlib.sha256(), Path(lesson.model).is_dir()
    for path in sorted(folder.iterdir()):
        if path.name in MODEL_FILES or path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with open(path, "rb") as file:
                digest.update(file.read(CHUNK))
                rest = path.stat().st_size - CHUNK
                for part in range(SAMPLES + 1) if local and rest > 0 else ():  # Hub files never change under a name
                    file.seek(CHUNK + max(rest - SAMPLE_BYTES, 0) * part // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    name = lesson.model_name
    return {"name": Path(name).name if Path(name).is_absolute() else name, "content": digest.hexdigest()[:16]}
