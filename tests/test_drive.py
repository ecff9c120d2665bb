"""Drive on an imitated Colab (S1, S3-S7, S9, K1): every failure is a sentence, the wait is bounded, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import simulate

from nbutils.platforms import Platform, drive, waiting

COLAB = Platform("colab", "a test says so")
MOUNT = "platforms.mount_drive(platforms.detect())"
STATE = f"[{MOUNT}, platforms.folders(platforms.detect()).keep]"


def calls(machine: simulate.Machine) -> list[str]:
    """What was asked of the fake packages."""
    file = machine.root / "fake_calls.txt"
    return file.read_text().splitlines() if file.exists() else []


def colab(tmp_path: Path, **env: str) -> simulate.Machine:
    """Colab with a kernel, on which Drive is not mounted yet."""
    machine = simulate.colab(tmp_path)
    machine.env |= {"FAKE_KERNEL": "1", "FAKE_DELAY": "0.1"} | env
    return machine


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drive.MEMORY, "")


def test_s1_drive_is_mounted_and_runs_are_kept_there(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="ok")
    said, keep = machine.ask(STATE)
    assert said.startswith("Drive is mounted: runs outlive this machine")
    assert keep == str(machine.root / "content/drive/MyDrive/finetune-course") and keep in said
    assert calls(machine) == ["mount 110000"], "upstream gets less time than we allow in all"


@pytest.mark.parametrize(
    ("env", "meaning", "todo"),
    [
        ({"FAKE_DRIVE": "headless"}, "no Colab page is attached", "open this notebook in a Colab page"),  # S3
        ({"FAKE_DRIVE": "pexpect"}, "no Colab page is attached", "open this notebook in a Colab page"),
        ({"FAKE_DRIVE": "denied"}, "access was refused", "del os.environ['NBUTILS_DRIVE']"),  # S4
        ({"FAKE_KERNEL": ""}, "outside the notebook's kernel", "run this in a notebook cell"),  # S5
        ({"FAKE_DRIVE": "policy"}, "your organisation does not allow", "personal Google account"),
        ({"FAKE_DRIVE": "too_big"}, "too many files", "into folders"),
        ({"FAKE_DRIVE": "liar"}, "nothing is mounted at /content/drive", "mount it yourself"),
        ({"FAKE_DRIVE": "odd"}, "OSError: [Errno 28] no room for [masked]", "mount it yourself"),
    ],
)
def test_every_failure_is_a_sentence_and_runs_stay_here(
    tmp_path: Path, env: dict[str, str], meaning: str, todo: str
) -> None:
    machine = colab(tmp_path, **env)
    began = time.monotonic()
    said, keep, again = machine.ask(f"[*{STATE}, {MOUNT}]")
    assert time.monotonic() - began < 5
    assert said.startswith("Drive could not be mounted: ") and meaning in said
    assert "To do: " in said and todo in said and drive.FALLBACK in said
    assert keep == str(machine.root / "content/runs")
    assert "not asked for a second time" in again and meaning in again and "To try again" in again
    assert len(calls(machine)) == 1
    assert not (machine.root / "content/drive/MyDrive").exists()


def test_a_shell_without_the_notebooks_variables_is_told_so(tmp_path: Path) -> None:
    machine = colab(tmp_path)
    del machine.env["TBE_EPHEM_CREDS_ADDR"]
    assert "SSH shell" in machine.ask(MOUNT) and calls(machine) == ["mount 110000"]


def test_colabs_image_without_colabs_service_is_told_so(tmp_path: Path) -> None:
    machine = colab(tmp_path)
    (machine.root / "var/colab/hostname").unlink()
    assert "has no Drive" in machine.ask(MOUNT)


def test_s7_enterprise_is_never_asked(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path, enterprise=True)
    said, keep = machine.ask(STATE)
    assert said.startswith("No Drive on Colab Enterprise") and "NBUTILS_HOME" in said and calls(machine) == []
    assert keep == str(machine.root / "content/runs")


def test_k1_kaggle_is_never_asked_although_it_has_colabs_package(tmp_path: Path) -> None:
    machine = simulate.kaggle(tmp_path)
    probe = "from google.colab import drive\nfrom nbutils import platforms"
    assert "No Drive on kaggle" in machine.ask(MOUNT, probe) and calls(machine) == []


@pytest.mark.parametrize("kernel", ["1", ""])
def test_s5_a_drive_that_is_mounted_is_used_and_not_asked_for(tmp_path: Path, kernel: str) -> None:
    machine = simulate.mounted(colab(tmp_path, FAKE_KERNEL=kernel, NBUTILS_DRIVE="failed: once before"))
    said, keep = machine.ask(STATE)
    assert said.startswith("Drive is mounted already") and calls(machine) == []
    assert keep == str(machine.root / "content/drive/MyDrive/finetune-course")


def test_a_child_process_does_not_wait_again(tmp_path: Path) -> None:
    machine = colab(tmp_path)
    child = f"from nbutils import platforms; print({MOUNT})"
    imports = "import subprocess, sys\nfrom nbutils import platforms"
    first, second = machine.ask(f"[{MOUNT}, subprocess.check_output([sys.executable, '-c', {child!r}])]", imports)
    assert "could not be mounted" in first and "not asked for a second time" in second
    assert len(calls(machine)) == 1


def test_a_learner_may_do_without_drive(tmp_path: Path) -> None:
    machine = colab(tmp_path, NBUTILS_DRIVE="off")
    assert "not used (NBUTILS_DRIVE=off)" in machine.ask(MOUNT) and calls(machine) == []


def test_s9_files_in_the_mount_point_are_named_and_left_alone(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="ok")
    lost = machine.write("content/drive/MyDrive/x/adapter.bin", "made before Drive was mounted")
    said, keep = machine.ask(STATE)
    assert f"holds files of this machine already ({machine.root}/content/drive/MyDrive)" in said
    assert "which are not on Drive" in said and f"mv {machine.root}/content/drive " in said
    assert lost.read_text() == "made before Drive was mounted" and calls(machine) == []
    assert keep == str(machine.root / "content/runs")
    (machine.root / "content/drive").rename(machine.root / "content/drive-before")
    assert machine.ask(MOUNT).startswith("Drive is mounted:"), "mended as told, it works"


def test_a_symbolic_link_as_mount_point_is_named(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="ok")
    (machine.root / "content/drive").symlink_to(machine.root / "content/sample_data")
    assert "is a symbolic link" in machine.ask(MOUNT) and calls(machine) == []


def test_what_upstream_says_about_its_mount_point_is_told_as_well(tmp_path: Path) -> None:
    for words, meaning in (
        ("Mountpoint must not already contain files", "holds files already"),
        ("Mountpoint must not be a symlink", "is a symbolic link"),
        ("Mountpoint must not contain a space.", "has a space in its name"),
    ):
        assert meaning in drive._explained(ValueError(words))[0]


HANGS = """
import json, sys, threading, time
from nbutils import platforms
said, began = [], time.monotonic()
def ask(): said.append(platforms.drive.mount_drive(platforms.detect(), seconds=0.5))
if sys.argv[1] == "main":
    ask()
else:
    thread = threading.Thread(target=ask); thread.start(); thread.join()
print(json.dumps([said[0], time.monotonic() - began]))
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_mount_that_never_comes_back_is_left_after_the_time_allowed(tmp_path: Path, where: str) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="hang")
    ran = machine.python("-c", HANGS, where, timeout=20)
    said, seconds = json.loads(ran.stdout.splitlines()[-1])
    assert 0.4 < seconds < 3 and "nobody allowed it in time" in said, ran.stderr
    assert calls(machine) == ["mount 400"]


def test_s3_a_real_kernel_without_a_page_is_left_after_the_time_allowed(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="hang", FAKE_KERNEL="")
    cell = "from nbutils import platforms; print(platforms.drive.mount_drive(platforms.detect(), seconds=1))"
    code = (
        "import nbformat, nbclient\n"
        f"book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({cell!r})])\n"
        "nbclient.NotebookClient(book, kernel_name='python3').execute()\n"
        "print(book.cells[0].outputs[0].text)"
    )
    ran = machine.python("-c", code, timeout=60)
    assert "nobody allowed it in time" in ran.stdout and calls(machine) == ["mount 800"], ran.stderr


def test_a_learner_who_interrupts_is_obeyed(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="hang")
    code = (
        "import os, signal, threading\nfrom nbutils import platforms\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts without it
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"try:\n    {MOUNT}\nexcept KeyboardInterrupt:\n    print('stopped')"
    )
    assert machine.python("-c", code, timeout=20).stdout.endswith("stopped\n")


# --- what is mounted -------------------------------------------------------------------------------------------------


def test_only_drives_own_line_or_a_real_mount_is_drive(tmp_path: Path) -> None:
    place = tmp_path / drive.MOUNT_POINT
    (place / "MyDrive").mkdir(parents=True)
    assert not drive.is_mounted(tmp_path), "a folder of that name is not Drive"
    mounts = tmp_path / "proc/mounts"
    mounts.parent.mkdir()
    for line, expected in (
        ("overlay / overlay rw 0 0", False),
        ("drive /content/drive2 fuse.drive rw 0 0", False),
        ("tmp /content/drive tmpfs rw 0 0", False),
        ("garbage", False),
        ("overlay / overlay rw 0 0\ndrive /content/drive fuse.drive rw 0 0", True),
    ):
        mounts.write_text(f"{line}\n")
        assert drive.is_mounted(tmp_path) is expected, line


def test_a_mount_whose_connection_died_is_not_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path))
    place, stat = machine.root / drive.MOUNT_POINT, os.stat
    assert drive.is_mounted(machine.root)

    def dead(path: object, *words: object, **options: object) -> os.stat_result:
        if Path(str(path)).is_relative_to(place):
            raise OSError(107, "Transport endpoint is not connected")
        return stat(path, *words, **options)

    monkeypatch.setattr(os, "stat", dead)
    monkeypatch.setattr(os, "lstat", dead)
    mounted, said = drive.is_mounted(machine.root), drive.mount_drive(COLAB, root=machine.root)
    monkeypatch.undo()
    assert not mounted and "lost its connection (Errno 107, Transport endpoint is not connected)" in said
    assert "force_remount=True" in said and calls(machine) == []


def test_a_mount_that_vanishes_is_noticed(tmp_path: Path) -> None:
    machine = simulate.mounted(simulate.colab(tmp_path))
    keep = drive.runs_folder(machine.root) / "demo/checkpoints"
    place = drive.mount_point_of(keep, machine.root)
    assert place == machine.root / "content/drive" and drive.is_mount(place, machine.root)
    machine.write("proc/mounts", "")
    assert not drive.is_mount(place, machine.root) and drive.mount_point_of(keep, machine.root) is None


def test_the_nearest_mount_is_found_and_the_root_disk_is_none(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    data, shared = "root/autodl-tmp", "root/autodl fs"
    machine.write(
        "proc/mounts", f"overlay / overlay rw 0 0\n/dev/sdb /{data} xfs rw 0 0\nnas /root/autodl\\040fs nfs rw\n"
    )
    for path, expected in ((data, data), (f"{data}/a/b", data), (f"{shared}/runs", shared)):
        assert drive.mount_point_of(machine.root / path, machine.root) == machine.root / expected
    assert drive.mount_point_of(machine.root / "root/else", machine.root) is None
    assert drive.mount_point_of(machine.root, machine.root) is None
    assert drive.mount_point_of(Path("/proc/self"), machine.root) == Path("/proc"), "outside the imitated root"


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_an_alarm_set_by_others_is_given_back() -> None:
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 30, 0)
    try:
        with pytest.raises(waiting.TookTooLong):
            waiting.within(0.1, lambda: time.sleep(5))
        assert waiting.within(5, lambda: "value") == "value"
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 28 < left < 29.95
        os.kill(os.getpid(), signal.SIGALRM)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def test_results_and_errors_come_back_from_a_thread_too() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        seen.append(waiting.within(5, lambda: 7))
        for call in (lambda: {}["missing"], lambda: time.sleep(5)):
            try:
                waiting.within(0.1, call)
            except Exception as problem:
                seen.append(type(problem))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [7, KeyError, waiting.TookTooLong]
