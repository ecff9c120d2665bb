"""Around the trainer of lesson 03: its settings, the one callback, the training itself and its result."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate import PartialState
from transformers import PrinterCallback, TrainerCallback, TrainerState

from nbutils import chat, checkpoints, display, distributed, files, hardware, platforms, record, tracking
from nbutils.config import flat
from nbutils.disk import require_disk
from nbutils.errors import CourseError, StoppedByHand
from nbutils.language import joined, tr
from nbutils.processes import first_signals
from nbutils.record import LessonLike
from nbutils.tracking import Clock, Curve, LiveNumbers, best_of, loss_history, validation_history
from nbutils.training import model, oom, sharding, validation
from nbutils.training import resume as resuming

PEER_PATIENCE = 15.0  # seconds for a checkpoint under way to reach the run folder, when another process has ended
RESERVE_SECONDS = 300.0  # for what follows the training: adapter, plots, record


def bookkeeping(lesson: LessonLike, seed: int) -> dict[str, Any]:
    """The SFTConfig settings that are about this machine and this run, not about learning."""
    # TRL will drop Liger one day; `model.patch_lora_kernels` adds its kernels without TRL
    warnings.filterwarnings("ignore", message=".*use_liger_kernel", category=FutureWarning)
    return {
        "output_dir": str(lesson.scratch / "trainer"), "run_name": lesson.run.name, "seed": seed, "data_seed": seed,
        "use_cpu": lesson.gpu is None, "dataloader_pin_memory": lesson.gpu is not None,
        "ddp_find_unused_parameters": False,  # every adapter weight is used in every step
        "metric_for_best_model": "eval_loss",
        "disable_tqdm": True,  # the callback shows progress
        "eval_packing": False,  # rows are validated as they are
        "logging_nan_inf_filter": False,  # it would hide a loss that is not a number
    }  # fmt: skip


class TimeBudget:
    """Saves and ends the training before its time is up, on SIGTERM, and when it is interrupted (Ctrl-C, ■)."""

    def __init__(self, lesson: LessonLike, max_hours: float, now: Clock = monotonic) -> None:
        platform, self.now = lesson.platform, now
        hours = max_hours or platform.entry.hours
        used = 0.0 if max_hours else platforms.session_seconds(platform) - (now() - lesson.started)
        there = tr("the {hours:g} h of {platform}", hours=hours, platform=platform.name)
        self.limit = "MAX_HOURS" if max_hours else there
        known = hours and used <= hours * 3600  # a machine older than its limit has another one (Colab Pro)
        self.end = lesson.started - used + hours * 3600 if known else math.inf
        self.reserve = min(RESERVE_SECONDS, hours * 180)
        self.steps: deque[float] = deque(maxlen=20)  # seconds of the recent ones, saving included
        self.last = now()
        self.sync_seconds = 0.0  # of the last one; 0: not measured yet
        self.ended_by: signal.Signals | None = None
        self.note: Callable[[str], object] = print

    def ask_to_end(self, number: int) -> None:
        """End the training after its step; called with the signal that asks for it."""
        self.ended_by = signal.Signals(number)
        print(tr("\n{signal}: the training ends after this step, and is saved.", signal=self.ended_by.name), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.now() - self.last)
        self.last = self.now()
        sync = self.sync_seconds or min(60.0, self.reserve)
        needed, left = 1.5 * (max(self.steps) + sync) + self.reserve, self.end - self.last
        reason = tr("Another process was asked to end.")
        if self.ended_by:
            reason = tr("This run was asked to end ({signal}).", signal=self.ended_by.name)
        elif left < needed:
            minutes = {"left": max(left, 0.0) / 60, "needed": needed / 60, "limit": self.limit}
            reason = tr("{left:.1f} minutes of {limit} are left, {needed:.1f} are needed to save and end.", **minutes)
        if control.should_training_stop or not distributed.anyone(bool(self.ended_by) or left < needed):
            return
        about = {"reason": reason, "step": state.global_step, "steps": state.max_steps}
        self.note(tr("[WARN] {reason} Saving at step {step} of {steps} and ending here.", **about))
        print(tr("Run the same notebook again (on Kaggle with this output attached): it continues."))
        control.should_log = control.should_save = control.should_training_stop = True


class CourseCallback(TrainerCallback):
    """Keeps checkpoints in the run folder, ends the run in time, shows progress; `train` resumes with it."""

    def __init__(self, lesson: LessonLike, dataset: chat.ChatDataset, max_hours: float = 0.0) -> None:
        self.lesson, self.dataset = lesson, dataset
        self.patience = lesson.profile.course.early_stopping_patience
        self.time, self.live = TimeBudget(lesson, max_hours), LiveNumbers(lesson)
        self.time.note = self.live.note
        self.trainer: Any = None  # set by `take_over`
        self.sync: Any = None  # started by `train`
        self.fingerprint: dict[str, Any] = {}
        self.started = monotonic()
        self.earlier: dict[str, Any] = {}  # what sessions before this one `spent`
        self.trained: tuple[float, int] | None = None  # seconds, and the step it started from
        self.on_train_end = self.live.on_train_end  # type: ignore[method-assign]

    def prepare(self, trainer: Any) -> str:
        """Check the trainer's rows and the disk, cast and fuse the LoRA layers; what was done, in one line."""
        self.require_room(trainer)
        chat.check_trainer(trainer, self.dataset.report)
        sharding.use_engine(trainer)
        patched = model.patch_lora_kernels(trainer)
        self.take_over(trainer)
        self.fingerprint = resuming.run_fingerprint(self.lesson, trainer.args.seed)
        distributed.require_same(self.fingerprint | {"sft": dict(self.lesson.profile.sft)})
        return tr("{tokens:,} tokens to learn from; {patched}", tokens=self.dataset.report.trained, patched=patched)

    def require_room(self, trainer: Any) -> None:
        """Refuse a training whose checkpoints do not fit on the disks."""
        keep, limit = self.lesson.run.checkpoints, trainer.args.save_total_limit
        trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        gib = self.checkpoint_gib = (trainable * 12 + 64 * 2**20) / files.GIB  # weights, two optimizer states, the rest
        require_disk(Path(trainer.args.output_dir), (limit + 2) * gib, tr("writing checkpoints"))
        missing = limit + 2 - len(checkpoints.look(keep)[0])  # the best one is kept beside the newest
        require_disk(keep, max(missing, 1) * gib, tr("keeping checkpoints"))

    def take_over(self, trainer: Any) -> None:
        """Let the trainer validate as the course does, silence its output, note the checksums of its weights."""
        self.trainer = trainer
        validation.use_token_mean(trainer)
        trainer.remove_callback(PrinterCallback)
        logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)  # warns of what on_train_begin mends
        self.kinds, self.checksums = model.weight_kinds(trainer.model), model.weight_checksums(trainer.model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # else SAVE_STEPS of the checkpoint would count, not that of today
        if distributed.strategy() in distributed.SHARDED:  # now it is known which shard is here
            self.checksums = model.weight_checksums(self.trainer.model)
        if warning := validation.go_on(self.trainer):
            self.live.note(warning)
        self.time.last = self.time.now()
        self.live.on_train_begin(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # saving steps are logged too, so that a resumed run logs the same
        control.should_log |= control.should_save or state.global_step >= state.max_steps
        for line in self.sync.messages():
            self.live.note(line)
        self.time.sync_seconds = self.sync.seconds
        self.time.on_step_end(args, state, control)
        self.live.on_step_end(args, state, control, **given)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        state.log_history[-1] |= self.spent(monotonic() - self.started)  # a checkpoint keeps it for the next session
        self.live.on_log(args, state, control, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if not math.isfinite(metrics["eval_loss"]):
            seen = {"loss": metrics["eval_loss"], "step": state.global_step}
            self.live.note(tr("[WARN] the validation loss is {loss} at step {step}: training ends here", **seen))
            control.should_training_stop, control.should_save = True, False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            resuming.carry_former_best(folder, state.best_model_checkpoint)
            self.sync.take(folder)

    def spent(self, seconds: float) -> dict[str, Any]:
        """Time and cost of the training, if this session took so many seconds; earlier sessions are counted in."""
        total: dict[str, Any] = {"train_seconds": round(self.earlier.get("train_seconds", 0.0) + seconds, 1)}
        cost = dict(self.live.cost(seconds) or {})
        for sign, amount in self.earlier.get("cost", {}).items():
            cost[sign] = round(cost.get(sign, 0.0) + amount, 2)
        return total | ({"cost": cost} if cost else {})

    def stopped_early(self) -> bool:
        """Whether the training was ended by early stopping."""
        return validation.stopped_early(vars(self.trainer.state), self.patience)

    def load_finished(self, checkpoint: Path) -> None:
        """Load weights and history of a complete training."""
        model.load_checkpoint(self.trainer.model, checkpoint)
        state = self.trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        state.max_steps = state.global_step  # MAX_STEPS may be less than what was planned then
        print(tr("trained before · nothing is left to train: this run has {steps} steps", steps=state.global_step))
        if self.stopped_early():
            print(tr('SET = "course.early_stopping_patience=0" continues it, RESUME = "never" starts over.'))
        else:
            print(tr('A larger MAX_STEPS continues it, RESUME = "never" starts over.'))


@dataclass(frozen=True)
class TrainingResult:
    """A finished training: its curves, what it took, and which step is kept."""

    trainer: Any
    callback: CourseCallback
    seconds: float  # of this session
    first_step: int  # 0, or where it was resumed
    best: tuple[int, float] | None  # step and validation loss of the weights the model has now; None: those of the last
    changed: tuple[int, int]  # weight tensors of the adapter, and of the base
    peak_gib: float
    checksums: dict[str, tuple[bool, int]]  # of the weights it ended with
    weights: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # trained ones of which the model has shards, or 16 bits

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
        state, args, lesson, callback = self.trainer.state, self.trainer.args, self.callback.lesson, self.callback
        losses, validated = self.history["train"], self.history["validation"]
        last = validated[-1][1] if validated and math.isfinite(validated[-1][1]) else None
        best, early = best_of(validated), callback.stopped_early()
        found: dict[str, Any] = {
            "steps": state.global_step, "planned_steps": state.global_step if early else state.max_steps,
            "resumed_from_step": self.first_step, "kept_step": self.kept_step,
            "final_loss": round(losses[-1][1], 5) if losses else None, "best_step": best and best[0],
            "validation_loss": {"first": validated[0][1], "best": best[1], "last": last} if best else None,
            "weights": callback.kinds, "adapter_moved": self.changed[0], "base_moved": self.changed[1],
            "data_fingerprint": callback.fingerprint["data"], "oom_rungs": oom.oom_changes(lesson),
            "settings": flat(lesson.profile.model_dump()),
        }  # fmt: skip
        log = [entry for entry in state.log_history if "num_tokens" in entry and entry["step"] > self.first_step]
        measured: dict[str, Any] = {
            "tokens_per_second": round(log[-1]["num_tokens"] / self.seconds, 1) if log else None,
            "peak_memory_gib": round(self.peak_gib, 3), "skipped_steps": callback.live.skipped,
            "processes": args.world_size,
            "engine": distributed.strategy() and distributed.strategy_name(str(callback.lesson.profile.method)),
            "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        }  # fmt: skip
        measured |= callback.spent(self.seconds)
        return (measured if log else dict.fromkeys((*measured, "cost"))) | found

    def __str__(self) -> str:
        facts, changed = self.facts(), {"adapter": self.changed[0], "base": self.changed[1]}
        loss = facts["validation_loss"]
        return self.described({
            tr("validation loss"): tr("{first:.4f} -> {best:.4f} at step {best_step}", **facts | loss) if loss else "",
            tr("changed weights"): tr("{adapter} of the adapter, {base} of the base model", **changed),
        })  # fmt: skip

    def described(self, brought: dict[str, str]) -> str:
        """What the training took, and what it brought, in lines."""
        facts = self.facts()
        done = {"steps": facts["steps"], "planned": self.trainer.state.max_steps, "first": self.first_step}
        early = tr(" (early stopping)") if facts["planned_steps"] < self.trainer.state.max_steps else ""
        lines = {
            tr("steps"): tr("{steps} of {planned}, from step {first}", **done) + early,
            tr("saved"): tr("the weights of step {step}", step=self.kept_step),
        }
        lines |= brought
        if speed := facts["tokens_per_second"]:
            took = [display.clock(facts["train_seconds"])]
            if self.first_step:
                took.append(display.clock(self.seconds) + tr(" since step {step}", step=self.first_step))
            lines[tr("took")] = joined([*took, f"{speed:,.0f} tokens/s"])
            lines[tr("peak")] = f"{self.peak_gib:.2f} GiB"
        return "\n".join(display.pad(name, 17) + text for name, text in lines.items() if text)


def train(trainer: Any, callback: CourseCallback, resume: str = "auto") -> TrainingResult:
    """Resume or start, train to the end, restore the best step and wait until everything is in the run folder.

    Called again, it only repeats what follows the training, as when the disk of the run folder was away.
    """
    lesson, sft = callback.lesson, callback.lesson.profile.sft
    if callback.trained is None:
        if trainer.state.global_step:
            raise CourseError(
                tr("This trainer has trained before, and would mix two trainings."),
                todo=tr(
                    "Run the cells again from the one that loads the model (or restart the kernel and run all cells)."
                ),
            )
        wanted = (lesson, callback.fingerprint, resume)
        found = distributed.broadcast(resuming.resume_point(*wanted) if distributed.is_main() else None)
        checkpoint = distributed.send_folder(lesson.scratch / "trainer", found.name) if found else None
        if checkpoint is None:
            print(tr("starting at step 0"))
        rows = int(lesson.profile.course.validation_rows)
        callback.sync = resuming.start_sync(lesson, callback.fingerprint, sft.save_total_limit, rows)
        distributed.before_end(partial(callback.sync.finish, patience=PEER_PATIENCE))
        callback.earlier = resuming.spent_until(checkpoint)
        callback.started = monotonic()
        with callback.live.reported(trainer):
            if checkpoint is None or validation.steps_left(trainer, checkpoint, callback.patience):
                _train(trainer, callback, checkpoint)
            else:
                callback.load_finished(checkpoint)
        callback.trained = monotonic() - callback.started, checkpoints.step_of(checkpoint)
    with callback.live.reported(trainer):
        interrupted = callback.time.ended_by == signal.SIGINT
        chosen = resume.isdecimal() and int(resume) == trainer.state.global_step  # its own weights are asked for
        peak, best = hardware.peak_memory_gib(), None
        if not interrupted and not chosen:
            best = validation.load_best(trainer)
        before, after = callback.checksums, model.weight_checksums(trainer.model)
        moved = {name for name in before if before[name] != after[name]}
        moved = set().union(*distributed.gather(moved))
        weights = {} if distributed.strategy() in distributed.WHOLE else sharding.full_weights(trainer.model)
        distributed.leave_it_to_main()  # only the main process continues from here
        tracking.end(lesson.run.logs)
        kept = callback.sync.finish()
    resuming.unlock_run(lesson)
    state = trainer.state
    done = state.global_step >= state.max_steps or callback.stopped_early()
    callback.live.write(callback.live.progress(state, "finished" if done else "stopped"), kept=True)
    if kept:
        print(tr("safe: checkpoint {step} in {folder}", step=kept.step, folder=kept.archive.parent))
    else:
        print(tr("nothing new had to be kept"))
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
    changed = Counter(before[name][0] for name in moved)
    tracking.write_history(trainer.state.log_history, lesson.run.logs / "history.json")
    counts = changed[True], changed[False]
    return TrainingResult(trainer, callback, *callback.trained, best, counts, peak, after, weights)


def _train(trainer: Any, callback: CourseCallback, checkpoint: Path | None) -> None:
    """Train from a checkpoint, or from the start."""
    run = callback.lesson.run
    if distributed.is_main() and files.stamp(run.adapter):  # of a shorter or another training
        shutil.rmtree(run.former_adapter, ignore_errors=True)
        run.adapter.rename(run.former_adapter)  # until this training has saved its own
    try:
        with first_signals(callback.time.ask_to_end):
            if checkpoint:
                sharding.convert_optimizer_file(checkpoint, trainer.args.optim)
            oom.train(trainer, callback.lesson, checkpoint, callback.live.note)
    except Exception as problem:  # of a full disk, libraries say many things
        if ended := distributed.peer_error(problem):
            callback.sync.finish(PEER_PATIENCE)
            raise ended from None
        require_disk(Path(trainer.args.output_dir), callback.checkpoint_gib, tr("writing checkpoints"))
        raise


def save_adapter(result: TrainingResult, tokenizer: Any) -> None:
    """Write adapter and tokenizer to the run's adapter folder; one of this very training is left as it is."""
    callback, trainer = result.callback, result.trainer
    if model.weight_checksums(trainer.model) != result.checksums:
        raise CourseError(
            tr("The weights of the adapter are no longer those the training ended with."),
            todo=tr(
                "Run the cells again from the one that loads the model; the training is loaded from its last "
                "checkpoint, not repeated."
            ),
        )
    trainable = sorted(item for item in result.checksums.items() if item[1][0])
    checksum = f"{zlib.crc32(repr(trainable).encode()):08x}"
    about = {"steps": result.kept_step, "weights": checksum, "fingerprint": callback.fingerprint}
    if files.stamp(callback.lesson.run.adapter) != about:
        with files.complete_folder(callback.lesson.run.adapter, about) as folder:
            if result.weights:
                trainer._save(str(folder), state_dict=result.weights)
            else:
                trainer.save_model(str(folder))
            tokenizer.save_pretrained(folder)
    if record.complete(result.facts()):  # else the former one may be the better
        shutil.rmtree(callback.lesson.run.former_adapter, ignore_errors=True)
