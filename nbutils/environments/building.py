"""Making an environment, mending the packages that are damaged, and replacing one that cannot be mended.

Not here: running one step (steps), what is wrong with one (checking). What worked is never removed before its
replacement is ready: a machine without network keeps what it has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nbutils import disk, paths
from nbutils.environments import checking, steps
from nbutils.environments.recipe import BEGUN, LOG, MARKER, Recipe, is_ready, marker, python_in, require_ours
from nbutils.errors import CourseError

UNREADY = "it is unfinished or was made for other versions"


def ensure(recipe: Recipe, folder: Path) -> Path:
    """The interpreter of an environment; built, mended or replaced if it is missing, half made, outdated or broken."""
    if given := os.environ.get(f"{recipe.prefix}_PYTHON"):
        return checking.checked_interpreter(Path(given).expanduser(), recipe)
    folder = folder.absolute()
    paths.require_own(folder)
    if not is_ready(folder, recipe) or checking.damage(folder, recipe) or _former(folder.resolve()).exists():
        _settle(folder, recipe)
    return python_in(folder)


def rebuild(recipe: Recipe, folder: Path, why: str) -> Path:
    """Mend or replace an environment that was seen not to work: every byte of it is looked at."""
    _settle(folder, recipe, why)
    return python_in(folder)


def _settle(folder: Path, recipe: Recipe, seen: str = "") -> None:
    """Do what is needed under the lock; of two builders the second finds it ready."""
    folder = folder.resolve()  # a link stays where it is, and its target is replaced
    before = _made(folder)
    with _locked(folder) as lock:
        Builder(folder, recipe, lock).settle(seen if _made(folder) == before else "")


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """A lock that the system frees when this process, and a step it may have left running, are gone."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)  # the folder above: it stays when an environment is replaced
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is building {folder}: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Builder:
    """One environment, while its lock is held."""

    folder: Path
    recipe: Recipe
    lock: int

    def settle(self, seen: str) -> None:
        """Mend what can be mended; what cannot, or is not there, is built."""
        self._tidy()
        ready = is_ready(self.folder, self.recipe)
        if ready and seen:
            print(f"{self.folder}: {seen}. Reading every file of it for damage.", flush=True)
        found = checking.faults(self.folder, self.recipe, deep=bool(seen)) if ready else []
        if ready and not found and not seen:
            return
        if not (found and self._mended(found)):
            self._replace(seen or checking.in_words(found) or UNREADY)

    def _tidy(self) -> None:
        """What a replacement that was interrupted left: the former environment comes back if there is no new one."""
        former = _former(self.folder)
        if not former.exists():
            return
        require_ours(former, self.recipe)
        require_ours(self.folder, self.recipe)
        if marker(self.folder):
            _remove(former)
        else:
            self._put_back()

    def _mended(self, found: list[checking.Fault]) -> bool:
        """Whether installing the damaged packages again was enough; pip removes none before it has all of them."""
        if not all(fault.wanted for fault in found):
            return False
        print(f"{self.folder}: {checking.in_words(found)}; mending it.", flush=True)
        wanted = [*(fault.wanted for fault in found), *self.recipe.options]
        try:
            self._step("mending", [*self._pip, "install", "--force-reinstall", "--no-deps", *wanted])
            self._finish()
        except CourseError:
            return False
        return not checking.faults(self.folder, self.recipe)

    def _replace(self, why: str) -> None:
        """Build it anew; a finished one waits beside it and comes back if that fails."""
        require_ours(self.folder, self.recipe)
        if self.folder.exists() and any(self.folder.iterdir()):
            print(f"{self.folder}: {why}, so it is built anew.", flush=True)
        former = _former(self.folder)
        if not marker(self.folder):
            _remove(self.folder)
        disk.require_disk(self.folder, self.recipe.needs_gib, f"the {self.recipe.name} environment")
        if self.folder.exists():
            self.folder.rename(former)
        try:
            self._build()
        except BaseException as problem:
            if former.exists():
                self._put_back()
                if isinstance(problem, CourseError):
                    raise _kept(problem, self.folder, why) from problem
            raise
        _remove(former)

    def _put_back(self) -> None:
        """The former environment to its place, with the words of the build that failed."""
        former = _former(self.folder)
        if (self.folder / LOG).exists():
            shutil.copy(self.folder / LOG, former / LOG)
        _remove(self.folder)
        former.rename(self.folder)

    def _build(self) -> None:
        """Make the environment from nothing; the marker is written last, after the probe ran in it."""
        print(f"Building the {self.recipe.name} environment in {self.folder} (once, a few minutes).", flush=True)
        started = time.monotonic()
        paths.make_folder(self.folder, f"the {self.recipe.name} environment")
        paths.write_json(self.folder / BEGUN, {"name": self.recipe.name})
        self._step("new environment", [sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
        for wanted in self.recipe.steps:
            self._step(" ".join(wanted), [*self._pip, "install", *wanted])
        if self.recipe.remove:
            unwanted = [*self._pip, "uninstall", "-y", *self.recipe.remove]
            self._step("without " + ", ".join(self.recipe.remove), unwanted)
        self._finish()
        print(f"The {self.recipe.name} environment is ready after {time.monotonic() - started:.0f} s.", flush=True)

    def _finish(self) -> None:
        """Import what matters, then write the marker."""
        self._step("first import", [str(python_in(self.folder)), "-c", self.recipe.probe])
        told = json.loads((self.folder / LOG).read_text(encoding="utf-8").strip().splitlines()[-1])
        about = {"versions": told, "installed": checking.packages(self.folder)}
        paths.write_json(self.folder / MARKER, self.recipe.described | about)
        print(f"  it has {', '.join(f'{name} {version}' for name, version in told.items())}", flush=True)

    @property
    def _pip(self) -> list[str]:
        return [sys.executable, "-m", "pip", "--python", str(python_in(self.folder))]

    def _step(self, title: str, command: list[str]) -> None:
        steps.run(title, command, self.folder / LOG, self.recipe, self.lock)


def _former(folder: Path) -> Path:
    """Where a finished environment waits while its replacement is built."""
    return folder.with_name(folder.name + ".former")


def _made(folder: Path) -> int:
    """When the marker was written; another builder changes it."""
    try:
        return (folder / MARKER).stat().st_mtime_ns
    except OSError:
        return 0


def _remove(folder: Path) -> None:
    """Remove an environment of ours; the note that it is ours goes last, in case this is interrupted."""
    if not folder.exists():
        return
    if (kept := marker(folder)) and not (folder / BEGUN).exists():
        paths.write_json(folder / BEGUN, {"name": kept.get("name")})
    (folder / MARKER).unlink(missing_ok=True)
    for part in folder.iterdir():
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        elif part.name != BEGUN:
            part.unlink()
    shutil.rmtree(folder)


def _kept(problem: CourseError, folder: Path, why: str) -> CourseError:
    """The error of a replacement that failed, and what is left."""
    seen = f"{problem.seen}\nWhat was in {folder} before is there again, as it was ({why})."
    return CourseError(seen, problem.allowed, f"run this again where packages can be had; {problem.todo}")
