"""Asking a server many questions at once, and comparing its answers with those of plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Message
from nbutils.serving import watching

if TYPE_CHECKING:
    from openai import OpenAI

Tools = list[dict[str, Any]] | None


def ask(
    client: OpenAI,
    model_name: str,
    conversations: Sequence[list[Message]],
    max_tokens: int,
    *,
    tools: Sequence[Tools] = (),
    token_ids: bool = True,
    at_once: int = 32,
) -> list[Answer]:
    """Greedy answers of a server, `at_once` requests in flight, in the order they were asked; `tools` of each, if any.

    `token_ids` asks for the tokens too; vLLM gives them, `transformers serve` refuses the question.
    """
    from tqdm.auto import tqdm

    def one(conversation: list[Message], offered: Tools) -> Answer:
        return _ask_one(client, model_name, conversation, offered, max_tokens, token_ids)

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        found = pool.map(one, conversations, tools or [None] * len(conversations))
        try:
            return list(tqdm(found, total=len(conversations), desc="requests", unit="row"))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the others would fail one by one
            raise


def _ask_one(
    client: OpenAI, model_name: str, messages: list[Message], tools: Tools, max_tokens: int, token_ids: bool
) -> Answer:
    """One request; the fields beyond OpenAI's own are vLLM's. Calls come back as the text the model wrote."""
    from openai import OpenAIError

    try:
        response = client.chat.completions.create(
            model=model_name, messages=[_for_api(message) for message in messages], max_tokens=max_tokens,
            temperature=0.0, extra_body={"return_token_ids": True} if token_ids else None,
            **({"tools": tools, "tool_choice": "none"} if tools else {}),
        )  # type: ignore[call-overload]  # fmt: skip
    except OpenAIError as problem:
        raise refusal(problem, str(client.base_url)) from problem
    choice = response.choices[0]
    prompt, answer = getattr(response, "prompt_token_ids", None), getattr(choice, "token_ids", None)
    if token_ids and (prompt is None or answer is None):
        raise CourseError(
            "the server returned no token ids.", "a vLLM server", "pass token_ids=False to compare texts only"
        )
    return Answer(list(prompt or []), list(answer or []), choice.message.content or "", choice.finish_reason == "stop")


def refusal(problem: Exception, url: str) -> CourseError:
    """A request that failed, in plain words: the server is gone, wants a key, or refuses this request."""
    if gone := watching.cause(url):
        return gone
    status = getattr(problem, "status_code", None)
    if status == 401:
        todo = "take the client from server.client(), or set VLLM_API_KEY to the server's key"
    elif "chat template" in str(problem):
        todo = "serve a folder that has a chat template (lesson 04 writes one), or pass chat-template: a file with one"
    elif status == 404:
        todo = "call the model by a name it is served under: server.names"
    elif status is None:
        todo = "run the cell that starts the server again"
    else:
        todo = "shorten the prompt or max_tokens, or mend what it names"
    return CourseError(f"the server at {url} did not answer: {problem}", "a request this server takes", todo)


def _for_api(message: Message) -> Message:
    """A message with the arguments of its calls as JSON text, the form they have in OpenAI's API."""
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
    """How many answers (and prompts, where the server tells them) are the same in two places."""

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
        prompts = prompts if self.by == "token" else "prompts not told by this server"
        line = f"parity: {self.identical} of {self.total} answers identical ({self.by} by {self.by}), {prompts}"
        return line if self.first_difference is None else f"{line}\n  {self.first_difference}"


def compare(answers_server: Sequence[Answer], answers_local: Sequence[Answer]) -> Parity:
    """Compare answer by answer: by tokens where the server told them, else by text."""
    if len(answers_server) != len(answers_local) or not answers_local:
        raise CourseError(
            f"{len(answers_server)} answers of the server and {len(answers_local)} of transformers.",
            "the same number of both, at least one", "ask both the same questions",
        )  # fmt: skip
    pairs = list(zip(answers_server, answers_local, strict=True))
    by_token = all(server.prompt_ids for server in answers_server)
    prompts = [not by_token or server.prompt_ids == local.prompt_ids for server, local in pairs]
    answers = [_same(server, local, by_token) for server, local in pairs]
    wrong = next((index for index in range(len(pairs)) if not (prompts[index] and answers[index])), None)
    told = None if wrong is None else _difference(wrong, *pairs[wrong], by_token, prompts[wrong])
    return Parity(sum(answers), len(pairs), sum(prompts) if by_token else 0, told, "token" if by_token else "text")


def require_parity(parity: Parity, dtype: str) -> None:
    """Stop unless the server says the same; in 16 bits only prompts must agree, as rounding may tip a close choice."""
    prompts_differ = parity.by == "token" and parity.same_prompts < parity.total
    if parity.full or (dtype != "float32" and not prompts_differ):
        return
    raise CourseError(
        str(parity), "the same prompts, and in float32 the same answers token by token",
        "serve the folder lesson 04 wrote, with its own chat template and generation config",
    )  # fmt: skip


def _same(server: Answer, local: Answer, by_token: bool) -> bool:
    return server.token_ids == local.token_ids if by_token else server.text == local.text


def _difference(index: int, server: Answer, local: Answer, by_token: bool, same_prompt: bool) -> str:
    """The first difference of one pair, for people."""
    if not same_prompt:
        place = _fork(server.prompt_ids, local.prompt_ids)
        return f"prompt {index} differs at token {place}: the server does not use the model's own chat template"
    where = _fork(server.token_ids, local.token_ids) if by_token else _fork(server.text, local.text)
    unit = "token" if by_token else "character"
    return f"answer {index} differs at {unit} {where}: server {server.text!r}, transformers {local.text!r}"


def _fork(one: Sequence[object], other: Sequence[object]) -> int:
    """The first position at which two sequences differ."""
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)
