"""nbutils.sharing: nothing leaves unasked, private by default, no token and no path shown; one file that verifies."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from http import HTTPStatus
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from support import refused

from nbutils import cli, disk, errors, paths, sharing

TOKEN = "hf_correcthorsebatterystaple0123456"
SECRETS = ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "KAGGLE_API_TOKEN", "KAGGLE_USERNAME", "KAGGLE_KEY")


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A merged folder as lesson 04 leaves it, with a local path in its config."""
    folder = tmp_path / "run/merged"
    folder.parent.mkdir()
    with paths.whole_folder(folder, {"base": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "adapter": "x"}) as new:
        shutil.copytree(paths.TINY_MODEL, new, dirs_exist_ok=True)
        config = json.loads((new / "config.json").read_text())
        (new / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/li/secret-project"}))
    return folder


class FakeHub:
    """The API of the Hub and of ModelScope: what was called, and what the uploaded folder held."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.sent: dict[str, str] = {}
        self.private, self.exists = True, False
        self.reply: dict[str, Any] | None = None

    def create_repo(self, repo_id: str, **settings: Any) -> None:
        self.calls["create"] = settings

    def repo_exists(self, repo_id: str, **settings: Any) -> bool:
        return self.exists

    def get_model(self, name: str) -> dict[str, Any]:
        return {"Visibility": 1 if self.private else 5} if self.reply is None else self.reply

    def model_info(self, name: str) -> Any:
        return SimpleNamespace(private=self.private)

    def upload_folder(self, *, folder_path: Any, **settings: Any) -> None:
        files = [file for file in Path(folder_path).rglob("*") if file.is_file()]
        names = {file.relative_to(folder_path).as_posix(): file for file in files}
        self.sent = {name: file.read_text(errors="replace")[:5000] for name, file in names.items()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    import huggingface_hub

    api = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **settings: api.calls.update(made=settings) or api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return api


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    api = FakeHub()
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["modelscope.hub.api"].HubApi = lambda **settings: api  # type: ignore[attr-defined]
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    return api


class FakeKaggle:
    """kagglehub and kagglesdk: what is there, and what was sent with which token."""

    def __init__(self) -> None:
        self.there: Any = HTTPStatus.NOT_FOUND
        self.sent: list[tuple[str, str | None, list[str]]] = []
        self.asked: list[tuple[str, str, str | None]] = []
        self.models = self.model_api_client = self

    def __enter__(self) -> FakeKaggle:
        return self

    def __exit__(self, *given: object) -> None:
        pass

    def get_model(self, request: Any) -> Any:
        self.asked.append((request.owner_slug, request.model_slug, os.environ.get("KAGGLE_API_TOKEN")))
        if isinstance(self.there, HTTPStatus):
            response = requests.Response()
            response.status_code = self.there
            raise requests.HTTPError(f"no: {TOKEN}", response=response)
        return self.there

    def model_upload(self, handle: str, folder: str, **settings: Any) -> None:
        self.sent.append((handle, os.environ.get("KAGGLE_API_TOKEN"), sorted(os.listdir(folder))))


@pytest.fixture
def kaggle(monkeypatch: pytest.MonkeyPatch) -> FakeKaggle:
    there = FakeKaggle()
    contents: dict[str, dict[str, Any]] = {
        "kagglehub": {"model_upload": there.model_upload},
        "kagglehub.clients": {"build_kaggle_client": lambda: there},
        "kagglesdk": {}, "kagglesdk.models": {}, "kagglesdk.models.types": {},
        "kagglesdk.models.types.model_api_service": {"ApiGetModelRequest": SimpleNamespace},
    }  # fmt: skip
    for name, inside in contents.items():
        module = ModuleType(name)
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sharing.platforms, "secret", {"KAGGLE_API_TOKEN": TOKEN}.get)  # as from Kaggle's secrets
    return there


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_a_push_is_private_has_a_card_and_nothing_of_this_machine(
    model: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = sharing.push(model, "hub:li/orders")
    assert hub.calls["made"] == {"endpoint": "https://huggingface.co", "token": TOKEN}  # never to a mirror
    assert hub.calls["create"]["private"] is True
    assert pushed.url == "https://huggingface.co/li/orders" and pushed.private
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent)
    assert not {paths.STAMP, "training.json"} & set(hub.sent)
    assert "base_model: Qwen/Qwen2.5-7B-Instruct" in hub.sent["README.md"]
    shown = "".join(hub.sent.values()) + str(pushed) + "".join(capsys.readouterr())
    assert "/home" not in shown and str(model.parent) not in shown and TOKEN not in shown
    assert "/home/li" in (model / "config.json").read_text() and paths.stamp(model) is not None  # the original stays
    assert [place.name for place in model.parent.iterdir()] == ["merged"]


def test_a_public_push_must_be_asked_for(model: Path, hub: FakeHub) -> None:
    hub.private = False
    with refused("sharing.public_repository", name="li/orders"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent and not sharing.push(model, "hub:li/orders", private=False).private and hub.sent
    hub.private = True
    assert sharing.push(model, "hub:li/orders", private=False).private  # an old private one stays private


@pytest.mark.parametrize(
    "to", ["li/orders", "hub:orders", "hub:li/orders/x", "drive:li/x", "hub:../etc/x", "", f"hub:{TOKEN}@li/orders"]
)
def test_an_unknown_target_is_refused_and_a_token_in_it_not_shown(model: Path, to: str) -> None:
    with refused("sharing.unknown_target") as caught:
        sharing.push(model, to)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("share", [lambda folder: sharing.push(folder, "hub:li/orders"), sharing.single_file])
def test_only_a_model_is_shared(share: Any, tmp_path: Path) -> None:
    with refused("sharing.no_model"):
        share(tmp_path)


@pytest.mark.parametrize("kind", sorted(sharing.PLACES))
def test_a_missing_token_is_named_with_where_to_get_one(model: Path, kind: str) -> None:
    place = sharing.PLACES[kind]
    with refused("sharing.missing_token", place.secrets[0][0], get_token=place.get_token):
        sharing.push(model, f"{kind}:li/orders")


@pytest.mark.parametrize(
    ("kind", "module"), [("modelscope", "modelscope"), ("kaggle", "kagglehub"), ("kaggle", "kagglehub.clients")]
)
def test_a_missing_or_old_package_is_named(
    model: Path, kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sharing.platforms, "secret", lambda name: TOKEN)
    with refused("sharing.missing_package", package=module.partition(".")[0]):
        sharing.push(model, f"{kind}:li/orders")
    assert not kaggle.sent


@pytest.mark.parametrize("reply", [{"Visibility": 1}, {"visibility": 1}, {}])
def test_modelscope_gets_a_new_private_repository(model: Path, modelscope: FakeHub, reply: dict[str, Any]) -> None:
    modelscope.reply = reply  # a new private one may be reported without its visibility
    assert sharing.push(model, "modelscope:li/orders").private and "README.md" in modelscope.sent
    created = modelscope.calls["create"]
    assert created["visibility"] == "private" and created["exist_ok"] is False  # a foreign one is not taken for ours


@pytest.mark.parametrize(
    ("exists", "reply"),
    [(True, {"Visibility": 5}), (True, {"visibility": 3}), (True, {"Visibility": "?"}), (True, {}),
     (False, {"Visibility": 5})],
)  # fmt: skip
def test_modelscope_must_say_that_it_is_private(
    model: Path, modelscope: FakeHub, exists: bool, reply: dict[str, Any]
) -> None:
    modelscope.exists, modelscope.reply = exists, reply
    with refused("sharing.public_repository"):
        sharing.push(model, "modelscope:li/orders")
    assert not modelscope.sent and ("create" in modelscope.calls) is not exists
    assert not sharing.push(model, "modelscope:li/orders", private=False).private and modelscope.sent


@pytest.mark.parametrize("there", [HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, SimpleNamespace(is_private=True)])
def test_kaggle_gets_its_token_for_the_upload_only(model: Path, kaggle: FakeKaggle, there: Any) -> None:
    kaggle.there = there
    assert sharing.push(model, "kaggle:li/orders").private
    handle, token, files = kaggle.sent[0]
    assert handle == "li/orders/transformers/default" and token == TOKEN and "README.md" in files
    assert kaggle.asked == [("li", "orders", TOKEN)] and "KAGGLE_API_TOKEN" not in os.environ
    with refused("sharing.kaggle_is_private"):
        sharing.push(model, "kaggle:li/orders", private=False)
    assert len(kaggle.sent) == 1


@pytest.mark.parametrize(
    ("there", "code"),
    [(SimpleNamespace(is_private=False), "public_repository"), (SimpleNamespace(is_private=None), "public_repository"),
     (HTTPStatus.INTERNAL_SERVER_ERROR, "upload_failed")],
)  # fmt: skip
def test_kaggle_is_asked_before_the_upload(model: Path, kaggle: FakeKaggle, there: Any, code: str) -> None:
    kaggle.there = there
    with refused(f"sharing.{code}") as caught:
        sharing.push(model, "kaggle:li/orders")
    assert not kaggle.sent and "KAGGLE_API_TOKEN" not in os.environ
    assert TOKEN not in str(caught.value) and TOKEN not in str(caught.value.values)
    assert caught.value.__cause__ is None  # the original may hold the token


# --- which files ------------------------------------------------------------------------------------------------------


def test_a_folder_of_links_is_shared_as_the_files_they_lead_to(tmp_path: Path, hub: FakeHub) -> None:
    """A model in the Hub's cache."""
    blobs, snapshot = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/abc"
    shutil.copytree(paths.TINY_MODEL, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    size = (paths.TINY_MODEL / "model.safetensors").stat().st_size
    with tarfile.open(sharing.single_file(snapshot, tmp_path / "one.tar", progress=False).file) as tar:
        assert all(member.isreg() for member in tar) and tar.getmember("abc/model.safetensors").size == size
    assert sharing.push(snapshot, "hub:li/orders").gib * paths.GIB > size
    assert {"config.json", "model.safetensors"} <= set(hub.sent) and (snapshot / "config.json").is_symlink()


@pytest.mark.parametrize(("name", "target"), [("model-2.safetensors", "gone"), ("data", "..")])
def test_other_links_are_refused(model: Path, hub: FakeHub, name: str, target: str) -> None:
    (model / name).symlink_to(target)
    with refused("sharing.link", link=model / name):
        sharing.single_file(model, progress=False)
    with refused("sharing.link"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent


def test_hidden_and_half_written_files_stay_here(model: Path, hub: FakeHub, tmp_path: Path) -> None:
    (model / ".env").write_text("HF_TOKEN=x")
    for name in (".ipynb_checkpoints", "__pycache__"):
        (model / name).mkdir()
        (model / name / "config.json").write_text("{}")
    (model / "model-2.safetensors.partial").write_text("half")
    (model / "training_args.bin").write_text("/home/li")
    with tarfile.open(sharing.single_file(model, tmp_path / "one.tar", progress=False).file) as tar:
        packed = {name.removeprefix("merged/") for name in tar.getnames()}
    sharing.push(model, "hub:li/orders")
    files = {file.name for file in paths.TINY_MODEL.iterdir() if file.is_file()}
    assert packed == files | {paths.STAMP} and set(hub.sent) == files - set(sharing.NOT_UPLOADED) | {"README.md"}


PRIVATE: dict[str, Any] = {
    "config.json": {"text_config": {"_name_or_path": "/home/li/one"}, "parts": [{"deep": {"name_or_path": "../li/x"}}]},
    "generation_config.json": {"_name_or_path": "runs/li/merged"},
    "tokenizer_config.json": {"tokenizer_file": "/home/li/two/tokenizer.json", "name_or_path": "C:\\\\li\\\\x"},
    "trainer_state.json": ["~/li/three", {"best": "/home/li/four words/checkpoint-3", "from": "file:///home/li/five"}],
    "vision/processor_config.json": {"a": [[{"b": "/root/li/six"}]], "/root/li/eight": 1},
    "tokenizer.json": {"model": {"vocab": {"/usr/li": 0}}, "name_or_path": "/home/li/seven"},
}


def test_no_local_path_is_uploaded_at_any_depth(model: Path, hub: FakeHub) -> None:
    (model / "vision").mkdir()
    public = {"eos_token": "</s>", "base": "Qwen/Qwen2.5-7B", "n": 1, "merges": [["/", "usr/li"]], "think": "/think"}
    for name, settings in PRIVATE.items():
        (model / name).write_text(json.dumps([*settings, public] if isinstance(settings, list) else settings | public))
    before = {name: (model / name).read_text() for name in PRIVATE}
    sharing.push(model, "hub:li/orders")
    for name in PRIVATE:
        shown = hub.sent[name].replace("usr/li", "")
        assert "li/" not in shown and "/li" not in shown and "\\\\li" not in shown, (name, hub.sent[name])
        sent = json.loads(hub.sent[name])
        assert public.items() <= (sent[-1] if isinstance(sent, list) else sent).items()
    assert json.loads(hub.sent["tokenizer.json"])["model"] == {"vocab": {"/usr/li": 0}}  # a vocabulary is kept
    assert before == {name: (model / name).read_text() for name in PRIVATE}


@pytest.mark.parametrize("text", [b"{no", b"\xff\xfe{}"])
def test_a_damaged_json_file_is_not_uploaded(model: Path, hub: FakeHub, text: bytes) -> None:
    (model / "generation_config.json").write_bytes(text)
    with refused("sharing.damaged_json", file="generation_config.json"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent and [place.name for place in model.parent.iterdir()] == ["merged"]


def test_a_card_names_no_path(tmp_path: Path) -> None:
    about = {"format": "fp8", "base": "/home/li/models/tiny_base", "method": "FP8_DYNAMIC, rounded without data"}
    with paths.whole_folder(tmp_path / "fp8", about) as new:
        shutil.copy(paths.TINY_MODEL / "config.json", new)
    card = sharing.model_card(tmp_path / "fp8", "li/orders")
    assert "/home" not in card and "base model: tiny_base" in card and "base_model:" not in card
    assert "vllm serve li/orders" in card


# --- one file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [".", "../merged/", "text"])
def test_one_file_holds_the_folder_and_verifies(
    given: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    made = sharing.single_file(str(model) if given == "text" else Path(given), progress=False)
    assert made.file == model.parent / "merged.tar" and made.bytes == made.file.stat().st_size
    assert made.sha256 == paths.sha256(made.file)
    with tarfile.open(made.file) as tar:
        assert {member.uname + member.gname for member in tar} == {""}
        tar.extractall(tmp_path / "there", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert paths.stamp(tmp_path / "there/merged") == paths.stamp(model)
    assert sharing.single_file(model, progress=False).sha256 == made.sha256  # made again in its place


def test_an_archive_that_does_not_verify_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = sharing._pack

    def damaged(folder: Path, files: list[Path], partial: Path, progress: bool) -> tuple[str, int]:
        packed = pack(folder, files, partial, progress)
        with open(partial, "r+b") as file:
            file.seek(partial.stat().st_size // 2)
            file.write(b"\xff" * 64)
        return packed

    monkeypatch.setattr(sharing, "_pack", damaged)
    with refused("sharing.archive_differs"):
        sharing.single_file(model, progress=False)
    assert [place.name for place in model.parent.iterdir()] == ["merged"]


def test_where_one_file_may_lie(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latest").symlink_to(model)
    for out in (model / "model.tar", tmp_path / "latest/x/model.tar", tmp_path / "run"):
        with refused("sharing.archive_place"):
            sharing.single_file(model, out, progress=False)
    (tmp_path / "notes.tar").write_text("mine")
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        tar.add(model, model.name + "/copy")
    for out in (tmp_path / "notes.tar", tmp_path / "foreign.tar"):
        before = out.read_bytes()
        with refused("sharing.file_exists"):
            sharing.single_file(model, out, progress=False)
        assert out.read_bytes() == before
    assert sharing.single_file(model, tmp_path / "new/place/one.tar", progress=False).file.is_file()
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(errors.CourseError):
        sharing.single_file(model, tmp_path / "full.tar", progress=False)
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "full.tar").exists()


@pytest.mark.parametrize(
    ("platform", "size", "hint"),
    [("colab", 1000, "files.download("), ("colab", 300_000_000, "MyDrive"), ("kaggle", 1000, "/kaggle/working"),
     ("autodl", 1000, "scp -P PORT"), ("local", 1000, "right-click")],
)  # fmt: skip
def test_how_to_download_it(
    platform: str, size: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "merged.tar", "wb") as file:
        file.truncate(size)
    monkeypatch.setattr(sharing.platforms, "detect", lambda: SimpleNamespace(name=platform))
    assert hint in sharing.download_hint(tmp_path / "merged.tar")


def test_the_command_line(model: Path, hub: FakeHub, tmp_path: Path) -> None:
    packed = CliRunner().invoke(cli.app, ["push", str(model), str(tmp_path / "own.tar")])
    assert packed.exit_code == 0 and (tmp_path / "own.tar").exists() and not hub.sent
    ran = CliRunner().invoke(cli.app, ["push", str(model), "hub:li/orders"])
    assert ran.exit_code == 0 and "private" in ran.output and TOKEN not in ran.output
