"""Where a training goes on: the newest checkpoint that verifies or a chosen one, and what is left to do after it.

Not here: how checkpoints are kept while it trains (keeping).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbutils import checkpoints, paths, scaling
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import CHUNK, GIB
from nbutils.training import memory, validation

if TYPE_CHECKING:
    from transformers import Trainer

    from nbutils.lessons import Lesson

DECISIVE = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
SAMPLES, SAMPLE = 64, 2**16  # blocks of a weights file, and the bytes of each: a moment even for 15 GB
# Of train: in a profile, what a run may be continued with in spite of another value. The batch is not among them.
MAY_CHANGE = {
    "epochs", "max_steps", "save_steps", "keep_checkpoints", "logging_steps", "micro_batch", "gradient_checkpointing",
    "shorten", "validation_rows", "keep_best", "early_stopping",
}  # fmt: skip
_LOCKS: dict[Path, IO[str]] = {}


@scaling.told_by_main
def resume_point(lesson: Lesson, mark: dict[str, Any], resume: str) -> Path | None:
    """The checkpoint to continue from, unpacked in scratch; with RESUME="never" the old ones are removed first."""
    step = int(resume) if resume.isdecimal() else None
    scratch = lesson.scratch
    _train_alone(scratch)
    checkpoints.end_earlier(sealed(lesson))
    for unproven in ("trainer", "outbox"):  # a folder left by a killed run proves nothing; only archives that verify do
        shutil.rmtree(scratch / unproven, ignore_errors=True)
    if resume == "never":
        memory.forget(lesson)
        removed = sum(checkpoints.clear(place) for place in _own_stores(lesson))
        _count_only_here(lesson, resume)
        print(f'RESUME is "never": {removed} earlier checkpoints removed' if removed else "no earlier checkpoints")
        return None
    best = checkpoints.newest_verified(checkpoints.stores(lesson.folders, lesson.run.name), mark, step)
    if best is None:
        checkpoints.clear(sealed(lesson))
        return None
    whose = ", which is attached: go on only if it is yours" if lesson.folders.is_attached(best.archive) else ""
    print(f"continuing from step {best.step}, kept in {best.archive.parent}{whose}")
    if step is not None:
        _set_later_aside(lesson, best)
    return checkpoints.unpack(_alone_in_scratch(best, sealed(lesson)), scratch / "trainer")


def _count_only_here(lesson: Lesson, resume: str) -> None:
    """Note in this run's store that what other places have of the run is not meant any more."""
    store = paths.make_folder(lesson.run.checkpoints, "checkpoints")
    paths.write_text(store / checkpoints.BEGAN_ANEW, f"Begun with RESUME={resume!r}: only what is here counts.\n")


def _set_later_aside(lesson: Lesson, best: checkpoints.Kept) -> None:
    """Make the chosen checkpoint the newest of its run; later ones are moved to where nothing looks for them."""
    keep = lesson.run.checkpoints
    if best.archive.parent != keep:
        _copied(best, keep)  # before the other places stop to count
    _count_only_here(lesson, str(best.step))
    aside = keep / time.strftime(f"after-{best.step}-%Y%m%d-%H%M%S")
    later = [one for store in (keep, sealed(lesson)) for one in checkpoints.look(store)[0] if one.step > best.step]
    for one in later:
        aside.mkdir(exist_ok=True)
        for place in (one.archive.with_suffix(".json"), one.archive):  # without its manifest none is looked at
            if place.exists() and not (aside / place.name).exists():
                shutil.move(place, aside)
    if later:
        print(f"set aside in {aside}: {', '.join(sorted({one.archive.stem for one in later}))}")
    print(f'Set RESUME back to "auto" for the next start, which would else go back to step {best.step} again.')


def _copied(best: checkpoints.Kept, store: Path) -> checkpoints.Kept:
    """The checkpoint in another store, with room for the folder it is unpacked into."""
    store.mkdir(parents=True, exist_ok=True)
    require_disk(store, 2.2 * best.manifest.size / GIB, "restoring a checkpoint")  # the archive, and the folder
    try:
        return checkpoints.copy(best, store)
    except OSError as problem:
        raise CourseError(
            f"{best.archive} was whole a moment ago, but could not be copied to {store} ({problem.strerror}).",
            "a disk that can be read to the end", "run this cell again",
        ) from problem  # fmt: skip


def _alone_in_scratch(best: checkpoints.Kept, store: Path) -> checkpoints.Kept:
    """The checkpoint as the only one in the store of scratch, from where the carrier takes it on to keep if need be."""
    if best.archive.parent != store:
        checkpoints.clear(store)
        return _copied(best, store)
    for old in checkpoints.look(store)[0]:
        if old.archive != best.archive:
            checkpoints.forget(old.archive)
    return best


def _own_stores(lesson: Lesson) -> list[Path]:
    """The stores of this run that are not attached inputs: those are somebody's finished version."""
    inputs = lesson.folders.inputs
    found = checkpoints.stores(lesson.folders, lesson.run.name)
    return [place for place in found if inputs is None or not place.is_relative_to(inputs)]


def sealed(lesson: Lesson) -> Path:
    """The store in scratch: archives on their way to keep."""
    return checkpoints.sealed(lesson.folders, lesson.run.name)


def _train_alone(scratch: Path) -> None:
    """Hold the run until this process ends, however it ends; a second trainer would delete the first one's files."""
    import fcntl

    paths.make_folder(scratch, "working space")
    handle = _LOCKS.pop(scratch, None) or open(scratch / "training.lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CourseError(
            f"another process is training in {scratch.name} right now.", "one training per run at a time",
            "wait for it, stop it (restart its kernel), or choose another RUN_NAME",
        ) from None  # fmt: skip
    except OSError:  # a disk without locks: then there is none
        pass
    _LOCKS[scratch] = handle


def let_others_train(lesson: Lesson) -> None:
    """Give up the hold on this run: the training is over and at home."""
    if handle := _LOCKS.pop(lesson.scratch, None):
        handle.close()


def steps_left(trainer: Trainer, checkpoint: Path | None) -> int:
    """How many steps remain after a checkpoint."""
    if checkpoint is None:
        return max(trainer.args.max_steps, 1)
    try:
        done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise trained_already() from problem
    if validation.ended_early(trainer, done.get("log_history", [])):
        return 0
    return max(_steps_wanted(trainer) - done["global_step"], 0)


def _steps_wanted(trainer: Trainer) -> int:
    """How many steps the settings ask for, by number or by passes over the data."""
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps
    batches = math.ceil(len(trainer.train_dataset) / (trainer.args.train_batch_size * trainer.args.world_size))  # type: ignore[arg-type]
    per_pass = max(math.ceil(batches / trainer.args.gradient_accumulation_steps), 1)
    return math.ceil(trainer.args.num_train_epochs * per_pass)


def trained_already() -> CourseError:
    """The error for a trainer that is started a second time: its weights are not those of the checkpoint any more."""
    return CourseError(
        "this trainer has trained before, and would mix two trainings.", "one training for each trainer",
        "run the cells again from the one that loads the model on (or restart the kernel and run all cells)",
    )  # fmt: skip


def model_mark(lesson: Lesson) -> dict[str, str]:
    """What the base model is: its name, and a checksum of its settings, its tokenizer and parts of its weights."""
    from transformers.utils import cached_file

    folder = Path(str(cached_file(lesson.model, "config.json"))).parent
    digest, local = hashlib.sha256(), Path(lesson.model).is_dir()
    for place in sorted(folder.iterdir()):
        if place.name in DECISIVE or place.suffix == ".safetensors":
            digest.update(f"{place.name} {place.stat().st_size} ".encode())
            for piece in _samples(place, all_over=local):
                digest.update(piece)
    name = lesson.model_name
    return {"name": Path(name).name if Path(name).is_absolute() else name, "content": digest.hexdigest()[:16]}


def _samples(place: Path, all_over: bool) -> Iterator[bytes]:
    """The beginning of a file; all over: evenly spaced blocks to its end too, so that no changed matrix is missed.

    Files of the Hub need not be read so far: there another content has another name.
    """
    with open(place, "rb") as file:
        yield file.read(CHUNK)
        rest = place.stat().st_size - CHUNK
        for part in range(SAMPLES + 1) if all_over and rest > 0 else ():
            file.seek(CHUNK + max(rest - SAMPLE, 0) * part // SAMPLES)
            yield file.read(SAMPLE)


def load_finished(trainer: Trainer, checkpoint: Path, chosen: bool = False) -> None:
    """Take over the weights and the history of a training that is complete; of a `chosen` step, its own weights."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import TrainerState

    set_peft_model_state_dict(trainer.model, load_file(checkpoint / "adapter_model.safetensors"))
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    trainer.state.max_steps = trainer.state.global_step  # MAX_STEPS may be less than what was planned then
    if not chosen and (asked := validation.of(trainer)):
        asked.remember(trainer.state, checkpoint)
    early = validation.ended_early(trainer, trainer.state.log_history)
    go_on = 'SET = "train.early_stopping=0"' if early else "a larger MAX_STEPS"
    why = ", and ended early because validation had risen" if early else ""
    print(f"Nothing is left to train: this run has {trainer.state.global_step} steps{why}.")
    print(f'{go_on} goes on with it, RESUME = "never" starts anew.')


def step_of(checkpoint: Path | None) -> int:
    """The step a checkpoint folder was saved at; 0 without one."""
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
