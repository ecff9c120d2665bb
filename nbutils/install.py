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
from nbutils.language import tr
from nbutils.masking import without_secrets

TORCH = ">=2.8"  # as in pyproject.toml; an older one is left alone: driver and CUDA of its image belong to it
BLOCKERS = {"torchao": "<0.16"}  # PEFT from 0.19 on refuses to start beside these versions
FREE = ("datasets", "pyarrow", "dill", "multiprocess")  # TRL asks for newer ones than Colab and Kaggle have
MARKER = "course-wheels.json"
READ_BY_PIP = (".whl", ".gz", ".zip", ".bz2", ".xz", ".html")
CONFLICT = "ResolutionImpossible"  # pip's word for requirements that exclude each other


def ensure(extra: str) -> None:
    """Install what the extra names and this Python lacks; silent and instant when nothing is missing."""
    if version := old_torch():
        raise CourseError(
            tr(
                "This Python has torch {version}. Nothing was installed: pip would replace it with one that "
                "may not fit the driver.",
                version=version,
            ),
            allowed=f"torch{TORCH}",
            todo=tr("{todo}.", todo=torch_todo()),
        )
    for name, old in BLOCKERS.items():
        if not unsatisfied([f"{name}{old}"]):
            said = tr("Removing {name} {version}: PEFT refuses to start beside it, and no lesson uses it.",
                      name=name, version=metadata.version(name))  # fmt: skip
            print(said)
            command = [sys.executable, "-m", "pip", "uninstall", "-y", "-q", name]
            subprocess.run(command, check=True, env=without_secrets(os.environ))
    if not (missing := unsatisfied(requirements(extra))):
        return
    wheels = attached_wheels()
    source, names = str(wheels) if wheels else tr("the package index"), ", ".join(missing)
    print(tr("Installing for the lessons, from {source}: {names}", source=source, names=names), flush=True)
    before = versions()
    pip_install(missing, wheels)
    importlib.invalidate_caches()
    same = before.items() & versions().items()
    if loaded := [name for name in before if name not in dict(same) and name.replace("-", "_") in sys.modules]:
        raise CourseError(
            tr("{packages} was replaced while this kernel had the old version loaded.", packages=", ".join(loaded)),
            todo=tr("Restart the kernel (Runtime > Restart) and run all cells again."),
        )


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
    if platforms.detect().name == "autodl":
        return tr("shut the instance down and choose 更换镜像, or rent a new one: a base image (基础镜像) with "
                  "PyTorch 2.8 or newer; the PyTorch 2.0 and CUDA 11.8 of many guides are of 2023")  # fmt: skip
    return tr("`make course` in the clone makes an environment with a torch of its own; or replace that of this "
              "Python yourself: pip install -U 'torch{wanted}' torchvision torchaudio", wanted=TORCH)  # fmt: skip


def import_package(name: str) -> Any:
    """A package that few downloads need, installed when it is first imported."""
    if importlib.util.find_spec(name) is None:
        print(tr("Installing for this download: {name}", name=name), flush=True)
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
            if _meets(asked.specifier, metadata.version(asked.name)):
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
        raise CourseError(
            tr(
                "pip could not install the missing packages from {source}:\n{tail}",
                source=wheels or tr("the package index"),
                tail=tail,
            ),
            todo=tr(
                "Switch the network on (Kaggle: Settings > Internet), or attach a folder that `make wheels "
                "IMAGE=freeze.txt` builds on any machine with a network (freeze.txt is what `pip freeze` "
                "prints here), then run this cell again."
            ),
        )


def attached_wheels() -> Path | None:
    """The folder of wheels that NBUTILS_SOURCE is in, or an attached one, if it is exactly what its list says."""
    given, here = os.environ.get("NBUTILS_SOURCE", ""), ".".join(platform.python_version_tuple()[:2])
    if given.endswith(".whl") and (marker := Path(given).with_name(MARKER)).exists():
        found = [marker]
    else:
        found = platforms.find_inputs(platforms.folders(platforms.detect()).inputs, MARKER)
    if len(found) > 1:
        raise CourseError(
            tr(
                "Several folders of wheels are attached: {folders}.",
                folders=", ".join(str(marker.parent) for marker in found),
            ),
            todo=tr("Detach the others, or set NBUTILS_SOURCE to the course's wheel in the one that is yours."),
        )
    if not found:
        return None
    folder, files = found[0].parent, dict[str, str]()
    try:
        listed = read_json(found[0])
        files = {Path(str(file["name"])).name: file["sha256"] for file in listed["files"]}
        other = tr("it is for Python {version}", version=listed["python"])
        problems = [other] if listed["python"] != here else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = [tr("{name} is damaged ({problem})", name=MARKER, problem=type(error).__name__)]
    damaged = [name for name in files if not (folder / name).is_file() or sha256(folder / name) != files[name]]
    extra = [path.name for path in sorted(folder.iterdir()) if path.suffix in READ_BY_PIP and path.name not in files]
    problems += [tr("{name} is missing or damaged", name=name) for name in damaged]
    problems += [tr("{name} is not listed", name=name) for name in extra]
    if problems:
        raise CourseError(
            tr(
                "The attached folder of wheels {folder} is not used: {problems}. Nothing was installed.",
                folder=folder,
                problems=", ".join(problems),
            ),
            allowed=tr(
                "wheels for Python {python}, and exactly the files that {marker} lists", python=here, marker=MARKER
            ),
            todo=tr(
                "Upload the whole folder that `make wheels PYTHON_VERSION={python}` builds, or detach it and "
                "switch the network on.",
                python=here,
            ),
        )
    return folder
