"""Validation on held-back rows: the best step, early stopping, and what is left to train."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from nbutils.tracking import best_of, validation_history
from nbutils.training.weights import load_trained_weights, trained_weights

BEST = "best_adapter.safetensors"  # in a checkpoint folder whose own weights are not the best


class Validation(TrainerCallback):
    """The loss on held-back rows at the start, at each save and at the end; keeps the weights of the best step.

    `trainer` must be set before the training begins.
    """

    def __init__(self, rows: Any, every: int, keep_best: bool = True, patience: int = 0) -> None:
        self.rows, self.every, self.keep_best, self.patience = rows, every, keep_best, patience
        self.trainer: Any = None
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

    def stopped_early(self, log_history: Iterable[dict[str, Any]]) -> bool:
        """Whether as many validations in a row as there is patience for are all later than the best."""
        validation = validation_history(log_history)
        best = best_of(validation)
        return bool(self.patience and best and sum(step > best[0] for step, _ in validation) >= self.patience)

    def steps_left(self, checkpoint: Path) -> int:
        """How many steps of the training remain after a checkpoint."""
        args = self.trainer.args
        done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if self.stopped_early(done["log_history"]):
            return 0
        batches = math.ceil(len(self.trainer.train_dataset) / (args.train_batch_size * args.world_size))
        per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
        planned = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        return max(planned - done["global_step"], 0)

    def load_finished(self, checkpoint: Path, chosen: bool = False) -> None:
        """Load weights and history of a complete training; of a `chosen` step, its own weights instead of the best."""
        set_peft_model_state_dict(self.trainer.model, load_file(checkpoint / "adapter_model.safetensors"))
        state = self.trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        state.max_steps = state.global_step  # MAX_STEPS may be less than what was planned then
        if not chosen:
            self.load(state, checkpoint)
        more = 'SET = "train.early_stopping=0"' if self.stopped_early(state.log_history) else "a larger MAX_STEPS"
        print(f"Nothing is left to train: this run has {state.global_step} steps.")
        print(f'{more} continues it, RESUME = "never" starts over.')

    @staticmethod
    def _validated(state: Any) -> bool:
        return state.global_step in dict(validation_history(state.log_history))

    def _validate(self, state: Any, control: Any) -> None:
        loss, should_log = validation_loss_on(self.trainer, self.rows), control.should_log
        self.trainer.model.eval()  # so that the trainer logs it as a validation
        self.trainer.log({"eval_loss": round(loss, 5)})
        self.trainer.model.train()
        control.should_log = should_log  # logging resets it, and the training loss is still to come
        best = best_of(validation_history(state.log_history))
        if not math.isfinite(loss):
            print(f"[WARN] the validation loss is {loss} at step {state.global_step}: training ends here")
            control.should_training_stop, control.should_save = True, False
        elif best and best[0] == state.global_step:
            self.best_step, self.best = state.global_step, trained_weights(self.trainer.model)
        elif best and self.stopped_early(state.log_history) and state.global_step < state.max_steps:
            print(f"\nthe validation loss was lowest at step {best[0]} ({best[1]:.4f}): training ends here", flush=True)
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
