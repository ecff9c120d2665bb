"""The evaluator: every model gets the same rows, the same greedy decoding and the same scores.

Answers and losses are stored in `evaluation/` as they come, under the fingerprint of everything that decides them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils.chat import View, common_length, find_stop_ids, rows_think, training_format
from nbutils.data import stored_rows
from nbutils.errors import CourseError
from nbutils.evaluation import inference, metrics
from nbutils.evaluation.inference import Answer, Message, Row, RowLoss
from nbutils.files import SAMPLES, write_json, write_text
from nbutils.masking import without_secrets

if TYPE_CHECKING:
    from nbutils.config import Evaluation

FOLDER = "evaluation"  # below the run
LEAST_TOKENS, LONGER = 32, 1.5  # of an answer; than the longest reference
THINKING_MODES = {None: "the template's default", False: "off (enable_thinking=False)", True: "on"}
Ask = Callable[[dict[int, list[int]]], Iterable[tuple[int, Answer]]]


@dataclass(frozen=True)
class Result:
    """The answers of one model to the rows of an evaluator: a value for each row under each score."""

    name: str
    answers: list[Answer]
    references: list[str]
    losses: list[RowLoss]
    scores: dict[str, list[float]]
    by: str = "generate"
    questions: Sequence[list[Message]] = ()

    def mean(self, score: str) -> float:
        """The plain mean of a score."""
        return sum(self.scores[score]) / len(self.scores[score])

    @property
    def loss(self) -> float:
        """Nats per assistant token."""
        return sum(row.total for row in self.losses) / sum(row.tokens for row in self.losses)

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [answer.text for answer in self.answers]

    def values(self, score: str) -> tuple[list[float], list[float] | None]:
        """Row by row, with weights: the loss is weighted by tokens, so that its mean is that of the whole text."""
        if score == "loss":
            return [row.total / row.tokens for row in self.losses], [float(row.tokens) for row in self.losses]
        return self.scores[score], None


class Evaluator:
    """Rows with known answers, and how they are asked; those that do not fit `limit` tokens are left out."""

    def __init__(
        self, run: Path, tokenizer: Any, rows: Sequence[Row], size: Evaluation, dtype: str, *,
        subject: str = "", thinking: bool | None = None, limit: int = 0,
    ) -> None:  # fmt: skip
        chosen = list(rows[: size.rows] if size.rows else rows)
        if not chosen:
            raise CourseError("evaluation.no_rows")
        self.run, self.folder, self.tokenizer, self.size = run, run / FOLDER, tokenizer, size
        self.dtype, self.subject, self.thinking, self.limit = dtype, subject, thinking, limit
        self.mode = THINKING_MODES[thinking]
        self.view = View(tokenizer, training_format(tokenizer, chosen, thinking).value, thinking)
        self.max_new_tokens = _answer_tokens(self.view, rows, size.max_new_tokens)
        self.rows = _fitting_rows(self.view, chosen, size.max_new_tokens, limit) if limit else chosen
        self.left_out = len(chosen) - len(self.rows)
        self.questions, self.tools = questions_of(self.rows)[0], [row.get("tools") for row in self.rows]
        self.prompts = [_prompt(self.view, row) for row in self.rows]
        self.references = [reference_of(self.view, row) for row in self.rows]

    def general(self) -> Evaluator:
        """The rows of general knowledge, asked in the same way; always all of them."""
        return Evaluator(
            self.run, self.tokenizer, general_rows(), self.size.model_copy(update={"rows": 0}), self.dtype,
            subject="general", thinking=self.thinking, limit=self.limit,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """How it was asked, for facts.json."""
        return {"thinking": self.mode, "rows_left_out": self.left_out}

    def evaluate(self, name: str, model: Any, fingerprint: Any, server: Any = None) -> Result:
        """Ask one model, which `fingerprint` identifies; through a `serving.Running` server of that model if given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model.eval()
        encoded = inference.encode_rows(self.view, self.rows)
        decided_by = self._decided_by(fingerprint, rows=digest([row._asdict() for row in encoded]))
        make = partial(inference.row_losses, model, encoded, self.size.batch_size)
        losses = stored_once(self._file("losses", name, "json"), decided_by, make)
        by, file, ask = "generate", self._file("answers", name, "jsonl"), self._ask(model)
        decided_by = self._decided_by(fingerprint, stops=sorted(find_stop_ids(self.tokenizer, model.generation_config)))
        if server:
            by, file = f"{server.engine} server", self._file("answers", f"{name}-served", "jsonl")
            decided_by["server"], ask = server.engine, partial(server.answers, max_tokens=self.max_new_tokens)
        answers = self.with_think_tag(resume_answers(file, decided_by, self.prompts, ask))
        row_losses, scores = [RowLoss(*pair) for pair in losses], self.score(answers)
        return Result(name, answers, self.references, row_losses, scores, by, self.questions)

    def kept(self, name: str, fingerprint: Any, folder: Path) -> list[Answer]:
        """The stored answers of a folder's model to these very rows, without loading it; [] unless all are there."""
        decided_by = self._decided_by(fingerprint, stops=sorted(find_stop_ids(self.tokenizer, folder)))
        found = stored_answers(self._file("answers", name, "jsonl"), decided_by, self.prompts)
        return list(dict(sorted(found.items())).values()) if len(found) == len(self.prompts) else []

    def generate(self, model: Any) -> list[Answer]:
        """The answers of a model, none of them stored."""
        return list(dict(sorted(self._ask(model)(dict(enumerate(self.prompts))))).values())

    def with_think_tag(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with the `<think>` that a prompt may have opened for them, so that thinking is seen as such."""
        ends = [str(self.tokenizer.decode(prompt[-12:])).rstrip() for prompt in self.prompts]
        return [
            replace(answer, text=f"<think>{answer.text}") if end.endswith("<think>") else answer
            for answer, end in zip(answers, ends, strict=True)
        ]

    def score(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """Every score of every answer."""
        texts, references = [answer.text for answer in answers], self.references
        return {
            "exact_match": list(map(metrics.exact, texts, references)),
            "rouge_l": list(map(metrics.rouge_l, texts, references)),
            "character_f1": list(map(metrics.character_f1, texts, references)),
            "exact_content": metrics.content(metrics.exact, texts, references),
            "content": metrics.content(metrics.rouge_l, texts, references),
            "characters": [float(len(metrics.normalized(text))) for text in texts],
            "tokens": [float(len(answer.token_ids)) for answer in answers],
            "stopped": [float(answer.stopped) for answer in answers],
            "unfinished": [float(metrics.is_unfinished(text)) for text in texts],
        }

    def _ask(self, model: Any) -> Ask:
        size = (self.max_new_tokens, self.size.batch_size)
        return lambda prompts: inference.answer_prompts(model, self.tokenizer, prompts, *size)

    def _decided_by(self, fingerprint: Any, **more: Any) -> dict[str, Any]:
        return {"model": fingerprint, "dtype": self.dtype, "max_new_tokens": self.max_new_tokens, **more}

    def _file(self, what: str, name: str, ending: str) -> Path:
        return self.folder / f"{'-'.join(filter(None, (what, self.subject, name)))}.{ending}"


def questions_of(rows: Sequence[Row]) -> tuple[list[list[Message]], list[str]]:
    """Prompts and references of chat rows: everything before the last turn, and that turn."""
    turns = [row["messages"] for row in rows]
    return [messages[:-1] for messages in turns], [str(messages[-1]["content"] or "") for messages in turns]


def general_rows() -> list[Row]:
    """Everyday questions in Chinese and English that have nothing to do with any training data of the course."""
    return stored_rows(SAMPLES / "general.jsonl")


def reference_of(view: View, row: Row) -> str:
    """The reference as a model would write it; a tool call is written the way the template writes it."""
    last = row["messages"][-1]
    if not last.get("tool_calls"):
        return str(last["content"] or "")
    ids, _ = view.encode(row["messages"], row.get("tools"))
    begins = common_length(_prompt(view, row), ids)
    return str(view.tokenizer.decode(ids[begins:], skip_special_tokens=True)).strip()


def _prompt(view: View, row: Row) -> list[int]:
    return view.prompt(row["messages"][:-1], row.get("tools"))


def _answer_tokens(view: View, rows: Sequence[Row], most: int) -> int:
    """Tokens an answer may have: half as many again as the longest reference; `most` where a model may think."""
    if rows_think(rows) or (view.thinking is not False and "think>" in str(view.tokenizer.chat_template)):
        return most
    references = view.tokenizer([reference_of(view, row) for row in rows], add_special_tokens=False)["input_ids"]
    return min(most, max(LEAST_TOKENS, int(LONGER * max(map(len, references)))))


def _fitting_rows(view: View, rows: list[Row], new_tokens: int, limit: int) -> list[Row]:
    """The rows that fit a context of `limit` tokens."""
    needed = [len(_prompt(view, row)) + new_tokens for row in rows]
    for example in view.encode_all(rows):
        needed[example.row - 1] = max(needed[example.row - 1], len(example.ids))
    fitting = [row for row, tokens in zip(rows, needed, strict=True) if tokens <= limit]
    if not fitting:
        values = {"rows": len(rows), "least": min(needed), "limit": limit, "new_tokens": new_tokens}
        raise CourseError("evaluation.no_row_fits", **values)
    if len(fitting) < len(rows):
        print(f"[WARN] {len(rows) - len(fitting)} rows do not fit {limit:,} tokens with their answer: left out")
    return fitting


def digest(value: Any) -> str:
    """A short fingerprint of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def stored_once(file: Path, decided_by: dict[str, Any], make: Callable[[], Any]) -> Any:
    """A JSON value that is made once and then read from its file, as long as what decides it stays the same."""
    fingerprint = digest(decided_by)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["fingerprint"] == fingerprint and stored["check"] == digest(stored["value"]):
            return stored["value"]
    value = make()
    write_json(file, {"fingerprint": fingerprint, "decided_by": decided_by, "check": digest(value), "value": value})
    return value


def resume_answers(file: Path, decided_by: dict[str, Any], prompts: list[list[int]], ask: Ask) -> list[Answer]:
    """All answers in order: those the file has already, and the missing ones from `ask`, written as they come."""
    found = stored_answers(file, decided_by, prompts)
    missing = {number: prompt for number, prompt in enumerate(prompts) if number not in found}
    if missing:
        header = {"fingerprint": digest(decided_by | {"prompts": prompts}), "decided_by": decided_by}
        lines = [json.dumps(header, ensure_ascii=False, default=str), *(_line(*one) for one in sorted(found.items()))]
        write_text(file, "\n".join(lines) + "\n")  # whole, so that a line torn by a kill is gone
        with open(file, "a", encoding="utf-8", newline="\n") as out:
            for number, answer in ask(missing):
                found[number] = answer
                out.write(_line(number, answer) + "\n")
                out.flush()
            os.fsync(out.fileno())
    return [found[number] for number in range(len(prompts))]


def stored_answers(file: Path, decided_by: dict[str, Any], prompts: list[list[int]]) -> dict[int, Answer]:
    """The answers in a file of this fingerprint; a line that is torn or was changed counts as missing."""
    found: dict[int, Answer] = {}
    if not file.exists():
        return found
    header, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n")  # no other line end
    if f'"fingerprint": "{digest(decided_by | {"prompts": prompts})}"' not in header:
        return found
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, IndexError):
            stored = json.loads(line)
            number = int(stored["row"])
            answer = Answer(prompts[number], stored["token_ids"], stored["text"], stored["stopped"])
            if line == _line(number, answer):
                found[number] = answer
    return found


def _line(number: int, answer: Answer) -> str:
    """One stored answer, with a checksum over its prompt too."""
    stored = {"row": number, "token_ids": answer.token_ids, "text": answer.text, "stopped": answer.stopped}
    check = digest([answer.prompt_ids, answer.token_ids, answer.text, answer.stopped])
    return json.dumps(stored | {"check": check}, ensure_ascii=False)


class Harness:
    """Named lm-eval tasks (or YAML files of your own) on several models; with no task, nothing happens at all."""

    def __init__(self, tasks: str, run: Path, dtype: str) -> None:
        self.tasks = [name.strip() for name in tasks.split(",") if name.strip()]
        self.folder, self.dtype = run / FOLDER / "lm_eval", dtype
        self.results: dict[str, dict[str, dict[str, float]]] = {}
        if self.tasks and find_spec("lm_eval") is None:
            raise CourseError("evaluation.no_lm_eval", tasks=tasks)

    def run(self, name: str, model: Path | str, fingerprint: Any) -> None:
        """Measure one model, which `fingerprint` identifies; a result that is there already is read."""
        if not self.tasks:
            return
        if "," in str(model):  # lm-eval would read what follows as options of its own
            raise CourseError("evaluation.comma_in_path", model=model)
        self.folder.mkdir(parents=True, exist_ok=True)
        decided_by = {"model": fingerprint, "dtype": self.dtype, "tasks": self.tasks}
        self.results[name] = stored_once(self.folder / f"{name}.json", decided_by, partial(self._measure, str(model)))

    def _measure(self, model: str) -> dict[str, dict[str, float]]:
        """One run of lm-eval in a process of its own, which may know the hub's token and no other secret."""
        import torch

        token = {"HF_TOKEN": os.environ["HF_TOKEN"]} if "HF_TOKEN" in os.environ else {}
        with tempfile.TemporaryDirectory() as output:
            command = [  # without the word `run`: versions before 0.4.10 do not know it, later ones add it
                sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
                f"pretrained={model},dtype={self.dtype}", "--tasks", ",".join(self.tasks), "--batch_size", "auto",
                "--device", "cuda:0" if torch.cuda.is_available() else "cpu", "--output_path", output,
            ]  # fmt: skip
            env = without_secrets(os.environ) | token
            ended = subprocess.run(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env, text=True)
            results = sorted(Path(output).rglob("results*.json"))
            if ended.returncode or not results:
                lines = "\n".join(ended.stderr.strip().splitlines()[-12:])
                raise CourseError("evaluation.lm_eval_failed", tasks=", ".join(self.tasks), lines=lines)
            found = json.loads(results[-1].read_text(encoding="utf-8"))["results"]
        return {
            task: {name.removesuffix(",none"): one for name, one in numbers.items() if isinstance(one, float)}
            for task, numbers in found.items()
        }

    def __str__(self) -> str:
        lines = [f"{name}, {task}: {found}" for name, one in self.results.items() for task, found in one.items()]
        return "\n".join(lines) or "no public benchmark was asked for (LM_EVAL_TASKS)"
