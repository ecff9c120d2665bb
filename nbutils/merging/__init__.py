"""Merging an adapter into its base on a small machine, from disk to disk, and proving the result."""

from nbutils.merging.folder import is_quantized, read_weight
from nbutils.merging.merge import cast_model, check, choose_folder, merge_adapter, prove, size_gib
from nbutils.merging.weights import init_changes_base

__all__ = [
    "cast_model",
    "check",
    "choose_folder",
    "init_changes_base",
    "is_quantized",
    "merge_adapter",
    "prove",
    "read_weight",
    "size_gib",
]
