"""The exercises of a lesson, and a lesson in which they are solved: by the solutions printed below them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from support import ROOT, python

from nbutils import exercises, record

CODE = re.compile(r"(?s)```python\n(.*?)```")


@dataclass
class Exercise:
    """A cell with a check, and the closed solution that follows it."""

    name: str  # of the check
    unknowns: list[str]  # the names that are None
    cell: Any
    solution: str

    def solve(self) -> None:
        """Put the solution in the place of the lines that say None."""
        lines = self.cell.source.splitlines()
        unknown = re.compile(rf"({'|'.join(self.unknowns)})(: [^=]+)? = None")
        places = [number for number, line in enumerate(lines) if unknown.fullmatch(line)]
        assert len(places) == len(self.unknowns), self.cell.source
        lines[places[0]] = self.solution
        for place in reversed(places[1:]):
            del lines[place]
        self.cell.source = "\n".join(lines)


def exercises_of(notebook: Any) -> list[Exercise]:
    """The exercises of a lesson in their order."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if "exercise" not in cell.metadata.get("tags", []):
            continue
        tree = ast.parse(cell.source)
        checks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_check(node)]
        assert len(checks) == 1, f"one lesson.check in a cell: {cell.source}"
        unknowns = [
            ast.unparse(node.targets[0])
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value) == "None"
        ]
        below = notebook.cells[number + 1]
        assert below.source.startswith("<details><summary>"), f"a closed solution follows: {cell.source}"
        assert below.source.rstrip().endswith("</details>")
        [solution] = CODE.findall(below.source)
        name = ast.unparse(checks[0].args[0]).removeprefix("exercises.")
        found.append(Exercise(name, unknowns, cell, solution.rstrip()))
    return found


def _is_check(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "lesson.check"


def solved(source: Path, target: Path) -> Path:
    """A copy of a notebook in which every exercise is solved."""
    notebook = nbformat.read(source, 4)
    for exercise in exercises_of(notebook):
        exercise.solve()
    nbformat.write(notebook, target)
    return target


def run_solved(stem: str, home: Path, run: str, *parameters: str | Path, redirect: bool = False, **options: Any) -> str:
    """Execute the Chinese lesson with its exercises solved: every check must say so. What the cells printed.

    Like a learner, it names no output: the executed notebook is kept beside the runs, and the lesson is left as it was.
    `redirect`: papermill writes to its output, which goes to a file.
    """
    lesson = solved(ROOT / "notebooks/zh" / f"{stem}.ipynb", home / f"{stem}.ipynb")
    as_given = lesson.read_bytes()
    words: list[str | Path] = ["-m", "papermill", lesson]
    for name, value in zip(parameters[::2], parameters[1::2], strict=True):
        words += ["-p", name, value]
    options = {"home": home, "timeout": 600, **options}
    if redirect:
        executed = home / f"{stem}.executed.ipynb"
        with open(executed, "w", encoding="utf-8") as out:
            python(*words, stdout=out, **options)
    else:
        executed = home / "notebooks" / lesson.name
        python(*words, **options)
    assert lesson.read_bytes() == as_given
    notebook = nbformat.read(executed, 4)
    assert notebook.metadata.papermill.exception is None
    printed = str([cell.get("outputs") for cell in notebook.cells])
    noted = record.RunFolder(home / run).recorded.exercises.get(stem, {}) if run else {}
    for check in exercises.OF_LESSON.get(stem, ()):
        assert check.__name__ in noted and noted[check.__name__].right, printed
    assert "missing from font" not in printed
    return printed
