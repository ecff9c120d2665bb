"""Compare the next-token predictions of every form of a model: the base, the adapter on its base, merged, served.

Lesson 04 measures the models, lesson 05 the server; both store the result in `evaluation/parity.json`. The merged model
is measured twice, in different batches: what differs then is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nbutils import evaluation, files
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, Evaluator, Facts, digest
from nbutils.evaluation.inference import Row, Tokens, in_batches, padded
from nbutils.evaluation.placement import Placement
from nbutils.language import tr
from nbutils.record import RunFolder

if TYPE_CHECKING:
    import torch
    from openai import OpenAI

HELD_OUT_ROWS = 12
GENERAL_ROWS = 4
MEASURED_TOKENS = 16  # of each row: the first ones of its reference answer
LONGEST_TEXT = 512  # tokens, so that all texts fit any GPU as one batch
KEPT_TOKENS = 256  # the likeliest ones at each position that are stored: half a megabyte for each model
SERVER_TOKENS = 20  # vLLM gives no more logprobs of a position unless --max-logprobs says so
SERVER_REQUESTS = 8  # in flight
POSITIONS_AT_ONCE = 32  # to compare: 40 MB with a large vocabulary
RESOLUTION = 1e-6  # a sum of float32 probabilities is not known better than this
TOKENIZED_ROWS = 32  # that the tokenizers of training and merged folder must tokenize alike
FAR_FROM_NOISE = 30  # times the noise: other kernels do not round that differently, so it must be another model
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


@dataclass(frozen=True)
class FixedSet:
    """The texts that every form of the model is measured on."""

    texts: list[Tokens]
    measured: list[int]  # for each text: how many of its last tokens are to be predicted


def fixed_set(evaluator: Evaluator, general: Evaluator | None = None, *, limit: int = LONGEST_TEXT) -> FixedSet:
    """Rows spread evenly over the held-out and the general ones; `limit` is the shortest context of all forms."""
    fixed = FixedSet([], [])
    longest = min(limit, LONGEST_TEXT)
    _add_texts(fixed, evaluator, HELD_OUT_ROWS, longest)
    if general:
        _add_texts(fixed, general, GENERAL_ROWS, longest)
    return fixed


def _add_texts(fixed: FixedSet, evaluator: Evaluator, count: int, longest: int) -> None:
    """Add `count` rows that are short enough; if there are none, rows that are too long, without their beginning."""
    numbers = range(len(evaluator.rows))
    fitting = [number for number in numbers if len(evaluator.prompts[number]) <= longest - MEASURED_TOKENS]
    usable = fitting or numbers
    stride = max(1, len(usable) // count)
    for number in usable[::stride][:count]:
        row = evaluator.rows[number]
        example = evaluator.renderer.encode(row)
        answer_start = max(1, example.shared[-1])  # the first token of a text has nothing to be predicted from
        text = list(example.ids[: answer_start + MEASURED_TOKENS])
        text = text[1 - longest :]  # one token less than the limit: a server must generate at least one
        measured = min(
            MEASURED_TOKENS,
            len(example.ids) - answer_start,
            len(text) - 1,
        )
        fixed.texts.append(text)
        fixed.measured.append(measured)


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities at each position: of the whole vocabulary, or of the likeliest tokens, in falling order."""

    log_probs: torch.Tensor  # by position and token
    tokens: torch.Tensor | None = None  # which ones, by position; None: the whole vocabulary

    @property
    def likeliest(self) -> torch.Tensor:
        """The likeliest token of each position."""
        return self.log_probs.argmax(-1) if self.tokens is None else self.tokens[:, 0]

    def shortened(self, count: int = KEPT_TOKENS) -> Predictions:
        """Only the `count` likeliest tokens; what is short already stays as it is."""
        if self.tokens is not None:
            return self
        log_probs, tokens = self.log_probs.topk(min(count, self.log_probs.shape[-1]), dim=-1)
        return Predictions(log_probs, tokens)


def measure(model: Any, fixed: FixedSet, batch_size: int = HELD_OUT_ROWS + GENERAL_ROWS) -> Predictions:
    """The predictions of a model in memory, over the whole vocabulary."""
    import torch

    model.eval()

    def predict(batch: Sequence[int]) -> list[torch.Tensor]:
        """Log-probabilities of a batch; padded at the left, so that the measured positions are the last of each row."""
        counts = [fixed.measured[row] for row in batch]
        inputs = [fixed.texts[row][:-1] for row in batch]  # the last token is predicted, not read
        ids, mask = padded(inputs, 0, model.device, left=True)
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=max(counts),
            ).logits
            return [logits[row, -count:].float().log_softmax(-1).cpu() for row, count in enumerate(counts)]

    rows = range(len(fixed.texts))
    log_probs = torch.cat([predicted for _, predicted in in_batches(rows, batch_size, predict)])
    if torch.isnan(log_probs).any():
        raise CourseError(
            tr("The model's logits contain NaN or infinity: a value overflowed its precision."),
            todo=tr("Use another dtype (float32, or bfloat16 where the GPU supports it), or another model."),
        )
    return Predictions(log_probs)


def measure_server(client: OpenAI, model_name: str, fixed: FixedSet) -> Predictions:
    """The predictions of the model on a vLLM server: the likeliest tokens of every position."""
    import torch
    from openai import OpenAIError

    def predict(text: Tokens, measured: int) -> list[Any]:
        """(logprob, token) of the likeliest tokens at each position; a token of the text that vLLM adds is cut off."""
        completion: Any = client.completions.create(
            model=model_name,
            prompt=text,
            max_tokens=1,
            temperature=0.0,
            extra_body={"prompt_logprobs": SERVER_TOKENS},
        )
        positions = []
        for tokens in completion.choices[0].prompt_logprobs[-measured:]:
            ranked = [(value["logprob"], int(token)) for token, value in tokens.items()]
            ranked.sort(reverse=True)
            positions.append(ranked[:SERVER_TOKENS])
        return positions

    try:
        with ThreadPoolExecutor(SERVER_REQUESTS) as pool:
            texts = list(pool.map(predict, fixed.texts, fixed.measured))
    except (OpenAIError, AttributeError, TypeError) as problem:  # it is not up, or is not vLLM
        raise CourseError(
            tr(
                "The server at {url} did not answer: {problem}.",
                url=client.base_url,
                problem=problem,
            ),
            todo=tr("Read its log; a text that is too long for it needs a larger vllm.max_model_len."),
        ) from problem
    # float64 holds both of a pair, token ids exactly
    likeliest = torch.tensor([position for text in texts for position in text], dtype=torch.float64)
    return Predictions(likeliest[..., 0].float(), likeliest[..., 1].long())


@dataclass(frozen=True)
class Gap:
    """KL divergence of two predictions in nats per token, and how many of the likeliest next tokens agree."""

    mean: float
    worst: float
    same_choices: int
    positions: int
    coarse: bool = False  # computed from the likeliest tokens: the divergences are lower bounds

    @property
    def columns(self) -> dict[str, str]:
        """The gap as cells of a table, by heading."""
        return {
            tr("KL mean"): self.nats(self.mean),
            tr("KL worst"): self.nats(self.worst),
            tr("same next token"): tr("{same} of {all}", same=self.same_choices, all=self.positions),
        }

    def nats(self, value: float) -> str:
        """A divergence as text."""
        return tr("at least {nats}", nats=f"{value:.2g}") if self.coarse else f"{value:.2g}"


def gap(reference: Predictions, other: Predictions) -> Gap:
    """KL(reference || other): how much is lost if `other` predicts in place of `reference`."""
    coarse = reference.tokens is not None or other.tokens is not None
    divergences = _coarse_divergences(reference, other) if coarse else _divergences(reference, other)
    divergences = divergences.float().clamp(min=0.0)  # rounding can make them slightly negative
    return Gap(
        mean=float(divergences.mean()),
        worst=float(divergences.max()),
        same_choices=int((reference.likeliest == other.likeliest).sum()),
        positions=len(divergences),
        coarse=coarse,
    )


def _divergences(reference: Predictions, other: Predictions) -> torch.Tensor:
    """The KL divergence at each position, over the whole vocabulary."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = []
    pairs = zip(reference.log_probs.split(POSITIONS_AT_ONCE), other.log_probs.split(POSITIONS_AT_ONCE), strict=True)
    for left, right in pairs:
        log_p = left.to(device).double()
        log_q = right.to(device).double()
        terms = log_p.exp() * (log_p - log_q)
        terms = torch.where(log_p == -torch.inf, 0.0, terms)  # 0 * log 0 is 0, not NaN
        parts.append(terms.sum(dim=-1).cpu())
    return torch.cat(parts)


def _coarse_divergences(reference: Predictions, other: Predictions) -> torch.Tensor:
    """A lower bound at each position: over the tokens that both sides have, with all others taken together as one."""
    import torch

    left = reference.shortened()
    right = other.shortened()
    assert left.tokens is not None and right.tokens is not None
    same = left.tokens.unsqueeze(2) == right.tokens.unsqueeze(1)  # (position, token of left, token of right)
    right_log_probs = right.log_probs.double().unsqueeze(1)
    log_q = torch.where(same, right_log_probs, -torch.inf)
    log_q = log_q.amax(2)  # what right gives to the tokens of left; -inf where it does not have one
    log_p = left.log_probs.double()
    log_p = torch.where(log_q == -torch.inf, log_q, log_p)  # such a token belongs to the rest on both sides
    p = log_p.exp()
    q = log_q.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    rest_p = (1 - p.sum(1)).clamp(min=RESOLUTION)
    rest_q = (1 - q.sum(1)).clamp(min=RESOLUTION)
    rest = rest_p * (rest_p / rest_q).log()
    return terms.sum(1) + rest


class StoredParity(BaseModel):
    """The content of parity.json; what older versions stored beside it is ignored."""

    mark: str  # digest of the texts and of `about`; the files of predictions that belong here have the same
    about: dict[str, Any]  # the stamp of the merged model: which one it is, and what it was merged into
    fixed: FixedSet
    gaps: dict[str, Gap] = {}  # by "OTHER against REFERENCE"
    readings: dict[str, Any] = {}  # the forms that were measured; the values are empty


class PredictionStore:
    """The predictions of each form of a model on the fixed set, and the gaps between them; stored in the run folder."""

    def __init__(self, run: Path, stored: StoredParity) -> None:
        self.folder = run / FOLDER / "parity"
        self.stored = stored
        self.fixed = stored.fixed
        self.forms: dict[str, Predictions] = {}

    def add(self, name: str, predictions: Predictions) -> None:
        """Compare new predictions with all others, and store them: first their likeliest tokens, then parity.json."""
        from safetensors.torch import save_file

        for other, of_other in self.forms.items():
            if other != name:
                self.stored.gaps[f"{other} against {name}"] = gap(predictions, of_other)
                self.stored.gaps[f"{name} against {other}"] = gap(of_other, predictions)
        self.forms[name] = predictions
        self.stored.readings[name] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        short = predictions.shortened()
        assert short.tokens is not None
        tensors = {
            "tokens": short.tokens.int().contiguous(),
            "logs": short.log_probs.float().contiguous(),
        }
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self.stored.mark})
        files.write_json(self.folder.with_suffix(".json"), self.stored.model_dump())

    def measure_merged(self, model: Any) -> None:
        """Measure the merged model in one batch, and `again` text by text: the gap between both is noise."""
        self.add("merged", measure(model, self.fixed))
        self.add("again", measure(model, self.fixed, batch_size=1))

    def measure_tuned(self, name: str, base: Any, adapter: Path) -> None:
        """Measure the adapter on a base, as the form `name`; for `full`, the unquantized base, also the base alone."""
        from peft import PeftModel

        tuned = PeftModel.from_pretrained(base, adapter)
        self.add(name, measure(tuned, self.fixed))
        if name == "full":
            with tuned.disable_adapter():
                self.add("base", measure(tuned, self.fixed))

    def gap(self, reference: str, other: str) -> Gap | None:
        """The stored gap of `other` from `reference`; None if one of them was not measured."""
        return self.stored.gaps.get(f"{other} against {reference}")


def new_store(run: Path, fixed: FixedSet, stamp: Facts) -> PredictionStore:
    """An empty store for the forms of the merged model with this stamp."""
    mark = digest([asdict(fixed), stamp])
    return PredictionStore(run, StoredParity(mark=mark, about=stamp, fixed=fixed))


def load_predictions(run: Path, merged: Path) -> PredictionStore:
    """The store that lessons 04 and 05 wrote; refused if it is of another merged model, or incomplete."""
    from safetensors import SafetensorError, safe_open

    file = run / FOLDER / "parity.json"
    try:
        store = PredictionStore(run, StoredParity.model_validate(files.read_json(file)))
        marks = set()
        for name in store.stored.readings:
            with safe_open(store.folder / f"{name}.safetensors", "pt") as tensors:
                marks.add(tensors.metadata()["mark"])
                store.forms[name] = Predictions(tensors.get_tensor("logs"), tensors.get_tensor("tokens").long())
        valid = marks == {store.stored.mark} and store.stored.about == files.stamp(merged)
    except (OSError, ValueError, SafetensorError):
        valid = False
    if valid:
        return store
    raise CourseError(
        tr("No predictions of {merged} are stored in {file}.", merged=merged, file=file), todo=tr("Run lesson 04.")
    )


@dataclass(frozen=True)
class FormComparison:
    """One form of the model against another; only a judged one can fail."""

    reference: str
    other: str
    gap: Gap
    judged: bool = False
    failure: str = ""  # why it fails

    @property
    def verdict(self) -> str:
        """In a few words of English, which `tr` translates."""
        if self.judged:
            return FAILS if self.failure else SAME
        return CHANGED if self.other == "base" else PRICE

    def __str__(self) -> str:
        verdict = tr(self.verdict)
        if self.failure:
            verdict = f"{verdict}: {self.failure}"
        return tr(
            "{other}, {nats} nats per token from {reference}: {verdict}.",
            other=tr(NAMES[self.other]),
            nats=self.gap.nats(self.gap.mean),
            reference=tr(NAMES[self.reference]),
            verdict=verdict,
        )


class ParityReport:
    """All comparisons of a run: first what tuning, 4 bits and merging changed, then what must be the same model."""

    def __init__(self, predictions: PredictionStore) -> None:
        self.predictions = predictions
        onto = predictions.stored.about.get("onto")
        self.target = "4bit" if onto == "dequantized" else "full"  # the form that the merged model must equal
        again = predictions.gap("merged", "again")  # the same model, in other batches
        self.noise = max(RESOLUTION, again.mean if again else 0.0)
        self.lines: list[FormComparison] = []
        self._add("full", "base")
        self._add("4bit", "full")
        if self.target != "full":
            self._add("full", "merged")
        self._add(self.target, "merged", judged=True)
        self._add("merged", "vllm", judged=True)
        verdicts = [line.verdict for line in self.lines]
        self.holds = SAME in verdicts and FAILS not in verdicts

    def _add(self, reference: str, other: str, *, judged: bool = False) -> None:
        """Add a comparison, if both were measured."""
        distance = self.predictions.gap(reference, other)
        if distance:
            failure = self._failure(other, distance) if judged else ""
            self.lines.append(FormComparison(reference, other, distance, judged, failure))

    def _failure(self, other: str, distance: Gap) -> str:
        """Why `other`, at this distance from its reference, must be another model; empty if it is the same."""
        base = self.predictions.gap("base", other)
        if base and distance.mean > base.mean + self.noise:
            return tr(
                "it is nearer to {base} ({nats})",
                base=tr(NAMES["base"]),
                nats=f"{max(base.mean, RESOLUTION):.2g}",
            )
        rounding = self.noise
        merged = self.predictions.gap(self.target, "merged")
        if merged:  # lesson 04 has proved the merge weight by weight, so what it changes is rounding too
            rounding = max(rounding, merged.mean)
        if other == "vllm" and distance.mean > FAR_FROM_NOISE * rounding:
            return tr("that is {times} times the noise of this run", times=f"{distance.mean / rounding:.0f}")
        return ""

    def __str__(self) -> str:
        lines = "\n".join(map(str, self.lines))
        return lines or tr("Predictions are not compared: the unquantized model does not fit here.")

    def facts(self) -> Facts:
        """For facts.json; the verdict in English, the summary in the language of the course."""
        if not self.lines:
            return {"parity": {}}
        numbers = {
            "holds": self.holds,
            "verdict": SAME if self.holds else FAILS,
            "summary": str(self),
            "noise": self.noise,
            "gaps": {f"{line.other} against {line.reference}": asdict(line.gap) for line in self.lines},
        }
        return {"parity": numbers}

    def require(self) -> None:
        """Stop the lesson if a form of the model is not the one that was trained."""
        if not self.holds:
            raise CourseError(
                str(self),
                todo=tr(
                    "Serve the folder that lesson 04 wrote. If the line above names the merged model, check that "
                    "adapter and base belong together, or train longer: an adapter that hardly learned is lost "
                    "in rounding."
                ),
            )


def prove(run: RunFolder, profile: Profile, placement: Placement, folder: Path) -> ParityReport:
    """Stop the lesson unless the merged model in `folder` tokenizes and predicts as the adapter on its base does.

    One model at a time is in memory; without room for the unquantized one, only the tokens are compared.

    Example:
        proof = prove(lesson.run, lesson.profile, placement, folder)
        print(proof)
    """
    evaluator = evaluation.open_evaluator(run, profile, folder)
    require_same_tokens(run.adapter, folder, evaluator.rows[:TOKENIZED_ROWS])
    fixed = fixed_set(evaluator, evaluator.general(), limit=profile.vllm.max_model_len)
    predictions = new_store(run.path, fixed, files.stamp(folder) or {})
    if not placement.fits:
        return ParityReport(predictions)
    predictions.measure_merged(placement.load(folder))
    if profile.method == "qlora":
        predictions.measure_tuned("4bit", placement.load(placement.model, in_4_bits=True), run.adapter)
    predictions.measure_tuned("full", placement.load(placement.model), run.adapter)
    placement.free()  # PEFT has put adapter layers into the loaded base: nobody may use it as the base again
    report = ParityReport(predictions)
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
