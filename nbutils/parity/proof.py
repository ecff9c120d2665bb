"""The proof of lesson 04: the merged model computes what adapter and base computed, and what leaving 4 bits costs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import evaluation, files, hardware, merging
from nbutils.errors import CourseError
from nbutils.evaluation.models import load_model
from nbutils.parity.predictions import PredictionStore, fixed_set
from nbutils.parity.verdict import Report

if TYPE_CHECKING:
    from nbutils.lesson import Lesson

TOKENIZED_ROWS = 32


@dataclass(frozen=True)
class Proof:
    """What `prove` found: the weights in a sentence, and the predictions of each form of the model."""

    weights: str
    report: Report

    def __str__(self) -> str:
        return f"{self.weights}\n{self.report.summary()}"

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        return {"parity": self.report.facts()}


def prove(lesson: Lesson, folder: Path, placement: evaluation.Placement) -> Proof:
    """Stop the lesson unless the merged model in `folder` is the adapter's: weights, tokens and predictions."""
    from transformers import AutoTokenizer

    adapter, about = lesson.run.adapter, files.stamp(folder) or {}
    weights = merging.prove(lesson.model, adapter, folder, onto=about.get("onto", "full"))
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    evaluator = evaluation.open_evaluator(lesson, lesson.model, tokenizer, in_4_bits=not placement.fits)
    require_tokenizer(folder, tokenizer, evaluator.rows)
    limit = lesson.profile.serve.max_model_len
    fixed = fixed_set(evaluator, evaluator.general(), model=lesson.model, limit=limit)
    predictions = PredictionStore(lesson.run.path, fixed, about=about)
    forms = {"full": placement.unquantized}
    if lesson.profile.method == "qlora":  # the base it was trained on
        forms["4bit"] = placement.in_4_bits

    def load_tuned(loading: dict[str, Any]) -> Any:
        hardware.free_memory()
        return add_adapter(load_model(lesson.model, loading), adapter)

    try:
        for name, loading in forms.items():
            predictions.read(name, partial(load_tuned, loading), answers=placement.fits or name == "4bit")
        hardware.free_memory()
        # The merged model is read at every start, as a server would load it.
        predictions.read_merged(load_model(folder, placement.unquantized), answers=placement.fits)
    finally:
        placement.clear()
        hardware.free_memory()
    report = Report(predictions)
    report.require()
    return Proof(weights, report)


def require_tokenizer(folder: Path, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Refuse a folder whose own tokenizer and template, which a server will use, make other tokens of these rows."""
    from transformers import AutoTokenizer

    own: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for row in rows[:TOKENIZED_ROWS]:
        ours, theirs = (
            one.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for one in (tokenizer, own)
        )
        if ours != theirs:
            raise CourseError("parity.other_tokens", folder=folder)


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
