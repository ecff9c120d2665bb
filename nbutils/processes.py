"""Commands that end with this kernel, however it ends: a supervisor leads their process group and watches its parent.

This file is that supervisor, too (`python -I -S processes.py`), so at the top it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

SUPERVISOR = Path(__file__)
PR_SET_PDEATHSIG = 1  # Linux: a signal when the parent ends
POLL_SECONDS = 0.2


def supervised(
    command: list[str], env: Mapping[str, str], cwd: Path, output: IO[bytes], grace: float
) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, which ends when this process does."""
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(grace)]
    return subprocess.Popen(
        [*supervisor, *command], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def run(command: list[str], env: Mapping[str, str], log: Path, report: Callable[[float], object]) -> int:
    """Run a supervised command to its end, output to the log; its exit status. `report` gets the seconds so far."""
    started = time.monotonic()
    with open(log, "ab") as output:
        running = supervised(command, env, log.parent, output, grace=5.0)
    try:
        while True:
            try:
                return running.wait(20.0)
            except subprocess.TimeoutExpired:
                report(time.monotonic() - started)
    finally:
        end(running.pid, grace=5.0)
        running.wait()


def end(group: int, grace: float) -> None:
    """End a process group: ask it, wait until its leader is gone, then kill who is left and wait for them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        _wait_until(lambda: is_gone(group), grace)
        os.killpg(group, signal.SIGKILL)
        _wait_until(lambda: not members(group), grace)  # a dying process still holds GPU memory


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def members(group: int) -> list[int]:
    """The living processes of a group."""
    import psutil

    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group and not is_gone(pid):
                found.append(pid)
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _supervise(parent: int, grace: float, command: list[str]) -> int:
    """Run the command until it or the parent ends; its exit status, 128 + N if signal N ended it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the whole group gets it; this process leaves last
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None  # looked up before the fork
    child = subprocess.Popen(command, preexec_fn=(lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if prctl else None)
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(os.getpgrp(), signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace)
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
