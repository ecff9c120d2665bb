"""torch on Kaggle's two T4, on its P100 (available, but without kernels), or without a GPU, as FAKE_GPU says."""

from __future__ import annotations

import os
from types import SimpleNamespace

__version__ = "2.10.0+cu128"
NAME, CAPABILITY, COUNT = {
    "t4": ("Tesla T4", (7, 5), 2), "p100": ("Tesla P100-PCIE-16GB", (6, 0), 1), "": ("", (0, 0), 0),
}[os.environ.get("FAKE_GPU", "")]  # fmt: skip


class Matrix:
    """A square of equal numbers, which is all the course multiplies before it trains."""

    def __init__(self, size: int, value: float) -> None:
        self.size, self.value = size, value

    def __matmul__(self, other: Matrix) -> Matrix:
        return Matrix(self.size, self.size * self.value * other.value)

    def __getitem__(self, _: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(item=lambda: self.value)


def ones(size: int, _: int, device: str = "cpu") -> Matrix:
    if CAPABILITY == (6, 0):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    return Matrix(size, 1.0)


cuda = SimpleNamespace(
    is_available=lambda: COUNT > 0,
    device_count=lambda: COUNT,
    get_device_name=lambda _=0: NAME,
    get_device_capability=lambda _=0: CAPABILITY,
    get_device_properties=lambda _=0: SimpleNamespace(total_memory=15 * 2**30),
    is_bf16_supported=lambda including_emulation=True: including_emulation,
)
