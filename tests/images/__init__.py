"""Platform images as pip sees them: an environment with an empty distribution for each package of a `pip freeze` list.

`requires.json` has what the releases declare that pip weighs against each other here; the other stand-ins ask for
nothing. torch asks for the CUDA libraries and the triton that the list shows.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
WHEELS = runpy.run_path(str(FOLDER.parent.parent / ".ci/wheels.py"))
COLAB = FOLDER / "colab-2026-08.txt"
LISTS = {"colab": (COLAB,), "kaggle": (COLAB, FOLDER / "kaggle-2026-09.txt")}
IMPORTED = "import sys, nbutils.install; print(*{name.partition('.')[0] for name in sys.modules} - {'nbutils'})"
NOT_PASSED_ON = ("PIP_", "NBUTILS_", "PYTHON", "VIRTUAL_ENV", "KAGGLE_", "COLAB_")


def packages(name: str) -> dict[str, str]:
    """name -> version on that image."""
    return WHEELS["read_image"](*LISTS[name])


def requires(name: str, version: str, image: dict[str, str]) -> list[str]:
    """What the stand-in of a package asks for."""
    if name == "torch":
        return [f"{n}=={v}" for n, v in image.items() if n == "triton" or (n.startswith("nvidia-") and "cu12" in n)]
    return json.loads((FOLDER / "requires.json").read_text(encoding="utf-8")).get(f"{name}=={version}", [])


def registry() -> dict[str, str]:
    """pip's settings of this machine: how it reaches the package registry."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


@dataclass(frozen=True)
class Environment:
    """A throw-away environment with its own Python."""

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin/python")

    def run(self, code: str, **variables: str) -> str:
        """Run code in it, in an empty folder and a clean environment; its output."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        given: dict[str, Any] = {"cwd": empty, "env": kept | variables, "stdin": subprocess.DEVNULL}
        ran = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=300, **given)
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}"
        return ran.stdout

    def versions(self) -> dict[str, str]:
        """name -> version of everything installed in it."""
        code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
        return {WHEELS["canonicalize_name"](name): version for name, version in json.loads(self.run(code)).items()}

    def site(self) -> Path:
        """Its site-packages."""
        return Path(self.run("import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())


def bare(folder: Path) -> Environment:
    """An environment with nothing but pip."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    environment = Environment(folder)
    for entry in [*environment.site().glob("setuptools*"), *environment.site().glob("pkg_resources*")]:
        shutil.rmtree(entry)  # only older Pythons bring it
    return environment


def stand_in(environment: Environment, package: str, version: str, needs: Sequence[str] = ()) -> None:
    """Let pip find a package there, without its code."""
    wheel = WHEELS["stand_in"](environment.folder, package, version, list(needs))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(environment.site())
    wheel.unlink()


def imitate(name: str, folder: Path) -> Environment:
    """An environment like that image: its pip, stand-ins for all its packages."""
    environment, image = bare(folder), packages(name)
    pip = [environment.python, "-m", "pip", "install", "-q", f"pip=={image.pop('pip')}"]
    subprocess.run(pip, check=True)
    for package, version in image.items():
        stand_in(environment, package, version, requires(package, version, image))
    imported = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True).stdout
    site = environment.site()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():  # the stand-ins have no code, and nbutils needs some
        if entry.stem in imported.split() and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return environment
