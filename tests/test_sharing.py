"""nbutils.sharing: nothing leaves unasked, private by default, no token and no path shown; one file that verifies."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from nbutils import cli, disk, paths, sharing
from nbutils.errors import CourseError
from nbutils.sharing import contents, packing, pushing

TOKEN = "hf_correcthorsebatterystaple0123456"
SECRETS = ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "KAGGLE_API_TOKEN", "KAGGLE_USERNAME", "KAGGLE_KEY")


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A merged folder as lesson 04 leaves it, with a private path in its settings."""
    folder = tmp_path / "run/merged"
    folder.parent.mkdir()
    with paths.whole_folder(folder, {"base": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "adapter": "x"}) as new:
        shutil.copytree(paths.TINY_MODEL, new, dirs_exist_ok=True)
        config = json.loads((new / "config.json").read_text())
        (new / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/li/secret-project"}))
    return folder


class Recorded:
    """A library's upload call, recorded: what was asked, and what the folder held at that moment."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = [("made", settings)]
        self.sent: dict[str, str] = {}
        self.public = self.exists = False
        self.reply: dict[str, Any] | None = None

    def create_repo(self, repo_id: str, **settings: Any) -> None:
        self.calls.append(("create", {"repo_id": repo_id, **settings}))

    def repo_exists(self, repo_id: str, **settings: Any) -> bool:
        return self.exists

    def get_model(self, name: str) -> dict[str, Any]:
        return {"Visibility": 5 if self.public else 1} if self.reply is None else self.reply

    def model_info(self, name: str) -> Any:
        return type("Info", (), {"private": not self.public})()

    def upload_folder(self, *, folder_path: Any, **settings: Any) -> None:
        self.calls.append(("upload", settings))
        files = [file for file in Path(folder_path).rglob("*") if file.is_file()]
        self.sent = {
            file.relative_to(folder_path).as_posix(): file.read_text(errors="replace")[:5000] for file in files
        }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    import huggingface_hub

    api = Recorded()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **settings: api.calls.append(("made", settings)) or api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return api


# --- pushing ---------------------------------------------------------------------------------------------------------


def test_a_push_is_private_has_a_card_and_takes_nothing_of_this_machine_along(
    model: Path, hub: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = sharing.push(model, "hub:li/orders")
    calls = dict(hub.calls)
    assert (
        calls["made"] == {"endpoint": "https://huggingface.co", "token": TOKEN} and calls["create"]["private"] is True
    )
    assert pushed.url == "https://huggingface.co/li/orders" and "private" in str(pushed)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent)
    assert not {paths.STAMP, "training.json"} & set(hub.sent)
    assert "base_model: Qwen/Qwen2.5-7B-Instruct" in hub.sent["README.md"]
    sent = "".join(hub.sent.values()) + str(pushed) + "".join(capsys.readouterr())
    assert "/home" not in sent and str(model.parent) not in sent and TOKEN not in sent
    assert "/home/li" in (model / "config.json").read_text() and paths.stamp(model) is not None  # the original stays
    assert [place.name for place in model.parent.iterdir()] == ["merged"]


def test_a_public_push_must_be_asked_for(model: Path, hub: Recorded) -> None:
    hub.public = True
    with pytest.raises(CourseError, match="exists already and is public"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent
    assert "PUBLIC" in str(sharing.push(model, "hub:li/orders", private=False)) and hub.sent


@pytest.mark.parametrize("to", ["li/orders", "hub:orders", "hub:li/orders/x", "drive:li/orders", "hub:../etc/x", ""])
def test_a_target_that_is_none(model: Path, to: str) -> None:
    with pytest.raises(CourseError, match="hub:owner/name"):
        sharing.push(model, to)


def test_no_model_no_push(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no model folder"):
        sharing.push(tmp_path, "hub:li/orders")


@pytest.mark.parametrize("kind", sorted(sharing.PLACES))
def test_a_missing_token_is_named_with_where_to_get_one(model: Path, kind: str) -> None:
    place = sharing.PLACES[kind]
    with pytest.raises(CourseError, match=place.get_token) as told:
        sharing.push(model, f"{kind}:li/orders")
    assert place.secrets[0][0] in str(told.value)


@pytest.mark.parametrize(("kind", "module"), [("modelscope", "modelscope"), ("kaggle", "kagglehub")])
def test_a_missing_library_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv(sharing.PLACES[kind].secrets[0][0], TOKEN)
    with pytest.raises(CourseError, match=f"pip install {module}"):
        sharing.push(model, f"{kind}:li/orders")


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    api = Recorded()
    fake = ModuleType("modelscope.hub.api")
    fake.HubApi = lambda **settings: api  # type: ignore[attr-defined]
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", fake)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    return api


@pytest.mark.parametrize("reply", [{"Visibility": 1}, {"visibility": 1}, {}])
def test_modelscope_gets_a_new_private_repository(model: Path, modelscope: Recorded, reply: dict[str, Any]) -> None:
    modelscope.reply = reply  # what was just made as private may be reported without a word about it
    assert "private" in str(sharing.push(model, "modelscope:li/orders")) and "README.md" in modelscope.sent
    made = dict(modelscope.calls)["create"]
    assert made["visibility"] == "private" and made["exist_ok"] is False  # a foreign one is not taken for ours


@pytest.mark.parametrize("reply", [{"Visibility": 5}, {"visibility": 3}, {"Visibility": None}, {"Visibility": "?"}, {}])
def test_modelscope_must_say_that_an_old_repository_is_private(
    model: Path, modelscope: Recorded, reply: dict[str, Any]
) -> None:
    modelscope.exists, modelscope.reply = True, reply
    with pytest.raises(CourseError, match=r"(?s)li/orders exists already and .*--public"):
        sharing.push(model, "modelscope:li/orders")
    assert not modelscope.sent and "create" not in dict(modelscope.calls)
    assert "PUBLIC" in str(sharing.push(model, "modelscope:li/orders", private=False)) and modelscope.sent


def test_modelscope_is_not_trusted_to_have_made_it_private(model: Path, modelscope: Recorded) -> None:
    modelscope.public = True
    with pytest.raises(CourseError, match="is public"):
        sharing.push(model, "modelscope:li/orders")
    assert not modelscope.sent


def test_what_is_told_is_what_is_there(model: Path, modelscope: Recorded, hub: Recorded) -> None:
    modelscope.exists = True
    assert "PUBLIC" not in str(sharing.push(model, "modelscope:li/orders", private=False))
    assert "PUBLIC" not in str(sharing.push(model, "hub:li/orders", private=False))  # an old one stays private


class Kaggle:
    """kagglehub and kagglesdk as far as they are asked: what is there, and what was sent with which token."""

    def __init__(self) -> None:
        self.there: Any = HTTPStatus.NOT_FOUND
        self.sent: list[tuple[str, str | None, list[str]]] = []
        self.asked: list[tuple[str, str, str | None]] = []
        self.models = self.model_api_client = self

    def __enter__(self) -> Kaggle:
        return self

    def __exit__(self, *told: object) -> None:
        pass

    def get_model(self, request: Any) -> Any:
        self.asked.append((request.owner_slug, request.model_slug, os.environ.get("KAGGLE_API_TOKEN")))
        if isinstance(self.there, HTTPStatus):
            answer = requests.Response()
            answer.status_code = self.there
            raise requests.HTTPError(f"no: {TOKEN}", response=answer)
        return self.there

    def model_upload(self, handle: str, folder: str, **settings: Any) -> None:
        self.sent.append((handle, os.environ.get("KAGGLE_API_TOKEN"), sorted(os.listdir(folder))))


@pytest.fixture
def kaggle(monkeypatch: pytest.MonkeyPatch) -> Kaggle:
    there = Kaggle()
    contents_of: dict[str, dict[str, Any]] = {
        "kagglehub": {"model_upload": there.model_upload},
        "kagglehub.clients": {"build_kaggle_client": lambda: there},
        "kagglesdk": {}, "kagglesdk.models": {}, "kagglesdk.models.types": {},
        "kagglesdk.models.types.model_api_service": {"ApiGetModelRequest": SimpleNamespace},
    }  # fmt: skip
    for name, inside in contents_of.items():
        module = ModuleType(name)
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(pushing.platforms, "secret", {"KAGGLE_API_TOKEN": TOKEN}.get)  # as from Kaggle's secrets
    return there


@pytest.mark.parametrize("there", [HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, SimpleNamespace(is_private=True)])
def test_kaggle_gets_its_token_for_the_upload_only(model: Path, kaggle: Kaggle, there: Any) -> None:
    kaggle.there = there
    assert "(0.0" in (told := str(sharing.push(model, "kaggle:li/orders"))) and told.endswith("private)")
    handle, token, files = kaggle.sent[0]
    assert handle == "li/orders/transformers/default" and token == TOKEN and "README.md" in files
    assert kaggle.asked == [("li", "orders", TOKEN)] and "KAGGLE_API_TOKEN" not in os.environ
    with pytest.raises(CourseError, match="every new model private"):
        sharing.push(model, "kaggle:li/orders", private=False)
    assert len(kaggle.sent) == 1


@pytest.mark.parametrize("there", [SimpleNamespace(is_private=False), SimpleNamespace(is_private=None)])
def test_kaggle_is_asked_before_the_upload(model: Path, kaggle: Kaggle, there: Any) -> None:
    kaggle.there = there
    with pytest.raises(CourseError, match=r"(?s)li/orders exists already and .*--public"):
        sharing.push(model, "kaggle:li/orders")
    assert not kaggle.sent and "KAGGLE_API_TOKEN" not in os.environ
    assert "PUBLIC" in str(sharing.push(model, "kaggle:li/orders", private=False)) and kaggle.sent


def test_kaggle_that_does_not_answer_gets_nothing(model: Path, kaggle: Kaggle) -> None:
    kaggle.there = HTTPStatus.INTERNAL_SERVER_ERROR
    with pytest.raises(CourseError, match="the upload to kaggle:li/orders failed: HTTPError") as told:
        sharing.push(model, "kaggle:li/orders")
    assert not kaggle.sent and TOKEN not in str(told.value)


def test_a_kagglehub_too_old_to_be_asked_is_named(model: Path, kaggle: Kaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kagglehub.clients", ModuleType("kagglehub.clients"))
    with pytest.raises(CourseError, match="too old"):
        sharing.push(model, "kaggle:li/orders")
    assert not kaggle.sent


def test_a_token_in_the_target_is_not_shown(model: Path) -> None:
    with pytest.raises(CourseError, match="the target is") as told:
        sharing.push(model, f"hub:{TOKEN}@li/orders")
    assert TOKEN not in str(told.value)


@pytest.fixture
def refusing_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A real HTTP server in place of the Hub that refuses every token, and what it was asked."""
    asked: list[str] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"{self.path} {self.headers.get('authorization')}")
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.dumps({"error": f"Invalid token {TOKEN}"}).encode()
            self.send_response(401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import huggingface_hub

    real, address = huggingface_hub.HfApi, f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **settings: real(**settings | {"endpoint": address}))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield asked
    server.shutdown()


def test_a_refused_token_is_told_and_never_shown(model: Path, refusing_hub: list[str]) -> None:
    with pytest.raises(CourseError, match="the upload to hub:li/orders failed") as told:
        sharing.push(model, "hub:li/orders")
    assert refusing_hub[0].startswith("/api/repos/create") and TOKEN in refusing_hub[0]  # it went where it belongs
    assert TOKEN not in str(told.value) and told.value.__cause__ is None and told.value.__suppress_context__


# --- what of a folder is given away ----------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model as the Hub's cache keeps it: every file is a link with a relative target."""
    blobs, folder = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/abc"
    shutil.copytree(paths.TINY_MODEL, blobs)
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(f"../../blobs/{file.name}")
    return folder


def test_a_folder_of_links_is_pushed_as_the_files_they_lead_to(snapshot: Path, hub: Recorded) -> None:
    pushed = sharing.push(snapshot, "hub:li/orders")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent)
    assert pushed.gib * paths.GIB > (paths.TINY_MODEL / "model.safetensors").stat().st_size
    assert (snapshot / "config.json").is_symlink()


def test_a_folder_of_links_is_packed_as_the_files_they_lead_to(snapshot: Path, tmp_path: Path) -> None:
    weights = "abc/model.safetensors"
    (snapshot / "second.safetensors").hardlink_to(snapshot.parents[1] / "blobs/model.safetensors")
    made = sharing.single_file(snapshot, tmp_path / "one.tar", progress=False)
    with tarfile.open(made.file) as tar:
        assert all(member.isreg() for member in tar)
        assert tar.getmember(weights).size == (paths.TINY_MODEL / "model.safetensors").stat().st_size


def test_room_for_one_file_is_counted_behind_the_links(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (paths.TINY_MODEL / "model.safetensors").stat().st_size / paths.GIB
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.01 + size / 2)
    with pytest.raises(CourseError, match="one file of the model needs"):
        sharing.single_file(snapshot, progress=False)


def test_a_disk_without_second_names_still_serves(
    snapshot: Path, hub: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: Any) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(contents.os, "link", refuse)
    sharing.push(snapshot, "hub:li/orders")
    monkeypatch.setattr(contents.os, "symlink", refuse)
    sharing.push(snapshot, "hub:li/orders")
    assert "model.safetensors" in hub.sent


@pytest.mark.parametrize(("name", "target"), [("model-2.safetensors", "gone"), ("data", "..")])
def test_a_link_to_nothing_or_to_a_folder_is_no_part_of_a_model(
    model: Path, hub: Recorded, name: str, target: str
) -> None:
    (model / name).symlink_to(target)
    with pytest.raises(CourseError, match=f"{name} is a link to"):
        sharing.single_file(model, progress=False)
    with pytest.raises(CourseError, match=f"{name} is a link to"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent


def test_what_is_hidden_or_half_written_stays_here(model: Path, hub: Recorded, tmp_path: Path) -> None:
    (model / ".env").write_text("HF_TOKEN=x")
    for name in (".ipynb_checkpoints", "__pycache__"):
        (model / name).mkdir()
        (model / name / "config.json").write_text("{}")
    (model / "model-2.safetensors.partial").write_text("half")
    (model / "training_args.bin").write_text("/home/li")
    with tarfile.open(sharing.single_file(model, tmp_path / "one.tar", progress=False).file) as tar:
        packed = {name.removeprefix("merged/") for name in tar.getnames()}
    sharing.push(model, "hub:li/orders")
    given = {file.name for file in paths.TINY_MODEL.iterdir() if file.is_file()}
    assert packed == given | {paths.STAMP} and set(hub.sent) == given - set(contents.OWN) | {"README.md"}


PRIVATE: dict[str, Any] = {
    "config.json": {"text_config": {"_name_or_path": "/home/li/one"}, "parts": [{"deep": {"name_or_path": "../li/x"}}]},
    "generation_config.json": {"_name_or_path": "runs/li/merged"},
    "tokenizer_config.json": {"tokenizer_file": "/home/li/two/tokenizer.json", "name_or_path": "C:\\\\li\\\\x"},
    "trainer_state.json": ["~/li/three", {"best": "/home/li/four words/checkpoint-3", "from": "file:///home/li/five"}],
    "vision/processor_config.json": {"a": [[{"b": "/root/li/six"}]], "/root/li/eight": 1},
    "tokenizer.json": {"model": {"vocab": {"/usr/li": 0}}, "name_or_path": "/home/li/seven"},
}


def test_no_private_path_is_uploaded_however_deep_it_lies(model: Path, hub: Recorded) -> None:
    (model / "vision").mkdir()
    for name, settings in PRIVATE.items():
        kept = {"eos_token": "</s>", "base": "Qwen/Qwen2.5-7B", "n": 1, "merges": [["/", "usr/li"]], "think": "/think"}
        (model / name).write_text(json.dumps([*settings, kept] if isinstance(settings, list) else settings | kept))
    before = {name: (model / name).read_text() for name in PRIVATE}
    sharing.push(model, "hub:li/orders")
    for name, text in ((name, hub.sent[name]) for name in PRIVATE):
        told = text.replace("usr/li", "")
        assert "li/" not in told and "/li" not in told and "\\\\li" not in told, (name, text)
        kept = json.loads(text)[-1] if name == "trainer_state.json" else json.loads(text)
        assert kept["eos_token"] == "</s>" and kept["base"] == "Qwen/Qwen2.5-7B" and kept["think"] == "/think"
        assert kept["merges"] == [["/", "usr/li"]]
    assert json.loads(hub.sent["tokenizer.json"])["model"] == {"vocab": {"/usr/li": 0}}
    assert before == {name: (model / name).read_text() for name in PRIVATE}


def test_a_vocabulary_is_not_searched_for_paths(model: Path, hub: Recorded) -> None:
    (model / "tokenizer.json").write_text(json.dumps({"model": {"merges": [["/usr/local", "/bin"]]}}))
    sharing.push(model, "hub:li/orders")
    assert hub.sent["tokenizer.json"] == (model / "tokenizer.json").read_text()


@pytest.mark.parametrize("text", [b"{no", b"\xff\xfe{}"])
def test_damaged_settings_are_not_uploaded(model: Path, hub: Recorded, text: bytes) -> None:
    (model / "generation_config.json").write_bytes(text)
    with pytest.raises(CourseError, match=r"generation_config\.json cannot be read"):
        sharing.push(model, "hub:li/orders")
    assert not hub.sent and [place.name for place in model.parent.iterdir()] == ["merged"]


@pytest.mark.parametrize("given", [".", "../merged/", "text"])
def test_the_folder_one_stands_in_has_a_name(
    model: Path, hub: Recorded, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(model)
    folder: Any = str(model) if given == "text" else Path(given)
    made = sharing.single_file(folder, progress=False)
    assert made.file == model.parent / "merged.tar"
    with tarfile.open(made.file) as tar:
        assert "merged/config.json" in tar.getnames()
    sharing.push(folder, "hub:li/orders")
    assert "config.json" in hub.sent


# --- the card --------------------------------------------------------------------------------------------------------


def test_a_card_names_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    about = {"format": "fp8", "base": "/home/li/models/tiny_base", "method": "FP8_DYNAMIC, rounded without data"}
    with paths.whole_folder(folder, about) as new:
        shutil.copy(paths.TINY_MODEL / "config.json", new)
    card = sharing.model_card(folder, "li/orders")
    assert "/home" not in card and "base model: tiny_base" in card and "base_model:" not in card
    assert "fp8: half the size" in card and "vllm serve li/orders" in card


# --- one file --------------------------------------------------------------------------------------------------------


def test_one_file_holds_the_folder_and_verifies(model: Path, tmp_path: Path) -> None:
    made = sharing.single_file(model, progress=False)
    assert made.file == model.parent / "merged.tar" and made.bytes == made.file.stat().st_size
    assert made.sha256 == paths.sha256(made.file) and made.sha256[:16] in str(made)
    with tarfile.open(made.file) as tar:
        assert {member.uname + member.gname for member in tar} == {""}
        tar.extractall(tmp_path / "there", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert paths.stamp(tmp_path / "there/merged") == paths.stamp(model)
    assert sharing.single_file(model, tmp_path / "again.tar", progress=False).sha256 == made.sha256


def test_a_file_of_another_kind_is_not_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.tar").write_text("mine")
    with pytest.raises(CourseError, match="is no archive of a merged folder"):
        sharing.single_file(model, tmp_path / "notes.tar", progress=False)
    assert (tmp_path / "notes.tar").read_text() == "mine"
    first, again = (sharing.single_file(model, tmp_path / "model.tar", progress=False) for _ in range(2))
    assert first.sha256 == again.sha256


def test_an_archive_that_does_not_verify_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packing._pack

    def damaged(folder: Path, files: list[Path], partial: Path, progress: bool) -> tuple[str, int]:
        told = real(folder, files, partial, progress)
        with open(partial, "r+b") as file:
            file.seek(partial.stat().st_size // 2)
            file.write(b"\xff" * 64)
        return told

    monkeypatch.setattr(packing, "_pack", damaged)
    with pytest.raises(CourseError, match=r"differs from .*model\.safetensors"):
        sharing.single_file(model, progress=False)
    assert [place.name for place in model.parent.iterdir()] == ["merged"]


def test_one_file_needs_a_model_and_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CourseError, match="no model folder"):
        sharing.single_file(tmp_path)
    monkeypatch.setattr(disk, "free_gib", lambda folder: 0.001)
    with pytest.raises(CourseError, match="one file of the model needs"):
        sharing.single_file(model)


def test_where_one_file_may_lie(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(model)
    for folder, out in [(model, model / "model.tar"), (model, tmp_path / "latest/x/model.tar")]:
        with pytest.raises(CourseError, match="inside the folder it is made of"):
            sharing.single_file(folder, out, progress=False)
    with pytest.raises(CourseError, match="is a folder"):
        sharing.single_file(model, tmp_path / "run", progress=False)
    assert sharing.single_file(model, tmp_path / "new/place/one.tar", progress=False).file.is_file()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("platform", "size", "told"),
    [
        ("colab", 1000, "files.download("),
        ("colab", 300_000_000, "mount Drive"),
        ("kaggle", 1000, "/kaggle/working"),
        ("autodl", 1000, "scp -P PORT"),
        ("local", 1000, "right-click"),
    ],
)
def test_how_to_download_it(
    platform: str, size: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "merged.tar"
    with open(file, "wb") as opened:
        opened.truncate(size)
    monkeypatch.setattr(packing.platforms, "detect", lambda: type("P", (), {"name": platform})())
    assert told in sharing.download_hint(file)


def test_the_command_line(model: Path, hub: Recorded, tmp_path: Path) -> None:
    packed = CliRunner().invoke(cli.app, ["push", str(model), str(tmp_path / "own.tar")])
    assert packed.exit_code == 0 and (tmp_path / "own.tar").exists() and not hub.sent
    ran = CliRunner().invoke(cli.app, ["push", str(model), "hub:li/orders"])
    assert ran.exit_code == 0 and "private" in ran.output and TOKEN not in ran.output


def test_a_tar_of_somebody_else_is_not_replaced(model: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "mine.tar", "w") as tar:
        tar.add(model, model.name + "/copy")
    before = (tmp_path / "mine.tar").read_bytes()
    with pytest.raises(CourseError, match="there already"):
        sharing.single_file(model, tmp_path / "mine.tar", progress=False)
    assert (tmp_path / "mine.tar").read_bytes() == before
