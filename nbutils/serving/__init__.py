"""Serving a model: an engine in an environment of its own, a server that ends with its kernel, its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from nbutils import processes
from nbutils.chat import Message
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.evaluation.scores import without_thinking
from nbutils.language import tr
from nbutils.serving import server as server_module
from nbutils.serving.engine import (  # noqa: F401
    ServingEnvironment,
    choose_engine,
    ensure_environment,
    flags_for,
    flags_reason,
    free_gpu_memory,
    to_words,
)
from nbutils.serving.server import SERVERS, Server, preferred_port, public_address  # noqa: F401

if TYPE_CHECKING:
    from openai import OpenAI

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
    opens_thinking: bool = False,
    token_ids: bool = True,
    at_once: int = AT_ONCE,
) -> list[Answer]:
    """Greedy answers in the order of the conversations, `at_once` requests in flight; `tools` of each, if any.

    `opens_thinking`: whether the prompts end with `<think>`, and the server gives thoughts apart.
    vLLM returns token ids, too; `transformers serve` refuses a request for them (`token_ids=False`).

    Example: ask(server.client(), "course", [[{"role": "user", "content": "Hello"}]], max_tokens=64)
    """

    def send(index: int) -> Answer:
        extra: dict[str, Any] = {}
        if token_ids:
            extra["return_token_ids"] = True
        if tools and tools[index]:
            extra["tools"] = tools[index]
            extra["tool_choice"] = "none"  # calls come back as text
        response: Any = client.chat.completions.create(
            model=model_name,
            messages=to_openai(conversations[index]),
            max_tokens=max_tokens,
            temperature=0.0,
            extra_body=extra,
        )
        choice = response.choices[0]
        return Answer(
            prompt_ids=getattr(response, "prompt_token_ids", None) or [],
            token_ids=getattr(choice, "token_ids", None) or [],
            text=generated_text(choice.message, opens_thinking),
            stopped=choice.finish_reason == "stop",
        )

    return send_concurrently(send, range(len(conversations)), str(client.base_url), at_once)


def generated_text(message: Any, opens_thinking: bool = False) -> str:
    """The text of an answer with the thoughts before it, which a server may give apart.

    An answer without thoughts has ended those that the prompt opened.

    Example: print(generated_text(response.choices[0].message))
    """
    text = with_thoughts(thoughts(message), message.content or "")
    if opens_thinking and text and "think>" not in text:
        return f"</think>{text}"
    return text


def thoughts(message: Any) -> str:
    """The thoughts in a message, or in a piece of one, where a server gives them apart.

    Example: print(thoughts(chunk.choices[0].delta), end="")
    """
    return getattr(message, "reasoning", "") or getattr(message, "reasoning_content", "") or ""  # vLLM, transformers


def with_thoughts(thinking: str, answer: str) -> str:
    """Thoughts and answer as a model writes them; thoughts that no answer follows have not ended.

    Example: with_thoughts("2 and 2", "4") == "<think>2 and 2</think>4"
    """
    if not thinking:
        return answer
    end = "</think>" if answer else ""
    return f"<think>{thinking}{end}{answer}"


def to_openai(conversation: list[Message]) -> list[Any]:
    """Messages as OpenAI's API has them: with the arguments of tool calls as JSON text."""
    messages = []
    for message in conversation:
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = dict(call["function"])
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append({"id": f"call_{number}", "type": "function", **call, "function": function})
        messages.append(message | {"tool_calls": calls} if calls else message)
    return messages


def send_concurrently(
    request: Callable[[Item], Result], items: Collection[Item], url: str, at_once: int = AT_ONCE
) -> list[Result]:
    """The answers to many requests in the order of the items; the first that fails cancels the rest."""
    from httpx import HTTPError  # where a stream breaks off
    from openai import OpenAIError
    from tqdm.contrib.concurrent import thread_map

    try:
        return list(thread_map(request, items, max_workers=at_once, desc=tr("requests"), unit=tr("row")))
    except (OpenAIError, HTTPError) as error:
        if server := SERVERS.get(url.rstrip("/")):
            time.sleep(1.0)  # a connection breaks a moment before the process has ended
            server.require_running()
        raise CourseError(
            "A request to the server at {url} failed: {error}",
            todo="Use server.client(), correct what it names, or run the cell that starts the server again.",
            url=url,
            error=error,
        ) from error


@dataclass(frozen=True)
class AnswerParity:
    """How many answers are the same in two places, how many prompts, and the first difference in words.

    Without the token ids of a server, texts are compared, and no prompts.
    """

    identical: int
    total: int
    same_prompts: int
    by_token: bool
    difference: str

    def __str__(self) -> str:
        line = tr("{parity.identical} of {parity.total} answers are the same.", parity=self)
        if self.by_token:
            line += tr(" So are {parity.same_prompts} of {parity.total} prompts.", parity=self)
        return f"{line}\n{self.difference}".strip()

    def require(self, dtype: str) -> None:
        """Stop unless prompts and answers agree; in 16 bits only prompts must, as rounding may change an answer."""
        prompts_differ = self.by_token and self.same_prompts < self.total
        if self.difference and (dtype == "float32" or prompts_differ):
            raise CourseError(
                str(self),
                todo="Serve the folder lesson 04 wrote, with its own chat template and generation config.",
            )


def compare_answers(served: Sequence[Answer], stored: Sequence[Answer]) -> AnswerParity:
    """Compare answer by answer: by tokens where the server returned them, else by the text after the thoughts.

    Example: print(compare_answers(serving.ask(...), stored))
    """
    by_token = all(answer.prompt_ids for answer in served)
    same_prompts = 0
    same_answers = 0
    difference = ""
    for ours, theirs in zip(served, stored, strict=True):
        same_prompt = ours.prompt_ids == theirs.prompt_ids
        same_text = without_thinking(ours.text) == without_thinking(theirs.text)
        same_answer = ours.token_ids == theirs.token_ids if by_token else same_text
        same_prompts += same_prompt
        same_answers += same_answer
        is_same = same_answer and (same_prompt or not by_token)
        if not is_same and not difference:
            difference = tr(
                "The first that differs: {served!r} from the server, {stored!r} in lesson 04.",
                served=ours.text,
                stored=theirs.text,
            )
    return AnswerParity(same_answers, len(stored), same_prompts, by_token, difference)


def stop_leftover_servers(run: Path, stop_others: bool = False) -> None:
    """Stop this kernel's servers, and those that work in a run folder; another kernel's only with `stop_others`.

    Example: stop_leftover_servers(Path("runs/tiny"))
    """
    for server in SERVERS.values():
        server.stop()
    supervisor = str(processes.SUPERVISOR)
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        folder = process.info["cwd"] or ""
        if supervisor not in words or "--port" not in words or not Path(folder).is_relative_to(run.absolute()):
            continue
        kernel = int(words[words.index(supervisor) + 1])
        if psutil.pid_exists(kernel) and not stop_others:
            raise CourseError(
                "Another kernel (process {kernel}) has a server up for this run (process {pid}).",
                todo="Close its notebook, or set STOP_OTHERS to True.",
                kernel=kernel,
                pid=process.pid,
            )
        processes.end(process.pid, server_module.GRACE_SECONDS)
