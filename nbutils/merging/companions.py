"""The small files beside the weights: settings, tokenizer, generation settings, the index of the shards.

Not here: the weights (streaming).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from nbutils.merging.bases import INDEX, Base
from nbutils.merging.shards import Stored
from nbutils.paths import write_json

SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.py")
TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip
VOCABULARY = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")


def write_companions(folder: Path, base: Base, adapter: Path | None, dtype: str, untied: bool) -> None:
    """Copy what belongs to the base; tokenizer and chat template are those of the training if the adapter has them."""
    own = _matching(adapter, TOKENIZER) if adapter and (adapter / "tokenizer_config.json").is_file() else set()
    whole = any(file.match(pattern) for file in own for pattern in VOCABULARY)
    tokenizer = own if whole else _over(_matching(base.folder, TOKENIZER), own)
    others = _matching(base.folder, SMALL) - _matching(base.folder, (*TOKENIZER, INDEX, "config.json"))
    for file in sorted(tokenizer | others):
        shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", _settings(base, dtype, untied))


def _over(files: set[Path], others: set[Path]) -> set[Path]:
    """The files, and the others in place of those with the same name: settings alone are no tokenizer."""
    return others | {file for file in files if file.name not in {one.name for one in others}}


def _matching(folder: Path, patterns: tuple[str, ...]) -> set[Path]:
    return {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}


def _settings(base: Base, dtype: str, untied: bool) -> dict[str, object]:
    """The base's config.json with the new type, and with the output layer untied if it was."""
    config: dict[str, object] = dict(base.config)
    config.pop("quantization_config", None)
    if dtype != "auto":
        config.pop("torch_dtype", None)  # the former name of the same thing
        config["dtype"] = dtype
    if untied:
        config["tie_word_embeddings"] = False
    return config


def write_index(folder: Path, shards: Mapping[str, Mapping[str, Stored]]) -> None:
    """The list of which weight is in which file, where there are several."""
    if len(shards) < 2:
        return
    size = sum(place.size for shard in shards.values() for place in shard.values())
    where = {name: file for file, shard in shards.items() for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))})
