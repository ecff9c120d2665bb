"""The model that lessons 05 and 09 serve: the flags it needs, and whether its server says what lesson 04 stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbutils import display, evaluation, files, hardware, merging, parity, profiles, record, serving
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.evaluation.comparison import fit
from nbutils.exporting.make import Export, ParityLine, find_format, open_export, weights_bytes
from nbutils.language import tr
from nbutils.models import read_config
from nbutils.serving.engine import require_engine, tensor_parallel

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MIN_KV_CACHE_GIB = 0.5  # what a server needs at least beside the weights
NOTHING_STORED = "Lesson 04 stored nothing for this model and precision: there is nothing to compare with."
ROUNDING = "In 16 bits vLLM and transformers round differently; where two tokens are nearly tied, another may win."


@dataclass(frozen=True)
class ServerComparison:
    """What came of a comparison in a sentence, the numbers for facts.json, and the rows of a table."""

    text: str
    numbers: dict[str, Any]
    table: list[dict[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def show(self, rows: int = 4) -> None:
        """The first rows of the table."""
        display.show_table(self.table[:rows], tr("The server's answers"))

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        return self.numbers


class ServedModel:
    """A model folder (the merged model, an export of it, or any other) and the held-out questions for it."""

    def __init__(self, lesson: record.LessonLike, folder: str = "", engine: str = "auto", rows: int = 0) -> None:
        from transformers import AutoTokenizer

        self.lesson, self.merged = lesson, lesson.run.merged
        given = Path(folder).expanduser() if folder else self.merged
        if any(given.glob("*.gguf")):
            raise CourseError(
                tr("{folder} has GGUF weights: they are for llama.cpp, Ollama and LM Studio.", folder=given),
                todo=tr("Serve the merged model (leave FOLDER empty), or set EXPORTS to another format in lesson 08."),
            )
        self.folder = Path(profiles.model_folder(given))
        self.is_merged = self.folder.resolve() == self.merged.resolve()
        self.dtype, self.export = serving_dtype(self.folder, lesson, engine)  # stops if it cannot be served here
        size: Any = {"rows": rows, "limit": lesson.profile.vllm.max_model_len}
        if found := evaluation.stored_answers(lesson, self.folder, **size):
            self.evaluator = found.evaluator
        else:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
            self.evaluator = evaluation.open_evaluator(lesson, self.folder, tokenizer, **size)
        self.stored, self.questions = found.answers if found else None, self.evaluator.questions

    @property
    def flags(self) -> dict[str, Any]:
        """The flags this GPU and this model need; the lesson chooses the others."""
        own = {name: choice.value for name, choice in serving.flags_for(self.lesson.gpu, self.folder).items()}
        if self.evaluator.thinking is not None:
            own["default-chat-template-kwargs"] = {"enable_thinking": self.evaluator.thinking}
        return own | {"dtype": self.dtype}

    def ask(self, server: serving.Server, name: str = "") -> list[Answer]:
        """The server's greedy answers to all questions."""
        return serving.ask(
            server.client(), name or server.model_name, self.questions, self.evaluator.max_new_tokens,
            tools=self.evaluator.tools, token_ids=server.environment.engine != "transformers",
            at_once=self.lesson.profile.vllm.max_num_seqs,
        )  # fmt: skip

    def compare_answers(self, server: serving.Server) -> ServerComparison:
        """Ask the server, and stop if the merged model does not answer as in lesson 04; an export is only reported."""
        served, evaluator = self.ask(server), self.evaluator
        text, identical, prompts, total = tr(NOTHING_STORED), 0, 0, 0
        if self.stored:
            found = serving.compare(served, self.stored)
            if self.is_merged:
                found.require(evaluator.dtype)
            values = {"dtype": tr(evaluator.dtype), "found": found}
            text = tr("Server and lesson 04 (transformers, {dtype}): {found}", **values)
            text += f"\n{tr(ROUNDING)}" if found.differences and evaluator.dtype != "float32" else ""
            identical, prompts, total = found.identical, found.same_prompts, found.total
        said, before = ([answer.text for answer in answers] for answers in (served, self.stored or []))
        columns = ({tr("lesson 04"): before} if before else {}) | {tr("server"): said}
        numbers = {
            "folder": str(self.folder), "rows_left_out": evaluator.left_out,
            "identical_answers": {"count": identical, "total": total},
            "identical_prompts": {"count": prompts, "total": total},
            "exact_match": evaluation.exact_match(said, evaluator.references),
        }  # fmt: skip
        table = evaluation.before_after_table(self.questions, evaluator.references, columns, rows=len(served))
        return ServerComparison(text, numbers, table)

    def compare_predictions(self, server: serving.Server) -> ServerComparison:
        """The server's predictions on lesson 04's fixed set beside the merged model's; stops if it is another model."""
        if server.environment.engine == "transformers":
            return ServerComparison(tr("`transformers serve` does not return predictions."), {"parity": {}})
        stored = (self.is_merged or self.export) and (self.evaluator.folder / "parity.json").is_file()
        about = files.stamp(self.merged)
        if not stored or "merged" not in (store := parity.PredictionStore(self.lesson.run.path, about=about)):
            return ServerComparison(tr(NOTHING_STORED), {"parity": {}})
        return self.judge(store, parity.measure_server(server.url, server.model_name, store.fixed, server.api_key))

    def judge(self, store: parity.PredictionStore, served: parity.Predictions) -> ServerComparison:
        """The server's predictions beside the merged model's; those of an export have a price, and cannot fail."""
        if self.export:
            line = ParityLine(self.export, found := parity.gap(store["merged"], served))
            values = {"name": self.export.name, "verdict": tr(line.verdict), "mean": found.mean}
            verdict = tr("The price of {name}, in vLLM: {verdict}, {mean:.2g} nats per token.", **values)
            facts, table = {"price": line.facts, "verdict": verdict}, [line.row]
        else:
            store["vllm"] = served
            report = parity.Report(store)
            report.require()
            verdict, facts, table = report.verdict.splitlines()[-1], report.facts(), report.table()
        text = tr("At {count} positions: {verdict}", count=store.fixed.positions, verdict=verdict)
        return ServerComparison(text, {"parity": facts}, table)


def serving_dtype(folder: Path, lesson: record.LessonLike, engine: str = "auto") -> tuple[str, Export | None]:
    """The dtype a folder is served in on this machine, and the export if it is one; stops if it cannot be served."""
    gpu, dtype = lesson.gpu, lesson.profile.from_pretrained.dtype
    engine = hardware.engine(gpu).value if engine == "auto" else engine
    require_engine(engine)
    if merging.is_quantized(config := read_config(folder / "config.json")):
        export = open_export(folder, lesson.run.merged)
        form = find_format(export.name)
        old = (gpu.capability if gpu else (0, 0)) < form.capability  # vLLM's CPU build has none of these kernels
        if old or engine == "transformers" or not form.load.startswith("vllm"):
            place = (gpu.name if gpu else tr("a CPU")) if old else engine
            raise CourseError(
                tr(
                    "{folder} has {name} weights, and {place} cannot compute with them.",
                    folder=folder,
                    name=form.name,
                    place=place,
                ),
                allowed=tr("{name} runs in: {runs}", name=form.name, runs=tr(form.runs)),
                todo=tr("Serve the merged model (leave FOLDER empty), or set EXPORTS to another format in lesson 08."),
            )
        return "bfloat16" if dtype == "float32" else dtype, export  # its kernels compute in 16 bits only
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    gib = weights_bytes(folder) * BYTES[dtype] / BYTES.get(stored, BYTES[dtype]) / files.GIB
    parts = int(tensor_parallel(folder, gpu.count).value) if gpu and engine != "transformers" else 1
    most = parts * (lesson.profile.vllm.gpu_memory_utilization * gpu.memory_gib - MIN_KV_CACHE_GIB) if gpu else 0.0
    if not fit(gib, gpu)[0] and (gib > most or engine == "transformers"):
        raise CourseError(
            tr("{folder} has {gib:.1f} GiB of weights, too much for this machine.", folder=folder, gib=gib),
            todo=tr(
                'Set EXPORTS = "w4a16" in lesson 08 and FOLDER = "{small}" here, or take a larger or newer '
                "GPU (T4 or later).",
                small=folder.parent / "exports/w4a16",
            ),
        )
    return dtype, None
