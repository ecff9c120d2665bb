"""A server that is up already: lesson 05 leaves a note about it, and whoever needs that very model can ask it.

Not here: starting and stopping one (server). A note proves nothing; only an answer from that model does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request

import psutil

from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.paths import read_json, stamp, write_json
from nbutils.serving import keys
from nbutils.serving.ports import DIRECT, reach_directly
from nbutils.serving.server import Server

NOTE = "server.json"  # in the run folder
AT_ONCE = 32
LONGEST = 1 << 20  # bytes of an answer: whatever listens there by now need not be a server of ours


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
        """Greedy answers to numbered prompts given as tokens, so that the server sees what `generate` would."""
        from openai import OpenAI
        from tqdm.auto import tqdm

        reach_directly("127.0.0.1")
        client = OpenAI(base_url=self.url, api_key=own_key(self) or keys.NO_KEY)
        one = partial(self._answer, client, max_tokens)
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            found = pool.map(one, prompts.values())
            yield from zip(prompts, tqdm(found, total=len(prompts), desc="requests", unit="row"), strict=True)

    def _answer(self, client: Any, max_tokens: int, prompt: list[int]) -> Answer:
        from openai import OpenAIError

        try:
            response = client.completions.create(
                model=self.model_name, prompt=prompt, max_tokens=max_tokens, temperature=0.0,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        except OpenAIError as problem:
            raise CourseError(
                f"the server at {self.url} did not answer: {problem}.", "a server that takes these prompts",
                "stop it in lesson 05 and run this cell again: answers that are here already are kept",
            ) from problem  # fmt: skip
        choice = response.choices[0]
        return Answer(prompt, list(choice.token_ids), choice.text, choice.finish_reason == "stop")


def leave_note(server: Server, run: Path) -> None:
    """Tell later lessons of this run that the server is up."""
    assert server.process
    about = Running(
        server.url, server.model_name, server.model, stamp(Path(server.model)), server.process.pid,
        server.environment.engine,
    )  # fmt: skip
    write_json(run / NOTE, asdict(about))


def running(run: Path, folder: Path) -> Running | None:
    """The server noted in a run folder, if it answers, takes tokens, and serves this very model; else None."""
    try:
        noted = Running(**read_json(run / NOTE))
        same = Path(noted.folder) == folder.absolute() and noted.stamp == stamp(folder) and noted.stamp is not None
        return noted if same and noted.engine.startswith("vllm") and _serves(noted) else None
    # Whatever else listens there by now may answer anything.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, HTTPException):
        return None


def _serves(noted: Running) -> bool:
    """Whether the one who answers there, on this machine, loaded that folder."""
    if noted.url not in [f"http://{host}:{urlsplit(noted.url).port}/v1" for host in keys.LOOPBACK]:
        return False
    key = own_key(noted)
    request = Request(f"{noted.url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    with DIRECT.open(request, timeout=3.0) as answer:
        listed = json.loads(answer.read(LONGEST)).get("data", [])
    return any(one.get("id") == noted.model_name and one.get("root") == noted.folder for one in listed)


def own_key(noted: Running) -> str | None:
    """The key of a server that this user's own process runs at that port, read from that process.

    Anyone could write a note, or listen there by now; neither is sent a key.
    """
    with suppress(psutil.Error, OSError):
        process, port = psutil.Process(noted.pid), urlsplit(noted.url).port
        family = {process.pid, *(child.pid for child in process.children(recursive=True))}
        sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        listening = {one.pid for one in sockets if one.laddr and one.laddr.port == port}
        if process.uids().real == os.getuid() and listening & family:
            return process.environ().get(keys.VARIABLE)
    return None
