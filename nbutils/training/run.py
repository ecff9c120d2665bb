"""What surrounds the SFTTrainer of lesson 03: its settings, the course's callback, the training and its result."""

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
from transformers import PrinterCallback, TrainerCallback, TrainerState

from nbutils import chat, checkpoints, display, distributed, files, hardware, platforms, record, tracking
from nbutils.checkpoints import Fingerprint
from nbutils.config import Profile, flat
from nbutils.disk import require_disk
from nbutils.errors import CourseError, StoppedByHand
from nbutils.language import say, tr
from nbutils.processes import first_signals
from nbutils.record import Facts, RunFolder
from nbutils.tracking import Curve, LiveNumbers, best_of, loss_history, validation_history
from nbutils.training import hybrid, model, oom, sharding, validation
from nbutils.training import resume as resuming

LAST_SYNC_SECONDS = 15.0  # how long a checkpoint may still be copied to the run folder once another process has died
RESERVE_SECONDS = 300.0  # for what follows the training: adapter, plots, record
SHOWN_FACTS = (  # when the training has ended
    "steps", "planned_steps", "resumed_from_step", "kept_step", "validation_loss", "adapter_moved", "base_moved",
    "train_seconds", "tokens_per_second", "peak_memory_gib", "cost",
)  # fmt: skip


def bookkeeping(scratch: Path, seed: int) -> Facts:
    """The arguments of SFTConfig that are about this machine and this run, not about learning.

    Example:
        SFTConfig(**profile.sft, **bookkeeping(lesson.scratch, seed=42))
    """
    # TRL announces that it will drop Liger; `model.patch_lora_kernels` adds the kernels without TRL
    warnings.filterwarnings("ignore", message=".*use_liger_kernel", category=FutureWarning)
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(scratch / "trainer"),
        "run_name": scratch.name,
        "seed": seed,
        "data_seed": seed,
        "use_cpu": not has_gpu,
        "dataloader_pin_memory": has_gpu,
        "ddp_find_unused_parameters": False,  # there are none: every step uses every adapter weight
        "metric_for_best_model": "eval_loss",
        "disable_tqdm": True,  # the callback shows progress
        "eval_packing": False,  # validate each row on its own
        "logging_nan_inf_filter": False,  # it would hide a loss that is not a number
    }


class TimeBudget:
    """Says when a training must save and end: before its time is up, on SIGTERM, or when interrupted (Ctrl-C, ■)."""

    def __init__(self, max_hours: float, started: float) -> None:
        platform = platforms.detect()
        hours = max_hours or platform.entry.hours
        # MAX_HOURS counts from the start of the lesson, a platform's limit from the start of its session
        began = started if max_hours else monotonic() - platforms.session_seconds(platform)
        self.end = began + hours * 3600
        if not hours or self.end < started:  # older than the known limit: it has a longer one (Colab Pro)
            self.end = math.inf
        self.reserve = min(RESERVE_SECONDS, hours * 180)  # at most a twentieth of a short limit
        self.step_seconds: deque[float] = deque(maxlen=20)  # of recent steps, saving included
        self.last_step = monotonic()  # when it ended
        self.ended_by: signal.Signals | None = None

    def ask_to_end(self, number: int) -> None:
        """Handle a signal: the training ends after its current step."""
        self.ended_by = signal.Signals(number)
        say("\n{signal}: the training ends after this step, and is saved.", signal=self.ended_by.name)

    def step_ended(self, sync_seconds: float) -> str:
        """Note that a step has ended; why the training must end now, empty if it may go on.

        `sync_seconds`: what copying the last checkpoint took, 0 if none was copied yet.
        """
        if self.ended_by:
            return tr("This run was asked to end ({signal}).", signal=self.ended_by.name)
        now = monotonic()
        self.step_seconds.append(now - self.last_step)
        self.last_step = now
        saving = sync_seconds or self.reserve
        needed = 1.5 * (max(self.step_seconds) + saving)  # the next step and its checkpoint may be slower
        if now + needed + self.reserve > self.end:
            return tr("Its time is nearly up (MAX_HOURS, or the limit of the platform).")
        return ""


class CourseCallback(TrainerCallback):
    """Copies checkpoints to the run folder, ends the training in time, shows progress; for SFTTrainer and `train`.

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
        self.dataset = dataset  # chat.FilteredRows
        self.profile = profile
        self.run = run
        self.folders = folders
        self.scratch = folders.scratch / run.name
        self.base_model = base_model  # from `model_fingerprint`
        self.patience = profile.course.early_stopping_patience
        self.budget = TimeBudget(max_hours, started)
        self.live = LiveNumbers(self.scratch / run.logs.name, run.logs)
        self.trainer: Any = None  # set by `take_over`
        self.sync: Any = None  # copies checkpoints; started by `train` in the main process
        self.fingerprint: Fingerprint = {}
        self.first_step = 0  # or that of the checkpoint it resumed from
        self.earlier_seconds = 0.0  # of the sessions before this one
        self.session_seconds = 0.0  # of this one; 0 until it has trained

    def prepare(self, trainer: Any) -> str:
        """Check disk and rows, adapt the trainer, note what the run is; a line to print."""
        self.require_room(trainer)
        chat.check_trainer(trainer, self.dataset)
        sharding.adapt_to_strategy(trainer)
        layers = model.patch_lora_kernels(trainer)
        if distributed.strategy() in distributed.WHOLE:
            hybrid.require_rows_apart(trainer.model, trainer.compute_loss_context_manager())
        self.take_over(trainer)
        profile = self.profile
        data = files.read_json(self.run.data / "data_card.json")["fingerprint"]
        self.fingerprint = resuming.run_fingerprint(profile, self.base_model, data, trainer.args.seed) | {
            "method": profile.method,
            "quantization": profile.quantization.model_dump(mode="json") if profile.method == "qlora" else {},
            "lora": profile.lora.model_dump(mode="json"),
        }
        distributed.require_same(self.fingerprint | {"sft": dict(profile.sft)})
        tokens = self.dataset.trained_tokens
        return tr("{tokens:,} tokens to learn from; {layers} fused LoRA layers", tokens=tokens, layers=layers)

    def require_room(self, trainer: Any) -> None:
        """Refuse a training whose checkpoints do not fit on the disks."""
        trained = trainer.model.num_parameters(only_trainable=True)
        size = trained * 12 + 64 * 2**20  # a weight and the two moments of Adam, 4 bytes each; 64 MiB for all else
        self.checkpoint_gib = size / files.GIB
        count = trainer.args.save_total_limit + 2  # the best is kept too, and a new one comes before the oldest goes
        output = Path(trainer.args.output_dir)
        require_disk(output, count * self.checkpoint_gib)
        stored = checkpoints.look(self.run.checkpoints)
        missing = max(count - len(stored), 1)
        require_disk(self.run.checkpoints, missing * self.checkpoint_gib)

    def take_over(self, trainer: Any) -> None:
        """Replace the trainer's validation and its printing by the course's; note the checksums of its weights."""
        self.trainer = trainer
        validation.use_token_mean(trainer)
        trainer.remove_callback(PrinterCallback)
        # it warns that a checkpoint has other settings, which on_train_begin corrects
        logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
        self.kinds = model.weight_kinds(trainer.model)
        self.checksums = model.weight_checksums(trainer.model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a resumed state has the save_steps of its checkpoint, not today's
        if distributed.strategy() in distributed.SHARDED:  # only now the weights are divided among the processes
            self.checksums = model.weight_checksums(self.trainer.model)
        validation.continue_validation(self.trainer)
        self.budget.last_step = monotonic()
        self.live.on_train_begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        # a step that is saved is logged too: a resumed training then logs what an uninterrupted one does
        control.should_log |= control.should_save or state.global_step >= state.max_steps
        if self.sync:
            for line in self.sync.messages():
                self.live.note(line)
        self.end_in_time(state, control)
        self.live.on_step_end(state, optimizer)

    def end_in_time(self, state: Any, control: Any) -> None:
        """Save and end after this step if the time is up, or if any process was asked to end."""
        reason = self.budget.step_ended(self.sync.seconds if self.sync else 0.0)
        # `anyone` waits for all processes, and should_training_stop is the same in each
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
        # the log is stored with each checkpoint, where the next session reads it
        state.log_history[-1]["train_seconds"] = round(self.earlier_seconds + self.live.seconds, 1)
        self.live.on_log(state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        loss = metrics["eval_loss"]
        if math.isfinite(loss):
            return
        if state.global_step == 0:
            raise CourseError(
                "The loss of the model is {loss} before the first step.",
                todo=(
                    "If from_pretrained.dtype is float16, which overflows, set it to float32. Otherwise the weights "
                    "are damaged: download or copy that model again."
                ),
                loss=loss,
            )
        self.live.note(tr("[WARN] the validation loss is {loss}: training ends here", loss=loss))
        control.should_training_stop = True
        control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        distributed.barrier()
        if self.sync:
            self.sync.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def planned_steps(self) -> int:
        """How many steps the training has, those done if early stopping has ended it."""
        state = self.trainer.state
        return state.global_step if validation.stopped_early(state, self.patience) else state.max_steps


@dataclass
class TrainingResult:
    """The outcome of `train`: its loss curves, what it took, and the step whose weights are kept."""

    trainer: Any
    callback: CourseCallback
    kept_step: int  # whose weights the model has now
    changed: tuple[int, int]  # how many weight tensors of the adapter changed, and of the base
    peak_gib: float
    checksums: model.Checksums  # of the weights it ended with
    gathered: dict[str, torch.Tensor]  # trained weights from the shards of all processes; empty with one, or DDP

    @property
    def ended(self) -> bool:
        """Whether the training reached its last step; one that was stopped is continued later."""
        steps: int = self.trainer.state.global_step
        return steps >= self.callback.planned_steps()

    @property
    def history(self) -> dict[str, Curve]:
        """(step, loss) pairs of `train` and `validation`."""
        log = self.trainer.state.log_history
        return {"train": loss_history(log), "validation": validation_history(log)}

    def facts(self) -> Facts:
        """What goes into facts.json; measurements are None if this session trained nothing."""
        callback = self.callback
        losses = self.history["train"]
        return self._measured() | {
            "steps": self.trainer.state.global_step,
            "planned_steps": callback.planned_steps(),
            "resumed_from_step": callback.first_step,
            "kept_step": self.kept_step,
            "final_loss": round(losses[-1][1], 5) if losses else None,
            **self._validated(),
            "weights": callback.kinds,  # how many have each precision
            "adapter_moved": self.changed[0],
            "base_moved": self.changed[1],
            "data_fingerprint": callback.fingerprint["data"],
            "oom_rungs": oom.oom_changes(callback.run.path),
            "settings": flat(callback.profile.model_dump()),
        }

    def _validated(self) -> Facts:
        """The best step, and the validation loss before, there and at the end."""
        curve = self.history["validation"]
        best = best_of(curve)
        if best is None:
            return {"best_step": None, "validation_loss": None}
        step, loss = best
        return {"best_step": step, "validation_loss": {"first": curve[0][1], "best": loss, "last": curve[-1][1]}}

    def _measured(self) -> Facts:
        """Speed, memory and cost; None for each if this session trained nothing: the record keeps what it has."""
        args = self.trainer.args
        callback = self.callback
        seconds = round(callback.earlier_seconds + callback.session_seconds, 1)
        measured = {
            "tokens_per_second": round(callback.live.tokens / callback.session_seconds, 1),
            "peak_memory_gib": round(self.peak_gib, 3),
            "skipped_steps": callback.live.skipped,
            "processes": args.world_size,
            "engine": distributed.strategy() and distributed.strategy_name(str(callback.profile.method)),
            "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "train_seconds": seconds,
            "cost": callback.live.cost(seconds) or None,
        }
        has_trained = self.trainer.state.global_step > callback.first_step
        return measured if has_trained else dict.fromkeys(measured)

    def stamp(self) -> Facts:
        """Identifies the weights, so that `save_adapter` writes those of one training only once."""
        trained = sorted(item for item in self.checksums.items() if item[1][0])  # (name, (is trained, checksum))
        checksum = zlib.crc32(repr(trained).encode())
        return {
            "steps": self.kept_step,
            "weights": f"{checksum:08x}",
            "fingerprint": self.callback.fingerprint,
        }

    def show(self) -> None:
        """Steps, validation losses and changed weights as a table."""
        facts = self.facts()
        display.show_facts(record.readable({name: facts[name] for name in SHOWN_FACTS}))


def train(trainer: Any, callback: CourseCallback, resume: str = "auto") -> TrainingResult:
    """Resume or start, train to the end, restore the best step and wait until everything is in the run folder.

    It returns in the main process alone; the others end here.

    Called again, for example because the run folder's disk had failed, it repeats only what follows the training.

    Example:
        result = train(trainer, callback, resume="auto")
    """
    if not callback.session_seconds:
        _train_session(trainer, callback, resume)
    state = trainer.state
    interrupted = callback.budget.ended_by == signal.SIGINT
    with callback.live.reported(trainer):
        # RESUME = "40" without a step left keeps the weights of step 40, best or not. Of an interrupted run, which
        # raises below, the best are not loaded.
        result = _result_of(trainer, callback, loads_best=not interrupted and resume != str(state.global_step))
        distributed.end_other_processes()  # from here on there is only the main one, which has the sync
        tracking.end_trackers(callback.run.logs)
        stored = callback.sync.finish()
    resuming.unlock_run(callback.scratch)
    callback.live.on_train_end(state, "stopped" if state.global_step < callback.planned_steps() else "finished")
    if stored:
        say("safe: checkpoint {step} in {folder}", step=stored.step, folder=stored.archive.parent)
    if interrupted:
        raise StoppedByHand(
            "You stopped the training at step {step} of {steps}; what it learned until then is saved.",
            todo=(
                "To go on, restart the kernel and run all cells, or give the same command again; it "
                "continues from that step."
            ),
            step=state.global_step,
            steps=state.max_steps,
        )
    tracking.write_history(state.log_history, callback.run.logs / "history.json")
    return result


def _train_session(trainer: Any, callback: CourseCallback, resume: str) -> None:
    """Train what is left after the newest checkpoint."""
    if trainer.state.global_step:
        raise CourseError(
            "This trainer has trained before, and would mix two trainings.",
            todo="Run the cells again from the one that loads the model (or restart the kernel and run all cells).",
        )
    checkpoint = None
    if distributed.is_main():
        checkpoint = resuming.resume_point(callback.run, callback.folders, callback.fingerprint, resume)
        callback.sync = resuming.start_sync(callback.run, callback.scratch, callback.fingerprint, callback.profile)
    checkpoint = distributed.broadcast(checkpoint)
    if checkpoint is None:
        say("starting at step 0")
    else:
        checkpoint = callback.scratch / "trainer" / checkpoint.name  # scratch may be elsewhere than the main process's
        distributed.send_folder(checkpoint)
        callback.earlier_seconds = resuming.seconds_until(checkpoint)
    callback.first_step = checkpoints.step_of(checkpoint)
    callback.live.begin(callback.first_step)
    with callback.live.reported(trainer):
        if checkpoint is None or validation.steps_left(trainer, checkpoint, callback.patience):
            _train_steps(trainer, callback, checkpoint)
        else:
            _load_finished(trainer, checkpoint)
    callback.session_seconds = callback.live.seconds


def _load_finished(trainer: Any, checkpoint: Path) -> None:
    """Load weights and history of a training that has no steps left."""
    model.load_checkpoint(trainer.model, checkpoint)
    state = TrainerState.load_from_json(str(checkpoint / checkpoints.STATE))
    state.max_steps = state.global_step  # today's MAX_STEPS may be less than it has trained
    trainer.state = state
    say(
        "trained before · nothing is left to train: this run has {steps} steps. A larger MAX_STEPS continues "
        'it (after early stopping SET = "course.early_stopping_patience=0"), RESUME = "never" starts over.',
        steps=state.global_step,
    )


def _train_steps(trainer: Any, callback: CourseCallback, checkpoint: Path | None) -> None:
    """Set an earlier adapter aside, then train from a checkpoint or from the start."""
    run = callback.run
    if distributed.is_main() and files.stamp(run.adapter):  # a complete adapter of the weights before
        shutil.rmtree(run.former_adapter, ignore_errors=True)
        run.adapter.rename(run.former_adapter)
    try:
        with first_signals(callback.budget.ask_to_end):
            if checkpoint:
                sharding.convert_optimizer_file(checkpoint, trainer.args.optim)
            oom.train_within_memory(trainer, run.path, checkpoint, callback.live.note)
    except Exception as problem:  # libraries report a full disk with many kinds of errors
        if peer_error := distributed.peer_error(problem):
            if callback.sync:
                callback.sync.finish(LAST_SYNC_SECONDS)
            raise peer_error from None
        require_disk(Path(trainer.args.output_dir), callback.checkpoint_gib)
        raise


def _result_of(trainer: Any, callback: CourseCallback, loads_best: bool) -> TrainingResult:
    """What the training has become, with the weights of its best step or of its last one."""
    peak_gib = hardware.peak_memory_gib()
    kept_step = validation.load_best(trainer) if loads_best else trainer.state.global_step
    checksums = model.weight_checksums(trainer.model)
    return TrainingResult(
        trainer=trainer,
        callback=callback,
        kept_step=kept_step,
        changed=_count_changed(callback.checksums, checksums),
        peak_gib=peak_gib,
        checksums=checksums,
        gathered={} if distributed.strategy() in distributed.WHOLE else sharding.full_weights(trainer.model),
    )


def _count_changed(before: model.Checksums, after: model.Checksums) -> tuple[int, int]:
    """How many weights of the adapter, and of the base, have changed in any process."""
    changed = [name for name in before if before[name] != after[name]]
    in_each_process = distributed.gather(changed)  # each may hold other shards
    names = set[str]().union(*in_each_process)
    trained = 0
    for name in names:
        is_trained, _ = before[name]
        trained += is_trained
    return trained, len(names) - trained


def save_adapter(result: TrainingResult, tokenizer: Any) -> None:
    """Write adapter and tokenizer to the run's adapter folder, unless they are there already.

    Example:
        save_adapter(result, tokenizer)
    """
    trainer = result.trainer
    run = result.callback.run
    if model.weight_checksums(trainer.model) != result.checksums:
        raise CourseError(
            "The weights of the adapter are no longer those the training ended with.",
            todo=(
                "Run the cells again from the one that loads the model; the training is loaded from its last "
                "checkpoint, not repeated."
            ),
        )
    stamp = result.stamp()
    if files.stamp(run.adapter) != stamp:
        with files.complete_folder(run.adapter, stamp) as folder:
            trainer._save(str(folder), state_dict=result.gathered or None)
            tokenizer.save_pretrained(folder)
