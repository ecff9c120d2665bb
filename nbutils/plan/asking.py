"""The questions a lesson and the command line ask the plan: this machine, a GPU by name, or the table of all GPUs.

torch is loaded only if no GPU is named and one may be in this machine.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbutils import dashboard, hardware, scaling
from nbutils.config import Document, Profile, load, read, settings_in, with_overrides
from nbutils.errors import CourseError
from nbutils.hardware import Card
from nbutils.models import Shape, find_shape
from nbutils.plan import gpus as gpu_table
from nbutils.plan.forecast import Forecast, describe, divisors, explain, money, of_profile, require_fit
from nbutils.plan.gpus import CardFacts
from nbutils.plan.schedule import Rows

BY_MEMORY = ((20.0, "t4_16gb"), (38.0, "ampere_24gb"), (70.0, "ampere_40gb"), (130.0, "hopper_80gb"))
LARGEST = "hopper_141gb"
RENTED = ("RTX 4090", "ampere_24gb")  # the usual rented GPU, and its profile
REMARK = "Speed from published numbers; only the H200 was measured. Prices: configs/cards.yaml, yours to edit."


class Settled(Protocol):
    """A profile settled for this machine, as `profiles.resolve` gives it."""

    @property
    def profile(self) -> Profile: ...
    @property
    def model(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def card(self) -> Card | None: ...
    @property
    def rows(self) -> Rows | None: ...


def profile_for(capability: tuple[int, int], memory_gib: float) -> str:
    """The profile made for GPUs like this one."""
    if capability < hardware.BF16_FROM:
        return BY_MEMORY[0][1]
    return next((name for below, name in BY_MEMORY if memory_gib < below), LARGEST)


def example(resolved: Settled, rows: int, mean_length: float) -> Forecast:
    """A forecast to look at: this machine's profile on its GPU; without one, a 7B model on a GPU one can rent."""
    if resolved.card is None:
        return of_profile(load(RENTED[1]), gpu_table.find(RENTED[0]), rows=rows, mean_length=mean_length)
    gpu = gpu_table.of_machine(resolved.card)
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        shape = find_shape(load(resolved.source).model)
        unknown = f"the shape of {resolved.model} is not known before its download: this is {shape.name} instead"
        gpu = replace(gpu, note=unknown)
    return of_profile(resolved.profile, gpu, shape, rows, mean_length)


def require(resolved: Settled, rows: int | None = None, mean_length: float | None = None) -> Forecast | str:
    """This machine's forecast for lesson 03, or why there is none; stops where not even the smallest setting fits."""
    if resolved.card is None:
        return "No forecast: there is no card here."
    try:
        shape = find_shape(resolved.model)
    except CourseError:
        return f"No forecast: the shape of {resolved.model} is not known before its download."
    gpu = replace(gpu_table.of_machine(resolved.card), count=scaling.world_size())
    made = of_profile(resolved.profile, gpu, shape, rows, mean_length, resolved.rows)
    require_fit(shape, made.recipe, made.batch, gpu)
    return made


def which_fits() -> list[dict[str, Any]]:
    """For every GPU of the table, every GPU profile on it: whether it fits, how, how fast; `auto` marks its own."""
    profiles = [(name, load(name)) for name in [*(name for _, name in BY_MEMORY), LARGEST]]
    shapes = {name: find_shape(profile.model) for name, profile in profiles}
    return [_row(name, of_profile(one, gpu, shapes[name])) for gpu in gpu_table.every() for name, one in profiles]


def _row(name: str, made: Forecast) -> dict[str, Any]:
    gpu, recipe = made.card, made.recipe
    return {
        "card": gpu.name, "memory_gib": gpu.memory_gib, "profile": name, "model": made.model, "fits": made.fits,
        "auto": name == profile_for(gpu.capability, gpu.memory_gib),
        "peak_vram_gib": round(made.peak_vram_gib, 1), "micro_batch": recipe.micro_batch,
        "accumulation": made.batch // recipe.micro_batch, "checkpointing": recipe.checkpointing,
        "length": recipe.length, "tokens_per_second": round(made.tokens_per_second or 0),
        "yuan_per_hour": gpu.yuan, "dollars_per_hour": gpu.dollars,
    }  # fmt: skip


def fits_table() -> list[dict[str, Any]]:
    """For every GPU: what PROFILE auto trains there, how, how fast, for what price; and the largest model."""
    rows, table = which_fits(), []
    for row in [row for row in rows if row["auto"]]:
        largest = [one["model"] for one in rows if one["card"] == row["card"] and one["fits"]]
        price = money({"yuan": row["yuan_per_hour"], "dollars": row["dollars_per_hour"]}).replace(" or ", " ")
        table.append({
            "card": row["card"], "GiB": row["memory_gib"], "profile": row["profile"], "model": row["model"],
            "rows": f"{row['micro_batch']} x {row['accumulation']}", "recompute": row["checkpointing"],
            "peak GiB": row["peak_vram_gib"], "tokens/s": f"{row['tokens_per_second']:,}", "an hour": price,
            "largest model": largest[-1] if largest else "none of the profiles",
        })  # fmt: skip
    return table


# ---- the command line


@dataclass(frozen=True)
class Answer:
    """The same answer for programs and for people."""

    data: Any
    text: str


def answer(
    gpu: str = "", gpus: int | None = None, vram: float | None = None, tflops: float | None = None,
    capability: str | None = None, **options: Any,
) -> Answer:  # fmt: skip
    """One forecast; or the table of all GPUs where there is no GPU and none was named.

    `options` are those of the command line; one that is None is left to the profile, or to what fits.
    """
    found = None
    if tflops and not (gpu or vram):
        raise CourseError("plan.tflops_alone")
    if gpu or vram:
        found = gpu_table.find(gpu or "a card of your own", vram, tflops, _capability(capability))
    elif card := _this_machine():
        found = gpu_table.of_machine(card)
    if found:
        shape, made = _forecast(replace(found, count=gpus or found.count), options)
        return Answer(made.as_dict(), f"{describe(made)}\n\n{explain(shape, made)}")
    if gpus is None and not any(value is not None for value in options.values()):
        data, table = which_fits(), fits_table()
    else:
        every = [_forecast(replace(one, count=gpus or 1), options)[1] for one in gpu_table.every()]
        data, table = [made.as_dict() for made in every], [_compared(made) for made in every]
    heading = "No card here and none named with --gpu: the cards one can rent."
    return Answer({"fits": data}, f"{heading}\n\n{dashboard.aligned(table)}\n\n{REMARK}")


def _this_machine() -> Card | None:
    """The GPU of this machine; torch is asked only where the driver lists one."""
    return hardware.card() if importlib.util.find_spec("torch") and hardware.driver_gpus() else None


def _capability(text: str | None) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)\.(\d)", text.strip()) if text else None
    if text and not found:
        raise CourseError("plan.bad_capability", text=text)
    return (int(found[1]), int(found[2])) if found else None


def _forecast(gpu: CardFacts, options: dict[str, Any]) -> tuple[Shape, Forecast]:
    """A GPU with all options; micro-batch and checkpointing, where nobody gives them, are the fastest that fit."""
    profile = _with_options(read(options.get("profile") or profile_for(gpu.capability, gpu.memory_gib)), options)
    shape, size = find_shape(options.get("model") or profile.model), options.get("micro_batch")
    free = _changed(profile, train=_changed(profile.train, micro_batch="auto"))
    batch = of_profile(free, gpu, shape, options.get("rows"), options.get("mean_length")).batch
    each = batch // gpu.count
    if size and each % size:
        fits = ", ".join(map(str, divisors(each)))
        raise CourseError("plan.bad_micro_batch", size=size, batch=batch, each=each, fits=fits)
    return shape, of_profile(profile, gpu, shape, options.get("rows"), options.get("mean_length"))


def _with_options(document: Document, options: dict[str, Any]) -> Profile:
    """The profile with the options in it; one that nobody named leaves open what can be left open."""
    left_open = (
        {} if options.get("profile") else dict.fromkeys(("train.micro_batch", "train.gradient_checkpointing"), "auto")
    )
    given = settings_in(options.get("given") or "")
    profile = with_overrides(document, {name: (value, "--set") for name, value in (left_open | given).items()}).profile
    by_rows = options.get("epochs") is not None or (options.get("rows") is not None and profile.train.epochs != 0)
    train = {
        "max_length": options.get("length"), "epochs": options.get("epochs"),
        "max_steps": 0 if by_rows and "train.max_steps" not in given else None,
        "micro_batch": options.get("micro_batch"), "gradient_checkpointing": options.get("checkpointing"),
    }  # fmt: skip
    groups = {"train": _changed(profile.train, **train), "lora": _changed(profile.lora, rank=options.get("rank"))}
    return _changed(profile, method=options.get("method"), **groups)


def _changed(part: Any, **values: Any) -> Any:
    return part.model_copy(update={name: value for name, value in values.items() if value is not None})


def _compared(made: Forecast) -> dict[str, Any]:
    """One training on one GPU, as a row of the table."""
    gpu, recipe = made.card, made.recipe
    return {
        "card": str(gpu), "GiB": gpu.memory_gib, "model": made.model, "length": recipe.length,
        "peak GiB": round(made.peak_vram_gib, 1), "fits": "yes" if made.fits else "no",
        "rows": f"{recipe.micro_batch} x {recipe.accumulation}", "recompute": recipe.checkpointing,
        "tokens/s": "unknown" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f}",
        "hours": "unknown" if made.hours is None else f"{made.hours:.1f}", "cost": money(made.cost),
        "an hour": money({"yuan": gpu.yuan, "dollars": gpu.dollars}),
    }  # fmt: skip
