"""Checkpoints that can be trusted: written to scratch, carried to keep in the background, restored only if they verify.

archive: one checkpoint as a file and its manifest; store: a folder of them; carrier: the way from scratch to keep;
people: what a run has, shown and restored by hand.
Not here: what is in a checkpoint (the trainer decides that).
"""

from __future__ import annotations

from nbutils.checkpoints.archive import Kept, Manifest, copy, defect, fingerprint, forget, pack, unpack
from nbutils.checkpoints.carrier import Carrier, Route, end_earlier
from nbutils.checkpoints.people import listing, restore_for_people, stores_of
from nbutils.checkpoints.store import (
    BEGAN_ANEW,
    clear,
    look,
    newest_verified,
    prune,
    refuse_other_run,
    sealed,
    stores,
    unsafe,
)

__all__ = [
    "BEGAN_ANEW", "Carrier", "Kept", "Manifest", "Route", "clear", "copy", "defect", "end_earlier", "fingerprint",
    "forget", "listing", "look", "newest_verified", "pack", "prune", "refuse_other_run",
    "restore_for_people", "sealed", "stores", "stores_of", "unpack", "unsafe",
]  # fmt: skip
