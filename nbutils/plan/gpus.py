"""What is known of a GPU: `configs/gpus.yaml`, what torch says, or what a person gives; the rest stays None."""

from __future__ import annotations

import re
from collections import namedtuple
from typing import Annotated, Any

from pydantic import Field

from nbutils.config import Strict, Text, read_table
from nbutils.errors import CourseError
from nbutils.hardware import BF16_FROM, GPU
from nbutils.language import tr

OLDEST = (7, 0)  # torch has no kernels for older ones any more
ASSUMED = (8, 0)  # the capability of a GPU of which only memory is given
BY_MEMORY = ((20.0, "t4_16gb"), (38.0, "ampere_24gb"), (70.0, "ampere_40gb"), (130.0, "hopper_80gb"))
LARGEST = "hopper_141gb"
PROFILES = (*(name for _, name in BY_MEMORY), LARGEST)
Positive = Annotated[float, Field(gt=0)]
PriceOrNull = Annotated[float, Field(ge=0)] | None
Names = Annotated[tuple[Text, ...], Field(strict=False)]
Price = namedtuple("Price", ("yuan", "dollars"))  # of an hour of one machine; None where it is free or unknown


class GPUSpec(Strict):
    """One GPU, and how many of its kind; `yuan` and `dollars` are per hour and GPU, 0 is free, None unknown."""

    name: str = ""
    memory_gib: Positive
    tflops: Positive | None = None
    bandwidth: Positive | None = None
    capability: Annotated[tuple[int, int], Field(strict=False)]
    yuan: PriceOrNull = None
    dollars: PriceOrNull = None
    price_from: Text = "unknown"
    count: int = 1
    note: str = ""
    called: Names = ()
    also: Names = ()
    platforms: Names = ()


def every() -> list[GPUSpec]:
    """All GPUs of `configs/gpus.yaml`."""
    return [entry.model_copy(update={"name": name}) for name, entry in read_table("gpus.yaml", GPUSpec).items()]


def usable() -> list[GPUSpec]:
    """Those that a torch of today computes on."""
    return [one for one in every() if one.capability >= OLDEST]


def find(
    name: str, vram: float | None = None, tflops: float | None = None, capability: tuple[int, int] | None = None
) -> GPUSpec:
    """A GPU by its name ("4090", "A100 80GB", "T4 x2"); what is given overrules the table, or stands in for it."""
    several = re.fullmatch(r"(.+?)\s*[x×]\s*([1-9]\d?)", name.strip(), re.IGNORECASE)
    name, count = (several[1], int(several[2])) if several else (name.strip(), 1)
    found = next((one for one in every() if _plain(name) in map(_plain, (one.name, *one.also))), None)
    if found is None and vram is None:
        raise CourseError(
            tr("{name!r} is not in configs/gpus.yaml, so its memory is not known.", name=name),
            allowed=", ".join(one.name for one in every()),
            todo=tr(
                "Give its memory with --vram GIB (about 5 % less than advertised) and its dense 16-bit "
                "TFLOP/s with --tflops T, or add it to that file."
            ),
        )
    found = found or GPUSpec(name=name, memory_gib=vram or 0.0, capability=ASSUMED)
    given = {"memory_gib": vram, "tflops": tflops, "capability": capability}
    return found.model_copy(update={"count": count} | {key: value for key, value in given.items() if value})


def of_machine(gpu: GPU) -> GPUSpec:
    """The facts of one GPU torch has found: memory and capability from torch, the rest from the table."""
    seen: dict[str, Any] = {"memory_gib": gpu.memory_gib, "capability": gpu.capability}
    whole = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
    called = [(one, whole.format(re.escape(word))) for one in every() for word in one.called]
    hits = [one for one, word in called if re.search(word, gpu.name, re.IGNORECASE)]
    if not hits or "laptop" in gpu.name.lower():  # those of laptops are others
        return GPUSpec(name=gpu.name, **seen)
    # the longest name first: a 4090 D is called RTX 4090 as well
    best = min(hits, key=lambda one: (-max(map(len, one.called)), abs(one.memory_gib - gpu.memory_gib)))
    return best.model_copy(update=seen)


def hourly_price(gpu: GPU | None) -> Price | None:
    """What an hour of this machine's GPUs costs, by the table; None without a GPU, or where it is free or unknown."""
    if gpu is None:
        return None
    facts = of_machine(gpu)
    yuan, dollars = ((price or 0) * gpu.count or None for price in (facts.yuan, facts.dollars))
    return Price(yuan, dollars) if yuan or dollars else None


def profile_for(capability: tuple[int, int], memory_gib: float) -> str:
    """The profile made for GPUs like this one."""
    if capability < BF16_FROM:
        return BY_MEMORY[0][1]
    return next((name for below, name in BY_MEMORY if memory_gib < below), LARGEST)


def _plain(name: str) -> str:
    """A name without vendor, spaces, dashes and unit: "NVIDIA RTX 4090" and "4090" are one, so are "80" and "80GB"."""
    words = re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.lower())
    return re.sub(r"(?<=\d)gi?b?$", "", words)
