"""nbutils.environments: built once under a lock, trusted by its marker, rebuilt when incomplete or broken."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import images
import pytest
from support import refused, wait_for

from nbutils import environments, files, processes
from nbutils.environments import EnvironmentSpec, installer

UV_VARIABLES = installer.uv_variables
SPEC = EnvironmentSpec("thing", [["thing==1.0"]], [], "json", 0.001, "NBUTILS_THING")
pytestmark = pytest.mark.install


@pytest.fixture(scope="module", autouse=True)
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """pip is configured to use a folder of wheels, and nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheels")
    images.WHEELS["stand_in"](folder, "thing", "1.0", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_NO_INDEX", "1")
        for name in ("PYTHON", "ENV"):
            patch.delenv(f"NBUTILS_THING_{name}", raising=False)
        variables = installer.uv_variables()
        patch.setattr(installer, "uv_variables", lambda: variables)  # asking pip takes a second
        yield


def installed(venv: Path) -> bool:
    return bool([*venv.glob("lib/python*/site-packages/thing-1.0.dist-info")])


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A finished environment of a test's own."""
    environments.ensure(SPEC, tmp_path / "venv")
    return tmp_path / "venv"


def test_it_is_built_once_and_then_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "venv"
    with ThreadPoolExecutor(2) as both:
        python, same = both.map(environments.ensure, [SPEC] * 2, [folder] * 2)
    assert python == same and capsys.readouterr().out.count("is ready") == 1
    assert files.read_json(folder / "ready.json") == SPEC.described and not (folder / "uv-cache").exists()
    files.write_json(folder / "ready.json", SPEC.described | {"versions": {}})  # as former versions wrote it
    assert environments.ensure(SPEC, folder) == python and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "damage",
    [lambda venv: (venv / "ready.json").write_text('{"name": "thi', encoding="utf-8"),
     lambda venv: (venv / "bin/python").unlink(),
     lambda venv: [path.unlink() for path in venv.iterdir() if path.is_file() and path.name != "begun.json"]],
)  # fmt: skip
def test_an_incomplete_one_is_built_anew_and_a_link_stays_a_link(venv: Path, damage: Callable[[Path], object]) -> None:
    (link := venv.with_name("link")).symlink_to(venv)
    damage(venv)
    (venv / "leftover").touch()
    environments.ensure(SPEC, link)
    assert link.is_symlink() and installed(venv) and environments.is_ready(venv, SPEC)
    assert not (venv / "leftover").exists()


def test_a_build_that_fails_leaves_nothing_trusted(venv: Path) -> None:
    outdated = replace(SPEC, steps=[["thing==2.0"]])
    with refused("Building the thing environment failed", "thing==2.0`:", "NBUTILS_THING_PYTHON"):
        environments.ensure(outdated, venv)
    assert not environments.is_ready(venv, SPEC)
    broken = replace(SPEC, imports="not_there")
    with refused("bin/python -c ", "No module named 'not_there'"):
        environments.ensure(broken, venv)
    assert not environments.is_ready(venv, broken)
    environments.ensure(replace(SPEC, remove=["thing"]), venv)
    assert not installed(venv), "what must not stay is removed"


KERNEL = """
import pathlib, sys
from nbutils import environments
slow = "import os, sys, time; open(sys.argv[-1], 'w').write(str(os.getpgrp())); time.sleep(60)"
environments.installer.new_environment = lambda folder: [sys.executable, "-c", slow, sys.argv[2]]
spec = environments.EnvironmentSpec("thing", [], [], "json", 0.001, "NBUTILS_THING")
environments.ensure(spec, pathlib.Path(sys.argv[1]))
"""


def test_a_build_ends_with_its_kernel_and_the_next_one_succeeds(tmp_path: Path) -> None:
    group = tmp_path / "group"
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, tmp_path / "venv", group], stderr=subprocess.DEVNULL)
    wait_for(lambda: group.exists() and group.read_text(), 20)
    kernel.kill()
    kernel.wait(10)
    wait_for(lambda: not processes.members(int(group.read_text())), 20)
    environments.ensure(SPEC, tmp_path / "venv")
    assert environments.is_ready(tmp_path / "venv", SPEC)


def test_a_folder_of_somebody_else_is_never_emptied(venv: Path, tmp_path: Path) -> None:
    with refused("was not made for the other environment", "NBUTILS_THING_ENV"):
        environments.ensure(replace(SPEC, name="other"), venv)
    assert environments.is_ready(venv, SPEC)
    (folder := tmp_path / "theirs").mkdir()
    for like_ours in ("thesis.txt", "build.log", "pyvenv.cfg", "ready.json", "begun.json"):
        (folder / like_ours).touch()
        with refused(f"{folder} is not"):
            environments.ensure(SPEC, folder)
    assert (folder / "thesis.txt").exists()
    with refused("Not enough disk space in"):
        environments.ensure(replace(SPEC, needs_gib=1e9), tmp_path / "new")


def test_where_an_environment_is_kept(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / ".venv-serve"
    monkeypatch.setattr(files, "CHECKOUT", None)
    monkeypatch.setenv("NBUTILS_PLATFORM", "local")
    assert environments.place("NBUTILS_THING", "serve") == home / ".scratch" / "venv-serve"
    monkeypatch.setenv("NBUTILS_THING_ENV", str(tmp_path / "else"))
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / "else"
    monkeypatch.setenv("NBUTILS_THING_PYTHON", "/their/python")
    assert environments.ensure(SPEC, tmp_path / "else") == Path("/their/python")
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert "PYTHONPATH" not in environments.variables({})


def test_uv_gets_the_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(pip_conf := tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert UV_VARIABLES()["UV_TORCH_BACKEND"] == "cpu", "no driver, no other source of torch"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "UV_TORCH_BACKEND" not in UV_VARIABLES()
    lines = ["index-url = http://mirror/simple", "trusted-host = mirror", "extra-index-url =\n  http://a\n  http://b"]
    pip_conf.write_text("\n".join(["[global]", *lines, "find-links = /old"]), encoding="utf-8")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    variables = UV_VARIABLES()
    assert variables["UV_DEFAULT_INDEX"] == "http://mirror/simple" and variables["UV_INDEX"] == "http://a http://b"
    assert (variables["UV_FIND_LINKS"], variables["UV_INSECURE_HOST"]) == ("/one,/two", "mirror")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://mine")
    assert UV_VARIABLES()["UV_DEFAULT_INDEX"] == "http://mine"
