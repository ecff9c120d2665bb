"""platforms: the right name for the right reason, decoys included."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbutils import platforms
from nbutils.errors import CourseError

KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_20260514"}
COLAB = {"COLAB_GPU": "", "COLAB_RELEASE_TAG": "x", "TBE_RUNTIME_ADDR": "172.28.0.1:8011"}


def make(root: Path, *places: str) -> Path:
    for place in places:
        (root / place).mkdir(parents=True)
    return root


def test_kaggle_is_kaggle_although_its_image_is_colabs(tmp_path: Path) -> None:
    found = platforms.detect(KAGGLE, make(tmp_path, "content", "kaggle/working"))
    assert (found.name, found.batch) == ("kaggle", True)
    assert "KAGGLE_KERNEL_RUN_TYPE=Batch" in found.evidence


def test_colab_is_colab_although_it_has_kaggle_folders(tmp_path: Path) -> None:
    root = make(tmp_path, "content", "kaggle/working", "kaggle/input/some-slug", "var/colab")
    (root / "var/colab/hostname").write_text("m-s-test")
    assert platforms.detect(COLAB, root).name == "colab"
    assert platforms.detect({}, root).evidence == "/var/colab/hostname"


def test_colab_enterprise_has_its_own_name(tmp_path: Path) -> None:
    assert platforms.detect(COLAB | {"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, tmp_path).name == "colab_enterprise"


def test_autodl_is_found_without_its_variables_but_not_by_its_proxy_script(tmp_path: Path) -> None:
    lanyun = make(tmp_path / "lanyun", "etc")
    (lanyun / "etc/network_turbo").write_text("export http_proxy=http://127.0.0.1:12798")
    assert platforms.detect({}, lanyun).name == "local"
    assert platforms.detect({}, make(tmp_path / "a", "root/autodl-tmp")).name == "autodl"
    assert platforms.detect({"AutoDLRegion": "west-E"}, tmp_path).name == "autodl"


def test_kaggle_keys_at_home_are_not_kaggle(tmp_path: Path) -> None:
    assert platforms.detect({"KAGGLE_KEY": "k", "KAGGLE_USERNAME": "u"}, tmp_path).name == "local"


def test_a_wrong_override_lists_the_right_names(tmp_path: Path) -> None:
    assert platforms.detect({"NBUTILS_PLATFORM": "autodl"}, tmp_path).name == "autodl"
    with pytest.raises(CourseError, match="colab, colab_enterprise, kaggle, autodl, local"):
        platforms.detect({"NBUTILS_PLATFORM": "kagle"}, tmp_path)


def test_each_platform_keeps_runs_where_they_last(tmp_path: Path) -> None:
    kaggle = platforms.folders(platforms.Platform("kaggle", ""), {}, tmp_path)
    assert kaggle.keep == tmp_path / "kaggle/working/runs" and kaggle.scratch == tmp_path / "kaggle/temp"
    autodl = platforms.Platform("autodl", "")
    assert platforms.folders(autodl, {}, tmp_path).keep == tmp_path / "root/autodl-tmp/runs"
    make(tmp_path, "root/autodl-fs")
    assert platforms.folders(autodl, {}, tmp_path).keep == tmp_path / "root/autodl-fs/runs"
    assert platforms.folders(platforms.Platform("colab", ""), {}, tmp_path).keep == tmp_path / "content/runs"


def test_nbutils_home_moves_the_runs_everywhere(tmp_path: Path) -> None:
    env = {"NBUTILS_HOME": str(tmp_path / "mine")}
    for name in platforms.NAMES:
        assert platforms.folders(platforms.Platform(name, ""), env, tmp_path).keep == tmp_path / "mine"


def test_a_drive_that_cannot_be_mounted_costs_a_sentence_not_the_lesson() -> None:
    said = platforms.mount_drive(platforms.Platform("colab", ""))
    assert "could not be mounted" in said and "disk" in said
    assert "No Drive" in platforms.mount_drive(platforms.Platform("local", ""))


def test_secrets_come_from_the_environment_or_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "value")
    assert platforms.secret("SOME_KEY") == "value"
    assert platforms.secret("NO_SUCH_KEY_ANYWHERE") is None


def test_a_hub_that_does_not_answer_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert platforms.hub_online(seconds=1) is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert platforms.hub_online() is False


def test_a_test_is_not_a_kernel() -> None:
    assert platforms.in_kernel() is False
