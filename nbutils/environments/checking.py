"""Whether an environment is whole: every file of every package, asked of its own interpreter (inside_check).

Not here: what is done about it (building). An interpreter that a variable names is only asked what it has.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils.environments.recipe import Recipe, marker, python_in, variables
from nbutils.errors import CourseError

SCRIPT = Path(__file__).with_name("inside_check.py")
SECONDS = 600.0  # reading 12 GB from a slow disk
SHOWN = 3


@dataclass(frozen=True)
class Fault:
    """What is wrong with one package, and what pip would install to mend it; empty where pip cannot."""

    told: str
    wanted: str


def faults(folder: Path, recipe: Recipe, deep: bool = False) -> list[Fault]:
    """What is wrong with a finished environment; `deep` reads every byte."""
    try:
        known = marker(folder).get("installed")  # markers of former versions do not have it
        asked = {"pins": recipe.pins, "known": known if isinstance(known, dict) else {}, "deep": deep}
        return [Fault(*found) for found in _ask(folder, asked)["faults"]]
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        return [Fault(f"its interpreter does not run ({type(problem).__name__})", "")]


def packages(folder: Path) -> dict[str, str]:
    """Every package that is installed, with its version."""
    return dict(_ask(folder, {"pins": [], "known": {}, "deep": False})["packages"])


def in_words(found: list[Fault]) -> str:
    """Faults in a sentence."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(fault.told for fault in found[:SHOWN]) + more


def damage(folder: Path, recipe: Recipe) -> str:
    """What is wrong with a finished environment, in words; empty if nothing is."""
    return in_words(faults(folder, recipe))


def checked_interpreter(python: Path, recipe: Recipe) -> Path:
    """The interpreter that a variable names, if the probe's modules can be found by it; it is never changed."""
    wanted = re.findall(r"^import (.+)$", recipe.probe, re.MULTILINE)
    names = [name.strip() for line in wanted for name in line.split(",")]
    code = f"import importlib.util as u; print(*[name for name in {names!r} if u.find_spec(name) is None])"
    try:
        told = subprocess.run(
            [python, "-c", code], env=variables(recipe.prefix), cwd="/", capture_output=True, text=True
        )
        lacks = told.stdout.strip() if told.returncode == 0 else "everything: it does not run"
    except OSError:
        lacks = "everything: it does not run"
    if lacks:
        raise CourseError(
            f"{recipe.prefix}_PYTHON is {python}, which lacks {lacks}.", f"an interpreter that has {', '.join(names)}",
            f"mend the path or set {recipe.prefix}_PYTHONPATH to where they lie; unset it to have an environment built",
        )  # fmt: skip
    return python


def _ask(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What the script says in the environment's own interpreter."""
    words = [str(python_in(folder)), "-I", str(SCRIPT), json.dumps(asked)]
    told = subprocess.run(words, env=variables(), cwd="/", capture_output=True, text=True, timeout=SECONDS)
    return dict(json.loads(told.stdout))
