"""What programs and notebooks of others rely on: commands, JSON keys, parameters, import paths.

`contracts.json` holds what was promised. More may be added; what is there may not go. test_course_run checks the run
folder.
"""

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from support import python

from nbutils import cli, files, lesson

FROZEN = json.loads((Path(__file__).with_name("contracts.json")).read_text(encoding="utf-8"))


def commands(group: click.Group = cli.app, prefix: str = "") -> dict[str, list[str]]:
    """Every command with its arguments and options."""
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= commands(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = sorted(max(option.opts, key=len) for option in command.params)
    return found


def keys(value: Any) -> Any:
    """The keys of nested dicts; of a list, those of its first entry."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in sorted(value.items())}
    return [keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def missing(promised: Any, there: Any, place: str = "") -> list[str]:
    """What was promised and is not there."""
    if isinstance(promised, list) and promised and isinstance(promised[0], dict):
        return missing(promised[0], there[0] if isinstance(there, list) and there else {}, place)
    if isinstance(promised, list):
        return [f"{place}: {name}" for name in promised if name not in (there or ())]
    gone = []
    for name, inner in (promised or {}).items():
        if not isinstance(there, dict) or name not in there:
            gone.append(f"{place}.{name}")
        else:
            gone += missing(inner, there[name], f"{place}.{name}")
    return gone


def json_of(words: str) -> Any:
    """The keys of what a command prints with --json."""
    ran = python("-m", "nbutils", *words.split(), "--json", home=Path(tempfile.mkdtemp()), ok=None)
    return keys(json.loads(ran.stdout))


def lesson_parameters() -> dict[str, list[str]]:
    return {file.stem: sorted(lesson.declared_in(file)) for file in sorted(files.NOTEBOOKS.glob("[0-9]*.py"))}


def test_commands_and_options() -> None:
    assert missing(FROZEN["commands"], commands()) == []


def test_parameters_of_the_lessons() -> None:
    assert missing(FROZEN["parameters"], lesson_parameters()) == []


@pytest.mark.parametrize("words", FROZEN["json"], ids=lambda words: words.split()[0])
def test_json_keys(words: str) -> None:
    assert missing(FROZEN["json"][words], json_of(words)) == []


@pytest.mark.parametrize("path", FROZEN["imports"])
def test_import_paths(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
