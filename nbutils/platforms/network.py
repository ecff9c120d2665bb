"""The network as it is here: whether the model hub answers, and which mirror to use.

Not here: downloading anything.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request


def hub_online(seconds: float = 4.0) -> bool:
    """Whether the model hub (or the mirror in HF_ENDPOINT) answers, asked once and briefly."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    return answers(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), seconds)


def answers(url: str, seconds: float) -> bool:
    """Whether a web address answers at all within the given time."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "nbutils"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status < 500
    except urllib.error.HTTPError as refused:
        return refused.code < 500
    except (OSError, ValueError):
        return False
