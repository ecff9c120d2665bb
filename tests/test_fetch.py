"""fetch: what a lesson downloads, beforehand; continued after a kill, refused on a small disk, from the next source."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import simulate
from fakes.hub import Hub
from support import refused, wait_for
from test_platforms import Site

from nbutils import fetch, files, hardware, models, platforms
from nbutils.platforms import network

Patch = pytest.MonkeyPatch
REPO = "some/model"
LARGE = 5 << 20
NOT_NEEDED = {"pytorch_model.bin": b"b" * LARGE, "model.gguf": b"g" * LARGE, "consolidated.safetensors": b"c" * LARGE}
FETCH = "import sys; from nbutils.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
OFFLINE = """
from nbutils import models, platforms, profiles
platform = platforms.detect()
platforms.use_model_cache(platform, platforms.folders(platform))
resolved = profiles.resolve("laptop", "some/model", gpu=None, platform=platform, online=lambda: 1 / 0)
from huggingface_hub import snapshot_download  # as lesson 04 does; it checks that every file is there
snapshot_download(resolved.model, allow_patterns=list(models.WANTED), ignore_patterns=list(models.NOT_WANTED))
print(resolved.model, resolved.choices["model"].reason)
"""


@pytest.fixture
def serve() -> Iterator[Callable[..., Hub]]:
    """Starts hubs that have a small model, real but for its weights; they end with the test."""
    small = {
        name: (files.TINY_MODEL / name).read_bytes()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    }
    weights = {"model.safetensors": os.urandom(LARGE)}
    begun: list[Hub] = []

    def start(**options: Any) -> Hub:
        begun.append(Hub(REPO, small | weights | NOT_NEEDED, **options))
        return begun[-1]

    yield start
    for hub in begun:
        hub.shutdown()
        hub.server_close()


def machine(tmp_path: Path, **env: str) -> simulate.Machine:
    """An AutoDL machine without a GPU, with a network."""
    autodl = simulate.autodl(tmp_path, gpu=False)
    autodl.env |= {"HF_HUB_OFFLINE": "0", **env}
    return autodl


@pytest.mark.slow
def test_a_killed_download_goes_on_and_lessons_find_the_model_without_a_network(
    tmp_path: Path, serve: Callable[..., Hub]
) -> None:
    hub = serve(delay=0.02)  # the weights take more than a second
    there = machine(tmp_path, HF_ENDPOINT=hub.url)
    cache = there.root / "root/autodl-tmp/huggingface"
    words = [sys.executable, "-c", FETCH, "fetch", REPO]
    first = subprocess.Popen(words, env=there.environment(), cwd=there.root, stdout=subprocess.DEVNULL)
    wait_for(lambda: hub.sent > LARGE // 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    [partial] = cache.rglob(f"*{network.PARTIAL}")
    held = partial.stat().st_size
    assert 0 < held < LARGE and not list(cache.rglob("model.safetensors"))
    hub.delay, before = 0.0, hub.sent
    ran = there.python("-c", FETCH, "fetch", REPO)
    assert ran.returncode == 0, ran.stderr
    assert hub.sent - before < LARGE - held + 2 * len(hub.files["tokenizer.json"]) + 20000, "only what was missing came"
    assert any(f"model.safetensors {held}" in request for request in hub.asked)
    assert str(cache) in ran.stdout and "torch" not in ran.stdout.split()
    names = {file.name for file in cache.rglob("snapshots/*/*")}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    [whole] = cache.rglob("snapshots/*/model.safetensors")
    assert whole.read_bytes() == hub.files["model.safetensors"] and not list(cache.rglob(f"*{network.PARTIAL}"))
    there.env["HF_HUB_OFFLINE"] = "1"
    ran = there.python("-c", OFFLINE)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1].startswith("some/model"), ran.stderr
    assert "from the cache" in ran.stdout


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    tmp_path: Path, serve: Callable[..., Hub], monkeypatch: Patch
) -> None:
    hub = serve()
    machine(tmp_path, HF_ENDPOINT=hub.url).enter(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.001)
    with refused("are needed, and only 0.00 GiB are free"):
        fetch.fetch_inputs(REPO, "", "")
    assert not [request for request in hub.asked if "/resolve/" in request and "config.json" not in request]


def test_the_next_source_is_taken_when_one_fails_and_half_a_file_is_never_trusted(
    tmp_path: Path, serve: Callable[..., Hub], monkeypatch: Patch, capsys: Any
) -> None:
    broken, modelscope = serve(status=403), serve()
    machine(tmp_path).enter(monkeypatch)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(network, "SOURCES", {"hub": broken.url, "hf-mirror": broken.url, "modelscope": modelscope.url})
    monkeypatch.setenv(network.FOUND, "hub")
    work = platforms.folders(platforms.detect()).work
    folder = models.modelscope_folder(REPO, work)
    folder.mkdir(parents=True)
    (folder / f"model.safetensors{network.PARTIAL}").write_bytes(b"of another file")
    with refused("downloaded from ModelScope ("):
        fetch.fetch_inputs(REPO, "", "")
    assert not (folder / "model.safetensors").exists() and not (folder / models.DOWNLOADED).exists()
    fetch.fetch_inputs(REPO, "", "")
    said = capsys.readouterr().out
    assert "could not be downloaded from hub" in said and "could not be downloaded from hf-mirror" in said
    assert (folder / "model.safetensors").read_bytes() == modelscope.files["model.safetensors"]
    assert {file.name for file in folder.glob("[!.]*")} == set(modelscope.files) - set(NOT_NEEDED) | {models.DOWNLOADED}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch.fetch_inputs(REPO, "", "")  # it is here
    assert models.reachable(REPO, network.hub_online, work) == "modelscope"
    modelscope.files["../evil.json"] = b"{}"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (folder / models.DOWNLOADED).unlink()
    with refused("could not be downloaded from", "evil.json"):
        fetch.fetch_inputs(REPO, "", "")


def test_what_is_here_outlives_a_page_that_comes_instead_and_a_download_given_up_asks_no_more(tmp_path: Path) -> None:
    page, file = Site(body=b"<html>sign in first</html>"), tmp_path / "weights"
    partial = tmp_path / f"weights{network.PARTIAL}"
    partial.write_bytes(b"w" * 999)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="26 bytes came"):
        patch.setattr(network, "ATTEMPTS", 1)
        network.download(page.url, file, 1000, "", lambda count: None)
    assert partial.stat().st_size == 999
    with pytest.raises(ZeroDivisionError):  # as `models` ends what waits for bytes
        network.download(page.url, file, 1000, "", lambda count: 1 // 0)
    assert len(page.asked) == 1


def test_no_more_is_written_than_was_announced(tmp_path: Path, monkeypatch: Patch) -> None:
    endless, came = Site(status=206, body=bytes(8 << 20)), list[int]()
    monkeypatch.setattr(models, "tqdm", MagicMock(return_value=MagicMock(update=came.append)))
    listed = models.RemoteFile(f"{endless.url}/model.safetensors", tmp_path / "model.safetensors", 1000, "")
    with refused(f"{REPO} could not"), models.download_errors(REPO, "ModelScope"):
        models._download(REPO, "ModelScope", tmp_path, [listed])
    assert 1000 < sum(came) <= 2 * network.PIECE and not list(tmp_path.glob("model*"))


@pytest.mark.parametrize("name", ["downloaded.json", "a/../downloaded.json", "downloaded.json/a.json"])
def test_a_repository_does_not_say_itself_that_it_is_complete(
    name: str, tmp_path: Path, serve: Callable[..., Hub], monkeypatch: Patch
) -> None:
    hub = serve()
    hub.files[name] = b"{}"
    monkeypatch.setattr(network, "SOURCES", {"modelscope": hub.url})
    folder = Path(models.from_modelscope(REPO, tmp_path))
    assert not any("downloaded.json" in asked for asked in hub.asked)
    assert (folder / models.DOWNLOADED).read_bytes() != b"{}"


def test_without_a_gpu_the_learner_names_what_to_download_and_with_one_it_is_known(
    tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    machine(tmp_path, HF_HUB_OFFLINE="1").enter(monkeypatch)
    with refused("There is no GPU here, so PROFILE auto cannot", "ampere_24gb (Qwen3.5-9B)", "fetch Qwen2.5-7B"):
        fetch.fetch_inputs("", "", "auto")
    fetch.fetch_inputs("tiny", "assistant_zh", "")
    assert "assistant_zh" in capsys.readouterr().out
    with refused("Correct the path"):
        fetch.fetch_inputs("tiny", "no_such_rows.jsonl", "")
    with refused("is not in the local cache (at least not"):
        fetch.fetch_inputs("", "", "ampere_24gb")
    monkeypatch.setattr(hardware, "driver_gpus", lambda: ["NVIDIA GeForce RTX 4090"])
    monkeypatch.setattr(hardware, "gpu", lambda: hardware.GPU("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 2))
    assert fetch.profile_here() == "ampere_24gb"
