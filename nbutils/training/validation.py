"""The loss on held-out rows, and the weights of the best step.

transformers decides when to evaluate, which step is the best one and when to stop: `eval_strategy`, `eval_on_start`,
`load_best_model_at_end`, `EarlyStoppingCallback`. Two things are done here instead. The loss is a mean over all tokens
of the rows, while the trainer's own is a mean over batches, which changes with the number of processes. And all
processes load the best weights together, because they may have shards of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState

from nbutils import distributed
from nbutils.checkpoints import STATE
from nbutils.errors import CourseError
from nbutils.tracking import validation_history
from nbutils.training import model
from nbutils.training.sharding import mix_in


def use_token_mean(trainer: Any) -> None:
    """Let a trainer evaluate with a mean over all tokens."""
    mix_in(trainer, TokenMean)


class TokenMean:
    """Mixed into a trainer: its evaluation, and who loads the best weights."""

    def evaluate(self: Any, *_: Any, **__: Any) -> dict[str, float]:
        """The loss on the held-out rows, logged and passed to the callbacks as the trainer does."""
        self.model.eval()
        loss = token_mean_loss(self, self.eval_dataset)
        metrics = {
            "eval_loss": round(loss, 5),
            "eval_rows": len(self.eval_dataset),
        }
        self.log(dict(metrics))  # by the mode of the model TRL knows that it is a validation
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.state.global_step:  # the trainer does so itself, but for an evaluation with which it begins
            self._determine_best_metric(metrics, trial=None)
        return metrics

    def _load_best_model(self) -> None:
        """Left to `load_best`: the trainer would call this only in processes that see the checkpoint's folder."""


def token_mean_loss(trainer: Any, rows: Any) -> float:
    """The mean loss over all trained tokens of the rows; several processes share them."""
    args = trainer.args
    batches = _batches(trainer, [len(ids) for ids in rows["input_ids"]])
    tokens = sum(int((labels != -100).sum()) for labels in rows.with_format("numpy")["labels"])
    total = torch.zeros((), device=args.device)
    wrapped = trainer.model_wrapped if distributed.strategy() == "zero3" else trainer.model
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for first in range(0, len(batches), args.world_size):
            number = first + args.process_index
            batch = batches[number % len(batches)]
            collated = trainer.data_collator([rows[row] for row in batch])
            inputs = trainer._prepare_inputs(collated)
            loss = trainer.compute_loss(
                wrapped,
                inputs,
                num_items_in_batch=torch.tensor(tokens),
            )
            if number < len(batches):  # else repeated uncounted, because all processes gather
                total += loss
    total = trainer.accelerator.reduce(total, "sum")
    return float(total) / args.world_size


def _batches(trainer: Any, lengths: list[int]) -> list[list[int]]:
    """Numbers of rows to be laid end to end: in order, with about the tokens of a micro-batch in the training."""
    args = trainer.args
    row_tokens = args.max_length
    if not args.packing:
        row_tokens = sum(lengths) / len(lengths)
    most_tokens = args.per_device_train_batch_size * row_tokens
    batches: list[list[int]] = []
    tokens = math.inf  # the first row begins a batch
    for row, length in enumerate(lengths):
        tokens += length
        if tokens > most_tokens:
            batches.append([])
            tokens = length
        batches[-1].append(row)
    return batches


def load_best(trainer: Any) -> int:
    """Give the model the weights of the best step, if they are to be had; the step of those it has now."""
    state = trainer.state
    best = state.best_global_step
    if not trainer.args.load_best_model_at_end or best in (None, state.global_step):
        return state.global_step
    folder = Path(trainer.args.output_dir) / f"checkpoint-{best}"
    if not distributed.broadcast(folder.is_dir()):
        return state.global_step
    model.load_checkpoint(trainer.model, folder)
    return best


def evaluations_since_best(state: TrainerState) -> int:
    """How many evaluations of the training, after its best, brought no better one."""
    best_step = state.best_global_step
    if best_step is None:
        return 0
    return sum(step > best_step for step, _ in validation_history(state.log_history))


def stopped_early(state: TrainerState, patience: int) -> bool:
    """Whether a training in this state was ended by early stopping."""
    return 0 < patience <= evaluations_since_best(state)


def continue_validation(trainer: Any) -> None:
    """Let a resumed training validate what it has not yet, and count towards early stopping what it has."""
    state = trainer.state
    if not trainer.eval_dataset:
        return
    rows = len(trainer.eval_dataset)
    earlier = next((entry["eval_rows"] for entry in state.log_history if "eval_rows" in entry), rows)
    if earlier != rows:  # the losses would not compare
        raise CourseError(
            "This training was validated on {earlier} rows, and would be on {rows}.",
            todo='Set SET = "course.validation_rows={earlier}", or choose another RUN_NAME.',
            earlier=earlier,
            rows=rows,
        )
    step = state.global_step
    is_due = step % state.eval_steps == 0 or step >= state.max_steps
    trainer.args.eval_on_start = is_due and step not in dict(validation_history(state.log_history))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = evaluations_since_best(state)
            # a checkpoint without early stopping knows nothing of it, and the trainer would fail at its next save
            state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())


def steps_left(trainer: Any, checkpoint: Path, patience: int) -> int:
    """How many steps of the training remain after a checkpoint."""
    args = trainer.args
    state = TrainerState.load_from_json(str(checkpoint / STATE))
    if stopped_early(state, patience):
        return 0
    planned = args.max_steps
    if planned <= 0:
        batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        steps_per_epoch = math.ceil(len(trainer.train_dataset) / batch)
        planned = math.ceil(args.num_train_epochs * steps_per_epoch)
    return max(planned - state.global_step, 0)
