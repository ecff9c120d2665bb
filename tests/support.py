"""Helpers the test files share."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbutils.errors import CourseError

ROOT = Path(__file__).resolve().parent.parent
ESCAPES = "\x1b[2J\x9b31m\x07\b\r\u202e\u2066"  # what a stranger may write into a name: they steer a terminal


@contextmanager
def refused(*words: str) -> Iterator[Any]:
    """A CourseError whose text has all these words."""
    with pytest.raises(CourseError) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert missing == [], text


def python(*words: str | Path, home: Path, ok: bool | None = True, threads: int = 0, **options: Any) -> Any:
    """`python *words` with its own folder for runs and nobody to ask; `ok` says how it must end (None: either way)."""
    env = dict(os.environ)
    env.pop("WANDB_API_KEY", None)
    env["NBUTILS_HOME"] = str(home)
    env["HF_HUB_OFFLINE"] = "1"
    env["PYTHONWARNINGS"] = "ignore"
    env["PYTHONPATH"] = str(ROOT)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    settings: dict[str, Any] = {
        "cwd": ROOT,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "timeout": 300,
        **options,
    }
    ran = subprocess.run([sys.executable, *words], env=env, text=True, check=False, **settings)
    if ok is not None:
        stdout = ran.stdout or ""  # None where `options` sent it elsewhere
        stderr = ran.stderr or ""
        succeeded = ran.returncode == 0
        assert succeeded == ok, stdout[-2000:] + stderr[-4000:]
    return ran


def ci_module(name: str) -> Any:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def steers(text: str) -> str:
    """The characters of a text that would steer a terminal, each once."""
    steering = set(ESCAPES) - set("[2J31m")
    return "".join(sorted(steering & set(text)))


def lesson_facts(run: Path, stem: str = "03_qlora") -> dict[str, Any]:
    """What a lesson wrote into the facts.json of a run folder."""
    facts = json.loads((run / "facts.json").read_text(encoding="utf-8"))
    return dict(facts["lessons"][stem])


def setup_cell(root: Path, port: int = 9000, ours: str = "") -> str:
    """The setup cell of a real notebook: where Kaggle's folders begin, Colab's port, what `make sync` wrote into it."""
    notebook = json.loads((ROOT / "notebooks/03_qlora.ipynb").read_text(encoding="utf-8"))
    [cell] = [cell for cell in notebook["cells"] if "setup" in cell["metadata"].get("tags", [])]
    text = "".join(cell["source"])
    text = re.sub('OURS = ".*"', f'OURS = "{ours}"', text)
    text = text.replace("/kaggle/input", f"{root}/kaggle/input")
    return text.replace(":9000/", f":{port}/")


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
