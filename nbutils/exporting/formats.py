"""The formats a merged model can be exported to: what each is for, where it runs, what makes it.

Not here: whether it can be made on this machine (offering).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from nbutils.errors import CourseError

PRESS, TURN, PACK = "llmcompressor", "convert_hf_to_gguf", "torchao"  # modules of the export environment


@dataclass(frozen=True)
class Format:
    """`work` is what makes it, with `setting`; `needs` is the module that does; `size` a share of the 16-bit model."""

    name: str
    purpose: str
    runs: str
    work: str
    setting: str
    needs: str = ""
    size: float = 1.0
    capability: tuple[int, int] = (0, 0)  # the least a card must have to compute with it
    whole: bool = False  # the model must be in memory at once
    load: str = "vllm serve {path}"


LLAMA = "llama-cli -m {path}    # llama.cpp; Ollama and LM Studio read the same file"
FORMATS: dict[str, Format] = {one.name: one for one in (
    Format("bf16", "the model as it is, also for training on", "vLLM, transformers; cards from Ampere on",
           "cast", "bfloat16", capability=(8, 0)),
    Format("fp16", "the same for cards without bfloat16", "vLLM, transformers; every card, T4 included",
           "cast", "float16"),
    Format("fp8", "half the size and faster, next to no loss", "vLLM; Ada and Hopper compute in it, Ampere only stores",
           "compress", "FP8_DYNAMIC", PRESS, 0.55, capability=(8, 0)),
    Format("w4a16", "a quarter of the size, fastest for one user", "vLLM; cards from Turing (T4) on",
           "compress", "W4A16", PRESS, 0.35, capability=(7, 5)),
    Format("awq", "like w4a16, but it keeps what matters on your data", "vLLM; cards from Turing (T4) on",
           "calibrate", "awq", PRESS, 0.35, capability=(7, 5), whole=True),
    Format("int8", "half the memory on a plain CPU", "transformers with torchao, any CPU",
           "int8", "", PACK, 0.6, whole=True,
           load='AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")    # pip install torchao'),
    Format("gguf-f16", "for llama.cpp, Ollama, LM Studio; also the start for their smaller forms", "laptops, with or "
           "without a card", "gguf", "f16", TURN, 1.05, load=LLAMA),
    Format("gguf-q8_0", "the same in 8 bits, next to no loss", "laptops, with or without a card",
           "gguf", "q8_0", TURN, 0.6, load=LLAMA),
)}  # fmt: skip
# What only llama.cpp's own program makes: shown with the command, not made here.
ELSEWHERE = {"gguf-q4_k_m": "llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m"}


def find(name: str) -> Format:
    """The format of that name."""
    if name in FORMATS:
        return FORMATS[name]
    if name in ELSEWHERE:
        raise CourseError(
            f"{name} is made by a program of llama.cpp, which is not part of this course.", ", ".join(FORMATS),
            f"export gguf-f16, install llama.cpp, then: {ELSEWHERE[name]}",
        )  # fmt: skip
    near = difflib.get_close_matches(name, FORMATS, 1)
    raise CourseError(
        f"the export format is {name!r}.", ", ".join(FORMATS), f"did you mean {near[0]}?" if near else "choose one"
    )


def chosen(text: str) -> list[str]:
    """The formats of a parameter such as "fp8, gguf-q8_0", each once and checked."""
    names = [word.strip().lower() for word in text.replace(";", ",").split(",") if word.strip()]
    return [find(name).name for name in dict.fromkeys(names)]
