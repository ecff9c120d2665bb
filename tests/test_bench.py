"""bench: its numbers against a server whose behavior is known, its file, and its errors; compare: runs side by side."""

import asyncio
import dataclasses
import json
import math
import os
import runpy
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import test_utils, web
from click.testing import CliRunner
from safetensors.torch import load_file
from support import ESCAPES, ROOT, lesson_facts, python, refused, steers

from nbutils import bench, cli, compare, files, lesson, profiles, record, served_model, serving, tracking
from nbutils.config import flat
from nbutils.evaluation import Answer
from nbutils.serving import ServingEnvironment

FIRST, EACH = 0.05, 0.01  # seconds the fake engine takes until its first token, and for each one after it
KEY = "k-123"


class Engine:
    """A server that streams as vLLM does, at a known pace; `faults` makes requests of 5 tokens fail, in their order."""

    def __init__(self) -> None:
        self.running, self.most, self.bodies, self.url = 0, 0, list[dict[str, Any]](), ""
        self.faults: Iterator[str] = iter(())
        self.listing: Any = {
            "data": [{"id": "tuned", "owned_by": "vllm", "root": str(files.TINY_MODEL)}, {"id": "base"}]
        }

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"key": request.headers.get("Authorization", "")})
        fault = next(self.faults, "") if body["max_tokens"] == 5 else ""
        if fault == "refuses":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            async for piece in self.pieces(body["max_tokens"], request, fault):
                await response.write(piece)
        finally:
            self.running -= 1
        return response

    async def pieces(self, tokens: int, request: web.Request, fault: str) -> AsyncIterator[bytes]:
        for place in range(tokens):
            await asyncio.sleep(EACH if place else FIRST)
            yield b'data: {"choices":[{"index":0,"text":" word"}]}\n\n'
            if fault == "breaks" and place == 2:
                yield b'data: {"error": {"message": "engine died"}}\n\n'
                return
            if fault == "hangs up" and place == 2 and request.transport:
                request.transport.abort()
        told = tokens - 1 if fault == "short" else tokens
        yield b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % told

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(self.listing, status=401 if self.listing == "401" else 200)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One on a free port, in a thread of its own."""
    made, loop, app = Engine(), asyncio.new_event_loop(), web.Application()
    app.add_routes([web.post("/v1/completions", made.completions), web.get("/v1/models", made.models)])
    server, thread = test_utils.TestServer(app), threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = server.start_server(shutdown_timeout=0.1)
    asyncio.run_coroutine_threadsafe(starting, loop).result(5)
    made.url = str(server.make_url("/v1"))
    yield made
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def assert_pace(level: dict[str, Any], requests: int, tokens: int, many: int) -> None:
    """The numbers of a level are those of the server."""
    whole, latency = FIRST + (tokens - 1) * EACH, level["latency_ms"]
    assert (level["errors"], level["requests"], level["concurrency"]) == (0, requests, many)
    assert whole * 1000 <= latency["p50"] <= latency["p90"] and level["seconds"] >= requests / many * whole
    assert level["tokens_per_second"] == pytest.approx(requests * tokens / level["seconds"], rel=0.01)


FAULTS = ("refuses", "breaks", "short", "hangs up")


@pytest.mark.serve
def test_the_command_measures_a_running_server_by_vllm_bench_serve(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the client goes past it
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    words = ["bench-serve", "--url", engine.url, "--prompt-tokens", "16", "--out", str(tmp_path)]
    ran = invoke(*words, "--concurrency", "8", "--answer-tokens", "20", "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    level = told["levels"][0]
    assert_pace(level, 32, 20, 8)
    assert FIRST * 1000 <= level["ttft_ms"]["p50"] < level["latency_ms"]["p50"]
    assert level["tpot_ms"]["p50"] >= EACH * 1000
    assert level["engine"] == "vllm" and engine.most == 8, "eight at a time, not one by one"
    assert json.loads((tmp_path / "bench.json").read_text()) == told and KEY not in ran.output
    assert (tmp_path / "bench.png").exists()
    body = engine.bodies[-1]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["model"]) == (20, True, 0, "tuned")
    assert {body["key"] for body in engine.bodies} == {f"Bearer {KEY}"}


@pytest.mark.long
def test_requests_that_fail_are_counted_and_the_others_kept(engine: Engine, tmp_path: Path) -> None:
    engine.faults = iter(["", *FAULTS, *[""] * 4])  # the first answers the warm-up
    words = ["bench-serve", "--url", engine.url, "--prompt-tokens", "16", "--out", str(tmp_path)]
    ran = invoke(*words, "--concurrency", "1", "--answer-tokens", "5")
    assert "Bad Request" in ran.output and "Traceback" not in ran.output
    [level] = json.loads((tmp_path / "bench.json").read_text())["levels"]
    assert (level["errors"], level["requests"]) == (2, 8), "kept; a short answer counts with the tokens it has"


def result(errors: list[str], lengths: list[int]) -> dict[str, Any]:
    """What `vllm bench serve` saves, as far as it is read."""
    times = {f"p{n}_{metric}_ms": n / 3 for n in (50, 90, 99) for metric in ("ttft", "tpot", "e2el")}
    completed = sum(not error for error in errors)
    return times | {"errors": errors, "output_lens": lengths, "max_concurrency": 2, "duration": 2.0,
                    "output_throughput": sum(lengths) / 2, "completed": completed}  # fmt: skip


def test_requests_without_an_answer_are_counted_and_a_level_without_any_is_refused() -> None:
    level = bench.read_level("vllm", result(["", "", "Traceback\nOSError: gone\n"], [5, 4, 0]))
    assert level.requests == 3 and level.errors == 1 and level.ttft_ms and level.ttft_ms["p50"] == 16.67
    assert level.first_error == "OSError: gone" and level.tokens_per_second == 4.5
    with refused("Not one request was answered: Bad Request"):
        bench.read_level("vllm", result(["Bad Request\n"], [0]))


def of_transformers(engine: Engine) -> serving.Server:
    server = serving.Server(files.TINY_MODEL, ServingEnvironment(Path(sys.executable), "transformers"))
    server.url, server.model_name, server.api_key = engine.url, "tuned", KEY
    return server


def test_transformers_serve_is_measured_by_a_client_of_ours(engine: Engine) -> None:
    board = bench.Benchmark(None, bench.Load((8,), 16, 20, 2), {})
    board.measure(of_transformers(engine), "transformers serve")
    assert_pace(dataclasses.asdict(board.levels[0]), 16, 20, 8)
    body = engine.bodies[-1]
    assert json.loads(body["generation_config"])["eos_token_id"] == -1 and body["key"] == f"Bearer {KEY}"
    assert isinstance(body["prompt"], str) and not {"ignore_eos", "repetition_penalty"} & set(body), "it takes neither"


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_whole_answer_ends_the_measurement(engine: Engine, fault: str) -> None:
    words = {
        "refuses": "too long",
        "breaks": "engine died",
        "short": "4 tokens returned, 5",
        "hangs up": "failed",
    }
    engine.faults = iter(["", fault])
    board = bench.Benchmark(None, bench.Load((2,), 16, 5, 4), {})
    with refused(words[fault]):
        board.measure(of_transformers(engine), "transformers serve")
    assert not board.levels


def test_a_level_is_summarized() -> None:
    level = bench.summarize("generate", 1, [number / 1000 for number in range(1, 101)], tokens=2, seconds=1.0)
    assert level.latency_ms == {"p50": 50.5, "p90": 90.1, "p99": 99.01} and level.tokens_per_second == 200.0
    assert (level.requests, level.errors, level.ttft_ms, level.tpot_ms) == (100, 0, None, None)


def test_a_running_server_is_asked_for_its_names(engine: Engine, monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "bench_serve", lambda *given, engine: asked.append(given[1]) or a_level(engine, 1, 5.0))
    monkeypatch.setattr(bench.serving, "ensure_environment", lambda: ServingEnvironment(Path("python"), "vllm"))
    board = bench.Benchmark(None, bench.Load((1,)), {})
    bench.bench_url(engine.url.removesuffix("/v1"), "", None, board)
    bench.bench_url(engine.url, "base", Path("my"), board)
    assert {flags["base-url"] for flags in asked} == {engine.url.removesuffix("/v1")}
    assert [(flags["model"], flags["tokenizer"]) for flags in asked] == [
        ("tuned", str(files.TINY_MODEL)),
        ("base", "my"),
    ]
    assert board.levels[0].engine == "vllm"


def test_what_vllm_bench_serve_says_when_it_stops_is_shown() -> None:
    without_vllm = ServingEnvironment(Path(sys.executable), "vllm")
    with refused("`vllm bench serve` stopped", "No module named 'vllm'", "--model"):
        bench.bench_serve(without_vllm, {"tokenizer": "."})


def test_what_is_no_such_server_is_refused(engine: Engine) -> None:
    for listing in ("401", {"data": None}, {"data": []}):
        engine.listing = listing
        with refused("did not answer like an OpenAI-compatible server"):
            bench.bench_url(engine.url, "", None, bench.Benchmark(None, bench.Load(), {}))


def test_the_command_line_of_lesson_09_is_the_one_of_the_command() -> None:
    lesson_09 = (ROOT / "notebooks/09_benchmark.py").read_text(encoding="utf-8")
    flags = bench.bench_serve_flags("http://127.0.0.1:1/v1", "m", "t", bench.Load(), 1)
    assert [name for name in flags if f'"{name}":' not in lesson_09] == []


def test_prompts_have_their_length_read_back_and_differ() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    settings = bench.Load((1, 8, 32, 128), 48, 16, 2)
    prompts = settings.prompts(tokenizer, 8)
    assert len(prompts) == 16 and {len(prompt) for prompt in prompts} == {48}
    assert all(tokenizer(tokenizer.decode(prompt))["input_ids"] == prompt for prompt in prompts)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 16  # no shared beginning, no prefix cache
    assert prompts == settings.prompts(tokenizer, 8) != settings.prompts(tokenizer, 32)[:16]
    few = settings.for_slow_engine(8)  # a slow server gets the first prompts of the same levels
    assert few.concurrency == (1, 8) and bench.Load((64,)).for_slow_engine(8).concurrency == (1,)
    assert few.prompts(tokenizer, 8) == prompts[:8]


def a_level(engine: str, many: int, speed: float) -> bench.Level:
    return bench.summarize(engine, many, [1.0] * 8, tokens=100, seconds=800 / speed)


def test_all_is_on_disk_after_every_step_and_the_table_says_what_it_means(tmp_path: Path, capsys: Any) -> None:
    board = bench.Benchmark(tmp_path / "bench.json", bench.Load((1, 32)), {"where": "here"})
    board.add(a_level("generate", 32, 100.0))
    assert len(json.loads((tmp_path / "bench.json").read_text())["levels"]) == 1
    board.add(a_level("vllm", 1, 200.0))
    board.add(a_level("vllm", 32, 1500.0))
    assert board.speeds() == {"generate": {"32": 100.0}, "vllm": {"1": 200.0, "32": 1500.0}}
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept == json.loads(json.dumps(board.as_dict())) and kept["about"] == {"where": "here"}
    board.show()
    shown = capsys.readouterr().out
    assert "1,500" in shown and "p50 / p90 / p99" in shown, "what the three numbers of a cell are"
    board.plot(tmp_path / "plots" / "bench.png")
    assert (tmp_path / "plots" / "bench.png").stat().st_size > 5000
    assert bench.parse_rivals("generate, transformers-serve") == [*bench.RIVALS] and bench.parse_rivals("") == []


def test_the_benchmark_measures_what_memory_allows_one_stream() -> None:
    bandwidth_limit = runpy.run_path(str(ROOT / "benchmarks/serve.py"))["bandwidth_limit"]
    limit = bandwidth_limit(files.TINY_MODEL, "cpu", 2**22)
    tensors = load_file(files.TINY_MODEL / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())  # the embedding is the output layer too
    assert limit["weights_gb"] == size / 1e9 and limit["copy_gb_per_second"] > 1e-3
    assert limit["tokens_per_second"] == pytest.approx(limit["copy_gb_per_second"] * 1e9 / size, abs=0.06)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_a_step_that_fails_stops_no_other_and_ends_the_command_with_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench.Benchmark, "generate", lambda self, folder: 1 / 0)
    monkeypatch.setattr(bench.Benchmark, "vllm", lambda self, folder: self.add(a_level("vllm", 1, 5.0)))
    monkeypatch.setattr(bench.hardware, "gpu", lambda: None)
    ran = invoke("bench-serve", "--model", str(files.TINY_MODEL), "--rivals", " generate ,", "--out", str(tmp_path))
    assert ran.exit_code == 1 and "generate" in ran.stderr and "ZeroDivisionError" in ran.stdout
    assert list(json.loads((tmp_path / "bench.json").read_text())["left_out"]) == ["generate"]


def test_plain_generate_is_measured_in_this_process() -> None:
    board = bench.Benchmark(None, bench.Load((1, 32, 128), 8, 4), {})
    board.run(files.TINY_MODEL, ["generate"])
    levels = [(level.engine, level.concurrency, level.requests, level.errors) for level in board.levels]
    assert levels == [("generate", 1, 2, 0), ("generate", 32, 32, 0)], "not 128: memory"
    batch = board.levels[1]
    assert batch.tokens_per_second == pytest.approx(32 * 4 / batch.seconds, rel=0.05)


@pytest.mark.notebook
@pytest.mark.serve
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rivals", ["generate", pytest.param("generate,transformers-serve", marks=pytest.mark.long)])
def test_lesson_09_measures_all_engines_and_serves_base_and_adapter(
    course_run: Path, tmp_path: Path, rivals: str
) -> None:
    shutil.copytree(course_run, tmp_path / "tiny")
    python(ROOT / "notebooks/09_benchmark.py", "--PROFILE", "tiny", "--RIVALS", rivals, home=tmp_path)
    entry = lesson_facts(tmp_path / "tiny", "09_benchmark")
    assert entry["side_by_side"]["tuned"] == 32 and entry["side_by_side"]["base"] < 16 and entry["parity"]["holds"]
    levels = json.loads((tmp_path / "tiny/bench.json").read_text(encoding="utf-8"))["levels"]
    assert {level["engine"] for level in levels} == {"vllm", *rivals.replace("-", " ").split(",")}
    assert {level["errors"] for level in levels} == {0} and (tmp_path / "tiny/bench.png").exists()


@pytest.mark.notebook
@pytest.mark.serve
def test_a_served_model_is_compared_with_lesson_04(course_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(course_run, tmp_path / "tiny")
    monkeypatch.setenv("NBUTILS_HOME", str(tmp_path))
    started = lesson.begin("05_serve", {"PROFILE": "tiny"})
    server: Any = SimpleNamespace(environment=SimpleNamespace(engine="vllm-cpu"))

    def compared(folder: str = "", change: str = "") -> Any:
        model = served_model.ServedModel(started.run, started.profile, folder, engine="vllm-cpu", rows=5)
        other = {"token_ids": [1], "text": change} if change else {}
        answers = [dataclasses.replace(one, **other) for one in model.stored]
        monkeypatch.setattr(model, "ask", lambda _: answers or [Answer([1], [1], "x")] * 5)
        return model.compare_answers(server)

    assert compared().facts()["identical_answers"] == {"count": 5, "total": 5}
    with refused("Serve the folder lesson 04 wrote, with its own"):
        compared(change="x")
    assert compared(str(files.TINY_MODEL), "x").facts()["identical_answers"]["count"] == 0, "reported only"
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model.gguf").touch()
    with refused("has no config.json"):
        compared(str(tmp_path / "gguf"))
    shutil.rmtree(tmp_path / "tiny/evaluation")
    assert compared().facts()["identical_answers"] == {"count": 0, "total": 0}
    assert served_model.ServedModel(started.run, started.profile, engine="vllm-cpu", rows=5).compare_predictions(
        server
    ).facts() == {"parity": {}}


@pytest.mark.parametrize("words", ["", "--url x --concurrency 1,no", "--model . --rivals fast"])
def test_wrong_words_are_refused(words: str) -> None:
    ran = invoke("bench-serve", *words.split())
    assert ran.exit_code == 1 and "To do:" in ran.stderr and "Traceback" not in ran.output


ESTIMATE = {"mean": 0.912, "low": 0.85, "high": 0.95}
SCORES = {name: {"base": ESTIMATE, "merged": ESTIMATE} for name in compare.PANELS}
EVALUATION = {"verdict": "helped", "scores": SCORES}


def a_run(home: Path, name: str, steps: int = 200, **settings: Any) -> lesson.RunFolder:
    """A run folder as lessons 03 and 04 leave it."""
    folder = lesson.RunFolder(home / name)
    folder.path.mkdir(parents=True)
    record.note_beginning(folder.facts, {"profile": "tiny", "profile_source": "tiny", "model": "tiny"}, by_auto=False)
    trained = {
        "steps": steps, "planned_steps": steps, "examples": 800, "trained_tokens": 30367, "train_seconds": 1450.3,
        "cost": {"¥": 1.25}, "final_loss": 0.18607, "validation_loss": {"first": 2.0, "best": 0.3, "last": 0.4},
        "best_step": steps // 2, "data_fingerprint": settings.pop("data", "450a6a355ac5"),
        "settings": flat(profiles.load("tiny").model_dump()) | settings,
    }  # fmt: skip
    record.update(folder.facts, {}, "03_qlora", trained)
    record.update(folder.facts, {}, "04_merge", {"verdict": "helped", "evaluation": EVALUATION})
    log = [{"step": at, "loss": 9.0 / at, "eval_loss": 9.5 / at, "num_tokens": 5.0} for at in range(5, steps, 5)]
    tracking.write_history([*log, {"step": 3, "loss": math.nan}], folder.logs / "history.json")
    return folder


def cells(text: str, row: str) -> list[str]:
    """The columns of a row of the table."""
    line = next(line for line in text.splitlines() if line.startswith(row))
    return [cell.strip() for cell in line.removeprefix(row).strip().split("  ") if cell.strip()]


def test_settings_that_differ_and_what_came_of_them_are_shown(home: Path, tmp_path: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", 100, **{"lora.r": 64, "data": "other"})
    text = invoke("compare", "one", str(home / "two"), "--out", str(tmp_path / "out")).output
    assert "their losses do not compare" in text
    assert cells(text, "lora.r") == ["16", "64"] and cells(text, "data") == ["450a6a355ac5", "other"]
    assert "lora.lora_alpha" not in text and "profile" not in text and "about" not in text
    assert cells(text, "steps") == ["200", "100"] and cells(text, "best step") == ["100", "50"]
    assert cells(text, "merged: exact match") == ["91.2% [85.0%, 95.0%]"] * 2
    assert cells(text, "cost") == ["¥ 1.25"] * 2 and cells(text, "verdict") == ["helped"] * 2
    whole = json.loads(invoke("compare", "one", "two", "--json", "--out", str(tmp_path / "out")).stdout)
    assert whole["differing"] == ["data", "lora.r"] and whole["runs"]["two"]["settings"]["lora.r"] == 64
    one = whole["runs"]["one"]
    assert (
        one["trained"]["validation_loss"]["best"] == 0.3
        and one["evaluation"]["scores"]["exact_match"]["merged"] == ESTIMATE
    )
    assert {name for entry in one["history"] for name in entry} == {"step", "loss", "eval_loss"}
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000
    with refused("no run 'twoo' in ", "one, two\n"):
        record.find_run("twoo")
    assert invoke("compare").exit_code == 2


WRONG: dict[str, Any] = {  # in facts.json, by dotted name, and in history.json
    "03_qlora.settings": "x", "03_qlora.steps": [1], "03_qlora.planned_steps": "x", "04_merge.evaluation": "x",
    "04_merge.evaluation.scores": [1], "04_merge.evaluation.scores.exact_match": "x",
    "04_merge.evaluation.scores.exact_match.merged": "x", "04_merge.evaluation.verdict": [1],
    "04_merge.evaluation.general": "x", "history": "x", "history.": [1], "history.0.step": "x", "history.0.loss": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_kind_is_told_with_its_file_and_is_no_others_problem(name: str, home: Path) -> None:
    good, bad = a_run(home, "good"), a_run(home, "bad", **{"lora.layers_to_transform": [1, 2]})
    first, *inner = name.split(".")
    file = bad.logs / "history.json" if first == "history" else bad.facts
    whole = files.read_json(file)
    if inner in ([], [""]):
        whole = WRONG[name]
    else:
        at = whole[int(inner.pop(0))] if first == "history" else whole["lessons"][first]
        for key in inner[:-1]:
            at = at.setdefault(key, {})
        at[inner[-1]] = WRONG[name]
    files.write_json(file, whole)
    ran = invoke("compare", "good", "bad")
    assert ran.exit_code == 1 and str(file) in ran.stderr and "Traceback" not in ran.output
    assert list(compare.beside(good, {})) == ["good"], "lesson 03 shows its own run, whatever lies beside it"


def test_lists_among_the_settings_are_shown(home: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", **{"lora.layers_to_transform": [1, 2]})
    assert cells(invoke("compare", "one", "two").output, "lora.layers_to_transform") == ["-", "[1, 2]"]


def test_planted_runs_do_not_steer_the_terminal(home: Path) -> None:
    for name in (f"one{ESCAPES}", f"two{ESCAPES}"):
        run = a_run(home, name, **{"lora.r": name, f"lora.{name}": name})
        facts = record.read_facts(run.facts)
        facts["lessons"]["04_merge"]["evaluation"] = EVALUATION | {"verdict": name}
        files.write_json(run.facts, facts)
    for words in ([], ["--json"]):
        shown = invoke("compare", *(path.name for path in home.iterdir()), *words).output
        assert shown.count("lora.one") and "two" in shown and not steers(shown)


def test_what_a_run_lacks_is_a_dash_and_said(home: Path, capsys: Any) -> None:
    mine, older = a_run(home, "one", **{"lora.r": 8}), a_run(home, "older")
    facts = json.loads(older.facts.read_text())
    for name in ("settings", "validation_loss", "best_step", "cost"):
        del facts["lessons"]["03_qlora"][name]
    files.write_json(older.facts, facts)
    (older.logs / "history.json").unlink()
    begun = a_run(home, "begun")
    record.note_beginning(begun.facts, {"profile": "tiny"}, by_auto=False)
    files.write_json(begun.facts, {"profile": "tiny", "lessons": {}})
    text = invoke("compare", "one", "older", "begun").output
    assert cells(text, "validation loss") == ["first 2, best 0.3, last 0.4", "-", "-"] and cells(text, "steps") == [
        "200",
        "200",
        "-",
    ]
    assert "lora.r" not in text and "do not compare" not in text, "one run alone differs from nothing"
    assert compare.load_run(older).history == []
    compare.beside(mine, {})  # finished runs only
    assert "begun" not in (said := capsys.readouterr().out) and cells(said, "verdict") == ["helped"] * 2
    older.facts.write_text("{")
    compare.beside(mine, {})  # a damaged record of another run
    assert cells(capsys.readouterr().out, "verdict") == ["helped"]
    runs = [a_run(home, name) for name in ("slow", "fast")] + [a_run(home, str(n), data="other") for n in range(4)]
    for age, one in enumerate((*runs, mine)):
        os.utime(one.facts, (age, age))
    assert list(compare.beside(mine, {})) == ["one", "fast", "slow"], "the newest of the same data"


def run_folder(folder: Path, processes: int, losses: dict[int, float], speed: float) -> Path:
    """A run folder as lesson 03 leaves it, as far as a comparison looks at it."""
    folder.mkdir()
    files.write_json(folder / "logs/history.json", [{"step": step, "loss": loss} for step, loss in losses.items()])
    facts = {"processes": processes, "steps": 20, "batch": 2, "tokens_per_second": speed}
    files.write_json(folder / "facts.json", {"lessons": {"03_qlora": facts}})
    return folder


def test_one_process_and_several_are_compared(tmp_path: Path) -> None:
    alone = run_folder(tmp_path / "alone", 1, {10: 4.0, 20: 2.0}, 1000.0)
    compared = compare.speed_up(alone, run_folder(tmp_path / "together", 2, {10: 4.0, 20: 2.01}, 1800.0))
    assert compared.loss_difference == pytest.approx(0.005) and compared.same_work and compared.speedup == 1.8
    for name, losses in {
        "apart": {10: 4.0, 20: 2.1},
        "diverged": {10: 4.0},
        "shorter": {5: 4.0},
    }.items():  # without nan
        assert not compare.speed_up(alone, run_folder(tmp_path / name, 2, losses, 0.0)).same_work
