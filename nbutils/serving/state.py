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
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request

import psutil

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.paths import read_json, stamp, write_json
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
        from openai import OpenAI, OpenAIError

        reach_directly("127.0.0.1")
        client = OpenAI(base_url=self.url, api_key=own_key(self) or NO_KEY)
        options: Any = {"max_tokens": max_tokens, "temperature": 0.0, "extra_body": {"return_token_ids": True}}

        def one(prompt: list[int]) -> Answer:
            try:
                response = client.completions.create(model=self.model_name, prompt=prompt, **options)
            except OpenAIError as error:
                raise CourseError("serving.lost_server", url=self.url, error=error) from error
            choice: Any = response.choices[0]
            return Answer(prompt, list(choice.token_ids), choice.text, choice.finish_reason == "stop")

        yield from zip(prompts, concurrently(one, prompts.values()), strict=True)


def leave_note(server: Server, run: Path) -> None:
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


@dataclass(frozen=True)
class Stale:
    """A leftover server, and the kernel that started it."""

    pid: int  # of the supervisor, which leads the server's process group
    owner: int
    owner_alive: bool
    model: str
    port: int

    def __str__(self) -> str:
        whose = "this kernel" if self.owner == os.getpid() else f"another kernel (process {self.owner})"
        whose = whose if self.owner_alive else f"a kernel that is gone (process {self.owner})"
        return f"a server of {self.model} is still up on port {self.port} (process {self.pid}), started by {whose}"


def make_way(run: Path, stop_others: bool = False) -> None:
    """Stop the leftover servers of a run; that of another living kernel only with `stop_others`."""
    while left := stale(run):
        if left.owner_alive and left.owner != os.getpid() and not stop_others:
            raise CourseError("serving.other_kernel", server=left, port=left.port)
        print(f"{left}: it is stopped now", flush=True)
        for server in list(SERVERS.values()):
            if server.process and server.process.pid == left.pid:
                server.stop()  # this kernel's own: the thread that watches it must know
        processes.end(left.pid, GRACE_SECONDS)
        if members := processes.members(left.pid):
            raise CourseError("serving.cannot_stop", server=left, processes=", ".join(map(str, members)))


def stale(run: Path) -> Stale | None:
    """A leftover server of a run, by its note or the folder it works in; None if there is none."""
    try:
        noted = int(read_json(run / NOTE)["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        noted = -1
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError, IndexError):
            found = _leftover(process)
            if found and (found.pid == noted or Path(process.cwd()).is_relative_to(run.absolute())):
                return found
    return None


def _leftover(process: psutil.Process) -> Stale | None:
    """A process as the supervisor of a server; None for any other."""
    words = process.cmdline()
    if str(processes.SUPERVISOR) not in words or processes.is_gone(process.pid):
        return None
    owner = int(words[words.index(str(processes.SUPERVISOR)) + 1])
    values = dict(pairwise(words))
    model = values.get("--served-model-name") or values.get("--model") or "a model"
    return Stale(process.pid, owner, psutil.pid_exists(owner), model, int(values.get("--port", 0)))
