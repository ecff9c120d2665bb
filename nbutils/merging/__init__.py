"""Merging an adapter into its base on a small machine: checks, the streaming merge, where the result goes.

Not here: whether the merged model is the same model (parity) and whether the tuning helped (evaluation).
"""

from nbutils.merging.checks import check_base, describe, size_gib
from nbutils.merging.places import choose_place
from nbutils.merging.proving import Proof, prove
from nbutils.merging.streaming import MergeReport, cast_model, merge_adapter

__all__ = [
    "MergeReport", "Proof", "cast_model", "check_base", "choose_place", "describe", "merge_adapter", "prove",
    "size_gib",
]  # fmt: skip
