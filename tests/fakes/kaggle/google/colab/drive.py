"""Drive is not there on Kaggle."""

from __future__ import annotations

import os
from pathlib import Path


def mount(mountpoint: str, force_remount: bool = False, timeout_ms: int = 120000, readonly: bool = False) -> None:
    """Fails as it does on Kaggle, and leaves a trace that it was called at all."""
    (Path(os.environ.get("NBUTILS_FS_ROOT", "/")) / "fake_calls.txt").write_text("mount\n")
    raise NotImplementedError("google.colab.drive is unsupported in this environment.")
