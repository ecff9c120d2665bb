"""An engine's flags as words of a command line, those of LoRA adapters among them.

Not here: which flags to set (the lesson; what a GPU needs is in engine).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nbutils import files, merging
from nbutils.errors import CourseError
from nbutils.serving.engine import table

Flags = Mapping[str, Any]
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
NOT_SERVED = ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern", "lora_bias")


def normalize(flags: Flags) -> dict[str, Any]:
    """Flags by name as vLLM spells them, without those left at None; what Server decides itself is refused."""
    found = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items() if value is not None}
    for name in found:
        bare = re.split(r"[=.]", name)[0]
        for reserved, instead in table()["reserved_flags"].items():
            if reserved.startswith(bare) or fnmatch(bare, reserved):  # argparse reads --hos as --host
                raise CourseError("serving.reserved_flag", name=bare, instead=instead)
    return found


def to_words(flags: Flags) -> list[str]:
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
    """The flags that serve LoRA adapters unmerged, each under its own name, beside their base model.

    On a CPU one slot stays empty: when requests for base and adapter share a step, vLLM 0.32 computes those for the
    base with the weights of the last slot.
    """
    if not adapters:
        return {}
    rank = max(map(_rank, adapters.values()))
    return {
        "enable-lora": True,
        "max-loras": len(adapters) + (engine == "vllm-cpu"),
        "max-lora-rank": min(size for size in LORA_RANKS if size >= rank),
        "lora-modules": [f"{name}={folder.absolute()}" for name, folder in adapters.items()],
    }


def _rank(folder: Path) -> int:
    """The rank of an adapter; one that vLLM refuses, or would serve wrong, is refused with the reason."""
    try:
        config = files.read_json(folder / "adapter_config.json")
    except (OSError, ValueError) as error:
        reason = f"its adapter_config.json cannot be read ({type(error).__name__})"
        raise CourseError("serving.adapter_unsupported", folder=folder, reason=reason) from error
    problems = [name for name in NOT_SERVED if config.get(name)]
    problems += ["peft_type"] if config.get("peft_type") != "LORA" else []
    problems += ["bias"] if config.get("bias", "none") != "none" else []
    problems += ["init_lora_weights"] if merging.init_changes_base(config) else []
    problems += ["r"] if config.get("r", 0) > LORA_RANKS[-1] else []
    if problems:
        reason = ", ".join(f"{name} is {config.get(name)}" for name in problems)
        raise CourseError("serving.adapter_unsupported", folder=folder, reason=reason)
    return int(config["r"])
