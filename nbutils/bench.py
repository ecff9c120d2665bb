"""How fast a model is served: the same prompts to vLLM, to `transformers serve` and to plain `generate`.

The load client is aiohttp with two regular expressions: one that parses every piece measures itself at thousands of
tokens/s. Every level is kept in the file when it is done, and an engine that fails stops no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nbutils import display, files, hardware, profiles, serving
from nbutils.errors import CourseError
from nbutils.language import joined, tr
from nbutils.merging.folder import read_header
from nbutils.serving.server import NO_KEY, reach_directly

RIVALS = ("generate", "transformers-serve")
WARM_UP_TOKENS, WARM_UP_SEED = 8, -1
USUAL_SPEED = 1000  # tokens/s: about what vLLM has with 8 requests at a time (tiny on 2 cores, a 7B on an H200)
# the first text, or the first token where it has none (half a character); not a comment, not an empty piece
FIRST_TOKEN = re.compile(rb'"text":\s*"[^"]|"token_ids":\s*\[\s*\d')
TOKEN_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL = 2048  # bytes of a stream's end in which its count of tokens stands
Level = dict[str, Any]  # one engine at one concurrency; times are percentiles in ms, None where there are none
Timing = tuple[float | None, float, str]  # of a request: seconds to its first token and to its last, what went wrong


@dataclass(frozen=True)
class Settings:
    """Levels of concurrency, tokens of a prompt and of an answer; each slot is filled `rounds` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4

    def few(self, most: int) -> Settings:
        """The same for a rival that is slow: levels up to `most`, and each slot filled once."""
        return replace(self, concurrency=tuple(n for n in self.concurrency if n <= most) or (1,), rounds=1)

    @property
    def requests(self) -> int:
        """How many requests an engine gets."""
        return sum(self.rounds * max(2, many) for many in self.concurrency)

    def __str__(self) -> str:
        tokens = self.requests * self.answer_tokens
        amount = {"requests": self.requests, "tokens": tokens, "seconds": tokens / USUAL_SPEED, "speed": USUAL_SPEED}
        return tr(
            "  {requests:,} requests, {tokens:,} tokens to generate: {seconds:,.0f} s at {speed:,} a second", **amount
        )

    def prompts(self, tokenizer: Any, concurrency: int) -> list[list[int]]:
        """The prompts of one level, the same for every engine."""
        return make_prompts(tokenizer, self.prompt_tokens, self.rounds * max(2, concurrency), seed=concurrency)


def summarize(engine: str, concurrency: int, requests: Sequence[Timing], tokens: int, seconds: float) -> Level:
    """The numbers of a level; a request that failed counts as an error and in nothing else."""
    import numpy as np

    def spread(times: Sequence[float]) -> dict[str, float] | None:
        return {f"p{n}": round(1000 * float(np.percentile(times, n)), 2) for n in (50, 90, 99)} if times else None

    good, errors = [one for one in requests if not one[2]], [error for _, _, error in requests if error]
    streamed = [(first, whole) for first, whole, _ in good if first is not None]
    each = [(whole - first) / (tokens - 1) for first, whole in streamed] if tokens > 1 else []
    return {
        "engine": engine, "concurrency": concurrency, "requests": len(requests), "errors": len(errors),
        "first_error": errors[0] if errors else "", "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens * len(good) / seconds, 1), "ttft_ms": spread([one for one, _ in streamed]),
        "tpot_ms": spread(each), "latency_ms": spread([whole for _, whole, _ in good]),
    }  # fmt: skip


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random words that are one token each: none share a beginning, so that no engine gains from its prefix cache."""
    rng, words = random.Random(seed), list(range(100, 1000))  # without a tokenizer: ids that every model has
    if tokenizer is not None:
        some = rng.sample(range(len(tokenizer)), min(4000, len(tokenizer)))
        words = [token for token in some if re.fullmatch(" [A-Za-z]+", tokenizer.decode([token]))] or words
    return [rng.choices(words, k=tokens) for _ in range(count)]


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there; vLLM, or else `transformers serve`."""

    url: str
    name: str
    vllm: bool = True
    api_key: str | None = field(default=None, repr=False)

    def body(self, prompt: list[int], tokens: int, tokenizer: Any = None) -> bytes:
        """A request for exactly so many tokens, in the words of the engine; `transformers serve` takes text."""
        body: dict[str, Any] = {"model": self.name, "stream": True, "max_tokens": tokens, "temperature": 0.0}
        if self.vllm:
            body |= {"prompt": prompt, "min_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
            return json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        # no token is -1: the answer goes on to its full length
        config = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return json.dumps(body | {"prompt": tokenizer.decode(prompt), "generation_config": json.dumps(config)}).encode()


def find_target(url: str, name: str = "", api_key: str | None = None) -> Target:
    """A vLLM server that was started elsewhere; its first model unless one is named."""
    from openai import OpenAI

    url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    reach_directly(urlsplit(url).hostname or "127.0.0.1")
    try:
        [first, *_] = OpenAI(base_url=url, api_key=api_key or NO_KEY, timeout=10.0, max_retries=0).models.list().data
        assert first.owned_by == "vllm", f"owned_by={first.owned_by}"
        return Target(url, name or first.id, True, api_key)
    except Exception as problem:  # whatever answers there need not be an OpenAI-compatible server
        raise CourseError("bench.no_server", url=url, problem=repr(problem)) from problem


def measure(target: Target, engine: str, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """Warm the server up, then one level after the other; stops where not one request is answered."""
    most = max(settings.concurrency)
    warm_up = make_prompts(tokenizer, settings.prompt_tokens, most, seed=WARM_UP_SEED)
    level = drive(target, engine, warm_up, WARM_UP_TOKENS, most, tokenizer)
    for many in settings.concurrency:
        if level["errors"] == level["requests"]:
            raise CourseError("bench.no_answer", requests=level["requests"], url=target.url, error=level["first_error"])
        level = drive(target, engine, settings.prompts(tokenizer, many), settings.answer_tokens, many, tokenizer)
        yield level


def drive(target: Target, engine: str, prompts: list[list[int]], tokens: int, many: int, tokenizer: Any) -> Level:
    """Send all requests, `many` at a time, from a thread of its own: a notebook's has a loop running already."""
    bodies = [target.body(prompt, tokens, tokenizer) for prompt in prompts]
    with contextlib.closing(asyncio.new_event_loop()) as loop, ThreadPoolExecutor(max_workers=1) as pool:
        task = loop.create_task(_send(target, bodies, tokens, many))
        try:
            done, seconds = pool.submit(loop.run_until_complete, task).result()
            return summarize(engine, many, done, tokens, seconds)
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


async def _send(target: Target, bodies: Sequence[bytes], tokens: int, concurrency: int) -> tuple[list[Timing], float]:
    """Workers that take the next request when one is done; what is no answer of exactly `tokens` tokens is an error."""
    import aiohttp

    async def request(body: bytes) -> Timing:
        sent, first, tail, error = time.perf_counter(), None, b"", ""
        try:
            async with session.post(f"{target.url}/completions", data=body) as response:
                async for piece in response.content.iter_any():
                    tail = tail[-TAIL:] + piece
                    if first is None and FIRST_TOKEN.search(tail):
                        first = time.perf_counter() - sent
                if response.status != 200 or b'"error":' in tail:  # a quote inside a text would be escaped
                    error = f"HTTP {response.status}: {tail[-200:].decode(errors='replace')}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        counts = TOKEN_COUNT.findall(tail)
        if not error and counts[-1:] != [b"%d" % tokens]:
            count = int(counts[-1]) if counts else 0
            error = tr("{count} tokens returned, {tokens} requested", count=count, tokens=tokens)
        return first, time.perf_counter() - sent, error

    async def worker() -> None:
        for body in waiting:
            done.append(await request(body))

    waiting, done = iter(bodies), list[Timing]()
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(None, sock_read=300.0)  # without a byte; kernels may be compiled at first
    options: Any = {"headers": headers, "timeout": timeout, "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(**options) as session:
        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return done, time.perf_counter() - started


def parse_rivals(text: str) -> list[str]:
    """The rivals in a text with commas between; none in an empty one."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in RIVALS]:
        raise CourseError("bench.unknown_rivals", names=", ".join(unknown), rivals=", ".join(RIVALS))
    return names


@dataclass
class Benchmark:
    """Engines at several levels of concurrency; the file is written after each level, so that none is lost."""

    path: Path | None
    settings: Settings
    about: dict[str, Any]
    gpu: hardware.GPU | None = None
    levels: list[Level] = field(default_factory=list)
    bandwidth_limit: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine: what its weights allow at 1
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, levels: Iterable[Level]) -> None:
        """Keep these, one after the other."""
        for level in levels:
            self.levels.append(level)
            wrong = tr(", {errors} ERRORS ({first_error})", **level) if level["errors"] else ""
            speed = tr("  {engine}, {concurrency} at a time: {tokens_per_second:,.1f} tokens/s", **level)
            print(f"{speed}{wrong}", flush=True)
            self.save()

    def add_limit(self, engine: str, folder: Path, device: str = "cuda", size: int = 2**30) -> None:
        """The most tokens a second for one stream, which reads all weights but an embedding: measured by copying."""
        import torch
        from torch.utils.benchmark import Timer

        source = torch.ones(size, dtype=torch.uint8, device=device)
        timer = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
        bandwidth = 2 * size / timer.timeit(10).mean
        found = {name: one.size for file in folder.glob("*.safetensors") for name, one in read_header(file).items()}
        weights = sum(found.values()) - ("lm_head.weight" in found) * found.get("model.embed_tokens.weight", 0)
        limit = {"weights_gb": weights / 1e9, "copy_gb_per_second": bandwidth / 1e9}
        self.bandwidth_limit[engine] = limit | {"tokens_per_second": round(bandwidth / weights, 1)}
        self.save()

    def speeds(self) -> dict[str, dict[str, float]]:
        """Tokens a second by engine and concurrency."""
        found: dict[str, dict[str, float]] = {}
        for level in self.levels:
            found.setdefault(level["engine"], {})[str(level["concurrency"])] = level["tokens_per_second"]
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "gpu")}

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path:
            files.write_json(self.path, self.as_dict())

    def show(self, title: str = "") -> None:
        """The table, and below it what it means."""

        def three(spread: dict[str, float] | None) -> str:
            return " / ".join(f"{value:,.1f}" for value in spread.values()) if spread else "–"

        rows = [
            {tr("engine"): one["engine"], tr("at a time"): one["concurrency"]}
            | {"tokens/s": f"{one['tokens_per_second']:,.0f}", tr("first token ms"): three(one["ttft_ms"])}
            | {tr("per token ms"): three(one["tpot_ms"]), tr("answer ms"): three(one["latency_ms"])}
            | {tr("errors"): f"{one['errors']} / {one['requests']}"}
            for one in sorted(self.levels, key=lambda one: one["concurrency"])
        ]  # fmt: skip
        display.show_table(rows, title, display.aligned(rows) if rows else tr("nothing was measured"))
        if rows:
            print(tr("at a time: requests under way together. Three times in a cell are p50 / p90 / p99: half, 90 % and"
                     " 99 % of the requests took no longer. errors: failed / all."))  # fmt: skip
        for engine, most in self.bandwidth_limit.items():
            values = {"engine": engine, "speed": most["tokens_per_second"]}
            print(tr("{engine}, one at a time: at most {speed:,} tokens/s, by memory bandwidth.", **values))
        for what, reason in self.left_out.items():
            print(tr("Not measured: {what} ({reason}).", what=what, reason=reason))

    def plot(self, path: Path | None = None) -> None:
        """Tokens a second over the concurrency."""
        figure, axes = display.pyplot().subplots(figsize=(7, 3.5))
        for engine, speeds in self.speeds().items():
            axes.plot([int(many) for many in speeds], list(speeds.values()), "o-", label=engine)
        axes.set(xlabel=tr("requests at a time"), ylabel="tokens/s", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.tight_layout()
        display.show_figure(figure, path)

    def run(self, folder: Path, names: Sequence[str], variants: Mapping[str, Path] | None = None) -> None:
        """Measure a model in the named engines, and its variants in vLLM; what fails is kept, the others go on."""
        steps: dict[str, Callable[[], None]] = {
            "generate": partial(self.generate, folder), "vllm": partial(self.vllm, "vllm", folder),
            **{f"vllm {name}": partial(self.vllm, f"vllm {name}", other) for name, other in (variants or {}).items()},
            "transformers-serve": partial(self.transformers, folder),
        }  # fmt: skip
        for name in [name for name in steps if name.partition(" ")[0] in names]:
            print(f"{name}:", flush=True)
            try:
                steps[name]()
            except Exception as problem:  # an engine may fail in any way; what was measured before it counts
                reason = str(problem) if isinstance(problem, CourseError) else repr(problem)
                self.left_out[name] = reason
                self.save()
                print(tr("  {name} left out: {reason}", name=name, reason=reason), flush=True)
            serving.free_gpu_memory()  # also after a model that did not fit

    def generate(self, folder: Path) -> None:
        """Plain `generate` in batches, on the first prompts that servers get; memory is freed."""
        import torch
        from transformers import AutoModelForCausalLM

        where: Any = {"dtype": _dtype(self.gpu), "device_map": {"": 0 if self.gpu else "cpu"}}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **where).eval()
        fixed = {"do_sample": False, "pad_token_id": model.generation_config.pad_token_id or 0}

        def timed(ids: Any, tokens: int) -> list[Timing]:
            began, length = time.perf_counter(), {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with torch.inference_mode():
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed, **length).tolist()
            return [(None, time.perf_counter() - began, "")] * len(ids)

        settings, tokenizer = self.settings.few(32), _tokenizer(folder)
        print(settings, flush=True)
        for batch in settings.concurrency:
            batches = torch.tensor(settings.prompts(tokenizer, batch), device=model.device).split(batch)
            timed(batches[0], WARM_UP_TOKENS)
            started = time.perf_counter()
            done = [one for ids in batches for one in timed(ids, settings.answer_tokens)]
            seconds = time.perf_counter() - started
            self.add([summarize("generate", batch, done, settings.answer_tokens, seconds)])

    def vllm(self, name: str, folder: Path) -> None:
        """vLLM with its defaults; only what this GPU wants and the prompts need is set."""
        if self.gpu:
            self.add_limit(name, folder)
            serving.free_gpu_memory()
        settings, engine = self.settings, hardware.engine(self.gpu).value
        flags = {flag: choice.value for flag, choice in serving.flags_for(self.gpu, folder).items()} | {
            "served-model-name": "bench", "max-num-seqs": max(settings.concurrency),
            "max-model-len": settings.prompt_tokens + settings.answer_tokens + 16,  # some to spare
        }  # fmt: skip
        with serving.Server(folder, engine, flags=flags) as server:
            self.measure(server, name)

    def transformers(self, folder: Path) -> None:
        """`transformers serve`, with its continuous batching where there is a GPU; fewer requests, as it is slow."""
        settings, batching = self.settings.few(32 if self.gpu else 8), self.gpu is not None
        flags = {"dtype": _dtype(self.gpu), "device": "cuda:0" if batching else "cpu", "continuous-batching": batching}
        with serving.Server(folder, "transformers", flags=flags) as server:
            self.measure(server, "transformers serve", settings)

    def measure(self, server: serving.Server, name: str, settings: Settings | None = None) -> None:
        """Measure a server that is up."""
        target = Target(server.url, server.model_name, server.environment.engine != "transformers", server.api_key)
        settings = settings or self.settings
        print(settings, flush=True)
        self.add(measure(target, name, settings, _tokenizer(Path(server.model))))


def _dtype(gpu: hardware.GPU | None) -> str:
    return hardware.DTYPES[hardware.precision(gpu).value]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def bench_model(
    folder: Path, benchmark: Benchmark, *, rivals: Sequence[str] = RIVALS, variants: Mapping[str, Path] | None = None
) -> None:
    """Measure a model folder: plain generate, vLLM, vLLM with other forms of the same model, `transformers serve`."""
    hardware.share_processors()
    benchmark.gpu = gpu = hardware.gpu()
    benchmark.about |= {"model": folder.name, "dtype": _dtype(gpu), "machine": gpu.name if gpu else "cpu"}
    print(tr("Each engine is started first, which can take minutes. Measured in all: 90 s with the tiny model on 2 idle"
             " cores."), flush=True)  # fmt: skip
    own = "transformers-serve" if hardware.engine(gpu).value == "transformers" else "vllm"
    benchmark.run(Path(profiles.model_folder(folder)), [*rivals, own], variants)


def levels_in(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise CourseError("bench.wrong_concurrency", text=text)
    return tuple(sorted({int(part) for part in parts}))


def answer(
    model: Path | None, url: str, name: str, settings: Settings, rivals: Sequence[str], out: Path | None
) -> Benchmark:
    """The command line: a model folder with its rivals, or a running server, whose key is in VLLM_API_KEY."""
    if not (model or url):
        raise CourseError("bench.no_model_or_url")
    path = files.make_folder(out, tr("the results")) / "bench.json" if out else None
    benchmark = Benchmark(path, settings, {})
    if url:
        target = find_target(url, name, os.environ.get("VLLM_API_KEY") or None)
        print(settings, flush=True)
        benchmark.add(measure(target, "vllm", settings, _tokenizer(model) if model else None))
    elif model:
        bench_model(model, benchmark, rivals=rivals)
    if out:
        benchmark.plot(out / "bench.png")
    if benchmark.left_out:
        benchmark.show()
        reasons = joined((f"{what}: {reason.splitlines()[0]}" for what, reason in benchmark.left_out.items()), ";")
        raise CourseError("bench.not_measured", reasons=reasons)
    return benchmark
