"""One export: from a merged folder to a folder (or a GGUF file in one) that is complete or not there at all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbutils import disk, environments, paths, platforms, processes
from nbutils.errors import CourseError
from nbutils.exporting.formats import PREFIX, Format, ensure_environment, find
from nbutils.masking import mask_secrets
from nbutils.merging import cast_model
from nbutils.merging.folder import TOKENIZER_FILES, ModelFolder, model_fingerprint, open_base

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
        load = find(self.name).load.format(path=self.file or self.folder)
        lesson = "    # or lesson 05 with FOLDER set to it" if load.startswith("vllm") else ""
        return (
            f"{self.name}: {self.bytes / 1e6:,.1f} MB, {self.ratio:.2f} of the merged model ({self.method}; {made})\n"
            f"  {self.file or self.folder}\n  {load}{lesson}"
        )


def export(
    merged: Path, name: str, out: Path | None = None, *, calibration: Sequence[Any] = (), progress: bool = True
) -> Export:
    """Write a merged model in another format; a finished export of this very model is reused.

    `calibration` are train rows, texts or token lists: AWQ needs them, and with them w4a16 is made by GPTQ if the
    model fits in memory.
    """
    form, model = find(name), open_base(merged)
    out = out or merged.parent / "exports" / name
    paths.require_apart(out, model.path)
    if form.work == "cast":
        return _cast(model, form, out, progress)
    job, about = _choose_job(form, model, out, calibration)
    if paths.stamp(out) == about:
        return _finished(form, model, out, about["method"], reused=True)
    cast_first = model.dtype == "float32" and form.work in ("compress", "calibrate")  # vLLM wants 16 bits
    _require_room(form, model, out, cast_first, whole=form.whole or job["do"] == "calibrate")
    paths.make_folder(out.parent, "exports")
    if progress:
        print(f"Exporting {merged} as {name} ({about['method']}).", flush=True)
    started = time.monotonic()
    with paths.whole_folder(out, about) as folder:
        with tempfile.TemporaryDirectory(prefix=".cast-", dir=folder) if cast_first else nullcontext() as place:
            source = model.path
            if place:
                source = cast_model(source, Path(place) / source.name, "bfloat16", progress=False).folder
            places = {"source": source, "out": folder, "file": _gguf_file(form, folder)}
            job |= {key: str(path.absolute()) for key, path in places.items()}
            run_job(job, f"the export {name}", progress)
        if form.work != "gguf":
            _copy_tokenizer(model.path, folder)
    return _finished(form, model, out, about["method"], time.monotonic() - started)


def open_export(folder: Path, merged: Path) -> Export:
    """An export that was made earlier from this merged model."""
    about = paths.stamp(folder) or {}
    model = open_base(merged) if "of" in about and (merged / "config.json").is_file() else None
    if model is None or about["of"] != model_fingerprint(model):
        raise CourseError("exporting.foreign_export", folder=folder, merged=merged, exports=merged.parent / "exports")
    return _finished(find(about["format"]), model, folder, about["method"], reused=True)


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind))


def _finished(
    form: Format, model: ModelFolder, out: Path, method: str, seconds: float = 0.0, reused: bool = False
) -> Export:
    file = _gguf_file(form, out) if form.work == "gguf" else None
    sizes = weights_bytes(out), weights_bytes(model.path)
    return Export(form.name, out, model.path, *sizes, seconds, method, file, reused)


def _gguf_file(form: Format, folder: Path) -> Path:
    return folder / f"model-{form.setting}.gguf"


def _cast(model: ModelFolder, form: Format, out: Path, progress: bool) -> Export:
    """Another dtype, streamed; a model that has it already is its own export."""
    if model.dtype == form.setting:
        return _finished(form, model, model.path, "it was merged in this dtype", reused=True)
    paths.make_folder(out.parent, "exports")
    report = cast_model(model.path, out, form.setting, progress=progress)
    return _finished(form, model, out, f"cast to {form.setting}", report.seconds, report.reused)


def _copy_tokenizer(merged: Path, folder: Path) -> None:
    """Add tokenizer, chat template and generation settings; remove what belongs to the merged folder alone."""
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in merged.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    for name in (paths.STAMP, "training.json"):
        (folder / name).unlink(missing_ok=True)


def _choose_job(
    form: Format, model: ModelFolder, out: Path, calibration: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job and its stamp; GPTQ gives way to plain rounding if the model does not fit in memory."""
    rows = list(calibration)[:: max(1, len(calibration) // MAX_ROWS)][:MAX_ROWS]
    if form.setting == "awq" and not rows:
        raise CourseError("exporting.awq_needs_rows")
    job = _job(form, model, rows)
    about = _about(form, model, job)
    needed, free = _memory(model)
    if job["do"] == "calibrate" and form.work == "compress" and free < needed and paths.stamp(out) != about:
        print(
            f"[WARN] {form.name}: GPTQ needs the whole model in memory, {needed:.1f} GiB, and {free:.1f} GiB are free. "
            "It is rounded file by file instead, without your rows: a little coarser.", flush=True,
        )  # fmt: skip
        job = _job(form, model, [])
        about = _about(form, model, job)
    return job, about


def _job(form: Format, model: ModelFolder, rows: list[Any]) -> dict[str, Any]:
    """What the worker does: with calibration rows 4 bits are chosen by GPTQ or AWQ, without by rounding."""
    four_bit = form.setting in ("W4A16", "awq")
    job: dict[str, Any] = {"do": form.work, "setting": form.setting, "group": _group_size(model) if four_bit else 0}
    if four_bit and rows:
        length = min(BLOCK, model.config.get("max_position_embeddings", BLOCK))
        method = "awq" if form.setting == "awq" else "gptq"
        job |= {"do": "calibrate", "setting": method, "rows": rows, "length": length}
    return job


def _about(form: Format, model: ModelFolder, job: dict[str, Any]) -> dict[str, Any]:
    """The stamp of an export: what it was made from and how."""
    groups = f", groups of {job['group']}" if job["group"] else ""
    rows = job.get("rows", [])
    method = {
        "calibrate": f"{job['setting'].upper()} on {len(rows)} rows{groups}", "gguf": f"GGUF {job['setting']}",
        "compress": f"{job['setting']}, rounded without data{groups}",
        "int8": "8-bit integers for every row of a weight",
    }[job["do"]]  # fmt: skip
    text = json.dumps(rows, ensure_ascii=False, sort_keys=True, default=str)
    return {
        "format": form.name, "base": (paths.stamp(model.path) or {}).get("base", ""), "method": method,
        "of": model_fingerprint(model), "rows": hashlib.sha256(text.encode()).hexdigest()[:16],
    }  # fmt: skip


def _group_size(model: ModelFolder) -> int:
    """The largest group that divides the width of every layer."""
    layers = {name: tensor.shape for name, tensor in model.weights.items() if len(tensor.shape) == 2}
    widths = {shape[1] for name, shape in layers.items() if "embed" not in name and "lm_head" not in name}
    for size in GROUPS:
        if not any(width % size for width in widths):
            return size
    raise CourseError("exporting.odd_width", width=min(width for width in widths if width % GROUPS[-1]), groups=GROUPS)


def _gib(model: ModelFolder) -> float:
    return sum(tensor.size for tensor in model.weights.values()) / paths.GIB


def _memory(model: ModelFolder) -> tuple[float, float]:
    """GiB of memory that a job needs which holds the whole model, and that are free."""
    return _gib(model) * 1.2 + 1.0, platforms.free_memory_gib().value


def _require_room(form: Format, model: ModelFolder, out: Path, cast_first: bool, whole: bool) -> None:
    """Stop before a long job that disk or memory cannot hold."""
    sixteen_bit = _gib(model) / 2 if model.dtype == "float32" else _gib(model)
    needed_gib = sixteen_bit * (form.size * 1.1 + cast_first) + 0.02
    disk.require_disk(out.parent, needed_gib, f"the export {form.name}")
    needed, free = _memory(model)
    if whole and free < needed:
        raise CourseError("exporting.memory", name=form.name, needed=needed, free=free)


def run_job(job: Mapping[str, Any], title: str, progress: bool = True) -> dict[str, Any]:
    """Do a job in the export environment, in a process that ends with this kernel; its answer."""
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="nbutils-export-") as place:
        file, log, answer = (Path(place) / name for name in ("job.json", "log.txt", "answer.json"))
        file.write_text(json.dumps({**job, "answer": str(answer)}, default=str), encoding="utf-8")

        def report(seconds: float) -> None:
            if progress:
                print(f"  {title}: {seconds:.0f} s, {mask_secrets((_lines(log) or ['started'])[-1])[:90]}", flush=True)

        command = [str(python), "-c", START, str(paths.PACKAGE), str(file)]
        status = processes.run(command, environments.variables(PREFIX, VARIABLES), log, report)
        if status != 0 or not answer.exists():
            raise _failure(title, status, _lines(log))
        return dict(json.loads(answer.read_text(encoding="utf-8")))


def _lines(log: Path) -> list[str]:
    """The lines of a log that are not empty; every state of a progress bar is one."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in log.read_text("utf-8", errors="replace").splitlines())
    return [line for line in lines if line]


def _failure(title: str, status: int, lines: list[str]) -> CourseError:
    text = "\n".join(lines)
    out_of_memory = r"OutOfMemory|out of memory|Cannot allocate memory|MemoryError"
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL) or re.search(out_of_memory, text):
        return CourseError("exporting.out_of_memory", title=title)
    if re.search(r"pre-tokenizer was not recognized|Model \S+ is not supported", text):
        return CourseError("exporting.unknown_architecture", title=title)
    return CourseError("exporting.job_failed", title=title, log="\n".join(lines[-8:]))
