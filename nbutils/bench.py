"""How fast a model is served: the same load on vLLM, on `transformers serve` and on plain `generate`.

`vllm bench serve` measures vLLM and what takes its requests. It sends `repetition_penalty` and `ignore_eos`, and
`transformers serve` (5.19) answers 422 to a field it does not know, so a small client of ours measures that one. Every
level is kept in the file when it is done, and an engine that fails stops no other.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from nbutils import display, environments, figures, files, hardware, serving
from nbutils.errors import CourseError, parse_choices
from nbutils.language import joined, last_lines, say, tr
from nbutils.masking import describe
from nbutils.platforms import network
from nbutils.record import Facts
from nbutils.serving.server import KEY_VARIABLE, NO_KEY, SERVER_SIDE_CODE

RIVALS = ("generate", "transformers-serve")
BENCH_SERVE = SERVER_SIDE_CODE / "bench_serve.py"
PERCENTILES = (50, 90, 99)
WARM_UP_TOKENS = 8
SPARE_TOKENS = 64  # a prompt of `vllm bench serve` has some tokens more than asked for: random text, tokenized again
ENDLESS = json.dumps({"eos_token_id": -1, "pad_token_id": 0})  # no token is -1: every answer has its full length
WORD = re.compile("[Ġ▁][A-Za-z]+")  # how vocabularies write a space and a word
Percentiles = dict[str, float]  # p50, p90 and p99 in milliseconds


@dataclass(frozen=True)
class Load:
    """Levels of concurrency, tokens of a prompt and of an answer; each slot is filled `rounds` times.

    Example: Load(concurrency=(1, 8), prompt_tokens=32, answer_tokens=16)
    """

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4

    def for_slow_engine(self, most: int) -> Load:
        """The same with levels up to `most`, and each slot filled once."""
        levels = tuple(level for level in self.concurrency if level <= most)
        return replace(self, concurrency=levels or (1,), rounds=1)

    def requests_at(self, concurrency: int) -> int:
        """How many requests an engine gets at this level."""
        return self.rounds * max(2, concurrency)

    def prompts(self, tokenizer: Any, concurrency: int) -> list[list[int]]:
        """The prompts of one level: random words of one token each, so that none gains from a prefix cache."""
        words = sorted(number for token, number in tokenizer.get_vocab().items() if WORD.fullmatch(token))
        rng = random.Random(concurrency)
        return [rng.choices(words, k=self.prompt_tokens) for _ in range(self.requests_at(concurrency))]


@dataclass(frozen=True)
class Level:
    """One engine at one concurrency; times that were not measured are None."""

    engine: str
    concurrency: int
    requests: int
    seconds: float
    tokens_per_second: float
    latency_ms: Percentiles
    errors: int = 0
    first_error: str = ""
    ttft_ms: Percentiles | None = None
    tpot_ms: Percentiles | None = None


def summarize(engine: str, concurrency: int, latencies: Sequence[float], *, tokens: int, seconds: float) -> Level:
    """A level of which all answers have so many tokens, and were complete after these seconds."""
    import numpy as np

    latency_ms = {f"p{share}": round(1000 * float(np.percentile(latencies, share)), 2) for share in PERCENTILES}
    return Level(
        engine,
        concurrency,
        requests=len(latencies),
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens * len(latencies) / seconds, 1),
        latency_ms=latency_ms,
    )


def bench_serve_flags(url: str, model_name: str, tokenizer: str, settings: Load, concurrency: int) -> Facts:
    """The flags of `vllm bench serve` for one level, those that lesson 09 has in view."""
    return {
        "backend": "openai",
        "base-url": url.removesuffix("/v1"),
        "model": model_name,
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": settings.prompt_tokens,
        "random-output-len": settings.answer_tokens,
        "ignore-eos": True,
        "temperature": 0,
        "max-concurrency": concurrency,
        "num-prompts": settings.requests_at(concurrency),
        "num-warmups": concurrency,
        "percentile-metrics": "ttft,tpot,e2el",
        "metric-percentiles": "50,90,99",
    }


def bench_serve(
    environment: serving.ServingEnvironment, flags: Mapping[str, Any], api_key: str | None = None, engine: str = "vllm"
) -> Level:
    """Run `vllm bench serve` in the serving environment; what it measured.

    Example: bench_serve(environment, flags, server.api_key).tokens_per_second
    """
    extra = dict(environment.env_vars)
    if api_key:
        extra["OPENAI_API_KEY"] = api_key
    if Path(flags["tokenizer"]).is_dir():
        extra["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        saving = {
            "save-result": True,
            "save-detailed": True,  # every single request
            "result-dir": folder,
            "result-filename": "result.json",
            "disable-tqdm": True,
        }
        command = [str(environment.python), str(BENCH_SERVE), *serving.to_words({**flags, **saving})]
        variables = environments.variables(extra)
        ended = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ended.returncode:
            raise CourseError(
                "`vllm bench serve` stopped: {lines}",
                todo="If the tokenizer is named, give the folder of the served model with --model.",
                lines=last_lines(ended.stderr, 3),
            )
        return read_level(engine, files.read_json(Path(folder) / "result.json"))


def read_level(engine: str, result: Mapping[str, Any]) -> Level:
    """A level from what `vllm bench serve` saved."""
    errors = [error.strip().splitlines()[-1] for error in result["errors"] if error]
    if not result["completed"]:
        raise CourseError(
            "Not one request was answered: {error}",
            todo="Read the server's log, and check --name and the key in VLLM_API_KEY.",
            error=errors[0],
        )
    times = {}
    for metric in ("ttft", "tpot", "e2el"):
        times[metric] = {f"p{share}": round(result[f"p{share}_{metric}_ms"], 2) for share in PERCENTILES}
    return Level(
        engine,
        concurrency=result["max_concurrency"],
        requests=len(result["errors"]),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        seconds=round(result["duration"], 3),
        tokens_per_second=round(result["output_throughput"], 1),
        ttft_ms=times["ttft"],
        tpot_ms=times["tpot"],
        latency_ms=times["e2el"],
    )


def measure_by_client(server: serving.Server, engine: str, settings: Load, concurrency: int) -> Level:
    """Measure one level with the `openai` client in threads, which is fast enough for `transformers serve`."""
    from transformers import AutoTokenizer

    client = server.client(timeout=300.0, max_retries=0)
    tokenizer = AutoTokenizer.from_pretrained(server.model, trust_remote_code=False)
    prompts = [tokenizer.decode(ids) for ids in settings.prompts(tokenizer, concurrency)]
    tokens = settings.answer_tokens
    request = partial(time_request, client, server.model_name, tokens)
    serving.send_concurrently(request, prompts[:1], server.url)  # the first one is slow
    started = time.perf_counter()
    latencies = serving.send_concurrently(request, prompts, server.url, at_once=concurrency)
    seconds = time.perf_counter() - started
    return summarize(engine, concurrency, latencies, tokens=tokens, seconds=seconds)


def time_request(client: Any, model_name: str, tokens: int, prompt: str) -> float:
    """The seconds until an answer of so many tokens is here, streamed as vLLM's are."""
    count = 0
    started = time.perf_counter()
    stream = client.completions.create(
        model=model_name,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        extra_body={"generation_config": ENDLESS},
    )
    for piece in stream:
        if piece.usage:
            count = piece.usage.completion_tokens
    seconds = time.perf_counter() - started
    if count != tokens:
        raise CourseError(
            "{count} tokens returned, {tokens} requested",
            todo="Read the server's log: it ended an answer too early.",
            count=count,
            tokens=tokens,
        )
    return seconds


def time_generate(model: Any, prompts: Any, tokens: int) -> float:
    """The seconds that plain `generate` takes for one batch, every answer of so many tokens."""
    import torch

    started = time.perf_counter()
    with torch.inference_mode():
        answers = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            pad_token_id=model.generation_config.pad_token_id or 0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    answers.tolist()  # waits for the GPU
    return time.perf_counter() - started


@dataclass
class Benchmark:
    """Engines at several levels of concurrency; the file is written after each level, so that none is lost.

    Example: Benchmark(Path("bench.json"), Load(), {}).run(folder, ["generate", "vllm"])
    """

    path: Path | None
    settings: Load
    about: Facts
    levels: list[Level] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, level: Level) -> None:
        """Keep a level, and print it."""
        self.levels.append(level)
        self.save()
        say(
            "  {level.engine}, {level.concurrency} at a time: {level.tokens_per_second:,.1f} tokens/s, errors: "
            "{level.errors} {level.first_error}",
            level=level,
        )

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and concurrency."""
        speeds: dict[str, dict[str, float]] = {}
        for level in self.levels:
            of_engine = speeds.setdefault(level.engine, {})
            of_engine[str(level.concurrency)] = level.tokens_per_second
        return speeds

    def as_dict(self) -> Facts:
        """Everything, for a file or another program."""
        everything = asdict(self)
        del everything["path"]
        return everything

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path:
            files.write_json(self.path, self.as_dict())

    def show(self, title: str = "") -> None:
        """The table, and below it what it means."""
        rows = [level_row(level) for level in sorted(self.levels, key=attrgetter("concurrency"))]
        display.show_table(rows, title)
        say(
            "at a time: requests under way together. Three times in a cell are p50 / p90 / p99: half, 90 % and"
            " 99 % of the requests took no longer. errors: failed / all."
        )

    def plot(self, path: Path | None = None) -> None:
        """Latency over throughput; a dot is named by its concurrency."""
        engines: Facts = {}
        for level in self.levels:
            of_engine = engines.setdefault(level.engine, {})
            name = str(level.concurrency)
            of_engine[name] = (level.tokens_per_second, level.latency_ms["p50"])
        title = tr("Requests at a time: more tokens per second, longer answers")
        answer = tr("answer ms")
        figures.dots(engines, title, "tokens/s", answer, "xy", path)

    def run(self, folder: Path, engines: Sequence[str]) -> None:
        """Measure a model in the named engines, one after the other."""
        steps: dict[str, Callable[[Path], None]] = {
            "generate": self.generate,
            "vllm": self.vllm,
            "transformers-serve": self.transformers_serve,
        }
        for name in dict.fromkeys(engines):
            self.attempt(name, steps[name], folder)

    def attempt(self, name: str, measure: Callable[[Path], None], folder: Path) -> None:
        """Measure one engine; if it fails, the reason is kept and the others go on."""
        print(f"{name}:")
        try:
            measure(folder)
        except Exception as problem:  # an engine may fail in any way; what was measured before it counts
            reason = describe(problem)
            self.left_out[name] = reason
            self.save()
            say("  {name} left out: {reason}", name=name, reason=reason)
        hardware.free_memory()  # also after a model that did not fit

    def generate(self, folder: Path) -> None:
        """Plain `generate` in batches, on the first prompts that servers get."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        gpu = hardware.gpu()
        settings = self.settings.for_slow_engine(32)
        tokens = settings.answer_tokens
        device = "cuda:0" if gpu else "cpu"
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=hardware.dtype(gpu).value, device_map=device, trust_remote_code=False
        )
        for size in settings.concurrency:
            batches = torch.tensor(settings.prompts(tokenizer, size), device=device).split(size)
            time_generate(model, batches[0], WARM_UP_TOKENS)
            seconds = [time_generate(model, batch, tokens) for batch in batches]
            self.add(summarize("generate", size, seconds * size, tokens=tokens, seconds=sum(seconds)))

    def vllm(self, folder: Path, name: str = "vllm") -> None:
        """vLLM with its defaults; only what this GPU wants and the prompts need is set."""
        settings = self.settings
        flags = serving.flags_for(hardware.gpu(), folder)
        flags["served-model-name"] = "bench"
        flags["max-num-seqs"] = max(settings.concurrency)
        flags["max-model-len"] = settings.prompt_tokens + settings.answer_tokens + SPARE_TOKENS
        with serving.Server(folder, serving.ensure_environment("auto", folder), flags=flags) as server:
            self.measure(server, name)

    def transformers_serve(self, folder: Path) -> None:
        """`transformers serve`, with its continuous batching where there is a GPU; fewer requests, as it is slow."""
        gpu = hardware.gpu()
        flags = {
            "dtype": hardware.dtype(gpu).value,
            "device": "cuda:0" if gpu else "cpu",
            "continuous-batching": gpu is not None,
        }
        with serving.Server(folder, serving.ensure_environment("transformers"), flags=flags) as server:
            self.measure(server, "transformers serve", self.settings.for_slow_engine(32 if gpu else 8))

    def measure(self, server: serving.Server, engine: str, settings: Load | None = None) -> None:
        """Measure a server that is up, level by level; by `vllm bench serve` if it takes its requests."""
        settings = settings or self.settings
        for concurrency in settings.concurrency:
            if server.environment.engine == "transformers":
                level = measure_by_client(server, engine, settings, concurrency)
            else:
                flags = bench_serve_flags(server.url, server.model_name, server.model, settings, concurrency)
                level = bench_serve(server.environment, flags, server.api_key, engine)
            self.add(level)


def level_row(level: Level) -> Facts:
    """A level as a row of the table."""
    return {
        tr("engine"): level.engine,
        tr("at a time"): level.concurrency,
        "tokens/s": f"{level.tokens_per_second:,.0f}",
        tr("first token ms"): in_one_cell(level.ttft_ms),
        tr("per token ms"): in_one_cell(level.tpot_ms),
        tr("answer ms"): in_one_cell(level.latency_ms),
        tr("errors"): f"{level.errors} / {level.requests}",
    }


def in_one_cell(times: Percentiles | None) -> str:
    """Three times with slashes between."""
    if times is None:
        return "–"
    return " / ".join(f"{value:,.1f}" for value in times.values())


def bench_model(folder: Path, benchmark: Benchmark, rivals: Sequence[str]) -> None:
    """Measure a model folder in its rivals, and in what serves it best on this machine."""
    hardware.share_processors()
    gpu = hardware.gpu()
    benchmark.about["model"] = folder.name
    benchmark.about["machine"] = gpu.name if gpu else "cpu"
    own = "transformers-serve" if serving.choose_engine(gpu, folder).value == "transformers" else "vllm"
    benchmark.run(folder, [*rivals, own])


def parse_rivals(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one.

    Example: parse_rivals("generate, transformers-serve")
    """
    return parse_choices(tr("A rival"), text, RIVALS)


def parse_concurrency(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise CourseError("--concurrency is {text!r}.", todo="Write it like 1,8,32.", text=text)
    return tuple(map(int, text.split(",")))


def bench_url(url: str, name: str, model: Path | None, benchmark: Benchmark) -> None:
    """Measure a running server, whose key is in VLLM_API_KEY, with its first model unless one is named."""
    from openai import OpenAI

    url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    network.reach_directly()
    key = os.environ.get(KEY_VARIABLE)
    client = OpenAI(base_url=url, api_key=key or NO_KEY, timeout=10.0, max_retries=0)
    try:
        first = client.models.list().data[0]
    except Exception as problem:  # whatever answers there need not be an OpenAI-compatible server
        raise CourseError(
            "{url} did not answer like an OpenAI-compatible server ({problem!r}).",
            todo="Start it first, correct --url, or set VLLM_API_KEY to the key it was started with.",
            url=url,
            problem=problem,
        ) from problem
    tokenizer = str(model or getattr(first, "root", None) or first.id)  # vLLM says where its model came from
    environment = serving.ensure_environment()
    settings = benchmark.settings
    for concurrency in settings.concurrency:
        flags = bench_serve_flags(url, name or first.id, tokenizer, settings, concurrency)
        benchmark.add(bench_serve(environment, flags, key, engine=first.owned_by))


def measure_speed(
    model: Path | None, url: str, name: str, settings: Load, *, rivals: Sequence[str], out: Path | None
) -> Benchmark:
    """The command line: a model folder with its rivals, or a running server."""
    path = files.make_folder(out) / "bench.json" if out else None
    benchmark = Benchmark(path, settings, {})
    if url:
        bench_url(url, name, model, benchmark)
    elif model:
        bench_model(model, benchmark, rivals)
    else:
        raise CourseError("Neither a model nor a server was named.", todo="Give --model FOLDER or --url URL.")
    if out:
        benchmark.plot(out / "bench.png")
    if benchmark.left_out:
        benchmark.show()
        raise CourseError(
            "Not measured: {names}",
            todo="Fix what is named above, then measure again.",
            names=joined(benchmark.left_out),
        )
    return benchmark
