"""Out of memory: training goes on from the last finished step with settings that need less memory.

The rows of an optimizer step stay the same; only how many are computed at a time, and what is stored, changes.
A broken step is forgotten: weights, optimizer, schedule and sampler go on as if it had not been started.
"""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # another one in notebooks
from trl.models import activation_offloading

from nbutils import hardware, paths
from nbutils.checkpoints import step_of
from nbutils.errors import CourseError
from nbutils.lessons import Lesson
from nbutils.training.progress import validation_callback
from nbutils.training.resume import OOM_FILE
from nbutils.training.weights import load_trained_weights, trained_weights

COUNTERS = ("current_flos", "_total_train_tokens", "_metrics")
LOSS_COUNTERS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
CHECKPOINTING = ("off", "on", "offload")  # each needs less memory, and more time, than the one before


@dataclass(frozen=True)
class StepSettings:
    """What decides the memory of a step."""

    micro_batch: int
    accumulation: int
    checkpointing: str  # of gradients; offload: activations go to the computer's memory

    @property
    def batch(self) -> int:
        """Rows of an optimizer step."""
        return self.micro_batch * self.accumulation

    def smaller(self, offload: bool) -> StepSettings | None:
        """The next settings that need less memory; `offload` says whether activations may go to the CPU."""
        if self.micro_batch > 1:
            rows = next(rows for rows in range(self.micro_batch // 2, 0, -1) if self.micro_batch % rows == 0)
            return replace(self, micro_batch=rows, accumulation=self.batch // rows)
        if self.checkpointing == "off":
            return replace(self, checkpointing="on")
        return replace(self, checkpointing="offload") if self.checkpointing == "on" and offload else None

    def __str__(self) -> str:
        batch = f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"
        return f"{batch}, gradient checkpointing {self.checkpointing}"


def train(trainer: Trainer, lesson: Lesson, resume_from: Path | None) -> None:
    """Train to the end; where memory runs out, go on from the last finished step with smaller settings."""
    args = trainer.args
    history = OomHistory(lesson, settings_of(trainer))
    settings = history.start(resume_from)
    validation_callback(trainer)
    if settings != history.planned:
        apply(trainer, settings)
    watch = StepWatch(trainer)
    trainer.add_callback(watch)
    remove_progress_bars(trainer)
    while problem := _attempt(trainer, resume_from):
        step = (trainer.state.global_step if watch.started else step_of(resume_from)) + 1
        peak = hardware.peak_memory_gib()
        if args.world_size > 1:
            raise CourseError("training.oom_distributed", step=step, problem=problem.splitlines()[0])
        _free(trainer)
        if watch.started and 0 < trainer.state.max_steps <= trainer.state.global_step:
            _finish(trainer, watch)
            return
        smaller = settings.smaller(offload=lesson.card is not None)
        if smaller is None:
            with suppress(CourseError, OSError, RuntimeError):  # keep the last step before giving up
                if watch.last_checkpoint(resume_from) is not None:
                    trainer.callback_handler.on_save(args, trainer.state, trainer.control)
            tried = "; ".join(str(_settings(one["from"])) for one in history.changes) or "nothing else"
            raise CourseError("training.oom_exhausted", step=step, peak=peak, settings=settings, tried=tried)
        history.add(step, peak, settings, smaller)
        apply(trainer, smaller)
        resume_from = _saved(watch, resume_from)
        _reset(trainer)
        print(f"out of memory at step {step} (peak {peak:.1f} GiB): going on from step {step_of(resume_from)} with "
              f"{smaller} (the batch stays {smaller.batch})", flush=True)  # fmt: skip
        settings = smaller


def _attempt(trainer: Trainer, resume_from: Path | None) -> str:
    """Train; empty at the end, else torch's message. The error and the tensors it holds end with this frame."""
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    except Exception as problem:
        if not hardware.out_of_memory(problem):
            raise
        return str(problem).strip() or "out of memory"
    return ""


class StepWatch(TrainerCallback):
    """Knows what the last finished step left; keeps the weights until the optimizer has updated them once."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.started = self.updating = False
        self.step_started = -1
        self.noted: dict[str, Any] = {}  # the trainer's counters when the current step began
        self.restored: dict[str, Any] = {}  # those to go on with after an out-of-memory
        self.first_weights: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.updating, self.step_started = True, False, -1
        for name, value in copy.deepcopy(self.restored).items():  # `train` has just set them to zero
            setattr(self.trainer, name, value)
        # The first update allocates the optimizer's state: the likeliest place to run out of memory.
        self.first_weights = {} if self.trainer.optimizer.state else trained_weights(self.trainer.model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_started, self.noted = state.global_step, _counters(self.trainer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updating = False
        if not self.trainer.accelerator.optimizer_step_was_skipped:  # as float16 does until it finds its scale
            self.first_weights = {}

    def last_checkpoint(self, resume_from: Path | None) -> Path | None:
        """A checkpoint of the last finished step, written now unless it exists."""
        if not self.started:
            return resume_from
        trainer, step, self.started = self.trainer, self.trainer.state.global_step, False
        inside = self.step_started == step  # else it was after a step, in a validation or a save
        self.restored = self.noted if inside else _counters(trainer)
        trainer.current_flos = self.restored.pop("current_flos")  # the checkpoint has it
        if inside and self.updating and (self.first_weights or step != step_of(resume_from)):
            self._undo_update(step + 1)
        if step == step_of(resume_from):
            return resume_from
        trainer._save_checkpoint(trainer.model, trial=None)
        return Path(trainer.args.output_dir) / f"checkpoint-{step}"

    def _undo_update(self, step: int) -> None:
        """Undo a first update that broke off; a later one cannot be undone."""
        if not self.first_weights:
            raise CourseError("training.oom_half_updated", step=step)
        load_trained_weights(self.trainer.model, self.first_weights)
        self.trainer.optimizer.state.clear()


def _counters(trainer: Any) -> dict[str, Any]:
    """What a step adds to: means of the next log, tokens, flops."""
    names = [*COUNTERS, *(LOSS_COUNTERS if hasattr(trainer, "_tr_loss") else ())]  # local variables in older versions
    return copy.deepcopy({name: getattr(trainer, name) for name in names if hasattr(trainer, name)})


def _saved(watch: StepWatch, resume_from: Path | None) -> Path | None:
    try:
        return watch.last_checkpoint(resume_from)
    except (OSError, RuntimeError) as problem:  # the disk is full, or no memory is left at all
        raise CourseError("training.oom_not_saved", problem=problem) from problem


def _finish(trainer: Any, watch: StepWatch) -> None:
    """Memory ran out after the last step: only its checkpoint may be missing."""
    print(f"out of memory after the last step ({trainer.state.global_step}): nothing is left to train", flush=True)
    _saved(watch, None)
    trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    with suppress(Exception):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


def _free(trainer: Any) -> None:
    """Free what the broken step holds."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.callback_handler.train_dataloader = None
    hardware.free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the reported peak is that of the settings that fit


def _reset(trainer: Any) -> None:
    """Allow the next `train`, which makes a new optimizer and loads it from the checkpoint."""
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "trained"):  # KeepCheckpoints
            callback.trained = False
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        scaler._per_optimizer_states.clear()  # it would refuse to unscale a second time


def settings_of(trainer: Trainer) -> StepSettings:
    """The settings a trainer was built with."""
    args: Any = trainer.args
    kind = "off" if not args.gradient_checkpointing else "offload" if args.activation_offloading else "on"
    return StepSettings(args.per_device_train_batch_size, args.gradient_accumulation_steps, kind)


def apply(trainer: Any, new: StepSettings) -> None:
    """Give a trainer that is not training new settings; its next `train` builds all that depends on them."""
    args = trainer.args
    args.per_device_train_batch_size, args.gradient_accumulation_steps = new.micro_batch, new.accumulation
    trainer._train_batch_size = trainer.state.train_batch_size = args.train_batch_size
    if new.checkpointing != "off" and not args.gradient_checkpointing:
        args.gradient_checkpointing = True  # `train` enables it in the model
        args.gradient_checkpointing_kwargs = {"use_reentrant": False} | (args.gradient_checkpointing_kwargs or {})
        trainer.model.config.use_cache = False
        trainer.model.enable_input_require_grads()  # a frozen base passes on no gradients otherwise
    args.activation_offloading |= new.checkpointing == "offload"
    if args.activation_offloading:  # always a new one: that of a broken step still holds its tensors
        context = activation_offloading.get_act_offloading_ctx_manager(trainer.model)
        trainer.maybe_activation_offload_context = context


def remove_progress_bars(trainer: Trainer) -> None:
    """Remove the trainer's own displays."""
    for kind in (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(kind)


class OomHistory:
    """memory.json in the run folder: what was changed, so that the next session on this GPU starts with what fits."""

    def __init__(self, lesson: Lesson, planned: StepSettings) -> None:
        self.lesson, self.planned, self.card = lesson, planned, str(lesson.card or "none")
        self.changes: list[dict[str, Any]] = []

    def start(self, resume_from: Path | None) -> StepSettings:
        """The planned settings, or those a resumed run came down to on this GPU."""
        written, path = _read(self.lesson), self.lesson.run.path / OOM_FILE
        reached = _settings(written.get("reached"))
        same = written.get("card") == self.card and _settings(written.get("planned")) == self.planned
        if resume_from is None and not same:
            path.unlink(missing_ok=True)
        self.changes = oom_rungs(self.lesson)
        if not same or reached is None or reached.batch != self.planned.batch:
            return self.planned
        print(f"This run ran out of memory on this GPU before: {reached}. Delete {path} to start as planned.")
        return reached

    def add(self, step: int, peak: float, old: StepSettings, new: StepSettings) -> None:
        """Write one more change; a disk that does not take it does not end the training."""
        change = {"step": step, "card": self.card, "used_gib": round(peak, 2), "from": asdict(old), "to": asdict(new)}
        self.changes = [*self.changes, change]
        content = {"card": self.card, "planned": asdict(self.planned), "reached": asdict(new), "rungs": self.changes}
        try:
            paths.write_json(self.lesson.run.path / OOM_FILE, content)
        except OSError as problem:
            print(f"[WARN] {OOM_FILE} could not be written ({problem.strerror}); the training goes on.")


def oom_rungs(lesson: Lesson) -> list[dict[str, Any]]:
    """Every change this run made, in all its sessions, for facts.json; damaged entries do not count."""
    changes = _read(lesson).get("rungs")
    entries = [one for one in changes if isinstance(one, dict)] if isinstance(changes, list) else []
    return [one for one in entries if _settings(one.get("from")) and _settings(one.get("to"))]


def _read(lesson: Lesson) -> dict[str, Any]:
    try:
        written = json.loads((lesson.run.path / OOM_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) else {}


def _settings(written: Any) -> StepSettings | None:
    """Settings as this version or an earlier one wrote them; None if they are damaged."""
    try:
        found = StepSettings(written["micro_batch"], written["accumulation"], written["checkpointing"])
        return found if found.batch > 0 and found.checkpointing in CHECKPOINTING else None
    except (TypeError, KeyError):
        return None
