"""Former names of a profile's values, before its blocks became keyword arguments of the libraries.

Profiles, `SET` and runs of that time are read through this one table; nothing else knows the old names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nbutils.language import joined, tr

RENAMED = {  # values kept as they are
    "lora.rank": "lora.r",
    "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout",
    "quantization.double": "quantization.bnb_4bit_use_double_quant",
    "train.max_length": "sft.max_length",
    "train.micro_batch": "sft.per_device_train_batch_size",
    "train.epochs": "sft.num_train_epochs",
    "train.learning_rate": "sft.learning_rate",
    "train.scheduler": "sft.lr_scheduler_type",
    "train.warmup_ratio": "sft.warmup_steps",
    "train.weight_decay": "sft.weight_decay",
    "train.max_grad_norm": "sft.max_grad_norm",
    "train.optimizer": "sft.optim",
    "train.packing": "sft.packing",
    "train.save_steps": "sft.save_steps",
    "train.keep_checkpoints": "sft.save_total_limit",
    "train.logging_steps": "sft.logging_steps",
    "train.keep_best": "sft.load_best_model_at_end",
    "train.validation_rows": "course.validation_rows",
    "train.early_stopping": "course.early_stopping_patience",
    "machine.attention": "from_pretrained.attn_implementation",
    "data.source": "course.data",
    "data.rows": "course.rows",
    "evaluation.batch_size": "course.evaluation_batch_size",
    "evaluation.max_new_tokens": "course.max_new_tokens",
    "evaluation.rows": "course.evaluation_rows",
    "serve.max_model_len": "vllm.max_model_len",
    "serve.gpu_memory": "vllm.gpu_memory_utilization",
    "serve.max_num_seqs": "vllm.max_num_seqs",
}
RECODED: dict[str, tuple[str, dict[Any, Any]]] = {  # some values are called otherwise too
    "machine.precision": ("from_pretrained.dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}),
    "machine.liger": ("sft.use_liger_kernel", {"on": True, "off": False}),
    "train.max_steps": ("sft.max_steps", {0: -1}),
}
SPLIT: dict[str, tuple[str, dict[Any, dict[str, Any]]]] = {  # one value was what are several now
    "quantization.type": ("quantization.bnb_4bit_quant_type", {
        "none": {"quantization.load_in_4bit": False, "quantization.bnb_4bit_quant_type": "nf4"},
        "nf4": {"quantization.load_in_4bit": True, "quantization.bnb_4bit_quant_type": "nf4"},
        "fp4": {"quantization.load_in_4bit": True, "quantization.bnb_4bit_quant_type": "fp4"},
    }),
    "train.gradient_checkpointing": ("sft.gradient_checkpointing", {
        "auto": {"sft.gradient_checkpointing": "auto", "sft.activation_offloading": "auto"},
        "off": {"sft.gradient_checkpointing": False, "sft.activation_offloading": False},
        "on": {"sft.gradient_checkpointing": True, "sft.activation_offloading": False},
        "offload": {"sft.gradient_checkpointing": True, "sft.activation_offloading": True},
    }),
}  # fmt: skip
BATCH, MICRO_BATCH = "train.batch", "train.micro_batch"
DROPPED = ("train.shorten",)
MOST_TOLD = 6  # names in one line
_SAID: set[tuple[str, ...]] = set()
NAMES = (*RENAMED, *RECODED, *SPLIT, BATCH, *DROPPED)


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, with the names and values of today."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _today(name, value)
    if BATCH in settings:
        found |= _step(settings)
    elif MICRO_BATCH in settings:  # it cut a step of whatever size
        found["sft.gradient_accumulation_steps"] = "auto"
    return found


def _today(name: str, value: Any) -> dict[str, Any]:
    """What one setting is today."""
    if name in RENAMED:
        return {RENAMED[name]: value}
    if name in RECODED:
        new, values = RECODED[name]
        return {new: values.get(value, value)} if isinstance(value, str | int) else {new: value}
    if name in SPLIT:
        new, meanings = SPLIT[name]
        unknown = {new: value}  # never allowed: the schema says so under the new name
        return meanings.get(value, unknown) if isinstance(value, str) else unknown
    return {} if name in (BATCH, *DROPPED) else {name: value}


def _step(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of an optimizer step, which was `train.batch`: packed rows where rows are packed, else conversations."""
    size, packing = settings.get(MICRO_BATCH, "auto"), settings.get("train.packing", "auto")
    batch = settings[BATCH]
    conversations: Any = "auto"
    accumulation: Any = "auto"
    if isinstance(batch, int) and isinstance(size, int) and size > 0 and batch % size == 0:
        accumulation = batch // size
    elif batch != "auto" and size != "auto":  # they never went together: the schema says so under the new names
        conversations, accumulation = batch, size
    elif batch != "auto" and packing is True:  # in packed rows, which cannot be counted in conversations
        size, accumulation = 1, batch
    elif batch != "auto":
        conversations = batch
    return {
        "sft.per_device_train_batch_size": size,
        "sft.gradient_accumulation_steps": accumulation,
        "course.conversations_per_step": conversations,
    }


def fingerprint(found: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint of a training, as it would be written today."""
    if "train" not in found:
        return found
    train = {f"train.{name}": value for name, value in found["train"].items() if name not in ("batch", "optimizer")}
    made = {name: found[name] for name in ("model", "data", "seed")}
    made |= {"sft": _block("sft", train), "rows_per_step": found["train"]["batch"]}
    if "method" in found:
        method, four_bit = found["method"]
        kept = {f"quantization.{name}": value for name, value in four_bit.items()}
        made |= {"method": method, "quantization": _block("quantization", kept) if method == "qlora" else {}}
        made["lora"] = _block("lora", {f"lora.{name}": value for name, value in found["lora"].items()})
    return made


def _block(block: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{block}."): value for name, value in translated(settings).items()}


def say(settings: Mapping[str, Any], where: str) -> None:
    """Say once, on stderr, what the former names among these settings are called now."""
    former = [name for name in settings if name in NAMES]
    if not former or (where, *former) in _SAID:
        return
    _SAID.add((where, *former))
    told = []
    for name in former[:MOST_TOLD]:
        if news := joined(translated({name: settings[name]})):
            told.append(tr("{old} is now {new}", old=name, new=news))
        else:
            told.append(tr("{old} has no effect any more", old=name))
    line = f"{where}: {joined(told, ';')}"
    if len(former) > MOST_TOLD:
        line += tr("; all new names: docs/reference.md")
    print(line, file=sys.stderr)
