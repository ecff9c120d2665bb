"""platforms, hardware, disk: the right platform, decoys included; folders, limits, Drive, network, secrets, GPUs."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import simulate
from click.testing import CliRunner
from support import refused

from nbutils import cli, disk, environments, hardware, masking, platforms, serving
from nbutils.files import GIB
from nbutils.hardware import GPU
from nbutils.platforms import Platform, network, secret

Patch = pytest.MonkeyPatch
AUTODL, COLAB, KAGGLE, LOCAL = (Platform(name, "a test says so") for name in ("autodl", "colab", "kaggle", "local"))
SILENCE = "network   neither the hub nor a mirror answers: models come from folders and the cache"
TOKEN = "very-secret-developer-token"
READ = re.compile(r"HF_|HUGGINGFACE_|TRANSFORMERS_OFFLINE|NBUTILS_|.*_proxy$", re.IGNORECASE)


@pytest.fixture(autouse=True)
def bare(tmp_path: Path) -> Iterator[None]:
    """None of the variables these rooms read; what a test sets is gone after it, and after what monkeypatch undoes."""
    before, secrets = dict(os.environ), set(masking._found)
    for name in filter(READ.match, before):
        del os.environ[name]
    os.environ |= {"HOME": str(tmp_path), "NBUTILS_FS_ROOT": str(tmp_path), "AUTODL_TOKEN": TOKEN}
    masking._found.clear()
    yield
    masking._found.clear()
    masking._found.update(secrets)
    os.environ.clear()
    os.environ.update(before)


def make(root: Path, *places: str) -> Path:
    for place in places:
        (root / place).mkdir(parents=True, exist_ok=True)
    return root


KAGGLE_ENV = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_20260514"}
DETECTED: list[tuple[str, dict[str, str], tuple[str, ...], str]] = [  # name, variables, folders, where runs are kept
    ("kaggle", KAGGLE_ENV, ("content", "kaggle/working"), "kaggle/working/runs"),
    ("colab", {"TBE_RUNTIME_ADDR": "1:8011", "KAGGLE_KEY": "k"}, ("content", "kaggle/working"), "content/runs"),
    ("colab", {}, ("var/colab/hostname", "kaggle/input/some-slug"), "content/runs"),
    ("colab_enterprise", {"VERTEX_PRODUCT": "COLAB_ENTERPRISE", "TBE_RUNTIME_ADDR": "x"}, (), "content/runs"),
    ("autodl", {"AutoDLRegion": "west-E"}, (), "root/autodl-tmp/runs"),
    ("autodl", {}, ("root/autodl-tmp",), "root/autodl-tmp/runs"),
    # decoys
    ("local", {"COLAB_RELEASE_TAG": "x", "COLAB_GPU": ""}, ("content",), ""),
    ("local", {}, ("etc/network_turbo",), ""),
    ("local", {"KAGGLE_KEY": "k", "KAGGLE_USERNAME": "u", "KAGGLE_API_TOKEN": "t"}, ("kaggle",), ""),
    ("local", {"USER": "ann"}, ("mnt/workspace", "data", "workspace", "storage", "home/featurize"), ""),
    ("local", {"SPACE_ID": "", "RUNPOD_POD_ID": "", "AutoDLRegion": "", "KAGGLE_KERNEL_RUN_TYPE": ""}, (), ""),
    # other platforms
    ("pai_dsw", {"DSW_INSTANCE_ID": "dsw-1"}, ("mnt/workspace",), "mnt/workspace/runs"),
    ("modelscope", {"MODELSCOPE_ENVIRONMENT": "n", "DSW_INSTANCE_ID": "d"}, ("mnt/workspace",), "mnt/workspace/runs"),
    ("featurize", {"HOME": "/home/featurize"}, ("home/featurize/work",), "home/featurize/work/runs"),
    ("gpushare", {}, ("hy-tmp", "hy-netdisk"), "hy-netdisk/runs"),
    ("matpool", {}, ("public/script/switch_pip_source.sh", "mnt"), "mnt/runs"),
    ("paperspace", {"PAPERSPACE_NOTEBOOK_REPO_ID": "r"}, ("storage", "notebooks"), "storage/runs"),
    ("hf_spaces", {"SPACE_ID": "a/b"}, ("data",), "data/runs"),
    ("studio_lab", {}, ("home/studio-lab-user",), "home/studio-lab-user/runs"),
    ("lightning", {"LIGHTNING_CLOUD_SPACE_ID": "x"}, ("teamspace/studios/this_studio",),
     "teamspace/studios/this_studio/runs"),
    ("modal", {"MODAL_TASK_ID": "ta-1"}, (), "tmp/finetune-course/runs"),
    ("runpod", {"RUNPOD_POD_ID": "p"}, ("workspace",), "workspace/runs"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "env", "places", "keep"), DETECTED)
def test_each_platform_is_found_by_its_marks_and_keeps_runs_where_they_last(
    tmp_path: Path, monkeypatch: Patch, name: str, env: dict[str, str], places: tuple[str, ...], keep: str
) -> None:
    simulate.Machine(make(tmp_path, *places), env).enter(monkeypatch)
    platform = platforms.detect()
    assert platform.name == name
    assert platform.evidence
    is_kaggle = name == "kaggle"
    assert platform.batch == is_kaggle
    if name != "local":
        assert platforms.folders(platform).keep == tmp_path / keep


def test_the_override_wins_and_a_wrong_one_lists_the_right_names() -> None:
    os.environ |= KAGGLE_ENV | {"NBUTILS_PLATFORM": "local"}
    assert platforms.detect() == Platform("local", "NBUTILS_PLATFORM is set")
    os.environ["NBUTILS_PLATFORM"] = "kagle"
    with refused("NBUTILS_PLATFORM is 'kagle'.", *platforms.table()):
        platforms.detect()


def test_a_user_who_may_not_look_into_the_home_of_root_is_no_error(tmp_path: Path) -> None:
    machine = simulate.Machine(tmp_path / "m").make("root/autodl-tmp")
    drop = "os.chmod(str(platforms.fs_root() / 'root'), 0); os.getuid() or os.setuid(65534)"
    ran = machine.python("-c", f"import os; from nbutils import platforms; {drop}; print(platforms.detect().name)")
    (tmp_path / "m/root").chmod(0o700)
    assert ran.stdout == "local\n" and platforms.in_kernel() is False, ran.stderr


def test_each_platform_keeps_runs_where_they_last(tmp_path: Path) -> None:
    make(tmp_path, "kaggle/working")
    kaggle = platforms.folders(KAGGLE)
    assert kaggle.keep == tmp_path / "kaggle/working/runs" and kaggle.scratch == tmp_path / "kaggle/temp"
    assert kaggle.inputs == tmp_path / "kaggle/input" and kaggle.lasting and platforms.folders(LOCAL).lasting
    assert kaggle.is_attached(tmp_path / "kaggle/input/x") and not kaggle.is_attached(kaggle.keep)
    for name in ("colab", "colab_enterprise", "modal", "hf_spaces"):
        assert not platforms.folders(Platform(name, "")).lasting


def test_autodl_prefers_its_file_storage_unless_it_takes_no_files(tmp_path: Path, monkeypatch: Patch) -> None:
    data, storage = tmp_path / "root/autodl-tmp/runs", tmp_path / "root/autodl-fs/runs"
    make(tmp_path, "root/autodl-tmp")
    without = platforms.folders(AUTODL)
    assert (without.keep, without.earlier, without.lasting) == (data, (), True)
    make(tmp_path, "root/autodl-fs")
    folders = platforms.folders(AUTODL)
    assert (folders.keep, folders.earlier) == (storage, (data,))
    assert list((tmp_path / "root/autodl-fs").iterdir()) == [], "looking leaves nothing behind"
    real = tempfile.NamedTemporaryFile

    def full(dir: Path, **options: Any) -> Any:
        if dir == storage.parent:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(dir=dir, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    folders = platforms.folders(AUTODL)
    assert (folders.keep, folders.earlier) == (data, (storage,))


def test_nbutils_home_moves_the_runs_and_is_taken_to_last(tmp_path: Path, monkeypatch: Patch) -> None:
    os.environ["NBUTILS_HOME"] = str(tmp_path / "mine")
    for name in platforms.table():
        folders = platforms.folders(Platform(name, ""))
        assert folders.keep == tmp_path / "mine" and folders.lasting
    machine = simulate.colab(tmp_path).enter(monkeypatch)
    os.environ["NBUTILS_HOME"] = mine = str(machine.root / "content/drive/MyDrive/mine")
    folders = platforms.folders(COLAB)
    assert folders.keep == machine.root / "content/runs" and not folders.lasting, "a Drive that is not mounted"
    simulate.mounted(machine)
    assert str(platforms.folders(COLAB).keep) == mine
    del os.environ["NBUTILS_HOME"]
    folders = platforms.folders(COLAB)
    assert (folders.keep, folders.earlier) == (machine.root / platforms.RUNS, (machine.root / "content/runs",))


def test_models_are_downloaded_to_the_large_disk(tmp_path: Path, monkeypatch: Patch) -> None:
    def cache(name: str) -> str:
        platform = Platform(name, "")
        return platforms.use_model_cache(platform, platforms.folders(platform)).rpartition(" ")[2]

    assert cache("local") == cache("colab") == ""
    assert cache("autodl") == os.environ["HF_HUB_CACHE"] == str(tmp_path / "root/autodl-tmp/huggingface")
    assert cache("kaggle") == ""  # set already
    monkeypatch.delenv("HF_HUB_CACHE")
    assert cache("kaggle") == str(tmp_path / "kaggle/temp/huggingface")
    monkeypatch.delenv("HF_HUB_CACHE")
    make(tmp_path, ".cache/huggingface/hub/models--Qwen--x")
    assert cache("autodl") == ""


def test_a_learner_names_an_input_by_the_end_of_its_path_in_every_layout(tmp_path: Path) -> None:
    model = make(tmp_path, "models/qwen/1") / "models/qwen/1"
    for layout in ("ann/some-slug", "other", "notebooks/ann/first-run"):
        run = make(tmp_path / "datasets" / layout / "runs/tiny", "checkpoints")
        (run / "checkpoints/checkpoint-4.json").write_text("{}")
        (run / "train.jsonl").write_text("{}")
    slug = "ann/some-slug/runs/tiny/train.jsonl"
    assert platforms.find_input(tmp_path, "qwen/1") == model
    assert platforms.find_input(tmp_path, slug) == tmp_path / "datasets" / slug
    for name in ("rain.jsonl", "", ".", "..", str(model), "no/such", "train.json?", "*"):
        assert platforms.find_input(tmp_path, name) is None
    with refused("was found several times: ", "ann/some-slug/runs", "other/runs"):
        platforms.find_input(tmp_path, "train.jsonl")
    manifests = platforms.find_inputs(tmp_path, "checkpoints/checkpoint-*.json")
    assert manifests == sorted(manifests) and len(manifests) == 3
    assert platforms.find_inputs(None, "*") == platforms.find_inputs(tmp_path / "no", "*") == []


def test_hours_are_counted_where_somebody_counts_them(tmp_path: Path) -> None:
    hours = {name: Platform(name, "").entry.hours for name in platforms.table()}
    assert {name: value for name, value in hours.items() if value} == {"colab": 12, "kaggle": 12, "paperspace": 6}
    assert platforms.session_seconds(KAGGLE) == 0
    began = time.time() - 3 * 3600
    os.utime(make(tmp_path, "proc/1") / "proc/1", (began, began))
    assert platforms.session_seconds(KAGGLE) == pytest.approx(3 * 3600, abs=60)
    assert platforms.session_seconds(AUTODL) == 0
    del os.environ["NBUTILS_FS_ROOT"]
    assert 0 < platforms.session_seconds(COLAB) < 10**9


@pytest.mark.parametrize(
    ("files", "cpus", "memory", "free"),
    [
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, 512, 500),  # no limit: the machine's own
        ({"cpu.max": "50000 100000", "memory.max": 2 * GIB}, 0.5, 2, 2),
        ({"memory.max": 12 * GIB, "memory.current": 11 * GIB, "memory.stat": f"a 1\ninactive_file {GIB}"}, None, 12, 2),
        ({"memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": 2 * GIB,
          "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
          "cpu/cpu.cfs_quota_us": 50000, "cpu/cpu.cfs_period_us": 100000}, 0.5, 4, 3),
        ({"memory/memory.limit_in_bytes": 2**63 - 4096, "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 10},
         None, 512, 500),
    ],
)  # fmt: skip
def test_the_limits_of_a_container_hold_in_both_layouts_of_cgroups(
    tmp_path: Path, monkeypatch: Patch, files: dict[str, Any], cpus: float | None, memory: float, free: float
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * GIB, total=512 * GIB))
    for name, text in files.items():
        simulate.Machine(tmp_path).write(f"sys/fs/cgroup/{name}", str(text))
    own_processors = len(os.sched_getaffinity(0))
    assert platforms.processors() == (cpus or own_processors)
    assert platforms.memory_gib() == pytest.approx(memory)
    assert platforms.free_memory_gib() == pytest.approx(free)


def times_asked_for_drive(machine: simulate.Machine) -> int:
    """How often the fake google.colab was asked to mount."""
    log = machine.root / "fake_calls.txt"
    calls = log.read_text().splitlines() if log.exists() else []
    assert set(calls) <= {"mount 120000"}
    return len(calls)


@pytest.mark.parametrize(
    ("env", "reason", "asked"),
    [
        ({"FAKE_DRIVE": "headless"}, "Drive is not mounted (ValueError: mount failed for [masked]", 1),
        ({"FAKE_DRIVE": "liar"}, "nothing is mounted at /content/drive): ", 1),
        ({"NBUTILS_DRIVE": "off"}, "=off", 0),
    ],
    ids=["headless", "mounts nothing", "switched off"],
)
def test_without_drive_runs_stay_here_and_it_is_asked_for_once(
    tmp_path: Path, monkeypatch: Patch, env: dict[str, str], reason: str, asked: int
) -> None:
    machine = simulate.colab(tmp_path, **env).enter(monkeypatch)
    line = platforms.mount_drive()
    assert reason in line
    assert "To mount it" in line
    assert platforms.folders(COLAB).keep == machine.root / "content/runs"
    assert not (machine.root / "content/drive/MyDrive").exists()
    assert "Drive is not mounted (NBUTILS_DRIVE=" in platforms.mount_drive(), "as in a child process"
    assert times_asked_for_drive(machine) == asked


def test_files_where_drive_belongs_are_kept_and_it_is_not_mounted(tmp_path: Path, monkeypatch: Patch) -> None:
    machine = simulate.colab(tmp_path, FAKE_DRIVE="ok").enter(monkeypatch)
    made_before = machine.write("content/drive/MyDrive/x/adapter.bin", "x")
    line = platforms.mount_drive()
    assert "must not already contain files" in line
    assert "To mount it" in line
    assert made_before.exists()
    assert platforms.folders(COLAB).keep == machine.root / "content/runs"
    assert "Drive is not mounted (NBUTILS_DRIVE=" in platforms.mount_drive(), "as in a child process"
    assert times_asked_for_drive(machine) == 1


def test_runs_are_kept_on_a_mounted_drive_and_it_is_asked_for_once(tmp_path: Path, monkeypatch: Patch) -> None:
    machine = simulate.colab(tmp_path, FAKE_DRIVE="ok").enter(monkeypatch)
    line = platforms.mount_drive()
    assert "Drive is mounted: " in line
    assert "To mount it" not in line
    assert platforms.folders(COLAB).keep == machine.root / platforms.RUNS
    assert (machine.root / "content/drive/MyDrive").exists()
    assert "Drive is mounted: " in platforms.mount_drive(), "as in a child process"
    assert times_asked_for_drive(machine) == 1


def test_a_mount_that_dies_or_vanishes_is_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path)).enter(monkeypatch)
    runs, stat = machine.root / platforms.RUNS / "demo/checkpoints", os.stat
    place = platforms.mount_point_of(runs)
    assert place == machine.root / "content/drive" and platforms.is_mount(place)

    def dead(path: object, *words: object, **options: object) -> os.stat_result:
        if Path(str(path)).is_relative_to(machine.root / platforms.MOUNT_POINT):
            raise OSError(107, "Transport endpoint is not connected")
        return stat(path, *words, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", dead)
        broken.setattr(os, "lstat", dead)
        assert not platforms.drive_mounted()
    machine.write("proc/mounts", "")
    assert not platforms.is_mount(place) and platforms.mount_point_of(runs) is None


def test_a_user_without_a_home_folder_is_told_to_set_one(monkeypatch: Patch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("getpwuid(): uid not found")))
    platform = platforms.detect()
    with refused("This user has no home folder", "export HOME="):
        platforms.use_model_cache(platform, platforms.folders(platform))
    ran = CliRunner().invoke(cli.app, ["fetch", "tiny"])
    assert ran.exit_code == 1 and "HOME" in ran.stderr and "Traceback" not in ran.output


class Site(ThreadingHTTPServer):
    """A web site that answers after a delay, and writes down what it was asked."""

    daemon_threads = True

    def __init__(self, delay: float = 0.0, status: int = 200, body: bytes = b"{}", location: str = "") -> None:
        self.delay = delay
        self.status = status
        self.body = body
        self.location = location
        self.asked: list[Any] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Whoever asked went away: nothing to tell."""


class _Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        size = int(self.headers["Content-Length"] or 0)
        sent = json.loads(self.rfile.read(size)) | {"token": self.headers["Authorization"]} if size else self.path
        self.server.asked.append(sent)
        self.server.paths.append(self.path)
        time.sleep(self.server.delay)
        self.send_response(self.server.status)
        for name, value in {"Content-Length": len(self.server.body), "Location": self.server.location}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST, log_message = do_GET, lambda *_: None


Web = Callable[..., dict[str, Site]]


@pytest.fixture
def web(monkeypatch: Patch) -> Iterator[Web]:
    """Local stand-ins for the hub and its mirrors, by delay in seconds or by (delay, status)."""
    opened: list[Site] = []

    def build(**delays: float | tuple[float, int]) -> dict[str, Site]:
        answers = {
            name.replace("_", "-"): answer if isinstance(answer, tuple) else (answer, 200)
            for name, answer in delays.items()
        }
        sites = {name: Site(*answer) for name, answer in answers.items()}
        opened.extend(sites.values())
        monkeypatch.setattr(network, "SOURCES", {name: site.url for name, site in sites.items()})
        monkeypatch.setattr(network, "HUB", sites["hub"].url)
        monkeypatch.setattr(network, "SECONDS", 3.0)  # a busy machine may take one of them to send an answer
        return sites

    yield build
    for site in opened:
        site.shutdown()
        site.server_close()


ALL = {"hub": 0.0, "hf_mirror": 0.0, "modelscope": 0.0}


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ({"hub": 0.0, "hf_mirror": 0.8, "modelscope": 0.8}, "hub"),
        ({"hub": 0.8, "hf_mirror": 0.0, "modelscope": 0.8}, "hf-mirror"),
        ({"hub": 0.8, "hf_mirror": 0.8, "modelscope": 0.0}, "modelscope"),
        ({"hub": (0.0, 403), "hf_mirror": 0.0, "modelscope": 0.8}, "hf-mirror"),  # turned away is no answer
    ],
)
def test_in_china_the_best_measured_is_taken_once_for_all_processes(web: Web, delays: dict, expected: str) -> None:
    sites = web(**delays)
    line = network.prepare_network(AUTODL)
    assert line.startswith(f"network   models come from {expected}, ")
    assert network.chosen() == expected
    if expected == "hf-mirror":
        assert os.environ["HF_ENDPOINT"] == sites["hf-mirror"].url
        assert os.environ["HF_HUB_DISABLE_XET"] == "1"
    else:
        assert "HF_ENDPOINT" not in os.environ
        assert "HF_HUB_DISABLE_XET" not in os.environ
    again = network.prepare_network(AUTODL)  # as in a child process, which inherits the variables
    assert again == ""
    assert network.chosen() == expected
    for site in sites.values():
        assert len(site.asked) == 1


def test_elsewhere_the_mirrors_are_asked_only_if_the_hub_is_silent(web: Web, monkeypatch: Patch) -> None:
    sites = web(hub=0.1, hf_mirror=0.0, modelscope=0.0)
    assert network.prepare_network(AUTODL, probe=False) == "" and not sites["hub"].asked, "nothing is needed"
    assert network.prepare_network(LOCAL) == "" and network.chosen() == "hub"
    assert [len(site.asked) for site in sites.values()] == [1, 0, 0]
    monkeypatch.delenv(network.FOUND)
    web(hub=5.0, hf_mirror=0.8, modelscope=0.0)
    assert "models come from modelscope" in network.prepare_network(LOCAL)
    assert os.environ["HF_ENDPOINT"] == network.SOURCES["hf-mirror"], "which serves what ModelScope does not"


def test_a_lesson_asks_again_after_silence(web: Web) -> None:
    sites = web(hub=(0.0, 503), hf_mirror=(0.0, 503), modelscope=(0.0, 503))
    assert network.prepare_network(AUTODL) == SILENCE and not network.hub_online()
    assert len(sites["hub"].asked) == 1, "and not within a lesson"
    sites["hub"].status = 200
    assert "models come from hub" in network.prepare_network(AUTODL) and network.hub_online()


@pytest.mark.parametrize("name", ["hub", "hf-mirror", "modelscope"])
def test_the_learners_mirror_is_taken_unmeasured(web: Web, monkeypatch: Patch, name: str) -> None:
    sites = web(**ALL)
    monkeypatch.setenv("NBUTILS_MIRROR", name)
    for _ in range(2):
        assert network.prepare_network(AUTODL) == ""
    assert network.chosen() == name and not any(site.asked for site in sites.values())
    assert os.environ.get("HF_ENDPOINT") == (sites[name].url if name == "hf-mirror" else None)
    monkeypatch.setenv("NBUTILS_MIRROR", "hfmirror")
    with refused("NBUTILS_MIRROR is", "hf-mirror", "modelscope"):
        network.prepare_network(LOCAL)
    monkeypatch.delenv("NBUTILS_MIRROR")
    monkeypatch.delenv(network.FOUND)
    monkeypatch.setenv("HF_ENDPOINT", "http://models.example")
    assert network.prepare_network(AUTODL) == "" and network.chosen() == ""
    assert network.sources() == {"HF_ENDPOINT": "http://models.example"}


def test_a_mirror_gets_no_token_and_the_hub_gets_it_again(web: Web, monkeypatch: Patch) -> None:
    web(**ALL)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    code = "from huggingface_hub.utils import build_hf_headers; print(build_hf_headers().get('authorization'))"
    for name in ("hf-mirror", "hub"):
        monkeypatch.setenv("NBUTILS_MIRROR", name)
        network.prepare_network(AUTODL)
        assert ("Bearer" in subprocess.check_output([sys.executable, "-c", code], text=True)) is (name == "hub")
        child = environments.variables({})
        sent = "HF_TOKEN" in child or child.get("HF_HUB_DISABLE_IMPLICIT_TOKEN") != "1"
        assert not sent or name == "hub", "a token of a file included"


def test_offline_means_not_one_connection_and_a_dead_network_costs_seconds(tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as there:
        simulate.autodl(tmp_path).enter(there)
        for name in ("getaddrinfo", "create_connection"):
            there.setattr(socket, name, Mock(side_effect=AssertionError("a connection was tried")))
        said = platforms.prepare_network(platforms.detect())
        assert "offline, as HF_HUB_OFFLINE says" in said and not platforms.hub_online()

    def lost(*_: object, **__: object) -> None:
        time.sleep(3)  # a name lookup that nobody answers knows no timeout
        raise OSError("no name server")

    for name in filter(READ.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(network, "SECONDS", 0.3)
    began = time.monotonic()
    assert network.prepare_network(KAGGLE) == SILENCE
    assert network.hub_online() is False and time.monotonic() - began < 2


def test_requests_to_this_machine_and_to_what_is_near_go_past_the_proxies(
    web: Web, tmp_path: Path, monkeypatch: Patch
) -> None:
    sites = web(**ALL)
    network.prepare_network(LOCAL, probe=False)
    assert "no_proxy" not in os.environ, "without a proxy nothing is set"
    monkeypatch.setenv("http_proxy", sites["hub"].url)
    monkeypatch.setenv("no_proxy", "intra")
    network.prepare_network(LOCAL, probe=False)
    assert os.environ["no_proxy"] == "intra,127.0.0.1,localhost"
    assert urllib.request.proxy_bypass("127.0.0.1:8000"), "the server of lesson 05"
    simulate.Machine(tmp_path).write("etc/network_turbo", "")
    for _ in range(2):  # as in a child process
        network.prepare_network(AUTODL, probe=False)
    direct = os.environ["no_proxy"].split(",")
    assert {"hf-mirror.com", "aliyuncs.com", "edu.cn"} < set(direct) and len(direct) == len(set(direct))
    assert network.measure({"hub": "http://huggingface.co/x"}, 2) and sites["hub"].asked == ["http://huggingface.co/x"]
    assert network.measure({"mirror": f"{sites['hf-mirror'].url}/y"}, 2) and sites["hf-mirror"].asked == ["/y"]


def test_the_first_free_public_port_of_autodl_is_taken_and_told(tmp_path: Path, monkeypatch: Patch) -> None:
    autodl = AUTODL.entry
    assert autodl.ports == [6006, 6008]
    assert serving.preferred_port(LOCAL) == 0
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [busy.getsockname()[1], other.getsockname()[1]]
        monkeypatch.setitem(platforms.table(), "autodl", autodl.model_copy(update={"ports": ports}))
        assert serving.preferred_port(AUTODL) == 0, "both are busy: any free one"
        other.close()
        assert serving.preferred_port(AUTODL) == ports[1]
    monkeypatch.undo()
    simulate.autodl(tmp_path).enter(monkeypatch)
    said = [serving.public_address(platforms.detect(), port) for port in (6006, 6008, 7000)]
    assert "https://u1-abc.westb.seetacloud.com:8443/v1" in said[0] and "API key" in said[0]
    assert "6008" in said[1] and "for programs on this machine" in said[2]
    assert "for programs on this machine" in serving.public_address(LOCAL, 7000)


VALUE = "correct-horse-battery-staple"


def test_the_environment_comes_first_is_trimmed_and_masked() -> None:
    os.environ["MY_NOTE"] = f" {VALUE}\n"
    assert masking.mask_secrets(f"note {VALUE}") == f"note {VALUE}"
    assert secret("MY_NOTE") == VALUE and masking.mask_secrets(f"note {VALUE}") == "note [masked]"
    assert secret("NO_SUCH_KEY_ANYWHERE") is None


STORED = {"FAKE_SECRETS": json.dumps({"HF_TOKEN": f"{VALUE} \n"}), "FAKE_USERDATA": "ok"}


@pytest.mark.parametrize(
    ("build", "env", "secrets", "problem"),
    [
        (simulate.colab, STORED, {"HF_TOKEN": VALUE, "WANDB_API_KEY": None}, ""),
        (simulate.colab, STORED | {"FAKE_NOT_GRANTED": "W"}, {"W": None, "HF_TOKEN": VALUE}, "NotebookAccessError"),
        (simulate.colab, {}, {"HF_TOKEN": None, "B_KEY": None}, "TimeoutException"),
        (simulate.kaggle, STORED, {"WANDB_API_KEY": None, "HF_TOKEN": VALUE}, ""),
        (simulate.kaggle, {}, {"HF_TOKEN": None, "B_KEY": None}, "ConnectionError"),
    ],
)
def test_the_secrets_of_a_platform_are_found_and_a_store_that_cannot_answer_is_told_once(
    tmp_path: Path, monkeypatch: Patch, capsys: Any, build: Any,
    env: dict[str, str], secrets: dict[str, str | None], problem: str,
) -> None:  # fmt: skip
    machine = build(tmp_path)
    machine.env |= env
    machine.enter(monkeypatch)
    for name, value in secrets.items():
        assert secret(name) == value
    printed = capsys.readouterr().out
    assert VALUE not in printed
    if problem:
        [line] = printed.splitlines()
        assert problem in line
    else:
        assert printed == ""
    if VALUE in secrets.values():
        assert VALUE not in masking.mask_secrets(VALUE)


T4, P100 = GPU("Tesla T4", (7, 5), 14.7, 2), GPU("Tesla P100", (6, 0), 15.9, 1)
A100 = GPU("NVIDIA A100", (8, 0), 39.4, 1)


@pytest.mark.parametrize(
    ("gpu", "dtype", "engine"),
    [(None, "float32", "vllm-cpu"), (P100, "float16", "transformers"), (T4, "float16", "vllm"),
     (A100, "bfloat16", "vllm")],
)  # fmt: skip
def test_each_gpu_gets_what_it_can_do(gpu: GPU | None, dtype: str, engine: str) -> None:
    assert (hardware.dtype(gpu).value, hardware.engine(gpu).value) == (dtype, engine)
    if gpu is not A100:
        assert (hardware.attention(gpu).value, hardware.liger(gpu).value) == ("sdpa", False)


def test_a_gpu_without_kernels_stops_the_lesson(tmp_path: Path, monkeypatch: Patch) -> None:
    for torch in ("torch_cpu", "torch_t4"):
        simulate.Machine(tmp_path, packages=(torch,)).enter(monkeypatch)
        hardware.require_working(hardware.gpu())
        assert torch == "torch_t4" or hardware.peak_memory_gib() > 0.01
    assert str(hardware.gpu()) == "2 x Tesla T4 (capability 7.5, 15.0 GiB)"
    simulate.Machine(tmp_path, packages=("torch_p100",)).enter(monkeypatch)
    with refused("Computing on this device failed", "GPU T4 x2", "cu126"):
        hardware.require_working(hardware.gpu())


@pytest.mark.parametrize(
    ("supported", "release", "own"), [(1, "6.6+", ""), (0, "6.6+", ""), (1, "6-microsoft", ""), (1, "6.6+", "x")]
)
def test_torch_gets_expandable_segments_where_they_work(
    monkeypatch: Patch, supported: int, release: str, own: str
) -> None:
    def attribute(answer: Any, number: int, device: int) -> int:
        answer._obj.value = supported
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    monkeypatch.setattr("platform.release", lambda: release)
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    os.environ |= {"PYTORCH_ALLOC_CONF": own} if own else {}
    hardware.leave_no_gaps()
    works = supported and release == "6.6+" and not own
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == ("expandable_segments:True" if works else None)


@pytest.mark.parametrize(
    ("env", "after"), [({}, "0"), ({"LOCAL_RANK": "1"}, None), ({"CUDA_VISIBLE_DEVICES": "1"}, "1")]
)
def test_torch_sees_one_gpu_and_idle_threads_sleep_unless_somebody_decided(env: dict[str, str], after: Any) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ |= env
    hardware.use_one_gpu()
    hardware.share_processors()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after and os.environ["OMP_WAIT_POLICY"] == "passive"


def test_what_kaggle_saves_is_20_gb_whatever_the_disk_holds(tmp_path: Path, monkeypatch: Patch) -> None:
    kaggle = simulate.kaggle(tmp_path).enter(monkeypatch).root / "kaggle/working"
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100 * GIB))
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(20e9 / GIB)
    (kaggle / "old.safetensors").touch()
    os.truncate(kaggle / "old.safetensors", int(15e9))  # it takes no room
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(5e9 / GIB)
    assert disk.free_gib(kaggle.parent / "temp") == 100, "intermediate files are not counted"
    disk.require_disk(kaggle, 4)
    with refused("6.00 GiB are needed, and only 4.66 GiB are free."):
        disk.require_disk(kaggle, 6)


@pytest.mark.parametrize(
    ("inodes", "free"),
    [
        ((200_000, 12, 12), 12),
        ((0, 0, 0), None),  # a file system that does not count them
    ],
)
def test_how_many_more_files_a_disk_takes(
    tmp_path: Path, monkeypatch: Patch, inodes: tuple[int, int, int], free: int | None
) -> None:
    real = os.statvfs("/")
    answer = os.statvfs_result([*real[:5], *inodes, *real[8:]])
    monkeypatch.setattr("os.statvfs", lambda place: answer)
    assert disk.free_inodes(tmp_path / "not/there/yet") == free


def test_the_kernel_metadata_is_what_kaggle_takes() -> None:
    folder = simulate.ROOT / "configs/kaggle"
    metadata = json.loads((folder / "kernel-metadata.json").read_text(encoding="utf-8"))
    assert metadata["id"].partition("/")[2] == re.sub(r"[^a-z0-9]+", "-", metadata["title"].lower())
    assert metadata["is_private"] and metadata["enable_gpu"] and metadata["enable_internet"]
    code = (folder / metadata["code_file"]).resolve()
    assert code.name == "03_qlora.ipynb" and json.loads(code.read_text(encoding="utf-8"))["nbformat"] == 4
    assert code.stat().st_size < 700_000
