"""One step of a build: a command whose words go to a log, and that ends with this kernel, whatever ends it.

Not here: which commands (building), how a group of processes ends (processes).
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from nbutils import processes
from nbutils.environments.recipe import Recipe, variables
from nbutils.errors import CourseError
from nbutils.masking import mask_secrets


def run(title: str, command: list[str], log: Path, recipe: Recipe, lock: int, beat: float = 20.0) -> None:
    """Run one step; a line when it begins to take long, a line when it is done.

    The supervisor keeps the lock open: should this kernel be killed, the next one waits until pip has ended too.
    """
    started = time.monotonic()

    def tell(seconds: float) -> None:
        latest = (_lines(log) or ["no output yet"])[-1]
        print(f"  {title}: {seconds:.0f} s, {mask_secrets(latest)[:80]}", flush=True)

    if processes.run(command, variables(), log, tell, beat=beat, fds=(lock,)) != 0:
        raise failed(title, log, recipe)
    print(f"  {title}: done in {time.monotonic() - started:.0f} s", flush=True)


def _lines(log: Path) -> list[str]:
    """The log without pip's warnings."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("WARNING")]


def failed(title: str, log: Path, recipe: Recipe) -> CourseError:
    """A failed step in plain words."""
    tail = "\n".join(_lines(log)[-12:])
    if re.search(r"No module named '?(venv|pip)|no such option: --python", tail):
        todo = "install what is missing or too old (pip, venv; Debian: apt install python3-pip python3-venv)"
    elif "+cpu" in tail:
        todo = "it wants torch's CPU build: tell pip where (PIP_FIND_LINKS a folder, PIP_EXTRA_INDEX_URL an index)"
    else:
        todo = f"read {log}; with no network here, set {recipe.prefix}_PYTHON to an interpreter that has the packages"
    return CourseError(
        f"the step '{title}' of the {recipe.name} environment failed:\n{tail}", "every step succeeds", todo
    )
