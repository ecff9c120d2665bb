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
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import IO, Any, NamedTuple

import yaml

from nbutils import display, record, watch
from nbutils.errors import CourseError
from nbutils.files import read_object
from nbutils.language import tr
from nbutils.record import RunFolder
from nbutils.tracking import Curve, best_of, loss_history, read_history, validation_history

PIECE, MOST_PIECES = 2**23, 2**9  # bytes of a log that are read at a time, and how often
FEW_STEPS, LARGE_SHARE = 20, 0.1
FLAT, RISEN = 0.95, 1.1  # the last loss as a share of the first, or of the best


class Finding(NamedTuple):
    """What was seen, why, and what to do."""

    seen: str
    cause: str
    todo: str


@cache
def symptoms() -> dict[str, dict[str, dict[str, str]]]:
    """The table: `messages` and `runs`, by name."""
    table = Path(__file__).with_name("symptoms.yaml")
    return dict(yaml.safe_load(table.read_text(encoding="utf-8")))


def read_log(file: IO[bytes]) -> str:
    """The beginning and the end of a log of any size; of what has no end, such as a device, a part."""
    pieces = [file.read(PIECE)]
    if len(pieces[0]) == PIECE:  # otherwise it is read; whoever pastes would have to end it twice
        rest = iter(lambda: file.read(PIECE), b"")
        pieces += deque(islice(rest, MOST_PIECES), maxlen=4)  # the last four of them
    return b"".join(pieces).decode(errors="replace")


def explain(text: str) -> dict[str, Finding]:
    """What an error message or a log means, the likeliest first; empty if nothing in it is known."""
    text = text.replace("\r", "\n")  # a progress bar in a log is one line of megabytes
    found = {name: (re.search(one["seen"], text), one) for name, one in symptoms()["messages"].items()}
    return {name: _finding(match.group().strip(), one) for name, (match, one) in found.items() if match}


def known() -> dict[str, Finding]:
    """All there is in the table, by name."""
    return {name: _finding(name, entry) for part in symptoms().values() for name, entry in part.items()}


def _finding(seen: str, entry: Mapping[str, str]) -> Finding:
    return Finding(seen, tr(entry["cause"]), tr(entry["todo"]))


@dataclass(frozen=True)
class Trained:
    """What a run's folder says of its training: curves, facts of lesson 03, evaluation of lesson 04, data card."""

    train: Curve
    validation: Curve
    facts: dict[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    merge_is_outdated: bool = False
    failure: str = ""  # how a training ended that neither finished nor was asked to stop

    @classmethod
    def of(cls, run: RunFolder) -> Trained:
        """Read what there is in a run folder."""
        card = read_object(run.data / "data_card.json")
        failure = _failure(run)
        if failure:  # its curves, facts and evaluation were not written: those that are here are of an earlier stop
            return cls([], [], card=card, failure=failure)
        lessons = record.read(run.facts).get("lessons", {})
        log = read_history(run.logs / "history.json")
        outdated = run.merge_is_outdated
        found = cls(
            loss_history(log),
            validation_history(log),
            facts=lessons.get("03_qlora", {}),
            evaluation={} if outdated else lessons.get("04_merge", {}).get("evaluation", {}),
            card=card,
            merge_is_outdated=outdated,
        )
        with record.reading(run.facts):
            examine(found)  # all of it can be examined
        return found

    @property
    def ends(self) -> tuple[float, float]:
        """The training loss at the start and at the end, each a mean of a few; zeros if there is none."""
        losses = [loss for _, loss in self.train if math.isfinite(loss)] or [0.0]
        return fmean(losses[:3]), fmean(losses[-min(3, len(losses)) :])

    @property
    def fall(self) -> str:
        """The two, for people."""
        return tr("the training loss went from {first:.3g} to {last:.3g}", first=self.ends[0], last=self.ends[1])


def _failure(run: RunFolder) -> str:
    """How the newest training of a run failed or died; empty if it did not."""
    try:
        last = watch.find(str(run.path))
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
    wrong = [step for step, loss in run.train if not math.isfinite(loss)]
    steps, skipped = run.facts.get("steps", 0), run.facts.get("skipped_steps", 0)
    last = run.train[-1][0] if run.train else steps
    if steps - last > 2 * run.facts.get("settings", {}).get("sft.logging_steps", steps):
        wrong.append(last + 1)
    if wrong:
        return tr("the loss is not a number from step {step} on", step=min(wrong))
    many = skipped > LARGE_SHARE * steps
    return tr("{count} of {steps} steps were skipped: float16 overflowed", count=skipped, steps=steps) if many else ""


def diverging(run: Trained) -> str:
    """The loss rises instead of falling."""
    first, last = run.ends
    return run.fall if last > RISEN * first else ""


def flat(run: Trained) -> str:
    """The loss hardly moves."""
    first, last = run.ends
    return run.fall if len(run.train) > 5 and FLAT * first < last <= RISEN * first else ""


def overfitting(run: Trained) -> str:
    """The validation loss rises again while the training loss goes on falling."""
    (step, best), last = best_of(run.validation) or (0, math.inf), run.validation[-1][1] if run.validation else 0.0
    if last <= RISEN * best or run.ends[1] >= run.ends[0]:
        return ""
    return tr("validation loss {best:.3g} at step {step}, {last:.3g} at the end", best=best, step=step, last=last)


def never_better(run: Trained) -> str:
    """The validation loss was lowest before the training."""
    best = best_of(run.validation)
    if best is None or best[0] > 0 or len(run.validation) < 2:
        return ""
    return tr("the validation loss never fell below {first:.3g}, where it began", first=best[1])


def few_steps(run: Trained) -> str:
    """There were too few steps to learn much."""
    steps = run.facts.get("steps", FEW_STEPS + 1)
    return tr("{steps} steps", steps=steps) if steps <= FEW_STEPS else ""


def unfinished(run: Trained) -> str:
    """The training did not reach its planned steps."""
    if record.complete(run.facts):
        return ""
    return tr("step {steps} of {planned}", steps=run.facts["steps"], planned=run.facts["planned_steps"])


def rows_lost(run: Trained) -> str:
    """Many rows could not be used, or are longer than max_length."""
    rejected, rows = run.card.get("rejected", 0), run.card.get("rows", 0)
    long, used = run.facts.get("rows_left_out", 0), run.facts.get("examples", 0)
    if rejected <= LARGE_SHARE * rows and long <= LARGE_SHARE * (used + long):
        return ""
    return tr("{rejected} of {rows} rows rejected, {long} too long", rejected=rejected, rows=rows, long=long)


def out_of_memory(run: Trained) -> str:
    """The training ran out of memory and went on with slower settings."""
    times = len(run.facts.get("oom_rungs") or ())
    return tr("out of memory, {times} times", times=times) if times else ""


def merge_outdated(run: Trained) -> str:
    """The merged model is of an earlier training."""
    return tr("the merged model is older than the adapter") if run.merge_is_outdated else ""


def did_not_help(run: Trained) -> str:
    """Lesson 04 found no gain."""
    verdict = run.evaluation.get("verdict", "helped")
    return "" if verdict == "helped" else tr("verdict of lesson 04: {verdict}", verdict=tr(verdict))


def endless_answers(run: Trained) -> str:
    """Many answers of the merged model do not end by themselves."""
    stopped = run.evaluation.get("scores", {}).get("stopped", {}).get("merged", {}).get("mean", 1.0)
    return tr("{share:.0%} of the answers do not stop", share=1 - stopped) if stopped < 1 - LARGE_SHARE else ""


CHECKS: Sequence[Callable[[Trained], str]] = (
    failed, not_a_number, diverging, never_better, flat, overfitting, few_steps, unfinished, rows_lost, out_of_memory,
    merge_outdated, did_not_help, endless_answers,
)  # fmt: skip


def examine(run: Trained) -> dict[str, Finding]:
    """Everything that is wrong with a training, by name of the check."""
    found = {check.__name__: check(run) for check in CHECKS}
    return {name: _finding(seen, symptoms()["runs"][name]) for name, seen in found.items() if seen}


def show_causes(message: str) -> None:
    """What an error message means, as a table; where to look on if it is not known."""
    if found := explain(message):
        show(found)
    else:
        print(tr("This message is not in the table. docs/faq.md has more; `python -m nbutils doctor` checks the "
                 "machine."))  # fmt: skip


def show(findings: Mapping[str, Finding]) -> None:
    """Findings as a table; one line if there are none."""
    if not findings:
        print(tr("Nothing known is wrong here."))
        return
    names = (tr("symptom"), tr("cause"), tr("to do"))
    display.show_table([dict(zip(names, finding, strict=True)) for finding in findings.values()])
