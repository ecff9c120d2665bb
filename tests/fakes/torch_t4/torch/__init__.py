"""torch on Kaggle's two T4: everything works; bfloat16 is said to be supported, by emulation."""

from __future__ import annotations

from types import SimpleNamespace

__version__ = "2.10.0+cu128"
version = SimpleNamespace(cuda="12.8")


class Matrix:
    """A square of equal numbers, which is all the course multiplies before it trains."""

    def __init__(self, size: int, value: float) -> None:
        self.size, self.value = size, value

    def __matmul__(self, other: Matrix) -> Matrix:
        return Matrix(self.size, self.size * self.value * other.value)

    def __getitem__(self, _: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(item=lambda: self.value)


def ones(size: int, _: int, device: str = "cpu") -> Matrix:
    assert device == "cuda"
    return Matrix(size, 1.0)


cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_name=lambda _=0: "Tesla T4",
    get_device_capability=lambda _=0: (7, 5),
    get_device_properties=lambda _=0: SimpleNamespace(total_memory=15 * 2**30),
    get_arch_list=lambda: ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    is_bf16_supported=lambda including_emulation=True: including_emulation,
)
