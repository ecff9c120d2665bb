"""Whether a pre-trained folder is complete and made with given settings; the training itself stands in lesson 07."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = "training.json"


def finished_training(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of a finished training with the same settings, or None: then it has to be done."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if record.get("settings") == settings else None
