"""Is it still the same model? The same texts through every form of it, and how far their predictions are apart.

fixed: the texts; reading, served: what one model makes of them; keeping: all readings of a run; gaps: two readings
compared; judging: what that means, in words; spelling: the tokenizer; fitting: a model larger than the card.
Not here: merging or exporting a model, or asking whether the tuning helped (evaluation).
"""

from __future__ import annotations

from nbutils.parity.fitting import Room, as_trained, put_beside, room_for
from nbutils.parity.fixed import Fixed, fixed_set
from nbutils.parity.gaps import Gap, gap
from nbutils.parity.judging import Report, require_onto
from nbutils.parity.keeping import Readings
from nbutils.parity.reading import Reading, measure
from nbutils.parity.served import measure_server
from nbutils.parity.spelling import require_tokenizer

__all__ = [
    "Fixed", "Gap", "Reading", "Readings", "Report", "Room", "as_trained", "fixed_set", "gap", "measure",
    "measure_server", "put_beside", "require_onto", "require_tokenizer", "room_for",
]  # fmt: skip
