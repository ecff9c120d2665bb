"""Secrets by name: from the environment, Colab's userdata or Kaggle's secrets. Their values are never printed.

Not here: who uses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nbutils.platforms.detection import detect


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets; None if nobody has it."""
    for source in (os.environ.get, _colab_secret, _kaggle_secret):
        if value := _quietly(source, name):
            return value
    return None


def _quietly(source: Callable[[str], str | None], name: str) -> str | None:
    try:
        return source(name)
    except Exception:  # absent, not granted, no frontend, no network: all mean "not here"
        return None


def _colab_secret(name: str) -> str | None:
    if detect().name != "colab":
        return None
    from google.colab import userdata

    return userdata.get(name)


def _kaggle_secret(name: str) -> str | None:
    if "KAGGLE_USER_SECRETS_TOKEN" not in os.environ:
        return None
    from kaggle_secrets import UserSecretsClient

    return UserSecretsClient().get_secret(name)
