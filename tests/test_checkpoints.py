"""checkpoints: only what verifies is restored; what is finished reaches the run folder, whatever its disk does."""

import errno
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import refused

from nbutils import checkpoints, cli

FINGERPRINT = dict[str, Any](model="m", seed=1)
Member = tuple[tarfile.TarInfo, bytes]


def save(scratch: Path, step: int) -> Path:
    folder = scratch / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / "weights.bin").write_bytes(bytes([step % 256]) * 10_000)
    return folder


def keep_one(
    scratch: Path, keep: Path, step: int, fingerprint: dict[str, Any] = FINGERPRINT
) -> checkpoints.StoredCheckpoint:
    keep.mkdir(exist_ok=True)
    return checkpoints.pack(save(scratch, step), keep, fingerprint)


def newest(*stores: Path) -> int | None:
    best = checkpoints.newest_verified(stores, FINGERPRINT)
    return best and best.step


def steps_in(store: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.look(store)]


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with checkpoints 10, 20 and 30; disks are retried at once."""
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "MAX_MEMBERS", 50)
    for step in (10, 20, 30):
        keep_one(tmp_path / "scratch", tmp_path / "keep", step)
    return tmp_path / "keep"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "its size differs": lambda path: os.truncate(path, 1000),
    "sha256 differs": flip_a_byte,
    "the archive is missing": Path.unlink,
}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 20)], ids=["missing", "cut off"])
def test_one_without_a_whole_manifest_does_not_count(keep: Path, damage: Callable[[Path], Any]) -> None:
    damage(keep / "checkpoint-30.json")
    assert newest(keep) == 20 and steps_in(keep) == [20, 10]


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_one_is_skipped_with_the_reason(keep: Path, why: str, capsys: Any) -> None:
    for suffix in (".tar", ".json"):  # a copy under another name is not believed
        shutil.copy(keep / f"checkpoint-10{suffix}", keep / f"checkpoint-99{suffix}")
    shutil.copy(keep / "checkpoint-30.tar", keep / "checkpoint-30 (1).tar")
    assert newest(keep) == 30
    DAMAGE[why](keep / "checkpoint-30.tar")
    assert newest(keep) == 20
    output = capsys.readouterr().out
    assert f"skipping {keep / 'checkpoint-30.tar'}" in output and why in output


def test_the_newest_of_several_stores_wins_and_another_training_is_refused(keep: Path, tmp_path: Path) -> None:
    keep_one(tmp_path / "s", tmp_path / "far", 30)
    best = checkpoints.newest_verified([keep, tmp_path / "far", tmp_path / "missing"], FINGERPRINT)
    assert best and best.archive == keep / "checkpoint-30.tar"
    restored = checkpoints.unpack(best, tmp_path / "new/checkpoint-30")
    assert (restored / "weights.bin").read_bytes() == bytes([30]) * 10_000
    keep_one(tmp_path / "s", tmp_path / "far", 35)
    assert newest(keep, tmp_path / "far") == 35 and newest(tmp_path / "missing") is None
    other = dict[str, Any](model="m", seed=2)
    with refused("The checkpoints in this run are of another training", "kept and requested: seed 1, 2"):
        checkpoints.newest_verified([keep], other)
    keep_one(tmp_path / "s", tmp_path / "attached", 50, other)
    assert newest(keep, tmp_path / "attached") == 30  # an own checkpoint counts, though it is older


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_disk_that_cannot_be_read_stops_the_run_and_one_error_does_not(keep: Path, monkeypatch: Any) -> None:
    real, calls = checkpoints.sha256, []
    monkeypatch.setattr(
        checkpoints, "sha256", lambda path: calls.append(1) or (failing(5)() if len(calls) < 2 else real(path))
    )
    assert newest(keep) == 30
    monkeypatch.setattr(checkpoints, "sha256", failing(errno.EIO))
    with refused("cannot be read: [Errno 5]"):
        newest(keep)
    monkeypatch.setattr(Path, "iterdir", failing(errno.ENOTCONN))
    with refused("may hold trained checkpoints cannot be read"):
        newest(keep)


def test_a_step_without_a_manifest_cannot_be_resumed_and_hides_no_other_training(keep: Path) -> None:
    (keep / "checkpoint-30.json").unlink()
    with refused("not complete, or not there: 30", "10, 20"):
        checkpoints.newest_verified([keep], FINGERPRINT, step=30)
    assert checkpoints.newest_first([keep])[0].step == 20
    with refused("are of another training"):
        checkpoints.newest_verified([keep], {"seed": 2}, step=20)


def test_pruning_and_clearing_leave_later_steps_and_foreign_files(keep: Path, tmp_path: Path) -> None:
    foreign = ["checkpoint-007.tar", "checkpoint-30 (1).tar", "checkpoint-notes.json", "checkpoint-٣.tar", "notes.txt"]
    for name in foreign:
        (keep / name).write_text("mine")
    keep_one(tmp_path / "scratch", keep, 90)  # of a run that got further
    os.truncate(keep / "checkpoint-20.tar", 100)
    (keep / "checkpoint-15.tar").write_bytes(b"the rest of a copy that was cut off")
    checkpoints.prune(keep, keep_one(tmp_path / "scratch", keep, 40), keep_last=2)
    own = {f"checkpoint-{step}.{end}" for step in (30, 40, 90) for end in ("tar", "json")}
    assert {path.name for path in keep.iterdir()} == own | {*foreign}
    checkpoints.clear(keep)
    assert {path.name for path in keep.iterdir()} == {*foreign}


@pytest.fixture
def make_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., checkpoints.CheckpointSync]]:
    """Makes syncs with short pauses, and stops them."""
    monkeypatch.setattr(checkpoints, "PAUSE", 0.05)
    outbox = tmp_path / "outbox"
    (tmp_path / "run").mkdir()

    def make(**options: Any) -> checkpoints.CheckpointSync:
        options = {"logs": (tmp_path / "no logs", tmp_path / "run/logs"), "check": lambda: None} | options
        return checkpoints.CheckpointSync(outbox, tmp_path / "run/checkpoints", FINGERPRINT, **options)

    yield make
    checkpoints.end_earlier(outbox)


def test_the_best_reaches_the_run_folder_also_where_the_newest_overtakes_it(make_sync: Any, tmp_path: Path) -> None:
    away = [True]

    def check() -> None:
        if away[0]:
            raise OSError(errno.ENOTCONN, "away")

    running = make_sync(keep_last=1, check=check)
    for step in (40, 60):
        folder = save(tmp_path / "trainer", step)
        (folder / checkpoints.STATE).write_text(json.dumps({"best_global_step": 40, "global_step": step}))
        running.take(folder)
    away[0] = False
    running.finish(patience=10)
    kept = checkpoints.look(tmp_path / "run/checkpoints")
    assert [checkpoint.step for checkpoint in kept] == [60, 40]
    assert all(checkpoints.defect(checkpoint) is None for checkpoint in kept)


def test_checkpoints_and_logs_reach_the_run_folder(make_sync: Any, tmp_path: Path, capsys: Any) -> None:
    logs = (tmp_path / "scratch logs", tmp_path / "run/logs")
    (logs[0] / "deep").mkdir(parents=True)
    running = make_sync(keep_last=2, logs=logs)
    for step in (10, 20, 30):
        (logs[0] / "deep/events").write_text("loss" * step)
        running.take(save(tmp_path / "trainer", step))
        running.finish(patience=5)
    kept = checkpoints.look(tmp_path / "run/checkpoints")
    assert [checkpoint.step for checkpoint in kept] == [30, 20]
    assert all(checkpoints.defect(checkpoint) is None for checkpoint in kept)
    assert "checkpoint 30 is kept" in capsys.readouterr().out and (logs[1] / "deep/events").read_text() == "loss" * 30
    assert not list((tmp_path / "outbox").iterdir())
    assert len(list((tmp_path / "trainer").iterdir())) == 3, "the trainer's own are its business"
    shutil.rmtree(tmp_path / "run")  # a Drive that was unmounted: no folder is made in its place
    running.finish()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", ["mount", "write", "hang", "read back", "space", "run folder"])
def test_a_fault_costs_a_line_and_no_checkpoint(
    make_sync: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, fault: str
) -> None:
    broken, error = [True], failing(errno.EIO)
    real = {"pack": checkpoints.pack, "sha256": checkpoints.sha256}
    running = make_sync(check=lambda: error() if broken and fault == "mount" else None)

    def pack(*arguments: Any) -> Any:
        while fault == "hang" and broken:
            time.sleep(0.01)
        return error() if broken else real["pack"](*arguments)

    if fault in ("write", "hang"):
        monkeypatch.setattr(checkpoints, "pack", pack)
    if fault == "read back":
        monkeypatch.setattr(checkpoints, "sha256", lambda path: "0" * 64 if broken else real["sha256"](path))
    if fault == "space":
        monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.0 if broken else 1.0)
    if fault == "run folder":
        (tmp_path / "run").rmdir()
    for step in (10, 20):
        running.take(save(tmp_path / "trainer", step))
    with refused("checkpoint is " + str(tmp_path / "outbox/checkpoint-20")):
        running.finish(patience=0.2)
    assert "copying checkpoint 20 " in capsys.readouterr().out
    assert running.kept is None and checkpoints.look(tmp_path / "run/checkpoints") == []
    assert [line[:6] for line in running.messages()] == ([] if fault == "hang" else ["[WARN]"])
    broken.clear()
    if fault == "run folder":
        assert not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
    kept = running.finish(patience=5)
    assert kept is not None and kept.step == 20 and checkpoints.defect(kept) is None


def test_a_copy_that_met_a_full_disk_leaves_nothing_on_it(tmp_path: Path, monkeypatch: Any) -> None:
    store = tmp_path / "store"
    store.mkdir()
    monkeypatch.setattr(checkpoints, "_write_manifest", failing(errno.ENOSPC))  # the archive is written by then
    with pytest.raises(OSError, match="No space"):
        checkpoints.pack(save(tmp_path, 10), store, {})
    assert not list(store.iterdir())


def test_a_whole_one_of_the_same_step_is_never_overwritten(make_sync: Any, tmp_path: Path) -> None:
    theirs = keep_one(tmp_path / "another machine", tmp_path / "run/checkpoints", 10)
    before, running = theirs.archive.stat().st_mtime_ns, make_sync()
    running.take(save(tmp_path / "trainer", 10))
    assert running.finish(patience=5) == theirs and theirs.archive.stat().st_mtime_ns == before


def test_a_sync_that_was_replaced_gives_its_copy_up(make_sync: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def endless(*arguments: Any) -> None:
        stopped = arguments[-1]
        while not stopped():
            time.sleep(0.01)

    monkeypatch.setattr(checkpoints, "pack", endless)
    old = make_sync()
    old.take(save(tmp_path / "trainer", 5))
    checkpoints.end_earlier(old.outbox)
    assert not old._thread.is_alive()


def cli_checkpoints(*words: str) -> tuple[int, str]:
    ran = CliRunner().invoke(cli.app, ["checkpoints", *words])
    return ran.exit_code, ran.output


def test_list_verify_and_restore(keep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    run = tmp_path / "runs/demo"
    run.mkdir(parents=True)
    (run / "facts.json").write_text("{}")
    store = keep.rename(run / "checkpoints")
    assert cli_checkpoints("verify", str(run))[0] == 0
    flip_a_byte(store / "checkpoint-30.tar")
    status, output = cli_checkpoints("list", "demo")
    assert status == 0 and output.index("\n30 ") < output.index("\n10 ") and "damaged" not in output
    status, output = cli_checkpoints("verify", "demo")
    assert status == 1 and "sha256 differs" in output
    target = tmp_path / "new/by hand"
    assert cli_checkpoints("restore", "demo", "--to", str(target))[0] == 0
    assert json.loads((target / "state.json").read_text()) == {"step": 20} and len(list(target.parent.iterdir())) == 1
    with refused("exists already"):
        checkpoints.restore(store, target, None)
    with refused("not complete, or not there: "):
        checkpoints.restore(store, tmp_path / "x", 15)
    assert cli_checkpoints("list", "dmeo")[0] == 1


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.size, header.mode = kind, link, len(content), 0o6777
    return header, content


def with_headers(plain: Member, **headers: str) -> Member:
    """The member with headers of its own, which go before its fields."""
    plain[0].pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
    return plain


def sparse() -> Member:
    headers = {"GNU_sparse_major": "1", "GNU_sparse_minor": "0", "GNU_sparse_realsize": str(2**40)}
    return with_headers(member("checkpoint-40/large", b"x" * 512), **headers)


def with_manifest(path: Path) -> checkpoints.StoredCheckpoint:
    size, digest = path.stat().st_size, checkpoints.sha256(path)
    checkpoint = checkpoints.StoredCheckpoint(archive=path, step=40, size=size, sha256=digest, fingerprint=FINGERPRINT)
    path.with_suffix(".json").write_text(checkpoint.model_dump_json(indent=2))
    return checkpoint


def planted(store: Path, members: list[Member], mode: str = "w", **headers: Any) -> checkpoints.StoredCheckpoint:
    """An archive with a manifest that fits it, as anyone who knows the fingerprint can make one."""
    path = store / "checkpoint-40.tar"
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT, **headers) as tar:  # type: ignore[call-overload]
        for header, content in members:
            tar.addfile(header, io.BytesIO(content))
    return with_manifest(path)


TOP = member("checkpoint-40", kind=tarfile.DIRTYPE)
PLAIN = [member("checkpoint-40/a", b"x")]
HOSTILE: dict[str, list[Member]] = {
    "above": [member("checkpoint-40/../../evil", b"x")],
    "absolute": [member("/tmp/nbutils-evil", b"x")],
    "beside": [member("evil", b"x")],
    "another checkpoint": [member("checkpoint-4", b"x")],
    "link": [member("checkpoint-40/link", kind=tarfile.SYMTYPE, link="/"), member("checkpoint-40/link/evil", b"x")],
    "hard link": [member("checkpoint-40/link", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "device": [member("checkpoint-40/null", kind=tarfile.CHRTYPE)],
    "sparse": [sparse()],
    "twice": [member("checkpoint-40/a", b"x"), member("checkpoint-40/./a", b"y")],
    "below a file": [member("checkpoint-40/a", b"x"), member("checkpoint-40/a/b", b"y")],
    "a file instead": [member("checkpoint-40", b"x")],
    "too many": [member(f"checkpoint-40/{number}") for number in range(51)],
    "compressed": [member("checkpoint-40/zeros", bytes(2**24))],
    "headers for all members": PLAIN,
    "negative size": PLAIN,
    "endless size": PLAIN,
    "NUL in a name": [with_headers(member("checkpoint-40/a", b"x"), path="checkpoint-40/a\0b")],
    "long name": [member(f"checkpoint-40/{'长' * 86}", b"x")],
    "deep folders": [member("checkpoint-40" + f"/{'a' * 200}" * depth, kind=tarfile.DIRTYPE) for depth in range(1, 22)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_with_anything_but_plain_files_below_its_name_is_skipped(
    kind: str, keep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"pax_headers": {"comment": "x"}} if kind == "headers for all members" else {}
    bad = planted(keep, [TOP, *HOSTILE[kind]], "w:gz" if kind == "compressed" else "w", **headers)
    if "size" in kind:  # an archive whose own bytes would be read again and again, or no disk has
        header = bytearray(PLAIN[0][0].tobuf())
        size = -1024 if kind == "negative size" else 2**62
        header[124:136] = (size | (0 if size < 0 else 1 << 95)).to_bytes(12, "big", signed=size < 0)  # base-256
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        bad.archive.write_bytes(bad.archive.read_bytes().replace(PLAIN[0][0].tobuf(), bytes(header)))
        bad = with_manifest(bad.archive)
    assert newest(keep) == 30 and "no checkpoint archive of this course" in capsys.readouterr().out
    with pytest.raises((tarfile.TarError, OSError, ValueError)):
        checkpoints.unpack(bad, tmp_path / "scratch2/checkpoint-40")
    assert not list(tmp_path.rglob("evil")) and not Path("/tmp/nbutils-evil").exists()


@pytest.mark.parametrize("members", [[], [member("checkpoint-40", b"x")]], ids=["empty", "a file"])
def test_an_archive_without_a_checkpoint_folder_does_not_verify_and_the_one_before_is_restored(
    members: list[Member], keep: Path, tmp_path: Path
) -> None:
    planted(keep, members)
    assert newest(keep) == 30
    assert not checkpoints.listing(keep, thorough=True)[1]
    restored = checkpoints.restore(keep, tmp_path / "restored", None)
    assert json.loads((restored / "state.json").read_text()) == {"step": 30}


@pytest.mark.parametrize("kind", ["pipe", "device", "nested", "true"])
def test_a_manifest_or_archive_that_is_no_file_of_ours_is_skipped(kind: str, keep: Path) -> None:
    path, manifest = planted(keep, [TOP, *PLAIN]).archive, keep / "checkpoint-40.json"
    assert newest(keep) == 40
    if kind == "pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    elif kind == "device":
        manifest.write_text(manifest.read_text().replace(str(path.stat().st_size), "0"))
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind == "nested":
        manifest.write_text("[" * 100_000)
    else:
        text = manifest.read_text().replace('"step": 40', '"step": true')
        manifest.rename(keep / "checkpoint-True.json").write_text(text)
    assert newest(keep) == 30


def test_links_are_packed_as_files_and_modes_are_not_restored(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    (folder / "link").symlink_to("state.json")
    os.link(folder / "state.json", folder / "hard link")
    (tmp_path / "store").mkdir()
    kept = checkpoints.pack(folder, tmp_path / "store", FINGERPRINT)
    unpacked = checkpoints.unpack(kept, tmp_path / "new/checkpoint-7")
    assert checkpoints.defect(kept) is None
    assert all((unpacked / name).read_text() == '{"step": 7}' for name in ("link", "hard link"))
    unpacked = checkpoints.unpack(planted(tmp_path / "store", [TOP, *PLAIN]), tmp_path / "new/checkpoint-40")
    assert not (unpacked / "a").stat().st_mode & 0o6022
