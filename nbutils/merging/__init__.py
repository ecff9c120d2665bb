"""Merging an adapter into its base on a small machine, from disk to disk, and proving the result."""

from nbutils.merging.folder import is_quantized, read_weight
from nbutils.merging.merge import cast_model, check, choose_folder, merge_adapter, prove, size_gib
from nbutils.merging.weights import init_changes_base
