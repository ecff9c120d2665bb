"""Compare the next-token predictions of every form of a model: the base, the adapter on its base, merged, served.

Lesson 04 measures the models, lesson 05 the server; both store the likeliest tokens of each position in
`evaluation/parity/`. The merged model is measured twice, in different batches: what differs then is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from nbutils import evaluation, files
from nbutils.chat import Row
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.evaluation.evaluator import FOLDER, Evaluator, Facts, digest
from nbutils.evaluation.inference import Tokens, end_logits, in_batches
from nbutils.evaluation.placement import Placement
from nbutils.language import tr
from nbutils.record import RunFolder

if TYPE_CHECKING:
    import torch

HELD_OUT_ROWS = 12
GENERAL_ROWS = 4
MEASURED_TOKENS = 16  # of each row: the first ones of its reference answer
LONGEST_TEXT = 512  # tokens, so that all texts fit any GPU as one batch
KEPT_TOKENS = 256  # the likeliest ones at each position: half a megabyte for each model
RESOLUTION = 1e-6  # a sum of float32 probabilities is not known better than this
FAR_FROM_NOISE = 30  # times the noise: other kernels do not round that differently, so it must be another model
NAMES = {  # of the forms of a model
    "base": "the base without the tuning",
    "4bit": "adapter on the 4-bit base it was trained on",
    "full": "adapter on the unquantized base",
    "merged": "merged",
    "vllm": "merged, in vLLM",
}
CHANGED = "what the tuning changed"
PRICE = "what 4 bits cost"  # in accuracy: reported, never a failure
SAME = "the same model"
FAILS = "FAILS"


@dataclass(frozen=True)
class FixedSet:
    """The texts that every form of the model is measured on."""

    texts: list[Tokens]
    measured: list[int]  # for each text: how many of its last tokens are to be predicted


def fixed_set(evaluator: Evaluator) -> FixedSet:
    """Rows spread evenly over the held-out and the general ones; a text that is too long loses its beginning."""
    fixed = FixedSet([], [])
    longest = min(evaluator.limit, LONGEST_TEXT) - 1  # a server must generate at least one token more
    for source, count in ((evaluator, HELD_OUT_ROWS), (evaluator.general(), GENERAL_ROWS)):
        stride = max(1, len(source.rows) // count)
        for row in source.rows[::stride][:count]:
            example = source.renderer.encode(row)
            answer_start = max(1, example.shared[-1])  # the first token of a text has nothing to be predicted from
            text = list(example.ids[: answer_start + MEASURED_TOKENS])
            measured = len(text) - answer_start
            fixed.texts.append(text[-longest:])
            fixed.measured.append(measured)
    return fixed


@dataclass(frozen=True)
class Predictions:
    """The likeliest tokens of each position, in falling order, and their log-probabilities."""

    log_probs: torch.Tensor  # by position
    tokens: torch.Tensor


def measure(model: Any, fixed: FixedSet, batch_size: int = HELD_OUT_ROWS + GENERAL_ROWS) -> Predictions:
    """The predictions of a model in memory."""
    import torch

    model.eval()

    def predict(batch: Sequence[int]) -> list[Any]:
        counts = [fixed.measured[row] for row in batch]
        texts = [fixed.texts[row][:-1] for row in batch]  # the last token is predicted, not read
        likeliest = []
        with torch.inference_mode():
            logits = end_logits(model, texts, max(counts))
            for row, count in enumerate(counts):
                log_probs = logits[row, -count:].float().log_softmax(-1)
                likeliest.append(log_probs.topk(KEPT_TOKENS))
        return likeliest

    likeliest = [top for _, top in in_batches(range(len(fixed.texts)), batch_size, predict)]
    log_probs = torch.cat([top.values for top in likeliest]).cpu()
    if torch.isnan(log_probs).any():
        raise CourseError(
            "The model's logits contain NaN or infinity: a value overflowed its precision.",
            todo="Use another dtype (float32, or bfloat16 where the GPU supports it), or another model.",
        )
    return Predictions(log_probs, torch.cat([top.indices for top in likeliest]).cpu())


@dataclass(frozen=True)
class Gap:
    """KL divergence of two predictions in nats per token, and how many of the likeliest next tokens agree."""

    mean: float
    worst: float
    same_choices: int
    positions: int

    @property
    def columns(self) -> dict[str, str]:
        """The gap as cells of a table, by heading."""
        return {
            tr("KL mean"): f"{self.mean:.2g}",
            tr("KL worst"): f"{self.worst:.2g}",
            tr("same next token"): tr("{same} of {all}", same=self.same_choices, all=self.positions),
        }


def gap(reference: Predictions, other: Predictions) -> Gap:
    """KL(reference || other): how much is lost if `other` predicts in place of `reference`.

    Over the tokens that both have, with all others taken together as one: so it is a lower bound.
    """
    import torch

    same = reference.tokens.unsqueeze(2) == other.tokens.unsqueeze(1)  # (position, token of reference, token of other)
    # a lookup of what `other` gives each of the reference's tokens: at most one is the same, -inf if it has none
    log_q = torch.where(same, other.log_probs.unsqueeze(1), -torch.inf).amax(2).double()
    log_p = reference.log_probs.double()
    log_p = torch.where(log_q == -torch.inf, log_q, log_p)  # a token that `other` lacks belongs to the rest
    p = log_p.exp()
    q = log_q.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # without a token, -inf - -inf would be NaN
    rest_p = (1 - p.sum(1)).clamp(min=RESOLUTION)
    rest_q = (1 - q.sum(1)).clamp(min=RESOLUTION)
    divergences = terms.sum(1) + rest_p * (rest_p / rest_q).log()
    divergences = divergences.clamp(min=0.0)  # rounding can make them slightly negative
    return Gap(
        mean=float(divergences.mean()),
        worst=float(divergences.max()),
        same_choices=int((reference.tokens[:, 0] == other.tokens[:, 0]).sum()),
        positions=len(divergences),
    )


class PredictionStore(BaseModel):
    """The predictions of each form of a model on the fixed set: a file for each, and parity.json for the rest."""

    mark: str  # digest of the texts and of `about`; the files of predictions that belong here have the same
    about: Facts  # the stamp of the merged model: which one it is, and what it was merged into
    fixed: FixedSet
    folder: Path = Field(exclude=True)  # in the run; parity.json lies beside it
    forms: dict[str, Any] = Field(default={}, exclude=True)  # Predictions by the name of the form

    def add(self, name: str, predictions: Predictions) -> None:
        """Keep the predictions of a form, here and on disk."""
        from safetensors.torch import save_file

        self.forms[name] = predictions
        files.make_folder(self.folder)
        tensors = {
            "tokens": predictions.tokens.int().contiguous(),
            "logs": predictions.log_probs.contiguous(),
        }
        save_file(tensors, self.folder / f"{name}.safetensors", metadata={"mark": self.mark})
        files.write_json(self.folder.with_suffix(".json"), self.model_dump())

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
        """How far the form `other` is from `reference`; None if one of them was not measured."""
        if reference in self.forms and other in self.forms:
            return gap(self.forms[reference], self.forms[other])
        return None


def new_store(run: Path, fixed: FixedSet, stamp: Facts) -> PredictionStore:
    """An empty store for the forms of the merged model with this stamp."""
    mark = digest([asdict(fixed), stamp])
    return PredictionStore(mark=mark, about=stamp, fixed=fixed, folder=run / FOLDER / "parity")


def load_predictions(run: Path, merged: Path) -> PredictionStore:
    """The store that lessons 04 and 05 wrote; refused if it is of another merged model, or damaged."""
    from safetensors import SafetensorError, safe_open

    folder = run / FOLDER / "parity"
    parity_file = folder.with_suffix(".json")
    with suppress(OSError, ValueError, SafetensorError):
        stored = files.read_object(parity_file)
        store = PredictionStore.model_validate(stored | {"folder": folder, "forms": {}})
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                if tensors.metadata()["mark"] == store.mark:  # others are of an earlier merge
                    tokens = tensors.get_tensor("tokens").long()
                    store.forms[file.stem] = Predictions(tensors.get_tensor("logs"), tokens)
        if "merged" in store.forms and store.about == files.stamp(merged):
            return store
    raise CourseError(
        "No predictions of {merged} are stored in {file}.",
        todo="Run lesson 04.",
        merged=merged,
        file=parity_file,
    )


@dataclass(frozen=True)
class FormComparison:
    """One form of the model against another."""

    reference: str
    other: str
    gap: Gap
    verdict: str  # CHANGED or PRICE, which cannot fail; SAME or FAILS

    def __str__(self) -> str:
        return tr(
            "{verdict}: {nats} nats per token between [{other}] and [{reference}]",
            other=tr(NAMES[self.other]),
            nats=f"{self.gap.mean:.2g}",
            reference=tr(NAMES[self.reference]),
            verdict=tr(self.verdict),
        )


class ParityReport:
    """All comparisons of a run: first what tuning, 4 bits and merging changed, then what must be the same model."""

    def __init__(self, predictions: PredictionStore) -> None:
        self.predictions = predictions
        onto = predictions.about.get("onto")
        self.target = "4bit" if onto == "dequantized" else "full"  # the form that the merged model must equal
        again = predictions.gap("merged", "again")  # the same model, in other batches
        self.noise = max(RESOLUTION, again.mean if again else 0.0)
        self.lines: list[FormComparison] = []
        self._add("full", "base", CHANGED)
        self._add("4bit", "full", PRICE)
        if self.target != "full":
            self._add("full", "merged", PRICE)
        self._add(self.target, "merged", SAME)
        self._add("merged", "vllm", SAME)
        verdicts = [line.verdict for line in self.lines]
        self.holds = SAME in verdicts and FAILS not in verdicts

    def _add(self, reference: str, other: str, verdict: str) -> None:
        """Add a comparison, if both were measured; one that must be SAME may fail."""
        distance = self.predictions.gap(reference, other)
        if not distance:
            return
        if verdict == SAME and self._is_another_model(other, distance):
            verdict = FAILS
        self.lines.append(FormComparison(reference, other, distance, verdict))

    def _is_another_model(self, other: str, distance: Gap) -> bool:
        """Whether `other` is nearer to the base than to its reference or, served, further than rounding explains."""
        from_base = self.predictions.gap("base", other)
        if from_base and distance.mean > from_base.mean + self.noise:
            return True
        rounding = self.noise
        by_merging = self.predictions.gap(self.target, "merged")
        if by_merging:  # lesson 04 has proved the merge weight by weight, so what it changes is rounding too
            rounding = max(rounding, by_merging.mean)
        return other == "vllm" and distance.mean > FAR_FROM_NOISE * rounding

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
                todo=(
                    "What fails is nearer to the base than to what it must equal, or further from it than rounding "
                    "explains. Serve the folder that lesson 04 wrote. If the merged model fails, check that adapter "
                    "and base belong together, or train longer: an adapter that hardly learned is lost in rounding."
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
    require_same_tokens(run.adapter, folder, evaluator.rows)
    predictions = new_store(run.path, fixed_set(evaluator), files.stamp(folder) or {})
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
                "The tokenizer in {folder} tokenizes differently from the one used in training.",
                todo=(
                    "Save the training's tokenizer beside the adapter (tokenizer.save_pretrained), delete the "
                    "merged folder and merge again."
                ),
                folder=folder,
            )
