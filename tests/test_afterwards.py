"""After a run on an imitated AutoDL (A1): power-off and notice, only when asked for; every failure is a sentence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import simulate

from nbutils import masking
from nbutils.platforms import Platform, afterwards

AUTODL = Platform("autodl", "a test says so")
TOKEN = "very-secret-developer-token"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_found", set())
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTODL_TOKEN", TOKEN)
    monkeypatch.setattr(afterwards.time, "sleep", lambda seconds: None)


# --- power -----------------------------------------------------------------------------------------------------------


def shutdowns(machine: simulate.Machine) -> str:
    log = machine.root / "shutdown.log"
    return log.read_text() if log.exists() else ""


def test_a1_a_safe_run_may_power_the_machine_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = simulate.autodl(tmp_path)
    said = afterwards.power_off(AUTODL, None, root=machine.root)
    assert said.startswith("Powered off.") and shutdowns(machine) == "called with []\n", "without arguments"
    assert "powered off in 60 s" in capsys.readouterr().out


def test_a1_in_a_process_of_its_own_the_machine_is_found_and_powered_off(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path, login=False)
    assert machine.ask("platforms.power_off(platforms.detect(), None, grace=0)").startswith("Powered off.")
    assert shutdowns(machine) == "called with []\n"


def test_an_unsafe_run_is_never_powered_off(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    for problem in ("checkpoint-40.tar is shorter than its manifest says", ""):
        said = afterwards.power_off(AUTODL, problem, root=machine.root)
        assert said.startswith("Not powered off, because the run is not safe yet") and problem in said
    assert shutdowns(machine) == ""


@pytest.mark.parametrize("name", ["local", "colab", "kaggle", "featurize"])
def test_no_other_machine_is_powered_off(tmp_path: Path, name: str) -> None:
    machine = simulate.autodl(tmp_path)
    assert f"this is {name}" in afterwards.power_off(Platform(name, ""), None, root=machine.root)
    assert shutdowns(machine) == ""


def test_a_machine_without_the_tool_is_told(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    (machine.root / "usr/bin/shutdown").unlink()
    assert "shutdown is missing" in afterwards.power_off(AUTODL, None, root=machine.root)


def test_a_tool_that_fails_is_told(tmp_path: Path) -> None:
    machine = simulate.autodl(tmp_path)
    tool = machine.write("usr/bin/shutdown", f"#!/bin/sh\necho no right {TOKEN} >&2\nexit 4\n")
    said = afterwards.power_off(AUTODL, None, root=machine.root)
    assert "ended with status 4 (no right [masked])" in said
    tool.write_text("not a program")
    assert "failed (OSError)" in afterwards.power_off(AUTODL, None, root=machine.root)


def test_a_learner_can_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate.autodl(tmp_path)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(afterwards.time, "sleep", interrupted)
    assert "you stopped it" in afterwards.power_off(AUTODL, None, root=machine.root) and shutdowns(machine) == ""


# --- notice ----------------------------------------------------------------------------------------------------------


class Service(ThreadingHTTPServer):
    """AutoDL's service for messages, answering as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        self.location = ""
        self.status, self.answer, self.delay, self.got = 200, b'{"code": "Success"}', 0.0, list[dict]()
        super().__init__(("127.0.0.1", 0), _Take)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api/v1/wechat/message/send"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked went away: nothing to tell."""


class _Take(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        self.server.got.append(body | {"path": self.path, "token": self.headers["Authorization"]})
        threading.Event().wait(self.server.delay)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.answer)))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.answer)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_notice_is_sent_as_documented_and_masked(service: Service) -> None:
    said = afterwards.send_notice("训练结束", f"loss 0.5, key {TOKEN}, hf_{'a' * 30}", "demo", url=service.url)
    assert said == "Notice sent to WeChat."
    assert service.got == [
        {
            "title": "训练结束", "name": "demo", "content": "loss 0.5, key [masked], [masked]",
            "path": "/api/v1/wechat/message/send", "token": TOKEN,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (429, b"", "too many notices: AutoDL allows 50 notices a day and 5 a minute"),
        (401, b"", "AUTODL_TOKEN is not valid"),
        (500, b"", "HTTP status 500, AutoDL did not take it"),
        (200, b'{"code": "AuthorizeFailed", "msg": "bad token ' + TOKEN.encode() + b'"}', "'bad token [masked]'"),
        (200, b'{"code": "Limit"}', "'Limit'. AutoDL allows 50 notices a day and 5 a minute"),
        (200, b"[]", "an answer nobody understands"),
        (200, b"<html>", "did not answer (JSONDecodeError"),
    ],
)
def test_every_refusal_is_a_sentence_without_the_token(service: Service, status: int, answer: bytes, said: str) -> None:
    service.status, service.answer = status, answer
    told = afterwards.send_notice("t", "x", url=service.url)
    assert told.startswith("No notice sent: ") and said in told and TOKEN not in told


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_token_follows_no_redirect(service: Service, status: int) -> None:
    elsewhere = Service()
    threading.Thread(target=elsewhere.serve_forever, args=(0.05,), daemon=True).start()
    service.status, service.location = status, elsewhere.url
    assert "No notice sent" in afterwards.send_notice("t", "x", url=service.url) and not elsewhere.got
    elsewhere.shutdown()
    elsewhere.server_close()


def test_a_service_that_is_silent_or_gone_costs_little(service: Service) -> None:
    service.delay = 5.0
    began = time.monotonic()
    assert "did not answer" in afterwards.send_notice("t", "x", url=service.url, seconds=0.3)
    assert "did not answer (URLError" in afterwards.send_notice("t", "x", url="http://127.0.0.1:9")
    assert time.monotonic() - began < 2


def test_without_a_token_nobody_is_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTODL_TOKEN")
    assert "there is no AUTODL_TOKEN" in afterwards.send_notice("t", "x", url=service.url) and service.got == []
