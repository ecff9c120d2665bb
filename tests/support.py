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
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def python(*words: str | Path, home: Path, ok: bool | None = True, threads: int = 0, **options: Any) -> Any:
    """`python *words` with its own folder for runs and nobody to ask; `ok` says how it must end (None: either way)."""
    env = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    env |= {"NBUTILS_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    given: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "timeout": 300}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ran = subprocess.run([sys.executable, *words], env=env, text=True, check=False, **(given | options))
    assert ok is None or (ran.returncode == 0) == ok, f"{(ran.stdout or '')[-2000:]}{(ran.stderr or '')[-4000:]}"
    return ran


def ci_module(name: str) -> Any:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def steers(text: str) -> str:
    """The characters of a text that would steer a terminal, each once."""
    return "".join(sorted(set(ESCAPES) - set("[2J31m") & set(text)))


def lesson_facts(run: Path, stem: str = "03_qlora") -> dict[str, Any]:
    """What a lesson wrote into the facts.json of a run folder."""
    return dict(json.loads((run / "facts.json").read_text(encoding="utf-8"))["lessons"][stem])


def setup_cell(root: Path, port: int = 9000, ours: str = "") -> str:
    """The setup cell of a real notebook: where Kaggle's folders begin, Colab's port, what `make sync` wrote into it."""
    cells = json.loads((ROOT / "notebooks/03_qlora.ipynb").read_text(encoding="utf-8"))["cells"]
    [text] = ["".join(cell["source"]) for cell in cells if "setup" in cell["metadata"].get("tags", [])]
    text = re.sub('OURS = ".*"', f'OURS = "{ours}"', text)
    return text.replace("/kaggle/input", f"{root}/kaggle/input").replace(":9000/", f":{port}/")


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
