"""checkpoints: only what verifies is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbutils import checkpoints
from nbutils.errors import CourseError

MARK = checkpoints.fingerprint(model="m", seed=1)


def save(scratch: Path, step: int) -> Path:
    folder = scratch / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / "weights.bin").write_bytes(bytes([step % 256]) * 10_000)
    return folder


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        checkpoints.publish(save(tmp_path / "scratch", step), tmp_path / "keep", MARK)
    return tmp_path / "keep"


def test_the_newest_comes_back_whole(keep: Path, tmp_path: Path) -> None:
    restored = checkpoints.restore(keep, tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-30"
    assert (restored / "weights.bin").read_bytes() == bytes([30]) * 10_000


def truncate(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-100])


def flip_a_byte(archive: Path) -> None:
    whole = bytearray(archive.read_bytes())
    whole[2000] ^= 1
    archive.write_bytes(whole)


def half_a_manifest(archive: Path) -> None:
    manifest = archive.with_suffix(".json")
    manifest.write_text(manifest.read_text()[:20])


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, half_a_manifest, Path.unlink])
def test_a_damaged_one_is_skipped_with_a_line(keep: Path, tmp_path: Path, damage, capsys) -> None:  # type: ignore[no-untyped-def]
    damage(keep / "checkpoint-30.tar")
    restored = checkpoints.restore(keep, tmp_path / "new", MARK)
    assert restored is not None and restored.name == "checkpoint-20"
    assert "skipping checkpoint-30" in capsys.readouterr().out


def test_an_archive_without_manifest_is_as_good_as_absent(keep: Path, tmp_path: Path) -> None:
    for manifest in keep.glob("*.json"):
        manifest.unlink()
    assert checkpoints.restore(keep, tmp_path / "new", MARK) is None


def test_only_the_newest_are_kept(keep: Path, tmp_path: Path) -> None:
    checkpoints.publish(save(tmp_path / "scratch", 40), keep, MARK, keep_last=2)
    assert sorted(file.name for file in keep.iterdir()) == [
        "checkpoint-30.json", "checkpoint-30.tar", "checkpoint-40.json", "checkpoint-40.tar",
    ]  # fmt: skip


def test_another_training_is_refused_with_both_values(keep: Path, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="seed: kept 1, asked 2") as caught:
        checkpoints.restore(keep, tmp_path / "new", checkpoints.fingerprint(model="m", seed=2))
    assert "RUN_NAME" in str(caught.value) and 'RESUME="never"' in str(caught.value)


def test_a_copy_that_does_not_verify_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "defect", lambda one: "its sha256 differs")
    with pytest.raises(CourseError, match="does not verify"):
        checkpoints.publish(save(tmp_path / "scratch", 10), tmp_path / "keep", MARK)
