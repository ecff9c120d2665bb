"""notices: what is told of an end and to whom, when a machine is switched off; with processes that fail and die."""

import importlib
import json
import logging
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
import simulate
from click.testing import CliRunner, Result
from support import refused, wait_for
from test_platforms import Site

from nbutils import checkpoints, cli, display, masking, notices, platforms, tracking
from nbutils.errors import CourseError, StoppedByHand, Unfinished
from nbutils.record import RunFolder

Patch = pytest.MonkeyPatch
KEY = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"  # in the address of a robot


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Iterator[simulate.Machine]:
    """An AutoDL machine that this process is on, where nothing waits."""
    secrets = set(masking._found)
    for name, value in {"GRACE": 0.0, "PAUSE": 0.0, "SECONDS": 3.0}.items():
        monkeypatch.setattr(notices, name, value)
    monkeypatch.setattr("apprise.NotifyBase.request_rate_per_sec", 0.0)
    yield simulate.autodl(tmp_path).enter(monkeypatch)
    masking._found.clear()
    masking._found.update(secrets)


@pytest.fixture
def run(machine: simulate.Machine) -> RunFolder:
    """A run folder there, with the checkpoint of step 5."""
    folder = RunFolder(machine.root / "root/autodl-tmp/runs/demo")
    folder.checkpoints.mkdir(parents=True)
    saved = machine.write("checkpoint-5/weights", "w").parent
    checkpoints.pack(saved, folder.checkpoints, {})
    return folder


def is_off(machine: simulate.Machine) -> bool:
    return (machine.root / "shutdown.log").exists()


# --- where notices go ------------------------------------------------------------------------------------------------

Text = Callable[[Any], str]
SERVICES: dict[str, tuple[str, str, Text, bytes, bytes]] = {  # address, host in apprise, text, taken, refused
    "Feishu": ("https://open.feishu.cn/open-apis/bot/v2/hook/" + KEY, "feishu.NotifyFeishu.notify_url",
               lambda sent: sent["content"]["text"],
               b'{"StatusCode": 0, "code": 0, "msg": "success"}', b'{"code":19024,"msg":"Key Words Not Found"}'),
    "Lark (Feishu)": ("https://open.larksuite.com/open-apis/bot/v2/hook/" + KEY, "lark.NotifyLark.notify_url",
                      lambda sent: sent["content"]["text"],
                      b'{"code":0,"msg":"success"}', b'{"code":9499,"msg":"Bad Request"}'),
    "DingTalk": ("https://oapi.dingtalk.com/robot/send?access_token=" + KEY.replace("-", ""),
                 "dingtalk.NotifyDingTalk.notify_url", lambda sent: sent["text"]["content"],
                 b'{"errcode":0,"errmsg":"ok"}', b'{"errcode":310000,"errmsg":"keywords not in content"}'),
    "WeCom Bot": ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=" + KEY, "wecombot.NotifyWeComBot.notify_url",
                  lambda sent: sent["text"]["content"],
                  b'{"errcode":0,"errmsg":"ok"}', f'{{"errcode":93000,"errmsg":"invalid webhook {KEY}"}}'.encode()),
    "Slack": ("https://hooks.slack.com/services/T0/B0/" + KEY.replace("-", ""), "slack.NotifySlack.webhook_url",
              lambda sent: "\n".join([sent["attachments"][0]["title"], sent["attachments"][0]["text"]]),
              b"ok", b"<html>sign in first</html>"),
}  # fmt: skip


def move(monkeypatch: Patch, attribute: str, site: Site) -> str:
    """Have apprise send to this site what is meant for a robot; what follows the host is left alone."""
    module, name, constant = attribute.split(".")
    plugin = getattr(importlib.import_module(f"apprise.plugins.{module}"), name)
    original = getattr(plugin, constant)
    monkeypatch.setattr(plugin, constant, re.sub(r"https://[^/]+", site.url, original))
    return str(original)


@pytest.mark.parametrize("name", SERVICES)
def test_a_robot_gets_what_it_understands_at_the_address_its_app_shows_and_its_refusal_is_told(
    name: str, machine: simulate.Machine, monkeypatch: Patch
) -> None:
    address, attribute, text_of, taken, refusal = SERVICES[name]
    site = Site(body=taken)
    original = move(monkeypatch, attribute, site)
    assert urlsplit(address).netloc == urlsplit(original).netloc, "the host that was copied"
    monkeypatch.setenv(notices.URL, address)
    assert notices.send("nbutils: 训练结束", f"hf_{'a' * 30} {'长' * 2000}") == name
    text = text_of(site.asked[0])
    assert re.match(r"nbutils: 训练结束\s+\[masked\] 长长", text), text[:50]
    assert len(text.encode()) <= 2048, "as much as WeCom takes"
    assert urlsplit(address)._replace(scheme="", netloc="").geturl() == site.paths[0]
    site.body = refusal
    with refused("No notice sent to") as caught:
        notices.send("nbutils", "x")
    assert KEY not in str(caught.value) and KEY.replace("-", "") not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "name"),
    {
        "tgram://123456789:abcdefg_hijklmnop/12315544/": "Telegram",
        "mailto://user:secret@qq.com": "E-Mail",
        "bark://api.day.app/devicekey": "Bark",
        "ntfy://topic": "ntfy",
        "schan://1234567890": "ServerChan",
        "pushplus://0123456789abcdef0123456789abcdef": "Pushplus",
        "dingtalk://0123456789abcdef": "DingTalk",
    }.items(),
)
def test_every_address_of_apprise_is_understood(
    address: str, name: str, machine: simulate.Machine, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(notices.URL, address)
    assert str(notices._service().service_name) == name


AGAIN = "Start the same again, once the cause is mended: what is kept is not repeated."


@pytest.mark.slow
def test_another_server_gets_all_fields_and_whatever_it_does_costs_one_line(
    machine: simulate.Machine, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = Site()
    monkeypatch.setenv(notices.NOTICE, "1")
    logging.getLogger().addHandler(shown := logging.StreamHandler())  # a learner may have one

    def told(site: Site) -> tuple[str, int]:
        monkeypatch.setenv(notices.URL, f"{site.url}/{KEY}?key={KEY}")
        notices.tell("demo", None, "failed", "text")
        [line] = "".join(capfd.readouterr()).splitlines()
        assert KEY not in line
        return line, len(site.asked)

    good = Site(status=202, body=b"<html>thanks</html>")
    assert told(good) == ("Notice sent to 127.0.0.1.", 1)
    [asked] = good.asked
    assert (asked["title"], asked["message"]) == ("nbutils: run demo has failed", f"demo: text\n{AGAIN}")
    assert (asked["type"], asked["token"]) == ("failure", None)
    assert good.paths == [f"/{KEY}?key={KEY}"]
    for status in (500, 404):
        line, attempts = told(Site(status=status))
        assert "No notice sent to 127.0.0.1" in line and str(status) in line and attempts == 2, "it is asked twice"
    assert "302" in told(Site(status=302, location=elsewhere.url))[0]
    assert not elsewhere.asked, "the secret does not travel on"
    began = time.monotonic()
    assert "No notice sent" in told(Site(delay=60))[0] and time.monotonic() - began < 10
    good.shutdown()
    good.server_close()
    assert "No notice sent" in told(good)[0]
    logging.getLogger().removeHandler(shown)


class Dripping(socketserver.BaseRequestHandler):
    """A server whose answer never ends: a line of its head each half second."""

    def handle(self) -> None:
        with suppress(OSError):
            self.request.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                self.request.sendall(b"X-Wait: longer")
                time.sleep(0.5)


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of such a server."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.slow
def test_a_server_that_never_ends_its_answer_holds_neither_the_command_nor_the_power_off(
    machine: simulate.Machine, run: RunFolder, dripping: str, monkeypatch: Patch
) -> None:
    for name, value in {notices.URL: dripping, notices.NOTICE: "1", notices.POWER_OFF: "always"}.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    notices.tell("demo", run, "failed", "text")
    assert is_off(machine) and time.monotonic() - began < 20
    command = "from nbutils import cli, notices; notices.SECONDS = 2.0; cli.app(['notice'])"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1 and "No notice sent" in ran.stderr and "Traceback" not in ran.stderr


def test_a_proxy_of_the_environment_is_used(machine: simulate.Machine, monkeypatch: Patch) -> None:
    proxy = Site()
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv(notices.URL, "http://notices.example.org/mine")
    assert notices.send("nbutils", "text") == "notices.example.org"
    assert [asked["message"] for asked in proxy.asked] == ["text"]


def test_a_wrong_address_is_told_at_the_start_when_someone_is_there(
    machine: simulate.Machine, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(notices.URL, "not a web address")
    with refused("No notice can be sent", notices.URL):
        notices.send("t", "x")
    monkeypatch.setenv(notices.NOTICE, "1")
    notices.require_settings()
    assert "[WARN]" in capsys.readouterr().out


def test_the_command_fails_and_says_why_and_what_to_set_where_no_notice_was_sent(
    machine: simulate.Machine, monkeypatch: Patch
) -> None:
    def sent(address: str) -> Result:
        monkeypatch.setenv(notices.URL, address)
        return CliRunner().invoke(cli.app, ["notice"])

    took = sent(Site().url)
    assert took.exit_code == 0 and "Notice sent to 127.0.0.1" in took.stdout
    for address, reason in {
        "": "not the address",
        "robot": "not the address",
        "http://": "not the address",
        "http://127.0.0.1:65536/robot": "onnection",
        "https://127.0.0.1:99999999": "onnection",
        f"{Site(status=404).url}/{KEY}": "404",
    }.items():
        failed = sent(address)
        assert failed.exit_code == 1 and reason in failed.stderr and KEY not in failed.output
        assert notices.URL in failed.stderr, "what to set"


def test_other_values_of_the_variables_are_refused_and_the_address_is_a_secret(monkeypatch: Patch) -> None:
    for name, value in ((notices.NOTICE, "always"), (notices.POWER_OFF, "yes")):
        with monkeypatch.context() as here, refused(f"{name} is ", f" is {value!r}."):
            here.setenv(name, value)
            notices.require_settings()
    monkeypatch.setenv(notices.URL, f"https://example.org/{KEY}")
    assert notices.URL not in masking.without_secrets(os.environ)
    assert masking.mask_secrets(f"see https://example.org/{KEY}") == "see [masked]"


# --- when a machine is switched off ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "status", "checkpoint", "off"),
    [
        ("0", "finished", "whole", False), ("1", "finished", "whole", True), ("always", "finished", "whole", True),
        ("1", "failed", "whole", False), ("always", "failed", "whole", True), ("always", "unfinished", "whole", True),
        ("1", "unfinished", "whole", True), ("always", "failed", "damaged", False), ("always", "failed", "none", True),
        ("1", "finished", "damaged", False), ("1", "finished", "none", False), ("1", "finished", "manifest", False),
    ],
)  # fmt: skip
def test_a_machine_is_switched_off_when_asked_and_when_nothing_can_be_lost(
    when: str, status: notices.Status, checkpoint: str, off: bool,
    machine: simulate.Machine, run: RunFolder, monkeypatch: Patch,
) -> None:  # fmt: skip
    if checkpoint != "whole":
        archive = run.checkpoints / "checkpoint-5.tar"
        broken = {"damaged": archive, "manifest": archive.with_suffix(".json")}.get(checkpoint)
        os.truncate(broken, 10) if broken else checkpoints.forget(archive)
    site = Site()
    for name, value in {notices.NOTICE: "1", notices.URL: site.url, notices.POWER_OFF: when}.items():
        monkeypatch.setenv(name, value)
    notices.tell("03_qlora", run, status, "said")
    assert is_off(machine) == off
    [sent] = site.asked
    assert sent["type"] == notices.KINDS[status] and sent["title"].startswith("nbutils: run demo has ")
    assert "03_qlora: said" in sent["message"]
    words = {
        "whole": "Checkpoint 5 verifies",
        "damaged": "does not verify",
        "manifest": "No checkpoint is kept yet",
        "none": "No checkpoint is kept yet",
    }
    assert words[checkpoint] in sent["message"]
    assert (str(run.path) in sent["message"]) == (off or checkpoint in ("whole", "damaged"))
    assert ("This machine is powered off" in sent["message"]) == off
    assert ("tart the same again" in sent["message"]) == (status != "finished")


def test_a_power_off_is_cancelled_by_a_file_and_by_an_interruption_and_its_failure_is_told(
    machine: simulate.Machine, run: RunFolder, monkeypatch: Patch
) -> None:
    keep_on = run.path / "keep_on"
    monkeypatch.setenv(notices.POWER_OFF, "always")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's & has it ignored
    code += "from nbutils import notices; notices.begin('03_qlora').ended('failed', 'said'); print('over')"
    waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert waiting.stdout and waiting.stdout.readline() == b"03_qlora: said\n"
    time.sleep(0.3)
    waiting.send_signal(signal.SIGINT)
    assert b"stays on" in waiting.communicate(timeout=20)[0] and waiting.returncode == 0
    monkeypatch.setattr(notices, "GRACE", 60.0)
    keep_on.touch()
    assert "keep_on" in notices.power_off(keep_on) and not is_off(machine)
    monkeypatch.setattr(notices, "GRACE", 0.0)
    assert notices.power_off(keep_on).startswith("Powered off.")
    assert (machine.root / "shutdown.log").read_text() == "called with []\n", "without arguments"
    (machine.root / "usr/bin/shutdown").write_text("#!/bin/sh\nexit 4\n")
    assert "exit status 4" in notices.power_off(keep_on)


def test_a_file_keeps_the_machine_on_once(machine: simulate.Machine, run: RunFolder, monkeypatch: Patch) -> None:
    site = Site()
    for name, value in {notices.NOTICE: "1", notices.URL: site.url, notices.POWER_OFF: "1"}.items():
        monkeypatch.setenv(name, value)
    (run.path / "keep_on").touch()
    notices.tell("03_qlora", run, "finished", "said")
    assert not is_off(machine) and "Not powered off" in site.asked[0]["message"]
    notices.tell("03_qlora", run, "finished", "said")
    assert is_off(machine), "the file of an earlier night counts no more"


def test_only_autodl_is_switched_off(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    simulate.kaggle(tmp_path).enter(monkeypatch)
    monkeypatch.setenv(notices.POWER_OFF, "always")
    notices.tell("03_qlora", None, "failed", "said")
    assert "this is kaggle" in capsys.readouterr().out


def test_elsewhere_a_notice_says_nothing_of_a_power_off_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate.kaggle(tmp_path).enter(monkeypatch)
    site = Site()
    monkeypatch.setenv(notices.NOTICE, "1")
    monkeypatch.setenv(notices.URL, site.url)
    notices.tell("03_qlora", None, "finished", "said")
    assert [sent["message"] for sent in site.asked] == ["03_qlora: said"]
    assert capsys.readouterr().out == "Notice sent to 127.0.0.1.\n"


# --- which errors are told -------------------------------------------------------------------------------------------


def test_an_error_is_told_unless_it_is_an_interruption_or_someone_watches(
    machine: simulate.Machine, monkeypatch: Patch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(notices.Work, "ended", lambda self, status, said: told.append((status, said)))
    work = notices.Work("03_qlora")
    for by_hand in (KeyboardInterrupt(), SystemExit(0), StoppedByHand("at step 1")):
        work.failed(by_hand)
    work.failed(StoppedByHand("03_qlora, SIGINT"))
    assert told == []
    work.failed(Unfinished("03_qlora, SIGTERM"))
    work.failed(CourseError(f"03_qlora failed in cell 3: ValueError: hf_{'a' * 30}\nmore", todo="Fix it."))
    assert [status for status, _ in told] == ["unfinished", "failed"]
    assert told[1][1] == "03_qlora failed in cell 3: ValueError: [masked]", (
        "the first line of what went wrong in the cell"
    )

    class Result:
        error_in_exec, error_before_exec = None, SyntaxError("typo")

    for is_watched, seconds, expected in ((True, 0.0, 0), (True, notices.LONG_CELL, 1), (False, 0.0, 1)):
        told.clear()
        monkeypatch.setattr(display, "watched", lambda is_watched=is_watched: is_watched)
        monkeypatch.setattr(notices, "_underway", notices.Work("03_qlora", cell_began=time.monotonic() - seconds))
        notices._after_cell(Result())
        assert len(told) == expected


QUICK = """
from nbutils import notices
notices.WATCH = notices.WATCH.replace(";", "; notices.GRACE = 0;")
"""
SCRIPT = (
    QUICK
    + """
import os, signal, subprocess, time
work = notices.begin("03_qlora")
{then}
"""
)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
HELD = "child = os.fork()\nif not child: os.closerange(1, 3); time.sleep(60)\nelse: print(child, flush=True); " + KILLED
ENDS = {  # how many notices the end of a script is worth, and what the first says
    "raise RuntimeError('no such thing')": (1, "RuntimeError: no such thing"),
    "raise KeyboardInterrupt": (0, ""),
    "pass": (0, ""),
    "work.ended('unfinished', 'time is up'); " + KILLED: (1, "time is up"),
    "notices.begin('03_qlora')": (0, ""),
    KILLED: (1, "was killed"),
    "os.kill(os.getpid(), signal.SIGTERM)": (1, "was killed"),
    HELD: (1, "was killed"),
    "with notices.deferred(): notices.begin('04_merge'); " + KILLED: (0, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("then", ENDS)
def test_one_notice_is_sent_of_each_end_of_a_script_however_it_ends(tmp_path: Path, then: str) -> None:
    notices_sent, text = ENDS[then]
    site, machine = Site(), simulate.autodl(tmp_path)
    machine.env |= {"NBUTILS_NOTICE": "1", "NBUTILS_POWER_OFF": "always", "NBUTILS_NOTICE_URL": site.url}
    ran = machine.python("-c", SCRIPT.format(then=then))
    if notices_sent:
        wait_for(lambda: is_off(machine), seconds=20)
    else:
        time.sleep(2)
    assert len(site.asked) == notices_sent and is_off(machine) == bool(notices_sent), ran.stderr
    assert all(text in sent["message"] for sent in site.asked)
    if then == HELD:
        os.kill(int(ran.stdout.split()[-1]), signal.SIGKILL)


OUT_OF_MEMORY = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\nbytearray(2**36)"
START = 'import nbutils\nPROFILE, RUN_NAME = "tiny", "night"\nlesson = nbutils.start("01_environment", globals())'


def notebook(path: Path, *cells: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel)
    nbformat.write(book, path)
    return path


@pytest.mark.slow
def test_a_cell_that_fails_under_papermill_is_told_before_its_kernel_is_shut_down(tmp_path: Path) -> None:
    site, machine = Site(delay=1.0), simulate.autodl(tmp_path)  # slower than papermill shuts a kernel down
    machine.env |= {"NBUTILS_NOTICE": "1", "NBUTILS_POWER_OFF": "always", "NBUTILS_NOTICE_URL": site.url}
    slower = QUICK.replace("GRACE = 0", "GRACE = 2.0")
    book = notebook(tmp_path / "night.ipynb", slower, START, OUT_OF_MEMORY, "print('never')")
    ran = machine.python("-m", "papermill", str(book), str(tmp_path / "out.ipynb"))
    assert ran.returncode and "MemoryError" in ran.stderr, ran.stderr[-3000:]
    [sent] = site.asked
    assert (sent["type"], sent["title"]) == (
        "failure",
        "nbutils: run night has failed",
    ) and "01_environment: MemoryError" in sent["message"]
    assert is_off(machine) and "Powered off." in (tmp_path / "out.ipynb").read_text()


WAIT = "import os, time\nopen({!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"


@pytest.mark.slow
@pytest.mark.long
def test_a_kernel_that_is_killed_under_papermill_is_told(tmp_path: Path) -> None:
    site, machine, started = Site(), simulate.autodl(tmp_path), tmp_path / "started"
    machine.env |= {"NBUTILS_NOTICE": "1", "NBUTILS_POWER_OFF": "always", "NBUTILS_NOTICE_URL": site.url}
    book = notebook(tmp_path / "night.ipynb", QUICK, START, WAIT.format(str(started)))
    command = [sys.executable, "-m", "papermill", str(book), str(tmp_path / "out.ipynb")]
    with subprocess.Popen(command, env=machine.environment(), cwd=tmp_path, stderr=subprocess.PIPE) as running:
        wait_for(lambda: started.exists() and started.read_text())
        os.kill(int(started.read_text()), signal.SIGKILL)
        wait_for(lambda: is_off(machine))
        running.communicate(timeout=60)
    [sent] = site.asked
    assert (sent["type"], sent["title"]) == ("failure", "nbutils: run night has failed") and "01_environment" in sent[
        "message"
    ]
    assert "create the file" in sent["message"] and "Ctrl-C" not in sent["message"], "there is nothing to interrupt"


@pytest.mark.slow
@pytest.mark.long
def test_a_kernel_that_is_shut_down_by_its_user_is_not_told(tmp_path: Path) -> None:
    site, machine = Site(), simulate.autodl(tmp_path)
    machine.env |= {"NBUTILS_NOTICE": "1", "NBUTILS_POWER_OFF": "always", "NBUTILS_NOTICE_URL": site.url}
    book = notebook(tmp_path / "idle.ipynb", QUICK, START)
    ran = machine.python("-m", "papermill", str(book), str(tmp_path / "out.ipynb"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    time.sleep(2)
    assert not site.asked and not is_off(machine)


RUN = (
    QUICK
    + """
import sys
from pathlib import Path
from nbutils import cli, course, notices
course.NOTEBOOKS = Path(sys.argv.pop(1))
cli.app(["run", "--only", "09_night", "--profile", "tiny", "-p", "RUN_NAME", "night"])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, "failed"), (signal.SIGTERM, "unfinished")])
def test_a_run_tells_of_a_kernel_that_is_killed_and_of_a_signal_and_ends_with_an_error(
    tmp_path: Path, number: signal.Signals, status: str
) -> None:
    site, machine, lessons = Site(), simulate.autodl(tmp_path), tmp_path / "lessons"
    machine.env |= {"NBUTILS_NOTICE": "1", "NBUTILS_POWER_OFF": "always", "NBUTILS_NOTICE_URL": site.url}
    machine.env["NBUTILS_LANG"] = "zh"
    started = tmp_path / "started"
    notebook(lessons / "09_night.ipynb", "raise ValueError('the English one')")
    notebook(lessons / "zh/09_night.ipynb", WAIT.format(str(started)))
    for folder in (lessons, lessons / "zh"):
        (folder / "09_night.py").write_text('PROFILE: str = "auto"\nRUN_NAME: str = ""\n')
    command = [sys.executable, "-c", RUN, str(lessons)]
    options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=machine.environment(), **options) as running:
        wait_for(lambda: started.exists() and started.read_text())
        os.kill(int(started.read_text()) if number == signal.SIGKILL else running.pid, number)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 1, said
    [sent] = site.asked
    assert sent["type"] == notices.KINDS[status] and sent["title"].startswith("nbutils：night ")
    assert "09_night" in sent["message"] and is_off(machine), said


def test_another_training_on_the_machine_keeps_it_on(run: RunFolder, monkeypatch: Patch) -> None:
    process = psutil.Process()
    other = {"state": "training", "step": 3, "steps": 9, "pid": process.pid, "began": process.create_time()}
    logs = platforms.folders(platforms.detect()).keep / "other/logs"
    logs.mkdir(parents=True)
    (logs / tracking.PROGRESS).write_text(json.dumps(other))
    assert "other" in notices._why_on(run.path / notices.KEEP_ON)
    assert "other" in notices._why_on(logs.parent / notices.KEEP_ON), "the same run was started again meanwhile"
    with monkeypatch.context() as here:
        here.setattr(os, "getppid", lambda: process.pid)
        assert notices._why_on(logs.parent / notices.KEEP_ON) == "", "its own end is not kept from it"
    (logs / tracking.PROGRESS).write_text(json.dumps(other | {"began": 0.0}))
    assert notices._why_on(run.path / notices.KEEP_ON) == "", "a process of that number which is another one"
