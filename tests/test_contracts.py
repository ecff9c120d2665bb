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

CONTRACTS = Path(__file__).with_name("contracts.json")
FROZEN = json.loads(CONTRACTS.read_text(encoding="utf-8"))


def commands(group: click.Group = cli.app, prefix: str = "") -> dict[str, list[str]]:
    """Every command with its arguments and options."""
    words_of: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            words_of |= commands(command, f"{prefix}{name} ")
        else:
            longest_names = [max(parameter.opts, key=len) for parameter in command.params]
            words_of[prefix + name] = sorted(longest_names)
    return words_of


def is_list_of_dicts(value: Any) -> bool:
    """Whether a list begins with a dict."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def keys(value: Any) -> Any:
    """The keys of nested dicts; of a list, those of its first entry."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in sorted(value.items())}
    if is_list_of_dicts(value):
        return [keys(value[0])]
    return None


def missing(promised: Any, there: Any, place: str = "") -> list[str]:
    """What was promised and is not there."""
    if is_list_of_dicts(promised):
        first_entry = {}
        if isinstance(there, list) and there:
            first_entry = there[0]
        return missing(promised[0], first_entry, place)
    gone = []
    if isinstance(promised, list):
        for name in promised:
            if name not in (there or ()):
                gone.append(f"{place}: {name}")
        return gone
    for name, inner in (promised or {}).items():
        if isinstance(there, dict) and name in there:
            gone += missing(inner, there[name], f"{place}.{name}")
        else:
            gone.append(f"{place}.{name}")
    return gone


def keys_printed_by(words: str) -> Any:
    """The keys of what a command prints with --json."""
    home = Path(tempfile.mkdtemp())
    ran = python("-m", "nbutils", *words.split(), "--json", home=home, ok=None)
    return keys(json.loads(ran.stdout))


def lesson_parameters() -> dict[str, list[str]]:
    """The parameters of each lesson."""
    lessons = sorted(files.NOTEBOOKS.glob("[0-9]*.py"))
    return {file.stem: sorted(lesson.declared_in(file)) for file in lessons}


def test_commands_and_options() -> None:
    assert missing(FROZEN["commands"], commands()) == []


def test_parameters_of_the_lessons() -> None:
    assert missing(FROZEN["parameters"], lesson_parameters()) == []


@pytest.mark.parametrize("words", FROZEN["json"], ids=lambda words: words.split()[0])
def test_json_keys(words: str) -> None:
    assert missing(FROZEN["json"][words], keys_printed_by(words)) == []


@pytest.mark.parametrize("path", FROZEN["imports"])
def test_import_paths(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
