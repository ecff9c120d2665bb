"""The model that lessons 05 and 09 serve: the flags it needs, and whether its server says what lesson 04 stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import display, evaluation, exporting, files, parity, profiles, serving
from nbutils.errors import CourseError
from nbutils.evaluation import Answer, Evaluator

if TYPE_CHECKING:
    from nbutils.lesson import Lesson

NOTHING_STORED = "Lesson 04 stored no {what} for this model and precision: there is nothing to compare with."
ROUNDING = "In 16 bits vLLM and transformers round differently; where two tokens are nearly tied, another may win."


class ServedModel:
    """A model folder (the merged model, an export of it, or any other) and the held-back questions for it."""

    def __init__(self, lesson: Lesson, folder: str = "", engine: str = "auto", rows: int = 0) -> None:
        self.lesson, self.merged = lesson, lesson.run.merged
        given = Path(folder).expanduser() if folder else self.merged
        if any(given.glob("*.gguf")):
            values = {"name": "GGUF", "runs": "llama.cpp, Ollama, LM Studio", "place": "vLLM"}
            raise CourseError("exporting.cannot_serve", folder=given, **values)
        self.folder = Path(profiles.model_folder(given))
        self.is_merged = self.folder.resolve() == self.merged.resolve()
        self.reference = exporting.reference(self.folder, lesson, engine)  # stops if it cannot be served here
        size: Any = {"rows": rows, "limit": lesson.profile.serve.max_model_len}
        found = evaluation.stored_answers(lesson, self.folder, **size)
        if not found and not self.reference.export and (self.merged / "config.json").is_file():
            found = evaluation.stored_answers(lesson, self.merged, **size)
        self.evaluator = found.evaluator if found else _evaluator(lesson, self.folder, size)
        self.stored, self.questions = found.answers if found else None, self.evaluator.questions

    @property
    def flags(self) -> dict[str, Any]:
        """The flags this GPU and this model need; the lesson chooses the others."""
        own = {name: choice.value for name, choice in serving.flags_for(self.lesson.gpu, self.folder).items()}
        return own | {"dtype": self.reference.served_in} | self.reference.flags(self.evaluator.thinking)

    def ask(self, server: serving.Server, name: str = "") -> list[Answer]:
        """The server's greedy answers to all questions."""
        return serving.ask(
            server.client(), name or server.model_name, self.questions, self.evaluator.max_new_tokens,
            tools=self.evaluator.tools, token_ids=server.environment.engine != "transformers",
            at_once=self.lesson.profile.serve.max_num_seqs,
        )  # fmt: skip

    def compare_answers(self, server: serving.Server) -> AnswerComparison:
        """Ask the server, and stop if the merged model does not answer as in lesson 04; others are only reported."""
        served = self.ask(server)
        found = serving.compare(served, self.stored) if self.stored else None
        if found and self.is_merged:
            found.require(self.evaluator.dtype)
        return AnswerComparison(self.evaluator, served, self.stored, found)

    def compare_predictions(self, server: serving.Server) -> PredictionComparison:
        """The server's predictions on lesson 04's fixed set beside the merged model's; stops if it is another model."""
        if server.environment.engine == "transformers":
            return PredictionComparison("`transformers serve` does not return predictions.")
        run, is_ours = self.lesson.run.path, self.is_merged or bool(self.reference.export)
        stored = is_ours and (self.evaluator.folder / "parity.json").is_file()
        if not stored or "merged" not in (store := parity.PredictionStore(run, about=files.stamp(self.merged))):
            return PredictionComparison(NOTHING_STORED.format(what="predictions"))
        measured = parity.measure_server(server.url, server.model_name, store.fixed, server.api_key)
        report = self.reference.compared(store, measured)
        report.require()
        text = f"At {store.fixed.positions} positions: {report.verdict.splitlines()[-1]}"
        return PredictionComparison(text, report.facts(), report.table())


def _evaluator(lesson: Lesson, folder: Path, size: Any) -> Evaluator:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return evaluation.open_evaluator(lesson, folder, tokenizer, **size)


@dataclass(frozen=True)
class AnswerComparison:
    """The server's answers beside the stored ones."""

    evaluator: Evaluator
    served: list[Answer]
    stored: list[Answer] | None
    parity: serving.AnswerParity | None

    def __str__(self) -> str:
        if not self.parity:
            return NOTHING_STORED.format(what="answers")
        text = f"Server and lesson 04 (transformers, {self.evaluator.dtype}): {self.parity}"
        return f"{text}\n{ROUNDING}" if self.parity.differences and self.evaluator.dtype != "float32" else text

    def show(self, rows: int = 4) -> None:
        """Some of the answers, for your own eyes."""
        columns = {"lesson 04": self.stored or [], "server": self.served}
        texts: Any = {name: [answer.text for answer in answers] for name, answers in columns.items() if answers}
        table = evaluation.before_after_table(self.evaluator.questions, self.evaluator.references, texts, rows=rows)
        display.show_table(table, "The server's answers")

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        found, texts = self.parity, [answer.text for answer in self.served]
        identical, prompts, total = (found.identical, found.same_prompts, found.total) if found else (0, 0, 0)
        return {
            "rows_left_out": self.evaluator.left_out,
            "identical_answers": {"count": identical, "total": total},
            "identical_prompts": {"count": prompts, "total": total},
            "exact_match": evaluation.exact_match(texts, self.evaluator.references),
        }


@dataclass(frozen=True)
class PredictionComparison:
    """What came of it in a sentence, the numbers for facts.json, and the rows of a table."""

    text: str
    parity: dict[str, Any] = field(default_factory=dict)
    table: list[dict[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def facts(self) -> dict[str, Any]:
        """For facts.json."""
        return {"parity": self.parity}
