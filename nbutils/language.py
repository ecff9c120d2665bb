"""The language the course speaks: English, or Chinese with `NBUTILS_LANG=zh` or a Chinese locale.

Texts stand in the code in English, as `tr("{count} rows", count=3)`. `messages/zh/<room>.yaml` has the Chinese ones: of
printed texts under `texts`, by the English one, and of errors by their code, as in `messages/en`. Names of commands,
parameters and JSON keys stay English.
"""

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

MESSAGES = Path(__file__).parent / "messages"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides, as in gettext
# A name that a stranger chose could steer a terminal with these, or turn a line around; and half a character cannot be
# written at all. Line breaks and tabs stay.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def language() -> str:
    """`zh` or `en`."""
    chosen = next(filter(None, map(os.environ.get, ("NBUTILS_LANG", *LOCALE))), "")
    return "zh" if chosen.lower().startswith("zh") else "en"


@cache
def messages(language: str, room: str) -> dict[str, Any]:
    """The messages of a room in a language."""
    file = MESSAGES / language / f"{room}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(file.read_text(encoding="utf-8"), loader) or {} if file.exists() else {}


@cache
def _chinese() -> dict[str, str]:
    rooms = sorted(file.stem for file in (MESSAGES / "zh").glob("*.yaml"))
    return {english: text for room in rooms for english, text in messages("zh", room).get("texts", {}).items()}


def printable(text: str) -> str:
    """The text with control characters spelled out as in JSON, \\u001b, so that no terminal obeys them."""
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def tr(english: str, **values: Any) -> str:
    """A text in the language of the course, with its values; one that has no translation stays English."""
    text = _chinese().get(english, english) if language() == "zh" else english
    return printable(text.format(**values) if values else text)


def joined(parts: Iterable[str], mark: str = ",") -> str:
    """Texts in one line, with a comma, semicolon or colon of the language between them."""
    return ({",": "，", ";": "；", ":": "："}[mark] if language() == "zh" else f"{mark} ").join(parts)


def print_whatever() -> None:
    """Let streams that cannot show Chinese (an ASCII locale, a pipe on Windows) print ? instead of failing."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")
