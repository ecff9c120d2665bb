"""When it breaks: what an error message means, and what the numbers of a run show.

`symptoms.yaml` has cause and remedy: of error messages by a pattern, of runs by the name of a fault, for which
`examine` looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import IO

from nbutils import display, record, watch
from nbutils.errors import CourseError
from nbutils.files import read_yaml
from nbutils.language import say, tr
from nbutils.record import CheckedRows, Evaluation, RunFolder, TrainingFacts
from nbutils.tracking import Curve, best_of, loss_history, read_history, validation_history

MOST_READ = 2**28  # bytes of a log; a device has no end
FIRST_BYTES = 2**21  # that are searched
LAST_BYTES = 2**23
LARGE_SHARE = 0.1
FLAT = 0.95  # the last loss as a share of the first
RISEN = 1.1  # the last loss as a share of the first, or of the best
Entry = Mapping[str, str]  # of the table: cause, todo, and for a message its pattern, `seen`
Faults = Iterator[tuple[str, str]]  # the name of each in the table, and what was seen of it


@dataclass(frozen=True)
class Finding:
    """What was seen, why, and what to do."""

    symptom: str
    cause: str
    todo: str


@cache
def symptoms() -> dict[str, dict[str, Entry]]:
    """The table: `messages` and `runs`, by name."""
    return dict(read_yaml(Path(__file__).with_name("symptoms.yaml")))


def read_log(file: IO[bytes]) -> str:
    """The beginning and the end of a log."""
    log = file.read(MOST_READ)
    rest = log[FIRST_BYTES:]
    return (log[:FIRST_BYTES] + rest[-LAST_BYTES:]).decode(errors="replace")


def explain(text: str) -> dict[str, Finding]:
    """What an error message or a log means, the likeliest first; empty if nothing in it is known."""
    text = text.replace("\r", "\n")  # a progress bar in a log is one line of megabytes
    findings = {}
    for name, entry in symptoms()["messages"].items():
        if match := re.search(entry["seen"], text):
            findings[name] = _finding(match.group().strip(), entry)
    return findings


def _finding(seen: str, entry: Entry) -> Finding:
    return Finding(seen, tr(entry["cause"]), tr(entry["todo"]))


@dataclass(frozen=True)
class Trained:
    """What a run's folder says of its training: curves, counted rows, facts of lesson 03, evaluation of lesson 04."""

    train: Curve
    validation: Curve
    facts: TrainingFacts = field(default_factory=TrainingFacts)
    evaluation: Evaluation = field(default_factory=Evaluation)
    rows: CheckedRows = field(default_factory=CheckedRows)
    failure: str = ""  # how a training ended that neither finished nor was asked to stop

    @classmethod
    def of(cls, run: RunFolder) -> Trained:
        """Read what there is in a run folder."""
        failure = _failure(run.path)
        if failure:  # its curves, facts and evaluation were not written: those that are here are of an earlier stop
            return cls([], [], failure=failure)
        facts = run.recorded
        log = read_history(run.logs / "history.json")
        return cls(
            loss_history(log),
            validation_history(log),
            facts=facts.trained,
            evaluation=facts.evaluation,
            rows=facts.checked,
        )

    @property
    def ends(self) -> tuple[float, float]:
        """The training loss at the start and at the end, each a mean of a few; zeros if there is none."""
        losses = [loss for _, loss in self.train] or [0.0]
        return fmean(losses[:3]), fmean(losses[-3:])


def _failure(run: Path) -> str:
    """How the newest training in a run folder failed or died; empty if it did not."""
    with suppress(CourseError):  # no training here yet
        _, progress = watch.find_training(str(run))
        if progress.state in ("failed", "died"):
            return " ".join([watch.describe_state(progress), *progress.notes[-1:]])
    return ""


def _in_the_loss(run: Trained) -> Faults:
    """The training loss rises, or hardly moves."""
    first, last = run.ends
    fall = tr("the training loss went from {first:.3g} to {last:.3g}", first=first, last=last)
    if last > RISEN * first:
        yield "diverging", fall
    elif last > FLAT * first and len(run.train) > 5:
        yield "flat", fall


def _not_a_number(run: Trained) -> Faults:
    """The loss is NaN or infinite: the log ends before the training did, or float16 skipped many steps."""
    steps = run.facts.steps
    skipped = run.facts.skipped_steps or 0
    interval = run.facts.settings.get("sft.logging_steps", steps)
    last = run.train[-1][0] if run.train else steps
    if steps - last > 2 * interval:  # a loss that is not a number is not written
        yield "not_a_number", tr("the loss is not a number from step {step} on", step=last + 1)
    elif skipped > LARGE_SHARE * steps:
        seen = tr("{count} of {steps} steps were skipped: float16 overflowed", count=skipped, steps=steps)
        yield "not_a_number", seen


def _in_the_validation(run: Trained) -> Faults:
    """The validation loss never fell, or rose again while the training loss went on falling."""
    best = best_of(run.validation)
    if best is None:
        return
    step, lowest = best
    _, final = run.validation[-1]
    first, last = run.ends
    if step == 0 and len(run.validation) > 1:
        yield "never_better", tr("the validation loss never fell below {first:.3g}, where it began", first=lowest)
    if last < first and final > RISEN * lowest:
        yield (
            "overfitting",
            tr("validation loss {best:.3g} at step {step}, {last:.3g} at the end", best=lowest, step=step, last=final),
        )


def _in_the_training(run: Trained) -> Faults:
    """It failed, is unfinished, lost rows, or ran out of memory and went on with slower settings."""
    facts = run.facts
    rows = run.rows
    if run.failure:
        yield "failed", run.failure
    if not facts.ended:
        yield "unfinished", tr("step {steps} of {planned}", steps=facts.steps, planned=facts.planned_steps)
    too_long = facts.rows_left_out
    many_too_long = too_long > LARGE_SHARE * (facts.examples + too_long)
    if many_too_long or rows.rejected > LARGE_SHARE * rows.rows:
        seen = tr(
            "{rejected} of {rows} rows rejected, {long} too long", rejected=rows.rejected, rows=rows.rows, long=too_long
        )
        yield "rows_lost", seen
    if facts.oom_rungs:
        yield "out_of_memory", tr("out of memory, {times} times", times=len(facts.oom_rungs))


def _in_the_merged_model(run: Trained) -> Faults:
    """It is no better than the base, or does not end its answers."""
    verdict = run.evaluation.verdict
    if verdict not in ("", "helped"):
        yield "did_not_help", tr("verdict of lesson 04: {verdict}", verdict=tr(verdict))
    score = run.evaluation.scores.get("stopped", record.Score())
    stopped = score.merged.mean
    if stopped is not None and stopped < 1 - LARGE_SHARE:
        yield "endless_answers", tr("{share:.0%} of the answers do not stop", share=1 - stopped)


def examine(run: Trained) -> dict[str, Finding]:
    """Everything that is wrong with a training, by name of the fault.

    Example: diagnose.examine(diagnose.Trained.of(lesson.run))
    """
    findings = {}
    for look in (_not_a_number, _in_the_loss, _in_the_validation, _in_the_training, _in_the_merged_model):
        for name, seen in look(run):
            findings[name] = _finding(seen, symptoms()["runs"][name])
    return findings


def show(findings: Mapping[str, Finding]) -> None:
    """Findings as a table; where to look on if there are none.

    Example: diagnose.show(diagnose.explain("torch.OutOfMemoryError: CUDA out of memory."))
    """
    if not findings:
        say("Nothing known is wrong here. docs/faq.md has more; `python -m nbutils doctor` checks the machine.")
        return
    display.show_table([asdict(finding) for finding in findings.values()])
