"""How much a reader takes in per line: the nodes of the syntax tree of nbutils, and nodes per line of code.

    python .ci/density.py            the package, its modules and its densest functions
    python .ci/density.py --check    exit 1 if a limit is passed

Formatting cannot change the nodes. A line of code holds something other than a comment, a docstring or a blank.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "nbutils"
MOST_NODES = 138_887
MOST_A_LINE = 9.5
MOST_IN_A_MODULE = 11.0  # nodes per line of code
MOST_IN_A_FUNCTION = 14.0
SHORTEST_FUNCTION = 5  # lines of code; one line is dense by nature
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Part:
    """A module or a function with its size."""

    name: str
    nodes: int
    lines: int

    @property
    def density(self) -> float:
        return self.nodes / max(self.lines, 1)

    def __str__(self) -> str:
        return f"{self.nodes:>7,} nodes {self.lines:>6,} lines {self.density:5.1f}  {self.name}"


def docstring_lines(tree: ast.AST) -> Iterator[int]:
    """The numbers of the lines that docstrings stand on."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            text = node.body[0]
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - set(docstring_lines(tree))


def count_nodes(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def measure(path: Path) -> tuple[Part, list[Part]]:
    """A module, and its functions that are long enough to judge."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    name = path.relative_to(PACKAGE).as_posix()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = lines.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if len(own) >= SHORTEST_FUNCTION:
                functions.append(Part(f"{name}:{node.lineno} {node.name}", count_nodes(node), len(own)))
    return Part(name, count_nodes(tree), len(lines)), functions


def problems_of(whole: Part, modules: list[Part], functions: list[Part]) -> list[str]:
    """What passes a limit, a sentence each."""
    problems = []
    if whole.nodes > MOST_NODES:
        problems.append(f"nbutils has {whole.nodes:,} nodes; at most {MOST_NODES:,}: delete something.")
    if whole.density > MOST_A_LINE:
        problems.append(f"nbutils has {whole.density:.1f} nodes a line of code; at most {MOST_A_LINE}.")
    for module in modules:
        if module.density > MOST_IN_A_MODULE:
            problems.append(f"{module.name} has {module.density:.1f} nodes a line; at most {MOST_IN_A_MODULE:.0f}.")
    for function in functions:
        if function.density > MOST_IN_A_FUNCTION:
            problems.append(
                f"{function.name} has {function.density:.1f} nodes a line; at most {MOST_IN_A_FUNCTION:.0f}."
            )
    return problems


def main() -> int:
    """Print the sizes or check the limits; the exit status says whether one is passed."""
    modules = []
    functions = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module, own = measure(path)
        modules.append(module)
        functions += own
    whole = Part("nbutils", sum(module.nodes for module in modules), sum(module.lines for module in modules))
    if "--check" in sys.argv:
        problems = problems_of(whole, modules, functions)
        print("\n".join(problems) or str(whole))
        return int(bool(problems))
    densest = sorted(functions, key=lambda function: function.density, reverse=True)[:12]
    print(*modules, whole, "", "densest functions:", *densest, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
