"""install: only what is missing, the least change, never the platform's torch; wheels only when they are whole."""

import hashlib
import importlib.metadata as metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import images
import pytest
from support import ROOT, refused

from nbutils import DISTRIBUTION, install

Patch = pytest.MonkeyPatch
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-0.1.0-py3-none-any.whl"
TRL = "trl-1.16.0-py3-none-any.whl"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


class Pip:
    """Stands in for `subprocess.run`: keeps the commands and the pins they were given, fails as told."""

    def __init__(self, monkeypatch: Patch, *errors: str | bytes) -> None:
        self.errors, self.commands, self.pinned, self.env = list(errors), [], [], {}
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        self.commands.append(command)
        self.env = options.get("env", {})
        if "--constraint" in command:
            lines = Path(command[command.index("--constraint") + 1]).read_text().split()
            self.pinned.append(dict(line.split("==") for line in lines))
        error = self.errors.pop(0) if self.errors else ""
        return subprocess.CompletedProcess(command, int(bool(error)), "", error)


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An imitated Kaggle; the folder of an attached dataset with a list of two wheels, both whole."""
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    for name in ("NBUTILS_PLATFORM", "NBUTILS_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "kaggle/input/datasets/someone/wheels"
    folder.mkdir(parents=True)
    for name, content in {WHEEL: b"the course", TRL: b"a trainer"}.items():
        (folder / name).write_bytes(content)
    write_list(folder, RUNNING)
    return folder


def write_list(folder: Path, python: str) -> None:
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.whl"))}
    files = [{"name": name, "sha256": checksum} for name, checksum in sums.items()]
    (folder / install.MARKER).write_text(json.dumps({"python": python, "files": files}))


def test_only_what_is_missing_is_asked_for() -> None:
    missing = ["no-such-distribution>=3", "pytest>=9999"]
    assert install.unsatisfied(["pytest>=1", *missing]) == missing
    required = install.requirements("train")
    assert any(text.startswith("trl") for text in required) and not any("extra" in text for text in required)


def test_everything_installed_is_pinned_but_the_wanted_and_the_known_to_be_old(monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    pip = Pip(monkeypatch)
    install.pip_install(["trl>=99"])
    [pinned] = pip.pinned
    assert pinned["torch"] == metadata.version("torch").split("+")[0], "a build tag is on no index"
    assert {"numpy", "transformers", "huggingface-hub", "peft"} <= set(pinned)
    assert not {"trl", *install.FREE} & set(pinned)
    assert "PATH" in pip.env and "HF_TOKEN" not in pip.env


def test_when_pinning_everything_is_impossible_only_the_platforms_own_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr(install, "versions", lambda: {"transformers": "5.0", "torch": "2.10.0+cu128", "numpy": "2.3"})
    for wheels in (None, Path("/wheels")):
        pip = Pip(monkeypatch, "ERROR: ResolutionImpossible: see")
        install.pip_install(["trl>=1"], wheels)
        first, second = pip.pinned
        assert "transformers" in first and "transformers" not in second and {"torch", "numpy"} <= set(second)
        pip = Pip(monkeypatch, "ERROR: no network")
        with refused(
            "pip could not install the missing packages from", "no network", "Settings > Internet", "make wheels IMAGE="
        ):
            install.pip_install(["trl>=1"], wheels)
        assert len(pip.commands) == 1


def test_a_package_replaced_under_a_running_kernel_asks_for_a_restart(monkeypatch: Patch) -> None:
    seen = iter([{"pytest": "8", "never-loaded": "1"}, {"pytest": "9999", "never-loaded": "2", "new": "1"}])
    monkeypatch.setattr(install, "requirements", lambda extra: ["trl>=9999"])
    monkeypatch.setattr(install, "pip_install", lambda required, wheels: None)
    monkeypatch.setattr(install, "versions", lambda: next(seen))
    with refused("pytest was replaced"):
        install.ensure("train")


def test_a_torch_that_is_too_old_is_refused_before_pip_touches_anything(tmp_path: Path, monkeypatch: Patch) -> None:
    torch_requirement = f"torch{install.TORCH}"
    assert torch_requirement in install.requirements("train")
    pip = Pip(monkeypatch)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.0.0+cu118" if name == "torch" else real(name))
    monkeypatch.setattr(install, "BLOCKER", "pytest>=1")
    with refused("has torch 2.0.0+cu118. Nothing was", "PyTorch 2.8", "更换镜像", "make course"):
        install.ensure("train")
    assert pip.commands == [], "nothing is installed or removed"
    for version in ("2.8.0+cu128", "2.13.0", "2.9.0.dev20250901", "2.8.0a0+5228986c39.nv25.06"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert install.old_torch() == "" and install.unsatisfied([torch_requirement]) == []


def test_wheels_for_a_platform_are_those_its_own_conditions_ask_for(tmp_path: Path) -> None:
    asked = ["liger>=1; platform_machine == 'x86_64'", "other; platform_machine == 'aarch64'"]
    asked += ["trl>=1; extra == 'train'", "vllm; extra == 'serve'", "click"]
    wheel = images.WHEELS["stand_in"](tmp_path, "course", "1.0", asked)
    required = images.WHEELS["Target"]().requirements(wheel, "train")
    assert required == ["liger>=1", "trl>=1", "click"], "whatever the machine is that makes them"


@pytest.mark.install
@pytest.mark.long  # pip reads the metadata of a hundred packages
@pytest.mark.parametrize(("version", "replaced"), [("2.8.0+cu128", False), ("2.0.0+cu118", True)])
def test_pip_itself_leaves_a_torch_that_is_new_enough(tmp_path: Path, version: str, replaced: bool) -> None:
    machine, plan = images.bare(tmp_path / "env"), tmp_path / "plan.json"
    images.stand_in(machine, "torch", version)
    command = [machine.python, "-m", "pip", "install", "-q", "--dry-run", "--report", str(plan), f"{ROOT}[train,serve]"]
    subprocess.run(command, check=True)
    planned = [package["metadata"]["name"] for package in json.loads(plan.read_text(encoding="utf-8"))["install"]]
    assert ("torch" in planned) is replaced and "trl" in planned


def test_an_old_torchao_is_removed(monkeypatch: Patch) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0" if name == "torchao" else "9")
    monkeypatch.setattr(install, "requirements", lambda extra: [])
    install.ensure("train")
    assert [command[-3:] for command in pip.commands] == [["-y", "-q", "torchao"]]


def test_attached_wheels_are_used_alone_also_with_a_network(kaggle: Path, monkeypatch: Patch) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(install, "requirements", lambda extra: ["no-such-distribution>=3"])
    monkeypatch.setattr(install, "versions", lambda: {"torch": "2.10.0"})
    install.ensure("train")
    offline = ["--no-index", "--only-binary", ":all:", "--find-links", str(kaggle)]
    assert pip.commands[0][-6:] == [*offline, "no-such-distribution>=3"]


def test_where_wheels_are_looked_for(kaggle: Path, monkeypatch: Patch) -> None:
    shutil.copytree(kaggle, kaggle.parent / "zzz")
    with refused("Several folders of wheels are attached", str(kaggle), "zzz", "NBUTILS_SOURCE"):
        install.attached_wheels()
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert install.attached_wheels() is None, "only a platform that attaches inputs is searched"
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    assert install.attached_wheels() == kaggle
    (kaggle / install.MARKER).unlink()
    assert install.attached_wheels() is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / TRL).write_bytes(b"reniart a"), TRL),
        (lambda folder: (folder / TRL).unlink(), TRL),
        (lambda folder: (folder / "torch-99.tar.gz").touch(), "torch-99.tar.gz"),
        (lambda folder: (folder / "index.html").touch(), "index.html"),
        (lambda folder: write_list(folder, "3.7"), "Python 3.7"),
        (lambda folder: (folder / install.MARKER).write_text("{"), install.MARKER),
        (lambda folder: (folder / install.MARKER).write_text("[]"), install.MARKER),
        (lambda folder: (folder / install.MARKER).write_text('{"files": [{"name": "x"}]}'), install.MARKER),
    ],
)
def test_damaged_planted_or_other_wheels_are_named_and_nothing_is_installed(
    kaggle: Path, damage: Callable[[Path], object], problem: str
) -> None:
    damage(kaggle)
    with refused("The attached folder of wheels", problem, f"PYTHON_VERSION={RUNNING}"):
        install.attached_wheels()


def test_a_folder_that_is_not_of_wheels_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        images.WHEELS["build"](tmp_path, "train", images.WHEELS["Target"](), {})
    assert (tmp_path / "thesis.txt").exists()
