"""Runs lessons headless through papermill, one after the other, with a progress bar."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils import display, install, lesson, notices, record
from nbutils.errors import CourseError, LessonFailed, StoppedByHand, Unfinished
from nbutils.files import NOTEBOOKS, make_folder
from nbutils.language import language, tr
from nbutils.papermill_io import signals_to_kernel

SHARED = ("PROFILE", "MODEL", "RUN_NAME", "SET", "RESUME", *lesson.OVERRIDES)  # parameters that choose the run


def select(only: Sequence[str]) -> list[str]:
    """The lessons named ("03" or "03_qlora"); the course 01-05 when none is."""
    available = {file.stem[:2]: file.stem for file in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))}
    if unknown := [name for name in only if name not in (*available, *available.values())]:
        raise CourseError(
            tr("There is no lesson {name!r}.", name=unknown[0]),
            allowed=", ".join(available.values()),
            todo=tr("Write its number, as in --only 03."),
        )
    return [available.get(name, name) for name in only] or list(lesson.COURSE)


def split_parameters(given: dict[str, str], stems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Typed parameters for each lesson: every name must belong to at least one of them."""
    declared = {stem: lesson.declared_in(NOTEBOOKS / f"{stem}.py") for stem in stems}
    lesson.refuse_unknown(given, {name: kind for types in declared.values() for name, kind in types.items()})
    return {
        stem: {name: lesson.parse(name, text, types[name]) for name, text in given.items() if name in types}
        for stem, types in declared.items()
    }


def run(stems: Sequence[str], given: dict[str, str]) -> lesson.RunFolder:
    """Execute the lessons in one run folder; the first that fails or is stopped ends it with an error."""
    install.ensure("train")
    notices.require_settings()
    with notices.telling(stems[0]) as work:
        by_lesson = split_parameters(given, stems)
        platform, folders, gpu = lesson.find_machine(given)
        shared = {name: values[name] for values in by_lesson.values() for name in SHARED if name in values}
        folder, resolved = lesson.open_run(shared, platform, folders, gpu)
        work.opened(folder)
        print(tr("profile {name}, run {folder}", name=resolved.name, folder=folder.path), flush=True)
        for number, stem in enumerate(stems, 1):
            print(f"[{number}/{len(stems)}] {stem}", flush=True)
            work.goes_on(stem)
            values = by_lesson[stem] | {"RUN_NAME": folder.name}
            with signals_to_kernel(besides=work.watcher) as received, notices.deferred():
                try:
                    execute(stem, folder.notebooks / f"{stem}.ipynb", values)
                except CourseError:
                    if not received:
                        raise
            if received:
                by_hand = received[0] == signal.SIGINT
                raise (StoppedByHand if by_hand else Unfinished)(
                    tr(
                        "This run was asked to end ({signal}), and stops after lesson {lesson}.",
                        lesson=stem,
                        signal=signal.Signals(received[0]).name,
                    ),
                    todo=tr(
                        "Give the same command again. What is done is not repeated, and a training that was stopped "
                        "continues."
                    ),
                )
            if stem == "03_qlora" and not record.complete(trained := record.read(folder.facts)["lessons"][stem]):
                raise Unfinished(
                    tr(
                        "The training has ended at step {step} of {steps}, so the next lessons wait.",
                        step=trained["steps"],
                        steps=trained["planned_steps"],
                    ),
                    todo=tr("Give the same command again, which continues it."),
                )
    work.ended("finished", summary(folder))
    return folder


def execute(stem: str, output: Path, values: dict[str, Any]) -> None:
    """One lesson under papermill; a CourseError names the cell that failed and shows its error."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    make_folder(output.parent, tr("executed notebooks"))
    chinese = NOTEBOOKS / "zh" / f"{stem}.ipynb"
    source = chinese if language() == "zh" and chinese.exists() else NOTEBOOKS / f"{stem}.ipynb"
    unfinished = output.with_suffix(".unfinished.ipynb")  # a failure leaves the notebook of an earlier success alone
    try:
        papermill.execute_notebook(
            source, unfinished, parameters=values, kernel_name="python3",
            progress_bar={"desc": stem},
            stdout_file=display.LiveLines(),  # the lines of a training appear above the bar while its cell runs
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # the kernel's own remarks would break the bar
        )  # fmt: skip
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


def summary(folder: lesson.RunFolder) -> str:
    """Where everything is, and the main results."""
    facts = record.read(folder.facts)["lessons"]
    places = {tr("notebooks"): folder.notebooks, tr("report"): folder.report, tr("facts"): folder.facts}
    lines = [f"{display.pad(name, 10)} {place}" for name, place in places.items()]
    merged = facts.get("04_merge", {})
    match = merged.get("exact_match", {})
    if max(match.values(), default=0) > 0.5:  # where answers are sentences, hardly any equals its reference
        base, tuned = match["base"], match["merged"]
        lines.append(tr("exact match  base {base:.1%}  ->  merged {merged:.1%}", base=base, merged=tuned))
    evaluation = merged.get("evaluation", {})
    if "verdict" in evaluation:
        page = folder.path / "evaluation" / "report.html"
        lines.append(tr("the tuning   {verdict}; why: {page}", verdict=record.outcome(evaluation), page=page))
    if same := facts.get("05_serve", {}).get("identical_answers"):
        count, total = same["count"], same["total"]
        lines.append(tr("served answers identical to generate: {count} of {total}", count=count, total=total))
    return "\n".join(lines)
