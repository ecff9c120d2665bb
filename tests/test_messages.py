"""The catalogue of messages and the code that uses it agree: no unknown code, no unused entry, no missing value."""

import ast
import re
import string
from pathlib import Path

import pytest
import yaml

from nbutils import errors

PACKAGE = Path(errors.__file__).parent
CATALOGUE = {
    f"{file.stem}.{name}": entry
    for file in sorted((errors.MESSAGES / "en").glob("*.yaml"))
    for name, entry in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).items()
}


def raised() -> dict[str, list[tuple[str, set[str | None]]]]:
    """Every code in the source, with where it is raised and the names of its values (None among them: **values)."""
    found: dict[str, list[tuple[str, set[str | None]]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "CourseError":
                values = {word.arg for word in node.keywords}
                found.setdefault(ast.literal_eval(node.args[0]), []).append((f"{file.name}:{node.lineno}", values))
    return found


RAISED = raised()


@pytest.mark.parametrize("code", sorted(RAISED))
def test_each_code_has_texts_for_its_values(code: str) -> None:
    assert code in CATALOGUE, f"{RAISED[code]} raises {code}, which no file of messages/en has"
    entry = CATALOGUE[code]
    assert set(entry) == {"seen", "allowed", "todo"} and all(entry.values()), code
    for part in ("seen", "todo"):  # sentences; what a field holds is the caller's
        assert re.match(r"[^a-z]|(pip|vLLM|lm-eval) ", entry[part]) and entry[part][-1] in ".?}", (code, part)
    assert not re.match(r"[A-Z][a-z]+ ", entry["allowed"]) and entry["allowed"][-1] != ".", code
    fields = [name for part in entry.values() for _, name, _, _ in string.Formatter().parse(part) if name]
    wanted = {name.split(".")[0].split("[")[0] for name in fields}
    for place, given in RAISED[code]:
        assert None in given or given == wanted, f"{place} gives {given}, the text wants {wanted}"
    assert sorted(set(CATALOGUE) - set(RAISED)) == [], "entries that nothing raises"
