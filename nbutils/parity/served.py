"""A reading through a server: vLLM tells the likeliest tokens at every position of a prompt (`prompt_logprobs`).

Not here: starting a server (serving). A server tells 20 tokens and not the whole vocabulary: the comparison is coarse.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nbutils.errors import CourseError
from nbutils.parity.gaps import NOTHING
from nbutils.parity.reading import Reading
from nbutils.serving.ports import reach_directly

if TYPE_CHECKING:
    import torch

    from nbutils.parity.fixed import Fixed

TOLD = 20  # tokens of a position: what vLLM allows unless --max-logprobs says more
AT_ONCE = 8


def measure_server(server_url: str, model_name: str, fixed: Fixed, api_key: str | None = None) -> Reading:
    """Read the model a vLLM server (`http://host:port/v1`) serves under this name."""
    from openai import OpenAI, OpenAIError

    reach_directly(urlsplit(server_url).hostname or "127.0.0.1")
    client = OpenAI(base_url=server_url, api_key=api_key or "none-is-checked")
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            told = list(pool.map(partial(_told, client, model_name), fixed.texts, fixed.measured))
            answers = list(pool.map(partial(_answer, client, model_name, fixed), fixed.prompts))
    except OpenAIError as problem:
        raise CourseError(
            f"the server at {server_url} did not answer: {problem}.", "a vLLM server that takes these texts",
            "look at its log; a text that is too long for it needs a larger serve.max_model_len",
        ) from problem  # fmt: skip
    return _reading([place for text in told for place in text], answers)


def _told(client: Any, model_name: str, text: list[int], measured: int) -> list[dict[int, float]]:
    """For each of the last tokens of a text: what the server expected in its place."""
    choice = _complete(client, model_name, text, 1, prompt_logprobs=TOLD)
    told = getattr(choice, "prompt_logprobs", None)
    if not told or len(told) != len(text):
        raise CourseError(
            f"the server that serves {model_name} does not tell what it expected (`prompt_logprobs`).",
            "vLLM", "compare answers only, as lesson 05 does with `transformers serve`",
        )  # fmt: skip
    return [{int(token): float(one["logprob"]) for token, one in place.items()} for place in told[-measured:]]


def _answer(client: Any, model_name: str, fixed: Fixed, prompt: list[int]) -> list[int]:
    choice = _complete(client, model_name, prompt, fixed.answer_tokens, stop_token_ids=fixed.stops)
    return list(choice.token_ids)


def _complete(client: Any, model_name: str, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    """One greedy completion of tokens."""
    more["return_token_ids"] = True
    made = client.completions.create(
        model=model_name, prompt=prompt, max_tokens=max_tokens, temperature=0.0, extra_body=more
    )
    return made.choices[0]


def _reading(places: list[dict[int, float]], answers: list[list[int]]) -> Reading:
    import torch

    width = max(map(len, places))
    tokens = torch.full((len(places), width), NOTHING)
    logs: torch.Tensor = torch.full((len(places), width), -torch.inf)
    for row, told in enumerate(places):
        tokens[row, : len(told)] = torch.tensor(list(told))
        logs[row, : len(told)] = torch.tensor(list(told.values()))
    return Reading(logs, tokens, answers)
