"""torch on Kaggle's P100: it says the card is available and has no kernels for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

__version__ = "2.10.0+cu128"
version = SimpleNamespace(cuda="12.8")


class AcceleratorError(RuntimeError):
    """What torch raises for a failed operation on a device."""


def ones(*_: int, device: str = "cpu") -> NoReturn:
    raise AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors")


cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    get_device_name=lambda _=0: "Tesla P100-PCIE-16GB",
    get_device_capability=lambda _=0: (6, 0),
    get_device_properties=lambda _=0: SimpleNamespace(total_memory=17_059_545_088),
    get_arch_list=lambda: ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    is_bf16_supported=lambda including_emulation=True: including_emulation,
)
