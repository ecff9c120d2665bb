"""Compare the next-token predictions of every form of a model: the base, the adapter on its base, merged, served.

Stored in `evaluation/parity.json` by lessons 04 (models), 05 (server). Reading the merged model twice gives the noise.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import evaluation, files
from nbutils.chat import common_length, find_stop_ids
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, Evaluator, Facts, Table, digest
from nbutils.evaluation.inference import Row, Tokens, generate_ids, in_batches, padded
from nbutils.evaluation.placement import Placement
from nbutils.language import tr
from nbutils.record import RunFolder

if TYPE_CHECKING:
    import torch
    from openai import OpenAI

HELD_OUT_ROWS = 12
GENERAL_ROWS = 4
MEASURED = 16  # positions of a row: the first ones of its reference
ANSWER_TOKENS = 16  # of a greedy answer
LONGEST = 512  # tokens of a text with its answer, so that all texts are one batch on any GPU
KEPT_TOKENS = 256  # the likeliest of a position, when predictions are kept: half a megabyte for each model
SERVER_TOKENS = 20  # what vLLM tells of a position unless --max-logprobs says more
SERVER_REQUESTS = 8  # in flight
POSITIONS = 32  # compared together: 40 MB of a large vocabulary
RESOLUTION = 1e-6  # a sum of float32 probabilities is not known better than this
TOKENIZED_ROWS = 32  # of a merged folder's own tokenizer, beside the training's
FAR = 30  # times the noise: no kernels of another program round that differently, it runs another model
ONTO = {"full": "full", "dequantized": "4bit"}  # what a merged model must equal, by what it was merged into
NAMES = {  # of the forms of a model
    "base": "the base without the tuning",
    "4bit": "adapter on the 4-bit base it was trained on",
    "full": "adapter on the unquantized base",
    "merged": "merged",
    "vllm": "merged, in vLLM",
}
CHANGED = "what the tuning changed"
PRICE = "a price"
SAME = "the same model"
FAILS = "FAILS"
SENTENCE = "{other}, {nats} nats per token from {reference}: {verdict}."
FAILURE = "THE MODEL CHANGED: {other}, {nats} nats per token from {reference}: {verdict}."
Translate = Callable[..., str]


@dataclass(frozen=True)
class Fixed:
    """Texts whose last `measured` tokens are to be predicted, prompts to be answered, and where an answer ends."""

    texts: list[Tokens]
    measured: list[int]
    prompts: list[Tokens]
    stops: Tokens
    pad: int
    answer_tokens: int = ANSWER_TOKENS

    @property
    def positions(self) -> int:
        """How many predictions are compared."""
        return sum(self.measured)


def fixed_set(evaluator: Evaluator, general: Evaluator | None = None, *, model: Any = None, limit: int = 0) -> Fixed:
    """The fixed set of a run, rows spread evenly over both; `limit` is the shortest context of all models."""
    stops = sorted(find_stop_ids(evaluator.tokenizer, model))
    pad = evaluator.tokenizer.pad_token_id
    fixed = Fixed([], [], [], stops, stops[0] if pad is None else pad)
    longest = min(limit or LONGEST, LONGEST)
    _add_texts(fixed, evaluator, HELD_OUT_ROWS, longest)
    if general:
        _add_texts(fixed, general, GENERAL_ROWS, longest)
    return fixed


def _add_texts(fixed: Fixed, evaluator: Evaluator, count: int, longest: int) -> None:
    """Add `count` rows; where none is short enough, what is too long loses its beginning."""
    most = longest - max(MEASURED, ANSWER_TOKENS)
    numbers = range(len(evaluator.rows))
    fitting = [number for number in numbers if len(evaluator.prompts[number]) <= most]
    pool = fitting or numbers
    stride = max(1, len(pool) // count)
    for number in pool[::stride][:count]:
        row = evaluator.rows[number]
        prompt = evaluator.prompts[number]
        ids, _ = evaluator.view.encode(row["messages"], row.get("tools"))
        begin = max(1, common_length(prompt, ids))
        text = ids[: begin + MEASURED]
        text = text[1 - longest :]  # a server adds at least one token
        measured = min(
            MEASURED,
            len(ids) - begin,
            len(text) - 1,
        )
        fixed.texts.append(text)
        fixed.measured.append(measured)
        fixed.prompts.append(prompt[ANSWER_TOKENS - longest :])


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities at each position: of the whole vocabulary, or (`tokens` says which) of the likeliest ones."""

    logs: torch.Tensor
    tokens: torch.Tensor | None = None
    answers: list[Tokens] | None = None

    @property
    def likeliest(self) -> torch.Tensor:
        """The token each position would choose."""
        return self.logs.argmax(-1) if self.tokens is None else self.tokens[:, 0]

    def shortened(self, count: int = KEPT_TOKENS) -> Predictions:
        """The same with the likeliest tokens only, the likeliest first."""
        if self.tokens is not None:
            return self
        logs, tokens = self.logs.topk(min(count, self.logs.shape[-1]), dim=-1)
        return Predictions(logs, tokens, self.answers)


def measure(model: Any, fixed: Fixed, *, answers: bool = True, batch_size: int = 0) -> Predictions:
    """Read a model in memory; without `answers` it is run once only, as one that lies partly on disk should be."""
    import torch

    model.eval()
    rows = range(len(fixed.texts))  # at once if memory allows, so that a model on disk is read once

    def predict(batch: Sequence[int]) -> list[torch.Tensor]:
        """Of a batch padded at the left: the measured positions are then the last ones of every row."""
        counts = [fixed.measured[row] for row in batch]
        device = "cpu" if model.device.type == "meta" else model.device  # meta: its first weight lies on disk
        ids, mask = padded([fixed.texts[row][:-1] for row in batch], fixed.pad, device, left=True)
        with torch.no_grad():  # not inference_mode: weights read from disk meanwhile would stay bound to it
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=max(counts),
            ).logits
            return [logits[row, -count:].float().log_softmax(-1).cpu() for row, count in enumerate(counts)]

    logs = torch.cat([predicted for _, predicted in in_batches(rows, batch_size or len(rows), predict)])
    if torch.isnan(logs).any() or not torch.isfinite(logs).any(dim=-1).all():
        raise CourseError(
            tr("The model's logits contain NaN or infinity: a value overflowed its precision."),
            todo=tr("Use another dtype (float32, or bfloat16 where the GPU supports it), or another model."),
        )
    if not answers:
        return Predictions(logs)
    generated = generate_ids(model, fixed.prompts, fixed.answer_tokens, fixed.stops, fixed.pad)
    return Predictions(logs, answers=generated)


def measure_server(client: OpenAI, model_name: str, fixed: Fixed) -> Predictions:
    """Read the model that a vLLM server serves: the likeliest tokens of every position."""
    import torch
    from openai import OpenAIError

    def complete(prompt: Tokens, max_tokens: int, **more: Any) -> Any:
        completion = client.completions.create(
            model=model_name,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            extra_body={"return_token_ids": True, **more},
        )
        return completion.choices[0]

    def predict(text: Tokens, measured: int) -> list[Any]:
        """The likeliest tokens of each position (vLLM adds the text's own token where it is not among them)."""
        completion = complete(text, 1, prompt_logprobs=SERVER_TOKENS)
        positions = []
        for tokens in completion.prompt_logprobs[-measured:]:
            logs = [(value["logprob"], int(token)) for token, value in tokens.items()]
            logs.sort(reverse=True)
            positions.append(logs[:SERVER_TOKENS])
        return positions

    def generate(prompt: Tokens) -> Tokens:
        return list(complete(prompt, fixed.answer_tokens, stop_token_ids=fixed.stops).token_ids)

    try:
        with ThreadPoolExecutor(SERVER_REQUESTS) as pool:
            texts = list(pool.map(predict, fixed.texts, fixed.measured))
            answers = list(pool.map(generate, fixed.prompts))
    except (OpenAIError, AttributeError, TypeError) as problem:  # not up, or no vLLM
        raise CourseError(
            tr(
                "The server at {url} did not answer: {problem}.",
                url=client.base_url,
                problem=problem,
            ),
            todo=tr("Read its log; a text that is too long for it needs a larger vllm.max_model_len."),
        ) from problem
    likeliest = torch.tensor([position for text in texts for position in text], dtype=torch.float64)
    return Predictions(likeliest[..., 0].float(), likeliest[..., 1].long(), answers)


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
        answers = tr("not compared")
        if self.same_answers is not None:
            answers = tr("{same} of {all}", same=self.same_answers, all=self.answers)
        return {
            tr("KL mean"): self.nats(self.mean),
            tr("KL worst"): self.nats(self.worst),
            tr("same next token"): tr("{same} of {all}", same=self.same_choices, all=self.positions),
            tr("same answers"): answers,
        }

    def nats(self, value: float, tr: Translate = tr) -> str:
        """A divergence as text."""
        return tr("at least {nats}", nats=f"{value:.2g}") if self.coarse else f"{value:.2g}"


def gap(reference: Predictions, other: Predictions) -> Gap:
    """How much is lost if `other` predicts in place of `reference`."""
    coarse = reference.tokens is not None or other.tokens is not None
    divergences = _coarse_divergences(reference, other) if coarse else _divergences(reference, other)
    divergences = divergences.float().clamp(min=0.0)
    same_answers = None
    answers = 0
    if reference.answers is not None and other.answers is not None:
        pairs = zip(reference.answers, other.answers, strict=True)
        same_answers = sum(mine == theirs for mine, theirs in pairs)
        answers = len(reference.answers)
    return Gap(
        mean=float(divergences.mean()),
        worst=float(divergences.max()),
        same_choices=int((reference.likeliest == other.likeliest).sum()),
        positions=len(divergences),
        same_answers=same_answers,
        answers=answers,
        coarse=coarse,
    )


def _divergences(reference: Predictions, other: Predictions) -> torch.Tensor:
    """Of each position, over the whole vocabulary."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = []
    pairs = zip(reference.logs.split(POSITIONS), other.logs.split(POSITIONS), strict=True)
    for left, right in pairs:
        log_p = left.to(device).double()
        log_q = right.to(device).double()
        terms = log_p.exp() * (log_p - log_q)
        possible = torch.where(log_p == -torch.inf, 0.0, terms)  # where it is impossible, nothing is lost
        parts.append(possible.sum(dim=-1).cpu())
    return torch.cat(parts)


def _coarse_divergences(reference: Predictions, other: Predictions) -> torch.Tensor:
    """Over the tokens that both sides know, and all the rest as one: it never exceeds the true value."""
    import torch

    left = reference.shortened()
    right = other.shortened()
    assert left.tokens is not None and right.tokens is not None
    same = left.tokens.unsqueeze(2) == right.tokens.unsqueeze(1)  # at each position: our tokens by theirs
    theirs = right.logs.double().unsqueeze(1)
    log_q = torch.where(same, theirs, -torch.inf)
    log_q = log_q.amax(2)  # of our tokens; -inf where the other side does not know it
    log_p = left.logs.double()
    log_p = torch.where(log_q == -torch.inf, log_q, log_p)
    p = log_p.exp()
    q = log_q.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    rest_p = (1 - p.sum(1)).clamp(min=RESOLUTION)
    rest_q = (1 - q.sum(1)).clamp(min=RESOLUTION)
    rest = rest_p * (rest_p / rest_q).log()
    return terms.sum(1) + rest


class PredictionStore(UserDict[str, Predictions]):
    """Predictions on a fixed set by the name of the form, kept in the run, and the gaps between them.

    `stamp` is that of the merged model: it says which one it is, and what it was merged into.
    """

    def __init__(self, run: Path, fixed: Fixed, stamp: Facts) -> None:
        super().__init__()
        self.file = run / FOLDER / "parity.json"
        self.folder = run / FOLDER / "parity"
        self.fixed = fixed
        self.stamp = stamp
        self.fingerprint = digest([digest(asdict(fixed)), stamp])
        self.gaps: dict[str, Gap] = {}

    def __setitem__(self, name: str, predictions: Predictions) -> None:
        """Compare new predictions with all that are here, and keep them: the likeliest tokens, then all numbers."""
        from safetensors.torch import save_file

        for other, known in self.data.items():
            if other != name:
                self.gaps[f"{other} against {name}"] = gap(predictions, known)
                self.gaps[f"{name} against {other}"] = gap(known, predictions)
        self.data[name] = predictions
        self.folder.mkdir(parents=True, exist_ok=True)
        short = predictions.shortened()
        assert short.tokens is not None
        tensors = {
            "tokens": short.tokens.int().contiguous(),
            "logs": short.logs.float().contiguous(),
        }
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self.fingerprint})
        stored = {
            "mark": self.fingerprint,
            "about": self.stamp,
            "positions": self.fixed.positions,
            "gaps": {key: asdict(numbers) for key, numbers in self.gaps.items()},
            "readings": {key: {"answers": known.answers} for key, known in self.data.items()},
            "fixed": asdict(self.fixed),
        }
        files.write_json(self.file, stored)

    def read_merged(self, model: Any, *, answers: bool = True) -> None:
        """Measure the merged model, and once more in smaller batches: what differs then is the noise of this run."""
        self["merged"] = measure(model, self.fixed, answers=answers)
        fewer = 1 if answers else max(1, len(self.fixed.texts) // 2)  # one that lies partly on disk: two runs, not 16
        self["again"] = measure(model, self.fixed, answers=False, batch_size=fewer)

    def read_tuned(self, name: str, model: Any, *, answers: bool = True) -> None:
        """Measure an adapter on a base; on the unquantized one (`full`) also the base alone."""
        self[name] = measure(model, self.fixed, answers=answers)
        if name == "full":
            with model.disable_adapter():
                self["base"] = measure(model, self.fixed, answers=answers)

    def gap(self, reference: str, other: str) -> Gap | None:
        """How far `other` is from `reference`; None if one of them was not measured."""
        return self.gaps.get(f"{other} against {reference}")


def load_predictions(run: Path, merged: Path) -> PredictionStore:
    """What lesson 04 stored of this merged model, and lesson 05 of its server."""
    from safetensors import SafetensorError, safe_open

    file = run / FOLDER / "parity.json"
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        stored = files.read_json(file)
        store = PredictionStore(run, Fixed(**stored["fixed"]), files.stamp(merged) or {})
        store.gaps = {key: Gap(**numbers) for key, numbers in stored["gaps"].items()}
        for name, reading in stored["readings"].items():
            with safe_open(store.folder / f"{name}.safetensors", "pt") as tensors:
                if tensors.metadata()["mark"] != store.fingerprint:  # of other texts, or of another merged model
                    raise ValueError(name)
                logs = tensors.get_tensor("logs")
                store.data[name] = Predictions(logs, tensors.get_tensor("tokens").long(), reading["answers"])
        return store
    raise CourseError(
        tr("No predictions of {merged} are stored in {file}.", merged=merged, file=file), todo=tr("Run lesson 04.")
    )


@dataclass(frozen=True)
class Line:
    """One comparison: `other` against `reference`; only a judged one can fail."""

    reference: str
    other: str
    gap: Gap
    judged: bool = False
    failure: str = ""  # why it fails

    @property
    def verdict(self) -> str:
        """In a word or two, in English."""
        if self.judged:
            return FAILS if self.failure else SAME
        return CHANGED if self.other == "base" else PRICE

    def sentence(self, tr: Translate) -> str:
        """The whole comparison in the language of `tr`."""
        return tr(
            FAILURE if self.failure else SENTENCE,
            other=tr(NAMES[self.other]),
            nats=self.gap.nats(self.gap.mean, tr),
            reference=tr(NAMES[self.reference]),
            verdict=self.failure or tr(self.verdict),
        )


class Report:
    """All comparisons of a run: prices first, then what must be the same model, down to the server."""

    def __init__(self, predictions: PredictionStore) -> None:
        self.predictions = predictions
        self.target = ONTO.get(predictions.stamp.get("onto", "full"), "full")
        again = predictions.gap("merged", "again")
        self.noise = max(RESOLUTION, again.mean if again else 0.0)  # the same model, in other batches
        self.lines: list[Line] = []
        self._add("full", "base")
        self._add("4bit", "full")
        if self.target != "full":
            self._add("full", "merged")
        self._add(self.target, "merged", judged=True)
        self._add("merged", "vllm", judged=True)
        judged = [line for line in self.lines if line.judged]
        self.holds = bool(judged) and not any(line.failure for line in judged)
        self.verdict = "\n".join(line.sentence(tr) for line in self.lines)

    def _add(self, reference: str, other: str, *, judged: bool = False) -> None:
        """Add a comparison, if both were measured."""
        distance = self.predictions.gap(reference, other)
        if distance:
            failure = self._failure(other, distance) if judged else ""
            line = Line(reference, other, distance, judged, failure)
            self.lines.append(line)

    def _failure(self, other: str, distance: Gap) -> str:
        """Why this form of the model is another one than it should be; empty if it is the same."""
        base = self.predictions.gap("base", other)
        if base and distance.mean > base.mean + self.noise:
            nats = f"{max(base.mean, RESOLUTION):.2g}"
            return tr("it is nearer to {base} ({nats})", base=tr(NAMES["base"]), nats=nats)
        rounding = self.noise
        merged = self.predictions.gap(self.target, "merged")
        if merged:  # the merge, proven by weight, is rounding too
            rounding = max(rounding, merged.mean)
        if other == "vllm" and distance.mean > FAR * rounding:
            times = f"{distance.mean / rounding:.0f}"
            return tr("that is {times} times the noise of this run", times=times)
        return ""

    def __str__(self) -> str:
        """The judged comparison of lesson 04, and the price of the step from 4 bits."""
        same = next(line.gap for line in self.lines if line.judged)
        text = tr(
            "{count} predictions compared: {nats} nats per token apart on average, the same next token at {same}",
            count=same.positions,
            nats=same.nats(same.mean),
            same=same.same_choices,
        )
        price = self.predictions.gap("4bit", "full")
        if price and self.target == "full":
            text += tr("; leaving the 4-bit base costs {nats} nats per token", nats=price.nats(price.mean))
        return text

    def table(self) -> Table:
        """For display: a row for each comparison."""
        table = []
        for line in self.lines:
            row = {
                tr("model"): tr(NAMES[line.other]),
                tr("compared with"): tr(NAMES[line.reference]),
                **line.gap.columns,
                tr("times noise"): f"{line.gap.mean / self.noise:.2g}",
                tr("verdict"): tr(line.verdict),
            }
            table.append(row)
        return table

    def facts(self) -> Facts:
        """For facts.json; the verdict in English, the summary in the language of the course."""
        numbers = {
            "holds": self.holds,
            "verdict": "\n".join(line.sentence(str.format) for line in self.lines),
            "summary": self.verdict,
            "noise": self.noise,
            "gaps": {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines},
        }
        return {"parity": numbers}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained, or nothing was compared."""
        if not self.holds:
            raise CourseError(
                self.verdict or tr("Nothing was compared."),
                allowed=tr(
                    "a merged model nearer to the adapter than to the base, and a server within {far} times the "
                    "noise of it",
                    far=FAR,
                ),
                todo=tr(
                    "Serve the folder that lesson 04 wrote. If the line above names the merged model, check that "
                    "adapter and base belong together, or train longer: an adapter that hardly learned is lost "
                    "in rounding."
                ),
            )


def prove(run: RunFolder, profile: Profile, placement: Placement, folder: Path) -> Report:
    """Stop the lesson unless the merged model in `folder` tokenizes and predicts as the adapter on its base does.

    One model at a time is in memory. The base that answers questions is the last, and stays loaded in `placement`.

    Example:
        proof = prove(lesson.run, lesson.profile, placement, folder)
        print(proof)
    """
    evaluator = evaluation.open_evaluator(run, profile, folder)
    require_same_tokens(run.adapter, folder, evaluator.rows[:TOKENIZED_ROWS])
    limit = profile.vllm.max_model_len
    fixed = fixed_set(evaluator, evaluator.general(), model=placement.model, limit=limit)
    predictions = PredictionStore(run.path, fixed, files.stamp(folder) or {})
    predictions.read_merged(placement.load(folder, placement.unquantized), answers=placement.fits)
    if not placement.fits:  # nothing of it stays on disk
        placement.free()
    forms = [("full", placement.unquantized)]
    if profile.method == "qlora":  # the base it was trained on
        forms.append(("4bit", placement.in_4_bits))
    forms.sort(key=lambda form: form[1] is placement.loading)
    for name, loading in forms:
        tuned = add_adapter(placement.load(placement.model, loading), run.adapter)
        predictions.read_tuned(name, tuned, answers=placement.fits or name == "4bit")
        config = tuned.peft_config["default"]
        if loading is placement.loading and config.bias == "none" and not config.modules_to_save:
            tuned.unload()  # the adapter goes, the base stays
        else:
            placement.free()
    report = Report(predictions)
    report.require()
    return report


def require_same_tokens(adapter: Path, folder: Path, rows: Sequence[Row]) -> None:
    """Stop unless the tokenizer in `folder`, which a server will use, tokenizes these rows as the training's does."""
    from transformers import AutoTokenizer

    trained = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    served = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for row in rows:
        expected = trained.apply_chat_template(row["messages"], return_dict=False)
        if served.apply_chat_template(row["messages"], return_dict=False) != expected:
            raise CourseError(
                tr("The tokenizer in {folder} tokenizes differently from the one used in training.", folder=folder),
                todo=tr(
                    "Save the training's tokenizer beside the adapter (tokenizer.save_pretrained), delete the "
                    "merged folder and merge again."
                ),
            )


def add_adapter(model: Any, adapter: Path) -> Any:
    """PEFT's model of a base that may lie partly in RAM and on disk, with the adapter on the device that computes.

    PEFT itself would write a copy of such a base into the current folder; so it is not told where the base lies.
    """
    from accelerate.utils import set_module_tensor_to_device
    from peft import PeftModel
    from peft.utils import load_peft_weights

    if not any(weight.is_meta for weight in model.parameters()):
        return PeftModel.from_pretrained(model, adapter)
    places = model.__dict__.pop("hf_device_map").values()
    device = next((place for place in places if place not in ("cpu", "disk")), "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # what the next lines are for
        tuned = PeftModel.from_pretrained(model, adapter)
    known = dict(tuned.named_parameters())
    for name, value in load_peft_weights(str(adapter), device="cpu").items():
        head, _, tail = name.rpartition(".")
        place = f"{head}.default.{tail}"
        set_module_tensor_to_device(tuned, place, device, value.to(known[place].dtype))
    return tuned
