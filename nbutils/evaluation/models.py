"""The models of a lesson: whether they fit this machine, how they are loaded, and what base and merged model answer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbutils import data, disk, files, hardware, merging, platforms, record
from nbutils.chat import may_skip_thinking
from nbutils.evaluation.evaluator import Evaluator
from nbutils.evaluation.inference import Answer, context_length
from nbutils.evaluation.report import Comparison, write_report

if TYPE_CHECKING:
    from nbutils.lesson import Lesson

WORK_GIB = 1.5  # beside the weights: CUDA itself, activations and logits
SPARE_RAM_GIB = 2.0  # for this program and its neighbors
LOADED = 1.1  # weights as loaded, with what torch leaves between them
IN_4_BITS = "weights in 4 bits"  # how models that do not fit are asked


@dataclass(frozen=True)
class Placement:
    """Whether the unquantized model fits, why, and what `from_pretrained` is given to load it unquantized or not."""

    fits: bool
    reason: str
    unquantized: dict[str, Any]  # spread over GPU, RAM and disk if it does not fit
    in_4_bits: dict[str, Any]

    @property
    def loading(self) -> dict[str, Any]:
        """How to load a model that answers questions."""
        return self.unquantized if self.fits else self.in_4_bits

    def clear(self) -> None:
        """Delete what was put on disk."""
        if "offload_folder" in self.unquantized:
            shutil.rmtree(self.unquantized["offload_folder"], ignore_errors=True)

    def __str__(self) -> str:
        return self.reason


def place_model(lesson: Lesson) -> Placement:
    """Whether the lesson's model fits into free memory, and how to load it."""
    from transformers import BitsAndBytesConfig

    four_bit, dtype = lesson.profile.quantization, hardware.DTYPES[lesson.profile.machine.precision]
    gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype)
    fits, memory, place = fit(gib, lesson.gpu)
    whole: dict[str, Any] = {"dtype": dtype, "device_map": {"": 0 if lesson.gpu else "cpu"}}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=four_bit.type, bnb_4bit_use_double_quant=four_bit.double,
        bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip
    in_4_bits = whole | {"quantization_config": quantization}
    if fits:
        return Placement(True, f"{gib:.1f} GiB of weights fit into {place}", whole, in_4_bits)
    scratch = lesson.scratch / "offload"
    disk.require_disk(scratch, gib, "what GPU and RAM cannot hold of the model")
    reason = f"{gib:.1f} GiB of weights do NOT fit into {place}: questions are asked in 4 bits"
    spread = {"dtype": dtype, "device_map": "auto", "max_memory": memory, "offload_folder": str(scratch)}
    return Placement(False, reason, spread, in_4_bits)


def fit(gib: float, gpu: hardware.GPU | None) -> tuple[bool, dict[int | str, str], str]:
    """Whether weights of this size fit; if not, what they may take of GPU and RAM; and where they would lie."""
    free, ram = _free_gpu_gib() if gpu else None, platforms.free_memory_gib().value
    place = f"RAM ({ram:.1f} GiB free)" if free is None else f"the GPU ({free:.1f} GiB free)"
    return *decide(gib, free, ram), place


def decide(gib: float, gpu_gib: float | None, ram_gib: float) -> tuple[bool, dict[int | str, str]]:
    """The same for so much free memory."""
    shares: dict[int | str, float] = {} if gpu_gib is None else {0: gpu_gib - 2 * WORK_GIB}
    shares["cpu"] = (ram_gib - SPARE_RAM_GIB) / 2
    free = ram_gib - SPARE_RAM_GIB if gpu_gib is None else gpu_gib - WORK_GIB
    return gib * LOADED <= free, {place: f"{max(0, int(share * 1024))}MiB" for place, share in shares.items()}


def _free_gpu_gib() -> float:
    import torch

    hardware.free_memory()
    return float(torch.cuda.mem_get_info()[0]) / files.GIB


def load_model(folder: str | Path, loading: dict[str, Any]) -> Any:
    """The model in `folder`; a CPU's bitsandbytes is kept from repacking 4-bit weights, which training does not do."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, **loading, trust_remote_code=False)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


def open_evaluator(
    lesson: Lesson, folder: str | Path, tokenizer: Any, *, in_4_bits: bool = False, rows: int = 0, limit: int = 0
) -> Evaluator:
    """The held-back rows for the model in `folder`; rows that do not fit its context, or `limit`, are left out."""
    from transformers import AutoConfig

    _, held_back = data.load(lesson.run.data)
    size, dtype = lesson.profile.evaluation, hardware.DTYPES[lesson.profile.machine.precision]
    return Evaluator(
        lesson.run.path, tokenizer, held_back, size.model_copy(update={"rows": rows or size.rows}),
        f"{dtype}, {IN_4_BITS}" if in_4_bits else dtype,
        thinking=False if may_skip_thinking(tokenizer, held_back) else None,
        limit=context_length(AutoConfig.from_pretrained(folder, trust_remote_code=False), limit),
    )  # fmt: skip


def compare_models(lesson: Lesson, folder: Path, placement: Placement, server: Any = None) -> Comparison:
    """Base and merged model on the held-back and the general rows, and the HTML report.

    Answers are stored as they come. A `server` (serving.running) that serves this folder gives the merged model's.
    """
    from transformers import AutoTokenizer

    from nbutils.training import model_fingerprint

    tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter, trust_remote_code=False)
    evaluator = open_evaluator(lesson, lesson.model, tokenizer, in_4_bits=not placement.fits)
    general = evaluator.general()
    thinking = ", asked without thinking" if evaluator.thinking is False else ""
    rows = f"{len(evaluator.rows)} held-back rows and {len(general.rows)} general ones{thinking}"
    print(f"{rows}; answers of at most {evaluator.max_new_tokens} tokens")
    results, general_results = [], []
    for name, path, fingerprint, answers_by in (
        ("base", lesson.model, model_fingerprint(lesson), None),
        ("merged", folder, files.stamp(folder), server),
    ):
        model = load_model(path, placement.loading)
        results.append(evaluator.evaluate(name, model, fingerprint, answers_by))
        general_results.append(general.evaluate(name, model, fingerprint, answers_by))
        del model
        hardware.free_memory()
    comparison = Comparison(results, general_results, evaluator)
    versions = ", ".join(f"{name} {number}" for name, number in record.versions().items())
    machine = f"{lesson.platform.name}, {lesson.gpu or 'CPU only'}"
    about = {"model": lesson.model_name, "machine": machine, "versions": versions}
    write_report(comparison.page, lesson.run.name, evaluator, comparison, about)
    return comparison


class StoredAnswers(NamedTuple):
    """What the merged model answered in lesson 04, and the evaluator with these questions, references and tools."""

    evaluator: Evaluator
    answers: list[Answer]


def stored_answers(lesson: Lesson, folder: Path, *, rows: int = 0, limit: int = 0) -> StoredAnswers | None:
    """Lesson 04's answers of the merged model in `folder`, or of the one an export was made from; None if it left none.

    `rows`: the first ones only. `limit`: those that fit a context of so many tokens. `evaluator.dtype` says how the
    model computed ("float32", "bfloat16, weights in 4 bits", ...), `evaluator.thinking` how it was asked.
    """
    from transformers import AutoTokenizer

    about, merged = files.stamp(folder) or {}, folder
    if "of" in about:  # an export
        merged = lesson.run.merged
        if (
            not (merged / "config.json").is_file()
            or merging.model_fingerprint(merging.open_base(merged)) != about["of"]
        ):
            return None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for in_4_bits in (False, True):
        asked = open_evaluator(lesson, merged, tokenizer, in_4_bits=in_4_bits)
        known = {tuple(one.prompt_ids): one for one in asked.kept("merged", files.stamp(merged), merged)}
        if not known:
            continue
        chosen = open_evaluator(lesson, merged, tokenizer, in_4_bits=in_4_bits, rows=rows, limit=limit)
        if all(tuple(prompt) in known for prompt in chosen.prompts):
            return StoredAnswers(chosen, [known[tuple(prompt)] for prompt in chosen.prompts])
    return None
