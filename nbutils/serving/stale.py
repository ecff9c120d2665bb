"""A server of this run that somebody else left up: a kernel that was killed, another notebook, an earlier cell.

Not here: asking one that is up (running). Found by the note in the run folder and by our supervisor among the machine's
processes, as a note may be old and a server may have left none.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.processes import SUPERVISOR
from nbutils.serving import flags, watching
from nbutils.serving.running import NOTE
from nbutils.serving.server import GRACE_SECONDS


@dataclass(frozen=True)
class Stale:
    """A server that is still up, and who started it."""

    pid: int  # of the supervisor, which leads the server's group
    owner: int  # the kernel that started it
    owner_alive: bool
    model: str
    port: int
    run: Path

    def __str__(self) -> str:
        whose = "this kernel" if self.owner == os.getpid() else f"another kernel (process {self.owner})"
        whose = whose if self.owner_alive else f"a kernel that is gone (process {self.owner})"
        return f"a server of {self.model} is still up on port {self.port} (process {self.pid}), started by {whose}"

    def stop(self) -> None:
        """End it and every process it made, whoever started it."""
        for server in list(watching.SERVERS.values()):
            if server.process and server.process.pid == self.pid:
                return server.stop()  # this kernel's own: its watcher must know that it was meant
        processes.end_group(self.pid, GRACE_SECONDS, self._gone)
        if left := processes.members(self.pid):
            raise CourseError(
                f"{self}, and it could not be ended (processes {', '.join(map(str, left))}).",
                "a server of this user", "let the user who started it stop it, or use another RUN_NAME",
            )  # fmt: skip
        return None

    def _gone(self, seconds: float) -> None:
        with suppress(psutil.Error):  # a child of this process is a zombie until its Server collects it
            deadline = time.monotonic() + seconds
            leader = psutil.Process(self.pid)
            while not processes.is_gone(leader) and time.monotonic() < deadline:
                time.sleep(0.05)


def make_way(run: Path, stop_others: bool = False) -> None:
    """End the servers an earlier start left up in this run; that of another living kernel only if told to."""
    while left := stale(run):
        if left.owner_alive and left.owner != os.getpid() and not stop_others:
            raise CourseError(
                f"{left}.", "one server at a time for a run: it holds the memory this one needs",
                f"ask that one (http://127.0.0.1:{left.port}/v1), close its notebook, or set STOP_OTHERS to True",
            )  # fmt: skip
        print(f"{left}: it is stopped now", flush=True)
        left.stop()


def stale(run: Path) -> Stale | None:
    """The server left up in this run folder; None if there is none. Call it again after `stop()`: there may be more."""
    noted = _noted(run)
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError, IndexError):
            found = _as_server(process, run)
            if found and (found.pid == noted or Path(process.cwd()).is_relative_to(run.absolute())):
                return found
    return None


def _as_server(process: psutil.Process, run: Path) -> Stale | None:
    """A process as one of our supervisors; None for any other."""
    words = process.cmdline()
    if str(SUPERVISOR) not in words or processes.is_gone(process):
        return None
    owner, _, *command = words[words.index(str(SUPERVISOR)) + 1 :]
    named = flags.value_of(command, "served-model-name") or flags.value_of(command, "model") or "a model"
    port = int(flags.value_of(command, "port") or 0)
    return Stale(process.pid, int(owner), psutil.pid_exists(int(owner)), named, port, run)


def _noted(run: Path) -> int:
    try:
        return int(json.loads((run / NOTE).read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
