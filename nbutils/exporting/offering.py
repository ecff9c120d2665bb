"""What can be made here: every format, with the reason where it cannot, and what to do about it.

Not here: making it (making).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbutils import disk, environments, hardware
from nbutils.exporting import environment
from nbutils.exporting.formats import ELSEWHERE, FORMATS, Format


@dataclass(frozen=True)
class Offer:
    """A format, whether it can be made here, why (not), and the command to use."""

    name: str
    purpose: str
    runs: str
    available: bool
    reason: str
    command: str

    @property
    def row(self) -> dict[str, str]:
        """For a table."""
        return {
            "format": self.name, "for": self.purpose, "runs on": self.runs,
            "here": ("yes: " if self.available else "NO: ") + self.reason, "command": self.command,
        }  # fmt: skip


def offer(card: hardware.Card | None = None) -> list[Offer]:
    """Every format, none hidden; `card` is this machine's, to say whether it could also compute with it."""
    state = _state()
    found = [_one(form, card, *state) for form in FORMATS.values()]
    return found + [
        Offer(name, "a quarter of the size, what laptops use most", "laptops, with or without a card", False,
              "a program of llama.cpp makes it, which no Python package brings", f"{command}    # after gguf-f16")
        for name, command in ELSEWHERE.items()
    ]  # fmt: skip


def _one(form: Format, card: hardware.Card | None, has: Sequence[str] | None, reason: str) -> Offer:
    available = not form.needs or (form.needs in has if has is not None else not reason)
    if not form.needs:
        said = "nothing to install"
    elif has is not None:
        said = "its libraries are there" if available else f"the interpreter named for exports lacks {form.needs}"
    else:
        said = reason or "its environment is made at first use (a few GiB, a few minutes, needs the network)"
    if card and card.capability < form.capability:
        said += f"; this card ({card.name}) cannot compute with it, another machine can"
    rows = " --data TRAIN_ROWS.jsonl" if form.work == "calibrate" else ""
    line = f"python -m nbutils export FOLDER {form.name}{rows}"
    return Offer(form.name, form.purpose, form.runs, available, said, line)


def _state() -> tuple[Sequence[str] | None, str]:
    """The modules an existing environment has (None: it is still to be made), and why it cannot be made."""
    if given := os.environ.get(f"{environment.PREFIX}_PYTHON"):
        search = os.environ.get(f"{environment.PREFIX}_PYTHONPATH", "")
        return sorted(environment.found_in(Path(given).expanduser(), search)), ""
    recipe, folder = environment.recipe(), environment.folder()
    if environments.is_ready(folder, recipe):
        return [form.needs for form in FORMATS.values()], ""
    free = disk.free_gib(folder)
    lack = (
        f"its environment needs {recipe.needs_gib:.0f} GiB in {folder.parent}, and {free:.1f} GiB are free: make room, "
    )
    lack += f"or set {environment.PREFIX}_ENV to a folder on a larger disk"
    return None, lack if free < recipe.needs_gib else ""
