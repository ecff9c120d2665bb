"""The rungs of the ladder: settings of which each needs less memory than the one before, and how a trainer takes one.

The rows of an optimiser step are the same on every rung; how many are computed at a time, and what is kept, is not.
Not here: when a rung is taken, and where the training goes on (ladder).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from nbutils.chat.types import IGNORED

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer

SHORTEST = 128  # tokens; an example cut into smaller pieces than this teaches little
KINDS = {
    "on": "gradient checkpointing goes on (slower: each layer is computed again in the backward pass)",
    "offload": "what gradient checkpointing keeps goes to the computer's memory (slower still)",
}


@dataclass(frozen=True)
class Setting:
    """What decides the memory of a step."""

    micro_batch: int
    accumulation: int
    checkpointing: str  # off, on, offload
    length: int  # tokens a row is computed in at most; 0 where nobody set one

    @property
    def batch(self) -> int:
        """Rows of an optimiser step."""
        return self.micro_batch * self.accumulation

    def below(self, shorten: bool, offload: bool) -> Setting | None:
        """The next rung down; None where there is none. `shorten` and `offload` say whether those may be used."""
        if self.micro_batch > 1:
            fewer = next(rows for rows in range(self.micro_batch // 2, 0, -1) if self.micro_batch % rows == 0)
            more = self.accumulation * self.micro_batch // fewer
            return replace(self, micro_batch=fewer, accumulation=more)
        if self.checkpointing == "off":
            return replace(self, checkpointing="on")
        if self.checkpointing == "on" and offload:
            return replace(self, checkpointing="offload")
        return replace(self, length=self.length // 2) if shorten and self.length // 2 >= SHORTEST else None

    def change_to(self, new: Setting) -> str:
        """What is different on another rung, for the learner."""
        if new.length != self.length:
            return f"length {self.length} -> {new.length} (longer rows are cut; an example across a cut becomes two)"
        if new.checkpointing != self.checkpointing:
            return KINDS[new.checkpointing]
        return f"micro-batch {self.micro_batch} -> {new.micro_batch}, " \
            f"accumulation {self.accumulation} -> {new.accumulation}"  # fmt: skip


def setting_of(trainer: Trainer) -> Setting:
    """The rung a trainer was built for."""
    args: Any = trainer.args
    kind = "off" if not args.gradient_checkpointing else "offload" if args.activation_offloading else "on"
    return Setting(args.per_device_train_batch_size, args.gradient_accumulation_steps, kind, longest(trainer))


def longest(trainer: Trainer) -> int:
    """Tokens of the longest row: of all where rows are packed."""
    args: Any = trainer.args
    return args.max_length or max(map(len, trainer.train_dataset["input_ids"]), default=0)  # type: ignore[index]


def take(trainer: Any, new: Setting) -> None:
    """Give a trainer that is not training the settings of a rung; its next `train` builds all that depends on them."""
    args = trainer.args
    args.per_device_train_batch_size, args.gradient_accumulation_steps = new.micro_batch, new.accumulation
    trainer._train_batch_size = trainer.state.train_batch_size = args.train_batch_size
    if new.checkpointing != "off" and not args.gradient_checkpointing:
        _recompute(trainer)
    if new.checkpointing == "offload":
        args.activation_offloading = True
    if args.activation_offloading:  # always a fresh one: that of a broken step still holds its tensors
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        trainer.maybe_activation_offload_context = get_act_offloading_ctx_manager(trainer.model)
    if new.length < longest(trainer):
        _cut_rows(trainer, new.length)


def _recompute(trainer: Any) -> None:
    """Gradient checkpointing; `train` itself switches the layers over."""
    args = trainer.args
    args.gradient_checkpointing = True
    args.gradient_checkpointing_kwargs = {"use_reentrant": False} | (args.gradient_checkpointing_kwargs or {})
    trainer.model.config.use_cache = False
    trainer.model.enable_input_require_grads()  # a frozen base hands on no gradients otherwise


def _cut_rows(trainer: Any, length: int) -> None:
    """Let the trainer compute each row in pieces, one after the other: rows, order and steps stay as they are."""
    if isinstance(trainer.data_collator, Cutter):
        trainer.data_collator.length = length
        return
    trainer.data_collator = Cutter(trainer.data_collator, length)
    whole: Callable[..., Tensor] = trainer.training_step

    def in_pieces(model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        import torch

        pieces, steps = inputs["pieces"], trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = steps * len(pieces)  # for what is averaged over parts of a step
        try:
            return torch.stack([whole(model, piece, num_items_in_batch) for piece in pieces]).sum()
        finally:
            trainer.current_gradient_accumulation_steps = steps

    trainer.training_step = in_pieces


class Cutter:
    """A collator whose batch also holds its rows as pieces, each collated as a row of its own."""

    def __init__(self, collator: Callable[..., dict[str, Any]], length: int) -> None:
        self.collator, self.length = collator, length

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        pieces = [self.collator([piece]) for row in rows for piece in cut(row, self.length)]
        whole = [self.collator([row]) for row in rows]
        counted = ("input_ids", "labels")  # what the trainer counts, for the mean over all tokens of a step
        return {name: torch.cat([row[name] for row in whole], dim=-1) for name in counted} | {"pieces": pieces}


def cut(row: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """A row as pieces of about equal size; an example across a cut becomes two.

    No label is lost: a piece that begins with one also holds the token before it, to predict it from.
    """
    total = len(row["input_ids"])
    size = math.ceil(total / math.ceil(total / length))
    return [_piece(row, start, min(start + size, total)) for start in range(0, total, size)]


def _piece(row: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    own = row.get("seq_lengths", [len(row["input_ids"])])
    ends = list(accumulate(own))
    labels = row.get("labels", row["input_ids"])
    borrowed = start > 0 and start not in ends and labels[start] != IGNORED  # an example's first token has no loss
    start -= borrowed
    piece = {name: values[start:end] for name, values in row.items() if name != "seq_lengths"}
    if borrowed:
        piece["labels"] = [IGNORED, *labels[start + 1 : end]]
    if "seq_lengths" in row:
        parts = [min(last, end) - max(last - size, start) for last, size in zip(ends, own, strict=True)]
        piece["seq_lengths"] = [part for part in parts if part > 0]
    return piece
