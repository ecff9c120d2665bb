"""nbutils: the machine, the files, the processes and the checks behind the course notebooks.

Importing it is cheap: torch, transformers, datasets and vLLM are only loaded by the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbutils.files import DISTRIBUTION

if TYPE_CHECKING:
    from nbutils.lesson import Lesson

__all__ = ["DISTRIBUTION", "start"]


def start(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Start a lesson: read its parameters, find the machine, resolve the profile, open the run folder."""
    from nbutils.lesson import begin

    return begin(stem, namespace)
