"""Virtual environments of their own for libraries that must not share one with training: built once, checked, repaired.

Not here: which packages (serving, exporting) and what runs in them. An environment is trusted by the marker written
last, and only as long as every file of its pinned packages is still there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, paths, platforms
from nbutils.errors import CourseError

MARKER, LOG = "ready.json", "build.log"
PINNED = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!]+)")
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR",
    "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
CHECK = """
import importlib.metadata as m, json, os, sys
def whole(file):
    try:
        return os.stat(file.locate()).st_size == file.size
    except OSError:
        return False
def problem(name, version):
    try:
        found = m.distribution(name)
    except m.PackageNotFoundError:
        return f"{name} is gone"
    if found.version.partition("+")[0] != version.partition("+")[0]:
        return f"{name} is {found.version} instead of {version}"
    lost = [str(file) for file in found.files or () if file.size is not None and not whole(file)]
    return f"{name} has lost {len(lost)} of its files ({lost[0]})" if lost else ""
print(json.dumps([told for told in (problem(*pair) for pair in json.loads(sys.argv[1])) if told]))
"""


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
    def described(self) -> dict[str, Any]:
        """The recipe as the marker keeps it."""
        return {"name": self.name, "steps": [list(step) for step in self.steps], "remove": list(self.remove)}


def ensure(recipe: Recipe, folder: Path) -> Path:
    """The interpreter of an environment; built if it is missing, half made, of another version or broken."""
    if given := os.environ.get(f"{recipe.prefix}_PYTHON"):
        return _checked(Path(given).expanduser(), recipe)
    folder = folder.absolute()
    if not is_ready(folder, recipe) or damage(folder, recipe):
        _build_alone(folder, recipe)
    return python_in(folder)


def rebuild(recipe: Recipe, folder: Path, why: str) -> Path:
    """Build an environment anew because it was seen not to work."""
    (folder / MARKER).unlink(missing_ok=True)
    _build_alone(folder, recipe, why)
    return python_in(folder)


def is_ready(folder: Path, recipe: Recipe) -> bool:
    """Whether a finished environment of exactly this recipe is there; `damage` tells whether it is still whole."""
    marker = _marker(folder)
    return {name: marker.get(name) for name in recipe.described} == recipe.described and python_in(folder).exists()


def damage(folder: Path, recipe: Recipe) -> str:
    """What is wrong with the pinned packages of a finished environment; empty if nothing is."""
    words = [str(python_in(folder)), "-I", "-c", CHECK, json.dumps(recipe.pins)]
    try:
        told = subprocess.run(words, env=variables(), cwd="/", capture_output=True, text=True, timeout=120)
        return "; ".join(json.loads(told.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        return f"its interpreter does not run ({type(problem).__name__})"


def place(prefix: str, name: str) -> Path:
    """Where an environment lives: <prefix>_ENV, the checkout, or the platform's scratch folder."""
    if given := os.environ.get(f"{prefix}_ENV"):
        return Path(given).expanduser()
    if paths.CHECKOUT:
        return paths.CHECKOUT / f".venv-{name}"
    return platforms.folders(platforms.detect()).scratch / f"venv-{name}"


def variables(prefix: str = "", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process in such an environment: nothing that belongs to this kernel only.

    <prefix>_PYTHONPATH names folders of packages, for an interpreter that finds its libraries there.
    """
    kept = {name: value for name, value in os.environ.items() if name not in KERNEL_ONLY}
    found = os.environ.get(f"{prefix}_PYTHONPATH") if prefix else None
    return kept | ({"PYTHONPATH": found} if found else {}) | dict(extra or {})


def python_in(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def _marker(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / MARKER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _checked(python: Path, recipe: Recipe) -> Path:
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


def _build_alone(folder: Path, recipe: Recipe, seen: str = "") -> None:
    """Build under a lock, which the system frees if this process dies: of two builders the second finds it ready."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)  # the folder above: it stays when a half-made environment is removed
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is building {folder}: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        unready = seen or "it is unfinished or was made for other versions"
        why = damage(folder, recipe) if is_ready(folder, recipe) else unready
        if why:
            _build(folder, recipe, why)
    finally:
        os.close(lock)


def _build(folder: Path, recipe: Recipe, why: str) -> None:
    """Make the environment from nothing; the marker is written last, after the probe ran in it."""
    if folder.exists() and any(folder.iterdir()):
        _discard(folder, recipe, why)
    disk.require_disk(folder, recipe.needs_gib, f"the {recipe.name} environment")
    print(f"Building the {recipe.name} environment in {folder} (once, a few minutes).", flush=True)
    log, started = folder / LOG, time.monotonic()
    folder.mkdir(exist_ok=True)
    for title, command in _steps(folder, recipe):
        _step(title, command, log, recipe)
    told = json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])
    paths.write_json(folder / MARKER, recipe.described | {"versions": told})
    print(f"The {recipe.name} environment is ready after {time.monotonic() - started:.0f} s: {told}", flush=True)


def _steps(folder: Path, recipe: Recipe) -> list[tuple[str, list[str]]]:
    """The commands that make an environment, with their titles."""
    pip = [sys.executable, "-m", "pip", "--python", str(python_in(folder))]
    removal = [("without " + ", ".join(recipe.remove), [*pip, "uninstall", "-y", *recipe.remove])]
    return [
        ("new environment", [sys.executable, "-m", "venv", "--without-pip", str(folder)]),
        *((" ".join(wanted), [*pip, "install", *wanted]) for wanted in recipe.steps),
        *(removal if recipe.remove else []),
        ("first import", [str(python_in(folder)), "-c", recipe.probe]),
    ]


def _discard(folder: Path, recipe: Recipe, why: str) -> None:
    """Remove a half-made, outdated or broken environment, but never a folder that is something else or another's."""
    if not ((folder / "pyvenv.cfg").exists() or (folder / LOG).exists()):
        raise CourseError(
            f"{folder} exists and is not a virtual environment.", "an empty or new folder, or an environment made here",
            f"set {recipe.prefix}_ENV to another folder",
        )  # fmt: skip
    other = _marker(folder).get("name", recipe.name)
    if other != recipe.name:
        raise CourseError(
            f"{folder} is the environment of {other}, and {recipe.name} was asked for.", f"{other!r} or 'auto'",
            f"set {recipe.prefix}_ENV to another folder to have {recipe.name} beside it",
        )  # fmt: skip
    print(f"{folder}: {why}, so it is built anew.", flush=True)
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _step(title: str, command: list[str], log: Path, recipe: Recipe, beat: float = 20.0) -> None:
    """Run one step with its output in the log; a line when it begins to take long, a line when it is done."""
    started = time.monotonic()
    with open(log, "ab") as output:
        running = subprocess.Popen(command, env=variables(), cwd=log.parent, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    running.wait(beat)
                    break
                except subprocess.TimeoutExpired:
                    latest = (_lines(log) or ["no output yet"])[-1]
                    print(f"  {title}: {time.monotonic() - started:.0f} s, {latest[:80]}", flush=True)
        finally:
            running.kill()
    if running.returncode != 0:
        raise _failed(title, log, recipe)
    print(f"  {title}: done in {time.monotonic() - started:.0f} s", flush=True)


def _lines(log: Path) -> list[str]:
    """The log without pip's warnings."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("WARNING")]


def _failed(title: str, log: Path, recipe: Recipe) -> CourseError:
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
