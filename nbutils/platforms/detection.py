"""Which platform this is, and on what evidence.

Not here: its folders (places) or limits. Folders and names alone prove little: Kaggle's image is built from Colab's
and carries its package and its /content, and Colab has stray /kaggle folders. So the order below matters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nbutils.errors import CourseError

NAMES = ("colab", "colab_enterprise", "kaggle", "autodl", "local")
COLAB_VARIABLES = ("TBE_RUNTIME_ADDR", "COLAB_JUPYTER_IP", "COLAB_BACKEND_VERSION")


@dataclass(frozen=True)
class Platform:
    """A platform's name, the evidence for it, and whether nobody is watching (`batch`)."""

    name: str
    evidence: str
    batch: bool = False


def fs_root(env: Mapping[str, str] | None = None) -> Path:
    """Where the platforms' fixed paths begin: `/`, or `NBUTILS_FS_ROOT` when a platform is imitated."""
    return Path((os.environ if env is None else env).get("NBUTILS_FS_ROOT") or "/")


def detect(env: Mapping[str, str] | None = None, root: Path | None = None) -> Platform:
    """The platform and its evidence; `NBUTILS_PLATFORM` overrides."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    if named := env.get("NBUTILS_PLATFORM"):
        if named not in NAMES:
            raise CourseError(
                f"NBUTILS_PLATFORM is {named!r}.", ", ".join(NAMES), "unset it to let the course look for itself"
            )
        return Platform(named, "NBUTILS_PLATFORM is set", env.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch")
    return _kaggle(env) or _colab(env, root) or _autodl(env, root) or Platform("local", "no platform left a mark")


def _kaggle(env: Mapping[str, str]) -> Platform | None:
    kind = env.get("KAGGLE_KERNEL_RUN_TYPE")
    return Platform("kaggle", f"KAGGLE_KERNEL_RUN_TYPE={kind}", kind == "Batch") if kind else None


def _colab(env: Mapping[str, str], root: Path) -> Platform | None:
    marks = [name for name in COLAB_VARIABLES if name in env]
    if (root / "var/colab/hostname").exists():
        marks.insert(0, "/var/colab/hostname")
    if not marks:
        return None
    name = "colab_enterprise" if env.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE" else "colab"
    return Platform(name, ", ".join(marks))


def _autodl(env: Mapping[str, str], root: Path) -> Platform | None:
    marks = [name for name in ("AutoDLContainerUUID", "AutoDLRegion") if name in env]
    marks += [f"/{place}" for place in ("etc/profile.d/autodl.env.sh", "root/autodl-tmp") if (root / place).exists()]
    return Platform("autodl", ", ".join(marks)) if marks else None


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)
