"""bench: its numbers against a server whose behavior is known, its file, and its errors; compare: runs side by side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner
from support import refused

from nbutils import bench, cli, compare, lessons, paths, profiles, record, training
from nbutils.bench import client, run
from nbutils.bench.client import Request, summarize
from nbutils.config import flat
from nbutils.errors import CourseError

FIRST, EACH = 0.05, 0.01  # seconds the fake engine takes until its first token, and for each one after it
KEY = "k-123"


class Engine:
    """A server that streams as vLLM does, at a known pace; `fault` makes it fail in one way."""

    def __init__(self) -> None:
        self.fault, self.running, self.most, self.bodies = "", 0, 0, list[dict[str, Any]]()
        self.url, self.turn = "", asyncio.Lock()
        self.listing: Any = {"data": [{"id": "tuned", "owned_by": "vllm"}, {"id": "base", "owned_by": "vllm"}]}

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"key": request.headers.get("Authorization", "")})
        if self.fault == "refuses" or (self.fault == "late refusal" and body["max_tokens"] == 4):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.fault == "wants a key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.fault == "silent":
            await asyncio.sleep(30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.turn if self.fault == "one by one" else contextlib.nullcontext():
                return await self.stream(response, body["max_tokens"], request)
        finally:
            self.running -= 1

    async def stream(self, response: web.StreamResponse, tokens: int, request: web.Request) -> web.StreamResponse:
        early = {"ping": b": ping\n\n", "empty first": b'data: {"choices":[{"text":"","index":0}]}\n\n'}
        await response.write(early.get(self.fault, b""))
        said = b'"","token_ids":[7]' if self.fault == "no text" else b'" say \\"error\\": no"'
        for place in range(tokens):
            await asyncio.sleep(EACH if place else FIRST)
            await response.write(b'data: {"choices":[{"text":%b}]}\n\n' % said)
            if self.fault == "breaks" and place == 2:
                await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
            if self.fault == "hangs up" and place == 2:
                assert request.transport
                request.transport.abort()
                return response
        told = tokens - 1 if self.fault == "short" else tokens
        await response.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % told)
        return response

    async def metrics(self, _: web.Request) -> web.Response:
        lines = [
            f'vllm:num_requests_running{{e="0"}} {self.running - 1.0}', 'vllm:num_requests_running{e="1"} 1.0',
            'vllm:num_requests_waiting{engine="0"} 3.0', 'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1"} 0.2', f"vllm:num_preemptions_total {len(self.bodies)}",
        ]  # fmt: skip
        return web.Response(text="\n".join(["# HELP x", *lines, ""]))

    async def models(self, _: web.Request) -> web.Response:
        if self.listing == "text":
            return web.Response(text="welcome")
        return web.json_response(self.listing, status=401 if self.listing == "401" else 200)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One on a free port, in a thread of its own."""
    made, loop, ready, app = Engine(), asyncio.new_event_loop(), threading.Event(), web.Application()
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def serve() -> None:
        app.router.add_post("/v1/completions", made.completions)
        app.router.add_get("/metrics", made.metrics)
        app.router.add_get("/v1/models", made.models)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[union-attr]
        ready.set()

    def work() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(5)
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def drive(engine: Engine, requests: int, tokens: int, concurrency: int, **more: Any) -> bench.Level:
    target = bench.Target(engine.url, "tuned", api_key=KEY)
    assert KEY not in repr(target)
    return bench.drive(target, "vllm", bench.make_prompts(None, 16, requests), tokens, concurrency, **more)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return client.tokenizer_of(paths.TINY_MODEL)


def test_the_numbers_are_those_of_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BEAT", 0.02)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the client goes past it
    level, whole = drive(engine, 16, 20, 8), FIRST + 19 * EACH
    assert (level.errors, level.requests, engine.most) == (0, 16, 8)
    assert level.ttft_ms and level.tpot_ms and level.latency_ms
    assert FIRST * 1000 <= level.ttft_ms["p50"] < FIRST * 1000 + 60
    assert EACH * 1000 <= level.tpot_ms["p50"] < EACH * 2000
    assert whole * 1000 <= level.latency_ms["p50"] <= level.latency_ms["p90"] and "p99" not in level.latency_ms
    assert level.tokens_per_second == pytest.approx(16 * 20 / level.seconds, rel=0.01)
    assert 2 * whole <= level.seconds < 6 * whole  # two rounds of eight, not sixteen one by one
    assert level.during["running_max"] == 8 and level.during["waiting_max"] == 3  # summed over two engines
    assert level.during["kv_cache_percent_max"] == 25 and level.during["preemptions"] == 16
    body = engine.bodies[0]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (20, 20, True, 0.0)
    assert body["prompt"] == bench.make_prompts(None, 16, 1)[0].ids and body["key"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("fault", "told"),
    [("refuses", "HTTP 400"), ("breaks", "engine died"), ("short", "4 tokens told, 5"), ("hangs up", "Error")],
)
def test_what_is_no_whole_answer_is_an_error_and_in_no_number(engine: Engine, fault: str, told: str) -> None:
    engine.fault = fault
    level = drive(engine, 3, 5, 3)
    assert level.errors == 3 and told in level.first_error and level.failed
    assert level.tokens_per_second == 0 and level.ttft_ms is None and "3 ERRORS" in str(level)


@pytest.mark.parametrize("fault", ["ping", "empty first", "no text"])
def test_the_first_token_is_the_first_text_or_a_token_without_one(engine: Engine, fault: str) -> None:
    engine.fault = fault
    level = drive(engine, 1, 3, 1)
    assert level.errors == 0 and level.ttft_ms and 1000 * FIRST <= level.ttft_ms["p50"] < 1000 * FIRST + 60
    assert all(map(client.FIRST_TOKEN.search, (b'{"text": "a', b'"text":"\\"', b'"text":"","token_ids":[7')))
    assert not any(map(client.FIRST_TOKEN.search, (b'"text":""', b'"text":null', b": ping", b'"prompt_token_ids":[7]')))


def test_silence_ends_a_level_but_waiting_in_line_does_not(engine: Engine) -> None:
    engine.fault, began = "silent", time.monotonic()
    level = drive(engine, 8, 3, 2, silence=0.8)
    assert time.monotonic() - began < 4 and level.errors == 8 and "silent" in level.first_error
    engine.fault = "one by one"
    level = drive(engine, 4, 20, 4, silence=0.5)
    assert level.errors == 0 and level.seconds > 0.5


def test_an_interrupt_ends_the_load_and_a_running_loop_does_not_hinder_it(engine: Engine, monkeypatch: Any) -> None:
    from concurrent.futures import Future

    async def cell() -> bench.Level:
        return drive(engine, 1, 2, 1)

    assert asyncio.run(cell()).errors == 0
    real, began = Future.result, time.monotonic()

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if not self.done():
            time.sleep(0.2)
            raise KeyboardInterrupt
        return real(self, timeout)

    monkeypatch.setattr(Future, "result", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        drive(engine, 4, 2000, 4)
    assert time.monotonic() - began < 8  # 2,000 tokens would take 20 s


def test_a_server_without_one_answer_stops_with_the_reason(engine: Engine, tmp_path: Path) -> None:
    def level(fault: str, **more: Any) -> bench.Level:
        engine.fault = fault
        return next(
            bench.measure(bench.Target(engine.url, "tuned", **more), "vllm", bench.Settings((1, 2), 8, 4), None)
        )

    with refused("bench.no_answer", "too long", requests=2):
        level("refuses")
    with refused("bench.wrong_key"):
        level("wants a key")

    def gone() -> None:
        raise CourseError("bench.no_model_or_url")

    with refused("bench.no_model_or_url"):  # a server of ours knows more than its silence tells
        level("refuses", require=gone)
    engine.fault = "late refusal"  # after the warm-up: what was measured is kept
    board = bench.Board(tmp_path / "bench.json", bench.Settings((1, 2), 8, 4), {})
    with refused("bench.no_answer"):
        board.add(bench.measure(bench.Target(engine.url, "tuned"), "vllm", board.settings, None))
    assert [one["errors"] for one in json.loads((tmp_path / "bench.json").read_text())["levels"]] == [10]


def test_a_running_server_is_found_with_its_kind_and_names(engine: Engine) -> None:
    found = bench.find_target(engine.url.removesuffix("/v1"))
    assert (found.url, found.name, found.vllm) == (engine.url, "tuned", True)
    assert bench.find_target(engine.url, "base").name == "base"
    with refused("bench.not_served", name="other", names="tuned, base"):
        bench.find_target(engine.url, "other")
    with refused("bench.no_server"):
        bench.find_target("http://127.0.0.1:9")
    for listing, code in (("401", "wrong_key"), ({"data": None}, "not_served"), ("text", "no_server")):
        engine.listing = listing
        with refused(f"bench.{code}"):
            bench.find_target(engine.url)
    engine.listing = {"data": [{"id": "m", "owned_by": "Qwen"}]}
    target = bench.find_target(engine.url, "any")
    body = json.loads(target.body(bench.Prompt([5], "word"), 7))  # `transformers serve` takes text, no stop token
    assert not target.vllm and body["prompt"] == "word" and json.loads(body["generation_config"])["eos_token_id"] == -1
    with refused("bench.text_prompts_only"):
        target.body(bench.Prompt([5]), 7)


def test_prompts_have_their_length_read_back_and_differ(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    found = bench.make_prompts(tokenizer, 48, 12, seed=3)
    assert {len(prompt.ids) for prompt in found} == {48}
    assert all(tokenizer(prompt.text)["input_ids"] == prompt.ids for prompt in found)
    assert len({tuple(prompt.ids[:4]) for prompt in found}) == 12  # no shared beginning, no prefix cache
    assert found == bench.make_prompts(tokenizer, 48, 12, seed=3) != bench.make_prompts(tokenizer, 48, 12, seed=4)
    full = bench.Settings((1, 8, 32, 128), 16, 16)
    few = full.few()  # a slow server gets the first prompts of the same levels
    assert few.concurrency == (1, 8) and bench.Settings((64,)).few().concurrency == (1,)
    assert [len(few.prompts(None, many)) for many in (1, 8)] == [2, 8] and len(full.prompts(None, 1)) == 10
    assert few.prompts(tokenizer, 8) == full.prompts(tokenizer, 8)[:8]
    with refused("bench.no_tokenizer"):
        client.tokenizer_of(tmp_path)
    monkeypatch.setattr(client, "TRIES", 0)
    with refused("bench.no_prompt", tokens=8):
        bench.make_prompts(tokenizer, 8, 1)


def test_percentiles_are_of_all_requests_and_told_only_of_enough() -> None:
    level = summarize("vllm", 1, [Request(1.0, 4.0, 4)], 4.0)
    assert level.ttft_ms == {"p50": 1000.0} and level.tpot_ms == {"p50": 1000.0}  # three tokens in three seconds
    hundred = summarize("vllm", 1, [Request(one / 1000, 1.0, 1) for one in range(1, 101)], 1.0)
    assert hundred.ttft_ms == {"p50": 50.5, "p90": 90.1, "p99": 99.01} and hundred.tpot_ms is None
    ten = summarize("vllm", 1, [Request(0.1, 0.2, 2)] * 10, 1.0)
    assert run._row(ten)["answer ms"] == "200 / 200 / –"


def test_generate_gets_the_servers_prompts_and_leaves_the_model_as_it_was(tokenizer: Any, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    own, settings, seen = model.generation_config, bench.Settings((1, 32), 8, 4), dict[int, list[bench.Prompt]]()
    level = bench.generate(model, bench.make_prompts(tokenizer, 8, 6), 12, 4)
    assert (level.engine, level.errors, level.requests, level.ttft_ms) == ("generate", 0, 6, None)
    assert level.tokens_per_second == pytest.approx(72 / level.seconds, rel=0.01) and model.generation_config is own
    monkeypatch.setattr(run, "generate", lambda model, given, tokens, batch: seen.update({batch: given}))
    list(bench.static(None, settings, tokenizer))
    assert {batch: len(given) for batch, given in seen.items()} == {1: 2, 32: 32}
    assert all(given == settings.prompts(tokenizer, batch)[: len(given)] for batch, given in seen.items())


def test_the_limit_counts_the_weights_a_token_reads(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    with refused("bench.no_weights"):
        bench.limit(tmp_path, 1.0)
    weights = {"model.embed_tokens.weight": torch.zeros(10, 4), "lm_head.weight": torch.zeros(10, 4)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for tied, strict in ((False, 20.0), (True, 10.0)):
        paths.write_json(tmp_path / "config.json", {"tie_word_embeddings": tied})
        found = bench.limit(tmp_path, 3200.0)
        assert (found["tokens_per_second"], found["tokens_per_second_strict"]) == (10.0, strict)
    assert bench.copy_bandwidth("cpu", 2**22, 3) > 1e6


def a_level(engine: str, many: int, speed: float, tpot: float | None = None) -> bench.Level:
    each = None if tpot is None else {"p50": tpot, "p90": tpot, "p99": tpot}
    return bench.Level(engine, many, 8, 0, "", 1.0, speed, each, each, {"p50": 1.0, "p90": 2.0, "p99": 3.0})


def test_the_board_is_on_disk_after_every_step_and_says_what_it_means(tmp_path: Path, capsys: Any) -> None:
    board = bench.Board(tmp_path / "bench.json", bench.Settings((1, 32)), {"where": "here"})
    board.add([a_level("generate", 32, 100.0)])
    assert len(json.loads((tmp_path / "bench.json").read_text())["levels"]) == 1
    board.limit("vllm", {"tokens_per_second": 250.0, "tokens_per_second_strict": 500.0})
    board.add([a_level("vllm", 1, 200.0, 4.0), a_level("vllm", 32, 1500.0, 5.0)])
    assert board.invited("generate, transformers-serve") == ["generate", "transformers-serve"] and not board.left_out
    assert board.invited("transformers-serve", "fp8 is for vLLM") == [] == board.invited("", "no")
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["ratios"] == {"vllm_over_generate_at_32": 15.0} and kept["about"] == {"where": "here"}
    assert kept["percent_of_limit_at_1"]["vllm"] == {"request": 80.0, "decoding": 100.0, "decoding_strict": 50.0}
    assert kept["left_out"] == {"transformers-serve": "fp8 is for vLLM"} and set(kept) >= {
        "settings",
        "bandwidth_limit",
    }
    board.show()
    said = capsys.readouterr().out
    assert "15.0 times" in said and "80 % of the 250" in said and "transformers-serve (fp8 is for vLLM)" in said
    board.plot(tmp_path / "plots" / "bench.png")
    assert (tmp_path / "plots" / "bench.png").stat().st_size > 5000
    with refused("bench.unknown_rivals", names="fast"):
        board.invited("fast", "no room")


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_the_command_measures_a_running_server_as_json(engine: Engine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    words = ["bench-serve", "--url", engine.url, "--concurrency", "2,1", "--answer-tokens", "4", "--out", str(tmp_path)]
    ran = invoke(*words, "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert [(one["concurrency"], one["errors"]) for one in told["levels"]] == [(1, 0), (2, 0)]
    assert json.loads((tmp_path / "bench.json").read_text()) == told and KEY not in ran.output
    assert {body["key"] for body in engine.bodies} == {f"Bearer {KEY}"} and (tmp_path / "bench.png").exists()
    engine.fault = "late refusal"
    ran = invoke(*words)
    assert ran.exit_code == 1 and "HTTP 400" in ran.output and "Traceback" not in ran.output


def test_a_step_that_fails_stops_no_other_and_ends_the_command_with_an_error(monkeypatch: Any) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run.Bench, "generate", fails)
    monkeypatch.setattr(run.Bench, "vllm", lambda self, name, folder: self.board.add([a_level(name, 1, 5.0)]))
    monkeypatch.setattr(run.hardware, "card", lambda: None)
    ran = invoke("bench-serve", "--model", str(paths.TINY_MODEL), "--rivals", "generate")
    assert ran.exit_code == 1 and "out of memory" in ran.stderr and "vllm" in ran.stdout


def test_plain_generate_is_measured_in_this_process() -> None:
    board = bench.Board(None, bench.Settings((1,), 8, 4), {})
    bench.Bench(paths.TINY_MODEL, board).generate()
    assert [(one.concurrency, one.errors) for one in board.levels] == [(1, 0), (32, 0)]


@pytest.mark.parametrize(
    "words", [[], ["--url", "x", "--concurrency", "1,no"], ["--model", ".", "--rivals", "fast"]], ids=str
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    ran = invoke("bench-serve", *words)
    assert ran.exit_code == 1 and "Allowed:" in ran.stderr and "Traceback" not in ran.output


ESTIMATE = {"mean": 0.912, "low": 0.85, "high": 0.95}
EVALUATION = {
    "verdict": "helped", "scores": {name: {"base": ESTIMATE, "merged": ESTIMATE} for name in compare.PANELS},
}  # fmt: skip


def a_run(home: Path, name: str, steps: int = 200, **settings: Any) -> lessons.RunFolder:
    """A run folder as lessons 03 and 04 leave it."""
    folder = lessons.RunFolder(home / name)
    folder.path.mkdir(parents=True)
    record.begin(folder.facts, {"profile": "tiny", "profile_source": "tiny", "model": "tiny"}, by_auto=False)
    record.update(
        folder.facts, {}, "03_qlora",
        {
            "steps": steps, "planned_steps": steps, "examples": 800, "trained_tokens": 30367, "train_seconds": 1450.3,
            "cost": {"¥": 1.25}, "final_loss": 0.18607, "validation_loss": {"first": 2.0, "best": 0.3, "last": 0.4},
            "best_step": steps // 2, "data_fingerprint": settings.pop("data", "450a6a355ac5"),
            "settings": flat(profiles.load("tiny").model_dump()) | settings,
        },
    )  # fmt: skip
    record.update(folder.facts, {}, "04_merge", {"verdict": "helped", "evaluation": EVALUATION})
    log = [{"step": at, "loss": 9.0 / at, "eval_loss": 9.5 / at, "num_tokens": 5.0} for at in range(5, steps, 5)]
    training.write_history([*log, {"step": 3, "loss": math.nan}], folder.logs / "history.json")
    return folder


def cells(text: str, row: str) -> list[str]:
    """The columns of a row of the table."""
    line = next(line for line in text.splitlines() if line.startswith(row))
    return [cell.strip() for cell in line.removeprefix(row).strip().split("  ") if cell.strip()]


def test_settings_that_differ_and_what_came_of_them_are_shown(home: Path, tmp_path: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", 100, **{"lora.rank": 64, "data": "other"})
    text = invoke("compare", "one", str(home / "two")).output
    assert cells(text, "lora.rank") == ["16", "64"] and cells(text, "data") == ["450a6a355ac5", "other"]
    assert "lora.alpha" not in text and "profile" not in text and "about" not in text
    assert cells(text, "steps") == ["200", "100"] and cells(text, "best step") == ["100", "50"]
    assert cells(text, "merged: exact match") == ["91.2% [85.0%, 95.0%]"] * 2
    assert cells(text, "cost") == ["¥1.25"] * 2 and cells(text, "verdict") == ["helped"] * 2
    whole = json.loads(invoke("compare", "one", "two", "--json", "--out", str(tmp_path / "out")).output)
    assert whole["differing"] == ["data", "lora.rank"] and whole["runs"]["two"]["settings"]["lora.rank"] == 64
    one = whole["runs"]["one"]
    assert one["trained"]["validation_loss"]["best"] == 0.3 and one["scores"]["exact_match"] == ESTIMATE
    assert {name for entry in one["history"] for name in entry} == {"step", "loss", "eval_loss"}
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000


def test_what_a_run_lacks_is_a_dash_and_said(home: Path, capsys: Any) -> None:
    mine, older = a_run(home, "one", **{"lora.rank": 8}), a_run(home, "older")
    facts = json.loads(older.facts.read_text())
    for name in ("settings", "validation_loss", "best_step", "cost"):
        del facts["lessons"]["03_qlora"][name]
    paths.write_json(older.facts, facts)
    (older.logs / "history.json").write_text('[{"loss": 1}, 2]')
    begun = a_run(home, "begun")
    record.begin(begun.facts, {"profile": "tiny"}, by_auto=False)
    paths.write_json(begun.facts, {"profile": "tiny", "lessons": {}})
    text = invoke("compare", "one", "older", "begun").output
    assert cells(text, "validation loss, best") == ["0.3000", "-", "-"] and cells(text, "steps") == ["200", "200", "-"]
    assert cells(text, "lesson 03") == ["finished", "finished, settings not recorded", "has not finished here"]
    assert "lora.rank" not in text, "one run alone differs from nothing"
    assert compare.load(older.path)["history"] == []
    compare.beside(mine, EVALUATION)  # lesson 04: finished runs only
    assert "begun" not in (said := capsys.readouterr().out) and cells(said, "verdict") == ["helped"] * 2
    older.facts.write_text("{")
    compare.beside(mine, EVALUATION)
    assert "only finished run" in capsys.readouterr().out


def test_unknown_runs_and_fewer_than_two_are_refused(home: Path) -> None:
    a_run(home, "one")
    a_run(home, "two")
    with refused("compare.no_run", "two?", name="twoo", known="one, two"):
        compare.of_names(["one", "twoo"])
    for names in (["one"], []):
        with refused("compare.too_few_runs", count=len(names)):
            compare.of_names(names)
        assert invoke("compare", *names).exit_code == 1
