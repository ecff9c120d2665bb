"""The loss on held-out rows, and the weights of the best step.

transformers decides when to evaluate, which step is the best one and when to stop: `eval_strategy`, `eval_on_start`,
`load_best_model_at_end`, `EarlyStoppingCallback`. Two things are done here instead. The loss is a mean over all tokens
of the rows, while the trainer's own is a mean over batches, which changes with the number of processes. And all
processes load the best weights together, because they may have shards of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from nbutils import distributed, files
from nbutils.language import tr
from nbutils.tracking import Log, validation_history
from nbutils.training import model, sharding


def use_token_mean(trainer: Any) -> None:
    """Let a trainer evaluate with a mean over all tokens."""
    if not isinstance(trainer, TokenMean):
        trainer.__class__ = type(type(trainer).__name__, (TokenMean, type(trainer)), {})


class TokenMean:
    """Mixed into a trainer: its evaluation, and who loads the best weights."""

    def evaluate(self: Any, *_: Any, **__: Any) -> dict[str, float]:
        """The loss on the held-out rows, logged and passed to the callbacks as the trainer does."""
        began = time.perf_counter()
        metrics = {"eval_loss": round(token_mean_loss(self, self.eval_dataset), 5)}
        metrics["eval_runtime"] = round(time.perf_counter() - began, 3)
        metrics |= {"eval_rows": len(self.eval_dataset), "eval_steps": self.state.eval_steps}
        self.model.eval()  # so that TRL logs it as a validation
        self.log(dict(metrics))
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.state.global_step:  # the trainer does so itself, but for an evaluation with which it begins
            self._determine_best_metric(metrics, trial=None)
        return metrics

    def _load_best_model(self) -> None:
        """Left to `load_best`: the trainer would call this only in processes that see the checkpoint's folder."""


def token_mean_loss(trainer: Any, rows: Any) -> float:
    """The mean loss over all trained tokens of the rows; several processes share them."""
    args, lengths = trainer.args, [len(ids) for ids in rows["input_ids"]]
    row_tokens = args.max_length if args.packing else sum(lengths) / len(lengths)
    batches = _batches(lengths, args.per_device_train_batch_size * row_tokens)
    tokens = torch.tensor(int(sum((row != -100).sum() for row in rows.with_format("numpy")["labels"])))
    total = torch.zeros((), device=args.device)
    was_training = trainer.model.training
    wrapped = trainer.model_wrapped if distributed.strategy() == "zero3" else trainer.model
    trainer.model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for first in range(0, len(batches), args.world_size):
            number = first + args.process_index  # past the end: repeated uncounted, because all processes gather
            batch = [rows[row] for row in batches[number % len(batches)]]
            inputs = trainer._prepare_inputs(trainer.data_collator(batch))
            loss = trainer.compute_loss(wrapped, inputs, num_items_in_batch=tokens)
            total += loss if number < len(batches) else 0.0
    trainer.model.train(was_training)
    return float(trainer.accelerator.reduce(total, "sum")) / args.world_size


def _batches(lengths: Sequence[int], most_tokens: float) -> list[list[int]]:
    """Numbers of rows to be laid end to end: in order, with about the tokens of a micro-batch in the training."""
    batches: list[list[int]] = []
    tokens = math.inf
    for row, length in enumerate(lengths):
        tokens += length
        if tokens > most_tokens:
            batches.append([])
            tokens = length
        batches[-1].append(row)
    return batches


def load_best(trainer: Any) -> tuple[int, float] | None:
    """Give the model the weights of the best step; that step and its loss, or None if there is none to be had."""
    state = trainer.state
    if not trainer.args.load_best_model_at_end or state.best_global_step is None:
        return None
    if state.best_global_step != state.global_step:
        folder = Path(trainer.args.output_dir) / f"checkpoint-{state.best_global_step}"
        if not distributed.broadcast(folder.is_dir()):
            return None
        _load(trainer.model, folder)
    return state.best_global_step, state.best_metric


def _load(trained: Any, checkpoint: Path) -> None:
    """Load a checkpoint that perhaps only the main process can see."""
    if not distributed.strategy():
        model.load_checkpoint(trained, checkpoint)
        return
    weights = sharding.adapter_weights(trained, checkpoint / sharding.ADAPTER) if distributed.is_main() else None
    sharding.load_weights(trained, distributed.broadcast(weights))


def evaluations_since_best(log_history: Log, best_step: int | None) -> int:
    """How many evaluations of the training, after its best, brought no better one."""
    return sum(step > best_step for step, _ in validation_history(log_history)) if best_step is not None else 0


def stopped_early(state: Mapping[str, Any], patience: int) -> bool:
    """Whether a training in this state, as trainer_state.json has it, was ended by early stopping."""
    return bool(patience) and evaluations_since_best(state["log_history"], state.get("best_global_step")) >= patience


def go_on(trainer: Any) -> str:
    """Let a resumed training evaluate as it began to; a warning where that cannot be compared with what was before."""
    args, state, warning = trainer.args, trainer.state, ""
    rows = len(trainer.eval_dataset or ())
    if not rows:
        return warning
    earlier = [entry for entry in state.log_history if "eval_loss" in entry]
    last = earlier[-1] if earlier else {}
    changed = last.get("eval_rows", rows) != rows
    if changed:  # neither the best step nor early stopping may look at both
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        words = {"rows": rows, "earlier": last["eval_rows"]}
        warning = tr("[WARN] validated on {rows} rows from here on: the losses on {earlier} do not compare", **words)
    # however often it saves today, it evaluates no more often than it began to, and only steps that it saves
    state.eval_steps = math.ceil(last.get("eval_steps", 1) / state.save_steps) * state.save_steps
    is_due = state.global_step % state.eval_steps == 0 or state.global_step >= state.max_steps
    args.eval_on_start = changed or (is_due and state.global_step not in dict(validation_history(earlier)))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            since = evaluations_since_best(state.log_history, state.best_global_step)
            callback.early_stopping_patience_counter = since
            # a checkpoint without early stopping knows nothing of it, and the trainer would fail at its next save
            state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
    return warning


def steps_left(trainer: Any, checkpoint: Path, patience: int) -> int:
    """How many steps of the training remain after a checkpoint."""
    args, done = trainer.args, files.read_json(checkpoint / "trainer_state.json")
    if stopped_early(done, patience):
        return 0
    batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    planned = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return max(planned - done["global_step"], 0)
