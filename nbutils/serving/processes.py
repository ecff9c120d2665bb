"""Groups of processes: who lives in one, and how it is ended for good.

Not here: the server that leads one (server), the one that outlives its kernel (stale).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def end_group(group: int, grace: float, gone: Callable[[float], object]) -> None:
    """Ask a group to end, wait for its leader (`gone` waits so many seconds), then make sure of everybody."""
    signal_group(group, signal.SIGTERM)
    gone(grace)
    signal_group(group, signal.SIGKILL)
    deadline = time.monotonic() + grace
    while members(group) and time.monotonic() < deadline:  # a dying process still holds its card's memory
        time.sleep(0.05)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a group; harmless if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def members(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def engines(leader: int) -> list[psutil.Process]:
    """The processes vLLM computes in; they carry its name in their titles."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith("VLLM::"):
                    found.append(process)
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ended; a zombie has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
