"""`python -m nbutils progress`: the exercises that are solved, in any run; and the certificate of the course 01-05.

For a teacher: a row for each student, from the facts.json of the runs that were handed in.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from nbutils import display, files, record
from nbutils.errors import CourseError
from nbutils.exercises import OF_LESSON, names_of
from nbutils.language import language, tr
from nbutils.lesson import COURSE

CERTIFICATE = "certificate.html"
Solved = dict[str, list[str]]  # the exercises of each lesson that are solved


def solved(keep: Path) -> Solved:
    """The exercises that a run in this folder has solved."""
    done: Solved = {stem: [] for stem in OF_LESSON}
    for run in record.runs(keep).values():
        facts = run.recorded
        for stem, names in done.items():
            for name in names_of(stem):
                if facts.has_solved(stem, name) and name not in names:
                    names.append(name)
    return done


def text(solved: Solved) -> str:
    """A line for each lesson: how many are solved, and which are not."""
    lines = [[tr("lesson"), tr("solved"), tr("to do")]]
    for stem, done in solved.items():
        names = names_of(stem)
        todo = [name for name in names if name not in done]
        share = f"{len(done)} / {len(names)}"
        lines.append([stem, share, ", ".join(todo)])
    return display.columns_of(lines)


def of_class(folder: Path) -> list[dict[str, str]]:
    """A row for each student, whose runs lie in a folder of theirs in this one.

    A training that two of them hand in is shown where it came first: no two take the same seconds.
    """
    rows = []
    first_places: dict[str, str] = {}  # of trainings, by what was measured of them
    for student in sorted(folder.glob("[!.]*/")):
        row = {"student": student.name} | {stem[:2]: "-" for stem in OF_LESSON}
        trainings = []
        try:
            for stem, done in solved(student).items():
                row[stem[:2]] = f"{len(done)}/{len(names_of(stem))}"
            for run in record.runs(student).values():
                facts = run.recorded
                if facts.trained.steps:
                    place = first_places.setdefault(facts.trained.model_dump_json(), str(run.path))
                    trainings.append(f"{place}: {tr(facts.evaluation.verdict or '-')}")
        except CourseError as problem:  # one broken file hides nobody else
            trainings.append(problem.seen)
        rows.append(row | {"trainings": ", ".join(trainings)})
    return rows


def course_done(solved: Solved) -> bool:
    """Whether all exercises of the course 01-05 are solved."""
    return all(len(solved[stem]) == len(names_of(stem)) for stem in COURSE)


def write_certificate(keep: Path, solved: Solved, name: str) -> Path:
    """The certificate, from the newest run that lesson 04 has judged."""
    for run in record.runs(keep).values():
        facts = run.recorded
        if facts.evaluation.verdict:
            break
    else:
        raise CourseError(
            "No run in {folder} has a verdict.",
            todo="Run lesson 04 of the run that the certificate should tell of.",
            folder=keep,
        )
    page = display.render(
        "certificate.html",
        name=name,
        run=run.name,
        facts=facts,
        solved=solved,
        asked=names_of,
        day=datetime.date.today().isoformat(),
        language=language(),
    )
    file = keep / CERTIFICATE
    files.write_text(file, page + "\n")
    return file
