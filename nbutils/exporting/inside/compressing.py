"""Smaller weights: FP8 and 4 bits through llm-compressor, 8-bit integers through torchao.

Not here: which format has which settings (formats), how it is checked (reading).
"""

from __future__ import annotations

from typing import Any

KEPT = ["re:.*lm_head", "re:.*embed_tokens"]  # the output layer and the embedding stay as they are, as vLLM expects


def compress(job: dict[str, Any]) -> dict[str, Any]:
    """Round the weights file by file, without data and without ever loading the model."""
    from llmcompressor import model_free_ptq

    scheme = _scheme(job["setting"], job["group"])
    model_free_ptq(job["source"], job["out"], scheme=scheme, ignore=KEPT, device=_device(), max_workers=1)
    return {}


def calibrate(job: dict[str, Any]) -> dict[str, Any]:
    """Round the weights so that the model changes least on the learner's own rows: GPTQ, or AWQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():  # llm-compressor 0.14 pins memory for a card before it looks whether one is there
        IntermediatesCache.pin_memory = lambda *args, **settings: None
    tokenizer = AutoTokenizer.from_pretrained(job["source"], trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto", trust_remote_code=False)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in _blocks(job, tokenizer)]
    made = oneshot(
        model=model, dataset=Dataset.from_list(rows), recipe=_recipe(job["setting"], job["group"]),
        num_calibration_samples=len(rows), max_seq_length=job["length"],
    )  # fmt: skip
    made.save_pretrained(job["out"], save_compressed=True)
    return {"blocks": len(rows)}


def _recipe(way: str, group: int) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    name = {"gptq": "W4A16", "awq": "W4A16_ASYM"}[way]
    settings = {"config_groups": {"group_0": _scheme(name, group)}, "ignore": KEPT}
    return [GPTQModifier(**settings)] if way == "gptq" else [AWQModifier(), QuantizationModifier(**settings)]


def _scheme(name: str, group: int) -> Any:
    """The preset of that name, with groups that this model's width can be cut into."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    if group:
        scheme.weights.group_size = group
    return scheme


def _blocks(job: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The calibration rows (chats, texts, or tokens) joined and cut into blocks: few long runs, not many short ones."""
    joined: list[int] = []
    for row in job["rows"]:
        if isinstance(row, dict):
            row = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        joined += tokenizer(row, add_special_tokens=False)["input_ids"] if isinstance(row, str) else row
    size = min(job["length"], len(joined))
    return [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]


def int8(job: dict[str, Any]) -> dict[str, Any]:
    """Round every weight to 8-bit integers as it is loaded, and save it so that it can be loaded again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        job["source"], dtype="auto", device_map="cpu", quantization_config=settings, trust_remote_code=False
    )
    model.save_pretrained(job["out"])
    return {}


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
