"""Kaggle's secrets."""

from __future__ import annotations

from kaggle_web_client import KaggleWebClient


class ValidationError(Exception):
    """Not a name a secret can have."""


class UserSecretsClient:
    """Asks the service for secrets attached to this notebook."""

    def __init__(self) -> None:
        self.client = KaggleWebClient()

    def get_secret(self, label: str) -> str:
        """The value of a secret by its label."""
        if not label:
            raise ValidationError("Label must be non-empty.")
        return self.client.ask("GetUserSecretByLabelRequest", {"Label": label})["secret"]
