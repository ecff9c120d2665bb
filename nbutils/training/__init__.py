"""What a training run needs around the trainer: a lean step, progress kept, time and memory watched, numbers shown.

Not here: building the trainer or choosing its settings; lesson 03 does both in full view.
"""

from __future__ import annotations

from nbutils.training.budget import time_budget
from nbutils.training.keeping import bring_home, carrier, keep_checkpoints, require_room
from nbutils.training.ladder import train
from nbutils.training.live import live_numbers
from nbutils.training.memory import oom_rungs
from nbutils.training.numbers import bookkeeping, loss_history, measured, write_history
from nbutils.training.resuming import MAY_CHANGE, load_finished, model_mark, resume_point, step_of, steps_left
from nbutils.training.step import make_lean
from nbutils.training.validation import validation_history, validation_loss
from nbutils.training.weights import Moved, adapter_checksum, compare, photograph, require_unquantised, weight_kinds

__all__ = [
    "MAY_CHANGE", "Moved", "adapter_checksum", "bookkeeping", "bring_home", "carrier", "compare", "keep_checkpoints",
    "live_numbers", "load_finished", "loss_history", "make_lean", "measured", "model_mark", "oom_rungs", "photograph",
    "require_room", "require_unquantised", "resume_point", "step_of", "steps_left", "time_budget", "train",
    "validation_history", "validation_loss", "weight_kinds", "write_history",
]  # fmt: skip
