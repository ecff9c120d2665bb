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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import images
import pytest

from nbutils import DISTRIBUTION, install
from nbutils.errors import CourseError

ROOT = Path(__file__).resolve().parent.parent
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-0.1.0-py3-none-any.whl"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


class Pip:
    """Stands in for `subprocess.run`: keeps the commands and what they were held to, answers as told."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.commands, self.held = list(errors), [], []

    def __call__(self, command: list[str], **_: object) -> SimpleNamespace:
        self.commands.append(command)
        self.held.append(Path(command[command.index("--constraint") + 1]).read_text().split())
        error = self.errors.pop(0) if self.errors else ""
        return SimpleNamespace(returncode=int(bool(error)), stderr=error)


def use_pip(monkeypatch: pytest.MonkeyPatch, *errors: str) -> Pip:
    pip = Pip(*errors)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An imitated Kaggle; returns the folder of an attached dataset with a list of two wheels, both whole."""
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    for name in ("NBUTILS_PLATFORM", "NBUTILS_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "kaggle/input/datasets/someone/wheels"
    folder.mkdir(parents=True)
    contents = {WHEEL: b"the course", "trl-1.16.0-py3-none-any.whl": b"a trainer"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_list(folder, RUNNING)
    return folder


def write_list(folder: Path, python: str) -> None:
    files = [
        {"name": f.name, "bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in sorted(folder.glob("*.whl"))
    ]
    (folder / install.MARKER).write_text(json.dumps({"python": python, "files": files}))


def test_what_is_installed_is_not_asked_for_again() -> None:
    assert install.unsatisfied(["pytest>=1", "no-such-distribution>=3", "pytest>=9999"]) == [
        "no-such-distribution>=3",
        "pytest>=9999",
    ]


def test_the_extra_names_the_stack_and_this_environment_has_it() -> None:
    wanted = install.requirements("train")
    assert any(text.startswith("trl") for text in wanted) and not any("extra" in text for text in wanted)
    assert install.unsatisfied(wanted) == []


def test_the_platforms_torch_is_pinned_without_its_build_tag() -> None:
    [pin] = [line for line in install.platform_pins() if line.startswith("torch==")]
    assert pin == f"torch=={metadata.version('torch').split('+')[0]}"


def test_torch_cuda_and_numpy_are_the_platforms_own_and_the_course_is_not() -> None:
    own = ("torch", "torchvision", "triton", "numpy", "nvidia-cudnn-cu12", "cuda-toolkit")
    assert all(map(install.is_platforms_own, own))
    assert not any(map(install.is_platforms_own, ("trl", "transformers", "numba", "torchao", "pyarrow")))


def test_every_package_is_held_but_the_wanted_and_the_known_to_be_old() -> None:
    held = [line.split("==")[0] for line in install.least_change(["trl>=99"])]
    assert {"torch", "numpy", "transformers", "huggingface-hub", "peft"} <= set(held)
    assert not {"trl", *install.FREE} & set(held)


def test_pip_is_held_to_the_pins_and_its_failure_tells_both_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, "ERROR: no network")
    with pytest.raises(CourseError, match=r"(?s)could not complete.*no network.*Settings > Internet.*make wheels"):
        install.pip_install(["trl>=1"])
    assert any(line.startswith("torch==") for line in pip.held[0]) and len(pip.commands) == 1


def test_when_holding_everything_is_impossible_only_the_platforms_own_is_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use_pip(monkeypatch, "ERROR: ResolutionImpossible: see")
    install.pip_install(["trl>=1"])
    first, second = ({line.split("==")[0] for line in held} for held in pip.held)
    assert "transformers" in first and "transformers" not in second and "torch" in second
    assert "now only torch" in capsys.readouterr().out


def test_a_package_replaced_under_a_running_kernel_asks_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{"pytest": "8", "pyarrow": "18"}, {"pytest": "9999", "pyarrow": "26"}])
    monkeypatch.setattr(install, "requirements", lambda extra: ["trl>=9999"])
    monkeypatch.setattr(install, "versions", lambda: next(seen))
    monkeypatch.setattr(install, "pip_install", lambda wanted, wheels: None)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    with pytest.raises(CourseError, match=r"(?s)^pytest was replaced.*restart the kernel"):
        install.ensure("train")


def test_a_package_replaced_before_anything_loaded_it_needs_no_restart() -> None:
    install._refuse_stale_modules(
        {"never-loaded": "1", "pytest": "8"}, {"never-loaded": "2", "pytest": "8", "new": "1"}
    )


def test_an_old_torchao_is_removed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0" if name == "torchao" else "1")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    install.remove_blockers()
    assert commands[0][-3:] == ["-y", "-q", "torchao"] and "torchao 0.10.0" in capsys.readouterr().out


def test_attached_wheels_are_used_alone_also_with_a_network(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use_pip(monkeypatch)
    monkeypatch.setattr(install, "requirements", lambda extra: ["no-such-distribution>=3"])
    install.ensure("train")
    words = pip.commands[0]
    offline = ["--no-index", "--only-binary", ":all:", "--find-links", str(kaggle)]
    assert words[-6:] == [*offline, "no-such-distribution>=3"]
    assert f"from the attached {kaggle}" in capsys.readouterr().out


def test_without_attached_wheels_the_registry_is_asked(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kaggle / install.MARKER).unlink()
    assert install.attached_wheels() is None
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    write_list(kaggle, RUNNING)
    assert install.attached_wheels() is None, "only a platform that attaches inputs is searched"


def test_a_wheel_named_in_nbutils_source_brings_its_folder(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    assert install.attached_wheels() == kaggle


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("damage", "reason"), [(cut, "8 of 9 bytes"), (flip, "other content"), (Path.unlink, "missing")]
)
def test_a_damaged_wheel_is_named_and_nothing_is_installed(kaggle: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    damage(kaggle / "trl-1.16.0-py3-none-any.whl")
    with pytest.raises(CourseError, match=rf"trl-1.16.0-py3-none-any.whl \({reason}\)\. Nothing was installed"):
        install.attached_wheels()


@pytest.mark.parametrize("text", ["{", "[]", '{"python": "3.12", "files": [{"name": "x"}]}'])
def test_an_unreadable_list_is_named(kaggle: Path, text: str) -> None:
    (kaggle / install.MARKER).write_text(text)
    with pytest.raises(CourseError, match=rf"is damaged: {install.MARKER}"):
        install.attached_wheels()


def test_wheels_for_another_python_are_passed_over_with_a_line(
    kaggle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_list(kaggle, "3.7")
    assert install.attached_wheels() is None
    told = capsys.readouterr().out
    assert "is for Python 3.7" in told and f"make wheels PYTHON_VERSION={RUNNING}" in told


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            "ERROR: No matching distribution found for pyarrow>=21.0.0 (from datasets)",
            r"does not have pyarrow>=21\.0\.0",
        ),
        ("ERROR: ResolutionImpossible", "does not have versions that fit"),
    ],
)
def test_a_wheel_that_is_not_in_the_folder_is_named_with_the_way_to_build_it(
    monkeypatch: pytest.MonkeyPatch, error: str, named: str
) -> None:
    use_pip(monkeypatch, error, error)
    with pytest.raises(CourseError, match=rf"(?s){named}.*make wheels IMAGE="):
        install.pip_install(["trl>=1"], Path("/wheels"))


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


def test_the_setup_cell_installs_the_attached_wheel_from_its_folder(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [words] = set_up(monkeypatch)
    wheel = kaggle / WHEEL
    assert words[3:] == ["install", "-q", str(wheel), "--no-index", "--only-binary=:all:", "-f", str(kaggle)]


def test_nbutils_source_wins_over_an_attached_wheel(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_SOURCE", "/some/checkout")
    [words] = set_up(monkeypatch)
    assert words[3:] == ["install", "-q", "/some/checkout"]


def test_the_setup_cell_installs_from_no_address_that_nobody_owns(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(kaggle))
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: pytest.fail("nothing may be installed"))
    with pytest.raises(AssertionError, match="NBUTILS_SOURCE"):
        set_up(monkeypatch)


@pytest.mark.parametrize("source", ["nbutils", "--index-url=http://evil/", "a/b\nc/d"])
def test_the_setup_cell_takes_no_bare_name_and_no_option(
    kaggle: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("NBUTILS_SOURCE", source)
    with pytest.raises(AssertionError, match="NBUTILS_SOURCE"):
        set_up(monkeypatch)


def test_the_setup_cell_chooses_between_no_two_wheels(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = kaggle.parent.parent / "a-stranger/zzz"
    other.mkdir(parents=True)
    (other / WHEEL.replace("0.1.0", "9.9.9")).write_bytes(b"evil")
    with pytest.raises(
        AssertionError, match=r"NBUTILS_SOURCE.*a-stranger.*someone|NBUTILS_SOURCE.*someone.*a-stranger"
    ):
        set_up(monkeypatch)
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
    told = f"{caught.value}{capsys.readouterr().out}"
    assert "example.org" in told and "pass-word" not in told and "abc" not in told


def test_between_two_attached_folders_of_wheels_a_person_chooses(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = kaggle.parent / "zzz"
    shutil.copytree(kaggle, other)
    with pytest.raises(CourseError, match=r"(?s)wheels.*zzz.*NBUTILS_SOURCE"):
        install.attached_wheels()
    monkeypatch.setenv("NBUTILS_SOURCE", str(kaggle / WHEEL))
    assert install.attached_wheels() == kaggle


@pytest.mark.parametrize("name", ["torch-99-py3-none-any.whl", "torch-99.tar.gz", "index.html"])
def test_what_is_not_listed_is_named_and_nothing_is_installed(kaggle: Path, name: str) -> None:
    (kaggle / name).write_bytes(b"evil")
    with pytest.raises(CourseError, match=rf"{name}.*not listed"):
        install.attached_wheels()


def test_pip_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def pip(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        given.append(options["env"])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setattr(subprocess, "run", pip)
    install.pip_install(["trl>=1"])
    assert "PATH" in given[0] and "HF_TOKEN" not in given[0]


def test_the_setup_cell_does_nothing_where_the_course_is(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_up(monkeypatch, have_it=True) == []


def test_the_lists_of_the_images_are_plain_facts() -> None:
    colab, kaggle = images.packages("colab"), images.packages("kaggle")
    assert len(colab) > 690 and colab["torch"] == "2.11.0+cu128" and colab["torchao"] == "0.10.0"
    assert kaggle["torch"] == "2.10.0+cu128" and kaggle["transformers"] == "5.0.0" and kaggle["peft"] == colab["peft"]
    assert f"triton=={colab['triton']}" in images.requires("torch", colab["torch"], colab)
    lines = [line for file in images.LISTS["kaggle"] for line in file.read_text().splitlines()]
    assert all("==" in line and not {" ", "@", "#"} & set(line) for line in lines)


def test_a_stand_in_is_a_wheel_of_that_name_and_version(tmp_path: Path) -> None:
    wheel = images.WHEELS["stand_in"](tmp_path, "Some.Name", "1.0+image", ["numpy>=1"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    [found] = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version, found.requires) == ("Some.Name", "1.0+image", ["numpy>=1"])
    assert {str(file) for file in found.files or []} == set(zipfile.ZipFile(wheel).namelist())


def test_stand_ins_and_the_platforms_own_are_never_fetched() -> None:
    listed = {DISTRIBUTION: "0.1.0", "TRL": "1.16.0", "torch": "2.14.0", "rich": "13+image", "nvidia-nvtx-cu12": "12.8"}
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in listed.items()]}
    assert images.WHEELS["_to_fetch"](report) == ["trl==1.16.0"]


def test_wheels_of_older_linux_are_welcome_and_of_newer_are_not() -> None:
    words = images.WHEELS["Target"]("3.12", "manylinux_2_28_x86_64").words()
    assert {"manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(words)
    assert "manylinux_2_29_x86_64" not in words and words[words.index("--python-version") + 1] == "3.12"


def test_a_folder_that_is_not_of_wheels_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="is left as it is"):
        images.WHEELS["build"](tmp_path, "train", images.WHEELS["Target"](), {})
    assert (tmp_path / "thesis.txt").exists()
