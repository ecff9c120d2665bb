"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits.

Here is what a lesson and the command line ask it: this machine, a GPU by name, or all GPUs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from nbutils import display, distributed, hardware
from nbutils.config import load, read, settings_in, with_overrides
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import joined, tr
from nbutils.models import find_shape
from nbutils.plan import gpus as gpu_table
from nbutils.plan.engines import ENGINES, engine_for, engine_table, fits_alone, memory_formula, memory_table
from nbutils.plan.forecast import (
    CONTEXT_GIB,
    MARGIN,
    STEP_ARGUMENTS,
    Forecast,
    Recipe,
    apply,
    candidates,
    of_profile,
    peak_gib,
)  # fmt: skip
from nbutils.plan.gpus import GPUSpec

__all__ = [
    "ENGINES", "Recipe", "candidates", "engine_for", "engine_table", "fits_alone", "memory_formula", "memory_table",
    "peak_gib",
]  # fmt: skip

RENTED = ("RTX 4090", "ampere_24gb")  # the usual rented GPU, and its profile
DIGITS = {  # as far as a forecast deserves
    "examples_per_step": 1, "epochs": 3, "peak_vram_gib": 2, "limit_gib": 2, "parts": 3, "tokens_per_second": None,
    "hours": 2, "cost": 2, "disk_gib": 1, "after_gib": 1, "ram_gib": 1, "smallest": 2,
}  # fmt: skip
RECOMPUTE = {"off": (False, False), "on": (True, False), "offload": (True, True)}  # as --checkpointing says it


def example(resolved: Any, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's resolved profile; without a GPU, a 7B model on one that can be rented."""
    made = of_profile(load(RENTED[1]), gpu_table.find(RENTED[0]), rows=rows, mean_length=mean_length)
    if resolved.gpu:
        with suppress(CourseError):  # the model's shape is not known before its download
            gpu, shape = gpu_table.of_machine(resolved.gpu), find_shape(resolved.model)
            made = of_profile(resolved.profile, gpu, shape, rows, mean_length)
    return made | {"parts": {tr(name): size for name, size in made["parts"].items()}}


def require(
    resolved: Any, rows: int | None = None, mean_length: float | None = None, engine: str = ""
) -> Forecast | str:
    """This machine's forecast for lesson 03, or why there is none; stops where not even the smallest setting fits."""
    if resolved.gpu is None:
        return tr("No forecast: there is no GPU here.")
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return tr("No forecast: the size of {model} is not known before its download.", model=resolved.model)
    gpu = gpu_table.of_machine(resolved.gpu).model_copy(update={"count": distributed.world_size()})
    engine = engine or distributed.strategy_name(str(resolved.profile.method))
    made = of_profile(resolved.profile, gpu, shape, rows, mean_length, resolved.rows, engine)
    recipe, limit = Recipe(**made["recipe"]), made["limit_gib"]
    least = min(peak_gib(shape, one) for one in candidates(recipe, made["batch"], gpu))
    if least > limit:
        raise CourseError(
            tr(
                "{model} with rows of {length} tokens needs at least {needed:.1f} GiB, and {gpu} allows "
                "{limit:.1f} of its {memory:.1f} GiB.",
                model=shape.name,
                length=recipe.length,
                needed=least,
                gpu=gpu.name,
                limit=limit,
                memory=gpu.memory_gib,
            ),
            todo=tr("Choose a smaller MODEL, a shorter sft.max_length, a larger GPU, or qlora instead of lora."),
        )
    return made


def describe(made: Forecast | str) -> str:
    """The forecast as aligned text: what, how much, why; the reason where there is none."""
    if isinstance(made, str):
        return made
    recipe, card, row, hours = Recipe(**made["recipe"]), made["card"], _table_row(made), made["hours"]
    rows = tr("conversations of about {length} tokens", length=recipe.length)
    if recipe.packing:
        rows = tr("rows packed to {length}", length=recipe.length)
    how = tr(
        "{method} rank {rank}, {rows}, {steps} per step, checkpointing {way}",
        method=recipe.method, rank=recipe.r, rows=rows, steps=row["rows"], way=recipe.recompute,
    )  # fmt: skip
    how = how if recipe.engine == "ddp" and recipe.cards == 1 else joined([how, recipe.engine])
    lines = [
        (tr("training"), tr("{model} on {gpu}", model=made["model"], gpu=row["GPU"]), how),
        (tr("recipe"), tr("{count:,} steps", count=made["steps"]), made["schedule"]) if made["schedule"] else None,
        (tr("peak memory"), f"{made['peak_vram_gib']:.1f} GiB",
         joined(f"{tr(name)} {size:.2f}" for name, size in made["parts"].items())),
        (tr("the plan allows"),
         tr("{limit:.1f} of {memory:.1f} GiB", limit=made["limit_gib"], memory=card["memory_gib"]),
         tr("{verdict}: {share:.0%} and {context:g} GiB for CUDA must stay free",
            verdict=tr("fits") if made["fits"] else tr("DOES NOT FIT"), share=MARGIN, context=CONTEXT_GIB)),
        (tr("smallest"), f"{made['smallest']['peak_vram_gib']:.1f} GiB", small) if (small := _smallest(made)) else None,
        (tr("speed"), row["tokens/s"] + (" tokens/s" if made["tokens_per_second"] else ""),
         tr("without padding, on all GPUs together")),
        (tr("time"), tr("unknown") if hours is None else time_text(hours), ""),
        (tr("cost"), row["cost"], "" if card["price_from"] == "unknown" else
         tr("{price} per hour and GPU: {source}", price=row["an hour"], source=tr(card["price_from"]))),
        (tr("disk"), f"{sum(made['disk_gib'].values()):.0f} GiB",
         joined(f"{tr(name)} {size:.1f}" for name, size in made["disk_gib"].items())),
        (tr("serving"), tr("{size:.0f} GiB of the GPU", size=made["after_gib"]["on_card"]),
         tr("in 16 bits; the KV cache needs some more")),
        *((tr("note"), "", note) for note in made["notes"]),
    ]  # fmt: skip
    heads = tr("what"), tr("forecast"), tr("from")
    return display.aligned([dict(zip(heads, line, strict=True)) for line in lines if line])


def time_text(hours: float) -> str:
    """Minutes below an hour, else hours."""
    return tr("{minutes:.0f} min", minutes=60 * hours) if hours < 1 else tr("{hours:.1f} h", hours=hours)


def _smallest(made: Forecast) -> str:
    """How the smallest setting trains, and how much longer; empty where it is the fastest that fits."""
    least, times = Recipe(**made["smallest"]["recipe"]), made["smallest"]["times_as_long"]
    if least == Recipe(**made["recipe"]):
        return ""
    how = tr("micro-batch {size}, checkpointing {way}", size=least.per_device_train_batch_size, way=least.recompute)
    return tr("{how}: {times:.1f} times as long", how=how, times=times) if times else how


def fits_table(names: Sequence[str] = (), **options: Any) -> list[dict[str, Any]]:
    """For these GPUs, or all: what PROFILE auto trains there, how, how fast, and for what price."""
    chosen = [gpu_table.find(name) for name in names] or gpu_table.usable()
    return [_table_row(of_options(gpu, options)) for gpu in chosen]


def command(rows: int, mean_length: float) -> str:
    """The line that forecasts a training on so many rows of this mean length in tokens."""
    return f"python -m nbutils plan --rows {rows} --mean-length {mean_length:.0f}"


def money(yuan: float | None, dollars: float | None) -> str:
    """A price in both currencies, as far as it is known; 0 is free."""
    known = [f"{sign}{amount:.2f}" for sign, amount in (("¥", yuan), ("$", dollars)) if amount]
    return tr(" or ").join(known) or (tr("free") if 0 in (yuan, dollars) else tr("unknown"))


def _table_row(made: Forecast) -> dict[str, Any]:
    recipe, card, rate, hours = Recipe(**made["recipe"]), made["card"], made["tokens_per_second"], made["hours"]
    micro_batches = f"{recipe.per_device_train_batch_size} x {recipe.gradient_accumulation_steps}"
    return {
        "GPU": f"{made['gpus']} x {made['gpu']}" if made["gpus"] > 1 else made["gpu"], "GiB": card["memory_gib"],
        "model": made["model"], "length": recipe.length, "peak GiB": round(made["peak_vram_gib"], 1),
        "fits": tr("yes") if made["fits"] else tr("no"), "rows": micro_batches,
        "recompute": recipe.recompute, "tokens/s": tr("unknown") if rate is None else f"{rate:,.0f}",
        "hours": tr("unknown") if hours is None else f"{hours:.1f}", "cost": money(**made["cost"]),
        "an hour": money(card["yuan"], card["dollars"]),
    }  # fmt: skip


def answer(
    gpu: str = "", gpus: int | None = None, vram: float | None = None, tflops: float | None = None,
    capability: str | None = None, **options: Any,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The same answer for programs and for people: one forecast, or a table where there is no GPU and none is named."""
    if capability and not re.fullmatch(r"\d+\.\d", capability):
        raise CourseError(
            tr("--capability is {text!r}.", text=capability),
            allowed=tr("two numbers, as 7.5 or 8.9"),
            todo=tr("Look it up at https://developer.nvidia.com/cuda-gpus."),
        )
    found = None
    if gpu or vram or tflops:
        numbers = (int(capability[:-2]), int(capability[-1])) if capability else None
        found = gpu_table.find(gpu or tr("a GPU of your own"), vram, tflops, numbers)
    elif importlib.util.find_spec("torch") and hardware.driver_gpus() and (here := hardware.gpu()):  # loads torch last
        found = gpu_table.of_machine(here)
    if found:
        made = of_options(found.model_copy(update={"count": gpus or found.count}), options)
        return _rounded(made), describe(made)
    every = [of_options(one.model_copy(update={"count": gpus or 1}), options) for one in gpu_table.usable()]
    table = [{tr(name): value for name, value in _table_row(made).items()} for made in every]
    lines = [
        tr("No GPU here, and none named with --gpu: these are GPUs you can rent."), "", display.aligned(table), "",
        tr("Speeds follow from published numbers; only the H200 was measured. Prices stand in configs/gpus.yaml."),
    ]  # fmt: skip
    if not every[0]["hours"]:
        lines.append(tr(
            "For hours and costs give both, rows and their mean length: --rows 5000 --mean-length 400. For one GPU "
            'with reasons: --gpu "RTX 4090".'
        ))  # fmt: skip
    text = "\n".join(lines)
    if gpus or any(value is not None for value in options.values()):
        return {"fits": [_rounded(made) for made in every]}, text
    rows = []  # every GPU profile on every GPU; `auto` marks the one that PROFILE auto takes there
    for one, name in product(gpu_table.usable(), gpu_table.PROFILES):
        made = of_profile(load(name), one)
        rows.append({
            "card": one.name, "memory_gib": one.memory_gib, "profile": name,
            "auto": name == gpu_table.profile_for(one.capability, one.memory_gib),
            **{key: made[key] for key in ("model", "fits")}, "peak_vram_gib": round(made["peak_vram_gib"], 1),
            **{key: made["recipe"][key] for key in (*STEP_ARGUMENTS, "length")},
            "tokens_per_second": round(made["tokens_per_second"] or 0),
            "yuan_per_hour": one.yuan, "dollars_per_hour": one.dollars,
        })  # fmt: skip
    return {"fits": rows}, text


def _rounded(made: Forecast) -> Forecast:
    def cut(value: Any, digits: int | None) -> Any:
        if isinstance(value, dict):
            return {name: cut(one, digits) for name, one in value.items()}
        return round(value, digits) if isinstance(value, float) else value

    whole = {name: value for name, value in made.items() if name != "schedule"}
    return whole | {name: cut(whole[name], digits) for name, digits in DIGITS.items()}


def of_options(gpu: GPUSpec, options: Mapping[str, Any]) -> Forecast:
    """A GPU with all options; micro-batch and checkpointing, where nobody gives them, are the fastest that fit."""
    name, rows, epochs = options.get("profile"), options.get("rows"), options.get("epochs")
    given = {} if name else {f"sft.{argument}": "auto" for argument in STEP_ARGUMENTS}
    given |= settings_in(options.get("given") or "")
    document = read(name or gpu_table.profile_for(gpu.capability, gpu.memory_gib))
    profile = with_overrides(document, {key: (value, "--set") for key, value in given.items()}).profile
    values = {
        "method": options.get("method"), "lora.r": options.get("rank"), "sft.max_length": options.get("length"),
        "sft.num_train_epochs": epochs,
    }  # fmt: skip
    by_rows = epochs is not None or (rows is not None and profile.sft.num_train_epochs != 0)
    if by_rows and "sft.max_steps" not in given:
        values["sft.max_steps"] = -1
    size = options.get("micro_batch")
    values["sft.per_device_train_batch_size"] = size
    if way := options.get("checkpointing"):
        values["sft.gradient_checkpointing"], values["sft.activation_offloading"] = RECOMPUTE[way]
    profile = apply(profile, {key: Choice(value, "") for key, value in values.items() if value is not None})
    model, engine = options.get("model") or "", options.get("engine") or "ddp"
    made = of_profile(profile, gpu, model, rows, options.get("mean_length"), engine=engine)
    if size and made["recipe"]["per_device_train_batch_size"] != size:
        raise CourseError(
            tr(
                "--micro-batch is {size}, and of a step's {batch} rows each GPU takes {each}.",
                size=size,
                batch=made["batch"],
                each=made["batch"] // gpu.count,
            ),
            allowed=tr("a number that divides {each}", each=made["batch"] // gpu.count),
            todo=tr(
                "Choose another, or a profile of your own with another course.conversations_per_step (--profile FILE)."
            ),
        )
    return made
