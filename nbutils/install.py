"""Completes a platform's Python for the course without touching the torch that came with it.

The setup cell installs bare nbutils; the first cell of a lesson calls `ensure`, which adds what the lessons import.
Not here: the serving environment (serving), or anything that runs when all is in place already.
"""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from nbutils.errors import CourseError

PINNED = ("torch", "torchvision", "torchaudio", "triton", "numpy")  # the platform's own, matched to its driver
BLOCKERS = {"torchao": "<0.16"}  # PEFT from 0.19 on refuses to start beside these versions


def ensure(extra: str) -> None:
    """Install what `nbutils[extra]` names and this Python lacks; silent and instant when nothing is missing."""
    remove_blockers()
    missing = unsatisfied(requirements(extra))
    if not missing:
        return
    loaded = sorted({Requirement(text).name for text in missing if Requirement(text).name in sys.modules})
    print(f"Installing for the lessons: {', '.join(missing)}", flush=True)
    pip_install(missing)
    if loaded:
        raise CourseError(
            f"{', '.join(loaded)} was replaced while this kernel had the old version loaded.",
            "a kernel that starts with the new version",
            "restart the kernel (Runtime > Restart) and run all cells again",
        )


def requirements(extra: str) -> list[str]:
    """What the installed nbutils asks for under `extra` here; nothing for a checkout that is not installed."""
    try:
        listed = [Requirement(text) for text in metadata.requires("nbutils") or []]
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


def pip_install(wanted: list[str]) -> None:
    """pip, held to the platform's own torch by a constraint file."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in platform_pins()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "--constraint", str(constraints), *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CourseError(
            "pip could not complete this Python:\n" + "\n".join(done.stderr.strip().splitlines()[-8:]),
            f"a package registry that answers and has {', '.join(wanted)}",
            "check the network (Kaggle: Settings > Internet), then run this cell again",
        )


def platform_pins() -> list[str]:
    """`torch==2.11.0`-like lines for what is installed and must stay; a local build tag cannot be asked for by name."""
    pins = []
    for name in PINNED:
        try:
            pins.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return pins


def remove_blockers() -> None:
    """Uninstall packages the course does not use and that stop the ones it does."""
    for name, versions in BLOCKERS.items():
        if _is_met(Requirement(f"{name}{versions}")):
            print(f"Removing {name} {metadata.version(name)}: PEFT refuses to start beside it, and no lesson uses it.")
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "-y", "-q", name], check=True)
