"""checkpoints: only what verifies is restored; what is finished gets home, whatever the disk there does."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbutils import checkpoints
from nbutils.checkpoints import archive, carrier, store
from nbutils.errors import CourseError

MARK = checkpoints.fingerprint(model="m", seed=1)


def save(scratch: Path, step: int) -> Path:
    folder = scratch / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / "weights.bin").write_bytes(bytes([step % 256]) * 10_000)
    return folder


def keep_one(scratch: Path, keep: Path, step: int, mark: dict = MARK) -> checkpoints.Kept:
    keep.mkdir(exist_ok=True)
    return checkpoints.pack(save(scratch, step), keep, mark)


def restore(stores: list[Path], folder: Path, mark: dict) -> Path | None:
    best = checkpoints.newest_verified(stores, mark)
    return checkpoints.unpack(best, folder) if best else None


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        keep_one(tmp_path / "scratch", tmp_path / "keep", step)
    return tmp_path / "keep"


def test_the_newest_comes_back_whole(keep: Path, tmp_path: Path) -> None:
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"
    assert (restored / "weights.bin").read_bytes() == bytes([30]) * 10_000


def truncate(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:-100])


def flip_a_byte(place: Path) -> None:
    whole = bytearray(place.read_bytes())
    whole[2000] ^= 1
    place.write_bytes(whole)


def half_a_manifest(place: Path) -> None:
    manifest = place.with_suffix(".json")
    manifest.write_text(manifest.read_text()[:20])


def no_manifest(place: Path) -> None:
    place.with_suffix(".json").unlink()


def empty(place: Path) -> None:
    place.write_bytes(b"")


def swapped_with_the_older(place: Path) -> None:
    shutil.copy(place.with_name("checkpoint-20.tar"), place)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "bytes, 20,480 expected"),
        (flip_a_byte, "sha256 differs"),
        (half_a_manifest, "its manifest cannot be used"),
        (no_manifest, "it has no manifest"),
        (Path.unlink, "the archive is missing"),
        (empty, "0 bytes"),
        (swapped_with_the_older, "sha256 differs"),
    ],
)
def test_a_damaged_one_is_skipped_with_a_line_that_says_why(
    keep: Path, tmp_path: Path, damage: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture
) -> None:
    damage(keep / "checkpoint-30.tar")
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-20"
    said = capsys.readouterr().out
    assert "skipping checkpoint-30" in said and why in said


def test_a_duplicate_under_a_newer_name_is_not_believed(keep: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    for suffix in (".tar", ".json"):
        shutil.copy(keep / f"checkpoint-10{suffix}", keep / f"checkpoint-99{suffix}")
    shutil.copy(keep / "checkpoint-30.tar", keep / "checkpoint-30 (1).tar")
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"
    said = capsys.readouterr().out
    assert "renamed or duplicated" in said and "checkpoint-30 (1).tar" in said


def test_nothing_that_verifies_is_nothing_to_continue_from(keep: Path, tmp_path: Path) -> None:
    for manifest in keep.glob("*.json"):
        manifest.unlink()
    assert restore([keep, tmp_path / "nowhere"], tmp_path / "new", MARK) is None


def test_the_newest_of_several_places_wins_and_the_nearest_of_equals(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for step in (10, 20):
        keep_one(tmp_path / "s1", near, step)
    for step in (20, 15):
        keep_one(tmp_path / "s2", far, step)
    best = checkpoints.newest_verified([near, far], MARK)
    assert best is not None and best.archive == near / "checkpoint-20.tar"
    keep_one(tmp_path / "s2", far, 25)
    best = checkpoints.newest_verified([near, far], MARK)
    assert best is not None and best.archive == far / "checkpoint-25.tar"


def test_another_training_is_refused_with_both_values(keep: Path, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="seed: kept 1, asked 2") as caught:
        restore([keep], tmp_path / "new", checkpoints.fingerprint(model="m", seed=2))
    assert "RUN_NAME" in str(caught.value) and 'RESUME="never"' in str(caught.value)


def test_an_older_one_of_this_training_is_preferred_to_a_newer_one_of_another(keep: Path, tmp_path: Path) -> None:
    keep_one(tmp_path / "s", tmp_path / "attached", 50, checkpoints.fingerprint(model="other", seed=1))
    best = checkpoints.newest_verified([keep, tmp_path / "attached"], MARK)
    assert best is not None and best.step == 30


def test_a_store_that_cannot_be_listed_stops_the_run_instead_of_repeating_its_work(
    keep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WAITS", (0.0,))
    monkeypatch.setattr(Path, "iterdir", raising(errno.ENOTCONN))
    with pytest.raises(CourseError, match=r"(?s)cannot be read.*never"):
        checkpoints.newest_verified([keep], MARK)


def test_a_read_that_fails_once_does_not_cost_the_newest(keep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = archive.sha256, []

    def sha256(place: Path) -> str:
        calls.append(place)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(place)

    monkeypatch.setattr(store, "WAITS", (0.0,))
    monkeypatch.setattr(archive, "sha256", sha256)
    best = checkpoints.newest_verified([keep], MARK)
    assert best is not None and best.step == 30


def test_archives_nobody_can_read_now_stop_the_run_instead_of_repeating_it(keep: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(store, "WAITS", (0.0,))
    monkeypatch.setattr(archive, "sha256", raising(errno.EIO))
    with pytest.raises(CourseError, match=r"(?s)cannot be read.*run this cell again"):
        checkpoints.newest_verified([keep], MARK)


def raising(number: int) -> Callable:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_pruning_keeps_the_newest_that_are_whole_and_never_a_later_one(keep: Path, tmp_path: Path) -> None:
    keep_one(tmp_path / "scratch", keep, 90)  # of a run that got further before it was damaged
    truncate(keep / "checkpoint-20.tar")
    (keep / "checkpoint-15.tar").write_bytes(b"the rest of a copy that was cut off")
    newest = keep_one(tmp_path / "scratch", keep, 40)
    checkpoints.prune(keep, newest, keep_last=2)
    assert sorted(place.name for place in keep.glob("*.tar")) == [
        "checkpoint-30.tar", "checkpoint-40.tar", "checkpoint-90.tar",
    ]  # fmt: skip
    assert len(list(keep.iterdir())) == 6


# The carrier


@pytest.fixture
def make_carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., checkpoints.Carrier]]:
    """Makes carriers with short pauses, and ends them."""
    monkeypatch.setattr(carrier, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(carrier, "LONGEST_PAUSE", 0.1)
    made: list[checkpoints.Carrier] = []
    (tmp_path / "run").mkdir()

    def make(**options: object) -> checkpoints.Carrier:
        logs = options.pop("logs", None)
        route = checkpoints.Route(tmp_path / "sealed", tmp_path / "run/checkpoints", **options)  # type: ignore[arg-type]
        made.append(checkpoints.Carrier(route, MARK, logs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_is_taken_gets_home_and_verifies(make_carrier, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    way = make_carrier(keep_last=2)
    for step in (10, 20, 30):
        way.take(save(tmp_path / "trainer", step))
        way.finish(patience=5, bar=False)
    kept, remarks = checkpoints.look(tmp_path / "run/checkpoints")
    assert [one.step for one in kept] == [30, 20] and not remarks
    assert all(checkpoints.defect(one) is None for one in kept)
    assert "checkpoint 30 is kept (0.0 MiB, verified)" in capsys.readouterr().out
    assert not list((tmp_path / "trainer").iterdir()) and not list(way.outbox.iterdir())
    assert [one.step for one in checkpoints.look(tmp_path / "sealed")[0]] == [30]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EIO, errno.ENOSPC])
def test_a_fault_costs_two_lines_and_no_checkpoint(make_carrier, tmp_path: Path, number: int) -> None:  # type: ignore[no-untyped-def]
    broken = [True]

    def check() -> None:
        if broken:
            raise OSError(number, os.strerror(number))

    way = make_carrier(check=check)
    for step in (10, 20):
        began = time.monotonic()
        way.take(save(tmp_path / "trainer", step))
        assert time.monotonic() - began < 0.5
        time.sleep(0.15)
    [line] = way.messages()
    assert os.strerror(number) in line and "Training goes on" in line
    broken.clear()
    kept = way.finish(patience=5, bar=False)
    assert kept is not None and kept.step == 20 and way.problem is None


def test_the_way_back_is_told_once(make_carrier, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    real, calls = archive.copy, []

    def copy(*given: object) -> checkpoints.Kept:
        calls.append(1)
        if len(calls) < 4:
            raise OSError(errno.EIO, "Input/output error")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(archive, "copy", copy)
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    way.finish(patience=5, bar=False)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "[WARN]" in said[0] and "the way to keep works again" in said[1] and len(calls) == 4


def test_a_rename_that_does_not_stick_harms_nothing(
    make_carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if not str(target).startswith(str(tmp_path / "run")):
            real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    kept = way.finish(patience=5, bar=False)
    assert kept is not None and checkpoints.defect(kept) is None


def test_a_copy_that_reads_back_differently_is_not_announced(make_carrier, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    real, lies = archive.sha256, [True]
    monkeypatch.setattr(archive, "sha256", lambda place: "0" * 64 if lies else real(place))
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    time.sleep(0.2)
    assert way.kept is None and "does not verify" in way.messages()[0]
    assert checkpoints.look(tmp_path / "run/checkpoints")[0] == []
    lies.clear()
    assert way.finish(patience=5, bar=False) is not None


def test_a_vanished_mount_is_not_written_into(make_carrier, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    way = make_carrier()
    shutil.rmtree(tmp_path / "run")
    way.take(save(tmp_path / "trainer", 10))
    with pytest.raises(CourseError, match=r"(?s)could not be brought.*checkpoint-10\.tar"):
        way.finish(patience=0.3, bar=False)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert way.finish(patience=5, bar=False) is not None


def test_too_little_room_is_a_fault_like_any_other(make_carrier, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(carrier, "free_gib", lambda folder: 0.0)
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    time.sleep(0.2)
    assert "0.00 GiB free" in way.messages()[0]


def test_a_new_start_carries_on_what_an_earlier_one_left_in_scratch(make_carrier, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    keep_one(tmp_path / "trainer", tmp_path / "sealed", 10)
    kept = make_carrier().finish(patience=5, bar=False)
    assert kept is not None and kept.step == 10 and kept.archive.parent.name == "checkpoints"


def test_a_trainer_from_before_the_cell_ran_again_is_told_to_start_over(make_carrier, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    old = make_carrier()
    make_carrier()
    with pytest.raises(CourseError, match="all cells after it"):
        old.take(save(tmp_path / "trainer", 10))


def test_a_whole_one_of_the_same_step_is_never_overwritten(make_carrier, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    theirs = keep_one(tmp_path / "another machine", tmp_path / "run/checkpoints", 10)
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    assert way.finish(patience=5, bar=False) == theirs and checkpoints.defect(theirs) is None


def test_one_that_cannot_be_read_just_now_is_not_overwritten(make_carrier, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    theirs = keep_one(tmp_path / "another start", tmp_path / "run/checkpoints", 10)
    real, broken = archive.sha256, [True]
    monkeypatch.setattr(archive, "sha256", lambda place: raising(errno.EIO)() if broken else real(place))
    way = make_carrier()
    way.take(save(tmp_path / "trainer", 10))
    time.sleep(0.2)
    assert theirs.archive.exists() and "is there, but it cannot be read" in way.messages()[0]
    broken.clear()
    assert way.finish(patience=5, bar=False) == theirs


def test_logs_come_home_too(make_carrier, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    logs = (tmp_path / "scratch logs", tmp_path / "run/logs")
    (logs[0] / "deep").mkdir(parents=True)
    (logs[0] / "deep/events").write_text("one")
    way = make_carrier(logs=logs)
    way.take(save(tmp_path / "trainer", 10))
    way.finish(patience=5, bar=False)
    (logs[0] / "deep/events").write_text("one two")
    way.finish(patience=5, bar=False)
    assert (logs[1] / "deep/events").read_text() == "one two"


# For people


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs, one of them with checkpoints in scratch and in keep."""
    monkeypatch.setenv("NBUTILS_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    for step in (10, 20):
        (tmp_path / "runs/demo").mkdir(parents=True, exist_ok=True)
        keep_one(tmp_path / "s", tmp_path / "runs/demo/checkpoints", step)
    return tmp_path / "runs"


def say(*words: str) -> tuple[int, str]:
    """Exit status and output of `python -m nbutils checkpoints …`."""
    from click.testing import CliRunner

    from nbutils.cli import app

    ran = CliRunner().invoke(app, ["checkpoints", *words])
    return ran.exit_code, ran.output


def test_list_shows_the_newest_first_and_verify_reads_them(runs: Path) -> None:
    flip_a_byte(runs / "demo/checkpoints/checkpoint-10.tar")
    status, said = say("list", "demo")
    assert status == 0 and said.index("\n      20") < said.index("\n      10") and "damaged" not in said
    status, said = say("verify", "demo")
    assert status == 1 and "sha256 differs" in said
    (runs / "demo/checkpoints/checkpoint-10.tar").unlink()
    (runs / "demo/checkpoints/checkpoint-10.json").unlink()
    assert say("verify", str(runs / "demo"))[0] == 0


def test_restore_unpacks_the_newest_whole_one_into_a_new_folder(runs: Path, tmp_path: Path) -> None:
    truncate(runs / "demo/checkpoints/checkpoint-20.tar")
    target = tmp_path / "by hand"
    status, said = say("restore", "demo", "--to", str(target))
    assert status == 0 and str(target) in said and "skipping checkpoint-20" in said
    assert json.loads((target / "state.json").read_text()) == {"step": 10}
    assert sorted(place.name for place in tmp_path.iterdir() if "by hand" in place.name) == ["by hand"]
    status, said = say("restore", "demo", "--to", str(target))
    assert status == 1 and "exists already" in said


def test_restore_makes_the_folders_above(runs: Path, tmp_path: Path) -> None:
    assert say("restore", "demo", "--to", str(tmp_path / "new/sub/x"))[0] == 0
    assert [place.name for place in (tmp_path / "new/sub").iterdir()] == ["x"]


def test_a_checkpoint_with_links_of_its_own_is_packed_as_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    (folder / "a").write_text("x")
    (folder / "b").symlink_to("a")
    os.link(folder / "a", folder / "c")
    (tmp_path / "store").mkdir()
    kept = checkpoints.pack(folder, tmp_path / "store", MARK)
    unpacked = checkpoints.unpack(kept, tmp_path / "new")
    assert checkpoints.defect(kept) is None and {place.read_text() for place in unpacked.iterdir()} == {"x"}


def test_a_run_or_a_step_that_is_not_there_is_told(runs: Path, tmp_path: Path) -> None:
    status, said = say("list", "dmeo")
    assert status == 1 and "no run 'dmeo'" in said and "demo" in said
    status, said = say("restore", "demo", "--step", "15", "--to", str(tmp_path / "x"))
    assert status == 1 and "20, 10" in said


def test_a_store_is_safe_only_if_its_newest_verifies(keep: Path, tmp_path: Path) -> None:
    assert checkpoints.unsafe(keep) is None
    truncate(keep / "checkpoint-30.tar")
    assert "checkpoint-30.tar" in str(checkpoints.unsafe(keep))
    assert "no checkpoint is kept" in str(checkpoints.unsafe(tmp_path / "nowhere"))


# ---- archives from elsewhere


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(content)
    return made, content


def sparse() -> tuple[tarfile.TarInfo, bytes]:
    made, content = member("checkpoint-40/large", b"x" * 512)
    made.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}
    return made, content


def planted(store: Path, members: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> checkpoints.Kept:
    """An archive with a manifest that fits it, as anyone who knows the fingerprint can make one."""
    place = store / "checkpoint-40.tar"
    with tarfile.open(place, mode, format=tarfile.PAX_FORMAT) as tar:
        for made, content in [member("checkpoint-40", kind=tarfile.DIRTYPE), *members]:
            tar.addfile(made, io.BytesIO(content))
    manifest = archive.Manifest(40, place.stat().st_size, archive.sha256(place), MARK)
    return archive._seal(archive.Kept(place, manifest))


HOSTILE = {
    "above": [member("checkpoint-40/../../evil", b"x")],
    "absolute": [member("/tmp/nbutils-evil", b"x")],
    "beside": [member("evil", b"x")],
    "another checkpoint": [member("checkpoint-4", b"x")],
    "link": [member("checkpoint-40/link", kind=tarfile.SYMTYPE, link="/"), member("checkpoint-40/link/evil", b"x")],
    "hard link": [member("checkpoint-40/link", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "device": [member("checkpoint-40/null", kind=tarfile.CHRTYPE)],
    "pipe": [member("checkpoint-40/pipe", kind=tarfile.FIFOTYPE)],
    "sparse": [sparse()],
    "twice": [member("checkpoint-40/a", b"x"), member("checkpoint-40/./a", b"y")],
    "below a file": [member("checkpoint-40/a", b"x"), member("checkpoint-40/a/b", b"y")],
    "a file instead": [member("checkpoint-40", b"x")],
    "a long name": [member("checkpoint-40/" + "a" * 300, b"x")],
    "too deep": [member("checkpoint-40/" + "a/" * 12_000 + "x", b"x")],
    "too many": [member(f"checkpoint-40/{number}") for number in range(10_001)],
    "empty": [],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_an_archive_with_anything_but_plain_files_below_its_name_is_skipped(
    members: list[tuple[tarfile.TarInfo, bytes]], keep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = planted(keep, members)
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"
    assert "skipping checkpoint-40.tar" in capsys.readouterr().out
    with pytest.raises((tarfile.TarError, OSError, ValueError)):
        checkpoints.unpack(bad, tmp_path / "scratch2")
    assert not list(tmp_path.rglob("evil")) and not Path("/tmp/nbutils-evil").exists()


def test_a_compressed_archive_is_skipped(keep: Path, tmp_path: Path) -> None:
    planted(keep, [member("checkpoint-40/zeros", bytes(2**24))], mode="w:gz")
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"
    assert sum(place.stat().st_size for place in (tmp_path / "new").rglob("*") if place.is_file()) < 2**20


def test_sizes_below_nothing_do_not_make_room(keep: Path, tmp_path: Path) -> None:
    """With a negative size an archive's own bytes are read again and again."""
    made, _ = member("checkpoint-40/a")
    bad = planted(keep, [(made, b"")])
    header = bytearray(made.tobuf())
    header[124:136] = (-1024).to_bytes(12, "big", signed=True)  # base-256, as tarfile reads it
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    raw = bad.archive.read_bytes()
    bad.archive.write_bytes(raw.replace(bytes(made.tobuf()), bytes(header)))
    manifest = archive.Manifest(40, bad.archive.stat().st_size, archive.sha256(bad.archive), MARK)
    assert "no checkpoint archive" in str(checkpoints.defect(archive._seal(archive.Kept(bad.archive, manifest))))


def test_headers_for_all_members_are_refused(keep: Path) -> None:
    place = keep / "checkpoint-40.tar"
    with tarfile.open(place, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as tar:
        for made, content in (member("checkpoint-40", kind=tarfile.DIRTYPE), member("checkpoint-40/a", b"x")):
            tar.addfile(made, io.BytesIO(content))
    manifest = archive.Manifest(40, place.stat().st_size, archive.sha256(place), MARK)
    assert "no checkpoint archive" in str(checkpoints.defect(archive.Kept(place, manifest)))


@pytest.mark.parametrize("what", ["pipe", "device", "nested", "true"])
def test_a_manifest_or_archive_that_is_no_file_of_ours_is_skipped(what: str, keep: Path, tmp_path: Path) -> None:
    planted(keep, [member("checkpoint-40/a", b"x")])
    place, manifest = keep / "checkpoint-40.tar", keep / "checkpoint-40.json"
    if what == "pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    elif what == "device":
        manifest.write_text(manifest.read_text().replace(str(place.stat().st_size), "0"))
        place.unlink()
        place.symlink_to("/dev/zero")
    elif what == "nested":
        manifest.write_text("[" * 100_000)
    else:
        manifest.rename(keep / "checkpoint-True.json")
        (keep / "checkpoint-True.json").write_text((keep / "checkpoint-True.json").read_text().replace("40", "true", 1))
    restored = restore([keep], tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"


def test_modes_of_an_archive_do_not_count(tmp_path: Path) -> None:
    made, content = member("checkpoint-40/run", b"#!/bin/sh")
    made.mode = 0o6777
    unpacked = checkpoints.unpack(planted(tmp_path, [(made, content)]), tmp_path / "new")
    assert not (unpacked / "run").stat().st_mode & 0o6111


def test_starting_anew_removes_checkpoints_and_nothing_else(keep: Path) -> None:
    own = ["checkpoint-007.tar", "checkpoint-30 (1).tar", "checkpoint-notes.json", "checkpoint-٣.tar", "notes.txt"]
    for name in own:
        (keep / name).write_text("mine")
    checkpoints.prune(keep, checkpoints.look(keep)[0][0], keep_last=3)
    assert checkpoints.clear(keep) == 3
    assert sorted(place.name for place in keep.iterdir()) == own
