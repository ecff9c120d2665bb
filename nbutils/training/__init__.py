"""What a training run needs around the trainer: precision repaired, progress kept, time watched, numbers measured.

Not here: building the trainer or choosing its settings; lesson 03 does both in full view.
"""

from __future__ import annotations

from nbutils.training.budget import time_budget
from nbutils.training.keeping import bring_home, carrier, keep_checkpoints, require_room
from nbutils.training.numbers import bookkeeping, loss_history, measured
from nbutils.training.resuming import load_finished, model_mark, resume_point, step_of, steps_left
from nbutils.training.weights import Moved, adapter_checksum, compare, photograph, repair_precision, weight_kinds

__all__ = [
    "Moved", "adapter_checksum", "bookkeeping", "bring_home", "carrier", "compare", "keep_checkpoints", "load_finished",
    "loss_history", "measured", "model_mark", "photograph", "repair_precision", "require_room", "resume_point",
    "step_of", "steps_left", "time_budget", "weight_kinds",
]  # fmt: skip
