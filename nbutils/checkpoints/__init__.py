"""Checkpoints that can be trusted: archive (one file and its manifest), store (a folder of them), sync (to the run)."""

from __future__ import annotations

from nbutils.checkpoints.archive import Kept, Manifest, copy, defect, fingerprint, forget, pack, step_of, unpack
from nbutils.checkpoints.store import BEGAN_ANEW, clear, listing, look, newest_verified, prune, refuse_other_run

from nbutils.checkpoints.store import restore_for_people, sealed, stores, unsafe  # isort: skip
from nbutils.checkpoints.sync import CheckpointSync, Route, end_earlier

Carrier = CheckpointSync  # the name benchmarks use

__all__ = [
    "BEGAN_ANEW", "Carrier", "CheckpointSync", "Kept", "Manifest", "Route", "clear", "copy", "defect", "end_earlier",
    "fingerprint", "forget", "listing", "look", "newest_verified", "pack", "prune", "refuse_other_run",
    "restore_for_people", "sealed", "step_of", "stores", "unpack", "unsafe",
]  # fmt: skip
