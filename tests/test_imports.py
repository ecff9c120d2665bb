"""`import nbutils` is cheap, and so is every room."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import nbutils

ROOT = Path(__file__).resolve().parent.parent

# The arithmetic of a training step is torch code; `training.make_lean` loads it when a trainer is there.
TORCH_CODE = [f"nbutils.training.{name}" for name in ("callbacks", "fused", "oom", "progress", "weights")]
HEAVY = ("torch", "transformers", "datasets", "vllm", "trl", "peft", "matplotlib", "ipywidgets", "openai")


def loaded_by(code: str) -> list[str]:
    probe = f"{code}\nimport sys, json; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def rooms() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(nbutils.__path__, "nbutils.")]
    return [name for name in found if not name.endswith("__main__") and name not in TORCH_CODE]


def test_importing_nbutils_loads_nothing_heavy_and_takes_under_300_ms() -> None:
    assert loaded_by("import nbutils") == []
    probe = "import time; t=time.perf_counter(); import nbutils; print(time.perf_counter()-t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", probe])) for _ in range(3)]
    assert min(seconds) < 0.3


def test_no_room_loads_anything_heavy() -> None:
    assert len(rooms()) > 15
    assert loaded_by("import " + ", ".join(rooms())) == []


def calls(file: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("file", sorted([*(ROOT / "nbutils").rglob("*.py"), *(ROOT / "notebooks").glob("*.py")]))
def test_no_model_brings_code_of_its_own(file: Path) -> None:
    for call in calls(file):
        name = ast.unparse(call.func)
        if name.startswith("Auto") and name.endswith(".from_pretrained"):
            said = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert said.get("trust_remote_code") == "False", f"{file.name} line {call.lineno}"
