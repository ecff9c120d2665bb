"""Secrets of imitated platforms (S3, S5, S6, K3): each documented failure, bounded waits, no value ever shown."""

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
from nbutils.errors import CourseError
from nbutils.platforms import secret

VALUE = "correct-horse-battery-staple"
ASK = """
import json, os, sys, time
from nbutils import masking, platforms
began = time.monotonic()
found = [platforms.secret(name) for name in sys.argv[1:]]
seconds = time.monotonic() - began
masked = masking.mask_secrets(" ".join(value or "" for value in found))
print()
print(json.dumps([found, seconds, masked, os.environ.get("NBUTILS_SECRETS_SILENT")]))
"""


def ask(machine: simulate.Machine, *names: str, before: str = "") -> tuple[list[str | None], str, float]:
    """The secrets by name, what was printed on the way, and the seconds it took."""
    ran = machine.python("-c", before + ASK, *names, timeout=30)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    printed, _, last = ran.stdout.strip().rpartition("\n")
    found, seconds, masked, _ = json.loads(last)
    assert VALUE not in printed and VALUE not in masked
    return found, printed.strip(), seconds


def calls(machine: simulate.Machine) -> list[str]:
    file = machine.root / "fake_calls.txt"
    return file.read_text().splitlines() if file.exists() else []


# --- everywhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "  \n"])
def test_a_secret_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(CourseError, match="without a name"):
        secret(name)


def test_the_environment_comes_first_and_is_trimmed(tmp_path: Path) -> None:
    machine = simulate.colab(tmp_path)
    machine.env |= {"FAKE_KERNEL": "1", "FAKE_USERDATA": "ok", "FAKE_SECRETS": json.dumps({"MY_NOTE": "other"})}
    machine.env["MY_NOTE"] = f" {VALUE}\n"
    assert ask(machine, "MY_NOTE", " MY_NOTE ")[0] == [VALUE, VALUE] and calls(machine) == []


def test_a_secret_of_the_environment_is_masked_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_found", set())
    monkeypatch.setenv("MY_NOTE", VALUE)
    assert masking.mask_secrets(f"note {VALUE}") == f"note {VALUE}"
    assert secret("MY_NOTE") == VALUE and masking.mask_secrets(f"note {VALUE}") == "note [masked]"


def test_at_home_nobody_is_asked(tmp_path: Path) -> None:
    assert ask(simulate.local(tmp_path, KAGGLE_KEY="k"), "HF_TOKEN")[:2] == ([None], "")


# --- Colab -----------------------------------------------------------------------------------------------------------


def colab(tmp_path: Path, **env: str) -> simulate.Machine:
    machine = simulate.colab(tmp_path)
    machine.env |= {"FAKE_KERNEL": "1", "FAKE_SECRETS": json.dumps({"HF_TOKEN": f"{VALUE} \n"})} | env
    return machine


def test_colab_gives_what_it_has_and_is_silent_about_the_rest(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_USERDATA="ok")
    assert ask(machine, "HF_TOKEN", "WANDB_API_KEY")[:2] == ([VALUE, None], "")


def test_a_secret_not_granted_is_told_once(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_USERDATA="ok", FAKE_NOT_GRANTED="WANDB_API_KEY")
    found, printed, _ = ask(machine, "WANDB_API_KEY", "WANDB_API_KEY", "HF_TOKEN")
    assert found == [None, None, VALUE] and printed.count("\n") == 0
    assert "WANDB_API_KEY" in printed and "tick 'Notebook access'" in printed


@pytest.mark.parametrize(
    ("env", "said"),
    [({"FAKE_USERDATA": "timeout"}, "without an open Colab page"), ({"FAKE_KERNEL": ""}, "not in `!python ...`")],
)
def test_s3_s5_without_a_page_or_a_kernel_one_wait_is_enough(tmp_path: Path, env: dict[str, str], said: str) -> None:
    machine = colab(tmp_path, **env)
    found, printed, seconds = ask(machine, "HF_TOKEN", "WANDB_API_KEY", "AUTODL_TOKEN")
    assert found == [None, None, None] and calls(machine) == ["userdata HF_TOKEN"] and seconds < 1
    assert said in printed and "environment variable" in printed and printed.count("\n") == 0


def test_s6_drive_works_where_secrets_do_not(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DRIVE="ok", FAKE_USERDATA="timeout")
    both = machine.ask("[platforms.mount_drive(platforms.detect()), platforms.secret('HF_TOKEN')]")
    assert both[0].startswith("Drive is mounted:") and both[1] is None


def test_an_error_of_the_page_is_told(tmp_path: Path) -> None:
    found, printed, _ = ask(colab(tmp_path, FAKE_USERDATA="error"), "HF_TOKEN")
    assert found == [None] and "reload the page" in printed and "something broke" not in printed


def test_secrets_that_never_answer_are_left_after_the_time_allowed(tmp_path: Path) -> None:
    machine = colab(tmp_path, FAKE_DELAY="60")
    found, printed, seconds = ask(
        machine, "A_KEY", "B_KEY", before="from nbutils.platforms import secrets as s; s.SECONDS = 0.3"
    )
    assert found == [None, None] and seconds < 2 and "do not answer" in printed and len(calls(machine)) == 1


# --- Kaggle ----------------------------------------------------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    """Kaggle's service for secrets: by label a value, an error, or an HTTP status."""

    asked: list[str]

    def do_POST(self) -> None:
        label = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["Label"]
        type(self).asked.append(f"{self.path} {label}")
        if label.startswith("STATUS_"):
            self.send_error(int(label.removeprefix("STATUS_")))
            return
        if label == "SLOW":
            time.sleep(3)
        absent = {"errors": [f"No user secrets exist for kernel id 7 and label {label}."], "error": {"code": 5}}
        broken = {"errors": [f"Internal trouble with {VALUE}"], "error": {"code": 13}}
        failed = (broken if label == "BROKEN" else absent) | {"wasSuccessful": False}
        told = {"wasSuccessful": True, "result": {"secret": VALUE}} if label == "HF_TOKEN" else failed
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kaggle(tmp_path: Path) -> Iterator[simulate.Machine]:
    Service.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    machine = simulate.kaggle(tmp_path)
    machine.env["KAGGLE_URL_BASE"] = f"http://127.0.0.1:{server.server_address[1]}"
    yield machine
    server.shutdown()
    server.server_close()


def test_k3_kaggle_gives_what_is_attached_and_is_silent_about_the_rest(kaggle: simulate.Machine) -> None:
    assert ask(kaggle, "WANDB_API_KEY", "HF_TOKEN")[:2] == ([None, VALUE], "")
    assert Service.asked[1] == "/requests/GetUserSecretByLabelRequest HF_TOKEN"


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_k3_a_status_is_told_and_nobody_asks_again(kaggle: simulate.Machine, status: int) -> None:
    found, printed, _ = ask(kaggle, f"STATUS_{status}", "HF_TOKEN")
    assert found == [None, None] and f"HTTP status {status}" in printed and "Internet" in printed
    assert len(Service.asked) == 1


def test_k3_too_many_requests_may_be_asked_again(kaggle: simulate.Machine) -> None:
    found, printed, _ = ask(kaggle, "STATUS_429", "HF_TOKEN")
    assert found == [None, VALUE] and "HTTP status 429" in printed


def test_k3_an_error_of_the_service_is_told_without_its_text(kaggle: simulate.Machine) -> None:
    found, printed, _ = ask(kaggle, "BROKEN", "HF_TOKEN")
    assert found == [None, VALUE] and "answered with an error for BROKEN" in printed


def test_k3_a_machine_without_token_is_told(kaggle: simulate.Machine) -> None:
    del kaggle.env["KAGGLE_USER_SECRETS_TOKEN"]
    found, printed, _ = ask(kaggle, "HF_TOKEN", "WANDB_API_KEY")
    assert found == [None, None] and "Add-ons > Secrets" in printed and printed.count("\n") == 0
    assert Service.asked == []


def test_k5_with_the_internet_off_one_failure_is_enough(tmp_path: Path) -> None:
    found, printed, seconds = ask(simulate.kaggle(tmp_path), "HF_TOKEN", "WANDB_API_KEY")
    assert found == [None, None] and "cannot be reached:" in printed and seconds < 2


def test_a_service_that_hangs_is_left_after_the_time_allowed(kaggle: simulate.Machine) -> None:
    found, printed, seconds = ask(
        kaggle, "SLOW", "HF_TOKEN", before="from nbutils.platforms import secrets as s; s.SECONDS = 0.3"
    )
    assert found == [None, None] and seconds < 2 and "do not answer" in printed


def test_a_name_kaggle_refuses_is_told(kaggle: simulate.Machine) -> None:
    before = "import kaggle_secrets as k\ndef refuse(self, label): raise k.ValidationError('no')\n"
    found, printed, _ = ask(kaggle, "odd name", before=before + "k.UserSecretsClient.get_secret = refuse")
    assert found == [None] and "odd name cannot be the name" in printed


def test_a_failure_nobody_documented_is_still_no_end(kaggle: simulate.Machine) -> None:
    before = f"import kaggle_secrets as k\ndef odd(self, label): raise RuntimeError('{VALUE}')\n"
    found, printed, _ = ask(kaggle, "HF_TOKEN", before=before + "k.UserSecretsClient.get_secret = odd")
    assert found == [None] and "failed with RuntimeError" in printed
