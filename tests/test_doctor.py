"""doctor: simulated machines in subprocesses with clean environments; one look tells what is what and what to do."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simulate

from nbutils import doctor, platforms

LOCAL = platforms.Platform("local", "test")


def report(machine: simulate.Machine, torch: str = "torch_cpu") -> dict[str, Any]:
    """The doctor's report from that machine, its checks by name; the exit status must fit it."""
    machine.packages += (torch,)
    ran = machine.python("-m", "nbutils", "doctor", "--json")
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)
    found["checks"] = {check["name"]: check for check in found["checks"]}
    assert ran.returncode == int("FAIL" in [check["status"] for check in found["checks"].values()])
    return found


def statuses(found: dict[str, Any], *names: str) -> list[str]:
    return [found["checks"][name]["status"] for name in names]


def test_colab_with_a_gpu_and_without_drive(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    found = report(machine, "torch_t4")
    assert found["folders"] == {
        "work": f"{machine.root}/content", "scratch": f"{machine.root}/content/scratch",
        "keep": f"{machine.root}/content/runs", "inputs": None,
    }  # fmt: skip
    assert statuses(found, "keep lasts", "drive", "card") == ["WARN", "WARN", "OK"]
    assert found["limits"]["hours"] == found["limits"]["hours_left"] == 12
    assert not (machine.root / "content/drive").exists(), "nothing is made below a mount point"


def test_colab_without_a_gpu_and_with_drive(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path, gpu=False))
    found = report(machine)
    assert found["card"] is None and "Change runtime type" in found["checks"]["card"]["todo"]
    assert found["folders"]["keep"] == f"{machine.root}/content/drive/MyDrive/finetune-course"
    assert statuses(found, "drive", "keep", "keep lasts", "card") == ["OK", "OK", "OK", "WARN"]


def test_kaggle_with_two_t4(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    machine.make("kaggle/input/datasets/ann/some-slug")
    found = report(machine, "torch_t4")
    assert found["card"] == {"name": "Tesla T4", "capability": [7, 5], "memory_gib": 15.0, "count": 2}
    assert found["checks"]["precision"]["seen"].startswith("fp16"), "bfloat16 is only emulated there"
    assert "Save Version" in found["checks"]["keep lasts"]["todo"] and "datasets" in found["checks"]["inputs"]["seen"]


def test_a_batch_run_on_a_p100_fails_with_its_two_cures(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path, batch=True)
    machine.make("proc/1")
    began = time.time() - 11.5 * 3600
    os.utime(machine.root / "proc/1", (began, began))
    found = report(machine, "torch_p100")
    assert found["platform"]["batch"] and statuses(found, "card", "keep lasts", "time") == ["FAIL", "OK", "WARN"]
    assert "sm_60" in found["checks"]["card"]["seen"]
    assert "GPU T4 x2" in found["checks"]["card"]["todo"] and "cu126" in found["checks"]["card"]["todo"]
    assert 0.4 < found["limits"]["hours_left"] < 0.6


def test_autodl_without_a_gpu_knows_its_2_gib(tmp_path: Path) -> None:
    found = report(simulate.autodl(tmp_path, login=False, file_storage=False, card=False))
    assert found["platform"]["name"] == "autodl" and found["limits"]["hours_left"] is None
    assert (found["limits"]["memory_gib"], found["limits"]["processors"]) == (2.0, 0.5)
    assert found["room"]["keep"]["free_gib"] > 0 and "free_inodes" in found["room"]["keep"]
    assert statuses(found, "memory", "card", "keep lasts") == ["WARN", "WARN", "OK"]
    assert "无卡模式" in found["checks"]["memory"]["seen"] and "15 days" in found["checks"]["keep lasts"]["seen"]


def test_a_computer_at_home_tells_no_value_of_a_secret(tmp_path: Path) -> None:
    secrets = {"KAGGLE_KEY": "kk-5511", "HF_TOKEN": "hf_5533", "WANDB_API_KEY": "wb-5544"}
    machine = simulate.local(tmp_path, NBUTILS_HOME=str(tmp_path / "runs"), **secrets)
    found = report(machine)
    assert found["platform"]["name"] == "local" and found["folders"]["keep"] == str(tmp_path / "runs")
    assert found["checks"]["secrets"]["seen"].endswith("HF_TOKEN is set, WANDB_API_KEY is set")
    assert not [value for value in secrets.values() if value in json.dumps(found)]
    ran = machine.python("-m", "nbutils", "doctor")
    lines = ran.stdout.splitlines()
    assert all(line.startswith(("[ OK ] ", "[WARN] ", " " * 19)) for line in lines[:-2])
    assert ran.returncode == 0 and max(map(len, lines)) <= 120 and "0 FAIL" in lines[-1]


def test_a_wrong_override_ends_with_the_right_names(tmp_path: Path) -> None:
    ran = simulate.local(tmp_path, NBUTILS_PLATFORM="kagle").python("-m", "nbutils", "doctor")
    assert ran.returncode == 1 and "runpod, local" in ran.stderr and "Traceback" not in ran.stderr


# ---- single checks


def machine(platform: str = "local", trouble: str = "", torch: str = "OK") -> doctor.Machine:
    here = platforms.Platform(platform, "test")
    return doctor.Machine(here, platforms.folders(LOCAL), doctor.Check("torch", torch, "2.0"), None, trouble)


def test_a_missing_or_broken_torch_is_a_report_and_not_a_crash(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: 1 / 0)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        found = doctor.examine()
    checks = {check.name: check for check in found.checks}
    assert found.failed and checks["torch"].status == "FAIL" and "card" not in checks
    assert len(found.rows()) == len(found.checks) and "1 FAIL" in found.text()
    assert checks["packages"].status == "WARN" and "ZeroDivisionError" in checks["packages"].seen, "one gap"
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.check_torch().status == "FAIL" and "libcudart" in doctor.check_torch().seen


def test_a_gpu_that_only_the_driver_sees_or_nobody_can_ask_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "Tesla T4",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    _, check, _ = doctor.check_gpu(machine())
    assert check.status == "WARN" and "lists Tesla T4, but torch 2.0" in check.seen
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [check.status for check in doctor.check_gpu(machine())] == ["OK", "OK", "OK"]
    _, check, _ = doctor.check_gpu(machine(trouble="RuntimeError: CUDA driver error"))
    assert check.status == "FAIL" and "driver error" in check.seen


def test_missing_and_blocking_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: ["click>=1", "no-such-package>=2"])
    monkeypatch.setattr("nbutils.install.BLOCKERS", {"click": ">=1", "torchao-not-here": "<1"})
    [check] = doctor.check_packages(machine())
    assert check.status == "WARN" and check.seen == "missing: no-such-package>=2; in the way: click>=1"


def test_a_silent_hub_is_a_warning_without_a_password_and_in_china_a_mirror_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "NBUTILS_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call and never says a word
        monkeypatch.setenv("HF_ENDPOINT", f"http://ann:password@127.0.0.1:{silent.getsockname()[1]}")
        [check] = doctor.check_hub(machine("kaggle"))
    assert check.status == "WARN" and "127.0.0.1 is silent" in check.seen and "Internet" in check.todo
    assert "password" not in check.seen + check.todo
    monkeypatch.delenv("HF_ENDPOINT")
    measured = lambda urls, seconds: {"hf-mirror.com": 0.2} if len(urls) > 1 else {}  # noqa: E731
    monkeypatch.setattr("nbutils.platforms.network.measure", measured)
    assert [check.status for check in doctor.check_hub(machine("autodl"))] == ["OK"]
    assert [check.status for check in doctor.check_hub(machine())] == ["WARN"]
    monkeypatch.setenv("NBUTILS_MIRROR", "hfmirror")
    assert [check.status for check in doctor.check_hub(machine())] == ["FAIL"]


def test_a_folder_that_is_nearly_full_or_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str) -> doctor.Check:
        return next(iter(doctor.check_folder(name, machine())))

    assert check("keep").status == "OK"
    monkeypatch.setattr("nbutils.disk.free_inodes", lambda folder: 7)
    assert check("keep").status == "WARN" and "room for 7 files" in check("keep").seen
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.4)
    assert "0.4 GiB free" in check("scratch").seen
    monkeypatch.setattr("nbutils.platforms.cannot_write", lambda folder: "Read-only file system")
    assert [check(name).status for name in ("work", "scratch", "keep")] == ["WARN", "FAIL", "FAIL"]
