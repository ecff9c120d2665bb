"""Former names of a profile's values, before its blocks became keyword arguments of the libraries.

Profiles, `SET` and runs of that time are read through this one table; nothing else knows the old names.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]  # {dotted name: value}
Fingerprint = dict[str, Any]  # what a training was made with, in blocks
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
CHANGED: dict[str, dict[str, dict[str, Any]]] = {  # what some values are today; the others are kept
    "machine.precision": {"from_pretrained.dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}},
    "machine.liger": {"sft.use_liger_kernel": {"on": True, "off": False}},
    "train.max_steps": {"sft.max_steps": {"0": -1}},
    "quantization.type": {
        "quantization.bnb_4bit_quant_type": {"none": "nf4"},
        "quantization.load_in_4bit": {"none": False, "nf4": True, "fp4": True},
    },
    "train.gradient_checkpointing": {
        "sft.gradient_checkpointing": {"off": False, "on": True, "offload": True},
        "sft.activation_offloading": {"off": False, "on": False, "offload": True},
    },
}
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
