"""Engines side by side: what each needs of a card and of RAM, its formula in numbers, and which one a machine needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nbutils import distributed
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.files import GIB
from nbutils.hardware import Choice
from nbutils.language import tr
from nbutils.models import Shape, find_shape
from nbutils.plan import forecast, gpus
from nbutils.plan.forecast import ENGINES, Recipe, Rows, limit_gib, peak_gib
from nbutils.plan.gpus import GPUSpec

MODELS = ("Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B")
MACHINES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))  # machines, and the cards of each
COMMON = ("ddp", "fsdp_qlora", "fsdp_lora")
CLASSES = {"16 GB": "T4", "24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "A100-80GB", "141 GB": "H200"}


def engine_table(
    models: Sequence[str] = MODELS, engines: Sequence[str] = tuple(ENGINES),
    machines: Sequence[tuple[int, int]] = MACHINES, length: int = 2048,
) -> list[dict[str, Any]]:  # fmt: skip
    """For every model, number of cards and engine: memory of a card, RAM of a machine, the smallest GPUs by memory.

    A micro-batch is one row of `length` tokens, with gradient checkpointing; the step is the course's largest.
    """
    rows = []
    for shape in map(find_shape, models):
        for count, each in machines:
            for engine in engines:
                recipe = table_recipe(engine, count * each, length)
                peak, ram = peak_gib(shape, recipe), forecast.ram_gib(shape, recipe, count)
                fitting = (size for size, name in CLASSES.items() if peak <= limit_gib(gpus.find(name)))
                rows.append({
                    tr("model"): shape.name, tr("cards"): str(each) if count == 1 else f"{count} x {each}",
                    tr("engine"): engine, tr("weights"): "4 bit" if recipe.method == "qlora" else "16 bit",
                    tr("GiB of a card"): f"{peak:.1f}", tr("RAM of a machine"): f"{ram:.0f} GiB" if ram else "–",
                    tr("fits from"): next(fitting, tr("none")),
                })  # fmt: skip
    return rows


def memory_table(engines: Sequence[str] = COMMON, **options: Any) -> list[dict[str, Any]]:
    """The same, with a column for each engine: GiB of a card, and the smallest GPU that has them."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in engine_table(engines=engines, **options):
        model, cards, engine, _, size, _, smallest = row.values()
        line = lines.setdefault((model, cards), {tr("model"): model, tr("cards"): cards})
        line[engine] = f"{size} ({smallest})"
    return list(lines.values())


def table_recipe(engine: str, cards: int, length: int = 2048) -> Recipe:
    """The recipe of the table: where an engine takes any base, one in 4 bits."""
    method, accumulation = distributed.STRATEGIES[engine] or "qlora", max(1, forecast.LARGEST_STEP // cards)
    return Recipe(method, length=length, gradient_accumulation_steps=accumulation, engine=engine, cards=cards)


def memory_formula(shape: Shape, recipe: Recipe) -> list[dict[str, Any]]:
    """Each part of a card's memory as its formula in GiB: what is divided by the cards, what is whole."""
    summands, rows = forecast.terms(shape, recipe), []
    for part, size in forecast.parts(shape, recipe).items():
        texts = [
            f"{tr(one.name)} {one.size / GIB:.2f}{f' / {recipe.cards}' if one.divided else ''}"
            for one in summands.get(part, ()) if one.size
        ]  # fmt: skip
        whole = tr("whole: each card computes its own rows") if part not in summands else tr("in RAM")
        rows.append({tr("part"): tr(part), "GiB": f"{size:.2f}", tr("formula"): " + ".join(texts) or whole})
    return rows


def engine_for(resolved: Any, processes: int, asked: str = "auto") -> Choice:
    """The engine with which so many processes train a resolved profile, one on each GPU: that asked for, or by size.

    DDP where each GPU holds the model, with the smallest setting; else FSDP, where its share fits.
    """
    if asked != "auto":
        distributed.require_known_strategy(asked)
        distributed.require_method(asked, resolved.profile.method)
        return Choice(asked, tr("parameter {name}", name="ENGINE"))
    if resolved.gpu is None:
        return Choice("ddp", tr("no GPU here: each process holds the whole model"))
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return Choice("ddp", tr("the size of {model} is not known before its download", model=resolved.model))
    gpu = gpus.of_machine(resolved.gpu).model_copy(update={"count": processes})
    sharded, limit = f"fsdp_{resolved.profile.method}", limit_gib(gpu)
    alone, share = (_smallest_gib(resolved.given, shape, gpu, name, resolved.rows) for name in ("ddp", sharded))
    sizes = {"model": shape.name, "alone": alone, "limit": limit}
    if alone <= limit:
        return Choice("ddp", tr("{model} needs {alone:.1f} GiB, and a GPU allows {limit:.1f}", **sizes))
    if share <= limit:
        return Choice(sharded, tr(
            "{model} needs {alone:.1f} GiB on one GPU, which allows {limit:.1f}; shared by {count}, {share:.1f} each",
            model=shape.name, alone=alone, limit=limit, count=processes, share=share,
        ))  # fmt: skip
    raise CourseError(
        tr(
            "{model} with {method} needs at least {alone:.1f} GiB on one GPU and {share:.1f} on each of "
            "{processes} with {engine}; {gpu} allows {limit:.1f}.",
            model=shape.name,
            method=resolved.profile.method,
            alone=alone,
            share=share,
            processes=processes,
            engine=sharded,
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


def _smallest_gib(profile: Profile, shape: Shape, gpu: GPUSpec, engine: str, rows: Rows | None) -> float:
    made = forecast.of_profile(profile, gpu, shape, data=rows, engine=engine)
    return min(peak_gib(shape, one) for one in forecast.candidates(Recipe(**made["recipe"]), made["batch"], gpu))
