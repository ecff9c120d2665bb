"""Validation while it trains: the loss on held-back rows at the start, at each save and at the end; the best step kept.

The history of validation losses lives in the trainer's log, and the weights of the best step travel inside each
checkpoint, so that a run which is continued elsewhere knows both. Not here: which rows are held back (data), or how
many of them are asked (profiles.recipe).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.training.weights import load_trained_weights, trained_weights

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

BEST = "best_adapter.safetensors"  # in a checkpoint folder, unless its own weights are the best
RISING = "the validation loss has been above its best ({:.4f} at step {}) {} times in a row"
SPOILT = "[WARN] the validation loss is {} at step {}: training ends here, and the last good step ({}) is kept"


def validation_loss(rows: Any, every: int, keep_best: bool = True, patience: int = 0) -> TrainerCallback:
    """A callback that validates on `rows` every so many steps; without rows it only keeps quiet."""
    from transformers import TrainerCallback

    class Validation(TrainerCallback):
        """`of` sets its trainer, which is made with this callback."""

        def __init__(self) -> None:
            self.trainer: Any = None
            self.patience = patience
            self.best: dict[str, Any] = {}  # the trained weights of the best step so far, on the CPU
            self.best_step = -1

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not len(rows):
                return
            self.remember(state, Path(args.output_dir) / f"checkpoint-{state.global_step}")
            if self._due(state) and state.global_step not in dict(validation_history(state.log_history)):
                self._validate(state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if len(rows) and self._due(state):
                self._validate(state, control)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            from safetensors.torch import save_file

            if self.best and state.is_world_process_zero and self.best_step != state.global_step:
                save_file(self.best, Path(args.output_dir) / f"checkpoint-{state.global_step}" / BEST)

        def restore_best(self) -> tuple[int, float] | None:
            """Give the model the weights of the best step, a last unvalidated one included; that step and its loss."""
            state = self.trainer.state
            if not len(rows) or not keep_best:
                return None
            if state.global_step not in dict(validation_history(state.log_history)):
                self._validate(state, self.trainer.control)
            found = best_of(validation_history(state.log_history))
            if found and self.best and self.best_step == found[0] != state.global_step:
                load_trained_weights(self.trainer.model, self.best)
            return found if found and found[0] in (self.best_step, state.global_step) else None

        def _due(self, state: Any) -> bool:
            return state.global_step % every == 0 or state.global_step >= state.max_steps

        def _validate(self, state: Any, control: Any) -> None:
            loss, asked_to_log = loss_on(self.trainer, rows), control.should_log
            self.trainer.model.eval()  # the trainer then logs it as a validation
            self.trainer.log({"eval_loss": round(loss, 5)})
            self.trainer.model.train()
            control.should_log = asked_to_log  # any log takes this back, and the training loss is still to come
            history = validation_history(state.log_history)
            found = best_of(history)
            if not math.isfinite(loss):
                print(SPOILT.format(loss, state.global_step, found[0] if found else 0), flush=True)
                control.should_training_stop, control.should_save = True, False
            elif found and found[0] == state.global_step:
                self.best_step = state.global_step
                self.best = trained_weights(self.trainer.model)
            elif found and ends_early(history, patience) and state.global_step < state.max_steps:
                print("\n" + RISING.format(found[1], found[0], patience) + ": training ends here.", flush=True)
                control.should_training_stop = control.should_save = True

        def remember(self, state: Any, checkpoint: Path) -> None:
            """After a continued run was loaded: its best weights, from the checkpoint or because they are its own."""
            from safetensors.torch import load_file

            found = best_of(validation_history(state.log_history))
            if not found or found[0] == self.best_step:
                return
            if found[0] == state.global_step:
                self.best = trained_weights(self.trainer.model)
            elif (checkpoint / BEST).exists():
                self.best = load_file(checkpoint / BEST)
            self.best_step = found[0] if self.best else -1

    return Validation()


def validation_history(log_history: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) pairs of the validation log; of a step that was validated twice, the last."""
    return sorted({entry["step"]: entry["eval_loss"] for entry in log_history if "eval_loss" in entry}.items())


def facts(log_history: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first, best and last validation loss, and the step of the best; None where nothing was held back."""
    history = validation_history(log_history)
    best = best_of(history)
    if best is None:
        return {"validation_loss": None, "best_step": None}
    last = history[-1][1] if math.isfinite(history[-1][1]) else None
    return {"validation_loss": {"first": history[0][1], "best": best[1], "last": last}, "best_step": best[0]}


def best_of(history: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """The step with the lowest finite loss."""
    finite = [point for point in history if math.isfinite(point[1])]
    return min(finite, key=lambda point: point[1]) if finite else None


def ends_early(history: Sequence[tuple[int, float]], patience: int) -> bool:
    """Whether the last `patience` losses are all later than the best."""
    found = best_of(history)
    return bool(patience and found and sum(step > found[0] for step, _ in history) >= patience)


def loss_on(trainer: Any, rows: Any) -> float:
    """Nats for each trained token of the rows; several processes share them."""
    import torch

    lengths = [len(ids) for ids in rows["input_ids"]]
    collate = getattr(trainer.data_collator, "collator", trainer.data_collator)  # not in pieces, after an OOM
    batches = in_batches(lengths, _tokens_at_once(trainer.args, lengths))
    count = int(sum((row != -100).sum() for row in rows.with_format("numpy")["labels"]))
    total = torch.zeros((), device=trainer.args.device)
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for first in range(0, len(batches), trainer.args.world_size):
            place = first + trainer.args.process_index  # past the end: once more, uncounted; all processes gather
            inputs = trainer._prepare_inputs(collate([rows[number] for number in batches[place % len(batches)]]))
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(count))
            total += loss if place < len(batches) else 0.0
    trainer.model.train(was_training)
    return float(trainer.accelerator.reduce(total, "sum")) / trainer.args.world_size


def in_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Numbers of rows in groups of at most so many tokens; a longer row is a group of its own."""
    groups: list[list[int]] = [[]]
    room = tokens
    for number, length in enumerate(lengths):
        if groups[-1] and length > room:
            groups.append([])
            room = tokens
        groups[-1].append(number)
        room -= length
    return groups


def _tokens_at_once(args: Any, lengths: Sequence[int]) -> int:
    """About as many as a micro-batch of the training has: without gradients that surely fits."""
    each = args.max_length if args.packing else sum(lengths) / len(lengths)
    return max(int(args.per_device_train_batch_size * each), *lengths)


def of(trainer: Trainer) -> Any:
    """The validation a trainer was given, and told which trainer it is; None without one."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    found = next((one for one in callbacks if hasattr(one, "best_step")), None)
    if found is not None:
        found.trainer = trainer
    return found


def ended_early(trainer: Trainer, log_history: list[dict[str, Any]]) -> bool:
    """Whether a training with this log ended because validation had risen for a while."""
    asked = of(trainer)
    return asked is not None and ends_early(validation_history(log_history), asked.patience)
