"""Kaggle's secrets, with the failures they are documented to have; none of its code."""

import json
import os
import urllib.error
import urllib.request


class CredentialError(Exception):
    """No token on this machine."""


class BackendError(Exception):
    """The service answered that it did not succeed."""


class UserSecretsClient:
    """Asks the service for secrets attached to this notebook."""

    def __init__(self) -> None:
        if not os.environ.get("KAGGLE_USER_SECRETS_TOKEN"):
            raise CredentialError("A JWT Token is required to call Kaggle, please set KAGGLE_USER_SECRETS_TOKEN")

    def get_secret(self, label: str) -> str:
        """The value of a secret; an HTTP status that is an error cannot be told from a dead network here."""
        url = f"{os.environ['KAGGLE_URL_BASE']}/requests/GetUserSecretByLabelRequest"
        body, headers = json.dumps({"Label": label}).encode(), {"Content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=40) as answer:
                told = json.loads(answer.read())
        except urllib.error.URLError as problem:
            raise ConnectionError("Connection error trying to communicate with service.") from problem
        if not told.get("wasSuccessful"):
            raise BackendError(f"Unexpected response from the service. Response: {told}.")
        return told["result"]["secret"]
