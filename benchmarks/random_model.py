"""Makes a model of a course model's shape with random weights, for machines that cannot download one.

    python benchmarks/random_model.py Qwen2.5-7B FOLDER

The tokenizer is the tiny model's: its ids are valid in any larger vocabulary. Good for speed, memory and plumbing;
what such a model says means nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from nbutils import files
from nbutils.models import Shape, known_models

VISION = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}  # of the smallest Qwen3.5


def empty_model(shape: Shape, **tokens: int | None) -> PreTrainedModel:
    """A model of this shape with transformers' initial weights: a Qwen2, or a Qwen3.5 with its vision weights."""
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
        "max_position_embeddings": 32768, "tie_word_embeddings": shape.tied, **tokens,
    }  # fmt: skip
    linear = shape.linear_attention
    if linear is None:
        return Qwen2ForCausalLM._from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)  # float32 takes twice as much
    names = set(type(linear).model_fields) - {"layers"}
    sizes |= {"head_dim": shape.head_dim} | {f"linear_{name}": getattr(linear, name) for name in names}
    vision = VISION | {"out_hidden_size": shape.hidden}
    config = Qwen3_5Config(text_config=sizes, vision_config=vision, tie_word_embeddings=shape.tied)
    return Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)


def make(name: str, folder: Path) -> None:
    """Random bfloat16 weights in the shape of `name`."""
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    began = time.perf_counter()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = empty_model(
            known_models()[name],
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    model.generation_config = GenerationConfig.from_pretrained(files.TINY_MODEL)
    model.save_pretrained(folder, max_shard_size="4GB")  # as the Hub has them
    tokenizer.save_pretrained(folder)
    print(f"{model.num_parameters() / 1e9:.2f} B parameters in {folder} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
