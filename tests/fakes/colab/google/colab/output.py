"""The page's output."""

from __future__ import annotations

import time
from typing import Any

from google.colab import called, kernel


def enable_custom_widget_manager(version: str = "5.0.0a") -> None:
    """Needs a kernel and does nothing visible."""
    called("enable_custom_widget_manager")
    kernel()


def eval_js(script: str, ignore_result: bool = False, timeout_sec: int | None = None) -> Any:
    """Never comes back without a page, unless it is given a time."""
    called("eval_js")
    while timeout_sec is None:
        time.sleep(60)
