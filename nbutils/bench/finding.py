"""A server that somebody else started: which models it has, whether it is vLLM, and in words why it cannot be used.

Not here: measuring it (load).
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from nbutils.bench.load import Target, in_own_loop, open_session
from nbutils.errors import CourseError

REPLY = 30.0  # seconds for a list of models
NO_ENTRY = (401, 403)


def find_target(url: str, name: str = "", api_key: str | None = None) -> Target:
    """A server that is running: which model it has and whether it is vLLM."""
    url = url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    status, names, vllm = in_own_loop(_look(url, api_key))
    if status in NO_ENTRY:
        raise CourseError(
            f"{url}/models answers {status}: {'the key it got is not its key' if api_key else 'it asks for a key'}.",
            "the API key the server was started with", "set VLLM_API_KEY to it in the environment",
        )  # fmt: skip
    if not (name or names) or (vllm and name not in ["", *names]):
        raise CourseError(
            f"{url} serves {', '.join(names) or f'nothing that can be read (status {status})'}, "
            f"and {name or 'a model'} was asked for.",
            "a name it serves", "mend --name or --url",
        )  # fmt: skip
    return Target(url, name or names[0], vllm, api_key)


async def _look(url: str, api_key: str | None) -> tuple[int, list[str], bool]:
    """The status and the names of `/models`, and whether the metrics are vLLM's."""
    import aiohttp

    try:
        async with open_session(Target(url, "", api_key=api_key), REPLY) as session:
            async with session.get(f"{url}/models") as response:
                status, body = response.status, await response.read()
            async with session.get(f"{url.removesuffix('/v1')}/metrics") as response:
                vllm = b"vllm:" in await response.read()
        return status, [] if status in NO_ENTRY else names_in(orjson.loads(body)), vllm
    except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as problem:
        raise CourseError(
            f"{url}/models did not answer like a server ({type(problem).__name__}).",
            "the address of a running OpenAI-compatible server", "start it first, or mend --url",
        ) from problem  # fmt: skip


def names_in(listing: Any) -> list[str]:
    """The models of a list as OpenAI's servers give it; nothing where it is another thing."""
    rows = listing.get("data") if isinstance(listing, dict) else None
    found = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [name for name in found if isinstance(name, str) and name]
