"""The plan: memory, time and money of a training before anything is downloaded, and the fastest setting that fits.

Here is what a lesson and the command line ask it: this machine, a GPU by name, or all GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbutils import display, distributed
from nbutils.config import read, settings_in, with_overrides
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import joined, tr
from nbutils.models import find_shape
from nbutils.plan import gpus as gpu_table
from nbutils.plan.forecast import RECOMPUTE_MODES, Forecast, assumed_rows, of_profile
from nbutils.plan.gpus import GPUSpec
from nbutils.plan.recipe import Choices, apply
from nbutils.record import Facts

RENTED = "RTX 4090"  # the usual rented GPU
OPTIONS = {  # of the command line, which are values of a profile
    "method": "method",
    "rank": "lora.r",
    "length": "sft.max_length",
    "epochs": "sft.num_train_epochs",
    "micro_batch": "sft.per_device_train_batch_size",
}


def example(resolved: Any, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's resolved profile; without a GPU, a 7B model on one that can be rented.

    Example: `plan.example(lesson.resolved, rows=10_000, mean_length=300)`
    """
    shape = resolved.shape
    if resolved.gpu and shape:
        profile = resolved.profile
        gpu = gpu_table.of_machine(resolved.gpu)
        return of_profile(profile, gpu, shape, assumed_rows(profile, rows, mean_length))
    return of_options(gpu_table.find(RENTED), {"rows": rows, "mean_length": mean_length})


def require(resolved: Any) -> Forecast | None:
    """This machine's forecast for lesson 03, if it can be known; stops where not even the smallest setting fits.

    Example: `print(plan.describe(plan.require(lesson.resolved)))`
    """
    shape = resolved.shape
    if resolved.gpu is None or shape is None:
        return None
    gpu = gpu_table.of_machine(resolved.gpu, distributed.world_size())
    strategy = distributed.strategy_name(str(resolved.profile.method))
    forecast = of_profile(resolved.profile, gpu, shape, resolved.rows, strategy)
    forecast.require_room()
    return forecast


def describe(forecast: Forecast | None) -> str:
    """The forecast as aligned text, a fact in each line."""
    if forecast is None:
        return tr("No forecast: there is no GPU here, or the size of the model is not known before its download.")
    lines = [(tr(name), str(value)) for name, value in _table_row(forecast).items()]
    gpus_together = forecast.gpu.price.times(forecast.gpu.count)
    lines += [
        (tr("an hour"), joined([str(gpus_together), tr(forecast.gpu.price_from)], ";")),
        (tr("recipe"), str(forecast.schedule or tr("unknown"))),
        (tr("peak memory"), _sizes(forecast.parts)),
        (tr("disk"), _sizes(forecast.disk_gib)),
    ]
    lines += [(tr("note"), note) for note in forecast.notes]
    return display.columns_of(lines)


def _sizes(parts: Mapping[str, float]) -> str:
    """A sum in GiB with its parts."""
    sizes = [f"{tr(part)} {size:.2f}" for part, size in parts.items()]
    return joined([f"{sum(parts.values()):.1f} GiB", joined(sizes)], ":")


def fits_table(names: Sequence[str], **options: Any) -> list[Facts]:
    """For these GPUs: what PROFILE auto trains there, how, how fast, and for what price.

    Example: `plan.fits_table(["T4", "RTX 4090"], rows=10_000, mean_length=300)`
    """
    return [_table_row(of_options(gpu_table.find(name), options)) for name in names]


def command(rows: int, mean_length: float) -> str:
    """The line that forecasts a training on so many rows of this mean length in tokens."""
    return f"python -m nbutils plan --rows {rows} --mean-length {mean_length:.0f}"


def _table_row(forecast: Forecast) -> Facts:
    gpu = forecast.gpu
    recipe = forecast.recipe
    return {
        "GPU": f"{gpu.count} x {gpu.name}" if gpu.count > 1 else gpu.name,
        "model": forecast.shape.name,
        "method": joined([recipe.method, recipe.engine]),
        "length": recipe.length,
        "rows": f"{recipe.per_device_train_batch_size} x {recipe.gradient_accumulation_steps}",
        "recompute": recipe.recompute,
        **forecast.columns(),
    }


def answer(
    gpu: str = "",
    vram: float | None = None,
    tflops: float | None = None,
    capability: float | None = None,
    **options: Any,
) -> tuple[Facts, str]:
    """The same answer for programs and for people: one forecast, or a table where there is no GPU and none is named.

    Example: `facts, text = plan.answer(gpu="RTX 4090", model="Qwen2.5-14B", length=1024)`
    """
    if gpu or vram or tflops:
        card: GPUSpec | None = gpu_table.find(gpu or tr("a GPU of your own"), vram, tflops, capability)
    else:
        card = gpu_table.of_this_machine()
    if card:
        forecast = of_options(card, options)
        return forecast.facts(), describe(forecast)
    forecasts = [of_options(card, options) for card in gpu_table.every()]
    lines = [
        tr("No GPU here, and none named with --gpu: these are GPUs you can rent."),
        display.aligned([_table_row(forecast) for forecast in forecasts]),
        tr(
            "Speeds follow from published numbers; only the H200 was measured. Prices stand in configs/gpus.yaml. "
            "Hours and costs need both: --rows 5000 --mean-length 400."
        ),
    ]
    return {"fits": [forecast.facts() for forecast in forecasts]}, "\n\n".join(lines)


def of_options(gpu: GPUSpec, options: Mapping[str, Any]) -> Forecast:
    """A GPU with all options; micro-batch and checkpointing, where nobody gives them, are the fastest that fit."""
    if count := options.get("gpus"):
        gpu = gpu.model_copy(update={"count": count})
    document = read(options.get("profile") or gpu_table.profile_for(gpu))
    settings = settings_in(options.get("given", ""))
    overrides = {key: (value, "--set") for key, value in settings.items()}
    profile = with_overrides(document, overrides).profile
    choices = Choices()  # not checked: a length that the profile's server would refuse may be asked for, too
    for option, key in OPTIONS.items():
        if options.get(option):
            choices[key] = Choice(options[option], "")
    if options.get("epochs"):
        choices["sft.max_steps"] = Choice(-1, "")
    if mode := options.get("checkpointing"):
        recompute, offload = RECOMPUTE_MODES[mode]
        choices["sft.gradient_checkpointing"] = Choice(recompute, "")
        choices["sft.activation_offloading"] = Choice(offload, "")
    profile = apply(profile, choices)
    shape = find_shape(options.get("model") or profile.model)
    rows = assumed_rows(profile, options.get("rows"), options.get("mean_length"))
    strategy = options.get("engine") or "ddp"
    forecast = of_profile(profile, gpu, shape, rows, strategy)
    return replace(forecast, mean_length=options.get("mean_length") or 0.0)


def engine_for(resolved: Any, processes: int, asked: str = "auto") -> Choice:
    """The strategy with which so many processes train a resolved profile, one on each GPU: that asked for, or by size.

    DDP where each GPU holds the model, with the smallest setting; else FSDP, where its share fits.
    Example: `plan.engine_for(lesson.resolved, processes=2).value`
    """
    method = resolved.profile.method
    if asked != "auto":
        distributed.require_method(asked, method)
        return Choice(asked, tr("parameter {name}", name="ENGINE"))
    shape = resolved.shape
    if resolved.gpu is None or shape is None:
        return Choice("ddp", tr("there is no GPU, or the size of the model is not known: each process holds it whole"))
    gpu = gpu_table.of_machine(resolved.gpu, processes)
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
