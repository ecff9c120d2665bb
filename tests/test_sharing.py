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
    with files.complete_folder(
        folder, {"base": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "adapter": "x"}
    ) as new:
        shutil.copytree(files.TINY_MODEL, new, dirs_exist_ok=True)
        config = json.loads((new / "config.json").read_text())
        private = {"_name_or_path": "runs/li/merged", "deep": [{"text": {"n": 1, "files": ["/home/li/secret"]}}]}
        (new / "config.json").write_text(json.dumps(config | private))
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
    there = FakeHosts()
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", SimpleNamespace(HubApi=there))
    monkeypatch.setattr("huggingface_hub.HfApi", there)
    return there


def test_a_push_is_private_has_a_card_and_nothing_of_this_machine(
    model: Path, hosts: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / ".env.json").write_text("{}")
    (model / "training_args.bin").write_text("/home/li")
    pushed = sharing.push(model, "hub:li/orders")
    assert hosts.settings["endpoint"] == "https://huggingface.co" and hosts.settings["private"] is True  # no mirror
    assert pushed.startswith("https://huggingface.co/li/orders (") and "private" in pushed
    names = {file.name for file in files.TINY_MODEL.iterdir() if file.is_file()}
    assert set(hosts.sent) == names - set(sharing.NOT_UPLOADED) | {"README.md"}
    card, config = hosts.sent["README.md"], json.loads(hosts.sent["config.json"])
    assert "base_model: Qwen/Qwen2.5-7B-Instruct" in card and "# li/orders" in card
    assert config["deep"] == [{"text": {"n": 1}}] and config["model_type"] and "_name_or_path" not in config
    shown = "".join(hosts.sent.values()) + pushed + "".join(capsys.readouterr())
    assert "/home" not in shown and str(model.parent) not in shown and TOKEN not in shown
    assert "/home/li" in (model / "config.json").read_text() and files.stamp(model) is not None  # the original stays
    with files.complete_folder(model.parent / "fp8", {"format": "fp8", "base": "/home/li/models/tiny_base"}):
        pass
    card = sharing.model_card(model.parent / "fp8", "li/orders")
    assert "/home" not in card and "base model: tiny_base" in card and "base_model:" not in card and "fp8" in card


def test_the_upload_of_lesson_08_is_private_and_shows_no_token(
    model: Path, hosts: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (ROOT / "notebooks/08_export.py").read_text(encoding="utf-8").split("# %%\n")
    [code] = [cell.partition("# %% [markdown]")[0] for cell in cells if "upload_folder(" in cell]
    names: dict[str, Any] = {"PUSH_TO": "hub:li/orders", "EXPORTS": "", "folder": model, "sharing": sharing}
    exec(code, names)
    assert hosts.settings["private"] is True and hosts.settings["token"] == TOKEN and "README.md" in hosts.sent
    shown = str(names["upload"]) + "".join(hosts.sent.values()) + "".join(capsys.readouterr())
    assert "https://huggingface.co/li/orders" in shown and TOKEN not in shown and "/home/li" not in shown
    hosts.private, hosts.sent = False, {}
    with refused("li/orders exists already"):
        exec(code, names)
    assert not hosts.sent


@pytest.mark.parametrize("kind", sorted(sharing.HOSTS))
def test_every_host_gets_a_private_model_unless_a_public_one_is_asked_for(
    model: Path, hosts: FakeHosts, secrets: dict[str, str], kind: str
) -> None:
    assert "private" in sharing.push(model, f"{kind}:li/orders") and {"README.md", "config.json"} <= set(hosts.sent)
    assert hosts.settings["token"] == TOKEN
    assert hosts.settings.get("visibility", "private") == "private"
    hosts.exists, hosts.private, hosts.sent = True, False, {}
    with refused("li/orders exists already"):
        sharing.push(model, f"{kind}:li/orders")
    assert not hosts.sent and "PUBLIC" in sharing.push(model, f"{kind}:li/orders", private=False) and hosts.sent
    secrets.clear()
    with refused(
        f" needs {sharing.HOSTS[kind].secret}, which was", f"one at {sharing.HOSTS[kind].get_token} and store"
    ):
        sharing.push(model, f"{kind}:li/orders")


def test_a_failure_shows_no_token(model: Path, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.problem = OSError(f"no: {TOKEN}")
    with refused("The upload to", "OSError: no:") as caught:
        sharing.push(model, "hub:li/orders")
    assert TOKEN not in str(caught.value) and TOKEN not in repr(caught.value.args) and not hosts.sent
    assert caught.value.__cause__ is None, "the original may hold the token"
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", None)
    with refused("The upload to", "modelscope"):
        sharing.push(model, "modelscope:li/orders")


@pytest.mark.parametrize("to", ["li/orders", "hub:orders", "kaggle:li/x", "hub:../etc/x", "", f"hub:{TOKEN}@li/orders"])
def test_an_unknown_target_is_refused_and_a_token_in_it_not_shown(model: Path, to: str) -> None:
    with refused("The target is") as caught:
        sharing.push(model, to)
    assert TOKEN not in str(caught.value) and '"file"' in str(caught.value)


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
    snapshot, packed = repo / "snapshots/merged", repo / "snapshots/merged.tar"
    for folder in (snapshot, repo / "blobs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(model.iterdir()):
        shutil.copyfile(file, repo / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    for _ in range(2):
        assert str(packed) in sharing.single_file(snapshot)
    checksum = packed.with_name("merged.tar.sha256").read_text()
    assert checksum == f"{files.sha256(packed)}  merged.tar\n"
    with tarfile.open(packed) as tar:
        assert all(member.isreg() and member.uname + member.gname == "" for member in tar)
        tar.extractall(tmp_path / "there", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert files.stamp(tmp_path / "there/merged") == files.stamp(model)


def test_a_link_that_leads_out_of_a_model_is_not_packed_or_uploaded(
    model: Path, hosts: FakeHosts, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_text("a key")
    (model / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    for to in ("file", "hub:me/model"):
        with refused(str(model / "vocab.txt")):
            sharing.push(model, to)
    assert not hosts.sent and not list(tmp_path.rglob("*.tar"))


def test_a_planted_link_does_not_lead_one_file_elsewhere(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years")
    (tmp_path / ".one.tar.partial").symlink_to(tmp_path / "thesis")
    (tmp_path / ".one.tar.0a1b2c3d.partial").write_text("half of one, by a process that was killed")
    sharing.single_file(model, tmp_path / "one.tar")
    assert not (tmp_path / ".one.tar.0a1b2c3d.partial").exists()
    assert (tmp_path / "thesis").read_text() == "years" and not (tmp_path / "one.tar").is_symlink()


def test_of_two_that_pack_one_file_at_once_one_is_refused_or_both_are_whole(model: Path, tmp_path: Path) -> None:
    (model / "padding.txt").write_text("x" * 20_000_000)

    def pack(_: int) -> str:
        try:
            return sharing.single_file(model, tmp_path / "one.tar")
        except errors.CourseError as refusal:
            return str(refusal)

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(pack, range(2)))
    whole = files.sha256(tmp_path / "one.tar")
    packed = [line for line in lines if "Another process is writing" not in line]
    assert packed and all(f"sha256 {whole[:16]}" in line for line in packed)
    assert (tmp_path / "one.tar.sha256").read_text().startswith(whole)


def test_where_one_file_may_lie(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.tar").write_text("mine")
    for out in (tmp_path / "notes.tar", tmp_path / "run"):
        with refused("exists, and was not made here"):
            sharing.single_file(model, out)
    with refused("The result would go to"):
        sharing.single_file(model, model / "model.tar")
    assert (tmp_path / "notes.tar").read_text() == "mine"
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(errors.CourseError):
        sharing.single_file(model, tmp_path / "full.tar")
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "full.tar").exists()


def test_the_command_line(model: Path, hosts: FakeHosts, tmp_path: Path) -> None:
    packed = CliRunner().invoke(cli.app, ["push", str(model), str(tmp_path / "own.tar")])
    assert packed.exit_code == 0 and (tmp_path / "own.tar").exists() and not hosts.sent
    ran = CliRunner().invoke(cli.app, ["push", str(model), "hub:li/orders"])
    assert ran.exit_code == 0 and "private" in ran.output and TOKEN not in ran.output
