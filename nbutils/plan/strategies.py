"""How cards share a training: the strategy that a model and a machine need."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from nbutils import distributed
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.models import Shape, find_shape
from nbutils.plan import gpus
from nbutils.plan.forecast import of_profile, smallest
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import Recipe, limit_gib, peak_gib
from nbutils.plan.recipe import LARGEST_STEP


def table_recipe(strategy: str, cards: int) -> Recipe:
    """Rows of 2,048 tokens one by one, in the course's largest step; where a strategy takes any base, one in 4 bits.

    Example: `memory.peak_gib(find_shape("Qwen2.5-72B"), table_recipe("fsdp_qlora", 4))`
    """
    return Recipe(
        method=distributed.STRATEGIES[strategy] or "qlora",
        gradient_accumulation_steps=max(1, LARGEST_STEP // cards),
        engine=strategy,
        cards=cards,
    )


def engine_for(resolved: Any, processes: int, asked: str = "auto") -> Choice:
    """The strategy with which so many processes train a resolved profile, one on each GPU: that asked for, or by size.

    DDP where each GPU holds the model, with the smallest setting; else FSDP, where its share fits.
    Example: `plan.engine_for(lesson.resolved, processes=2).value`
    """
    method = resolved.profile.method
    if asked != "auto":
        distributed.require_known_strategy(asked)
        distributed.require_method(asked, method)
        return Choice(asked, tr("parameter {name}", name="ENGINE"))
    if resolved.gpu is None:
        return Choice("ddp", tr("no GPU here: each process holds the whole model"))
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return Choice("ddp", tr("the size of {model} is not known before its download", model=resolved.model))
    gpu = gpus.of_machine(resolved.gpu).model_copy(update={"count": processes})
    limit = limit_gib(gpu)
    alone = _smallest_gib(resolved, shape, gpu, "ddp")
    if alone <= limit:
        text = tr(
            "{model} needs {alone:.1f} GiB, and a GPU allows {limit:.1f}", model=shape.name, alone=alone, limit=limit
        )
        return Choice("ddp", text)
    share = _smallest_gib(resolved, shape, gpu, f"fsdp_{method}")
    if share <= limit:
        text = tr(
            "{model} needs {alone:.1f} GiB on one GPU, which allows {limit:.1f}; shared by {count}, {share:.1f} each",
            model=shape.name,
            alone=alone,
            limit=limit,
            count=processes,
            share=share,
        )
        return Choice(f"fsdp_{method}", text)
    raise CourseError(
        tr(
            "{model} with {method} needs at least {alone:.1f} GiB on one GPU and {share:.1f} on each of "
            "{processes} with {engine}; {gpu} allows {limit:.1f}.",
            model=shape.name,
            method=method,
            alone=alone,
            share=share,
            processes=processes,
            engine=f"fsdp_{method}",
            gpu=gpu.name,
            limit=limit,
        ),
        todo=tr(
            "Take more or larger GPUs, a smaller MODEL, a shorter sft.max_length, or qlora instead of "
            "lora; `python -m nbutils plan --gpus N --engine NAME` forecasts it."
        ),
    )


def fits_alone(resolved: Any) -> bool:
    """Whether one GPU holds the model of a resolved profile; also true where that is not known."""
    with suppress(CourseError):
        return bool(engine_for(resolved, 1).value == "ddp")
    return False


def _smallest_gib(resolved: Any, shape: Shape, gpu: GPUSpec, strategy: str) -> float:
    made = of_profile(resolved.given, gpu, shape, resolved.rows, strategy)
    return peak_gib(shape, smallest(shape, made.recipe, made.batch, gpu))
