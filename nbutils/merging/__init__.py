"""Merging an adapter into its base on a small machine, from disk to disk, and proving the result."""

from nbutils.merging import folder as bases  # lesson 04 opens models with merging.bases.open_base
from nbutils.merging.adapters import init_changes_base
from nbutils.merging.folder import choose_place, is_quantized, open_base
from nbutils.merging.merge import MergeReport, cast_model, check_base, describe, merge_adapter, size_gib
from nbutils.merging.verify import Proof, prove

__all__ = [
    "MergeReport", "Proof", "bases", "cast_model", "check_base", "choose_place", "describe", "init_changes_base",
    "is_quantized", "merge_adapter", "open_base", "prove", "size_gib",
]  # fmt: skip
