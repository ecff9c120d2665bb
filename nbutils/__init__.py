"""nbutils: the machine, the files, the processes and the checks behind the course notebooks.

Each module is a room with one subject; its first lines say what lives there. Importing this package is cheap:
torch, transformers, datasets and vLLM are only loaded by the functions that need them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbutils.lessons import Lesson

DISTRIBUTION = "nbutils-finetune-course"  # as pip knows it; `nbutils` there is somebody else's

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # used from a checkout that was never installed
    __version__ = "0+checkout"

__all__ = ["__version__", "start"]


def start(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Begin a lesson: read its parameters, find the machine, resolve the profile, open the run folder."""
    from nbutils.lessons import begin

    return begin(stem, namespace)
