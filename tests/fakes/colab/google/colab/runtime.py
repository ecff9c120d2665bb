"""The machine itself."""

from __future__ import annotations

import os

from google.colab import called, errors


def unassign() -> None:
    """Give the machine back; a trace is left instead."""
    called("unassign")
    if "TBE_RUNTIME_ADDR" not in os.environ:
        raise errors.RuntimeManagementError("no runtime address")
