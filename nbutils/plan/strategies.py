"""How cards share a training, side by side: what each strategy needs of a card, and which one a machine needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nbutils import distributed
from nbutils.errors import CourseError
from nbutils.files import GIB
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.models import Shape, find_shape
from nbutils.plan import gpus
from nbutils.plan.forecast import of_profile, smallest
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import Recipe, limit_gib, parts, peak_gib, terms
from nbutils.plan.recipe import LARGEST_STEP

MODELS = ("Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B")
MACHINES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))  # machines, and the cards of each
COMMON = ("ddp", "fsdp_qlora", "fsdp_lora")
CLASSES = {"16 GB": "T4", "24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "A100-80GB", "141 GB": "H200"}


def memory_table(models: Sequence[str] = MODELS, strategies: Sequence[str] = COMMON) -> list[dict[str, str]]:
    """For every model and number of cards: GiB of a card under each strategy, and the smallest GPU that has them.

    Example: `plan.memory_table(["Qwen2.5-7B"], ["ddp", "zero2", "zero3"])`
    """
    rows = []
    for model in models:
        for machines, each in MACHINES:
            cards = str(each) if machines == 1 else f"{machines} x {each}"
            row = {tr("model"): model, tr("cards"): cards}
            for strategy in strategies:
                peak = peak_gib(find_shape(model), table_recipe(strategy, machines * each))
                row[strategy] = f"{peak:.1f} ({_smallest_class(peak)})"
            rows.append(row)
    return rows


def _smallest_class(peak: float) -> str:
    for size, name in CLASSES.items():
        if peak <= limit_gib(gpus.find(name)):
            return size
    return tr("none")


def table_recipe(strategy: str, cards: int) -> Recipe:
    """The recipe of the table: rows of 2,048 tokens one by one; where a strategy takes any base, one in 4 bits."""
    return Recipe(
        method=distributed.ENGINES[strategy] or "qlora",
        gradient_accumulation_steps=max(1, LARGEST_STEP // cards),
        engine=strategy,
        cards=cards,
    )


def memory_formula(shape: Shape, recipe: Recipe) -> list[dict[str, str]]:
    """Each part of a card's memory as its formula in GiB: what is divided by the cards, what is whole."""
    shared = terms(shape, recipe)
    rows = []
    for part, size in parts(shape, recipe).items():
        formula = tr("whole: each card computes its own rows")
        if part in shared:
            summands = [_summand(term.name, term.size, term.shared_by) for term in shared[part] if term.size]
            formula = " + ".join(summands) or tr("in RAM")
        rows.append({tr("part"): tr(part), "GiB": f"{size:.2f}", tr("formula"): formula})
    return rows


def _summand(name: str, size: float, cards: int) -> str:
    text = f"{tr(name)} {size / GIB:.2f}"
    return f"{text} / {cards}" if cards > 1 else text


def engine_for(resolved: Any, processes: int, asked: str = "auto") -> Choice:
    """The strategy with which so many processes train a resolved profile, one on each GPU: that asked for, or by size.

    DDP where each GPU holds the model, with the smallest setting; else FSDP, where its share fits.
    Example: `plan.engine_for(lesson.resolved, processes=2).value`
    """
    method = resolved.profile.method
    if asked != "auto":
        distributed.require_known(asked)
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
