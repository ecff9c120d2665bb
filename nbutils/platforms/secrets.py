"""Secrets by name: from the environment, Colab's userdata or Kaggle's secrets. Their values are never printed.

A store that cannot answer is asked once: each further secret would cost its wait again.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nbutils.errors import CourseError
from nbutils.masking import remember_secret
from nbutils.platforms.detection import detect
from nbutils.platforms.drive import within

SECONDS = 15.0  # Colab gives up after 10 by itself; Kaggle would wait 40
STATE = "NBUTILS_SECRETS_SILENT"  # the store that cannot answer; child processes inherit it
INSTEAD = "set an environment variable of that name instead"
_printed: set[str] = set()

# (store, type of the exception): (what to say, nothing where the secret is just not there; whether to ask again)
CAUSES: dict[tuple[str, str], tuple[str, bool]] = {
    ("colab", "SecretNotFoundError"): ("", True),
    ("colab", "NotebookAccessError"): ("open the key symbol at the left and tick 'Notebook access' for {name}", True),
    ("colab", "MessageError"): ("the Colab page could not give {name}: reload the page and run this cell again", True),
    ("colab", "AttributeError"): ("only a notebook's kernel can read Colab's secrets, not `!python ...`", False),
    ("colab", "TimeoutException"): ("without an open Colab page (papermill, VS Code) its secrets do not answer", False),
    ("colab", "TimedOut"): ("Colab's secrets do not answer", False),
    ("kaggle", "BackendError"): ("Kaggle's secrets answered with an error for {name}: run this cell again later", True),
    ("kaggle", "CredentialError"): ("tick the secret under Add-ons > Secrets of this notebook and start again", False),
    ("kaggle", "ConnectionError"): ("Kaggle's secrets cannot be reached: turn on Settings > Internet", False),
    ("kaggle", "TimedOut"): ("Kaggle's secrets do not answer: turn on Settings > Internet", False),
}


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets; None if nobody has it."""
    name = name.strip()
    if not name:
        raise CourseError("platforms.unnamed_secret")
    value = os.environ.get(name, "").strip() or _from_store(name)
    if value:
        remember_secret(value)
    return value or None


def _from_store(name: str) -> str:
    """The secret as this platform keeps it; empty, after a sentence where one helps, if it cannot be had."""
    store = detect().name
    if store not in STORES or os.environ.get(STATE) == store:
        return ""
    try:
        return str(within(SECONDS, lambda: STORES[store](name)) or "").strip()
    except ImportError:
        return ""
    except Exception as problem:  # seven documented types, of which none may cost the learner the lesson
        if "No user secrets exist" not in str(problem):
            _explain(store, name, problem)
        return ""


def _colab(name: str) -> str | None:
    from google.colab import userdata

    return userdata.get(name)


def _kaggle(name: str) -> str | None:
    from kaggle_secrets import UserSecretsClient

    return UserSecretsClient().get_secret(name)


STORES: dict[str, Callable[[str], str | None]] = {"colab": _colab, "kaggle": _kaggle}


def _explain(store: str, name: str, problem: Exception) -> None:
    """One sentence, once; the exception's own text is not shown, it may hold what it must not."""
    kinds = [kind.__name__ for kind in type(problem).__mro__]
    known = [CAUSES[store, kind] for kind in kinds if (store, kind) in CAUSES]
    text, again = known[0] if known else (f"{store}'s secrets failed with {kinds[0]}", True)
    status = getattr(problem.__cause__, "code", None)
    if not again and status != 429:  # too many requests: the next may be answered
        os.environ[STATE] = store
    sentence = text.format(name=name) + (f" (HTTP status {status})" if status else "")
    if text and sentence not in _printed:
        _printed.add(sentence)
        print(f"secret    {sentence}; or {INSTEAD}.")
