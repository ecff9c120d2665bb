"""A training that runs out of memory goes on: with settings that need less, from the last step it finished.

A broken step is forgotten whole: its gradients, its tokens, its part of the loss. Weights, optimizer, schedule, sampler
and log go on as if nothing had happened. Not here: what the rungs are (rungs), what is remembered of them (memory).
"""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import hardware
from nbutils.errors import CourseError
from nbutils.training import memory, rungs, validation
from nbutils.training.live import replace_bars
from nbutils.training.resuming import step_of
from nbutils.training.weights import load_trained_weights, trained_weights

if TYPE_CHECKING:
    from transformers import Trainer

    from nbutils.lessons import Lesson

OF_THE_LOSS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


def train(trainer: Trainer, lesson: Lesson, resume_from: Path | None) -> None:
    """Train to the end. Where the card's memory runs out: one rung down, and on from the last finished step."""
    remembered, watch = memory.Memory(lesson, rungs.setting_of(trainer)), _watch(trainer)
    now = remembered.begin(resume_from)
    validation.of(trainer)
    if now != remembered.planned:
        rungs.take(trainer, now)
    trainer.add_callback(watch)
    replace_bars(trainer)
    while problem := _attempt(trainer, resume_from):
        used = memory.in_use()
        at = (trainer.state.global_step if watch.begun else step_of(resume_from)) + 1
        if trainer.args.world_size > 1:
            raise _not_alone(at, problem)
        _let_go(trainer)
        if watch.done():
            _finish(trainer, watch)
            return
        new = now.below(lesson.profile.train.shorten, offload=lesson.card is not None)
        if new is None:
            _hand_over(trainer, watch, resume_from)
            raise memory.nothing_left(now, at, used, remembered.rungs)
        remembered.add(at, used, now, new)
        rungs.take(trainer, new)
        resume_from = _saved(watch, resume_from)
        _make_ready(trainer)
        print(f"out of memory at step {at}{memory.shown(used)}: {now.change_to(new)}; "
              f"the batch stays {new.batch}; going on from step {step_of(resume_from)}", flush=True)  # fmt: skip
        now = new


def _attempt(trainer: Trainer, resume_from: Path | None) -> str:
    """Train; empty when it came to its end, else what torch said. The error, and all it holds, ends with this frame."""
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    except Exception as problem:
        if not hardware.out_of_memory(problem):
            raise
        return str(problem).strip() or "out of memory"
    return ""


def _watch(trainer: Any) -> Any:
    """A callback that knows what the last finished step left, and leads back to it."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Notes the counters where a step begins; keeps the weights until the optimizer has moved them once."""

        def __init__(self) -> None:
            self.begun = self.updating = False
            self.noted: tuple[int, dict[str, Any]] | None = None  # the last finished step, and the counters after it
            self.back_to: dict[str, Any] = {}
            self.first_weights: dict[str, Any] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun, self.updating, self.noted = True, False, None
            _restore(trainer, self.back_to)
            if not trainer.optimizer.state:  # its first update is where it takes its memory
                self.first_weights = trained_weights(trainer.model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.noted = state.global_step, _note(trainer)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.updating = True

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.updating = False
            if not trainer.accelerator.optimizer_step_was_skipped:  # as float16 does until it finds its scale
                self.first_weights = {}

        def done(self) -> bool:
            """Whether the last step was finished, and memory ran out in what comes after it."""
            last = trainer.state.max_steps > 0 and trainer.state.global_step >= trainer.state.max_steps
            return self.begun and last

        def way_back(self, resume_from: Path | None) -> Path | None:
            """Where to go on: a checkpoint of the last finished step, written now unless it is there."""
            if not self.begun:
                return resume_from
            step, self.begun = trainer.state.global_step, False
            inside = self.noted is not None and self.noted[0] == step  # else it was after a step, while saving
            self.back_to = self.noted[1] if self.noted and inside else _note(trainer)
            trainer.current_flos = self.back_to["current_flos"]
            if inside and self.updating and (self.first_weights or step != step_of(resume_from)):
                self.undo_update(step)
            if step == step_of(resume_from):
                return resume_from
            trainer._save_checkpoint(trainer.model, trial=None)
            return Path(trainer.args.output_dir) / f"checkpoint-{step}"

        def undo_update(self, step: int) -> None:
            """Take back a first update that broke off; a later one cannot be: what it moved is nowhere else."""
            if not self.first_weights:
                raise _half_updated(step + 1)
            load_trained_weights(trainer.model, self.first_weights)
            trainer.optimizer.state.clear()

    return Watch()


def _saved(watch: Any, resume_from: Path | None) -> Path | None:
    """The way back, written to scratch; a disk that is full or memory that is gone altogether ends the run in words."""
    try:
        return watch.way_back(resume_from)
    except (OSError, RuntimeError) as problem:
        raise CourseError(
            f"out of memory, and the last finished step could not be saved either ({problem}).",
            "room for one checkpoint in scratch, and a little free memory",
            "make room and run all cells again: the training continues from its newest checkpoint",
        ) from problem


def _finish(trainer: Any, watch: Any) -> None:
    """Memory ran out after the last step: the training is done, only its last checkpoint may be missing."""
    step = trainer.state.global_step
    print(f"out of memory after the last step ({step}): nothing is left to train, keeping it", flush=True)
    place = _saved(watch, None)
    if place is not None:
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    with suppress(Exception):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


def _note(trainer: Any) -> dict[str, Any]:
    """The trainer's counters, which a step that fails has already moved."""
    loss = OF_THE_LOSS if hasattr(trainer, "_tr_loss") else ()  # older ones keep theirs out of reach
    counters = [name for name in (*loss, "current_flos", "_total_train_tokens") if hasattr(trainer, name)]
    return copy.deepcopy({name: getattr(trainer, name) for name in counters} | {"_metrics": trainer._metrics["train"]})


def _restore(trainer: Any, noted: dict[str, Any]) -> None:
    """Put them back, after `train` has set them to zero."""
    for name, value in copy.deepcopy(noted).items():
        if name == "_metrics":
            trainer._metrics["train"] = value
        elif name != "current_flos":  # the checkpoint has it
            setattr(trainer, name, value)


def _let_go(trainer: Any) -> None:
    """Free what the broken step holds, and close what it left open."""
    import torch

    trainer.model.zero_grad(set_to_none=True)
    trainer.callback_handler.train_dataloader = None
    for callback in trainer.callback_handler.callbacks:
        if (bar := getattr(callback, "training_bar", None)) is not None:
            bar.close()
            callback.training_bar = None
    hardware.free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the peak that is told in the end is that of the settings that fit


def _make_ready(trainer: Any) -> None:
    """Allow the next `train`, which makes a new optimizer and fills it from the checkpoint."""
    for callback in trainer.callback_handler.callbacks:
        if begin_again := getattr(callback, "begin_again", None):
            begin_again()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        scaler._per_optimizer_states.clear()  # it would refuse to unscale a second time


def _hand_over(trainer: Any, watch: Any, resume_from: Path | None) -> None:
    """Before giving up, keep the last finished step, so that nothing is lost when the learner has made room."""
    with suppress(CourseError, OSError, RuntimeError):
        if watch.way_back(resume_from) is not None:
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def _not_alone(at: int, problem: str) -> CourseError:
    return CourseError(
        f"out of memory at step {at} in one of several processes: {problem.splitlines()[0]}",
        "a micro-batch that fits on every card; with several cards, none may change it alone",
        "halve train.micro_batch in the profile (the batch stays as it is) and start all processes again: "
        "they continue from the newest checkpoint",
    )


def _half_updated(at: int) -> CourseError:
    return CourseError(
        f"out of memory inside the optimizer's update of step {at}: some weights have moved, others have not.",
        "weights of a whole step",
        "run all cells again: the training continues from its newest checkpoint, with settings that need less memory",
    )
