"""Completes a platform's Python for the lessons with the least change, and never replaces the torch that came with it.

The setup cell installs bare nbutils; the first cell of a lesson calls `ensure`, which adds what the lessons import,
from the package index or, without a network, from an attached folder of wheels (`make wheels` builds one).
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.masking import without_secrets
from nbutils.paths import DISTRIBUTION, read_json, sha256

PINNED = ("torch", "torchvision", "torchaudio", "triton", "numpy")  # the platform's own, matched to its driver
PINNED_FAMILIES = ("nvidia-", "cuda-")
BLOCKERS = {"torchao": "<0.16"}  # PEFT from 0.19 on refuses to start beside these versions
FREE = ("datasets", "pyarrow", "dill", "multiprocess")  # TRL asks for newer ones than Colab and Kaggle have
MARKER = "course-wheels.json"
READ_BY_PIP = (".whl", ".gz", ".zip", ".bz2", ".xz", ".html")
CONFLICT = "ResolutionImpossible"  # pip's word for requirements that exclude each other


def ensure(extra: str) -> None:
    """Install what the extra names and this Python lacks; silent and instant when nothing is missing."""
    remove_blockers()
    missing = unsatisfied(requirements(extra))
    if not missing:
        return
    wheels = attached_wheels()
    source = f"the attached {wheels}" if wheels else "the package index"
    print(f"Installing for the lessons, from {source}: {', '.join(missing)}", flush=True)
    before = versions()
    pip_install(missing, wheels)
    importlib.invalidate_caches()
    after = versions()
    replaced = [name for name, version in before.items() if after.get(name) != version]
    if loaded := [name for name in replaced if name.replace("-", "_") in sys.modules]:
        raise CourseError("install.restart_kernel", packages=", ".join(loaded))


def import_package(name: str) -> Any:
    """A package that few downloads need, installed when it is first imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"Installing for this download: {name}", flush=True)
        pip_install([name])
        importlib.invalidate_caches()
        return importlib.import_module(name)


def requirements(extra: str) -> list[str]:
    """What the installed nbutils requires under `extra` here; nothing for a checkout that is not installed."""
    try:
        listed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return []
    of_extra = [one for one in listed if one.marker and "extra" in str(one.marker)]
    return [f"{one.name}{one.specifier}" for one in of_extra if one.marker and one.marker.evaluate({"extra": extra})]


def unsatisfied(wanted: Iterable[str]) -> list[str]:
    """The requirements that the installed versions do not meet."""
    return [text for text in wanted if not _is_met(Requirement(text))]


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def versions() -> dict[str, str]:
    """Every installed distribution and its version."""
    listed = {str(one.metadata["Name"]): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return {str(canonicalize_name(name)): version for name, version in sorted(listed.items()) if version}


def is_platforms_own(name: str) -> bool:
    """Whether a package belongs to the platform's torch and CUDA and must stay as it is."""
    return name in PINNED or name.startswith(PINNED_FAMILIES)


def pip_install(wanted: list[str], wheels: Path | None = None) -> None:
    """Install with every installed package pinned; if that is impossible, with only the platform's own pinned."""
    source = ["--no-index", "--only-binary", ":all:", "--find-links", str(wheels)] if wheels else []
    free = {*FREE, *(str(canonicalize_name(Requirement(text).name)) for text in wanted)}
    installed = versions()
    done = _pip([*source, *wanted], {name: installed[name] for name in installed if name not in free})
    if done.returncode != 0 and CONFLICT in done.stderr:
        print("Not possible with all packages as they are; now only torch, CUDA and numpy are pinned.", flush=True)
        done = _pip([*source, *wanted], {name: installed[name] for name in installed if is_platforms_own(name)})
    if done.returncode == 0:
        return
    tail = "\n".join(done.stderr.strip().splitlines()[-8:])
    absent = re.search(r"No matching distribution found for (\S+)", done.stderr)
    if wheels and (absent or CONFLICT in done.stderr):
        lacks = absent[1] if absent else "versions that fit beside the packages of this Python"
        raise CourseError("install.wheels_incomplete", folder=wheels, lacks=lacks, tail=tail)
    raise CourseError("install.pip_failed", tail=tail, wanted=", ".join(wanted), marker=MARKER)


def _pip(words: list[str], pinned: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """pip, with installed packages pinned to their versions; a local build tag (+cu128) is on no index."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        lines = [f"{name}=={version.split('+')[0]}\n" for name, version in pinned.items()]
        constraints.write_text("".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "--constraint", str(constraints), *words]
        return subprocess.run(command, capture_output=True, text=True, env=without_secrets(os.environ))


def remove_blockers() -> None:
    """Uninstall packages the course does not use and that stop the ones it does."""
    for name, old in BLOCKERS.items():
        if _is_met(Requirement(f"{name}{old}")):
            print(f"Removing {name} {metadata.version(name)}: PEFT refuses to start beside it, and no lesson uses it.")
            command = [sys.executable, "-m", "pip", "uninstall", "-y", "-q", name]
            subprocess.run(command, check=True, env=without_secrets(os.environ))


def attached_wheels() -> Path | None:
    """The folder of wheels that NBUTILS_SOURCE is in, else the one attached for this Python, verified; None if none."""
    given = os.environ.get("NBUTILS_SOURCE", "")
    if given.endswith(".whl") and (marker := Path(given).with_name(MARKER)).exists():
        found = [marker]
    else:
        found = list(platforms.find_inputs(platforms.folders(platforms.detect()).inputs, MARKER))
    fitting = [marker for marker in found if _fits(marker)]
    if len(fitting) > 1:
        raise CourseError("install.several_folders", folders=", ".join(str(marker.parent) for marker in fitting))
    return _verified(fitting[0]) if fitting else None


def _fits(marker: Path) -> bool:
    """Whether wheels are for this Python; a line if they are not."""
    built_for, here = _listed(marker)["python"], ".".join(platform.python_version_tuple()[:2])
    if built_for != here:
        print(f"The attached {marker.parent} is for Python {built_for} and not used: this is {here} "
              f"(`make wheels PYTHON_VERSION={here}` builds the right one).")  # fmt: skip
    return bool(built_for == here)


def _listed(marker: Path) -> dict[str, Any]:
    """What `make wheels` wrote about a folder: the Python version, and size and checksum of every file."""
    try:
        listed = read_json(marker)
        files = {Path(str(file["name"])).name: (file["bytes"], file["sha256"]) for file in listed["files"]}
        return {"python": str(listed["python"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = f"{MARKER} ({type(error).__name__})"
        raise CourseError("install.wheels_damaged", folder=marker.parent, problems=problems, marker=MARKER) from error


def _verified(marker: Path) -> Path:
    """The folder, if its files are exactly those of its list."""
    folder, files = marker.parent, _listed(marker)["files"]
    problems = []
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} (missing)")
        elif path.stat().st_size != size or sha256(path) != checksum:
            problems.append(f"{name} (other content)")
    extra = [path.name for path in sorted(folder.iterdir()) if path.suffix in READ_BY_PIP and path.name not in files]
    problems += [f"{name} (not listed)" for name in extra]
    if problems:
        raise CourseError("install.wheels_damaged", folder=folder, problems=", ".join(problems), marker=MARKER)
    return folder
