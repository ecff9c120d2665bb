"""Virtual environments for libraries that must not share one with training: built once, trusted by a marker.

The marker is written last. An environment without one, or with another spec's, is rebuilt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, files, platforms, processes
from nbutils.environments import installer
from nbutils.errors import CourseError
from nbutils.language import last_lines, say, tr
from nbutils.masking import without_secrets

MARKER = "ready.json"  # written last: the environment is complete
OWNER = "begun.json"  # written first, never removed: this course made the folder
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR",
    "CLICOLOR", "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an environment holds; `prefix` begins the variables that override it: _PYTHON and _ENV."""

    name: str
    steps: list[list[str]]  # one install command each, in this order
    remove: list[str]  # what a step brings and must not stay
    imports: str  # what must be importable in it, as in `import torch, vllm`
    needs_gib: float
    prefix: str

    @property
    def described(self) -> dict[str, Any]:
        """The spec as the marker keeps it."""
        return {"name": self.name, "steps": self.steps, "remove": self.remove}


def ensure(spec: EnvironmentSpec, folder: Path) -> Path:
    """The interpreter of an environment, which is built if it is missing, incomplete or outdated.

    Example:
        python = environments.ensure(spec, environments.place("NBUTILS_SERVE", "serve"))
    """
    if own_python := os.environ.get(f"{spec.prefix}_PYTHON"):
        return Path(own_python).expanduser()  # an interpreter of the learner's, used as it is
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
    marker = files.read_object(folder / MARKER)
    return marker.items() >= spec.described.items() and (folder / "bin" / "python").exists()


def place(prefix: str, name: str) -> Path:
    """Where an environment lives: <prefix>_ENV, the checkout, or the platform's scratch folder."""
    if own_folder := os.environ.get(f"{prefix}_ENV"):
        return Path(own_folder).expanduser()
    if files.CHECKOUT:
        return files.CHECKOUT / f".venv-{name}"
    return platforms.folders().scratch / f"venv-{name}"


def variables(extra: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process in such an environment: no secret, nothing of this kernel, and what it needs."""
    kept = without_secrets(os.environ)
    for name in KERNEL_ONLY:
        kept.pop(name, None)
    return kept | dict(extra)


def _build(spec: EnvironmentSpec, folder: Path) -> None:
    """Empty a folder that this course made for this spec, any other is refused; the marker is written last."""
    title = tr("the {name} environment", name=spec.name)
    if folder.exists() and any(folder.iterdir()):
        _empty(spec, folder)
    disk.require_disk(folder, spec.needs_gib)
    say(
        "Building {title} in {folder} (once): some minutes, up to {gib:.0f} GiB of disk.",
        title=title,
        folder=folder,
        gib=spec.needs_gib,
    )
    files.make_folder(folder)
    files.write_json(folder / OWNER, {"name": spec.name})
    _install(spec, folder)
    files.write_json(folder / MARKER, spec.described)
    say("It is ready.")


def _empty(spec: EnvironmentSpec, folder: Path) -> None:
    """Remove what an earlier build of this spec left; its marker goes first, its owner stays."""
    if files.read_object(folder / OWNER).get("name") != spec.name:
        raise CourseError(
            "{folder} is not empty, and was not made for the {name} environment.",
            todo="Set {prefix}_ENV to another folder, or remove this one yourself if you need nothing in it.",
            folder=folder,
            name=spec.name,
            prefix=spec.prefix,
        )
    (folder / MARKER).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.name != OWNER:
            files.remove(entry)


def _install(spec: EnvironmentSpec, folder: Path) -> None:
    """Make the environment, install every step, and import what matters."""
    python = folder / "bin" / "python"
    try:
        commands = [installer.new_environment(folder)]
    except subprocess.CalledProcessError as problem:  # pip has printed why
        raise CourseError(
            "uv, which makes environments here, could not be installed.",
            todo="Read pip's message above. Without a network, make this environment on a machine that has one.",
        ) from problem
    for packages in spec.steps:
        commands.append(installer.uv_pip(python, "install", *packages))
    if spec.remove:
        commands.append(installer.uv_pip(python, "uninstall", *spec.remove))
    commands.append([str(python), "-c", f"import {spec.imports}"])
    cache = folder / "uv-cache"  # on the same disk, where uv links instead of copying; the home folder's may be small
    env = variables(installer.uv_variables())
    env.setdefault("UV_CACHE_DIR", str(cache))
    for command in commands:
        _run_command(spec, folder, command, env)
    shutil.rmtree(cache, ignore_errors=True)


def _run_command(spec: EnvironmentSpec, folder: Path, command: list[str], env: dict[str, str]) -> None:
    """Run one command of a build; if it fails, the last lines of the log are shown."""
    title = shlex.join(command)
    print(f"  {title}", flush=True)
    log = folder / "build.log"
    if processes.run(command, env, log, spec.name) == 0:
        return
    raise CourseError(
        "Building the {name} environment failed at `{title}`:\n{tail}",
        todo=(
            "Read {log} and run this again; without a network, set {prefix}_PYTHON to an interpreter "
            "that has the packages."
        ),
        name=spec.name,
        title=title,
        tail=last_lines(log.read_text(encoding="utf-8", errors="replace"), 12),
        log=log,
        prefix=spec.prefix,
    )
