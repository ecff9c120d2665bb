"""Where a model fits on this machine, and how it is loaded: unquantized, in 4 bits, or spread out to RAM and disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nbutils import disk, files, hardware, merging, platforms
from nbutils.config import Profile
from nbutils.language import tr

WORK_GIB = 1.5  # beside the weights: CUDA itself, activations and logits
SPARE_RAM_GIB = 2.0  # for this program and its neighbors
LOADED = 1.1  # weights as loaded, with what torch leaves between them


@dataclass
class Placement:
    """Whether the unquantized model fits, why, and what `from_pretrained` is given to load it unquantized or not."""

    model: str  # the base
    fits: bool
    reason: str
    unquantized: dict[str, Any]  # spread over GPU, RAM and disk if it does not fit
    in_4_bits: dict[str, Any]
    loaded: Any = None  # the model that `load` keeps
    loaded_from: Any = None

    @property
    def loading(self) -> dict[str, Any]:
        """What loads a model that answers questions."""
        return self.unquantized if self.fits else self.in_4_bits

    def load(self, folder: str | Path, loading: dict[str, Any] | None = None) -> Any:
        """The model in `folder`; it is kept for the next call, and the one before leaves the memory first."""
        from transformers import AutoModelForCausalLM

        loading = loading or self.loading
        wanted = (str(folder), files.stamp(Path(folder)), loading is self.in_4_bits)
        if self.loaded_from != wanted:
            self.free()
            self.loaded = AutoModelForCausalLM.from_pretrained(folder, **loading, trust_remote_code=False)
            self.loaded_from = wanted
            hardware.keep_4bit_layout(self.loaded)  # as in training
        return self.loaded

    def free(self) -> None:
        """Let the loaded model leave the memory, and delete what of it was put on disk."""
        self.loaded = self.loaded_from = None
        hardware.free_memory()
        if "offload_folder" in self.unquantized:
            shutil.rmtree(self.unquantized["offload_folder"], ignore_errors=True)


def place_model(model: str, adapter: Path, profile: Profile, scratch: Path) -> Placement:
    """Whether a model of the profile's precision fits into free memory, and how to load it.

    Example:
        placement = place_model(lesson.model, lesson.run.adapter, lesson.profile, lesson.scratch)
        base = AutoModelForCausalLM.from_pretrained(lesson.model, **placement.loading)
    """
    from transformers import BitsAndBytesConfig

    dtype = profile.from_pretrained.dtype
    gpu = hardware.gpu()
    gib = merging.size_gib(model, adapter, dtype)
    room = fit(gib, gpu)
    whole: dict[str, Any] = {"dtype": dtype, "device_map": {"": 0 if gpu else "cpu"}}
    settings = dict(profile.quantization) | {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    in_4_bits = whole | {"quantization_config": BitsAndBytesConfig(**settings)}
    if room.fits:
        reason = tr("{gib:.1f} GiB of weights fit into {place}", gib=gib, place=room.place)
        return Placement(model, True, reason, whole, in_4_bits)
    offload = scratch / "offload"
    disk.require_disk(offload, gib, tr("what GPU and RAM cannot hold of the model"))
    reason = tr(
        "{gib:.1f} GiB of weights do NOT fit into {place}: questions are asked in 4 bits", gib=gib, place=room.place
    )
    spread = {"dtype": dtype, "device_map": "auto", "max_memory": room.shares, "offload_folder": str(offload)}
    return Placement(model, False, reason, spread, in_4_bits)


class Fit(NamedTuple):
    """Whether weights fit; if not, what they may take of GPU and RAM (`max_memory`); and where they would lie."""

    fits: bool
    shares: dict[int | str, str]
    place: str


def fit(gib: float, gpu: hardware.GPU | None) -> Fit:
    """Whether weights of this size fit into what is free now."""
    import torch

    needed = gib * LOADED
    ram = platforms.free_memory_gib()
    spare = ram - SPARE_RAM_GIB
    shares: dict[int | str, str] = {"cpu": _mebibytes(spare / 2)}
    if gpu is None:
        place = tr("RAM ({gib:.1f} GiB free)", gib=ram)
        return Fit(needed <= spare, shares, place)
    hardware.free_memory()
    free = torch.cuda.mem_get_info()[0] / files.GIB
    shares[0] = _mebibytes(free - 2 * WORK_GIB)
    place = tr("the GPU ({gib:.1f} GiB free)", gib=free)
    return Fit(needed <= free - WORK_GIB, shares, place)


def _mebibytes(gib: float) -> str:
    return f"{max(0, int(gib * 1024))}MiB"
