"""Servers that are up already: the one lesson 05 noted in a run folder, and those an earlier start left over.

A note proves nothing: a server is used only if it answers with that very model, and gets its key only from the
process that really listens there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request

import psutil

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.files import read_json, stamp, write_json
from nbutils.platforms.network import THIS_MACHINE
from nbutils.serving.client import concurrently
from nbutils.serving.ports import DIRECT, KEY_VARIABLE, NO_KEY, reach_directly
from nbutils.serving.server import GRACE_SECONDS, SERVERS, Server

NOTE = "server.json"  # in the run folder
LARGEST_ANSWER = 2**20  # bytes: whatever listens there by now need not be a server of ours


@dataclass(frozen=True)
class Running:
    """Where a server answers, under which name, and which model folder it loaded."""

    url: str
    model_name: str
    folder: str
    stamp: dict[str, Any] | None
    pid: int
    engine: str

    def answers(self, prompts: dict[int, list[int]], max_tokens: int) -> Iterator[tuple[int, Answer]]:
        """Greedy answers to numbered prompts given as token ids, so that the server sees what `generate` would."""
        from openai import OpenAI

        reach_directly("127.0.0.1")
        client = OpenAI(base_url=self.url, api_key=own_key(self) or NO_KEY)
        options: Any = {"max_tokens": max_tokens, "temperature": 0.0, "extra_body": {"return_token_ids": True}}

        def one(prompt: list[int]) -> Answer:
            choice: Any = client.completions.create(model=self.model_name, prompt=prompt, **options).choices[0]
            return Answer(prompt, list(choice.token_ids), choice.text, choice.finish_reason == "stop")

        yield from zip(prompts, concurrently(one, prompts.values(), self.url), strict=True)


def write_server_note(server: Server, run: Path) -> None:
    """Note in the run folder that this server is up; the key is not in it."""
    assert server.process
    model, pid, engine = Path(server.model), server.process.pid, server.environment.engine
    write_json(run / NOTE, asdict(Running(server.url, server.model_name, server.model, stamp(model), pid, engine)))


def running(run: Path, folder: Path) -> Running | None:
    """The server noted in a run folder, if it answers, takes token ids, and serves this very model; else None."""
    try:
        noted = Running(**read_json(run / NOTE))
        same = Path(noted.folder) == folder.absolute() and noted.stamp == stamp(folder) and noted.stamp is not None
        return noted if same and noted.engine.startswith("vllm") and _serves(noted) else None
    # Whatever else listens there by now may answer anything.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, HTTPException):
        return None


def _serves(noted: Running) -> bool:
    """Whether a server on this machine answers there that it loaded that folder."""
    if noted.url not in [f"http://{host}:{urlsplit(noted.url).port}/v1" for host in THIS_MACHINE]:
        return False
    key = own_key(noted)
    request = Request(f"{noted.url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    with DIRECT.open(request, timeout=3.0) as answer:
        listed = json.loads(answer.read(LARGEST_ANSWER)).get("data", [])
    return any(model.get("id") == noted.model_name and model.get("root") == noted.folder for model in listed)


def own_key(noted: Running) -> str | None:
    """The key of a server, read from the process of this user that listens on its port; else None."""
    with suppress(psutil.Error, OSError):
        process, port = psutil.Process(noted.pid), urlsplit(noted.url).port
        family = {process.pid, *(child.pid for child in process.children(recursive=True))}
        sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        listening = {one.pid for one in sockets if one.laddr and one.laddr.port == port}
        if process.uids().real == os.getuid() and listening & family:
            return process.environ().get(KEY_VARIABLE)
    return None


def stop_leftover_servers(run: Path, stop_others: bool = False) -> None:
    """Stop the leftover servers of a run; that of another living kernel only with `stop_others`."""
    for pid, owner, port in leftovers(run):
        if owner != os.getpid() and psutil.pid_exists(owner) and not stop_others:
            raise CourseError("serving.other_kernel", pid=pid, owner=owner, port=port)
        print(f"A server is still up on port {port} (process {pid}): it is stopped now.", flush=True)
        for server in SERVERS.values():
            if server.process and server.process.pid == pid:
                server.stop()
        processes.end(pid, GRACE_SECONDS)


def leftovers(run: Path) -> list[tuple[int, int, str]]:
    """The servers that work in a run folder: supervisor, the kernel that started it, and port."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError, IndexError):
            words = process.cmdline()
            at = words.index(str(processes.SUPERVISOR))
            if "--port" in words and Path(process.cwd()).is_relative_to(run.absolute()):
                found.append((process.pid, int(words[at + 1]), words[words.index("--port") + 1]))
    return found
