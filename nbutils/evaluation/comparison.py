"""Did the tuning help? How base and merged model are loaded, what they answer, the verdict, and one HTML page.

Form is cheap: loss and character F1 improve on any answers, right or wrong. So only content decides, and it must rise
further than chance explains. Its texts are in texts.yaml; in the page they are escaped and masked.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nbutils import data, disk, display, files, hardware, merging, platforms, record
from nbutils.chat import may_skip_thinking
from nbutils.data.evidence import ALPHA, DECIDING, FEW_ROWS, LEAST_ROWS
from nbutils.data.texts import shown
from nbutils.evaluation import evaluator as scoring
from nbutils.evaluation.evaluator import Difference, Estimate, Evaluator, Result, Size
from nbutils.evaluation.inference import Answer
from nbutils.language import joined, language, tr
from nbutils.record import LessonLike

PANELS = ("exact_match", "character_f1", "rouge_l", "content", "loss", "stopped")
LEAST_GENERAL = 10  # rows; below: no word on forgetting
CUT_OFF = 0.2  # share of unfinished thinking that makes a comparison worthless
FORGOT_PERPLEXITY, FORGOT_F1 = 1.10, -0.05  # ratio above, change below
SAMPLES, LONGEST = 6, 1200  # rows of each list in the page, characters of a text
WORK_GIB = 1.5  # beside the weights: CUDA itself, activations and logits
SPARE_RAM_GIB = 2.0  # for this program and its neighbors
LOADED = 1.1  # weights as loaded, with what torch leaves between them
IN_4_BITS = "weights in 4 bits"  # how models that do not fit are asked
TEXTS = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))
SHOWN = TEXTS["scores"]


@dataclass(frozen=True)
class Verdict:
    """One word, the same in every language; why, what to do next, and what else looks wrong."""

    word: str
    why: str
    todo: str
    flags: list[str]
    outcome: str  # the word, with that on general knowledge

    def __str__(self) -> str:
        todo = [tr("To do: {todo}", todo=self.todo)] if self.todo else []
        warnings = [f"[WARN] {flag}" for flag in self.flags]
        lines = [tr("VERDICT: {word}", word=self.outcome), self.why, *todo, *warnings]
        return "\n".join(part for line in lines for part in display.wrap(line))


@dataclass(frozen=True)
class Forgetting:
    """What became of general knowledge: the ratio of perplexities, after to before, and F1 of the answers."""

    word: str
    ratio: Estimate
    f1: Difference
    text: str  # the numbers and what they mean, in a sentence

    def __str__(self) -> str:
        title = tr("GENERAL KNOWLEDGE: {word}", word=tr(self.word))
        return "\n".join([title, *display.wrap(self.text)])


@dataclass(frozen=True)
class Comparison:
    """The results of one evaluator: the first is the one before the tuning, the last the one after."""

    results: Sequence[Result]
    general: Sequence[Result] = ()
    evaluator: Evaluator | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it helped: only content decides, if its interval is above 0 and p below ALPHA."""
        base, tuned = self.results[0], self.results[-1]
        rows, changes = len(base.answers), {score: tuned.change(base, score) for score in DECIDING}
        moved = {(one.low > 0) - (one.high < 0) for one in changes.values() if one.p < ALPHA}
        if rows < LEAST_ROWS:
            case = "too_few_rows"
        elif max(base.mean("unfinished"), tuned.mean("unfinished")) > CUT_OFF:
            case = "cut_in_thinking"
        else:
            case = {1: "helped", -1: "harmed", 0: "no_proof"}[sum(moved)]  # one up and one down: no proof
        before, after = (round(sum(one.scores["exact_match"])) for one in (base, tuned))
        gained = [f"{tr(SHOWN[score][0])} {one.text('+.3f')}, p {one.p_text}" for score, one in changes.items()]
        values = {"rows": rows, "before": before, "after": after, "content": joined(gained, ";")}
        flags = [tr(TEXTS["few_rows"], rows=rows)] if rows < FEW_ROWS else []
        for one, enough in ((base, max(map(len, base.references))), (tuned, math.inf)):  # a base may be wordy
            count = sum(not answer.stopped and len(answer.text) < enough for answer in one.answers)
            flags += [tr(TEXTS["cut_off"], name=tr(one.name), count=count, rows=rows)] if count > rows / 10 else []
        texts = TEXTS["cases"][case]
        words: dict[str, Any] = {"verdict": texts["word"]}
        if self.forgetting:
            words["general"] = {"verdict": self.forgetting.word}
        return Verdict(texts["word"], tr(texts["why"], **values), tr(texts["todo"]), flags, record.outcome(words))

    @cached_property
    def forgetting(self) -> Forgetting | None:
        """Whether perplexity on the general rows surely rose by more than a tenth, or F1 fell by more than 0.05."""
        if not self.general:
            return None
        loss, f1 = (self.general[-1].change(self.general[0], score) for score in ("loss", "character_f1"))
        ratio = Estimate(*(math.exp(min(one, 50.0)) for one in (loss.mean, loss.low, loss.high)))
        answers_lost = f1.mean < FORGOT_F1 and f1.high < 0 and f1.p < 0.05
        word = "kept" if ratio.high <= FORGOT_PERPLEXITY else "unclear"
        word = "forgot" if ratio.low > FORGOT_PERPLEXITY or answers_lost else word
        word = word if len(self.general[0].answers) >= LEAST_GENERAL else "unclear"
        means = TEXTS["slightly_worse"] if word == "kept" and f1.high < 0 else TEXTS["forgetting"][word]
        values = {"ratio": ratio.text(".3g"), "f1": f1.text("+.3f"), "means": tr(means)}
        return Forgetting(word, ratio, f1, tr("Perplexity x {ratio}, character F1 {f1}: {means}.", **values))

    @cached_property
    def means(self) -> dict[str, dict[str, Estimate]]:
        """Each score of each model with its interval."""
        return {score: {one.name: one.estimate(score) for one in self.results} for score in SHOWN}

    @cached_property
    def changes(self) -> dict[str, Difference]:
        """Each score, after minus before, on the same rows."""
        return {score: self.results[-1].change(self.results[0], score) for score in SHOWN}

    @property
    def page(self) -> Path:
        """The HTML report."""
        assert self.evaluator
        return self.evaluator.folder / "report.html"

    def table(self, *scores: str) -> list[dict[str, str]]:
        """For display: one row for each score, or for those named."""
        rows = []
        for score in scores or SHOWN:
            label, form, _ = SHOWN[score]
            means = {tr(name): one.text(form) for name, one in self.means[score].items()}
            difference, p = self.changes[score].text(f"+{form.lstrip('+')}"), self.changes[score].p_text
            rows.append({tr("score"): tr(label)} | means | {tr("difference"): difference, "p": p})
        return rows

    def show_scores(self, *scores: str) -> None:
        """The table in a notebook, or as text."""
        display.show_table(table := self.table(*scores), text=display.aligned(table))

    def show_answers(self, rows: int = 6, *, general: bool = False) -> None:
        """The first answers of each model beside the reference; a tick if they are equal."""
        results = self.general if general else self.results
        columns = {tr(one.name): one.texts for one in results}
        display.show_table(scoring.before_after_table(results[0].questions, results[0].references, columns, rows))

    def plot(self, *scores: str) -> None:
        """The scores as a figure, also in evaluation/scores.png."""
        display.show_figure(_figure(self, scores), self.page.with_name("scores.png"))

    def write_page(self, run: str, about: Mapping[str, Any]) -> None:
        """Write the HTML report; `about` says how it was measured (GPU, versions, dtype)."""
        import jinja2
        import matplotlib.pyplot as plt

        def for_others(value: Any) -> str:
            """Private data masked, control characters visible, cut if it is very long."""
            text = "\n".join(map(shown, str(value or "").split("\n")))
            cut = {"text": text[:LONGEST], "count": len(text)}
            return text if len(text) <= LONGEST else tr("{text} … ({count} characters)", **cut)

        template, svg, figure = Path(__file__).with_name("report.html"), io.StringIO(), _figure(self, PANELS)
        figure.savefig(svg, format="svg")
        plt.close(figure)  # a notebook shows every figure that is left open
        tuned, before = self.results[-1].scores, self.results[0].scores["exact_match"]
        wrong = [row for row, right in enumerate(tuned["exact_match"]) if not right]
        worst = sorted(wrong, key=lambda row: (-before[row], tuned["rouge_l"][row]))  # first those right before
        page = jinja2.Environment(autoescape=True).from_string(template.read_text(encoding="utf-8")).render(
            run=run, date=f"{datetime.now():%Y-%m-%d %H:%M}", evaluator=self.evaluator, comparison=self, about=about,
            first=range(min(SAMPLES, len(tuned["exact_match"]))), worst=worst[:SAMPLES], alpha=f"{ALPHA:g}",
            level=f"{scoring.LEVEL:.0%}", descriptions=[text for _, _, text in SHOWN.values()], shown=for_others,
            answer=scoring.without_thinking, svg=svg.getvalue().partition("<svg")[2], tr=tr, language=language(),
        )  # fmt: skip
        files.write_text(self.page, page.encode("utf-8", "replace").decode("utf-8") + "\n")

    def facts(self) -> dict[str, Any]:
        """All numbers for facts.json."""
        first, verdict, summary = self.results[0], self.verdict, [self.verdict.outcome]
        for score in ("exact_match", "content"):
            label, form, _ = SHOWN[score]
            means = [f"{tr(name)} {one.text(form)}" for name, one in self.means[score].items()]
            summary += [joined([tr(label), joined(means)], ":")]
        summary += [f"[WARN] {flag}" for flag in verdict.flags]
        evaluation = {
            "verdict": verdict.word, "rows": len(first.answers),
            "why": verdict.why, "todo": verdict.todo, "flags": verdict.flags,
            "scores": {
                score: {name: one.facts() for name, one in means.items()} | {"difference": self.changes[score].facts()}
                for score, means in self.means.items()
            },
            "summary": [*summary, tr("all of it: [evaluation/report.html](evaluation/report.html)")],
            "perplexity": {one.name: math.exp(one.loss) if one.loss < 50 else None for one in self.results},
            "answers_by": {one.name: one.by for one in self.results},
        }  # fmt: skip
        if self.forgetting:
            evaluation["general"] = {
                "verdict": self.forgetting.word, "perplexity_ratio": self.forgetting.ratio.facts(),
                "loss": {one.name: one.loss if math.isfinite(one.loss) else None for one in self.general},
                "rows": len(self.general[0].answers), "character_f1_difference": self.forgetting.f1.facts(),
            }  # fmt: skip
        if self.evaluator:
            asked = {"thinking": self.evaluator.mode, "rows_left_out": self.evaluator.left_out}
            evaluation |= asked | {"report": str(self.page)}
        return {
            "exact_match": {one.name: one.mean("exact_match") for one in self.results}, "rows": len(first.answers),
            "rows_left_out": evaluation.get("rows_left_out", 0), "verdict": self.verdict.word, "evaluation": evaluation,
        }  # fmt: skip


def score_table(evaluator: Evaluator, answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, str]]:
    """The means of several sets of answers to one evaluator, for display."""
    table, scored = [], {name: evaluator.score(evaluator.with_think_tag(given)) for name, given in answers.items()}
    for score in ("exact_match", "character_f1", "rouge_l", "stopped"):
        means = {name: scoring.estimate(one[score], shares=score in scoring.SHARES) for name, one in scored.items()}
        label, form, _ = SHOWN[score]
        table.append({tr("score"): tr(label)} | {tr(name): one.text(form) for name, one in means.items()})
    return table


def _figure(comparison: Comparison, scores: Sequence[str]) -> Any:
    """Small panels, three in a line, the models from left to right: a dot with its interval each."""
    lines = -(-len(scores) // 3)
    figure, axes = display.pyplot().subplots(lines, 3, figsize=(8.4, 2.2 * lines), squeeze=False)
    for panel, score in zip(axes.flat, scores, strict=False):
        for name, one in comparison.means[score].items():
            panel.errorbar([tr(name)], [one.mean], [[one.mean - one.low], [one.high - one.mean]], fmt="o", lw=4)
        panel.set_title(tr(SHOWN[score][0]), loc="left")
        panel.margins(x=0.4)
        panel.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    return figure


@dataclass
class Placement:
    """Whether the unquantized model fits, why, and what `from_pretrained` is given to load it unquantized or not."""

    fits: bool
    reason: str
    unquantized: dict[str, Any]  # spread over GPU, RAM and disk if it does not fit
    in_4_bits: dict[str, Any]
    loading: dict[str, Any]  # the one of both for models that answer questions
    loaded: tuple[Any, Any] = (None, None)  # the model that `load` keeps, after what identifies it

    def load(self, folder: str | Path, loading: dict[str, Any] | None = None) -> Any:
        """The model in `folder`; it is kept for the next call, and the one before leaves the memory first."""
        from transformers import AutoModelForCausalLM

        loading = loading or self.loading
        wanted = (str(folder), files.stamp(Path(folder)), "quantization_config" in loading)
        if self.loaded[0] != wanted:
            self.free()
            model: Any = AutoModelForCausalLM.from_pretrained(folder, **loading, trust_remote_code=False)
            hardware.keep_4bit_layout(model)  # as in training
            self.loaded = (wanted, model)
        return self.loaded[1]

    def free(self) -> None:
        """Let the loaded model leave the memory, and delete what of it was put on disk."""
        self.loaded = (None, None)
        hardware.free_memory()
        if "offload_folder" in self.unquantized:
            shutil.rmtree(self.unquantized["offload_folder"], ignore_errors=True)


def place_model(lesson: LessonLike) -> Placement:
    """Whether the lesson's model fits into free memory, and how to load it."""
    from transformers import BitsAndBytesConfig

    dtype = lesson.profile.from_pretrained.dtype
    gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype)
    fits, memory, place = fit(gib, lesson.gpu)
    whole: dict[str, Any] = {"dtype": dtype, "device_map": {"": 0 if lesson.gpu else "cpu"}}
    kind = dict(lesson.profile.quantization) | {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    in_4_bits = whole | {"quantization_config": BitsAndBytesConfig(**kind)}
    if fits:
        reason = tr("{gib:.1f} GiB of weights fit into {place}", gib=gib, place=place)
        return Placement(True, reason, whole, in_4_bits, whole)
    scratch = lesson.scratch / "offload"
    disk.require_disk(scratch, gib, tr("what GPU and RAM cannot hold of the model"))
    shown = {"gib": gib, "place": place}
    reason = tr("{gib:.1f} GiB of weights do NOT fit into {place}: questions are asked in 4 bits", **shown)
    spread = {"dtype": dtype, "device_map": "auto", "max_memory": memory, "offload_folder": str(scratch)}
    return Placement(False, reason, spread, in_4_bits, in_4_bits)


def fit(gib: float, gpu: hardware.GPU | None) -> tuple[bool, dict[int | str, str], str]:
    """Whether weights of this size fit; if not, what they may take of GPU and RAM; and where they would lie."""
    ram = platforms.free_memory_gib().value
    free, place, shares = ram - SPARE_RAM_GIB, tr("RAM ({gib:.1f} GiB free)", gib=ram), dict[int | str, float]()
    if gpu:
        import torch

        hardware.free_memory()
        on_gpu = float(torch.cuda.mem_get_info()[0]) / files.GIB
        place = tr("the GPU ({gib:.1f} GiB free)", gib=on_gpu)
        free, shares[0] = on_gpu - WORK_GIB, on_gpu - 2 * WORK_GIB
    shares["cpu"] = (ram - SPARE_RAM_GIB) / 2
    return gib * LOADED <= free, {part: f"{max(0, int(share * 1024))}MiB" for part, share in shares.items()}, place


def open_evaluator(
    lesson: LessonLike, folder: str | Path, tokenizer: Any, *, in_4_bits: bool = False, rows: int = 0, limit: int = 0
) -> Evaluator:
    """The held-out rows for the model in `folder`; rows that do not fit its context, or `limit`, are left out."""
    from transformers import AutoConfig

    _, held_out = data.load(lesson.run.data)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    context = getattr(config, "max_position_embeddings", 0) or 0
    course, dtype = lesson.profile.course, lesson.profile.from_pretrained.dtype
    size = Size(rows or course.evaluation_rows, course.evaluation_batch_size, course.max_new_tokens)
    return Evaluator(
        lesson.run.path, tokenizer, held_out, size,
        f"{dtype}, {IN_4_BITS}" if in_4_bits else dtype,
        thinking=False if may_skip_thinking(tokenizer, held_out) else None,
        limit=min(filter(None, (int(context), limit)), default=0),
    )  # fmt: skip


def compare_models(lesson: LessonLike, folder: Path, placement: Placement, server: Any = None) -> Comparison:
    """Base and merged model on the held-out and the general rows, and the HTML report.

    Answers are stored as they come. A `server` (serving.running) that serves this folder gives the merged model's.
    """
    from transformers import AutoTokenizer

    from nbutils.training import model_fingerprint

    tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter, trust_remote_code=False)
    evaluator = open_evaluator(lesson, lesson.model, tokenizer, in_4_bits=not placement.fits)
    general = evaluator.general()
    thinking = tr(", asked without thinking") if evaluator.thinking is False else ""
    asked = {"rows": len(evaluator.rows), "general": len(general.rows), "tokens": evaluator.max_new_tokens}
    print(tr("{rows} held-out rows and {general} general ones; answers of at most {tokens} tokens", **asked) + thinking)
    results: tuple[list[Result], list[Result]] = ([], [])
    for name, path, fingerprint, answers_by in (
        ("base", lesson.model, model_fingerprint(lesson), None),
        ("merged", folder, files.stamp(folder), server),
    ):
        for one, found in zip((evaluator, general), results, strict=True):
            found.append(one.evaluate(name, placement.load(path), fingerprint, answers_by))
    placement.free()
    comparison = Comparison(*results, evaluator)
    versions = ", ".join(f"{name} {number}" for name, number in record.versions().items())
    machine = f"{lesson.platform.name}, {lesson.gpu or 'CPU'}"
    about = {tr("model"): lesson.model_name, tr("machine"): machine, tr("versions"): versions}
    comparison.write_page(lesson.run.name, about)
    return comparison


class StoredAnswers(NamedTuple):
    """What the merged model answered in lesson 04, and the evaluator with these questions, references and tools."""

    evaluator: Evaluator
    answers: list[Answer]


def stored_answers(lesson: LessonLike, folder: Path, *, rows: int = 0, limit: int = 0) -> StoredAnswers | None:
    """Lesson 04's answers of the merged model in `folder`, or of the one an export was made from; None if it left none.

    `rows`: the first ones only. `limit`: those that fit a context of so many tokens. `evaluator.dtype` says how the
    model computed ("float32", "bfloat16, weights in 4 bits", ...), `evaluator.thinking` how it was asked.
    """
    from transformers import AutoTokenizer

    about, merged = files.stamp(folder) or {}, folder
    if "of" in about:  # an export
        merged = lesson.run.merged
        there = (merged / "config.json").is_file()
        if not there or merging.weights_fingerprint(merging.open_base(merged)) != about["of"]:
            return None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for in_4_bits in (False, True):
        asked = open_evaluator(lesson, merged, tokenizer, in_4_bits=in_4_bits)
        known = {tuple(one.prompt_ids): one for one in asked.kept("merged", files.stamp(merged), merged)}
        if known:
            chosen = open_evaluator(lesson, merged, tokenizer, in_4_bits=in_4_bits, rows=rows, limit=limit)
            if all(tuple(prompt) in known for prompt in chosen.prompts):
                return StoredAnswers(chosen, [known[tuple(prompt)] for prompt in chosen.prompts])
    return None
