"""Runs lessons headless through papermill, one after the other, with a progress bar.

Not here: what a lesson does, or the command line (cli).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils import dashboard, install, lessons, parameters, record
from nbutils.errors import CourseError
from nbutils.papermill_io import passing_on_sigterm
from nbutils.paths import NOTEBOOKS, make_folder


def available() -> list[str]:
    """The lessons in the course folder, in order."""
    return sorted(file.stem for file in NOTEBOOKS.glob("[0-9][0-9]_*.py"))


def select(only: Sequence[str]) -> list[str]:
    """The lessons asked for ("03" or "03_qlora"); the course 01-05 when none is named."""
    if not only:
        return list(lessons.COURSE)
    chosen = []
    for wanted in only:
        found = [stem for stem in available() if stem == wanted or stem.split("_")[0] == wanted]
        if not found:
            raise CourseError(
                f"there is no lesson {wanted!r}.", ", ".join(available()), "write its number, as in --only 03"
            )
        chosen += found
    return chosen


def split_parameters(given: dict[str, str], stems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Typed parameters for each lesson: every name must belong to at least one of them."""
    declared = {stem: parameters.declared_in(NOTEBOOKS / f"{stem}.py") for stem in stems}
    everything = {name: kind for types in declared.values() for name, kind in types.items()}
    parameters.refuse_unknown(given, everything)
    return {
        stem: {name: parameters.parse(name, text, types[name]) for name, text in given.items() if name in types}
        for stem, types in declared.items()
    }


def run(stems: Sequence[str], given: dict[str, str]) -> lessons.RunFolder:
    """Execute the lessons in one run folder; the first failing cell ends it with that cell's error."""
    install.ensure("train")
    by_lesson = split_parameters(given, stems)
    platform, folders, card = lessons.find_machine(lessons.may_download(given))
    asked: dict[str, Any] = {
        name: values[name]
        for values in by_lesson.values()
        for name in ("PROFILE", "MODEL", "RUN_NAME", "SET", "RESUME", *lessons.OVERRIDES)
        if name in values
    }
    folder, resolved = lessons.open_run(asked, platform, folders, card)
    print(f"profile {resolved.name}, run {folder.path}", flush=True)
    for number, stem in enumerate(stems, 1):
        print(f"[{number}/{len(stems)}] {stem}", flush=True)
        with passing_on_sigterm() as asked_to_end, lessons.goodbye_later():
            execute(stem, folder.notebooks / f"{stem}.ipynb", by_lesson[stem] | {"RUN_NAME": folder.name})
        if stem == "03_qlora" and not record.complete(record.read(folder.facts)["lessons"][stem]):
            print("The training is not finished: what follows waits. The same command goes on with it.")
            break
        if asked_to_end:
            print(f"The machine asked this run to end (SIGTERM): it stops after {stem}. The same command goes on.")
            break
    lessons.say_goodbye(platform, folder, summary(folder))
    return folder


def execute(stem: str, output: Path, values: dict[str, Any]) -> None:
    """One lesson under papermill; a CourseError names the cell that failed and shows its last line."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    make_folder(output.parent, "the executed lessons")
    try:
        papermill.execute_notebook(
            NOTEBOOKS / f"{stem}.ipynb",
            output,
            parameters=values,
            kernel_name="python3",
            progress_bar={"desc": stem},
            stdout_file=dashboard.LiveLines(),  # a training's lines appear above the bar while its cell runs
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # the kernel's own remarks would break the bar
        )
    except PapermillExecutionError as failure:
        where = f"lesson {stem} failed in cell {failure.exec_count}:"
        if told := re.fullmatch(r"(?s)(.*)\n  Allowed: (.*)\n  To do: (.*)", failure.evalue):
            raise CourseError(f"{where} {told[1]}", told[2], told[3]) from failure
        raise CourseError(
            f"{where}\n{failure.ename}: {failure.evalue}",
            "a lesson that runs to its end", f"open {output} to see the cell and everything above it",
        ) from failure  # fmt: skip


def summary(folder: lessons.RunFolder) -> str:
    """Where everything is, and the results people ask for first."""
    facts = json.loads(folder.facts.read_text(encoding="utf-8"))["lessons"]
    lines = [f"notebooks  {folder.notebooks}", f"report     {folder.report}", f"facts      {folder.facts}"]
    if match := facts.get("04_merge", {}).get("exact_match"):
        lines.append(f"exact match  base {match['base']:.1%}  ->  merged {match['merged']:.1%}")
    if verdict := facts.get("04_merge", {}).get("evaluation", {}).get("verdict"):
        lines.append(f"the tuning   {verdict}; why: {folder.path / 'evaluation' / 'report.html'}")
    if same := facts.get("05_serve", {}).get("identical_answers"):
        lines.append(f"served answers identical to generate: {same['count']} of {same['total']}")
    return "\n".join(lines)
