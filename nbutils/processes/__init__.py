"""Groups of processes that end with this kernel: how one is started (supervise leads it), who lives in it, its end.

Not here: what runs in one: servers (serving), the steps of a build (environments).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

SUPERVISOR = Path(__file__).with_name("supervise.py")


def supervised(
    command: list[str], env: Mapping[str, str], cwd: Path, output: IO[bytes], grace: float, fds: Collection[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own, which ends when this process does; `fds` stay open until then."""
    leader = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(grace)]
    return subprocess.Popen(
        [*leader, *command], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True, pass_fds=fds,
    )  # fmt: skip


def run(
    command: list[str], env: Mapping[str, str], log: Path, tell: Callable[[float], object] = lambda seconds: None,
    *, grace: float = 5.0, beat: float = 20.0, fds: Collection[int] = (),
) -> int:  # fmt: skip
    """Run a supervised command to its end with its words in the log; its status. `tell` hears the seconds each beat."""
    started = time.monotonic()
    with open(log, "ab") as output:
        running = supervised(command, env, log.parent, output, grace, fds)
    try:
        while True:
            try:
                return running.wait(beat)
            except subprocess.TimeoutExpired:
                tell(time.monotonic() - started)
    finally:
        end(running, grace)


def end(leader: subprocess.Popen[bytes], grace: float) -> None:
    """End a supervised command and every process it made."""

    def gone(seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(seconds)

    end_group(leader.pid, grace, gone)
    leader.wait()


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
