"""Runs lessons headless through papermill, one after the other, with a progress bar."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from nbutils import display, install, lesson, notices, record
from nbutils.errors import CourseError, LessonFailed, StoppedByHand, Unfinished
from nbutils.files import NOTEBOOKS, make_folder
from nbutils.language import language, tr
from nbutils.papermill_io import signals_to_kernel
from nbutils.record import Facts, RunFolder


def select(only: Sequence[str]) -> list[str]:
    """The lessons named ("03" or "03_qlora"); the course 01-05 when none is."""
    stems = sorted(file.stem for file in NOTEBOOKS.glob("[0-9][0-9]_*.py"))
    chosen = []
    for name in only:
        matching = [stem for stem in stems if name in (stem, stem[:2])]
        if not matching:
            raise CourseError(
                tr("There is no lesson {name!r}.", name=name),
                allowed=", ".join(stems),
                todo=tr("Write its number, as in --only 03."),
            )
        chosen += matching
    return chosen or list(lesson.COURSE)


def split_parameters(parameters: dict[str, str], stems: Sequence[str]) -> dict[str, Facts]:
    """Typed parameters for each lesson: every name must belong to at least one of them."""
    known: dict[str, type] = {}
    by_lesson: dict[str, Facts] = {}
    for stem in stems:
        types = lesson.declared_in(NOTEBOOKS / f"{stem}.py")
        known |= types
        by_lesson[stem] = {}
        for name in parameters.keys() & types.keys():
            by_lesson[stem][name] = lesson.parse(name, parameters[name], types[name])
    lesson.refuse_unknown(parameters, known)
    return by_lesson


def run_lessons(stems: Sequence[str], parameters: dict[str, str]) -> RunFolder:
    """Execute the lessons in one run folder; the first that fails or is stopped ends it with an error."""
    install.ensure("train")
    notices.require_settings()
    with notices.telling(stems[0]) as work:
        by_lesson = split_parameters(parameters, stems)
        of_the_run = lesson.RunParameters.model_validate(parameters)
        machine = lesson.find_machine(of_the_run)
        folder, resolved = lesson.open_run(of_the_run, machine)
        work.set_lesson(stems[0], folder)
        print(tr("profile {name}, run {folder}", name=resolved.name, folder=folder.path), flush=True)
        for number, stem in enumerate(stems, 1):
            print(f"[{number}/{len(stems)}] {stem}", flush=True)
            work.set_lesson(stem, folder)
            values = by_lesson[stem] | {"RUN_NAME": folder.name}
            with signals_to_kernel(besides=work.watcher) as received, notices.deferred():
                try:
                    execute(stem, folder.notebooks / f"{stem}.ipynb", values)
                except CourseError:
                    if not received:
                        raise
            if received:
                raise _stopped(stem, signal.Signals(received[0]))
            if stem == "03_qlora":
                lesson.require_trained(folder)
    work.ended("finished", summary(folder))
    return folder


def _stopped(stem: str, received: signal.Signals) -> CourseError:
    """The error that ends a run which was asked to end."""
    kind = StoppedByHand if received == signal.SIGINT else Unfinished
    return kind(
        tr(
            "This run was asked to end ({signal}), and stops after lesson {lesson}.",
            signal=received.name,
            lesson=stem,
        ),
        todo=tr(
            "Give the same command again. What is done is not repeated, and a training that was stopped continues."
        ),
    )


def execute(stem: str, output: Path, values: Facts) -> None:
    """One lesson under papermill; a CourseError names the cell that failed and shows its error."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    make_folder(output.parent)
    chinese = NOTEBOOKS / "zh" / f"{stem}.ipynb"
    source = chinese if language() == "zh" and chinese.exists() else NOTEBOOKS / f"{stem}.ipynb"
    unfinished = output.with_suffix(".unfinished.ipynb")  # a failure leaves the notebook of an earlier success alone
    try:
        papermill.execute_notebook(
            source,
            unfinished,
            parameters=values,
            kernel_name="python3",
            progress_bar={"desc": stem},
            stdout_file=display.LiveLines(),  # the lines of a training appear above the bar while its cell runs
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # the kernel's own remarks would break the bar
        )
    except PapermillExecutionError as failure:
        raise LessonFailed(
            tr(
                "Lesson {lesson} failed in cell {cell}; {output} shows where.",
                lesson=stem,
                cell=failure.exec_count,
                output=unfinished,
            ),
            todo=tr("Fix the cause shown below, then run the same command again."),
            problem=f"{failure.ename}: {failure.evalue}",
        ) from failure
    except DeadKernelError as failure:
        raise CourseError(
            tr(
                "The kernel of lesson {lesson} ended before the lesson did. It was stopped, or the machine's "
                "memory was full.",
                lesson=stem,
            ),
            todo=tr("Give the same command again. What is done is not repeated."),
        ) from failure
    unfinished.replace(output)


def summary(folder: RunFolder) -> str:
    """Where everything is, and whether the tuning helped."""
    lines = [tr("results      {folder}: report.md, facts.json, notebooks", folder=folder.path)]
    evaluation = record.load_facts(folder.facts).lessons.merged.evaluation
    if evaluation.verdict:
        outcome = record.outcome(evaluation.verdict, evaluation.general.verdict)
        page = folder.path / "evaluation" / "report.html"
        lines.append(tr("the tuning   {verdict}; why: {page}", verdict=outcome, page=page))
    return "\n".join(lines)
