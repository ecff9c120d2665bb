"""The card's memory before a server wants it: what this kernel holds is freed, and whoever still holds some is named.

Not here: what fits (plan). Asked of the driver through pynvml, as torch knows only about its own process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import psutil

from nbutils import hardware
from nbutils.errors import CourseError
from nbutils.paths import GIB

CONTEXT_GIB = 1.0  # what a process that only looked at the card keeps; nobody is blamed for that


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a card; `gib` is None where the driver does not tell, as in many containers."""

    pid: int
    name: str
    gib: float | None

    def __str__(self) -> str:
        who = "this kernel" if self.pid == os.getpid() else self.name
        return f"{who} (process {self.pid}) holds {'an unknown part' if self.gib is None else f'{self.gib:.1f} GiB'}"


@dataclass(frozen=True)
class CardMemory:
    """Of the first visible card."""

    free_gib: float
    total_gib: float
    holders: tuple[Holder, ...]

    def __str__(self) -> str:
        told = "; ".join(map(str, self.holders)) or "no process that the driver names holds any"
        return f"{self.free_gib:.1f} of {self.total_gib:.1f} GiB of the card are free; {told}"


def free_card() -> CardMemory | None:
    """Give back what this kernel no longer uses and tell who still holds memory; None without a card."""
    if "torch" in sys.modules:
        hardware.free_memory()
    found = memory()
    if found:
        print(found, flush=True)
    return found


def memory(index: int = 0) -> CardMemory | None:
    """Free and held memory of a card, as its driver tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(_physical(index))
        told = pynvml.nvmlDeviceGetMemoryInfo(handle)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # no pynvml, no driver, no card, no right to ask: nothing is known then
        return None
    holders = sorted((_holder(one) for one in running), key=lambda one: -(one.gib or 0.0))
    return CardMemory(told.free / GIB, told.total / GIB, tuple(holders))


def require_free(share: float) -> None:
    """Stop before vLLM does, and name who holds the card; `share` of it must be free."""
    found = memory()
    if found is None or found.free_gib >= share * found.total_gib:
        return
    raise CourseError(
        f"the server wants {share:.0%} of the card ({share * found.total_gib:.1f} GiB), and only {found}.",
        "a card whose memory is free", _advice(found),
    )  # fmt: skip


def _advice(found: CardMemory) -> str:
    lower = f"lower gpu-memory-utilization to {max(0.0, (found.free_gib - CONTEXT_GIB) / found.total_gib):.2f}"
    if any(one.pid == os.getpid() and (one.gib or 0) > CONTEXT_GIB for one in found.holders):
        return f"`del model, trainer` in this notebook and call serving.free_card(), or restart the kernel; or {lower}"
    return f"stop the process it names (another notebook's kernel: shut it down), or {lower}"


def _holder(told: Any) -> Holder:
    try:
        name = psutil.Process(told.pid).name()
    except psutil.Error:
        name = "a process outside this container"
    return Holder(told.pid, name, told.usedGpuMemory / GIB if told.usedGpuMemory else None)


def _physical(index: int) -> int:
    """The driver's number of a visible card; names instead of numbers (MIG, UUID) are taken as the first one."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
