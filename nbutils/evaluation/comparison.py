"""Did the tuning help? The answers of base and merged model, the verdict, and one HTML page.

Loss and character F1 improve as soon as a model copies the form of the answers, right or wrong. So only the scores of
content decide, and they must rise further than chance explains. The words of the verdict are in texts.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nbutils import data, display, files, record
from nbutils.chat import Row, may_skip_thinking
from nbutils.config import Profile
from nbutils.data.evidence import ALPHA, DECIDING, LEAST_ROWS
from nbutils.data.texts import shown
from nbutils.evaluation import scores
from nbutils.evaluation.evaluator import Evaluator, Facts, Result, Size, Table
from nbutils.evaluation.inference import Answer
from nbutils.evaluation.placement import Placement
from nbutils.evaluation.scores import Difference, Estimate
from nbutils.language import joined, language, tr
from nbutils.record import RunFolder

LEAST_GENERAL_ROWS = 10  # with fewer, forgetting is not judged
MOST_UNFINISHED = 0.2  # share of answers cut off while thinking; above it a comparison is worthless
FORGOT_PERPLEXITY = 1.10  # a ratio above it is forgetting
FORGOT_F1 = -0.05  # a change below it is forgetting
WORST_ROWS = 6  # that the page lists
PRACTICE_SIZE = Size(rows=40, batch_size=32, max_new_tokens=64)  # takes seconds on a CPU
PRACTICE_GENERAL_ROWS = 16
IN_4_BITS = "weights in 4 bits"  # where models do not fit otherwise


class ScoreDisplay(NamedTuple):
    """How a score is shown."""

    label: str
    form: str  # a format specification such as .3f
    description: str  # what it is, in a few words


TEXTS = files.read_yaml(Path(__file__).with_name("texts.yaml"))
SHOWN_SCORES = {score: ScoreDisplay(*texts) for score, texts in TEXTS["scores"].items()}


@dataclass(frozen=True)
class Verdict:
    """Whether the tuning helped, and why."""

    word: str  # the same in every language
    why: str
    todo: str  # what to do next; may be empty
    flags: list[str]  # what else looks wrong
    outcome: str  # the word, together with that on general knowledge

    @property
    def warnings(self) -> list[str]:
        """The flags as lines."""
        return [f"[WARN] {flag}" for flag in self.flags]

    def __str__(self) -> str:
        lines = [tr("VERDICT: {word}", word=self.outcome), self.why]
        if self.todo:
            lines.append(tr("To do: {todo}", todo=self.todo))
        lines += self.warnings
        return "\n".join(map(display.prose, lines))


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge."""

    word: str  # kept, forgot or unclear
    ratio: Estimate  # of the perplexities, after to before
    f1: Difference  # of the answers, after minus before
    text: str  # the numbers and what they mean, in a sentence

    def __str__(self) -> str:
        title = tr("GENERAL KNOWLEDGE: {word}", word=tr(self.word))
        return f"{title}\n{display.prose(self.text)}"


@dataclass(frozen=True)
class Comparison:
    """What two models answered, before and after the tuning, to the held-out and to the general rows."""

    base: Result
    tuned: Result
    general_base: Result
    general_tuned: Result

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of the held-out rows."""
        return self.tuned.evaluator

    @property
    def results(self) -> tuple[Result, Result]:
        """The results on the held-out rows, before and after."""
        return self.base, self.tuned

    @property
    def title(self) -> str:
        """The name of the tuned model, for display."""
        return tr(self.tuned.name)

    @cached_property
    def means(self) -> dict[str, dict[str, Estimate]]:
        """Each score of each model with its interval."""
        return {score: {result.name: result.estimate(score) for result in self.results} for score in SHOWN_SCORES}

    @cached_property
    def changes(self) -> dict[str, Difference]:
        """The change of each score on the same rows, after minus before."""
        return {score: self.tuned.change(self.base, score) for score in SHOWN_SCORES}

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the tuning helped; `_case` says when."""
        rows = len(self.tuned.answers)
        deciding = []
        for score in DECIDING:
            change = self.changes[score]
            deciding.append(f"{tr(SHOWN_SCORES[score].label)} {change.text('+.3f')}, p {change.p_text}")
        texts = TEXTS["cases"][self._case()]
        why = tr(
            texts["why"],
            rows=rows,
            before=round(sum(self.base.scores["exact_match"])),
            after=round(sum(self.tuned.scores["exact_match"])),
            content=joined(deciding, ";"),
        )
        flags = []
        cut = sum(not answer.stopped for answer in self.tuned.answers)
        if cut > rows / 10:
            flags.append(tr(TEXTS["cut_off"], count=cut, rows=rows))
        outcome = record.outcome(texts["word"], self.forgetting.word)
        return Verdict(texts["word"], why, tr(texts["todo"]), flags, outcome)

    def _case(self) -> str:
        """The case in texts.yaml: what decides is content that changed with p below ALPHA and an interval without 0."""
        if len(self.base.answers) < LEAST_ROWS:
            return "too_few_rows"
        if max(result.mean("unfinished") for result in self.results) > MOST_UNFINISHED:
            return "cut_in_thinking"
        changes = [self.changes[score] for score in DECIDING if self.changes[score].p < ALPHA]
        rose = any(change.low > 0 for change in changes)
        fell = any(change.high < 0 for change in changes)
        if rose == fell:  # neither, or one up and one down
            return "no_proof"
        return "helped" if rose else "harmed"

    @cached_property
    def forgetting(self) -> Forgetting:
        """Whether perplexity on the general rows surely rose above FORGOT_PERPLEXITY, or F1 fell below FORGOT_F1."""
        loss = self.general_tuned.change(self.general_base, "loss")
        f1 = self.general_tuned.change(self.general_base, "character_f1")
        # the exponential of a difference of losses is the ratio of the perplexities
        ratio = Estimate(_exp(loss.mean), _exp(loss.low), _exp(loss.high))
        answers_lost = f1.mean < FORGOT_F1 and f1.high < 0 and f1.p < 0.05
        if len(self.general_base.answers) < LEAST_GENERAL_ROWS:
            word = "unclear"
        elif ratio.low > FORGOT_PERPLEXITY or answers_lost:
            word = "forgot"
        else:
            word = "kept" if ratio.high <= FORGOT_PERPLEXITY else "unclear"
        text = tr(
            "Perplexity x {ratio}, character F1 {f1}: {means}.",
            ratio=ratio.text(".3g"),
            f1=f1.text("+.3f"),
            means=tr(TEXTS["forgetting"][word]),
        )
        return Forgetting(word, ratio, f1, text)

    @property
    def page(self) -> Path:
        """The HTML report."""
        return self.evaluator.folder / "report.html"

    def table(self, *names: str) -> Table:
        """A table with a row for each score, or for the named ones."""
        table = []
        for score in names or SHOWN_SCORES:
            change = self.changes[score]
            form = "+" + SHOWN_SCORES[score].form.lstrip("+")
            row = _table_row(score, self.means[score])
            row[tr("difference")] = change.text(form)
            row["p"] = change.p_text
            table.append(row)
        return table

    def show_scores(self, *names: str) -> None:
        """Show the table: in a notebook as HTML, elsewhere as text."""
        display.show_table(self.table(*names))

    def show_answers(self, rows: int = 6, *, general: bool = False) -> None:
        """Show the first answers of each model beside the reference, with a tick if they are equal."""
        results = (self.general_base, self.general_tuned) if general else self.results
        columns = {tr(result.name): result.texts for result in results}
        display.show_table(results[0].evaluator.table(columns, rows))

    def write_page(self, run: str) -> None:
        """Write the HTML report, with the answers that are least like their references."""
        similarity = self.tuned.scores["rouge_l"]
        worst = sorted(range(len(similarity)), key=similarity.__getitem__)  # row numbers
        page = display.render(
            "report.html",
            run=run,
            comparison=self,
            worst=worst[:WORST_ROWS],
            alpha=f"{ALPHA:g}",
            level=f"{scores.LEVEL:.0%}",
            descriptions=[score.description for score in SHOWN_SCORES.values()],
            shown=_masked_text,
            answer=scores.without_thinking,
            language=language(),
        )
        files.write_text(self.page, page + "\n")

    def facts(self) -> Facts:
        """Everything for facts.json."""
        rows = len(self.base.answers)
        left_out = self.evaluator.left_out
        verdict = self.verdict
        link = tr("all of it: [evaluation/report.html](evaluation/report.html)")
        measured = {}
        for score, means in self.means.items():
            measured[score] = {name: asdict(mean) for name, mean in means.items()}
            measured[score]["difference"] = asdict(self.changes[score])
        evaluation = {
            "verdict": verdict.word,
            "rows": rows,
            "why": verdict.why,
            "todo": verdict.todo,
            "flags": verdict.flags,
            "scores": measured,
            "summary": [verdict.outcome, *verdict.warnings, link],
            "perplexity": {result.name: _exp(result.mean("loss")) for result in self.results},
            "answers_by": {"base": "generate", "merged": "generate"},
            "general": {
                "verdict": self.forgetting.word,
                "perplexity_ratio": asdict(self.forgetting.ratio),
                "loss": {result.name: result.mean("loss") for result in (self.general_base, self.general_tuned)},
                "rows": len(self.general_base.answers),
                "character_f1_difference": asdict(self.forgetting.f1),
            },
            "thinking": self.evaluator.mode,
            "rows_left_out": left_out,
            "report": str(self.page),
        }
        return {
            "exact_match": {result.name: result.mean("exact_match") for result in self.results},
            "rows": rows,
            "rows_left_out": left_out,
            "verdict": verdict.word,
            "evaluation": evaluation,
        }


def _exp(loss: float) -> float:
    """The perplexity of a loss; 50 keeps that of a broken model finite."""
    return math.exp(min(loss, 50.0))


def _table_row(score: str, means: Mapping[str, Estimate]) -> dict[str, str]:
    label, form, _ = SHOWN_SCORES[score]
    return {tr("score"): tr(label)} | {tr(name): mean.text(form) for name, mean in means.items()}


def score_table(evaluator: Evaluator, answers: Mapping[str, Sequence[Answer]]) -> Table:
    """A table of the mean scores of several sets of answers to the same questions.

    Example:
        display.show_table(score_table(model.evaluator, {"tuned": model.ask(server)}))
    """
    return result_table({name: evaluator.result(name, model_answers) for name, model_answers in answers.items()})


def result_table(results: Mapping[str, Result]) -> Table:
    """A table of the mean scores of several results, by name.

    Example: display.show_table(result_table({"base": comparison.base, "tuned": comparison.tuned}))
    """
    table = []
    for score in (
        "exact_match",
        "character_f1",
        "rouge_l",
        "stopped",
    ):
        means = {name: result.estimate(score) for name, result in results.items()}
        table.append(_table_row(score, means))
    return table


def _masked_text(value: Any) -> str:
    """A text for the page: private data masked, control characters visible."""
    return "\n".join(map(shown, str(value or "").split("\n")))


def open_evaluator(
    run: RunFolder,
    profile: Profile,
    folder: Path | str,
    *,
    in_4_bits: bool = False,
    rows: Sequence[Row] | None = None,
    subject: str = "",
) -> Evaluator:
    """The held-out rows, or others, for the model in `folder`; those that do not fit it, or a server, are left out."""
    from transformers import AutoConfig, AutoTokenizer

    if rows is None:
        _, rows = data.load(run.data)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    course = profile.course
    dtype = profile.from_pretrained.dtype
    return Evaluator(
        run.path,
        tokenizer,
        rows,
        Size(course.evaluation_rows, course.evaluation_batch_size, course.max_new_tokens),
        f"{dtype}, {IN_4_BITS}" if in_4_bits else dtype,
        subject,
        thinking=False if may_skip_thinking(tokenizer, rows) else None,
        limit=min(config.get_text_config().max_position_embeddings, profile.vllm.max_model_len),
    )


def compare_models(
    run: RunFolder,
    profile: Profile,
    placement: Placement,
    folder: Path,
    *,
    model_name: str,
) -> Comparison:
    """Base and merged model on the held-out and the general rows, and the HTML report; answers are stored as they come.

    Example:
        comparison = compare_models(lesson.run, lesson.profile, placement, folder, model_name=lesson.model_name)
        print(comparison.verdict)
    """
    from nbutils.training import model_fingerprint

    evaluator = open_evaluator(run, profile, folder, in_4_bits=not placement.fits)
    general = evaluator.general()

    def ask(name: str, path: str | Path, fingerprint: Any) -> list[Result]:
        model = placement.load(path)
        return [rows.evaluate(name, model, fingerprint) for rows in (evaluator, general)]

    base, general_base = ask("base", placement.model, model_fingerprint(placement.model, model_name))
    tuned, general_tuned = ask("merged", folder, files.stamp(folder))
    placement.free()
    comparison = Comparison(base, tuned, general_base, general_tuned)
    comparison.write_page(run.name)
    return comparison


def compare_practice(run: Path) -> dict[str, Comparison]:
    """The practice runs of lesson 03, each against the untuned model; they are kept in the folder of a run.

    Example: judged = compare_practice(lesson.run.path)
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from nbutils.training import practice

    trained = {name: practice.train(settings, practice.folder(run, name)) for name, settings in practice.RUNS.items()}
    tokenizer = practice.small_tokenizer()
    evaluator = Evaluator(run / practice.FOLDER, tokenizer, practice.held_out(), PRACTICE_SIZE, "float32")
    both = (evaluator, evaluator.general(PRACTICE_GENERAL_ROWS))

    def base_model() -> Any:
        return AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype="float32", trust_remote_code=False)

    base, general_base = (rows.evaluate("base", base_model(), "") for rows in both)
    judged = {}
    for name, practised in trained.items():
        merged: Any = PeftModel.from_pretrained(base_model(), practised.adapter).merge_and_unload()
        tuned, general_tuned = (rows.evaluate(name, merged, str(practice.RUNS[name])) for rows in both)
        judged[name] = Comparison(base, tuned, general_base, general_tuned)
    return judged


def stored_answers(run: RunFolder, profile: Profile, folder: Path, rows: int = 0) -> tuple[Evaluator, list[Answer]]:
    """An evaluator with the held-out questions for a server of the model in `folder`, and lesson 04's answers to them.

    `rows`: the first ones only. There are no answers if lesson 04 asked another model, or in 4 bits.
    """
    evaluator = open_evaluator(run, profile, folder)
    stored = evaluator.stored_answers("merged", files.stamp(folder), folder)
    if rows:
        size = replace(evaluator.size, rows=rows)
        evaluator = replace(evaluator, size=size)
    asked = len(evaluator.rows)
    if asked > len(stored):
        return evaluator, []
    return evaluator, stored[:asked]
