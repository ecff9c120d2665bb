"""Whether a pre-trained folder is complete and made with given settings; the training itself stands in lesson 07."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError

RECORD = "training.json"


def finished_training(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of a finished training with these settings, or None if it still has to be done."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    made = record.get("settings", {})
    other = ", ".join(f"{name} {made.get(name)}" for name in settings if made.get(name) != settings[name])
    if other:
        raise CourseError(
            f"{folder} holds a model trained with {other}.",
            "one finished model in a run; it is never overwritten",
            "give this training its own RUN_NAME, or delete that folder",
        )
    return record
