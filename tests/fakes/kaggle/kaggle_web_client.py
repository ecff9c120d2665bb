"""The client of Kaggle's own services, with the failures it is documented to have; none of its code."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from typing import Any


class CredentialError(Exception):
    """No token on this machine."""


class BackendError(Exception):
    """The service answered that it did not succeed."""


class KaggleWebClient:
    """Posts requests with the machine's token."""

    def __init__(self) -> None:
        if not os.environ.get("KAGGLE_USER_SECRETS_TOKEN"):
            raise CredentialError("A JWT Token is required to call Kaggle, please set KAGGLE_USER_SECRETS_TOKEN")
        self.base = os.environ["KAGGLE_URL_BASE"]
        self.patience = float(os.environ.get("FAKE_PATIENCE", "40"))

    def ask(self, request: str, values: dict[str, str]) -> Any:
        """The result of a request; an HTTP status that is an error cannot be told from a dead network here."""
        headers = {"Content-type": "application/json", "X-Kaggle-Authorization": "Bearer token"}
        body = json.dumps(values).encode()
        try:
            call = urllib.request.Request(f"{self.base}/requests/{request}", data=body, headers=headers)
            with urllib.request.urlopen(call, timeout=self.patience) as answer:
                told = json.loads(answer.read())
        except urllib.error.URLError as problem:
            if isinstance(problem.reason, socket.timeout):
                said = "Timeout error trying to communicate with service. Please ensure internet is on."
                raise ConnectionError(said) from problem
            raise ConnectionError("Connection error trying to communicate with service.") from problem
        if not told.get("wasSuccessful"):
            raise BackendError(f"Unexpected response from the service. Response: {told}.")
        return told["result"]
