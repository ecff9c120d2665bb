"""The exam every model sits: the same rows, the same decoding, the same scores.

`Exam` asks and scores; what it finds is a `Result`, row by row. Not here: the rows themselves (rows),
or comparing two results (comparing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.chat import View, find_stop_ids, training_format
from nbutils.errors import CourseError
from nbutils.evaluation import keeping, scores
from nbutils.evaluation.answers import Answer, Row, answer_prompts, greedy, rows_at_once
from nbutils.evaluation.control import beyond_others
from nbutils.evaluation.losses import Encoded, RowLoss, encode_rows, row_losses
from nbutils.evaluation.rows import enough_tokens, fitting_rows, general_rows, prompts_of, questions_of, reference_of

if TYPE_CHECKING:
    from nbutils.config import Evaluation
    from nbutils.serving import Running

FOLDER = "evaluation"  # below the run


@dataclass(frozen=True)
class Result:
    """What one model made of an exam: a value for each row under each score."""

    name: str
    answers: list[Answer]
    references: list[str]
    losses: list[RowLoss]
    scores: dict[str, list[float]]
    by: str = "generate"

    def mean(self, score: str) -> float:
        """The plain mean of a score."""
        values = self.scores[score]
        return sum(values) / len(values)

    @property
    def loss(self) -> float:
        """Nats for each of the assistant's tokens."""
        return sum(row.total for row in self.losses) / sum(row.tokens for row in self.losses)

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [answer.text for answer in self.answers]


class Exam:
    """Rows with known answers, and the way they are asked; `subject` keeps the files of two exams apart.

    `thinking` is the thinking mode of the prompts (None: the template's default). Rows that do not fit `limit` tokens,
    with the longest answer allowed, are left out and told.
    """

    def __init__(
        self,
        run: Path,
        tokenizer: Any,
        rows: Sequence[Row],
        size: Evaluation,
        dtype: str,
        *,
        subject: str = "",
        thinking: bool | None = None,
        limit: int = 0,
    ) -> None:
        held_back, rows = rows, list(rows[: size.rows] if size.rows else rows)
        if not rows:
            raise CourseError("there is no row to ask.", "at least one evaluation row", "run lesson 02 again")
        self.run, self.folder, self.tokenizer, self.size = run, run / FOLDER, tokenizer, size
        self.dtype, self.subject, self.thinking, self.limit = dtype, subject, thinking, limit
        self.view = View(tokenizer, training_format(tokenizer, rows, thinking).value, thinking)
        self.max_new_tokens = enough_tokens(self.view, held_back, size.max_new_tokens)
        self.rows = fitting_rows(self.view, rows, size.max_new_tokens, limit) if limit else rows
        self.left_out = len(rows) - len(self.rows)
        self.questions, self.tools = questions_of(self.rows)[0], [row.get("tools") for row in self.rows]
        self.prompts = prompts_of(self.view, self.rows)
        self.references = [reference_of(self.view, row) for row in self.rows]

    def general(self) -> Exam:
        """The exam on everyday knowledge, asked in the same way; always all of it."""
        size = self.size.model_copy(update={"rows": 0})
        asked: dict[str, Any] = {"thinking": self.thinking, "limit": self.limit}
        return Exam(self.run, self.tokenizer, general_rows(), size, self.dtype, subject="general", **asked)

    @property
    def mode(self) -> str:
        """In which thinking mode every model is asked."""
        return {None: "the template's default", False: "off (enable_thinking=False)", True: "on"}[self.thinking]

    def facts(self) -> dict[str, Any]:
        """How it was asked, for facts.json."""
        return {"thinking": self.mode, "rows_left_out": self.left_out}

    def sit(self, name: str, model: Any, mark: Any, server: Running | None = None) -> Result:
        """Ask one model, of which `mark` says exactly what it is; through a server of that model if one is given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model.eval()
        losses = self._losses(name, model, mark)
        answers = self.heard(self._answers(name, model, mark, server))
        by = f"{server.engine} server" if server else "generate"
        return Result(name, answers, self.references, losses, self.score(answers), by)

    def kept(self, name: str, mark: Any, folder: Path) -> list[Answer]:
        """What a folder's model answered when it sat this very exam, without loading it; [] unless all is there."""
        decided_by = self._decided_by(mark, stops=sorted(find_stop_ids(self.tokenizer, folder)))
        found = keeping.kept(self._file("answers", name, None, "jsonl"), decided_by, self.prompts)
        return [found[number] for number in sorted(found)] if len(found) == len(self.prompts) else []

    def generate(self, model: Any) -> list[Answer]:
        """The answers of a model, all asked anew and none kept: for those who measure how fast they come."""
        return greedy(model, self.tokenizer, self.prompts, self.max_new_tokens, self.size.batch_size)

    def heard(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with the `<think>` a prompt may have written for them, so that a thought is known as one."""
        ends = [str(self.tokenizer.decode(prompt[-12:])).rstrip() for prompt in self.prompts]
        return [
            replace(answer, text=f"<think>{answer.text}") if end.endswith("<think>") else answer
            for answer, end in zip(answers, ends, strict=True)
        ]

    def score(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """Every score of every answer."""
        texts = [answer.text for answer in answers]
        return {
            "exact_match": self._each(lambda a, r: float(scores.is_exact(a, r)), texts),
            "rouge_l": self._each(scores.rouge_l, texts),
            "character_f1": self._each(scores.character_f1, texts),
            "exact_content": beyond_others(lambda a, r: float(scores.is_exact(a, r)), texts, self.references),
            "content": beyond_others(scores.rouge_l, texts, self.references),
            "characters": [float(len(scores.characters(text))) for text in texts],
            "tokens": [float(len(answer.token_ids)) for answer in answers],
            "stopped": [float(answer.stopped) for answer in answers],
            "unfinished": [float(scores.is_unfinished(text)) for text in texts],
        }

    def _each(self, score: Callable[[str, str], float], texts: list[str]) -> list[float]:
        return [score(text, reference) for text, reference in zip(texts, self.references, strict=True)]

    def _answers(self, name: str, model: Any, mark: Any, server: Running | None) -> list[Answer]:
        decided_by = self._decided_by(mark, stops=sorted(find_stop_ids(self.tokenizer, model.generation_config)))
        size: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "batch_size": self.size.batch_size}
        ask: keeping.Ask = partial(answer_prompts, model, self.tokenizer, **size)
        if server:
            ask = partial(server.answers, max_tokens=self.max_new_tokens)
            decided_by |= {"server": server.engine}
            print(f"{name}: the answers come from the {server.engine} server at {server.url}")
        return keeping.resumed(self._file("answers", name, server, "jsonl"), decided_by, self.prompts, ask)

    def _losses(self, name: str, model: Any, mark: Any) -> list[RowLoss]:
        decided_by = self._decided_by(mark, rows=keeping.digest([asdict(row) for row in self._encoded]))
        made = keeping.once(self._file("losses", name, None, "json"), decided_by, partial(self._lost, model))
        return [RowLoss(*pair) for pair in made]

    @cached_property
    def _encoded(self) -> list[Encoded]:
        """The rows as training sees them, rendered once for all models."""
        return encode_rows(self.view, self.rows)

    def _lost(self, model: Any) -> list[list[float]]:
        batch_size = rows_at_once(model, max(len(text.ids) for text in self._encoded), self.size.batch_size)
        return [[row.total, row.tokens] for row in row_losses(model, self._encoded, batch_size)]

    def _decided_by(self, mark: Any, **more: Any) -> dict[str, Any]:
        return {"model": mark, "dtype": self.dtype, "max_new_tokens": self.max_new_tokens, **more}

    def _file(self, what: str, name: str, server: Running | None, ending: str) -> Path:
        parts = [what, self.subject, name, "served" if server else ""]
        return self.folder / f"{'-'.join(filter(None, parts))}.{ending}"
