"""Is it still the same model? The same texts through every form of it, and how far their predictions are apart."""

from __future__ import annotations

from nbutils.parity.offload import Room, as_trained, put_beside, room_for
from nbutils.parity.predictions import Fixed, Gap, Reading, Readings, fixed_set, gap, measure, measure_server
from nbutils.parity.verdict import Report, require_onto, require_tokenizer

__all__ = [
    "Fixed", "Gap", "Reading", "Readings", "Report", "Room", "as_trained", "fixed_set", "gap", "measure",
    "measure_server", "put_beside", "require_onto", "require_tokenizer", "room_for",
]  # fmt: skip
