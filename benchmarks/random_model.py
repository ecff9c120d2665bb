"""Makes a model of a course model's shape with random weights, for machines that cannot download one.

    python benchmarks/random_model.py Qwen2.5-7B FOLDER

The tokenizer is the tiny model's: its ids are valid in any larger vocabulary. Good for speed, memory and plumbing;
what such a model says means nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from nbutils import files
from nbutils.models import known_models


def make(name: str, folder: Path) -> None:
    """Random bfloat16 weights in the shape of `name`."""
    shape = known_models()[name]
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    config = Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=32768, tie_word_embeddings=shape.tied, dtype="bfloat16",
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    began = time.perf_counter()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(
            config, dtype=torch.bfloat16
        )  # never in float32: that is twice the memory
    model.generation_config = GenerationConfig.from_pretrained(files.TINY_MODEL)
    model.save_pretrained(folder, max_shard_size="4GB")  # as the Hub has them
    tokenizer.save_pretrained(folder)
    print(f"{model.num_parameters() / 1e9:.2f} B parameters in {folder} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
