"""The serving benchmark: its numbers against a server whose behaviour is known, its file, its words and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from click.testing import CliRunner

from nbutils import bench, cli, paths
from nbutils.bench import alone, asking, limits, load, numbers, rivals, silence, watching
from nbutils.errors import CourseError

FIRST, EACH = 0.05, 0.01  # seconds the fake engine takes until its first token, and for each one after it
KEY = "k-123"


class Engine:
    """A server that streams as vLLM does, at a known pace; `fault` makes it fail in one way."""

    def __init__(self) -> None:
        self.fault, self.running, self.most, self.bodies = "", 0, 0, list[dict[str, Any]]()
        self.vllm, self.url, self.turn = True, "", asyncio.Lock()
        self.listing: Any = {"data": [{"id": "tuned"}, {"id": "base"}]}

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"key": request.headers.get("Authorization", "")})
        late = self.fault == "late refusal" and body["max_tokens"] == 4
        if self.fault == "refuses" or late:
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
            f'vllm:num_requests_running{{engine="0"}} {float(self.running)}',
            'vllm:num_requests_waiting{engine="0"} 3.0', 'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            f"vllm:num_preemptions_total {len(self.bodies)}",
        ]  # fmt: skip
        return web.Response(text="\n".join(["# HELP x", *lines, ""]) if self.vllm else "nothing")

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
        routes = [("POST", "/v1/completions", made.completions), ("GET", "/metrics", made.metrics)]
        for method, place, answer in [*routes, ("GET", "/v1/models", made.models)]:
            app.router.add_route(method, place, answer)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server
        made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[attr-defined]
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(5)
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def prompts(count: int) -> list[bench.Prompt]:
    return bench.make_prompts(None, 16, count)


def test_the_numbers_are_those_of_the_server(engine: Engine) -> None:
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(16), 20, 8)
    whole = FIRST + 19 * EACH
    assert (level.errors, level.requests, engine.most) == (0, 16, 8)
    assert level.ttft_ms and level.tpot_ms and level.latency_ms
    assert FIRST * 1000 <= level.ttft_ms["p50"] < FIRST * 1000 + 60
    assert EACH * 1000 <= level.tpot_ms["p50"] < EACH * 2000
    assert whole * 1000 <= level.latency_ms["p50"] <= level.latency_ms["p90"]
    assert level.tokens_per_second == pytest.approx(16 * 20 / level.seconds, rel=0.01)
    assert 2 * whole <= level.seconds < 6 * whole  # two rounds of eight, not sixteen one by one


def test_a_request_asks_for_exactly_so_many_tokens_with_the_key_in_its_header(engine: Engine) -> None:
    target = bench.Target(engine.url, "tuned", api_key=KEY)
    bench.drive(target, "vllm", prompts(1), 3, 1)
    body = engine.bodies[0]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (3, 3, True, 0.0)
    assert body["prompt"] == prompts(1)[0].ids and body["key"] == f"Bearer {KEY}"
    assert KEY not in repr(target)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("refuses", "HTTP 400"), ("breaks", "engine died"), ("short", "4 tokens told, 5"), ("hangs up", "Error"),
    ],
)  # fmt: skip
def test_what_is_no_whole_answer_is_an_error_and_in_no_number(engine: Engine, fault: str, told: str) -> None:
    engine.fault = fault
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(3), 5, 3)
    assert level.errors == 3 and told in level.first_error
    assert level.tokens_per_second == 0 and level.ttft_ms is None and "3 ERRORS" in str(level)


def test_a_server_that_is_gone_is_an_error_of_each_request() -> None:
    level = bench.drive(bench.Target("http://127.0.0.1:9/v1", "x"), "vllm", prompts(2), 5, 2)
    assert level.errors == 2 and "ClientConnector" in level.first_error


def test_queue_and_cache_are_read_while_it_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "card_use", lambda: (90.0, 12.5))
    monkeypatch.setattr(watching.Watcher.__init__, "__defaults__", (0.02,))
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(4), 20, 4)
    assert level.during["running_max"] == 4 and level.during["waiting_max"] == 3
    assert level.during["kv_cache_percent_max"] == 25 and level.during["preemptions"] == 4
    assert level.during["gpu_percent_mean"] == 90 and level.during["gpu_gib_max"] == 12.5


def test_metrics_of_several_engines_are_summed_and_old_names_are_known() -> None:
    page = 'vllm:num_requests_running{e="0"} 2.0\nvllm:num_requests_running{e="1"} 3.0\nvllm:gpu_cache_usage_perc 0.5\n'
    assert watching.read_metrics(page + 'vllm:gpu_cache_usage_perc{e="1"} 0.4\nother 1\n') == {
        "vllm:num_requests_running": 5.0, "vllm:gpu_cache_usage_perc": 0.5,
    }  # fmt: skip


def test_it_runs_where_a_loop_runs_already(engine: Engine) -> None:
    async def cell() -> bench.Level:
        return bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(1), 2, 1)

    assert asyncio.run(cell()).errors == 0


def test_a_running_server_is_found_with_its_kind_and_names(engine: Engine) -> None:
    found = bench.find_target(engine.url.removesuffix("/v1"))
    assert (found.url, found.name, found.vllm) == (engine.url, "tuned", True)
    assert bench.find_target(engine.url, "base").name == "base"
    engine.vllm = False
    assert not bench.find_target(engine.url, "any").vllm


def test_an_address_without_a_server_and_a_name_it_does_not_serve_are_told(engine: Engine) -> None:
    with pytest.raises(CourseError, match="did not answer like a server"):
        bench.find_target("http://127.0.0.1:9")
    with pytest.raises(CourseError, match="serves tuned, base, and other was asked for"):
        bench.find_target(engine.url, "other")


def test_transformers_gets_the_same_prompt_as_text_and_no_stop_token() -> None:
    target = bench.Target("http://x/v1", "m", vllm=False)
    body = json.loads(target.body(bench.Prompt([5], "word"), 7))
    assert body["prompt"] == "word" and json.loads(body["generation_config"])["eos_token_id"] == -1
    with pytest.raises(CourseError, match="takes prompts as text"):
        target.body(bench.Prompt([5]), 7)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return asking.tokenizer_of(paths.TINY_MODEL)


def test_prompts_have_their_length_read_back_and_differ(tokenizer: Any) -> None:
    found = bench.make_prompts(tokenizer, 48, 12, seed=3)
    assert {len(prompt.ids) for prompt in found} == {48}
    assert all(tokenizer(prompt.text)["input_ids"] == prompt.ids for prompt in found)
    assert len({tuple(prompt.ids[:4]) for prompt in found}) == 12  # no shared beginning, no prefix cache
    assert found == bench.make_prompts(tokenizer, 48, 12, seed=3) != bench.make_prompts(tokenizer, 48, 12, seed=4)


def test_a_slow_server_gets_the_first_prompts_of_the_same_levels(tokenizer: Any) -> None:
    full = bench.Settings((1, 8, 32, 128), 16, 16)
    few = full.few()
    assert few.concurrency == (1, 8) and [few.requests(many) for many in few.concurrency] == [2, 8]
    assert few.prompts(tokenizer, 8) == full.prompts(tokenizer, 8)[:8] and bench.Settings((64,)).few().concurrency == (
        1,
    )


def test_a_tokenizer_that_does_not_read_itself_back_is_told() -> None:
    class Odd:
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 5

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1] * (len(text) + 1)}

        def decode(self, ids: list[int]) -> str:
            return " a" * len(ids)

    with pytest.raises(CourseError, match="no text of exactly 8 tokens"):
        bench.make_prompts(Odd(), 8, 1)


def test_generate_gives_every_answer_its_full_length_and_leaves_the_model_as_it_was(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    own = model.generation_config
    level = bench.generate(model, bench.make_prompts(tokenizer, 8, 6), 12, 4)
    assert (level.engine, level.errors, level.requests, level.ttft_ms) == ("generate", 0, 6, None)
    assert level.tokens_per_second == pytest.approx(72 / level.seconds, rel=0.01) and model.generation_config is own


def test_the_limit_counts_the_weights_a_token_reads(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {"model.embed_tokens.weight": torch.zeros(10, 4), "lm_head.weight": torch.zeros(10, 4)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for tied, read in ((False, 160), (True, 320)):
        paths.write_json(tmp_path / "config.json", {"tie_word_embeddings": tied})
        assert limits.weights_bytes(tmp_path) == (320, read)
    assert limits.limit(tmp_path, 3200.0)["tokens_per_second"] == 10
    assert limits.copy_bandwidth("cpu", 2**22, 3) > 1e6
    with pytest.raises(CourseError, match="no safetensors weights"):
        limits.weights_bytes(tmp_path / "none")


def level(engine: str, many: int, speed: float, tpot: float | None = None) -> bench.Level:
    each = None if tpot is None else {"p50": tpot, "p90": tpot, "p99": tpot}
    return bench.Level(engine, many, 8, 0, "", 1.0, speed, each, each, {"p50": 1.0, "p90": 2.0, "p99": 3.0})


def test_the_board_is_on_disk_after_every_step_and_says_what_it_means(tmp_path: Path, capsys: Any) -> None:
    board = bench.Board(tmp_path / "bench.json", bench.Settings((1, 32)), {"where": "here"})
    board.add([level("generate", 32, 100.0)])
    assert len(json.loads((tmp_path / "bench.json").read_text())["levels"]) == 1
    board.limit("vllm", {"tokens_per_second": 250.0, "tokens_per_second_strict": 500.0})
    board.add([level("vllm", 1, 200.0, 4.0), level("vllm", 32, 1500.0, 5.0)])
    board.leave_out("transformers serve", "the time was up")
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["ratios"] == {"vllm_over_generate_at_32": 15.0} and kept["about"] == {"where": "here"}
    assert kept["percent_of_limit_at_1"]["vllm"] == {"request": 80.0, "decoding": 100.0, "decoding_strict": 50.0}
    board.show()
    told = capsys.readouterr().out
    assert "15.0 times the tokens of plain generate" in told and "80 % of the 250 tokens/s that memory allows" in told
    assert "not measured: transformers serve (the time was up)" in told
    board.limit("vllm", {"tokens_per_second": 4e5, "tokens_per_second_strict": 4e5})
    assert "memory allows" not in "\n".join(board.sentences())  # a tiny model
    board.plot(tmp_path / "plots" / "bench.png")
    assert (tmp_path / "plots" / "bench.png").stat().st_size > 5000


def test_rivals_of_a_model_that_cannot_be_loaded_are_left_out_with_the_reason(tmp_path: Path, capsys: Any) -> None:
    board = bench.Board(tmp_path / "bench.json", bench.Settings((1,), 4, 4), {})
    assert board.invited("generate, transformers-serve") == ["generate", "transformers-serve"] and not board.left_out
    assert board.invited("generate,transformers-serve", "fp8 is for vLLM") == [] and board.invited("", "no") == []
    assert "generate left out: fp8 is for vLLM" in capsys.readouterr().out
    kept = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert list(kept["left_out"]) == ["generate", "transformers-serve"]


def test_a_step_that_fails_and_one_without_time_stop_no_other(tmp_path: Path) -> None:
    board, clock = bench.Board(tmp_path / "bench.json", bench.Settings(), {}), asking.Clock()

    def broken() -> None:
        raise CourseError("no engine.", "one", "make it")

    def dies() -> None:
        raise RuntimeError("out of memory")

    def slow() -> None:
        board.add(clock.taken(iter([level("vllm", 1, 5.0), level("vllm", 8, 6.0)])))
        clock.ends = time.monotonic() - 1
        board.add(clock.taken(iter([level("vllm", 32, 7.0)])))

    asking.run_steps({"broken": broken, "dies": dies, "slow": slow, "late": slow}, board, clock)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert [one["concurrency"] for one in kept["levels"]] == [1, 8]
    assert kept["left_out"]["late"] == "the time was up" and "no engine" in kept["left_out"]["broken"]
    assert "out of memory" in kept["left_out"]["dies"]


def test_spread_is_of_all_requests() -> None:
    found = numbers.spread([one / 1000 for one in range(1, 101)])
    assert found == {"p50": 50.5, "p90": 90.1, "p99": 99.01} and numbers.spread([]) is None


def test_the_command_measures_a_running_server_as_json(engine: Engine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    words = ["bench-serve", "--url", engine.url, "--concurrency", "2,1", "--answer-tokens", "4", "--json"]
    ran = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert [(one["concurrency"], one["errors"]) for one in told["levels"]] == [(1, 0), (2, 0)]
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == told and KEY not in ran.output
    assert {body["key"] for body in engine.bodies} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "neither a model nor a server"), (["--url", "x", "--concurrency", "1,no"], "--concurrency has 'no'"),
        (["--model", ".", "--rivals", "fast"], "rivals are fast"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_are_told(words: list[str], told: str) -> None:
    ran = CliRunner().invoke(cli.app, ["bench-serve", *words])
    assert ran.exit_code == 1 and told in ran.stderr


def test_an_interrupt_ends_the_load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    real = Future.result

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if not self.done():
            time.sleep(0.2)
            raise KeyboardInterrupt
        return real(self, timeout)

    monkeypatch.setattr(Future, "result", interrupted)
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(4), 2000, 4)
    assert time.monotonic() - began < 5  # 2,000 tokens would take 20 s


def test_time_per_token_is_of_the_tokens_after_the_first() -> None:
    found = numbers.summarise("vllm", 1, [bench.Request(1.0, 4.0, 4)], 4.0)
    assert found.ttft_ms == {"p50": 1000.0} and found.tpot_ms == {"p50": 1000.0}  # three tokens in three seconds


def test_an_idle_server_before_and_after_is_in_no_mean() -> None:
    watcher = watching.Watcher(None, "")
    watcher.samples = [{watching.RUNNING: many, watching.WAITING: 9 - many} for many in (0.0, 4.0, 6.0, 0.0)]
    watcher.cards = [(0.0, 90.0), (80.0, 1.0), (100.0, 2.0), (0.0, 90.0)]
    assert watcher.summary() == {
        "running_mean": 5.0, "running_max": 6.0, "waiting_max": 5.0, "gpu_percent_mean": 90.0, "gpu_gib_max": 2.0,
    }  # fmt: skip


def test_the_client_goes_past_any_proxy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(1), 2, 1).errors == 0


def test_percentiles_are_told_only_of_enough_requests() -> None:
    assert numbers.spread([0.001] * 9) == {"p50": 1.0} and set(numbers.spread([0.001] * 99) or ()) == {"p50", "p90"}
    row = bench.Board(None, bench.Settings(), {})
    row.levels = [numbers.summarise("vllm", 1, [bench.Request(0.1, 0.2, 2)] * 10, 1.0)]
    assert row.rows()[0]["answer ms"] == "200 / 200 / –"
    assert bench.Settings().requests(1) >= 10  # p90 has a meaning at every level


def test_generate_gets_the_prompts_the_servers_get(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, seen = bench.Settings((1, 32), 8, 4), dict[int, list[bench.Prompt]]()
    monkeypatch.setattr(rivals, "generate", lambda model, given, tokens, batch: seen.update({batch: given}))
    list(bench.static(None, settings, tokenizer))
    assert [len(seen[batch]) for batch in (1, 32)] == [2, 32]
    assert all(seen[batch] == settings.prompts(tokenizer, batch)[: len(seen[batch])] for batch in (1, 32))


@pytest.mark.parametrize("fault", ["ping", "empty first"])
def test_the_first_token_is_the_first_text(engine: Engine, fault: str) -> None:
    engine.fault = fault
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(1), 3, 1)
    assert level.errors == 0 and level.ttft_ms and level.ttft_ms["p50"] >= 1000 * FIRST


def test_a_first_token_without_a_text_counts(engine: Engine) -> None:
    engine.fault = "no text"  # half a character, or a token the tokenizer does not know
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(1), 3, 1)
    assert level.ttft_ms and level.ttft_ms["p50"] >= 1000 * FIRST and engine.bodies[-1]["return_token_ids"] is True


def test_text_that_comes_in_crumbs_is_seen() -> None:
    seen = (b'{"text": "a', b'"text":"\\"', b'"text":"","token_ids":[7')
    assert all(map(load.FIRST.search, seen))
    nothing = (b'"text":""', b'"text":"', b'"text":null', b": ping", b'"prompt_token_ids":[7]', b'"token_ids":[]')
    assert not any(map(load.FIRST.search, nothing))


def test_a_warm_up_without_one_answer_stops(engine: Engine) -> None:
    engine.fault = "refuses"
    settings = bench.Settings((1, 2), 8, 4)
    with pytest.raises(CourseError, match=r"not one of 2 requests .* was answered: HTTP 400.*too long"):
        next(bench.measure(bench.Target(engine.url, "tuned"), "vllm", settings, None))

    def gone() -> None:
        raise CourseError("its engine is gone.", "one", "start it")

    with pytest.raises(CourseError, match="its engine is gone"):  # a server of ours knows more than its silence tells
        next(bench.measure(bench.Target(engine.url, "tuned", require=gone), "vllm", settings, None))


def test_a_level_of_errors_is_kept_and_stops_the_lesson_and_the_command(engine: Engine, tmp_path: Path) -> None:
    engine.fault = "late refusal"  # after the warm-up
    board = bench.Board(tmp_path / "bench.json", bench.Settings((1, 2), 8, 4), {})
    with pytest.raises(CourseError, match="not one of 10 requests"):
        board.add(bench.measure(bench.Target(engine.url, "tuned"), "vllm", board.settings, None))
    assert [one.errors for one in board.levels] == [10]
    engine.bodies.clear()
    words = ["bench-serve", "--url", engine.url, "--concurrency", "1,2", "--answer-tokens", "4", "--out", str(tmp_path)]
    ran = CliRunner().invoke(cli.app, words)
    assert ran.exit_code == 1 and "vllm was not measured" in ran.stderr and "HTTP 400" in ran.stdout
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert "Traceback" not in ran.output and [one["errors"] for one in kept["levels"]] == [10]


def test_a_rival_that_only_fails_ends_the_command_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise CourseError("no engine.", "one", "make it")

    monkeypatch.setattr(alone, "measure", nothing)
    monkeypatch.setattr(asking.Bench, "vllm", lambda self, name, folder: self.board.add([level(name, 1, 5.0)]))
    monkeypatch.setattr(asking.hardware, "card", lambda: None)
    words = ["bench-serve", "--model", str(paths.TINY_MODEL), "--rivals", "generate"]
    ran = CliRunner().invoke(cli.app, words)
    assert ran.exit_code == 1 and "generate was not measured: no engine." in ran.stderr and "vllm" in ran.stdout


def test_silence_is_told_and_ends_the_level(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(silence, "WORD", 0.3)
    engine.fault = "silent"
    began = time.monotonic()
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(8), 3, 2, silence=0.8)
    assert time.monotonic() - began < 3 and level.errors == 8 and "silent for 1 s" in level.first_error
    assert "the server has been silent for 0 s" in capsys.readouterr().out
    assert load.SILENCE <= 120 and load.WARM_SILENCE <= 300


def test_a_server_that_answers_somebody_is_not_silent(engine: Engine) -> None:
    engine.fault = "one by one"
    level = bench.drive(bench.Target(engine.url, "tuned"), "vllm", prompts(4), 20, 4, silence=0.5)
    assert level.errors == 0 and level.seconds > 0.5


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("401", "set VLLM_API_KEY"), ([1, 2], "serves nothing"), ({"data": None}, "serves nothing"),
        ({"data": [{"x": 1}, 3]}, "serves nothing"), ({"data": 7}, "serves nothing"), ("text", "like a server"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vllm", [True, False])
def test_odd_answers_of_a_server_are_told_in_words(engine: Engine, fault: Any, told: str, vllm: bool) -> None:
    engine.listing, engine.vllm = fault, vllm
    ran = CliRunner().invoke(cli.app, ["bench-serve", "--url", engine.url, "--concurrency", "1"])
    assert ran.exit_code == 1 and told in ran.stderr and "Traceback" not in ran.output


def test_a_server_that_wants_a_key_for_its_answers_only_says_so(engine: Engine) -> None:
    engine.fault = "wants a key"
    with pytest.raises(CourseError, match="set VLLM_API_KEY"):
        next(bench.measure(bench.Target(engine.url, "tuned"), "vllm", bench.Settings((1,)), None))


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no tokenizer"):
        asking.tokenizer_of(tmp_path)


def test_rivals_are_read_and_unknown_ones_refused() -> None:
    assert bench.chosen(" generate,transformers-serve, ") == ["generate", "transformers-serve"]
    assert bench.chosen("") == []
    for text in ("generat", "generate,transformers serve"):
        with pytest.raises(CourseError, match="generate, transformers-serve"):
            bench.chosen(text)
    with pytest.raises(CourseError, match="rivals are fast"):
        bench.Board(None, bench.Settings(), {}).invited("fast", "no room")


def test_generate_ends_with_the_process_that_asked_for_it() -> None:
    code = (
        "from nbutils import bench, paths\n"
        "bench.Bench(paths.TINY_MODEL, bench.Board(None, bench.Settings((1,), 8, 400), {})).generate()"
    )
    asks = subprocess.Popen([sys.executable, "-c", code])
    try:
        workers, deadline = list[psutil.Process](), time.monotonic() + 30
        while not workers and time.monotonic() < deadline:
            time.sleep(0.1)
            workers = psutil.Process(asks.pid).children(recursive=True)
        time.sleep(2)
        workers = psutil.Process(asks.pid).children(recursive=True)
        assert workers
    finally:
        asks.kill()
        asks.wait()
    _, alive = psutil.wait_procs(workers, 10)
    for process in alive:
        process.kill()
    assert not alive


def test_generate_alone_brings_its_levels_back_and_says_why_it_could_not(monkeypatch: Any) -> None:
    found = alone.measure(paths.TINY_MODEL, "float32", bench.Settings((1,), 8, 4))
    assert [(one.concurrency, one.errors) for one in found.levels] == [(1, 0), (32, 0)] and found.bandwidth == 0.0
    monkeypatch.setattr(alone, "CODE", "raise MemoryError('no room')")
    with pytest.raises(CourseError, match=r"plain generate ended with status 1: .*no room"):
        alone.measure(paths.TINY_MODEL, "float32", bench.Settings((1,), 8, 4))
