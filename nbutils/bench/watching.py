"""What server and card do while requests run: vLLM's `/metrics` and the card's driver, read twice a second.

Not here: the requests (load).
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

from nbutils.paths import GIB

BEAT = 0.5
REPLY = 10.0  # seconds for one sample, as a server may hang
LINE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second until vLLM 0.10
PREEMPTIONS, CACHED = "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"


class Watcher:
    """`async with Watcher(session, url) as watcher:` samples until the block ends; `summary()` is the outcome."""

    def __init__(self, session: Any, url: str, beat: float = BEAT) -> None:
        self.session, self.beat = session, beat
        self.address = f"{url.removesuffix('/v1')}/metrics" if url else ""
        self.samples: list[dict[str, float]] = []
        self.cards: list[tuple[float, float]] = []
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watcher:
        await self.look()  # counters begin here
        self.task = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.look()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.beat)
            await self.look()

    async def look(self) -> None:
        """One sample; a server that tells nothing leaves it out."""
        if seen := card_use():
            self.cards.append(seen)
        if not self.address:
            return
        with suppress(Exception):  # the numbers are an extra: no request fails because of them
            self.samples.append(read_metrics(await asyncio.wait_for(self._page(), REPLY)))

    async def _page(self) -> str:
        async with self.session.get(self.address) as response:
            return str(await response.text())

    def summary(self) -> dict[str, float]:
        """Means and peaks in the words of the table; the first and last sample see an idle server."""
        found: dict[str, float] = {}
        busy = self.samples[1:-1]
        if busy:
            running = [sample.get(RUNNING, 0.0) for sample in busy]
            found |= {"running_mean": round(sum(running) / len(running), 1), "running_max": max(running)}
            found["waiting_max"] = max(sample.get(WAITING, 0.0) for sample in busy)
            cache = [sample[name] for sample in busy for name in CACHE if name in sample]
            found |= {"kv_cache_percent_max": round(100 * max(cache), 2)} if cache else {}
        for name, short in ((PREEMPTIONS, "preemptions"), (CACHED, "prefix_cache_hits")):
            if len(self.samples) > 1 and name in self.samples[-1]:
                found[short] = self.samples[-1][name] - self.samples[0].get(name, 0.0)
        if self.cards[1:-1]:
            uses = self.cards[1:-1]
            found["gpu_percent_mean"] = round(sum(use for use, _ in uses) / len(uses), 1)
            found["gpu_gib_max"] = round(max(gib for _, gib in uses), 2)
        return found


def read_metrics(text: str) -> dict[str, float]:
    """The values of a Prometheus page by name, summed over engines; shares are the highest of all instead."""
    values: dict[str, float] = {}
    for name, number in LINE.findall(text):
        value = float(number)
        values[name] = max(values.get(name, 0.0), value) if name in CACHE else values.get(name, 0.0) + value
    return values


def card_use() -> tuple[float, float] | None:
    """How busy the busiest card is in percent, and the GiB it holds; None without a card or its driver's library."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
        uses = [
            (float(pynvml.nvmlDeviceGetUtilizationRates(one).gpu), pynvml.nvmlDeviceGetMemoryInfo(one).used / GIB)
            for one in cards
        ]
    except Exception:  # no driver, no library, or a virtual card that does not tell
        return None
    return max(uses, default=None)
