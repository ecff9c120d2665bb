"""Which platform this is, and on what evidence.

Not here: its folders (places) or limits. Folders and packages alone prove little: Kaggle's image is built from Colab's
and carries its package and its /content, and Colab has stray /kaggle folders. So the order below matters. Only
variables and files count, so that a subprocess of a notebook finds the same platform as the notebook.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nbutils.errors import CourseError

NAMES = (
    "colab", "colab_enterprise", "kaggle", "autodl", "pai_dsw", "modelscope", "featurize", "gpushare", "matpool",
    "paperspace", "hf_spaces", "studio_lab", "lightning", "modal", "runpod", "local",
)  # fmt: skip


@dataclass(frozen=True)
class Platform:
    """A platform's name, the evidence for it, and whether nobody is watching (`batch`)."""

    name: str
    evidence: str
    batch: bool = False


@dataclass(frozen=True)
class Marks:
    """Variables and /paths of a platform: any of `proof` proves it; `also` is seen there too and proves nothing."""

    proof: tuple[str, ...]
    also: tuple[str, ...] = ()
    remark: str = "{} too"


COLAB = Marks(
    ("/var/colab/hostname", "TBE_RUNTIME_ADDR", "COLAB_JUPYTER_IP", "COLAB_BACKEND_VERSION"), ("/kaggle",),
    "the {} folder is a stray one of Colab's image",
)  # fmt: skip
KAGGLE = Marks(
    ("KAGGLE_KERNEL_RUN_TYPE",), ("COLAB_RELEASE_TAG", "/content"),
    "{} came with Colab's image, from which Kaggle's is built",
)  # fmt: skip
AUTODL = Marks(("AutoDLContainerUUID", "AutoDLRegion", "/etc/profile.d/autodl.env.sh", "/root/autodl-tmp"))
OTHERS = {  # in this order: ModelScope's notebooks are PAI-DSW machines and have its variables too
    "modelscope": Marks(
        ("MODELSCOPE_ENVIRONMENT", "MODELSCOPE_USERNAME"), ("DSW_INSTANCE_ID",), "{} because it runs on PAI-DSW"
    ),
    "pai_dsw": Marks(("DSW_INSTANCE_ID", "dsw_region"), ("PAI_WORKSPACE_ID", "/mnt/workspace")),
    "gpushare": Marks(("/hy-tmp",), ("/hy-public", "/hy-netdisk", "/hy-nas")),
    "matpool": Marks(("/public/script/switch_pip_source.sh",)),  # /mnt, its disk, is on every machine
    "paperspace": Marks(("PAPERSPACE_NOTEBOOK_REPO_ID", "PAPERSPACE_CLUSTER_ID")),
    "hf_spaces": Marks(("SPACE_ID", "SPACE_HOST")),
    "studio_lab": Marks(("/home/studio-lab-user",)),
    "lightning": Marks(("LIGHTNING_CLOUD_SPACE_ID", "LIGHTNING_CLOUD_PROJECT_ID", "/teamspace")),
    "modal": Marks(("MODAL_TASK_ID", "MODAL_IMAGE_ID", "MODAL_CLOUD_PROVIDER", "MODAL_REGION", "MODAL_IS_REMOTE")),
    "runpod": Marks(("RUNPOD_POD_ID",)),
}
DECOYS = ("COLAB_RELEASE_TAG", "KAGGLE_KEY", "KAGGLE_USERNAME", "KAGGLE_API_TOKEN", "/kaggle", "/etc/network_turbo")


def fs_root(env: Mapping[str, str] | None = None) -> Path:
    """Where the platforms' fixed paths begin: `/`, or `NBUTILS_FS_ROOT` when a platform is imitated."""
    return Path((os.environ if env is None else env).get("NBUTILS_FS_ROOT") or "/")


def detect(env: Mapping[str, str] | None = None, root: Path | None = None) -> Platform:
    """The platform and its evidence; `NBUTILS_PLATFORM` overrides."""
    env = os.environ if env is None else env
    root = root or fs_root(env)
    return (
        _named(env) or _kaggle(env, root) or _colab(env, root) or _marked("autodl", AUTODL, env, root)
        or _featurize(env, root) or _other(env, root) or _local(env, root)
    )  # fmt: skip


def _named(env: Mapping[str, str]) -> Platform | None:
    name = env.get("NBUTILS_PLATFORM")
    if name and name not in NAMES:
        raise CourseError(
            f"NBUTILS_PLATFORM is {name!r}.", ", ".join(NAMES), "unset it to let the course look for itself"
        )
    batch = name == "kaggle" and env.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    return Platform(name, "NBUTILS_PLATFORM is set", batch) if name else None


def _kaggle(env: Mapping[str, str], root: Path) -> Platform | None:
    kind = env.get("KAGGLE_KERNEL_RUN_TYPE")  # Interactive or Batch; an account's keys at home are no mark
    found = _marked("kaggle", KAGGLE, env, root)
    if not (kind and found):
        return None
    return Platform("kaggle", found.evidence.replace("RUN_TYPE", f"RUN_TYPE={kind}", 1), kind == "Batch")


def _colab(env: Mapping[str, str], root: Path) -> Platform | None:
    found = _marked("colab", COLAB, env, root)
    if env.get("VERTEX_PRODUCT") != "COLAB_ENTERPRISE":
        return found
    return Platform("colab_enterprise", "VERTEX_PRODUCT=COLAB_ENTERPRISE" + (f", {found.evidence}" if found else ""))


def _featurize(env: Mapping[str, str], root: Path) -> Platform | None:
    """A home folder of that name may lie in any image: the user or the command must fit it."""
    if not _seen(("/home/featurize",), env, root):
        return None
    users = {env.get("USER"), env.get("LOGNAME"), Path(env.get("HOME", "")).name}
    marks = ["user featurize"] if "featurize" in users else []
    marks += ["command featurize"] if shutil.which("featurize", path=env.get("PATH", "")) else []
    return Platform("featurize", ", ".join(["/home/featurize", *marks])) if marks else None


def _other(env: Mapping[str, str], root: Path) -> Platform | None:
    found = (_marked(name, marks, env, root) for name, marks in OTHERS.items())
    return next(filter(None, found), None)


def _local(env: Mapping[str, str], root: Path) -> Platform:
    decoys = _seen(DECOYS, env, root)
    return Platform("local", "no platform left a mark" + (f"; {', '.join(decoys)} alone proves none" if decoys else ""))


def _marked(name: str, marks: Marks, env: Mapping[str, str], root: Path) -> Platform | None:
    proof, also = _seen(marks.proof, env, root), _seen(marks.also, env, root)
    said = f"; {marks.remark.format(', '.join(also))}" if also else ""
    return Platform(name, ", ".join(proof) + said) if proof else None


def _seen(marks: tuple[str, ...], env: Mapping[str, str], root: Path) -> list[str]:
    """The marks that are here; a path this user may not look at (below /root) is not, `Path.exists` would raise."""
    here = {mark: os.path.exists(root / mark[1:]) if mark.startswith("/") else bool(env.get(mark)) for mark in marks}
    return [mark for mark, is_here in here.items() if is_here]


def in_kernel() -> bool:
    """Whether this code runs in a notebook kernel (also a headless one) and not as a plain script."""
    shell = sys.modules.get("IPython")
    return bool(shell and shell.get_ipython() and "ipykernel" in sys.modules)
