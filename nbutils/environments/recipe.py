"""What an environment holds, where it lies, and whether the one found there is of that recipe and made by this course.

Not here: whether its files are whole (checking), making one (building). It is trusted by the marker, written last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from nbutils import paths, platforms
from nbutils.errors import CourseError
from nbutils.masking import without_secrets

MARKER, BEGUN, LOG = (
    "ready.json",
    "begun.json",
    "build.log",
)  # finished; ours, written first and removed last; pip's words
PINNED = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!]+)")
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR",
    "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What an environment holds; `prefix` begins the variables that override it: _PYTHON, _PYTHONPATH, _ENV."""

    name: str
    steps: tuple[tuple[str, ...], ...]  # one pip call each, in this order
    remove: tuple[str, ...]  # what a step brings and must not stay
    probe: str  # Python code that imports what matters and prints the versions as JSON, on its last line
    needs_gib: float
    prefix: str = "NBUTILS_SERVE"

    @property
    def pins(self) -> list[tuple[str, str]]:
        """Names and versions of the packages that are pinned exactly."""
        words = [PINNED.fullmatch(word) for step in self.steps for word in step]
        return [(word[1], word[2]) for word in words if word]

    @property
    def options(self) -> list[str]:
        """What the steps tell pip beyond packages (they come after them): where to look, for instance."""
        return [word for step in self.steps for word in dropwhile(lambda word: not word.startswith("-"), step)]

    @property
    def described(self) -> dict[str, Any]:
        """The recipe as the marker keeps it."""
        return {"name": self.name, "steps": [list(step) for step in self.steps], "remove": list(self.remove)}


def is_ready(folder: Path, recipe: Recipe) -> bool:
    """Whether a finished environment of exactly this recipe is there; `damage` tells whether it is still whole."""
    kept = marker(folder)
    return {name: kept.get(name) for name in recipe.described} == recipe.described and python_in(folder).exists()


def place(prefix: str, name: str) -> Path:
    """Where an environment lives: <prefix>_ENV, the checkout, or the platform's scratch folder."""
    if given := os.environ.get(f"{prefix}_ENV"):
        return Path(given).expanduser()
    if paths.CHECKOUT:
        return paths.CHECKOUT / f".venv-{name}"
    return platforms.folders(platforms.detect()).scratch / f"venv-{name}"


def variables(prefix: str = "", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process in such an environment: nothing that belongs to this kernel only, and no secret.

    <prefix>_PYTHONPATH names folders of packages, for an interpreter that finds its libraries there.
    """
    kept = {name: value for name, value in without_secrets(os.environ).items() if name not in KERNEL_ONLY}
    found = os.environ.get(f"{prefix}_PYTHONPATH") if prefix else None
    return kept | ({"PYTHONPATH": found} if found else {}) | dict(extra or {})


def python_in(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def marker(folder: Path, name: str = MARKER) -> dict[str, Any]:
    """What a finished environment says of itself; nothing for any other folder."""
    try:
        return dict(paths.read_json(folder / name))
    except (OSError, ValueError, TypeError):
        return {}


def require_ours(folder: Path, recipe: Recipe) -> None:
    """Stop before a folder is replaced that this course did not make, or made for something else; empty is fine."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    owner = marker(folder).get("name") or marker(folder, BEGUN).get("name")
    if not owner or folder.resolve() == Path(sys.prefix).resolve():
        raise CourseError(
            f"{folder} exists and was not made by this course.", "an empty or new folder, or an environment made here",
            f"set {recipe.prefix}_ENV to another folder, or remove this one yourself if nothing in it is needed",
        )  # fmt: skip
    if owner != recipe.name:
        raise CourseError(
            f"{folder} is the environment of {owner}, and {recipe.name} was asked for.", f"{owner!r} or 'auto'",
            f"set {recipe.prefix}_ENV to another folder to have {recipe.name} beside it",
        )  # fmt: skip
