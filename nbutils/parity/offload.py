"""A model that may be larger than the GPU: whether it fits, and how its logits are computed all the same."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import hardware, platforms
from nbutils.disk import require_disk
from nbutils.errors import CourseError
from nbutils.paths import GIB

WORK_GIB = 1.5  # beside the weights: CUDA itself, the activations of the fixed set and its logits
SPARE_RAM_GIB = 2.0  # for this program and its neighbors
LOADED = 1.1  # weights as loaded, with what torch leaves between them


@dataclass(frozen=True)
class Room:
    """Whether the unquantised model fits, why, and what `from_pretrained` is given to load it in any case."""

    fits: bool
    reason: str
    wide: dict[str, Any]

    @property
    def name(self) -> str:
        """The reading that the model of the exam gives."""
        return "full" if self.fits else "4bit"

    @property
    def other(self) -> str:
        """The reading that needs another model."""
        return "4bit" if self.fits else "full"

    def wanted(self, method: str) -> tuple[str, ...]:
        """The readings a lesson takes: in 4 bits only if the adapter was trained so, on the unquantised base always."""
        return ("full", "4bit") if method == "qlora" else ("full",)

    def clear(self) -> None:
        """Delete what was put on disk."""
        if "offload_folder" in self.wide:
            shutil.rmtree(self.wide["offload_folder"], ignore_errors=True)


def decide(gib: float, gpu_gib: float | None, ram_gib: float) -> tuple[bool, dict[int | str, str]]:
    """Whether weights of this size fit into free memory, else how much of GPU and RAM they may take; disk the rest."""
    memory: dict[int | str, str] = {"cpu": _mib((ram_gib - SPARE_RAM_GIB) / 2)}
    if gpu_gib is None:
        return gib * LOADED <= ram_gib - SPARE_RAM_GIB, memory
    return gib * LOADED + WORK_GIB <= gpu_gib, {0: _mib(gpu_gib - 2 * WORK_GIB)} | memory


def _mib(gib: float) -> str:
    return f"{max(0, int(gib * 1024))}MiB"


def room_for(gib: float, card: Any, scratch: Path) -> Room:
    """The same for this machine as it is now; `scratch` takes what neither GPU nor RAM can hold."""
    gpu, ram = _free_gpu_gib() if card else None, platforms.free_memory_gib().value
    fits, memory = decide(gib, gpu, ram)
    place = f"RAM ({ram:.1f} GiB free)" if gpu is None else f"the GPU ({gpu:.1f} GiB free)"
    if fits:
        return Room(True, f"{gib:.1f} GiB of weights fit into {place}", {"device_map": {"": 0 if card else "cpu"}})
    require_disk(scratch, gib, "what GPU and RAM cannot hold of the model")
    reason = (
        f"{gib:.1f} GiB of weights do NOT fit into {place}: every model is asked in 4 bits, and the unquantised one is "
        f"run once over the fixed set, piece by piece from RAM and disk"
    )
    return Room(False, reason, {"device_map": "auto", "max_memory": memory, "offload_folder": str(scratch)})


def _free_gpu_gib() -> float:
    import torch

    hardware.free_memory()
    return float(torch.cuda.mem_get_info()[0]) / GIB


def as_trained(model: Any) -> Any:
    """The model, if in 4 bits on a CPU, computing as it did in training; call this before the model is first run.

    Where a CPU has bfloat16, bitsandbytes otherwise repacks the weights for it at the first run without training.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


def put_beside(model: Any, adapter: Path) -> Any:
    """PEFT's model of a base that may lie partly in RAM and on disk, with the adapter on the device that computes.

    PEFT's own way would write a copy of such a base into the current folder, over the base itself if its path is
    relative. So it is not told where the base lies, and gets the adapter's weights from here.
    """
    from accelerate.utils import set_module_tensor_to_device
    from peft import PeftModel
    from peft.utils import load_peft_weights

    if not any(weight.is_meta for weight in model.parameters()):
        return PeftModel.from_pretrained(model, adapter)
    places = model.__dict__.pop("hf_device_map", {}).values()
    device = next((place for place in places if str(place) not in ("cpu", "disk")), "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # what the next lines are for
        tuned = PeftModel.from_pretrained(model, adapter)
    known = dict(tuned.named_parameters())
    for name, value in load_peft_weights(str(adapter), device="cpu").items():
        head, _, tail = name.rpartition(".")
        place = f"{head}.default.{tail}"
        if place not in known:
            raise CourseError("parity.adapter_not_lora", weight=name)
        set_module_tensor_to_device(tuned, place, device, value.to(known[place].dtype))
    return tuned
