"""Merging an adapter into its base on a small machine: checks, the streaming merge, where the result goes.

Not here: whether the merged model is the same model (parity) and whether the tuning helped (evaluation).
"""

from nbutils.merging.checks import check_base, describe, size_gib
from nbutils.merging.former import Parity, logits, parity, require_parity, require_room
from nbutils.merging.places import choose_place
from nbutils.merging.streaming import MergeReport, cast_model, merge_adapter

__all__ = [
    "MergeReport", "Parity", "cast_model", "check_base", "choose_place", "describe", "logits", "merge_adapter",
    "parity", "require_parity", "require_room", "size_gib",
]  # fmt: skip
