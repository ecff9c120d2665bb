"""Where the course is installed from: the setup cell, the repository's address, the workflows, what goes to Kaggle."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from support import ROOT, setup_cell

SYNC = runpy.run_path(str(ROOT / ".ci/sync.py"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TO_PUBLISH_PAGES = {"pages": "write", "id-token": "write"}
OURS = "https://github.com/ours/course/archive/main.zip"
SetUp = Callable[..., list[str]]


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Executes the setup cell with a recorder in place of Python; the words after `pip install`."""
    said = tmp_path / "said.txt"
    recorder = tmp_path / "python"
    recorder.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {said}\n")
    recorder.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(recorder))
    for name in ("COLAB_JUPYTER_IP", "http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def execute(source: str = "", have_it: bool = False, **options: Any) -> list[str]:
        said.unlink(missing_ok=True)
        monkeypatch.setenv("NBUTILS_SOURCE", source)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if have_it else None)
        exec(compile(setup_cell(tmp_path, **options), "setup cell", "exec"), {})
        return said.read_text().splitlines()[3:] if said.exists() else []

    return execute


class Sessions(ThreadingHTTPServer):
    """Colab's notebook server on this machine: what it answers, after how long, and how often it was asked."""

    answer, wait, asked = b"", 0.0, 0

    def of(self, *paths: str) -> None:
        """Answer as Jupyter does: every path stands in its session twice."""
        kernel = {"id": "1", "name": "python3"}
        about = [{"id": "1", "path": path, "name": "x", "kernel": kernel, "notebook": {"path": path}} for path in paths]
        self.answer = json.dumps(about).encode()


class Handler(BaseHTTPRequestHandler):
    server: Sessions

    def do_GET(self) -> None:
        self.server.asked += 1
        time.sleep(self.server.wait)
        if self.path == "/api/sessions":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.answer)

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def sessions(set_up: SetUp, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    """This machine is Colab's."""
    monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
    with Sessions(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def opened(page: str) -> str:
    """How Colab calls a notebook that was opened from a page."""
    return "fileId=" + quote(page, safe="")


def attach(root: Path, name: str) -> Path:
    """A wheel of the course in an attached dataset."""
    wheel = root / f"kaggle/input/datasets/{name}/nbutils_finetune_course-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    return wheel


def test_the_setup_cell_installs_one_attached_wheel_from_its_folder_alone_or_the_source(
    tmp_path: Path, set_up: SetUp
) -> None:
    wheel = attach(tmp_path, "someone/wheels")
    alone = ["--no-index", "--only-binary=:all:", "-f", str(wheel.parent)]
    assert set_up(have_it=True) == []
    assert set_up() == [str(wheel), *alone] == set_up(ours=OURS)
    for source in ("/some/checkout", "git+https://example.org/me/course@v0.1.0"):
        assert set_up(source) == [source]
    attach(tmp_path, "a-stranger/zzz")
    with pytest.raises(AssertionError, match=r"NBUTILS_SOURCE.*a-stranger"):
        set_up()
    assert set_up(str(wheel)) == [str(wheel), *alone]


@pytest.mark.parametrize(
    "source",
    [
        "", "nbutils", "--index-url=http://evil/", "a/b\nc/d", "git+https://me:pass-word@example.org/course",
        "https://pass-word@example.org/x/y", "https://example.org/x.whl?token=pass-word",
    ],
)  # fmt: skip
def test_the_setup_cell_takes_no_bare_name_no_option_no_placeholder_and_no_password(source: str, set_up: SetUp) -> None:
    with pytest.raises(AssertionError, match="NBUTILS_SOURCE") as caught:
        set_up(source)
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize("ref", ["main", "v0.1.0", "feature/zh-texts", "0123456789abcdef0123456789abcdef01234567"])
def test_on_colab_the_setup_cell_installs_the_repository_it_was_opened_from(
    ref: str, set_up: SetUp, sessions: Sessions, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"https://github.com/some-body/finetune.course/archive/{ref}.zip"
    for folder in ("", "zh/"):
        page = f"https://github.com/some-body/finetune.course/blob/{ref}/notebooks/{folder}03_qlora.ipynb"
        sessions.of(opened(page))
        assert set_up(port=sessions.server_port, ours=OURS) == [address]
        assert address in capsys.readouterr().out


def test_what_is_named_or_attached_comes_before_the_repository(
    tmp_path: Path, set_up: SetUp, sessions: Sessions
) -> None:
    sessions.of(opened("https://github.com/me/course/blob/main/notebooks/03_qlora.ipynb"))
    assert set_up("/some/checkout", port=sessions.server_port) == ["/some/checkout"]
    wheel = attach(tmp_path, "me/wheels")
    assert set_up(port=sessions.server_port)[0] == str(wheel)
    asked = sessions.asked
    assert set_up(have_it=True, port=sessions.server_port) == [] and sessions.asked == asked


def test_a_copy_in_drive_takes_what_make_sync_wrote_or_asks(set_up: SetUp, sessions: Sessions) -> None:
    sessions.of("fileId=1AbC-dEf_GhI")
    assert set_up(port=sessions.server_port, ours=OURS) == [OURS]
    with pytest.raises(AssertionError, match="NBUTILS_SOURCE"):
        set_up(port=sessions.server_port)


def test_off_colab_nobody_is_asked(set_up: SetUp, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLAB_JUPYTER_IP")
    sessions.of(opened("https://github.com/me/course/blob/main/notebooks/03_qlora.ipynb"))
    began = time.monotonic()
    assert set_up(port=sessions.server_port, ours=OURS) == [OURS]
    assert sessions.asked == 0 and time.monotonic() - began < 1


@pytest.mark.parametrize(
    "page",
    [
        "https://github.com.evil.org/me/course/blob/main/notebooks/03_qlora.ipynb",
        "https://evil.org/github.com/me/course/blob/main/notebooks/03_qlora.ipynb",
        "https://me:pass-word@github.com/me/course/blob/main/notebooks/03_qlora.ipynb",
        "https://github.com@evil.org/me/course/blob/main/notebooks/03_qlora.ipynb",
        "http://github.com/me/course/blob/main/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/../../evil/blob/main/notebooks/03_qlora.ipynb",
        "https://github.com/../course/blob/main/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/main --index-url=http://evil/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/main\n--pre/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/$(touch evil)/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/main?token=pass-word/notebooks/03_qlora.ipynb",
        "https://github.com/me/course/blob/main/elsewhere/03_qlora.ipynb",
        "https://github.com/me/course/blob/märz/notebooks/03_qlora.ipynb",
        "https://gist.github.com/me/0123/blob/main/notebooks/03_qlora.ipynb",
    ],
)
def test_any_other_page_is_left_alone(
    page: str, set_up: SetUp, sessions: Sessions, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (opened(page), f"fileId={page}"):
        sessions.of(path)
        assert set_up(port=sessions.server_port, ours=OURS) == [OURS]
        assert "pass-word" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [b"", b"no JSON", b"\xff\xfe\x00", b"[]", b'{"path": null}', b"x" * 10**8, b'"path": "' * 10**6],
    ids=["nothing", "text", "bytes", "empty", "null", "huge", "repeated"],
)
def test_an_answer_without_a_page_is_left_alone(answer: bytes, set_up: SetUp, sessions: Sessions) -> None:
    sessions.answer = answer
    began = time.monotonic()
    assert set_up(port=sessions.server_port, ours=OURS) == [OURS]
    assert time.monotonic() - began < 4


@pytest.mark.slow
def test_a_slow_server_and_none_hold_nobody_up(set_up: SetUp, sessions: Sessions) -> None:
    sessions.wait = 5
    began = time.monotonic()
    assert set_up(port=sessions.server_port, ours=OURS) == [OURS]
    assert set_up(port=9, ours=OURS) == [OURS]
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://github.com/me/course", "https://github.com/me/course"),
        ("https://github.com/me/course.git", "https://github.com/me/course"),
        ("https://me:pass-word@github.com/me/course.git", "https://github.com/me/course"),
        ("https://token@github.com/me/course/", "https://github.com/me/course"),
        ("git@github.com:me/course.git", "https://github.com/me/course"),
        ("ssh://git@github.com/me/course.git", "https://github.com/me/course"),
        ("ssh://git@ssh.github.com:443/me/course.git", "https://github.com/me/course"),
        ("https://gitee.com/me/course.git", "https://gitee.com/me/course"),
        ("git@gitlab.example.org:group/sub/course.git", "https://gitlab.example.org/group/sub/course"),
        ("", ""), ("/srv/git/course.git", ""), ("../course", ""), ("file:///srv/course", ""), ("C:/course", ""),
        ("git@work:me/course.git", ""), ("http://127.0.0.1:8000/me/course", ""), ("https://127.0.0.1/me/course", ""),
        ('https://github.com/me/course"; import evil', ""), ("https://github.com/me/../course", ""),
        ("https://github.com/me/course?token=pass-word", "https://github.com/me/course"),
    ],
)  # fmt: skip
def test_the_page_of_a_remote(remote: str, page: str) -> None:
    assert SYNC["web_address"](remote) == page


def run(*words: str | Path, cwd: Path, ok: bool = True) -> str:
    """Run a command; what it printed."""
    ran = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert (ran.returncode == 0) == ok, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of what is here, not committed changes included; its origin is a folder."""
    folder = tmp_path / "clone"
    run("git", "clone", "-q", ROOT, folder, cwd=tmp_path)
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copyfile(ROOT / name, folder / name)
    run("git", "add", "-A", cwd=folder)
    return folder


@pytest.fixture
def sync(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python .ci/sync.py` in that clone, but for docs/choosing.md, which has no address and takes long."""
    main = runpy.run_path(str(clone / ".ci/sync.py"))["main"]
    main.__globals__["choosing"] = dict

    def execute(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sync.py", *words])
        return int(main())

    return execute


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://me:pass-word@github.com/me/course.git", "https://github.com/me/course/archive/main.zip"),
        ("git@gitee.com:me/course.git", "git+https://gitee.com/me/course"),
    ],
)
@pytest.mark.slow
def test_make_sync_takes_the_address_from_origin_and_a_check_does_not(
    clone: Path, sync: Callable[..., int], origin: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sync()
    assert run("git", "diff", cwd=clone) == "", "an origin in a folder changes nothing"
    run("git", "remote", "set-url", "origin", origin, cwd=clone)
    assert sync("--check") == 0
    sync()
    assert sync("--check") == 0
    for lesson in (clone / "notebooks").rglob("[0-9]*.ipynb"):
        assert f'    OURS = \\"{address}\\"' in lesson.read_text(encoding="utf-8")
    badge = "https://colab.research.google.com/github/me/course/blob/main/notebooks/03_qlora.ipynb"
    for readme in ("README.md", "README.zh-CN.md"):
        assert (badge in (clone / readme).read_text(encoding="utf-8")) == ("github" in address)
    changed = run("git", "diff", cwd=clone)
    assert "pass-word" not in changed + capsys.readouterr().out
    run("git", "add", "-A", cwd=clone)
    sync()
    assert run("git", "diff", cwd=clone) == "", "a second time there is nothing to write"


def test_an_address_with_a_password_is_not_carried_anywhere(clone: Path, sync: Callable[..., int]) -> None:
    about = clone / "pyproject.toml"
    address = "https://me:pass-word@github.com/me/course"
    about.write_text(re.sub('Repository = ".*"', f'Repository = "{address}"', about.read_text()))
    with pytest.raises(AssertionError, match="Repository") as caught:
        sync()
    assert "pass-word" not in str(caught.value)
    assert "pass-word" not in (clone / "notebooks/03_qlora.ipynb").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_has_pinned_actions_few_rights_and_commands_that_exist(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    triggers = workflow[True]  # YAML reads `on` as a truth value
    writes = workflow["permissions"] == {"contents": "write"}
    assert writes or workflow["permissions"] == {"contents": "read"}
    assert not (writes and "pull_request" in triggers) and "pull_request_target" not in triggers
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        assert job.get("permissions", TO_PUBLISH_PAGES) == TO_PUBLISH_PAGES
        for step in job["steps"]:
            command = step.get("run", "")
            assert command or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            assert "${{" not in command, "a name that somebody chose would be read by the shell"
            for script in re.findall(r"\.ci/[\w.]+", command):
                assert (ROOT / script).exists()
            for target in re.findall(r"\bmake ([\w-]+)", command):
                assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text())


def test_there_is_a_workflow_for_the_gate_for_a_new_fork_and_for_a_release() -> None:
    texts = {file.stem: file.read_text(encoding="utf-8") for file in WORKFLOWS}
    assert "run: .ci/run\n" in texts["test"]
    assert "python .ci/sync.py" in texts["address"] and "git push" in texts["address"]
    assert "pip wheel" in texts["release"] and "gh release create" in texts["release"]


def test_make_kaggle_wants_a_name_and_a_lesson_that_exist(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / ".ci/kaggle.py", "--into", tmp_path / "kaggle"]
    assert "KAGGLE_USER" in run(*script, cwd=tmp_path, ok=False)
    assert "KAGGLE_USER" in run(*script, "--user", "me/../you", cwd=tmp_path, ok=False)
    assert "zh/03_qlora" in run(*script, "--user", "me", "--lesson", "../README", cwd=tmp_path, ok=False)
    assert not (tmp_path / "kaggle").exists()


@pytest.mark.parametrize("lesson", ["03_qlora", "zh/99_when_it_breaks"])
def test_a_lesson_becomes_a_kernel_that_attaches_the_dataset(
    lesson: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    kaggle = runpy.run_path(str(ROOT / ".ci/kaggle.py"))
    kaggle["kernel"](tmp_path, "me", lesson, offline=False)
    about = json.loads((tmp_path / "kernel-metadata.json").read_text(encoding="utf-8"))
    assert about["id"] == "me/" + about["title"].lower().replace(" ", "-") and len(about["title"]) >= 5
    assert about["dataset_sources"] == [f"me/{kaggle['DATASET']}"] and about["enable_internet"]
    copied = (tmp_path / about["code_file"]).read_bytes()
    assert copied == (ROOT / f"notebooks/{lesson}.ipynb").read_bytes()
    kaggle["kernel"](tmp_path, "me", lesson, offline=True)
    assert not json.loads((tmp_path / "kernel-metadata.json").read_text(encoding="utf-8"))["enable_internet"]


@pytest.mark.install
@pytest.mark.long
def test_the_dataset_has_what_the_setup_cell_needs_and_is_made_again(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / ".ci/kaggle.py", "--user", "me", "--into", tmp_path]
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/nbutils_finetune_course-0.0.1-py3-none-any.whl").touch()  # of an earlier version
    assert f"kaggle kernels push -p {tmp_path}/kernel" in run(*script, cwd=tmp_path)
    names = sorted(file.name.split("-")[0] for file in (tmp_path / "dataset").iterdir())
    assert names == ["apprise", "dataset", "ftfy", "nbutils_finetune_course", "rensa"], (
        "no list: lessons use the network"
    )
    about = json.loads((tmp_path / "dataset/dataset-metadata.json").read_text(encoding="utf-8"))
    owner, slug = about["id"].split("/")
    assert owner == "me" and 6 <= len(slug) <= 50 and 6 <= len(about["title"]) <= 50 and len(about["licenses"]) == 1
