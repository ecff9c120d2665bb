"""Former names of a profile's values, before its blocks became keyword arguments of the libraries.

Profiles, `SET` and runs of that time are read through this one table; nothing else knows the old names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbutils import files

Settings = dict[str, Any]  # {dotted name: value}
Fingerprint = dict[str, Any]  # what a training was made with, in blocks
TABLE: dict[str, dict[str, Any]] = files.read_yaml(Path(__file__).with_suffix(".yaml"))
RENAMED = TABLE["renamed"]
CHANGED = TABLE["changed"]
BATCH = "train.batch"
MICRO_BATCH = "train.micro_batch"
DROPPED = "train.shorten"  # without effect any more
FORMER = (*RENAMED, *CHANGED, BATCH, DROPPED)


def translated(settings: Settings) -> Settings:
    """Settings by dotted name, with the names and values of today."""
    today: Settings = {}
    for name, value in settings.items():
        for new, values in CHANGED.get(name, {}).items():
            today[new] = values.get(str(value), value)
        if name in RENAMED or name not in FORMER:
            today[RENAMED.get(name, name)] = value
    if BATCH in settings:
        for name, value in _step(settings).items():
            if name not in settings:
                today[name] = value
    elif MICRO_BATCH in settings:  # it cut a step of whatever size
        today.setdefault("sft.gradient_accumulation_steps", "auto")
    return today


def _step(settings: Settings) -> Settings:
    """The rows of an optimizer step, which was `train.batch`: packed rows where rows are packed, else conversations."""
    batch = settings[BATCH]
    size = settings.get(MICRO_BATCH, "auto")
    conversations: Any = "auto"
    accumulation: Any = "auto"
    if batch == "auto" or (size == "auto" and settings.get("train.packing") is not True):
        conversations = batch
    else:
        size = 1 if size == "auto" else size  # packed rows are no number of conversations
        is_whole = isinstance(batch, int) and isinstance(size, int) and size and batch % size == 0
        accumulation = batch // size if is_whole else f"{batch} / {size}"  # no number: the schema says so
    return {
        "sft.per_device_train_batch_size": size,
        "sft.gradient_accumulation_steps": accumulation,
        "course.conversations_per_step": conversations,
    }


def fingerprint(former: Fingerprint) -> Fingerprint:
    """The fingerprint of a training, as it would be written today."""
    if "train" not in former:
        return former
    train = dict(former["train"])
    today = {name: former[name] for name in ("model", "data", "seed")}
    today["rows_per_step"] = train.pop("batch")
    train.pop("optimizer", None)
    today["sft"] = _block("train", train)
    if "method" in former:
        method, four_bits = former["method"]
        today["method"] = method
        today["quantization"] = _block("quantization", four_bits) if method == "qlora" else {}
        today["lora"] = _block("lora", former["lora"])
    return today


def _block(former: str, values: Settings) -> Settings:
    today = translated({f"{former}.{name}": value for name, value in values.items()})
    return {name.rpartition(".")[2]: value for name, value in today.items()}
