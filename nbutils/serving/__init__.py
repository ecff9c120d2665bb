"""Serving a model: an engine in an environment of its own, a server that ends with its kernel, its answers.

The note that lesson 05 leaves in a run folder proves nothing: a server is used, and its key read, only if that very
process is one of this course and serves that very model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Message
from nbutils.files import read_json, stamp, write_json
from nbutils.language import tr
from nbutils.serving import server as one_server
from nbutils.serving.engine import ServingEnvironment, ensure_environment, flags_for, free_gpu_memory, to_words
from nbutils.serving.server import KEY_VARIABLE, NO_KEY, SERVERS, Server, health, preferred_port, public_address

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = [
    "AnswerParity", "Running", "Server", "ServingEnvironment", "ask", "compare", "ensure_environment", "flags_for",
    "free_gpu_memory", "preferred_port", "public_address", "running", "stop_leftover_servers", "to_words",
    "write_server_note",
]  # fmt: skip
NOTE = "server.json"  # in the run folder


def ask(
    client: OpenAI, model_name: str, conversations: Sequence[list[Message]], max_tokens: int, *,
    tools: Sequence[list[Any] | None] = (), token_ids: bool = True, at_once: int = 32,
) -> list[Answer]:  # fmt: skip
    """Greedy answers in the order of the conversations, `at_once` requests in flight; `tools` of each, if any.

    vLLM returns token ids, too; `transformers serve` refuses a request for them (`token_ids=False`).
    """
    options: Any = {"max_tokens": max_tokens, "temperature": 0.0}
    options |= {"extra_body": {"return_token_ids": True}} if token_ids else {}

    def calls(message: Message) -> list[Any]:  # OpenAI's API has the arguments of tool calls as JSON text
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in message["tool_calls"]]
        return [
            {"id": f"call_{number}", "type": "function", **call, "function": call["function"] | {"arguments": text}}
            for number, (call, text) in enumerate(zip(message["tool_calls"], texts, strict=True))
        ]

    def one(asked: tuple[list[Message], Any]) -> Answer:
        conversation, offered = asked
        calling: Any = {"tools": offered, "tool_choice": "none"} if offered else {}  # calls come back as text
        messages: Any = [message | {"tool_calls": calls(message)} if message.get("tool_calls") else message
                         for message in conversation]  # fmt: skip
        response: Any = client.chat.completions.create(model=model_name, messages=messages, **options, **calling)
        choice: Any = response.choices[0]
        ids = (list(response.prompt_token_ids), list(choice.token_ids)) if token_ids else ([], [])
        return Answer(*ids, choice.message.content or "", choice.finish_reason == "stop")

    pairs = list(zip(conversations, tools or [None] * len(conversations), strict=True))
    return list(concurrently(one, pairs, str(client.base_url), at_once))


def concurrently(request: Callable[..., Answer], items: Collection[Any], url: str, at_once: int) -> Iterator[Answer]:
    """The answers to many requests in the order of the items; the first that fails cancels the rest."""
    from openai import OpenAIError
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            yield from tqdm(pool.map(request, items), total=len(items), desc=tr("requests"), unit=tr("row"))
        except OpenAIError as error:
            if server := SERVERS.get(url.rstrip("/")):
                time.sleep(1.0)  # a connection breaks a moment before the process has ended
                server.require()
            raise CourseError(
                tr("A request to the server at {url} failed: {error}", url=url, error=error),
                todo=tr("Use server.client(), correct what it names, or run the cell that starts the server again."),
            ) from error


@dataclass(frozen=True)
class AnswerParity:
    """How many answers, and prompts where the server returns them, are the same in two places."""

    identical: int
    total: int
    same_prompts: int
    by_token: bool
    differences: list[str]

    def __str__(self) -> str:
        line = tr("{identical} of {total} answers are the same, compared as text.", **vars(self))
        if self.by_token:
            counts = tr("{identical} of {total} answers and {same_prompts} of {total} prompts", **vars(self))
            line = tr("{counts} are the same, compared token by token.", counts=counts)
        return "\n".join([line, *self.differences[:1]])

    def require(self, dtype: str) -> None:
        """Stop unless prompts and answers agree; in 16 bits only prompts must, as rounding may change an answer."""
        prompts_differ = self.by_token and self.same_prompts < self.total
        if self.differences and (dtype == "float32" or prompts_differ):
            raise CourseError(
                str(self),
                todo=tr("Serve the folder lesson 04 wrote, with its own chat template and generation config."),
            )


def compare(served: Sequence[Answer], stored: Sequence[Answer]) -> AnswerParity:
    """Compare answer by answer: by tokens where the server returned them, else by text."""
    by_token = all(answer.prompt_ids for answer in served)
    same_prompts, same_answers, differences = 0, 0, []
    for index, (one, other) in enumerate(zip(served, stored, strict=True)):
        same_prompt = by_token and one.prompt_ids == other.prompt_ids
        same_answer = one.token_ids == other.token_ids if by_token else one.text == other.text
        same_prompts, same_answers = same_prompts + same_prompt, same_answers + same_answer
        if by_token and not same_prompt:
            differences.append(tr("Prompt {index} differs: the server uses another chat template.", index=index))
        elif not same_answer:
            both = {"index": index, "served": one.text, "stored": other.text}
            differences.append(
                tr("Answer {index} differs: {served!r} from the server, {stored!r} in lesson 04.", **both)
            )
    return AnswerParity(same_answers, len(stored), same_prompts, by_token, differences)


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

        one_server.reach_directly("127.0.0.1")
        key = psutil.Process(self.pid).environ().get(KEY_VARIABLE)
        client = OpenAI(base_url=self.url, api_key=key or NO_KEY)
        options: Any = {"max_tokens": max_tokens, "temperature": 0.0, "extra_body": {"return_token_ids": True}}

        def one(prompt: list[int]) -> Answer:
            choice: Any = client.completions.create(model=self.model_name, prompt=prompt, **options).choices[0]
            return Answer(prompt, list(choice.token_ids), choice.text, choice.finish_reason == "stop")

        yield from zip(prompts, concurrently(one, prompts.values(), self.url, at_once=32), strict=True)


def write_server_note(server: Server, run: Path) -> None:
    """Note in the run folder that this server is up; the key is not in it."""
    assert server.process
    model, pid, engine = Path(server.model), server.process.pid, server.environment.engine
    write_json(run / NOTE, asdict(Running(server.url, server.model_name, server.model, stamp(model), pid, engine)))


def running(run: Path, folder: Path) -> Running | None:
    """The vLLM server noted in a run folder, if its process still serves this very model; else None."""
    try:
        noted = Running(**read_json(run / NOTE))
        process, current = psutil.Process(noted.pid), stamp(folder)
        found, words = _supervisor(process), process.cmdline()
        if found is None or process.uids().real != os.getuid():
            return None
        port = found[1]
        loaded = words[words.index("--model") + 1] == noted.folder == str(folder.absolute())
        same = loaded and noted.engine.startswith("vllm") and noted.stamp == current is not None
        listens = noted.url == f"http://127.0.0.1:{port}/v1" and processes.listens(noted.pid, int(port))
        return noted if same and listens and health(noted.url.removesuffix("/v1")) == 200 else None
    except (psutil.Error, OSError, ValueError, TypeError, AttributeError):
        return None


def _supervisor(process: psutil.Process) -> tuple[int, str, Path] | None:
    """Of the process that leads a server: the kernel that started it, its port, and the folder it works in."""
    try:
        words = process.cmdline()
        owner, port = words[words.index(str(processes.SUPERVISOR)) + 1], words[words.index("--port") + 1]
        return int(owner), port, Path(process.cwd())
    except (psutil.Error, ValueError, IndexError):
        return None


def stop_leftover_servers(run: Path, stop_others: bool = False) -> None:
    """Stop the servers that work in a run folder; that of another living kernel only with `stop_others`."""
    for process in psutil.process_iter():
        if (found := _supervisor(process)) and found[2].is_relative_to(run.absolute()):
            (owner, port, _), pid = found, process.pid
            if owner != os.getpid() and psutil.pid_exists(owner) and not stop_others:
                raise CourseError(
                    tr(
                        "A server is still up on port {port} (process {pid}), started by another kernel (process "
                        "{owner}).",
                        pid=pid,
                        owner=owner,
                        port=port,
                    ),
                    todo=tr(
                        "Use that one (http://127.0.0.1:{port}/v1), close its notebook, or set STOP_OTHERS to True.",
                        port=port,
                    ),
                )
            print(tr("A server is still up on port {port} (process {pid}): it is stopped now.", port=port, pid=pid))
            for server in SERVERS.values():
                if server.process and server.process.pid == pid:
                    server.stop()
            processes.end(pid, one_server.GRACE_SECONDS)
