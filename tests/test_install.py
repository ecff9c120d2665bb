"""install: only what is missing, the least change, never the platform's torch; wheels only when they are whole."""

import hashlib
import importlib.metadata as metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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

    def __init__(self, monkeypatch: Patch, *errors: str) -> None:
        self.errors = list(errors)  # of the first calls; those after them succeed
        self.commands: list[list[str]] = []
        self.pinned: list[dict[str, str]] = []  # of each call with a file of constraints
        self.env: dict[str, str] = {}
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.env = options.get("env", {})
        if "--constraint" in command:
            file = command[command.index("--constraint") + 1]
            pins = Path(file).read_text().split()
            self.pinned.append(dict(pin.split("==") for pin in pins))
        if self.errors:
            return subprocess.CompletedProcess(command, 1, "", self.errors.pop(0))
        return subprocess.CompletedProcess(command, 0, "", "")


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
    """The list of the wheels in a folder, with their checksums and the Python they are for."""
    wheels = []
    for file in sorted(folder.glob("*.whl")):
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        wheels.append({"name": file.name, "sha256": checksum})
    (folder / install.MARKER).write_text(json.dumps({"python": python, "files": wheels}))


def test_only_what_is_missing_is_asked_for() -> None:
    missing = ["no-such-distribution>=3", "pytest>=9999"]
    assert install.unsatisfied(["pytest>=1", *missing]) == missing


def test_requirements_of_an_extra_are_told_without_its_condition() -> None:
    required = install.requirements("train")
    assert any(requirement.startswith("trl") for requirement in required)
    assert not any("extra" in requirement for requirement in required)


def test_everything_installed_is_pinned_but_the_wanted_and_the_known_to_be_old(monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    pip = Pip(monkeypatch)
    install.pip_install(["trl>=99"])
    [pinned] = pip.pinned
    assert pinned["torch"] == metadata.version("torch").split("+")[0], "a build tag is on no index"
    assert {"numpy", "transformers", "huggingface-hub", "peft"} <= set(pinned)
    assert not {"trl", *install.FREE} & set(pinned)
    assert "PATH" in pip.env
    assert "HF_TOKEN" not in pip.env


@pytest.mark.parametrize("wheels", [None, Path("/wheels")])
def test_when_pinning_everything_is_impossible_only_the_platforms_own_is(
    monkeypatch: Patch, wheels: Path | None
) -> None:
    monkeypatch.setattr(install, "versions", lambda: {"transformers": "5.0", "torch": "2.10.0+cu128", "numpy": "2.3"})
    pip = Pip(monkeypatch, "ERROR: ResolutionImpossible: see")
    install.pip_install(["trl>=1"], wheels)
    first, second = pip.pinned
    assert "transformers" in first
    assert "transformers" not in second
    assert {"torch", "numpy"} <= set(second)


@pytest.mark.parametrize("wheels", [None, Path("/wheels")])
def test_any_other_failure_of_pip_is_told_at_once(monkeypatch: Patch, wheels: Path | None) -> None:
    monkeypatch.setattr(install, "versions", lambda: {"transformers": "5.0", "torch": "2.10.0+cu128", "numpy": "2.3"})
    pip = Pip(monkeypatch, "ERROR: no network")
    with refused(
        "pip could not install the missing packages from", "no network", "Settings > Internet", "make wheels IMAGE="
    ):
        install.pip_install(["trl>=1"], wheels)
    assert len(pip.commands) == 1


def test_a_package_replaced_under_a_running_kernel_asks_for_a_restart(monkeypatch: Patch) -> None:
    before = {"pytest": "8", "never-loaded": "1"}
    after = {"pytest": "9999", "never-loaded": "2", "new": "1"}
    monkeypatch.setattr(install, "versions", Mock(side_effect=[before, after]))
    monkeypatch.setattr(install, "requirements", lambda extra: ["trl>=9999"])
    monkeypatch.setattr(install, "pip_install", lambda required, wheels: None)
    with refused("pytest was replaced"):
        install.ensure("train")


def test_a_torch_that_is_too_old_is_refused_before_pip_touches_anything(monkeypatch: Patch) -> None:
    pip = Pip(monkeypatch)
    real_version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.0.0+cu118" if name == "torch" else real_version(name))
    monkeypatch.setattr(install, "BLOCKER", "pytest>=1")  # as if something installed had to be removed
    with refused("has torch 2.0.0+cu118. Nothing was", "PyTorch 2.8", "更换镜像", "make course"):
        install.ensure("train")
    assert pip.commands == [], "nothing is installed or removed"


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.13.0", "2.9.0.dev20250901", "2.8.0a0+5228986c39.nv25.06"])
def test_a_torch_that_is_new_enough_is_not_asked_for(monkeypatch: Patch, version: str) -> None:
    torch_requirement = f"torch{install.TORCH}"
    assert torch_requirement in install.requirements("train")
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert install.old_torch() == ""
    assert install.unsatisfied([torch_requirement]) == []


def test_wheels_for_a_platform_are_those_its_own_conditions_ask_for(tmp_path: Path) -> None:
    conditions = [
        "liger>=1; platform_machine == 'x86_64'",
        "other; platform_machine == 'aarch64'",
        "trl>=1; extra == 'train'",
        "vllm; extra == 'serve'",
        "click",
    ]
    wheel = images.WHEELS["stand_in"](tmp_path, "course", "1.0", conditions)
    required = images.WHEELS["Target"]().requirements(wheel, "train")
    assert required == ["liger>=1", "trl>=1", "click"], "whatever the machine is that makes them"


@pytest.mark.install
@pytest.mark.long  # pip reads the metadata of a hundred packages
@pytest.mark.parametrize(("version", "replaced"), [("2.8.0+cu128", False), ("2.0.0+cu118", True)])
def test_pip_itself_leaves_a_torch_that_is_new_enough(tmp_path: Path, version: str, replaced: bool) -> None:
    machine = images.bare(tmp_path / "env")
    images.stand_in(machine, "torch", version)
    file = tmp_path / "plan.json"
    course = f"{ROOT}[train,serve]"
    command = [machine.python, "-m", "pip", "install", "-q", "--dry-run", "--report", str(file), course]
    subprocess.run(command, check=True)
    plan = json.loads(file.read_text(encoding="utf-8"))
    installed = [package["metadata"]["name"] for package in plan["install"]]
    assert "trl" in installed
    assert ("torch" in installed) is replaced


def test_an_old_torchao_is_removed(monkeypatch: Patch) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0" if name == "torchao" else "9")
    monkeypatch.setattr(install, "requirements", lambda extra: [])
    install.ensure("train")
    [command] = pip.commands
    assert command[-3:] == ["-y", "-q", "torchao"]


def test_attached_wheels_are_used_alone_also_with_a_network(kaggle: Path, monkeypatch: Patch) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(install, "requirements", lambda extra: ["no-such-distribution>=3"])
    monkeypatch.setattr(install, "versions", lambda: {"torch": "2.10.0"})
    install.ensure("train")
    offline = ["--no-index", "--only-binary", ":all:", "--find-links", str(kaggle)]
    assert pip.commands[0][-6:] == [*offline, "no-such-distribution>=3"]


def test_one_folder_of_wheels_is_taken_and_of_several_none(kaggle: Path) -> None:
    assert install.attached_wheels() == kaggle
    shutil.copytree(kaggle, kaggle.parent / "zzz")
    with refused("Several folders of wheels are attached", str(kaggle), "zzz", "NBUTILS_SOURCE"):
        install.attached_wheels()


def test_wheels_are_looked_for_among_attached_inputs_or_beside_the_source(kaggle: Path, monkeypatch: Patch) -> None:
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert install.attached_wheels() is None, "only a platform that attaches inputs is searched"
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    assert install.attached_wheels() == kaggle
    (kaggle / install.MARKER).unlink()
    assert install.attached_wheels() is None


def assert_wheels_are_refused(problem: str) -> None:
    with refused("The attached folder of wheels", problem, f"PYTHON_VERSION={RUNNING}"):
        install.attached_wheels()


def test_a_wheel_that_is_changed_or_lacking_is_named(kaggle: Path) -> None:
    (kaggle / TRL).write_bytes(b"reniart a")  # of the length it had
    assert_wheels_are_refused(TRL)
    (kaggle / TRL).unlink()
    assert_wheels_are_refused(TRL)


@pytest.mark.parametrize("name", ["torch-99.tar.gz", "index.html"])
def test_a_file_that_is_not_in_the_list_is_named(kaggle: Path, name: str) -> None:
    (kaggle / name).touch()
    assert_wheels_are_refused(name)


def test_wheels_for_another_python_are_named(kaggle: Path) -> None:
    write_list(kaggle, "3.7")
    assert_wheels_are_refused("Python 3.7")


@pytest.mark.parametrize("content", ["{", "[]", '{"files": [{"name": "x"}]}'])
def test_a_damaged_list_of_wheels_is_named(kaggle: Path, content: str) -> None:
    (kaggle / install.MARKER).write_text(content)
    assert_wheels_are_refused(install.MARKER)


def test_a_folder_that_is_not_of_wheels_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        images.WHEELS["build"](tmp_path, "train", images.WHEELS["Target"](), {})
    assert (tmp_path / "thesis.txt").exists()
