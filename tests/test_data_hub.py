"""nbutils.data.hub: datasets by their name, against a server that speaks the hub's protocol to the real client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from test_data_reading import messages_of, qa

from nbutils import data
from nbutils.data.files import files_of
from nbutils.errors import CourseError

pytest.importorskip("huggingface_hub")

COMMIT = "1" * 40
ROWS = ("\n".join(json.dumps(qa(n)) for n in range(4)) + "\n").encode()
DATASETS = {
    "someone/plain": {"README.md": b"# rows", "train.jsonl": ROWS, "big.bin": b"0" * 10},
    "someone/shards": {"data/train-00000-of-00001.jsonl": ROWS, "data/test-00000-of-00001.jsonl": ROWS[:60] + b"\n"},
    "someone/configs": {"zh/train.jsonl": ROWS, "en/train.jsonl": ROWS, "en/deeper/train.jsonl": b"{}"},
    "someone/pictures": {"a.png": b"png"},
}


class Hub(ThreadingHTTPServer):
    """The few addresses of the hub a download needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.fetched: list[str] = []


class Answers(BaseHTTPRequestHandler):
    """Information, tree and files of the datasets above; 401 for all others, as the hub answers strangers."""

    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        if not path:
            return self.answer(b"hub")
        words = path.removeprefix("api/").removeprefix("datasets/").split("/")
        name, rest = "/".join(words[:2]), words[2:]
        if name == "someone/gated":
            return self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        if name not in DATASETS:
            return self.answer(b"{}", 401, {"X-Error-Code": "RepoNotFound"})
        held = DATASETS[name]
        if path.startswith("api/") and rest[:1] == ["tree"]:
            return self.answer(json.dumps([self.entry(file, body) for file, body in held.items()]).encode())
        if path.startswith("api/"):
            told = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in held], "tags": []}
            return self.answer(json.dumps(told | {"downloads": 0, "likes": 0, "private": False}).encode())
        file = "/".join(rest[2:])
        self.server.fetched.append(file)
        mark = {"ETag": f'"{self.entry(file, held[file])["oid"]}"', "X-Repo-Commit": COMMIT}
        return self.answer(held[file], 200, mark)

    @staticmethod
    def entry(file: str, body: bytes) -> dict[str, object]:
        return {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "NBUTILS_MIRROR", "NBUTILS_MIRROR_FOUND", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as it was when another test imported it
    yield server
    server.shutdown()
    server.server_close()


def test_a_dataset_of_the_hub_is_read_by_its_name(hub: Hub) -> None:
    assert len(messages_of("someone/plain")) == 4
    assert [name for name in hub.fetched if name != "train.jsonl"] == []
    fetched = len(hub.fetched)
    assert len(messages_of("someone/plain:train.jsonl")) == 4 and len(hub.fetched) == fetched


def test_shards_in_a_folder_are_found_and_told_apart(hub: Hub, tmp_path: Path) -> None:
    assert [path.name[:5] for path in files_of("someone/shards")] == ["test-", "train"]
    assert data.prepare("someone/shards:data", tmp_path / "out").eval == 1


def test_a_dataset_with_several_sets_asks_for_one(hub: Hub) -> None:
    with pytest.raises(CourseError) as caught:
        files_of("someone/configs")
    assert "zh" in caught.value.seen and "someone/configs:zh" in caught.value.todo and hub.fetched == []
    assert len(messages_of("someone/configs:zh")) == len(messages_of("someone/configs:en/")) == 4
    assert [path.name for path in files_of("someone/configs:en")] == ["train.jsonl"]


@pytest.mark.parametrize(
    ("name", "seen", "todo"),
    [
        ("someone/gated", "gated", "HF_TOKEN"),
        ("someone/nowhere", "no dataset of that name", "HF_TOKEN"),
        ("someone/pictures", "a.png", "to_json"),
        ("someone/plain:zh", "under 'zh'", "colon"),
    ],
)
def test_what_the_hub_cannot_give_is_explained(hub: Hub, name: str, seen: str, todo: str) -> None:
    with pytest.raises(CourseError) as caught:
        files_of(name)
    assert seen in caught.value.seen and todo in caught.value.todo


def test_without_a_network_an_earlier_download_is_used_and_half_a_one_is_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of("someone/shards")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert files_of("someone/shards") == files
    with pytest.raises(CourseError, match="HF_HUB_OFFLINE forbids"):
        files_of("someone/plain")
    files[0].unlink()
    with pytest.raises(CourseError, match="no whole copy"):
        files_of("someone/shards")


def test_a_hub_that_does_not_answer_is_said_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CourseError, match="does not answer") as caught:
        files_of("someone/plain")
    assert "mirror" in caught.value.todo
