"""Secrets by name: from the environment, Colab's userdata or Kaggle's secrets. Their values are never printed.

Not here: who uses them. A source that cannot answer is asked once: each further secret would cost its wait again.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nbutils.errors import CourseError
from nbutils.masking import remember_secret
from nbutils.platforms.detection import detect
from nbutils.platforms.waiting import within

SECONDS = 15.0  # Colab gives up after 10 by itself; Kaggle would wait 40
MEMORY = "NBUTILS_SECRETS_SILENT"  # the source that cannot answer; child processes inherit it
_told: set[str] = set()

INSTEAD = "set an environment variable of that name instead"
ABSENT, SILENT = "absent", "silent"
# (source, type of the exception, what it means: ABSENT, or a sentence; whether the source is not asked again)
CAUSES: tuple[tuple[str, str, str, str], ...] = (
    ("colab", "SecretNotFoundError", ABSENT, ""),
    ("colab", "NotebookAccessError", "{name} is among Colab's secrets, but this notebook may not read it: "
     "open the key symbol at the left and tick 'Notebook access' beside it", ""),
    ("colab", "AttributeError", "Colab's secrets can only be read in a notebook's kernel, not in `!python ...`: "
     + INSTEAD, SILENT),
    ("colab", "TimeoutException", "Colab's secrets do not answer without an open Colab page (papermill, VS Code): "
     + INSTEAD, SILENT),
    ("colab", "TookTooLong", "Colab's secrets do not answer: " + INSTEAD, SILENT),
    ("colab", "MessageError", "the Colab page could not give {name}: reload the page and run this cell again", ""),
    ("kaggle", "BackendError", "Kaggle's secrets answered with an error for {name}: run this cell again later", ""),
    ("kaggle", "CredentialError", "Kaggle gave this machine no token for its secrets: open Add-ons > Secrets in the "
     "notebook's page, tick the secret, and start again; or " + INSTEAD, SILENT),
    ("kaggle", "ValidationError", "{name} cannot be the name of a Kaggle secret: correct it", ""),
    ("kaggle", "ConnectionError", "Kaggle's secrets cannot be reached{status}: turn on Settings > Internet, or "
     + INSTEAD, SILENT),
    ("kaggle", "TookTooLong", "Kaggle's secrets do not answer: turn on Settings > Internet, or " + INSTEAD, SILENT),
)  # fmt: skip


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets; None if nobody has it."""
    name = name.strip()
    if not name:
        raise CourseError("a secret without a name was asked for.", "a name such as HF_TOKEN", "name the secret")
    value = os.environ.get(name, "").strip() or _from_platform(name)
    if value:
        remember_secret(value)
    return value or None


def _from_platform(name: str) -> str:
    """The secret as this platform keeps it; empty, and a sentence where one helps, if it cannot be had."""
    source = detect().name
    if source not in SOURCES or os.environ.get(MEMORY) == source:
        return ""
    try:
        return str(within(SECONDS, lambda: SOURCES[source](name)) or "").strip()
    except ImportError:
        return ""
    except Exception as problem:  # seven documented types, of which none may cost the learner the lesson
        _explain(source, name, problem)
        return ""


def _colab(name: str) -> str | None:
    from google.colab import userdata

    return userdata.get(name)


def _kaggle(name: str) -> str | None:
    from kaggle_secrets import UserSecretsClient

    return UserSecretsClient().get_secret(name)


SOURCES: dict[str, Callable[[str], str | None]] = {"colab": _colab, "kaggle": _kaggle}


def _explain(source: str, name: str, problem: Exception) -> None:
    """One sentence for what a learner can mend; a failure's own text is not shown, it may hold what it must not."""
    kinds = [kind.__name__ for kind in type(problem).__mro__]
    unknown = (f"{source}'s secrets failed with {kinds[0]}: {INSTEAD}", "")
    found = [cause[2:] for cause in CAUSES if cause[0] == source and cause[1] in kinds]
    meaning, silent = found[0] if found else unknown
    status = getattr(problem.__cause__, "code", None)
    if meaning == ABSENT or "No user secrets exist" in str(problem):
        return
    if silent and status != 429:  # too many requests: the next may be answered
        os.environ[MEMORY] = source
    sentence = meaning.format(name=name, status=f" (HTTP status {status})" if status else "")
    if sentence not in _told:
        _told.add(sentence)
        print(f"secret    {sentence}.")
