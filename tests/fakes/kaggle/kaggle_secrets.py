"""Kaggle's secrets, with the failures they are documented to have; none of its code."""

import json
import os


class BackendError(Exception):
    """The service answered that it did not succeed."""


class UserSecretsClient:
    """Asks the service for secrets attached to this notebook."""

    def get_secret(self, label: str) -> str:
        known = json.loads(os.environ.get("FAKE_SECRETS", "null"))
        if known is None:
            raise ConnectionError("Connection error trying to communicate with service.")
        if label not in known:
            raise BackendError("No user secrets exist for kernel id 7 and label X.")
        return known[label]
