"""Around the trainer of lesson 03: its settings, the one callback, the training itself and its result."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # another one in notebooks

from nbutils import chat, checkpoints, display, distributed, files, hardware, platforms, tracking
from nbutils.config import flat
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.lesson import Lesson
from nbutils.tracking import Clock, Curve, LiveNumbers, best_of, loss_history, validation_history
from nbutils.training import oom, weights
from nbutils.training import resume as resuming
from nbutils.training.fused import patch_lora_kernels
from nbutils.training.validation import Validation

CHECKPOINT_EXTRAS = 64 * 2**20  # bytes of tokenizer, trainer state and random states
RESERVE_SECONDS = 300.0  # for what follows the training: adapter, plots, record
FIRST_SYNC_SECONDS = 60.0  # assumed until it was measured
MEASURED = ("tokens_per_second", "train_seconds", "skipped_steps", "processes", "batch", "peak_memory_gib", "cost")


def bookkeeping(lesson: Lesson, seed: int) -> dict[str, Any]:
    """The SFTConfig settings that are about this machine and this run, not about learning."""
    train = lesson.profile.train
    return {
        "output_dir": str(lesson.scratch / "trainer"),
        "seed": seed,
        "data_seed": seed,
        "use_cpu": lesson.gpu is None,
        "dataloader_pin_memory": lesson.gpu is not None,
        "ddp_find_unused_parameters": False,  # every adapter weight is used in every step
        "save_strategy": "steps",
        "save_steps": train.save_steps,
        "save_total_limit": 1,  # in scratch; the run folder keeps more
        "eval_packing": False,  # the callback validates rows as they are
        "logging_steps": train.logging_steps,
        "logging_nan_inf_filter": False,  # it would hide a loss that is not a number
        "report_to": tracking.begin(lesson.scratch / lesson.run.logs.name, lesson.run.name),
        "run_name": lesson.run.name,
    }


def require_room(trainer: Any, keep: Path, keep_last: int) -> None:
    """Stop before a training whose checkpoints do not fit: weights and two optimizer states, in float32."""
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    one = (trainable * 12 + CHECKPOINT_EXTRAS) / files.GIB
    missing = keep_last + 1 - len(checkpoints.look(keep)[0])
    require_disk(Path(trainer.args.output_dir), 3 * one, "writing checkpoints")
    require_disk(keep, max(missing, 1) * one, "keeping checkpoints")


class TimeBudget:
    """Saves and ends the training before its time is up, or when the machine sends SIGTERM."""

    def __init__(self, lesson: Lesson, max_hours: float, now: Clock = monotonic) -> None:
        platform, self.now = lesson.platform, now
        hours = max_hours or platforms.time_limit_hours(platform)
        used = 0.0 if max_hours else platforms.session_seconds(platform) - (now() - lesson.started)
        self.limit = "MAX_HOURS" if max_hours else f"the {hours:g} h of {platform.name}"
        known = hours and used <= hours * 3600  # a machine older than its limit has another one (Colab Pro)
        self.end = lesson.started - used + hours * 3600 if known else math.inf
        self.reserve = min(RESERVE_SECONDS, hours * 180)
        self.steps: deque[float] = deque(maxlen=20)  # seconds of the recent ones, saving included
        self.last = now()
        self.sync_seconds = 0.0  # of the last one; 0: not measured yet
        self.terminated = False

    @contextmanager
    def sigterm_saves(self) -> Iterator[None]:
        """Within this block the first SIGTERM ends the training at its next step, and a second one the process."""

        def terminate(number: int, frame: Any) -> None:
            self.terminated = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        before = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.now() - self.last)
        self.last = self.now()
        reason = self._reason()
        if control.should_training_stop or not distributed.anyone(bool(reason)):
            return
        reason = reason or "Another process was asked to end."
        print(f"\n{reason} Saving at step {state.global_step} of {state.max_steps} and ending here.")
        print("Run the same notebook again (on Kaggle with this output attached): it continues.")
        control.should_log = control.should_save = control.should_training_stop = True

    def _reason(self) -> str:
        if self.terminated:
            return "The machine asked this run to end (SIGTERM)."
        sync = self.sync_seconds or min(FIRST_SYNC_SECONDS, self.reserve)
        needed, left = 1.5 * (max(self.steps) + sync) + self.reserve, self.end - self.now()
        if left >= needed:
            return ""
        return f"{left / 60:.1f} minutes of {self.limit} are left, {needed / 60:.1f} are needed to save and end."


class CourseCallback(TrainerCallback):
    """Validates, keeps checkpoints in the run folder, ends the run in time, shows progress; `train` resumes with it."""

    def __init__(self, lesson: Lesson, dataset: chat.ChatDataset, max_hours: float = 0.0) -> None:
        train = lesson.profile.train
        self.lesson, self.dataset = lesson, dataset
        self.validation = Validation((), int(train.save_steps), train.keep_best, train.early_stopping)
        self.time, self.live = TimeBudget(lesson, max_hours), LiveNumbers(lesson)
        self.sync: Any = None  # started by `train`
        self.fingerprint: dict[str, Any] = {}
        self.trained: tuple[float, int] | None = None  # seconds, and the step it started from

    def prepare(self, trainer: Any) -> str:
        """Check the trainer's rows and the disk, cast and fuse the LoRA layers; what was done, in one line."""
        self.validation.trainer, self.validation.rows = trainer, trainer.eval_dataset or ()
        require_room(trainer, self.lesson.run.checkpoints, self.lesson.profile.train.keep_checkpoints)
        chat.check_trainer(trainer, self.dataset.report)
        for kind in (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(kind)
        patched = patch_lora_kernels(trainer, fused=self.lesson.profile.machine.liger == "on")
        self.fingerprint = resuming.run_fingerprint(self.lesson, trainer.args.seed)
        self.kinds, self.checksums = weights.weight_kinds(trainer.model), weights.weight_checksums(trainer.model)
        return f"{self.dataset.report.trained:,} trained tokens, as the contract counted; {patched}"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for part in (self.validation, self.time, self.live):
            part.on_train_begin(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.validation.on_step_end(args, state, control)
        # saving steps are logged too, so that a resumed run logs the same
        control.should_log |= control.should_save or state.global_step >= state.max_steps
        for line in self.sync.messages():
            self.live.note(line)
        self.time.sync_seconds = self.sync.seconds
        self.time.on_step_end(args, state, control)
        self.live.on_step_end(args, state, control, **given)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.validation.on_save(args, state, control)
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self.sync.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.live.on_log(args, state, control, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.live.on_train_end(args, state, control)


@dataclass(frozen=True)
class TrainingResult:
    """A finished training: its curves, what it took, and which step is kept."""

    trainer: Any
    callback: CourseCallback
    seconds: float
    first_step: int  # 0, or where it was resumed
    best: tuple[int, float] | None  # step and validation loss of the weights the model has now; None: those of the last
    changed: tuple[int, int]  # weight tensors of the adapter, and of the base
    peak_gib: float

    @property
    def history(self) -> dict[str, Curve]:
        """(step, loss) pairs of `train` and `validation`."""
        log = self.trainer.state.log_history
        return {"train": loss_history(log), "validation": validation_history(log)}

    @property
    def kept_step(self) -> int:
        """The step whose weights the model has now."""
        return self.best[0] if self.best else self.trainer.state.global_step

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json; None where this session trained nothing."""
        state, lesson, callback = self.trainer.state, self.callback.lesson, self.callback
        losses, validation = self.history["train"], self.history["validation"]
        last = validation[-1][1] if validation and math.isfinite(validation[-1][1]) else None
        best, early = best_of(validation), callback.validation.stopped_early(state.log_history)
        return self._measured() | {
            "steps": state.global_step,
            "planned_steps": state.global_step if early else state.max_steps,
            "resumed_from_step": self.first_step,
            "kept_step": self.kept_step,
            "final_loss": round(losses[-1][1], 5) if losses else None,
            "validation_loss": {"first": validation[0][1], "best": best[1], "last": last} if best else None,
            "best_step": best and best[0],
            "weights": callback.kinds,
            "adapter_moved": self.changed[0],
            "base_moved": self.changed[1],
            "data_fingerprint": callback.fingerprint["data"],
            "oom_rungs": oom.oom_changes(lesson),
            "settings": flat(lesson.profile.model_dump()),
        }

    def _measured(self) -> dict[str, Any]:
        args, log = self.trainer.args, self.trainer.state.log_history
        tokens = [entry["num_tokens"] for entry in log if "num_tokens" in entry and entry["step"] > self.first_step]
        if not tokens:
            return dict.fromkeys(MEASURED)
        cost = self.callback.live.cost(self.seconds)
        return {
            "tokens_per_second": round(tokens[-1] / self.seconds, 1),
            "train_seconds": round(self.seconds, 1),
            "skipped_steps": self.callback.live.skipped,
            "processes": args.world_size,
            "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "peak_memory_gib": round(self.peak_gib, 3),
        } | ({"cost": cost} if cost else {})  # fmt: skip

    def __str__(self) -> str:
        facts = self.facts()
        loss, speed = facts["validation_loss"], facts["tokens_per_second"]
        best = f"{loss['first']:.4f} -> {loss['best']:.4f} at step {facts['best_step']}" if loss else ""
        lines = {
            "steps": f"{facts['steps']} of {facts['planned_steps']}, from step {self.first_step}",
            "kept": f"the weights of step {self.kept_step}",
            "validation loss": best,
            "time": f"{display.clock(self.seconds)}, {speed:,.0f} tokens/s" if speed else "",
            "peak memory": f"{self.peak_gib:.2f} GiB" if speed else "",
            "changed weights": f"{self.changed[0]} of the adapter, {self.changed[1]} of the base model",
        }
        return "\n".join(f"{name:17}{text}" for name, text in lines.items() if text)


def train(trainer: Any, callback: CourseCallback, resume: str = "auto") -> TrainingResult:
    """Resume or start, train to the end, restore the best step and wait until everything is in the run folder.

    Called again, it only repeats what follows the training, as when the disk of the run folder was away.
    """
    callback.trained = callback.trained or _train(trainer, callback, resume)
    peak, best = hardware.peak_memory_gib(), callback.validation.restore_best()
    _wait_for_sync(callback)
    changed = weights.changed_weights(callback.checksums, trainer.model)
    tracking.write_history(trainer.state.log_history, callback.lesson.run.logs / "history.json")
    return TrainingResult(trainer, callback, *callback.trained, best, changed, peak)


def _train(trainer: Any, callback: CourseCallback, resume: str) -> tuple[float, int]:
    if trainer.state.global_step:
        raise CourseError("training.trained_already")
    lesson, validation = callback.lesson, callback.validation
    checkpoint = resuming.resume_point(lesson, callback.fingerprint, resume)
    if checkpoint is None:
        print("starting at step 0")
    callback.sync = resuming.start_sync(lesson, callback.fingerprint, lesson.profile.train.keep_checkpoints)
    started = monotonic()
    if checkpoint is None or validation.steps_left(checkpoint):
        with callback.time.sigterm_saves():
            oom.train(trainer, lesson, checkpoint)
    else:
        validation.load_finished(checkpoint, chosen=resume.isdecimal())
    return monotonic() - started, checkpoints.step_of(checkpoint)


def _wait_for_sync(callback: CourseCallback) -> None:
    """Wait until the last checkpoint and the logs are in the run folder; only the main process continues from here."""
    distributed.leave_it_to_main()
    tracking.end()
    kept = callback.sync.finish(progress=display.LiveOutput(most_lines=1).show)
    resuming.unlock_run(callback.lesson)
    print(f"safe: checkpoint {kept.step} in {kept.archive.parent}" if kept else "nothing new had to be kept")


def save_adapter(result: TrainingResult, tokenizer: Any) -> None:
    """Write adapter and tokenizer to the run's adapter folder; one of this very training is left as it is."""
    callback, trainer = result.callback, result.trainer
    checksum = weights.adapter_checksum(trainer.model)
    about = {"steps": result.kept_step, "weights": checksum, "fingerprint": callback.fingerprint}
    if files.stamp(callback.lesson.run.adapter) != about:
        with files.complete_folder(callback.lesson.run.adapter, about) as folder:
            trainer.save_model(str(folder))
            tokenizer.save_pretrained(folder)
