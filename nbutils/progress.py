"""`python -m nbutils progress`: the exercises that are solved, in any run; and the certificate of the course 01-05."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from nbutils import display, exercises, files, record
from nbutils.errors import CourseError
from nbutils.language import language, tr
from nbutils.lesson import COURSE
from nbutils.record import RunFacts

CERTIFICATE = "certificate.html"
State = Mapping[str, Mapping[str, bool]]  # of every lesson: each exercise, and whether it is solved


def state(keep: Path) -> dict[str, dict[str, bool]]:
    """Every exercise of every lesson, and whether a run in this folder has solved it."""
    solved = set()
    for run in record.runs(keep).values():
        for stem, noted in record.load_facts(run.facts).exercises.items():
            solved |= {(stem, name) for name, exercise in noted.items() if exercise.right}
    lessons = {}
    for stem, checks in exercises.OF_LESSON.items():
        lessons[stem] = {check.__name__: (stem, check.__name__) in solved for check in checks}
    return lessons


def text(lessons: State) -> str:
    """A line for each lesson: how many are solved, and which are not."""
    lines = [[tr("lesson"), tr("solved"), tr("to do")]]
    for stem, solved in lessons.items():
        open_ones = [name for name, right in solved.items() if not right]
        lines.append([stem, f"{len(solved) - len(open_ones)} / {len(solved)}", ", ".join(open_ones)])
    return display.columns_of(lines)


def course_done(lessons: State) -> bool:
    """Whether all exercises of the course 01-05 are solved."""
    return all(right for stem in COURSE for right in lessons[stem].values())


def write_certificate(keep: Path, lessons: State, name: str) -> Path:
    """The certificate, from the newest run that lesson 04 has judged."""
    judged: dict[str, RunFacts] = {}
    for run_name, run in record.runs(keep).items():
        facts = record.load_facts(run.facts)
        if facts.evaluation.verdict:
            judged[run_name] = facts
    if not judged:
        raise CourseError(
            tr("No run in {folder} has a verdict.", folder=keep),
            todo=tr("Run lesson 04 of the run that the certificate should tell of."),
        )
    run_name, facts = next(iter(judged.items()))
    page = display.render(
        "certificate.html",
        name=name,
        run=run_name,
        facts=facts,
        lessons=lessons,
        day=datetime.date.today().isoformat(),
        language=language(),
    )
    file = keep / CERTIFICATE
    files.write_text(file, page + "\n")
    return file
