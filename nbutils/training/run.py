"""Around the trainer of lesson 03: its settings, the one callback, the training itself and its result."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import warnings
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate import PartialState
from transformers import PrinterCallback, TrainerCallback, TrainerState

from nbutils import chat, checkpoints, display, distributed, files, hardware, platforms, record, tracking
from nbutils.config import Profile, flat
from nbutils.disk import require_disk
from nbutils.errors import CourseError, StoppedByHand
from nbutils.language import tr
from nbutils.processes import first_signals
from nbutils.record import RunFolder
from nbutils.tracking import Clock, Curve, LiveNumbers, best_of, loss_history, validation_history
from nbutils.training import model, oom, sharding, validation
from nbutils.training import resume as resuming

PEER_PATIENCE = 15.0  # seconds for a checkpoint under way to reach the run folder, when another process has ended
RESERVE_SECONDS = 300.0  # for what follows the training: adapter, plots, record
UNKNOWN_SYNC = 60.0  # seconds that a sync is taken to need before one was measured
SHOWN = (  # of the facts, when the training has ended
    "steps", "planned_steps", "resumed_from_step", "kept_step", "validation_loss", "adapter_moved", "base_moved",
    "train_seconds", "tokens_per_second", "peak_memory_gib", "cost",
)  # fmt: skip


def bookkeeping(scratch: Path, seed: int) -> dict[str, Any]:
    """The SFTConfig settings that are about this machine and this run, not about learning.

    Example:
        SFTConfig(**profile.sft, **bookkeeping(lesson.scratch, seed=42))
    """
    # TRL will drop Liger one day; `model.patch_lora_kernels` adds its kernels without TRL
    warnings.filterwarnings("ignore", message=".*use_liger_kernel", category=FutureWarning)
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(scratch / "trainer"),
        "run_name": scratch.name,
        "seed": seed,
        "data_seed": seed,
        "use_cpu": not has_gpu,
        "dataloader_pin_memory": has_gpu,
        "ddp_find_unused_parameters": False,  # every adapter weight is used in every step
        "metric_for_best_model": "eval_loss",
        "disable_tqdm": True,  # the callback shows progress
        "eval_packing": False,  # rows are validated as they are
        "logging_nan_inf_filter": False,  # it would hide a loss that is not a number
    }


class TimeBudget:
    """Saves and ends the training before its time is up, on SIGTERM, and when it is interrupted (Ctrl-C, ■)."""

    def __init__(self, max_hours: float, started: float, now: Clock = monotonic) -> None:
        platform = platforms.detect()
        hours = max_hours or platform.entry.hours
        began = started if max_hours else now() - platforms.session_seconds(platform)
        self.end = began + hours * 3600
        if not hours or self.end < started:  # a machine older than its limit has another one (Colab Pro)
            self.end = math.inf
        self.now = now
        self.reserve = min(RESERVE_SECONDS, hours * 180)
        self.steps: deque[float] = deque(maxlen=20)  # seconds of the recent ones, saving included
        self.last = now()
        self.sync_seconds = 0.0  # of the last one; 0: not measured yet
        self.ended_by: signal.Signals | None = None

    def ask_to_end(self, number: int) -> None:
        """End the training after its step; called with the signal that asks for it."""
        self.ended_by = signal.Signals(number)
        print(tr("\n{signal}: the training ends after this step, and is saved.", signal=self.ended_by.name), flush=True)

    def reason_to_end(self) -> str:
        """Why the training must end after this step; empty if it may go on."""
        self.steps.append(self.now() - self.last)
        self.last = self.now()
        sync = self.sync_seconds or min(UNKNOWN_SYNC, self.reserve)
        needed = 1.5 * (max(self.steps) + sync) + self.reserve
        left = self.end - self.last
        if self.ended_by:
            return tr("This run was asked to end ({signal}).", signal=self.ended_by.name)
        if left < needed:
            return tr("Its time is nearly up (MAX_HOURS, or the limit of the platform).")
        return ""


class CourseCallback(TrainerCallback):
    """Keeps checkpoints in the run folder, ends the run in time, shows progress; `train` resumes with it.

    Example:
        callback = CourseCallback(dataset, profile, run=lesson.run, folders=lesson.folders, started=lesson.started)
    """

    def __init__(
        self,
        dataset: Any,
        profile: Profile,
        *,
        run: RunFolder,
        folders: platforms.Folders,
        started: float,
        base_model: dict[str, str] | None = None,
        max_hours: float = 0.0,
    ) -> None:
        self.dataset = dataset  # chat.ChatDataset
        self.profile = profile
        self.run = run
        self.folders = folders
        self.scratch = folders.scratch / run.name
        self.base_model = base_model or {}  # `model_fingerprint`
        self.patience = profile.course.early_stopping_patience
        self.time = TimeBudget(max_hours, started)
        self.live = LiveNumbers(self.scratch / run.logs.name, run.logs)
        self.trainer: Any = None  # set by `take_over`
        self.sync: Any = None  # started by `train`
        self.fingerprint: dict[str, Any] = {}
        self.started = monotonic()
        self.earlier_seconds = 0.0  # of the sessions before this one
        self.trained: tuple[float, int] | None = None  # seconds, and the step it started from

    def prepare(self, trainer: Any) -> str:
        """Check the trainer's rows and the disk, cast and fuse the LoRA layers; what was done, in one line."""
        self.require_room(trainer)
        chat.check_trainer(trainer, self.dataset.report)
        sharding.use_engine(trainer)
        layers = model.patch_lora_kernels(trainer)
        self.take_over(trainer)
        seed = trainer.args.seed
        self.fingerprint = resuming.run_fingerprint(self.profile, self.run.data, self.base_model, seed)
        distributed.require_same(self.fingerprint | {"sft": dict(self.profile.sft)})
        tokens = self.dataset.report.trained
        return tr("{tokens:,} tokens to learn from; {layers} fused LoRA layers", tokens=tokens, layers=layers)

    def require_room(self, trainer: Any) -> None:
        """Refuse a training whose checkpoints do not fit on the disks."""
        trained = 0
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                trained += weight.numel()
        self.checkpoint_gib = (trained * 12 + 64 * 2**20) / files.GIB  # with two states of the optimizer
        count = trainer.args.save_total_limit + 2  # the best one is kept beside the newest
        output = Path(trainer.args.output_dir)
        require_disk(output, count * self.checkpoint_gib, tr("writing checkpoints"))
        kept = checkpoints.look(self.run.checkpoints)
        missing = max(count - len(kept), 1)
        require_disk(self.run.checkpoints, missing * self.checkpoint_gib, tr("keeping checkpoints"))

    def take_over(self, trainer: Any) -> None:
        """Let the trainer validate as the course does, silence its output, note the checksums of its weights."""
        self.trainer = trainer
        validation.use_token_mean(trainer)
        trainer.remove_callback(PrinterCallback)
        logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)  # warns of what on_train_begin mends
        self.kinds = model.weight_kinds(trainer.model)
        self.checksums = model.weight_checksums(trainer.model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # else SAVE_STEPS of the checkpoint would count, not that of today
        if distributed.strategy() in distributed.SHARDED:  # now it is known which shard is here
            self.checksums = model.weight_checksums(self.trainer.model)
        validation.continue_validation(self.trainer)
        self.time.last = self.time.now()
        self.live.on_train_begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        # saving steps are logged too, so that a resumed run logs the same
        control.should_log |= control.should_save or state.global_step >= state.max_steps
        for line in self.sync.messages():
            self.live.note(line)
        self.time.sync_seconds = self.sync.seconds
        self.end_in_time(state, control)
        self.live.on_step_end(state, optimizer)

    def end_in_time(self, state: Any, control: Any) -> None:
        """Save and end after this step where the time is up, or where any process was asked to end."""
        reason = self.time.reason_to_end()
        if control.should_training_stop or not distributed.anyone(bool(reason)):
            return
        self.live.note(
            tr(
                "[WARN] {reason} Saving at step {step} of {steps} and ending here. Run the same notebook again (on "
                "Kaggle with this output attached): it continues.",
                reason=reason or tr("Another process was asked to end."),
                step=state.global_step,
                steps=state.max_steps,
            )
        )
        control.should_log = True
        control.should_save = True
        control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # a checkpoint keeps it for the next session
        state.log_history[-1]["train_seconds"] = self.all_seconds(monotonic() - self.started)
        self.live.on_log(state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        loss = metrics["eval_loss"]
        if not math.isfinite(loss):
            self.live.note(tr("[WARN] the validation loss is {loss}: training ends here", loss=loss))
            control.should_training_stop = True
            control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self.sync.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def all_seconds(self, seconds: float) -> float:
        """How long the training took in all sessions, if this one took so many seconds."""
        return round(self.earlier_seconds + seconds, 1)

    def stopped_early(self) -> bool:
        """Whether the training was ended by early stopping."""
        return validation.stopped_early(vars(self.trainer.state), self.patience)

    def is_complete(self) -> bool:
        """Whether the training has done all its steps, or needs no more."""
        state = self.trainer.state
        return state.global_step >= state.max_steps or self.stopped_early()

    def load_finished(self, checkpoint: Path) -> None:
        """Load weights and history of a complete training."""
        model.load_checkpoint(self.trainer.model, checkpoint)
        state = TrainerState.load_from_json(str(checkpoint / checkpoints.STATE))
        state.max_steps = state.global_step  # MAX_STEPS may be less than what was planned then
        self.trainer.state = state
        print(
            tr(
                "trained before · nothing is left to train: this run has {steps} steps. A larger MAX_STEPS continues "
                'it (after early stopping SET = "course.early_stopping_patience=0"), RESUME = "never" starts over.',
                steps=state.global_step,
            )
        )


@dataclass(frozen=True)
class TrainingResult:
    """A finished training: its curves, what it took, and which step is kept."""

    trainer: Any
    callback: CourseCallback
    seconds: float  # of this session
    first_step: int  # 0, or where it was resumed
    kept_step: int  # whose weights the model has now
    changed: tuple[int, int]  # weight tensors of the adapter, and of the base
    peak_gib: float
    checksums: model.Checksums  # of the weights it ended with
    weights: dict[str, torch.Tensor]  # trained ones, where the model has shards or 16 bits

    @property
    def history(self) -> dict[str, Curve]:
        """(step, loss) pairs of `train` and `validation`."""
        log = self.trainer.state.log_history
        return {"train": loss_history(log), "validation": validation_history(log)}

    def facts(self) -> dict[str, Any]:
        """What goes into facts.json; None where this session trained nothing."""
        state = self.trainer.state
        callback = self.callback
        losses = self.history["train"]
        validated = self.history["validation"]
        best = best_of(validated)
        facts = {
            "steps": state.global_step,
            "planned_steps": state.global_step if callback.stopped_early() else state.max_steps,
            "resumed_from_step": self.first_step,
            "kept_step": self.kept_step,
            "final_loss": round(losses[-1][1], 5) if losses else None,
            "best_step": best[0] if best else None,
            "validation_loss": {"first": validated[0][1], "best": best[1], "last": validated[-1][1]} if best else None,
            "weights": callback.kinds,
            "adapter_moved": self.changed[0],
            "base_moved": self.changed[1],
            "data_fingerprint": callback.fingerprint["data"],
            "oom_rungs": oom.oom_changes(callback.run.path),
            "settings": flat(callback.profile.model_dump()),
        }
        return self._measured() | facts

    def _measured(self) -> dict[str, Any]:
        """What this session took."""
        args = self.trainer.args
        tokens = 0
        for entry in self.trainer.state.log_history:
            if "num_tokens" in entry and entry["step"] > self.first_step:
                tokens = entry["num_tokens"]
        seconds = self.callback.all_seconds(self.seconds)
        measured = {
            "tokens_per_second": round(tokens / self.seconds, 1),
            "peak_memory_gib": round(self.peak_gib, 3),
            "skipped_steps": self.callback.live.skipped,
            "processes": args.world_size,
            "engine": distributed.strategy() and distributed.strategy_name(str(self.callback.profile.method)),
            "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "train_seconds": seconds,
            "cost": self.callback.live.cost(seconds) or None,
        }
        return measured if tokens else dict.fromkeys(measured)

    def stamp(self) -> dict[str, Any]:
        """What the saved weights are, so that those of one training are written once."""
        trained = sorted(item for item in self.checksums.items() if item[1][0])
        checksum = zlib.crc32(repr(trained).encode())
        return {
            "steps": self.kept_step,
            "weights": f"{checksum:08x}",
            "fingerprint": self.callback.fingerprint,
        }

    def __str__(self) -> str:
        facts = self.facts()
        shown = record.readable({name: facts[name] for name in SHOWN})
        return display.columns_of(list(shown.items()))


def train(trainer: Any, callback: CourseCallback, resume: str = "auto") -> TrainingResult:
    """Resume or start, train to the end, restore the best step and wait until everything is in the run folder.

    Called again, it only repeats what follows the training, as when the disk of the run folder was away.

    Example:
        result = train(trainer, callback, resume="auto")
    """
    if callback.trained is None:
        callback.trained = _train_session(trainer, callback, resume)
    interrupted = callback.time.ended_by == signal.SIGINT
    with callback.live.reported(trainer):
        peak_gib = hardware.peak_memory_gib()
        kept_step = trainer.state.global_step
        if not interrupted and resume != str(kept_step):  # else its own weights are asked for
            kept_step = validation.load_best(trainer)
        checksums = model.weight_checksums(trainer.model)
        changed = _count_changed(callback.checksums, checksums)
        weights = {} if distributed.strategy() in distributed.WHOLE else sharding.full_weights(trainer.model)
        distributed.leave_it_to_main()  # only the main process continues from here
        tracking.end_trackers(callback.run.logs)
        kept = callback.sync.finish()
    resuming.unlock_run(callback.scratch)
    callback.live.on_train_end(trainer.state, "finished" if callback.is_complete() else "stopped")
    if kept:
        print(tr("safe: checkpoint {step} in {folder}", step=kept.step, folder=kept.archive.parent))
    if interrupted:
        raise StoppedByHand(
            tr(
                "You stopped the training at step {step} of {steps}; what it learned until then is saved.",
                step=trainer.state.global_step,
                steps=trainer.state.max_steps,
            ),
            todo=tr(
                "To go on, restart the kernel and run all cells, or give the same command again; it "
                "continues from that step."
            ),
        )
    tracking.write_history(trainer.state.log_history, callback.run.logs / "history.json")
    seconds, first_step = callback.trained
    return TrainingResult(
        trainer=trainer,
        callback=callback,
        seconds=seconds,
        first_step=first_step,
        kept_step=kept_step,
        changed=changed,
        peak_gib=peak_gib,
        checksums=checksums,
        weights=weights,
    )


def _train_session(trainer: Any, callback: CourseCallback, resume: str) -> tuple[float, int]:
    """Train what is left after the newest checkpoint; the seconds it took, and the step it started from."""
    if trainer.state.global_step:
        raise CourseError(
            tr("This trainer has trained before, and would mix two trainings."),
            todo=tr("Run the cells again from the one that loads the model (or restart the kernel and run all cells)."),
        )
    checkpoint = None
    if distributed.is_main():
        checkpoint = resuming.resume_point(callback.run, callback.folders, callback.fingerprint, resume)
    checkpoint = distributed.broadcast(checkpoint)
    if checkpoint is None:
        print(tr("starting at step 0"))
    else:
        checkpoint = distributed.send_folder(callback.scratch / "trainer", checkpoint.name)
    callback.sync = resuming.start_sync(
        callback.run,
        callback.scratch,
        callback.fingerprint,
        keep_last=callback.profile.sft.save_total_limit,
        validation_rows=int(callback.profile.course.validation_rows),
    )
    callback.earlier_seconds = resuming.seconds_until(checkpoint)
    callback.started = monotonic()
    with callback.live.reported(trainer):
        if checkpoint is None or validation.steps_left(trainer, checkpoint, callback.patience):
            _train_steps(trainer, callback, checkpoint)
        else:
            callback.load_finished(checkpoint)
    return monotonic() - callback.started, checkpoints.step_of(checkpoint)


def _train_steps(trainer: Any, callback: CourseCallback, checkpoint: Path | None) -> None:
    """Train from a checkpoint, or from the start."""
    run = callback.run
    if distributed.is_main() and files.stamp(run.adapter):  # of a shorter or another training
        shutil.rmtree(run.former_adapter, ignore_errors=True)
        run.adapter.rename(run.former_adapter)
    try:
        with first_signals(callback.time.ask_to_end):
            if checkpoint:
                sharding.convert_optimizer_file(checkpoint, trainer.args.optim)
            oom.train_within_memory(trainer, run.path, checkpoint, callback.live.note)
    except Exception as problem:  # of a full disk, libraries say many things
        if ended := distributed.peer_error(problem):
            callback.sync.finish(PEER_PATIENCE)
            raise ended from None
        require_disk(Path(trainer.args.output_dir), callback.checkpoint_gib, tr("writing checkpoints"))
        raise


def _count_changed(before: model.Checksums, after: model.Checksums) -> tuple[int, int]:
    """How many weights of the adapter, and of the base, are others in any process."""
    changed = [name for name in before if before[name] != after[name]]
    in_any_process = set[str]()
    for names in distributed.gather(changed):
        in_any_process.update(names)
    trained = 0
    for name in in_any_process:
        is_trained, _ = before[name]
        trained += is_trained
    return trained, len(in_any_process) - trained


def save_adapter(result: TrainingResult, tokenizer: Any) -> None:
    """Write adapter and tokenizer to the run's adapter folder; one of this very training is left as it is.

    Example:
        save_adapter(result, tokenizer)
    """
    trainer = result.trainer
    run = result.callback.run
    if model.weight_checksums(trainer.model) != result.checksums:
        raise CourseError(
            tr("The weights of the adapter are no longer those the training ended with."),
            todo=tr(
                "Run the cells again from the one that loads the model; the training is loaded from its last "
                "checkpoint, not repeated."
            ),
        )
    stamp = result.stamp()
    if files.stamp(run.adapter) != stamp:
        with files.complete_folder(run.adapter, stamp) as folder:
            trainer._save(str(folder), state_dict=result.weights or None)
            tokenizer.save_pretrained(folder)
