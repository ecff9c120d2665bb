"""The load: many streamed requests in flight at once, timed as they arrive. aiohttp, because at thousands of tokens a
second a client that parses every piece measures itself.

Not here: starting servers (serving, asking) and what the server does meanwhile (watching).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from nbutils.bench.numbers import Level, Request, summarise
from nbutils.bench.prompts import Prompt, Settings, make_prompts
from nbutils.bench.watching import Watcher
from nbutils.errors import CourseError

TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL = 2048  # bytes of a stream's end in which its count of tokens stands
WARM_TOKENS, WARM_SEED = 8, -1
SILENCE = 600.0  # seconds without a byte after which a request has failed
Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """A server to be measured: its `base_url`, the model's name there, and whether it is vLLM."""

    url: str
    name: str
    vllm: bool = True
    api_key: str | None = field(default=None, repr=False)

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
            exact = {"prompt": prompt.ids, "min_tokens": tokens, "ignore_eos": True}
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
    drive(target, engine, make_prompts(tokenizer, settings.prompt_tokens, most, seed=WARM_SEED), WARM_TOKENS, most)
    for concurrency in settings.concurrency:
        yield drive(target, engine, settings.prompts(tokenizer, concurrency), settings.answer_tokens, concurrency)


def drive(
    target: Target,
    engine: str,
    prompts: Sequence[Prompt],
    tokens: int,
    concurrency: int,
) -> Level:
    """Send all prompts, `concurrency` in flight, and sum up; what the server tells of itself is read meanwhile."""
    return in_own_loop(_drive(target, engine, [target.body(prompt, tokens) for prompt in prompts], tokens, concurrency))


async def _drive(target: Target, engine: str, bodies: Iterable[bytes], tokens: int, concurrency: int) -> Level:
    waiting, done = iter(bodies), list[Request]()

    async with _session(target) as session:

        async def worker() -> None:
            for body in waiting:
                done.append(await request(session, target, body, tokens))

        async with Watcher(session, target.url if target.vllm else "") as watcher:
            started = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(concurrency)))
            seconds = time.perf_counter() - started
    return summarise(engine, concurrency, done, seconds, watcher.summary())


async def request(session: Any, target: Target, body: bytes, tokens: int) -> Request:
    """One streamed request; whatever is not an answer of exactly `tokens` tokens is an error."""
    import aiohttp

    sent, first, tail = time.perf_counter(), None, b""
    try:
        async with session.post(f"{target.url}/completions", data=body) as response:
            if response.status != 200:
                return _failed(sent, f"HTTP {response.status}: {(await response.text())[:200]}")
            async for piece in response.content.iter_any():
                first = first or time.perf_counter()
                tail = tail[-TAIL:] + piece
                if b'"error":' in tail:  # a quote inside a text would be escaped
                    return _failed(sent, tail[-200:].decode(errors="replace"))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as problem:
        return _failed(sent, f"{type(problem).__name__}: {problem}")
    told = TOKENS.findall(tail)
    if first is None or not told or int(told[-1]) != tokens:
        return _failed(sent, f"{told[-1].decode() if told else 'no'} tokens told, {tokens} were asked for")
    return Request(first - sent, time.perf_counter() - sent, tokens)


def find_target(url: str, name: str = "", api_key: str | None = None) -> Target:
    """A server that is running: which model it has and whether it is vLLM."""
    return in_own_loop(_find(url.rstrip("/"), name, api_key))


async def _find(url: str, name: str, api_key: str | None) -> Target:
    import aiohttp

    url = url if url.endswith("/v1") else f"{url}/v1"
    try:
        async with _session(Target(url, name, api_key=api_key)) as session:
            async with session.get(f"{url}/models") as response:
                names = [model["id"] for model in orjson.loads(await response.read()).get("data", [])]
            async with session.get(f"{url.removesuffix('/v1')}/metrics") as response:
                vllm = b"vllm:" in await response.read()
    except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as problem:
        raise CourseError(
            f"{url}/models did not answer like a server ({type(problem).__name__}).",
            "the address of a running OpenAI-compatible server", "start it first, or mend --url",
        ) from problem  # fmt: skip
    if vllm and (not names or (name and name not in names)):
        raise CourseError(
            f"{url} serves {', '.join(names) or 'nothing'}, and {name or 'a model'} was asked for.",
            "a name it serves; with an API key, the right one in VLLM_API_KEY", "mend --name or set VLLM_API_KEY",
        )  # fmt: skip
    return Target(url, name or names[0], vllm, api_key)


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


def _session(target: Target) -> Any:
    """A session without limits of its own, past any proxy."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=SILENCE)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(headers=target.headers, timeout=timeout, connector=connector, trust_env=False)


def _failed(sent: float, error: str) -> Request:
    return Request(None, time.perf_counter() - sent, 0, error)
