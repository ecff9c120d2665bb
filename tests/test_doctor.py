"""doctor: what it says on simulated machines, each with a clean environment, and what to do there."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simulate
from click.testing import CliRunner
from support import python, refused
from wcwidth import wcswidth

from nbutils import doctor, platforms
from nbutils.cli import app

Patch = pytest.MonkeyPatch
Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report(monkeypatch: Patch) -> Report:
    """The doctor's report from a machine, its checks by name; the exit status must fit it."""

    def look(machine: simulate.Machine, torch: str = "torch_cpu") -> dict[str, Any]:
        machine.packages += (torch,)
        machine.enter(monkeypatch)
        ran = CliRunner().invoke(app, ["doctor", "--json"])
        result = json.loads(ran.output)
        result["checks"] = {check["name"]: check for check in result["checks"]}
        assert ran.exit_code == int("FAIL" in [check["status"] for check in result["checks"].values()])
        return result

    return look


def statuses(result: dict[str, Any], *names: str) -> list[str]:
    return [result["checks"][name]["status"] for name in names]


def checks(look: Any, name: str = "local") -> dict[str, doctor.Check]:
    platform = platforms.Platform(name, "test")
    return {check.name: check for check in look(platform, platforms.folders(platform))}


def test_colab_with_a_gpu_and_with_drive(tmp_path: Path, report: Report) -> None:
    machine = simulate.colab(tmp_path)
    result = report(machine, "torch_t4")
    assert result["folders"] == {
        "work": f"{machine.root}/content", "scratch": f"{machine.root}/content/scratch",
        "keep": f"{machine.root}/content/runs", "inputs": None,
    }  # fmt: skip
    assert statuses(result, "keep lasts", "GPU") == ["WARN", "OK"]
    assert result["card"] == {"name": "Tesla T4", "capability": [7, 5], "memory_gib": 15.0, "count": 2}
    assert result["precision"] == "float16", "bfloat16 is only emulated there"
    assert not (machine.root / "content/drive").exists(), "nothing is made below a mount point"
    result = report(simulate.mounted(simulate.colab(tmp_path, gpu=False)))
    assert result["card"] is None and "Change runtime type" in result["checks"]["GPU"]["todo"]
    assert result["folders"]["keep"] == f"{machine.root}/content/drive/MyDrive/finetune-course"
    assert statuses(result, "keep", "keep lasts", "GPU") == ["OK", "OK", "WARN"]


def test_a_batch_run_on_a_p100_fails_with_its_two_cures(tmp_path: Path, report: Report) -> None:
    machine = simulate.kaggle(tmp_path, batch=True)
    machine.make("proc/1")
    began = time.time() - 11.5 * 3600
    os.utime(machine.root / "proc/1", (began, began))
    result = report(machine, "torch_p100")
    assert result["platform"]["batch"] and statuses(result, "GPU", "keep lasts", "time") == ["FAIL", "OK", "WARN"]
    assert "GPU T4 x2" in result["checks"]["GPU"]["todo"] and "cu126" in result["checks"]["GPU"]["todo"]
    assert 0.4 < result["limits"]["hours_left"] < 0.6


def test_autodl_without_a_gpu_knows_its_2_gib(tmp_path: Path, report: Report) -> None:
    result = report(simulate.autodl(tmp_path, gpu=False))
    assert result["platform"]["name"] == "autodl"
    assert (result["limits"]["hours"], result["limits"]["hours_left"]) == (None, None), "no limit is not one of 0 hours"
    assert (result["limits"]["memory_gib"], result["limits"]["processors"]) == (2.0, 0.5)
    assert result["room"]["keep"]["free_gib"] > 0 and "free_inodes" in result["room"]["keep"]
    assert statuses(result, "memory", "GPU", "keep lasts") == ["WARN", "WARN", "OK"]


def test_a_computer_at_home_tells_no_value_of_a_secret(tmp_path: Path, report: Report) -> None:
    secrets = {"KAGGLE_KEY": "kk-5511", "HF_TOKEN": "hf_5533", "WANDB_API_KEY": "wb-5544"}
    result = report(simulate.Machine(tmp_path, {"NBUTILS_HOME": str(tmp_path / "runs"), **secrets}))
    assert result["platform"]["name"] == "local" and result["folders"]["keep"] == str(tmp_path / "runs")
    ran = CliRunner().invoke(app, ["doctor"])
    assert not [value for value in secrets.values() if value in json.dumps(result) + ran.output]
    assert ran.exit_code == 0 and max(map(len, ran.output.splitlines())) <= 120 and "0 FAIL" in ran.output


def test_a_missing_torch_or_a_failing_check_is_a_report_that_stops_the_lesson(
    home: Path, monkeypatch: Patch, capsys: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = doctor.examine()
    result.require()
    assert " OK, " in capsys.readouterr().out and result.facts()["device_works"]
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: 1 / 0)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = doctor.examine()
    by_name = {check.name: check for check in result.checks}
    assert by_name["torch"].status == "FAIL" and "GPU" not in by_name and "1 FAIL" in result.text()
    assert by_name["packages"].status == "WARN" and "ZeroDivisionError" in by_name["packages"].seen, "one gap"
    with refused("machine failed: torch."):
        result.require()
    assert not result.facts()["device_works"] and "torch" in result.facts()["warnings"]


def test_a_gpu_that_only_the_driver_sees_and_packages_that_miss_are_named(
    tmp_path: Path, report: Report, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("nbutils.hardware.ask_driver", lambda *words: "Tesla T4\n")
    monkeypatch.setattr("nbutils.install.requirements", lambda extra: ["click>=1", "no-such-package>=2"])
    result = report(simulate.Machine(tmp_path))
    assert statuses(result, "GPU", "packages") == ["WARN", "WARN"]
    assert "lists Tesla T4, but torch" in result["checks"]["GPU"]["seen"]
    assert result["checks"]["packages"]["seen"] == "missing: no-such-package>=2"


def test_a_silent_hub_is_a_warning_without_a_password(monkeypatch: Patch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "NBUTILS_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nbutils.platforms.network.SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call and never says a word
        monkeypatch.setenv("HF_ENDPOINT", f"http://ann:password@127.0.0.1:{silent.getsockname()[1]}")
        result = checks(doctor.check_hub, "kaggle")["model hub"]
    assert result.status == "WARN" and result.seen == "HF_ENDPOINT does not answer" and "Internet" in result.todo
    assert "password" not in str(result)


def test_a_folder_that_is_nearly_full_or_cannot_be_written(monkeypatch: Patch) -> None:
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 0.4)
    assert checks(doctor.check_folders)["scratch"].status == "WARN"
    monkeypatch.setattr("nbutils.disk.free_gib", lambda folder: 99.0)
    monkeypatch.setattr("nbutils.disk.free_inodes", lambda folder: 7)
    assert "300 files" in checks(doctor.check_folders)["keep"].todo
    monkeypatch.setattr("nbutils.platforms.cannot_write", lambda folder: "Read-only file system")
    result = checks(doctor.check_folders)
    assert [result[name].status for name in ("work", "scratch", "keep")] == ["WARN", "FAIL", "FAIL"]


@pytest.mark.parametrize(("platform", "mend"), [("autodl", "更换镜像"), ("local", "make course")])
def test_a_torch_that_is_too_old_fails_unimported_and_says_what_mends_it(
    platform: str, mend: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("nbutils.install.old_torch", lambda: "2.0.0+cu118")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("NBUTILS_PLATFORM", platform)
    [result] = checks(doctor.check_torch, platform).values()
    assert result.status == "FAIL" and mend in result.todo and "2.8" in result.todo + result.seen


def test_chinese_columns_are_aligned_and_lines_are_not_too_long(monkeypatch: Patch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    seen = "课程需要的包" * 20
    text = str(doctor.Check("packages", seen, "运行 `python -m nbutils install`"))
    first, *others = text.splitlines()
    assert wcswidth(first.partition("课程")[0]) == 19 and first.startswith("[WARN] Python 包")
    assert all(line.startswith(" " * 19) for line in others) and max(map(wcswidth, text.splitlines())) <= 110
    assert "".join(text.split()).endswith("怎么办：运行`python-mnbutilsinstall`") and len(others) >= 2


ELSEWHERE = """
import os, shutil, signal, sys, urllib.request  # libraries first: theirs are not those of the other system
import click, datasets, filelock, psutil, pydantic.main, torch
kind, out = sys.argv[1:]
usage = shutil.disk_usage("/")
shutil.disk_usage = lambda path: usage
gone = ["sched_getaffinity"]
if kind == "win32":
    gone += ["statvfs", "getuid", "geteuid", "getpgid", "getpgrp", "killpg", "fork", "O_NOFOLLOW", "pread", "uname"]
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    for name in ("SIGKILL", "SIGHUP", "SIGUSR1"):
        delattr(signal, name)
for name in gone:
    delattr(os, name)
sys.platform = kind
from nbutils.cli import app
plan = "plan --model Qwen2.5-7B --gpu 4090 --rows 100 --mean-length 300"
for words in ("doctor", plan, f"data check assistant_en --out {out}"):
    try:
        app(words.split())
    except SystemExit as ended:
        assert not ended.code, words
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "told"), [("darwin", "on the CPU"), ("win32", "wsl --install")])
@pytest.mark.long
def test_a_mac_and_windows_have_what_they_need_for_doctor_plan_and_data_check(
    kind: str, told: str, tmp_path: Path
) -> None:
    ran = python("-c", ELSEWHERE, kind, tmp_path / "out", home=tmp_path)
    said = " ".join(ran.stdout.split())
    assert all(text in said for text in (told, "serving", "128 accepted", "data_card.json")), said
