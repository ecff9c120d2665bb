"""Watching a server that is up: a thread notices within seconds when it, or the engine behind it, is gone, and tells.

Not here: why it ended while starting (server, logs). Who asked the server finds the cause by its address.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.serving import logs
from nbutils.serving.ports import health

if TYPE_CHECKING:
    from nbutils.serving.server import Server

EVERY_SECONDS = 1.0
SERVERS: WeakValueDictionary[str, Server] = WeakValueDictionary()  # those this kernel started, by address


class Watcher(threading.Thread):
    """Looks at one running server until it is stopped or gone."""

    def __init__(self, server: Server) -> None:
        super().__init__(name=f"watch-{server.port}", daemon=True)
        assert server.process
        self.server, self.leader = server, server.process
        self.engines = processes.engines(self.leader.pid)
        self.done = threading.Event()

    def run(self) -> None:
        """Look every second; the first trouble is told and ends the server's processes."""
        while not self.done.wait(EVERY_SECONDS):
            if trouble := self.trouble():
                if not self.done.is_set():
                    self.server.fail(trouble)
                return

    def trouble(self) -> str:
        """What is wrong with the server; empty if nothing is."""
        status = self.leader.poll()
        lost = [process.pid for process in self.engines if processes.is_gone(process)]
        signs = [f"its process ended (exit status {status})"] if status is not None else []
        if lost:
            signs.append(f"its engine (process {lost[0]}) is gone: it crashed, or the system or somebody killed it")
        if not signs and health(self.server.root) == 503:
            signs.append("it says itself that its engine is dead")
        return ", ".join(signs)


def failed(server: Server, trouble: str) -> CourseError:
    """What is told about a server that was up and is not any more."""
    cause = logs.cause(server.log)
    return CourseError(
        f"the server at {server.url} is gone: {trouble}." + (f"\n{cause}" if cause else ""), "a server that stays up",
        f"run the cell that starts it again; memory is the usual reason (fewer max-num-seqs, a shorter max-model-len,"
        f" a smaller gpu-memory-utilization); the whole log is {server.log}",
    )  # fmt: skip


def cause(url: str, patience: float = 3.0) -> CourseError | None:
    """Why the server of this address does not answer, if this kernel started it and it failed."""
    server = SERVERS.get(url.rstrip("/"))
    deadline = time.monotonic() + patience
    while server and server.failure is None and server.process and time.monotonic() < deadline:
        time.sleep(0.1)  # the connection breaks, and the process ends, a moment before the watcher looks
    return server.failure if server is not None else None


def cell_events(action: str, hook: Any) -> None:
    """Add or remove a hook that runs after each notebook cell, where there is a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        with suppress(ValueError):
            getattr(shell.events, action)("post_run_cell", hook)
