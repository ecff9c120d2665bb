"""Colab's secrets."""

import json
import os

from google.colab import MessageError, called, kernel, wait


class SecretNotFoundError(Exception):
    """No secret of that name."""


class NotebookAccessError(Exception):
    """There is one, but not for this notebook."""


class TimeoutException(Exception):
    """No page answered."""


def get(key: str) -> str:
    called(f"userdata {key}")
    kernel()
    outcome = os.environ.get("FAKE_USERDATA", "timeout")
    if outcome == "timeout":
        wait()
        raise TimeoutException(f"Requesting secret {key} timed out. Secrets can only be fetched from the Colab UI.")
    if outcome == "error":
        raise MessageError("Error: something broke in the page")
    if key == os.environ.get("FAKE_NOT_GRANTED"):
        raise NotebookAccessError(f"Notebook does not have access to secret {key}")
    known = json.loads(os.environ.get("FAKE_SECRETS", "{}"))
    if key not in known:
        raise SecretNotFoundError(f"Secret {key} does not exist.")
    return known[key]
