"""A new user's machine: an empty folder; the images of Colab and Kaggle; Kaggle with the internet off."""

import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import images
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support import ROOT, lesson_facts, setup_cell

from nbutils import DISTRIBUTION, install

NOT_OURS = ("PYTHONPATH", "NBUTILS_HOME", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST")  # with the last, a kernel hides pip
pytestmark = [pytest.mark.install, pytest.mark.long]


@pytest.fixture
def platform_python(tmp_path: Path) -> Path:
    """An environment that sees every package of this one except nbutils, as a platform's own Python would."""
    env = images.bare(tmp_path / "env")
    shelf = tmp_path / "platform/site-packages"  # dill takes libraries from any other folder for the user's own code
    shelf.mkdir(parents=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "nbutils" not in entry.name and not entry.name.startswith(("pip", "setuptools", "__pycache__")):
            (shelf / entry.name).symlink_to(entry)
    (env.site() / "platform.pth").write_text(f"{shelf}\n")
    return Path(env.python)


def test_one_notebook_in_an_empty_folder_installs_the_course_and_runs_to_the_end(
    tmp_path: Path, platform_python: Path
) -> None:
    clone, empty = tmp_path / "clone", tmp_path / "empty"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    empty.mkdir()
    (empty / "03_qlora.ipynb").write_bytes((clone / "notebooks/03_qlora.ipynb").read_bytes())
    env = {k: v for k, v in os.environ.items() if k not in NOT_OURS}
    env |= {"NBUTILS_SOURCE": str(clone), "HF_HUB_OFFLINE": "1"}

    def run(*words: str) -> Any:
        command = [platform_python, *words]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    which = "import torch; print(torch.__version__, torch.__file__)"
    before = run("-c", which).stdout
    assert before and run("-c", "import nbutils").returncode != 0
    ran = run("-m", "papermill", "03_qlora.ipynb", "out.ipynb", "-p", "MAX_STEPS", "3")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"Processing {clone}" in (empty / "out.ipynb").read_text(encoding="utf-8")
    assert lesson_facts(empty / "runs/tiny")["steps"] == 3 and run("-c", which).stdout == before
    assert str(tmp_path / "env") in run("-c", "import nbutils; print(nbutils.__file__)").stdout


def broken(final: dict[str, str], image: dict[str, str], plan: dict[str, dict[str, Any]]) -> list[str]:
    """Requirements, of the image's packages and of the new ones, that the final versions would not meet."""
    found = []
    for name, version in final.items():
        texts = plan[name].get("requires_dist", []) if name in plan else images.requires(name, version, image)
        for one in map(Requirement, texts):
            has = final.get(canonicalize_name(one.name), "0")
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                found += [] if one.specifier.contains(has, prereleases=True) else [f"{name} needs {one}, has {has}"]
    return found


LACKING = {
    "bitsandbytes",
    "liger-kernel",
    "rapidfuzz",
    "trl",
    "zhplot",
}  # on both images; Colab's has no papermill either
NOT_HERE = {"liger-kernel"} if platform.machine() != "x86_64" else set()  # no wheels for other processors


@pytest.mark.parametrize("name", images.LISTS)
def test_on_a_platforms_image_only_what_is_lacking_comes_and_torchao_goes(name: str, tmp_path: Path) -> None:
    machine, report = images.imitate(name, tmp_path / name), tmp_path / "plan.json"
    before = machine.versions()
    assert set(images.packages(name)) <= set(before) and len(before) > 690
    machine.run(setup_cell(tmp_path), NBUTILS_SOURCE=str(ROOT), **images.registry())
    bare = machine.versions()
    assert before.items() < bare.items() and set(bare) - set(before) == {DISTRIBUTION, "apprise", "ftfy", "rensa"}

    dry = {"PIP_DRY_RUN": "1", "PIP_REPORT": str(report), "NBUTILS_FS_ROOT": str(tmp_path)}
    machine.run("from nbutils import install; install.ensure('train')", **images.registry(), **dry)
    after = machine.versions()
    assert set(bare) - set(after) == {"torchao"} and after.items() <= bare.items()  # the rest was only planned
    listed = json.loads(report.read_text(encoding="utf-8"))["install"]
    plan = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in listed}
    versions = {package: about["version"] for package, about in plan.items()}
    assert not any(map(install.is_platforms_own, plan)), versions
    lacking = LACKING - NOT_HERE | ({"papermill"} if name == "colab" else set())
    assert set(plan) - set(bare) == lacking and set(plan) & set(bare) <= set(install.FREE), versions
    assert [p for p in set(plan) & set(bare) if Version(versions[p]) < Version(bare[p])] == [], versions
    assert broken(after | versions, images.packages(name), plan) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels are made for Kaggle's processors: x86_64")
def test_kaggle_with_the_internet_off_installs_from_an_attached_folder_of_wheels(tmp_path: Path) -> None:
    attached = tmp_path / "kaggle/input/datasets/someone/course-wheels"
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = ["--python-version", running, "--image", "none", "--extra", "serve", "--into", str(attached)]
    subprocess.run([sys.executable, ROOT / ".ci/wheels.py", *words], check=True)
    listed = json.loads((attached / install.MARKER).read_text(encoding="utf-8"))
    names = {file["name"].split("-")[0] for file in listed["files"]}
    assert {DISTRIBUTION.replace("-", "_"), "fastapi", "pydantic"} <= names
    assert not [one for one in names if install.is_platforms_own(canonicalize_name(one))]
    attached.chmod(0o555)  # inputs are read-only

    machine = images.bare(tmp_path / "env")
    images.stand_in(machine, "numpy", images.packages("kaggle")["numpy"])  # every image has it, no folder brings it
    kaggle = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    kaggle |= {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    kaggle |= {"NBUTILS_FS_ROOT": str(tmp_path), "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    machine.run(setup_cell(tmp_path), **kaggle)
    assert DISTRIBUTION in machine.versions() and "fastapi" not in machine.versions()
    serve = "from nbutils import install; install.ensure('serve'); import fastapi"
    assert str(attached) in machine.run(serve, **kaggle) and machine.run(serve, **kaggle) == ""
    code = "from nbutils import install\ntry: install.ensure('train')\nexcept install.CourseError as told: print(told)"
    assert "accelerate>=" in machine.run(code, **kaggle)
    assert "make wheels" in machine.run(code, **kaggle | {"NBUTILS_FS_ROOT": str(tmp_path / "nothing")})
