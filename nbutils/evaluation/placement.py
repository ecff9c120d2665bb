"""Where a model fits on this machine, and how it is loaded: unquantized, or in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import files, hardware, merging, models, platforms
from nbutils.config import Profile
from nbutils.language import tr

WORK_GIB = 1.5  # beside the weights: CUDA itself, activations and logits
SPARE_RAM_GIB = 2.0  # for this program and its neighbors
LOADED = 1.1  # weights as loaded, with what torch leaves between them


@dataclass
class Placement:
    """Whether the unquantized model fits, why, and what `from_pretrained` is given to load a model."""

    model: str  # the base
    fits: bool
    reason: str
    loading: dict[str, Any]  # unquantized if it fits
    in_4_bits: dict[str, Any]
    loaded: Any = None  # the model that `load` keeps
    loaded_from: Any = None

    def load(self, folder: str | Path, *, in_4_bits: bool = False) -> Any:
        """The model in `folder`; it is kept for the next call, and the one before leaves the memory first."""
        from transformers import AutoModelForCausalLM

        source = (str(folder), files.stamp(Path(folder)), in_4_bits)
        if self.loaded_from != source:
            self.free()
            loading = self.in_4_bits if in_4_bits else self.loading
            self.loaded = AutoModelForCausalLM.from_pretrained(folder, **loading, trust_remote_code=False)
            self.loaded_from = source
            hardware.keep_4bit_layout(self.loaded)  # as in training
        return self.loaded

    def free(self) -> None:
        """Let the loaded model leave the memory."""
        self.loaded = self.loaded_from = None
        hardware.free_memory()


def place_model(model: str, adapter: Path | None, profile: Profile) -> Placement:
    """Whether a model of the profile's precision fits into free memory, and how to load it; without an adapter as well.

    Example:
        placement = place_model(lesson.model, lesson.run.adapter, lesson.profile)
        base = AutoModelForCausalLM.from_pretrained(lesson.model, **placement.loading)
    """
    from transformers import BitsAndBytesConfig

    dtype = profile.from_pretrained.dtype
    gpu = hardware.gpu()
    if adapter:
        gib = merging.size_gib(model, adapter, dtype)
    else:
        gib = models.find_shape(model).params * (4 if dtype == "float32" else 2) / files.GIB
    fits = fit(gib, gpu)
    reason = tr("{gib:.1f} GiB of weights fit into the free memory", gib=gib)
    if not fits:
        reason = tr("{gib:.1f} GiB of weights do NOT fit into the free memory: questions are asked in 4 bits", gib=gib)
    unquantized = {"dtype": dtype, "device_map": {"": 0 if gpu else "cpu"}}
    settings = dict(profile.quantization) | {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    in_4_bits = unquantized | {"quantization_config": BitsAndBytesConfig(**settings)}
    return Placement(model, fits, reason, unquantized if fits else in_4_bits, in_4_bits)


def fit(gib: float, gpu: hardware.GPU | None) -> bool:
    """Whether weights of this size fit into what is free now: of the GPU, or of RAM without one."""
    import torch

    free = platforms.free_memory_gib() - SPARE_RAM_GIB
    if gpu:
        hardware.free_memory()
        free = torch.cuda.mem_get_info()[0] / files.GIB - WORK_GIB
    return gib * LOADED <= free
