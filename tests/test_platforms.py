"""platforms: the right name for the right reason, decoys included; its folders; its limits."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import simulate

from nbutils import platforms
from nbutils.errors import CourseError

KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_20260514"}
COLAB = {"COLAB_GPU": "", "COLAB_RELEASE_TAG": "x", "TBE_RUNTIME_ADDR": "172.28.0.1:8011"}
ALL = (
    "colab colab_enterprise kaggle autodl pai_dsw modelscope featurize gpushare matpool paperspace hf_spaces "
    "studio_lab lightning modal runpod local"
)
SEEN = "[platforms.detect().name, platforms.detect().evidence, str(platforms.folders(platforms.detect()).keep)]"
OTHERS: list[tuple[str, dict[str, str], tuple[str, ...], str]] = [  # name, variables, folders, where runs are kept
    ("pai_dsw", {"DSW_INSTANCE_ID": "dsw-1", "PAI_WORKSPACE_ID": "7"}, ("mnt/workspace",), "mnt/workspace/runs"),
    ("modelscope", {"MODELSCOPE_ENVIRONMENT": "notebook", "DSW_INSTANCE_ID": "dsw-1"}, ("mnt/workspace",),
     "mnt/workspace/runs"),
    ("featurize", {"USER": "featurize"}, ("home/featurize", "home/featurize/work"), "home/featurize/work/runs"),
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


def make(root: Path, *places: str) -> Path:
    for place in places:
        (root / place).mkdir(parents=True)
    return root


def named(name: str) -> platforms.Platform:
    return platforms.Platform(name, "")


def test_the_names_are_these_in_this_order() -> None:
    assert " ".join(platforms.NAMES) == ALL


def test_kaggle_is_kaggle_although_its_image_is_colabs(tmp_path: Path) -> None:
    found = platforms.detect(KAGGLE, make(tmp_path, "content", "kaggle/working"))
    assert (found.name, found.batch) == ("kaggle", True)
    assert found.evidence.startswith("KAGGLE_KERNEL_RUN_TYPE=Batch; COLAB_RELEASE_TAG, /content came with Colab's")


def test_colab_is_colab_although_it_has_kaggle_folders(tmp_path: Path) -> None:
    root = make(tmp_path, "content", "kaggle/working", "kaggle/input/some-slug", "var/colab")
    (root / "var/colab/hostname").write_text("m-s-test")
    assert platforms.detect(COLAB | {"KAGGLE_KEY": "k"}, root).name == "colab"
    assert platforms.detect({}, root).evidence.startswith("/var/colab/hostname; the /kaggle folder")


def test_colabs_release_tag_its_package_and_its_folder_are_no_proof(tmp_path: Path) -> None:
    found = platforms.detect({"COLAB_RELEASE_TAG": "x", "COLAB_GPU": ""}, make(tmp_path, "content"))
    assert found.name == "local" and "COLAB_RELEASE_TAG alone proves none" in found.evidence


def test_colab_enterprise_has_its_own_name(tmp_path: Path) -> None:
    for env in (COLAB, {}):
        assert platforms.detect(env | {"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, tmp_path).name == "colab_enterprise"
    assert platforms.detect(KAGGLE | {"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, tmp_path).name == "kaggle"


def test_autodl_is_found_without_its_variables_but_not_by_its_proxy_script(tmp_path: Path) -> None:
    lanyun = make(tmp_path / "lanyun", "etc")
    (lanyun / "etc/network_turbo").write_text("export http_proxy=http://127.0.0.1:12798")
    found = platforms.detect({}, lanyun)
    assert found.name == "local" and "/etc/network_turbo alone" in found.evidence
    assert platforms.detect({}, make(tmp_path / "a", "root/autodl-tmp")).name == "autodl"
    assert platforms.detect({}, make(tmp_path / "b", "etc/profile.d/autodl.env.sh")).name == "autodl"
    assert platforms.detect({"AutoDLRegion": "west-E"}, tmp_path).name == "autodl"


@pytest.mark.parametrize(("name", "env", "places", "keep"), OTHERS, ids=[row[0] for row in OTHERS])
def test_o1_every_other_platform(
    tmp_path: Path, name: str, env: dict[str, str], places: tuple[str, ...], keep: str
) -> None:
    machine = simulate.Machine(tmp_path / name, env).make(*places)
    seen, evidence, kept = machine.ask(SEEN)
    assert (seen, kept) == (name, str(machine.root / keep))
    assert any(mark in evidence for mark in [*env, *(f"/{place}" for place in places)])


def test_o1_look_alikes_of_other_platforms_are_local(tmp_path: Path) -> None:
    assert platforms.detect({}, make(tmp_path / "a", "mnt/workspace", "data", "workspace", "storage")).name == "local"
    assert platforms.detect({"USER": "ann"}, make(tmp_path / "b", "home/featurize")).name == "local"
    assert platforms.detect({"USER": "featurize"}, make(tmp_path / "c", "home")).name == "local"
    keys = {"REGION": "cn-hangzhou", "MODAL_TOKEN_ID": "t", "RUNPOD_API_KEY": "k", "HF_TOKEN": "h"}
    assert platforms.detect(keys, tmp_path).name == "local"


def test_featurize_is_known_by_its_command_too(tmp_path: Path) -> None:
    machine = simulate.Machine(tmp_path).make("home/featurize")
    machine.write("bin/featurize", "#!/bin/sh\n").chmod(0o755)
    assert platforms.detect({"PATH": str(tmp_path / "bin")}, tmp_path).name == "featurize"


def test_kaggle_keys_at_home_are_not_kaggle(tmp_path: Path) -> None:
    found = platforms.detect({"KAGGLE_KEY": "k", "KAGGLE_USERNAME": "u", "KAGGLE_API_TOKEN": "t"}, tmp_path)
    assert found.name == "local" and "KAGGLE_KEY" in found.evidence


def test_a_wrong_override_lists_the_right_names(tmp_path: Path) -> None:
    assert platforms.detect({"NBUTILS_PLATFORM": "autodl"}, tmp_path).name == "autodl"
    assert platforms.detect(KAGGLE | {"NBUTILS_PLATFORM": "local"}, tmp_path).batch is False
    with pytest.raises(CourseError, match=ALL.replace(" ", ", ")):
        platforms.detect({"NBUTILS_PLATFORM": "kagle"}, tmp_path)


def test_a_user_who_may_not_look_into_the_home_of_root_is_no_error(tmp_path: Path) -> None:
    machine = simulate.Machine(tmp_path / "m").make("root/autodl-tmp")
    drop = "import os; os.chmod(str(platforms.fs_root() / 'root'), 0); os.getuid() or os.setuid(65534)"
    seen = machine.ask("platforms.detect().name", f"from nbutils import platforms\n{drop}")
    (tmp_path / "m/root").chmod(stat.S_IRWXU)
    assert seen == "local"


def test_each_platform_keeps_runs_where_they_last(tmp_path: Path) -> None:
    kaggle = platforms.folders(named("kaggle"), {}, make(tmp_path, "kaggle/working"))
    assert kaggle.keep == tmp_path / "kaggle/working/runs" and kaggle.scratch == tmp_path / "kaggle/temp"
    assert kaggle.inputs == tmp_path / "kaggle/input" and kaggle.lasting
    for name in ("colab", "colab_enterprise"):
        colab = platforms.folders(named(name), {}, tmp_path)
        assert colab.keep == tmp_path / "content/runs" and not colab.lasting
    modal = platforms.folders(named("modal"), {}, tmp_path)
    assert not modal.lasting and not platforms.folders(named("hf_spaces"), {}, tmp_path).lasting
    assert platforms.folders(named("local"), {}, tmp_path).lasting


def test_autodl_prefers_its_file_storage_and_still_finds_runs_on_its_data_disk(tmp_path: Path) -> None:
    data, storage = tmp_path / "root/autodl-tmp/runs", tmp_path / "root/autodl-fs/runs"
    assert platforms.folders(named("autodl"), {}, tmp_path).keep == data  # also before the disk is there
    make(tmp_path, "root/autodl-tmp")
    without = platforms.folders(named("autodl"), {}, tmp_path)
    assert (without.keep, without.earlier, without.lasting) == (data, (), True)
    make(tmp_path, "root/autodl-fs")
    found = platforms.folders(named("autodl"), {}, tmp_path)
    assert (found.keep, found.earlier) == (storage, (data,))
    assert list((tmp_path / "root/autodl-fs").iterdir()) == [], "looking leaves nothing behind"


def test_a_file_storage_without_inodes_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "root/autodl-tmp", "root/autodl-fs")
    real = tempfile.NamedTemporaryFile

    def full(*words: Any, dir: Path, **options: Any) -> Any:
        if dir.name == "autodl-fs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*words, dir=dir, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    found = platforms.folders(named("autodl"), {}, tmp_path)
    assert found.keep == tmp_path / "root/autodl-tmp/runs"
    assert found.earlier == (tmp_path / "root/autodl-fs/runs",)
    assert "autodl-fs takes no files: No space left on device" in found.remark


def test_runs_of_a_colab_without_drive_are_found_once_it_is_mounted(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path))
    found = platforms.folders(named("colab"), {}, machine.root)
    assert found.keep == machine.root / "content/drive/MyDrive/finetune-course" and found.lasting
    assert found.earlier == (machine.root / "content/runs",)


def test_nbutils_home_moves_the_runs_everywhere(tmp_path: Path) -> None:
    env = {"NBUTILS_HOME": str(tmp_path / "mine")}
    for name in platforms.NAMES:
        found = platforms.folders(named(name), env, tmp_path / "machine")
        assert found.keep == tmp_path / "mine" and found.lasting is (name == "local")  # no disk of its own: who knows


def test_nbutils_home_on_a_mounted_disk_lasts(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    machine.make("mnt/bucket")
    machine.write("proc/mounts", f"bucket {machine.root}/mnt/bucket fuse.gcsfuse rw 0 0\n")
    found = platforms.folders(named("colab"), {"NBUTILS_HOME": str(machine.root / "mnt/bucket/runs")}, machine.root)
    assert found.lasting and "mounted at" in found.remark


def test_nbutils_home_on_a_drive_that_is_not_mounted_is_passed_over(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    env = {"NBUTILS_HOME": str(machine.root / "content/drive/MyDrive/mine")}
    found = platforms.folders(named("colab"), env, machine.root)
    assert found.keep == machine.root / "content/runs" and "not mounted" in found.remark
    simulate.mounted(machine)
    assert str(platforms.folders(named("colab"), env, machine.root).keep) == env["NBUTILS_HOME"]


def test_a_home_of_nobody_is_told(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="nosuchuser"):
        platforms.folders(named("local"), {"NBUTILS_HOME": "~nosuchuser/x"}, tmp_path)


def test_an_empty_variable_proves_nothing(tmp_path: Path) -> None:
    empty = {"SPACE_ID": "", "RUNPOD_POD_ID": "", "AutoDLRegion": "", "KAGGLE_KERNEL_RUN_TYPE": ""}
    assert platforms.detect(empty, tmp_path).name == "local"
    inside = {"NBUTILS_HOME": str(tmp_path / "machine/content/mine")}
    assert not platforms.folders(named("colab"), inside, tmp_path / "machine").lasting


KAGGLE_LAYOUTS = ("notebooks/ann/first-run", "some-slug", "datasets/ann/some-slug")


def attach(inputs: Path, *layouts: str) -> None:
    """Put a run with a checkpoint below each, then make everything read-only."""
    for layout in layouts:
        run = inputs / layout / "runs/tiny"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints/checkpoint-4.json").write_text("{}")
        (run / "train.jsonl").write_text("{}")
    for place in [inputs, *inputs.rglob("*")]:
        place.chmod(0o555 if place.is_dir() else 0o444)


@pytest.mark.parametrize("layout", KAGGLE_LAYOUTS)
def test_inputs_are_found_by_marker_in_every_layout(tmp_path: Path, layout: str) -> None:
    attach(tmp_path / "input", layout)
    [found] = platforms.find_inputs(tmp_path / "input", "checkpoints/checkpoint-*.json")
    assert found == tmp_path / "input" / layout / "runs/tiny/checkpoints/checkpoint-4.json"


def test_inputs_are_found_in_order_and_not_below_the_deepest(tmp_path: Path) -> None:
    attach(tmp_path / "input", *KAGGLE_LAYOUTS)
    found = list(platforms.find_inputs(tmp_path / "input", "checkpoint-*.json"))
    assert found == sorted(found) and len(found) == 3
    deep = tmp_path / "deep" / "/".join("abcdefghij")
    deep.mkdir(parents=True)
    (deep / "checkpoint-1.json").write_text("{}")
    assert list(platforms.find_inputs(tmp_path / "deep", "checkpoint-*.json")) == []
    assert list(platforms.find_inputs(None, "*")) == list(platforms.find_inputs(tmp_path / "no", "*")) == []


def test_a_learner_names_an_input_by_the_end_of_its_path(tmp_path: Path) -> None:
    model = tmp_path / "models/qwen-lm/qwen2.5/transformers/0.5b-instruct/1"
    model.mkdir(parents=True)
    attach(tmp_path / "datasets", "ann/some-slug")
    assert platforms.find_input(tmp_path, "qwen2.5/transformers/0.5b-instruct/1") == model
    assert (
        platforms.find_input(tmp_path, "tiny/train.jsonl") == tmp_path / "datasets/ann/some-slug/runs/tiny/train.jsonl"
    )
    for name in ("rain.jsonl", "", ".", "..", str(model), "no/such"):
        assert platforms.find_input(tmp_path, name) is None
    assert platforms.find_input(None, "train.jsonl") is None


def test_an_input_found_twice_is_an_error_that_names_both(tmp_path: Path) -> None:
    attach(tmp_path, "some-slug", "datasets/ann/some-slug")
    with pytest.raises(CourseError, match="found 2 times") as caught:
        platforms.find_input(tmp_path, "train.jsonl")
    assert all(
        str(tmp_path / place) in str(caught.value) for place in ("some-slug/runs", "datasets/ann/some-slug/runs")
    )
    assert platforms.find_input(tmp_path, "ann/some-slug/runs/tiny/train.jsonl") is not None


def test_hours_are_counted_where_somebody_counts_them(tmp_path: Path) -> None:
    hours = {name: platforms.time_limit_hours(named(name)) for name in platforms.NAMES}
    assert {name: value for name, value in hours.items() if value} == {"colab": 12, "kaggle": 12, "paperspace": 6}
    assert platforms.session_seconds(named("kaggle"), tmp_path) == 0
    make(tmp_path, "proc/1")
    began = time.time() - 3 * 3600
    os.utime(tmp_path / "proc/1", (began, began))
    assert platforms.session_seconds(named("kaggle"), tmp_path) == pytest.approx(3 * 3600, abs=60)
    assert platforms.session_seconds(named("autodl"), tmp_path) == 0
    assert 0 < platforms.session_seconds(named("colab"), Path("/")) < 10**9


def limits_of(root: Path, **files: str) -> tuple[platforms.Limit, platforms.Limit]:
    machine = simulate.Machine(root)
    machine.write("proc/meminfo", simulate.MEMINFO.format(kib=512 * 2**20))
    for place, text in files.items():
        machine.write(place, text)
    return platforms.processors(root), platforms.memory_gib(root)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": 12, "memory.current": 11, "memory.stat": "anon 1\ninactive_file {gib}"}, 2.0),
        ({"memory/memory.limit_in_bytes": 12, "memory/memory.usage_in_bytes": 11,
          "memory/memory.stat": "inactive_file 0\ntotal_inactive_file {gib}"}, 2.0),
        ({"memory.max": 12}, 12.0),
        ({"memory.max": 12, "memory.current": 13, "memory.stat": "nonsense"}, 0.0),
    ],
)  # fmt: skip
def test_what_a_container_has_used_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], free: float
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * 2**30, total=512 * 2**30))
    for name, value in files.items():
        text = value.format(gib=2**30) if isinstance(value, str) else str(value * 2**30)
        simulate.Machine(tmp_path).write(f"sys/fs/cgroup/{name}", text)
    assert platforms.free_memory_gib(tmp_path).value == pytest.approx(free, abs=1e-6)


def test_without_a_control_group_the_machines_numbers_hold(tmp_path: Path) -> None:
    cpu, memory = limits_of(tmp_path, **{"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"})
    assert cpu.value == len(os.sched_getaffinity(0))
    assert memory == platforms.Limit(512.0, "the machine's memory")


def test_the_new_layout_of_control_groups(tmp_path: Path) -> None:
    cpu, memory = limits_of(
        tmp_path, **{"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": f"{2 * 2**30}\n"}
    )
    assert cpu == platforms.Limit(0.5, "/sys/fs/cgroup/cpu.max")
    assert memory == platforms.Limit(2.0, "/sys/fs/cgroup/memory.max")


def test_a_limit_above_this_process_in_the_tree_holds_too(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/user.slice"
    cpu, memory = limits_of(tmp_path, **{
        "proc/self/cgroup": "0::/user.slice/job-7\n",
        f"{top}/memory.max": str(3 * 2**30), f"{top}/job-7/memory.max": "max",
        f"{top}/job-7/cpu.max": "25000 100000", f"{top}/cpu.max": "150000 100000",
    })  # fmt: skip
    assert (cpu.value, memory.value) == (0.25, 3.0)
    assert memory.source == "/sys/fs/cgroup/user.slice/memory.max"


def test_the_old_layout_of_control_groups(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    cpu, memory = limits_of(tmp_path, **{
        "proc/self/cgroup": "7:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
        f"{top}/memory/memory.limit_in_bytes": "9223372036854771712",
        f"{top}/memory/docker/abc/memory.limit_in_bytes": str(2**31),
        f"{top}/cpu,cpuacct/cpu.cfs_quota_us": "-1", f"{top}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        f"{top}/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "75000",
        f"{top}/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert (cpu.value, memory.value) == (0.75, 2.0)


def test_limits_nobody_can_read_are_no_limits(tmp_path: Path) -> None:
    cpu, memory = limits_of(tmp_path, **{
        "proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "", "sys/fs/cgroup/memory.max": "much",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100",
    })  # fmt: skip
    assert cpu.value >= 1 and memory.value == 512


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


def test_models_are_downloaded_to_the_large_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def cache(name: str) -> str:
        platform = platforms.Platform(name, "")
        said = platforms.use_model_cache(platform, platforms.folders(platform, {}, tmp_path))
        return said.removeprefix("downloaded models go to ")

    assert cache("local") == cache("colab") == ""
    assert cache("autodl") == os.environ["HF_HUB_CACHE"] == str(tmp_path / "root/autodl-tmp/huggingface")
    assert cache("kaggle") == ""  # set already
    monkeypatch.delenv("HF_HUB_CACHE")
    assert cache("kaggle") == str(tmp_path / "kaggle/temp/huggingface")
    monkeypatch.delenv("HF_HUB_CACHE")
    (tmp_path / ".cache/huggingface/hub/models--Qwen--x").mkdir(parents=True)
    assert cache("autodl") == ""
