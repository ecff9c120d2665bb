"""The step of a trainer made lean: precision repaired, rows as arrays with their boundaries, fewer passes over memory.

Not here: the arithmetic (lean).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbutils import attention
from nbutils.training.weights import repair_precision

if TYPE_CHECKING:
    from transformers import Trainer


def make_lean(trainer: Trainer, fused: bool) -> str:
    """Make the step of a trainer lean and its adapters float32; what was done, in words. `fused`: with Liger."""
    from nbutils.training import lean

    assert trainer.model is not None
    repaired = repair_precision(trainer.model)
    trainer.data_collator = attention.with_boundaries(trainer.data_collator)
    rows: Any = trainer.train_dataset
    trainer.train_dataset = rows.with_format("numpy")  # a batch is made four times faster than from lists
    layers = lean.lighten(trainer.model, fused)
    kernels = "Liger's kernels" if fused else "torch's own kernels"
    return f"{repaired} adapter weights back to float32; {layers} layers with the lean step, {kernels}"
