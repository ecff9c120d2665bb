"""The evaluator: every model gets the same rows, the same greedy decoding and the same scores.

Answers and losses are stored in `evaluation/` as they come, under the fingerprint of everything that decides them.
Scores count characters, as Chinese has no spaces. Content: trained on shuffled answers a model learns what answers look
like, its loss falls and its F1 rises. So only what an answer scores beyond the references of other rows is content.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nbutils.chat import View, common_length, find_stop_ids, rows_think, training_format
from nbutils.data import stored_rows
from nbutils.data.build import CJK
from nbutils.data.texts import mask
from nbutils.errors import CourseError
from nbutils.evaluation import inference
from nbutils.evaluation.inference import Answer, Message, Row, RowLoss
from nbutils.files import SAMPLES, read_json, stamp, write_json, write_text
from nbutils.language import tr
from nbutils.masking import without_secrets

FOLDER = "evaluation"  # below the run
LEAST_TOKENS, LONGER = 32, 1.5  # of an answer; than the longest reference
THINKING_MODES = {None: "the template's default", False: "off (enable_thinking=False)", True: "on"}
THINKING = re.compile(r"(?s)^\s*<think>.*?(</think>|\Z)|^((?!<think>).)*?</think>")  # or the prompt opened it
OTHERS, OTHERS_SEED = 5, 5  # references of other rows that each answer is scored against
SHARES = ("exact_match", "stopped")  # scores that are 0 or 1 for each row
LEVEL = 0.95  # of every interval: in the table, the figure, the texts and the verdict
RESAMPLES, SEED = 2_000, 2026
Score = Callable[[str, str], float]
Ask = Callable[[dict[int, list[int]]], Iterable[tuple[int, Answer]]]


def without_thinking(text: str) -> str:
    """The text without the thinking before it (unfinished thinking: nothing is left)."""
    return THINKING.sub("", text, count=1).strip()


def normalized(text: str) -> str:
    """The characters that are counted: full width and half width alike, and no white space."""
    return "".join(unicodedata.normalize("NFKC", without_thinking(text)).split())


def exact(answer: str, reference: str) -> float:
    """1 if the answer is the reference, surrounding white space aside, else 0."""
    return float(without_thinking(answer) == without_thinking(reference))


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers equal to their reference, surrounding white space aside."""
    return sum(exact(*pair) for pair in zip(answers, references, strict=True)) / len(references)


def character_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the characters, in any order."""
    left, right = normalized(answer), normalized(reference)
    shared = (Counter(left) & Counter(right)).total()
    return 2 * shared / (len(left) + len(right)) if left or right else 1.0


def rouge_l(answer: str, reference: str) -> float:
    """The same of the longest common subsequence of characters: order counts, gaps are allowed."""
    from rapidfuzz.distance import LCSseq

    left, right = normalized(answer), normalized(reference)
    return 2 * LCSseq.similarity(left, right) / (len(left) + len(right)) if left or right else 1.0


def content(score: Score, answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Score against the own reference minus the mean against other rows' references; 0 where there is no other row.

    Which rows lend theirs is fixed; they are mostly of the same language.
    """
    order = list(range(len(references)))
    random.Random(OTHERS_SEED).shuffle(order)
    order.sort(key=lambda row: CJK.search(references[row]) is not None)  # stable: within a kind the shuffle stays
    place, others, found = {row: at for at, row in enumerate(order)}, min(OTHERS, len(references) - 1), []
    for row, answer in enumerate(answers):
        lent = [references[order[(place[row] + step) % len(order)]] for step in range(1, others + 1)]
        own, against = score(answer, references[row]), [score(answer, reference) for reference in lent]
        found.append(own - sum(against) / len(against) if against else 0.0)
    return found


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """For display."""
        if not math.isfinite(self.mean):
            return tr("not a number")
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def facts(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {name: None if str(value) in ("nan", "inf", "-inf") else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference with its interval, and the probability of one as large if nothing had changed."""

    p: float
    test: str

    @property
    def p_text(self) -> str:
        """For display."""
        return "-" if math.isnan(self.p) else "<0.001" if self.p < 0.001 else f"{self.p:.3f}"


def estimate(values: Any, weights: Any = None, *, shares: bool = False) -> Estimate:
    """The (weighted) mean with its interval: Wilson's for 0/1 `shares`, right near 0 and 1 too, else a bootstrap's."""
    from scipy.stats import binomtest, bootstrap

    numbers = np.asarray(values, dtype=float)
    if shares:
        right = round(numbers.sum())
        found = binomtest(right, len(numbers)).proportion_ci(LEVEL, method="wilson")
        return Estimate(right / len(numbers), float(found.low), float(found.high))
    weights = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=float)
    mean = float((numbers * weights).sum() / weights.sum()) if np.isfinite(numbers).all() else math.nan
    if math.isnan(mean) or len(numbers) == 1:
        return Estimate(mean, mean, mean)
    found = bootstrap(  # rows are drawn together with their weights
        (numbers, weights), lambda drawn, given, axis: (drawn * given).sum(axis) / given.sum(axis), paired=True,
        vectorized=True, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile",
        batch=100, random_state=np.random.default_rng(SEED),
    ).confidence_interval  # fmt: skip
    return Estimate(mean, float(found.low), float(found.high))


def paired_difference(before: Any, after: Any, weights: Any = None, shares: bool = False) -> Difference:
    """after - before on the same rows: exact McNemar and Newcombe's interval for 0/1 `shares`, else a paired t-test.

    A bootstrap of shares would have no width where every row changed alike, and be too sure.
    """
    from scipy.stats import binomtest, ttest_1samp

    first, second = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    change = second - first
    changed = int((change != 0).sum())
    if not shares:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same change in every row is certain, not imprecise
            weighted = change * np.asarray(1.0 if weights is None else weights)
            p = float(ttest_1samp(weighted, 0.0).pvalue) if changed else 1.0
        return Difference(**vars(estimate(change, weights)), p=p, test="paired t")
    one, two = estimate(first, shares=True), estimate(second, shares=True)
    correlation = float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else 0.0

    def width(left: float, right: float) -> float:
        return math.sqrt(max(0.0, left**2 - 2 * correlation * left * right + right**2))

    mean = two.mean - one.mean
    low, high = width(two.mean - two.low, one.high - one.mean), width(two.high - two.mean, one.mean - one.low)
    p = float(binomtest(int((change > 0).sum()), changed).pvalue) if changed else 1.0
    return Difference(mean, mean - low, mean + high, p, "exact McNemar")


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
        return sum(total for total, _ in self.losses) / sum(tokens for _, tokens in self.losses)

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [answer.text for answer in self.answers]

    def values(self, score: str) -> tuple[list[float], list[float] | None]:
        """Row by row, with weights: the loss is weighted by tokens, so that its mean is that of the whole text."""
        if score == "loss":
            return [total / tokens for total, tokens in self.losses], [float(tokens) for _, tokens in self.losses]
        return self.scores[score], None

    def estimate(self, score: str) -> Estimate:
        """The mean of a score with its interval."""
        values, weights = self.values(score)
        return estimate(values, weights, shares=score in SHARES)

    def change(self, before: Result, score: str) -> Difference:
        """A score minus that of another model on the same rows: one number for table, figure and verdict."""
        (first, weights), (second, _) = before.values(score), self.values(score)
        return paired_difference(first, second, weights, shares=score in SHARES)


@dataclass(frozen=True)
class Size:
    """How much is asked: held-out rows (0: all), rows answered at once, tokens of an answer at most."""

    rows: int
    batch_size: int
    max_new_tokens: int


class Evaluator:
    """Rows with known answers, and how they are asked; those that do not fit `limit` tokens are left out."""

    def __init__(
        self, run: Path, tokenizer: Any, rows: Sequence[Row], size: Size, dtype: str, *,
        subject: str = "", thinking: bool | None = None, limit: int = 0,
    ) -> None:  # fmt: skip
        chosen = list(rows[: size.rows] if size.rows else rows)
        if not chosen:
            raise CourseError(
                tr("There are no evaluation rows."), todo=tr("Run lesson 02 again, with more rows or with EVAL_DATA.")
            )
        self.run, self.folder, self.tokenizer, self.size = run, run / FOLDER, tokenizer, size
        self.dtype, self.thinking, self.limit, self.subject = dtype, thinking, limit, f"-{subject}" if subject else ""
        self.mode, self.max_new_tokens = THINKING_MODES[thinking], size.max_new_tokens
        self.view = View(tokenizer, training_format(tokenizer, chosen, thinking).value, thinking)
        if not rows_think(rows) and (thinking is False or "think>" not in str(tokenizer.chat_template)):
            texts = [reference_of(self.view, row) for row in rows]
            longest = max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
            self.max_new_tokens = min(size.max_new_tokens, max(LEAST_TOKENS, int(LONGER * longest)))
        self.decided_by: dict[str, Any] = {"dtype": dtype, "max_new_tokens": self.max_new_tokens}
        prompts = [self.view.prompt(row["messages"][:-1], row.get("tools")) for row in chosen]
        needed = [len(prompt) + size.max_new_tokens for prompt in prompts]
        for example in self.view.encode_all(chosen) if limit else ():
            needed[example.row - 1] = max(needed[example.row - 1], len(example.ids))
        fitting = [number for number, tokens in enumerate(needed) if not limit or tokens <= limit]
        if not fitting:
            raise CourseError(
                tr(
                    "None of the {rows} evaluation rows fits: question and answer need {least:,} tokens or more.",
                    rows=len(chosen),
                    least=min(needed),
                ),
                allowed=tr("at most {limit:,} tokens", limit=limit),
                todo=tr(
                    "Lower course.max_new_tokens (now {new_tokens}), raise vllm.max_model_len if that is the "
                    "limit, or give shorter rows.",
                    new_tokens=size.max_new_tokens,
                ),
            )
        self.left_out = len(chosen) - len(fitting)
        if self.left_out:
            counts = {"count": self.left_out, "limit": limit}
            print(tr("[WARN] {count} rows do not fit {limit:,} tokens with their answer: left out", **counts))
        self.rows, self.prompts = [chosen[number] for number in fitting], [prompts[number] for number in fitting]
        self.questions = [row["messages"][:-1] for row in self.rows]
        self.tools = [row.get("tools") for row in self.rows]
        self.references = [reference_of(self.view, row) for row in self.rows]

    def general(self) -> Evaluator:
        """The rows of general knowledge, asked in the same way; always all of them."""
        rows, size = stored_rows(SAMPLES / "general.jsonl"), replace(self.size, rows=0)
        more: Any = {"subject": "general", "thinking": self.thinking, "limit": self.limit}
        return Evaluator(self.run, self.tokenizer, rows, size, self.dtype, **more)

    def evaluate(self, name: str, model: Any, fingerprint: Any, server: Any = None) -> Result:
        """Ask one model, which `fingerprint` identifies; through a `serving.Running` server of that model if given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model.eval()
        encoded = inference.encode_rows(self.view, self.rows)
        decided_by = self.decided_by | {"model": fingerprint, "rows": digest([row._asdict() for row in encoded])}
        make = partial(inference.row_losses, model, encoded, self.size.batch_size)
        stored = stored_once(self.folder / f"losses{self.subject}-{name}.json", decided_by, make)
        by, ask, file = "generate", self._ask(model), self.folder / f"answers{self.subject}-{name}.jsonl"
        stops = sorted(find_stop_ids(self.tokenizer, model.generation_config))
        decided_by = self.decided_by | {"model": fingerprint, "stops": stops}
        if server:
            by, file = f"{server.engine} server", self.folder / f"answers{self.subject}-{name}-served.jsonl"
            decided_by["server"], ask = server.engine, partial(server.answers, max_tokens=self.max_new_tokens)
        answers = self.with_think_tag(resume_answers(file, decided_by, self.prompts, ask))
        losses = [(total, tokens) for total, tokens in stored]
        return Result(name, answers, self.references, losses, self.score(answers), by, self.questions)

    def kept(self, name: str, fingerprint: Any, folder: Path) -> list[Answer]:
        """The stored answers of a folder's model to these very rows, without loading it; [] unless all are there."""
        decided_by = self.decided_by | {"model": fingerprint, "stops": sorted(find_stop_ids(self.tokenizer, folder))}
        file = self.folder / f"answers{self.subject}-{name}.jsonl"
        found = resume_answers(file, decided_by, self.prompts, None)
        return found if len(found) == len(self.prompts) else []

    def generate(self, model: Any) -> list[Answer]:
        """The answers of a model, none of them stored."""
        return [one for _, one in sorted(self._ask(model)(dict(enumerate(self.prompts))))]

    def _ask(self, model: Any) -> Ask:
        size: Any = {"max_new_tokens": self.max_new_tokens, "batch_size": self.size.batch_size}
        return partial(inference.answer_prompts, model, self.tokenizer, **size)

    def with_think_tag(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with the `<think>` that a prompt may have opened for them, so that thinking is seen as such."""
        opened = [str(self.tokenizer.decode(prompt[-12:])).rstrip().endswith("<think>") for prompt in self.prompts]
        pairs = zip(answers, opened, strict=True)
        return [replace(one, text=f"<think>{one.text}") if thinks else one for one, thinks in pairs]

    def score(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """Every score of every answer."""
        texts, references = [answer.text for answer in answers], self.references
        return {
            "exact_match": list(map(exact, texts, references)),
            "rouge_l": list(map(rouge_l, texts, references)),
            "character_f1": list(map(character_f1, texts, references)),
            "exact_content": content(exact, texts, references),
            "content": content(rouge_l, texts, references),
            "characters": [float(len(normalized(text))) for text in texts],
            "tokens": [float(len(answer.token_ids)) for answer in answers],
            "stopped": [float(answer.stopped) for answer in answers],
            "unfinished": [float(text.lstrip().startswith("<think>") and "</think>" not in text) for text in texts],
        }


def reference_of(view: View, row: Row) -> str:
    """The reference as a model would write it; a tool call is written the way the template writes it."""
    last = row["messages"][-1]
    if not last.get("tool_calls"):
        return str(last["content"] or "")
    prompt = view.prompt(row["messages"][:-1], row.get("tools"))
    ids, _ = view.encode(row["messages"], row.get("tools"))
    return str(view.tokenizer.decode(ids[common_length(prompt, ids) :], skip_special_tokens=True)).strip()


def before_after_table(
    questions: Sequence[list[Message]], references: Sequence[str], columns: Mapping[str, Sequence[str]], rows: int = 6
) -> list[dict[str, str]]:
    """For display: the question, the reference, and each model's answer with a tick or a cross; private data masked."""
    table = []
    for index in range(min(rows, len(references))):
        row = {tr("question"): mask(str(questions[index][-1]["content"])), tr("reference"): mask(references[index])}
        for name, answers in columns.items():
            tick = "✓" if exact(answers[index], references[index]) else "✗"
            row[name] = f"{tick} {mask(answers[index].strip())}"
        table.append(row)
    return table


def digest(value: Any) -> str:
    """A short fingerprint of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def stored_once(file: Path, decided_by: dict[str, Any], make: Callable[[], Any]) -> Any:
    """A JSON value that is made once and then read from its file, as long as what decides it stays the same."""
    fingerprint = digest(decided_by)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = read_json(file)
        if stored["fingerprint"] == fingerprint and stored["check"] == digest(stored["value"]):
            return stored["value"]
    value = make()
    write_json(file, {"fingerprint": fingerprint, "decided_by": decided_by, "check": digest(value), "value": value})
    return value


def resume_answers(file: Path, decided_by: dict[str, Any], prompts: list[list[int]], ask: Ask | None) -> list[Answer]:
    """The answers in order: those the file has already, and the missing ones from `ask`, written as they come.

    In a file of another fingerprint all are missing; so is a line that is torn or was changed.
    """
    header = {"fingerprint": digest(decided_by | {"prompts": prompts}), "decided_by": decided_by}
    first, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else [""]
    found: dict[int, Answer] = {}
    for line in lines if f'"fingerprint": "{header["fingerprint"]}"' in first else ():
        with suppress(ValueError, KeyError, TypeError, IndexError):
            stored = json.loads(line)
            number = int(stored["row"])
            answer = Answer(prompts[number], stored["token_ids"], stored["text"], stored["stopped"])
            if line == _line(number, answer):
                found[number] = answer
    missing = {number: prompt for number, prompt in enumerate(prompts) if number not in found}
    if missing and ask is not None:
        lines = [json.dumps(header, ensure_ascii=False, default=str), *(_line(*one) for one in sorted(found.items()))]
        write_text(file, "\n".join(lines) + "\n")  # whole, so that a line torn by a kill is gone
        with open(file, "a", encoding="utf-8", newline="\n") as out:
            for number, answer in ask(missing):
                found[number] = answer
                out.write(_line(number, answer) + "\n")
                out.flush()
            os.fsync(out.fileno())
    return [answer for _, answer in sorted(found.items())]


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
            raise CourseError(
                tr("LM_EVAL_TASKS is {tasks!r}, and lm-eval is not installed here.", tasks=tasks),
                todo=tr('Run `pip install "lm-eval>=0.4.9"`, then run this lesson again.'),
            )

    def run(self, name: str, model: Path | str, words: Sequence[str]) -> None:
        """Measure one model with these words of lm-eval's command; a result that is there already is read."""
        if "," in str(model):  # lm-eval would read what follows as options of its own
            raise CourseError(
                tr("The path {model} contains a comma, which lm-eval cannot parse.", model=model),
                todo=tr("Rename the folder."),
            )
        if self.tasks:
            self.folder.mkdir(parents=True, exist_ok=True)
            decided_by = {"model": stamp(Path(model)) or name, "dtype": self.dtype, "tasks": self.tasks}
            self.results[name] = stored_once(self.folder / f"{name}.json", decided_by, partial(self._measure, words))

    def _measure(self, words: Sequence[str]) -> dict[str, dict[str, float]]:
        """One run of lm-eval in a process of its own, which may know the hub's token and no other secret."""
        env = without_secrets(os.environ) | {key: os.environ[key] for key in ("HF_TOKEN",) if key in os.environ}
        with tempfile.TemporaryDirectory() as output:
            # without the word `run`: versions before 0.4.10 do not know it, later ones add it
            command = [sys.executable, "-m", "lm_eval", *words, "--output_path", output]
            ended = subprocess.run(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env, text=True)
            results = sorted(Path(output).rglob("results*.json"))
            if ended.returncode or not results:
                lines = "\n".join(ended.stderr.strip().splitlines()[-12:])
                raise CourseError(
                    tr(
                        "lm-eval could not run {tasks}. Its last lines:\n{lines}",
                        tasks=", ".join(self.tasks),
                        lines=lines,
                    ),
                    allowed=tr(
                        "names from `lm-eval ls tasks`, or paths of task files, whose data this machine can reach "
                        "(HF_HUB_OFFLINE forbids downloads)"
                    ),
                    todo=tr("Correct LM_EVAL_TASKS or the network, or leave it empty."),
                )
            tasks = read_json(results[-1])["results"].items()
        floats = {task: [pair for pair in one.items() if isinstance(pair[1], float)] for task, one in tasks}
        return {task: {name.removesuffix(",none"): one for name, one in pairs} for task, pairs in floats.items()}

    def __str__(self) -> str:
        lines = [f"{name}, {task}: {found}" for name, one in self.results.items() for task, found in one.items()]
        return "\n".join(lines) or tr("no public benchmark was asked for (LM_EVAL_TASKS)")
