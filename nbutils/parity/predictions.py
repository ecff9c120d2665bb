"""Predictions: what one model expects at every position of a fixed set of texts, and how far two of them are apart.

They are kept in `evaluation/parity.json`, with the likeliest tokens beside it: models by lesson 04, servers by 05.
"""

from __future__ import annotations

import json
import math
from collections import UserDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nbutils.chat import common_length, find_stop_ids
from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, Evaluator, digest
from nbutils.evaluation.inference import generate_ids, in_batches, padded
from nbutils.files import write_json
from nbutils.serving.ports import reach_directly

if TYPE_CHECKING:
    import torch

HELD_BACK_ROWS, GENERAL_ROWS = 12, 4
MEASURED = 16  # positions of a row: the first ones of its reference
ANSWER_TOKENS = 16  # of a greedy answer
LONGEST = 512  # tokens of a text with its answer, so that all texts are one batch on any GPU
KEPT_TOKENS = 256  # the likeliest of a position, when predictions are kept: half a megabyte for each model
SERVER_TOKENS = 20  # what vLLM tells of a position unless --max-logprobs says more
SERVER_REQUESTS = 8  # in flight
POSITIONS = 32  # compared together: 40 MB of a large vocabulary
RESOLUTION = 1e-6  # a sum of float32 probabilities is not known better than this


@dataclass(frozen=True)
class Fixed:
    """Texts whose last `measured` tokens are to be predicted, prompts to be answered, and where an answer ends."""

    texts: list[list[int]]
    measured: list[int]
    prompts: list[list[int]]
    stops: list[int]
    pad: int
    answer_tokens: int = ANSWER_TOKENS

    @property
    def positions(self) -> int:
        """How many predictions are compared."""
        return sum(self.measured)

    def __str__(self) -> str:
        return f"{len(self.texts)} texts, {self.positions} predictions compared, answers of {self.answer_tokens} tokens"


def fixed_set(evaluator: Evaluator, general: Evaluator | None = None, *, model: Any = None, limit: int = 0) -> Fixed:
    """The fixed set of a run, rows spread evenly over both; `limit` is the shortest context of all models."""
    longest = min(filter(None, (limit, LONGEST)))
    chosen = [(evaluator, row) for row in _spread(evaluator, HELD_BACK_ROWS, longest)]
    chosen += [(general, row) for row in _spread(general, GENERAL_ROWS, longest)] if general else []
    texts = [_text(one, row, longest) for one, row in chosen]
    prompts = [one.prompts[row][-(longest - ANSWER_TOKENS) :] for one, row in chosen]
    stops = sorted(find_stop_ids(evaluator.tokenizer, getattr(model, "generation_config", model)))
    pad = evaluator.tokenizer.pad_token_id
    return Fixed([ids for ids, _ in texts], [n for _, n in texts], prompts, stops, stops[0] if pad is None else pad)


def _spread(evaluator: Evaluator, count: int, longest: int) -> list[int]:
    """Rows at even distances, those that fit without being cut if there are any."""
    rows = range(len(evaluator.rows))
    pool = [row for row in rows if len(evaluator.prompts[row]) + max(MEASURED, ANSWER_TOKENS) <= longest] or list(rows)
    return pool[:: max(1, len(pool) // count)][:count]


def _text(evaluator: Evaluator, row: int, longest: int) -> tuple[list[int], int]:
    """A row as training sees it, up to the last measured token of its answer; what is too long loses its beginning."""
    ids, _ = evaluator.view.encode(evaluator.rows[row]["messages"], evaluator.rows[row].get("tools"))
    begin = max(1, common_length(evaluator.prompts[row], ids))
    text = ids[: begin + MEASURED][-(longest - 1) :]  # a server adds at least one token
    return text, min(len(ids) - begin, MEASURED, len(text) - 1)


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities at each position: of the whole vocabulary, or (`tokens` says which) of the likeliest ones."""

    logs: torch.Tensor
    tokens: torch.Tensor | None = None
    answers: list[list[int]] | None = None

    @property
    def choices(self) -> list[int]:
        """The likeliest token at each position."""
        best = self.logs.argmax(dim=-1)
        return (best if self.tokens is None else self.tokens.gather(1, best[:, None])[:, 0]).tolist()

    def shortened(self, count: int = KEPT_TOKENS) -> Predictions:
        """The same with the likeliest tokens only."""
        if self.tokens is not None:
            return self
        logs, tokens = self.logs.topk(min(count, self.logs.shape[-1]), dim=-1)
        return Predictions(logs, tokens, self.answers)

    def places(self) -> list[dict[int, float]]:
        """The likeliest tokens of each position, with their log-probabilities."""
        short = self.shortened()
        assert short.tokens is not None
        pairs = zip(short.tokens.tolist(), short.logs.tolist(), strict=True)
        return [dict(zip(tokens, logs, strict=True)) for tokens, logs in pairs]


def measure(model: Any, fixed: Fixed, *, answers: bool = True, batch_size: int = 0) -> Predictions:
    """Read a model in memory; without `answers` it is run once only, as one that lies partly on disk should be."""
    import torch

    model.eval()
    rows = range(len(fixed.texts))  # at once if memory allows, so that a model on disk is read once
    found = in_batches(rows, batch_size or len(rows), lambda batch: _log_probabilities(model, fixed, batch))
    logs = torch.cat([row for _, row in found])
    if not torch.isfinite(logs).any(dim=-1).all() or torch.isnan(logs).any():
        raise CourseError("parity.not_finite")

    if not answers:
        return Predictions(logs)

    def generated(batch: Sequence[int]) -> list[list[int]]:
        prompts = [fixed.prompts[row] for row in batch]
        return generate_ids(model, prompts, fixed.answer_tokens, fixed.stops, fixed.pad)

    return Predictions(logs, answers=[ids for _, ids in in_batches(rows, len(rows), generated)])


def _log_probabilities(model: Any, fixed: Fixed, batch: Sequence[int]) -> list[torch.Tensor]:
    """One batch, padded at the left: the measured positions are then the last ones of every row."""
    import torch

    texts = [fixed.texts[row][:-1] for row in batch]  # the last token is only predicted
    counts = [fixed.measured[row] for row in batch]
    device = "cpu" if model.device.type == "meta" else model.device  # meta: its first weight lies on disk
    ids, mask = padded(texts, fixed.pad, device, left=True)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():  # not inference_mode: weights read from disk meanwhile would stay bound to it
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=max(counts)
        ).logits
        return [logits[row, -count:].float().log_softmax(-1).cpu() for row, count in enumerate(counts)]


def measure_server(server_url: str, model_name: str, fixed: Fixed, api_key: str | None = None) -> Predictions:
    """Read the model that a vLLM server (`http://host:port/v1`) serves: the likeliest tokens of every position."""
    import torch
    from openai import OpenAI, OpenAIError

    reach_directly(urlsplit(server_url).hostname or "127.0.0.1")
    client = OpenAI(base_url=server_url, api_key=api_key or "none-is-checked")

    def complete(prompt: list[int], max_tokens: int, **more: Any) -> Any:
        given: dict[str, Any] = {"model": model_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        return client.completions.create(**given, extra_body=more | {"return_token_ids": True}).choices[0]

    def expected(text: list[int], measured: int) -> list[list[tuple[int, float]]]:
        """The likeliest tokens of each position (vLLM adds the text's own token where it is not among them)."""
        found = complete(text, 1, prompt_logprobs=SERVER_TOKENS).prompt_logprobs[-measured:]
        ranked = [sorted(place.items(), key=lambda one: -one[1]["logprob"])[:SERVER_TOKENS] for place in found]
        return [[(int(token), float(one["logprob"])) for token, one in place] for place in ranked]

    def answer(prompt: list[int]) -> list[int]:
        return list(complete(prompt, fixed.answer_tokens, stop_token_ids=fixed.stops).token_ids)

    try:
        with ThreadPoolExecutor(SERVER_REQUESTS) as pool:
            places = [one for text in pool.map(expected, fixed.texts, fixed.measured) for one in text]
            answers = list(pool.map(answer, fixed.prompts))
    except (OpenAIError, AttributeError, TypeError) as problem:  # not up, or no vLLM
        raise CourseError("parity.server_refused", url=server_url, problem=problem) from problem
    tokens, logs = ([[one[part] for one in place] for place in places] for part in (0, 1))
    return Predictions(torch.tensor(logs), torch.tensor(tokens), answers)


@dataclass(frozen=True)
class Gap:
    """KL divergence of two predictions in nats per token, and how many choices and answers agree; coarse: at least."""

    mean: float
    worst: float
    same_choices: int
    positions: int
    same_answers: int | None = None
    answers: int = 0
    coarse: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """For the tables that show it."""
        least = "at least " if self.coarse else ""
        return {
            "KL mean": f"{least}{self.mean:.2g}", "KL worst": f"{least}{self.worst:.2g}",
            "same next token": f"{self.same_choices} of {self.positions}",
            "same answers": "not compared" if self.same_answers is None else f"{self.same_answers} of {self.answers}",
        }  # fmt: skip


def gap(reference: Predictions, other: Predictions) -> Gap:
    """How much is lost if `other` predicts in place of `reference`."""
    import torch

    coarse = reference.tokens is not None or other.tokens is not None
    values = torch.tensor(_coarse_kl(reference, other) if coarse else _exact_kl(reference, other)).clamp(min=0.0)
    same = sum(one == two for one, two in zip(reference.choices, other.choices, strict=True))
    found = Gap(float(values.mean()), float(values.max()), same, len(values), coarse=coarse)
    if reference.answers is None or other.answers is None:
        return found
    equal = sum(one == two for one, two in zip(reference.answers, other.answers, strict=True))
    return replace(found, same_answers=equal, answers=len(reference.answers))


def _exact_kl(reference: Predictions, other: Predictions) -> list[float]:
    import torch

    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for one, two in zip(reference.logs.split(POSITIONS), other.logs.split(POSITIONS), strict=True):
        log_p, log_q = one.to(device).double(), two.to(device).double()
        terms = log_p.exp() * (log_p - log_q)
        found += torch.where(log_p == -torch.inf, 0.0, terms).sum(dim=-1).tolist()  # impossible on both sides: nothing
    return found


def _coarse_kl(reference: Predictions, other: Predictions) -> list[float]:
    """Over the tokens that both sides know, and all the rest as one: it never exceeds the true value."""
    found = []
    for p, q in zip(reference.places(), other.places(), strict=True):
        shared = p.keys() & q.keys()
        rest_p, rest_q = (max(RESOLUTION, 1 - sum(math.exp(logs[token]) for token in shared)) for logs in (p, q))
        known = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
        found.append(known + rest_p * math.log(rest_p / rest_q))
    return found


class PredictionStore(UserDict[str, Predictions]):
    """Predictions by name, kept in the run; those of other texts or another merged model (`about`) are dropped."""

    def __init__(self, run: Path, fixed: Fixed | None = None, *, about: Any = None, name: str = "parity") -> None:
        super().__init__()
        self.file, self.folder = run / FOLDER / f"{name}.json", run / FOLDER / name
        kept = _read(self.file)
        if fixed is None and not kept:
            raise CourseError("parity.no_predictions", file=self.file)
        self.fixed: Fixed = fixed or kept["fixed"]
        self.about = kept.get("about") if about is None else json.loads(json.dumps(about, default=str))
        self.fingerprint = digest([digest(asdict(self.fixed)), self.about])
        same = kept.get("mark") == self.fingerprint
        self.gaps: dict[str, Gap] = kept["gaps"] if same else {}
        answers = kept["readings"] if same else {}
        self.data = {one: found for one in answers if (found := self._load(one, answers[one]))}

    def __setitem__(self, name: str, predictions: Predictions) -> None:
        """Compare new predictions with all that are here, and keep them."""
        self.data[name] = predictions
        for other in self.data.keys() - {name}:
            self.gaps[f"{other} against {name}"] = gap(predictions, self.data[other])
            self.gaps[f"{name} against {other}"] = gap(self.data[other], predictions)
        self._write(name)

    def read_merged(self, model: Any, *, answers: bool = True) -> None:
        """Measure the merged model, and once more in smaller batches: what differs then is the noise of this run."""
        self.data.pop("vllm", None)  # a server of before says nothing about this one
        self.gaps = {key: found for key, found in self.gaps.items() if "vllm" not in key}
        self["merged"] = measure(model, self.fixed, answers=answers)
        fewer = 1 if answers else max(1, len(self.fixed.texts) // 2)  # one that lies partly on disk: two runs, not 16
        self["again"] = measure(model, self.fixed, answers=False, batch_size=fewer)

    def read(self, name: str, load: Callable[[], Any], *, answers: bool = True) -> None:
        """Measure an adapter on a base, unless it is kept; on the unquantized one (`full`) also the base alone."""
        if name in self and (name != "full" or "base" in self):
            return
        tuned = load()
        self[name] = measure(tuned, self.fixed, answers=answers)
        if name == "full":
            with tuned.disable_adapter():
                self["base"] = measure(tuned, self.fixed, answers=answers)

    def gap(self, reference: str, other: str) -> Gap | None:
        """How far `other` is from `reference`; None if one of them was not measured."""
        return self.gaps.get(f"{other} against {reference}")

    def _write(self, name: str) -> None:
        """Keep one model's likeliest tokens, then all numbers: a file that the JSON does not name counts nothing."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        short = self.data[name].shortened()
        assert short.tokens is not None
        tensors = {"tokens": short.tokens.int().contiguous(), "logs": short.logs.float().contiguous()}
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self.fingerprint})
        write_json(self.file, {
            "mark": self.fingerprint, "about": self.about, "positions": self.fixed.positions,
            "gaps": {key: asdict(one) for key, one in self.gaps.items()},
            "readings": {one: {"answers": held.answers} for one, held in self.data.items()},
            "fixed": asdict(self.fixed),
        })  # fmt: skip

    def _load(self, name: str, answers: list[list[int]] | None) -> Predictions | None:
        """Kept predictions, if their file is there, whole, and of these very texts and models."""
        from safetensors import SafetensorError, safe_open

        with suppress(OSError, SafetensorError), safe_open(self.folder / f"{name}.safetensors", "pt") as file:
            if (file.metadata() or {}).get("mark") == self.fingerprint:
                return Predictions(file.get_tensor("logs"), file.get_tensor("tokens").long(), answers)
        return None


def _read(file: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is missing, damaged or of another version."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        gaps = {key: Gap(**one) for key, one in kept["gaps"].items()}
        answers = {name: one["answers"] for name, one in kept["readings"].items()}
        known = {"mark": kept["mark"], "about": kept["about"], "fixed": Fixed(**kept["fixed"])}
        return known | {"gaps": gaps, "readings": answers}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
