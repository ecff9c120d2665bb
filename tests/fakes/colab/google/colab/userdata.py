"""Colab's secrets."""

from __future__ import annotations

import json
import os

from google.colab import _message, called, errors, kernel, wait


class SecretNotFoundError(errors.Error):
    """No secret of that name."""


class NotebookAccessError(Exception):
    """There is one, but not for this notebook."""


class TimeoutException(errors.Error):
    """No page answered."""


def get(key: str) -> str:
    """A secret of the account, as the page gives it."""
    called(f"userdata {key}")
    if not key.strip():
        raise ValueError("Secret name must not be empty")
    kernel()
    outcome = os.environ.get("FAKE_USERDATA", "timeout")
    if outcome == "timeout":
        wait()
        raise TimeoutException(f"Requesting secret {key} timed out. Secrets can only be fetched from the Colab UI.")
    if outcome == "error":
        raise _message.MessageError("Error: something broke in the page")
    if key == os.environ.get("FAKE_NOT_GRANTED"):
        raise NotebookAccessError(f"Notebook does not have access to secret {key}")
    known = json.loads(os.environ.get("FAKE_SECRETS", "{}"))
    if key not in known:
        raise SecretNotFoundError(f"Secret {key} does not exist.")
    return known[key]
