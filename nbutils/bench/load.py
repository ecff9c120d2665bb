"""The load: many streamed requests in flight at once, timed as they arrive. aiohttp, because at thousands of tokens a
second a client that parses every piece measures itself.

Not here: starting servers (serving, asking) or finding one (finding), and what it does meanwhile (watching).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from nbutils.bench.numbers import Level, Request, summarise
from nbutils.bench.prompts import Prompt, Settings, make_prompts
from nbutils.bench.silence import Patience
from nbutils.bench.watching import Watcher
from nbutils.errors import CourseError

TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
# the first text, or the first token where it has none (half a character); not a comment, not an empty piece
FIRST = re.compile(rb'"text":\s*"[^"]|"token_ids":\s*\[\s*\d')
TAIL = 2048  # bytes of a stream's end in which its count of tokens stands
WARM_TOKENS, WARM_SEED = 8, -1
SILENCE, WARM_SILENCE = 120.0, 300.0  # seconds without a byte for anybody; kernels may be compiled for the first ones
Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there, and whether it is vLLM."""

    url: str
    name: str
    vllm: bool = True
    api_key: str | None = field(default=None, repr=False)
    require: Callable[[], None] | None = field(default=None, repr=False, compare=False)  # raises why it is not up

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )

    def body(self, prompt: Prompt, tokens: int) -> bytes:
        """A request for exactly so many tokens, in the words of the engine."""
        shared: dict[str, Any] = {"model": self.name, "stream": True, "max_tokens": tokens, "temperature": 0.0}
        if self.vllm:
            exact = {"prompt": prompt.ids, "min_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
            return orjson.dumps(shared | exact | {"stream_options": {"include_usage": True}})
        if not prompt.text:
            raise CourseError(
                "this server takes prompts as text, and without a tokenizer there are only tokens.",
                "a vLLM server, or a model folder whose tokenizer can be read", "give --model FOLDER beside --url",
            )  # fmt: skip
        # no token is -1: the answer goes on to its full length
        config = json.dumps({"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
        return orjson.dumps(shared | {"prompt": prompt.text, "generation_config": config})


def measure(target: Target, engine: str, settings: Settings, tokenizer: Any) -> Iterator[Level]:
    """Warm the server up, then one level after the other; all of them or as many as are taken."""
    most = max(settings.concurrency)
    warm = make_prompts(tokenizer, settings.prompt_tokens, most, seed=WARM_SEED)
    require_answers(target, drive(target, engine, warm, WARM_TOKENS, most, silence=WARM_SILENCE))
    for many in settings.concurrency:
        level = drive(target, engine, settings.prompts(tokenizer, many), settings.answer_tokens, many)
        yield level  # kept first, even if it holds nothing but errors
        require_answers(target, level)


def require_answers(target: Target, level: Level) -> None:
    """Stop where not one request was answered; a server of this course knows best why."""
    if not level.dead:
        return
    if target.require:
        target.require()
    key = level.first_error.startswith(("HTTP 401", "HTTP 403"))
    raise CourseError(
        f"not one of {level.requests} requests to {target.url} was answered: {level.first_error}",
        "a server that answers" + " those who have its key" * key,
        "set VLLM_API_KEY to its key" if key else "look at the server's log, start it again, then measure again",
    )


def drive(
    target: Target,
    engine: str,
    prompts: Sequence[Prompt],
    tokens: int,
    concurrency: int,
    *,
    silence: float = SILENCE,
) -> Level:
    """Send all prompts, `concurrency` in flight, and sum up; what the server tells of itself is read meanwhile."""
    bodies = [target.body(prompt, tokens) for prompt in prompts]
    return in_own_loop(_drive(target, engine, bodies, tokens, concurrency, Patience(silence)))


async def _drive(
    target: Target, engine: str, bodies: Sequence[bytes], tokens: int, concurrency: int, patience: Patience
) -> Level:
    waiting, done = iter(bodies), list[Request]()

    async with open_session(target) as session:

        async def worker() -> None:
            for body in waiting:
                done.append(await request(session, target, body, tokens, patience.heard))

        async def workers() -> None:
            await asyncio.gather(*(worker() for _ in range(concurrency)))

        async with Watcher(session, target.url if target.vllm else "") as watcher:
            patience.heard()
            started = time.perf_counter()
            given_up = await patience.through(workers())
            seconds = time.perf_counter() - started
    done += [_failed(started, given_up) for _ in range(len(bodies) - len(done))]
    return summarise(engine, concurrency, done, seconds, watcher.summary())


async def request(session: Any, target: Target, body: bytes, tokens: int, heard: Callable[[], None]) -> Request:
    """One streamed request; whatever is not an answer of exactly `tokens` tokens is an error."""
    import aiohttp

    sent, first, tail = time.perf_counter(), None, b""
    try:
        async with session.post(f"{target.url}/completions", data=body) as response:
            if response.status != 200:
                return _failed(sent, f"HTTP {response.status}: {(await response.text())[:200]}")
            async for piece in response.content.iter_any():
                heard()
                tail = tail[-TAIL:] + piece
                if first is None and FIRST.search(tail):
                    first = time.perf_counter()
                if b'"error":' in tail:  # a quote inside a text would be escaped
                    return _failed(sent, tail[-200:].decode(errors="replace"))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as problem:
        return _failed(sent, f"{type(problem).__name__}: {problem}")
    told = TOKENS.findall(tail)
    if not told or int(told[-1]) != tokens:
        return _failed(sent, f"{told[-1].decode() if told else 'no'} tokens told, {tokens} were asked for")
    return Request(None if first is None else first - sent, time.perf_counter() - sent, tokens)


def in_own_loop(work: Coroutine[Any, Any, Result]) -> Result:
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


def open_session(target: Target, silence: float | None = None) -> Any:
    """A session past any proxy, without limits unless one of `silence` is given."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=silence)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(headers=target.headers, timeout=timeout, connector=connector, trust_env=False)


def _failed(sent: float, error: str) -> Request:
    return Request(None, time.perf_counter() - sent, 0, error)
