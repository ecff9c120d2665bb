"""The evaluator: every model gets the same rows, the same greedy decoding and the same scores.

Answers and losses are stored in `evaluation/` as they come, under the fingerprint of everything that decides them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils.chat import Message, Renderer, Row, find_stop_ids, rows_think, training_format
from nbutils.data import own_language_first, stored_rows
from nbutils.data.texts import mask
from nbutils.errors import CourseError
from nbutils.evaluation import inference, scores
from nbutils.evaluation.inference import Answer, RowLoss, Tokens
from nbutils.evaluation.scores import Difference, Estimate
from nbutils.files import SAMPLES, read_json, write_json, write_text
from nbutils.language import say, tr
from nbutils.record import Facts

FOLDER = "evaluation"  # below the run
LEAST_TOKENS = 32  # of an answer
LONGER = 1.5  # times the longest reference
THINKING_MODES = {None: "the template's default", False: "off (enable_thinking=False)"}
SHARES = ("exact_match", "stopped")  # scores that are 0 or 1 for each row
Ask = Callable[[dict[int, Tokens]], Iterable[tuple[int, Answer]]]
Table = list[dict[str, str]]  # for display


@dataclass(frozen=True)
class Result:
    """The answers of one model to the rows of an evaluator: a value for each row under each score."""

    evaluator: Evaluator
    name: str
    answers: list[Answer]
    scores: dict[str, list[float]]
    losses: Sequence[RowLoss]

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [answer.text for answer in self.answers]

    def mean(self, score: str) -> float:
        """The mean of a score."""
        return self.estimate(score).mean

    def weights(self, score: str) -> list[int] | None:
        """The loss is weighted by tokens, so that its mean is that of the whole text."""
        return [tokens for _, tokens in self.losses] if score == "loss" else None

    def estimate(self, score: str) -> Estimate:
        """The mean of a score with its interval."""
        if score in SHARES:
            return scores.estimate_share(self.scores[score])
        return scores.estimate(self.scores[score], self.weights(score))

    def change(self, before: Result, score: str) -> Difference:
        """A score minus that of another model on the same rows: one number for table, figure and verdict."""
        values = self.scores[score]
        if score in SHARES:
            return scores.paired_share_difference(before.scores[score], values)
        return scores.paired_difference(before.scores[score], values, self.weights(score))


@dataclass(frozen=True)
class Size:
    """How much is asked: held-out rows (0: all), rows answered at once, tokens of an answer at most."""

    rows: int
    batch_size: int
    max_new_tokens: int


@dataclass(eq=False)
class Evaluator:
    """Rows with known answers, and how they are asked; those that do not fit `limit` tokens are left out.

    Example:
        evaluator = Evaluator(run, tokenizer, rows, Size(rows=50, batch_size=8, max_new_tokens=128), "float32")
        result = evaluator.evaluate("base", model, "the base of my run")
    """

    run: Path
    tokenizer: Any
    held_out: Sequence[Row]
    size: Size
    dtype: str
    subject: str = ""  # in the names of its files
    thinking: bool | None = None
    limit: int = sys.maxsize  # tokens of a prompt and its answer

    def __post_init__(self) -> None:
        chosen = self.held_out[: self.size.rows or None]
        form = training_format(self.tokenizer, chosen, self.thinking)
        self.renderer = Renderer(self.tokenizer, form, self.thinking)
        self.folder = self.run / FOLDER
        self.mode = THINKING_MODES[self.thinking]
        self.rows: list[Row] = []
        self.questions: list[list[Message]] = []
        self.prompts: list[Tokens] = []
        for row in chosen:
            question = row["messages"][:-1]
            prompt = self.renderer.prompt(question, row.get("tools"))
            if len(prompt) + self.size.max_new_tokens <= self.limit:
                self.rows.append(row)
                self.questions.append(question)
                self.prompts.append(prompt)
        self.left_out = len(chosen) - len(self.rows)
        self._report_left_out()
        self.max_new_tokens = self._answer_tokens()
        self.references = [reference_of(self.renderer, row) for row in self.rows]

    def _report_left_out(self) -> None:
        """Say how many rows have no room for their answer; stop if no row is left."""
        if self.left_out:
            say(
                "[WARN] {count} rows do not fit {limit:,} tokens with their answer: left out",
                count=self.left_out,
                limit=self.limit,
            )
        if not self.rows:
            raise CourseError(
                "No evaluation row fits {limit:,} tokens with its answer, or there is none.",
                todo=(
                    "Run lesson 02 again, with more or shorter rows; or lower course.max_new_tokens (now "
                    "{new_tokens}), or raise vllm.max_model_len if that is the limit."
                ),
                limit=self.limit,
                new_tokens=self.size.max_new_tokens,
            )

    def _answer_tokens(self) -> int:
        """At most so many as the longest reference needs, unless the model may think before it answers."""
        most = self.size.max_new_tokens
        template_thinks = "think>" in str(self.tokenizer.chat_template)
        if rows_think(self.held_out) or (template_thinks and self.thinking is not False):
            return most
        texts = [reference_of(self.renderer, row) for row in self.held_out]
        tokenized = self.tokenizer(texts, add_special_tokens=False)
        longest = max(map(len, tokenized["input_ids"]))
        needed = max(LEAST_TOKENS, int(LONGER * longest))
        return min(most, needed)

    def general(self, rows: int = 0) -> Evaluator:
        """The rows of general knowledge, asked in the same way; always all of them, unless a number is given."""
        held_out = stored_rows(SAMPLES / "general.jsonl")
        return replace(self, held_out=held_out, size=replace(self.size, rows=rows), subject="-general")

    def evaluate(self, name: str, model: Any, fingerprint: Any) -> Result:
        """Ask one model, which `fingerprint` identifies; what was stored of it before is not asked again."""
        model.eval()
        examples = self.renderer.encode_all(self.rows)
        losses = stored_once(
            self.folder / f"losses{self.subject}-{name}.json",
            self._decided_by(fingerprint, rows=digest([example._asdict() for example in examples])),
            lambda: inference.row_losses(model, examples, self.size.batch_size),
        )
        answers = complete_answers(
            self._answers_file(name),
            self._decided_by(fingerprint, stops=self._stops(model.generation_config)),
            self.prompts,
            lambda prompts: inference.answer_prompts(
                model,
                self.tokenizer,
                prompts,
                self.max_new_tokens,
                self.size.batch_size,
            ),
        )
        return self.result(name, answers, losses)

    def result(self, name: str, answers: Sequence[Answer], losses: Sequence[RowLoss] = ()) -> Result:
        """The scores of answers to these rows, whoever gave them."""
        tagged = self.with_think_tag(answers)
        scored = score_answers(tagged, self.references)
        scored["loss"] = []
        for total, tokens in losses:
            scored["loss"].append(total / tokens)
        return Result(self, name, tagged, scored, losses)

    def stored_answers(self, name: str, fingerprint: Any, folder: Path) -> list[Answer]:
        """The stored answers of a folder's model to these very rows, without loading it; none if one is missing."""
        answers = read_answers(
            self._answers_file(name),
            self._decided_by(fingerprint, stops=self._stops(folder)),
            self.prompts,
        )
        if len(answers) < len(self.prompts):
            return []
        return [answers[row] for row in sorted(answers)]

    def _decided_by(self, fingerprint: Any, **more: Any) -> Facts:
        return {
            "dtype": self.dtype,
            "max_new_tokens": self.max_new_tokens,
            "model": fingerprint,
            **more,
        }

    def _stops(self, generation: Any) -> list[int]:
        return sorted(find_stop_ids(self.tokenizer, generation))

    def _answers_file(self, name: str) -> Path:
        return self.folder / f"answers{self.subject}-{name}.jsonl"

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompts end with `<think>`, so that an answer begins in the middle of its thoughts."""
        ending = self.tokenizer.decode(self.prompts[0][-12:])  # that of every prompt
        return bool(ending.rstrip().endswith("<think>"))

    def with_think_tag(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with the `<think>` that a prompt may have opened for them, so that thinking is seen as such."""
        if not self.opens_thinking:
            return list(answers)
        # a server that gives thoughts apart has it put back already
        return [replace(answer, text="<think>" + answer.text.removeprefix("<think>")) for answer in answers]

    def table(self, columns: Mapping[str, Sequence[str]], rows: int = 6) -> Table:
        """For display: question, reference, and each model's answer with a tick or a cross; private data masked.

        Rows in the language of the course come first.
        """
        table = []
        shown = own_language_first(enumerate(zip(self.questions, self.references, strict=True)))
        for number, (question, reference) in shown[:rows]:
            row = {
                tr("question"): mask(str(question[-1]["content"])),
                tr("reference"): mask(reference),
            }
            for name, answers in columns.items():
                answer = answers[number]
                tick = "✓" if scores.exact(answer, reference) else "✗"
                row[name] = f"{tick} {mask(answer.strip())}"
            table.append(row)
        return table


def score_answers(answers: Sequence[Answer], references: Sequence[str]) -> dict[str, list[float]]:
    """Every score of every answer."""
    texts = [answer.text for answer in answers]
    lengths = [len(scores.normalized(text)) for text in texts]
    return {
        "exact_match": list(map(scores.exact, texts, references)),
        "rouge_l": list(map(scores.rouge_l, texts, references)),
        "character_f1": list(map(scores.character_f1, texts, references)),
        "exact_content": scores.content(scores.exact, texts, references),
        "content": scores.content(scores.rouge_l, texts, references),
        "characters": list(map(float, lengths)),
        "tokens": [float(len(answer.token_ids)) for answer in answers],
        "stopped": [float(answer.stopped) for answer in answers],
        "unfinished": list(map(scores.unfinished, texts)),
    }


def reference_of(renderer: Renderer, row: Row) -> str:
    """The reference as a model would write it; a tool call is written the way the template writes it."""
    last = row["messages"][-1]
    if not last.get("tool_calls"):
        return last["content"] or ""
    example = renderer.encode(row)
    answer = list(example.ids[example.shared[-1] :])
    return str(renderer.tokenizer.decode(answer, skip_special_tokens=True)).strip()


def digest(value: Any) -> str:
    """A short fingerprint of any JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stored_once(file: Path, decided_by: Facts, make: Callable[[], Any]) -> Any:
    """A JSON value that is made once and then read from its file, as long as what decides it stays the same."""
    fingerprint = digest(decided_by)
    with suppress(OSError, ValueError):
        stored = read_json(file)
        if stored["fingerprint"] == fingerprint:
            return stored["value"]
    value = make()
    write_json(file, {"fingerprint": fingerprint, "decided_by": decided_by, "value": value})
    return value


def read_answers(file: Path, decided_by: Facts, prompts: list[Tokens]) -> dict[int, Answer]:
    """The answers in a file by row; none from a file of another fingerprint."""
    answers: dict[int, Answer] = {}
    if not file.exists():
        return answers
    header, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    if header != _header(decided_by, prompts):
        return answers
    for line in lines:
        with suppress(ValueError):  # a kill may have torn it
            stored = json.loads(line)
            row = stored.pop("row")
            answers[row] = Answer(prompts[row], **stored)
    return answers


def complete_answers(file: Path, decided_by: Facts, prompts: list[Tokens], ask: Ask) -> list[Answer]:
    """The answers in order: those the file has already, and the missing ones from `ask`, written as they come."""
    answers = read_answers(file, decided_by, prompts)
    missing = {row: prompt for row, prompt in enumerate(prompts) if row not in answers}
    if not answers:
        header = _header(decided_by, prompts)
        write_text(file, f"{header}\n")
    with open(file, "a", encoding="utf-8", newline="\n") as out:
        out.write("\n")  # a kill may have torn the last line
        for row, answer in ask(missing):
            answers[row] = answer
            stored = {"row": row} | asdict(answer)
            del stored["prompt_ids"]  # `prompts` has them
            line = json.dumps(stored, ensure_ascii=False)
            out.write(f"{line}\n")
            out.flush()
    return [answers[row] for row in range(len(prompts))]


def _header(decided_by: Facts, prompts: list[Tokens]) -> str:
    fingerprint = digest(decided_by | {"prompts": prompts})
    return json.dumps({"fingerprint": fingerprint, "decided_by": decided_by}, ensure_ascii=False, default=str)
