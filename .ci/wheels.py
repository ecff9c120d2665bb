"""Builds dist/wheels for notebooks without a network: the course's own wheel and what a platform's image lacks.

    make wheels                                          for Kaggle's image
    make wheels PYTHON_VERSION=3.13 IMAGE=freeze.txt     for another one; freeze.txt is what `pip freeze` prints there
    make wheels IMAGE=none                               everything but torch, CUDA and numpy

How: every package of the image is offered to pip as an empty stand-in of its version, and held to it. What pip then
still takes from the registry is what the image lacks. The list course-wheels.json is written last.
Conditions of the course's own requirements are those of the target; conditions of other packages, as on the version,
are read by the Python that runs pip: one of that version, if there is one.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from nbutils import DISTRIBUTION  # noqa: E402
from nbutils.files import read_json, write_json  # noqa: E402
from nbutils.install import CONFLICT, FREE, MARKER, is_platforms_own  # noqa: E402

IMAGES = ROOT / "tests/images"
KAGGLE = (IMAGES / "colab-2026-08.txt", IMAGES / "kaggle-2026-09.txt")  # Kaggle's image is built from Colab's
STAND_IN = "image"
MB = 2**20


@dataclass(frozen=True)
class Target:
    """The machine the wheels are for."""

    python: str = "3.12"
    platform: str = "manylinux_2_28_x86_64"

    def words(self) -> list[str]:
        """pip's options for it; older libraries' wheels run there too."""
        newest, arch = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", self.platform).groups()  # type: ignore[union-attr]
        tags = [f"manylinux_2_{minor}_{arch}" for minor in range(int(newest), 4, -1)]
        tags += [f"manylinux2014_{arch}", f"manylinux2010_{arch}", f"manylinux1_{arch}", f"linux_{arch}"]
        options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python]
        return options + [word for tag in tags for word in ("--platform", tag)]

    def requirements(self, wheel: Path, extra: str) -> list[str]:
        """What a wheel requires there, whatever this machine is."""
        arch = re.sub(r"manylinux_\d+_\d+_", "", self.platform)
        there = {"python_version": self.python, "sys_platform": "linux", "platform_machine": arch, "extra": extra}
        with zipfile.ZipFile(wheel) as archive:
            [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            lines = archive.read(about).decode().partition("\n\n")[0].splitlines()
        asked = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
        return [f"{one.name}{one.specifier}" for one in asked if one.marker is None or one.marker.evaluate(there)]


def read_image(*files: Path) -> dict[str, str]:
    """name -> version of `pip freeze` lists, later ones winning; lines without a version are left out."""
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==[^\s;@]+", line)]
    return {str(canonicalize_name(name)): version for name, version in pairs}


def stand_in(folder: Path, name: str, version: str, requires: list[str] | None = None) -> Path:
    """An empty wheel of that name and version."""
    plain = canonicalize_name(name).replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires or [])
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "INSTALLER": "pip\n",
    }
    files["RECORD"] = "".join(f"{info}/{file},,\n" for file in (*files, "RECORD"))
    wheel = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{info}/{file}", text)
    return wheel


def interpreter(version: str) -> str:
    """A Python of that version that has pip, else this one."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return found
    if not sys.version.startswith(f"{version}."):
        print(f"No Python {version} with pip here: conditions on the version are read by {sys.version.split()[0]}.")
    return sys.executable


def resolve(wheel: Path, extra: str, target: Target, image: dict[str, str], free: tuple[str, ...] = FREE) -> list[str]:
    """`name==version` of what has to be fetched; a second try holds only the platform's own torch and CUDA."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        marked = {name: f"{version}{'.' if '+' in version else '+'}{STAND_IN}" for name, version in image.items()}
        for name, version in marked.items():
            stand_in(folder, name, version)
        held = [f"{name}=={version}" for name, version in marked.items() if name not in free]
        (folder / "held.txt").write_text("\n".join(held), encoding="utf-8")
        asked = f"{DISTRIBUTION}{f'[{extra}]' if extra else ''} @ {wheel.resolve().as_uri()}"
        words = ["install", "-q", "--dry-run", "--ignore-installed", "--target", str(folder / "nowhere")]
        words += ["--report", str(folder / "report.json"), "--find-links", place, "-c", str(folder / "held.txt")]
        asked_there = target.requirements(wheel, extra)
        command = [interpreter(target.python), "-m", "pip", *words, *target.words(), asked, *asked_there]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return _to_fetch(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    if CONFLICT in done.stderr and free == FREE:
        return resolve(wheel, extra, target, image, tuple(name for name in image if not is_platforms_own(name)))
    raise SystemExit(done.stderr)


def _to_fetch(report: dict) -> list[str]:
    found = [(str(canonicalize_name(one["metadata"]["name"])), one["metadata"]["version"]) for one in report["install"]]
    return sorted(
        f"{name}=={version}"
        for name, version in found
        if not (name == DISTRIBUTION or version.endswith(STAND_IN) or is_platforms_own(name))
    )


def fetch(pins: list[str], target: Target, folder: Path) -> None:
    """Download them, one line per file as pip comes to it."""
    words = ["download", "--no-deps", "--progress-bar", "off", "--dest", str(folder), *target.words(), *pins]
    command = [sys.executable, "-m", "pip", *words]
    said, number = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or []:
            said.append(line)
            if found := re.match(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(\S+\.whl)( \(.*\))?$", line):
                number += 1
                print(f"[{number}/{len(pins)}] {found.group(1)}{found.group(2) or ''}", flush=True)
    if pip.returncode != 0:
        raise SystemExit("".join(said[-10:]))


def _others(folder: Path) -> list[str]:
    """What a folder holds beside the wheels that an earlier build listed."""
    marker = folder / MARKER
    files = read_json(marker)["files"] if marker.exists() else []
    return sorted({one.name for one in folder.iterdir()} - {MARKER, *(file["name"] for file in files)})


def build(result: Path, extra: str, target: Target, image: dict[str, str]) -> int:
    """Fill the folder, its list last; its size in bytes."""
    if result.exists() and (others := _others(result)):
        raise SystemExit(f"{result} holds {', '.join(others[:3])}, not from here: it is left as it is.")
    partial = result.with_name(f".{result.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    words = ["wheel", "-q", "--no-deps", "--wheel-dir", str(partial), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    [own] = partial.glob(f"{DISTRIBUTION.replace('-', '_')}-*.whl")
    if pins := resolve(own, extra, target, image):
        fetch(pins, target, partial)
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(partial.glob("*.whl"))
    ]
    about = {"python": target.python, "platform": target.platform, "extra": extra}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_json(partial / MARKER, about | {"made": today, "files": files})
    shutil.rmtree(result, ignore_errors=True)
    os.replace(partial, result)
    return sum(int(file["bytes"]) for file in files)


def main() -> None:
    """Read the options, build, say what came out."""
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--python-version", default=Target.python)
    options.add_argument("--platform", default=Target.platform)
    options.add_argument("--image", default="kaggle", help="kaggle, none, or a file: `pip freeze` of the image")
    options.add_argument("--extra", default="train")
    options.add_argument("--into", type=Path, default=ROOT / "dist/wheels")
    given = options.parse_args()
    image = read_image(*(KAGGLE if given.image in ("kaggle", "none") else [Path(given.image)]))
    if given.image == "none":
        image = {name: version for name, version in image.items() if is_platforms_own(name)}
    size = build(given.into, given.extra, Target(given.python_version, given.platform), image)
    count = len(list(given.into.glob("*.whl")))
    print(f"{given.into}: {count} wheels, {size / MB:.0f} MB. Upload this folder as a dataset and attach it.")


if __name__ == "__main__":
    main()
