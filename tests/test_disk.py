"""disk: too little room is said before the work, and what exactly is short."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest
import simulate

from nbutils import disk
from nbutils.errors import CourseError
from nbutils.paths import GIB

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/kaggle/working of an imitated Kaggle, on a disk with 100 GiB free."""
    root = simulate.kaggle(tmp_path).root
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(root))
    monkeypatch.setenv("NBUTILS_PLATFORM", "kaggle")
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(0, 0, 100 * GIB))
    return root / "kaggle/working"


def sparse(file: Path, size: float) -> None:
    """A file of that size which takes no room."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as handle:
        handle.truncate(int(size))


def test_room_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert disk.nearest(tmp_path / "not/there") == tmp_path
    assert disk.free_gib(tmp_path / "not/there") == pytest.approx(disk.free_gib(tmp_path), abs=1)


def test_what_kaggle_saves_is_20_gb_whatever_the_disk_holds(kaggle: Path) -> None:
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(20e9 / GIB)
    sparse(kaggle / "runs/old/merged/model.safetensors", 15e9)
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(5e9 / GIB)
    assert disk.free_gib(kaggle.parent / "temp") == 100, "intermediate files are not counted"
    sparse(kaggle / "more", 15e9)
    assert disk.free_gib(kaggle) == 0


def test_a_disk_smaller_than_kaggles_20_gb_counts(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(0, 0, 2 * GIB))
    assert disk.free_gib(kaggle) == 2
    with pytest.raises(CourseError, match=r"2\.0 GiB are free there"):
        disk.require_disk(kaggle, 3, "the merge")


def test_a_full_kaggle_output_names_the_folder_for_big_files(kaggle: Path) -> None:
    sparse(kaggle / "model", 15e9)
    disk.require_disk(kaggle, 4, "the merge")
    with pytest.raises(CourseError, match=r"the merge needs 6\.0 GiB .* 4\.7 GiB are left of the 20 GB") as caught:
        disk.require_disk(kaggle, 6, "the merge")
    assert "/kaggle/temp" in caught.value.todo


def test_stray_kaggle_folders_elsewhere_have_no_20_gb_rule(kaggle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_PLATFORM", "colab")
    assert disk.free_gib(kaggle) == 100


def inodes(monkeypatch: pytest.MonkeyPatch, files: int, left: int) -> None:
    seen = os.statvfs("/")
    fields = [*seen[:5], files, left, left, *seen[8:]]
    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result(fields))


def test_a_disk_that_takes_no_more_files_is_told_apart_from_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inodes(monkeypatch, files=200_000, left=12)
    assert disk.free_inodes(tmp_path / "runs") == 12
    with pytest.raises(CourseError, match=r"the run needs files in .* only 12 more can be made") as caught:
        disk.require_disk(tmp_path, 0.001, "the run")
    assert "200,000" in caught.value.allowed and "small files" in caught.value.todo


def test_a_file_system_that_does_not_count_files_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inodes(monkeypatch, files=0, left=0)
    assert disk.free_inodes(tmp_path) is None
    disk.require_disk(tmp_path, 0.001, "the run")


def test_a_file_that_vanishes_while_counting_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(tmp_path / "a/model", GIB)
    (tmp_path / "gone").symlink_to("nowhere")
    assert disk.folder_gib(tmp_path) == pytest.approx(1, abs=0.001)
    monkeypatch.setattr(Path, "lstat", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert disk.folder_gib(tmp_path) == 0
