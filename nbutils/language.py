"""The language the course speaks: English, or Chinese with `NBUTILS_LANG=zh` or a Chinese locale.

Texts stand in the code in English, as `tr("{count} rows", count=3)`. `locale/zh/LC_MESSAGES/nbutils.po` has the Chinese
ones; `make sync` takes new texts into it and writes the `.mo` beside it, which gettext reads. Names of commands,
parameters and JSON keys stay English.
"""

import gettext
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUES = Path(__file__).parent / "locale"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides, as in gettext
# A name that a stranger chose could steer a terminal with these, or turn a line around; and half a character cannot be
# written at all. Line breaks and tabs stay.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def language() -> str:
    """`zh` or `en`."""
    for name in ("NBUTILS_LANG", *LOCALE):
        if chosen := os.environ.get(name):
            return "zh" if chosen.lower().startswith("zh") else "en"
    return "en"


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("nbutils", CATALOGUES, [language], fallback=True)


def printable(text: str) -> str:
    """The text with control characters spelled out as in JSON, \\u001b, so that no terminal obeys them."""
    return UNPRINTABLE.sub(lambda character: f"\\u{ord(character[0]):04x}", text)


def tr(english: str, **values: Any) -> str:
    """A text in the language of the course, with its values; one that has no translation stays English."""
    if not english:  # gettext keeps the head of the catalogue there
        return ""
    text = _catalogue(language()).gettext(english)
    return printable(text.format(**values) if values else text)


def say(english: str, **values: Any) -> None:
    """Print a text in the language of the course; at once, also into a log that somebody follows."""
    print(tr(english, **values), flush=True)


def joined(parts: Iterable[str], mark: str = ",") -> str:
    """Texts in one line, with a comma, semicolon or colon of the language between them."""
    chinese = {",": "，", ";": "；", ":": "："}
    return (chinese[mark] if language() == "zh" else f"{mark} ").join(parts)


def split_words(text: str) -> list[str]:
    """The words of a parameter such as "fp8, gguf-q8_0"; none in an empty one."""
    return [word.strip() for word in text.split(",") if word.strip()]


def last_lines(text: str, count: int) -> str:
    """The end of what a program said, where it says why it stopped."""
    return "\n".join(text.strip().splitlines()[-count:])


def print_whatever() -> None:
    """Let streams that cannot show Chinese (an ASCII locale, a pipe on Windows) print ? instead of failing."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")
