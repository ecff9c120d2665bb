"""What 4 bits cost a base model, before it is trained: its loss on some held-out rows, unquantized and in 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbutils import chat, distributed, hardware, models, plan
from nbutils.errors import CourseError
from nbutils.evaluation import inference, placement
from nbutils.language import tr
from nbutils.merging.weights import round_to_4_bits
from nbutils.plan.recipe import METHODS, BaseLosses


def base_losses(resolved: Any, dataset: chat.FilteredRows, held_out: Sequence[Any]) -> BaseLosses | None:
    """The losses of the base model, printed; None where they would decide nothing or cannot be measured.

    Example: `evaluation.base_losses(lesson.begun(), dataset, eval_rows)`
    """
    losses = None
    if distributed.is_main():
        try:
            gib = _needed_gib(resolved)
            reason = _reason_not_to_measure(resolved, gib)
            if not reason:
                examples = chat.held_out_examples(dataset, held_out, most=32)  # take seconds, and tell about 0.01 nats
                losses = BaseLosses(len(examples), measure(resolved, examples), gib)
                hardware.free_memory()  # the reported peak is that of the training
        except CourseError as problem:  # 16 bits do not fit, or no held-out row can be used
            reason = problem.seen
        print(losses or tr("4 or 16 bits: not measured. {reason}", reason=reason))
    return distributed.broadcast(losses)  # all must decide alike


def _needed_gib(resolved: Any) -> dict[str, float]:
    """The GiB that a training needs at least, by method; empty where there is no forecast."""
    gib = {}
    for method in METHODS:
        profile = resolved.profile.model_copy(update={"method": method})
        if forecast := plan.require(replace(resolved, profile=profile)):
            gib[method] = forecast.least_gib
    return gib


def _reason_not_to_measure(resolved: Any, gib: dict[str, float]) -> str:
    """Why the losses would be of no use, or 16 bits have no room; empty if they can be measured.

    The bundled model is measured whatever the profile says: it takes a second, and is there to see it.
    """
    as_written = resolved.as_written
    is_open = gib and as_written.method == "auto" and as_written.quantization.load_in_4bit
    is_shown = is_open or models.bundled_name(resolved.model)
    if resolved.begun.method or not is_shown or distributed.strategy() not in distributed.WHOLE:
        return tr(
            "It takes a GPU, a model of known size, and a method that is still open: not named in the profile or SET, "
            "not that of an earlier session, no FSDP or ZeRO."
        )
    if gib and not placement.fit(gib["lora"], resolved.gpu):
        return tr("Too much of the GPU is in use for 16 bits.")
    return ""


def measure(resolved: Any, examples: Sequence[chat.Example]) -> dict[str, float]:
    """The loss by method. The model is loaded once, and rounded in place to what training in 4 bits would see of it."""
    from transformers import AutoModelForCausalLM

    profile = resolved.profile
    model = AutoModelForCausalLM.from_pretrained(
        resolved.model,
        dtype=profile.from_pretrained.dtype,
        device_map={"": 0 if resolved.gpu else "cpu"},
        trust_remote_code=False,
    )
    unquantized = mean_loss(model, examples)
    round_to_4_bits(model, dict(profile.quantization))
    return {"lora": unquantized, "qlora": mean_loss(model, examples)}


def mean_loss(model: Any, examples: Sequence[chat.Example]) -> float:
    """Nats per trained token."""
    loss, tokens = np.sum(inference.row_losses(model, examples, batch_size=8), axis=0)
    return float(loss / tokens)
