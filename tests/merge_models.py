"""Small random models and adapters for the tests of merging, and PEFT's own merge of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
)

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 161, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "glm4": Glm4Config}
SEEING: dict[str, Any] = {  # hybrid text layers, with a vision model beside them
    "text_config": SHAPE | {
        "intermediate_size": 128, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_ssm_dtype": "float32",
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 157, "video_token_id": 158, "vision_start_token_id": 159, "vision_end_token_id": 160,
}  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
PROMPT = torch.arange(3, 19)[None]


def make_base(folder: Path, kind: str = "qwen2", tied: bool = False, dtype: str = "bfloat16", shards: str = "") -> Path:
    """A random model in a folder; `shards`: the largest size of a file."""
    torch.manual_seed(7)
    config = CONFIGS[kind](**SHAPE, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    return folder


def make_seeing_base(folder: Path, tied: bool = False, vocabulary: int = 161, **saving: Any) -> Path:
    """A random model of Qwen3.5's kind, stored as the real ones are: 16 bits, with some weights in float32.

    It has vision weights (here of both kinds), a layer for predicting several tokens, and files of a processor.
    """
    torch.manual_seed(7)
    text = SEEING["text_config"] | {"tie_word_embeddings": tied, "vocab_size": vocabulary}
    config = Qwen3_5Config(**SEEING | {"text_config": text}, tie_word_embeddings=tied)
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder, **saving)
    file = sorted(folder.glob("*.safetensors"))[-1]
    stored = load_file(file)
    for name, weight in stored.items():
        if name.endswith(("A_log", "linear_attn.norm.weight", "merger.linear_fc1.weight")):
            stored[name] = torch.randn_like(weight, dtype=torch.float32)
    stored["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(96, 64, dtype=torch.bfloat16)
    save_file(stored, file, {"format": "pt"})
    for name in PROCESSOR_FILES:
        (folder / name).write_text(f'{{"of": "{name}"}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def load(folder: Path, dtype: str = "float32") -> Any:
    """A model from its folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def make_adapter(base: Path, folder: Path, seed: int = 11, dtype: str = "float32", **settings: Any) -> Path:
    """An adapter on that base whose every trained number was moved."""
    settings = {"r": 4, "lora_alpha": 10, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    torch.manual_seed(seed)
    model = get_peft_model(load(base), LoraConfig(**settings))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def with_adapter(base: Path, adapter: Path) -> Any:
    """The base with an adapter beside it."""
    return PeftModel.from_pretrained(load(base), adapter).eval()


def merged_by_peft(base: Path, adapter: Path, dtype: str = "float32") -> dict[str, Any]:
    """The weights PEFT makes in float32, cast to another dtype, as a state dict."""
    merged = with_adapter(base, adapter).merge_and_unload()
    return {name: weight.detach() for name, weight in merged.to(getattr(torch, dtype)).state_dict().items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder."""
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def logits(model: Any) -> torch.Tensor:
    """What a model says to the prompt, in float32."""
    with torch.inference_mode():
        return model(input_ids=PROMPT).logits.float()  # type: ignore[no-any-return]


def untied_copy(base: Path, folder: Path) -> Path:
    """The same model with an output layer of its own."""
    model = load(base, "bfloat16")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    return folder


def in_4_bits(base: Path, folder: Path, bnb_4bit_use_double_quant: bool = True, **settings: Any) -> Path:
    """The base as transformers and bitsandbytes load it in 4 bits, its weights dequantized."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig

    settings |= {"bnb_4bit_use_double_quant": bnb_4bit_use_double_quant}
    config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype="bfloat16", device_map="cpu")
    model = load(base, "bfloat16")
    for name, part in loaded.named_modules():
        if isinstance(part, Linear4bit):
            model.get_submodule(name).weight.data = dequantize_4bit(part.weight.data, part.weight.quant_state)
    model.save_pretrained(folder)
    return folder
