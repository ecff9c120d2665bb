"""Where a training resumes, and the sync of its new checkpoints. Loads no torch before a trainer is there."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from nbutils import checkpoints, paths, scaling
from nbutils.checkpoints import Kept
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.lessons import Lesson
from nbutils.paths import CHUNK, GIB
from nbutils.platforms import drive

if TYPE_CHECKING:
    from transformers import Trainer

MODEL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
SAMPLES, SAMPLE_BYTES = 64, 2**16  # blocks hashed of a weights file: a moment even for 15 GB
# Of `train:` in a profile, what may change when a run is resumed. The batch may not.
MAY_CHANGE = {
    "epochs", "max_steps", "save_steps", "keep_checkpoints", "logging_steps", "micro_batch", "gradient_checkpointing",
    "shorten", "validation_rows", "keep_best", "early_stopping",
}  # fmt: skip
OOM_FILE = "memory.json"  # in the run folder: what `oom` changed
_LOCKS: dict[Path, FileLock] = {}


@scaling.told_by_main
def resume_point(lesson: Lesson, fingerprint: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    step = int(resume) if resume.isdecimal() else None
    scratch, local, stores = lesson.scratch, sealed(lesson), checkpoints.stores(lesson.folders, lesson.run.name)
    _lock_run(scratch)
    checkpoints.end_earlier(local)
    for unproven in ("trainer", "outbox"):  # folders left by a killed run; only archives that verify count
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    if resume == "never":
        (lesson.run.path / OOM_FILE).unlink(missing_ok=True)
        removed = sum(checkpoints.clear(store) for store in stores if not lesson.folders.is_attached(store))
        _ignore_other_stores(lesson, resume)
        print(f'RESUME is "never": {removed} earlier checkpoints removed' if removed else "no earlier checkpoints")
        return None
    best = checkpoints.newest_verified(stores, fingerprint, step)
    if best is None:
        checkpoints.clear(local)
        return None
    attached = ", which is attached: go on only if it is yours" if lesson.folders.is_attached(best.archive) else ""
    print(f"continuing from step {best.step}, kept in {best.archive.parent}{attached}")
    if step is not None:
        _set_later_aside(lesson, best)
    if best.archive.parent != local:
        checkpoints.clear(local)
        best = _copied(best, local)
    for other in checkpoints.look(local)[0]:
        if other.archive != best.archive:
            checkpoints.forget(other.archive)
    return checkpoints.unpack(best, scratch / "trainer")


def sealed(lesson: Lesson) -> Path:
    """The store in scratch."""
    return checkpoints.sealed(lesson.folders, lesson.run.name)


def start_sync(lesson: Lesson, fingerprint: dict[str, Any], keep_last: int) -> Any:
    """Start copying this run's checkpoints and logs to the run folder; a process beside the main one copies nothing."""
    if not scaling.is_main():
        return SimpleNamespace(seconds=0.0, messages=list)
    route = checkpoints.Route(sealed(lesson), lesson.run.checkpoints, keep_last, mount_check(lesson.run.path))
    return checkpoints.CheckpointSync(route, fingerprint, (lesson.scratch / lesson.run.logs.name, lesson.run.logs))


def mount_check(folder: Path) -> Callable[[], None]:
    """A check that raises once the disk under `folder` is gone: its mount point is then an ordinary, empty folder."""
    mount = drive.mount_point_of(folder)

    def check() -> None:
        if mount is not None and not drive.is_mount(mount):
            raise OSError(errno.ENOTCONN, f"{mount} is not mounted any more")

    return check


def _ignore_other_stores(lesson: Lesson, resume: str) -> None:
    store = paths.make_folder(lesson.run.checkpoints, "checkpoints")
    paths.write_text(store / checkpoints.BEGAN_ANEW, f"Started with RESUME={resume!r}: only what is here counts.\n")


def _set_later_aside(lesson: Lesson, best: Kept) -> None:
    """Make the chosen checkpoint the newest of its run; later ones are moved to a folder nothing looks into."""
    keep = lesson.run.checkpoints
    if best.archive.parent != keep:
        _copied(best, keep)  # before the other stores stop counting
    _ignore_other_stores(lesson, str(best.step))
    aside = keep / time.strftime(f"after-{best.step}-%Y%m%d-%H%M%S")
    later = [one for store in (keep, sealed(lesson)) for one in checkpoints.look(store)[0] if one.step > best.step]
    for one in later:
        aside.mkdir(exist_ok=True)
        for path in (one.archive.with_suffix(".json"), one.archive):  # without its manifest an archive does not count
            if path.exists() and not (aside / path.name).exists():
                shutil.move(path, aside)
    if later:
        print(f"set aside in {aside}: {', '.join(sorted({one.archive.stem for one in later}))}")
    print(f'Set RESUME back to "auto" for the next start, which would else go back to step {best.step} again.')


def _copied(best: Kept, store: Path) -> Kept:
    store.mkdir(parents=True, exist_ok=True)
    require_disk(store, 2.2 * best.manifest.size / GIB, "restoring a checkpoint")  # the archive and its folder
    try:
        return checkpoints.copy(best, store)
    except OSError as problem:
        values = {"archive": best.archive, "store": store, "problem": problem.strerror}
        raise CourseError("training.copy_failed", **values) from problem


def _lock_run(scratch: Path) -> None:
    """Lock the run until this process ends: a second trainer would delete the first one's files."""
    paths.make_folder(scratch, "working space")
    lock = _LOCKS.setdefault(scratch, FileLock(scratch / "training.lock", timeout=0))
    try:
        lock.acquire()
    except Timeout:
        raise CourseError("training.run_in_use", run=scratch.name) from None
    except (OSError, NotImplementedError):  # a disk without locks
        pass


def unlock_run(lesson: Lesson) -> None:
    """The training is over and its checkpoint is in the run folder."""
    if lock := _LOCKS.pop(lesson.scratch, None):
        lock.release(force=True)


def steps_left(trainer: Trainer, checkpoint: Path | None) -> int:
    """How many steps remain after a checkpoint."""
    from nbutils.training.progress import stopped_early, validation_callback

    args = trainer.args
    if checkpoint is None:
        return max(args.max_steps, 1)
    try:
        done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise CourseError("training.trained_already") from problem
    if stopped_early(done.get("log_history", []), getattr(validation_callback(trainer), "patience", 0)):
        return 0
    batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))  # type: ignore[arg-type]
    per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    planned = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return max(planned - done["global_step"], 0)


def load_finished(trainer: Trainer, checkpoint: Path, chosen: bool = False) -> None:
    """Load weights and history of a complete training; of a `chosen` step, its own weights instead of the best."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import TrainerState

    from nbutils.training.progress import stopped_early, validation_callback

    set_peft_model_state_dict(trainer.model, load_file(checkpoint / "adapter_model.safetensors"))
    state = trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    state.max_steps = state.global_step  # MAX_STEPS may be less than what was planned then
    validation = validation_callback(trainer)
    if validation is not None and not chosen:
        validation.load(state, checkpoint)
    early = stopped_early(state.log_history, getattr(validation, "patience", 0))
    why, more = (", and ended early because the validation loss rose", 'SET = "train.early_stopping=0"') if early \
        else ("", "a larger MAX_STEPS")  # fmt: skip
    print(f"Nothing is left to train: this run has {state.global_step} steps{why}.")
    print(f'{more} continues it, RESUME = "never" starts over.')


def model_fingerprint(lesson: Lesson) -> dict[str, str]:
    """What the base model is: its name, and a checksum of config, tokenizer and samples of the weights."""
    from transformers.utils import cached_file

    folder = Path(str(cached_file(lesson.model, "config.json"))).parent
    digest, local = hashlib.sha256(), Path(lesson.model).is_dir()
    for path in sorted(folder.iterdir()):
        if path.name in MODEL_FILES or path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            for block in _blocks(path, to_the_end=local):
                digest.update(block)
    name = lesson.model_name
    return {"name": Path(name).name if Path(name).is_absolute() else name, "content": digest.hexdigest()[:16]}


def _blocks(path: Path, to_the_end: bool) -> Iterator[bytes]:
    """The start of a file; of a local one evenly spaced blocks too, because Hub files never change under a name."""
    with open(path, "rb") as file:
        yield file.read(CHUNK)
        rest = path.stat().st_size - CHUNK
        for part in range(SAMPLES + 1) if to_the_end and rest > 0 else ():
            file.seek(CHUNK + max(rest - SAMPLE_BYTES, 0) * part // SAMPLES)
            yield file.read(SAMPLE_BYTES)
