"""nbutils: the machine, the files, the processes and the checks behind the course notebooks.

Importing it is cheap: torch, transformers, datasets and vLLM are only loaded by the functions that need them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from nbutils.paths import DISTRIBUTION

if TYPE_CHECKING:
    from nbutils.lessons import Lesson

__all__ = ["DISTRIBUTION", "__version__", "start"]

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+checkout"


def start(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Start a lesson: read its parameters, find the machine, resolve the profile, open the run folder."""
    from nbutils.lessons import begin

    return begin(stem, namespace)
