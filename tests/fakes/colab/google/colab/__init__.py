"""Behaves as Colab's package is documented to, failures included; none of its code.

Variables say what the machine does: FAKE_KERNEL (there is a kernel), FAKE_DRIVE and FAKE_USERDATA (the outcome),
FAKE_SECRETS (JSON), FAKE_NOT_GRANTED (a name), FAKE_DELAY (seconds). Calls are written to fake_calls.txt.
"""

import os
import time
from pathlib import Path

ROOT = Path(os.environ.get("NBUTILS_FS_ROOT", "/"))


class MessageError(Exception):
    """The page answered with an error."""


def called(what: str) -> None:
    with open(ROOT / "fake_calls.txt", "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def kernel() -> None:
    if not os.environ.get("FAKE_KERNEL"):
        raise AttributeError("'NoneType' object has no attribute 'kernel'")


def wait() -> None:
    time.sleep(float(os.environ.get("FAKE_DELAY", "0.1")))
