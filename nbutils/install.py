"""Completes a platform's Python for the lessons with the least change, and never replaces its torch."""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.files import DISTRIBUTION, read_json, sha256
from nbutils.masking import without_secrets

BLOCKERS = {"torchao": "<0.16"}  # PEFT from 0.19 on refuses to start beside these versions
FREE = ("datasets", "pyarrow", "dill", "multiprocess")  # TRL asks for newer ones than Colab and Kaggle have
MARKER = "course-wheels.json"
READ_BY_PIP = (".whl", ".gz", ".zip", ".bz2", ".xz", ".html")
CONFLICT = "ResolutionImpossible"  # pip's word for requirements that exclude each other


def ensure(extra: str) -> None:
    """Install what the extra names and this Python lacks; silent and instant when nothing is missing."""
    for name, old in BLOCKERS.items():
        if not unsatisfied([f"{name}{old}"]):
            print(f"Removing {name} {metadata.version(name)}: PEFT refuses to start beside it, and no lesson uses it.")
            command = [sys.executable, "-m", "pip", "uninstall", "-y", "-q", name]
            subprocess.run(command, check=True, env=without_secrets(os.environ))
    if not (missing := unsatisfied(requirements(extra))):
        return
    wheels = attached_wheels()
    source = f"the attached {wheels}" if wheels else "the package index"
    print(f"Installing for the lessons, from {source}: {', '.join(missing)}", flush=True)
    before = versions()
    pip_install(missing, wheels)
    importlib.invalidate_caches()
    same = before.items() & versions().items()
    if loaded := [name for name in before if name not in dict(same) and name.replace("-", "_") in sys.modules]:
        raise CourseError("install.restart_kernel", packages=", ".join(loaded))


def import_package(name: str) -> Any:
    """A package that few downloads need, installed when it is first imported."""
    if importlib.util.find_spec(name) is None:
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
    marked = [(one, one.marker) for one in listed if one.marker and "extra" in str(one.marker)]
    return [f"{one.name}{one.specifier}" for one, marker in marked if marker.evaluate({"extra": extra})]


def unsatisfied(required: Iterable[str]) -> list[str]:
    """The requirements that the installed versions do not meet."""
    unmet = {text: Requirement(text) for text in required}
    for text, asked in list(unmet.items()):
        with suppress(metadata.PackageNotFoundError):
            if asked.specifier.contains(metadata.version(asked.name), prereleases=True):
                del unmet[text]
    return list(unmet)


def versions() -> dict[str, str]:
    """Every installed distribution and its version."""
    found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {str(canonicalize_name(name)): version for name, version in sorted(found.items()) if name and version}


def is_platforms_own(name: str) -> bool:
    """Whether a package belongs to the platform's torch and CUDA and must stay as it is."""
    return name in ("torch", "torchvision", "torchaudio", "triton", "numpy") or name.startswith(("nvidia-", "cuda-"))


def pip_install(required: list[str], wheels: Path | None = None) -> None:
    """Install with every installed package pinned; if that is impossible, with only the platform's own pinned."""
    source = ["--no-index", "--only-binary", ":all:", "--find-links", str(wheels)] if wheels else []
    free = {*FREE, *(str(canonicalize_name(Requirement(text).name)) for text in required)}
    installed = versions()
    for pinned in ([name for name in installed if name not in free], filter(is_platforms_own, installed)):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            for name in pinned:  # a local build tag (+cu128) is on no index
                constraints.write(f"{name}=={installed[name].split('+')[0]}\n")
            constraints.flush()
            command = [sys.executable, "-m", "pip", "install", "-q", "--constraint", constraints.name]
            words, env = [*command, *source, *required], without_secrets(os.environ)
            done = subprocess.run(words, capture_output=True, text=True, env=env)
        if CONFLICT not in done.stderr:
            break
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        about = {"source": wheels or "the package index", "marker": MARKER}
        raise CourseError("install.pip_failed", tail=tail, required=", ".join(required), **about)


def attached_wheels() -> Path | None:
    """The folder of wheels that NBUTILS_SOURCE is in, or an attached one, if it is exactly what its list says."""
    given, here = os.environ.get("NBUTILS_SOURCE", ""), ".".join(platform.python_version_tuple()[:2])
    if given.endswith(".whl") and (marker := Path(given).with_name(MARKER)).exists():
        found = [marker]
    else:
        found = platforms.find_inputs(platforms.folders(platforms.detect()).inputs, MARKER)
    if len(found) > 1:
        raise CourseError("install.several_folders", folders=", ".join(str(marker.parent) for marker in found))
    if not found:
        return None
    folder, files = found[0].parent, dict[str, str]()
    try:
        listed = read_json(found[0])
        files = {Path(str(file["name"])).name: file["sha256"] for file in listed["files"]}
        problems = [f"it is for Python {listed['python']}"] if listed["python"] != here else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = [f"{MARKER} is damaged ({type(error).__name__})"]
    damaged = [name for name in files if not (folder / name).is_file() or sha256(folder / name) != files[name]]
    extra = [path.name for path in sorted(folder.iterdir()) if path.suffix in READ_BY_PIP and path.name not in files]
    problems += [f"{name} is missing or damaged" for name in damaged] + [f"{name} is not listed" for name in extra]
    if problems:
        about = {"marker": MARKER, "python": here, "problems": ", ".join(problems)}
        raise CourseError("install.wheels_refused", folder=folder, **about)
    return folder
