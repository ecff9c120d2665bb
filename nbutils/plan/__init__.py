"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits.

Here is what a lesson and the command line ask it: this machine, a GPU by name, or all GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nbutils import display, distributed, hardware
from nbutils.config import read, settings_in, with_overrides
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import joined, tr
from nbutils.models import find_shape
from nbutils.plan import gpus as gpu_table
from nbutils.plan.forecast import STEP_ARGUMENTS, Forecast, assumed_rows, candidates, of_profile, smallest
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.memory import CONTEXT_GIB, MARGIN, STRATEGIES, Recipe, peak_gib
from nbutils.plan.recipe import apply
from nbutils.plan.strategies import engine_for, fits_alone

__all__ = ["STRATEGIES", "Recipe", "candidates", "engine_for", "fits_alone"]

Line = tuple[str, str, str]  # what, how much, why
RENTED = "RTX 4090"  # the usual rented GPU
OPTIONS = {  # of the command line, which are values of a profile
    "method": "method",
    "rank": "lora.r",
    "length": "sft.max_length",
    "epochs": "sft.num_train_epochs",
    "micro_batch": "sft.per_device_train_batch_size",
}
RECOMPUTE = {"off": (False, False), "on": (True, False), "offload": (True, True)}  # as --checkpointing says it


def example(resolved: Any, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's resolved profile; without a GPU, a 7B model on one that can be rented.

    Example: `plan.example(lesson.resolved, rows=10_000, mean_length=300)`
    """
    if resolved.gpu:
        with suppress(CourseError):  # the model's shape is not known before its download
            shape = find_shape(resolved.model)
            data = assumed_rows(resolved.profile, rows, mean_length)
            return of_profile(resolved.profile, gpu_table.of_machine(resolved.gpu), shape, data)
    return of_options(gpu_table.find(RENTED), {"rows": rows, "mean_length": mean_length})


def require(resolved: Any) -> Forecast | str:
    """This machine's forecast for lesson 03, or why there is none; stops where not even the smallest setting fits.

    Example: `print(plan.describe(plan.require(lesson.resolved)))`
    """
    if resolved.gpu is None:
        return tr("No forecast: there is no GPU here.")
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return tr("No forecast: the size of {model} is not known before its download.", model=resolved.model)
    gpu = gpu_table.of_machine(resolved.gpu).model_copy(update={"count": distributed.world_size()})
    strategy = distributed.strategy_name(str(resolved.profile.method))
    made = of_profile(resolved.profile, gpu, shape, resolved.rows, strategy)
    least = peak_gib(shape, smallest(shape, made.recipe, made.batch, gpu))
    if least > made.limit_gib:
        raise CourseError(
            tr(
                "{model} with rows of {length} tokens needs at least {needed:.1f} GiB, and {gpu} allows "
                "{limit:.1f} of its {memory:.1f} GiB.",
                model=shape.name,
                length=made.recipe.length,
                needed=least,
                gpu=gpu.name,
                limit=made.limit_gib,
                memory=gpu.memory_gib,
            ),
            todo=tr("Choose a smaller MODEL, a shorter sft.max_length, a larger GPU, or qlora instead of lora."),
        )
    return made


def describe(made: Forecast | str) -> str:
    """The forecast as aligned text: what, how much, why; the reason where there is none."""
    if isinstance(made, str):
        return made
    lines = [*_training_lines(made), *_memory_lines(made), *_time_lines(made)]
    rows = []
    for name, value, reason in lines:
        rows.append({tr("what"): name, tr("forecast"): value, tr("from"): reason})
    for note in made.notes:
        rows.append({tr("what"): tr("note"), tr("forecast"): "", tr("from"): note})
    return display.aligned(rows)


def _training_lines(made: Forecast) -> Iterator[Line]:
    row = _table_row(made)
    training = tr("{model} on {gpu}", model=row["model"], gpu=row["GPU"])
    yield tr("training"), training, _how(made)
    if made.schedule:
        steps = tr("{count:,} steps", count=made.schedule.steps)
        yield tr("recipe"), steps, str(made.schedule)


def _memory_lines(made: Forecast) -> Iterator[Line]:
    yield tr("peak memory"), f"{made.peak_gib:.1f} GiB", _sizes(made.parts, 2)
    allowed = tr("{limit:.1f} of {memory:.1f} GiB", limit=made.limit_gib, memory=made.gpu.memory_gib)
    margin = tr(
        "{verdict}: {share:.0%} and {context:g} GiB for CUDA must stay free",
        verdict=tr("fits") if made.fits else tr("DOES NOT FIT"),
        share=MARGIN,
        context=CONTEXT_GIB,
    )
    yield tr("the plan allows"), allowed, margin
    if made.smallest != made.recipe:
        yield tr("smallest"), f"{made.smallest_gib:.1f} GiB", _smallest(made)


def _time_lines(made: Forecast) -> Iterator[Line]:
    row = _table_row(made)
    speed = row["tokens/s"]
    if made.tokens_per_second:
        speed += " tokens/s"
    yield tr("speed"), speed, tr("without padding, on all GPUs together")
    yield tr("time"), tr("unknown") if made.hours is None else time_text(made.hours), ""
    source = ""
    if made.gpu.price_from != "unknown":
        source = tr("{price} per hour and GPU: {source}", price=row["an hour"], source=tr(made.gpu.price_from))
    yield tr("cost"), row["cost"], source
    disk = made.disk_gib
    yield tr("disk"), f"{sum(disk.values()):.0f} GiB", _sizes(disk, 1)
    served = tr("{size:.0f} GiB of the GPU", size=made.served_gib)
    yield tr("serving"), served, tr("in 16 bits; the KV cache needs some more")


def _sizes(parts: Mapping[str, float], digits: int) -> str:
    return joined(f"{tr(part)} {size:.{digits}f}" for part, size in parts.items())


def _how(made: Forecast) -> str:
    """How a forecast training trains."""
    recipe = made.recipe
    rows = tr("conversations of about {length} tokens", length=recipe.length)
    if recipe.packing:
        rows = tr("rows packed to {length}", length=recipe.length)
    text = tr(
        "{method} rank {rank}, {rows}, {steps} per step, checkpointing {way}",
        method=recipe.method,
        rank=recipe.r,
        rows=rows,
        steps=_micro_batches(recipe),
        way=recipe.recompute,
    )
    if recipe.engine == "ddp" and recipe.cards == 1:
        return text
    return joined([text, recipe.engine])


def _micro_batches(recipe: Recipe) -> str:
    return f"{recipe.per_device_train_batch_size} x {recipe.gradient_accumulation_steps}"


def _smallest(made: Forecast) -> str:
    """How the smallest setting trains, and how much longer."""
    least = made.smallest
    how = tr("micro-batch {size}, checkpointing {way}", size=least.per_device_train_batch_size, way=least.recompute)
    if made.times_as_long is None:
        return how
    return tr("{how}: {times:.1f} times as long", how=how, times=made.times_as_long)


def time_text(hours: float) -> str:
    """Minutes below an hour, else hours."""
    if hours < 1:
        return tr("{minutes:.0f} min", minutes=60 * hours)
    return tr("{hours:.1f} h", hours=hours)


def fits_table(names: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """For these GPUs: what PROFILE auto trains there, how, how fast, and for what price.

    Example: `plan.fits_table(["T4", "RTX 4090"], rows=10_000, mean_length=300)`
    """
    return [_table_row(of_options(gpu_table.find(name), options)) for name in names]


def command(rows: int, mean_length: float) -> str:
    """The line that forecasts a training on so many rows of this mean length in tokens."""
    return f"python -m nbutils plan --rows {rows} --mean-length {mean_length:.0f}"


def _table_row(made: Forecast) -> dict[str, Any]:
    gpu = made.gpu
    rate = made.tokens_per_second
    return {
        "GPU": f"{gpu.count} x {gpu.name}" if gpu.count > 1 else gpu.name,
        "GiB": gpu.memory_gib,
        "model": made.shape.name,
        "length": made.recipe.length,
        "peak GiB": round(made.peak_gib, 1),
        "fits": tr("yes") if made.fits else tr("no"),
        "rows": _micro_batches(made.recipe),
        "recompute": made.recipe.recompute,
        "tokens/s": tr("unknown") if rate is None else f"{rate:,.0f}",
        "hours": tr("unknown") if made.hours is None else f"{made.hours:.1f}",
        "cost": str(made.cost),
        "an hour": str(gpu.price),
    }


def answer(
    gpu: str = "",
    gpus: int | None = None,
    vram: float | None = None,
    tflops: float | None = None,
    capability: str | None = None,
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """The same answer for programs and for people: one forecast, or a table where there is no GPU and none is named.

    Example: `facts, text = plan.answer(gpu="RTX 4090", model="Qwen2.5-14B", length=1024)`
    """
    if spec := _find_gpu(gpu, vram, tflops, capability):
        made = of_options(spec.model_copy(update={"count": gpus or spec.count}), options)
        return _rounded(made), describe(made)
    every = [of_options(spec.model_copy(update={"count": gpus or 1}), options) for spec in gpu_table.usable()]
    lines = [
        tr("No GPU here, and none named with --gpu: these are GPUs you can rent."),
        "",
        display.aligned([_table_row(made) for made in every]),
        "",
        tr("Speeds follow from published numbers; only the H200 was measured. Prices stand in configs/gpus.yaml."),
    ]
    if every[0].hours is None:
        lines.append(
            tr(
                "For hours and costs give both, rows and their mean length: --rows 5000 --mean-length 400. For one GPU "
                'with reasons: --gpu "RTX 4090".'
            )
        )
    return {"fits": [_rounded(made) for made in every]}, "\n".join(lines)


def _find_gpu(name: str, vram: float | None, tflops: float | None, capability: str | None) -> GPUSpec | None:
    """The GPU that is named or described, else this machine's; None where there is none."""
    if capability and not re.fullmatch(r"\d+\.\d", capability):
        raise CourseError(
            tr("--capability is {text!r}.", text=capability),
            allowed=tr("two numbers, as 7.5 or 8.9"),
            todo=tr("Look it up at https://developer.nvidia.com/cuda-gpus."),
        )
    if name or vram or tflops:
        numbers = None
        if capability:
            major, minor = capability.split(".")
            numbers = (int(major), int(minor))
        return gpu_table.find(name or tr("a GPU of your own"), vram, tflops, numbers)
    if not importlib.util.find_spec("torch") or not hardware.driver_gpus():
        return None
    here = hardware.gpu()  # loads torch
    return gpu_table.of_machine(here) if here else None


def _rounded(made: Forecast) -> dict[str, Any]:
    """Its facts with four digits: a forecast deserves no more."""
    rounded: dict[str, Any] = json.loads(
        json.dumps(made.facts()), parse_float=lambda digits: float(f"{float(digits):.4g}")
    )
    return rounded


def of_options(gpu: GPUSpec, options: Mapping[str, Any]) -> Forecast:
    """A GPU with all options; micro-batch and checkpointing, where nobody gives them, are the fastest that fit."""
    name = options.get("profile")
    given = settings_in(options.get("given") or "")
    if not name:
        given = {f"sft.{argument}": "auto" for argument in STEP_ARGUMENTS} | given
    document = read(name or gpu_table.profile_for(gpu.capability, gpu.memory_gib))
    profile = with_overrides(document, {key: (value, "--set") for key, value in given.items()}).profile
    values = {key: options.get(option) for option, key in OPTIONS.items()}
    rows = options.get("rows")
    by_rows = options.get("epochs") or (rows and profile.sft.num_train_epochs != 0)
    if by_rows and "sft.max_steps" not in given:
        values["sft.max_steps"] = -1
    if way := options.get("checkpointing"):
        recompute, offload = RECOMPUTE[way]
        values |= {"sft.gradient_checkpointing": recompute, "sft.activation_offloading": offload}
    profile = apply(profile, {key: Choice(value, "") for key, value in values.items() if value is not None})
    shape = find_shape(options.get("model") or profile.model)
    data = assumed_rows(profile, rows, options.get("mean_length"))
    made = of_profile(profile, gpu, shape, data, options.get("engine") or "ddp")
    size = options.get("micro_batch")
    if size and made.recipe.per_device_train_batch_size != size:
        each = made.batch // gpu.count
        raise CourseError(
            tr(
                "--micro-batch is {size}, and of a step's {batch} rows each GPU takes {each}.",
                size=size,
                batch=made.batch,
                each=each,
            ),
            allowed=tr("a number that divides {each}", each=each),
            todo=tr(
                "Choose another, or a profile of your own with another course.conversations_per_step (--profile FILE)."
            ),
        )
    return made
