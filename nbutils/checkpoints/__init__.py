"""Checkpoints that can be trusted: archive (one file and its manifest), store (a folder of them), sync (to the run)."""

from __future__ import annotations

from nbutils.checkpoints.archive import Manifest, StoredCheckpoint, copy, defect, fingerprint, pack, step_of, unpack
from nbutils.checkpoints.store import BEGAN_ANEW, clear, listing, look, newest_verified, prune, restore, stores, unsafe
from nbutils.checkpoints.sync import CheckpointSync, end_earlier

__all__ = [
    "BEGAN_ANEW", "CheckpointSync", "Manifest", "StoredCheckpoint", "clear", "copy", "defect", "end_earlier",
    "fingerprint", "listing", "look", "newest_verified", "pack", "prune", "restore", "step_of", "stores", "unpack",
    "unsafe",
]  # fmt: skip
