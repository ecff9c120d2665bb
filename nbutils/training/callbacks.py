"""The trainer callbacks of lesson 03: keep checkpoints, end in time, validate."""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from nbutils import checkpoints, platforms, scaling, tracking
from nbutils.checkpoints import CheckpointSync
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.lessons import Lesson
from nbutils.paths import GIB
from nbutils.training.progress import best_of, stopped_early, validation_history
from nbutils.training.resume import unlock_run
from nbutils.training.weights import load_trained_weights, trained_weights

Clock = Callable[[], float]
CHECKPOINT_EXTRAS = 64 * 2**20  # bytes of tokenizer, trainer state and random states
RESERVE_SECONDS = 300.0  # for what follows the training: adapter, plots, record
FIRST_SYNC_SECONDS = 60.0  # assumed for saving and copying until it was measured
BEST = "best_adapter.safetensors"  # in a checkpoint folder whose own weights are not the best
CONTINUE = {
    "colab": "Connect again (Runtime > Connect) and run all cells: the run continues from here.",
    "kaggle": "Open the notebook, add this version's output as an input (Add Input > Your Work) and run it again.",
}


def wait_for_sync(lesson: Lesson, sync: CheckpointSync) -> None:
    """Wait until the last checkpoint and the logs are in the run folder; only the main process goes on from here."""
    scaling.leave_it_to_main()
    tracking.end()
    kept = sync.finish()
    checkpoints.clear(sync.route.sealed)  # else deleting the run folder would not start the run over
    unlock_run(lesson)
    restore_sigterm()
    print(f"safe: checkpoint {kept.step} in {kept.archive.parent}" if kept else "nothing new had to be kept")


def require_room(trainer: Trainer, keep: Path, keep_last: int) -> None:
    """Stop before a training whose checkpoints do not fit: weights and two optimizer states, in float32."""
    assert trainer.model and trainer.args.output_dir
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    one = (trainable * 12 + CHECKPOINT_EXTRAS) / GIB
    missing = keep_last + 1 - len(checkpoints.look(keep)[0])
    require_disk(Path(trainer.args.output_dir), 3 * one, "writing checkpoints")
    require_disk(keep, max(missing, 1) * one, "keeping checkpoints")


class KeepCheckpoints(TrainerCallback):
    """Gives each saved checkpoint to the sync; saving steps are logged too, so that a resumed run logs the same."""

    def __init__(self, sync: CheckpointSync) -> None:
        self.sync, self.trained = sync, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trained:  # `oom.train` resets it before it goes on
            raise CourseError("training.trained_already")
        self.trained = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log |= control.should_save or state.global_step >= state.max_steps
        for line in self.sync.messages():
            print(line, flush=True)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self.sync.take(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class TimeBudget(TrainerCallback):
    """Saves and ends the training before its time is up, or when the machine sends SIGTERM."""

    def __init__(self, lesson: Lesson, sync: CheckpointSync, max_hours: float, now: Clock = monotonic) -> None:
        platform, self.sync, self.now = lesson.platform, sync, now
        hours = max_hours or platforms.time_limit_hours(platform)
        used = 0.0 if max_hours else platforms.session_seconds(platform) - (now() - lesson.started)
        self.limit = "MAX_HOURS" if max_hours else f"the {hours:g} h of {platform.name}"
        known = hours and used <= hours * 3600  # a machine older than its limit has another one (Colab Pro)
        self.end = lesson.started - used + hours * 3600 if known else math.inf
        self.reserve = min(RESERVE_SECONDS, hours * 180)
        self.hint = CONTINUE.get(platform.name, "Run the same notebook again: it continues from here.")
        self.steps: deque[float] = deque(maxlen=20)  # seconds of the recent ones
        self.saving: float | None = None
        self.last = now()
        self.sigterm = threading.Event()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last = self.now()
        catch_sigterm(self.sigterm)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self._lap())
        reason = self._reason()
        if control.should_training_stop or not scaling.anyone(bool(reason)):
            return
        reason = reason or "Another process of this training was asked to end."
        print(f"\n{reason} Saving at step {state.global_step} of {state.max_steps} and ending here. {self.hint}")
        control.should_log = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saving = self._lap()

    def _lap(self) -> float:
        seconds, self.last = self.now() - self.last, self.now()
        return seconds

    def _reason(self) -> str:
        if self.sigterm.is_set():
            return "The machine asked this run to end (SIGTERM)."
        known = self.saving is not None and self.sync.seconds > 0
        keeping = (self.saving or 0) + self.sync.seconds if known else min(FIRST_SYNC_SECONDS, self.reserve)
        needed, left = 1.5 * (max(self.steps) + keeping) + self.reserve, self.end - self.now()
        if left >= needed:
            return ""
        return f"{left / 60:.1f} minutes of {self.limit} are left, {needed / 60:.1f} are needed to save and end."


_sigterm_before: list[Any] = []


def catch_sigterm(event: threading.Event) -> None:
    """Set `event` at the first SIGTERM, until `restore_sigterm`; a second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, handle)
    _sigterm_before[:] = _sigterm_before or [before or signal.SIG_DFL]


def restore_sigterm() -> None:
    """SIGTERM does again what it did before the training."""
    if _sigterm_before and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _sigterm_before.pop())


class Validation(TrainerCallback):
    """The loss on held-back rows at the start, at each save and at the end; keeps the weights of the best step.

    The losses live in the trainer's log and the best weights in each checkpoint, so a resumed run knows both.
    """

    def __init__(self, rows: Any, every: int, keep_best: bool = True, patience: int = 0) -> None:
        self.rows, self.every, self.keep_best, self.patience = rows, every, keep_best, patience
        self.trainer: Any = None  # set by `progress.validation_callback`
        self.best: dict[str, torch.Tensor] = {}  # trained weights of the best step, on the CPU
        self.best_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if len(self.rows):
            self.load(state, Path(args.output_dir) / f"checkpoint-{state.global_step}")
            if not self._validated(state):
                self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if len(self.rows) and (state.global_step % self.every == 0 or state.global_step >= state.max_steps):
            self._validate(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.best and state.is_world_process_zero and self.best_step != state.global_step:
            save_file(self.best, Path(args.output_dir) / f"checkpoint-{state.global_step}" / BEST)

    def restore_best(self) -> tuple[int, float] | None:
        """Give the model the weights of the best step; that step and its loss, None if nothing was validated."""
        state = self.trainer.state
        if not len(self.rows) or not self.keep_best:
            return None
        if not self._validated(state):
            self._validate(state, self.trainer.control)
        found = best_of(validation_history(state.log_history))
        if found and self.best and self.best_step == found[0] != state.global_step:
            load_trained_weights(self.trainer.model, self.best)
        return found if found and found[0] in (self.best_step, state.global_step) else None

    def load(self, state: Any, checkpoint: Path) -> None:
        """The best weights of a resumed run: its own, or those stored in its checkpoint."""
        found = best_of(validation_history(state.log_history))
        if not found or found[0] == self.best_step:
            return
        if found[0] == state.global_step:
            self.best = trained_weights(self.trainer.model)
        elif (checkpoint / BEST).exists():
            self.best = load_file(checkpoint / BEST)
        self.best_step = found[0] if self.best else -1

    @staticmethod
    def _validated(state: Any) -> bool:
        return state.global_step in dict(validation_history(state.log_history))

    def _validate(self, state: Any, control: Any) -> None:
        loss, should_log = validation_loss_on(self.trainer, self.rows), control.should_log
        self.trainer.model.eval()  # so that the trainer logs it as a validation
        self.trainer.log({"eval_loss": round(loss, 5)})
        self.trainer.model.train()
        control.should_log = should_log  # logging resets it, and the training loss is still to come
        step, best = state.global_step, best_of(validation_history(state.log_history))
        if not math.isfinite(loss):
            kept = best[0] if best else 0
            print(f"[WARN] the validation loss is {loss} at step {step}: training ends here, step {kept} is kept")
            control.should_training_stop, control.should_save = True, False
        elif best and best[0] == step:
            self.best_step, self.best = step, trained_weights(self.trainer.model)
        elif best and stopped_early(state.log_history, self.patience) and step < state.max_steps:
            print(f"\nthe validation loss has been above its best ({best[1]:.4f} at step {best[0]}) "
                  f"{self.patience} times in a row: training ends here.", flush=True)  # fmt: skip
            control.should_training_stop = control.should_save = True


def validation_loss_on(trainer: Any, rows: Any) -> float:
    """The mean loss over all trained tokens of the rows; several processes share them."""
    args, lengths = trainer.args, [len(ids) for ids in rows["input_ids"]]
    row_tokens = args.max_length if args.packing else sum(lengths) / len(lengths)
    size = max(int(args.per_device_train_batch_size * row_tokens / max(lengths)), 1)  # rows of about a micro-batch
    batches = [range(first, min(first + size, len(rows))) for first in range(0, len(rows), size)]
    tokens = torch.tensor(int(sum((row != -100).sum() for row in rows.with_format("numpy")["labels"])))
    total = torch.zeros((), device=args.device)
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for first in range(0, len(batches), args.world_size):
            number = first + args.process_index  # past the end: repeated uncounted, because all processes gather
            batch = [rows[row] for row in batches[number % len(batches)]]
            inputs = trainer._prepare_inputs(trainer.data_collator(batch))
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=tokens)
            total += loss if number < len(batches) else 0.0
    trainer.model.train(was_training)
    return float(trainer.accelerator.reduce(total, "sum")) / args.world_size
