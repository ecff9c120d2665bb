"""platforms, hardware, disk: the right platform, decoys included; folders, limits, Drive, network, secrets, GPUs."""

from __future__ import annotations

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
from collections import namedtuple
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import simulate
from support import refused

from nbutils import disk, environments, hardware, masking, platforms, serving
from nbutils.hardware import Card
from nbutils.paths import GIB
from nbutils.platforms import Platform, detection, drive, network, secret, secrets, shutdown

AUTODL, COLAB, LOCAL = (Platform(name, "a test says so") for name in ("autodl", "colab", "local"))
ROOT = Path(__file__).resolve().parent.parent
TOKEN = "very-secret-developer-token"
CLEARED = (
    "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "TRANSFORMERS_OFFLINE",
    "NBUTILS_MIRROR", "NBUTILS_TURBO", network.FOUND, drive.STATE, "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
    *(form for name in (*network.PROXIES, "no_proxy") for form in (name, name.upper())),
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the variables these rooms read or set, during the test and after it."""
    for name in CLEARED:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("AUTODL_TOKEN", TOKEN)
    monkeypatch.setattr(masking, "_found", set())


def make(root: Path, *places: str) -> Path:
    for place in places:
        (root / place).mkdir(parents=True, exist_ok=True)
    return root


def enter(monkeypatch: pytest.MonkeyPatch, machine: simulate.Machine) -> simulate.Machine:
    """This process is on that machine from now on: its variables, its root, the fakes of its packages."""
    for name in (drive.STATE, secrets.STATE, "HF_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in (machine.env | {"NBUTILS_FS_ROOT": str(machine.root)}).items():
        monkeypatch.setenv(name, value)
    for name in [one for one in sys.modules if one.startswith(("google.colab", "kaggle_secrets"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in machine.packages:
        monkeypatch.syspath_prepend(simulate.FAKES / name)
    monkeypatch.setattr(secrets, "_printed", set())
    monkeypatch.setattr(secrets, "SECONDS", 0.5)
    return machine


def calls(machine: simulate.Machine) -> list[str]:
    """What was asked of the fake packages."""
    file = machine.root / "fake_calls.txt"
    return file.read_text().splitlines() if file.exists() else []


# ---- which platform

KAGGLE_ENV = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_20260514"}
DETECTED: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("kaggle", KAGGLE_ENV, ("content", "kaggle/working")),
    ("kaggle", KAGGLE_ENV | {"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, ()),
    ("colab", {"TBE_RUNTIME_ADDR": "172.28.0.1:8011", "KAGGLE_KEY": "k"}, ("content", "kaggle/working")),
    ("colab", {}, ("var/colab/hostname", "kaggle/input/some-slug")),
    ("colab_enterprise", {"VERTEX_PRODUCT": "COLAB_ENTERPRISE", "TBE_RUNTIME_ADDR": "x"}, ()),
    ("autodl", {"AutoDLRegion": "west-E"}, ()),
    ("autodl", {}, ("root/autodl-tmp",)),
    ("autodl", {}, ("etc/profile.d/autodl.env.sh",)),
    # decoys
    ("local", {"COLAB_RELEASE_TAG": "x", "COLAB_GPU": ""}, ("content",)),
    ("local", {}, ("etc/network_turbo",)),
    ("local", {"KAGGLE_KEY": "k", "KAGGLE_USERNAME": "u", "KAGGLE_API_TOKEN": "t"}, ("kaggle",)),
    ("local", {"USER": "ann"}, ("mnt/workspace", "data", "workspace", "storage", "home/featurize")),
    ("local", {"REGION": "cn", "MODAL_TOKEN_ID": "t", "RUNPOD_API_KEY": "k", "HF_TOKEN": "h"}, ()),
    ("local", {"SPACE_ID": "", "RUNPOD_POD_ID": "", "AutoDLRegion": "", "KAGGLE_KERNEL_RUN_TYPE": ""}, ()),
]
OTHERS: list[tuple[str, dict[str, str], tuple[str, ...], str]] = [  # name, variables, folders, where runs are kept
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


@pytest.mark.parametrize(("name", "env", "places"), DETECTED)
def test_each_platform_is_found_by_its_marks_and_not_by_decoys(
    tmp_path: Path, name: str, env: dict[str, str], places: tuple[str, ...]
) -> None:
    found = platforms.detect(env, make(tmp_path, *places))
    assert (found.name, found.batch) == (name, name == "kaggle")


@pytest.mark.parametrize(("name", "env", "places", "keep"), OTHERS, ids=[row[0] for row in OTHERS])
def test_every_other_platform_and_where_it_keeps_runs(
    tmp_path: Path, name: str, env: dict[str, str], places: tuple[str, ...], keep: str
) -> None:
    found = platforms.detect(env, make(tmp_path, *places))
    assert (found.name, platforms.folders(found, {}, tmp_path).keep) == (name, tmp_path / keep)
    assert any(mark in found.evidence for mark in [*env, *(f"/{place}" for place in places)])


def test_the_evidence_names_what_proves_and_what_does_not(tmp_path: Path) -> None:
    evidence = platforms.detect(KAGGLE_ENV, make(tmp_path, "content")).evidence
    assert re.match(r"KAGGLE_KERNEL_RUN_TYPE; COLAB_RELEASE_TAG, /content alone", evidence)
    assert "/etc/network_turbo alone" in platforms.detect({}, make(tmp_path / "lanyun", "etc/network_turbo")).evidence


def test_the_override_wins_and_a_wrong_one_lists_the_right_names(tmp_path: Path) -> None:
    assert platforms.detect(KAGGLE_ENV | {"NBUTILS_PLATFORM": "local"}, tmp_path) == Platform(
        "local", "NBUTILS_PLATFORM is set"
    )
    with refused("platforms.unknown", *detection.table(), name="kagle"):
        platforms.detect({"NBUTILS_PLATFORM": "kagle"}, tmp_path)
    assert len(detection.table()) == 16 and next(iter(detection.table())) == "kaggle"


def test_a_user_who_may_not_look_into_the_home_of_root_is_no_error(tmp_path: Path) -> None:
    machine = simulate.Machine(tmp_path / "m").make("root/autodl-tmp")
    drop = "import os; os.chmod(str(platforms.fs_root() / 'root'), 0); os.getuid() or os.setuid(65534)"
    seen = machine.ask("platforms.detect().name", f"from nbutils import platforms\n{drop}")
    (tmp_path / "m/root").chmod(0o700)
    assert seen == "local" and platforms.in_kernel() is False


# ---- folders


def test_each_platform_keeps_runs_where_they_last(tmp_path: Path) -> None:
    kaggle = platforms.folders(Platform("kaggle", ""), {}, make(tmp_path, "kaggle/working"))
    assert kaggle.keep == tmp_path / "kaggle/working/runs" and kaggle.scratch == tmp_path / "kaggle/temp"
    assert kaggle.inputs == tmp_path / "kaggle/input" and kaggle.lasting
    assert kaggle.is_attached(tmp_path / "kaggle/input/x") and not kaggle.is_attached(kaggle.keep)
    for name in ("colab", "colab_enterprise", "modal", "hf_spaces"):
        assert not platforms.folders(Platform(name, ""), {}, tmp_path).lasting
    assert platforms.folders(LOCAL, {}, tmp_path).lasting


def test_autodl_prefers_its_file_storage_unless_it_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, storage = tmp_path / "root/autodl-tmp/runs", tmp_path / "root/autodl-fs/runs"
    without = platforms.folders(AUTODL, {}, make(tmp_path, "root/autodl-tmp"))
    assert (without.keep, without.earlier, without.lasting) == (data, (), True)
    found = platforms.folders(AUTODL, {}, make(tmp_path, "root/autodl-fs"))
    assert (found.keep, found.earlier) == (storage, (data,))
    assert list((tmp_path / "root/autodl-fs").iterdir()) == [], "looking leaves nothing behind"
    real = tempfile.NamedTemporaryFile

    def full(*words: Any, dir: Path, **options: Any) -> Any:
        if dir.name == "autodl-fs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*words, dir=dir, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    found = platforms.folders(AUTODL, {}, tmp_path)
    assert (found.keep, found.earlier) == (data, (storage,)) and "No space left" in found.remark


def test_nbutils_home_moves_the_runs_and_lasts_on_a_disk_of_its_own(tmp_path: Path) -> None:
    for name in detection.table():
        found = platforms.folders(Platform(name, ""), {"NBUTILS_HOME": str(tmp_path / "mine")}, tmp_path / "machine")
        assert found.keep == tmp_path / "mine" and found.lasting is (name == "local")  # no disk of its own: who knows
    machine = simulate.colab(tmp_path)
    machine.write("proc/mounts", f"bucket {machine.root}/mnt/bucket fuse.gcsfuse rw 0 0\n")
    bucket = {"NBUTILS_HOME": str(machine.root / "mnt/bucket/runs")}
    assert platforms.folders(COLAB, bucket, machine.root).lasting
    with refused("platforms.unknown_home"):
        platforms.folders(LOCAL, {"NBUTILS_HOME": "~nosuchuser/x"}, tmp_path)


def test_nbutils_home_on_a_drive_that_is_not_mounted_is_passed_over(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    env = {"NBUTILS_HOME": str(machine.root / "content/drive/MyDrive/mine")}
    found = platforms.folders(COLAB, env, machine.root)
    assert found.keep == machine.root / "content/runs" and "not mounted" in found.remark
    simulate.mounted(machine)
    assert str(platforms.folders(COLAB, env, machine.root).keep) == env["NBUTILS_HOME"]
    found = platforms.folders(COLAB, {}, machine.root)
    assert (found.keep, found.earlier) == (drive.runs_folder(machine.root), (machine.root / "content/runs",))


def test_models_are_downloaded_to_the_large_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(name: str) -> str:
        platform = Platform(name, "")
        return platforms.use_model_cache(platform, platforms.folders(platform, {}, tmp_path)).rpartition(" ")[2]

    assert cache("local") == cache("colab") == ""
    assert cache("autodl") == os.environ["HF_HUB_CACHE"] == str(tmp_path / "root/autodl-tmp/huggingface")
    assert cache("kaggle") == ""  # set already
    monkeypatch.delenv("HF_HUB_CACHE")
    assert cache("kaggle") == str(tmp_path / "kaggle/temp/huggingface")
    monkeypatch.delenv("HF_HUB_CACHE")
    make(tmp_path, ".cache/huggingface/hub/models--Qwen--x")
    assert cache("autodl") == ""


def attach(inputs: Path, *layouts: str) -> None:
    """Put a run with a checkpoint below each, then make everything read-only."""
    for layout in layouts:
        run = make(inputs / layout / "runs/tiny", "checkpoints")
        (run / "checkpoints/checkpoint-4.json").write_text("{}")
        (run / "train.jsonl").write_text("{}")
    for place in [inputs, *inputs.rglob("*")]:
        place.chmod(0o555 if place.is_dir() else 0o444)


def test_inputs_are_found_in_every_layout_in_order_and_not_below_the_deepest(tmp_path: Path) -> None:
    attach(tmp_path / "input", "notebooks/ann/first-run", "some-slug", "datasets/ann/some-slug")
    found = list(platforms.find_inputs(tmp_path / "input", "checkpoints/checkpoint-*.json"))
    assert found == sorted(found) and len(found) == 3
    deep = make(tmp_path / "deep", "/".join("abcdefghij")) / "/".join("abcdefghij")
    (deep / "checkpoint-1.json").write_text("{}")
    assert list(platforms.find_inputs(tmp_path / "deep", "checkpoint-*.json")) == []
    assert list(platforms.find_inputs(None, "*")) == list(platforms.find_inputs(tmp_path / "no", "*")) == []


def test_a_learner_names_an_input_by_the_end_of_its_path(tmp_path: Path) -> None:
    model = make(tmp_path, "models/qwen/1") / "models/qwen/1"
    attach(tmp_path / "datasets", "ann/some-slug", "other")
    slug = "ann/some-slug/runs/tiny/train.jsonl"
    assert platforms.find_input(tmp_path, "qwen/1") == model
    assert platforms.find_input(tmp_path, slug) == tmp_path / "datasets" / slug
    for name in ("rain.jsonl", "", ".", "..", str(model), "no/such", "train.json?", "*"):
        assert platforms.find_input(tmp_path, name) is None
    with refused("platforms.ambiguous_input", "ann/some-slug/runs", "other/runs", count=2):
        platforms.find_input(tmp_path, "train.jsonl")


# ---- limits


def test_hours_are_counted_where_somebody_counts_them(tmp_path: Path) -> None:
    hours = {name: platforms.time_limit_hours(Platform(name, "")) for name in detection.table()}
    assert {name: value for name, value in hours.items() if value} == {"colab": 12, "kaggle": 12, "paperspace": 6}
    assert platforms.session_seconds(Platform("kaggle", ""), tmp_path) == 0
    began = time.time() - 3 * 3600
    os.utime(make(tmp_path, "proc/1") / "proc/1", (began, began))
    assert platforms.session_seconds(Platform("kaggle", ""), tmp_path) == pytest.approx(3 * 3600, abs=60)
    assert platforms.session_seconds(AUTODL, tmp_path) == 0
    assert 0 < platforms.session_seconds(COLAB, Path("/")) < 10**9


@pytest.mark.parametrize(
    ("files", "cpus", "memory", "free"),
    [
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, 512, 500),  # no limit: the machine's own
        ({"cpu.max": "50000 100000", "memory.max": 2 * GIB}, 0.5, 2, 2),
        ({"memory.max": 12 * GIB, "memory.current": 11 * GIB, "memory.stat": f"a 1\ninactive_file {GIB}"}, None, 12, 2),
        ({"memory.max": 12 * GIB, "memory.current": 13 * GIB, "memory.stat": "anon 1"}, None, 12, 0),
        ({"memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": 2 * GIB,
          "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
          "cpu,cpuacct/cpu.cfs_quota_us": 50000, "cpu,cpuacct/cpu.cfs_period_us": 100000}, 0.5, 4, 3),
        ({"memory/memory.limit_in_bytes": 2**63 - 4096, "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 10},
         None, 512, 500),
    ],
)  # fmt: skip
def test_the_limits_of_a_container_hold_in_both_layouts_of_cgroups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Any],
    cpus: float | None,
    memory: float,
    free: float,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * GIB, total=512 * GIB))
    for name, text in files.items():
        simulate.Machine(tmp_path).write(f"sys/fs/cgroup/{name}", str(text))
    assert platforms.processors(tmp_path).value == (cpus or len(os.sched_getaffinity(0)))
    assert platforms.memory_gib(tmp_path).value == pytest.approx(memory)
    assert platforms.free_memory_gib(tmp_path).value == pytest.approx(free)


# ---- Drive

MOUNT = "platforms.mount_drive(platforms.detect())"


def mount() -> str:
    return platforms.mount_drive(platforms.detect())


def keep() -> Path:
    return platforms.folders(platforms.detect()).keep


def colab(tmp_path: Path, **env: str) -> simulate.Machine:
    """Colab with a kernel, on which Drive is not mounted yet."""
    machine = simulate.colab(tmp_path)
    machine.env |= {"FAKE_KERNEL": "1", "FAKE_DELAY": "0"} | env
    return machine


def test_drive_is_mounted_and_runs_are_kept_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = enter(monkeypatch, colab(tmp_path, FAKE_DRIVE="ok"))
    assert mount().startswith("Drive is mounted:")
    assert keep() == machine.root / "content/drive/MyDrive/finetune-course"
    assert calls(machine) == ["mount 110000"], "upstream gets less time than we allow in all"


@pytest.mark.parametrize(
    ("env", "meaning"),
    [
        ({"FAKE_DRIVE": "headless"}, "no Colab page"), ({"FAKE_DRIVE": "pexpect"}, "no Colab page"),
        ({"FAKE_DRIVE": "denied"}, "access was refused"), ({"FAKE_KERNEL": ""}, "only the notebook's kernel"),
        ({"FAKE_DRIVE": "policy"}, "your organization"), ({"FAKE_DRIVE": "too_big"}, "too many files"),
        ({"FAKE_DRIVE": "liar"}, "nothing is mounted"), ({"FAKE_DRIVE": "odd"}, "no room for [masked]"),
    ],
)  # fmt: skip
def test_every_failure_is_a_sentence_and_runs_stay_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], meaning: str
) -> None:
    machine = enter(monkeypatch, colab(tmp_path, **env))
    said = mount()
    assert said.startswith("Drive could not be mounted: ") and meaning in said and "To do: " in said
    assert keep() == machine.root / "content/runs" and not (machine.root / "content/drive/MyDrive").exists()
    assert "not requested a second time" in mount() and len(calls(machine)) == 1
    assert os.environ[drive.STATE].startswith("failed: "), "which child processes inherit"


def test_drive_is_not_requested_where_it_is_off_elsewhere_or_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = colab(tmp_path / "off", NBUTILS_DRIVE="off")
    enterprise = simulate.colab(tmp_path / "enterprise", enterprise=True)
    mounted = simulate.mounted(colab(tmp_path, NBUTILS_DRIVE="failed: once before"))
    kaggle = simulate.kaggle(tmp_path)  # has Colab's package
    said = {"off": off, "No Drive on colab_enterprise": enterprise, "mounted already": mounted, "No Drive on": kaggle}
    for text, machine in said.items():
        with monkeypatch.context() as patch:
            enter(patch, machine)
            assert text in mount() and calls(machine) == []
            assert machine is not mounted or keep() == drive.runs_folder(machine.root)


def test_files_in_the_mount_point_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = enter(monkeypatch, colab(tmp_path, FAKE_DRIVE="ok"))
    lost = machine.write("content/drive/MyDrive/x/adapter.bin", "made before Drive was mounted")
    assert f"mv {machine.root}/content/drive " in mount() and lost.exists() and calls(machine) == []
    (machine.root / "content/drive").rename(machine.root / "content/drive-before")
    assert mount().startswith("Drive is mounted:"), "done as told, it works"


HANGS = """
import json, time
from nbutils import platforms
began = time.monotonic()
print(json.dumps([platforms.drive.mount_drive(platforms.detect(), seconds=0.5), time.monotonic() - began]))
"""


def test_a_mount_that_never_returns_is_left_after_the_time_allowed(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="hang")
    ran = machine.python("-c", HANGS, timeout=20)
    said, seconds = json.loads(ran.stdout.splitlines()[-1])
    assert 0.4 < seconds < 5 and "nobody allowed it in time" in said and calls(machine) == ["mount 400"]
    code = (
        "import os, signal, threading\nfrom nbutils import platforms\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts without it
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"try:\n    {MOUNT}\nexcept KeyboardInterrupt:\n    print('stopped')"
    )
    assert machine.python("-c", code, timeout=20).stdout.endswith("stopped\n"), "who interrupts is obeyed"


def test_an_alarm_set_by_others_goes_on() -> None:
    import signal

    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 30, 0)
    try:
        with pytest.raises(drive.TimedOut):
            drive.within(0.1, lambda: time.sleep(5))
        assert drive.within(5, lambda: "value") == "value"
        assert 25 < signal.getitimer(signal.ITIMER_REAL)[0] < 29.95
        os.kill(os.getpid(), signal.SIGALRM)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("overlay / overlay rw 0 0", False), ("drive /content/drive2 fuse.drive rw 0 0", False), ("garbage", False),
        ("tmp /content/drive tmpfs rw 0 0", False), ("x / y rw\ndrive /content/drive fuse.drive rw 0 0", True),
    ],
)  # fmt: skip
def test_only_drives_own_line_or_a_real_mount_is_drive(tmp_path: Path, line: str, expected: bool) -> None:
    simulate.Machine(make(tmp_path, "content/drive/MyDrive")).write("proc/mounts", f"{line}\n")
    assert drive.is_mounted(tmp_path) is expected


def test_a_mount_that_dies_or_vanishes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path))
    keep, stat = drive.runs_folder(machine.root) / "demo/checkpoints", os.stat
    place = drive.mount_point_of(keep, machine.root)
    assert place == machine.root / "content/drive" and drive.is_mount(place, machine.root)

    def dead(path: object, *words: object, **options: object) -> os.stat_result:
        if Path(str(path)).is_relative_to(machine.root / drive.MOUNT_POINT):
            raise OSError(107, "Transport endpoint is not connected")
        return stat(path, *words, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", dead)
        broken.setattr(os, "lstat", dead)
        mounted, said = drive.is_mounted(machine.root), drive.mount_drive(COLAB, root=machine.root)
    assert not mounted and "lost its connection" in said and "force_remount=True" in said and calls(machine) == []
    machine.write("proc/mounts", "")
    assert not drive.is_mount(place, machine.root) and drive.mount_point_of(keep, machine.root) is None


def test_the_nearest_mount_is_found_and_the_root_disk_is_none(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    data, shared = "root/autodl-tmp", "root/autodl fs"
    machine.write("proc/mounts", f"overlay / overlay rw 0 0\n/dev/sdb /{data} xfs rw\nnas /root/autodl\\040fs nfs rw\n")
    for path, expected in ((data, data), (f"{data}/a/b", data), (f"{shared}/runs", shared)):
        assert drive.mount_point_of(machine.root / path, machine.root) == machine.root / expected
    assert drive.mount_point_of(machine.root / "root/else", machine.root) is None
    assert drive.mount_point_of(Path("/proc/self"), machine.root) == Path("/proc"), "outside the simulated root"


# ---- a web of one's own


class Site(ThreadingHTTPServer):
    """A web site that answers after a delay, and writes down what it was asked."""

    daemon_threads = True

    def __init__(self, delay: float = 0.0, status: int = 200, body: bytes = b"{}", location: str = "") -> None:
        self.delay, self.status, self.body, self.location, self.asked = delay, status, body, location, list[Any]()
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked went away: nothing to tell."""


class _Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        size = int(self.headers["Content-Length"] or 0)
        sent = json.loads(self.rfile.read(size)) | {"token": self.headers["Authorization"]} if size else self.path
        self.server.asked.append(sent)
        time.sleep(self.server.delay)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


Web = Callable[..., dict[str, Site]]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Local stand-ins for the hub and its mirrors, by delay in seconds or by (delay, status)."""
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)  # another test may have loaded it
    opened: list[Site] = []

    def build(**delays: float | tuple[float, int]) -> dict[str, Site]:
        given = {name.replace("_", "-"): one if isinstance(one, tuple) else (one, 200) for name, one in delays.items()}
        sites = {name: Site(*one) for name, one in given.items()}
        opened.extend(sites.values())
        monkeypatch.setattr(network, "SOURCES", {name: site.url for name, site in sites.items()})
        monkeypatch.setattr(network, "HUB", sites["hub"].url)
        monkeypatch.setattr(network, "SECONDS", 0.8)
        return sites

    yield build
    for site in opened:
        site.shutdown()
        site.server_close()


ALL = {"hub": 0.0, "hf_mirror": 0.0, "modelscope": 0.0}


# ---- the mirror


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ({"hub": 0.15, "hf_mirror": 0.1, "modelscope": 0.1}, "hub"),  # near enough
        ({"hub": 0.6, "hf_mirror": 0.05, "modelscope": 0.25}, "hf-mirror"),
        ({"hub": 0.6, "hf_mirror": 0.25, "modelscope": 0.05}, "modelscope"),
        ({"hub": (0.0, 403), "hf_mirror": 0.05, "modelscope": 0.3}, "hf-mirror"),  # turned away is no answer
        ({"hub": (0.0, 503), "hf_mirror": (0.0, 429), "modelscope": 0.1}, "modelscope"),
    ],
)
def test_in_china_the_best_measured_is_taken_once_for_all_processes(web: Web, delays: dict, expected: str) -> None:
    sites = web(**delays)
    [line] = network.prepare_network(AUTODL)
    assert line.startswith(f"network   models come from {expected} (hub ") and network.chosen() == expected
    mirrored = expected == "hf-mirror"
    assert os.environ.get("HF_ENDPOINT") == (sites["hf-mirror"].url if mirrored else None)
    assert os.environ.get("HF_HUB_DISABLE_XET") == ("1" if mirrored else None)
    code = "from nbutils.platforms import detect, network; network.prepare_network(detect()); print(network.chosen())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{expected}\n"
    assert all(len(site.asked) == 1 for site in sites.values())


def test_elsewhere_the_mirrors_are_asked_only_if_the_hub_is_silent(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(hub=0.1, hf_mirror=0.0, modelscope=0.0)
    assert network.prepare_network(AUTODL, probe=False) == [] and not sites["hub"].asked, "nothing is needed"
    assert network.prepare_network(LOCAL) == [] and network.chosen() == "hub"
    assert [len(site.asked) for site in sites.values()] == [1, 0, 0]
    monkeypatch.delenv(network.FOUND)
    web(hub=5.0, hf_mirror=0.3, modelscope=0.0)
    assert "models come from modelscope" in network.prepare_network(LOCAL)[0]
    assert os.environ["HF_ENDPOINT"] == network.SOURCES["hf-mirror"], "which serves what ModelScope does not"


def test_silence_is_remembered_for_a_while_and_then_asked_again(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(hub=(0.0, 503), hf_mirror=(0.0, 503), modelscope=(0.0, 503))
    for _ in range(2):
        assert network.prepare_network(AUTODL) == [f"network   {network.SILENCE}"] and not network.hub_online()
    assert len(sites["hub"].asked) == 1
    monkeypatch.setattr(network, "NOTHING_SECONDS", -1.0)
    sites["hub"].status = 200
    assert "models come from hub" in network.prepare_network(AUTODL)[0] and network.hub_online()


@pytest.mark.parametrize("name", ["hub", "hf-mirror", "modelscope"])
def test_the_learners_mirror_is_taken_unmeasured(web: Web, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sites = web(**ALL)
    monkeypatch.setenv("NBUTILS_MIRROR", name)
    for _ in range(2):
        assert "as NBUTILS_MIRROR says" in network.prepare_network(AUTODL)[0]
    assert network.chosen() == name and not any(site.asked for site in sites.values())
    assert os.environ.get("HF_ENDPOINT") == (sites[name].url if name == "hf-mirror" else None)
    monkeypatch.setenv("NBUTILS_MIRROR", "hfmirror")
    with refused("platforms.unknown_mirror", "hf-mirror", "modelscope"):
        network.prepare_network(LOCAL)


def test_the_learners_endpoint_wins(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = web(**ALL)
    monkeypatch.setenv("HF_ENDPOINT", "http://models.example")
    monkeypatch.setenv("NBUTILS_MIRROR", "modelscope")
    for _ in range(2):
        assert "as HF_ENDPOINT says" in network.prepare_network(AUTODL)[0]
    assert os.environ["HF_ENDPOINT"] == "http://models.example" and network.chosen() == ""
    assert not any(site.asked for site in sites.values())


HEADERS = "from huggingface_hub.utils import build_hf_headers; print(build_hf_headers().get('authorization'))"


@pytest.mark.parametrize("loaded", ["", "hub", "hf-mirror"])
def test_a_mirror_gets_no_token_and_the_hub_gets_it_again(
    web: Web, monkeypatch: pytest.MonkeyPatch, loaded: str
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    sites = web(**ALL)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    if loaded:
        monkeypatch.setattr(constants, "ENDPOINT", sites[loaded].url)
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    for name in ("hf-mirror", "hub"):
        monkeypatch.setenv("NBUTILS_MIRROR", name)
        told = " ".join(network.prepare_network(AUTODL))
        child = subprocess.check_output([sys.executable, "-c", HEADERS], text=True, env=environments.variables())
        assert "Bearer" not in child or name == "hub", "a token of a file included"
        if not loaded:
            assert ("Bearer" in subprocess.check_output([sys.executable, "-c", HEADERS], text=True)) is (name == "hub")
        else:  # imported for a mirror, it goes on asking there until the kernel is restarted
            assert ("authorization" in build_hf_headers()) is (name == "hub" and loaded == "hub")
            assert ("restart it" in told) is (loaded != name)


BLOCKED = """
import socket, time
def refuse(*_, **__): raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from nbutils import platforms
print(platforms.prepare_network(platforms.detect()), platforms.hub_online())
"""


def test_offline_means_not_one_connection_and_a_dead_network_costs_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = simulate.autodl(tmp_path).python("-c", BLOCKED)
    assert "offline, as HF_HUB_OFFLINE says" in ran.stdout and ran.stdout.endswith("False\n"), ran.stderr

    def lost(*_: object, **__: object) -> None:
        time.sleep(3)  # a name lookup that nobody answers knows no timeout
        raise OSError("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(network, "SECONDS", 0.6)
    began = time.monotonic()
    assert network.prepare_network(Platform("kaggle", "")) == [f"network   {network.SILENCE}"]
    assert network.hub_online() is False and time.monotonic() - began < 2


def test_any_answer_below_500_is_an_answer(web: Web) -> None:
    sites = web(hub=(0.0, 404), hf_mirror=(0.0, 429), modelscope=(0.0, 500))
    assert network.answers(sites["hub"].url, 2) and network.answers(sites["hf-mirror"].url, 2)
    assert not any(network.answers(url, 2) for url in (sites["modelscope"].url, "http://127.0.0.1:9", "nonsense"))


# ---- AutoDL's proxies, ports, power and notice

SHOW = (
    "[platforms.prepare_network(platforms.detect()), dict(os.environ), urllib.request.proxy_bypass('127.0.0.1:8000')]"
)
IMPORTS = "import os, urllib.request\nfrom nbutils import platforms"


@pytest.mark.parametrize(
    ("env", "script", "said", "proxy"),
    [
        ({}, simulate.TURBO, "proxies of", "http://127.0.0.1:12798"),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "no_proxy": "intra.example"}, simulate.TURBO, "offline", None),
        ({"NBUTILS_TURBO": "off"}, simulate.TURBO, "offline", None),
        ({}, "exit 3\n", "sets no proxy", None),
        ({}, "no such command at all (\n", "sets no proxy", None),
    ],
)
def test_autodls_proxies_are_taken_unless_the_learner_has_his_own(
    tmp_path: Path, env: dict[str, str], script: str, said: str, proxy: str | None
) -> None:
    machine = simulate.autodl(tmp_path)
    machine.env |= env
    machine.write("etc/network_turbo", script)
    lines, after, direct = machine.ask(SHOW, IMPORTS)
    assert said in lines[0] and after.get("http_proxy") == proxy and "12798" not in str(lines)
    assert direct is (proxy is not None or "HTTPS_PROXY" in env), "the server of lesson 05 is reached past any proxy"
    if proxy:
        assert {"hf-mirror.com", "aliyuncs.com", "localhost"} <= set(after["no_proxy"].split(","))


def test_a_request_goes_through_the_proxy_or_past_it_and_a_script_that_hangs_is_left(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, machine = web(**ALL), simulate.autodl(tmp_path)
    monkeypatch.setattr(network, "TURBO_SECONDS", 0.3)
    machine.write("etc/network_turbo", "sleep 60 & sleep 60\n")
    began = time.monotonic()
    assert "sets no proxy" in network.prepare_network(AUTODL, probe=False, root=machine.root)[0]
    assert time.monotonic() - began < 2
    monkeypatch.setattr(network, "TURBO_SECONDS", 5)
    machine.write("etc/network_turbo", f"export http_proxy={sites['hub'].url} https_proxy={sites['hub'].url}\n")
    network.prepare_network(AUTODL, probe=False, root=machine.root)
    assert network.answers("http://huggingface.co/x", 2) and sites["hub"].asked == ["http://huggingface.co/x"]
    assert network.answers(f"{sites['hf-mirror'].url}/y", 2) and sites["hf-mirror"].asked == ["/y"]


def test_the_first_free_public_port_of_autodl_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving.ports.PUBLIC == {"autodl": (6006, 6008)} and serving.preferred_port(LOCAL) == 0
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.1", 0)) as other:
        ports = busy.getsockname()[1], other.getsockname()[1]
        monkeypatch.setitem(serving.ports.PUBLIC, "autodl", ports)
        assert serving.preferred_port(AUTODL) == 0, "both are busy: any free one"
        other.close()
        assert serving.preferred_port(AUTODL) == ports[1]


def test_a_port_that_is_public_is_told_with_its_address(tmp_path: Path) -> None:
    said = simulate.autodl(tmp_path).ask(
        "[serving.public_address(platforms.detect(), port) for port in (6006, 6008, 7000)]",
        "from nbutils import platforms, serving",
    )
    assert "https://u1-abc.westb.seetacloud.com:8443/v1" in said[0] and "API key" in said[0]
    assert "6008" in said[1] and "only 6006 and 6008" in said[2]
    assert "for programs on this machine" in serving.public_address(LOCAL, 7000)


def shutdowns(machine: simulate.Machine) -> str:
    log = machine.root / "shutdown.log"
    return log.read_text() if log.exists() else ""


def test_only_a_safe_run_on_autodl_powers_the_machine_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown.time, "sleep", lambda seconds: None)
    machine = simulate.autodl(tmp_path)
    for problem in ("checkpoint-40.tar is shorter than its manifest says", ""):
        assert "not safe yet" in shutdown.power_off(AUTODL, problem, root=machine.root)
    for name in ("local", "colab", "kaggle", "featurize"):
        assert f"this is {name}" in shutdown.power_off(Platform(name, ""), None, root=machine.root)
    assert shutdowns(machine) == ""
    assert shutdown.power_off(AUTODL, None, root=machine.root).startswith("Powered off.")
    assert shutdowns(machine) == "called with []\n", "without arguments"


def test_a_power_off_that_fails_or_is_interrupted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate.autodl(tmp_path)
    tool = machine.write("usr/bin/shutdown", f"#!/bin/sh\necho no right {TOKEN} >&2\nexit 4\n")
    said = shutdown.power_off(AUTODL, None, grace=0, root=machine.root)
    assert said.startswith("Not powered off") and "no right [masked]" in said
    tool.unlink()
    assert "Not powered off: FileNotFoundError" in shutdown.power_off(AUTODL, None, grace=0, root=machine.root)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutdown.time, "sleep", interrupted)
    assert "you stopped it" in shutdown.power_off(AUTODL, None, root=simulate.autodl(tmp_path).root)
    assert shutdowns(machine) == ""


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b'{"code": "Success"}', "Notice sent"),
        (429, b"", "50 a day"),
        (401, b"", "AUTODL_TOKEN is not valid"),
        (500, b"", "HTTP status 500"),
        (200, b'{"code": "AuthorizeFailed", "msg": "bad token ' + TOKEN.encode() + b'"}', "'bad token [masked]'"),
        (200, b"[1]", "did not answer"),
        (200, b"<html>", "did not answer"),
        (302, b"", "No notice sent"),
        (308, b"", "No notice sent"),
    ],
)
def test_a_notice_is_masked_follows_no_redirect_and_every_refusal_is_a_sentence(
    status: int, answer: bytes, said: str
) -> None:
    elsewhere = Site()
    site = Site(status=status, body=answer, location=elsewhere.url if status in (302, 308) else "")
    told = shutdown.send_notice("训练结束", f"key {TOKEN}, hf_{'a' * 30}", "demo", url=site.url)
    assert said in told and TOKEN not in told and not elsewhere.asked
    assert site.asked == [{"title": "训练结束", "name": "demo", "content": "key [masked], [masked]", "token": TOKEN}]
    for one in (site, elsewhere):
        one.shutdown()
        one.server_close()


def test_without_a_token_or_a_service_no_notice_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not answer (URLError" in shutdown.send_notice("t", "x", url="http://127.0.0.1:9")
    monkeypatch.delenv("AUTODL_TOKEN")
    assert "there is no AUTODL_TOKEN" in shutdown.send_notice("t", "x")


# ---- secrets

VALUE = "correct-horse-battery-staple"


def read_secrets(capsys: pytest.CaptureFixture[str], *names: str) -> tuple[list[str | None], str]:
    """The secrets by name, and what was printed on the way."""
    began = time.monotonic()
    found, printed = [secret(name) for name in names], capsys.readouterr().out.strip()
    assert VALUE not in printed and VALUE not in masking.mask_secrets(str(found)) and time.monotonic() - began < 5
    return found, printed


def test_the_environment_comes_first_is_trimmed_and_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NOTE", f" {VALUE}\n")
    assert masking.mask_secrets(f"note {VALUE}") == f"note {VALUE}"
    assert secret(" MY_NOTE ") == VALUE and masking.mask_secrets(f"note {VALUE}") == "note [masked]"
    assert secret("NO_SUCH_KEY_ANYWHERE") is None
    with refused("platforms.unnamed_secret"):
        secret("  \n")


@pytest.mark.parametrize(
    ("env", "names", "expected", "said", "asked"),
    [
        ({"FAKE_USERDATA": "ok"}, ["HF_TOKEN", "WANDB_API_KEY"], [VALUE, None], "", 2),
        ({"FAKE_USERDATA": "ok", "FAKE_NOT_GRANTED": "W"}, ["W", "W", "HF_TOKEN"], [None, None, VALUE], "tick", 3),
        ({"FAKE_USERDATA": "error"}, ["HF_TOKEN"], [None], "reload the page", 1),
        ({"FAKE_USERDATA": "timeout"}, ["HF_TOKEN", "B_KEY"], [None, None], "without an open Colab page", 1),
        ({"FAKE_KERNEL": ""}, ["HF_TOKEN", "B_KEY"], [None, None], "not `!python ...`", 1),
        ({"FAKE_DELAY": "60"}, ["HF_TOKEN", "B_KEY"], [None, None], "do not answer", 1),
    ],
)
def test_colabs_secrets_and_each_of_their_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], env: dict[str, str],
    names: list[str], expected: list[str | None], said: str, asked: int,
) -> None:  # fmt: skip
    machine = colab(tmp_path, **{"FAKE_SECRETS": json.dumps({"HF_TOKEN": f"{VALUE} \n"})} | env)
    enter(monkeypatch, machine)
    found, printed = read_secrets(capsys, *names)
    assert found == expected and said in printed and printed.count("\n") == 0
    assert bool(printed) is bool(said) and len(calls(machine)) == asked


class Secrets(BaseHTTPRequestHandler):
    """Kaggle's service for secrets: by label a value, an error, or an HTTP status."""

    def do_POST(self) -> None:
        label = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["Label"]
        if label.startswith("STATUS_"):
            self.send_error(int(label.removeprefix("STATUS_")))
            return
        time.sleep(1 if label == "SLOW" else 0)
        absent, broken = "No user secrets exist for kernel id 7 and label X.", f"Internal trouble with {VALUE}"
        told = {"wasSuccessful": label == "HF_TOKEN", "result": {"secret": VALUE}}
        if label != "HF_TOKEN":
            told = {"wasSuccessful": False, "errors": [broken if label == "BROKEN" else absent]}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "expected", "said"),
    [
        (["WANDB_API_KEY", "HF_TOKEN"], [None, VALUE], ""),
        (["STATUS_403", "HF_TOKEN"], [None, None], "HTTP status 403"),
        (["STATUS_429", "HF_TOKEN"], [None, VALUE], "HTTP status 429"),
        (["BROKEN", "HF_TOKEN"], [None, VALUE], "answered with an error for BROKEN"),
        (["SLOW", "HF_TOKEN"], [None, None], "do not answer"),
    ],
)
def test_kaggles_secrets_and_each_of_their_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: list[str],
    expected: list[str | None], said: str,
) -> None:  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Secrets)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    machine = simulate.kaggle(tmp_path)
    machine.env["KAGGLE_URL_BASE"] = f"http://127.0.0.1:{server.server_address[1]}"
    enter(monkeypatch, machine)
    found, printed = read_secrets(capsys, *names)
    server.shutdown()
    server.server_close()
    assert found == expected and said in printed and bool(printed) is bool(said)


def test_kaggle_without_internet_or_token_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(monkeypatch, simulate.kaggle(tmp_path))
    found, printed = read_secrets(capsys, "HF_TOKEN", "WANDB_API_KEY")
    assert found == [None, None] and "Internet" in printed and printed.count("\n") == 0
    assert os.environ[secrets.STATE] == "kaggle", "which child processes inherit"
    monkeypatch.delenv(secrets.STATE)
    monkeypatch.delenv("KAGGLE_USER_SECRETS_TOKEN")
    assert "Add-ons > Secrets" in read_secrets(capsys, "HF_TOKEN")[1]


# ---- hardware

T4, P100 = Card("Tesla T4", (7, 5), 14.7, 2), Card("Tesla P100", (6, 0), 15.9, 1)
A100 = Card("NVIDIA A100", (8, 0), 39.4, 1)
KAGGLE_BUILD = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("card", "precision", "engine"),
    [(None, "fp32", "vllm-cpu"), (P100, "fp16", "transformers"), (T4, "fp16", "vllm"), (A100, "bf16", "vllm")],
)
def test_each_gpu_gets_what_it_can_do(card: Card | None, precision: str, engine: str) -> None:
    assert (hardware.precision(card).value, hardware.engine(card).value) == (precision, engine)
    if card is not A100:
        assert (hardware.attention(card).value, hardware.liger(card).value) == ("sdpa", False)
    for decide in (hardware.precision, hardware.attention, hardware.liger, hardware.engine):
        assert len(decide(card).reason) > 10


def test_this_machine_computes_and_a_gpu_without_kernels_stops_the_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    hardware.require_working(hardware.card())
    assert hardware.peak_memory_gib() > 0.01 and str(T4) == "2 x Tesla T4 (capability 7.5, 14.7 GiB)"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: KAGGLE_BUILD)
    with refused("hardware.does_not_compute", "sm_60", "GPU T4 x2", "cu126"):
        hardware.require_working(P100)
    newest = Card("Next", (13, 0), 99.0, 1)
    assert "newer torch" in hardware.cure(newest, hardware.working_operation(newest).reason)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch.cuda, "get_arch_list", list)  # where it names none, only a try tells
    monkeypatch.setattr(torch, "ones", fail)
    assert hardware.working_operation(P100).reason.endswith("on the device")


@pytest.mark.parametrize(
    ("capability", "built", "works"),
    [
        ((6, 0), KAGGLE_BUILD, False), ((7, 5), KAGGLE_BUILD, True), ((8, 9), KAGGLE_BUILD, True),
        ((12, 1), KAGGLE_BUILD, True), ((13, 0), KAGGLE_BUILD, False), ((13, 0), ["sm_90", "compute_90"], True),
        ((6, 0), ["sm_50", "sm_60", "sm_70"], True), ((6, 0), ["sm_61"], False), ((9, 0), ["sm_90a"], True),
        ((9, 4), ["gfx942"], True), ((6, 0), [], True),
    ],
)  # fmt: skip
def test_a_binary_serves_its_generation_and_ptx_what_comes_after(
    capability: tuple[int, int], built: list[str], works: bool
) -> None:
    assert hardware.has_kernels(capability, built) is works


def test_torch_gets_expandable_segments_where_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, supported: int, fails: int = 0) -> None:
            self.supported, self.fails = supported, fails

        def cuInit(self, flags: int) -> int:
            return self.fails

        def cuDeviceGetAttribute(self, answer: Any, number: int, device: int) -> int:
            assert number == 102 and device == 0
            answer._obj.value = self.supported
            return 0

    def set_by(driver: Driver | None, release: str = "6.6.105+") -> str | None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr("ctypes.CDLL", load)
        monkeypatch.setattr("platform.release", lambda: release)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
        hardware.leave_no_gaps()
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF")

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert set_by(Driver(1)) == "expandable_segments:True"
    assert "expandable_segments:False" in hardware.cure(T4, "CUDA driver error: operation not supported")
    assert set_by(None) is set_by(Driver(0)) is set_by(Driver(1, fails=100)) is None
    assert set_by(Driver(1), "6.6.87.2-microsoft-standard-WSL2") is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")  # the learner's own choice
    assert set_by(Driver(1)) is None


@pytest.mark.parametrize(
    ("given", "after"), [({}, "0"), ({"LOCAL_RANK": "1"}, None), ({"CUDA_VISIBLE_DEVICES": "1"}, "1")]
)
def test_torch_sees_one_gpu_and_idle_threads_sleep_unless_somebody_decided(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], after: str | None
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    hardware.use_one_card()
    hardware.share_processors()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after and os.environ["OMP_WAIT_POLICY"] == "passive"


# ---- disk

Usage = namedtuple("Usage", "total used free")


def sparse(file: Path, size: float) -> None:
    """A file of that size which takes no room."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as handle:
        handle.truncate(int(size))


def test_what_kaggle_saves_is_20_gb_whatever_the_disk_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaggle = simulate.kaggle(tmp_path).root / "kaggle/working"
    monkeypatch.setenv("NBUTILS_FS_ROOT", str(kaggle.parents[1]))
    monkeypatch.setenv("NBUTILS_PLATFORM", "kaggle")
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(0, 0, 100 * GIB))
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(20e9 / GIB)
    sparse(kaggle / "runs/old/merged/model.safetensors", 15e9)
    assert disk.free_gib(kaggle / "runs/tiny") == pytest.approx(5e9 / GIB)
    assert disk.free_gib(kaggle.parent / "temp") == 100, "intermediate files are not counted"
    disk.require_disk(kaggle, 4, "the merge")
    with refused("disk.full", "/kaggle/temp", needed="6.0 GiB", free="4.7 GiB"):
        disk.require_disk(kaggle, 6, "the merge")
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(0, 0, 2 * GIB))
    assert disk.free_gib(kaggle) == 2
    monkeypatch.setenv("NBUTILS_PLATFORM", "colab")  # has stray folders of these names
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(0, 0, 100 * GIB))
    assert disk.free_gib(kaggle) == 100


def test_a_disk_that_takes_no_more_files_is_told_apart_from_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = os.statvfs("/")
    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result([*seen[:5], 200_000, 12, 12, *seen[8:]]))
    with refused("disk.no_inodes", files=12):
        disk.require_disk(tmp_path / "not/there/yet", 0.001, "the run")
    monkeypatch.setattr("os.statvfs", lambda place: os.statvfs_result([*seen[:5], 0, 0, 0, *seen[8:]]))
    disk.require_disk(tmp_path, 0.001, "the run")  # a file system that does not count files is trusted


def test_a_file_that_vanishes_while_counting_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(tmp_path / "a/model", GIB)
    assert disk.folder_gib(tmp_path) == pytest.approx(1, abs=0.001)
    monkeypatch.setattr(Path, "lstat", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert disk.folder_gib(tmp_path) == 0


# ---- configs/kaggle/kernel-metadata.json


def test_the_kernel_metadata_is_what_kaggle_takes() -> None:
    folder = ROOT / "configs/kaggle"
    metadata = json.loads((folder / "kernel-metadata.json").read_text(encoding="utf-8"))
    owner, _, name = metadata["id"].partition("/")
    assert owner and name == re.sub(r"[^a-z0-9]+", "-", metadata["title"].lower()) == "finetune-course-qlora"
    fixed = {
        "language": "python", "kernel_type": "notebook", "is_private": True, "enable_gpu": True,
        "machine_shape": "NvidiaTeslaT4", "enable_tpu": False, "enable_internet": True,
    }  # fmt: skip
    sources = {f"{kind}_sources": [] for kind in ("dataset", "competition", "kernel", "model")}
    assert metadata == fixed | sources | {key: metadata[key] for key in ("id", "title", "code_file")}
    code = (folder / metadata["code_file"]).resolve()
    assert code.name == "03_qlora.ipynb" and json.loads(code.read_text(encoding="utf-8"))["nbformat"] == 4
    assert code.stat().st_size < 700_000
