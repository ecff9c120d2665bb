"""Which platform this is and on what evidence; its folders, time limit, secrets and network.

Not here: torch, or anything about the card (hardware). Folders and names alone prove little: Kaggle's image is built
from Colab's and carries its package and its /content, and Colab has stray /kaggle folders. So the order below matters.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbutils.errors import CourseError
from nbutils.paths import CHECKOUT

NAMES = ("colab", "colab_enterprise", "kaggle", "autodl", "local")
COLAB_VARIABLES = ("TBE_RUNTIME_ADDR", "COLAB_JUPYTER_IP", "COLAB_BACKEND_VERSION")
TIME_LIMIT_HOURS = {"colab": 12.0, "kaggle": 12.0}


@dataclass(frozen=True)
class Platform:
    """A platform's name, the evidence for it, and whether nobody is watching (`batch`)."""

    name: str
    evidence: str
    batch: bool = False


@dataclass(frozen=True)
class Folders:
    """work: fast and large; scratch: may vanish; keep: outlives the machine; inputs: read-only, or None."""

    work: Path
    scratch: Path
    keep: Path
    inputs: Path | None


def detect(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Platform:
    """The platform and its evidence; `NBUTILS_PLATFORM` overrides."""
    env = os.environ if env is None else env
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


def folders(platform: Platform, env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Folders:
    """The folders of a platform; `NBUTILS_HOME` moves the one in which runs are kept."""
    env = os.environ if env is None else env
    home = Path(env["NBUTILS_HOME"]).expanduser().absolute() if env.get("NBUTILS_HOME") else None
    if platform.name == "kaggle":
        work = root / "kaggle/working"
        return Folders(work, root / "kaggle/temp", home or work / "runs", root / "kaggle/input")
    if platform.name in ("colab", "colab_enterprise"):
        work = root / "content"
        return Folders(work, work / "scratch", home or _colab_keep(root), None)
    if platform.name == "autodl":
        work = root / "root/autodl-tmp"
        lasting = root / "root/autodl-fs"
        return Folders(work, work / "scratch", home or (lasting if lasting.is_dir() else work) / "runs", None)
    work = CHECKOUT or Path.cwd()
    keep = home or work / "runs"
    return Folders(work, keep / ".scratch", keep, None)


def _colab_keep(root: Path) -> Path:
    """Drive if it is mounted; else the machine's own disk, which goes away with it."""
    drive = root / "content/drive"
    return drive / "MyDrive/finetune-course" if os.path.ismount(drive) else root / "content/runs"


def mount_drive(platform: Platform) -> str:
    """Mount Google Drive on Colab if it is not there yet; says what happened and never stops the lesson."""
    if platform.name != "colab":
        return f"No Drive on {platform.name}: runs are kept on its own disk."
    if os.path.ismount("/content/drive"):
        return "Drive is mounted already."
    try:
        from google.colab import drive

        drive.mount("/content/drive")
    except Exception as problem:  # Colab raises eight unrelated types here, and none may cost the learner the lesson
        return f"Drive could not be mounted ({type(problem).__name__}: {problem}). Runs stay on this machine's disk."
    return "Drive is mounted: runs outlive this machine."


def secret(name: str) -> str | None:
    """A secret from the environment, Colab's userdata or Kaggle's secrets; None if nobody has it."""
    for source in (os.environ.get, _colab_secret, _kaggle_secret):
        if value := _quietly(source, name):
            return value
    return None


def _quietly(source: Callable[[str], str | None], name: str) -> str | None:
    try:
        return source(name)
    except Exception:  # absent, not granted, no frontend, no network: all mean "not here"
        return None


def _colab_secret(name: str) -> str | None:
    if detect().name != "colab":
        return None
    from google.colab import userdata

    return userdata.get(name)


def _kaggle_secret(name: str) -> str | None:
    if "KAGGLE_USER_SECRETS_TOKEN" not in os.environ:
        return None
    from kaggle_secrets import UserSecretsClient

    return UserSecretsClient().get_secret(name)


def hub_online(seconds: float = 4.0) -> bool:
    """Whether the model hub (or the mirror in HF_ENDPOINT) answers, asked once and briefly."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    return answers(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), seconds)


def answers(url: str, seconds: float) -> bool:
    """Whether a web address answers at all within the given time."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "nbutils"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status < 500
    except urllib.error.HTTPError as refused:
        return refused.code < 500
    except (OSError, ValueError):
        return False


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)
