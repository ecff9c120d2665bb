"""Completes a platform's Python for the course: the least change that works, and never the torch that came with it.

The setup cell installs bare nbutils; the first cell of a lesson calls `ensure`, which adds what the lessons import,
from the package registry or, without a network, from an attached folder of wheels (`make wheels` builds one).
Not here: the serving environment (serving), or anything that runs when all is in place already.
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

from nbutils import DISTRIBUTION, platforms
from nbutils.errors import CourseError
from nbutils.masking import without_secrets
from nbutils.paths import read_json, sha256

PINNED = ("torch", "torchvision", "torchaudio", "triton", "numpy")  # the platform's own, matched to its driver
PINNED_FAMILIES = ("nvidia-", "cuda-")
BLOCKERS = {"torchao": "<0.16"}  # PEFT from 0.19 on refuses to start beside these versions
FREE = ("datasets", "pyarrow", "dill", "multiprocess")  # TRL asks for newer ones than Colab and Kaggle have
MARKER = "course-wheels.json"
READ_BY_PIP = (".whl", ".gz", ".zip", ".bz2", ".xz", ".html")
CONFLICT = "ResolutionImpossible"  # pip's word for requirements that exclude each other
WAYS_ON = (
    "switch the network on (Kaggle: Settings > Internet), or attach a folder of wheels as an input "
    "(`make wheels` on any machine with a network builds it); then run this cell again"
)


def ensure(extra: str) -> None:
    """Install what the extra names and this Python lacks; silent and instant when nothing is missing."""
    remove_blockers()
    missing = unsatisfied(requirements(extra))
    if not missing:
        return
    wheels = attached_wheels()
    source = f"the attached {wheels}" if wheels else "the package registry"
    print(f"Installing for the lessons, from {source}: {', '.join(missing)}", flush=True)
    before = versions()
    pip_install(missing, wheels)
    importlib.invalidate_caches()
    _refuse_stale_modules(before, versions())


def _refuse_stale_modules(before: dict[str, str], after: dict[str, str]) -> None:
    changed = [name for name, version in before.items() if after.get(name) != version]
    loaded = [name for name in changed if name.replace("-", "_") in sys.modules]
    if loaded:
        raise CourseError(
            f"{', '.join(loaded)} was replaced while this kernel had the old version loaded.",
            "a kernel that starts with the new version",
            "restart the kernel (Runtime > Restart) and run all cells again",
        )


def requirements(extra: str) -> list[str]:
    """What the installed nbutils asks for under `extra` here; nothing for a checkout that is not installed."""
    try:
        listed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return []
    wanted = [
        one for one in listed if one.marker and "extra" in str(one.marker) and one.marker.evaluate({"extra": extra})
    ]
    return [f"{one.name}{one.specifier}" for one in wanted]


def unsatisfied(wanted: Iterable[str]) -> list[str]:
    """The requirements that the installed versions do not meet."""
    return [text for text in wanted if not _is_met(Requirement(text))]


def _is_met(one: Requirement) -> bool:
    try:
        return one.specifier.contains(metadata.version(one.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def versions() -> dict[str, str]:
    """Every installed distribution and its version; what does not say both is left out."""
    listed = {str(one.metadata["Name"]): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return {str(canonicalize_name(name)): version for name, version in sorted(listed.items()) if version}


def pip_install(wanted: list[str], wheels: Path | None = None) -> None:
    """pip, with every installed package held; if that is impossible, with only the platform's own held."""
    source = ["--no-index", "--only-binary", ":all:", "--find-links", str(wheels)] if wheels else []
    done = _pip([*source, *wanted], least_change(wanted))
    if done.returncode != 0 and CONFLICT in done.stderr:
        print("Not possible beside all packages as they are; now only torch, CUDA and numpy are held.", flush=True)
        done = _pip([*source, *wanted], platform_pins())
    if done.returncode != 0:
        raise _pip_failed(done.stderr, wanted, wheels)


def import_package(name: str) -> Any:
    """A package that few downloads need, installed when it is first imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"Installing for this download: {name}", flush=True)
        pip_install([name])
        importlib.invalidate_caches()
        return importlib.import_module(name)


def _pip(words: list[str], held: list[str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in held), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "--constraint", str(constraints), *words]
        return subprocess.run(command, capture_output=True, text=True, env=without_secrets(os.environ))


def _pip_failed(stderr: str, wanted: list[str], wheels: Path | None) -> CourseError:
    told = "\n".join(stderr.strip().splitlines()[-8:])
    absent = re.search(r"No matching distribution found for (\S+)", stderr)
    if wheels and (absent or CONFLICT in stderr):
        lacks = absent.group(1) if absent else "versions that fit beside the packages of this Python"
        return CourseError(
            f"The attached folder of wheels {wheels} does not have {lacks}:\n{told}",
            f"a folder made for this image, with {', '.join(wanted)} and what they need",
            "build it again: `make wheels IMAGE=freeze.txt`, where freeze.txt is what `pip freeze` prints here; "
            "or detach it and switch the network on (Kaggle: Settings > Internet)",
        )
    return CourseError(
        f"pip could not complete this Python:\n{told}",
        f"a package registry that answers and has {', '.join(wanted)}, or an attached folder with {MARKER}",
        WAYS_ON,
    )


def is_platforms_own(name: str) -> bool:
    """Whether a package belongs to the platform's torch and CUDA and must stay as it is."""
    return name in PINNED or name.startswith(PINNED_FAMILIES)


def platform_pins() -> list[str]:
    """`torch==2.11.0`-like lines for what is installed and must stay."""
    return [_pin(name, version) for name, version in versions().items() if is_platforms_own(name)]


def least_change(wanted: list[str]) -> list[str]:
    """Lines that hold every installed package but the ones asked for and those known to be too old on the images."""
    free = {*FREE, *(str(canonicalize_name(Requirement(text).name)) for text in wanted)}
    return [_pin(name, version) for name, version in versions().items() if name not in free]


def _pin(name: str, version: str) -> str:
    return f"{name}=={version.split('+')[0]}"  # a local build tag is on no registry; what is installed matches anyway


def remove_blockers() -> None:
    """Uninstall packages the course does not use and that stop the ones it does."""
    for name, old in BLOCKERS.items():
        if _is_met(Requirement(f"{name}{old}")):
            print(f"Removing {name} {metadata.version(name)}: PEFT refuses to start beside it, and no lesson uses it.")
            command = [sys.executable, "-m", "pip", "uninstall", "-y", "-q", name]
            subprocess.run(command, check=True, env=without_secrets(os.environ))


def attached_wheels() -> Path | None:
    """The folder of wheels that NBUTILS_SOURCE is in, else the one attached for this Python, checked; None if none."""
    given = os.environ.get("NBUTILS_SOURCE", "")
    if given.endswith(".whl") and (marker := Path(given).with_name(MARKER)).exists():
        found = [marker]
    else:
        found = list(platforms.find_inputs(platforms.folders(platforms.detect()).inputs, MARKER))
    fitting = [(marker.parent, listed) for marker in found if _fits(marker, listed := _listed(marker))]
    if len(fitting) > 1:
        raise CourseError(
            f"Several folders of wheels are attached: {', '.join(str(folder) for folder, _ in fitting)}.",
            "one of them", "detach the others, or set NBUTILS_SOURCE to the course's wheel in the one that is yours",
        )  # fmt: skip
    return _checked(fitting[0][0], fitting[0][1]["files"]) if fitting else None


def _fits(marker: Path, listed: dict[str, Any]) -> bool:
    """Whether wheels are for this Python; a line if they are not."""
    if listed["python"] == _python():
        return True
    print(
        f"The attached {marker.parent} is for Python {listed['python']} and not used: this is {_python()} "
        f"(`make wheels PYTHON_VERSION={_python()}` builds the right one)."
    )
    return False


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _listed(marker: Path) -> dict[str, Any]:
    try:
        listed = read_json(marker)
        return {
            "python": str(listed["python"]),
            "files": [(str(f["name"]), f["bytes"], f["sha256"]) for f in listed["files"]],
        }
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _damaged(marker.parent, [f"{MARKER} ({type(problem).__name__})"]) from problem


def _checked(folder: Path, files: list[tuple[str, int, str]]) -> Path:
    bad = []
    for name, size, digest in files:
        path = folder / Path(name).name
        if not path.is_file():
            bad.append(f"{name} (missing)")
        elif path.stat().st_size != size:
            bad.append(f"{name} ({path.stat().st_size} of {size} bytes)")
        elif sha256(path) != digest:
            bad.append(f"{name} (other content)")
    known = {MARKER, *(name for name, _, _ in files)}
    others = [path.name for path in sorted(folder.iterdir()) if path.suffix in READ_BY_PIP and path.name not in known]
    bad += [f"{name} (not listed)" for name in others]
    if bad:
        raise _damaged(folder, bad)
    return folder


def _damaged(folder: Path, bad: list[str]) -> CourseError:
    return CourseError(
        f"The attached folder of wheels {folder} is damaged: {', '.join(bad)}. Nothing was installed.",
        f"exactly the files that `make wheels` wrote, as {MARKER} lists them",
        "upload the whole folder dist/wheels again, or detach it and switch the network on",
    )
