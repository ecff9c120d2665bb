"""What is known of a GPU: `configs/gpus.yaml`, what torch says, or what a person gives; the rest stays None."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from nbutils import hardware
from nbutils.config import NotNegative, Positive, Strict, Text, read_table
from nbutils.errors import CourseError
from nbutils.hardware import BF16_FROM, GPU
from nbutils.language import tr

ASSUMED = (8, 0)  # the capability of a GPU of which only memory is given
PROFILES = {  # by the GiB of the GPUs they are made for, up to these
    "t4_16gb": 20,
    "ampere_24gb": 38,
    "ampere_40gb": 70,
    "hopper_80gb": 130,
    "hopper_141gb": math.inf,
}
Names = Annotated[tuple[Text, ...], Field(strict=False)]


class Price(NamedTuple):
    """In both currencies; 0 is free, None unknown."""

    yuan: float | None
    dollars: float | None

    def __str__(self) -> str:
        known = [f"{sign}{price:.2f}" for sign, price in zip("¥$", self, strict=True) if price]
        if known:
            return tr(" or ").join(known)
        return tr("free") if 0 in self else tr("unknown")

    def times(self, factor: float | None) -> Price:
        """So many times this price; what is not free is unknown where the factor is."""
        return Price(*(price and factor and price * factor for price in self))  # 0 and None stay what they are


class GPUSpec(Strict):
    """One GPU, and how many of its kind; `yuan` and `dollars` are per hour and GPU, 0 is free, None unknown."""

    name: str = ""
    memory_gib: Positive
    tflops: Positive | None = None
    bandwidth: Positive | None = None
    capability: Annotated[tuple[int, int], Field(strict=False)]
    yuan: NotNegative | None = None
    dollars: NotNegative | None = None
    price_from: Text = "unknown"
    count: int = 1
    note: str = ""
    called: Names = ()
    also: Names = ()
    platforms: Names = ()

    @property
    def price(self) -> Price:
        """Of an hour of one GPU."""
        return Price(self.yuan, self.dollars)


def every() -> list[GPUSpec]:
    """All GPUs of `configs/gpus.yaml`."""
    return list(read_table("gpus.yaml", GPUSpec).values())


def find(name: str, vram: float | None = None, tflops: float | None = None, capability: float | None = None) -> GPUSpec:
    """A GPU by its name ("4090", "A100 80GB", "T4 x2"); what is given overrules the table, or stands in for it."""
    changes: dict[str, Any] = {"memory_gib": vram, "tflops": tflops}
    changes = {key: value for key, value in changes.items() if value}
    if capability:
        changes["capability"] = divmod(round(10 * capability), 10)  # 7.5 is (7, 5)
    if several := re.fullmatch(r"(.+?)\s*[x×]\s*([1-9]\d?)", name.strip(), re.IGNORECASE):
        name = several[1]
        changes["count"] = int(several[2])
    for gpu in every():
        if _plain(name) in map(_plain, (gpu.name, *gpu.also)):
            return gpu.model_copy(update=changes)
    if vram is None:
        raise CourseError(
            tr("{name!r} is not in configs/gpus.yaml, so its memory is not known.", name=name),
            allowed=", ".join(gpu.name for gpu in every()),
            todo=(
                "Give its memory with --vram GIB (about 5 % less than advertised) and its dense 16-bit "
                "TFLOP/s with --tflops T, or add it to that file."
            ),
        )
    return GPUSpec.model_validate({"name": name.strip(), "capability": ASSUMED} | changes)


def of_machine(gpu: GPU, count: int = 1) -> GPUSpec:
    """The facts of so many GPUs torch has found: memory and capability from torch, the rest from the table."""
    own = {
        "memory_gib": gpu.memory_gib,
        "capability": gpu.capability,
        "count": count,
    }
    named = []
    for spec in every():
        if any(_is_in(word, gpu.name) for word in spec.called):
            named.append(spec)
    if not named or "laptop" in gpu.name.lower():  # those of laptops are others
        return GPUSpec.model_validate(own | {"name": gpu.name})
    named.sort(
        key=lambda spec: abs(spec.memory_gib - gpu.memory_gib),
    )
    longest = max(
        named,
        key=lambda spec: max(map(len, spec.called)),
    )  # a 4090 D is called RTX 4090 as well
    return longest.model_copy(update=own)


def of_this_machine() -> GPUSpec | None:
    """The GPU of this machine, if it has one; torch is loaded only then."""
    if not importlib.util.find_spec("torch") or not hardware.driver_gpus():
        return None
    gpu = hardware.gpu()
    return of_machine(gpu) if gpu else None


def hourly_price(gpu: GPU | None) -> Price:
    """What an hour of this machine's GPUs costs, by the table."""
    return of_machine(gpu).price.times(gpu.count) if gpu else Price(None, None)


def profile_for(gpu: GPU | GPUSpec) -> str:
    """The profile made for GPUs like this one."""
    if gpu.capability < BF16_FROM:
        return "t4_16gb"
    return next(profile for profile, most in PROFILES.items() if gpu.memory_gib < most)


def _is_in(word: str, name: str) -> bool:
    """Whether a name has this word as a whole: an A10 is no A100."""
    whole = rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"
    return re.search(whole, name, re.IGNORECASE) is not None


def _plain(name: str) -> str:
    """A name without vendor, spaces, dashes and unit: "NVIDIA RTX 4090" and "4090" are one, so are "80" and "80GB"."""
    words = re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.lower())
    return re.sub(r"(?<=\d)gi?b?$", "", words)
