"""Compare the next-token predictions of every form of a model: the base, the adapter on its base, merged, served.

Stored in `evaluation/parity.json` by lessons 04 (models), 05 (server). Reading the merged model twice gives the noise.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import UserDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from nbutils import evaluation, files, merging
from nbutils.chat import common_length, find_stop_ids
from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, Evaluator, digest
from nbutils.evaluation.inference import generate_ids, in_batches, padded
from nbutils.language import tr
from nbutils.serving.server import NO_KEY, reach_directly

if TYPE_CHECKING:
    import torch

    from nbutils.evaluation.comparison import Placement
    from nbutils.record import LessonLike

HELD_OUT_ROWS, GENERAL_ROWS = 12, 4
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
Translate = Callable[..., str]
ONTO = {"full": "full", "dequantized": "4bit"}  # what a merged model must equal, by what it was merged into


def plain(english: str, **values: Any) -> str:
    """What `tr` says in English: for facts.json, which is the same in every language."""
    return english.format(**values)


def label(model: str, tr: Translate = tr) -> str:
    """What a form of the model is called."""
    return {
        "base": tr("the base without the tuning"), "4bit": tr("adapter on the 4-bit base it was trained on"),
        "full": tr("adapter on the unquantized base"), "merged": tr("merged"), "vllm": tr("merged, in vLLM"),
    }[model]  # fmt: skip


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


def fixed_set(evaluator: Evaluator, general: Evaluator | None = None, *, model: Any = None, limit: int = 0) -> Fixed:
    """The fixed set of a run, rows spread evenly over both; `limit` is the shortest context of all models."""
    longest = min(filter(None, (limit, LONGEST)))
    texts, measured, prompts = list[list[int]](), list[int](), list[list[int]]()
    for one, count in ((evaluator, HELD_OUT_ROWS), (general, GENERAL_ROWS)):
        if one is None:
            continue
        every = range(len(one.rows))
        fitting = [row for row in every if len(one.prompts[row]) + max(MEASURED, ANSWER_TOKENS) <= longest]
        pool = fitting or list(every)  # what is too long loses its beginning
        for row in pool[:: max(1, len(pool) // count)][:count]:
            ids, _ = one.view.encode(one.rows[row]["messages"], one.rows[row].get("tools"))
            begin = max(1, common_length(one.prompts[row], ids))
            texts.append(ids[: begin + MEASURED][-(longest - 1) :])  # a server adds at least one token
            measured.append(min(len(ids) - begin, MEASURED, len(texts[-1]) - 1))
            prompts.append(one.prompts[row][-(longest - ANSWER_TOKENS) :])
    stops = sorted(find_stop_ids(evaluator.tokenizer, getattr(model, "generation_config", model)))
    pad = evaluator.tokenizer.pad_token_id
    return Fixed(texts, measured, prompts, stops, stops[0] if pad is None else pad)


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities at each position: of the whole vocabulary, or (`tokens` says which) of the likeliest ones."""

    logs: torch.Tensor
    tokens: torch.Tensor | None = None
    answers: list[list[int]] | None = None

    def shortened(self, count: int = KEPT_TOKENS) -> Predictions:
        """The same with the likeliest tokens only."""
        if self.tokens is not None:
            return self
        logs, tokens = self.logs.topk(min(count, self.logs.shape[-1]), dim=-1)
        return Predictions(logs, tokens, self.answers)


def measure(model: Any, fixed: Fixed, *, answers: bool = True, batch_size: int = 0) -> Predictions:
    """Read a model in memory; without `answers` it is run once only, as one that lies partly on disk should be."""
    import torch

    model.eval()
    rows = range(len(fixed.texts))  # at once if memory allows, so that a model on disk is read once

    def predicted(batch: Sequence[int]) -> list[torch.Tensor]:
        """Of a batch padded at the left: the measured positions are then the last ones of every row."""
        counts = [fixed.measured[row] for row in batch]
        device = "cpu" if model.device.type == "meta" else model.device  # meta: its first weight lies on disk
        ids, mask = padded([fixed.texts[row][:-1] for row in batch], fixed.pad, device, left=True)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        with torch.no_grad():  # not inference_mode: weights read from disk meanwhile would stay bound to it
            logits = model(**given, use_cache=False, logits_to_keep=max(counts)).logits
            return [logits[row, -count:].float().log_softmax(-1).cpu() for row, count in enumerate(counts)]

    def generated(batch: Sequence[int]) -> list[list[int]]:
        prompts = [fixed.prompts[row] for row in batch]
        return generate_ids(model, prompts, fixed.answer_tokens, fixed.stops, fixed.pad)

    logs = torch.cat([row for _, row in in_batches(rows, batch_size or len(rows), predicted)])
    if not torch.isfinite(logs).any(dim=-1).all() or torch.isnan(logs).any():
        raise CourseError(
            tr("The model's logits contain NaN or infinity: a value overflowed its precision."),
            todo=tr("Use another dtype (float32, or bfloat16 where the GPU supports it), or another model."),
        )
    said = [ids for _, ids in in_batches(rows, len(rows), generated)] if answers else None
    return Predictions(logs, answers=said)


def measure_server(server_url: str, model_name: str, fixed: Fixed, api_key: str | None = None) -> Predictions:
    """Read the model that a vLLM server (`http://host:port/v1`) serves: the likeliest tokens of every position."""
    import torch
    from openai import OpenAI, OpenAIError

    reach_directly(urlsplit(server_url).hostname or "127.0.0.1")
    client = OpenAI(base_url=server_url, api_key=api_key or NO_KEY)

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
        raise CourseError(
            tr("The server at {url} did not answer: {problem}.", url=server_url, problem=problem),
            todo=tr("Read its log; a text that is too long for it needs a larger vllm.max_model_len."),
        ) from problem
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
        answers = tr("not compared")
        if self.same_answers is not None:
            answers = tr("{same} of {all}", same=self.same_answers, all=self.answers)
        return {
            tr("KL mean"): self.nats(self.mean), tr("KL worst"): self.nats(self.worst),
            tr("same next token"): tr("{same} of {all}", same=self.same_choices, all=self.positions),
            tr("same answers"): answers,
        }  # fmt: skip

    def nats(self, value: float, tr: Translate = tr) -> str:
        """A divergence as text."""
        return tr("at least {nats}", nats=f"{value:.2g}") if self.coarse else f"{value:.2g}"


def gap(reference: Predictions, other: Predictions) -> Gap:
    """How much is lost if `other` predicts in place of `reference`."""
    import torch

    def places(predictions: Predictions) -> list[dict[int, float]]:
        """The likeliest tokens of each position, with their log-probabilities."""
        short = predictions.shortened()
        assert short.tokens is not None
        pairs = zip(short.tokens.tolist(), short.logs.tolist(), strict=True)
        return [dict(zip(tokens, logs, strict=True)) for tokens, logs in pairs]

    coarse = reference.tokens is not None or other.tokens is not None
    device, found = "cuda" if torch.cuda.is_available() else "cpu", list[float]()
    if coarse:  # over the tokens that both sides know, and all the rest as one: it never exceeds the true value
        for p, q in zip(places(reference), places(other), strict=True):
            shared = p.keys() & q.keys()
            rest_p, rest_q = (max(RESOLUTION, 1 - sum(math.exp(logs[token]) for token in shared)) for logs in (p, q))
            known = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
            found.append(known + rest_p * math.log(rest_p / rest_q))
    else:
        for one, two in zip(reference.logs.split(POSITIONS), other.logs.split(POSITIONS), strict=True):
            log_p, log_q = one.to(device).double(), two.to(device).double()
            terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))  # impossible: nothing is lost
            found += terms.sum(dim=-1).tolist()
    values, same_answers, answers = torch.tensor(found).clamp(min=0.0), None, 0
    if reference.answers is not None and other.answers is not None:
        same_answers = sum(one == two for one, two in zip(reference.answers, other.answers, strict=True))
        answers = len(reference.answers)
    first, second = (
        one.logs.argmax(-1) if one.tokens is None else one.tokens.gather(1, one.logs.argmax(-1, keepdim=True))[:, 0]
        for one in (reference, other)
    )
    same_choices = int((first == second).sum())
    return Gap(float(values.mean()), float(values.max()), same_choices, len(values), same_answers, answers, coarse)


class PredictionStore(UserDict[str, Predictions]):
    """Predictions by name, kept in the run; those of other texts or another merged model (`about`) are dropped."""

    def __init__(self, run: Path, fixed: Fixed | None = None, *, about: Any = None) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__()
        self.file, self.folder = run / FOLDER / "parity.json", run / FOLDER / "parity"
        self.gaps: dict[str, Gap] = {}
        try:
            kept = files.read_json(self.file)
            gaps = {key: Gap(**one) for key, one in kept["gaps"].items()}
            answers = {model: one["answers"] for model, one in kept["readings"].items()}
            mark, kept_about, kept_fixed = kept["mark"], kept["about"], Fixed(**kept["fixed"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing, damaged or of another version
            if fixed is None:
                raise CourseError(
                    tr("No predictions are stored in {file}.", file=self.file), todo=tr("Run lesson 04.")
                ) from None
            gaps, answers, mark, kept_about, kept_fixed = {}, {}, None, None, fixed
        self.fixed: Fixed = fixed or kept_fixed
        self.about = kept_about if about is None else json.loads(json.dumps(about, default=str))
        self.fingerprint = digest([digest(asdict(self.fixed)), self.about])
        if mark != self.fingerprint:
            return
        self.gaps = gaps
        for model in answers:  # those whose file is there, whole, and of these very texts and models
            with suppress(OSError, SafetensorError), safe_open(self.folder / f"{model}.safetensors", "pt") as file:
                if (file.metadata() or {}).get("mark") == self.fingerprint:
                    logs, tokens = file.get_tensor("logs"), file.get_tensor("tokens").long()
                    self.data[model] = Predictions(logs, tokens, answers[model])

    def __setitem__(self, name: str, predictions: Predictions) -> None:
        """Compare new predictions with all that are here, and keep them: the likeliest tokens, then all numbers."""
        from safetensors.torch import save_file

        self.data[name] = predictions
        for other in self.data.keys() - {name}:
            self.gaps[f"{other} against {name}"] = gap(predictions, self.data[other])
            self.gaps[f"{name} against {other}"] = gap(self.data[other], predictions)
        self.folder.mkdir(parents=True, exist_ok=True)
        short = predictions.shortened()
        assert short.tokens is not None
        tensors = {"tokens": short.tokens.int().contiguous(), "logs": short.logs.float().contiguous()}
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self.fingerprint})
        files.write_json(self.file, {
            "mark": self.fingerprint, "about": self.about, "positions": self.fixed.positions,
            "gaps": {key: asdict(one) for key, one in self.gaps.items()},
            "readings": {one: {"answers": held.answers} for one, held in self.data.items()},
            "fixed": asdict(self.fixed),
        })  # fmt: skip

    def read_merged(self, model: Any, *, answers: bool = True) -> None:
        """Measure the merged model, and once more in smaller batches: what differs then is the noise of this run."""
        self.data.pop("vllm", None)  # a server of before says nothing about this one
        self.gaps = {key: found for key, found in self.gaps.items() if "vllm" not in key}
        self["merged"] = measure(model, self.fixed, answers=answers)
        fewer = 1 if answers else max(1, len(self.fixed.texts) // 2)  # one that lies partly on disk: two runs, not 16
        self["again"] = measure(model, self.fixed, answers=False, batch_size=fewer)

    def read(self, name: str, load: Callable[[], Any], *, answers: bool = True) -> Any:
        """Measure an adapter on a base, unless it is kept; on the unquantized one (`full`) also the base alone.

        Returns the model that was loaded, None if all is kept.
        """
        if name in self and (name != "full" or "base" in self):
            return None
        tuned = load()
        self[name] = measure(tuned, self.fixed, answers=answers)
        if name == "full":
            with tuned.disable_adapter():
                self["base"] = measure(tuned, self.fixed, answers=answers)
        return tuned

    def gap(self, reference: str, other: str) -> Gap | None:
        """How far `other` is from `reference`; None if one of them was not measured."""
        return self.gaps.get(f"{other} against {reference}")


class Line(NamedTuple):
    """One comparison: `other` against `reference`; only a judged one can fail."""

    reference: str
    other: str
    gap: Gap
    judged: bool
    nearer: float = 0.0  # it fails: it is nearer to the base, which is so far away
    times: float = 0.0  # it fails: it is so many times the noise

    @property
    def why(self) -> str:
        """Why it fails; empty if it does not."""
        return self.explain()

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return self.judge()

    def explain(self, tr: Translate = tr) -> str:
        """`why` in a language."""
        if self.nearer:
            return tr("it is nearer to {base} ({nats})", base=label("base", tr), nats=f"{self.nearer:.2g}")
        return tr("that is {times} times the noise of this run", times=f"{self.times:.0f}") if self.times else ""

    def judge(self, tr: Translate = tr) -> str:
        """`verdict` in a language."""
        if not self.judged:
            return tr("what the tuning changed") if self.other == "base" else tr("a price")
        return tr("FAILS") if self.nearer or self.times else tr("the same model")

    def sentence(self, tr: Translate = tr) -> str:
        """The whole comparison in a language."""
        names = {"other": label(self.other, tr), "reference": label(self.reference, tr)}
        values = names | {"nats": self.gap.nats(self.gap.mean, tr), "verdict": self.explain(tr) or self.judge(tr)}
        if self.nearer or self.times:
            return tr("THE MODEL CHANGED: {other}, {nats} nats per token from {reference}: {verdict}.", **values)
        return tr("{other}, {nats} nats per token from {reference}: {verdict}.", **values)


class Report:
    """All comparisons of a run: prices first, then what must be the same model, down to the server."""

    def __init__(self, predictions: PredictionStore) -> None:
        self.predictions, about, again = predictions, predictions.about, predictions.gap("merged", "again")
        self.target = ONTO.get(str(about.get("onto")), "full") if isinstance(about, dict) else "full"
        self.noise = max(RESOLUTION, again.mean if again else 0.0)  # the same model, in other batches
        self.lines: list[Line] = []
        merged = predictions.gap(self.target, "merged")
        rounding = max(self.noise, merged.mean if merged else 0.0)  # the merge, proven by weight, is rounding too
        prices = [("full", "base"), ("4bit", "full")] + ([("full", "merged")] if self.target != "full" else [])
        for reference, other in (*prices, (self.target, "merged"), ("merged", "vllm")):
            found, base = predictions.gap(reference, other), predictions.gap("base", other)
            judged, nearer, times = (reference, other) not in prices, 0.0, 0.0
            if found and judged:
                if base and found.mean > base.mean + self.noise:
                    nearer = max(base.mean, RESOLUTION)
                elif other == "vllm" and found.mean > FAR * rounding:
                    times = found.mean / rounding
            self.lines += [Line(reference, other, found, judged, nearer, times)] if found else []
        self.holds = any(line.judged for line in self.lines) and not any(line.why for line in self.lines)
        self.verdict = "\n".join(line.sentence() for line in self.lines)

    def table(self) -> list[dict[str, str]]:
        """For display: a row for each comparison."""
        return [
            {tr("model"): label(line.other), tr("compared with"): label(line.reference), **line.gap.columns,
             tr("times noise"): f"{line.gap.mean / self.noise:.2g}", tr("verdict"): line.verdict}
            for line in self.lines
        ]  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        gaps = {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines}
        verdict = "\n".join(line.sentence(plain) for line in self.lines)
        return {"holds": self.holds, "verdict": verdict, "summary": self.verdict, "noise": self.noise, "gaps": gaps}

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


@dataclass(frozen=True)
class Proof:
    """What `prove` found: the weights in a sentence, and the predictions of each form of the model."""

    weights: str
    report: Report

    def __str__(self) -> str:
        [same, *_] = [line.gap for line in self.report.lines if line.judged]
        text = tr(
            "{count} predictions compared: {nats} nats per token apart on average, the same next token at {same}",
            count=same.positions, nats=same.nats(same.mean), same=same.same_choices,
        )  # fmt: skip
        price = self.report.predictions.gap("4bit", "full") if self.report.target == "full" else None
        if price:
            text += tr("; leaving the 4-bit base costs {nats} nats per token", nats=price.nats(price.mean))
        return f"{self.weights}\n{text}"

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        return {"parity": self.report.facts()}


def prove(lesson: LessonLike, folder: Path, placement: Placement) -> Proof:
    """Stop the lesson unless the merged model in `folder` is the adapter's: weights, tokens and predictions.

    One model at a time is in memory. The base that answers questions is the last, and stays loaded in `placement`.
    """
    from transformers import AutoTokenizer

    adapter, about = lesson.run.adapter, files.stamp(folder) or {}
    weights = merging.prove(lesson.model, adapter, folder, onto=about.get("onto", "full"))
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    evaluator = evaluation.open_evaluator(lesson, lesson.model, tokenizer, in_4_bits=not placement.fits)
    own: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # what a server will use
    for row in evaluator.rows[:TOKENIZED_ROWS]:
        ours, theirs = (one.apply_chat_template(row["messages"], return_dict=True) for one in (tokenizer, own))
        if ours["input_ids"] != theirs["input_ids"]:
            raise CourseError(
                tr("The tokenizer in {folder} tokenizes differently from the one used in training.", folder=folder),
                todo=tr(
                    "Save the training's tokenizer beside the adapter (tokenizer.save_pretrained), delete the "
                    "merged folder and merge again."
                ),
            )
    limit = lesson.profile.vllm.max_model_len
    fixed = fixed_set(evaluator, evaluator.general(), model=lesson.model, limit=limit)
    predictions = PredictionStore(lesson.run.path, fixed, about=about)
    forms = {"full": placement.unquantized}
    if lesson.profile.method == "qlora":  # the base it was trained on
        forms["4bit"] = placement.in_4_bits

    def read(name: str, loading: dict[str, Any]) -> None:
        def load() -> Any:
            return add_adapter(placement.load(lesson.model, loading), adapter)

        tuned = predictions.read(name, load, answers=placement.fits or name == "4bit")
        config = tuned.peft_config["default"] if tuned is not None else None
        if config and loading is placement.loading and config.bias == "none" and not config.modules_to_save:
            tuned.unload()  # the adapter goes, the base stays
        elif config:
            placement.free()

    try:
        predictions.read_merged(placement.load(folder, placement.unquantized), answers=placement.fits)
        if not placement.fits:  # nothing of it stays on disk
            placement.free()
        for name, loading in sorted(forms.items(), key=lambda form: form[1] is placement.loading):
            read(name, loading)
        report = Report(predictions)
        report.require()
    except BaseException:
        placement.free()
        raise
    return Proof(weights, report)


def add_adapter(model: Any, adapter: Path) -> Any:
    """PEFT's model of a base that may lie partly in RAM and on disk, with the adapter on the device that computes.

    PEFT itself would write a copy of such a base into the current folder; so it is not told where the base lies.
    """
    from accelerate.utils import set_module_tensor_to_device
    from peft import PeftModel
    from peft.utils import load_peft_weights

    if not any(weight.is_meta for weight in model.parameters()):
        return PeftModel.from_pretrained(model, adapter)
    places = model.__dict__.pop("hf_device_map", {}).values()
    device = next((place for place in places if str(place) not in ("cpu", "disk")), "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # what the next lines are for
        tuned = PeftModel.from_pretrained(model, adapter)
    known = dict(tuned.named_parameters())
    for name, value in load_peft_weights(str(adapter), device="cpu").items():
        head, _, tail = name.rpartition(".")
        place = f"{head}.default.{tail}"
        set_module_tensor_to_device(tuned, place, device, value.to(known[place].dtype))
    return tuned
