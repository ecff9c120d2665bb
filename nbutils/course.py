"""Runs lessons headless through papermill, one after the other, with a progress bar."""

from __future__ import annotations

import signal
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path

from nbutils import display, install, lesson, notices, record
from nbutils.errors import CourseError, StoppedByHand, Unfinished, require_choice
from nbutils.files import NOTEBOOKS, make_folder
from nbutils.language import language, say, tr
from nbutils.papermill_io import signals_to_kernel
from nbutils.record import Facts, RunFolder

BAR = "{desc}: {n_fmt} of {total_fmt} cells [{elapsed}]"  # without the time left: cells differ too much


def select(only: Sequence[str]) -> list[str]:
    """The lessons named ("03" or "03_qlora"); the course 01-05 when none is."""
    stems = sorted(file.stem for file in NOTEBOOKS.glob("[0-9][0-9]_*.py"))
    by_number = {stem[:2]: stem for stem in stems}
    chosen = []
    for name in only:
        require_choice("--only", name, [*by_number, *stems])
        chosen.append(by_number[name[:2]])
    return chosen or list(lesson.COURSE)


def split_parameters(parameters: dict[str, str], stems: Sequence[str]) -> dict[str, Facts]:
    """Typed parameters for each lesson: every name must belong to at least one of them."""
    types = {}
    for stem in stems:
        source = NOTEBOOKS / f"{stem}.py"
        types[stem] = lesson.declared_in(source)
    values = lesson.check(parameters, ChainMap(*types.values()))
    by_lesson = {}
    for stem, declared in types.items():
        by_lesson[stem] = {name: values[name] for name in declared if name in values}
    return by_lesson


def run_lessons(stems: Sequence[str], parameters: dict[str, str]) -> RunFolder:
    """Execute the lessons in one run folder; the first that fails or is stopped ends it with an error."""
    install.ensure("train")
    notices.require_settings()
    with notices.telling(stems[0]) as work:
        by_lesson = split_parameters(parameters, stems)
        defaults = lesson.defaults_in(edition() / f"{stems[0]}.py")
        of_the_run = lesson.RunParameters.model_validate(defaults | parameters)
        machine = lesson.find_machine(of_the_run)
        folder, resolved = lesson.open_run(of_the_run, machine)
        say("profile {name}, run {folder}", name=resolved.name, folder=folder.path)
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
                kind = StoppedByHand if received[0] == signal.SIGINT else Unfinished
                raise kind(
                    tr("This run was asked to end, and stops after lesson {lesson}.", lesson=stem),
                    todo=tr("Give the same command again. What is done is not repeated."),
                )
            if stem == "03_qlora":
                lesson.require_trained(folder)
    work.ended("finished", record.summary(folder))
    return folder


def edition() -> Path:
    """The folder of the lessons in the learner's language."""
    return NOTEBOOKS / "zh" if language() == "zh" else NOTEBOOKS


def execute(stem: str, output: Path, values: Facts) -> None:
    """One lesson under papermill; a CourseError names the cell that failed and shows its error."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    make_folder(output.parent)
    unfinished = output.with_suffix(".unfinished.ipynb")  # a failure leaves the notebook of an earlier success alone
    try:
        papermill.execute_notebook(
            edition() / f"{stem}.ipynb",
            unfinished,
            parameters=values,
            kernel_name="python3",
            progress_bar={"desc": stem, "bar_format": BAR},
            stdout_file=display.LiveLines(),  # the lines of a training appear above the bar while its cell runs
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # the kernel's own remarks would break the bar
        )
    except PapermillExecutionError as failure:
        raise CourseError(
            "Lesson {lesson} failed in cell {cell}: {problem}",
            todo="Mend the cause, then give the same command again. {output} shows the cell.",
            lesson=stem,
            cell=failure.exec_count,
            problem=f"{failure.ename}: {failure.evalue}",
            output=unfinished,
        ) from failure
    except DeadKernelError as failure:
        raise CourseError(
            "The kernel of lesson {lesson} was stopped, or the machine's memory was full.",
            todo="Give the same command again. What is done is not repeated.",
            lesson=stem,
        ) from failure
    unfinished.replace(output)
