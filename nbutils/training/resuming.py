"""Where a training goes on: the newest checkpoint that verifies, wherever it lies, and what is left to do after it.

Not here: how checkpoints are kept while it trains (keeping).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbutils import checkpoints
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import GIB

if TYPE_CHECKING:
    from transformers import Trainer

    from nbutils.lessons import Lesson

RESUME_CHOICES = ("auto", "never")
_LOCKS: dict[Path, IO[str]] = {}


def resume_point(lesson: Lesson, mark: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    if resume not in RESUME_CHOICES:
        raise CourseError(
            f"RESUME is {resume!r}.", " or ".join(map(repr, RESUME_CHOICES)),
            '"auto" continues from the newest checkpoint that verifies, "never" starts anew',
        )  # fmt: skip
    scratch = lesson.scratch
    _train_alone(scratch)
    checkpoints.end_earlier(sealed(lesson))
    for unproven in ("trainer", "outbox"):  # a folder left by a killed run proves nothing; only archives that verify do
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    if resume == "never":
        removed = sum(map(checkpoints.clear, (sealed(lesson), lesson.run.checkpoints)))
        print(f'RESUME is "never": {removed} earlier checkpoints removed' if removed else "no earlier checkpoints")
        return None
    best = checkpoints.newest_verified(checkpoints.stores(lesson.folders, lesson.run.name), mark)
    if best is None:
        checkpoints.clear(sealed(lesson))
        return None
    print(f"continuing from step {best.step}, kept in {best.archive.parent}")
    return checkpoints.unpack(_alone_in_scratch(best, sealed(lesson)), scratch / "trainer")


def _alone_in_scratch(best: checkpoints.Kept, store: Path) -> checkpoints.Kept:
    """The checkpoint as the only one in the store of scratch, from where the carrier takes it on to keep if need be."""
    if best.archive.parent != store:
        checkpoints.clear(store)
        store.mkdir(parents=True, exist_ok=True)
        require_disk(store, 2.2 * best.manifest.size / GIB, "restoring a checkpoint")  # the archive, and the folder
        try:
            return checkpoints.copy(best, store)
        except OSError as problem:
            raise CourseError(
                f"{best.archive} was whole a moment ago, but could not be copied to {store} ({problem.strerror}).",
                "a disk that can be read to the end", "run this cell again",
            ) from problem  # fmt: skip
    for old in checkpoints.look(store)[0]:
        if old.archive != best.archive:
            checkpoints.forget(old.archive)
    return best


def sealed(lesson: Lesson) -> Path:
    """The store in scratch: archives on their way to keep."""
    return checkpoints.sealed(lesson.folders, lesson.run.name)


def _train_alone(scratch: Path) -> None:
    """Hold the run until this process ends, however it ends; a second trainer would delete the first one's files."""
    import fcntl

    scratch.mkdir(parents=True, exist_ok=True)
    handle = _LOCKS.pop(scratch, None) or open(scratch / "training.lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CourseError(
            f"another process is training in {scratch.name} right now.", "one training per run at a time",
            "wait for it, stop it (restart its kernel), or choose another RUN_NAME",
        ) from None  # fmt: skip
    _LOCKS[scratch] = handle


def steps_left(trainer: Trainer, checkpoint: Path | None) -> int:
    """How many steps remain after a checkpoint; a run that is not counted in steps ends where its checkpoint says."""
    if checkpoint is None:
        return max(trainer.args.max_steps, 1)
    done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    wanted = trainer.args.max_steps if trainer.args.max_steps > 0 else done["max_steps"]
    return max(wanted - done["global_step"], 0)


def load_finished(trainer: Trainer, checkpoint: Path) -> None:
    """Take over the weights and the history of a training that is complete already."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import TrainerState

    set_peft_model_state_dict(trainer.model, load_file(checkpoint / "adapter_model.safetensors"))
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    print(f"Nothing is left to train: this run has {trainer.state.global_step} steps.")
    print('Set a larger MAX_STEPS to go on, or RESUME = "never" to start anew.')


def step_of(checkpoint: Path | None) -> int:
    """The step a checkpoint folder was saved at; 0 without one."""
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
