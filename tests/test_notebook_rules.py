"""The notebook contract as rules; static, no lesson is run. Each test name is the rule."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from nbutils import lessons, parameters
from nbutils.masking import KEY as SECRET

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.py"))
NOTEBOOKS = {file.stem: json.loads(file.with_suffix(".ipynb").read_text(encoding="utf-8")) for file in SOURCES}
PLATFORM_PATH = re.compile(r"/content\b|/kaggle\b|/root/autodl|/mnt/workspace|/hy-tmp")
LESSON_03 = ["PROFILE", "MODEL", "DATA", "RUN_NAME", "MAX_STEPS", "SAVE_STEPS", "MAX_HOURS", "RESUME", "SEED", "SET"]

each_lesson = pytest.mark.parametrize("stem", NOTEBOOKS)


def cells(stem: str, kind: str = "") -> list[dict]:
    return [cell for cell in NOTEBOOKS[stem]["cells"] if not kind or cell["cell_type"] == kind]


def text(cell: dict) -> str:
    return "".join(cell["source"])


def code_lines(cell: dict) -> list[str]:
    return [line for line in text(cell).splitlines() if line.strip() and not line.strip().startswith("#")]


def tagged(stem: str, tag: str) -> list[dict]:
    return [cell for cell in cells(stem, "code") if tag in cell["metadata"].get("tags", [])]


def tree(stem: str) -> ast.Module:
    return ast.parse(next(file for file in SOURCES if file.stem == stem).read_text(encoding="utf-8"))


def test_the_course_and_the_lesson_on_pretraining_are_there() -> None:
    assert {*lessons.COURSE, "07_from_scratch"} <= set(NOTEBOOKS)


def test_derived_files_are_in_step_with_their_sources() -> None:
    sync = runpy.run_path(str(ROOT / ".ci/sync.py"))
    stale = [
        str(f.relative_to(ROOT)) for f, wanted in sync["wanted"]().items() if f.read_text(encoding="utf-8") != wanted
    ]
    assert stale == [], f"{stale} out of date: run `make sync`"


@each_lesson
def test_no_outputs_are_committed(stem: str) -> None:
    for cell in cells(stem, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@each_lesson
def test_the_kernel_is_named_and_cell_ids_are_stable(stem: str) -> None:
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
    nodes = ast.parse(text(cell)).body
    assert nodes and all(
        isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.UnaryOp) for node in nodes
    )
    source = next(file for file in SOURCES if file.stem == stem)
    assert list(parameters.declared_in(source)) == [node.target.id for node in nodes]


def test_lesson_03_has_the_promised_parameters() -> None:
    assert list(parameters.declared_in(ROOT / "notebooks/03_qlora.py")) == LESSON_03


@each_lesson
def test_a_sentence_stands_before_every_code_cell(stem: str) -> None:
    order = cells(stem)
    for before, cell in pairwise(order):
        if cell["cell_type"] == "code":
            assert before["cell_type"] == "markdown", f"no sentence before: {text(cell)[:80]}"


@each_lesson
def test_cells_are_short(stem: str) -> None:
    sizes = [len(code_lines(cell)) for cell in cells(stem, "code")]
    assert max(sizes) <= 25 and statistics.median(sizes) <= 6


@each_lesson
def test_no_class_and_no_long_function_is_defined(stem: str) -> None:
    for node in ast.walk(tree(stem)):
        assert not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 10, f"{node.name} belongs in nbutils"


@each_lesson
def test_nothing_waits_for_a_person(stem: str) -> None:
    calls = {ast.unparse(node.func) for node in ast.walk(tree(stem)) if isinstance(node, ast.Call)}
    assert not calls & {"input", "getpass", "notebook_login", "login", "wandb.login"}


@each_lesson
def test_no_background_shell_command_and_no_dead_code(stem: str) -> None:
    for cell in cells(stem, "code"):
        assert not re.search(r"^\s*[!%].*&\s*$", text(cell), re.M)
    tests = [ast.unparse(node.test) for node in ast.walk(tree(stem)) if isinstance(node, ast.If)]
    assert "False" not in tests and "0" not in tests


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


def imported_names(stem: str) -> dict[str, object]:
    """Names a notebook imports from the libraries, bound to the installed objects."""
    found: dict[str, object] = {}
    for node in ast.walk(tree(stem)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in (
            "trl", "peft", "transformers", "datasets", "openai", "nbutils"
        ):  # fmt: skip
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def resolve(call: ast.Call, names: dict[str, object]) -> object | None:
    """The installed object a call names (`SFTConfig`, `AutoTokenizer.from_pretrained`), where that can be told."""
    path = ast.unparse(call.func).split(".")
    if path[0] not in names or not all(part.isidentifier() for part in path):
        return None
    target = names[path[0]]
    for part in path[1:]:
        assert hasattr(target, part), f"{'.'.join(path)} does not exist in the installed version"
        target = getattr(target, part)
    return target


@each_lesson
def test_every_keyword_passed_exists_in_the_installed_signature(stem: str) -> None:
    names, checked = imported_names(stem), 0
    for call in [node for node in ast.walk(tree(stem)) if isinstance(node, ast.Call)]:
        target = resolve(call, names)
        if target is None or not callable(target):
            continue
        accepted = inspect.signature(target).parameters
        checked += 1
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
            continue
        for keyword in call.keywords:
            assert keyword.arg is None or keyword.arg in accepted, f"DRIFT: {ast.unparse(call.func)}({keyword.arg}=)"
    assert checked or stem == "01_environment"
