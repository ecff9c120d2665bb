"""The notebook contract as rules; static, no lesson is run. Each test name is the rule."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import operator
import re
import runpy
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbutils import lessons
from nbutils.masking import KEY as SECRET

ROOT = Path(__file__).resolve().parent.parent
SYNC = runpy.run_path(str(ROOT / ".ci/sync.py"))
SOURCES = SYNC["sources"]()  # those in git; a copy of yours follows no rules
NOTEBOOKS = {file.stem: json.loads(file.with_suffix(".ipynb").read_text(encoding="utf-8")) for file in SOURCES}
PLATFORM_PATH = re.compile(r"/content\b|/kaggle\b|/root/autodl|/mnt/workspace|/hy-tmp")

each_lesson = pytest.mark.parametrize("stem", NOTEBOOKS)


def cells(stem: str, kind: str = "") -> list[dict]:
    return [cell for cell in NOTEBOOKS[stem]["cells"] if not kind or cell["cell_type"] == kind]


def text(cell: dict) -> str:
    return "".join(cell["source"])


def code_lines(cell: dict) -> list[str]:
    return [line for line in text(cell).splitlines() if line.strip() and not line.strip().startswith("#")]


def tagged(stem: str, tag: str) -> list[dict]:
    return [cell for cell in cells(stem, "code") if tag in cell["metadata"].get("tags", [])]


def source(stem: str) -> Path:
    return next(file for file in SOURCES if file.stem == stem)


def nodes(stem: str, *kinds: type[ast.AST]) -> list[Any]:
    """The syntax nodes of a lesson that are of these kinds."""
    found = ast.walk(ast.parse(source(stem).read_text(encoding="utf-8")))
    return [node for node in found if isinstance(node, kinds)]


def test_derived_files_are_in_step_with_their_sources() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in SYNC["wanted"]()}
    stale = [file.name for file, text in SYNC["wanted"]().items() if texts[file] != text]
    assert stale == [], f"{stale} out of date: run `make sync`"


@each_lesson
def test_no_outputs_are_committed_the_kernel_is_named_and_cell_ids_are_stable(stem: str) -> None:
    for cell in cells(stem, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert NOTEBOOKS[stem]["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in cells(stem)]
    assert ids == [f"{stem.replace('_', '-')}-{number:02d}" for number in range(len(ids))]


@each_lesson
def test_no_secret_and_no_platform_path_stands_in_a_notebook(stem: str) -> None:
    for cell in cells(stem):
        assert not SECRET.search(text(cell))
        assert not PLATFORM_PATH.search(text(cell)), "absolute platform paths belong in nbutils.platforms"


@each_lesson
def test_one_setup_cell_a_learner_can_read(stem: str) -> None:
    [setup] = tagged(stem, "setup")
    lines = text(setup).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 100
    assert text(setup) == text(tagged("03_qlora", "setup")[0])
    assert "NBUTILS_SOURCE" in text(setup) and "print(" in text(setup) and "torch" not in text(setup)
    assert cells(stem, "code")[0] is setup


@each_lesson
def test_one_parameters_cell_of_annotated_scalars(stem: str) -> None:
    [cell] = tagged(stem, "parameters")
    body: list[Any] = ast.parse(text(cell)).body
    assert all(isinstance(node, ast.AnnAssign) for node in body)
    assert all(isinstance(node.value, ast.Constant | ast.UnaryOp) for node in body)
    assert list(lessons.declared_in(source(stem))) == [node.target.id for node in body] != []


@each_lesson
def test_a_sentence_stands_before_every_code_cell(stem: str) -> None:
    for before, cell in pairwise(cells(stem)):
        assert "markdown" in (before["cell_type"], cell["cell_type"]), f"no sentence before: {text(cell)[:80]}"


@each_lesson
def test_cells_are_short(stem: str) -> None:
    sizes = [len(code_lines(cell)) for cell in cells(stem, "code")]
    assert max(sizes) <= 25 and statistics.median(sizes) <= 6


@each_lesson
def test_no_class_and_no_long_function_is_defined(stem: str) -> None:
    assert nodes(stem, ast.ClassDef) == []
    for node in nodes(stem, ast.FunctionDef):
        assert node.end_lineno - node.lineno < 10, f"{node.name} belongs in nbutils"


@each_lesson
def test_nothing_waits_for_a_person(stem: str) -> None:
    calls = {ast.unparse(node.func) for node in nodes(stem, ast.Call)}
    assert not calls & {"input", "getpass", "notebook_login", "login", "wandb.login"}


@each_lesson
def test_no_background_shell_command_and_no_dead_code(stem: str) -> None:
    for cell in cells(stem, "code"):
        assert not re.search(r"^\s*[!%].*&\s*$", text(cell), re.M)
    assert not {ast.unparse(node.test) for node in nodes(stem, ast.If)} & {"False", "0"}


@each_lesson
def test_it_opens_with_a_promise_and_closes_with_the_same_bullets(stem: str) -> None:
    first = text(cells(stem)[0])
    assert first.startswith("# ") and "You will have" in first and re.search(r"minute|second", first)
    promised = [line for line in first.splitlines() if line.startswith("- ")]
    closing = [text(cell) for cell in cells(stem, "markdown") if "You now have" in text(cell)]
    assert len(promised) >= 3 and len(closing) == 1
    assert [line for line in closing[0].splitlines() if line.startswith("- ")] == promised


@each_lesson
def test_it_has_an_exercise_whose_check_prints_what_it_saw_and_expected(stem: str) -> None:
    assert any("## Exercise" in text(cell) for cell in cells(stem, "markdown"))
    checks = [text(cell) for cell in cells(stem, "code") if "saw" in text(cell) and "expected" in text(cell)]
    assert checks


@each_lesson
def test_it_starts_and_finishes_the_same_way(stem: str) -> None:
    code = [text(cell) for cell in cells(stem, "code")]
    assert sum(f'nbutils.start("{stem}", globals())' in cell for cell in code) == 1
    assert "lesson.finish(" in code[-1]


LIBRARIES = ("trl", "peft", "transformers", "datasets", "openai", "nbutils")


def imported_names(stem: str) -> dict[str, Any]:
    """Names a notebook imports from the libraries, bound to the installed objects."""
    found: dict[str, Any] = {}
    for node in nodes(stem, ast.ImportFrom):
        if node.module.split(".")[0] in LIBRARIES:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


@each_lesson
def test_every_keyword_passed_exists_in_the_installed_signature(stem: str) -> None:
    names, checked = imported_names(stem), 0
    for call in nodes(stem, ast.Call):
        path = ast.unparse(call.func)  # SFTConfig, AutoTokenizer.from_pretrained
        if path.split(".")[0] not in names or not all(part.isidentifier() for part in path.split(".")):
            continue
        target = operator.attrgetter(f"names.{path}")(SimpleNamespace(names=SimpleNamespace(**names)))
        if callable(target):
            accepted = inspect.signature(target).parameters
            anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
            unknown = {keyword.arg for keyword in call.keywords} - {None, *accepted}
            assert anything or not unknown, f"DRIFT: {path}({unknown})"
            checked += 1
    assert checked or stem == "01_environment"
