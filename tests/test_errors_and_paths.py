"""errors and paths: messages that help, files that are whole or absent."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from nbutils import disk, paths
from nbutils.errors import CourseError


def test_a_course_error_says_what_was_seen_what_is_allowed_and_what_to_do() -> None:
    text = str(CourseError("saw X.", "A or B", "write A"))
    assert text.splitlines() == ["saw X.", "  Allowed: A or B", "  To do: write A"]


def test_a_course_error_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(CourseError("a", "b", "c")))
    assert (again.seen, again.allowed, again.todo) == ("a", "b", "c")


def test_a_notebook_shows_the_message_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from nbutils.errors import CourseError\nraise CourseError('saw X.', 'A or B', 'write A')")
    shown = capsys.readouterr().out
    assert shown.strip().splitlines() == ["[FAIL] saw X.", "  Allowed: A or B", "  To do: write A"]


def test_the_course_folders_are_found() -> None:
    assert (paths.CONFIGS / "tiny.yaml").is_file()
    assert (paths.NOTEBOOKS / "03_qlora.py").is_file()
    assert (paths.TINY_MODEL / "config.json").is_file()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "facts.json"
    paths.write_json(target, {"a": "中"})
    with pytest.raises(TypeError):
        paths.write_json(target, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        paths.write_text(target, "\ud800")
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "中"}


def test_too_little_disk_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"the merge needs 9999999\.0 GiB .* GiB are free") as caught:
        disk.require_disk(tmp_path / "not" / "there" / "yet", 9_999_999, "the merge")
    assert "NBUTILS_HOME" in str(caught.value)


def test_a_failed_block_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with pytest.raises(RuntimeError), paths.whole_folder(target, {}) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not target.exists() and paths.stamp(target) is None
    with paths.whole_folder(target, {"steps": 3}) as folder:
        (folder / "model").write_text("x")
    assert sorted(file.name for file in target.iterdir()) == ["complete.json", "model"]
    assert paths.stamp(target) == {"steps": 3}


def test_a_file_that_was_cut_short_or_lost_voids_the_stamp(tmp_path: Path) -> None:
    for damage in (lambda file: file.write_text("x"), Path.unlink):
        with paths.whole_folder(tmp_path / "merged", {}) as folder:
            (folder / "model").write_text("whole")
        damage(tmp_path / "merged/model")
        assert paths.stamp(tmp_path / "merged") is None


def test_files_of_somebody_else_are_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    with paths.whole_folder(target, {}) as folder:
        (folder / "model").write_text("first")
    with paths.whole_folder(target, {}) as folder:  # our own is replaced
        (folder / "model").write_text("second")
    (target / "thesis.txt").write_text("years of work")
    assert paths.stamp(target) == {}  # it is still whole
    for made in (target, tmp_path):  # one of ours with a stranger in it, and a folder that never was ours
        with pytest.raises(CourseError, match="were not made here"), paths.whole_folder(made, {}):
            raise AssertionError("nothing may be begun")
    assert (target / "thesis.txt").read_text() == "years of work" and (target / "model").read_text() == "second"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(CourseError, match="no plain folder"), paths.whole_folder(tmp_path / "link", {}):
        raise AssertionError("nothing may be begun")


@pytest.mark.parametrize("name", [".bashrc", ".ssh/id", ".git", "a/.hidden", "empty"])
def test_a_folder_with_anything_in_it_is_not_taken_for_an_empty_one(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    if name in (".git", "empty"):
        (home / name).mkdir(parents=True)
    else:
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("mine")
    with pytest.raises(CourseError, match="were not made here"), paths.whole_folder(home, {}):
        raise AssertionError("nothing may be begun")
    assert (home / name).exists()


def test_links_in_a_folder_of_ours_are_not_lost(tmp_path: Path) -> None:
    with paths.whole_folder(tmp_path / "merged", {}) as folder:
        (folder / "model").write_text("first")
    (tmp_path / "merged/link").symlink_to(tmp_path / "gone")
    with pytest.raises(CourseError, match="link"), paths.whole_folder(tmp_path / "merged", {}):
        raise AssertionError("nothing may be begun")


def test_a_planted_link_in_the_place_of_the_half_written_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/years").write_text("of work")
    paths.partial_of(tmp_path / "merged").symlink_to(tmp_path / "thesis")
    for resume in (False, True):
        with pytest.raises(CourseError, match="is a link"), paths.whole_folder(tmp_path / "merged", {}, resume):
            raise AssertionError("nothing may be begun")
    assert (tmp_path / "thesis/years").read_text() == "of work"


def test_two_processes_do_not_write_the_same_folder(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with paths.whole_folder(target, {}, resume=True) as folder:
        (folder / "model").write_text("x")
        with pytest.raises(CourseError, match="another process is writing"), paths.whole_folder(target, {}):
            raise AssertionError("nothing may be begun")
        assert (folder / "model").exists()
    assert paths.stamp(target) == {}


def test_a_result_lies_apart_from_what_it_is_made_of(tmp_path: Path) -> None:
    paths.require_apart(tmp_path / "out", tmp_path / "base")
    for out in (tmp_path / "base", tmp_path, tmp_path / "base" / "out", tmp_path / "base" / ".." / "base"):
        with pytest.raises(CourseError, match="is needed to make it"):
            paths.require_apart(out, tmp_path / "base")


def test_half_a_stamp_is_no_stamp(tmp_path: Path) -> None:
    (tmp_path / "complete.json").write_text('{"steps"')
    assert paths.stamp(tmp_path) is None


def test_a_folder_that_a_disk_loses_on_the_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if target == tmp_path / "adapter":
            (target / "weights").unlink()

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CourseError, match="lost a part"), paths.whole_folder(tmp_path / "adapter", {}) as folder:
        (folder / "weights").write_text("w")


def test_no_folder_is_made_where_a_disk_has_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        paths.write_text(tmp_path / "drive/MyDrive/run/facts.json", "{}")
    assert not list(tmp_path.iterdir())


def test_new_folders_are_for_this_user_alone(tmp_path: Path) -> None:
    made = paths.make_folder(tmp_path / "runs/mine", "this run")
    assert {place.stat().st_mode & 0o077 for place in (made, made.parent)} == {0}


def test_a_folder_somebody_else_made_in_a_public_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").mkdir()
    paths.require_own(tmp_path / "theirs/venv-serve")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(CourseError, match="belongs to another user"):
        paths.make_folder(tmp_path / "theirs/venv-serve", "an environment")
