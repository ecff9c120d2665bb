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
