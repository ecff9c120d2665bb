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
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nbutils import platforms
from nbutils.errors import CourseError
from nbutils.files import DISTRIBUTION, read_json, sha256
from nbutils.language import last_lines, say, tr
from nbutils.masking import without_secrets

TORCH = ">=2.8"  # as in pyproject.toml; an older one is left alone: driver and CUDA of its image belong to it
BLOCKER = "torchao<0.16"  # PEFT from 0.19 on refuses to start beside it
FREE = ("datasets", "pyarrow", "dill", "multiprocess")  # TRL asks for newer ones than Colab and Kaggle have
MARKER = "course-wheels.json"
READ_BY_PIP = (".whl", ".gz", ".zip", ".bz2", ".xz", ".html")
PYTHON = ".".join(platform.python_version_tuple()[:2])
CONFLICT = "ResolutionImpossible"  # pip's word for requirements that exclude each other


def ensure(extra: str) -> None:
    """Install what the extra names and this Python lacks; silent and instant when nothing is missing.

    Example:
        install.ensure("train")
    """
    if version := old_torch():
        raise CourseError(
            tr(
                "This Python has torch {version}. Nothing was installed: pip would replace it with one that "
                "may not fit the driver.",
                version=version,
            ),
            todo=torch_todo(),
        )
    _remove_blocker()
    missing = unsatisfied(requirements(extra))
    if not missing:
        return
    wheels = attached_wheels()
    source = wheels or tr("the package index")
    say("Installing for the lessons, from {source}: {names}", source=source, names=", ".join(missing))
    before = versions()
    pip_install(missing, wheels)
    replaced = dict(before.items() - versions().items())
    loaded = [name for name in replaced if name.replace("-", "_") in sys.modules]
    if loaded:
        raise CourseError(
            "{packages} was replaced while this kernel had the old version loaded.",
            todo="Restart the kernel (Runtime > Restart) and run all cells again.",
            packages=", ".join(loaded),
        )


def _remove_blocker() -> None:
    """Remove a package beside which PEFT does not start."""
    if unsatisfied([BLOCKER]):
        return
    say("Removing {name}: PEFT refuses to start beside it, and no lesson uses it.", name=BLOCKER)
    command = [sys.executable, "-m", "pip", "uninstall", "-y", "-q", Requirement(BLOCKER).name]
    subprocess.run(command, check=True, env=without_secrets(os.environ))


def old_torch() -> str:
    """The version of an installed torch that is older than the lessons need; empty if it is not, or there is none."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    return "" if _meets(SpecifierSet(TORCH), version) else version


def _meets(wanted: SpecifierSet, version: str) -> bool:
    """Whether a version is wanted; a build of NVIDIA's images, called 2.8.0a0, counts as 2.8.0."""
    return wanted.contains(version, prereleases=True) or wanted.contains(Version(version).base_version)


def torch_todo() -> str:
    """How to get a newer torch: in an image, CUDA and torch belong together and are replaced together."""
    return tr(
        "Choose an image with PyTorch 2.8 or newer (AutoDL: shut the instance down and choose 更换镜像, a 基础镜像). "
        "On a machine of your own, `make course` in the clone makes an environment with a torch of its own."
    )


def import_package(name: str) -> Any:
    """A package that few downloads need, installed when it is first imported."""
    if importlib.util.find_spec(name) is None:
        say("Installing for this download: {name}", name=name)
        pip_install([name])
    return importlib.import_module(name)


def requirements(extra: str) -> list[str]:
    """What the installed nbutils requires under `extra` here; nothing for a checkout that is not installed."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    required = []
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker and "extra" in str(marker) and marker.evaluate({"extra": extra}):
            required.append(f"{requirement.name}{requirement.specifier}")
    return required


def unsatisfied(required: Iterable[str]) -> list[str]:
    """The requirements that the installed versions do not meet."""
    unmet = []
    for text in required:
        requirement = Requirement(text)
        with suppress(metadata.PackageNotFoundError):
            if _meets(requirement.specifier, metadata.version(requirement.name)):
                continue
        unmet.append(text)
    return unmet


def versions() -> dict[str, str]:
    """Every installed distribution and its version."""
    installed = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:  # a broken installation may have none
            installed[str(canonicalize_name(name))] = distribution.version
    return installed


def is_platforms_own(name: str) -> bool:
    """Whether a package belongs to the platform's torch and CUDA and must stay as it is."""
    return name in ("torch", "torchvision", "torchaudio", "triton", "numpy") or name.startswith(("nvidia-", "cuda-"))


def pip_install(required: list[str], wheels: Path | None = None) -> None:
    """Install with every installed package pinned; if that is impossible, with only the platform's own pinned."""
    installed = versions()
    pinned = dict(installed)
    for name in (*FREE, *(Requirement(text).name for text in required)):
        pinned.pop(str(canonicalize_name(name)), None)
    done = _run_pip(required, pinned, wheels)
    if CONFLICT in done.stderr:
        done = _run_pip(required, {name: installed[name] for name in installed if is_platforms_own(name)}, wheels)
    if done.returncode == 0:
        importlib.invalidate_caches()
        return
    raise CourseError(
        "pip could not install the missing packages from {source}:\n{tail}",
        todo=(
            "Switch the network on (Kaggle: Settings > Internet), or attach a folder that `make wheels "
            "IMAGE=freeze.txt` builds on any machine with a network (freeze.txt is what `pip freeze` "
            "prints here), then run this cell again."
        ),
        source=wheels or tr("the package index"),
        tail=last_lines(done.stderr, 8),
    )


def _run_pip(required: list[str], pinned: dict[str, str], wheels: Path | None) -> subprocess.CompletedProcess[str]:
    """Let pip install with packages pinned to these versions."""
    source = []
    if wheels:
        source = ["--no-index", "--only-binary", ":all:", "--find-links", str(wheels)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        for name, version in pinned.items():
            released = version.split("+")[0]  # a local build tag (+cu128) is on no index
            constraints.write(f"{name}=={released}\n")
        constraints.flush()
        env = without_secrets(os.environ)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--constraint", constraints.name]
        command = [*pip, *source, *required]
        return subprocess.run(command, capture_output=True, text=True, env=env)


def attached_wheels() -> Path | None:
    """The folder of wheels that NBUTILS_SOURCE is in, or an attached one, if it is exactly what its list says."""
    markers = platforms.find_inputs(platforms.folders().inputs, MARKER)
    source = Path(os.environ.get("NBUTILS_SOURCE", ""))
    beside = source.parent / MARKER
    if source.suffix == ".whl" and beside.exists():
        markers = [beside]
    if not markers:
        return None
    if len(markers) > 1:
        raise CourseError(
            "Several folders of wheels are attached: {folders}.",
            todo="Detach the others, or set NBUTILS_SOURCE to the course's wheel in the one that is yours.",
            folders=", ".join(str(marker.parent) for marker in markers),
        )
    folder = markers[0].parent
    problems = _wheel_problems(folder)
    if problems:
        raise CourseError(
            "The attached folder of wheels {folder} is not what its list says: {problems}. Nothing was installed.",
            todo=(
                "Upload the whole folder that `make wheels PYTHON_VERSION={python}` builds, or detach it and "
                "switch the network on."
            ),
            folder=folder,
            problems=", ".join(problems),
            python=PYTHON,
        )
    return folder


def _wheel_problems(folder: Path) -> list[str]:
    """The files that are missing, damaged or not listed; and the Python of a folder for another one."""
    try:
        listed = read_json(folder / MARKER)
        checksums = {str(file["name"]): file["sha256"] for file in listed["files"]}
        python = listed["python"]
    except (ValueError, KeyError, TypeError):
        return [MARKER]
    present = {}
    for path in folder.iterdir():
        if path.suffix in READ_BY_PIP:
            present[path.name] = sha256(path) if path.is_file() else ""
    names = sorted(checksums | present)
    problems = [name for name in names if checksums.get(name) != present.get(name)]
    if python != PYTHON:
        problems.append(f"Python {python}")
    return problems
