"""nbutils.sharing: nothing leaves unasked, private by default, no token and no path shown; one file with a checksum."""

import json
import os
import shutil
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support import ROOT, refused

from nbutils import cli, disk, errors, files, sharing

TOKEN = "hf_correcthorsebatterystaple0123456"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The secrets of the platform."""
    stored = {host.secret: TOKEN for host in sharing.HOSTS.values()}
    monkeypatch.setattr(sharing.platforms, "secret", stored.get)
    return stored


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A merged folder as lesson 04 leaves it, with local paths in its config."""
    folder = tmp_path / "run/merged"
    folder.parent.mkdir()
    stamp = {"base": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "adapter": "x"}
    with files.complete_folder(folder, stamp) as new:
        shutil.copytree(files.TINY_MODEL, new, dirs_exist_ok=True)
        config = json.loads((new / "config.json").read_text())
        config["_name_or_path"] = "runs/li/merged"
        config["deep"] = [{"text": {"n": 1, "files": ["/home/li/secret"]}}]
        (new / "config.json").write_text(json.dumps(config))
    return folder


class FakeHosts:
    """The APIs of all hosts: whether the model is there and private, and what was sent with which token."""

    def __init__(self) -> None:
        self.private = True
        self.exists = False
        self.problem: Exception | None = None
        self.settings: dict[str, Any] = {}
        self.sent: dict[str, str] = {}

    def __call__(self, *names: str, **settings: Any) -> "FakeHosts":
        self.settings |= settings
        return self

    create_repo = model_info = __call__

    def repo_exists(self, **settings: Any) -> bool:
        return self.exists

    def get_model(self, name: str) -> dict[str, int]:
        return {"Visibility": 1 if self.private else 5}

    def upload_folder(self, *, folder_path: Any, **settings: Any) -> None:
        if self.problem:
            raise self.problem
        files = [file for file in Path(folder_path).rglob("*") if file.is_file()]
        self.sent = {file.name: file.read_text(errors="replace")[:5000] for file in files}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> "FakeHosts":
    fake = FakeHosts()
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", SimpleNamespace(HubApi=fake))
    monkeypatch.setattr("huggingface_hub.HfApi", fake)
    return fake


def test_a_push_is_private_and_has_the_models_files_and_a_card(model: Path, hosts: FakeHosts) -> None:
    (model / ".env.json").write_text("{}")
    (model / "training_args.bin").write_text("/home/li")
    pushed = sharing.push(model, "hub:li/orders")
    assert hosts.settings["endpoint"] == "https://huggingface.co", "no mirror"
    assert hosts.settings["private"] is True
    assert pushed.startswith("https://huggingface.co/li/orders (")
    assert "private" in pushed
    names = {file.name for file in files.TINY_MODEL.iterdir() if file.is_file()}
    uploaded = names - set(sharing.NOT_UPLOADED)
    assert set(hosts.sent) == uploaded | {"README.md"}
    card = hosts.sent["README.md"]
    assert "base_model: Qwen/Qwen2.5-7B-Instruct" in card
    assert "# li/orders" in card


def test_a_push_tells_nothing_of_this_machine_and_changes_nothing_on_it(
    model: Path, hosts: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = sharing.push(model, "hub:li/orders")
    config = json.loads(hosts.sent["config.json"])
    assert config["deep"] == [{"text": {"n": 1}}]
    assert config["model_type"]
    assert "_name_or_path" not in config
    printed = capsys.readouterr()
    for text in (*hosts.sent.values(), pushed, printed.out, printed.err):
        assert "/home" not in text
        assert str(model.parent) not in text
        assert TOKEN not in text
    assert "/home/li" in (model / "config.json").read_text(), "the original stays"
    assert files.stamp(model) is not None


def test_the_card_of_a_model_with_a_local_base_names_it_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    with files.complete_folder(folder, {"format": "fp8", "base": "/home/li/models/tiny_base"}):
        pass
    card = sharing.model_card(folder, "li/orders")
    assert "fp8" in card
    assert "base model: tiny_base" in card
    assert "base_model:" not in card, "that would be a link to a model of the Hub"
    assert "/home" not in card


def test_the_upload_of_lesson_08_is_private_and_shows_no_token(
    model: Path, hosts: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (ROOT / "notebooks/08_export.py").read_text(encoding="utf-8").split("# %%\n")
    [cell] = [cell for cell in cells if "upload_folder(" in cell]
    code = cell.partition("# %% [markdown]")[0]
    names: dict[str, Any] = {"PUSH_TO": "hub:li/orders", "EXPORTS": "", "folder": model, "sharing": sharing}
    exec(code, names)
    assert hosts.settings["private"] is True
    assert hosts.settings["token"] == TOKEN
    assert "README.md" in hosts.sent
    upload = str(names["upload"])
    printed = capsys.readouterr()
    assert "https://huggingface.co/li/orders" in upload + printed.out
    for text in (*hosts.sent.values(), upload, printed.out, printed.err):
        assert TOKEN not in text
        assert "/home/li" not in text

    hosts.private = False
    hosts.sent = {}
    with refused("li/orders exists already"):
        exec(code, names)
    assert not hosts.sent


@pytest.mark.parametrize("kind", sorted(sharing.HOSTS))
def test_every_host_gets_a_private_model(model: Path, hosts: FakeHosts, kind: str) -> None:
    assert "private" in sharing.push(model, f"{kind}:li/orders")
    assert {"README.md", "config.json"} <= set(hosts.sent)
    assert hosts.settings["token"] == TOKEN
    assert hosts.settings.get("visibility", "private") == "private"


@pytest.mark.parametrize("kind", sorted(sharing.HOSTS))
def test_a_public_model_gets_new_files_only_where_that_is_asked_for(model: Path, hosts: FakeHosts, kind: str) -> None:
    hosts.exists = True
    hosts.private = False
    with refused("li/orders exists already"):
        sharing.push(model, f"{kind}:li/orders")
    assert not hosts.sent
    assert "PUBLIC" in sharing.push(model, f"{kind}:li/orders", private=False)
    assert hosts.sent


@pytest.mark.parametrize("kind", sorted(sharing.HOSTS))
def test_without_a_token_it_is_told_where_to_get_one(
    model: Path, hosts: FakeHosts, secrets: dict[str, str], kind: str
) -> None:
    secrets.clear()
    host = sharing.HOSTS[kind]
    with refused(f" needs {host.secret}, which was", f"one at {host.get_token} and store"):
        sharing.push(model, f"{kind}:li/orders")


def test_a_failure_shows_no_token(model: Path, hosts: FakeHosts) -> None:
    hosts.problem = OSError(f"no: {TOKEN}")
    with refused("The upload to", "OSError: no:") as caught:
        sharing.push(model, "hub:li/orders")
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(caught.value.args)
    assert caught.value.__cause__ is None, "the original may hold the token"
    assert not hosts.sent


def test_a_library_that_is_not_installed_is_named(
    model: Path, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", None)
    with refused("The upload to", "modelscope"):
        sharing.push(model, "modelscope:li/orders")


@pytest.mark.parametrize("to", ["li/orders", "hub:orders", "kaggle:li/x", "hub:../etc/x", "", f"hub:{TOKEN}@li/orders"])
def test_an_unknown_target_is_refused_and_a_token_in_it_not_shown(model: Path, to: str) -> None:
    with refused("The target is", '"file"') as caught:
        sharing.push(model, to)
    assert TOKEN not in str(caught.value)


def test_only_a_complete_model_is_shared(model: Path, hosts: FakeHosts, tmp_path: Path) -> None:
    (model / "generation_config.json").write_text("{no")
    with refused("The upload to"):
        sharing.push(model, "hub:li/orders")
    os.truncate(model / "model.safetensors", 1_000_000)
    with refused("is missing or damaged"):
        sharing.push(model, "file")
    (model / "model-2.safetensors").symlink_to("gone")
    for folder in (tmp_path, model):
        for to in ("hub:li/orders", "file"):
            with refused("lacks config.json or a GGUF file, or has"):
                sharing.push(folder, to)
    assert not hosts.sent


def test_one_file_holds_the_files_of_a_folder_of_links_and_its_checksum(model: Path, tmp_path: Path) -> None:
    """Links to files, as in the Hub's cache; made again in its place."""
    repo = tmp_path / "cache/models--one--merged"
    snapshot = repo / "snapshots/merged"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(model.iterdir()):
        shutil.copyfile(file, repo / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")

    packed = repo / "snapshots/merged.tar"
    for _ in range(2):
        assert str(packed) in sharing.single_file(snapshot)
    checksum = packed.with_name("merged.tar.sha256").read_text()
    assert checksum == f"{files.sha256(packed)}  merged.tar\n"

    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(packed) as tar:
        for member in tar:
            assert member.isreg()
            assert member.uname == ""
            assert member.gname == ""
        tar.extractall(tmp_path / "there", **safely)
    assert files.stamp(tmp_path / "there/merged") == files.stamp(model)


def test_a_link_that_leads_out_of_a_model_is_not_packed_or_uploaded(
    model: Path, hosts: FakeHosts, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_text("a key")
    (model / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    for to in ("file", "hub:me/model"):
        with refused(str(model / "vocab.txt")):
            sharing.push(model, to)
    assert not hosts.sent
    assert not list(tmp_path.rglob("*.tar"))


def test_a_planted_link_does_not_lead_one_file_elsewhere(model: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.write_text("years")
    (tmp_path / ".one.tar.partial").symlink_to(thesis)
    sharing.single_file(model, tmp_path / "one.tar")
    assert thesis.read_text() == "years"
    assert not (tmp_path / "one.tar").is_symlink()


def test_what_a_killed_process_left_of_one_file_is_removed(model: Path, tmp_path: Path) -> None:
    left_over = tmp_path / ".one.tar.0a1b2c3d.partial"
    left_over.write_text("half of one")
    sharing.single_file(model, tmp_path / "one.tar")
    assert not left_over.exists()


def test_of_two_that_pack_one_file_at_once_one_is_refused_or_both_are_whole(model: Path, tmp_path: Path) -> None:
    (model / "padding.txt").write_text("x" * 20_000_000)

    def pack(_: int) -> str:
        try:
            return sharing.single_file(model, tmp_path / "one.tar")
        except errors.CourseError as refusal:
            return str(refusal)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(pack, range(2)))
    packed = [answer for answer in answers if "Another process is writing" not in answer]
    checksum = files.sha256(tmp_path / "one.tar")
    assert packed
    for answer in packed:
        assert f"sha256 {checksum[:16]}" in answer
    assert (tmp_path / "one.tar.sha256").read_text().startswith(checksum)


def test_one_file_does_not_go_over_mine_or_into_the_model(model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.tar"
    notes.write_text("mine")
    for out in (notes, tmp_path / "run"):
        with refused("exists, and was not made here"):
            sharing.single_file(model, out)
    assert notes.read_text() == "mine"
    with refused("The result would go to"):
        sharing.single_file(model, model / "model.tar")


def test_one_file_leaves_nothing_where_there_is_no_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(errors.CourseError):
        sharing.single_file(model, tmp_path / "full.tar")
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "full.tar").exists()


def test_the_command_line_packs_one_file(model: Path, hosts: FakeHosts, tmp_path: Path) -> None:
    packed = tmp_path / "own.tar"
    result = CliRunner().invoke(cli.app, ["push", str(model), str(packed)])
    assert result.exit_code == 0
    assert packed.exists()
    assert not hosts.sent


def test_the_command_line_uploads(model: Path, hosts: FakeHosts) -> None:
    result = CliRunner().invoke(cli.app, ["push", str(model), "hub:li/orders"])
    assert result.exit_code == 0
    assert "private" in result.output
    assert TOKEN not in result.output
