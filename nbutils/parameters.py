"""The parameters of a lesson: annotated upper-case names in its one `parameters` cell.

In a kernel the values are already in the notebook (typed there, or injected by papermill); a plain script takes them
from its command line. Either way an unknown name or a wrong type is refused by name, because a misspelt parameter that
changes nothing is the most expensive kind of typo.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nbutils.errors import CourseError
from nbutils.platforms import in_kernel

Types = dict[str, type]
KNOWN_TYPES: Types = {"str": str, "int": int, "float": float, "bool": bool}
INJECTED = "# Parameters"  # how papermill begins the cell it adds


def collect(namespace: dict[str, Any]) -> dict[str, Any]:
    """The checked parameter values of a lesson; in a plain script the command line is applied to `namespace` first."""
    types = declared(namespace)
    if in_kernel():
        refuse_unknown(_injected_names(namespace.get("In", [])), types)
    elif namespace.get("__name__") == "__main__":
        namespace.update(from_command_line(sys.argv[1:], types))
    for name, expected in types.items():
        namespace[name] = check_type(name, namespace[name], expected)
    return {name: namespace[name] for name in types}


def declared(namespace: dict[str, Any]) -> Types:
    """Names and types of the annotated upper-case variables of a namespace."""
    annotations = namespace.get("__annotations__") or {}
    if not annotations and callable(namespace.get("__annotate__")):  # Python 3.14 computes them on demand
        annotations = namespace["__annotate__"](1)
    return {name: _as_type(kind) for name, kind in annotations.items() if name.isupper()}


def declared_in(source: Path) -> Types:
    """The same, read from a lesson's `.py` without running it."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    annotated = {ast.unparse(node.target): node.annotation for node in tree.body if isinstance(node, ast.AnnAssign)}
    return {name: _as_type(ast.unparse(kind)) for name, kind in annotated.items() if name.isupper()}


def from_command_line(arguments: Sequence[str], types: Types) -> dict[str, Any]:
    """`--NAME VALUE` pairs as typed values."""
    parser = _Parser(types, allow_abbrev=False, description="Parameters of this lesson, as in its parameters cell.")
    for name in types:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=types[name].__name__)
    given = vars(parser.parse_args(arguments))
    return {name: parse(name, text, types[name]) for name, text in given.items()}


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is told the way the course tells mistakes."""

    def __init__(self, types: Types, **options: Any) -> None:
        self.types = types
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        refuse_unknown([word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")], self.types)
        raise CourseError(f"the command line could not be read: {message}.", _listing(self.types), "write --NAME VALUE")


def parse(name: str, text: str, expected: type) -> Any:
    """Text from a command line as the type its parameter declares."""
    if expected is bool:
        if text.lower() in ("true", "1", "yes", "false", "0", "no"):
            return text.lower() in ("true", "1", "yes")
        raise _wrong_type(name, text, expected)
    try:
        return expected(text)
    except ValueError as problem:
        raise _wrong_type(name, text, expected) from problem


def check_type(name: str, value: Any, expected: type) -> Any:
    """The value if it has the declared type; whole numbers count as floats, numbers as text, and none is below zero."""
    if expected is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # papermill's -p makes a number of RUN_NAME 2024
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise _wrong_type(name, value, expected)
    if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 0:
        raise CourseError(f"parameter {name} is {value}.", "zero or more", f"zero leaves {name} to the profile")
    return value


def refuse_unknown(names: Iterable[str], types: Types) -> None:
    """Stop if any name is not a parameter of this lesson."""
    unknown = [name for name in names if name not in types]
    if unknown:
        near = difflib.get_close_matches(unknown[0].upper(), types, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        raise CourseError(f"unknown parameter {', '.join(unknown)}.", _listing(types), hint)


def _injected_names(history: Sequence[str]) -> list[str]:
    """Names that papermill assigned in this kernel."""
    cells = [ast.parse(cell) for cell in history if cell.lstrip().startswith(INJECTED)]
    assigned = [node.targets[0] for tree in cells for node in tree.body if isinstance(node, ast.Assign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("PAPERMILL_")]


def _as_type(annotation: Any) -> type:
    return annotation if isinstance(annotation, type) else KNOWN_TYPES[str(annotation).strip("'\"")]


def _listing(types: Types) -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())


def _wrong_type(name: str, value: Any, expected: type) -> CourseError:
    return CourseError(
        f"parameter {name} is {value!r}, a {type(value).__name__}.", f"a value of type {expected.__name__}",
        f"write {name} as {expected.__name__} in the parameters cell or after -p {name}",
    )  # fmt: skip
