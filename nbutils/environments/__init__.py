"""Virtual environments for libraries that must not share one with training: built once, trusted by a marker.

The marker is written last. An environment without one, or with another spec's, is rebuilt.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, files, platforms, processes
from nbutils.environments import installer
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.masking import without_secrets

MARKER = "ready.json"  # written last: the environment is complete
OWNER = "begun.json"  # written first, never removed: this course made the folder
UV_CACHE = "uv-cache"
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR",
    "CLICOLOR", "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
IMPORT_FAILED = re.compile(  # a model that needs more packages says `pip install`: no fault of the environment
    r"^(?!.*pip install)(ModuleNotFoundError: |ImportError: |OSError: .*cannot open shared|.*undefined symbol).*",
    re.MULTILINE,
)  # fmt: skip


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an environment holds; `prefix` begins the variables that override it: _PYTHON, _PYTHONPATH, _ENV."""

    name: str
    steps: tuple[tuple[str, ...], ...]  # one install command each, in this order
    remove: tuple[str, ...]  # what a step brings and must not stay
    probe: str  # Python code that imports what matters and prints the versions as JSON, on its last line
    needs_gib: float
    prefix: str = "NBUTILS_SERVE"

    @property
    def described(self) -> dict[str, Any]:
        """The spec as the marker keeps it."""
        return {"name": self.name, "steps": [list(step) for step in self.steps], "remove": list(self.remove)}


def ensure(spec: EnvironmentSpec, folder: Path) -> Path:
    """The interpreter of an environment, which is built if it is missing, incomplete or outdated.

    Example:
        python = environments.ensure(spec, environments.place("NBUTILS_SERVE", "serve"))
    """
    if given := os.environ.get(f"{spec.prefix}_PYTHON"):
        return Path(given).expanduser()  # an interpreter of the learner's, used as it is
    folder = folder.absolute()
    files.require_own(folder)
    if not is_ready(folder, spec):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(folder.with_name(f"{folder.name}.lock")):
            if not is_ready(folder, spec):  # no other process has built it meanwhile
                _build(spec, folder)
    return folder / "bin" / "python"


def is_ready(folder: Path, spec: EnvironmentSpec) -> bool:
    """Whether a complete environment of exactly this spec is there."""
    written = files.read_object(folder / MARKER)
    return written.items() >= spec.described.items() and (folder / "bin" / "python").exists()


def require_imports(python: Path, output: str) -> None:
    """Refuse an environment of ours whose process could not import a library; the next `ensure` rebuilds it."""
    folder = python.parent.parent
    failed = IMPORT_FAILED.search(output)
    if failed and (folder / OWNER).exists():
        (folder / MARKER).unlink(missing_ok=True)
        raise CourseError(
            tr("The environment {folder} is broken: {error}", folder=folder, error=failed[0]),
            todo=tr("Run this again: the environment is rebuilt."),
        )


def place(prefix: str, name: str) -> Path:
    """Where an environment lives: <prefix>_ENV, the checkout, or the platform's scratch folder."""
    if given := os.environ.get(f"{prefix}_ENV"):
        return Path(given).expanduser()
    if files.CHECKOUT:
        return files.CHECKOUT / f".venv-{name}"
    return platforms.folders(platforms.detect()).scratch / f"venv-{name}"


def variables(prefix: str = "", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process in such an environment: no secret, nothing of this kernel but <prefix>_PYTHONPATH."""
    kept = without_secrets(os.environ)
    for name in KERNEL_ONLY:
        kept.pop(name, None)
    search = os.environ.get(f"{prefix}_PYTHONPATH")
    if prefix and search:
        kept["PYTHONPATH"] = search
    kept.update(extra or {})
    return kept


def _build(spec: EnvironmentSpec, folder: Path) -> None:
    """Empty a folder that this course made for this spec, any other is refused; the marker is written last."""
    title = tr("the {name} environment", name=spec.name)
    if folder.exists() and any(folder.iterdir()):
        _empty(spec, folder)
    disk.require_disk(folder, spec.needs_gib, title)
    text = tr(
        "Building {title} in {folder} (once): some minutes, up to {gib:.0f} GiB of disk.",
        title=title,
        folder=folder,
        gib=spec.needs_gib,
    )
    print(text, flush=True)
    files.make_folder(folder, title)
    files.write_json(folder / OWNER, {"name": spec.name})
    versions = _install(spec, folder)
    files.write_json(folder / MARKER, spec.described | {"versions": versions})
    held = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(tr("It is ready: {versions}", versions=held), flush=True)


def _empty(spec: EnvironmentSpec, folder: Path) -> None:
    """Remove what an earlier build of this spec left; its marker goes first, its owner stays."""
    owner = files.read_object(folder / OWNER).get("name")
    if owner != spec.name:
        raise CourseError(
            tr("{folder} is not empty and belongs to {owner}.", folder=folder, owner=owner or tr("another program")),
            todo=tr(
                "Set {prefix}_ENV to another folder, or remove this one yourself if you need nothing in it.",
                prefix=spec.prefix,
            ),
        )
    (folder / MARKER).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != OWNER:
            entry.unlink()


def _install(spec: EnvironmentSpec, folder: Path) -> dict[str, str]:
    """Make the environment, install every step, and import what matters; the versions that the probe prints."""
    env = _build_variables(folder)
    lines = []
    for title, command in _build_commands(spec, folder).items():
        lines = _run_step(spec, folder, title, command=command, env=env)
    shutil.rmtree(folder / UV_CACHE, ignore_errors=True)
    return dict(json.loads(lines[-1]))


def _build_variables(folder: Path) -> dict[str, str]:
    """The variables of a build; uv's cache goes into the folder where its own is on another disk."""
    env = variables() | installer.uv_variables()
    cache = os.environ.get("UV_CACHE_DIR") or os.path.expanduser("~/.cache/uv")
    cache_disk = disk.nearest(Path(cache)).stat().st_dev
    own_disk = folder.stat().st_dev
    if cache_disk != own_disk:  # it would double what is written
        env["UV_CACHE_DIR"] = str(folder / UV_CACHE)
    return env


def _build_commands(spec: EnvironmentSpec, folder: Path) -> dict[str, list[str]]:
    """The commands of a build with their titles, in order."""
    python = folder / "bin" / "python"
    commands = {tr("new environment"): installer.new_environment(folder)}
    for step in spec.steps:
        commands[" ".join(step)] = installer.change(python, "install", *step)
    if spec.remove:
        title = tr("without {names}", names=", ".join(spec.remove))
        commands[title] = installer.change(python, "uninstall", *spec.remove)
    title = tr("first import")
    commands[title] = [str(python), "-c", spec.probe]
    return commands


def _run_step(spec: EnvironmentSpec, folder: Path, title: str, command: list[str], env: dict[str, str]) -> list[str]:
    """Run one command of a build; the lines of the log so far."""
    print(f"  {title}", flush=True)
    log = folder / "build.log"
    status = processes.run(command, env, log, lambda seconds: print(f"    {seconds:.0f} s", flush=True))
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if status == 0:
        return lines
    raise CourseError(
        tr(
            "Building the {name} environment failed at `{title}`:\n{tail}",
            name=spec.name,
            title=title,
            tail="\n".join(lines[-12:]),
        ),
        todo=tr(
            "Read {log} and run this again; without a network, set {prefix}_PYTHON to an interpreter "
            "that has the packages.",
            log=log,
            prefix=spec.prefix,
        ),
    )
