"""When it breaks: what an error message means, and what the numbers of a run show.

`symptoms.yaml` has cause and remedy: of error messages by a pattern, of runs by the name of one of the `CHECKS` below,
each of which looks at one thing and says what it saw.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import IO

import yaml

from nbutils import display, record, watch
from nbutils.errors import CourseError
from nbutils.files import read_object
from nbutils.language import tr
from nbutils.record import Count, Evaluation, Recorded, RunFolder, TrainingFacts
from nbutils.tracking import Curve, best_of, loss_history, read_history, validation_history

PIECE = 2**21  # bytes of a log that are read at a time
MOST_PIECES = 2**9  # of what has no end
LAST_PIECES = 3  # of a long log are searched, and the first
FEW_STEPS = 20
LARGE_SHARE = 0.1
FLAT = 0.95  # the last loss as a share of the first
RISEN = 1.1  # the last loss as a share of the first, or of the best
Entry = Mapping[str, str]  # of the table: cause, todo, and for a message its pattern, `seen`


@dataclass(frozen=True)
class Finding:
    """What was seen, why, and what to do."""

    seen: str
    cause: str
    todo: str


@cache
def symptoms() -> dict[str, dict[str, Entry]]:
    """The table: `messages` and `runs`, by name."""
    table = Path(__file__).with_name("symptoms.yaml")
    return dict(yaml.safe_load(table.read_text(encoding="utf-8")))


def read_log(file: IO[bytes]) -> str:
    """The beginning and the end of a log of any size; of what has no end, such as a device, a part."""
    first = file.read(PIECE)
    last: deque[bytes] = deque(maxlen=LAST_PIECES)
    piece = first
    for _ in range(MOST_PIECES):
        if len(piece) < PIECE:  # the end: whoever pastes would have to end it twice if it were read on
            break
        piece = file.read(PIECE)
        last.append(piece)
    return b"".join([first, *last]).decode(errors="replace")


def explain(text: str) -> dict[str, Finding]:
    """What an error message or a log means, the likeliest first; empty if nothing in it is known."""
    text = text.replace("\r", "\n")  # a progress bar in a log is one line of megabytes
    findings = {}
    for name, entry in symptoms()["messages"].items():
        if match := re.search(entry["seen"], text):
            findings[name] = _finding(match.group().strip(), entry)
    return findings


def known() -> dict[str, Finding]:
    """All there is in the table, by name."""
    entries = symptoms()["messages"] | symptoms()["runs"]
    return {name: _finding(name, entry) for name, entry in entries.items()}


def _finding(seen: str, entry: Entry) -> Finding:
    return Finding(seen, tr(entry["cause"]), tr(entry["todo"]))


class DataCard(Recorded):
    """What is read of data_card.json."""

    rows: Count = 0
    rejected: Count = 0


@dataclass(frozen=True)
class Trained:
    """What a run's folder says of its training: curves, facts of lesson 03, evaluation of lesson 04, data card."""

    train: Curve
    validation: Curve
    facts: TrainingFacts = field(default_factory=TrainingFacts)
    evaluation: Evaluation = field(default_factory=Evaluation)
    card: DataCard = field(default_factory=DataCard)
    merge_is_outdated: bool = False
    failure: str = ""  # how a training ended that neither finished nor was asked to stop

    @classmethod
    def of(cls, run: RunFolder) -> Trained:
        """Read what there is in a run folder."""
        with record.reading(run.data / "data_card.json"):
            card = DataCard.model_validate(read_object(run.data / "data_card.json"))
        failure = _failure(run)
        if failure:  # its curves, facts and evaluation were not written: those that are here are of an earlier stop
            return cls([], [], card=card, failure=failure)
        lessons = record.load(run.facts).lessons
        log = read_history(run.logs / "history.json")
        return cls(
            loss_history(log),
            validation_history(log),
            facts=lessons.trained,
            evaluation=Evaluation() if run.merge_is_outdated else lessons.merged.evaluation,
            card=card,
            merge_is_outdated=run.merge_is_outdated,
        )

    @property
    def ends(self) -> tuple[float, float]:
        """The training loss at the start and at the end, each a mean of a few; zeros if there is none."""
        losses = [loss for _, loss in self.train if math.isfinite(loss)] or [0.0]
        return fmean(losses[:3]), fmean(losses[-3:])

    @property
    def fall(self) -> str:
        """The two, for people."""
        first, last = self.ends
        return tr("the training loss went from {first:.3g} to {last:.3g}", first=first, last=last)


def _failure(run: RunFolder) -> str:
    """How the newest training of a run failed or died; empty if it did not."""
    try:
        last = watch.find_training(str(run.path))
    except CourseError:  # no training here yet
        return ""
    if last.state not in ("failed", "died"):
        return ""
    return " ".join([last.state_text(), *last.progress.notes[-1:]])


def failed(run: Trained) -> str:
    """The training ended with an error, or its process is gone."""
    return run.failure


def not_a_number(run: Trained) -> str:
    """The loss is NaN or infinite: the log says so, or ends before the training did, or float16 skipped many steps."""
    steps = run.facts.steps
    wrong = [step for step, loss in run.train if not math.isfinite(loss)]
    interval = run.facts.settings.get("sft.logging_steps")
    if run.train and isinstance(interval, int):
        last, _ = run.train[-1]
        if steps - last > 2 * interval:  # a loss that is not a number is not written
            wrong.append(last + 1)
    if wrong:
        return tr("the loss is not a number from step {step} on", step=min(wrong))
    skipped = run.facts.skipped_steps or 0
    if skipped > LARGE_SHARE * steps:
        return tr("{count} of {steps} steps were skipped: float16 overflowed", count=skipped, steps=steps)
    return ""


def diverging(run: Trained) -> str:
    """The loss rises instead of falling."""
    first, last = run.ends
    return run.fall if last > RISEN * first else ""


def flat(run: Trained) -> str:
    """The loss hardly moves."""
    first, last = run.ends
    if len(run.train) > 5 and FLAT * first < last <= RISEN * first:
        return run.fall
    return ""


def overfitting(run: Trained) -> str:
    """The validation loss rises again while the training loss goes on falling."""
    best = best_of(run.validation)
    first, last = run.ends
    if best is None or last >= first:
        return ""
    step, lowest = best
    _, final = run.validation[-1]
    if final <= RISEN * lowest:
        return ""
    return tr("validation loss {best:.3g} at step {step}, {last:.3g} at the end", best=lowest, step=step, last=final)


def never_better(run: Trained) -> str:
    """The validation loss was lowest before the training."""
    best = best_of(run.validation)
    if best is None or best[0] > 0 or len(run.validation) < 2:
        return ""
    return tr("the validation loss never fell below {first:.3g}, where it began", first=best[1])


def few_steps(run: Trained) -> str:
    """There were too few steps to learn much."""
    if 0 < run.facts.steps <= FEW_STEPS:
        return tr("{steps} steps", steps=run.facts.steps)
    return ""


def unfinished(run: Trained) -> str:
    """The training did not reach its planned steps."""
    facts = run.facts
    if not facts.ended:
        return tr("step {steps} of {planned}", steps=facts.steps, planned=facts.planned_steps)
    return ""


def rows_lost(run: Trained) -> str:
    """Many rows could not be used, or are longer than max_length."""
    card = run.card
    long = run.facts.rows_left_out
    many_rejected = card.rejected > LARGE_SHARE * card.rows
    many_long = long > LARGE_SHARE * (run.facts.examples + long)
    if many_rejected or many_long:
        return tr(
            "{rejected} of {rows} rows rejected, {long} too long", rejected=card.rejected, rows=card.rows, long=long
        )
    return ""


def out_of_memory(run: Trained) -> str:
    """The training ran out of memory and went on with slower settings."""
    if rungs := run.facts.oom_rungs:
        return tr("out of memory, {times} times", times=len(rungs))
    return ""


def merge_outdated(run: Trained) -> str:
    """The merged model is of an earlier training."""
    return tr("the merged model is older than the adapter") if run.merge_is_outdated else ""


def did_not_help(run: Trained) -> str:
    """Lesson 04 found no gain."""
    verdict = run.evaluation.verdict
    if verdict in ("", "helped"):
        return ""
    return tr("verdict of lesson 04: {verdict}", verdict=tr(verdict))


def endless_answers(run: Trained) -> str:
    """Many answers of the merged model do not end by themselves."""
    score = run.evaluation.scores.get("stopped", record.Score())
    stopped = score.merged.mean
    if stopped is not None and stopped < 1 - LARGE_SHARE:
        return tr("{share:.0%} of the answers do not stop", share=1 - stopped)
    return ""


CHECKS: Sequence[Callable[[Trained], str]] = (
    failed,
    not_a_number,
    diverging,
    never_better,
    flat,
    overfitting,
    few_steps,
    unfinished,
    rows_lost,
    out_of_memory,
    merge_outdated,
    did_not_help,
    endless_answers,
)


def examine(run: Trained) -> dict[str, Finding]:
    """Everything that is wrong with a training, by name of the check.

    Example: diagnose.examine(diagnose.Trained.of(lesson.run))
    """
    findings = {}
    for check in CHECKS:
        if seen := check(run):
            findings[check.__name__] = _finding(seen, symptoms()["runs"][check.__name__])
    return findings


def show_causes(message: str) -> None:
    """What an error message means, as a table; where to look on if it is not known.

    Example: diagnose.show_causes("torch.OutOfMemoryError: CUDA out of memory.")
    """
    if findings := explain(message):
        show(findings)
        return
    print(tr("This message is not in the table. docs/faq.md has more; `python -m nbutils doctor` checks the machine."))


def show(findings: Mapping[str, Finding]) -> None:
    """Findings as a table; one line if there are none."""
    if not findings:
        print(tr("Nothing known is wrong here."))
        return
    rows = []
    for finding in findings.values():
        rows.append({tr("symptom"): finding.seen, tr("cause"): finding.cause, tr("to do"): finding.todo})
    display.show_table(rows)
