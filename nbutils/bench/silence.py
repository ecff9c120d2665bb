"""How long a server may say nothing to anybody before a level ends: a word now and then, then the end.

Not here: the requests (load). One that waits in line while others are answered meets no silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

WORD = 30.0  # seconds of silence between two words about it
BEAT = 0.1


class Patience:
    """`heard()` at every byte; `through(work)` waits for the work as long as something is heard."""

    def __init__(self, limit: float) -> None:
        self.limit, self.last, self.words = limit, time.monotonic(), 0

    def heard(self) -> None:
        """Something came."""
        self.last, self.words = time.monotonic(), 0

    async def through(self, work: Coroutine[Any, Any, None]) -> str:
        """Wait for the work; "" when it is done, or why it was given up."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=BEAT))[0]:
                quiet = time.monotonic() - self.last
                if quiet > self.limit:
                    return f"the server was silent for {self.limit:.0f} s"
                self._tell(quiet)
            task.result()
            return ""
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _tell(self, quiet: float) -> None:
        """A word after each `WORD` seconds."""
        if quiet > WORD * (self.words + 1):
            self.words += 1
            print(f"  the server has been silent for {quiet:.0f} s; given up after {self.limit:.0f} s", flush=True)
