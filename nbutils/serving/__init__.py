"""Serving a model: an engine in an environment of its own, a server that ends with its kernel, its answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from nbutils import processes
from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Message
from nbutils.language import tr
from nbutils.serving import server as server_module
from nbutils.serving.engine import ServingEnvironment, ensure_environment, flags_for, free_gpu_memory, to_words
from nbutils.serving.server import SERVERS, Server, preferred_port, public_address

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = [
    "AnswerParity",
    "Server",
    "ServingEnvironment",
    "ask",
    "compare",
    "ensure_environment",
    "flags_for",
    "free_gpu_memory",
    "preferred_port",
    "public_address",
    "send_concurrently",
    "stop_leftover_servers",
    "to_words",
]
AT_ONCE = 32  # requests in flight
Item = TypeVar("Item")
Result = TypeVar("Result")


def ask(
    client: OpenAI,
    model_name: str,
    conversations: Sequence[list[Message]],
    max_tokens: int,
    *,
    tools: Sequence[list[Any] | None] = (),
    token_ids: bool = True,
    at_once: int = AT_ONCE,
) -> list[Answer]:
    """Greedy answers in the order of the conversations, `at_once` requests in flight; `tools` of each, if any.

    vLLM returns token ids, too; `transformers serve` refuses a request for them (`token_ids=False`).

    Example: ask(server.client(), "course", [[{"role": "user", "content": "Hello"}]], max_tokens=64)
    """
    options: dict[str, Any] = {"model": model_name, "max_tokens": max_tokens, "temperature": 0.0}
    if token_ids:
        options["extra_body"] = {"return_token_ids": True}
    requests = []
    for index, conversation in enumerate(conversations):
        request = options | {"messages": to_openai(conversation)}
        if tools and tools[index]:
            request |= {"tools": tools[index], "tool_choice": "none"}  # calls come back as text
        requests.append(request)
    return list(send_concurrently(partial(send, client), requests, str(client.base_url), at_once))


def to_openai(conversation: list[Message]) -> list[Message]:
    """Messages as OpenAI's API has them: with the arguments of tool calls as JSON text."""
    messages = []
    for message in conversation:
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            function = call["function"] | {"arguments": arguments}
            calls.append({"id": f"call_{number}", "type": "function", **call, "function": function})
        messages.append(message | {"tool_calls": calls} if calls else message)
    return messages


def send(client: OpenAI, request: dict[str, Any]) -> Answer:
    """The answer to one chat request; the token ids are those that vLLM adds when it is asked for them."""
    response: Any = client.chat.completions.create(**request)
    choice = response.choices[0]
    return Answer(
        prompt_ids=getattr(response, "prompt_token_ids", None) or [],
        token_ids=getattr(choice, "token_ids", None) or [],
        text=choice.message.content or "",
        stopped=choice.finish_reason == "stop",
    )


def send_concurrently(
    request: Callable[[Item], Result], items: Collection[Item], url: str, at_once: int = AT_ONCE
) -> Iterator[Result]:
    """The answers to many requests in the order of the items; the first that fails cancels the rest."""
    from httpx import HTTPError  # where a stream breaks off
    from openai import OpenAIError
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            yield from tqdm(pool.map(request, items), total=len(items), desc=tr("requests"), unit=tr("row"))
        except (OpenAIError, HTTPError) as error:
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
        if self.by_token:
            line = tr(
                "{identical} of {total} answers and {same_prompts} of {total} prompts are the same, compared token by"
                " token.",
                identical=self.identical,
                total=self.total,
                same_prompts=self.same_prompts,
            )
        else:
            line = tr(
                "{identical} of {total} answers are the same, compared as text.",
                identical=self.identical,
                total=self.total,
            )
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
    """Compare answer by answer: by tokens where the server returned them, else by text.

    Example: print(compare(serving.ask(...), stored))
    """
    by_token = all(answer.prompt_ids for answer in served)
    same_prompts = 0
    same_answers = 0
    differences = []
    for index, (ours, theirs) in enumerate(zip(served, stored, strict=True)):
        same_answer = ours.token_ids == theirs.token_ids if by_token else ours.text == theirs.text
        same_answers += same_answer
        if by_token and ours.prompt_ids != theirs.prompt_ids:
            differences.append(tr("Prompt {index} differs: the server uses another chat template.", index=index))
            continue
        same_prompts += by_token
        if not same_answer:
            differences.append(
                tr(
                    "Answer {index} differs: {served!r} from the server, {stored!r} in lesson 04.",
                    index=index,
                    served=ours.text,
                    stored=theirs.text,
                )
            )
    return AnswerParity(same_answers, len(stored), same_prompts, by_token, differences)


@dataclass(frozen=True)
class Leader:
    """The process that leads a server: the kernel that started it, its port, and the folder it works in."""

    kernel: int
    port: str
    folder: Path


def find_leader(process: psutil.Process) -> Leader | None:
    """What a process says of the server it leads; None if it leads none."""
    try:
        words = process.cmdline()
        kernel = words[words.index(str(processes.SUPERVISOR)) + 1]
        port = words[words.index("--port") + 1]
        return Leader(int(kernel), port, Path(process.cwd()))
    except (psutil.Error, ValueError, IndexError):
        return None


def stop_leftover_servers(run: Path, stop_others: bool = False) -> None:
    """Stop the servers that work in a run folder; that of another living kernel only with `stop_others`.

    Example: stop_leftover_servers(Path("runs/tiny"))
    """
    for process in psutil.process_iter():
        leader = find_leader(process)
        if leader is None or not leader.folder.is_relative_to(run.absolute()):
            continue
        pid = process.pid
        is_others = leader.kernel != os.getpid() and psutil.pid_exists(leader.kernel)
        if is_others and not stop_others:
            raise CourseError(
                tr(
                    "A server is still up on port {port} (process {pid}), started by another kernel (process {owner}).",
                    pid=pid,
                    owner=leader.kernel,
                    port=leader.port,
                ),
                todo=tr(
                    "Use that one (http://127.0.0.1:{port}/v1), close its notebook, or set STOP_OTHERS to True.",
                    port=leader.port,
                ),
            )
        print(tr("A server is still up on port {port} (process {pid}): it is stopped now.", port=leader.port, pid=pid))
        for server in SERVERS.values():
            if server.process and server.process.pid == pid:
                server.stop()
        processes.end(pid, server_module.GRACE_SECONDS)
