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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

SUPERVISOR = Path(__file__)
PR_SET_PDEATHSIG = 1  # Linux: a signal when the parent ends
HANGUP = getattr(signal, "SIGHUP", None)  # the terminal was closed; Windows has no such signal
AT_ONCE: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
if HANGUP:
    AT_ONCE[HANGUP] = signal.SIG_IGN  # a shell repeats what its terminal sent


@contextmanager
def first_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Within this block `handle` gets the first SIGTERM, SIGINT and SIGHUP; a second one, but SIGHUP, acts at once."""

    def first(number: int, frame: object) -> None:
        signal.signal(number, AT_ONCE[number])
        handle(number)

    if sys.stdout and sys.stderr and sys.stdout is sys.__stdout__:  # a plain script: in a terminal that may be closed
        sys.stdout = LastingStream(sys.stdout)
        sys.stderr = LastingStream(sys.stderr)
    before = {number: signal.getsignal(number) for number in AT_ONCE}
    for number, handler in before.items():
        signal.signal(number, handler if handler == signal.SIG_IGN else first)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # as it was before, or the terminal is gone
                signal.signal(number, handler or signal.SIG_DFL)


class LastingStream:
    """A stream that outlives its terminal: once that is gone, what is written goes nowhere, and is no error."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._lasting():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self.stream.flush()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())


def supervised(
    command: list[str], env: Mapping[str, str], cwd: Path, output: IO[bytes], grace: float
) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, which ends when this process does."""
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(grace)]
    return subprocess.Popen(
        [*supervisor, *command],
        env=env,
        cwd=cwd,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def run(command: list[str], env: Mapping[str, str], log: Path, title: str) -> int:
    """Run a supervised command to its end, output to the log; its exit status. The seconds so far are printed."""
    started = time.monotonic()
    with open(log, "ab") as output:
        running = supervised(command, env, log.parent, output, grace=5.0)
    try:
        while True:
            try:
                return running.wait(20.0)
            except subprocess.TimeoutExpired:
                print(f"  {title}: {time.monotonic() - started:.0f} s", flush=True)
    finally:
        end(running.pid, grace=5.0)
        running.wait()


def end(group: int, grace: float) -> None:
    """End a process group: ask it, wait until its leader is gone, then kill who is left and wait for them."""

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + grace
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)

    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        wait_until(lambda: group not in members(group))
        os.killpg(group, signal.SIGKILL)
        wait_until(lambda: not members(group))  # a dying process still holds GPU memory


def members(group: int) -> list[int]:
    """The living processes of a group; a zombie has ended."""
    import psutil

    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def listens(group: int, port: int) -> bool:
    """Whether a process of the group has that port; another user may have taken it first."""
    import psutil

    pids = members(group)
    for connection in psutil.net_connections("tcp"):
        listening = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
        if listening and connection.pid in pids:
            return True
    return False


def _supervise(parent: int, grace: float, command: list[str]) -> int:
    """Run the command until it or the parent ends; its exit status, 128 + N if signal N ended it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the whole group gets it; this process leaves last
    end_with_parent = None
    if sys.platform.startswith("linux"):
        prctl = ctypes.CDLL(None).prctl  # looked up before the fork
        end_with_parent = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    child = subprocess.Popen(command, preexec_fn=end_with_parent)
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(os.getpgrp(), signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace)
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(0.2)
    status = child.returncode
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
