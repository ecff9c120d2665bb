"""Asking a server many questions at once, and comparing its answers with those of plain transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Message
from nbutils.serving.server import failure_at

if TYPE_CHECKING:
    from openai import OpenAI

Tools = list[dict[str, Any]] | None
T = TypeVar("T")


def ask(
    client: OpenAI, model_name: str, conversations: Sequence[list[Message]], max_tokens: int, *,
    tools: Sequence[Tools] = (), token_ids: bool = True, at_once: int = 32,
) -> list[Answer]:  # fmt: skip
    """Greedy answers in the order of the conversations, `at_once` requests in flight; `tools` of each, if any.

    vLLM returns token ids, too; `transformers serve` refuses a request for them (`token_ids=False`).
    """

    from openai import OpenAIError

    options: Any = {"max_tokens": max_tokens, "temperature": 0.0}
    options |= {"extra_body": {"return_token_ids": True}} if token_ids else {}

    def one(conversation: list[Message], offered: Tools) -> Answer:
        calling: Any = {"tools": offered, "tool_choice": "none"} if offered else {}  # calls come back as text
        try:
            messages: Any = [_for_api(message) for message in conversation]
            response = client.chat.completions.create(model=model_name, messages=messages, **options, **calling)
        except OpenAIError as error:
            raise request_failed(error, str(client.base_url)) from error
        choice: Any = response.choices[0]
        prompt, answer = getattr(response, "prompt_token_ids", None), getattr(choice, "token_ids", None)
        if token_ids and (prompt is None or answer is None):
            raise CourseError("serving.no_token_ids")
        text, ended = choice.message.content or "", choice.finish_reason == "stop"
        return Answer(list(prompt or []), list(answer or []), text, ended)

    pairs = list(zip(conversations, tools or [None] * len(conversations), strict=True))
    return list(concurrently(lambda pair: one(*pair), pairs, at_once))


def concurrently(request: Callable[[T], Answer], items: Collection[T], at_once: int = 32) -> Iterator[Answer]:
    """The answers to many requests in the order of the items; the first that fails cancels the rest."""
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            yield from tqdm(pool.map(request, items), total=len(items), desc="requests", unit="row")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def request_failed(error: Exception, url: str) -> CourseError:
    """Why a request failed: the server died, wants a key, does not know the model, or refuses the request."""
    if died := failure_at(url):
        return died
    status = getattr(error, "status_code", None)
    if status is None:
        return CourseError("serving.no_answer", url=url, error=error)
    if status == 401:
        return CourseError("serving.wrong_key", url=url)
    if status == 404:
        return CourseError("serving.unknown_model", url=url, error=error)
    return CourseError("serving.request_refused", url=url, error=error)


def _for_api(message: Message) -> Message:
    """A message with the arguments of its tool calls as JSON text, as OpenAI's API has them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {"id": f"call_{number}", "type": "function", **call}
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for number, call in enumerate(message["tool_calls"])
    ]
    return message | {"tool_calls": calls}


@dataclass(frozen=True)
class Parity:
    """How many answers, and prompts where the server returns them, are the same in two places."""

    identical: int
    total: int
    same_prompts: int
    first_difference: str | None
    by: str = "token"

    @property
    def full(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None and self.identical == self.total

    def __str__(self) -> str:
        prompts = f"{self.same_prompts} of {self.total} prompts identical"
        prompts = prompts if self.by == "token" else "prompts not returned by this server"
        line = f"parity: {self.identical} of {self.total} answers identical ({self.by} by {self.by}), {prompts}"
        return line if self.first_difference is None else f"{line}\n  {self.first_difference}"


def compare(answers_server: Sequence[Answer], answers_local: Sequence[Answer]) -> Parity:
    """Compare answer by answer: by tokens where the server returned them, else by text."""
    if len(answers_server) != len(answers_local) or not answers_local:
        raise CourseError("serving.answer_count", server=len(answers_server), local=len(answers_local))
    by_token = all(answer.prompt_ids for answer in answers_server)
    same_prompts, same_answers, differences = 0, 0, []
    for index, (server, local) in enumerate(zip(answers_server, answers_local, strict=True)):
        ours, theirs = (server.token_ids, local.token_ids) if by_token else (server.text, local.text)
        same_answers += ours == theirs
        same_prompts += by_token and server.prompt_ids == local.prompt_ids
        if by_token and server.prompt_ids != local.prompt_ids:
            at = _common(server.prompt_ids, local.prompt_ids)
            differences.append(f"prompt {index} differs at token {at}: the server uses another chat template")
        elif ours != theirs:
            at, unit = _common(ours, theirs), "token" if by_token else "character"
            texts = f"server {server.text!r}, transformers {local.text!r}"
            differences.append(f"answer {index} differs at {unit} {at}: {texts}")
    first = differences[0] if differences else None
    return Parity(same_answers, len(answers_local), same_prompts, first, "token" if by_token else "text")


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How long two sequences are the same from their beginning."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def require_parity(parity: Parity, dtype: str) -> None:
    """Stop unless the answers agree; in 16 bits only prompts must, as rounding may tip a close choice."""
    prompts_differ = parity.by == "token" and parity.same_prompts < parity.total
    if not parity.full and (dtype == "float32" or prompts_differ):
        raise CourseError("serving.no_parity", parity=parity)
