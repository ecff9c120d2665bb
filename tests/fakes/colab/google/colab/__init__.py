"""Behaves as Colab's package is documented to, failures included; none of its code.

What the machine does is told by variables: FAKE_KERNEL (there is a kernel), FAKE_DRIVE (ok, headless, pexpect, hang,
denied, policy, too_big, liar), FAKE_USERDATA (ok, timeout, error), FAKE_SECRETS (JSON of names and values),
FAKE_NOT_GRANTED (a name), FAKE_DELAY (seconds for what takes minutes there). Calls are written to fake_calls.txt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("NBUTILS_FS_ROOT", "/"))


def called(what: str) -> None:
    """Leave a trace of a call."""
    with open(ROOT / "fake_calls.txt", "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def kernel() -> Any:
    """The kernel, as a notebook has one; outside of one this fails as it does there."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return "a kernel" if os.environ.get("FAKE_KERNEL") else shell.kernel


def wait() -> None:
    """What takes up to two minutes there."""
    time.sleep(float(os.environ.get("FAKE_DELAY", "0.1")))
