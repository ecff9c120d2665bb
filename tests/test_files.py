"""errors and paths: messages that help, files and folders that are whole or absent."""

import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import refused

from nbutils import files
from nbutils.errors import CourseError


def test_a_course_error_has_three_parts_survives_pickling_and_shows_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("MY_TOKEN", "correct-horse")
    error = CourseError("https://me:pass@host/x correct-horse", todo="sk-" + "a1" * 20, allowed="one of these")
    assert str(error).splitlines() == [error.seen, f"  Allowed: {error.allowed}", f"  To do: {error.todo}"]
    assert "host/x" in str(error) and not any(secret in str(error) for secret in ("pass@", "correct-horse", "a1a1"))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    InteractiveShell().run_cell("from nbutils.errors import CourseError\nraise CourseError('seen', todo='do')")
    assert capsys.readouterr().out.strip() == f"[FAIL] {CourseError('seen', todo='do')}"  # no traceback


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "facts.json"
    files.write_json(target, {"a": "中"})
    with pytest.raises(UnicodeEncodeError):
        files.write_text(target, "\ud800")
    assert files.read_json(target) == {"a": "中"}
    with pytest.raises(FileNotFoundError):  # a disk that was unmounted: its mount point stays empty
        files.write_text(tmp_path / "drive/MyDrive/run/facts.json", "{}")
    assert not (tmp_path / "drive").exists()


def write(target: Path, text: str = "x", about: dict | None = None) -> Path:
    with files.complete_folder(target, about or {}) as folder:
        (folder / "model").write_text(text)
    return target


def test_a_failed_block_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with pytest.raises(RuntimeError), files.complete_folder(target, {}) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not target.exists() and files.stamp(target) is None
    write(write(target, "first"), "second", {"steps": 3})  # our own is replaced
    assert sorted(file.name for file in target.iterdir()) == ["complete.json", "model"]
    assert files.stamp(target) == {"steps": 3}


def test_a_damaged_folder_has_no_stamp(tmp_path: Path) -> None:
    for name, text in (("model", ""), ("model", None), (files.STAMP, '{"about"')):
        place = write(tmp_path / "merged") / name
        place.unlink() if text is None else place.write_text(text)
        assert files.stamp(tmp_path / "merged") is None
        shutil.rmtree(tmp_path / "merged")


@pytest.mark.parametrize("name", ["thesis.txt", ".ssh/id"])
@pytest.mark.parametrize("ours", [True, False])
def test_files_of_somebody_else_are_never_replaced(name: str, ours: bool, tmp_path: Path) -> None:
    place = (write(tmp_path / "target") if ours else tmp_path / "target") / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine")
    with refused("has files that were not made here"), files.complete_folder(tmp_path / "target", {}):
        pytest.fail("nothing may be begun")
    assert place.exists()


def test_links_are_refused_and_not_followed(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "years").write_text("of work")
    (tmp_path / "link").symlink_to(thesis)
    files.partial_of(tmp_path / "merged").symlink_to(thesis)  # planted where the half-written folder would be
    for name in ("link", "merged"):
        with refused("is a link or a file, and a folder"), files.complete_folder(tmp_path / name, {}):
            pytest.fail("nothing may be begun")
    (write(tmp_path / "ours") / "link").symlink_to(thesis)
    with refused("made here (link)."), files.complete_folder(tmp_path / "ours", {}):
        pytest.fail("nothing may be begun")
    assert (thesis / "years").read_text() == "of work"


def test_two_processes_do_not_write_the_same_folder(tmp_path: Path) -> None:
    with files.complete_folder(tmp_path / "merged", {}) as folder:
        (folder / "model").write_text("x")
        with refused("Another process is writing"), files.complete_folder(tmp_path / "merged", {}):
            pytest.fail("nothing may be begun")
        assert (folder / "model").exists()


def test_a_planted_partial_is_neither_written_through_nor_taken(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.write_text("years")
    (tmp_path / f".facts.json.{os.getpid()}.partial").symlink_to(thesis)
    files.write_json(tmp_path / "facts.json", {})
    assert thesis.read_text() == "years" and not (tmp_path / "facts.json").is_symlink()

    with files.complete_folder(tmp_path / "merged", {}) as folder:
        assert folder.stat().st_mode & 0o077 == 0
    if os.getuid() == 0:  # only root can give a folder away
        tmp_path.chmod(0o1777)  # as /tmp
        planted = files.partial_of(tmp_path / "merged")
        planted.mkdir()
        os.chown(planted, 54321, 54321)
        with refused(f"{planted} belongs to"), files.complete_folder(tmp_path / "merged", {}):
            pytest.fail("nothing may be begun")
        tmp_path.chmod(0o700)  # nobody else can have put it there
        write(tmp_path / "merged")


REPLACED = """
import os, sys
from pathlib import Path
from nbutils import files
calls, last = 0, int(sys.argv[2])

def count(event, arguments):
    global calls
    calls += event in ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree")
    if calls == last:
        os._exit(9)

with files.complete_folder(Path(sys.argv[1]), {"model": "new"}) as folder:
    for name in "abc":
        (folder / name).write_text("new")
    sys.addaudithook(count)
"""


def test_a_kill_while_a_folder_is_replaced_leaves_one_that_can_be_replaced_again(tmp_path: Path) -> None:
    target, codes = tmp_path / "merged", []
    while 0 not in codes:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        with files.complete_folder(target, {"model": "old"}) as folder:
            for name in "abcdefgh":
                (folder / name).write_text("old")
        words = [sys.executable, "-c", REPLACED, str(target), str(len(codes) + 1)]
        codes.append(subprocess.run(words, cwd=files.PACKAGE.parent, check=False).returncode)
        with files.complete_folder(target, {"model": "newest"}):  # also where it was killed
            assert files.stamp(target) in ({"model": "old"}, {"model": "new"})
        assert [place.name for place in tmp_path.iterdir()] == ["merged"]
    assert len(codes) > 10 and codes[-1] == 0


def test_a_folder_that_cannot_be_renamed_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, target = os.replace, write(tmp_path / "merged", "old")

    def replace(source: Path, place: Path) -> None:
        if source == target:  # as a folder of a container's image
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, place)

    monkeypatch.setattr(os, "replace", replace)
    assert (write(target, "new") / "model").read_text() == "new"


def test_what_nobody_holds_is_removed_where_a_disk_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = write(tmp_path / "elsewhere")
    (tmp_path / ".x-link").symlink_to(elsewhere)
    for name in (".x-left", ".x-held"):
        (tmp_path / name).mkdir()
    with files.held(tmp_path / ".x-held"):
        files.remove_left(tmp_path, ".x-*")
    assert not (tmp_path / ".x-left").exists() and (tmp_path / ".x-held").exists() and (elsewhere / "model").exists()

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    files.remove_left(tmp_path, ".x-*")
    assert (tmp_path / ".x-held").exists(), "whether somebody works there is not known"


def test_a_disk_that_loses_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if target == tmp_path / "adapter":
            (target / "model").unlink()

    monkeypatch.setattr(os, "replace", replace)
    with refused("was written, but it is not complete: the disk"):
        write(tmp_path / "adapter")


def test_a_result_lies_apart_from_what_it_is_made_of(tmp_path: Path) -> None:
    files.require_apart(tmp_path / "out", tmp_path / "base")
    for out in ("base", ".", "base/out", "base/../base"):
        with refused("The result would go to"):
            files.require_apart(tmp_path / out, tmp_path / "base")


def test_folders_are_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = files.make_folder(tmp_path / "runs/mine")
    assert {place.stat().st_mode & 0o077 for place in (folder, folder.parent)} == {0}
    (tmp_path / "file").touch()
    with refused("cannot be used: "):
        files.make_folder(tmp_path / "file/runs")
    tmp_path.chmod(0o1777)  # as /tmp
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with refused(str(tmp_path / "runs")):
        files.make_folder(tmp_path / "runs/venv-serve")
