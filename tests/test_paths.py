"""errors and paths: messages that help, files and folders that are whole or absent."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from support import refused

from nbutils import paths
from nbutils.errors import CourseError


def test_a_course_error_has_three_parts_and_survives_pickling(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    error = CourseError("paths.locked", folder="runs/x")
    assert str(error).splitlines() == [error.seen, f"  Allowed: {error.allowed}", f"  To do: {error.todo}"]
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.seen, again.allowed, again.todo) == (error.code, error.seen, error.allowed, error.todo)
    code = "from nbutils.errors import CourseError\nraise CourseError('paths.locked', folder='runs/x')"
    InteractiveShell().run_cell(code)  # a notebook shows the message and no traceback
    assert capsys.readouterr().out.strip() == f"[FAIL] {error}"


def test_an_error_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct-horse")
    shown = str(CourseError("paths.overlap", target="https://me:secret@host/x correct-horse", source="sk-" + "a1" * 20))
    assert "host/x" in shown and not any(secret in shown for secret in ("secret@", "correct-horse", "a1a1"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "facts.json"
    paths.write_json(target, {"a": "中"})
    with pytest.raises(TypeError):
        paths.write_json(target, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        paths.write_text(target, "\ud800")
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "中"}
    with pytest.raises(FileNotFoundError):  # a disk that was unmounted: its mount point stays empty
        paths.write_text(tmp_path / "drive/MyDrive/run/facts.json", "{}")
    assert not (tmp_path / "drive").exists()


def write(target: Path, text: str = "x", about: dict | None = None) -> Path:
    with paths.whole_folder(target, about or {}) as folder:
        (folder / "model").write_text(text)
    return target


def test_a_failed_block_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with pytest.raises(RuntimeError), paths.whole_folder(target, {}) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not target.exists() and paths.stamp(target) is None
    write(target, about={"steps": 3})
    assert sorted(file.name for file in target.iterdir()) == ["complete.json", "model"]
    assert paths.stamp(target) == {"steps": 3}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model").write_text(""),
        lambda folder: (folder / "model").unlink(),
        lambda folder: (folder / paths.STAMP).write_text('{"about"'),
    ],
)
def test_a_damaged_folder_has_no_stamp(damage: Callable[[Path], object], tmp_path: Path) -> None:
    damage(write(tmp_path / "merged"))
    assert paths.stamp(tmp_path / "merged") is None


@pytest.mark.parametrize("name", ["thesis.txt", ".bashrc", ".ssh/id", "a/.hidden", "empty/"])
@pytest.mark.parametrize("ours", [True, False])
def test_files_of_somebody_else_are_never_replaced(name: str, ours: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if ours:
        write(write(target, "first"), "second")  # our own is replaced
    place = target / name
    (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
    if not name.endswith("/"):
        place.write_text("mine")
    with refused("paths.foreign_files", folder=target), paths.whole_folder(target, {}):
        pytest.fail("nothing may be begun")
    assert place.exists() and (not ours or paths.stamp(target) == {})


def test_links_are_refused_and_not_followed(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "years").write_text("of work")
    (tmp_path / "link").symlink_to(thesis)
    paths.partial_of(tmp_path / "merged").symlink_to(thesis)  # planted where the half-written folder would be
    for name, resume in (("link", False), ("merged", False), ("merged", True)):
        with refused("paths.not_a_folder"), paths.whole_folder(tmp_path / name, {}, resume):
            pytest.fail("nothing may be begun")
    (write(tmp_path / "ours") / "link").symlink_to(tmp_path / "gone")
    with refused("paths.foreign_files", names="link"), paths.whole_folder(tmp_path / "ours", {}):
        pytest.fail("nothing may be begun")
    assert (thesis / "years").read_text() == "of work"


def test_two_processes_do_not_write_the_same_folder(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with paths.whole_folder(target, {}, resume=True) as folder:
        (folder / "model").write_text("x")
        with refused("paths.locked"), paths.whole_folder(target, {}):
            pytest.fail("nothing may be begun")
        assert (folder / "model").exists()
    assert paths.stamp(target) == {}


def test_a_disk_that_loses_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if target == tmp_path / "adapter":
            (target / "model").unlink()

    monkeypatch.setattr(os, "replace", replace)
    with refused("paths.disk_lost_files"):
        write(tmp_path / "adapter")


def test_a_result_lies_apart_from_what_it_is_made_of(tmp_path: Path) -> None:
    paths.require_apart(tmp_path / "out", tmp_path / "base")
    for out in (tmp_path / "base", tmp_path, tmp_path / "base" / "out", tmp_path / "base" / ".." / "base"):
        with refused("paths.overlap"):
            paths.require_apart(out, tmp_path / "base")


def test_folders_are_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = paths.make_folder(tmp_path / "runs/mine", "this run")
    assert {place.stat().st_mode & 0o077 for place in (made, made.parent)} == {0}
    (tmp_path / "file").touch()
    with refused("paths.not_writable", purpose="runs"):
        paths.make_folder(tmp_path / "file/runs", "runs")
    tmp_path.chmod(0o1777)  # as /tmp
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with refused("paths.other_owner", folder=tmp_path / "runs"):
        paths.make_folder(tmp_path / "runs/venv-serve", "an environment")
