"""Asking a server many questions at once, and comparing its answers with those of plain transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Message
from nbutils.serving.server import SERVERS

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
    options: Any = {"max_tokens": max_tokens, "temperature": 0.0}
    options |= {"extra_body": {"return_token_ids": True}} if token_ids else {}

    def one(pair: tuple[list[Message], Tools]) -> Answer:
        conversation, offered = pair
        calling: Any = {"tools": offered, "tool_choice": "none"} if offered else {}  # calls come back as text
        messages: Any = [_for_api(message) for message in conversation]
        response: Any = client.chat.completions.create(model=model_name, messages=messages, **options, **calling)
        choice: Any = response.choices[0]
        text, ended = choice.message.content or "", choice.finish_reason == "stop"
        if not token_ids:
            return Answer([], [], text, ended)
        return Answer(list(response.prompt_token_ids), list(choice.token_ids), text, ended)

    pairs = list(zip(conversations, tools or [None] * len(conversations), strict=True))
    return list(concurrently(one, pairs, str(client.base_url), at_once))


def concurrently(request: Callable[[T], Answer], items: Collection[T], url: str, at_once: int = 32) -> Iterator[Answer]:
    """The answers to many requests in the order of the items; the first that fails cancels the rest."""
    from openai import OpenAIError
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            yield from tqdm(pool.map(request, items), total=len(items), desc="requests", unit="row")
        except OpenAIError as error:
            if server := SERVERS.get(url.rstrip("/")):
                time.sleep(1.0)  # a connection breaks a moment before the process has ended
                server.require()
            raise CourseError("serving.request_failed", url=url, error=error) from error


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
class AnswerParity:
    """How many answers, and prompts where the server returns them, are the same in two places."""

    identical: int
    total: int
    same_prompts: int
    by_token: bool
    differences: list[str]

    def __str__(self) -> str:
        how = "token by token" if self.by_token else "as text"
        prompts = f" and {self.same_prompts} of {self.total} prompts" if self.by_token else ""
        line = f"{self.identical} of {self.total} answers{prompts} are the same, compared {how}."
        return "\n".join([line, *self.differences[:1]])

    def require(self, dtype: str) -> None:
        """Stop unless prompts and answers agree; in 16 bits only prompts must, as rounding may change an answer."""
        prompts_differ = self.by_token and self.same_prompts < self.total
        if self.differences and (dtype == "float32" or prompts_differ):
            raise CourseError("serving.no_parity", parity=self)


def compare(served: Sequence[Answer], stored: Sequence[Answer]) -> AnswerParity:
    """Compare answer by answer: by tokens where the server returned them, else by text."""
    by_token = all(answer.prompt_ids for answer in served)
    same_prompts, same_answers, differences = 0, 0, []
    for index, (one, other) in enumerate(zip(served, stored, strict=True)):
        same_prompt = by_token and one.prompt_ids == other.prompt_ids
        same_answer = one.token_ids == other.token_ids if by_token else one.text == other.text
        same_prompts, same_answers = same_prompts + same_prompt, same_answers + same_answer
        if by_token and not same_prompt:
            differences.append(f"Prompt {index} differs: the server uses another chat template.")
        elif not same_answer:
            differences.append(f"Answer {index} differs: {one.text!r} from the server, {other.text!r} from lesson 04.")
    return AnswerParity(same_answers, len(stored), same_prompts, by_token, differences)
