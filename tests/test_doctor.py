"""doctor: imitated machines in subprocesses with clean environments; one look tells what is what and what to do.

S1, S2, S5, S7, K1, K2, K7, A1-A5 and L1 of the platforms' recipes; O1 is in test_platforms.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import simulate

from nbutils import doctor, platforms
from nbutils.doctor import computing, surroundings

DOCTOR = ("-m", "nbutils", "doctor", "--json")


def report(machine: simulate.Machine, torch: str = "torch_cpu") -> dict[str, Any]:
    """The doctor's report from that machine, its checks by name; the exit status must fit it."""
    machine.packages += (torch,)
    ran = machine.python(*DOCTOR)
    assert ran.returncode in (0, 1), ran.stderr
    return told(ran)


def told(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found = json.loads(ran.stdout)
    found["checks"] = {check["name"]: check for check in found["checks"]}
    assert ran.returncode == int("FAIL" in [check["status"] for check in found["checks"].values()])
    return found


def statuses(found: dict[str, Any], *names: str) -> list[str]:
    return [found["checks"][name]["status"] for name in names]


def test_s1_colab_with_a_card_and_nobody_who_mounted_drive(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    found = report(machine, "torch_t4")
    assert found["platform"]["name"] == "colab" and "/var/colab/hostname" in found["platform"]["evidence"]
    assert found["folders"] == {
        "work": f"{machine.root}/content", "scratch": f"{machine.root}/content/scratch",
        "keep": f"{machine.root}/content/runs", "inputs": None,
    }  # fmt: skip
    assert statuses(found, "keep lasts", "drive", "card") == ["WARN", "WARN", "OK"]
    assert "vanishes with this machine" in found["checks"]["keep lasts"]["seen"]
    assert "allow access" in found["checks"]["drive"]["todo"]
    assert found["limits"]["hours"] == 12 and found["limits"]["hours_left"] == 12
    assert not (machine.root / "content/drive").exists(), "nothing is made below a mount point"


def test_s2_colab_without_a_card(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path, gpu=False)
    machine.env["PATH"] = str(Path(sys.executable).parent)  # and no driver, also where the tests run beside a card
    found = report(machine)
    assert found["platform"]["name"] == "colab" and found["card"] is None
    assert statuses(found, "card") == ["WARN"] and "Change runtime type" in found["checks"]["card"]["todo"]


def test_s5_a_program_started_from_colab_uses_the_drive_that_is_mounted(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path))
    found = report(machine, "torch_t4")
    assert found["platform"]["name"] == "colab"
    assert found["folders"]["keep"] == f"{machine.root}/content/drive/MyDrive/finetune-course"
    assert statuses(found, "drive", "keep", "keep lasts") == ["OK", "OK", "OK"]


def test_s7_colab_enterprise_has_no_drive(tmp_path: Path) -> None:
    found = report(simulate.colab(tmp_path, enterprise=True))
    assert found["platform"]["name"] == "colab_enterprise" and "drive" not in found["checks"]
    assert "bucket" in found["checks"]["keep lasts"]["todo"]


def test_k1_and_k7_kaggle_with_two_t4(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    machine.make("kaggle/input/datasets/ann/some-slug")
    found = report(machine, "torch_t4")
    assert (found["platform"]["name"], found["platform"]["batch"]) == ("kaggle", False)
    assert found["card"] == {"name": "Tesla T4", "capability": [7, 5], "memory_gib": 15.0, "count": 2}
    assert found["checks"]["card"]["seen"].endswith("is right")
    assert found["checks"]["precision"]["seen"].startswith("fp16"), "bfloat16 is only emulated there"
    assert found["checks"]["keep lasts"]["status"] == "WARN" and "Save Version" in found["checks"]["keep lasts"]["todo"]
    assert (
        found["folders"]["inputs"] == f"{machine.root}/kaggle/input" and "datasets" in found["checks"]["inputs"]["seen"]
    )


def test_k2_and_k7_a_batch_run_on_a_p100_fails_with_its_two_cures(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path, batch=True)
    machine.make("proc/1")
    began = time.time() - 11.5 * 3600
    os.utime(machine.root / "proc/1", (began, began))
    found = report(machine, "torch_p100")
    assert (found["platform"]["name"], found["platform"]["batch"]) == ("kaggle", True)
    assert statuses(found, "card", "keep lasts", "time") == ["FAIL", "OK", "WARN"]
    assert "sm_60" in found["checks"]["card"]["seen"]
    assert "GPU T4 x2" in found["checks"]["card"]["todo"] and "cu126" in found["checks"]["card"]["todo"]
    assert 0.4 < found["limits"]["hours_left"] < 0.6


def test_a1_autodl_keeps_runs_in_its_file_storage(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    found = report(machine, "torch_t4")
    assert found["platform"]["name"] == "autodl" and "AutoDLContainerUUID" in found["platform"]["evidence"]
    assert found["folders"]["work"] == f"{machine.root}/root/autodl-tmp"
    assert found["folders"]["keep"] == f"{machine.root}/root/autodl-fs/runs"
    assert statuses(found, "keep lasts", "time") == ["OK", "OK"] and found["limits"]["hours_left"] is None


def test_a2_and_a3_autodl_in_a_plain_shell_and_without_file_storage(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path, login=False, file_storage=False)
    found = report(machine, "torch_t4")
    assert found["platform"]["name"] == "autodl" and found["platform"]["evidence"] == "/root/autodl-tmp"
    assert found["folders"]["keep"] == f"{machine.root}/root/autodl-tmp/runs"
    assert "15 days" in found["checks"]["keep lasts"]["seen"]


def test_a3_a_file_storage_that_takes_no_more_files_is_passed_over(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    machine.packages = ("torch_t4",)
    storage = machine.root / "root/autodl-fs"
    mount = f"mount -t tmpfs -o nr_inodes=1 tmpfs {storage}"
    if os.getuid() or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and a mount namespace")
    words = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, *DOCTOR]
    found = told(
        subprocess.run(words, env=machine.environment(), cwd=machine.root, capture_output=True, text=True, timeout=60)
    )
    assert found["folders"]["keep"] == f"{machine.root}/root/autodl-tmp/runs"
    assert f"{storage} takes no files: No space left on device" in found["checks"]["keep lasts"]["seen"]


def test_a4_autodl_without_a_card_knows_its_2_gib(tmp_path: Path) -> None:
    found = report(simulate.autodl(tmp_path, card=False))
    assert (found["limits"]["memory_gib"], found["limits"]["processors"]) == (2.0, 0.5)
    assert set(found["room"]) == {"work", "scratch", "keep"} and found["room"]["keep"]["free_gib"] > 0
    assert "free_inodes" in found["room"]["keep"]
    assert statuses(found, "memory", "card") == ["WARN", "WARN"]
    assert "mode without a card" in found["checks"]["memory"]["seen"]
    assert "No devices were found" in found["checks"]["card"]["seen"]
    assert "start it normally" in found["checks"]["card"]["todo"]


def test_a5_a_proxy_script_alone_is_not_autodl(tmp_path: Path) -> None:
    assert report(simulate.lanyun(tmp_path))["platform"]["name"] == "local"


def test_l1_a_computer_at_home_with_keys_of_a_kaggle_account_tells_no_value(tmp_path: Path) -> None:
    secrets = {
        "KAGGLE_KEY": "kk-5511",
        "KAGGLE_API_TOKEN": "kt-5522",
        "HF_TOKEN": "hf_5533",
        "WANDB_API_KEY": "wb-5544",
    }
    machine = simulate.local(tmp_path, KAGGLE_USERNAME="ann", NBUTILS_HOME=str(tmp_path / "runs"), **secrets)
    found = report(machine)
    assert found["platform"]["name"] == "local" and found["limits"]["hours"] == 0
    assert found["folders"]["keep"] == str(tmp_path / "runs")
    assert found["checks"]["secrets"]["seen"].endswith("HF_TOKEN is set, WANDB_API_KEY is set")
    assert not [value for value in secrets.values() if value in json.dumps(found)]
    assert set(found) == {"platform", "folders", "room", "limits", "card", "checks", "versions"}
    assert set(found["checks"]["python"]) == {"name", "status", "seen", "todo"} and found["versions"]["python"]


def test_a_machine_with_nothing_set_is_local_and_the_report_is_for_people(tmp_path: Path) -> None:
    machine = simulate.local(tmp_path)
    machine.packages = ("torch_cpu",)
    ran = machine.python("-m", "nbutils", "doctor")
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert lines[0] == "[ OK ] platform    local (no platform left a mark)"
    assert all(line.startswith(("[ OK ] ", "[WARN] ", " " * 19)) for line in lines[:-2])
    assert max(map(len, lines)) <= 120 and lines[-1].endswith("0 FAIL. This machine can be used.")


def test_a_wrong_override_ends_with_the_right_names(tmp_path: Path) -> None:
    ran = simulate.local(tmp_path, NBUTILS_PLATFORM="kagle").python(*DOCTOR)
    assert ran.returncode == 1 and "runpod, local" in ran.stderr and "Traceback" not in ran.stderr


LOCAL = platforms.Platform("local", "test")


def machine(
    torch: doctor.Check | None = None, trouble: str = "", platform: platforms.Platform = LOCAL
) -> doctor.Machine:
    return doctor.Machine(
        platform, platforms.folders(LOCAL), torch or doctor.Check("torch", "OK", "2.0"), None, trouble
    )


def test_a_python_without_torch_is_a_report_and_not_a_crash(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = doctor.examine()
    checks = {check.name: check for check in found.checks}
    assert found.failed and checks["torch"].seen == "torch is not installed" and "card" not in checks
    assert "[FAIL] torch       torch is not installed\n" in found.text()
    assert "Mend what says FAIL" in found.text()
    assert len(found.rows()) == len(found.checks)


def test_a_broken_torch_and_a_broken_driver_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = computing.check_torch()
    assert broken.status == "FAIL" and "libcudart" in broken.seen
    assert computing.check_card(machine(broken)) is None
    asked = computing.check_card(machine(trouble="RuntimeError: CUDA driver error"))
    assert asked is not None and asked.status == "FAIL" and "driver error" in asked.seen


def test_a_check_that_fails_itself_is_one_gap_in_the_report(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: 1 / 0)
    found = {check.name: check for check in doctor.examine().checks}
    assert found["packages"].status == "WARN" and "ZeroDivisionError" in found["packages"].seen
    assert found["secrets"].status == "OK"


def test_a_card_that_only_the_driver_sees_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = simulate.Machine(tmp_path).write("nvidia-smi", "#!/bin/sh\necho 'GPU 0: Tesla T4 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = computing.check_card(machine())
    assert check is not None and check.status == "WARN" and "lists GPU 0: Tesla T4, but torch 2.0" in check.seen
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    check = computing.check_card(machine())
    assert check is not None and check.status == "OK"


def test_missing_and_blocking_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: ["click>=1", "no-such-package>=2"])
    monkeypatch.setattr("nbutils.install.BLOCKERS", {"click": ">=1", "torchao-not-here": "<1"})
    check = computing.check_packages(machine())
    assert check.status == "WARN" and check.seen == "missing: no-such-package>=2; in the way: click>=1"


def test_a_hub_that_does_not_answer_is_a_warning_and_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call and never says a word
        monkeypatch.setenv("HF_ENDPOINT", f"http://ann:password@127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(surroundings, "HUB_SECONDS", 0.3)
        began = time.monotonic()
        check = surroundings.check_hub(machine(platform=platforms.Platform("kaggle", "")))
    assert time.monotonic() - began < 5
    assert check.status == "WARN" and "127.0.0.1 is silent" in check.seen and "Internet" in check.todo
    assert "password" not in check.seen + check.todo


def test_in_china_a_mirror_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "nbutils.platforms.network.measure", lambda urls, seconds: {"hf-mirror.com": 0.2} if len(urls) > 1 else {}
    )
    check = surroundings.check_hub(machine(platform=platforms.Platform("autodl", "")))
    assert (check.status, check.seen) == (
        "OK",
        "huggingface.co is silent, hf-mirror.com answers in 0.2 s, www.modelscope.cn is silent",
    )
    assert surroundings.check_hub(machine()).status == "WARN"


def test_a_folder_that_cannot_be_written_or_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    assert surroundings.check_folder("keep", here).status == "OK"
    monkeypatch.setattr("nbutils.disk.free_inodes", lambda folder: 7)
    check = surroundings.check_folder("keep", here)
    assert check.status == "WARN" and "room for 7 files" in check.seen and "small files" in check.todo
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.4)
    assert "0.4 GiB free" in surroundings.check_folder("scratch", here).seen
    monkeypatch.setattr("nbutils.platforms.cannot_write", lambda folder: "Read-only file system")
    assert [surroundings.check_folder(name, here).status for name in ("work", "scratch", "keep")] == [
        "WARN",
        "FAIL",
        "FAIL",
    ]
    assert "NBUTILS_HOME" in surroundings.check_folder("keep", here).todo
