"""nbutils.serving: what is decided before a start, the process, the client, leftovers; a real vLLM under `-m serve`."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from support import refused

from nbutils import environments, evaluation, hardware, paths, platforms, processes, serving
from nbutils.config import Evaluation
from nbutils.evaluation import Answer
from nbutils.serving import Running, Server, client, engine, flags, logs, ports, state
from nbutils.serving.server import engine_processes

HERE = serving.ServingEnvironment(Path("/py"), "vllm")
QUESTION = [[{"role": "user", "content": "q"}]]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not processes.is_gone(pid)]


# --- builds, flags and variables of a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [((6, 0), "transformers", "float16"), ((7, 0), "transformers", "float16"), ((7, 5), "vllm", "half"),
     ((8, 0), "vllm", "bfloat16"), ((8, 9), "vllm", "bfloat16"), ((12, 0), "vllm", "bfloat16"),
     (None, "vllm-cpu", "float32")],
)  # fmt: skip
def test_each_gpu_has_its_engine_and_dtype(capability: tuple[int, int] | None, name: str, dtype: str) -> None:
    gpu = hardware.Card("Some GPU", capability, 15.0, 1) if capability else None
    assert engine.row_for(capability).engine == hardware.engine(gpu).value == name
    assert serving.flags_for(gpu, paths.TINY_MODEL)["dtype"].value == dtype


@pytest.mark.parametrize(
    ("reported", "python", "version"),
    [("9.0, 580.1", "3.12.1", "0.32.0"), ("", "3.11.9", "0.32.0"), ("9.0, 580.1", "3.10.12", "0.26.0"),
     ("7.5, 570.1\n7.5, 570.1", "3.12.1", "0.19.1"), ("No devices were found", "3.12.1", "0.32.0"),
     ("9.0, 470.1", "3.12.1", None), ("9.0, 580.1", "3.9.1", None)],
)  # fmt: skip
def test_a_build_fits_driver_and_python(
    reported: str, python: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NBUTILS_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: reported)
    monkeypatch.setattr("platform.python_version", lambda: python)
    if version:
        assert f"vllm=={version}" in engine.recipe_for("vllm").steps[-1]
        return
    with refused("serving.no_build", "0.32.0: driver from", "NBUTILS_SERVE_PYTHON"):
        engine.recipe_for("vllm")
    monkeypatch.setenv("NBUTILS_SERVE_PYTHON", "/py")
    assert engine.recipe_for("vllm").prefix == "NBUTILS_SERVE", "a given interpreter need not fit"


@pytest.mark.parametrize(("gpus", "parts"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_gpus_share_a_model_whose_heads_divide(tmp_path: Path, gpus: int, parts: int) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 28, "num_key_value_heads": 4}}')
    assert engine.tensor_parallel(tmp_path, gpus).value == parts
    found = serving.flags_for(hardware.Card("T4", (7, 5), 15.0, gpus), tmp_path)
    assert found.get("tensor-parallel-size", hardware.Choice(1, "")).value == parts
    assert engine.tensor_parallel(tmp_path / "none", gpus).value == 1


def test_variables_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for reported, turing in (("7.5, 580.1", True), ("9.0, 580.1", False)):
        monkeypatch.setattr(hardware, "ask_driver", lambda *_, reported=reported: reported)
        assert ("VLLM_USE_FLASHINFER_SAMPLER" in engine.engine_variables("vllm")) == turing
    for allowed, threads in ((4, "3"), (0.5, "1")):
        monkeypatch.setattr(platforms, "processors", lambda allowed=allowed: platforms.Limit(allowed, "a container"))
        assert engine.engine_variables("vllm-cpu")["OMP_NUM_THREADS"] == threads, "a core is left to the API server"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in engine.engine_variables("vllm-cpu")


def test_engines_that_are_unknown_or_lack_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("serving.unknown_engine", engine="tgi"):
        serving.ensure_environment("tgi")
    monkeypatch.setattr(engine, "SERVE_PACKAGES", ("json",))
    assert serving.ensure_environment("transformers").python == Path(sys.executable)
    monkeypatch.setattr(engine, "SERVE_PACKAGES", ("no_such_package",))
    with refused("serving.packages_missing", missing="no_such_package"):
        serving.ensure_environment("transformers")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that reports a GPU of 16 GiB, 6 of them free, and three processes."""
    held = [(os.getpid(), 8 * paths.GIB), (2**22 + 1, 2 * paths.GIB), (1, None)]
    fake: Any = ModuleType("pynvml")
    fake.asked, fake.nvmlInit = [], lambda: None
    fake.nvmlDeviceGetHandleByIndex = fake.asked.append
    fake.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(free=6 * paths.GIB, total=16 * paths.GIB)
    fake.nvmlDeviceGetComputeRunningProcesses = lambda _: [
        SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in held
    ]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_who_holds_gpu_memory_is_named_before_a_start(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = serving.free_card()
    assert found and found.free_gib == 6 and [one.gib for one in found.holders] == [8, 2, None]
    engine.require_gpu("half", 0.3)
    names = (f"this kernel (process {os.getpid()}) holds 8.0 GiB", "a process outside this container", "0.31")
    with refused("serving.gpu_memory_held", *names, share=0.9):
        engine.require_gpu("half", 0.9)
    for visible, asked in (("3,1", 3), ("GPU-8f2c", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert engine.gpu_memory() and nvml.asked[-1] == asked
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert serving.free_card() is None
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: "7.5, 580.1")
    with refused("serving.no_bfloat16"):
        engine.require_gpu("bfloat16", 0.9)


# --- flags and adapters ----------------------------------------------------------------------------------------------


def test_flags_become_words() -> None:
    given = {"dtype": "half", "enforce_eager": True, "seed": None, "enable-prefix-caching": False, "stop": [1, 2],
             "config-format": "hf", "override-generation-config": {"top_p": 0.5}}  # fmt: skip
    assert flags.to_words(flags.normalize(given)) == [
        "--dtype", "half", "--enforce-eager", "--no-enable-prefix-caching", "--stop", "1", "2", "--config-format", "hf",
        "--override-generation-config", '{"top_p": 0.5}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["host", "hos", "port", "--port=6006", "api-key", "api_key", "--api-key=s3cret", "hf-token", "uds", "model",
     "middleware", "config", "root-path", "grpc", "grpc-port", "ssl-certfile", "headless", "lora-modules"],
)  # fmt: skip
def test_what_the_server_decides_is_not_for_flags(name: str) -> None:
    with refused("serving.reserved_flag") as caught:
        Server("owner/name", HERE, flags={name: "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_no_flag_hides_in_a_value() -> None:
    with refused("serving.flag_in_value", name="dtype"):
        Server("owner/name", HERE, flags={"dtype": ["half", "--host", "0.0.0.0"]})


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    paths.write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 12, "bias": "none"} | config)
    return folder


def test_adapters_become_flags_and_names(tmp_path: Path) -> None:
    both = {"tuned": adapter(tmp_path / "a"), "other": adapter(tmp_path / "b", r=40)}
    server = Server("base-model", HERE, flags={"served-model-name": "base"}, adapters=both)
    assert server.names == ["base", "tuned", "other"]
    line = " ".join(server.command())
    assert f"--enable-lora --max-loras 2 --max-lora-rank 64 --lora-modules tuned={both['tuned']} other=" in line
    assert flags.lora_flags(both, "base", "vllm-cpu")["max-loras"] == 3, "see there"
    for name in ("--trust-remote-code", "a=b", "a,b", "base"):
        with refused("serving.adapter_name"):
            flags.lora_flags({name: both["tuned"]}, "base", "vllm")
    with refused("serving.adapters_need_vllm"):
        flags.lora_flags(both, "base", "transformers")
    with refused("serving.not_an_adapter"):
        flags.lora_flags({"tuned": tmp_path}, "base", "vllm")


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]},
     {"trainable_token_indices": [1]}, {"init_lora_weights": "pissa"}, {"rank_pattern": {"q_proj": 4}},
     {"alpha_pattern": {"q_proj": 4}}, {"r": 513}],
)  # fmt: skip
def test_adapters_vllm_cannot_serve_are_refused(tmp_path: Path, config: Any) -> None:
    with refused("serving.adapter_unsupported", "lesson 04"):
        flags.lora_flags({"tuned": adapter(tmp_path / "a", **config)}, "base", "vllm")


# --- ports and keys --------------------------------------------------------------------------------------------------


def test_a_port_that_is_busy_or_impossible_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with refused("serving.port_taken", "PORT to 0", port=port):
                Server("owner/name", HERE, port=port)


def test_every_vllm_server_has_a_key_and_transformers_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(platforms, "detect", lambda: platforms.Platform("autodl", "a test"))
    made = {ports.api_key_for(None, host, 7000, "vllm") for host in ("0.0.0.0", "127.0.0.1", "127.0.0.1")}
    assert len(made) == 3 and all(key and len(key) > 30 for key in made)
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert ports.api_key_for(None, "127.0.0.1", 7000, "vllm") == "theirs"
    assert ports.api_key_for("given", "0.0.0.0", 7000, "vllm") == "given"
    assert ports.api_key_for(None, "127.0.0.1", 7000, "transformers") is None
    for host, port, given in (("0.0.0.0", 7000, None), ("127.0.0.1", 6006, None), ("127.0.0.1", 7000, "key")):
        with refused("serving.no_key_check"):
            ports.api_key_for(given, host, port, "transformers")
    assert serving.preferred_port(platforms.detect(), engine="transformers") == 0


def guard_answers(path: str, method: str = "POST", given: str = "", kind: str = "http") -> list[Any]:
    """What the guard lets through ("passed") or sends."""
    file = Path(serving.__file__).parent / "inside/course_guard.py"
    spec = importlib.util.spec_from_file_location("course_guard", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent: list[Any] = []

    async def app(*_: object) -> None:
        sent.append("passed")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status", message.get("code", "body")))

    headers = [(b"authorization", given.encode())] if given else []
    asyncio.run(module.Guard(app)({"type": kind, "path": path, "method": method, "headers": headers}, None, send))
    return sent


def test_without_the_key_only_signs_of_life_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    for path in ("/v1/completions", "/invocations", "/tokenize", "/health/", "//v1/models"):
        assert guard_answers(path) == guard_answers(path, given="Bearer wrong") == [401, "body"], path
        assert guard_answers(path, given="right") == [401, "body"]
        assert guard_answers(path, given="Bearer right") == ["passed"]
    assert guard_answers("/health", "GET") == guard_answers("/version", "GET") == ["passed"]
    assert guard_answers("/health") == guard_answers("/metrics", "GET") == [401, "body"], "metrics name the model"
    assert guard_answers("/v1/realtime", kind="websocket") == [1008]
    assert guard_answers("", kind="lifespan") == ["passed"]


# --- the log ---------------------------------------------------------------------------------------------------------

USAGE = "usage: api_server.py [-h] [--max-model-len N]\napi_server.py: error: unrecognized arguments: {}\n"
INVALID = """(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, User-specified max_model_len (100000) is greater than 512. [type=value_error, input=A]
(APIServer pid=7)     For further information visit somewhere
"""


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("OSError: [Errno 98] Address already in use", "address_in_use", ["PORT to 0"]),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory", ["free_card"]),
        ("ValueError: Free memory on device (5.1/14.7 GiB) is less than desired", "out_of_memory", []),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0", "no_bfloat16", []),
        ("ValueError: Model architectures ['Foo'] are not supported for now.", "unknown_architecture", []),
        ("ValueError: As of transformers v4.44, default chat template is no longer allowed", "no_chat_template", []),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged_model", []),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "old_driver", []),
        ("api_server.py: error: argument --dtype: invalid choice: 'bf17'", "flag_value", ["bf17"]),
        (USAGE.format("--max-modellen 5"), "unknown_flag", ["--max-model-len"]),
        (USAGE.format("--qqq"), "unknown_flag", ["none is similar"]),
        (USAGE.format("--max_batch_size 8"), "replaced_flag", ["max-num-seqs"]),
        (USAGE.format("--swap-space 4"), "replaced_flag", ["kv-offloading-size"]),
        (INVALID, "max_model_len", ["ModelConfig refuses it", "is greater than 512."]),
        ("ModuleNotFoundError: No module named 'vllm'", "broken_environment", []),
        ("RuntimeError: something nobody has seen", "start_failed", ["nobody has seen"]),
    ],
)
def test_each_way_to_fail_is_explained(tmp_path: Path, text: str, code: str, words: list[str]) -> None:
    (log := tmp_path / "log").write_text(f"start\n{text}\n", encoding="utf-8")
    with refused(f"serving.{code}", *words) as caught:
        raise logs.explain(log, 1)
    assert "input=A" not in str(caught.value)
    assert bool(logs.broken(log)) == (code == "broken_environment")


def test_a_crash_is_named_and_only_imports_are_a_broken_environment(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("loading\n", encoding="utf-8")
    for status, crash in ((137, " (killed)"), (139, " (segmentation fault)"), (1, "")):
        with refused("serving.start_failed", status=status, crash=crash):
            raise logs.explain(log, status)
    for line, broken in (
        ("(APIServer pid=1) ImportError: libcudart.so.13: cannot open shared object file", True),
        ("ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN3c10", True),
        ("ImportError: This modeling file requires einops. Run `pip install einops`", False),
    ):
        log.write_text(f"Traceback\n{line}\n", encoding="utf-8")
        assert bool(logs.broken(log)) == broken, line


def test_what_a_starting_server_is_doing_is_read_from_its_log(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("", encoding="utf-8")
    assert logs.phase(log) == "starting"
    log.write_text(
        "INFO Loading weights took 1 s\nnoise\n(E pid=7) \x1b[32mWARNING\x1b[0m Capturing\n", encoding="utf-8"
    )
    assert logs.phase(log) == "loading the weights"


# --- the process -----------------------------------------------------------------------------------------------------

STUB = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, mode, notes = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen(["VLLM::EngineCore", "-c", deaf], executable=sys.executable)
open(notes, "w").write(str(child.pid))
if mode in ("max_model_len is larger", "No module named 'vllm.engine'"):
    print("(EngineCore pid=7) ERROR 11-15 01:02:03 [core.py:9] ModuleNotFoundError: " + mode, flush=True)
    sys.exit(1)
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
        whole = {"id": "1", "created": 1, "model": "tiny"}
        if self.path == "/v1/completions":
            ids = asked["prompt"]
            ended = "stop" if len(ids) < 3 else "length"
            choice = {"index": 0, "finish_reason": ended, "text": str(sum(ids)), "token_ids": ids[::-1]}
            return self.reply(whole | {"object": "text_completion", "choices": [choice]})
        text = asked["messages"][-1]["content"]
        time.sleep(0.05 if text.endswith("0") else 0)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text.upper()}}
        told = {"prompt_token_ids": [len(text)]} if asked.get("return_token_ids") and mode != "texts" else {}
        choice |= {"token_ids": [ord(letter) for letter in text]} if told else {}
        self.reply(whole | {"object": "chat.completion", "choices": [choice]} | told)
    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


class StubServer(Server):
    """The real class around a small fake server that also has a child deaf to SIGTERM."""

    def __init__(self, folder: Path, mode: str = "healthy", **options: Any) -> None:
        here = serving.ServingEnvironment(Path(sys.executable), "vllm")
        super().__init__("tiny", here, log=folder / "log", **options)
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


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    server = StubServer(tmp_path)
    yield server
    server.stop()


def test_a_server_starts_answers_and_stops_with_its_children(stub: StubServer) -> None:
    with pytest.raises(ZeroDivisionError), stub:
        members = stub.everyone()
        assert stub.healthy() and len(members) == 3 and alive(members) == members
        questions = [[{"role": "user", "content": f"q{number}"}] for number in range(40)]
        answers = serving.ask(stub.client(), "m", questions, 8, at_once=8)
        assert [answer.text for answer in answers] == [f"Q{number}" for number in range(40)], "in the order asked"
        assert answers[3] == Answer([2], [ord("q"), ord("3")], "Q3")
        _ = 1 / 0
    assert alive(members) == [] and not stub.running
    stub.stop()
    time.sleep(1.2)
    assert stub.failure is None, "stopping is no failure"
    with refused("serving.not_running"):
        stub.require()


def test_a_server_that_fails_or_is_slow_is_stopped_and_explained(stub: StubServer) -> None:
    for mode, code in (("max_model_len is larger", "max_model_len"), ("slow", "start_timeout")):
        stub.mode = mode
        with refused(f"serving.{code}"):
            stub.start().wait(1.5)
        assert not stub.running and alive([int(stub.notes.read_text())]) == []


def test_a_broken_environment_is_rebuilt(stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def rebuild(_recipe: object, _folder: Path, reason: str) -> None:
        reasons.append(reason)
        stub.mode = after

    monkeypatch.setattr(environments, "rebuild", rebuild)
    stub.mode = after = "No module named 'vllm.engine'"
    with refused("serving.broken_environment"):
        stub.start().wait(20)
    assert reasons == [], "an interpreter of somebody else is not ours to rebuild"
    stub.environment = replace(stub.environment, folder=tmp_path)
    with refused("serving.broken_environment"):
        stub.start().wait(20)
    assert reasons == ["ModuleNotFoundError: No module named 'vllm.engine'"]
    after = "healthy"
    stub.start().wait(20)
    assert stub.healthy() and len(reasons) == 2


def test_a_failing_cell_stops_the_server(stub: StubServer) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        stub.start().wait(20)
        shell.run_cell("1 + 1")
        assert stub.healthy()
        shell.run_cell("1 / 0")
        assert stub.process is None
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
    assert owner.stdout
    line = next(line for line in iter(owner.stdout.readline, "") if line.startswith("PIDS"))
    return owner, [int(word) for word in line.split()[1:]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_server_dies_with_its_kernel(tmp_path: Path, number: signal.Signals | None) -> None:
    owner, members = started_elsewhere(tmp_path, "time.sleep(60)" if number else "")
    if number:
        assert len(alive(members)) == 3
        owner.send_signal(number)
    owner.wait(20)
    until(lambda: alive(members) == [])


def test_a_killed_supervisor_takes_the_server_along(stub: StubServer) -> None:
    stub.start().wait(20)
    supervisor, api, _ = stub.everyone()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: alive([api]) == [] or not sys.platform.startswith("linux"))


def test_a_killed_engine_is_noticed_and_reported_to_whoever_asks(stub: StubServer) -> None:
    stub.start().wait(20)
    members = stub.everyone()
    os.kill(members[-1], signal.SIGKILL)
    until(lambda: stub.failure is not None, 10)
    until(lambda: alive(members) == [])
    for ask in (stub.require, lambda: serving.ask(stub.client(max_retries=0), "tiny", QUESTION * 3, 8)):
        with refused("serving.died", f"its engine (process {members[-1]})"):
            ask()
    stub.start().wait(20)
    stub.require()
    os.kill(stub.everyone()[1], signal.SIGKILL)
    with refused("serving.died", "exit status 137"):
        serving.ask(stub.client(max_retries=0), "tiny", QUESTION, 8)


def test_the_key_travels_by_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbutils.serving.server.GRACE_SECONDS", 0.5)
    with StubServer(model_folder(tmp_path), api_key="s3cret") as server:
        serving.leave_note(server, tmp_path)
        members = [psutil.Process(pid) for pid in server.everyone()]
        assert members[1].environ()["VLLM_API_KEY"] == "s3cret" and server.client().api_key == "s3cret"
        seen = [" ".join(member.cmdline()) for member in members] + [server.log.read_text(), server.shell_line()]
        seen += [repr(server), " ".join(Server.command(server)), (tmp_path / "server.json").read_text()]
        assert not [text for text in seen if "s3cret" in text]
        assert "course_guard.Guard" in Server.command(server) and 'VLLM_API_KEY="$VLLM' in server.shell_line()


@pytest.mark.parametrize(("name", "word"), [("vllm", "vllm.entrypoints.openai.api_server"), ("transformers", "serve")])
def test_the_line_shown_is_the_line_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "merged").mkdir()
    server = Server("merged", replace(HERE, engine=name), flags={"served-model-name": "course"})
    assert word in server.command() and str(server.port) in server.command() and server.model_name == "course"
    assert str(tmp_path / "merged") in server.shell_line() and "HF_HUB_OFFLINE=1" in server.shell_line()
    online = Server("owner/name", HERE)
    assert "HF_HUB_OFFLINE" not in online.variables() and online.model_name == "owner/name"


def test_what_belongs_to_the_kernel_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "MPLBACKEND", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    seen = replace(HERE, env_vars={"A": "1"}).variables({"B": "2"})
    assert not {"PYTHONPATH", "MPLBACKEND", "WORLD_SIZE"} & set(seen) and (seen["A"], seen["B"]) == ("1", "2")


def test_clients_of_this_machine_go_past_a_proxy(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    stub.mode = "texts"
    stub.start().wait(20)
    assert os.environ["NO_PROXY"].split(",")[:2] == ["example.org", "127.0.0.1"]
    with refused("serving.no_token_ids"):
        serving.ask(stub.client(max_retries=0), "m", QUESTION, 8)
    assert serving.ask(stub.client(max_retries=0), "m", QUESTION, 8, token_ids=False) == [Answer([], [], "Q")]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "identical", "words", "allowed"),
    [
        (Answer([1], [5, 6], "bc"), 2, "2 of 2 prompts identical", ("float16", "float32")),
        (Answer([1], [5, 7], "bd"), 1, "answer 1 differs at token 1", ("float16",)),
        (Answer([1, 9], [5, 6], "bc"), 2, "prompt 1 differs at token 1", ()),
        (Answer([], [], "bd"), 1, "answer 1 differs at character 1", ("float16",)),
    ],
)
def test_parity_names_the_first_difference(served: Answer, identical: int, words: str, allowed: tuple[str]) -> None:
    local = [Answer([1], [3, 4], "a"), Answer([1], [5, 6], "bc")]
    found = serving.compare([local[0], served], local)
    assert (found.identical, found.full) == (identical, len(allowed) == 2) and words in str(found)
    for dtype in ("float16", "float32"):
        with nullcontext() if dtype in allowed else refused("serving.no_parity"):
            serving.require_parity(found, dtype)
    with refused("serving.answer_count", server=0, local=2):
        serving.compare([], local)


@pytest.mark.parametrize(
    ("status", "code"), [(401, "wrong_key"), (404, "unknown_model"), (400, "request_refused"), (None, "no_answer")]
)
def test_a_request_that_fails_is_explained(status: int | None, code: str) -> None:
    error = Exception("no")
    error.status_code = status  # type: ignore[attr-defined]
    assert client.request_failed(error, "http://127.0.0.1:1/v1").code == f"serving.{code}"


# --- servers that are up already -------------------------------------------------------------------------------------


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
    server.model, server.flags = str(folder), {"served-model-name": "tiny"}
    server.start().wait(20)
    serving.leave_note(server, tmp_path)
    yield server
    server.stop()


def test_a_running_server_answers_prompts_given_as_tokens(up: StubServer, tmp_path: Path) -> None:
    found = serving.running(tmp_path, tmp_path / "merged")
    assert found and up.api_key and state.own_key(found) == up.api_key
    answers = dict(found.answers({5: [1, 2], 2: [4, 5, 6]}, max_tokens=8))
    assert answers == {5: Answer([1, 2], [2, 1], "3", True), 2: Answer([4, 5, 6], [6, 5, 4], "15", False)}
    with socket.create_server(("127.0.0.1", 0)) as listening:  # of a process without that key
        assert state.own_key(replace(found, url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1")) is None
    assert state.own_key(replace(found, pid=os.getppid())) is None
    up.stop()
    assert serving.running(tmp_path, tmp_path / "merged") is None
    with refused("serving.lost_server"):
        list(found.answers({0: [1]}, 8))


def test_a_note_proves_nothing(up: StubServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert serving.running(tmp_path, model_folder(tmp_path / "other")) is None
    assert serving.running(tmp_path / "other", tmp_path / "merged") is None
    noted = json.loads((tmp_path / "server.json").read_text(encoding="utf-8"))
    remote = [{"url": url} for url in ("http://10.0.0.5:80/v1", "http://127.0.0.1.evil.example/v1", "file:///etc/x")]
    changes = [{"model_name": "course"}, {"engine": "transformers"}, {"engine": None}, {"x": 1}, *remote]
    for change in [*changes, {"url": "http://127.0.0.1:9/v1"}]:
        paths.write_json(tmp_path / "server.json", noted | change)
        assert serving.running(tmp_path, tmp_path / "merged") is None, change
    paths.write_json(tmp_path / "server.json", noted)
    assert serving.running(tmp_path, tmp_path / "merged")
    with paths.whole_folder(tmp_path / "merged", {"adapter": 2}):
        pass
    assert serving.running(tmp_path, tmp_path / "merged") is None, "merged again since"


OK = b"HTTP/1.1 200 OK\r\n"
LISTED = b'{"data": [{"id": "tiny", "root": "%s"}]}'


@pytest.mark.parametrize(
    "said",
    [OK + b"\r\n[]", OK + b'\r\n{"data":null}', OK + b'\r\n{"data":["x"]}', b"SSH-2.0-OpenSSH_9.6\r\n", b"",
     OK + b"Content-Length: 999\r\n\r\n{", OK + b"\r\n\xff\xfe{", OK + b"\r\n" + LISTED],
)  # fmt: skip
def test_whatever_else_listens_on_the_noted_port_gets_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    folder, heard = model_folder(tmp_path), list[bytes]()

    def answer_once(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            heard.append(connection.recv(65536))
            connection.sendall(said.replace(b"%s", str(folder).encode()))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        note = Running(url, "tiny", str(folder), paths.stamp(folder), 1, "vllm-cpu")
        paths.write_json(tmp_path / "server.json", asdict(note))
        thread = threading.Thread(target=answer_once, args=(listening,))
        thread.start()
        found = serving.running(tmp_path, folder)
        thread.join()
    assert bool(found) == (LISTED in said), "a server without a key that has the model may be asked"
    assert len(heard) == 1 and b"s3cret" not in heard[0]


def test_a_server_left_by_another_kernel_is_found_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, members = started_elsewhere(tmp_path, "time.sleep(60)")
    try:
        found = state.stale(tmp_path)
        assert found and (found.pid, found.owner, found.owner_alive) == (members[0], owner.pid, True)
        assert state.stale(tmp_path / "elsewhere") is None
        with refused("serving.other_kernel", "STOP_OTHERS", f"process {owner.pid}", port=found.port):
            serving.make_way(tmp_path)
        assert alive(members) == members
        with monkeypatch.context() as patch:
            patch.setattr(processes, "end", lambda *_: None)
            with refused("serving.cannot_stop"):
                serving.make_way(tmp_path, stop_others=True)
        serving.make_way(tmp_path, stop_others=True)
        assert alive(members) == [] and state.stale(tmp_path) is None
    finally:
        owner.kill()
        owner.wait()


def test_a_note_leads_to_a_server_of_this_kernel_which_may_stop_it(up: StubServer, tmp_path: Path) -> None:
    other = tmp_path / "other-run"
    other.mkdir()
    shutil.copy(tmp_path / "server.json", other)
    serving.make_way(other)
    assert state.stale(other) is None and up.process is None
    time.sleep(1.2)
    assert up.failure is None, "it was meant"


# --- a real vLLM -----------------------------------------------------------------------------------------------------

KEY, ANSWER_TOKENS, ASKED = "k3y-of-the-tests", 10, 200
SIZE = {"max-model-len": 512, "max-num-seqs": 16}
FLAGS = {"served-model-name": "base", "dtype": "float32", "enforce-eager": True} | SIZE
STOCK = {"type": "function", "function": {"name": "stock", "description": "How many are left", "parameters": {}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "stock", "arguments": {"水果": 3}}}]}
WITH_TOOLS = {"tools": [STOCK], "messages": [
    {"role": "user", "content": "还有三箱苹果吗？"}, CALLED, {"role": "tool", "name": "stock", "content": "3"},
    {"role": "assistant", "content": "还有。"},
]}  # fmt: skip


class Case:
    """A model folder with a chat template that shows tools, an adapter, and plain transformers beside them."""

    def __init__(self, folder: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.chat_template_utils import qwen2_5_chat_template

        self.run, self.merged, self.server = folder, folder / "merged", None
        with paths.whole_folder(self.merged, {}) as partial:
            shutil.copytree(paths.TINY_MODEL, partial, dirs_exist_ok=True)
            (partial / "chat_template.jinja").write_text(qwen2_5_chat_template, encoding="utf-8")
        self.tokenizer = AutoTokenizer.from_pretrained(self.merged)
        model = AutoModelForCausalLM.from_pretrained(self.merged, dtype="float32").eval()
        config = LoraConfig(r=12, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(0)
        self.model = get_peft_model(model, config).eval()
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)  # it says something else than its base
        self.model.save_pretrained(folder / "adapter")
        lines = (paths.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ASKED]
        texts = [json.loads(line)["messages"][-2]["content"] for line in lines]
        self.prompts = [self.tokenizer(f"{at}: {text}")["input_ids"][:200] for at, text in enumerate(texts)]
        self.names, self.expected = ["base", "tuned"] * (ASKED // 2), list[list[int]]()

    def greedy(self, prompt: list[int], name: str) -> list[int]:
        """One prompt at a time: no padding that could blur the comparison."""
        import torch

        with torch.inference_mode(), self.model.disable_adapter() if name == "base" else nullcontext():
            made = self.model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
        return list(made[0, len(prompt) :].tolist())

    def request(self, path: str, body: bytes | None, key: str | None = KEY) -> tuple[int, bytes]:
        """One plain HTTP request: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def answer(self, name: str, at: int) -> list[int]:
        status, body = self.request("/v1/completions", completion(name, self.prompts[at]))
        assert status == 200, body
        return list(json.loads(body)["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        text = self.request("/metrics", None)[1].decode()
        return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def completion(name: str, prompt: Any, **more: Any) -> bytes:
    asked = {"model": name, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
    return json.dumps(asked | more).encode()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One vLLM for all tests of the session; what it must answer is computed while it starts."""
    case: Any = Case(tmp_path_factory.mktemp("vllm"))
    tuned = {"tuned": case.run / "adapter"}
    case.server = Server(case.merged, "vllm-cpu", flags=FLAGS, adapters=tuned, api_key=KEY, log=case.run / "serve.log")
    try:
        case.server.start()
        case.expected = [case.greedy(prompt, name) for name, prompt in zip(case.names, case.prompts, strict=True)]
        case.server.wait()
        yield case
    finally:
        case.server.stop()


@pytest.mark.serve
def test_two_hundred_at_once_and_none_is_lost_or_wrong(vllm: Any) -> None:
    """Base and adapter share the steps: vLLM 0.32 mixed them up on a CPU (see lora_flags)."""
    with ThreadPoolExecutor(max_workers=ASKED) as pool:
        assert list(pool.map(vllm.answer, vllm.names, range(ASKED))) == vllm.expected
    confused = [at for at in range(10) if vllm.answer(vllm.names[at + 1], at) == vllm.expected[at]]
    assert len(confused) < 5, "the adapter says something else than the base"
    assert {one.id for one in vllm.server.client().models.list()} == set(vllm.server.names) == {"base", "tuned"}
    with refused("serving.unknown_model"):
        serving.ask(vllm.server.client(), "nobody", QUESTION, 4)


@pytest.mark.serve
@pytest.mark.parametrize("name", ["vllm-cpu", "transformers"])
def test_a_real_server_says_what_generate_says(vllm: Any, name: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (paths.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").split("\n")[:11]]
    rows.append(WITH_TOOLS if name == "vllm-cpu" else rows[0])
    exam = evaluation.Exam(
        tmp_path, vllm.tokenizer, rows, Evaluation(batch_size=4, max_new_tokens=32, rows=0), "float32"
    )
    by_token, own = name == "vllm-cpu", {"dtype": "float32", "device": "cpu"}
    with nullcontext(vllm.server) if by_token else Server(vllm.merged, name, flags=own) as server:
        asked = {"tools": exam.tools, "token_ids": by_token}
        served = serving.ask(server.client(), server.model_name, exam.questions, 32, **asked)
        serving.leave_note(server, tmp_path)
        up = serving.running(tmp_path, vllm.merged)
        later = list(dict(up.answers(dict(enumerate(exam.prompts)), 32)).values()) if up else []
    with vllm.model.disable_adapter():
        local = exam.generate(vllm.model)
    parity = serving.compare(served, local)
    assert parity.full and parity.identical == 12, str(parity)
    assert not by_token or "How many are left" in vllm.tokenizer.decode(served[-1].prompt_ids)
    assert [one.stopped for one in served] == [one.stopped for one in local]
    assert later == (local if by_token else [])


@pytest.mark.serve
def test_clients_that_hang_up_leak_no_slot(vllm: Any) -> None:
    before = vllm.metric("generation_tokens_total")
    body = completion("base", vllm.prompts[0], max_tokens=300, min_tokens=300, ignore_eos=True, stream=True)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connections = [http.client.HTTPConnection("127.0.0.1", vllm.server.port, timeout=60) for _ in range(24)]
    for connection in connections:
        connection.request("POST", "/v1/completions", body, headers)
    until(lambda: vllm.metric("num_requests_running") > 0)
    for connection in connections:
        connection.close()
    until(lambda: vllm.metric("num_requests_running") + vllm.metric("num_requests_waiting") == 0)
    assert vllm.metric("generation_tokens_total") - before < 24 * 300, "nobody wanted them any more"
    assert vllm.answer("base", 0) == vllm.expected[0]


@pytest.mark.serve
def test_bad_and_unauthorized_requests_get_a_4xx_and_the_server_lives(vllm: Any) -> None:
    bad = [b"{", b'{"model": "\xff\xfe"}', b"", b"[1, 2]", completion("nobody", [5]), completion("base", [5] * 600)]
    bad += [completion("base", [5] * 2_000_000), completion("base", [10**9]), completion("base", [-5])]
    bad += [completion("base", [5], **more) for more in ({"max_tokens": 10**9}, {"max_tokens": -1}, {"n": 10**9})]
    for body in [*bad, completion("base", [5], temperature="hot"), None]:
        assert 400 <= vllm.request("/v1/completions", body)[0] < 500, body
    chat = b'{"model": "base", "messages": [{"role": 3, "content": {}}]}'
    assert 400 <= vllm.request("/v1/chat/completions", chat)[0] < 500
    paths_of_vllm = ["/v1/completions", "/v1/models", "/invocations", "/tokenize", "/inference/v1/generate"]
    for key in (None, "", "wrong", KEY[:-1], KEY + "x"):
        for path in paths_of_vllm:
            assert vllm.request(path, completion("base", [5]), key)[0] == vllm.request(path, None, key)[0] == 401
    assert vllm.request("/health", None, None)[0] == 200 and vllm.answer("base", 0) == vllm.expected[0]
    family = psutil.Process(vllm.server.process.pid).children(recursive=True)
    seen = [vllm.server.log.read_text(encoding="utf-8", errors="replace"), *(" ".join(one.cmdline()) for one in family)]
    assert len(seen) > 1 and not any(KEY in text for text in seen), "the key is on no command line and in no log"


@pytest.mark.long
@pytest.mark.serve
def test_a_flag_vllm_does_not_have_is_named_with_its_nearest(tmp_path: Path) -> None:
    given = FLAGS | {"max-modellen": 5}
    server = Server(paths.TINY_MODEL, "vllm-cpu", flags=given, log=tmp_path / "log")
    with refused("serving.unknown_flag", "--max-model-len", flag="--max-modellen"):
        server.start().wait()
    known = server.log.read_text(encoding="utf-8")
    assert all(f"--{name}" in known for name in ("kv-offloading-size", "max-num-seqs", "max-num-batched-tokens"))


@pytest.mark.long
@pytest.mark.serve
def test_a_real_engine_that_is_killed_is_noticed_within_ten_seconds(tmp_path: Path) -> None:
    with Server(paths.TINY_MODEL, "vllm-cpu", flags=FLAGS, log=tmp_path / "log") as server:
        assert server.process
        leader, [pid, *_] = server.process.pid, engine_processes(server.process.pid)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with refused("serving.died", f"its engine (process {pid})"):
            serving.ask(server.client(), "base", QUESTION * 8, 4)
        assert time.monotonic() - killed < 10
        until(lambda: processes.members(leader) == [])


@pytest.mark.long
@pytest.mark.serve
def test_vllm_and_its_engine_die_with_a_killed_kernel(tmp_path: Path) -> None:
    code = f"""import time, psutil
from nbutils import paths, serving
server = serving.Server(paths.TINY_MODEL, "vllm-cpu", flags={FLAGS!r}, log=paths.Path({str(tmp_path / "log")!r}))
server.start().wait(300)
family = psutil.Process(server.process.pid).children(recursive=True)
print("PIDS", server.process.pid, *(member.pid for member in family), flush=True)
time.sleep(60)"""
    env = os.environ | {"PYTHONPATH": str(paths.PACKAGE.parent)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout
    line = next(line for line in iter(owner.stdout.readline, "") if line.startswith("PIDS"))
    members = [int(word) for word in line.split()[1:]]
    assert len(members) >= 3 and alive(members) == members
    owner.kill()
    owner.wait()
    until(lambda: alive(members) == [], 30)
