"""nbutils.environments: built once under a lock, trusted by its marker and an import check, rebuilt when broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import refused

from nbutils import environments, paths, processes, serving
from nbutils.environments import Recipe, installer

PROBE = 'import json, thing\nprint(json.dumps({"thing": thing.x}))'
PIP_SETTINGS = installer._pip_settings
RECIPE = Recipe("thing", (("thing==1.0",),), (), PROBE, 0.001, "NBUTILS_THING")


def make_wheel(folder: Path) -> None:
    """A package of one module."""
    notes, metadata = "thing-1.0.dist-info", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"thing.py": "x = 1\n", f"{notes}/METADATA": metadata, f"{notes}/WHEEL": tags}
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{notes}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{notes}/RECORD")))


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished environment; pip is configured to use a folder of wheels, and nothing is downloaded."""
    folder = tmp_path_factory.mktemp("template")
    make_wheel(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("UV_CACHE_DIR", str(folder / "cache"))
        for name in ("PYTHON", "PYTHONPATH", "ENV"):
            patch.delenv(f"NBUTILS_THING_{name}", raising=False)
        environments.ensure(RECIPE, folder / "venv")
        settings = installer._pip_settings()
        patch.setattr(installer, "_pip_settings", lambda: settings)  # asking pip takes a second
        yield folder / "venv"


@pytest.fixture
def venv(template: Path, tmp_path: Path) -> Path:
    """A finished environment of a test's own; it still works after it was moved."""
    return Path(shutil.copytree(template, tmp_path / "venv", symlinks=True))


def module_of(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages")) / "thing.py"


def test_it_is_built_once_and_then_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = environments.ensure(RECIPE, tmp_path / "venv")
    assert subprocess.check_output([python, "-c", "import thing; print(thing.x)"], text=True) == "1\n"
    assert "ready after" in capsys.readouterr().out and not (tmp_path / "venv.partial").exists()
    marker = json.loads((tmp_path / "venv/ready.json").read_text(encoding="utf-8"))
    assert marker.items() >= (RECIPE.described | {"versions": {"thing": 1}}).items()
    del marker["built"]
    paths.write_json(tmp_path / "venv/ready.json", marker | {"installed": {}})  # as the version before wrote it
    assert environments.ensure(RECIPE, tmp_path / "venv") == python
    assert capsys.readouterr().out == ""


def cut_marker(venv: Path) -> None:
    (venv / "ready.json").write_text('{"name": "thi', encoding="utf-8")


def begin_build(venv: Path) -> None:
    """What a build that was killed leaves."""
    (venv.with_name("venv.partial") / "bin").mkdir(parents=True)
    shutil.copy(venv / "begun.json", venv.with_name("venv.partial"))
    (venv / "ready.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [cut_marker, begin_build, lambda venv: (venv / "bin/python").unlink(), lambda venv: module_of(venv).unlink()],
)
def test_an_incomplete_or_broken_one_is_rebuilt(venv: Path, damage: Callable[[Path], None]) -> None:
    damage(venv)
    (venv / "leftover").touch()
    environments.ensure(RECIPE, venv)
    assert module_of(venv).exists() and environments.is_ready(venv, RECIPE)
    assert not (venv / "leftover").exists() and not venv.with_name("venv.partial").exists()


def test_one_of_other_versions_is_rebuilt_and_a_link_stays_a_link(venv: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(venv)
    other = replace(RECIPE, remove=("another",))
    assert environments.is_ready(link, RECIPE) and not environments.is_ready(link, other)
    environments.ensure(other, link)
    assert link.is_symlink() and environments.is_ready(venv, other)


@pytest.mark.parametrize("seen_broken", [True, False])
def test_two_processes_build_it_once(
    venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seen_broken: bool
) -> None:
    work = (environments.rebuild, venv, "a crash") if seen_broken else (environments.ensure, tmp_path / "new")
    both = [threading.Thread(target=work[0], args=(RECIPE, *work[1:])) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(30)
    assert capsys.readouterr().out.count("ready after") == 1 and environments.is_ready(Path(work[1]), RECIPE)


def test_a_failed_build_leaves_the_former_one(venv: Path) -> None:
    outdated = replace(RECIPE, steps=(("thing==2.0",),))
    with refused("environments.step_failed", "NBUTILS_THING_PYTHON", name="thing", title="thing==2.0"):
        environments.ensure(outdated, venv)
    assert environments.is_ready(venv, RECIPE) and not environments.is_ready(venv, outdated)
    environments.ensure(RECIPE, venv)


def test_a_probe_that_fails_leaves_nothing_trusted(tmp_path: Path) -> None:
    broken = replace(RECIPE, probe="raise ImportError('libcudart.so.13')")
    with refused("environments.step_failed", "libcudart.so.13", title="first import"):
        environments.ensure(broken, tmp_path / "venv")
    assert not environments.is_ready(tmp_path / "venv", broken)
    with refused("environments.no_cpu_torch"):
        environments.ensure(replace(RECIPE, steps=(("torch==2.13.0+cpu",),)), tmp_path / "venv")


def test_what_must_not_stay_is_removed(tmp_path: Path) -> None:
    probe = "import json\nprint(json.dumps({}))"
    environments.ensure(replace(RECIPE, remove=("thing",), probe=probe), tmp_path / "venv")
    assert not module_of(tmp_path / "venv").exists()


KERNEL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from pathlib import Path
from nbutils import environments
sleep = "import time; time.sleep(60)"
slow = f"import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {sleep!r}])"
slow += "; open(sys.argv[-1], 'w').write(f'{os.getpid()} {child.pid}'); child.wait()"
environments.installer.change = lambda *words: [sys.executable, "-c", slow, words[-1]]
recipe = environments.Recipe("thing", ((sys.argv[2],),), (), "import json", 0.001, "NBUTILS_THING")
environments.ensure(recipe, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_build_ends_with_its_kernel_and_the_next_one_succeeds(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, tmp_path / "venv", pids], stderr=subprocess.DEVNULL)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    kernel.send_signal(number)
    kernel.wait(10)
    until(lambda: all(processes.is_gone(int(pid)) for pid in pids.read_text().split()))
    assert not (tmp_path / "venv").exists()
    environments.ensure(RECIPE, tmp_path / "venv")
    assert environments.is_ready(tmp_path / "venv", RECIPE)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["venv", "venv.partial"])
def test_a_folder_of_somebody_else_is_never_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    for like_ours in ("thesis.txt", "build.log", "pyvenv.cfg", "ready.json"):
        (tmp_path / name / like_ours).touch()
        with refused("environments.not_ours", folder=tmp_path / name):
            environments.ensure(RECIPE, tmp_path / "venv")
    assert (tmp_path / name / "thesis.txt").exists()


def test_neither_this_kernels_nor_another_engines_is_replaced(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("environments.other_recipe", "NBUTILS_THING_ENV", owner="thing", name="other"):
        environments.ensure(replace(RECIPE, name="other"), venv)
    monkeypatch.setattr(sys, "prefix", str(venv))
    with refused("environments.not_ours"):
        environments.ensure(replace(RECIPE, remove=("else",)), venv)
    assert environments.is_ready(venv, RECIPE)


def test_an_interrupted_removal_is_still_recognized_as_ours(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def interrupted(path: Path, **options: bool) -> None:
        if path == venv:
            raise KeyboardInterrupt
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environments.rebuild(RECIPE, venv, "a test")
    assert [path.name for path in venv.iterdir()] == ["begun.json"]
    monkeypatch.setattr(shutil, "rmtree", real)
    environments.ensure(RECIPE, venv)
    assert environments.is_ready(venv, RECIPE)


def test_too_little_disk_stops_it_before_the_first_download(tmp_path: Path) -> None:
    with pytest.raises(environments.CourseError, match="GiB"):
        environments.ensure(replace(RECIPE, needs_gib=1e9), tmp_path / "venv")
    assert not (tmp_path / "venv.partial").exists()


def test_a_given_interpreter_is_checked_and_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, probe="import json, carried_along")
    monkeypatch.setenv("NBUTILS_THING_PYTHON", str(tmp_path / "python"))
    with refused("environments.given_python", missing="json, carried_along"):
        environments.ensure(recipe, tmp_path / "venv")
    monkeypatch.setenv("NBUTILS_THING_PYTHON", sys.executable)
    (tmp_path / "carried_along.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the kernel's own does not count
    with refused("environments.given_python", "NBUTILS_THING_PYTHONPATH", missing="carried_along"):
        environments.ensure(recipe, tmp_path / "venv")
    monkeypatch.setenv("NBUTILS_THING_PYTHONPATH", str(tmp_path))
    assert environments.ensure(recipe, tmp_path / "venv") == Path(sys.executable)
    assert environments.variables("NBUTILS_THING")["PYTHONPATH"] == str(tmp_path)
    assert not (tmp_path / "venv").exists()


def test_where_an_environment_is_kept(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CHECKOUT", tmp_path)
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / ".venv-serve"
    monkeypatch.setattr(paths, "CHECKOUT", None)
    monkeypatch.setenv("NBUTILS_PLATFORM", "local")
    assert environments.place("NBUTILS_THING", "serve") == home / ".scratch" / "venv-serve"
    monkeypatch.setenv("NBUTILS_THING_ENV", str(tmp_path / "else"))
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / "else"


def test_neither_a_server_nor_an_export_sees_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AUTODL_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")
    own = serving.ServingEnvironment(Path(sys.executable), "transformers")
    other = serving.ServingEnvironment(Path("/py"), "vllm")
    for given in (own.variables({"VLLM_API_KEY": "k"}), other.variables({"VLLM_API_KEY": "k"})):
        assert "secret" not in given.values() and given["VLLM_API_KEY"] == "k" and given["PATH"]
    assert "secret" not in environments.variables("EXPORT").values()


# --- uv and pip ------------------------------------------------------------------------------------------------------


def test_where_uv_cannot_be_had_pip_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "find_uv", lambda: None)
    probe = "import json\nprint(json.dumps({}))"
    python = environments.ensure(replace(RECIPE, remove=("thing",), probe=probe), tmp_path / "venv")
    assert subprocess.run([python, "-c", ""]).returncode == 0
    assert "uninstalled thing" in (tmp_path / "venv/build.log").read_text(encoding="utf-8")


@pytest.fixture
def pip_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only settings: a file, and no variable."""
    monkeypatch.setattr(installer, "_pip_settings", PIP_SETTINGS)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "pip.conf"


def test_uv_gets_the_settings_of_pip(pip_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["index-url = http://mirror/simple", "trusted-host = mirror", "extra-index-url =\n  http://a\n  http://b"]
    pip_conf.write_text("\n".join(["[global]", *lines, "find-links = /old"]), encoding="utf-8")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    found = installer.uv_variables()
    assert found["UV_DEFAULT_INDEX"] == "http://mirror/simple" and found["UV_INDEX"] == "http://a http://b"
    assert (found["UV_FIND_LINKS"], found["UV_INSECURE_HOST"]) == ("/one,/two", "mirror")
    assert "UV_TORCH_BACKEND" not in found
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://mine")
    assert installer.uv_variables()["UV_DEFAULT_INDEX"] == "http://mine"


@pytest.mark.parametrize("driver", [True, False])
def test_torch_comes_from_its_cpu_index_where_there_is_no_driver(
    pip_conf: Path, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if driver else None)
    assert installer.uv_variables().get("UV_TORCH_BACKEND") == (None if driver else "cpu")


@pytest.mark.long
def test_the_installer_runs_as_a_script_without_the_course(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bare"], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [tmp_path / "bare/bin/python", "-I", installer.__file__, "thing==1.0"]
    ran = subprocess.run(words, env=env, capture_output=True, text=True)
    assert ran.returncode == 0 and module_of(tmp_path / "bare").exists(), ran.stderr
