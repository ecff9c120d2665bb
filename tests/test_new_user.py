"""A new user's machine: one notebook in an empty folder, a Python that has torch but not the course."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.install


@pytest.fixture
def platform_python(tmp_path: Path) -> Path:
    """An environment that sees every package of this one except nbutils, as a platform's own Python would."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    shelf = tmp_path / "platform/site-packages"  # dill takes libraries from any other folder for the user's own code
    shelf.mkdir(parents=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "nbutils" not in entry.name and not entry.name.startswith(("pip", "setuptools", "__pycache__")):
            (shelf / entry.name).symlink_to(entry)
    python = tmp_path / "env/bin/python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    (Path(site.strip()) / "platform.pth").write_text(f"{shelf}\n")
    return python


def test_one_notebook_in_an_empty_folder_installs_the_course_and_runs_to_the_end(
    tmp_path: Path, platform_python: Path
) -> None:
    clone, empty = tmp_path / "clone", tmp_path / "empty"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    empty.mkdir()
    (empty / "03_qlora.ipynb").write_bytes((ROOT / "notebooks/03_qlora.ipynb").read_bytes())
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NBUTILS_HOME", "VIRTUAL_ENV")}
    env |= {"NBUTILS_SOURCE": str(clone), "HF_HUB_OFFLINE": "1"}

    def torch_version() -> str:
        return subprocess.check_output(
            [platform_python, "-c", "import torch; print(torch.__version__, torch.__file__)"], text=True
        )

    before = torch_version()
    missing = subprocess.run([platform_python, "-c", "import nbutils"], cwd=empty, env=env, capture_output=True)
    assert missing.returncode != 0
    words = ["-m", "papermill", "03_qlora.ipynb", "out.ipynb", "-p", "MAX_STEPS", "3"]
    ran = subprocess.run(
        [platform_python, *words], cwd=empty, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"Installing the course from {clone}" in (empty / "out.ipynb").read_text(encoding="utf-8")
    facts = json.loads((empty / "runs/tiny/facts.json").read_text())
    assert facts["lessons"]["03_qlora"]["steps"] == 3
    assert torch_version() == before
    inside = subprocess.check_output(
        [platform_python, "-c", "import nbutils; print(nbutils.__file__)"], cwd=empty, env=env, text=True
    )
    assert str(tmp_path / "env") in inside
