"""What a lesson and the command line ask the plan: this machine, a GPU by name, or all GPUs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from nbutils import display, distributed, hardware
from nbutils.config import load, read, settings_in, with_overrides
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.models import find_shape
from nbutils.plan import gpus as gpu_table
from nbutils.plan.forecast import CONTEXT_GIB, MARGIN, Forecast, candidates, limit_gib, of_profile, peak_gib
from nbutils.plan.gpus import GPUSpec, profile_for
from nbutils.plan.schedule import apply

RENTED = ("RTX 4090", "ampere_24gb")  # the usual rented GPU, and its profile
LEFT_OPEN = ("train.micro_batch", "train.gradient_checkpointing")
REMARK = "Speeds follow from published numbers; only the H200 was measured. Prices: configs/gpus.yaml, yours to edit."


def example(resolved: Any, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's resolved profile; without a GPU, a 7B model on one that can be rented."""
    try:
        if resolved.gpu:
            gpu, shape = gpu_table.of_machine(resolved.gpu), find_shape(resolved.model)
            return of_profile(resolved.profile, gpu, shape, rows, mean_length)
    except CourseError:
        pass  # the model's shape is not known before its download
    return of_profile(load(RENTED[1]), gpu_table.find(RENTED[0]), rows=rows, mean_length=mean_length)


def require(resolved: Any, rows: int | None = None, mean_length: float | None = None) -> Forecast | str:
    """This machine's forecast for lesson 03, or why there is none; stops where not even the smallest setting fits."""
    if resolved.gpu is None:
        return "No forecast: there is no GPU here."
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return f"No forecast: the size of {resolved.model} is not known before its download."
    gpu = gpu_table.of_machine(resolved.gpu).model_copy(update={"count": distributed.world_size()})
    made = of_profile(resolved.profile, gpu, shape, rows, mean_length, resolved.rows)
    least = min(peak_gib(shape, one) for one in candidates(made.recipe, made.batch, gpu))
    if least > limit_gib(gpu):
        sizes = {"needed": least, "limit": limit_gib(gpu), "memory": gpu.memory_gib}
        raise CourseError("plan.does_not_fit", model=shape.name, length=made.recipe.length, gpu=gpu.name, **sizes)
    return made


def describe(made: Forecast | str) -> str:
    """The forecast as aligned text: what, how much, why; the reason where there is none."""
    if isinstance(made, str):
        return made
    recipe, gpu = made.recipe, made.gpu
    rows = f"rows packed to {recipe.length}" if recipe.packing else f"conversations of about {recipe.length} tokens"
    minutes = f"{60 * (made.hours or 0):.0f} min"
    steps = f"{recipe.micro_batch} x {recipe.accumulation} per step, checkpointing {recipe.checkpointing}"
    lines = [
        ("training", f"{made.model} on {gpu}", f"{recipe.method} rank {recipe.rank}, {rows}, {steps}"),
        ("recipe", f"{made.schedule.steps:,} steps", str(made.schedule)) if made.schedule else None,
        ("peak memory", f"{made.peak_vram_gib:.1f} GiB", _sizes(made.parts, ".2f")),
        ("the plan allows", f"{limit_gib(gpu):.1f} of {gpu.memory_gib:.1f} GiB",
         f"{'fits' if made.fits else 'DOES NOT FIT'}: {MARGIN:.0%} and {CONTEXT_GIB:g} GiB for CUDA must stay free"),
        ("speed", _number(made.tokens_per_second, ",.0f", " tokens/s"), "without padding, on all GPUs together"),
        ("time", minutes if made.hours is not None and made.hours < 1 else _number(made.hours, ".1f", " h"), ""),
        ("cost", money(made.cost), f"{_price(gpu)} per hour and GPU: {gpu.price_from}"),
        ("disk", f"{sum(made.disk_gib.values()):.0f} GiB", _sizes(made.disk_gib, ".1f")),
        ("serving", f"{made.after_gib['on_card']:.0f} GiB of the GPU", "in 16 bits; the KV cache needs some more"),
        *(("note", "", note) for note in made.notes),
    ]  # fmt: skip
    return display.aligned([dict(zip(("what", "forecast", "from"), line, strict=True)) for line in lines if line])


def _sizes(sizes: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {size:{form}}" for name, size in sizes.items())


def _price(gpu: GPUSpec) -> str:
    return money({"yuan": gpu.yuan, "dollars": gpu.dollars})


def money(cost: dict[str, float | None]) -> str:
    """Yuan and dollars as far as they are known."""
    known = [f"{sign}{cost[name]:.2f}" for name, sign in (("yuan", "¥"), ("dollars", "$")) if cost[name]]
    return " or ".join(known) or ("free" if 0 in cost.values() else "unknown")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:{form}}{unit}"


def fits_table(
    names: Sequence[str] = (), rows: int | None = None, mean_length: float | None = None
) -> list[dict[str, Any]]:
    """For these GPUs, or all: what PROFILE auto trains there, how, how fast, and for what price."""
    chosen = [gpu_table.find(name) for name in names] or gpu_table.every()
    return [_table_row(_forecast(gpu, {"rows": rows, "mean_length": mean_length})) for gpu in chosen]


def _table_row(made: Forecast) -> dict[str, Any]:
    gpu, recipe = made.gpu, made.recipe
    return {
        "GPU": str(gpu), "GiB": gpu.memory_gib, "model": made.model, "length": recipe.length,
        "peak GiB": round(made.peak_vram_gib, 1), "fits": "yes" if made.fits else "no",
        "rows": f"{recipe.micro_batch} x {recipe.accumulation}", "recompute": recipe.checkpointing,
        "tokens/s": _number(made.tokens_per_second, ",.0f"), "hours": _number(made.hours, ".1f"),
        "cost": money(made.cost), "an hour": _price(gpu),
    }  # fmt: skip


def _every_profile() -> list[dict[str, Any]]:
    """For programs: every GPU profile on every GPU; `auto` marks the one that PROFILE auto takes there."""
    rows = []
    for gpu, name in product(gpu_table.every(), gpu_table.PROFILES):
        made = of_profile(load(name), gpu)
        recipe = made.recipe
        rows.append({
            "card": gpu.name, "memory_gib": gpu.memory_gib, "profile": name, "model": made.model, "fits": made.fits,
            "auto": name == profile_for(gpu.capability, gpu.memory_gib), "peak_vram_gib": round(made.peak_vram_gib, 1),
            "micro_batch": recipe.micro_batch, "accumulation": recipe.accumulation, "length": recipe.length,
            "checkpointing": recipe.checkpointing, "tokens_per_second": round(made.tokens_per_second or 0),
            "yuan_per_hour": gpu.yuan, "dollars_per_hour": gpu.dollars,
        })  # fmt: skip
    return rows


@dataclass(frozen=True)
class Answer:
    """The same answer for programs and for people."""

    data: Any
    text: str


def answer(
    gpu: str = "", gpus: int | None = None, vram: float | None = None, tflops: float | None = None,
    capability: str | None = None, **options: Any,
) -> Answer:  # fmt: skip
    """One forecast, or a table where there is no GPU and none is named; an option that is None is left to the plan."""
    if capability and not re.fullmatch(r"\d+\.\d", capability):
        raise CourseError("plan.bad_capability", text=capability)
    found = None
    if gpu or vram or tflops:
        numbers = (int(capability[:-2]), int(capability[-1])) if capability else None
        found = gpu_table.find(gpu or "a GPU of your own", vram, tflops, numbers)
    elif importlib.util.find_spec("torch") and hardware.driver_gpus() and (here := hardware.gpu()):  # loads torch last
        found = gpu_table.of_machine(here)
    if found:
        made = _forecast(found.model_copy(update={"count": gpus or found.count}), options)
        return Answer(made.as_dict(), describe(made))
    every = [_forecast(one.model_copy(update={"count": gpus or 1}), options) for one in gpu_table.every()]
    table = display.aligned([_table_row(made) for made in every])
    text = f"No GPU here, and none named with --gpu: these are GPUs you can rent.\n\n{table}\n\n{REMARK}"
    asked = gpus or any(value is not None for value in options.values())
    return Answer({"fits": [made.as_dict() for made in every] if asked else _every_profile()}, text)


def _forecast(gpu: GPUSpec, options: dict[str, Any]) -> Forecast:
    """A GPU with all options; micro-batch and checkpointing, where nobody gives them, are the fastest that fit."""
    name, rows, epochs, size = (options.get(key) for key in ("profile", "rows", "epochs", "micro_batch"))
    given = ({} if name else dict.fromkeys(LEFT_OPEN, "auto")) | settings_in(options.get("given") or "")
    document = read(name or profile_for(gpu.capability, gpu.memory_gib))
    profile = with_overrides(document, {key: (value, "--set") for key, value in given.items()}).profile
    by_rows = epochs is not None or (rows is not None and profile.train.epochs != 0)
    values = {
        "method": options.get("method"), "lora.rank": options.get("rank"), "train.max_length": options.get("length"),
        "train.epochs": epochs, "train.micro_batch": size, "train.gradient_checkpointing": options.get("checkpointing"),
        "train.max_steps": 0 if by_rows and "train.max_steps" not in given else None,
    }  # fmt: skip
    profile = apply(profile, {key: Choice(value, "") for key, value in values.items() if value is not None})
    made = of_profile(profile, gpu, options.get("model") or "", rows, options.get("mean_length"))
    if size and made.recipe.micro_batch != size:
        raise CourseError("plan.bad_micro_batch", size=size, batch=made.batch, each=made.batch // gpu.count)
    return made
