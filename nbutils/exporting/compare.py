"""Is an export still the merged model? What the difference costs, in nats and in words."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbutils import display, evaluation, files, hardware, parity
from nbutils.config import Evaluation
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.evaluation.models import fit
from nbutils.exporting.make import Export, find, offer, open_export, run_job, weights_bytes
from nbutils.exporting.make import export as make_export
from nbutils.merging import is_quantized
from nbutils.merging.folder import read_config
from nbutils.serving.engine import require_engine, tensor_parallel

if TYPE_CHECKING:
    from nbutils.lesson import Lesson

# Mean KL in nats per token up to which the words hold; beyond the last the export is broken.
VERDICTS = ((0.001, "next to the same"), (0.02, "hardly differs"), (0.15, "differs a little"), (1.0, "clearly differs"))
PROMPTS = 8  # rows of a quick set
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MIN_KV_CACHE_GIB = 0.5  # what a server needs at least beside the weights


@dataclass(frozen=True)
class ParityLine:
    """One export beside the merged model it was made from; without a gap it could not be compared here."""

    export: Export
    gap: parity.Gap | None

    @property
    def verdict(self) -> str:
        if self.gap is None:
            return "not compared: too large to be read here"
        mean = self.gap.mean
        return next((words for limit, words in VERDICTS if mean <= limit), "BROKEN")

    @property
    def row(self) -> dict[str, str]:
        export, columns = self.export, self.gap.columns if self.gap else {}
        sizes = {"format": export.name, "size": f"{export.bytes / 1e6:,.1f} MB", "of merged": f"{export.ratio:.2f}"}
        return {**sizes, **columns, "verdict": self.verdict, "made by": export.method}

    @property
    def facts(self) -> dict[str, Any]:
        export = self.export
        facts = {"format": export.name, "bytes": export.bytes, "ratio": export.ratio, "seconds": export.seconds}
        return facts | {"method": export.method, "verdict": self.verdict} | (asdict(self.gap) if self.gap else {})


def check_exports(lesson: Lesson, exports: Sequence[Export]) -> list[ParityLine]:
    """Compare the exports of a lesson's merged model with the predictions that lesson 04 stored of it."""
    stored = parity.PredictionStore(lesson.run.path, about=files.stamp(lesson.run.merged))
    return [check(one, stored.fixed, stored.get("merged")) for one in exports]


def check(export: Export, fixed: parity.Fixed, merged: parity.Predictions | None = None) -> ParityLine:
    """Compare an export with the merged model on the fixed set; the merged model is read too if it is not given."""
    if not fit(export.merged_bytes / files.GIB, hardware.gpu())[0]:  # transformers dequantizes before it computes
        return ParityLine(export, None)
    return ParityLine(export, parity.gap(merged or read_merged(export, fixed), _read(export, fixed)))


def read_merged(export: Export, fixed: parity.Fixed) -> parity.Predictions:
    """The merged model read in the same way, once for all its exports."""
    size = export.merged_bytes
    return _read(Export("merged", export.merged, export.merged, size, size, 0.0, "merged"), fixed)


def _read(export: Export, fixed: parity.Fixed) -> parity.Predictions:
    """What a model predicts and answers, read in the export environment as its users load it."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="nbutils-predictions-") as place:
        logs = Path(place) / "logs.safetensors"
        job = {
            "do": "read", "format": export.name, "folder": str(export.folder.absolute()), "logs": str(logs),
            "file": export.file.name if export.file else "", "bytes": export.bytes, "fixed": asdict(fixed),
        }  # fmt: skip
        answer = run_job(job, f"reading {export.name}")
        return parity.Predictions(load_file(logs)["logs"], answers=answer["answers"])


def quick_set(folder: Path, rows: Sequence[dict[str, Any]]) -> parity.Fixed:
    """A fixed set for a model without a run: the prompts of a few rows, and the first tokens of their answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    size = Evaluation(batch_size=4, max_new_tokens=16, rows=PROMPTS)
    return parity.fixed_set(evaluation.Evaluator(folder.parent, tokenizer, rows, size, "float32"), model=folder)


def answer(folder: Path, names: Sequence[str], out: Path | None, data: Path | None, check_each: bool) -> None:
    """Make and check the exports that are named; list the formats if none is."""
    if not names:
        display.show_table(offer(folder, hardware.gpu()))
        return
    rows = _read_rows(data) if data else []
    formats = [find(name).name for name in names]  # all of them, before the first is made
    exports = [make_export(folder, name, out / name if out else None, calibration=rows) for name in formats]
    print(*exports, sep="\n")
    if check_each:
        held_back = folder.parent / "data/eval.jsonl"  # never the rows of --data
        held_back = held_back if held_back.is_file() else files.SAMPLES / "general.jsonl"
        fixed = quick_set(folder, _read_rows(held_back))
        print(f"Compared on {len(fixed.texts)} rows of {held_back}; only tables of the same rows compare.")
        display.show_table([check(one, fixed).row for one in exports])


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The chat rows of a file that lesson 02 wrote."""
    try:
        return [row for row in stored_rows(file) if row["messages"][-1]["content"]]
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        raise CourseError("exporting.no_chat_rows", file=file) from problem


@dataclass(frozen=True)
class Reference:
    """How a folder is served and compared with the merged model: the dtype, and the export if it is one."""

    served_in: str
    export: Export | None = None

    def flags(self, thinking: bool | None) -> dict[str, Any]:
        """The flags of a vLLM server that asks in that mode."""
        return {} if thinking is None else {"default-chat-template-kwargs": {"enable_thinking": thinking}}

    def compared(self, predictions: parity.PredictionStore, served: parity.Predictions) -> Any:
        """The server's predictions beside the merged model's; those of an export have a price, and cannot fail."""
        if self.export is None:
            predictions["vllm"] = served
            return parity.Report(predictions)
        line = ParityLine(self.export, found := parity.gap(predictions["merged"], served))
        verdict = f"The price of {self.export.name}, in vLLM: {line.verdict}, {found.mean:.2g} nats per token."
        return SimpleNamespace(
            verdict=verdict, table=lambda: [line.row], text=lambda: display.aligned([line.row]),
            facts=lambda: {"price": line.facts, "verdict": verdict}, require=lambda: None,
        )  # fmt: skip


def reference(folder: Path, lesson: Lesson, engine: str = "auto") -> Reference:
    """How a folder is served on this machine; stops if it cannot be."""
    gpu, dtype = lesson.gpu, hardware.DTYPES[lesson.profile.machine.precision]
    engine = hardware.engine(gpu).value if engine == "auto" else engine
    require_engine(engine)
    if is_quantized(config := read_config(folder / "config.json")):
        export = open_export(folder, lesson.run.merged)
        form = find(export.name)
        old = (gpu.capability if gpu else (0, 0)) < form.capability  # vLLM's CPU build has none of these kernels
        if old or engine == "transformers" or not form.load.startswith("vllm"):
            place = (gpu.name if gpu else "a CPU") if old else engine
            raise CourseError("exporting.cannot_serve", folder=folder, name=form.name, runs=form.runs, place=place)
        return Reference("bfloat16" if dtype == "float32" else dtype, export)  # its kernels compute in 16 bits only
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    gib = weights_bytes(folder) * BYTES[dtype] / BYTES.get(stored, BYTES[dtype]) / files.GIB
    parts = int(tensor_parallel(folder, gpu.count).value) if gpu and engine != "transformers" else 1
    most = parts * (lesson.profile.serve.gpu_memory * gpu.memory_gib - MIN_KV_CACHE_GIB) if gpu else 0.0
    if not fit(gib, gpu)[0] and (gib > most or engine == "transformers"):
        small = folder.parent / "exports" / "w4a16"
        raise CourseError("exporting.too_large_to_serve", folder=folder, gib=gib, small=small)
    return Reference(dtype)
