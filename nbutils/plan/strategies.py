"""How cards share a training: the strategy that a model and a machine need."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from nbutils import distributed
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.plan import gpus
from nbutils.plan.forecast import known_shape, of_profile
from nbutils.plan.memory import Recipe
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
    shape = known_shape(resolved.model)
    if resolved.gpu is None or shape is None:
        return Choice("ddp", tr("there is no GPU, or the size of the model is not known: each process holds it whole"))
    gpu = gpus.of_machine(resolved.gpu, processes)
    forecast = of_profile(resolved.as_written, gpu, shape, resolved.rows, "ddp")
    if forecast.least_gib > forecast.limit_gib:
        forecast = of_profile(resolved.as_written, gpu, shape, resolved.rows, f"fsdp_{method}")
        forecast.require_room()
    return Choice(forecast.recipe.engine, forecast.requirement)


def fits_alone(resolved: Any) -> bool:
    """Whether one GPU holds the model of a resolved profile; also true where that is not known."""
    with suppress(CourseError):
        return bool(engine_for(resolved, 1).value == "ddp")
    return False
