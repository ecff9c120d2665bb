"""Serving adapters unmerged, beside their base: the flags vLLM wants for them, read from the adapters themselves.

Not here: merging (merging). Each adapter becomes a model name of the same server; the base keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from nbutils.errors import CourseError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # these leave the base as it is


def lora_flags(
    adapters: Mapping[str, Path], model_name: str, engine: str = "vllm",
    knows_patterns: Callable[[], bool] = lambda: True,
) -> list[str]:  # fmt: skip
    """The flags that serve these adapters under these names.

    `knows_patterns`: whether the installed vLLM heeds ranks of single layers. On a CPU one slot more stays empty: vLLM
    0.32 gives requests for the base, when they share a step with those for an adapter, the weights of the last slot.
    """
    if not adapters:
        return []
    if model_name in adapters:
        raise CourseError(
            f"the base model and an adapter are both called {model_name!r}.", "a name for each",
            "choose another served-model-name, or another key in adapters",
        )  # fmt: skip
    rank = max(_rank(Path(folder), knows_patterns) for folder in adapters.values())
    if not (room := [one for one in RANKS if one >= rank]):
        raise CourseError(
            f"the adapter has rank {rank}.", f"vLLM serves adapters up to rank {max(RANKS)} unmerged",
            "merge it (lesson 04) and serve the merged folder",
        )  # fmt: skip
    modules = [f"{name}={Path(folder).absolute()}" for name, folder in adapters.items()]
    if odd := [one for one in modules if not re.fullmatch(r"\w[\w./-]*=[^=]+", one)]:
        raise CourseError(
            f"vLLM would misread the adapter {odd[0]}.", "a name of letters, digits, . / - and a path without =",
            "choose another key in adapters, or rename the folder",
        )  # fmt: skip
    several = ["--max-loras", str(len(adapters) + (engine == "vllm-cpu"))]
    return ["--enable-lora", *several, "--max-lora-rank", str(min(room)), "--lora-modules", *modules]


def _rank(folder: Path, knows_patterns: Callable[[], bool]) -> int:
    """The largest rank of an adapter; one that vLLM cannot serve unmerged is refused here, with the reason."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CourseError(
            f"{folder} is not an adapter folder ({type(problem).__name__} at adapter_config.json).",
            "a folder with adapter_config.json and adapter_model.safetensors", "give the adapter lesson 03 left",
        ) from problem  # fmt: skip
    if why := _refused(config, knows_patterns):
        raise CourseError(
            f"vLLM cannot serve this adapter unmerged: {why}.", "a LoRA adapter of linear layers, without DoRA",
            "merge it (lesson 04) and serve the merged folder",
        )  # fmt: skip
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def _refused(config: Mapping[str, object], knows_patterns: Callable[[], bool]) -> str:
    """Why vLLM refuses an adapter; empty if it takes it."""
    if config.get("peft_type") != "LORA":
        return f"its type is {config.get('peft_type')}"
    if config.get("use_dora"):
        return "it uses DoRA"
    if config.get("modules_to_save"):
        return f"it brings whole layers of its own ({config['modules_to_save']})"
    if config.get("trainable_token_indices"):
        return "it trains single tokens of the embedding"
    if (config.get("rank_pattern") or config.get("alpha_pattern")) and not knows_patterns():
        return "some of its layers have a rank or weight of their own, which this version overlooks"
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        return f"its start ({start}) changed the base's weights"
    biases = config.get("lora_bias") or config.get("bias", "none") != "none"
    return "it trains biases" if biases else ""
