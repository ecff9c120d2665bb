"""Virtual environments for libraries that must not share one with training: built once, rebuilt when broken.

A new one is built beside its place and moved there when its marker, written last, says that it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nbutils import disk, paths, platforms, processes
from nbutils.environments import installer
from nbutils.errors import CourseError
from nbutils.masking import mask_secrets, without_secrets

MARKER = "ready.json"  # written last: the environment is complete
OWNER = "begun.json"  # written first, removed last: this course made the folder
LOG = "build.log"
UV_CACHE = "uv-cache"
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR",
    "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What an environment holds; `prefix` begins the variables that override it: _PYTHON, _PYTHONPATH, _ENV."""

    name: str
    steps: tuple[tuple[str, ...], ...]  # one install command each, in this order
    remove: tuple[str, ...]  # what a step brings and must not stay
    probe: str  # Python code that imports what matters and prints the versions as JSON, on its last line
    needs_gib: float
    prefix: str = "NBUTILS_SERVE"

    @property
    def described(self) -> dict[str, Any]:
        """The recipe as the marker keeps it."""
        return {"name": self.name, "steps": [list(step) for step in self.steps], "remove": list(self.remove)}


def ensure(recipe: Recipe, folder: Path) -> Path:
    """The interpreter of an environment, which is built if it is missing, incomplete, outdated or broken."""
    if given := os.environ.get(f"{recipe.prefix}_PYTHON"):
        python = Path(given).expanduser()  # used as it is, never changed
        if missing := _missing_modules(python, recipe, variables(recipe.prefix)):
            raise CourseError("environments.given_python", prefix=recipe.prefix, python=python, missing=missing)
        return python
    paths.require_own(folder.absolute())
    if not _works(recipe, folder):
        with _locked(folder.resolve()) as target:  # a link stays where it is
            if not _works(recipe, target):  # no other process has built it meanwhile
                _build(recipe, target)
    return python_in(folder.absolute())


def rebuild(recipe: Recipe, folder: Path, reason: str) -> None:
    """Replace an environment that turned out not to work, unless another process just did."""
    before = _read(folder / MARKER).get("built")
    with _locked(folder.resolve()) as target:
        if _read(target / MARKER).get("built") == before:
            print(f"{folder} is rebuilt: {reason}", flush=True)
            _build(recipe, target)


def is_ready(folder: Path, recipe: Recipe) -> bool:
    """Whether a complete environment of exactly this recipe is there."""
    return _read(folder / MARKER).items() >= recipe.described.items() and python_in(folder).exists()


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
    search = os.environ.get(f"{prefix}_PYTHONPATH") if prefix else None
    return kept | ({"PYTHONPATH": search} if search else {}) | dict(extra or {})


def python_in(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def _works(recipe: Recipe, folder: Path) -> bool:
    return is_ready(folder, recipe) and not _missing_modules(python_in(folder), recipe, variables())


def _missing_modules(python: Path, recipe: Recipe, env: Mapping[str, str]) -> str:
    """What the probe imports and the interpreter does not find; everything if it does not run."""
    lines = re.findall(r"^import ([\w., ]+)$", recipe.probe, re.MULTILINE)
    names = [name.strip() for line in lines for name in line.split(",")]
    code = f"import importlib.util as u; print(*[name for name in {names!r} if u.find_spec(name) is None])"
    try:
        return subprocess.check_output(
            [python, "-c", code], env=env, cwd="/", stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return ", ".join(names)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Hold the lock of an environment; the system frees it when this process is gone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process is building {folder}: waiting for it.", flush=True)
        lock.acquire()
    try:
        yield folder
    finally:
        lock.release()


def _build(recipe: Recipe, folder: Path) -> None:
    """Build an environment beside its place, then move it there; a failed build leaves the former one as it was."""
    started, partial = time.monotonic(), folder.with_name(f"{folder.name}.partial")
    for old in (folder, partial):
        _require_ours(old, recipe)
    _remove(partial)
    if disk.free_gib(folder) < recipe.needs_gib:
        _remove(folder)  # no room for both, and this one is of no use
    disk.require_disk(folder, recipe.needs_gib, f"the {recipe.name} environment")
    print(f"Building the {recipe.name} environment in {folder} (once).", flush=True)
    paths.make_folder(partial, f"the {recipe.name} environment")
    paths.write_json(partial / OWNER, {"name": recipe.name})
    versions = _install(recipe, partial)
    paths.write_json(partial / MARKER, recipe.described | {"versions": versions, "built": time.time()})
    _remove(folder)
    partial.rename(folder)
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"The {recipe.name} environment is ready after {time.monotonic() - started:.0f} s: {installed}", flush=True)


def _install(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Make the environment, install every step, and import what matters; the versions that the probe prints."""
    python, env = python_in(folder), variables() | installer.uv_variables()
    cache = disk.nearest(Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache/uv")))
    if cache.stat().st_dev != folder.stat().st_dev:  # on another disk it would double what is written
        env["UV_CACHE_DIR"] = str(folder / UV_CACHE)
    commands = {"new environment": installer.new_environment(folder)}
    commands |= {" ".join(step): installer.change(python, "install", *step) for step in recipe.steps}
    if recipe.remove:
        commands["without " + ", ".join(recipe.remove)] = installer.change(python, "uninstall", *recipe.remove)
    commands["first import"] = [str(python), "-c", recipe.probe]
    for title, command in commands.items():
        _run_step(recipe, folder, title, command, env)
    shutil.rmtree(folder / UV_CACHE, ignore_errors=True)
    return dict(json.loads(_log_lines(folder)[-1]))


def _run_step(recipe: Recipe, folder: Path, title: str, command: list[str], env: Mapping[str, str]) -> None:
    """Run one command with its output in the log; a line every 20 s, and one when it is done."""
    started = time.monotonic()

    def report(seconds: float) -> None:
        print(f"  {title}: {seconds:.0f} s, {mask_secrets(''.join(_log_lines(folder)[-1:]))[:80]}", flush=True)

    if processes.run(command, env, folder / LOG, report) == 0:
        print(f"  {title}: {time.monotonic() - started:.0f} s", flush=True)
        return
    tail = "\n".join(_log_lines(folder)[-12:])
    if "+cpu" in tail:
        raise CourseError("environments.no_cpu_torch", name=recipe.name, tail=tail)
    about = {"name": recipe.name, "prefix": recipe.prefix, "log": folder / LOG}
    raise CourseError("environments.step_failed", title=title, tail=tail, **about)


def _log_lines(folder: Path) -> list[str]:
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _require_ours(folder: Path, recipe: Recipe) -> None:
    """Refuse to replace a folder that this course did not make, or made for another engine; empty is fine."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    owner = _read(folder / MARKER).get("name") or _read(folder / OWNER).get("name")
    if not owner or folder.resolve() == Path(sys.prefix).resolve():
        raise CourseError("environments.not_ours", folder=folder, prefix=recipe.prefix)
    if owner != recipe.name:
        about = {"name": recipe.name, "prefix": recipe.prefix}
        raise CourseError("environments.other_recipe", folder=folder, owner=owner, **about)


def _remove(folder: Path) -> None:
    """Remove an environment: its marker first, and last the note that it is ours, in case this is interrupted."""
    (folder / MARKER).unlink(missing_ok=True)
    for entry in folder.iterdir() if folder.exists() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != OWNER:
            entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _read(file: Path) -> dict[str, Any]:
    """What a marker says; nothing where there is none."""
    try:
        return dict(paths.read_json(file))
    except (OSError, ValueError, TypeError):
        return {}
