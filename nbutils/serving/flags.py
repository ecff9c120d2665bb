"""An engine's flags as words of a command line, those of LoRA adapters among them.

Not here: which flags to set (the lesson; what a GPU needs is in engine) and flags the engine refuses (logs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nbutils.errors import CourseError
from nbutils.serving.engine import table

Flags = Mapping[str, Any]
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
PLAIN_INIT = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # these leave the base weights as they are


def normalize(flags: Flags) -> dict[str, Any]:
    """Flags by name as vLLM spells them, without those left at None; what Server decides itself is refused."""
    found = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items() if value is not None}
    for name, value in found.items():
        bare = re.split(r"[=.]", name)[0]
        for reserved, instead in table().reserved_flags.items():
            if reserved.startswith(bare) or fnmatch(bare, reserved):  # argparse reads --hos as --host
                raise CourseError("serving.reserved_flag", name=bare, instead=instead)
        if any(str(one).startswith("--") for one in _values(value)):
            raise CourseError("serving.flag_in_value", name=bare)
    return found


def to_words(flags: Flags) -> list[str]:
    """Flags as words: True is a bare flag, False its `--no-` form, a mapping is written as JSON."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--no-{name}" if value is False else f"--{name}")
        words += [json.dumps(one) if isinstance(one, Mapping) else str(one) for one in _values(value)]
    return words


def _values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def lora_flags(adapters: Mapping[str, Path], model_name: str, engine: str) -> dict[str, Any]:
    """The flags that serve LoRA adapters unmerged, each under its own name, beside their base model.

    On a CPU one slot stays empty: when requests for base and adapter share a step, vLLM 0.32 computes those for the
    base with the weights of the last slot.
    """
    if not adapters:
        return {}
    if engine == "transformers":
        raise CourseError("serving.adapters_need_vllm")
    rank = max(map(_rank, adapters.values()))
    modules = [f"{name}={folder.absolute()}" for name, folder in adapters.items()]
    for name, module in zip(adapters, modules, strict=True):
        if name == model_name or not re.fullmatch(r"\w[\w./-]*=[^=]+", module):
            raise CourseError("serving.adapter_name", module=module, model=model_name)
    return {
        "enable-lora": True,
        "max-loras": len(adapters) + (engine == "vllm-cpu"),
        "max-lora-rank": min(size for size in LORA_RANKS if size >= rank),
        "lora-modules": modules,
    }


def _rank(folder: Path) -> int:
    """The rank of an adapter; one that vLLM cannot serve unmerged is refused with the reason."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CourseError("serving.not_an_adapter", folder=folder, error=type(error).__name__) from error
    rank, init = int(config.get("r") or 0), config.get("init_lora_weights", True)
    reasons = {
        f"its type is {config.get('peft_type')}": config.get("peft_type") != "LORA",
        "it uses DoRA": config.get("use_dora"),
        "it has whole layers of its own": config.get("modules_to_save"),
        "it trains single tokens of the embedding": config.get("trainable_token_indices"),
        "some layers have a rank or alpha of their own": config.get("rank_pattern") or config.get("alpha_pattern"),
        f"its initialization ({init}) changed the base": isinstance(init, str) and init.lower() not in PLAIN_INIT,
        "it trains biases": config.get("lora_bias") or config.get("bias", "none") != "none",
        f"its rank is {rank}, and vLLM's limit is {LORA_RANKS[-1]}": rank > LORA_RANKS[-1],
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise CourseError("serving.adapter_unsupported", folder=folder, reason=reason)
    return rank
