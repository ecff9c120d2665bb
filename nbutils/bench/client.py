"""The load client: prompts of an exact length, many streamed requests in flight, timed as they arrive.

It is aiohttp with two regular expressions: a client that parses every piece measures itself at thousands of tokens/s.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nbutils import serving
from nbutils.errors import CourseError
from nbutils.serving.ports import reach_directly

WARM_UP_TOKENS, WARM_UP_SEED = 8, -1
SILENCE = 300.0  # seconds without a byte; kernels may be compiled at first
WORDS = 4000  # tokens that random words are looked for among
ANY_VOCABULARY = range(100, 1000)  # ids that every model has
# the first text, or the first token where it has none (half a character); not a comment, not an empty piece
FIRST_TOKEN = re.compile(rb'"text":\s*"[^"]|"token_ids":\s*\[\s*\d')
TOKEN_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL = 2048  # bytes of a stream's end in which its count of tokens stands
Spread = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """Levels of concurrency, tokens of a prompt and of an answer; each slot is filled `rounds` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    rounds: int = 4

    def few(self, most: int = 8) -> Settings:
        """The same for a server that answers one after the other: lower levels, and each slot filled once."""
        fewer = tuple(many for many in self.concurrency if many <= most) or (1,)
        return replace(self, concurrency=fewer, rounds=1)

    def prompts(self, tokenizer: Any, concurrency: int) -> list[list[int]]:
        """The prompts of one level, the same for every engine."""
        return make_prompts(tokenizer, self.prompt_tokens, self.rounds * max(2, concurrency), seed=concurrency)


class Request(NamedTuple):
    """Seconds until the first and until the last token, and the tokens; or what went wrong."""

    first: float | None
    seconds: float
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Level:
    """One engine at one concurrency; times are percentiles in ms, None where there are none."""

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

    def __str__(self) -> str:
        wrong = f", {self.errors} ERRORS ({self.first_error})" if self.errors else ""
        return f"{self.engine}, {self.concurrency} at a time: {self.tokens_per_second:,.1f} tokens/s{wrong}"


def summarize(engine: str, concurrency: int, requests: Sequence[Request], seconds: float) -> Level:
    """The numbers of a level; a request that failed counts as an error and in nothing else."""
    good, errors = [one for one in requests if not one.error], [one.error for one in requests if one.error]
    streamed = [(one, one.first) for one in good if one.first is not None]
    return Level(
        engine, concurrency, len(requests), len(errors), errors[0] if errors else "", round(seconds, 3),
        round(sum(one.tokens for one in good) / seconds, 1), _percentiles([first for _, first in streamed]),
        _percentiles([(one.seconds - first) / (one.tokens - 1) for one, first in streamed if one.tokens > 1]),
        _percentiles([one.seconds for one in good]),
    )  # fmt: skip


def _percentiles(seconds: Sequence[float]) -> Spread | None:
    import numpy as np

    return {f"p{n}": round(1000 * float(np.percentile(seconds, n)), 2) for n in (50, 90, 99)} if seconds else None


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random words that are one token each: none share a beginning, so that no engine gains from its prefix cache."""
    rng, words = random.Random(seed), []
    if tokenizer is not None:
        some = rng.sample(range(len(tokenizer)), min(WORDS, len(tokenizer)))
        words = [token for token in some if re.fullmatch(" [A-Za-z]+", tokenizer.decode([token]))]
    return [rng.choices(words or ANY_VOCABULARY, k=tokens) for _ in range(count)]


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there, and whether it is vLLM."""

    url: str
    name: str
    vllm: bool = True
    api_key: str | None = field(default=None, repr=False)

    def body(self, prompt: list[int], tokens: int, tokenizer: Any = None) -> bytes:
        """A request for exactly so many tokens, in the words of the engine; other servers than vLLM take text."""
        body: dict[str, Any] = {"model": self.name, "stream": True, "max_tokens": tokens, "temperature": 0.0}
        if self.vllm:
            body |= {"prompt": prompt, "min_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
            return json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        if tokenizer is None:
            raise CourseError("bench.text_prompts_only")
        # no token is -1: the answer goes on to its full length
        config = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        text = tokenizer.decode(prompt)
        return json.dumps(body | {"prompt": text, "generation_config": json.dumps(config)}).encode()


def target_of(server: serving.Server) -> Target:
    """A server of this course as a target."""
    vllm = server.environment.engine != "transformers"
    return Target(server.url, server.model_name, vllm, server.api_key)


def find_target(url: str, name: str = "", api_key: str | None = None) -> Target:
    """A server that was started elsewhere: its first model unless one is named, and whether it is vLLM."""
    from openai import OpenAI

    url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    reach_directly(urlsplit(url).hostname or "127.0.0.1")
    try:
        models = OpenAI(base_url=url, api_key=api_key or "none", timeout=10.0, max_retries=0).models.list().data
        return Target(url, name or models[0].id, models[0].owned_by == "vllm", api_key)
    except Exception as problem:  # whatever answers there need not be an OpenAI-compatible server
        raise CourseError("bench.no_server", url=url, problem=type(problem).__name__) from problem


def measure(target: Target, engine: str, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """Warm the server up, then one level after the other; stops where not one request is answered."""
    most = max(settings.concurrency)
    warm_up = make_prompts(tokenizer, settings.prompt_tokens, most, seed=WARM_UP_SEED)
    level = drive(target, engine, warm_up, WARM_UP_TOKENS, most, tokenizer)
    for many in settings.concurrency:
        if level.errors == level.requests:
            raise CourseError("bench.no_answer", requests=level.requests, url=target.url, error=level.first_error)
        level = drive(target, engine, settings.prompts(tokenizer, many), settings.answer_tokens, many, tokenizer)
        yield level


def drive(
    target: Target, engine: str, prompts: Sequence[list[int]], tokens: int, concurrency: int, tokenizer: Any = None
) -> Level:
    """Send all requests, `concurrency` in flight, from a thread of its own: a notebook's has a loop running already."""
    bodies = [target.body(prompt, tokens, tokenizer) for prompt in prompts]
    loop = asyncio.new_event_loop()
    task = loop.create_task(_send(target, bodies, tokens, concurrency))
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            return summarize(engine, concurrency, *pool.submit(loop.run_until_complete, task).result())
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


async def _send(target: Target, bodies: Sequence[bytes], tokens: int, concurrency: int) -> tuple[list[Request], float]:
    import aiohttp

    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout, connector = aiohttp.ClientTimeout(None, sock_read=SILENCE), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        waiting, done = iter(bodies), list[Request]()

        async def worker() -> None:
            for body in waiting:
                done.append(await _request(session, f"{target.url}/completions", body, tokens))

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return done, time.perf_counter() - started


async def _request(session: Any, url: str, body: bytes, tokens: int) -> Request:
    """One streamed request; whatever is not an answer of exactly `tokens` tokens is an error."""
    import aiohttp

    sent, first, tail, error = time.perf_counter(), None, b"", ""
    try:
        async with session.post(url, data=body) as response:
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
        error = f"{counts[-1].decode() if counts else 'no'} tokens returned, {tokens} requested"
    return Request(first, time.perf_counter() - sent, tokens, error)
