"""install: only what is missing, the least change, never the platform's torch; wheels only when they are whole."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import images
import pytest
from support import refused

from nbutils import DISTRIBUTION, install

ROOT = Path(__file__).resolve().parent.parent
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-0.1.0-py3-none-any.whl"
TRL = "trl-1.16.0-py3-none-any.whl"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


class Pip:
    """Stands in for `subprocess.run`: keeps the commands and the pins they were given, fails as told."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.commands, self.pinned, self.env = list(errors), [], [], {}

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.env = options.get("env", {})
        if "--constraint" in command:
            lines = Path(command[command.index("--constraint") + 1]).read_text().split()
            self.pinned.append(dict(line.split("==") for line in lines))
        error = self.errors.pop(0) if self.errors else ""
        return subprocess.CompletedProcess(command, int(bool(error)), "", error)


def use_pip(monkeypatch: pytest.MonkeyPatch, *errors: str) -> Pip:
    pip = Pip(*errors)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    files = [
        {"name": f.name, "bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in sorted(folder.glob("*.whl"))
    ]
    (folder / install.MARKER).write_text(json.dumps({"python": python, "files": files}))


# --- what is installed, and what stays -------------------------------------------------------------------------------


def test_only_what_is_missing_is_asked_for() -> None:
    missing = ["no-such-distribution>=3", "pytest>=9999"]
    assert install.unsatisfied(["pytest>=1", *missing]) == missing
    wanted = install.requirements("train")
    assert any(text.startswith("trl") for text in wanted) and not any("extra" in text for text in wanted)


def test_torch_cuda_and_numpy_are_the_platforms_own() -> None:
    own = ("torch", "torchvision", "triton", "numpy", "nvidia-cudnn-cu12", "cuda-toolkit")
    assert all(map(install.is_platforms_own, own))
    assert not any(map(install.is_platforms_own, ("trl", "transformers", "numba", "torchao", "pyarrow")))


def test_everything_installed_is_pinned_but_the_wanted_and_the_known_to_be_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    pip = use_pip(monkeypatch)
    install.pip_install(["trl>=99"])
    [pinned] = pip.pinned
    assert pinned["torch"] == metadata.version("torch").split("+")[0], "a build tag is on no index"
    assert {"numpy", "transformers", "huggingface-hub", "peft"} <= set(pinned)
    assert not {"trl", *install.FREE} & set(pinned)
    assert "PATH" in pip.env and "HF_TOKEN" not in pip.env


def test_when_pinning_everything_is_impossible_only_the_platforms_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, "ERROR: ResolutionImpossible: see")
    install.pip_install(["trl>=1"])
    first, second = pip.pinned
    assert "transformers" in first and "transformers" not in second and "torch" in second


def test_a_failure_shows_both_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, "ERROR: no network")
    with refused("install.pip_failed", "no network", "Settings > Internet", "make wheels"):
        install.pip_install(["trl>=1"])
    assert len(pip.commands) == 1


def test_a_package_replaced_under_a_running_kernel_asks_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{"pytest": "8", "never-loaded": "1"}, {"pytest": "9999", "never-loaded": "2", "new": "1"}]
    monkeypatch.setattr(install, "requirements", lambda extra: ["trl>=9999"])
    monkeypatch.setattr(install, "pip_install", lambda wanted, wheels: None)
    for after, replaced in ((states[1], True), (states[0] | {"never-loaded": "2"}, False)):
        seen = iter([states[0], after])
        monkeypatch.setattr(install, "versions", lambda seen=seen: next(seen))
        if replaced:
            with refused("install.restart_kernel", packages="pytest"):
                install.ensure("train")
        else:
            install.ensure("train")


def test_an_old_torchao_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch)
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0" if name == "torchao" else "1")
    install.remove_blockers()
    assert [command[-3:] for command in pip.commands] == [["-y", "-q", "torchao"]]


# --- attached wheels -------------------------------------------------------------------------------------------------


def test_attached_wheels_are_used_alone_also_with_a_network(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch)
    monkeypatch.setattr(install, "requirements", lambda extra: ["no-such-distribution>=3"])
    install.ensure("train")
    offline = ["--no-index", "--only-binary", ":all:", "--find-links", str(kaggle)]
    assert pip.commands[0][-6:] == [*offline, "no-such-distribution>=3"]


def test_where_wheels_are_looked_for(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.attached_wheels() == kaggle
    shutil.copytree(kaggle, kaggle.parent / "zzz")
    with refused("install.several_folders", str(kaggle), "zzz", "NBUTILS_SOURCE"):
        install.attached_wheels()
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert install.attached_wheels() is None, "only a platform that attaches inputs is searched"
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    assert install.attached_wheels() == kaggle
    (kaggle / install.MARKER).unlink()
    assert install.attached_wheels() is None


def test_wheels_for_another_python_are_passed_over(kaggle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_list(kaggle, "3.7")
    assert install.attached_wheels() is None
    assert f"make wheels PYTHON_VERSION={RUNNING}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / TRL).write_bytes(b"a traine"), f"{TRL} (other content)"),
        (lambda folder: (folder / TRL).write_bytes(b"reniart a"), f"{TRL} (other content)"),
        (lambda folder: (folder / TRL).unlink(), f"{TRL} (missing)"),
        (lambda folder: (folder / "torch-99-py3-none-any.whl").touch(), "torch-99-py3-none-any.whl (not listed)"),
        (lambda folder: (folder / "torch-99.tar.gz").touch(), "torch-99.tar.gz (not listed)"),
        (lambda folder: (folder / "index.html").touch(), "index.html (not listed)"),
        (lambda folder: (folder / install.MARKER).write_text("{"), f"{install.MARKER} (JSONDecodeError)"),
        (lambda folder: (folder / install.MARKER).write_text("[]"), f"{install.MARKER} (TypeError)"),
        (
            lambda folder: (folder / install.MARKER).write_text('{"python": "3.12", "files": [{"name": "x"}]}'),
            f"{install.MARKER} (KeyError)",
        ),
    ],
)
def test_damaged_or_planted_wheels_are_named_and_nothing_is_installed(
    kaggle: Path, damage: Callable[[Path], object], problem: str
) -> None:
    damage(kaggle)
    with refused("install.wheels_damaged", problems=problem):
        install.attached_wheels()


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        ("ERROR: No matching distribution found for pyarrow>=21.0.0 (from datasets)", "pyarrow>=21.0.0"),
        ("ERROR: ResolutionImpossible", "versions that fit beside the packages of this Python"),
    ],
)
def test_a_wheel_that_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch, error: str, lacks: str) -> None:
    use_pip(monkeypatch, error, error)
    with refused("install.wheels_incomplete", "make wheels IMAGE=", lacks=lacks):
        install.pip_install(["trl>=1"], Path("/wheels"))


# --- the setup cell --------------------------------------------------------------------------------------------------


def set_up(monkeypatch: pytest.MonkeyPatch, have_it: bool = False, failure: str = "") -> list[list[str]]:
    """Execute the setup cell of a real notebook; the commands it would run."""
    cells = json.loads((ROOT / "notebooks/03_qlora.ipynb").read_text(encoding="utf-8"))["cells"]
    [text] = ["".join(cell["source"]) for cell in cells if "setup" in cell["metadata"].get("tags", [])]
    commands: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if have_it else None)

    def pip(words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(words)
        return subprocess.CompletedProcess(words, int(bool(failure)), b"", failure.encode())

    monkeypatch.setattr(subprocess, "run", pip)
    exec(compile(text, "setup cell", "exec"), {})
    return commands


def test_the_setup_cell_installs_the_attached_wheel_or_the_source(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set_up(monkeypatch, have_it=True) == []
    [words] = set_up(monkeypatch)
    wheel = str(kaggle / WHEEL)
    assert words[3:] == ["install", "-q", wheel, "--no-index", "--only-binary=:all:", "-f", str(kaggle)]
    monkeypatch.setenv("NBUTILS_SOURCE", "/some/checkout")
    [words] = set_up(monkeypatch)
    assert words[3:] == ["install", "-q", "/some/checkout"]


@pytest.mark.parametrize("source", ["", "nbutils", "--index-url=http://evil/", "a/b\nc/d"])
def test_the_setup_cell_takes_no_bare_name_no_option_and_no_placeholder(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("NBUTILS_SOURCE", source)
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(kaggle))
    with pytest.raises(AssertionError, match="NBUTILS_SOURCE"):
        set_up(monkeypatch)


def test_the_setup_cell_chooses_between_no_two_wheels(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = kaggle.parent.parent / "a-stranger/zzz"
    other.mkdir(parents=True)
    (other / WHEEL.replace("0.1.0", "9.9.9")).write_bytes(b"evil")
    with pytest.raises(AssertionError, match=r"NBUTILS_SOURCE") as caught:
        set_up(monkeypatch)
    assert "a-stranger" in str(caught.value) and "someone" in str(caught.value)
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    [words] = set_up(monkeypatch)
    assert words[5] == str(kaggle / WHEEL)


def test_a_source_that_fails_shows_no_password(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "git+https://me:pass-word@example.org/course?token=abc"
    monkeypatch.setenv("NBUTILS_SOURCE", source)
    with pytest.raises(AssertionError) as caught:
        set_up(monkeypatch, failure=f"fatal: Authentication failed for '{source}'")
    shown = f"{caught.value}{capsys.readouterr().out}"
    assert "example.org" in shown and "pass-word" not in shown and "abc" not in shown


# --- building wheels -------------------------------------------------------------------------------------------------


def test_a_stand_in_is_a_wheel_of_that_name_and_version(tmp_path: Path) -> None:
    wheel = images.WHEELS["stand_in"](tmp_path, "Some.Name", "1.0+image", ["numpy>=1"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    [found] = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version, found.requires) == ("Some.Name", "1.0+image", ["numpy>=1"])
    assert {str(file) for file in found.files or []} == set(zipfile.ZipFile(wheel).namelist())


def test_what_is_fetched_and_for_which_machines() -> None:
    listed = {DISTRIBUTION: "0.1.0", "TRL": "1.16.0", "torch": "2.14.0", "rich": "13+image", "nvidia-nvtx-cu12": "12.8"}
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in listed.items()]}
    assert images.WHEELS["_to_fetch"](report) == ["trl==1.16.0"]
    words = images.WHEELS["Target"]("3.12", "manylinux_2_28_x86_64").words()
    assert {"manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(words)
    assert "manylinux_2_29_x86_64" not in words and words[words.index("--python-version") + 1] == "3.12"


def test_a_folder_that_is_not_of_wheels_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        images.WHEELS["build"](tmp_path, "train", images.WHEELS["Target"](), {})
    assert (tmp_path / "thesis.txt").exists()
